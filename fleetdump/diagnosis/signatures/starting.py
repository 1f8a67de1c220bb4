"""A start that stopped: the launcher waits for a rank that lives and does not come."""

from __future__ import annotations

from fleetdump.diagnosis.registry import Step, signature
from fleetdump.diagnosis.signatures.compiling import compiles
from fleetdump.diagnosis.signatures.pipes import mute
from fleetdump.diagnosis.suspect import stack_facts, suspect
from fleetdump.diagnosis.types import DIRECT, MEASURED, Verdict
from fleetdump.diagnosis.view import AFTER, View

SHORT_OF_MEMORY = 20.0
"""Percent of time in which all work waited for memory."""


@signature(Step.WAITING)
def parent_waits_ready(view: View) -> Verdict | None:
    """Port closed, everybody alive, nothing moves: some rank owes its ready message."""
    evidence = view.evidence
    if not view.complete or view.port_open or view.progress or compiles(view) or view.within_patience:
        return None
    found = suspect(view)
    if mute(view) or (view.unreadable and found.confidence not in (DIRECT, MEASURED)):
        return None
    process = next((p for p in view.schedulers if p.rank == found.rank), None)
    phase = view.phase_of(process)
    what = f", which {found.what} {AFTER[phase]}" if found.what else f" {AFTER[phase]}"
    late = f"the launcher waits for the ready message of rank {found.rank}{what}"
    level = f"the launcher waits for its ranks, which stand still {AFTER[phase]}; none of them stands out"
    if found.rank is None and found.what:
        level = f"the launcher waits for its ranks {AFTER[phase]}: {found.what}"
    if view.memory_pressure >= SHORT_OF_MEMORY:
        level += f", and all work waits for memory {view.memory_pressure:.0f} % of the time"
    quiet, _ = view.silence
    facts = [
        f"port {evidence.target.port} is closed and the launcher has not heard from every rank",
        f"nothing moved in two samples {evidence.seconds:.0f} s apart; silent for {quiet:.0f} s",
        *launcher_facts(view),
        *found.facts,
        *stack_facts(view),
        *mark_facts(view),
        *wakeup_facts(view),
        log_comparison(view, phase),
        "SGLang's own watchdog watches batches only: it never fires before the first one",
    ]
    return Verdict(
        "PARENT_WAITS_READY",
        level if found.rank is None else late,
        found.confidence,
        phase=phase,
        rank=found.rank,
        evidence=facts,
        next_steps=found.next_steps,
    )


def launcher_facts(view: View) -> list[str]:
    """Where the launcher is, and which rank's pipe it looks at."""
    launcher = view.launcher
    if launcher is None or launcher.main is None:
        return []
    names = {p.pid: p.label or p.role for p in view.evidence.processes}
    facts = [f"launcher: {launcher.main.cpu:.0%} CPU, sleeps in {launcher.main.wchan or 'a system call'}"]
    watched = {launcher.syscall_fd, *launcher.polled_fds} - {-1}
    for pipe in launcher.pipes:
        if pipe.mode != "r":
            continue
        peers = ", ".join(names.get(pid, str(pid)) for pid in pipe.peers) or "nobody"
        if pipe.fd in watched:
            facts.append(f"launcher waits on fd {pipe.fd}: the other end of that pipe is {peers}'s")
    return facts


def mark_facts(view: View) -> list[str]:
    """The last mark of each rank."""
    return [f"{m.label}: last mark {m.marks[-1]!r}" for m in view.evidence.log.ranks if m.marks]


def wakeup_facts(view: View) -> list[str]:
    """Writes that look like work and are not."""
    writes = [c for t in view.evidence.traces for c in t.calls if c.name == "write" and "eventfd" in c.target]
    wakes = sum(c.count for c in writes)
    return [f"{wakes} writes to eventfd descriptors are wake-ups between threads, not progress"] if wakes else []


def log_comparison(view: View, phase: str) -> str:
    """Log lines against what healthy starts had."""
    log, watch = view.evidence.log, view.evidence.watch
    healthy = watch.healthy if watch else None
    text = f"the log has {log.lines} lines" + (" beside what was too much to read" if log.skipped else "")
    if healthy and not log.skipped:
        text += f", healthy starts had {healthy.lines_span}"
    text += f"; stopped {AFTER[phase]}"
    if healthy and phase in healthy.phase_seconds:
        text += f"; healthy starts spend {healthy.phase_seconds[phase]:.0f} s there"
    return text
