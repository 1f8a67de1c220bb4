"""Questions that signatures ask of evidence, answered once: who waits, who spins, where they are."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cached_property

from fleetdump.agent.evidence_process import (
    ProcessFacts,
    Stack,
    StackGroup,
    Trace,
)
from fleetdump.agent.evidence_types import ProbeRecord
from fleetdump.diagnosis.answers import FIRST_CLIENT_ERROR, FIRST_SERVER_ERROR
from fleetdump.diagnosis.members import is_held
from fleetdump.diagnosis.movement import BLOCKED_CPU, CROWDED_CPU, FULL_USE, SPIN_CPU, Movement

FEW_SWITCHES = 20.0
"""Voluntary switches a second of a main thread: a spin has none, a blocked one a few; an idle scheduler thousands."""
SILENCE_APART = 20.0
"""Seconds of silence that are enough when one rank spins and every other sleeps."""
GROUP_FRAMES = 6
AFTER = {
    "imports": "before the first mark",
    "init": "during distributed init",
    "weights": "while weights are loaded",
    "kv_pool": "after weights, before the KV pool",
    "jit": "after the KV pool",
    "capture": "during graph capture",
    "http": "after the scheduler's set-up, before HTTP",
    "warmup": "during the warm-up request",
    "serving": "while serving",
}
_GRAMMAR = re.compile(
    r"xgrammar|GrammarCompiler|compile_(?:builtin_)?(?:json_schema|grammar|regex|structural_tag)|llguidance|outlines|"
    r"grammar_(?:backend|bitmask)|RegexGuide|build_regex_from_schema",
    re.IGNORECASE,
)
IN_EPOLL = re.compile(r"ep_poll|epoll")
IN_POLL = re.compile(r"(?<!e)poll_schedule_timeout|\bdo_(?:sys_)?poll")
_IN_ANY_POLL = re.compile(rf"{IN_EPOLL.pattern}|{IN_POLL.pattern}")
LOOKS_FOR_REQUESTS = re.compile(r"\brecv_(?:requests|reqs|from_)|\b_?poll_requests|\bget_next_batch")
_LOOP = re.compile(rf"{LOOKS_FOR_REQUESTS.pattern}|\bevent_loop_")
_SINCE_BOOT = re.compile(r"\[\s*(\d+\.\d+)\]")


@dataclass(frozen=True)
class Spin:
    """A rank whose main thread burns a core without ever yielding. ``kind``: python, gpu or unknown."""

    process: ProcessFacts
    kind: str
    facts: tuple[str, ...]


class View(Movement):
    """Adds who spins, who sleeps, and where the stacks are."""

    @property
    def unreadable(self) -> bool:
        """This user may see neither the log nor what any process reads, holds or waits for."""
        return bool(self.members) and not self.evidence.log.exists and not any(p.readable for p in self.members)

    @property
    def failing(self) -> bool:
        """Something is gone or has raised, or nothing has moved for longer than it may."""
        broken = not self.evidence.launcher_alive or self.gone or self.evidence.log.crash
        return bool(broken) or not (self.healthy or self.progress or self.compilers or self.within_patience)

    @property
    def starting(self) -> bool:
        """Alive and not ready yet."""
        ready = self.evidence.log.ready or self.healthy or self.port_taken or (self.is_vllm and self.port_open)
        gone = self.gone or self.evidence.log.crash or not self.evidence.launcher_alive
        return not ready and not gone and not any(map(is_held, self.members))

    @property
    def unserved(self) -> list[str]:
        """Adds a deadlock on the GPUs: every rank burns its core, the log is silent, and no GPU computes while requests
        run (of which vLLM's log tells, unless it was told not to), or the collectives contradict each other."""
        found, evidence = super().unserved, self.evidence
        quiet, allowed = self.silence_in("serving")
        waiting = bool(self.spins) and len(self.spins) == len(self.schedulers)
        if not waiting or self.forwards or quiet < allowed:
            return found
        parted = bool(evidence.ras.mismatches or self.trouble("nccl_watchdog"))
        told = self.is_vllm and not (self.launcher and "disable-log-stats" in self.launcher.cmdline)
        if self.gpus_wait and (parted or told or self.on_later_host or evidence.log.running_requests):
            found.append(f"no GPU computes and every rank waits for one, in {quiet:.0f} s without a word in the log")
        elif self.on_later_host and not self.gpus:
            found.append("on this host the launcher answers by itself, and none of its ranks comes to rest")
        elif parted and not self.gpus:
            found.append(f"every rank waits and NCCL calls it parted, in {quiet:.0f} s without a word in the log")
        return found

    @cached_property
    def engine_turns(self) -> bool:
        """It may have served, every rank looks for requests or goes round its loop, and nothing says that one fails:
        whatever HTTP says or was not asked, no rank hangs. One that does in a collective, in a kernel or in code of its
        own is not woken again and again."""
        failing = self.starved or self.unserved or self.grammar_stacks or any(map(self._sleeps_elsewhere, self.members))
        if not (self.port_open and self._may_have_served and self.complete) or failing:
            return False
        polling = any(map(_polls, self.schedulers))
        return all(self._turns(p) or (polling and self._waits_for_requests(p)) for p in self.schedulers)

    def _sleeps_elsewhere(self, process: ProcessFacts) -> bool:
        """The detokenizer, or the launcher of a server that was asked in vain, does not wait for events."""
        places = {"detokenizer": _IN_ANY_POLL}
        if self._asked_in_vain:
            places["launcher"] = IN_EPOLL
        place, main = places.get(process.role), process.main
        return bool(place and main and main.wchan and is_blocked(process) and not place.search(main.wchan))

    @property
    def _may_have_served(self) -> bool:
        """Its log may be gone or tell little: then nothing but an answer of ``/health`` says that it still starts."""
        return self.was_ready or not self.engine_was_asked

    @property
    def engine_was_asked(self) -> bool:
        """``/health`` was answered by more than a guard or a router in front of it, or not in time."""
        health = self.answer("/health")
        return health is not None and not FIRST_CLIENT_ERROR <= health.status < FIRST_SERVER_ERROR

    @property
    def _asked_in_vain(self) -> bool:
        return any(not probe.status for probe in self.evidence.http)

    def _turns(self, process: ProcessFacts) -> bool:
        """It is woken again and again, not from a sleep of its own that does nothing else."""
        main, stack, gpu = process.main, self.stack(process), self.gpu_of(process)
        if main is None or is_spinning(process) or main.voluntary < FEW_SWITCHES or main.cpu < BLOCKED_CPU:
            return False
        return stack is None or _in_its_loop(stack) or bool(gpu and gpu.utilization)

    def _waits_for_requests(self, process: ProcessFacts) -> bool:
        """It sleeps until one comes (``--sleep-on-idle``): the first rank in poll, the others until that tells them."""
        stack, gpu = self.stack(process), self.gpu_of(process)
        idle = gpu is None or gpu.utilization < FULL_USE
        there = _in_its_loop(stack) if stack else not self._asked_in_vain
        return idle and is_blocked(process) and there

    @property
    def on_later_host(self) -> bool:
        """On another host than the first of several ``/health`` is answered by the launcher alone, and no batch is
        logged: silence says nothing there."""
        return self.evidence.target.node_rank > 0 and self.port_open

    def probe(self, name: str) -> ProbeRecord | None:
        """How a probe went."""
        return next((p for p in self.evidence.probes if p.name == name), None)

    @cached_property
    def kernel_since_start(self) -> list[str]:
        """Kernel lines from the server's start on, and those without a time."""
        start = self.evidence.target.start_time / 100
        return [line for line in self.evidence.kernel_log if _since_boot(line) >= start]

    @property
    def silent_too_short(self) -> bool:
        """Nobody may say "hung" yet. An engine that counts its own zeros needs no patience. A rank that spins while all
        others slept through the whole window needs little: what all of them work on looks alike on all."""
        apart = len(self.spins) == 1 and len(self.blocked) == len(self.schedulers) - 1 > 0
        return self.within_patience and not self.starved and not (apart and self.silence[0] >= SILENCE_APART)

    @cached_property
    def stack_groups(self) -> list[StackGroup]:
        """Ranks by where they are; put together here when a bundle has stacks alone."""
        given = self.evidence.stack_groups
        ranks = [s for s in self.evidence.stacks if s.role == "scheduler"]
        if given or not ranks:
            return given
        places: dict[tuple[str, ...], list[str]] = {}
        for stack in ranks:
            places.setdefault(tuple(stack.frames[:GROUP_FRAMES]), []).append(stack.label)
        most = max(map(len, places.values()))
        groups = [StackGroup(list(frames), labels, len(labels) < most) for frames, labels in places.items()]
        return sorted(groups, key=lambda g: -len(g.ranks))

    @cached_property
    def grammar_stacks(self) -> list[tuple[Stack, str]]:
        """Stacks of threads that compile a grammar, each with the frame that says so."""
        found = []
        for stack in self.evidence.stacks:
            frames = [*stack.frames, *stack.native, *(f for of in stack.active.values() for f in of)]
            idle = stack.state == "idle" and not stack.active
            frame = next((f for f in frames if _GRAMMAR.search(f)), "")
            if frame and not idle:
                found.append((stack, frame))
        return found

    @property
    def spinning_engines(self) -> list[ProcessFacts]:
        """Engine core or schedulers that burn a core in their main thread."""
        return [p for p in self.members if p.role in ("engine", "scheduler") and p.main and p.main.cpu >= SPIN_CPU]

    @property
    def api_process(self) -> ProcessFacts | None:
        """The process that answers HTTP (launcher or tokenizer worker), when its main thread never comes to rest."""
        roles = ("launcher", "tokenizer_worker")
        return next((p for p in self.evidence.processes if p.role in roles and _is_busy(p)), None)

    def stack(self, process: ProcessFacts) -> Stack | None:
        return next((s for s in self.evidence.stacks if s.pid == process.pid), None)

    def trace(self, process: ProcessFacts) -> Trace | None:
        return next((t for t in self.evidence.traces if t.pid == process.pid), None)

    @cached_property
    def spins(self) -> list[Spin]:
        """Ranks that spin, with what shows it."""
        return [self._spin(p) for p in self.schedulers if is_spinning(p)]

    @cached_property
    def blocked(self) -> list[ProcessFacts]:
        """Ranks whose main thread sleeps and is not woken."""
        return [p for p in self.schedulers if is_blocked(p)]

    def _spin(self, process: ProcessFacts) -> Spin:
        assert process.main is not None
        main, stack, trace = process.main, self.stack(process), self.trace(process)
        facts = [
            f"{process.label} main thread: {main.cpu:.0%} of a core ({main.user_share:.0%} user), "
            f"{main.voluntary:.0f} voluntary switches a second, no system call in progress"
        ]
        calls = sum(c.count for c in trace.calls if c.main) if trace else 0
        names = {c.name for c in trace.calls if c.main} if trace else set()
        if trace:
            seen = ", ".join(sorted(names)) if calls else "not one"
            facts.append(
                f"{process.label} main thread: {calls} system calls in {trace.seconds:.0f} s of strace ({seen})"
            )
        if stack and stack.frames:
            facts.append(f"{process.label} is at {stack.frames[0]}, {stack.state}, called from {_callers(stack)}")
        if names & {"ioctl", "sched_yield"} or (
            stack and "gil" not in stack.state and stack.state.startswith("active")
        ):
            kind = "gpu"
        elif stack and "gil" in stack.state:
            kind = "python"
        else:
            kind = "unknown"
        return Spin(process, kind, tuple(facts))


def _since_boot(line: str) -> float:
    match = _SINCE_BOOT.match(line)
    return float(match[1]) if match else float("inf")


def _callers(stack: Stack) -> str:
    return " < ".join(frame.split(" (")[0] for frame in stack.frames[1:4]) or "nothing"


def is_spinning(process: ProcessFacts) -> bool:
    """One core busy in the main thread, and it never yields."""
    main = process.main
    if main is None or main.voluntary >= FEW_SWITCHES or process.state in "TtZX":
        return False
    return main.cpu >= SPIN_CPU or (main.demand >= SPIN_CPU and main.cpu >= CROWDED_CPU)


def _polls(process: ProcessFacts) -> bool:
    return process.main is not None and is_blocked(process) and bool(IN_POLL.search(process.main.wchan))


def _in_its_loop(stack: Stack) -> bool:
    """It is where a scheduler looks for requests, or no deeper than its loop's own functions."""
    return any(_LOOP.search(frame) for frame in stack.frames[:5])


def _is_busy(process: ProcessFacts) -> bool:
    main = process.main
    return main is not None and main.cpu >= SPIN_CPU and process.state not in "TtZX"


def is_blocked(process: ProcessFacts) -> bool:
    """The main thread sleeps all the time."""
    main = process.main
    if main is None or is_spinning(process) or process.state in "TtZX":
        return False
    return main.cpu < BLOCKED_CPU and main.voluntary < FEW_SWITCHES
