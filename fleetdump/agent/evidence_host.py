"""What the host gives a server: disks, locks, memory, CPU, GPUs, addresses; shared by both sides. Sizes are bytes, of
GPUs MiB.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Dict, List


@dataclass
class DiskFacts:
    """A file system that the server writes to."""

    use: str
    path: str
    free_bytes: int
    total_bytes: int
    free_inodes: int = -1
    fstype: str = ""


@dataclass
class LockFacts:
    """A lock of /proc/locks that concerns the server: ``waiter`` waits for ``holder`` (0: not visible here)."""

    kind: str
    inode: int
    holder: int
    waiter: int
    path: str = ""
    fstype: str = ""


@dataclass
class LockFile:
    """A lock file of a compile cache (``use`` "compile") or of a model hub's download folder ("hub"). ``holder`` is a
    living pid that has it open, 0 for none; ``age_seconds`` is since its last write. ``locked``: the kernel knows a
    lock on it (flock, fcntl); without one it only exists, which is all that FileBaton and SoftFileLock look at."""

    path: str
    age_seconds: float
    holder: int = 0
    use: str = "compile"
    fstype: str = ""
    locked: bool = False


@dataclass
class MemoryFacts:
    """``oom_kills`` from the server's cgroup; ``oom_lines`` of the kernel log that name a kill."""

    available: int = 0
    total: int = 0
    oom_kills: int = 0
    oom_lines: List[str] = field(default_factory=list)
    pressure_some: float = 0.0
    pressure_full: float = 0.0


@dataclass
class CgroupFacts:
    """The launcher's control group. ``memory_limit`` (bytes) and ``cpu_limit`` (cores) are 0 where there is none;
    ``memory_events`` are totals by the kernel's own names (high, max, oom, oom_kill)."""

    path: str = ""
    memory_bytes: int = 0
    memory_limit: int = 0
    memory_events: Dict[str, int] = field(default_factory=dict)
    cpu_limit: float = 0.0
    periods: int = 0
    """Scheduling periods between the samples."""
    throttled: int = 0
    """Those of them in which its CPU time was used up and it had to wait."""
    throttled_seconds: float = 0.0
    """Seconds that its threads waited so, all together."""


@dataclass
class CpuFacts:
    """``cores`` that we may use, the load of the last minute, and tasks that run or want to at this moment."""

    cores: int = 0
    load: float = 0.0
    running: int = 0


@dataclass
class Pressure:
    """Percent of the last 10 s in which some task, or all of them, waited for ``resource`` (cpu, io, memory);
    ``scope`` is "host" or "cgroup"."""

    resource: str
    scope: str
    some: float
    full: float


@dataclass
class GpuProcess:
    """A process with memory (MiB) on a GPU. ``role`` and ``label`` as in ``ProcessFacts``; ``ours`` when it belongs to
    this server; ``orphan`` when it is a server's process whose parent is gone."""

    pid: int
    memory: int
    name: str = ""
    ours: bool = False
    orphan: bool = False


@dataclass
class GpuFacts:
    """What nvidia-smi says of one GPU; utilisation in percent, power in watts, memory in MiB."""

    index: int
    utilization: int
    memory_used: int
    power: float = 0.0
    power_limit: float = 0.0
    memory_total: int = 0
    name: str = ""
    fabric: str = ""
    """State of the NVSwitch fabric ("Completed", "In Progress"); empty where there is none."""
    processes: List[GpuProcess] = field(default_factory=list)
    processes_known: bool = False
    """``processes`` was read; without it an empty list says nothing."""
    links_down: int = 0
    """NVLinks that nvidia-smi calls inactive while others of that GPU work."""
    memory_delta: int = 0
    """How much more memory was used in the second of two looks; MiB."""


@dataclass
class HostFacts:
    """The host's network names and links between its GPUs. ``addresses``: interface to its addresses;
    ``name_resolves_to``: what the host's own name resolves to."""

    addresses: Dict[str, List[str]] = field(default_factory=dict)
    name_resolves_to: List[str] = field(default_factory=list)
    gpu_links: List[str] = field(default_factory=list)
    """Kinds of link between GPUs in nvidia-smi's topology: NV18, PIX, PXB, PHB, NODE, SYS …"""
    acs_redirects: int = 0
    """PCIe bridges whose access control (ACSCtl ReqRedir+) sends peer traffic through the root complex."""
    cgroup: str = ""
    """The launcher's cgroup path."""
    machine: str = ""
    """The processor's kind, as ``uname -m`` says."""
    fabric_manager: str = ""
    """State of the fabric manager's unit as systemd says (active, inactive, failed); empty when there is none."""
    logins: List[str] = field(default_factory=list)
    """Lines of the journal on login sessions that ended and what was killed with them, "seconds-of-the-epoch text"."""
