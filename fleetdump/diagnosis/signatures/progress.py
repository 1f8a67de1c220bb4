"""Servers that move, or may still: a slow load, a start in progress."""

from __future__ import annotations

from fleetdump.diagnosis.registry import Step, signature
from fleetdump.diagnosis.types import HIGH, LOW, MEDIUM, WAIT, Verdict
from fleetdump.diagnosis.view import LOAD_RATE, View, size


@signature(Step.PROGRESS)
def loading(view: View) -> Verdict | None:
    """Bytes of the weights arrive."""
    if view.phase != "weights" or not _starting(view) or view.read_rate < LOAD_RATE:
        return None
    disk = sum(p.read_bytes_delta for p in view.schedulers) / max(view.evidence.seconds, 0.001)
    source = "disk" if disk > view.read_rate / 2 else "the page cache"
    facts = [f"{p.label} read {size(max(p.rchar_delta, p.read_bytes_delta))}" for p in view.schedulers]
    faults = sum(p.majflt_delta for p in view.schedulers)
    if faults:
        facts.append(f"{faults} major page faults: the files are mapped, so random reads set the pace")
    if view.bar:
        facts.append(f"progress bar: {view.bar}")
    bar = f", {view.bar}" if view.bar else ""
    return Verdict(
        "LOADING_SLOW",
        f"the weights are loading at {size(view.read_rate)}/s from {source}{bar}",
        HIGH,
        WAIT,
        "weights",
        evidence=facts,
        next_steps=["wait; a local NVMe copy or a warm page cache makes it faster"],
    )


@signature(Step.PROGRESS)
def start_in_progress(view: View) -> Verdict | None:
    """The start moves by any other measure, or has not been silent for as long as it may be."""
    quiet, allowed = view.silence
    loads = view.phase == "weights" and view.read_rate >= LOAD_RATE
    if not _starting(view) or loads or view.compilers:
        return None
    if view.progress:
        return Verdict(
            "BUSY_NOT_HUNG",
            f"the server is starting (phase {view.phase}) and moves",
            MEDIUM,
            WAIT,
            view.phase,
            evidence=view.progress,
            next_steps=["wait"],
        )
    if not view.within_patience:
        return None
    return Verdict(
        "BUSY_NOT_HUNG",
        f"the server is starting (phase {view.phase}); too early to call it hung",
        LOW,
        WAIT,
        view.phase,
        evidence=[
            f"no progress in {view.evidence.seconds:.0f} s, silent for {quiet:.0f} s of the {allowed:.0f} s allowed"
        ],
        next_steps=["ask again when the patience of this phase is over"],
    )


def _starting(view: View) -> bool:
    ready = view.evidence.log.ready or view.healthy
    gone = view.missing_ranks or view.evidence.log.crash or not view.evidence.launcher_alive
    return not ready and not gone and not any(p.state in "Tt" for p in view.members)
