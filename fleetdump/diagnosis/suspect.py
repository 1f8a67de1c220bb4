"""Which rank holds the others up: spins, stacks, marks and GPUs put together."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from fleetdump.agent.evidence_types import ProcessFacts
from fleetdump.diagnosis.types import HIGH, LOW, MEDIUM
from fleetdump.diagnosis.view import Spin, View

COLLECTIVES = re.compile(
    r"^(?:[\w<>.]*\.)?(?P<name>all_reduce|all_gather\w*|reduce_scatter\w*|broadcast\w*|barrier|monitored_barrier|"
    r"recv\w*|send\w*|all_to_all\w*|gather|scatter) "
)


@dataclass
class Suspect:
    """The rank to look at (None: nobody stands out), what it does, and how sure that is."""

    rank: int | None = None
    what: str = ""
    confidence: str = LOW
    facts: list[str] = field(default_factory=list)
    next_steps: list[str] = field(default_factory=list)
    diverged: bool = False


def suspect(view: View) -> Suspect:
    """Name the rank that the others wait for; the strongest reason wins."""
    for reason in (_lone_spin, _python_spin, _idle_gpu, _diverged, _minority, _behind, _only_rank):
        found = reason(view)
        if found:
            found.facts += [fact for p in view.blocked if p.rank != found.rank for fact in blocked_facts(view, p)]
            return found
    return _nobody(view)


def _nobody(view: View) -> Suspect:
    facts = [fact for spin in view.spins for fact in spin.facts]
    facts += [fact for p in view.blocked for fact in blocked_facts(view, p)]
    if view.spins and all(spin.kind == "gpu" for spin in view.spins) and len(view.spins) == len(view.schedulers):
        return Suspect(None, "every rank waits for its GPU in a busy loop", MEDIUM, facts, _NEXT_GPU)
    return Suspect(facts=facts, next_steps=_NEXT_UNKNOWN)


_NEXT_GPU = [
    "ask NCCL RAS (port 28028): counts that differ mean diverged ranks, equal ones a kernel without end",
    "take native stacks (py-spy dump --native)",
]
_NEXT_UNKNOWN = [
    "take the evidence again with --deep (stacks of every rank)",
    "if ptrace is refused, run fleetdump outside the container or add SYS_PTRACE",
]


def _lone_spin(view: View) -> Suspect | None:
    """One rank spins while all others sleep."""
    if len(view.spins) != 1:
        return None
    return _of_spin(view, view.spins[0])


def _python_spin(view: View) -> Suspect | None:
    """Several burn a core, but only one runs Python code: the others wait for a GPU that waits for it."""
    python = [spin for spin in view.spins if spin.kind == "python"]
    if len(python) != 1 or len(view.spins) < 2:
        return None
    found = _of_spin(view, python[0])
    found.facts += [fact for spin in view.spins if spin is not python[0] for fact in spin.facts]
    found.facts.append("the other ranks' main threads wait for their GPU (no interpreter lock held, driver calls only)")
    return found


def _idle_gpu(view: View) -> Suspect | None:
    """All spin on the host, and exactly one GPU has nothing to do: its rank has not joined."""
    gpus = {gpu.index: gpu.utilization for gpu in view.evidence.gpus}
    if len(view.spins) < 2 or len(gpus) != len(view.schedulers):
        return None
    idle = [index for index, utilization in gpus.items() if utilization == 0]
    spin = next((s for s in view.spins if len(idle) == 1 and s.process.rank == idle[0]), None)
    if spin is None:
        return None
    found = _of_spin(view, spin)
    found.confidence = MEDIUM
    found.facts.append(f"GPU {idle[0]} is at 0 %, the others at {max(gpus.values())} %: they wait for its rank")
    return found


def _diverged(view: View) -> Suspect | None:
    """All sleep, and the stacks are in different collectives."""
    if view.spins:
        return None
    where = {s.label: match["name"] for s in view.evidence.stacks if s.label and (match := _collective(s.frames))}
    # Neighbouring pipeline stages send and receive at the same time: that is no difference of opinion.
    if len({name for name in where.values() if not name.startswith(("send", "recv", "isend", "irecv"))}) < 2:
        return None
    listed = ", ".join(f"{label} in {name}" for label, name in sorted(where.items()))
    group = [g for g in view.evidence.stack_groups if g.minority]
    rank = _rank_of(view, group[0].ranks[0]) if len(group) == 1 and len(group[0].ranks) == 1 else None
    return Suspect(
        rank,
        f"ranks are in different collectives: {listed}" if rank is None else f"is in another collective: {listed}",
        MEDIUM,
        [f"stacks: {listed}"],
        ["look for code that only some ranks run (a condition on rank, a patch) before those frames"],
        diverged=True,
    )


def _minority(view: View) -> Suspect | None:
    """One rank's stack differs from all others'."""
    group = [g for g in view.evidence.stack_groups if g.minority]
    if len(group) != 1 or len(group[0].ranks) != 1:
        return None
    label = group[0].ranks[0]
    facts = [f"{label} alone is in {group[0].frames[0] if group[0].frames else 'no Python frame'}"]
    return Suspect(
        _rank_of(view, label), "is elsewhere than all other ranks", MEDIUM, facts, [f"look at {label}'s stack"]
    )


def _behind(view: View) -> Suspect | None:
    """One rank logged less than the others."""
    if len(view.behind) != 1:
        return None
    process = view.behind[0]
    facts = [f"{process.label} logged fewer marks than the other ranks"]
    return Suspect(process.rank, _state_word(process, view), LOW, facts, _NEXT_UNKNOWN)


def _only_rank(view: View) -> Suspect | None:
    """There is one rank only."""
    if len(view.schedulers) != 1:
        return None
    process = view.schedulers[0]
    confidence = MEDIUM if view.stack(process) else LOW
    return Suspect(process.rank, _state_word(process, view), confidence, blocked_facts(view, process), _NEXT_UNKNOWN)


def _of_spin(view: View, spin: Spin) -> Suspect:
    process = spin.process
    stack = view.stack(process)
    sure = bool(stack or view.trace(process))
    facts = [*spin.facts]
    if spin.kind == "python" and stack:
        what = f"spins in Python at {stack.frames[0]}"
        steps = [f"read the code at {stack.frames[0]}: it never returns; revert the patch if it put it there"]
    elif spin.kind == "gpu":
        what = "waits for its GPU in a busy loop"
        steps = _NEXT_GPU
    else:
        what = "spins without system calls"
        steps = ["take its stack: install py-spy beside the server's interpreter, or allow ptrace", *_NEXT_UNKNOWN[1:]]
    return Suspect(process.rank, what, HIGH if sure else MEDIUM, facts, steps)


def blocked_facts(view: View, process: ProcessFacts) -> list[str]:
    """Where a sleeping rank is."""
    if process.main is None:
        return []
    facts = [f"{process.label} main thread: asleep in {process.main.wchan or 'the kernel'}, {process.main.cpu:.0%} CPU"]
    stack = view.stack(process)
    match = _collective(stack.frames) if stack else None
    if match:
        facts.append(f"{process.label} waits in {match['name']} for the other ranks")
    return facts


def stack_facts(view: View) -> list[str]:
    """Stack groups in words, when there is more than one."""
    groups = view.evidence.stack_groups
    if len(groups) < 2:
        return []
    return [
        f"stack of {', '.join(g.ranks)}{' (the minority)' if g.minority else ''}: {' < '.join(g.frames[:3])}"
        for g in groups
    ]


def collective_of(frames: list[str]) -> str:
    """The collective in which these frames wait; empty when they are elsewhere."""
    match = _collective(frames)
    return match["name"] if match else ""


def _collective(frames: list[str]) -> re.Match[str] | None:
    return next((match for frame in frames[:5] if (match := COLLECTIVES.match(frame))), None)


def _rank_of(view: View, label: str) -> int | None:
    return next((p.rank for p in view.schedulers if p.label == label), None)


def _state_word(process: ProcessFacts, view: View) -> str:
    stack = view.stack(process)
    if stack and stack.frames:
        return f"is at {stack.frames[0]}"
    return f"sleeps in {process.main.wchan}" if process.main and process.main.wchan else ""
