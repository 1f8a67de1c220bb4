"""The host around a server: kernel log, memory and its pressure, file systems, locks, lock files of compile caches."""

from __future__ import annotations

import itertools
import os
import re
import time
from pathlib import Path
from typing import Dict, Iterable, List, Set, Tuple

from fleetdump.agent import procfs
from fleetdump.agent.evidence_types import DiskFacts, LockFacts, LockFile, MemoryFacts
from fleetdump.agent.probes.bounded import run_command

KERNEL_LINES = 60
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

_OOM = re.compile(r"Out of memory|oom-kill|Killed process", re.IGNORECASE)
_KERNEL = re.compile(
    r"Xid|NVRM.*(error|fail|fallen)|oom|Out of memory|Killed process|blocked for more than|nfs: server|"
    r"segfault|I/O error|hung_task|No space left",
    re.IGNORECASE,
)
_SINCE_BOOT = re.compile(r"\[\s*(?P<seconds>\d+\.\d+)\]")
_LOCK = re.compile(
    r"\d+: (?P<waits>-> )?(?P<kind>FLOCK|POSIX|OFDLCK)\s+\S+\s+\S+\s+(?P<pid>-?\d+) [0-9a-f]+:[0-9a-f]+:(?P<inode>\d+) "
)


def kernel_log() -> List[str]:
    """Lines of the kernel log that a diagnosis can use: driver events, kills, hung tasks, I/O errors."""
    output = run_command(["dmesg"], 3.0)
    if output.status:
        raise PermissionError(output.stderr.strip() or "dmesg refused")
    return [line for line in output.stdout.splitlines() if _KERNEL.search(line)][-KERNEL_LINES:]


def oom_lines(lines: Iterable[str], start_time: int) -> List[str]:
    """Lines that name an out-of-memory kill after the clock tick ``start_time`` (0: whenever)."""
    earliest = start_time / procfs.TICKS_PER_SECOND
    return [line for line in lines if _OOM.search(line) and _seconds_since_boot(line) >= earliest]


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
    facts.oom_kills = _oom_kills(pid)
    return facts


def _kib(text: str) -> int:
    return int(text.split()[0]) << 10 if text else 0


def _oom_kills(pid: int) -> int:
    for line in (procfs.read_text(f"/proc/{pid}/cgroup") or "").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers in ("", "memory"):
            base = f"/sys/fs/cgroup{path}" if not controllers else f"/sys/fs/cgroup/memory{path}"
            name = "memory.events" if not controllers else "memory.oom_control"
            match = re.search(r"^oom_kill (\d+)", procfs.read_text(f"{base}/{name}") or "", re.MULTILINE)
            if match:
                return int(match[1])
    return 0


def disk(use: str, path: str) -> DiskFacts:
    """Free space and inodes of the file system that holds ``path`` (or its nearest existing parent)."""
    place = Path(path)
    while not place.exists() and place != place.parent:
        place = place.parent
    stat = os.statvfs(place)
    inodes = stat.f_favail if stat.f_files else -1
    return DiskFacts(use, path, stat.f_bavail * stat.f_frsize, stat.f_blocks * stat.f_frsize, inodes, _fstype(place))


def _fstype(path: Path) -> str:
    real = os.path.realpath(path)
    best, kind = "", ""
    for line in (procfs.read_text("/proc/self/mounts") or "").splitlines():
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
    return found


def _path_of_inode(pid: int, inode: int) -> str:
    files = ((fd, target) for fd, target in procfs.fd_targets(pid).items() if target.startswith("/"))
    return next((target for fd, target in files if _inode(f"{procfs.PROC}/{pid}/fd/{fd}") == inode), "")


def _inode(path: str) -> int:
    try:
        return os.stat(path).st_ino
    except OSError:
        return 0


def lock_files(home: str, pids: Iterable[int], environment: Dict[str, str]) -> List[LockFile]:
    """Lock files in the compile caches and model hubs' folders below ``home`` (or where ``environment`` puts them),
    the youngest first, each with the process of ``pids`` that has it open."""
    open_paths: Dict[str, int] = {target: pid for pid in pids for target in procfs.fd_targets(pid).values()}
    found: List[LockFile] = []
    now = time.time()
    for use, cache in lock_folders(home, environment):
        for folder, _, names in itertools.islice(os.walk(cache), LOCK_FOLDERS):
            for name in names:
                if name == "lock" or name.endswith((".lock", "_lock")):
                    path = os.path.join(folder, name)
                    age = max(0.0, now - os.stat(path).st_mtime)
                    kind = "" if len(found) > LOCK_FILES else _fstype(Path(folder))
                    found.append(LockFile(path, round(age, 1), open_paths.get(path, 0), use, kind))
    return sorted(found, key=lambda lock: lock.age_seconds)[:LOCK_FILES]


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


def environment(pid: int) -> Dict[str, str]:
    """The environment that the process was started with; values stay inside the agent."""
    text = procfs.read_text(f"{procfs.PROC}/{pid}/environ", 1 << 18) or ""
    pairs = (entry.partition("=") for entry in text.split("\0") if "=" in entry)
    return {name: value for name, _, value in pairs}
