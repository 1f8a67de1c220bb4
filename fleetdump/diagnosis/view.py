"""Questions that signatures ask of evidence, answered once: who lives, who waits, who spins, what moved."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cached_property

from fleetdump.agent.evidence_host import GpuFacts
from fleetdump.agent.evidence_process import (
    ProcessFacts,
    Stack,
    StackGroup,
    Trace,
)
from fleetdump.agent.evidence_types import ProbeRecord
from fleetdump.diagnosis.members import Members
from fleetdump.diagnosis.words import size

RCHAR_RATE = 512 << 10
READ_RATE = 64 << 10
RSS_RATE = 1 << 20
"""Bytes a second and process that count as progress, as in ``agent.progress``: an idle scheduler reads up to 100 kB/s
through event descriptors."""
GPU_MEMORY_RATE = 8
"""MiB a second, while weights are loaded; in other phases what grows may be a leak of something tried again."""
LOAD_RATE = 1 << 20
"""Bytes a second of all ranks together that count as loading weights."""
COMPILER_CPU = 0.05
SPIN_CPU = 0.85
"""Share of a core that a spinning main thread uses, or asks for on a crowded host."""
BLOCKED_CPU = 0.05
CROWDED_CPU = 0.01
"""What a spin gets of a core at least that it shares with dozens of others; it wants all of it."""
FEW_SWITCHES = 20.0
"""Voluntary switches a second of a main thread: a spin has none, a blocked one a few; an idle scheduler thousands."""
SILENCE_APART = 20.0
"""Seconds of silence that are enough when one rank spins and every other sleeps."""
GROUP_FRAMES = 6
WORK_POWER = 0.6
"""Share of its limit from which a fully used GPU computes: waiting kernels were seen at a fifth, a light load at a
third."""
WORK_SECONDS = 600.0
"""How long full power alone is believed: no batch takes longer, a computing kernel without end might."""
LOW_POWER = 0.45
"""Share of its limit below which a fully used GPU only waits in a kernel."""
FULL_USE = 90
LOADED_MIB = 4096
FAULTS = 5.0
"""Major page faults a second that show a mapped file being read, however slowly."""
PRESSURE = 5.0
"""Percent of time in which all work waited for memory."""
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


class View(Members):
    """Adds what moves, who spins, and where the stacks are."""

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
        ready = self.evidence.log.ready or self.healthy or self.port_taken
        gone = self.gone or self.evidence.log.crash or not self.evidence.launcher_alive
        return not ready and not gone and not any(p.state in "Tt" for p in self.members)

    @cached_property
    def gpus(self) -> list[GpuFacts]:
        """The server's own GPUs, by index: those that its processes are on; else, where the host has more than ranks,
        those with as much memory in use as only a loaded model has, if there are just as many; else all."""
        known = sorted(self.evidence.gpus, key=lambda g: g.index)
        own = [g for g in known if any(p.ours for p in g.processes)]
        loaded = [g for g in known if g.memory_used >= LOADED_MIB]
        if own:
            return own
        return loaded if len(known) > len(self.schedulers) == len(loaded) else known

    def gpu_of(self, process: ProcessFacts) -> GpuFacts | None:
        """A rank's GPU: the one its process is on, else the one in its place among this host's ranks."""
        named = next((g for g in self.gpus if any(p.pid == process.pid for p in g.processes)), None)
        place = (process.rank or 0) - self.local_ranks.start
        counted = len(self.gpus) == len(self.schedulers) and 0 <= place < len(self.gpus)
        return named or (self.gpus[place] if counted else None)

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
        if self.gpus_wait and (parted or told or evidence.log.running_requests):
            found.append(f"no GPU computes and every rank waits for one, in {quiet:.0f} s without a word in the log")
        elif parted and not self.gpus:
            found.append(f"every rank waits and NCCL calls it parted, in {quiet:.0f} s without a word in the log")
        return found

    @property
    def gpus_wait(self) -> bool:
        """Every GPU of the server is fully used at little power: it waits in a kernel."""
        return bool(self.gpus) and all(
            g.utilization >= FULL_USE and (not g.power_limit or g.power < LOW_POWER * g.power_limit) for g in self.gpus
        )

    @property
    def gpus_work(self) -> list[GpuFacts]:
        """GPUs that compute: fully used, at a power that no waiting kernel draws."""
        return [
            g
            for g in self.gpus
            if g.utilization >= FULL_USE and g.power_limit and g.power >= WORK_POWER * g.power_limit
        ]

    def probe(self, name: str) -> ProbeRecord | None:
        """How a probe went."""
        return next((p for p in self.evidence.probes if p.name == name), None)

    @cached_property
    def kernel_since_start(self) -> list[str]:
        """Kernel lines from the server's start on, and those without a time."""
        start = self.evidence.target.start_time / 100
        return [line for line in self.evidence.kernel_log if _since_boot(line) >= start]

    @cached_property
    def read_rate(self) -> float:
        """Bytes a second that the schedulers read, from disk or cache."""
        total = sum(max(p.rchar_delta, p.read_bytes_delta) for p in self.schedulers)
        return total / max(self.evidence.seconds, 0.001)

    @cached_property
    def compilers(self) -> list[ProcessFacts]:
        """Living compiler children that use CPU; torch inductor's pool of workers sleeps until it has work."""
        roles = ("compiler", "compile_worker")
        return [p for p in self.evidence.processes if p.role in roles and p.cpu > COMPILER_CPU]

    @cached_property
    def progress(self) -> list[str]:
        """What counts as progress between the samples, in words; empty: nothing moved."""
        found, log = [], self.evidence.log
        if self.forwards:
            found.append(f"{log.forwards} batches were logged between the samples")
        elif log.news and not self.starved:
            found.append(f"the log has {log.news} new lines that are no repetition")
        seconds = self.evidence.seconds
        # Once it serves, what the launcher reads (a module, a certificate) is no work of the engine.
        working = self.schedulers if self.port_open else self.members
        for process in working:
            name = process.label or process.role
            if process.rchar_delta > RCHAR_RATE * seconds or process.read_bytes_delta > READ_RATE * seconds:
                read = max(process.rchar_delta, process.read_bytes_delta)
                found.append(f"{name} read {size(read)} in {seconds:.0f} s")
            if self.pages_in(process) and not self.port_open:
                found.append(f"{name} had {process.majflt_delta} major page faults in {seconds:.0f} s")
            if process.rss_delta > RSS_RATE * seconds:
                found.append(f"{name} grew by {size(process.rss_delta)} of memory")
        found += [
            f"GPU {g.index}: {g.memory_delta} MiB more memory in use"
            for g in self.gpus
            if g.memory_delta >= GPU_MEMORY_RATE * seconds and self.phase == "weights"
        ]
        if self.silence[0] < WORK_SECONDS and not self.schedulers:
            found += [
                f"process {p.pid}, not named yet, uses {p.cpu:.0%} of a core"
                for p in self.unnamed
                if p.cpu > BLOCKED_CPU
            ]
        if self.silence[0] < WORK_SECONDS:
            found += [f"GPU {g.index} computes: {g.utilization} % at {g.power:.0f} W" for g in self.gpus_work]
        return found

    def pages_in(self, process: ProcessFacts) -> bool:
        """It reads a mapped file: pages come. Not every network file system counts them as bytes that were read; of a
        host that is short of memory they may be its own code, again and again."""
        counted = process.read_bytes_delta > 0 or self.memory_pressure < PRESSURE
        return counted and process.majflt_delta >= FAULTS * self.evidence.seconds

    @property
    def silent_too_short(self) -> bool:
        """Nobody may say "hung" yet. An engine that counts its own zeros needs no patience. A rank that spins while all
        others slept through the whole window needs little: what all of them work on looks alike on all."""
        apart = len(self.spins) == 1 and len(self.blocked) == len(self.schedulers) - 1 > 0
        return self.within_patience and not self.starved and not (apart and self.silence[0] >= SILENCE_APART)

    @property
    def memory_pressure(self) -> float:
        """Percent of ten seconds in which all work waited for memory, in the server's group or on the host."""
        known = [one.full for one in self.evidence.pressure if one.resource == "memory"]
        return max([self.evidence.memory.pressure_full, *known])

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
