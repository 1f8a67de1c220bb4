"""Loads and imports that do not move."""

from __future__ import annotations

import re

from fleetdump.agent.evidence_process import ProcessFacts, Stack
from fleetdump.diagnosis.movement import PRESSURE
from fleetdump.diagnosis.registry import Step, signature
from fleetdump.diagnosis.signatures.collectives import stands_still
from fleetdump.diagnosis.signatures.locks import waits_for_lock
from fleetdump.diagnosis.signatures.network import HUB_FRAMES
from fleetdump.diagnosis.types import DIRECT, MEASURED, PATTERN, Verdict
from fleetdump.diagnosis.view import View
from fleetdump.diagnosis.words import name_of, size

LARGE = 0.5
_DISK_TROUBLE = re.compile(r"I/O error|nvme\S* nvme\d+: .*(?:timeout|abort|reset)|ata\d+.*(?:failed command|exception)")
_LOADER = re.compile(r"safetensors|weights_iterator|load_weights|load_model|model_loader|Future\.result|weight_utils")
_IMPORT = re.compile(r"importlib|_find_and_load|exec_module|<module>")


@signature(Step.WAITING)
def loader_deadlock(view: View) -> Verdict | None:
    """All ranks sleep in the loader and read nothing."""
    ranks = view.schedulers
    if not stands_still(view) or view.port_open or view.phase != "weights" or len(view.blocked) < len(ranks):
        return None
    asleep = [p for p in ranks if p.state == p.state_before == "D"]
    trouble = [line for line in view.kernel_since_start if _DISK_TROUBLE.search(line)]
    if asleep and trouble:
        return _disk_fails(asleep, trouble)
    memory = view.evidence.memory
    rss = sum(p.rss for p in ranks)
    inside = [s for s in view.evidence.stacks if s.role == "scheduler" and _loads(s)]
    pressed = view.memory_pressure >= PRESSURE
    large = bool(memory.total) and rss >= LARGE * memory.total
    if any(p.state == "D" for p in ranks) or not (pressed or large or inside):
        return None
    facts = [f"{p.label}: sleeps in {p.main.wchan if p.main else '?'}, read nothing" for p in ranks[:8]]
    facts += [f"the ranks hold {size(rss)} of {size(memory.total)} of memory"] if memory.total else []
    facts += [f"memory pressure: all work waits {view.memory_pressure:.0f} % of the time"] if pressed else []
    facts += [f"{s.label} is in {s.frames[0]}" for s in inside]
    return Verdict(
        "LOADER_DEADLOCK",
        "the loader stands still: every rank sleeps and nothing is read from disk or cache",
        MEASURED if pressed or inside else PATTERN,
        phase="weights",
        evidence=facts,
        next_steps=["fewer loader threads, no draft model beside it, or a newer SGLang; waiting does not help"],
    )


def _disk_fails(asleep: list[ProcessFacts], trouble: list[str]) -> Verdict:
    """Ranks wait for a disk of this host, of which the kernel complains."""
    return Verdict(
        "LOADER_DEADLOCK",
        f"the loader waits for a disk of this host that does not answer: {trouble[-1]}",
        MEASURED,
        phase="weights",
        rank=asleep[0].rank if len(asleep) == 1 else None,
        evidence=[*(f"{name_of(p)}: state D in both samples" for p in asleep[:8]), *trouble[-4:]],
        next_steps=["look at that disk (dmesg, smartctl, nvme smart-log); load from another until it is replaced"],
    )


def _loads(stack: Stack) -> bool:
    """It is in the loader, and waits there for no download and no lock."""
    elsewhere = waits_for_lock(stack) or any(HUB_FRAMES.search(frame) for frame in stack.frames)
    return not elsewhere and any(_LOADER.search(frame) for frame in stack.frames)


@signature(Step.WAITING)
def import_stall(view: View) -> Verdict | None:
    """Before any mark: the launcher or the ranks import a module and do not come back."""
    if view.phase != "imports" or view.evidence.log.ranks or view.missing_ranks or not view.evidence.launcher_alive:
        return None
    if view.port_open or view.progress or view.compilers or view.within_patience or not view.members:
        return None
    inside = [s for s in view.evidence.stacks if any(_IMPORT.search(frame) for frame in s.frames)]
    deep = [s for s in inside if any("importlib" in f or "_find_and_load" in f for f in s.frames)]
    disk = [p for p in view.members if p.state == "D" and p.state_before == "D"]
    connects = [(p, s) for p in view.members for s in p.sockets if s.state == "SYN_SENT"]
    if not (deep or disk or (connects and inside)):
        return None
    facts = [f"{s.label or s.role} is in {s.frames[0]}, called from an import" for s in deep]
    facts += [f"{name_of(p)}: state D in both samples, in {p.main.wchan if p.main else '?'}" for p in disk]
    facts += [f"{name_of(p)} connects to {s.remote} and gets no answer" for p, s in connects]
    return Verdict(
        "IMPORT_STALL",
        "the import of SGLang or of a module that it needs never ends",
        DIRECT if deep else MEASURED,
        phase="imports",
        evidence=[*facts, "the log has no mark of any phase yet"],
        next_steps=["read the stack: the last module in it is what hangs; use an environment on a local disk"],
    )
