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
from fleetdump.diagnosis.members import is_held
from fleetdump.diagnosis.movement import BLOCKED_CPU, CROWDED_CPU, SPIN_CPU, Movement

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


def _is_busy(process: ProcessFacts) -> bool:
    main = process.main
    return main is not None and main.cpu >= SPIN_CPU and process.state not in "TtZX"


def is_blocked(process: ProcessFacts) -> bool:
    """The main thread sleeps all the time."""
    main = process.main
    if main is None or is_spinning(process) or process.state in "TtZX":
        return False
    return main.cpu < BLOCKED_CPU and main.voluntary < FEW_SWITCHES
