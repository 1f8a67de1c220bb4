"""Servers whose port is open: healthy, idle, busy, or stuck in a request."""

from __future__ import annotations

from fleetdump.diagnosis.registry import Step, signature
from fleetdump.diagnosis.signatures.collectives import ras_facts
from fleetdump.diagnosis.signatures.compiling import compiles
from fleetdump.diagnosis.suspect import collective_of, stack_facts, suspect
from fleetdump.diagnosis.types import HIGH, LOW, MEDIUM, OK, WAIT, Verdict
from fleetdump.diagnosis.view import View


@signature(Step.ANSWERING)
def healthy(view: View) -> Verdict | None:
    """``/health`` generated a token."""
    health = view.answer("/health")
    if not view.healthy or health is None or view.missing_ranks or view.engine_dead or view.grammar_stacks:
        return None
    log = view.evidence.log
    facts = [f"GET /health: 200 in {health.seconds:.1f} s", f"port {view.evidence.target.port} is open"]
    cpu = ", ".join(f"{p.label} {p.main.cpu:.0%}" for p in view.schedulers if p.main)
    if log.forwards:
        facts.append(f"{log.forwards} batches logged in {view.evidence.seconds:.0f} s")
        return Verdict("HEALTHY", "the server is healthy and works", HIGH, OK, view.phase, evidence=facts)
    facts.append(f"schedulers poll for requests ({cpu} of a core): their CPU use is no sign of a hang")
    return Verdict("IDLE_OK", "the server is healthy and idle", HIGH, OK, view.phase, evidence=facts)


@signature(Step.ANSWERING)
def busy(view: View) -> Verdict | None:
    """``/health`` fails or is slow, but batches move."""
    health = view.answer("/health")
    if not view.port_open or view.healthy or not view.forwards or view.missing_ranks:
        return None
    answer = f"{health.status or health.error} in {health.seconds:.1f} s" if health else "not asked"
    return Verdict(
        "BUSY_NOT_HUNG",
        "the server is busy with long requests, not hung",
        HIGH,
        WAIT,
        view.phase,
        evidence=[f"GET /health: {answer}", f"{view.evidence.log.forwards} batches logged between the samples"],
        next_steps=["wait, or raise the client's time limit"],
    )


@signature(Step.WAITING)
def request_stuck(view: View) -> Verdict | None:
    """The port is open, no request gets through and nothing moves: the warm-up request, or a later one, is stuck."""
    evidence = view.evidence
    stuck = view.port_open and not view.healthy and not view.progress and not compiles(view)
    if not stuck or not view.complete or view.silent_too_short or view.grammar_stacks:
        return None
    found = suspect(view)
    during = "a request" if view.was_ready else "the warm-up request"
    who = f"rank {found.rank} " if found.rank is not None else ""
    where = f": {who}{found.what}" if found.what else ", and no single rank stands out"
    facts = [f"GET {h.path}: {h.status or h.error} in {h.seconds:.1f} s" for h in evidence.http]
    stages = _stage_facts(view)
    if found.diverged:
        code = "COLLECTIVE_DIVERGED"
    elif view.was_ready:
        code = "RANK_SPIN" if view.spins else "UNKNOWN"
    else:
        code = "WARMUP_STALL"
    confidence = found.confidence if code != "UNKNOWN" else LOW
    return Verdict(
        code,
        f"{during} never ends{where}",
        MEDIUM if code == "COLLECTIVE_DIVERGED" else confidence,
        phase="serving" if view.was_ready else "warmup",
        rank=found.rank,
        evidence=[*facts, *_count_facts(view), *stages, *found.facts, *stack_facts(view)],
        next_steps=found.next_steps,
    )


def _stage_facts(view: View) -> list[str]:
    """Where pipeline stages are, when there are several."""
    staged = [s for s in view.evidence.stacks if "PP" in s.label]
    return [f"{s.label} waits in {name}" for s in staged if (name := collective_of(s.frames))]


def _count_facts(view: View) -> list[str]:
    """Who is behind by NCCL's own count, and what the engine says of itself."""
    log = view.evidence.log
    starved = [f"{log.zero_statistics} statistics lines in a row say 0 tokens a second with requests there"]
    return [*ras_facts(view), *(starved if view.starved else [])]
