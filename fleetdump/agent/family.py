"""The processes of one server, sampled again and again at little cost.

A full look at a host reads every process. Between two of them only the processes that came since are looked at, and a
command line, whose reading goes through a guard, is kept for as long as the process cannot have changed it unnoticed.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Dict, List, Set, Tuple

from fleetdump.agent import procfs
from fleetdump.agent.logmarks import LogMarks
from fleetdump.agent.procfs import ProcSample, Stat

MEMBERS = ("scheduler", "detokenizer", "data_parallel_controller")
"""Roles without which a server is not whole."""
FULL_SECONDS = 30.0
"""Between two looks at every process of the host: a number may have been given anew to a process of the server's."""
YOUNG_SECONDS = 5.0
"""A process that we have known for less may still become another program."""
TITLE_SECONDS = 10.0
"""A process sets its title once it has imported what it needs: those of no known role are asked again so often."""


@dataclass
class _Member:
    """A process of the server. ``since`` and ``asked`` are clock values: first seen, command line read."""

    start_time: int
    since: float
    asked: float = 0.0
    comm: str = ""
    cmdline: List[str] = field(default_factory=list)


class Family:
    """Processes of the session that ``leader`` leads since ``started``, and their descendants in other sessions."""

    def __init__(self, leader: int, started: int) -> None:
        self._leader, self._started = leader, started
        self._looked_at: Set[int] = set()
        self._members: Dict[int, _Member] = {}
        self._full_at = 0.0

    def sample(self) -> List[ProcSample]:
        """Every member as it is now, by pid."""
        now = time.monotonic()
        self._find(now)
        samples = []
        for pid, member in sorted(self._members.items()):
            stat = procfs.read_stat(pid)
            if stat is None or stat.start_time != member.start_time:
                del self._members[pid]
                continue
            samples.append(procfs.sample(stat, self._cmdline(member, stat, now)))
        return procfs.disown_forks(samples)

    def _find(self, now: float) -> None:
        if now - self._full_at >= FULL_SECONDS:
            self._full_at = now
            self._looked_at = set()
        present = set(procfs.pids())
        for pid in sorted(present - self._looked_at):
            stat = procfs.read_stat(pid)
            known = self._members.get(pid)
            if stat is None or (known is not None and known.start_time == stat.start_time):
                continue
            if self._belongs(stat):
                self._members[pid] = _Member(stat.start_time, now)
        self._looked_at = present

    def _belongs(self, stat: Stat) -> bool:
        related = stat.pid == self._leader or stat.sid == self._leader or stat.ppid in self._members
        return related and stat.start_time >= self._started

    @staticmethod
    def _cmdline(member: _Member, stat: Stat, now: float) -> List[str]:
        if stat.state in "ZXx":
            return []
        young = now - member.since < YOUNG_SECONDS
        nameless = procfs.role_of(member.cmdline, stat.comm) == "other" and now - member.asked >= TITLE_SECONDS
        if young or nameless or member.comm != stat.comm or not member.cmdline:
            member.comm, member.asked = stat.comm, now
            member.cmdline = procfs.read_cmdline(stat.pid)
        return member.cmdline


class RollCall:
    """Who of a server's members was there and is gone, in words. A rank is known by its process, or, where it died
    before anybody looked, by what it has logged."""

    def __init__(self) -> None:
        self._seen: Dict[Tuple[int, int], str] = {}
        self._absent: Set[str] = set()
        self._lost: Set[str] = set()

    @property
    def is_whole(self) -> bool:
        """Whether nobody was missing at the last look."""
        return not (self._absent or self._lost)

    def call(self, processes: List[ProcSample], marks: LogMarks, ranks: int) -> List[str]:
        """Take the next look; ``ranks`` are the schedulers of a server that is ready (0: not known to be there)."""
        for process in processes:
            if process.role in MEMBERS:
                who = f"{process.role} {process.rank}" if process.rank else process.role
                self._seen[(process.pid, process.start_time)] = f"{who} (pid {process.pid})"
        self._lost |= {who for (pid, start), who in self._seen.items() if not procfs.is_alive(pid, start)}
        if not self._lost:
            # The log is read after the processes: who has just begun has logged, and was not there yet.
            absent = set(_absent(processes, marks, ranks))
            self._lost = absent & self._absent
            self._absent = absent
        return sorted(self._lost)


def _absent(processes: List[ProcSample], marks: LogMarks, ranks: int) -> List[str]:
    """Schedulers that have logged, or must be there, and have no process. Counted, since names of a rank in titles and
    in the log need not agree."""
    there = [process for process in processes if process.role == "scheduler"]
    wanted = max(len(marks.ranks), ranks)
    if len(there) >= wanted or not any(process.role in MEMBERS for process in processes):
        return []
    names = sorted(set(marks.ranks) - {str(process.rank) for process in there})
    if len(names) == wanted - len(there):
        return [f"scheduler {name}" for name in names]
    return [f"{wanted - len(there)} of {wanted} schedulers"]
