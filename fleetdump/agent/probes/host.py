"""The host around a server: kernel log, memory and its pressure, file systems, locks, lock files of compile caches."""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import time
from pathlib import Path
from typing import Dict, FrozenSet, Iterable, Iterator, List, Set, Tuple

from fleetdump.agent import procfs
from fleetdump.agent.evidence_host import (
    DiskFacts,
    LockFacts,
    LockFile,
    MemoryFacts,
)
from fleetdump.agent.probes.bounded import ProbeFailed, run_command
from fleetdump.agent.probes.cgroup import cgroup_path

KERNEL_LINES = 60
KERNEL_RECORDS = 20_000
LOCK_FILES = 20
COMPILE_CACHES = (
    "~/.cache/torch_extensions",
    "~/.cache/flashinfer",
    "~/.cache/tvm-ffi",
    "~/.cache/sglang",
    "~/.cache/deep_gemm",
    "~/.deep_gemm",
    "~/.triton",
)
HUB_CACHES = ("~/.cache/huggingface/hub/.locks", "~/.cache/modelscope/hub")
CACHE_VARIABLES = ("TORCH_EXTENSIONS_DIR", "TRITON_CACHE_DIR", "SGLANG_DG_CACHE_DIR", "FLASHINFER_WORKSPACE_BASE")
LOCK_FOLDERS = 20_000
"""Folders that the search for lock files enters at most."""

FEW_VARIABLES = 3
"""A title that was written over an environment leaves the ends of a few variables."""

_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*$")
_OOM = re.compile(r"Out of memory|oom-kill:|Killed process", re.IGNORECASE)
_KERNEL = re.compile(
    r"Xid|NVRM.*(error|fail|fallen)|oom|Out of memory|Killed process|blocked for more than|nfs: server|"
    r"segfault|I/O error|hung_task|No space left|LustreError|Lustre:.*(evict|lost)|ceph.*(hung|timeout|lost)|"
    r"CIFS.*(time|not respond)|nvme\S* .*(timeout|abort|reset)|\bata\d+.*(failed command|exception)",
    re.IGNORECASE,
)
_MEMCG = re.compile(r"oom-kill:constraint=CONSTRAINT_MEMCG.*oom_memcg=(?P<group>[^,]+).*,pid=(?P<pid>\d+)")
_AT_A_LIMIT = re.compile(r"Memory cgroup out of memory")
_PID = re.compile(r"Killed process (\d+)|oom-kill:.*,pid=(\d+)")
_SINCE_BOOT = re.compile(r"\[\s*(?P<seconds>\d+\.\d+)\]")
_LOCK = re.compile(
    r"\d+: (?P<waits>-> )?(?P<kind>FLOCK|POSIX|OFDLCK)\s+\S+\s+\S+\s+(?P<pid>-?\d+) [0-9a-f]+:[0-9a-f]+:(?P<inode>\d+) "
)


def kernel_log() -> List[str]:
    """Lines of the kernel log that a diagnosis can use: driver events, kills, hung tasks, I/O errors.

    Raises ``ProbeFailed`` when this user may not read it.
    """
    return [line for line in _kernel_text().splitlines() if _KERNEL.search(line)][-KERNEL_LINES:]


def _kernel_text() -> str:
    try:
        output = run_command(["dmesg"], 3.0)
    except ProbeFailed:  # an image without it
        return _kernel_messages()
    if output.status:
        raise ProbeFailed(output.stderr.strip() or "dmesg refused")
    return output.stdout


def _kernel_messages() -> str:
    """The kernel's own records, in the form that dmesg prints: ``priority,number,microseconds,flags;text``."""
    lines: List[str] = []
    try:
        messages = os.open("/dev/kmsg", os.O_RDONLY | os.O_NONBLOCK)
    except OSError as error:
        raise ProbeFailed(f"no dmesg here, and /dev/kmsg: {error.strerror}") from error
    with contextlib.suppress(BlockingIOError), contextlib.closing(os.fdopen(messages, "rb", buffering=0)) as file:
        while len(lines) < KERNEL_RECORDS:
            try:
                record = os.read(file.fileno(), 8192).decode("utf-8", "replace")
            except BrokenPipeError:  # overwritten while we read: the next one follows
                continue
            head, _, text = record.partition(";")
            words = head.split(",")
            if len(words) > 2 and words[2].isdigit():
                lines.append(f"[{int(words[2]) / 1e6:12.6f}] {text.splitlines()[0] if text else ''}")
    return "\n".join(lines)


def oom_lines(lines: Iterable[str], start_time: int, memory: MemoryFacts, group: str) -> List[str]:
    """Lines that name an out-of-memory kill after the clock tick ``start_time`` (0: whenever).

    A kill at the limit of another memory cgroup than ``group``, the server's, is left out: it is another container's on
    the same kernel; so is one of which the lines do not tell the cgroup (the log's beginning is cut off), or where
    ``group`` is not known. Inside a container ``group`` is "/" whatever the kernel calls it: then the group's own count
    of kills in ``memory`` decides.
    """
    earliest = start_time / procfs.TICKS_PER_SECOND
    recent = [line for line in lines if _OOM.search(line) and _seconds_since_boot(line) >= earliest]
    if group == "/" and memory.oom_kills:
        return recent
    limits = {m["pid"]: m["group"] for line in recent if (m := _MEMCG.search(line))}
    above = {pid for pid, limit in limits.items() if group and f"{group}/".startswith(f"{limit.rstrip('/')}/")}
    at_a_limit = {*limits, *(m[1] or m[2] for line in recent if _AT_A_LIMIT.search(line) and (m := _PID.search(line)))}
    foreign = at_a_limit - above
    return [line for line in recent if not (m := _PID.search(line)) or (m[1] or m[2]) not in foreign]


def _seconds_since_boot(line: str) -> float:
    match = _SINCE_BOOT.match(line)
    return float(match["seconds"]) if match else float("inf")


def memory(pid: int) -> MemoryFacts:
    """Memory of the host, kills in the cgroup of ``pid``, and pressure averages over 10 s (percent)."""
    meminfo = procfs.parse_fields(procfs.read_text("/proc/meminfo") or "")
    facts = MemoryFacts(_kib(meminfo.get("MemAvailable", "")), _kib(meminfo.get("MemTotal", "")))
    pressure = procfs.read_text("/proc/pressure/memory") or ""
    for line in pressure.splitlines():
        match = re.match(r"(some|full) avg10=([\d.]+)", line)
        if match:
            setattr(facts, f"pressure_{match[1]}", float(match[2]))
    folder = cgroup_path(pid, "memory")[1]
    for name in ("memory.events", "memory.oom_control"):
        text = procfs.read_text(f"{folder}/{name}") if folder else ""
        kills = re.search(r"^oom_kill (\d+)", text or "", re.MULTILINE)
        facts.oom_kills = int(kills[1]) if kills else facts.oom_kills
    return facts


def _kib(text: str) -> int:
    return int(text.split()[0]) << 10 if text else 0


def disk(use: str, path: str, root: str = "") -> DiskFacts:
    """Free space and inodes of the file system that holds ``path`` (or its nearest existing parent), below ``root``."""
    place = Path(path)
    while not os.path.exists(f"{root}{place}") and place != place.parent:
        place = place.parent
    stat = os.statvfs(f"{root}{place}")
    inodes = stat.f_favail if stat.f_files else -1
    kind = _fstype(place, root)
    return DiskFacts(use, path, stat.f_bavail * stat.f_frsize, stat.f_blocks * stat.f_frsize, inodes, kind)


def _fstype(path: Path, root: str = "") -> str:
    """Kind of file system; ``root`` is empty or ``/proc/<pid>/root``, whose mounts are that process's."""
    real = str(path) if root else os.path.realpath(path)
    mounts = f"{os.path.dirname(root)}/mounts" if root else f"{procfs.PROC}/self/mounts"
    best, kind = "", ""
    for line in (procfs.read_text(mounts) or "").splitlines():
        _, mount, fstype, *_ = line.split(" ")
        mount = mount.replace("\\040", " ")
        inside = real == mount or real.startswith(mount.rstrip("/") + "/")
        if inside and len(mount) >= len(best):
            best, kind = mount, fstype
    return kind


def parse_locks(text: str, pids: Set[int]) -> List[LockFacts]:
    """Waiters of ``/proc/locks`` where one of ``pids`` waits or holds, each with the holder on the line before."""
    found: List[LockFacts] = []
    holder = 0
    for line in text.splitlines():
        match = _LOCK.match(line)
        if not match:
            continue
        pid = max(0, int(match["pid"]))
        if not match["waits"]:
            holder = pid
        elif pid in pids or holder in pids:
            found.append(LockFacts(match["kind"], int(match["inode"]), holder, pid))
    return found


def locks(pids: Set[int]) -> List[LockFacts]:
    """Locks that one of ``pids`` waits for or makes others wait for, with the file's path where known."""
    found = parse_locks(procfs.read_text("/proc/locks") or "", pids)
    for lock in found:
        lock.path = next((p for pid in (lock.waiter, lock.holder) if (p := _path_of_inode(pid, lock.inode))), "")
        lock.fstype = _fstype(Path(lock.path)) if lock.path else ""
        if lock.path and not procfs.is_alive(lock.holder):  # who took it has gone and left it to a child
            lock.holder = _holders({lock.path}, frozenset(one.waiter for one in found)).get(lock.path, 0)
    return found


def _path_of_inode(pid: int, inode: int) -> str:
    files = ((fd, target) for fd, target in procfs.fd_targets(pid).items() if target.startswith("/"))
    return next((target for fd, target in files if _inode(f"{procfs.PROC}/{pid}/fd/{fd}") == inode), "")


def _inode(path: str) -> int:
    try:
        return os.stat(path).st_ino
    except OSError:
        return 0


def lock_files(home: str, environment: Dict[str, str], root: str = "") -> List[LockFile]:
    """Lock files in the compile caches and model hubs' folders below ``home`` (or where ``environment`` puts them),
    the youngest first, each with a process of this host that has it open and whether the kernel knows a lock on it.
    ``root`` as in ``disk``."""
    locked = _locked_inodes()
    found = [
        LockFile(path, round(max(0.0, time.time() - stat.st_mtime), 1), use=use, locked=stat.st_ino in locked)
        for use, folder in lock_folders(home, environment)
        for path, stat in _lock_names(folder, root)
    ]
    youngest = sorted(found, key=lambda lock: lock.age_seconds)[:LOCK_FILES]
    holders = _holders({lock.path for lock in youngest})
    for lock in youngest:
        lock.holder = holders.get(lock.path, 0)
        lock.fstype = _fstype(Path(lock.path).parent, root)
    return youngest


def _lock_names(folder: str, root: str) -> Iterator[Tuple[str, os.stat_result]]:
    """Lock files below ``folder``, each with its facts; one that is gone meanwhile is left out."""
    for place, _, names in itertools.islice(os.walk(root + folder), LOCK_FOLDERS):
        for name in names:
            if name == "lock" or name.endswith((".lock", "_lock")):
                with contextlib.suppress(OSError):
                    yield os.path.join(place, name)[len(root) :], os.stat(os.path.join(place, name))


def _locked_inodes() -> Set[int]:
    matches = map(_LOCK.match, (procfs.read_text("/proc/locks") or "").splitlines())
    return {int(match["inode"]) for match in matches if match}


def _holders(paths: Set[str], but: FrozenSet[int] = frozenset()) -> Dict[str, int]:
    """Which process of this host, none of ``but``, has each of ``paths`` open, as far as this user may see."""
    everybody = [pid for pid in procfs.pids() if pid not in but] if paths else []
    return {target: pid for pid in everybody for target in procfs.fd_targets(pid).values() if target in paths}


def lock_folders(home: str, environment: Dict[str, str]) -> List[Tuple[str, str]]:
    """(use, folder) of everything where lock files may lie."""
    folders = [("compile", cache.replace("~", home, 1)) for cache in COMPILE_CACHES]
    folders += [("compile", environment[name]) for name in CACHE_VARIABLES if environment.get(name)]
    folders += [("hub", cache.replace("~", home, 1)) for cache in HUB_CACHES]
    if environment.get("HF_HUB_CACHE"):
        folders.append(("hub", os.path.join(environment["HF_HUB_CACHE"], ".locks")))
    elif environment.get("HF_HOME"):
        folders.append(("hub", os.path.join(environment["HF_HOME"], "hub", ".locks")))
    return list(dict.fromkeys(folders))


def environment(pids: Iterable[int]) -> Dict[str, str]:
    """The environment that a server was started with, from the first of ``pids`` that still shows it: SGLang's ranks
    write their title over theirs. Values stay inside the agent. Raises ``ProbeFailed`` when none shows it."""
    for pid in pids:
        text = procfs.read_guarded(pid, "environ", 1 << 18) or ""
        pairs = (entry.partition("=") for entry in text.split("\0") if "=" in entry)
        found = {name: value for name, _, value in pairs if _VARIABLE.match(name)}
        if "PATH" in found or len(found) > FEW_VARIABLES:
            return found
    raise ProbeFailed("the environment of no process of the server can be read")
