"""Processes of a server between two samples: CPU, I/O and switches, threads, where the main thread is, descriptors."""

from __future__ import annotations

import os
import signal
import struct
import time
from dataclasses import dataclass, field
from typing import Callable, Dict, List, Optional, Tuple

from fleetdump.agent import procfs
from fleetdump.agent.evidence_process import ProcessFacts, ThreadFacts
from fleetdump.agent.guard import Guard, Stuck
from fleetdump.agent.probes.descriptors import Holders, Outside, Sockets, collect_pipes, describe
from fleetdump.agent.scrub import scrub_argv

DETAILED_ROLES = frozenset(
    {"launcher", "scheduler", "engine", "detokenizer", "data_parallel_controller", "tokenizer_worker", "compiler"}
)
"""Roles whose threads and descriptors are looked at; 60 idle compile workers are not."""
BUSY_THREADS = 8
FD_SYSCALLS = {"0", "1", "16", "17", "18", "19", "20", "44", "45", "46", "47", "73"}
"""x86-64: read, write, ioctl, pread, pwrite, readv, writev, send/recv, flock: their first argument is a descriptor."""
AARCH64 = {
    "63": "0", "64": "1", "29": "16", "67": "17", "68": "18", "65": "19", "66": "20", "206": "44", "207": "45",
    "211": "46", "212": "47", "32": "73", "73": "7", "22": "232", "98": "202", "101": "35", "115": "230", "203": "42",
}  # fmt: skip
"""Numbers of the same calls on ARM, and of (p)poll, epoll, futex, sleeps and connect: evidence has x86-64's alone."""
POLL = "7"
POLLFD = struct.Struct("=ihh")
POLLED = 64
DETAIL_SECONDS = 1.0
COMPILERS = 32
BYSTANDERS = 100
"""Processes of no particular role that are listed; and compilers that are looked at closely."""


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
    """All processes of a server; ``at`` is a ``time.monotonic()`` value, and ``read_at`` when the threads of each
    process were read: on a crowded host the last one's turn comes a second after the first one's. ``target`` is the
    process that was asked for: it is looked at closely whatever it is."""

    at: float
    processes: Dict[int, procfs.ProcSample] = field(default_factory=dict)
    threads: Dict[int, Dict[int, Ticks]] = field(default_factory=dict)
    read_at: Dict[int, float] = field(default_factory=dict)
    target: int = 0


def snapshot(pid: int, session: int, now: float) -> Snapshot:
    """Sample the launcher ``pid``, its descendants and its session."""
    samples = {sample.pid: sample for sample in procfs.server_processes(pid, session)}
    taken = Snapshot(now, samples, target=pid)
    for member, sample in samples.items():
        if sample.role in DETAILED_ROLES or member == pid:
            taken.read_at[member] = time.monotonic()
            taken.threads[member] = read_threads(member)
    return taken


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


@dataclass
class Compared:
    """Facts of all processes that are there now. ``blocked``: those that could not be looked at closely, since the
    kernel does not answer; ``left_out``: how many bystanders are not listed."""

    processes: List[ProcessFacts] = field(default_factory=list)
    blocked: List[int] = field(default_factory=list)
    left_out: int = 0


def compare(first: Snapshot, second: Snapshot, log: str) -> Compared:
    """What each process that is there now did between the two snapshots; the first one's dead are left out. Each is
    looked at within ``DETAIL_SECONDS``; ``log`` is the watched file as we see it."""
    found = Compared()
    facts = _without_crowd([_counted(first, second, pid) for pid in sorted(second.processes)], found)
    guard = Guard(DETAIL_SECONDS)
    pipes: Holders = {}
    members = [process.pid for process in facts if process.role in DETAILED_ROLES or process.pid == second.target]
    sockets, outside = Sockets(members), Outside(members)
    stuck = procfs.blocked_pids() & {process.pid for process in facts}
    for process in facts:
        if process.pid not in stuck and not _within(guard, lambda p=process: _locate(p)):  # type: ignore[misc]
            stuck.add(process.pid)
        if process.pid in members and process.pid not in stuck:
            _within(guard, lambda p=process: collect_pipes(p.pid, pipes))  # type: ignore[misc]
    for process in facts:
        if (
            process.pid in members
            and process.pid not in stuck
            and not _within(guard, lambda p=process: describe(p, pipes, outside, sockets, log))  # type: ignore[misc]
        ):
            stuck.add(process.pid)
    guard.close()
    _name_the_only_unknown(facts)
    found.processes, found.blocked = facts, sorted(stuck)
    return found


def _within(guard: Guard, look: Callable[[], None]) -> bool:
    try:
        guard.call(look)
    except Stuck:
        return False
    return True


def _without_crowd(facts: List[ProcessFacts], found: Compared) -> List[ProcessFacts]:
    """``facts`` with few bystanders, and compilers beyond the first ones made bystanders."""
    compilers = [process for process in facts if process.role == "compiler"]
    plain = [process for process in facts if process.role not in DETAILED_ROLES] + compilers[COMPILERS:]
    dropped = {process.pid for process in plain[BYSTANDERS:]}
    found.left_out = len(dropped)
    return [process for process in facts if process.pid not in dropped]


def _name_the_only_unknown(facts: List[ProcessFacts]) -> None:
    """A scheduler whose title cannot be read is the one rank that nobody else is."""
    ranks = [process for process in facts if process.role == "scheduler" and process.state not in "ZX"]
    unknown = [process for process in ranks if process.rank is None]
    absent = set(range(len(ranks))) - {process.rank for process in ranks}
    if len(unknown) == 1 and len(absent) == 1:
        unknown[0].rank = absent.pop()
        unknown[0].label = f"TP{unknown[0].rank}"


def _counted(first: Snapshot, second: Snapshot, pid: int) -> ProcessFacts:
    """What the two snapshots tell."""
    now = second.processes[pid]
    before = first.processes.get(pid)
    if before is None or before.start_time != now.start_time:
        before = now
    elapsed = max(second.at - first.at, 1e-3)
    ticks = now.utime + now.stime - before.utime - before.stime
    between = max(second.read_at.get(pid, second.at) - first.read_at.get(pid, first.at), 1e-3)
    threads = [
        _thread(tid, first.threads.get(pid, {}).get(tid), ticks_now, between)
        for tid, ticks_now in second.threads.get(pid, {}).items()
    ]
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
        write_bytes_delta=now.write_bytes - before.write_bytes,
        majflt_delta=now.majflt - before.majflt,
        main=next((thread for thread in threads if thread.tid == pid), None),
        threads=sorted((t for t in threads if t.tid != pid), key=lambda t: t.cpu, reverse=True)[:BUSY_THREADS],
        thread_count=now.threads,
        exit_signal=exit_signal(pid) if now.state in "ZX" else 0,
        readable=now.io_known or now.state in "ZX",
    )


def _locate(process: ProcessFacts) -> None:
    """Where its threads are, in the kernel."""
    pid = process.pid
    for thread in [process.main, *process.threads]:
        if thread:
            thread.wchan, thread.syscall = where_is(pid, thread.tid)
    status = procfs.parse_fields(procfs.read_text(f"{procfs.PROC}/{pid}/status", 1 << 16) or "")
    process.tracer_pid = int(status.get("TracerPid", 0))
    process.kill_pending = _has_kill(status.get("ShdPnd", "")) or _has_kill(status.get("SigPnd", ""))
    if process.main:
        process.syscall_fd = _descriptor_of(process.main.syscall)
        process.polled_fds = polled_descriptors(pid, process.main.syscall)
    if process.main:
        process.kernel_stack = kernel_stack(pid)


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
        demand=_demand(before, now, elapsed),
        user_share=round(user / (user + system), 3) if user + system else 0.0,
        voluntary=round((now.voluntary - before.voluntary) / elapsed, 1),
    )


def _demand(before: Ticks, now: Ticks, elapsed: float) -> float:
    """As ``ThreadFacts.demand``. The kernel counts a wait for a core when it ends, which on a crowded host may be after
    the second sample. But who could run at both of them and has not gone to sleep between wanted a core all the time.
    """
    if before is not now and before.state == now.state == "R" and before.voluntary == now.voluntary:
        return 1.0
    return round(min(1.0, (now.wanted_ns - before.wanted_ns) / 1e9 / elapsed), 3)


def where_is(pid: int, tid: int) -> Tuple[str, str]:
    """Kernel function a thread sleeps in, and its system call as the kernel prints it ("running": none)."""
    base = f"{procfs.PROC}/{pid}/task/{tid}"
    wchan = (procfs.read_text(f"{base}/wchan", 256) or "").strip()
    syscall = (procfs.read_text(f"{base}/syscall", 256) or "").strip()
    if os.uname().machine == "aarch64":
        number, _, rest = syscall.partition(" ")
        syscall = f"{AARCH64.get(number, number)} {rest}".strip()
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
