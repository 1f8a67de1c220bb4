"""What is to run on a host, as the inventory and the patches say: interpreters, servers, capture, patches, patience.
Shared with the controller."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Dict, List, Sequence

PHASES = (
    "imports",
    "init",
    "weights",
    "kv_pool",
    "jit",
    "capture",
    "http",
    "warmup",
    "serving",
)
"""Phases of a server's life, in order. ``http`` is 'scheduler ready, port not yet answering'."""

IMPORT_VARIABLES = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV", "LD_LIBRARY_PATH")
"""Environment variables that decide which engine an interpreter imports."""


@dataclass
class Interpreter:
    """What imports an engine: a Python interpreter, and those of ``IMPORT_VARIABLES`` that its server sets."""

    python: str
    env: Dict[str, str] = field(default_factory=dict)


@dataclass
class ServerSpec:
    """One SGLang server of a host, as the inventory wants it (secrets in ``env`` are resolved by the controller)."""

    name: str
    python: str
    model_path: str
    port: int
    host: str = "127.0.0.1"
    tp: int = 1
    dp: int = 1
    pp: int = 1
    gpus: List[int] = field(default_factory=list)
    args: List[str] = field(default_factory=list)
    env: Dict[str, str] = field(default_factory=dict)
    without: List[str] = field(default_factory=list)
    """Flags that a patch would add and that this server shall do without."""

    @property
    def ranks(self) -> int:
        """Its scheduler processes: ``dp`` replicas of ``pp`` stages of ``tp`` ranks. Data parallelism inside attention
        alone (``--enable-dp-attention``) makes no replicas, it divides the ``tp`` ranks."""
        replicas = 1 if "--enable-dp-attention" in self.args else self.dp
        return self.tp * self.pp * replicas

    @property
    def interpreter(self) -> Interpreter:
        return Interpreter(self.python, {name: self.env[name] for name in IMPORT_VARIABLES if name in self.env})


def interpreters(servers: Sequence[ServerSpec]) -> List[Interpreter]:
    """What imports the servers' engines, each once, in the servers' order."""
    found: List[Interpreter] = []
    for server in servers:
        if server.interpreter not in found:
            found.append(server.interpreter)
    return found


def models_of(servers: Sequence[ServerSpec], interpreter: Interpreter) -> List[str]:
    """The models of those servers that ``interpreter`` runs, each once, in the servers' order."""
    return list(dict.fromkeys(server.model_path for server in servers if server.interpreter == interpreter))


FSYNC = ("group", "close", "never")
"""When a tap makes its files durable."""


@dataclass
class CaptureSpec:
    """What the tap captures. ``layers`` are entry ids: id i is the residual stream that enters layer i (0-based);
    id L (the number of layers) is the stream after the last layer, before the final norm.

    Each process that writes has ``ring_bytes`` of (pinned) host memory for what is not on disk yet, at most
    ``device_bytes`` of GPU memory to gather a forward in, and ``threads`` writer threads. ``fsync``: ``group`` (a
    journal line names only what survives a loss of power), ``close`` (only closed shards do) or ``never``. A forward
    waits for room in the ring at most ``max_wait_seconds``."""

    layers: List[int]
    dir: str
    shard_bytes: int = 4 << 30
    header_bytes: int = 256 << 10
    idle_close_seconds: float = 2.0
    ring_bytes: int = 2 << 30
    device_bytes: int = 1 << 30
    threads: int = 8
    fsync: str = "group"
    max_wait_seconds: float = 5.0

    @property
    def slots(self) -> int:
        """States that are kept of a token: one for each of ``layers``, and the final one."""
        return len(self.layers) + 1


@dataclass
class Insertion:
    """Lines to put at a structural place. ``at``: ``module-imports`` (after the last top-level import),
    ``method-head`` (first statement after the docstring), ``loop-head`` (first statement of the layer loop's body),
    ``after-loop`` (right after the layer loop)."""

    at: str
    lines: List[str]


@dataclass
class Edit:
    """One edit of one module of the engine. ``present`` names locals that the method must have, or the module import,
    ``absent`` locals that it must not: they tell the two shapes of the layer loop apart, and the inserted lines use
    them. ``verified`` lists releases that tests have run."""

    module: str
    class_name: str
    method: str
    insertions: List[Insertion]
    present: List[str] = field(default_factory=list)
    absent: List[str] = field(default_factory=list)
    first_release: str = ""
    last_release: str = ""
    verified: List[str] = field(default_factory=list)


@dataclass
class PackageChange:
    """A change of any files of the engine's package. ``kind``: ``diff`` (a unified diff) or ``script`` (a Python script
    that edits a copy of the package). ``data`` is the file's bytes, base64. ``verified`` lists releases that tests
    have run."""

    kind: str
    name: str
    data: str
    first_release: str = ""
    last_release: str = ""
    verified: List[str] = field(default_factory=list)


DELIVERIES = ("in-place", "import-hook")
"""How a patch comes into the engine: in its files, or in the launched process alone, as the module is imported."""


@dataclass
class ReleaseArg:
    """A flag that servers with the patch get on the releases of a closed range (an empty bound is open).

    That it took effect is seen by ``shows`` (names in /server_info, dots go deeper, with the text of the value that
    must stand there: ``true``, ``none``, ``disabled``) and by ``unlogged`` (regular expressions that no line of the log
    may fit). ``optional`` says why a server may do without the flag (``ServerSpec.without``), from release
    ``optional_from`` on; empty: it may not."""

    flag: str
    first_release: str = ""
    last_release: str = ""
    why: str = ""
    shows: Dict[str, str] = field(default_factory=dict)
    unlogged: List[str] = field(default_factory=list)
    optional: str = ""
    optional_from: str = ""


@dataclass
class RefusedArg:
    """Options (the names that releases have for one thing) with which the patch would be wrong, unless their value is
    one of ``allowed``. Also what /server_info says under their names (``--attn-cp-size`` is ``attn_cp_size``) must be
    unset, or allowed."""

    flags: List[str]
    why: str
    allowed: List[str] = field(default_factory=list)


@dataclass
class Expectation:
    """What a server must say of itself: ``fields`` maps names in /server_info to the texts that are right there, and
    no line of the log may fit one of ``unlogged``. Not ``required``: a field may also be absent or unset."""

    flag: str
    why: str
    fields: Dict[str, List[str]]
    required: bool
    unlogged: List[str] = field(default_factory=list)


@dataclass
class PatchSpec:
    """A patch as data. Of ``changes`` the first that fits the release is applied, then for each module the first of
    ``edits`` that fits; ``files`` (name to text) go beside the engine's package in site-packages. ``sha256``
    identifies edits, files and changes together. ``mark`` is a string that every rank must log before the server
    counts as ready (empty: none).

    ``architectures`` maps what a model's config.json may name to modules, of which the first that has an edit for the
    engine's release is patched; ``refused`` maps it to the reason why the patch is wrong for such a model
    (``agent/applicable.py`` chooses). Servers get ``server_args`` on every release and ``release_args`` on theirs, and
    may have none of ``refused_args`` (``agent/flagrules.py``)."""

    name: str
    version: str
    sha256: str
    edits: List[Edit]
    files: Dict[str, str] = field(default_factory=dict)
    mark: str = ""
    captures: bool = False
    server_args: List[str] = field(default_factory=list)
    changes: List[PackageChange] = field(default_factory=list)
    release_args: List[ReleaseArg] = field(default_factory=list)
    architectures: Dict[str, List[str]] = field(default_factory=dict)
    refused: Dict[str, str] = field(default_factory=dict)
    refused_args: List[RefusedArg] = field(default_factory=list)


@dataclass
class Patience:
    """Seconds without progress that each phase is allowed; stretched to twice what healthy starts took there."""

    imports: float = 120.0
    init: float = 120.0
    weights: float = 120.0
    kv_pool: float = 120.0
    jit: float = 300.0
    capture: float = 300.0
    http: float = 60.0
    warmup: float = 120.0
    serving: float = 60.0
