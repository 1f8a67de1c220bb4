"""Questions that signatures ask of evidence, answered once: who lives, who waits, who spins, what moved."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cached_property

from fleetdump.agent.evidence_types import Evidence, HttpProbe, ProbeRecord, ProcessFacts, RankMarks, Stack, Trace
from fleetdump.agent.protocol import PHASES

RCHAR_RATE = 512 << 10
READ_RATE = 64 << 10
RSS_RATE = 1 << 20
"""Bytes a second and process that count as progress, as in ``agent.progress``: an idle scheduler reads up to 100 kB/s
through event descriptors."""
LOAD_RATE = 1 << 20
"""Bytes a second of all ranks together that count as loading weights."""
COMPILER_CPU = 0.05
SPIN_CPU = 0.85
"""Share of a core that a spinning main thread uses, or asks for on a crowded host."""
BLOCKED_CPU = 0.05
FEW_SWITCHES = 20.0
"""Voluntary switches a second of a main thread: a spin has none, a blocked one a few; an idle scheduler thousands."""
SILENCE_OF = {"init": 120.0}
"""Where more is usual: a communicator of 8 GPUs was seen to take 62 s."""
STARVED_LINES = 2
USUAL_LINE = 100
"""Bytes of a log line, where the repeated one is not known."""
SILENCE = 30.0
"""Seconds of silence below which nobody says "hung" when no patience is given."""

ENGINE_NAMES = ("sglang::sched", "VLLM::Worker", "VLLM::Engine")
"""What the names of ranks begin with, in the 15 characters that the kernel keeps of a dead one's."""
LOW_POWER = 0.45
"""Share of its limit below which a fully used GPU only waits in a kernel."""
FULL_USE = 90

FIRST_RANK_MARKS = frozenset({"scheduler ready"})
"""Marks that only rank 0 logs."""

AFTER = {
    "imports": "before its first mark",
    "init": "during distributed init",
    "weights": "while it loads weights",
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
_TP = re.compile(r"TP(\d+)")
_SINCE_BOOT = re.compile(r"\[\s*(\d+\.\d+)\]")
_RANK_DIED = re.compile(r"Rank (\d+) scheduler")
_PEER_LOST = re.compile(r"Connection (?:closed|reset) by peer|Broken pipe")
_BAR = re.compile(r"(?P<done>\d+)/(?P<total>\d+) \[(?P<spent>[\d:?]+)<(?P<left>[\d:?]+)")


@dataclass(frozen=True)
class Spin:
    """A rank whose main thread burns a core without ever yielding. ``kind``: python, gpu or unknown."""

    process: ProcessFacts
    kind: str
    facts: tuple[str, ...]


class View:
    """An index over one ``Evidence``; nothing here changes it."""

    def __init__(self, evidence: Evidence) -> None:
        self.evidence = evidence

    # ------------------------------------------------------------------ processes
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
        return [p for p in self.evidence.processes if p.role in wanted and p.state not in "ZX"]

    @cached_property
    def spawning(self) -> bool:
        """Ranks have not been started, or have not yet named themselves."""
        return not self.evidence.log.ranks and not self.evidence.log.crash and not self.port_open

    @property
    def engine_dead(self) -> bool:
        """vLLM's engine core, which feeds the workers, is gone."""
        launcher = self.launcher
        served = launcher is not None and "vllm" in launcher.cmdline.lower() and (self.port_open or self.was_ready)
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
        present = {p.rank or 0 for p in self.schedulers}
        return [rank for rank in self.local_ranks if rank not in present]

    @cached_property
    def zombies(self) -> list[ProcessFacts]:
        """Schedulers that died and were not reaped (the kernel keeps only 15 characters of their name)."""
        return [p for p in self.evidence.processes if p.state in "ZX" and p.name.startswith(ENGINE_NAMES)]

    @property
    def complete(self) -> bool:
        """Launcher and every rank live, none is stopped, none has raised."""
        alive = self.evidence.launcher_alive and self.schedulers and not self.missing_ranks
        return (
            bool(alive)
            and not self.engine_dead
            and not self.evidence.log.crash
            and not any(p.state in "Tt" for p in self.members)
        )

    # ------------------------------------------------------------------ phase and marks
    def marks_of(self, process: ProcessFacts) -> RankMarks | None:
        """Log marks of a scheduler."""
        return next((m for m in self.evidence.log.ranks if m.label == process.label), None)

    def phase_of(self, process: ProcessFacts | None) -> str:
        """The phase that a rank has entered; without one, or once HTTP is up, that of the server."""
        marks = self.marks_of(process) if process else None
        server = self.evidence.log.phase
        if marks is None or server in ("warmup", "serving"):
            return server or PHASES[0]
        return marks.phase

    @property
    def phase(self) -> str:
        """The phase of the server as a whole."""
        if self.healthy:
            return "serving"
        return self.evidence.log.phase or PHASES[0]

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
        if named:
            return int(named[1])
        match = _TP.search(self.evidence.log.crash_label)
        if not match:
            return None
        rank = int(match[1])
        if not self.crash_is_of_a_peer:
            return rank
        others = [other for other in range(self.evidence.target.ranks) if other != rank]
        return others[0] if len(others) == 1 else None

    @property
    def crash_is_of_a_peer(self) -> bool:
        """The first exception says that another rank's connection ended."""
        return bool(_PEER_LOST.search(self.evidence.log.crash))

    # ------------------------------------------------------------------ port and HTTP
    @property
    def port_open(self) -> bool:
        return self.evidence.port.open and self.evidence.port.ours

    def answer(self, prefix: str) -> HttpProbe | None:
        """The probe of ``/health`` or ``/model_info``."""
        return next((h for h in self.evidence.http if h.path.endswith(prefix)), None)

    @property
    def was_ready(self) -> bool:
        """It has served; without a log an open port is taken for that."""
        log = self.evidence.log
        return log.ready or (self.port_open and not log.exists)

    @property
    def healthy(self) -> bool:
        health = self.answer("/health")
        return self.port_open and health is not None and health.status == 200 and not self.starved

    @property
    def starved(self) -> bool:
        """The engine's own statistics say that requests are there and no token comes, whatever ``/health`` says."""
        return self.evidence.log.zero_statistics >= STARVED_LINES

    @property
    def forwards(self) -> int:
        """Batches logged between the samples that computed something."""
        return 0 if self.starved else self.evidence.log.forwards

    def trouble(self, name: str) -> str:
        """The first log line of a known trouble; empty when there is none."""
        return self.evidence.log.troubles.get(name, "")

    @property
    def failing(self) -> bool:
        """Something is gone or has raised, or nothing has moved for longer than it may."""
        broken = not self.evidence.launcher_alive or self.missing_ranks or self.evidence.log.crash
        return bool(broken) or not (self.healthy or self.progress or self.compilers or self.within_patience)

    @property
    def starting(self) -> bool:
        """Alive and not ready yet."""
        ready = self.evidence.log.ready or self.healthy
        gone = self.missing_ranks or self.evidence.log.crash or not self.evidence.launcher_alive
        return not ready and not gone and not any(p.state in "Tt" for p in self.members)

    # ------------------------------------------------------------------ GPUs
    @property
    def gpus_wait(self) -> bool:
        """Every GPU of the server is fully used at little power: it waits in a kernel."""
        gpus = self.evidence.gpus
        return bool(gpus) and all(
            g.utilization >= FULL_USE and (not g.power_limit or g.power < LOW_POWER * g.power_limit) for g in gpus
        )

    def probe(self, name: str) -> ProbeRecord | None:
        """How a probe went."""
        return next((p for p in self.evidence.probes if p.name == name), None)

    @cached_property
    def kernel_since_start(self) -> list[str]:
        """Kernel lines from the server's start on, and those without a time."""
        start = self.evidence.target.start_time / 100
        return [line for line in self.evidence.kernel_log if _since_boot(line) >= start]

    # ------------------------------------------------------------------ progress
    @cached_property
    def read_rate(self) -> float:
        """Bytes a second that the schedulers read, from disk or cache."""
        total = sum(max(p.rchar_delta, p.read_bytes_delta) for p in self.schedulers)
        return total / max(self.evidence.seconds, 0.001)

    @cached_property
    def compilers(self) -> list[ProcessFacts]:
        """Living compiler children that use CPU."""
        return [p for p in self.evidence.processes if p.role == "compiler" and p.cpu > COMPILER_CPU]

    @cached_property
    def progress(self) -> list[str]:
        """What counts as progress between the samples, in words; empty: nothing moved."""
        found, log = [], self.evidence.log
        if self.forwards:
            found.append(f"{log.forwards} batches were logged between the samples")
        elif log.news and not self.starved:
            found.append(f"the log has {log.news} new lines that are no repetition")
        seconds = self.evidence.seconds
        for process in self.members:
            name = process.label or process.role
            if process.rchar_delta > RCHAR_RATE * seconds or process.read_bytes_delta > READ_RATE * seconds:
                read = max(process.rchar_delta, process.read_bytes_delta)
                found.append(f"{name} read {size(read)} in {seconds:.0f} s")
            if process.rss_delta > RSS_RATE * seconds:
                found.append(f"{name} grew by {size(process.rss_delta)} of memory")
        return found

    @cached_property
    def silence(self) -> tuple[float, float]:
        """Seconds without progress as far as anybody knows, and the seconds that are allowed."""
        watch, log = self.evidence.watch, self.evidence.log
        if watch and watch.patience:
            return watch.idle_seconds, watch.patience
        quiet = log.quiet_seconds if log.exists and log.bytes else self.evidence.uptime
        if log.news_seconds:
            quiet = max(quiet, log.news_seconds)
        elif log.growth and log.repeated and not log.news:
            lines = max(1.0, log.growth / max(len(log.repeated_line), USUAL_LINE))
            quiet = max(quiet, min(self.evidence.uptime, log.repeated * self.evidence.seconds / lines))
        usual = SILENCE_OF.get(self.phase, SILENCE)
        given = getattr(watch.patiences, self.phase) if watch and watch.patiences else usual
        return quiet, given

    @property
    def silent_too_short(self) -> bool:
        """Nobody may say "hung" yet; an engine that counts its own zeros needs no patience."""
        return self.within_patience and not self.starved

    @property
    def within_patience(self) -> bool:
        quiet, allowed = self.silence
        return quiet < allowed

    @cached_property
    def bar(self) -> str:
        """The last progress bar, for instance "3/14, 00:40 left"; empty when there is none."""
        for line in reversed(self.evidence.log.tail):
            matches = list(_BAR.finditer(line))
            if matches:
                last = matches[-1]
                left = "" if "?" in last["left"] else f", {last['left']} left by its own estimate"
                return f"{last['done']} of {last['total']}{left}"
        return ""

    # ------------------------------------------------------------------ where ranks are
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
    return main.cpu >= SPIN_CPU or (main.demand >= SPIN_CPU and main.cpu >= BLOCKED_CPU)


def _is_busy(process: ProcessFacts) -> bool:
    main = process.main
    return main is not None and main.cpu >= SPIN_CPU and process.state not in "TtZX"


def is_blocked(process: ProcessFacts) -> bool:
    """The main thread sleeps all the time."""
    main = process.main
    return main is not None and main.cpu < BLOCKED_CPU and main.voluntary < FEW_SWITCHES and process.state not in "TtZX"


def size(count: float) -> str:
    """Bytes for people."""
    for unit in ("B", "kB", "MB", "GB"):
        if abs(count) < 1000:
            return f"{count:.0f} {unit}"
        count /= 1000
    return f"{count:.1f} TB"


def name_of(process: ProcessFacts) -> str:
    """A process for people: its rank's name in the log, or what it is."""
    return process.label or process.role
