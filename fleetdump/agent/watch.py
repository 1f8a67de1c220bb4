"""Follow a server until it is ready, stalled or dead (verb ``watch``).

A watch may begin at any time after the launch: it reads the log from its start and takes times from the log's stamps.
What it decides is in pure functions: ``judge`` here, ``progress`` for the stall.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import threading
import time
from dataclasses import dataclass, field
from typing import Any, Dict, List, Optional, Tuple

from fleetdump.agent import audit, healthy, procfs
from fleetdump.agent.context import AgentContext
from fleetdump.agent.evidence_types import Target, WatchFacts
from fleetdump.agent.family import Family, RollCall
from fleetdump.agent.formats import FORMAT_VERSION
from fleetdump.agent.jsonl import append_lines, open_journal
from fleetdump.agent.loading import Loading, LoadMeter, model_bytes
from fleetdump.agent.lock import read_holder
from fleetdump.agent.logfollow import LogFollower
from fleetdump.agent.logmarks import LogMarks
from fleetdump.agent.probes import gpu, net
from fleetdump.agent.probes.bounded import ProbeFailed
from fleetdump.agent.progress import Assessment, ProgressTracker, Sample
from fleetdump.agent.protocol import AgentFailure
from fleetdump.agent.scrub import scrub
from fleetdump.agent.server import ServerRecord, load_record, save_record
from fleetdump.agent.servermessages import HealthyProfile, WatchArgs, WatchResult
from fleetdump.agent.vitals import death

SETTLE_SECONDS = 2.0
"""Between the first sign of a death and its report: time for the traceback to reach the log."""
MARK_SECONDS = 5.0
"""Between the ready line and the verdict ``no_mark``: time for the other ranks' lines to reach the log."""
HTTP_SECONDS = 3.0
GPU_INTERVAL = 5.0
EVIDENCE_SECONDS = 5.0
CLOSING_SECONDS = 2.0
"""Kept of the call's deadline for the answer."""


@dataclass
class Situation:
    """What one look at the server showed, as ``judge`` needs it. ``lost``: members of the server that were there and
    are gone, in words. ``since_death``, ``since_ready``: seconds since the first sign of either."""

    marks: LogMarks
    launcher_alive: bool
    lost: List[str] = field(default_factory=list)
    since_death: float = 0.0
    since_ready: float = 0.0
    answers: bool = False


def watch(args: WatchArgs, ctx: AgentContext) -> WatchResult:
    """Watch server ``args.server``; raises ``AgentFailure`` not_found when it was never launched."""
    record = load_record(ctx.state, args.server)
    if record is None:
        raise AgentFailure(
            "not_found",
            f"server {args.server} was never launched on this host",
            where=str(ctx.state.root / "servers"),
            next_step="run `fleetdump deploy`",
        )
    return Watcher(args, ctx, record).run()


def judge(args: WatchArgs, now: Situation) -> Optional[Tuple[str, str]]:
    """Outcome and its explanation, or None while the server is on its way (a stall is judged by ``progress``)."""
    marks = now.marks
    wrong = {rank: name for rank, name in marks.classes.items() if args.expect_class and name != args.expect_class}
    if wrong:
        return "wrong_model", _wrong_model(args.expect_class, wrong, marks)
    if marks.crashed or now.lost or not now.launcher_alive:
        if now.since_death < SETTLE_SECONDS:
            return None
        return "died", death(marks, now.lost, now.launcher_alive)
    if args.mark and marks.refused:
        return "no_mark", f"the patch refuses to work: {'; '.join(sorted(set(marks.refused.values())))}"
    if not (marks.ready and now.answers):
        return None
    without_mark = max(0, args.ranks - len(marks.marked)) if args.mark else 0
    without_class = max(0, args.ranks - len(marks.classes)) if args.expect_class else 0
    if not without_mark and not without_class:
        return "ready", ""
    if now.since_ready < MARK_SECONDS:
        return None
    if without_mark:
        return "no_mark", f"the server is ready, but {without_mark} of {args.ranks} ranks never logged the patch's mark"
    said = f"{without_class} of {args.ranks} ranks never said which model class they loaded (Load weight end. type=)"
    return "wrong_model", f"the server is ready, but {said}; expected {args.expect_class}"


def _wrong_model(expected: str, wrong: Dict[str, str], marks: LogMarks) -> str:
    loaded = ", ".join(f"{rank} loaded {name}" for rank, name in wrong.items())
    failed = [module for module in marks.ignored_imports if ".models." in module]
    # Many model files fail on any host, for want of some optional package: those named like the model tell.
    failed.sort(key=lambda module: (-_likeness(module, expected), module))
    reasons: Dict[str, str] = {}
    for module in failed:
        reasons.setdefault(marks.ignored_imports[module], module.rpartition(".")[2])
    told = "; ".join(f"{module}: {why}" for why, module in list(reasons.items())[:3])
    hint = f"; imports of model files that failed: {told}" if marks.fallbacks and told else ""
    return f"expected {expected}, but {loaded}{hint}"


def _likeness(module: str, model_class: str) -> int:
    """How many letters a module's name and a class's have in common from the beginning."""
    pairs = zip(module.rpartition(".")[2].replace("_", ""), model_class.lower())
    return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))


class GpuMemory:
    """Memory in use on all GPUs, asked for now and then in a thread, since nvidia-smi itself can hang."""

    def __init__(self) -> None:
        self._used: Optional[int] = None
        self._next = 0.0
        self._thread: Optional[threading.Thread] = None
        self._failed = False

    def latest(self) -> Optional[int]:
        """Bytes at the last answer; None without GPUs, or once nvidia-smi has failed."""
        idle = self._thread is None or not self._thread.is_alive()
        if idle and not self._failed and time.monotonic() >= self._next:
            self._next = time.monotonic() + GPU_INTERVAL
            self._thread = threading.Thread(target=self._ask, name="gpu-memory", daemon=True)
            self._thread.start()
        return self._used

    def _ask(self) -> None:
        try:
            self._used = sum(facts.memory_used for facts in gpu.gpus()) << 20
        except ProbeFailed:
            self._used, self._failed = None, True


class Watcher:
    """One watch of one launch of a server."""

    def __init__(self, args: WatchArgs, ctx: AgentContext, record: ServerRecord) -> None:
        self._args, self._ctx, self._record = args, ctx, record
        self._log = LogFollower(record.log, args.mark, args.ranks)
        self._gpu = GpuMemory()
        self._roll = RollCall()
        self._lost: List[str] = []
        self._death_at = 0.0
        self._ready_at = 0.0
        self._phases_told = 0
        self._last_tick = 0.0
        self._family = Family(record.pid, record.start_time)
        self._meter = LoadMeter(model_bytes(record.model_path))
        self._loading: Optional[Loading] = None
        self._engine, self._key = healthy.kind_of(record)
        self._healthy = healthy.on_all_hosts(ctx.state, self._key, args.healthy)
        usual = self._healthy.longest if self._healthy else None
        self._tracker = ProgressTracker(args.patience, usual, gap_limit=max(5.0, 3 * args.interval))

    def run(self) -> WatchResult:
        """Poll until an outcome."""
        end = time.monotonic() + min(self._args.until, self._ctx.remaining() - CLOSING_SECONDS)
        while True:
            withdrawn = self._withdrawn()
            if withdrawn:
                return self._finish_withdrawn(*withdrawn)
            situation, assessment = self._look()
            self._tell(assessment)
            verdict = judge(self._args, situation)
            if verdict:
                return self._finish(*verdict, assessment)
            if assessment.stalled:
                return self._finish("stall", self._stall_text(assessment), assessment)
            if time.monotonic() + self._args.interval > end:
                return self._finish("timeout", f"still in phase {assessment.phase}", assessment)
            time.sleep(self._args.interval)

    # ------------------------------------------------------------------ what operators do meanwhile
    def _withdrawn(self) -> Optional[Tuple[str, str]]:
        """``stopped`` or ``replaced`` and by whom, once the record says that an operator took this launch away."""
        name = self._record.name
        try:
            current = load_record(self._ctx.state, name)
        except AgentFailure:
            return None  # what is known of the launch is enough to go on
        if current is None:
            return "stopped", f"server {name} was stopped and its record removed{self._operator('clean', 'stop')}"
        if current.launch_id != self._record.launch_id:
            return "replaced", f"server {name} was replaced by another launch of it{self._operator('launch')}"
        if current.stopped_at:
            return "stopped", f"server {name} was stopped by fleetdump stop{self._operator('stop', 'launch')}"
        return None

    def _operator(self, *verbs: str) -> str:
        holder = read_holder(self._ctx.state.root / "lock")
        if holder is not None and holder.verb in verbs and procfs.is_alive(holder.pid, holder.start_time):
            who = holder.operator
        else:
            who = audit.last_operator(self._ctx.state, verbs, self._record.started_at)
        return f" (operator {who})" if who else ""

    def _finish_withdrawn(self, outcome: str, detail: str) -> WatchResult:
        """The result of a launch that somebody else took away: no evidence, and nothing is written, for the folder is
        not this launch's any more."""
        marks = self._log.marks
        return WatchResult(
            outcome=outcome,
            phase=marks.phase,
            seconds=round(max(0.0, time.time() - self._record.started_at), 1),
            lines=marks.lines,
            detail=detail,
            log_tail=[scrub(line) for line in marks.tail],
        )

    # ------------------------------------------------------------------ looking
    def _look(self) -> Tuple[Situation, Assessment]:
        # Processes first: whoever dies after this look has already written what the log shows below.
        alive = procfs.is_alive(self._record.pid, self._record.start_time)
        processes = self._family.sample() if alive else []
        marks = self._log.read()
        if alive:
            self._lost = self._roll.call(processes, marks, self._args.ranks if marks.ready else 0)
        now = time.monotonic()
        self._loading = self._meter.observe(now, marks.phase, processes, marks.bar)
        if (marks.crashed or self._lost or not alive) and not self._death_at:
            self._death_at = now
        if marks.ready and not self._ready_at:
            self._ready_at = now
        situation = Situation(
            marks=marks,
            launcher_alive=alive,
            lost=self._lost,
            since_death=now - self._death_at if self._death_at else 0.0,
            since_ready=now - self._ready_at if self._ready_at else 0.0,
            answers=marks.ready and alive and self._roll.is_whole and self._answers(),
        )
        return situation, self._tracker.observe(self._sample(now, marks, processes))

    def _sample(self, now: float, marks: LogMarks, processes: List[procfs.ProcSample]) -> Sample:
        # A server that says it is ready but whose port does not answer must not count as an idle one.
        phase = "warmup" if marks.phase == "serving" else marks.phase
        return Sample(now, phase, marks.news, marks.forwards, processes, self._gpu.latest())

    def _answers(self) -> bool:
        target = Target(self._record.pid, self._record.start_time, port=self._record.port, host=self._record.host)
        paths = ("/model_info", "/get_model_info")  # the second is its name before SGLang 0.5.6
        return any(net.get(target, path, HTTP_SECONDS).status == 200 for path in paths)

    # ------------------------------------------------------------------ telling
    def _tell(self, assessment: Assessment) -> None:
        marks = self._log.marks
        for start in marks.phases[self._phases_told :]:
            seconds = round(max(0.0, start.at - self._record.started_at), 1)
            fact = {"server": self._record.name, "phase": start.phase, "seconds": seconds, "lines": start.line}
            self._ctx.emit("phase", **fact)
            self._timeline("phase", fact)
        if len(marks.phases) > self._phases_told:
            self._phases_told = len(marks.phases)
            self._save(ready=False)
        if time.monotonic() - self._last_tick >= 1.0:
            self._last_tick = time.monotonic()
            fact = {"server": self._record.name, "phase": marks.phase, "lines": marks.lines}
            fact.update(
                idle_seconds=round(assessment.idle_seconds, 1),
                usual_lines=self._healthy.lines_span if self._healthy else "",
            )
            self._ctx.emit("tick", **fact, **self._load_facts())

    def _load_facts(self) -> Dict[str, Any]:
        """What of the weights has been read, where that is what happens now."""
        now = self._loading
        if now is None:
            return {}
        done, rate, eta = round(now.done), round(now.rate), round(now.eta)
        return {"load_bytes": done, "load_total": now.total, "load_rate": rate, "load_eta": eta}

    def _timeline(self, event: str, fact: Dict[str, Any]) -> None:
        if self._record.ready and fact.get("outcome", "ready") == "ready":
            return  # it was ready before this watch began: nothing has happened to it
        line = {"v": FORMAT_VERSION, "t": time.time(), "event": event, "launch_id": self._record.launch_id, **fact}
        with contextlib.suppress(OSError):  # a full disk, a file that is none: the watch goes on without it
            file = open_journal(self._ctx.state.root / "servers" / self._record.name / "timeline.jsonl")
            if file is None:
                return  # another watch of the same server writes it
            with file:
                append_lines(file, [line])

    def _save(self, ready: bool) -> None:
        """Update server.json, unless the server was launched anew or stopped meanwhile."""
        current = self._current()
        if current is None:
            return
        current.phase, current.lines = self._log.marks.phase, self._log.marks.lines
        current.ready = current.ready or ready
        current.kind = self._key
        save_record(self._ctx.state, current)

    def _current(self) -> Optional[ServerRecord]:
        """The record of this launch as it is now, if it is still there and can be read."""
        with contextlib.suppress(AgentFailure):
            current = load_record(self._ctx.state, self._record.name)
            return current if current and current.launch_id == self._record.launch_id else None
        return None

    # ------------------------------------------------------------------ the end
    def _finish(self, outcome: str, detail: str, assessment: Assessment) -> WatchResult:
        marks = self._log.marks
        ready_at = next((start.at for start in marks.phases if start.phase == "serving"), 0.0)
        until = ready_at if outcome == "ready" and ready_at else time.time()
        result = WatchResult(
            outcome=outcome,
            phase=marks.phase,
            seconds=round(max(0.0, until - self._record.started_at), 1),
            lines=marks.ready_line or marks.lines,
            phase_seconds={name: round(s, 1) for name, s in self._phase_seconds(until).items()},
            idle_seconds=round(assessment.idle_seconds, 1),
            detail="; ".join(filter(None, [scrub(detail), "" if outcome == "ready" else self._log_trouble()])),
            log_tail=[scrub(line) for line in marks.tail],
            healthy=self._healthy,
            kind=self._key,
        )
        if outcome == "ready":
            self._on_ready(result)
        if outcome == "stall" and self._args.evidence_on_stall:
            result.evidence, result.evidence_dir = self._evidence(assessment)
        self._timeline("outcome", {"outcome": outcome, "phase": result.phase, "seconds": result.seconds})
        return result

    def _phase_seconds(self, until: float) -> Dict[str, float]:
        seconds = self._log.marks.phase_seconds(until, self._record.started_at)
        seconds.pop("serving", None)
        return seconds

    def _on_ready(self, result: WatchResult) -> None:
        current = self._current()
        first = current is not None and not current.ready
        self._save(ready=True)
        if first:
            took = max((rank.weights_gb or 0.0 for rank in self._log.marks.ranks.values()), default=0.0)
            start = healthy.HealthyStart(
                self._key, result.lines, result.seconds, result.phase_seconds, self._engine, took
            )
            healthy.remember(self._ctx.state, start)

    def _evidence(self, assessment: Assessment) -> Tuple[Dict[str, Any], str]:
        from fleetdump.agent import evidence

        record = self._record
        target = Target(
            pid=record.pid,
            start_time=record.start_time,
            session=record.pid,
            server=record.name,
            port=record.port,
            host=record.host,
            log=record.log,
            ranks=self._args.ranks,
            python=record.python,
            watched_paths=[record.capture_dir] if record.capture_dir else [],
        )
        facts = WatchFacts(self._log.marks.phase, assessment.idle_seconds, assessment.patience, self._healthy)
        return evidence.collect(target, self._ctx, seconds=EVIDENCE_SECONDS, deep=True, watch_facts=facts)

    def _stall_text(self, assessment: Assessment) -> str:
        marks = self._log.marks
        parts = [
            f"no progress for {assessment.idle_seconds:.0f} s in phase {marks.phase} "
            f"(patience {assessment.patience:.0f} s), {marks.lines} log lines{self._usual_lines()}"
        ]
        if marks.slowest():
            parts.append(f"behind the others: {', '.join(marks.slowest())}")
        if marks.repeated > 1:
            parts.append(f"the log only repeats: {marks.repeated_line}")
        return "; ".join(parts)

    def _usual_lines(self) -> str:
        known: Optional[HealthyProfile] = self._healthy
        if known is None:
            return ""
        return f" (healthy starts had {known.lines_span})"

    def _log_trouble(self) -> str:
        """Why the watched log may not say what the server does: the launcher's stdout is another file, or its disk is
        full. Empty when it does say it."""
        log = self._record.log
        try:
            out = os.stat(f"{procfs.PROC}/{self._record.pid}/fd/1")
            disk = os.statvfs(os.path.dirname(log))
        except OSError:
            return ""
        if not disk.f_bavail or (disk.f_files and not disk.f_favail):
            return f"the disk of the log is full, so that nothing more comes into {log}"
        with contextlib.suppress(FileNotFoundError):
            if os.path.samestat(out, os.stat(log)):
                return ""
        target = procfs.read_link(f"{procfs.PROC}/{self._record.pid}/fd/1")
        return f"the server writes to {target}, not to the watched log {log}"
