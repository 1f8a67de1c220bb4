"""Messages between controller and agent, shared by both sides.

Wire format. The controller runs one constant command on the host; on its stdin stand, in order, one line with the
bootstrap, one line with the bundle header, the bundle's bytes where the host lacked it, one JSON line (``Request``),
and, for verbs that take rows, ``Request.body_lines`` lines of JSON. On stdout come JSON lines: any number of
``{"type": "event", "event": <name>, ...}``, then exactly one ``{"type": "result", ...}``. An event named ``blob`` is
followed by exactly ``size`` raw bytes. Logs go to stderr.

The agent half must run on Python 3.8 with the standard library alone: typing generics, no ``X | Y``.
"""

from __future__ import annotations

import dataclasses
import functools
import typing
from dataclasses import dataclass, field
from typing import Any, Dict, List, Optional, Sequence, Tuple, Type, TypeVar, Union

PROTOCOL_VERSION = 1

T = TypeVar("T")

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


class ProtocolError(ValueError):
    """A message that does not fit its class: unknown key, missing key or wrong type (the path is in the text)."""


# --------------------------------------------------------------------------- codec
_SCALARS = (str, int, float, bool)


def to_json(value: Any) -> Any:
    """Plain JSON data (dict, list, str, int, float, bool, None) of a message dataclass or a container of them."""
    if value is None or type(value) in _SCALARS:
        return value
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: to_json(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, dict):
        return {str(k): to_json(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [to_json(v) for v in value]
    return value


def from_json(cls: Type[T], data: Any, where: str = "") -> T:
    """Build dataclass ``cls`` from JSON data; raises ``ProtocolError`` naming the path of what does not fit."""
    result: T = _convert(cls, data, where or cls.__name__)
    return result


def _convert(kind: Any, data: Any, where: str) -> Any:
    if type(data) is kind and kind in _SCALARS:
        return data
    origin = typing.get_origin(kind)
    if kind is Any:
        return data
    if origin is Union:
        if data is None and type(None) in typing.get_args(kind):
            return None
        members = [a for a in typing.get_args(kind) if a is not type(None)]
        return _convert(members[0], data, where)
    if origin is list:
        if not isinstance(data, list):
            raise ProtocolError(f"{where}: expected a list, got {type(data).__name__}")
        inner = typing.get_args(kind)[0]
        return [_convert(inner, item, f"{where}[{n}]") for n, item in enumerate(data)]
    if origin is dict:
        if not isinstance(data, dict):
            raise ProtocolError(f"{where}: expected an object, got {type(data).__name__}")
        inner = typing.get_args(kind)[1]
        return {str(k): _convert(inner, v, f"{where}.{k}") for k, v in data.items()}
    if dataclasses.is_dataclass(kind):
        return _convert_dataclass(kind, data, where)
    if kind is float and isinstance(data, int) and not isinstance(data, bool):
        return float(data)
    if not isinstance(data, kind) or (kind is int and isinstance(data, bool)):
        raise ProtocolError(f"{where}: expected {kind.__name__}, got {type(data).__name__}")
    return data


def _convert_dataclass(kind: Any, data: Any, where: str) -> Any:
    if not isinstance(data, dict):
        raise ProtocolError(f"{where}: expected an object, got {type(data).__name__}")
    fields = _fields(kind)
    if not data.keys() <= fields.keys():
        raise ProtocolError(f"{where}: unknown key {min(data.keys() - fields.keys())!r}")
    values = {}
    for name, (hint, required) in fields.items():
        if name in data:
            values[name] = _convert(hint, data[name], f"{where}.{name}")
        elif required:
            raise ProtocolError(f"{where}: missing key {name!r}")
    return kind(**values)


@functools.lru_cache(maxsize=None)
def _fields(kind: Any) -> Dict[str, Tuple[Any, bool]]:
    """Type of each field, and whether it must be there. Remembered: a run has millions of journal lines."""
    hints = typing.get_type_hints(kind)
    missing = dataclasses.MISSING
    return {
        f.name: (hints[f.name], f.default is missing and f.default_factory is missing) for f in dataclasses.fields(kind)
    }


# --------------------------------------------------------------------------- envelope
@dataclass
class Request:
    """One call of the agent. ``deadline`` is seconds from the start of the agent, enforced by the agent itself."""

    verb: str
    args: Dict[str, Any]
    state_dir: str = "~/.fleetdump"
    deadline: float = 60.0
    operator: str = ""
    """user@controller, for the lock and the audit log; never a secret."""
    body_lines: int = 0
    protocol: int = PROTOCOL_VERSION
    lock_wait: float = 0.0
    """Seconds that a verb which changes the host waits for another's change to end."""
    lease: str = ""
    """The lease of the deploy that this call belongs to (``HoldArgs``)."""


@dataclass
class AgentError:
    """Why a verb failed. Codes: usage, not_found, conflict, locked, timeout, disk_full, permission, failed, bug."""

    code: str
    what: str
    where: str = ""
    why: str = ""
    next_step: str = ""


class AgentFailure(Exception):
    """Raised inside the agent by a verb; becomes the result's ``error``."""

    def __init__(self, code: str, what: str, where: str = "", why: str = "", next_step: str = ""):
        super().__init__(what)
        self.error = AgentError(code, what, where, why, next_step)


# --------------------------------------------------------------------------- what is to run
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


# --------------------------------------------------------------------------- probe
@dataclass
class ProbeArgs:
    """``read_only`` checks of one host: interpreter, engine, patch, ports, disk, memory, GPUs, tools."""

    servers: List[ServerSpec]
    patch: Optional[PatchSpec] = None
    capture_dir: str = ""
    tokens: int = 0
    """About how many this host is to capture; 0: not known."""
    layers: List[int] = field(default_factory=list)
    """Entry ids that the capture wants, to be checked against the model's number of layers."""
    delivery: str = "in-place"
    ring_bytes: int = 0
    device_bytes: int = 0
    """Memory of each process that writes (``CaptureSpec``)."""
    shard_bytes: int = 0
    measure_writes: bool = False
    """Whether the capture directory's disk is timed with a file of some 100 MiB, which is gone at once."""


@dataclass
class Finding:
    """One checked fact. ``level``: ok, warning or blocker; ``fix`` is the next step for the latter two."""

    key: str
    level: str
    text: str
    fix: str = ""


@dataclass
class PatchState:
    """State of the patched modules of one engine install. ``state``: clean, ours, other (a patch of another name or
    version of ours), unknown (edited by somebody else) or absent (the engine or a module is missing)."""

    state: str
    patch: str = ""
    version: str = ""
    sha256: str = ""
    files: List[str] = field(default_factory=list)
    detail: str = ""


@dataclass
class ServerState:
    """A server of ours, as it is now. ``state``: absent, starting, ready, stopped, died; broken: its record cannot be
    read, ``detail`` says why and what to do. ``detail`` of another says which settings its patch misses, if any."""

    name: str
    state: str
    pid: int = 0
    start_time: int = 0
    """Clock ticks after boot, field 22 of /proc/<pid>/stat: with the pid it names one process for ever."""
    port: int = 0
    log: str = ""
    launch_id: str = ""
    patch: str = ""
    phase: str = ""
    selfcheck: str = ""
    """Empty before one ran, ``passed``, or why the last one failed."""
    started_at: float = 0.0
    uptime: float = 0.0
    delivery: str = "in-place"
    """How its patch came in, one of ``DELIVERIES``."""
    detail: str = ""
    patch_name: str = ""
    """``name@version``; empty without a patch."""
    capture_dir: str = ""
    disk_free: int = -1
    """Bytes free for its captures; -1 where it has none, or where that file system does not answer."""


@dataclass
class ModelFacts:
    """From the model's config.json: sizes, the dtype weights are stored in, and an identity hash
    (config.json plus names and sizes of the weight files)."""

    architecture: str
    num_layers: int
    hidden_size: int
    dtype: str
    sha256: str


@dataclass
class ProbeResult:
    """Facts and findings of one host. ``time`` is its clock when it began to look, in seconds since 1970."""

    hostname: str
    machine_id: str
    agent_python: str
    findings: List[Finding]
    engine: str = ""
    engine_path: str = ""
    patch: Optional[PatchState] = None
    model: Optional[ModelFacts] = None
    gpus: List[str] = field(default_factory=list)
    cpus: int = 0
    memory_bytes: int = 0
    disk_free_bytes: int = 0
    servers: List[ServerState] = field(default_factory=list)
    time: float = 0.0


# --------------------------------------------------------------------------- patch
@dataclass
class PatchArgs:
    """Apply (or only plan) a patch to the engine that ``python`` imports with ``env`` set. Applying twice changes
    nothing. ``force``: a file that somebody else edited is taken as it is, and one that was edited after our patch is
    put aside in the state directory. ``delivery`` import-hook is planned only: ``launch`` delivers it."""

    python: str
    patch: PatchSpec
    dry_run: bool = False
    env: Dict[str, str] = field(default_factory=dict)
    """As in ``Interpreter``."""
    force: bool = False
    delivery: str = "in-place"
    models: List[str] = field(default_factory=list)
    """Model directories of the servers that import this engine: only the modules that they run are patched. Empty,
    or a model that has no directory here: every module of the patch."""


@dataclass
class PatchResult:
    """``untested`` are the modules or files that no test has run on this release: the self-check then decides."""

    before: PatchState
    after: PatchState
    changed: bool
    engine: str
    untested: List[str]
    diff: str = ""
    kept: List[str] = field(default_factory=list)
    """Copies of files that ``force`` overwrote."""
    guessed: bool = False
    """No config.json said what the models run, so the patch is for all modules of the release."""
    delivery: str = "in-place"

    @property
    def verified(self) -> bool:
        return not self.untested

    @property
    def doubts(self) -> str:
        """What no test has run, in words; empty when all of it was."""
        if self.verified:
            return ""
        text = f"no test has run it on {self.engine} in {', '.join(self.untested)}"
        return (
            f"{text} (no config.json says which model is served, so the files of all count)" if self.guessed else text
        )


@dataclass
class RevertArgs:
    """Restore the engine that ``python`` imports with ``env`` set, byte for byte. ``force``: files that were edited
    after our patch are put aside in the state directory and restored too."""

    python: str
    env: Dict[str, str] = field(default_factory=dict)
    """As in ``Interpreter``."""
    force: bool = False


@dataclass
class RevertResult:
    """``changed`` is False when there was nothing of ours; ``verified`` lists files whose hash equals the original."""

    changed: bool
    before: PatchState
    after: PatchState
    verified: List[str] = field(default_factory=list)


# --------------------------------------------------------------------------- deploy
@dataclass
class HoldArgs:
    """Hold the host for a whole deploy: a ``held`` event says that it is so, and until ``release`` (or until the
    controller is gone) nobody changes the host but requests with this ``lease``, and ``stop``."""

    lease: str
    verb: str


@dataclass
class HoldResult:
    """How long the host was held."""

    seconds: float


@dataclass
class ReleaseArgs:
    """End the ``hold`` of that lease."""

    lease: str


@dataclass
class ReleaseResult:
    """Whether it was still held."""

    released: bool


@dataclass
class ForecastArgs:
    """What ``patch`` (or, for ``reverts``, ``revert``) and ``launch`` with these arguments would do now. Nothing is
    changed."""

    patches: List[PatchArgs] = field(default_factory=list)
    reverts: List[Interpreter] = field(default_factory=list)
    launches: List[LaunchArgs] = field(default_factory=list)


@dataclass
class LaunchForecast:
    """What a launch would do. ``change``: none (it runs as wanted: ``running``), start, or replace (one of that name
    runs in another way, as ``differs`` says). ``argv`` is scrubbed of secrets."""

    server: str
    change: str
    argv: List[str]
    added_args: List[str] = field(default_factory=list)
    running: Optional[LaunchResult] = None
    differs: List[str] = field(default_factory=list)


@dataclass
class ForecastResult:
    """In the order of the arguments. ``reverts``: the state of each engine; where it names a patch, that one would be
    taken out."""

    patches: List[PatchResult] = field(default_factory=list)
    reverts: List[PatchState] = field(default_factory=list)
    launches: List[LaunchForecast] = field(default_factory=list)


# --------------------------------------------------------------------------- launch, watch, stop
@dataclass
class LaunchArgs:
    """Start a server detached. ``replace`` stops our own earlier server of that name first; without it a living one
    with the same arguments and patch is left alone (``reused``), one with others is a ``conflict``."""

    server: ServerSpec
    patch: Optional[PatchSpec] = None
    capture: Optional[CaptureSpec] = None
    replace: bool = False
    delivery: str = "in-place"
    force: bool = False
    """For the import hook, as in ``PatchArgs``."""


@dataclass
class LaunchResult:
    """The launched process; it is verified again by the first ``watch``."""

    state: ServerState
    reused: bool
    argv: List[str]
    log: str
    added_args: List[str] = field(default_factory=list)
    """What the patch added to the server's own arguments, for this release."""
    architecture: str = ""
    """The model class that each rank must load; empty where the model cannot be looked at (a hub name)."""
    held_by: str = ""
    """How the process survives a logout, in words."""
    warning: str = ""
    """Why it may not, and what to do."""


@dataclass
class RunRestart:
    """Why a run's controller restarts a server. ``launch_id``: the launch to be replaced, and no other one;
    ``verdict``: what a diagnosis says of it; ``suspect`` as in ``RunProgress``."""

    run: str
    launch_id: str
    verdict: str = ""
    suspect: str = ""


@dataclass
class RestartArgs:
    """Stop a server of ours and launch it again exactly as it was launched, whatever the inventory says now. ``spec``
    and ``capture`` are the inventory's, for what the record of a dead server does not hold (values of its environment,
    secret arguments); they are used where they make the very same launch. With ``of_run`` it is a ``conflict`` when an
    operator has stopped or replaced the launch, and the restart is counted."""

    server: str
    grace: float = 30.0
    spec: Optional[ServerSpec] = None
    capture: Optional[CaptureSpec] = None
    of_run: Optional[RunRestart] = None


@dataclass
class RestartResult:
    """``patch`` and ``mark`` are those of the launch; ``ranks``, ``architecture`` and the rest as in ``WatchArgs`` and
    ``LaunchResult``. ``captures``: the server has a tap, so that the self-check has something to prove."""

    launched: LaunchResult
    killed: bool
    patch: str = ""
    mark: str = ""
    ranks: int = 1
    captures: bool = False


@dataclass
class UnlockArgs:
    """Who holds the host's lock; one whose holder is dead is removed, with ``force`` also another."""

    force: bool = False


@dataclass
class UnlockResult:
    """``state``: free, removed (dead, or by force) or held. ``holder`` is in words; ``damage`` says what stood in the
    lock's place, where that was no lock of ours."""

    state: str
    holder: str = ""
    operator: str = ""
    pid: int = 0
    since: float = 0.0
    alive: bool = False
    damage: str = ""


@dataclass
class SettingsArgs:
    """Ask a ready server whether it has the settings that its patch needs."""

    server: str


@dataclass
class SettingsResult:
    """``faults`` names each flag that did not take effect, or must not be on; the server's record keeps it, and a
    server with faults gets no work."""

    faults: List[str] = field(default_factory=list)
    checked: int = 0
    """Settings that were looked at."""


@dataclass
class WatchArgs:
    """Follow a server until ready, stalled, dead or ``until`` seconds have passed. On a stall the evidence is taken at
    once, before anybody can kill anything. ``expect_class``: the model class that ``Load weight end ... type=`` must
    name; ``mark``: what each of ``ranks`` ranks must log."""

    server: str
    patience: Patience
    ranks: int = 1
    mark: str = ""
    expect_class: str = ""
    until: float = 86400.0
    interval: float = 1.0
    evidence_on_stall: bool = True


@dataclass
class HealthyProfile:
    """What healthy starts of the same (model, release, arguments, GPU type) took."""

    key: str
    starts: int
    lines_min: int
    lines_max: int
    seconds: float
    phase_seconds: Dict[str, float] = field(default_factory=dict)
    weights_gb: float = 0.0
    """What the weights took of each rank's memory."""

    @property
    def lines_span(self) -> str:
        """Log lines in words: ``62``, or ``60 to 64``."""
        return str(self.lines_min) if self.lines_min == self.lines_max else f"{self.lines_min} to {self.lines_max}"


@dataclass
class WatchResult:
    """``outcome``: ready, stall, died, wrong_model (falls back to another implementation), no_mark, timeout;
    stopped and replaced: an operator did that to it, ``detail`` says who.
    ``evidence`` is the JSON of ``evidence_types.Evidence``; ``evidence_dir`` is its folder on the host."""

    outcome: str
    phase: str
    seconds: float
    lines: int
    phase_seconds: Dict[str, float] = field(default_factory=dict)
    idle_seconds: float = 0.0
    detail: str = ""
    log_tail: List[str] = field(default_factory=list)
    healthy: Optional[HealthyProfile] = None
    evidence: Optional[Dict[str, Any]] = None
    evidence_dir: str = ""


@dataclass
class Fault:
    """Something wrong with a running server, or with its host. ``code`` is one of ``FAULTS``; ``text`` names the cause
    as far as it shows. A ``note`` only explains what might look like a fault (a busy server whose health check times
    out), and makes no command fail."""

    code: str
    text: str
    note: bool = False


FAULTS = (
    "died",
    "rank_lost",
    "stall",
    "port_closed",
    "health_fails",
    "busy",
    "driver_gone",
    "capture_fails",
    "disk_full",
    "disk_filling",
    "gpu_lost",
    "broken",
)
"""Codes of ``Fault``, those first that explain others."""


@dataclass
class Vitals:
    """A server at one moment. ``state`` as in ``ServerState``; ``idle_seconds`` of ``patience`` without progress.
    ``forwards``: prefill and decode batches in its log. Rows, bytes and queue are those of all its taps since they
    began; ``errors`` counts their failed writes and skipped samples. ``disk_free`` is that of the capture directory, in
    whole MiB (-1: none), full in ``disk_eta`` seconds at its present rate (0: it does not fill). ``load_*``: bytes of
    the weights while they are read, of ``load_total`` (0: unknown). ``run`` is the extraction that it works for, in
    words."""

    server: str
    state: str
    phase: str = ""
    uptime: float = 0.0
    lines: int = 0
    idle_seconds: float = 0.0
    patience: float = 0.0
    moves: List[str] = field(default_factory=list)
    """What moved since the sample before."""
    behind: List[str] = field(default_factory=list)
    """Ranks of a start that are in an earlier phase than the others."""
    forwards: int = 0
    in_flight: int = 0
    rows: int = 0
    rows_per_second: float = 0.0
    bytes_per_second: float = 0.0
    queue_bytes: int = 0
    ring_bytes: int = 0
    errors: int = 0
    last_error: str = ""
    disk_free: int = -1
    disk_eta: float = 0.0
    load_bytes: float = 0.0
    load_total: int = 0
    load_rate: float = 0.0
    load_eta: float = 0.0
    run: str = ""
    healthy: Optional[HealthyProfile] = None
    faults: List[Fault] = field(default_factory=list)


@dataclass
class MonitorArgs:
    """Follow servers of this host (all of ours when ``servers`` is empty) for ``until`` seconds, a ``vitals`` event
    each time that one has changed. ``ready``: end as soon as each of them is ready, or has a fault."""

    servers: List[str] = field(default_factory=list)
    patience: Optional[Patience] = None
    until: float = 86400.0
    interval: float = 2.0
    ready: bool = False


@dataclass
class MonitorResult:
    """The last ``vitals`` of each server; what ``samples`` looks cost this host: CPU seconds in all, and the time that
    the looks themselves took."""

    servers: List[Vitals] = field(default_factory=list)
    samples: int = 0
    cpu_seconds: float = 0.0
    wall_seconds: float = 0.0


@dataclass
class EvidenceArgs:
    """Collect evidence of a server: ours by ``server`` (by ``port`` if it was never launched here), any by ``port`` or
    ``pid``, the only one of the host without any of them. ``seconds`` lie between the two samples; ``deep`` takes
    stage 2 (strace, stacks) even when the samples show progress."""

    server: str = ""
    port: int = 0
    pid: int = 0
    seconds: float = 5.0
    deep: bool = False
    patience: Optional[Patience] = None


@dataclass
class EvidenceResult:
    """``evidence`` is the JSON of ``evidence_types.Evidence``; ``evidence_dir`` is empty where the host could not store
    it. ``wants``: a tool that stage 2 lacked, which the controller may bring (``ToolArgs``) and ask again."""

    evidence: Dict[str, Any]
    evidence_dir: str
    wants: str = ""


@dataclass
class ToolArgs:
    """Keep a program for this host's diagnoses: ``tools/<name>-<sha256>`` below the state directory. The body's lines
    are its bytes, compressed with zlib and then cut, each ``{"data": <base64>}``."""

    name: str
    sha256: str


@dataclass
class ToolResult:
    """Where it lies."""

    path: str


@dataclass
class StopArgs:
    """Stop servers of ours (all when ``servers`` is empty): SIGTERM, up to ``grace`` seconds, then SIGKILL to what is
    left of that server's own session, each pid verified by its start time. A driver of a stopped server waits for its
    next launch; ``clean`` ends it."""

    servers: List[str] = field(default_factory=list)
    grace: float = 30.0


@dataclass
class StopResult:
    """Servers by what happened to them. ``waiting``: extractions of them, as ``<run> on <server>``, that go on when
    the server is launched again. ``gpu_freed``: bytes of GPU memory that came free; ``gpu_held`` says of each GPU that
    gave less than the servers had there who has it now (both empty where there is no nvidia-smi)."""

    stopped: List[str] = field(default_factory=list)
    killed: List[str] = field(default_factory=list)
    absent: List[str] = field(default_factory=list)
    waiting: List[str] = field(default_factory=list)
    gpu_freed: int = 0
    gpu_held: List[str] = field(default_factory=list)


@dataclass
class LogsArgs:
    """Last ``lines`` lines of a server's log; with ``follow`` new lines come as ``log`` events until the deadline.
    Only those of tensor-parallel rank ``rank`` (-1: all), and only those that were logged in ``phase`` (empty: all)."""

    server: str
    lines: int = 50
    follow: bool = False
    rank: int = -1
    phase: str = ""


@dataclass
class LogsResult:
    """Total number of lines in the log."""

    log: str
    lines: int
    tail: List[str] = field(default_factory=list)


@dataclass
class AuditArgs:
    """The last ``entries`` lines of the host's audit log."""

    entries: int = 50


@dataclass
class AuditEntry:
    """One verb that changed the host: when it began (Unix time), who asked for it, with what, and how it ended."""

    t: float
    operator: str
    verb: str
    args: Dict[str, Any]
    ok: bool
    seconds: float
    v: int = 1


@dataclass
class AuditResult:
    """The oldest first. ``holder`` says who changes the host now, empty when nobody does."""

    entries: List[AuditEntry] = field(default_factory=list)
    holder: str = ""


# --------------------------------------------------------------------------- extraction
TOO_LONG = ("drop", "truncate")
"""What becomes of a sample that is longer than the limit: it is rejected with reason too_long, or cut at its end."""


@dataclass
class SampleSpans:
    """A sample for a person to look at: how much of it is supervised, and its first supervised spans, decoded."""

    id: str
    tokens: int
    supervised: int
    spans: List[str]


@dataclass
class SubmitArgs:
    """Give a host one server's whole share of a run; the body holds one row of the data set a line
    (``dataset.rows.Row`` as JSON). Submitting the same share again changes nothing; another share is a ``conflict``."""

    run: str
    server: str
    share_sha256: str
    """SHA-256 of the body's lines: the identity of the share."""
    capture: CaptureSpec
    max_tokens: Optional[int] = None
    """0: no limit but the server's. None: as the share was begun, no limit for a new one; another value than it was
    begun with is a ``conflict``."""
    too_long: str = ""
    """What becomes of a longer sample, one of ``TOO_LONG``; empty as None above, the first for a new share."""
    token_budget: int = 32768
    max_attempts: int = 3
    allow_failed_selfcheck: bool = False
    """Without it a server whose last self-check failed gets no work."""
    engine: str = ""
    patch_sha256: str = ""
    model_sha256: str = ""


FINISHED = ("done", "failed")
"""States of a share in which no driver is needed."""


@dataclass
class RunProgress:
    """State of one share; ``server`` is its name (``formats.SHARE_NAME``). ``state``: tokenising, running, paused,
    closing, done, failed, stopped (the driver is dead). ``samples`` and ``tokens`` are what it has not given away.
    Counters are totals over all drivers of this share; rates are of the last 10 s."""

    run: str
    server: str
    state: str
    samples: int = 0
    done: int = 0
    rejected: int = 0
    in_flight: int = 0
    retries: int = 0
    tokens: int = 0
    tokens_done: int = 0
    bytes_written: int = 0
    tokens_per_second: float = 0.0
    eta_seconds: float = 0.0
    manifest_bytes: int = 0
    detail: str = ""
    driver_pid: int = 0
    driver_alive: bool = False
    updated_at: float = 0.0
    notes: List[str] = field(default_factory=list)
    """For people: decoded supervised spans of the first samples, and warnings about the loss masks."""
    share_id: str = ""
    """Another one for each submit that made a share: its manifest is another file, even of the same run and server."""
    order: str = ""
    """What the run's drivers on this host were told: ``pause``, ``drain``, ``cancel``, or nothing. An order that cannot
    be read counts as a ``pause`` of the whole run."""
    whole_run: bool = False
    """All hosts were told it (``OrderArgs``)."""
    dead_launch: str = ""
    """Id of the server's launch that died by itself and that the driver waits to see replaced, if there is one."""
    suspect: str = ""
    """The sample that was alone in flight when that launch died."""
    restarts: int = 0
    """How often a controller has restarted the server in this run with no such sample to blame."""
    bytes_per_second: float = 0.0
    """Of the samples' rows on the disk, as ``bytes_written``."""
    disk_free_bytes: Optional[int] = None
    """What the capture directory's disk has left; None while no driver has looked."""
    last_error: str = ""
    """Of the latest attempt that ended without a sample: which, how and why."""


@dataclass
class PreviewArgs:
    """Tokenise some rows (the body, as for ``SubmitArgs``) as an extraction would, and keep nothing. The server need
    not run; when it does, its context length is the limit."""

    server: ServerSpec
    max_tokens: int = 0
    too_long: str = TOO_LONG[0]


@dataclass
class PreviewReject:
    """A row that would be rejected, and why."""

    id: str
    reason: str
    detail: str


@dataclass
class PreviewResult:
    """``lengths``: tokens of each row in order, 0 for a rejected one. ``limit``: most tokens of a sample, 0 for none.
    ``shown``: the first samples that have supervised tokens. Counts are as in work.jsonl's head."""

    lengths: List[int]
    tokens: int
    supervised: int
    limit: int
    template_sha256: str
    tokenizer_sha256: str
    methods: Dict[str, int]
    shown: List[SampleSpans]
    rejected: List[PreviewReject]
    unsupervised_samples: int = 0
    all_supervised_samples: int = 0
    truncated: int = 0


@dataclass
class BurstArgs:
    """Send prompts of random ids with these ``lengths`` through each of ``servers``, at most ``token_budget`` tokens in
    flight at one, for at most ``seconds``; they are captured, and removed again."""

    servers: List[str]
    capture: CaptureSpec
    lengths: List[int]
    token_budget: int = 32768
    seconds: float = 20.0


@dataclass
class BurstResult:
    """Tokens a second of each server, from the first request to the last row in a journal."""

    tokens_per_second: Dict[str, float]


PAUSE, CANCEL, DRAIN = "pause", "cancel", "drain"
ORDERS = (PAUSE, "resume", CANCEL, DRAIN)


@dataclass
class OrderArgs:
    """Tell the drivers of a run on this host what to do, those of shares that come later too. ``order``: ``pause``
    (send nothing more until ``resume``), ``cancel`` (for good: what is not done is rejected as ``cancelled``), or
    ``drain`` (as ``pause``, and what is not in flight is given away as soon as somebody asks for it: the host leaves).
    ``whole_run``: all hosts of the run are told; a pause of some hosts alone has them give their work away too, as
    others have need of it."""

    run: str
    order: str
    whole_run: bool = True


@dataclass
class OrderResult:
    """State of each share, as it was when the order was left; the drivers follow it within a second."""

    shares: List[RunProgress]


@dataclass
class WithdrawArgs:
    """Have a share give samples away that it has not begun, of about ``tokens`` together; 0: none, only tell. A share
    of a run that is paused as a whole, or cancelled, gives nothing."""

    run: str
    share: str
    tokens: int


@dataclass
class WithdrawResult:
    """Every sample that the share has ever given away: its host works on none of them any more."""

    ids: List[str]


@dataclass
class HeldArgs:
    """Ask which samples are a share's: those that it was given and has not given away."""

    run: str
    share: str


@dataclass
class HeldResult:
    """The samples, done or not, and the identity of the share as it was submitted."""

    ids: List[str]
    share_sha256: str


@dataclass
class FollowArgs:
    """Stream ``progress`` events of a run on this host until every share is done or failed, or the deadline.
    ``revive``: start dead drivers again; without it the stream ends too when nobody has started them for a while.
    ``ahead``: end that many seconds before the servers will have nothing to do, by the shares' rates; 0 for not."""

    run: str
    interval: float = 1.0
    revive: bool = True
    ahead: float = 0.0


@dataclass
class FollowResult:
    """Progress of each share on this host."""

    shares: List[RunProgress]


@dataclass
class ManifestArgs:
    """Read manifest and reject lines of a run from byte ``offset`` of each server's file on; each comes as a
    ``manifest`` or ``rejected`` event with its text as ``line`` and the byte after it as ``end``."""

    run: str
    server: str
    offset: int = 0
    rejected_offset: int = 0


@dataclass
class ManifestResult:
    """Offsets to continue from (whole lines only) and the share's progress."""

    offset: int
    rejected_offset: int
    progress: RunProgress


@dataclass
class VerifyArgs:
    """Read and check what a run (empty: each) has written on this host. ``repair``: finish what dead writers left
    open first."""

    run: str = ""
    repair: bool = False


@dataclass
class RunVerification:
    """What ``verify`` read of one run, and what is wrong with it. ``open``: parts of living writers, right so far;
    ``torn``: parts that dead writers left (``repaired`` when they were finished). ``faults`` names files."""

    run: str
    shards: int = 0
    pieces: int = 0
    bytes: int = 0
    samples: int = 0
    open: List[str] = field(default_factory=list)
    torn: List[str] = field(default_factory=list)
    repaired: List[str] = field(default_factory=list)
    faults: List[str] = field(default_factory=list)
    more_faults: int = 0

    @property
    def is_whole(self) -> bool:
        """Whether nothing is wrong and nothing is left to repair."""
        return not (self.torn or self.faults)


@dataclass
class VerifyResult:
    """Every run that was asked for."""

    runs: List[RunVerification]


@dataclass
class ShardsArgs:
    """List closed shards of a run. ``close``: finish the ``.part`` files of writers that are dead."""

    run: str
    capture_dir: str
    close: bool = True


@dataclass
class ShardInfo:
    """A file in the run's capture directory: ``kind`` is shard, tokens, norm or journal."""

    name: str
    kind: str
    bytes: int
    sha256: str = ""
    open: bool = False


@dataclass
class ShardsResult:
    """All files of the run, sorted by name. ``faults``: files that cannot be read or finished, one sentence each."""

    shards: List[ShardInfo]
    faults: List[str] = field(default_factory=list)


@dataclass
class FetchArgs:
    """Send one file of a run's capture directory from byte ``offset`` on, as one ``blob`` event and its bytes."""

    run: str
    capture_dir: str
    name: str
    offset: int = 0


@dataclass
class FetchResult:
    """Bytes sent, and the size of the whole file."""

    sent: int
    size: int


@dataclass
class SelfCheckArgs:
    """Send a few prompts through the tap of a server that captures so, and judge what was written."""

    server: str
    capture: CaptureSpec


@dataclass
class SelfCheckResult:
    """``passed`` is False with the first reason in ``detail``. ``checks`` has one finding a check, ``causes`` the codes
    of the likely causes of those that failed; ``max_logprob_diff`` is that of lm_head over the captured final states
    against the server's own tokens."""

    passed: bool
    prompts: int
    rows: int
    max_logprob_diff: float
    detail: str = ""
    checks: List[Finding] = field(default_factory=list)
    causes: List[str] = field(default_factory=list)
    seconds: float = 0.0


# --------------------------------------------------------------------------- status, clean
@dataclass
class StatusArgs:
    """State of our servers and runs on this host, and the patch of the engine of ``interpreter``."""

    interpreter: Optional[Interpreter] = None


@dataclass
class TapStatus:
    """What one tap of a launched server said last (``servers/<name>/tap-<role>-<pid>.json``): counters since its
    process began, ``bytes_per_second`` over the last second, ``queue_bytes`` of ``ring_bytes`` wait for the disk.
    ``slow_down``: forwards wait for the disk, or soon would. ``failing``: nothing was written since ``last_error``."""

    server: str
    launch_id: str
    role: str
    pid: int
    rows: int
    bytes: int
    bytes_per_second: float
    ring_bytes: int
    queue_bytes: int
    slow_down: bool
    waited_seconds: float
    skips: Dict[str, int]
    errors: int
    last_error: str
    failing: bool
    t: float
    v: int = 1


@dataclass
class ControllerArgs:
    """Run ``fleetdump`` with ``argv`` on this host, as the controller of ``run``, by the interpreter ``python``, in the
    folder ``controllers/<run>/`` below the state directory. The body's lines are files that are put there first, each
    ``{"file": <name>, "data": <base64>}``, a file's lines one after the other; ``code/…`` is the package and is
    replaced as a whole, a ledger that is there stays. ``detach``: start it and return; else its end is waited for."""

    run: str
    python: str
    argv: List[str]
    detach: bool = False


@dataclass
class ControllerResult:
    """How it ended, with what it printed; with ``detach`` ``pid`` (0: it has ended at once), ``log``, the file that it
    writes to, and as ``err`` its first words."""

    code: int
    out: str
    err: str
    pid: int = 0
    log: str = ""


@dataclass
class ControllerState:
    """The latest controller of ``run`` on this host, alive or not, and who put it there (user@machine)."""

    run: str
    pid: int
    alive: bool
    operator: str
    started_at: float


@dataclass
class StatusResult:
    """Everything of ours on this host."""

    hostname: str
    servers: List[ServerState]
    shares: List[RunProgress]
    patch: Optional[PatchState] = None
    state_bytes: int = 0
    taps: List[TapStatus] = field(default_factory=list)
    """Of the last launch of each server."""
    controllers: List[ControllerState] = field(default_factory=list)
    """Of runs that are, or were, driven from this host."""


@dataclass
class CollectedShare:
    """Ids of the samples of one server's share that the controller has, every byte verified."""

    run: str
    server: str
    ids: List[str] = field(default_factory=list)


@dataclass
class CleanArgs:
    """Remove what is ours from the host. Servers must be stopped and patches reverted first; drivers are ended.
    ``data`` also removes this host's shards in ``capture_dirs``; without it runs that still have shards are kept. It
    is a ``conflict`` when a manifest has a sample that is not ``collected``, unless its run is one of ``discard``.
    ``dry_run`` only lists what would go; nothing stands in its way then."""

    capture_dirs: List[str] = field(default_factory=list)
    interpreters: List[Interpreter] = field(default_factory=list)
    data: bool = False
    runs: List[str] = field(default_factory=list)
    """Only these runs; empty: everything of ours."""
    collected: List[CollectedShare] = field(default_factory=list)
    discard: List[str] = field(default_factory=list)
    dry_run: bool = False


@dataclass
class CleanResult:
    """What was removed (or would be) and what was left, with the reason."""

    removed: List[str] = field(default_factory=list)
    kept: List[str] = field(default_factory=list)
    freed_bytes: int = 0


VERBS = (
    "probe",
    "hold",
    "release",
    "forecast",
    "patch",
    "revert",
    "launch",
    "watch",
    "monitor",
    "restart",
    "unlock",
    "settings",
    "evidence",
    "tool",
    "stop",
    "logs",
    "status",
    "audit",
    "selfcheck",
    "preview",
    "burst",
    "submit",
    "order",
    "withdraw",
    "held",
    "follow",
    "manifest",
    "verify",
    "shards",
    "fetch",
    "clean",
)
