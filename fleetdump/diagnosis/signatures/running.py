"""Servers whose port is open: healthy, idle, busy, or stuck in a request."""

from __future__ import annotations

from fleetdump.diagnosis.members import is_held
from fleetdump.diagnosis.movement import BULK_RATE
from fleetdump.diagnosis.registry import Step, signature
from fleetdump.diagnosis.signatures.collectives import (
    diverged,
    kernel_spin,
    network_lost,
    other_host_behind,
    other_host_waited_for,
    ras_facts,
)
from fleetdump.diagnosis.signatures.compiling import compiles, compiling_stacks
from fleetdump.diagnosis.suspect import Suspect, collective_of, stack_facts, suspect
from fleetdump.diagnosis.types import DIRECT, MEASURED, OK, PATTERN, WAIT, Verdict
from fleetdump.diagnosis.view import View
from fleetdump.diagnosis.words import asked, name_of, size

FEW_CPU = 0.2
OTHER_HOSTS = (other_host_behind, network_lost, other_host_waited_for)
BUSY_SWITCHES = 100.0
"""Voluntary switches a second of a main thread: the receive loop has thousands, on a slow CPU hundreds."""


@signature(Step.ANSWERING)
def healthy(view: View) -> Verdict | None:
    """``/health`` generated a token."""
    health = view.answer("/health")
    held = any(map(is_held, view.members))
    if not view.healthy or health is None or view.gone or held or view.grammar_stacks:
        return None
    facts = [f"GET /health: 200 in {health.seconds:.1f} s", f"port {view.evidence.target.port} is open"]
    cpu = ", ".join(f"{p.label} {p.main.cpu:.0%}" for p in view.schedulers if p.main)
    work = _work_facts(view)
    if work:
        facts += work
        return Verdict("HEALTHY", "the server is healthy and works", DIRECT, OK, view.phase, evidence=facts)
    facts.append(f"schedulers look for requests ({cpu} of a core): their CPU use is no sign of a hang")
    return Verdict("IDLE_OK", "the server is healthy and idle", DIRECT, OK, view.phase, evidence=facts)


def _work_facts(view: View) -> list[str]:
    """What shows that a healthy server has something to do."""
    log = view.evidence.log
    facts = [f"{log.forwards} batches logged in {view.evidence.seconds:.0f} s"] if log.forwards else []
    facts += [f"{s.label or s.role} compiles a kernel" for s in compiling_stacks(view)]
    facts += [f"GPU {g.index} computes: {g.utilization} % at {g.power:.0f} W" for g in view.gpus_work]
    busy = [p for p in view.schedulers if p.main and p.main.cpu > FEW_CPU and p.main.voluntary < BUSY_SWITCHES]
    return facts + [f"{name_of(p)} works: {p.main.cpu:.0%} of a core, hardly ever asleep" for p in busy if p.main]


@signature(Step.ANSWERING)
def busy(view: View) -> Verdict | None:
    """``/health`` or a request fails or is slow, but batches move."""
    health = view.answer("/health")
    reads = view.disk_rate >= BULK_RATE
    # Without /health what ranks do counts, and lines alone don't: the HTTP server logs whom it answers.
    ranks_move = not view.engine_was_asked and not view.evidence.log.news
    told = view.gpus_work or view.failed_requests or reads or ranks_move or (view.bar and view.evidence.log.news)
    working = view.progress if told and view.complete else []
    if not view.port_open or view.healthy or view.gone or view.starved or not (view.forwards or working):
        return None
    answer = f"{health.status or health.error} in {health.seconds:.1f} s" if health else "not asked"
    moved = [f"{view.evidence.log.forwards} batches logged between the samples"] if view.forwards else working
    return Verdict(
        "BUSY_NOT_HUNG",
        f"the server reads {size(view.disk_rate)}/s from disk (weights, a cache), and is not hung"
        if reads and not view.forwards
        else "the server is busy with long requests, not hung",
        MEASURED,
        WAIT,
        view.phase,
        evidence=[f"GET /health: {answer}", *view.unserved, *moved],
        next_steps=["wait, or raise the client's time limit"],
    )


@signature(Step.PROGRESS)
def engine_turns(view: View) -> Verdict | None:
    """All ranks look for requests or go round their loops, and ``/health`` did not say so, for whatever reason."""
    if view.healthy or not view.engine_turns:
        return None
    health = view.answer("/health")
    said = f"GET /health: {health.status or health.error}" if health else "no answer of /health is in the evidence"
    return Verdict(
        "BUSY_NOT_HUNG",
        f"no rank hangs (all look for requests or work); whether requests are answered is not known: {said}",
        PATTERN,
        WAIT,
        view.phase,
        evidence=[
            *(
                f"{name_of(p)}: {p.main.cpu:.0%} of a core, woken {p.main.voluntary:.0f} times a second"
                for p in view.schedulers
                if p.main
            ),
            *map(asked, view.evidence.http),
        ],
        next_steps=["ask GET /health, with the API key if the server has one: it generates a token"],
    )


@signature(Step.PROGRESS)
def too_early(view: View) -> Verdict | None:
    """The port is open and ``/health`` does not answer, but not for as long as a batch may take."""
    quiet, allowed = view.silence
    if not view.port_open or view.healthy or not view.complete or not view.silent_too_short or view.starting:
        return None
    if view.forwards or view.progress or compiles(view) or view.grammar_stacks or view.api_process:
        return None
    return Verdict(
        "BUSY_NOT_HUNG",
        f"the server does not answer, and {quiet:.0f} s of silence are too few to call it hung",
        PATTERN,
        WAIT,
        view.phase,
        evidence=[
            *map(asked, view.evidence.http),
            f"silent for {quiet:.0f} s of the {allowed:.0f} s that a batch may take",
        ],
        next_steps=[f"ask again in {max(10.0, allowed - quiet):.0f} s"],
    )


@signature(Step.PROGRESS)
def seen_from_later_host(view: View) -> Verdict | None:
    """A later host of several, without GPUs to look at: its busy ranks may compute or wait, and no log tells which."""
    if not _undecided_here(view):
        return None
    return Verdict(
        "BUSY_NOT_HUNG",
        "the ranks of this host are busy, and whether they come back is to be seen on the first host alone",
        PATTERN,
        WAIT,
        view.phase,
        evidence=[fact for spin in view.spins for fact in spin.facts],
        next_steps=["diagnose the first host: its log tells of batches, and its /health asks the engine"],
    )


def _undecided_here(view: View) -> bool:
    all_busy = bool(view.spins) and len(view.spins) == len(view.schedulers)
    return view.on_later_host and all_busy and not view.gpus and suspect(view).rank is None


@signature(Step.WAITING)
def request_stuck(view: View) -> Verdict | None:
    """The port is open, no request gets through and nothing moves: the warm-up request, or a later one, is stuck."""
    moves = view.healthy or view.engine_turns or view.progress or compiles(view)
    stuck = view.port_open and not moves
    if not stuck or not view.complete or view.silent_too_short or view.grammar_stacks or _undecided_here(view):
        return None
    found = suspect(view)
    during = "a request" if view.was_ready else "the warm-up request"
    who = f"rank {found.rank} " if found.rank is not None else ""
    where = f": {who}{found.what}" if found.what else ", and no single rank stands out"
    facts = [*map(asked, view.evidence.http)]
    facts.append(f"port {view.evidence.target.port} is open, and nothing moved in {view.evidence.seconds:.0f} s")
    stages = _stage_facts(view)
    if any(cause(view) for cause in OTHER_HOSTS) or (view.was_ready and (diverged(view) or kernel_spin(view))):
        return None  # has a verdict of its own
    code = _running_code(view, found) if view.was_ready else "WARMUP_STALL"
    if not code:
        return None
    return Verdict(
        code,
        f"{during} never ends{where}",
        found.confidence,
        phase="serving" if view.was_ready else "warmup",
        rank=found.rank,
        evidence=[*facts, *_count_facts(view), *stages, *found.facts, *stack_facts(view)],
        next_steps=found.next_steps,
    )


def _running_code(view: View, found: Suspect) -> str:
    """A server that has served: one rank spins, or is not where all others wait for it; empty when nobody knows."""
    others = [spin for spin in view.spins if spin.process.rank != found.rank]
    if found.rank is not None and found.facts and len(view.schedulers) > 1 and len(others) == len(view.spins):
        return "MISSING_RANK"
    return "RANK_SPIN" if view.spins else ""


def _stage_facts(view: View) -> list[str]:
    """Where pipeline stages are, when there are several."""
    staged = [s for s in view.evidence.stacks if "PP" in s.label]
    return [f"{s.label} waits in {name}" for s in staged if (name := collective_of(s.frames))]


def _count_facts(view: View) -> list[str]:
    """Who is behind by NCCL's own count, and what the engine says of itself."""
    log = view.evidence.log
    starved = [f"{log.zero_statistics} statistics lines in a row say 0 tokens a second with requests there"]
    return [*ras_facts(view), *(starved if view.starved else [])]
