"""Messages about a server: launch, watch, evidence, stop, logs. Shared with the controller."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Callable, Dict, Iterable, List, Optional

from fleetdump.agent.patchmessages import PatchArgs, PatchResult, PatchState
from fleetdump.agent.specs import CaptureSpec, Interpreter, PatchSpec, Patience, ServerSpec


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
    ``verdict``: what a diagnosis says of it; ``suspect`` as in ``RunProgress``. ``hangs``: that launch lives, and is
    replaced only if the run's driver still says that nothing comes from it."""

    run: str
    launch_id: str
    verdict: str = ""
    suspect: str = ""
    hangs: bool = False


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
    name; ``mark``: what each of ``ranks`` ranks must log. ``healthy``: what healthy starts took on other hosts, a
    profile a kind; that of the server's own kind counts like those of this host."""

    server: str
    patience: Patience
    ranks: int = 1
    mark: str = ""
    expect_class: str = ""
    until: float = 86400.0
    interval: float = 1.0
    evidence_on_stall: bool = True
    healthy: List[HealthyProfile] = field(default_factory=list)


MOST_STARTS = 1_000_000
MOST_LINES = 1 << 31
MOST_SECONDS = 7 * 86400.0
MOST_GB = 1e6


@dataclass
class HealthyProfile:
    """What healthy starts of the same (model, release, arguments, GPU type) took. It comes from files that anybody may
    have written: one that is not ``is_sane`` counts for nothing."""

    key: str
    starts: int
    lines_min: int
    lines_max: int
    seconds: float
    phase_seconds: Dict[str, float] = field(default_factory=dict)
    weights_gb: float = 0.0
    """What the weights took of each rank's memory."""
    slowest: Dict[str, float] = field(default_factory=dict)
    """Where profiles of several hosts are merged: ``phase_seconds`` of the slowest host of each phase."""

    @property
    def is_sane(self) -> bool:
        """Whether starts may have been so: no number is negative, absurdly large or none at all (NaN)."""
        seconds = [self.seconds, *self.phase_seconds.values(), *self.slowest.values()]
        return (
            1 <= self.starts <= MOST_STARTS
            and 0 <= self.lines_min <= self.lines_max <= MOST_LINES
            and all(0 <= each <= MOST_SECONDS for each in seconds)
            and 0 <= self.weights_gb <= MOST_GB
        )

    @property
    def longest(self) -> Dict[str, float]:
        """Seconds in each phase that a healthy start is known to take: patience is stretched by them."""
        return self.slowest or self.phase_seconds

    @property
    def lines_span(self) -> str:
        """Log lines in words: ``62``, or ``60 to 64``."""
        return str(self.lines_min) if self.lines_min == self.lines_max else f"{self.lines_min} to {self.lines_max}"


def merged_profile(profiles: Iterable[HealthyProfile]) -> Optional[HealthyProfile]:
    """What healthy starts of one kind took on all hosts together; None without any. Means are weighed by starts.
    Profiles that are not sane are left out."""
    known = [profile for profile in profiles if profile.is_sane]
    if not known:
        return None
    starts = sum(profile.starts for profile in known)
    phases = sorted({phase for profile in known for phase in profile.phase_seconds})

    def mean(value: Callable[[HealthyProfile], float]) -> float:
        return round(sum(value(profile) * profile.starts for profile in known) / starts, 2)

    def mean_of_phase(phase: str) -> float:
        return mean(lambda profile: profile.phase_seconds.get(phase, 0.0))

    return HealthyProfile(
        key=known[0].key,
        starts=min(starts, MOST_STARTS),
        lines_min=min(profile.lines_min for profile in known),
        lines_max=max(profile.lines_max for profile in known),
        seconds=mean(lambda profile: profile.seconds),
        phase_seconds={phase: mean_of_phase(phase) for phase in phases},
        weights_gb=mean(lambda profile: profile.weights_gb),
        slowest={phase: max(profile.longest.get(phase, 0.0) for profile in known) for phase in phases},
    )


@dataclass
class WatchResult:
    """``outcome``: ready, stall, died, wrong_model (falls back to another implementation), no_mark, timeout;
    stopped and replaced: an operator did that to it, ``detail`` says who.
    ``evidence`` is the JSON of ``evidence_types.Evidence``; ``evidence_dir`` is its folder on the host. ``kind`` is the
    key of the ``HealthyProfile`` that this start belongs to, ``healthy`` what those before it took, on all hosts."""

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
    kind: str = ""


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
    each time that one has changed. ``ready``: end as soon as each of them is ready, or has a fault. ``healthy`` as in
    ``WatchArgs``."""

    servers: List[str] = field(default_factory=list)
    patience: Optional[Patience] = None
    until: float = 86400.0
    interval: float = 2.0
    ready: bool = False
    healthy: List[HealthyProfile] = field(default_factory=list)


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
class StopArgs:
    """Stop servers of ours (all when ``servers`` is empty): SIGTERM, up to ``grace`` seconds, then SIGKILL to what is
    left of that server's own session, each pid verified by its start time. A driver of a stopped server waits for its
    next launch; ``clean`` ends it."""

    servers: List[str] = field(default_factory=list)
    grace: float = 30.0


@dataclass
class StopResult:
    """Servers by what happened to them. ``waiting``: extractions of them, as ``<run> on <share>``, that go on when
    the server is launched again; ``left``: those that this host was drained of, whose drivers were ended.
    ``gpu_freed``: bytes of GPU memory that came free; ``gpu_held`` says of each GPU that gave less than the servers had
    there who has it now (both empty where there is no nvidia-smi)."""

    stopped: List[str] = field(default_factory=list)
    killed: List[str] = field(default_factory=list)
    absent: List[str] = field(default_factory=list)
    waiting: List[str] = field(default_factory=list)
    left: List[str] = field(default_factory=list)
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
