"""Open ports behind which one thread is busy with something else: grammar compilation, the HTTP server's own loop."""

from __future__ import annotations

from fleetdump.agent.evidence_process import ProcessFacts
from fleetdump.diagnosis.movement import SPIN_CPU
from fleetdump.diagnosis.registry import Step, signature
from fleetdump.diagnosis.types import DIRECT, MEASURED, WAIT, Verdict
from fleetdump.diagnosis.view import FEW_SWITCHES, IN_EPOLL, IN_POLL, View, is_blocked
from fleetdump.diagnosis.words import asked, name_of


@signature(Step.ANSWERING)
def grammar(view: View) -> Verdict | None:
    """A thread compiles a grammar or schema for structured output."""
    if not view.grammar_stacks or view.evidence.log.forwards:
        return None
    stack, frame = view.grammar_stacks[0]
    process = next((p for p in view.evidence.processes if p.pid == stack.pid), None)
    who = stack.label or stack.role
    health = view.answer("/health")
    facts = [f"{who} is in {frame}"]
    facts += [f"{who}: {process.cpu:.0%} of a core"] if process else []
    facts += [f"GET /health: {health.status or health.error} (the HTTP server itself is well)"] if health else []
    facts += [f"GPUs: {', '.join(f'{g.utilization} %' for g in view.gpus)}"] if view.gpus else []
    return Verdict(
        "GRAMMAR_COMPILE",
        "a grammar for structured output is being compiled; it can take minutes to hours for a deep schema",
        DIRECT if process and process.cpu > 0.5 else MEASURED,
        WAIT,
        view.phase,
        rank=process.rank if process else None,
        evidence=facts,
        next_steps=["find the request with the deep schema and cancel it; limit schema depth in front of the server"],
    )


@signature(Step.ANSWERING)
def api_loop(view: View) -> Verdict | None:
    """The HTTP process burns a core, or sleeps in a call of its own, and answers nobody, while the schedulers poll for
    requests."""
    launcher = view.launcher
    busy = view.api_process or _sleeps_beside_its_loop(view)
    unanswered = any(not probe.status for probe in view.evidence.http)
    if not view.port_open or not unanswered or view.healthy or busy is None or launcher is None or not view.complete:
        return None
    idle = [p for p in view.schedulers if _is_free(p)]
    if len(idle) < len(view.schedulers) or view.forwards or not view.schedulers:
        return None
    assert busy.main is not None
    stack = view.stack(busy)
    facts = [
        f"{name_of(busy)} main thread: {busy.main.cpu:.0%} of a core, {busy.main.voluntary:.0f} switches a second"
        + (f", asleep in {busy.main.wchan}" if is_blocked(busy) else ""),
        *map(asked, view.evidence.http),
        *(f"{p.label} polls for requests" for p in idle),
    ]
    facts += [f"it is at {stack.frames[0]}"] if stack and stack.frames else []
    line = view.trouble("detokenizer_silent")
    return Verdict(
        "API_LOOP_BLOCKED",
        "the HTTP server's event loop is stuck in its own code; the schedulers are free and get nothing",
        DIRECT if stack else MEASURED,
        phase=view.phase,
        evidence=[*facts, *([f"log: {line}"] if line else [])],
        next_steps=[
            "take its stack with --deep; restart it; use --tokenizer-worker-num, or limit what one request asks"
        ],
    )


def _sleeps_beside_its_loop(view: View) -> ProcessFacts | None:
    """The launcher, when no endpoint answers and it sleeps in some other call than its event loop's epoll."""
    launcher = view.launcher
    silent = [h for h in view.evidence.http if not h.status and "refused" not in h.error]
    if launcher is None or launcher.main is None or len(silent) < max(2, len(view.evidence.http)):
        return None
    elsewhere = launcher.main.wchan and not IN_EPOLL.search(launcher.main.wchan)
    return launcher if elsewhere and is_blocked(launcher) and not view.silent_too_short else None


def _is_free(process: ProcessFacts) -> bool:
    """A scheduler that looks for requests: again and again, or asleep in poll until one comes (--sleep-on-idle). A
    collective sleeps in a futex."""
    main = process.main
    if main is None or main.cpu >= SPIN_CPU:
        return False
    return main.voluntary >= FEW_SWITCHES or bool(IN_POLL.search(main.wchan))
