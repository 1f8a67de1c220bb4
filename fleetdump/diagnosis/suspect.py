"""Which rank holds the others up: spins, stacks, marks and GPUs put together."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from fleetdump.agent.evidence_host import GpuFacts
from fleetdump.agent.evidence_process import ProcessFacts, Stack
from fleetdump.diagnosis.movement import FULL_USE
from fleetdump.diagnosis.types import DIRECT, LOG_ONLY, MEASURED, PATTERN
from fleetdump.diagnosis.view import LOOKS_FOR_REQUESTS, Spin, View
from fleetdump.diagnosis.words import rank_names

COLLECTIVES = re.compile(
    r"^(?:[\w<>.]*\.)?(?:(?:[a-z]+_)+(?=all_reduce|all_gather|reduce_scatter|all_to_all))?"
    r"(?P<name>all_reduce|all_gather\w*|reduce_scatter\w*|broadcast\w*|barrier|monitored_barrier|recv\w*|send\w*|irecv|"
    r"isend|batch_isend_irecv|all_to_all\w*|gather|gather_object|scatter|scatter_object_list|"
    r"reduce(?= \(\S*distributed)) "
)
"""A collective or point-to-point call by its function's name, behind whatever a library puts before it
(``tensor_model_parallel_all_reduce``)."""


_LIBRARY_WAIT = re.compile(r"\((?:.*/)?(?:threading|queue|selectors|socket|ssl|subprocess|concurrent/futures/\w+)\.py:")


@dataclass
class Suspect:
    """The rank to look at (None: nobody stands out), what it does, and how sure that is."""

    rank: int | None = None
    what: str = ""
    confidence: str = PATTERN
    facts: list[str] = field(default_factory=list)
    next_steps: list[str] = field(default_factory=list)
    diverged: bool = False


def suspect(view: View) -> Suspect:
    """Name the rank that the others wait for; the strongest reason wins."""
    for reason in (
        _counted_behind,
        _lone_spin,
        _python_spin,
        _idle_gpu,
        _parted,
        _diverged,
        _outside,
        _minority,
        _behind,
        _only_rank,
    ):
        found = reason(view)
        if found:
            found.facts += [fact for p in view.blocked if p.rank != found.rank for fact in blocked_facts(view, p)]
            return found
    return _nobody(view)


def _nobody(view: View) -> Suspect:
    facts = [fact for spin in view.spins for fact in spin.facts]
    facts += [fact for p in view.blocked for fact in blocked_facts(view, p)]
    if view.spins and all(spin.kind == "gpu" for spin in view.spins) and len(view.spins) == len(view.schedulers):
        return Suspect(None, "every rank waits for its GPU in a busy loop", MEASURED, facts, _NEXT_GPU)
    together = _all_in_one(view)
    if together and view.evidence.target.nodes > 1:
        what = f"all ranks of this host wait in {together}, and those of another host have not come"
        return Suspect(
            None, what, PATTERN, facts, ["diagnose the other hosts: a rank there that is elsewhere is the cause"]
        )
    return Suspect(facts=facts, next_steps=_NEXT_UNKNOWN)


def _all_in_one(view: View) -> str:
    """The collective in which every rank of this host sleeps."""
    stacks = [view.stack(p) for p in view.schedulers]
    names = {collective_of(stack.frames) if stack else "" for stack in stacks}
    return names.pop() if len(names) == 1 and len(view.blocked) == len(stacks) else ""


_NEXT_GPU = [
    "ask NCCL RAS (port 28028): counts that differ mean diverged ranks, equal ones a kernel without end",
    "take native stacks (py-spy dump --native)",
]
_NEXT_STACK = ["read that rank's stack (--deep): what it does instead is the cause"]
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


def _counted_behind(view: View) -> Suspect | None:
    """By NCCL's or PyTorch's own count one rank has launched less than all others, and it does not wait for a GPU."""
    behind = {_fewest({(one.pid, one.rank): one.count for one in m.ranks}) for m in view.evidence.ras.mismatches}
    pids = {p.pid: p.rank for p in view.schedulers}
    late_ranks = {pids.get(found[0], found[1]) for found in behind if found}
    facts = [f"NCCL RAS: rank {rank} has launched fewer operations than all others" for rank in late_ranks]
    if not behind and view.evidence.flight:
        late = _fewest({(0, one.rank): one.sequence for one in view.evidence.flight})
        late_ranks = {late[1]} if late else set()
        facts = [f"flight recorder: rank {rank} is behind all others" for rank in late_ranks]
    if len(late_ranks) != 1 or None in behind:
        return None
    rank = late_ranks.pop()
    own = next((spin for spin in view.spins if spin.process.rank == rank), None)
    process = next((p for p in view.schedulers if p.rank == rank), None)
    busy_elsewhere = any(spin.kind == "python" and spin is not own for spin in view.spins)
    if process is None or busy_elsewhere or (behind and own and own.kind == "gpu"):
        return None
    if own and own.kind != "gpu":
        found = _of_spin(view, own)
        found.facts += facts
        return found
    return Suspect(
        rank, f"is behind all others: it {_state_word(process, view) or 'does nothing'}", DIRECT, facts, _NEXT_STACK
    )


def _fewest(counts: dict[tuple[int, int], int]) -> tuple[int, int] | None:
    """The only one with the least, where all others have the same."""
    least = [key for key, count in counts.items() if count == min(counts.values())]
    return least[0] if len(least) == 1 and len(set(counts.values())) == 2 else None


def _idle_gpu(view: View) -> Suspect | None:
    """All spin on the host, and exactly one GPU has nothing to do: its rank has not joined."""
    own = [(process, gpu) for process in view.schedulers if (gpu := view.gpu_of(process))]
    idle = [(process, gpu) for process, gpu in own if gpu.utilization == 0]
    if len(view.spins) < 2 or len(own) < len(view.schedulers) or len(idle) != 1:
        return None
    process, gpu = idle[0]
    spin = next((s for s in view.spins if s.process is process), None)
    if spin is None:
        return None
    found = _of_spin(view, spin)
    found.confidence = MEASURED
    busiest = max(other.utilization for _, other in own)
    found.facts.append(f"GPU {gpu.index} is at 0 %, the others at {busiest} %: they wait for its rank")
    return found


def _parted(view: View) -> Suspect | None:
    """Some ranks' GPUs wait in a kernel for others whose GPUs have nothing to do: those are back at the top of their
    loop, where they sleep until the first rank tells them of requests. A rank that is only late is not there."""
    waiting = [spin.process for spin in view.spins if spin.kind == "gpu"]
    back = [p for p in view.blocked if _tells_requests(view.stack(p))]
    busy, idle = ([view.gpu_of(p) for p in of] for of in (waiting, back))
    replicas = any("DP" in p.label or "PP" in p.label for p in view.schedulers)
    if replicas or not waiting or not back or len(waiting) + len(back) < len(view.schedulers):
        return None
    if any(not g or g.utilization for g in idle) or any(not g or g.utilization < FULL_USE for g in busy):
        return None
    first, second = rank_names(p.label for p in waiting), rank_names(p.label for p in back)
    facts = [f"{first}: the GPU is fully used and the host waits for it" + _of_power(busy)]
    facts.append(f"{second}: the GPU is at 0 %, and the host sleeps in the broadcast of new requests")
    return Suspect(
        back[0].rank if len(back) == 1 < len(waiting) else None,
        f"{first} {'wait' if len(waiting) > 1 else 'waits'} on the GPU in a batch that {second} "
        f"{'have' if len(back) > 1 else 'has'} left or never begun",
        PATTERN,
        facts,
        ["look for what ranks decide each by themselves (clocks, timeouts, free memory) before a batch is made"],
        diverged=True,
    )


def _tells_requests(stack: Stack | None) -> bool:
    """It waits where the first rank tells the others of new requests."""
    return bool(stack and collective_of(stack.frames).startswith("broadcast")) and any(
        LOOKS_FOR_REQUESTS.search(frame) for frame in (stack.frames if stack else [])[:6]
    )


def _of_power(gpus: list[GpuFacts | None]) -> str:
    watts = [f"{g.power:.0f}" for g in gpus if g and g.power]
    return f" ({', '.join(watts)} W)" if watts else ""


def _diverged(view: View) -> Suspect | None:
    """The stacks are in different collectives, and nobody runs Python code that the others may wait for."""
    if any(spin.kind == "python" for spin in view.spins):
        return None
    where = {s.label: match["name"] for s in view.evidence.stacks if s.label and (match := _collective(s.frames))}
    # Neighbouring pipeline stages send and receive at the same time: that is no difference of opinion.
    if len({name for name in where.values() if not name.startswith(("send", "recv", "isend", "irecv"))}) < 2:
        return None
    names = sorted(set(where.values()), key=lambda name: -list(where.values()).count(name))
    places = "; ".join(f"{rank_names(label for label in where if where[label] == name)} in {name}" for name in names)
    group = [g for g in view.stack_groups if g.minority]
    rank = _rank_of(view, group[0].ranks[0]) if len(group) == 1 and len(group[0].ranks) == 1 else None
    return Suspect(
        rank,
        f"ranks are in different collectives: {places}" if rank is None else f"is in another collective: {places}",
        PATTERN,
        [f"stacks: {places}"],
        ["look for code that only some ranks run (a condition on rank, a patch) before those frames"],
        diverged=True,
    )


def _outside(view: View) -> Suspect | None:
    """All ranks but one wait in a collective, and that one is somewhere else. A scheduler that looks for requests is
    where it belongs."""
    known = {p.label: stack for p in view.schedulers if (stack := view.stack(p)) and stack.frames}
    absent = [label for label, stack in known.items() if not collective_of(stack.frames)]
    if len(absent) != 1 or len(known) < 2 or len(known) < len(view.schedulers):
        return None
    stack = known[absent[0]]
    if any(LOOKS_FOR_REQUESTS.search(frame) for frame in stack.frames[:5]):
        return None
    others = rank_names(label for label in known if label != absent[0])
    waits = sorted({collective_of(known[label].frames) for label in known if label != absent[0]})
    wait = "wait" if len(known) > 2 else "waits"
    facts = [f"{others} {wait} in {', '.join(waits)}", f"{absent[0]} is at {stack.frames[0]}, {_callers(stack.frames)}"]
    what = f"is at {telling_frame(stack.frames)} while {others} {wait} for it in {', '.join(waits)}"
    return Suspect(_rank_of(view, absent[0]), what, DIRECT, facts, _NEXT_STACK)


def telling_frame(frames: list[str]) -> str:
    """The innermost frame that is not a waiting call of Python's own library."""
    return next((frame for frame in frames if not _LIBRARY_WAIT.search(frame)), (frames or ["no frame"])[0])


def _callers(frames: list[str]) -> str:
    return f"called from {' < '.join(frame.split(' (')[0] for frame in frames[1:4]) or 'nothing'}"


def _minority(view: View) -> Suspect | None:
    """One rank's stack differs from all others'. Stages of a pipeline differ always."""
    if any("PP" in p.label for p in view.schedulers):
        return None
    group = [g for g in view.stack_groups if g.minority]
    if len(group) != 1 or len(group[0].ranks) != 1:
        return None
    label = group[0].ranks[0]
    facts = [f"{label} alone is in {group[0].frames[0] if group[0].frames else 'no Python frame'}"]
    return Suspect(
        _rank_of(view, label), "is elsewhere than all other ranks", PATTERN, facts, [f"look at {label}'s stack"]
    )


def _behind(view: View) -> Suspect | None:
    """One rank logged less than the others."""
    if len(view.behind) != 1:
        return None
    process = view.behind[0]
    facts = [f"{process.label} logged fewer marks than the other ranks"]
    return Suspect(process.rank, _state_word(process, view), LOG_ONLY, facts, _NEXT_UNKNOWN)


def _only_rank(view: View) -> Suspect | None:
    """There is one rank only."""
    if len(view.schedulers) != 1:
        return None
    process = view.schedulers[0]
    return Suspect(process.rank, _state_word(process, view), PATTERN, blocked_facts(view, process), _NEXT_UNKNOWN)


def _of_spin(view: View, spin: Spin) -> Suspect:
    process = spin.process
    stack = view.stack(process)
    sure = bool(stack or view.trace(process))
    facts = [*spin.facts]
    if spin.kind == "python" and stack and stack.frames:
        what = f"spins in Python at {stack.frames[0]}"
        steps = [f"read the code at {stack.frames[0]}: it never returns; revert the patch if it put it there"]
    elif spin.kind == "gpu":
        what = "waits for its GPU in a busy loop"
        steps = _NEXT_GPU
    else:
        what = "spins without system calls"
        steps = ["take its stack: install py-spy beside the server's interpreter, or allow ptrace", *_NEXT_UNKNOWN[1:]]
    return Suspect(process.rank, what, DIRECT if sure else MEASURED, facts, steps)


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
    groups = view.stack_groups
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
        return f"is at {telling_frame(stack.frames)}"
    return f"sleeps in {process.main.wchan}" if process.main and process.main.wchan else ""
