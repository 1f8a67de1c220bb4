"""The control group of a server: its memory and kills, the CPU time that was withheld, and pressure on the host."""

from __future__ import annotations

import os
import re
from typing import Dict, List, Optional, Tuple

from fleetdump.agent import procfs
from fleetdump.agent.evidence_host import CgroupFacts, CpuFacts, Pressure

ROOT = "/sys/fs/cgroup"
UNLIMITED = 1 << 60
"""Version 1 writes "no limit" as a number near 2^63."""
_PRESSURE = re.compile(r"(some|full) avg10=([\d.]+)")
Counters = Dict[str, int]


def cgroup_path(pid: int, controller: str) -> Tuple[str, str]:
    """(path as the kernel names it, folder below ``ROOT``) of the group of ``pid`` for ``controller``; the folder is
    empty where it is not mounted here. In a container the path may be the host's: then the mount itself is the group.
    """
    groups = {}
    for line in (procfs.read_text(f"{procfs.PROC}/{pid}/cgroup") or "").splitlines():
        _, controllers, path = line.split(":", 2)
        groups.update(dict.fromkeys(controllers.split(","), path))
    if controller in groups:
        return groups[controller], _folder(f"{ROOT}/{controller}", groups[controller])
    path = groups.get("", "")
    return path, _folder(ROOT, path) or _folder(f"{ROOT}/unified", path)


def _folder(mount: str, path: str) -> str:
    for place in (mount + path.rstrip("/"), mount):
        if path and os.path.exists(f"{place}/cgroup.procs"):
            return place
    return ""


def cgroup(pid: int) -> CgroupFacts:
    """The group of ``pid`` now; ``throttled`` and kin are totals, ``since`` turns them into differences."""
    facts = CgroupFacts(path=cgroup_path(pid, "memory")[0])
    memory, cpu = cgroup_path(pid, "memory")[1], cgroup_path(pid, "cpu")[1]
    facts.memory_bytes = _number(memory, "memory.current", "memory.usage_in_bytes")
    limit = _number(memory, "memory.max", "memory.limit_in_bytes")
    facts.memory_limit = limit if limit < UNLIMITED else 0
    for name in ("memory.events", "memory.oom_control"):
        counters = _counters(memory, name)
        facts.memory_events.update({k: v for k, v in counters.items() if k not in ("under_oom", "oom_kill_disable")})
    facts.cpu_limit = _cpu_limit(cpu)
    stat = _counters(cpu, "cpu.stat")
    facts.periods, facts.throttled = stat.get("nr_periods", 0), stat.get("nr_throttled", 0)
    nanoseconds = stat.get("throttled_time", 1000 * stat.get("throttled_usec", 0))
    facts.throttled_seconds = round(nanoseconds / 1e9, 3)
    return facts


def since(before: CgroupFacts, now: CgroupFacts) -> CgroupFacts:
    """``now`` with what was withheld since ``before``."""
    now.periods -= before.periods
    now.throttled -= before.throttled
    now.throttled_seconds = round(now.throttled_seconds - before.throttled_seconds, 3)
    return now


def cpus() -> CpuFacts:
    """Cores that this process may use, and how many tasks want one."""
    words = (procfs.read_text(f"{procfs.PROC}/loadavg") or "0 0 0 0/0").split()
    return CpuFacts(len(os.sched_getaffinity(0)), float(words[0]), int(words[3].partition("/")[0]))


def pressures(pid: int) -> List[Pressure]:
    """Pressure (PSI) of the host and of the group of ``pid``; empty where the kernel does not measure it."""
    _, folder = cgroup_path(pid, "memory")
    found = []
    for resource in ("cpu", "io", "memory"):
        places = {"host": f"{procfs.PROC}/pressure/{resource}", "cgroup": f"{folder}/{resource}.pressure"}
        for scope, path in places.items():
            averages = dict(_PRESSURE.findall(procfs.read_text(path) or ""))
            if averages:
                some, full = float(averages.get("some", 0)), float(averages.get("full", 0))
                found.append(Pressure(resource, scope, some, full))
    return found


def _counters(folder: str, name: str) -> Counters:
    pairs = (line.split() for line in (procfs.read_text(f"{folder}/{name}") or "").splitlines() if folder)
    return {words[0]: int(words[1]) for words in pairs if len(words) == 2 and words[1].isdigit()}


def _number(folder: str, *names: str) -> int:
    for name in names:
        text = (procfs.read_text(f"{folder}/{name}") or "").strip() if folder else ""
        if text:
            return int(text) if text.isdigit() else 0
    return 0


def _cpu_limit(folder: str) -> float:
    """Cores that the group may use in the mean; 0: no limit."""
    words = (procfs.read_text(f"{folder}/cpu.max") or "").split() if folder else []
    quota: Optional[str] = words[0] if words else None
    period = words[1] if words else ""
    if quota is None and folder:
        quota = (procfs.read_text(f"{folder}/cpu.cfs_quota_us") or "").strip()
        period = (procfs.read_text(f"{folder}/cpu.cfs_period_us") or "").strip()
    if not quota or not quota.isdigit() or not period.isdigit():
        return 0.0
    return round(int(quota) / int(period), 2)
