"""What the agent saw of one server, as the diagnosis reads it; shared by both sides.

The JSON form is ``protocol.to_json(evidence)`` and ``protocol.from_json(Evidence, data)``. Rates and deltas are over
the window between the two samples, ``Evidence.seconds``; CPU is a share of one core (1.0 = one core busy). Sizes are
bytes.

Secrets are scrubbed before anything lands here. Standard library alone, Python 3.8.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Dict, List, Optional

from fleetdump.agent.protocol import HealthyProfile, Patience

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
class ThreadFacts:
    """One thread, seen twice. ``syscall`` is the number, or "running"; ``voluntary`` are context switches a second."""

    tid: int
    name: str
    state: str
    cpu: float = 0.0
    demand: float = 0.0
    """Share of the window in which it ran or waited for a core: 1.0 for a spin, however crowded the host is."""
    user_share: float = 0.0
    """Part of its CPU time that was user time."""
    voluntary: float = 0.0
    wchan: str = ""
    syscall: str = ""


@dataclass
class PipeEnd:
    """A pipe of this process and the processes at its other end (pids that hold the opposite direction)."""

    fd: int
    inode: int
    mode: str
    """"r" or "w": what this process may do with it."""
    peers: List[int] = field(default_factory=list)
    own_writer: bool = False
    """The reader itself holds the only writing end that is left: end of file can never come."""
    peer_states: str = ""
    """States of the processes at the other end, one letter each ("T" for a reader that is stopped)."""
    peer_names: List[str] = field(default_factory=list)
    """Names of those of them that are not the server's own ("sshd", "tee")."""


@dataclass
class SocketFacts:
    """A TCP socket of the process; ``state`` as the kernel names it (LISTEN, ESTABLISHED, SYN_SENT, CLOSE_WAIT …), or
    UNIX for a Unix socket to another process of this server. ``peer``: that process at its other end, 0 where it is
    none of them."""

    fd: int
    state: str
    local: str
    remote: str = ""
    peer: int = 0


@dataclass
class ProcessFacts:
    """One process of the server, seen twice. ``role`` as ``procfs.role_of`` names it: launcher, scheduler,
    detokenizer, compiler, compile_worker, resource_tracker … ``rank`` is a scheduler's tensor-parallel rank, ``label``
    its whole name in SGLang's log ("TP1", "DP1 TP3")."""

    pid: int
    ppid: int
    role: str
    name: str
    start_time: int
    state: str
    rank: Optional[int] = None
    label: str = ""
    cmdline: str = ""
    state_before: str = ""
    cpu: float = 0.0
    """All threads together."""
    rss: int = 0
    rss_delta: int = 0
    rchar_delta: int = 0
    read_bytes_delta: int = 0
    wchar_delta: int = 0
    write_bytes_delta: int = 0
    majflt_delta: int = 0
    main: Optional[ThreadFacts] = None
    threads: List[ThreadFacts] = field(default_factory=list)
    """The busiest threads, the main thread left out."""
    thread_count: int = 0
    syscall_fd: int = -1
    """The descriptor that the main thread's read, write or ioctl waits on; -1 when it names none."""
    polled_fds: List[int] = field(default_factory=list)
    """Descriptors that its main thread waits for in poll, where they can be read."""
    kernel_stack: List[str] = field(default_factory=list)
    tracer_pid: int = 0
    exit_signal: int = 0
    """Of a zombie: the signal that ended it, 0 when it ended by itself or that cannot be read."""
    kill_pending: bool = False
    """SIGKILL was sent and has not ended it."""
    fd_count: int = 0
    fd_limit: int = 0
    stdout: str = ""
    stderr: str = ""
    writes_log: Optional[bool] = None
    """Whether fd 1 is the watched log file (same device and inode); None when there is no log or fd 1 is unreadable."""
    errors_in_log: Optional[bool] = None
    """The same of fd 2."""
    readable: bool = True
    """Its descriptors and counters may be read: it is this user's, or this user may look at everybody's."""
    pipes: List[PipeEnd] = field(default_factory=list)
    sockets: List[SocketFacts] = field(default_factory=list)


@dataclass
class RankMarks:
    """Log marks of one rank (``label`` as in the log, for instance "TP1"): the phase it has entered, what it logged."""

    label: str
    rank: int
    phase: str
    marks: List[str] = field(default_factory=list)
    last_line: str = ""
    nccl: str = ""
    """How far NCCL's own lines say that this rank got: bootstrap, init begin or init end; empty without such lines."""
    interface: str = ""
    """The network interface and address that NCCL or gloo chose, as logged ("br0:172.18.0.1")."""


@dataclass
class LogFacts:
    """The watched log. ``quiet_seconds``: since its last write. ``growth`` (bytes), ``news`` (lines that are no
    repetition, bars that advance) and ``forwards`` (batches) happened between the samples."""

    path: str = ""
    exists: bool = False
    bytes: int = 0
    skipped: int = 0
    """Bytes in the middle of a long log that were not read; ``lines`` are those of the rest."""
    lines: int = 0
    growth: int = 0
    news: int = 0
    forwards: int = 0
    quiet_seconds: float = 0.0
    phase: str = ""
    ready: bool = False
    server_marks: List[str] = field(default_factory=list)
    ranks: List[RankMarks] = field(default_factory=list)
    crash: str = ""
    """The first fatal exception's own line; empty when none was logged."""
    crash_label: str = ""
    """The rank that logged it, for instance "TP1"; empty when the log does not tell."""
    troubles: Dict[str, str] = field(default_factory=dict)
    """Known causes by name (port_in_use, disk_full, proxy_refused, rank_died …), each with its first line."""
    repeated: int = 0
    repeated_line: str = ""
    running_requests: int = 0
    zero_statistics: int = 0
    """Statistics lines at the log's end that say 0 tokens a second while requests run or wait."""
    tail: List[str] = field(default_factory=list)
    unterminated: bool = False
    """The last line has no newline yet."""
    news_seconds: float = 0.0
    """Seconds since the log last said anything new, by its own stamps; 0 when it does not tell."""
    fallbacks: List[str] = field(default_factory=list)
    """Model classes that SGLang could not import and replaced by another implementation, each with the reason."""
    waits_for_lock: str = ""
    """The lock file that the last lines name again and again; empty when they do not."""


@dataclass
class PortFacts:
    """The server's port, in the launcher's own network namespace. ``owner_pid`` 0: nobody listens or it is hidden."""

    port: int = 0
    open: bool = False
    owner_pid: int = 0
    owner: str = ""
    ours: bool = False


@dataclass
class HttpProbe:
    """One GET: ``status`` 0 when there was no answer, then ``error`` says why (refused, timeout …)."""

    path: str
    status: int
    seconds: float
    error: str = ""


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


@dataclass
class RankCount:
    """How many operations of one kind a rank has launched (NCCL RAS); 0: none."""

    rank: int
    count: int
    pid: int = 0


@dataclass
class OperationCounts:
    """Counts of one operation ("AllReduce") that differ between the ranks of one communicator."""

    operation: str
    communicator: str
    ranks: List[RankCount] = field(default_factory=list)


@dataclass
class RasFacts:
    """What NCCL's own monitor (RAS, port 28028) says. ``status``: the worst of OK, MISMATCH, INCOMPLETE, ERROR over
    all communicators; empty when it did not answer. Texts are never kept: a missing peer fills them with garbage."""

    status: str = ""
    communicators: int = 0
    mismatches: List[OperationCounts] = field(default_factory=list)
    silent_pids: List[int] = field(default_factory=list)
    """Processes that did not answer their peers."""


@dataclass
class FlightRecord:
    """The last collective of one rank in PyTorch's flight recorder. ``sizes`` are the input's shape."""

    rank: int
    sequence: int
    operation: str
    state: str = ""
    sizes: List[int] = field(default_factory=list)


@dataclass
class SyscallCount:
    """Calls of one thread during the trace. ``target``: what the descriptor is (log, eventfd, pipe to pid …)."""

    thread: str
    main: bool
    name: str
    count: int
    target: str = ""


@dataclass
class Trace:
    """strace of one process for ``seconds``, folded by thread, call and descriptor."""

    pid: int
    label: str
    seconds: float
    calls: List[SyscallCount] = field(default_factory=list)


@dataclass
class Stack:
    """The main thread's Python frames, innermost first, as "function (file:line)"; ``state`` as py-spy says."""

    pid: int
    role: str
    label: str
    state: str
    frames: List[str] = field(default_factory=list)
    native: List[str] = field(default_factory=list)
    """The same with the C and C++ frames, where they could be taken."""
    active: Dict[str, List[str]] = field(default_factory=dict)
    """Other threads that run code now, by name."""


@dataclass
class StackGroup:
    """Ranks (by label) whose main thread is in the same place. ``minority``: fewer ranks than the largest group."""

    frames: List[str]
    ranks: List[str]
    minority: bool = False


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
