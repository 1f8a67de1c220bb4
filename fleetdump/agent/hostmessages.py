"""Messages about a host: probe, lock, settings, audit, tools, status, clean. Shared with the controller."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Dict, List, Optional

from fleetdump.agent.patchmessages import PatchState
from fleetdump.agent.protocol import AgentError, Finding
from fleetdump.agent.runmessages import CollectedShare, RunProgress, TapStatus
from fleetdump.agent.servermessages import HealthyProfile, ServerState
from fleetdump.agent.specs import Interpreter, PatchSpec, ServerSpec
from fleetdump.agent.steermessages import Steering


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
    healthy: List[HealthyProfile] = field(default_factory=list)
    """What healthy starts took here, a profile a kind, the latest last."""


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
class AuditArgs:
    """The last ``entries`` lines of the host's audit log."""

    entries: int = 50


@dataclass
class AuditEntry:
    """One verb that changed the host: when it began (Unix time), who asked for it, with what, and how it ended.
    ``code`` says of one that failed how (``AgentError.code``, ``gone`` when its controller was, ``exit`` with the
    status of a command that it ran); empty when it is not known."""

    t: float
    operator: str
    verb: str
    args: Dict[str, Any]
    ok: bool
    seconds: float
    code: str = ""
    v: int = 1


@dataclass
class AuditResult:
    """The oldest first. ``holder`` says who changes the host now, empty when nobody does."""

    entries: List[AuditEntry] = field(default_factory=list)
    holder: str = ""


@dataclass
class StatusArgs:
    """State of our servers and runs on this host, and the patch of the engine of ``interpreter``."""

    interpreter: Optional[Interpreter] = None


@dataclass
class ControllerArgs:
    """Run ``fleetdump`` with ``argv`` on this host, as the controller of ``run``, by the interpreter ``python``, in the
    folder ``controllers/<run>/`` below the state directory. The body's lines are files that are put there first, each
    ``{"file": <name>, "data": <base64>}``, a file's lines one after the other; ``code/…`` is the package and is
    replaced as a whole, a ledger that is there stays. ``detach``: start it and return; else its end is waited for.
    ``replace``: a controller of the run that lives here is no hindrance, and ended once another is to start."""

    run: str
    python: str
    argv: List[str]
    detach: bool = False
    replace: bool = False


@dataclass
class ControllerResult:
    """How it ended, with what it printed; with ``detach`` ``pid`` (0: it has ended at once), ``log``, the file that it
    writes to, and as ``err`` its first words."""

    code: int
    out: str
    err: str
    pid: int = 0
    log: str = ""

    @property
    def failure(self) -> str:
        """For the audit log; empty when all went well."""
        return f"exit {self.code}" if self.code else ""


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
    steering: List[Steering] = field(default_factory=list)
    """Who drives the runs of this host now, from wherever it is."""


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
    """What was removed (or would be) and what was left, with the reason. ``obstacles``: of a dry run, why the real one
    would be refused."""

    removed: List[str] = field(default_factory=list)
    kept: List[str] = field(default_factory=list)
    freed_bytes: int = 0
    obstacles: List[AgentError] = field(default_factory=list)
