"""Processes as the agent saw them, and what stacks and system calls say of their threads; shared by both sides.

Rates and deltas are over the window between the two samples; CPU is a share of one core; sizes are bytes.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Dict, List, Optional


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
