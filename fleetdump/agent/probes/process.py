"""Processes of a server between two samples: CPU, I/O and switches, threads, where the main thread is, descriptors."""

from __future__ import annotations

import os
import signal
import struct
from dataclasses import dataclass, field
from typing import Dict, List, Optional, Set, Tuple

from fleetdump.agent import procfs
from fleetdump.agent.evidence_types import PipeEnd, ProcessFacts, SocketFacts, ThreadFacts
from fleetdump.agent.probes.net import tcp_table
from fleetdump.agent.scrub import scrub_argv

DETAILED_ROLES = frozenset(
    {"launcher", "scheduler", "detokenizer", "data_parallel_controller", "tokenizer_worker", "compiler"}
)
"""Roles whose threads and descriptors are looked at; 60 idle compile workers are not."""
BUSY_THREADS = 8
SOCKETS = 30
FD_SYSCALLS = {"0", "1", "16", "17", "18", "19", "20", "44", "45", "46", "47", "73"}
"""x86-64: read, write, ioctl, pread, pwrite, readv, writev, send/recv, flock: their first argument is a descriptor."""
POLL = "7"
POLLFD = struct.Struct("=ihh")
POLLED = 64
PEERS = 8
NATIVE_CPU = 0.85


@dataclass
class Ticks:
    """CPU of one thread so far, in clock ticks, its voluntary context switches, and the nanoseconds in which it ran
    or waited for a core."""

    name: str
    state: str
    utime: int
    stime: int
    voluntary: int
    wanted_ns: int = 0


@dataclass
class Snapshot:
    """All processes of a server at one moment; ``at`` is a ``time.monotonic()`` value."""

    at: float
    processes: Dict[int, procfs.ProcSample] = field(default_factory=dict)
    threads: Dict[int, Dict[int, Ticks]] = field(default_factory=dict)


def snapshot(pid: int, session: int, now: float) -> Snapshot:
    """Sample the launcher ``pid``, its descendants and its session."""
    samples = {sample.pid: sample for sample in procfs.server_processes(pid, session)}
    threads = {p: read_threads(p) for p, sample in samples.items() if sample.role in DETAILED_ROLES}
    return Snapshot(now, samples, threads)


def read_threads(pid: int) -> Dict[int, Ticks]:
    """Ticks of each thread of a process, by thread id."""
    try:
        names = os.listdir(f"{procfs.PROC}/{pid}/task")
    except OSError:
        return {}
    found: Dict[int, Ticks] = {}
    for name in names:
        base = f"{procfs.PROC}/{pid}/task/{name}"
        stat = procfs.parse_stat(procfs.read_text(f"{base}/stat", 4096) or "")
        if stat:
            status = procfs.parse_fields(procfs.read_text(f"{base}/status", 1 << 14) or "")
            voluntary = int(status.get("voluntary_ctxt_switches", 0))
            # Run time and wait time; an old kernel may lack the file.
            wanted = sum(map(int, (procfs.read_text(f"{base}/schedstat", 256) or "").split()[:2]))
            found[int(name)] = Ticks(stat.comm, stat.state, stat.utime, stat.stime, voluntary, wanted)
    return found


def compare(first: Snapshot, second: Snapshot, log: str) -> List[ProcessFacts]:
    """What each process that is there now did between the two snapshots; the first one's dead are left out."""
    pipes = pipe_holders(second)
    sockets = tcp_table(next(iter(second.processes), os.getpid()))
    facts = [_process(first, second, pid) for pid in sorted(second.processes)]
    for process in facts:
        if process.role in DETAILED_ROLES:
            _descriptors(process, pipes, sockets, log)
    return facts


def _process(first: Snapshot, second: Snapshot, pid: int) -> ProcessFacts:
    now = second.processes[pid]
    before = first.processes.get(pid)
    if before is None or before.start_time != now.start_time:
        before = now
    elapsed = max(second.at - first.at, 1e-3)
    status = procfs.parse_fields(procfs.read_text(f"{procfs.PROC}/{pid}/status", 1 << 16) or "")
    ticks = now.utime + now.stime - before.utime - before.stime
    threads = [
        _thread(tid, first.threads.get(pid, {}).get(tid), ticks_now, elapsed)
        for tid, ticks_now in second.threads.get(pid, {}).items()
    ]
    main = next((thread for thread in threads if thread.tid == pid), None)
    others = sorted((t for t in threads if t.tid != pid), key=lambda t: t.cpu, reverse=True)[:BUSY_THREADS]
    for thread in [main, *others]:
        if thread:
            thread.wchan, thread.syscall = where_is(pid, thread.tid)
    return ProcessFacts(
        pid=pid,
        ppid=now.ppid,
        role=now.role,
        name=now.comm,
        start_time=now.start_time,
        state=now.state,
        rank=now.rank.tp if now.rank else None,
        label=str(now.rank) if now.rank else "",
        cmdline=" ".join(scrub_argv([word.strip() for word in now.cmdline]))[:600],
        state_before=before.state,
        cpu=round(ticks / procfs.TICKS_PER_SECOND / elapsed, 3),
        rss=now.rss_bytes,
        rss_delta=now.rss_bytes - before.rss_bytes,
        rchar_delta=now.rchar - before.rchar,
        read_bytes_delta=now.read_bytes - before.read_bytes,
        wchar_delta=now.wchar - before.wchar,
        majflt_delta=now.majflt - before.majflt,
        main=main,
        threads=others,
        thread_count=now.threads,
        syscall_fd=_descriptor_of(main.syscall) if main else -1,
        polled_fds=polled_descriptors(pid, main.syscall) if main else [],
        kernel_stack=kernel_stack(pid) if main else [],
        tracer_pid=int(status.get("TracerPid", 0)),
        exit_signal=exit_signal(pid) if now.state in "ZX" else 0,
        kill_pending=any(_has_kill(status.get(name, "0")) for name in ("SigPnd", "ShdPnd")),
    )


def is_wanted_native(process: ProcessFacts) -> bool:
    """A rank that burns a core in its main thread."""
    return process.role == "scheduler" and process.main is not None and process.main.cpu > NATIVE_CPU


def exit_signal(pid: int) -> int:
    """The signal that ended a zombie, from the last field of its stat; 0 when it exited or that may not be read."""
    words = (procfs.read_text(f"{procfs.PROC}/{pid}/stat", 4096) or "").rpartition(")")[2].split()
    return int(words[49]) & 0x7F if len(words) > 49 else 0


def _has_kill(mask: str) -> bool:
    return bool(int(mask or "0", 16) >> (signal.SIGKILL - 1) & 1)


def _thread(tid: int, before: Optional[Ticks], now: Ticks, elapsed: float) -> ThreadFacts:
    before = before or now
    user, system = now.utime - before.utime, now.stime - before.stime
    return ThreadFacts(
        tid=tid,
        name=now.name,
        state=now.state,
        cpu=round((user + system) / procfs.TICKS_PER_SECOND / elapsed, 3),
        demand=round(min(1.0, (now.wanted_ns - before.wanted_ns) / 1e9 / elapsed), 3),
        user_share=round(user / (user + system), 3) if user + system else 0.0,
        voluntary=round((now.voluntary - before.voluntary) / elapsed, 1),
    )


def where_is(pid: int, tid: int) -> Tuple[str, str]:
    """Kernel function a thread sleeps in, and its system call as the kernel prints it ("running": none)."""
    base = f"{procfs.PROC}/{pid}/task/{tid}"
    wchan = (procfs.read_text(f"{base}/wchan", 256) or "").strip()
    syscall = (procfs.read_text(f"{base}/syscall", 256) or "").strip()
    return ("" if wchan == "0" else wchan), syscall


def _descriptor_of(syscall: str) -> int:
    words = syscall.split()
    return int(words[1], 16) if len(words) > 1 and words[0] in FD_SYSCALLS else -1


def polled_descriptors(pid: int, syscall: str) -> List[int]:
    """Descriptors of the poll (x86-64 system call 7) that a thread sleeps in, read from its own pollfd array.

    This needs the right to ptrace but stops nobody; empty without it.
    """
    words = syscall.split()
    if len(words) < 3 or words[0] != POLL:
        return []
    count = min(int(words[2], 16), POLLED)
    try:
        with open(f"{procfs.PROC}/{pid}/mem", "rb", buffering=0) as memory:
            memory.seek(int(words[1], 16))
            array = memory.read(count * POLLFD.size)
    except (OSError, ValueError, OverflowError):
        return []
    return [fd for fd, _, _ in POLLFD.iter_unpack(array[: len(array) // POLLFD.size * POLLFD.size])]


def kernel_stack(pid: int) -> List[str]:
    """Functions of the main thread's kernel stack, innermost first; empty without the right to read it."""
    text = procfs.read_text(f"{procfs.PROC}/{pid}/stack", 1 << 14) or ""
    return [line.split()[-1].partition("+")[0] for line in text.splitlines() if line.strip()]


# --------------------------------------------------------------------------- descriptors
def pipe_holders(taken: Snapshot) -> Dict[int, List[Tuple[int, int, str]]]:
    """Pipe inode to (pid, fd, "r" or "w") of every process of the server that has it open."""
    holders: Dict[int, List[Tuple[int, int, str]]] = {}
    for pid, sample in taken.processes.items():
        if sample.role not in DETAILED_ROLES:
            continue
        for fd, target in procfs.fd_targets(pid).items():
            if target.startswith("pipe:["):
                holders.setdefault(int(target[6:-1]), []).append((pid, fd, _mode(pid, fd)))
    return holders


def _mode(pid: int, fd: int) -> str:
    flags = procfs.parse_fields(procfs.read_text(f"{procfs.PROC}/{pid}/fdinfo/{fd}", 4096) or "").get("flags", "0")
    return "w" if int(flags, 8) & os.O_ACCMODE == os.O_WRONLY else "r"


def _descriptors(
    process: ProcessFacts, pipes: Dict[int, List[Tuple[int, int, str]]], sockets: Dict[int, SocketFacts], log: str
) -> None:
    targets = procfs.fd_targets(process.pid)
    process.fd_count = len(targets)
    process.fd_limit = _fd_limit(process.pid)
    process.stdout, process.stderr = targets.get(1, ""), targets.get(2, "")
    process.writes_log = _is_file(process.pid, 1, log) if log and 1 in targets else None
    process.pipes = [end for inode in pipes for end in _pipe_ends(process, inode, pipes[inode])]
    _output_readers(process)
    for fd, target in sorted(targets.items()):
        known = sockets.get(int(target[8:-1])) if target.startswith("socket:[") else None
        if known and len(process.sockets) < SOCKETS:
            process.sockets.append(SocketFacts(fd, known.state, known.local, known.remote))


def _pipe_ends(process: ProcessFacts, inode: int, holders: List[Tuple[int, int, str]]) -> List[PipeEnd]:
    """This process's ends of one pipe. A pipe to itself (an event loop's wake-up) says nothing and is left out, but
    for the one that its main thread waits on: then nobody else can ever write."""
    pid = process.pid
    alone = {holder for holder, _, _ in holders} == {pid} and {mode for _, _, mode in holders} == {"r", "w"}
    ends = []
    for holder, fd, mode in holders:
        if holder != pid or (alone and not (mode == "r" and fd == process.syscall_fd)):
            continue
        peers: Set[int] = {other for other, _, theirs in holders if theirs != mode} - ({pid} if alone else set())
        ends.append(PipeEnd(fd, inode, mode, sorted(peers), own_writer=alone and not _held_elsewhere(pid, inode)))
    return ends


def _held_elsewhere(pid: int, inode: int) -> bool:
    """Whether any other process of the host has that pipe open."""
    return bool(_holders(inode) - {pid})


def _holders(inode: int) -> Set[int]:
    name = f"pipe:[{inode}]"
    return {pid for pid in procfs.pids() if name in procfs.fd_targets(pid).values()}


def _output_readers(process: ProcessFacts) -> None:
    """Who reads the pipe into which the main thread cannot write its log; the reader is no part of the server."""
    target = {1: process.stdout, 2: process.stderr}.get(process.syscall_fd, "")
    if not target.startswith("pipe:["):
        return
    inode = int(target[6:-1])
    peers = sorted(_holders(inode) - {process.pid})[:PEERS]
    states = "".join(stat.state for pid in peers if (stat := procfs.read_stat(pid)))
    process.pipes = [end for end in process.pipes if end.fd != process.syscall_fd]
    process.pipes.append(PipeEnd(process.syscall_fd, inode, "w", peers, peer_states=states))


def _is_file(pid: int, fd: int, path: str) -> Optional[bool]:
    try:
        return os.path.samestat(os.stat(f"{procfs.PROC}/{pid}/fd/{fd}"), os.stat(path))
    except OSError:
        return None


def _fd_limit(pid: int) -> int:
    for line in (procfs.read_text(f"{procfs.PROC}/{pid}/limits", 4096) or "").splitlines():
        if line.startswith("Max open files"):
            soft = line.split()[3]
            return int(soft) if soft.isdigit() else 0
    return 0
