"""Which of the server's processes live, and which are missing."""

from __future__ import annotations

import re
from functools import cached_property

from fleetdump.agent.evidence_engine import RankMarks
from fleetdump.agent.evidence_process import ProcessFacts
from fleetdump.diagnosis.answers import Answers

ENGINE_NAMES = ("sglang::sched", "VLLM::Worker", "VLLM::Engine")
"""What the names of ranks begin with, in the 15 characters that the kernel keeps of a dead one's."""
INTERPRETERS = ("python", "pt_main", "sglang", "vllm")
HELPER_NAMES = ("sglang::detoken",)
SERVER_ROLES = frozenset({
    "launcher", "scheduler", "engine", "detokenizer", "tokenizer_worker", "data_parallel_controller",
})  # fmt: skip
FIRST_RANK_MARKS = frozenset({"scheduler ready"})
"""Marks that only rank 0 logs."""
_TP = re.compile(r"TP(\d+)")
_RANK_DIED = re.compile(r"Rank (\d+) scheduler|Subprocess scheduler_(\d+) ")
_SPAWNED = re.compile(r"multiprocessing[. ](?:spawn|forkserver)|--multiprocessing-fork")
_KILLED = re.compile(r"(?<![\w.])-9\b|\bSIGKILL\b|\bsignal 9\b")
"""How Python and those who write its exit codes down call a child that was killed."""
_PEER_LOST = re.compile(r"Connection (?:closed|reset) by peer|Broken pipe")
_CORE_DUMP = re.compile(r"\bdo_coredump|elf_core_dump|\bdump_emit|coredump_task_exit|coredump_wait")
"""Where a process is that a signal has ended and that writes its memory to a file, which takes long."""
_FREEZER = re.compile(r"do_freezer_trap|__refrigerator")
"""Where the kernel keeps a task of a frozen control group (versions 2 and 1); its state letter is S or D."""


class Members(Answers):
    """Adds who belongs to the server, who is gone, and where each rank is in its log."""

    @cached_property
    def launcher(self) -> ProcessFacts | None:
        """The living launcher."""
        if not self.evidence.launcher_alive:
            return None
        return next((p for p in self.evidence.processes if p.pid == self.evidence.target.pid), None)

    @cached_property
    def schedulers(self) -> list[ProcessFacts]:
        """Living schedulers (of vLLM: workers, or the engine core when it has no other rank), by rank."""
        roles = ("scheduler", "engine") if self.evidence.target.ranks == 1 else ("scheduler",)
        alive = [p for p in self.evidence.processes if p.role in roles and p.state not in "ZX"]
        return sorted(alive, key=lambda p: (p.rank or 0, p.label))

    @cached_property
    def members(self) -> list[ProcessFacts]:
        """Launcher, schedulers and detokenizer: what must live for the server to work."""
        wanted = ("launcher", "scheduler", "engine", "detokenizer", "data_parallel_controller")
        roles = [p for p in self.evidence.processes if p.role in wanted and p.state not in "ZX"]
        return [self.foreign] if self.foreign else roles

    @cached_property
    def foreign(self) -> ProcessFacts | None:
        """The living process that was named, when neither it nor any below it is called as those of a server are."""
        processes = self.evidence.processes
        if not self.evidence.launcher_alive or any(p.role in SERVER_ROLES for p in processes):
            return None
        named = next((p for p in processes if p.pid == self.evidence.target.pid and p.state not in "ZX"), None)
        # An interpreter whose command line could not be read in time may run anything.
        return None if named and not named.cmdline and named.name.startswith(INTERPRETERS) else named

    @cached_property
    def spawning(self) -> bool:
        """Ranks have not been started, or have not yet named themselves. They are started in their order: one that is
        still missing below another after the phase's patience will not come."""
        unnamed = not self.evidence.log.ranks and not self.evidence.log.crash and not self.port_open
        if self._all_were_started and not self.within_patience:
            return False
        present = {p.rank for p in self.schedulers if p.rank is not None}
        gap = any(rank not in present for rank in self.local_ranks if rank < max(present, default=0))
        return unnamed and (self.within_patience or not gap)

    @property
    def _all_were_started(self) -> bool:
        """Who started the ranks holds as many pipes from them as belong to all, whatever log and names say: each rank
        alive has a share of them, and what is left over was another's. (Whose writing end it was may live on in a rank
        that inherited it.)"""
        alive = {p.pid for p in self.schedulers}
        for parent in self.members:
            ends = [end.peers for end in parent.pipes if end.mode == "r" and (not end.peers or alive & set(end.peers))]
            share = min((sum(pid in peers for peers in ends) for pid in alive), default=0)
            if share and parent.pid not in alive and len(ends) >= share * len(self.local_ranks) > share * len(alive):
                return True
        return False

    @property
    def engine_dead(self) -> bool:
        """vLLM's engine core, which feeds the workers, is gone."""
        served = self.launcher is not None and self.is_vllm and (self.port_open or self.was_ready)
        return served and not any(p.role == "engine" and p.state not in "ZX" for p in self.evidence.processes)

    @property
    def local_ranks(self) -> range:
        """The ranks that belong on this host."""
        target = self.evidence.target
        each = max(1, target.ranks // max(1, target.nodes))
        return range(target.node_rank * each, (target.node_rank + 1) * each)

    @cached_property
    def missing_ranks(self) -> list[int]:
        """Ranks that were there (or must have been) and are gone."""
        unseen = self.evidence.launcher_alive and not self.evidence.processes
        if unseen or (self.spawning and not self.zombies):
            return []
        present = {p.rank for p in self.schedulers}
        gone = [rank for rank in self.local_ranks if rank not in present]
        unranked = sum(p.rank is None for p in self.schedulers)
        if len(gone) <= len(self.unnamed) + unranked:
            gone = []
        return gone or self._lost_replicas

    @cached_property
    def unnamed(self) -> list[ProcessFacts]:
        """Children that have not yet called themselves anything, before the port opens: on a crowded host a rank does
        that many seconds after another has logged its first line. They still show how Python starts a process, or, as
        forks do, their parent's command line."""
        started = [p for p in self.evidence.processes if p.pid != self.evidence.target.pid and p.state not in "ZX"]
        spawned = [p for p in started if p.role == "other" and (not p.cmdline or _SPAWNED.search(p.cmdline))]
        forked = [p for p in started if p.role == "launcher"]
        return [] if self.port_open else [*spawned, *forked]

    @property
    def _lost_replicas(self) -> list[int]:
        """Ranks of which one replica (data-parallel, pipeline) is gone while another lives."""
        alive = {p.label for p in self.schedulers if p.label}
        if len(self.zombies) != 1 or not alive or self.evidence.target.nodes > 1:
            return []
        return [m.rank for m in self.evidence.log.ranks if m.label not in alive][:1]

    @cached_property
    def zombies(self) -> list[ProcessFacts]:
        """Schedulers that died and were not reaped (the kernel keeps only 15 characters of their name)."""
        dead = [p for p in self.evidence.processes if p.state in "ZX"]
        named = [p for p in dead if p.name.startswith(ENGINE_NAMES) or p.role in ("scheduler", "engine")]
        return named or self._stillborn

    @property
    def _stillborn(self) -> list[ProcessFacts]:
        """Children that ended before they had a name, as many as all ranks: they could not be executed at all."""
        if self.port_open or self.schedulers or self.evidence.log.ranks:
            return []
        of = [p for p in self.evidence.processes if p.state in "ZX" and p.ppid == self.evidence.target.pid]
        dead = [p for p in of if p.name.startswith(INTERPRETERS) and p.role != "resource_tracker"]
        return dead if len(dead) >= len(self.local_ranks) else []

    @cached_property
    def dead_helpers(self) -> list[ProcessFacts]:
        """Processes without which no answer leaves the server, dead and not reaped: SGLang's detokenizer."""
        dead = [p for p in self.evidence.processes if p.state in "ZX"]
        return [p for p in dead if p.name.startswith(HELPER_NAMES) or p.role == "detokenizer"]

    @cached_property
    def dying(self) -> list[ProcessFacts]:
        """Members that crashed and are not gone yet: they write a core dump."""
        return [p for p in self.members if is_dumping(p)]

    @property
    def gone(self) -> bool:
        """A process that the server needs has ended while its launcher lives."""
        return bool(self.missing_ranks or self.engine_dead or self.zombies or self.dead_helpers)

    @property
    def complete(self) -> bool:
        """Launcher and every rank live, none is stopped, none has raised."""
        return (
            bool(self.evidence.launcher_alive and self.schedulers)
            and not self.gone
            and not self.evidence.log.crash
            and not self.dying
            and not any(map(is_held, self.members))
        )

    def marks_of(self, process: ProcessFacts) -> RankMarks | None:
        """Log marks of a scheduler."""
        return next((m for m in self.evidence.log.ranks if m.label == process.label), None)

    def phase_of(self, process: ProcessFacts | None) -> str:
        """The phase that a rank has entered; without one, or once HTTP is up, that of the server."""
        marks = self.marks_of(process) if process else None
        server = self.evidence.log.phase
        if marks is None or server in ("warmup", "serving"):
            return self.phase
        return marks.phase

    @cached_property
    def behind(self) -> list[ProcessFacts]:
        """Ranks that logged fewer marks than others, of those that every rank logs; empty when all are level."""
        counts = {p.label: len(set(m.marks) - FIRST_RANK_MARKS) for p in self.schedulers if (m := self.marks_of(p))}
        low = [p for p in self.schedulers if counts.get(p.label, 0) == min(counts.values(), default=0)]
        return low if len(low) < len(self.schedulers) else []

    @cached_property
    def late_ranks(self) -> list[ProcessFacts]:
        """Ranks without NCCL's lines where others have them; else ranks with fewer marks."""
        silent = [p for p in self.schedulers if not ((m := self.marks_of(p)) and m.nccl)]
        return silent if 0 < len(silent) < len(self.schedulers) else self.behind

    @property
    def crash_rank(self) -> int | None:
        """The rank that is to blame for the first exception. One that only lost its peer is not."""
        named = _RANK_DIED.search(self.evidence.log.troubles.get("rank_died", ""))
        if named and named[1]:
            return int(named[1])
        if named and not any("DP" in rank.label for rank in self.evidence.log.ranks):
            return self.local_ranks.start + int(named[2])  # with replicas it is the process that started them
        match = _TP.search(self.evidence.log.crash_label)
        if not match:
            return None
        rank = int(match[1])
        if not self.crash_is_of_a_peer:
            return rank
        others = [other for other in range(self.evidence.target.ranks) if other != rank]
        return others[0] if len(others) == 1 else None

    @property
    def crash_is_of_a_kill(self) -> bool:
        """The first exception only tells that a child was killed: it has not raised."""
        return bool(_KILLED.search(self.evidence.log.crash))

    @property
    def crash_is_of_a_peer(self) -> bool:
        """The first exception says that another rank's connection ended."""
        return bool(_PEER_LOST.search(self.evidence.log.crash))


def is_frozen(process: ProcessFacts) -> bool:
    """Its control group is frozen (``docker pause``): it runs no more until somebody thaws that."""
    main = process.main
    places = [main.wchan if main else "", *process.kernel_stack[:1]]
    return process.state in "SD" and any(map(_FREEZER.search, places))


def is_held(process: ProcessFacts) -> bool:
    """Stopped, held by a tracer, or frozen: it will run again only when somebody lets it."""
    return process.state in "Tt" or is_frozen(process)


def is_dumping(process: ProcessFacts) -> bool:
    """A signal has ended it, and the kernel writes its core."""
    places = [process.main.wchan if process.main else "", *process.kernel_stack]
    return any(map(_CORE_DUMP.search, places))
