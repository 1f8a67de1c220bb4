"""What the agent saw of one server, as the diagnosis reads it; shared by both sides.

The JSON form is ``protocol.to_json(evidence)`` and ``protocol.from_json(Evidence, data)``. Rates and deltas are over
the window between the two samples, ``Evidence.seconds``; CPU is a share of one core (1.0 = one core busy). Sizes are
bytes.

Secrets are scrubbed before anything lands here. Standard library alone, Python 3.8.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Dict, List, Optional

from fleetdump.agent.evidence_engine import FlightRecord, HttpProbe, LogFacts, PortFacts, RasFacts
from fleetdump.agent.evidence_host import (
    CgroupFacts,
    CpuFacts,
    DiskFacts,
    GpuFacts,
    HostFacts,
    LockFacts,
    LockFile,
    MemoryFacts,
    Pressure,
)
from fleetdump.agent.evidence_process import ProcessFacts, Stack, StackGroup, Trace
from fleetdump.agent.servermessages import HealthyProfile
from fleetdump.agent.specs import Patience

EVIDENCE_VERSION = 1


@dataclass
class Target:
    """The server to look at. ``pid`` is its launcher, ``start_time`` tells it from a later process of that number
    (0: not known); ``session`` is its session id (0: the launcher's own tree only)."""

    pid: int
    start_time: int = 0
    session: int = 0
    server: str = ""
    port: int = 0
    host: str = "127.0.0.1"
    log: str = ""
    ranks: int = 1
    """Tensor-parallel ranks of the whole server, over all of its nodes."""
    nodes: int = 1
    node_rank: int = 0
    python: str = ""
    """The server's interpreter; py-spy is looked for beside it."""
    watched_paths: List[str] = field(default_factory=list)
    """More directories whose free space matters (the capture directory)."""
    root: str = ""
    """Prefix of the server's own files where it lives in another mount namespace: ``/proc/<pid>/root``."""
    stopped_at: float = 0.0
    """When ``fleetdump stop`` ended it (seconds of the epoch); 0: it did not."""


@dataclass
class WatchFacts:
    """What a watcher knew when it asked for evidence: ``idle_seconds`` without progress, of ``patience`` allowed.
    Without a watcher ``patience`` is 0 and ``patiences`` may say what each phase is allowed."""

    phase: str = ""
    idle_seconds: float = 0.0
    patience: float = 0.0
    healthy: Optional[HealthyProfile] = None
    patiences: Optional[Patience] = None


@dataclass
class ProbeRecord:
    """How one probe went: ``ok`` False is itself evidence (ptrace refused, tool absent, time limit)."""

    name: str
    ok: bool
    seconds: float
    detail: str = ""


@dataclass
class Evidence:
    """Everything the agent saw of one server."""

    target: Target
    taken_at: float
    seconds: float
    hostname: str = ""
    launcher_alive: bool = True
    uptime: float = 0.0
    """Seconds since the launcher started."""
    processes: List[ProcessFacts] = field(default_factory=list)
    log: LogFacts = field(default_factory=LogFacts)
    port: PortFacts = field(default_factory=PortFacts)
    http: List[HttpProbe] = field(default_factory=list)
    memory: MemoryFacts = field(default_factory=MemoryFacts)
    cgroup: CgroupFacts = field(default_factory=CgroupFacts)
    cpus: CpuFacts = field(default_factory=CpuFacts)
    pressure: List[Pressure] = field(default_factory=list)
    disks: List[DiskFacts] = field(default_factory=list)
    kernel_log: List[str] = field(default_factory=list)
    locks: List[LockFacts] = field(default_factory=list)
    lock_files: List[LockFile] = field(default_factory=list)
    env_names: List[str] = field(default_factory=list)
    proxy: Dict[str, str] = field(default_factory=dict)
    """Proxy variables of the launcher: host:port without credentials; ``no_proxy`` as it is."""
    gpus: List[GpuFacts] = field(default_factory=list)
    host: HostFacts = field(default_factory=HostFacts)
    ras: RasFacts = field(default_factory=RasFacts)
    flight: List[FlightRecord] = field(default_factory=list)
    traces: List[Trace] = field(default_factory=list)
    stacks: List[Stack] = field(default_factory=list)
    stack_groups: List[StackGroup] = field(default_factory=list)
    native_groups: List[StackGroup] = field(default_factory=list)
    """The same by the C and C++ frames."""
    watch: Optional[WatchFacts] = None
    probes: List[ProbeRecord] = field(default_factory=list)
    deep: bool = False
    """Stage 2 (strace, stacks) was taken."""
    v: int = EVIDENCE_VERSION
