"""Facts about processes from /proc: who they are, what they did, which ports they own.

``parse_*`` functions are pure (text in, dataclass out); the others read /proc. Every read is bounded, and a process
that vanishes or belongs to somebody else gives None or an empty answer, never an exception.
"""

from __future__ import annotations

import os
import re
import threading
import time
from dataclasses import dataclass, field
from typing import Dict, List, Optional, Set

from fleetdump.agent.guard import Guard, Stuck

PROC = "/proc"
GUARD_SECONDS = 0.5
BLOCKED_SECONDS = 30.0
"""How long a process counts as blocked after a read of its memory did not return within ``GUARD_SECONDS``."""
_blocked: Dict[int, float] = {}
_local = threading.local()
READ_LIMIT = 1 << 20
PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
TICKS_PER_SECOND = os.sysconf("SC_CLK_TCK")

TCP_LISTEN = "0A"
COMPILERS = frozenset(
    {"nvcc", "cicc", "ptxas", "fatbinary", "nvlink", "cudafe++", "ninja", "make", "cmake", "as", "ld", "collect2"}
    | {"cc", "cc1", "cc1plus", "gcc", "g++", "c++", "clang", "clang++"}
)

_SCHEDULER = re.compile(r"(?:sglang::scheduler|VLLM::Worker)(?P<suffix>(?:_[A-Z_]*?\d+)*)")
_TITLE_PART = re.compile(r"_(?P<name>DP|PP|ATTN_CP|MOE_DP|TP|EP)(?P<value>\d+)")
_STAT = re.compile(r"(?P<pid>\d+) \((?P<comm>.*)\) (?P<rest>[A-Za-z] .*)", re.DOTALL)


@dataclass(frozen=True)
class Rank:
    """Place of a scheduler in the server's parallel layout; ranks order by (dp, pp, tp)."""

    dp: int = 0
    pp: int = 0
    tp: int = 0
    ep: int = 0

    def __str__(self) -> str:
        """As in SGLang's log prefix, for instance ``TP3`` or ``DP1 TP3``."""
        parts = [f"{name}{value}" for name, value in (("DP", self.dp), ("PP", self.pp)) if value]
        return " ".join([*parts, f"TP{self.tp}"])


@dataclass
class Stat:
    """/proc/<pid>/stat. Times are clock ticks (``TICKS_PER_SECOND``); ``start_time`` counts from boot."""

    pid: int
    comm: str
    state: str
    ppid: int
    sid: int
    majflt: int
    utime: int
    stime: int
    threads: int
    start_time: int
    rss_bytes: int
    processor: int


@dataclass
class ProcSample:
    """One process at one moment. CPU times are clock ticks of all its threads, bytes are totals since its start;
    ``voluntary``/``involuntary`` are context switches of the main thread. ``io_known`` is False where
    /proc/<pid>/io may not be read: its four counters are 0 then."""

    pid: int
    ppid: int
    sid: int
    start_time: int
    state: str
    comm: str
    cmdline: List[str]
    role: str
    rank: Optional[Rank]
    threads: int = 0
    utime: int = 0
    stime: int = 0
    majflt: int = 0
    rss_bytes: int = 0
    processor: int = 0
    voluntary: int = 0
    involuntary: int = 0
    rchar: int = 0
    wchar: int = 0
    read_bytes: int = 0
    write_bytes: int = 0
    io_known: bool = False


@dataclass
class PortOwner:
    """The process that listens on a TCP port, as far as this user may see (pid 0: someone does, but hidden)."""

    port: int
    pid: int
    start_time: int = 0
    cmdline: List[str] = field(default_factory=list)


# --------------------------------------------------------------------------- parsing
def parse_stat(text: str) -> Optional[Stat]:
    """Fields of /proc/<pid>/stat; a command name may hold spaces and parentheses."""
    match = _STAT.match(text)
    if not match:
        return None
    rest = match["rest"].split()
    if len(rest) < 37:
        return None
    return Stat(
        pid=int(match["pid"]),
        comm=match["comm"],
        state=rest[0],
        ppid=int(rest[1]),
        sid=int(rest[3]),
        majflt=int(rest[9]),
        utime=int(rest[11]),
        stime=int(rest[12]),
        threads=int(rest[17]),
        start_time=int(rest[19]),
        rss_bytes=int(rest[21]) * PAGE_BYTES,
        processor=int(rest[36]),
    )


def parse_fields(text: str) -> Dict[str, str]:
    """``name: value`` lines, as in /proc/<pid>/status, io and fdinfo."""
    pairs = (line.partition(":") for line in text.splitlines())
    return {name.strip(): value.strip() for name, colon, value in pairs if colon}


def parse_listeners(text: str) -> Dict[int, Set[int]]:
    """Listening ports of /proc/net/tcp or tcp6, each with the socket inodes that listen on it."""
    listeners: Dict[int, Set[int]] = {}
    for line in text.splitlines()[1:]:
        columns = line.split()
        if len(columns) > 9 and columns[3] == TCP_LISTEN:
            port = int(columns[1].rpartition(":")[2], 16)
            listeners.setdefault(port, set()).add(int(columns[9]))
    return listeners


def rank_of(cmdline: List[str]) -> Optional[Rank]:
    """The rank in a scheduler's process title (``sglang::scheduler_DP0_TP3_EP3``); None for other processes.
    A part that the title leaves out has size 1, so its rank is 0."""
    match = _SCHEDULER.match(cmdline[0]) if cmdline else None
    if not match:
        return None
    parts = {part["name"]: int(part["value"]) for part in _TITLE_PART.finditer(match["suffix"])}
    return Rank(parts.get("DP", 0), parts.get("PP", 0), parts.get("TP", 0), parts.get("EP", 0))


def role_of(cmdline: List[str], comm: str = "") -> str:
    """launcher, scheduler, detokenizer, data_parallel_controller, tokenizer_worker, compiler, compile_worker (of
    torch inductor), resource_tracker or other. Of vLLM: launcher (its API server), engine (the core), scheduler (a
    worker)."""
    title = cmdline[0] if cmdline else ""
    if title.startswith("VLLM::"):
        return "scheduler" if _SCHEDULER.match(title) else "engine" if "EngineCore" in title else "other"
    if title.startswith("sglang::"):
        return re.split(r"[_\d:]*$|_(?=[A-Z]+\d)|:(?=\d)", title[len("sglang::") :])[0] or "other"
    if os.path.basename(title) in COMPILERS or comm in COMPILERS:
        return "compiler"
    joined = " ".join(cmdline)
    if "torch/_inductor/compile_worker" in joined or "torch._inductor.compile_worker" in joined:
        return "compile_worker"
    if "resource_tracker" in joined:
        return "resource_tracker"
    if (
        "sglang.launch_server" in joined
        or "vllm.entrypoints" in joined
        or re.search(r"\b(?:sglang|vllm) serve\b", joined)
    ):
        return "launcher"
    return "other"


def _titles_of(stat: Stat) -> List[str]:
    """Of a living process whose command line cannot be read, the title that the kernel's 15 characters stand for."""
    return [
        title
        for title in ("sglang::scheduler", "sglang::detokenizer")
        if title[:15] == stat.comm and stat.state not in "ZXx"
    ]


# --------------------------------------------------------------------------- reading
def read_text(path: str, limit: int = READ_LIMIT) -> Optional[str]:
    """At most ``limit`` bytes of a file as text (bytes that are no UTF-8 are replaced); None when it can't be read."""
    try:
        with open(path, "rb") as file:
            return file.read(limit).decode("utf-8", "replace")
    except OSError:
        return None


def read_link(path: str) -> Optional[str]:
    """Target of a link such as /proc/<pid>/fd/1; None when it can't be read."""
    try:
        return os.readlink(path)
    except OSError:
        return None


def pids() -> List[int]:
    """All process ids of this pid namespace."""
    return [int(name) for name in os.listdir(PROC) if name.isdigit()]


def read_stat(pid: int) -> Optional[Stat]:
    """/proc/<pid>/stat, which never blocks, whatever state the process is in."""
    text = read_text(f"{PROC}/{pid}/stat", 4096)
    return parse_stat(text) if text else None


def start_time(pid: int) -> Optional[int]:
    """Clock ticks after boot at which ``pid`` started: with the pid they name one process. None when there is none."""
    stat = read_stat(pid)
    return stat.start_time if stat else None


def is_alive(pid: int, started: Optional[int] = None) -> bool:
    """Whether ``pid`` runs and, if given, is the process that began at ``started``; a zombie does not run."""
    stat = read_stat(pid)
    return stat is not None and stat.state not in "ZXx" and started in (None, stat.start_time)


def read_cmdline(pid: int) -> List[str]:
    """Arguments of a process, at most 64 KiB of them. Empty when reading them blocks: it takes the memory lock of the
    process, which one that hangs in the kernel may hold for ever."""
    text = read_guarded(pid, "cmdline", 1 << 16)
    return [part for part in text.split("\0") if part] if text else []


def read_guarded(pid: int, name: str, limit: int = READ_LIMIT) -> Optional[str]:
    """``read_text`` of a file in /proc/<pid> whose reading may block; None when it does. A process that blocked once
    is not asked again for ``BLOCKED_SECONDS``."""
    if time.monotonic() - _blocked.get(pid, -BLOCKED_SECONDS) < BLOCKED_SECONDS:
        return None
    guard = getattr(_local, "guard", None) or Guard(GUARD_SECONDS)
    _local.guard = guard
    try:
        return guard.call(lambda: read_text(f"{PROC}/{pid}/{name}", limit))
    except Stuck:
        _blocked[pid] = time.monotonic()
        return None


def blocked_pids() -> Set[int]:
    """Processes whose memory could not be read within the limit, lately."""
    now = time.monotonic()
    return {pid for pid, when in _blocked.items() if now - when < BLOCKED_SECONDS}


def read_process(pid: int) -> Optional[ProcSample]:
    """A sample of one process; None when it is gone."""
    stat = read_stat(pid)
    return _sample(stat) if stat else None


def session_processes(sid: int) -> List[ProcSample]:
    """Every process of session ``sid``, by pid."""
    return disown_forks([_sample(stat) for stat in _all_stats() if stat.sid == sid])


def tree(pid: int) -> List[ProcSample]:
    """``pid`` and all its descendants, by pid; empty when ``pid`` is gone."""
    stats = {stat.pid: stat for stat in _all_stats()}
    wanted: Set[int] = {pid} & set(stats)
    grown = True
    while grown:
        children = {stat.pid for stat in stats.values() if stat.ppid in wanted} - wanted
        wanted |= children
        grown = bool(children)
    return disown_forks([_sample(stats[member]) for member in sorted(wanted)])


def server_processes(pid: int, sid: int = 0) -> List[ProcSample]:
    """Processes of a server: ``pid``'s descendants and, if given, its whole session (orphans of a dead launcher)."""
    members = {sample.pid: sample for sample in tree(pid)}
    if sid:
        members.update({sample.pid: sample for sample in session_processes(sid)})
    return [members[member] for member in sorted(members)]


def all_processes() -> List[ProcSample]:
    """Every process of this pid namespace; one that still has the title of a parent that forked it is told apart."""
    return disown_forks([_sample(stat) for stat in _all_stats()])


def root_of(pid: int) -> str:
    """Where the files that ``pid`` sees are for us: ``/proc/<pid>/root`` for a process in another mount namespace or
    root (a container), empty for one that sees what we see."""
    ours, theirs = read_link(f"{PROC}/self/ns/mnt"), read_link(f"{PROC}/{pid}/ns/mnt")
    inside = read_link(f"{PROC}/{pid}/root")
    return f"{PROC}/{pid}/root" if (theirs and theirs != ours) or (inside or "/") != "/" else ""


def socket_inodes(pid: int) -> Set[int]:
    """Inodes of the sockets that a process has open; empty when its descriptors may not be read."""
    return {int(target[8:-1]) for target in fd_targets(pid).values() if target.startswith("socket:[")}


def fd_targets(pid: int) -> Dict[int, str]:
    """What each descriptor of a process points to."""
    try:
        names = os.listdir(f"{PROC}/{pid}/fd")
    except OSError:
        return {}
    links = {int(name): read_link(f"{PROC}/{pid}/fd/{name}") for name in names}
    return {fd: target for fd, target in links.items() if target is not None}


def listeners(pid: int) -> Dict[int, Set[int]]:
    """Listening ports, with socket inodes, of the network namespace that ``pid`` lives in."""
    found: Dict[int, Set[int]] = {}
    for name in ("tcp", "tcp6"):
        text = read_text(f"{PROC}/{pid}/net/{name}", 16 << 20)
        for port, inodes in parse_listeners(text or "").items():
            found.setdefault(port, set()).update(inodes)
    return found


def listening_ports(pid: int) -> List[int]:
    """Ports that this process itself listens on, in its own network namespace."""
    own = socket_inodes(pid)
    return sorted(port for port, inodes in listeners(pid).items() if inodes & own) if own else []


def port_owner(port: int) -> Optional[PortOwner]:
    """Who listens on ``port`` in our own network namespace; None when nobody does."""
    inodes = listeners(os.getpid()).get(port)
    if not inodes:
        return None
    for stat in _all_stats():
        if inodes & socket_inodes(stat.pid):
            return PortOwner(port, stat.pid, stat.start_time, read_cmdline(stat.pid))
    return PortOwner(port, 0)


def _all_stats() -> List[Stat]:
    return [stat for stat in map(read_stat, pids()) if stat]


def disown_forks(samples: List[ProcSample]) -> List[ProcSample]:
    """The samples, put right: a child shows its parent's title until it runs a program of its own, and for a moment of
    that no command line at all but the kernel's short name; neither makes it a second scheduler."""
    parents = {sample.pid: (sample.cmdline, sample.role) for sample in samples}
    for sample in samples:
        cmdline, role = parents.get(sample.ppid, ([], ""))
        if (sample.cmdline and cmdline == sample.cmdline) or (not sample.cmdline and role == sample.role):
            sample.role, sample.rank = "other", None
    return samples


def _sample(stat: Stat) -> ProcSample:
    return sample(stat, read_cmdline(stat.pid))


def sample(stat: Stat, cmdline: List[str]) -> ProcSample:
    """A sample of the process that ``stat`` is of, for whoever knows its command line already."""
    titles = cmdline or _titles_of(stat)
    status = parse_fields(read_text(f"{PROC}/{stat.pid}/status", 1 << 16) or "")
    io = parse_fields(read_text(f"{PROC}/{stat.pid}/io", 4096) or "")
    return ProcSample(
        pid=stat.pid,
        ppid=stat.ppid,
        sid=stat.sid,
        start_time=stat.start_time,
        state=stat.state,
        comm=stat.comm,
        cmdline=cmdline,
        role=role_of(titles, stat.comm),
        rank=rank_of(cmdline),
        threads=stat.threads,
        utime=stat.utime,
        stime=stat.stime,
        majflt=stat.majflt,
        rss_bytes=stat.rss_bytes,
        processor=stat.processor,
        voluntary=int(status.get("voluntary_ctxt_switches", 0)),
        involuntary=int(status.get("nonvoluntary_ctxt_switches", 0)),
        rchar=int(io.get("rchar", 0)),
        wchar=int(io.get("wchar", 0)),
        read_bytes=int(io.get("read_bytes", 0)),
        write_bytes=int(io.get("write_bytes", 0)),
        io_known=bool(io),
    )
