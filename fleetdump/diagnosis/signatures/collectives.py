"""GPUs that wait in a kernel, and ranks that have parted: counts, flight records, stacks and power together."""

from __future__ import annotations

import re

from fleetdump.agent.evidence_engine import FlightRecord, RankCount
from fleetdump.diagnosis.registry import Step, signature
from fleetdump.diagnosis.signatures.compiling import compiles
from fleetdump.diagnosis.signatures.pipes import mute
from fleetdump.diagnosis.suspect import COLLECTIVES, Suspect, collective_of, stack_facts, suspect
from fleetdump.diagnosis.types import DIRECT, LOG_ONLY, MEASURED, PATTERN, Verdict
from fleetdump.diagnosis.view import View
from fleetdump.diagnosis.words import is_are, rank_names

BEFORE_CAPTURE = ("imports", "init", "weights", "kv_pool", "jit")
_NVLINK = re.compile(r"^NV\d+$")
_NVLINK_BOARD = re.compile(r"SXM|HBM3|\b(?:H200|B200|B300|GB[23]00)\b(?! NVL)")
"""Names of GPUs that come on boards with NVLink between all of them."""
_BRINGS_CODE = re.compile(r"cu(?:Module|Library)Load|cuda(?:Module|Library)Load")
"""The driver takes in code for a kernel's first use, and may wait for all kernels that run meanwhile."""
_ALL_REDUCE = re.compile(
    r"custom_all_?reduce|cross_device_reduce|one_?shot|two_?shot|trtllm_allreduce|all_?reduce", re.I
)


def stands_still(view: View) -> bool:
    """Everybody lives, and nothing has moved for longer than it may."""
    explained = compiles(view) or mute(view)
    moves = view.healthy or view.engine_turns or view.progress
    return view.complete and not (moves or explained or view.silent_too_short)


@signature(Step.COLLECTIVES)
def diverged(view: View) -> Verdict | None:
    """Ranks have launched different collectives, or of different size."""
    if not stands_still(view):
        return None
    found = suspect(view)
    facts = [*_flight_facts(view.evidence.flight), *_contradictions(view)]
    if not facts and not found.diverged:
        return None
    rank = _odd_one(view) if found.rank is None else found.rank
    return Verdict(
        "COLLECTIVE_DIVERGED",
        f"the ranks have parted and none of their collectives ends: {_how_parted(view, found)}",
        DIRECT if facts else PATTERN,
        phase=view.phase,
        rank=rank,
        evidence=[*facts, *_ran_more(view, rank), *found.facts, *stack_facts(view)],
        next_steps=["look for code that only some ranks run (a condition on rank, a patch, an early return)"],
    )


@signature(Step.COLLECTIVES)
def other_host_behind(view: View) -> Verdict | None:
    """NCCL counts all ranks of this host level, and those of another host behind them."""
    mismatches = view.evidence.ras.mismatches
    if not mismatches or view.evidence.target.nodes < 2 or not stands_still(view):
        return None
    here = {p.pid for p in view.schedulers}
    for one in mismatches:
        counts = {r.count for r in one.ranks if r.pid in here}
        away = [r for r in one.ranks if r.pid not in here]
        if len(counts) != 1 or not away or any(r.count >= max(counts) for r in away):
            return None
    late = [f"rank {r.rank}" for r in mismatches[0].ranks if r.pid not in here]
    return Verdict(
        "MISSING_RANK",
        f"the ranks of this host are level and wait for another host, whose {rank_names(late)} {is_are(late)} behind",
        DIRECT,
        phase=view.phase,
        evidence=[*ras_facts(view), *(fact for spin in view.spins for fact in spin.facts)],
        next_steps=["diagnose the other host: what its ranks do instead is the cause"],
    )


@signature(Step.COLLECTIVES)
def network_lost(view: View) -> Verdict | None:
    """NCCL complains of its network, and every rank here waits in a kernel for a host at the other end."""
    line = view.trouble("network_failed")
    if not line or view.evidence.target.nodes < 2 or not stands_still(view):
        return None
    waits = view.gpus_wait or len(view.spins) == len(view.schedulers)
    return Verdict(
        "MISSING_RANK",
        "the ranks of this host wait for another host, to which the network failed",
        MEASURED if waits else LOG_ONLY,
        phase=view.phase,
        evidence=[f"log: {line}", *(_power_facts(view) if view.gpus else [])],
        next_steps=[
            "look at that port and its counters on both hosts (ibstat, ibqueryerrors, ethtool -S), and at the switch",
            "NCCL does not recover from that: restart the server on all hosts when the link is up",
        ],
    )


@signature(Step.COLLECTIVES)
def other_host_waited_for(view: View) -> Verdict | None:
    """On a later host of several, whose log has no batches: all of its ranks wait in a kernel, and none stands out."""
    waiting = view.gpus_wait and len(view.spins) == len(view.schedulers)
    if not view.on_later_host or not waiting or not stands_still(view):
        return None
    found = suspect(view)
    if found.rank is not None or found.diverged or view.evidence.ras.mismatches:
        return None
    return Verdict(
        "MISSING_RANK",
        "all ranks of this host wait on their GPUs for ranks of another host",
        PATTERN,
        phase=view.phase,
        evidence=[*_power_facts(view), *found.facts],
        next_steps=["diagnose the first host: its log tells of batches, and what its ranks do is the cause"],
    )


def _how_parted(view: View, found: Suspect) -> str:
    """The difference in a few words: sizes, counts, or where the stacks are."""
    records = view.evidence.flight if _flight_facts(view.evidence.flight) else []
    if records:
        kinds: dict[tuple[str, tuple[int, ...]], list[str]] = {}
        for r in records:
            kinds.setdefault((r.operation, tuple(r.sizes)), []).append(f"TP{r.rank}")
        return "; ".join(f"{rank_names(of)} in {name} of size {list(sizes)}" for (name, sizes), of in kinds.items())
    mismatches = view.evidence.ras.mismatches if _contradictions(view) else []
    if mismatches:
        by_count: dict[int, list[str]] = {}
        for one in mismatches[0].ranks:
            by_count.setdefault(one.count, []).append(f"TP{one.rank}")
        return f"{mismatches[0].operation} " + "; ".join(
            f"{count} on {rank_names(of)}" for count, of in by_count.items()
        )
    where = {s.label: name for s in view.evidence.stacks if s.label and (name := collective_of(s.frames))}
    names = dict.fromkeys(where.values())
    places = [f"{rank_names(label for label in where if where[label] == name)} in {name}" for name in names]
    return "; ".join(places) if len(places) > 1 else found.what or "; ".join(places)


def _flight_facts(records: list[FlightRecord]) -> list[str]:
    """Ranks whose flight recorders disagree at the same sequence number."""
    shapes = {(r.sequence, r.operation, tuple(r.sizes)) for r in records}
    if len(records) < 2 or len(shapes) < 2 or len({r.sequence for r in records}) > 1:
        return []
    return [f"flight recorder, rank {r.rank}: {r.operation} number {r.sequence}, sizes {r.sizes}" for r in records]


def _contradictions(view: View) -> list[str]:
    """NCCL counts that cannot come from a rank that is merely late."""
    mismatches = view.evidence.ras.mismatches
    ahead = {tuple(sorted(one.pid or one.rank for one in m.ranks if one.count == _top(m.ranks))) for m in mismatches}
    late_in_python = any(spin.kind == "python" for spin in view.spins)
    all_wait = len(view.spins) == len(view.schedulers) and all(s.kind == "gpu" for s in view.spins)
    if late_in_python or not mismatches or (len(ahead) < 2 and not all_wait):
        return []
    return ras_facts(view)


def _top(ranks: list[RankCount]) -> int:
    return max((one.count for one in ranks), default=0)


def _odd_one(view: View) -> int | None:
    """The one rank whose count is unlike all others' (of three or more); of two, the one that ran more than the other
    on the way to the same place."""
    for mismatch in view.evidence.ras.mismatches:
        counts = [one.count for one in mismatch.ranks]
        lonely = [one for one in mismatch.ranks if counts.count(one.count) == 1]
        if len(counts) > 2 and len(lonely) == 1:
            return _rank_of_count(view, lonely[0])
        if len(lonely) == 2 and len(counts) == 2 and _same_place(view):
            return _rank_of_count(view, max(mismatch.ranks, key=lambda one: one.count))
    return _odd_record(view.evidence.flight)


def _odd_record(records: list[FlightRecord]) -> int | None:
    """The one rank (of three or more) whose collective is unlike all others' at the same number."""
    shapes = [(r.operation, tuple(r.sizes)) for r in records] if _flight_facts(records) else []
    lonely = [r.rank for r, shape in zip(records, shapes, strict=False) if shapes.count(shape) == 1]
    return lonely[0] if len(lonely) == 1 and len(set(shapes)) == 2 else None


def _rank_of_count(view: View, counted: RankCount) -> int:
    """The server's rank: a communicator numbers its members by itself."""
    own = (p.rank for p in view.schedulers if p.pid == counted.pid and p.rank is not None)
    return next(own, counted.rank)


def _same_place(view: View) -> bool:
    """Whether every rank's host waits at the same frame, by stacks of all of them."""
    stacks = [view.stack(p) for p in view.schedulers]
    return bool(stacks) and len({tuple(stack.frames) if stack else () for stack in stacks} | {()}) == 2


def _ran_more(view: View, rank: int | None) -> list[str]:
    """What names the rank where counts alone do not."""
    if rank is None or not (_contradictions(view) and _same_place(view)):
        return []
    return [
        f"all ranks' hosts wait at the same place, and rank {rank} has launched more on its way there: it ran a "
        "collective that the others did not (or they left one out)"
    ]


def ras_facts(view: View) -> list[str]:
    """What NCCL counted, in words."""
    return [
        f"NCCL RAS: {m.operation} counts differ: "
        + ", ".join(f"rank {one.rank} launched {one.count or 'none'}" for one in m.ranks[:8])
        for m in view.evidence.ras.mismatches
    ]


@signature(Step.COLLECTIVES)
def peer_to_peer_blocked(view: View) -> Verdict | None:
    """The first collective between GPUs on PCIe never ends: peer writes are dropped on their way."""
    members = view.schedulers
    if not stands_still(view) or view.port_open or len(members) < 2 or view.phase not in BEFORE_CAPTURE:
        return None
    found = suspect(view)
    level = found.rank is None and not (found.diverged or view.evidence.ras.mismatches or view.late_ranks)
    links = view.evidence.host.gpu_links
    joined = any(map(_NVLINK.match, links)) or (not links and any(_NVLINK_BOARD.search(g.name) for g in view.gpus))
    if not level or joined or view.evidence.target.nodes > 1:
        return None
    waiting = view.gpus_wait and len(view.spins) == len(members)
    at_nccl = view.phase == "init" and all((m := view.marks_of(p)) and _at_nccl(m.nccl, m.last_line) for p in members)
    if not (waiting or at_nccl):
        return None
    acs = view.evidence.host.acs_redirects
    facts = _power_facts(view) if view.gpus else []
    facts += [f"links between the GPUs: {', '.join(sorted(set(links)))}"] if links else []
    facts += [f"{acs} PCIe bridges redirect peer traffic (ACSCtl ReqRedir+)"] if acs else []
    facts += [f"{m.label}: last line {m.last_line!r}" for m in view.evidence.log.ranks if at_nccl and m.last_line]
    facts += ["no rank stands out: all wait in the same place", *found.facts]
    return Verdict(
        "P2P_BLOCKED",
        "the first collective between the GPUs never ends: peer-to-peer access over PCIe seems to be blocked",
        DIRECT if acs and waiting else MEASURED if waiting and links else PATTERN if waiting else LOG_ONLY,
        phase=view.phase,
        evidence=facts,
        next_steps=[
            "deploy once with NCCL_P2P_DISABLE=1 and --disable-custom-all-reduce: if it starts, this was it",
            "then switch ACS off on the PCIe bridges, or the IOMMU to pass-through (iommu=pt)",
        ],
    )


def _at_nccl(stage: str, line: str) -> bool:
    return stage in ("bootstrap", "init begin") or (not stage and "NCCL" in line)


@signature(Step.COLLECTIVES)
def kernel_spin(view: View) -> Verdict | None:
    """Every host thread waits for a GPU, every GPU is busy at little power, and nobody has parted: a kernel never
    ends."""
    members = view.schedulers
    if not stands_still(view) or not members or not view.gpus_wait or view.evidence.ras.mismatches:
        return None
    if (view.phase == "capture" and not view.port_open) or network_lost(view) or other_host_waited_for(view):
        return None
    if peer_to_peer_blocked(view) or diverged(view):
        return None
    launching = [s for s in view.evidence.stacks if s.role in ("scheduler", "engine")]
    hosts_wait = bool(view.spins) and all(s.kind in ("gpu", "unknown") for s in view.spins)
    found = suspect(view)
    if (
        not hosts_wait
        or len(view.spins) < len(members)
        or (found.rank is not None and len(members) > 1)
        or found.diverged
    ):
        return None
    native = [frame for s in launching for frame in s.native]
    named = next((frame for frame in native if _ALL_REDUCE.search(frame)), "")
    what = " of the custom all-reduce" if named else ""
    sure = view.evidence.ras.status == "OK" or bool(named)
    facts = [*_power_facts(view), *found.facts]
    facts += ["NCCL RAS: all members have launched the same operations"] if view.evidence.ras.status == "OK" else []
    facts += [f"native frame: {named}"] if named else []
    loads = next((frame for frame in native if _BRINGS_CODE.search(frame)), "")
    facts += [f"native frame: {loads}: code is brought to a GPU whose kernels wait for a peer"] if loads else []
    eager = ["set CUDA_MODULE_LOADING=EAGER, or warm every kernel up before the first request"] if loads else []
    return Verdict(
        "KERNEL_SPIN",
        f"a GPU kernel{what} never ends, and every rank waits for it",
        DIRECT if sure else MEASURED,
        phase=view.phase,
        evidence=facts,
        next_steps=[
            *eager,
            "try --disable-custom-all-reduce, then other attention and MoE backends",
            "take native stacks with --deep; on one GPU alone, cuda-gdb names the kernel",
        ],
    )


def _power_facts(view: View) -> list[str]:
    gpus = view.gpus[:8]
    facts = [f"GPU {g.index}: {g.utilization} % busy at {g.power:.0f} of {g.power_limit:.0f} W" for g in gpus]
    facts += ["so they wait in a kernel, they do not compute"] if view.gpus_wait else []
    return facts + [f"GPU {g.index}: {g.links_down} NVLinks are down" for g in view.gpus if g.links_down]


@signature(Step.COLLECTIVES)
def capture(view: View) -> Verdict | None:
    """Graph capture stands still on all ranks, and none of them stands out."""
    in_driver = [p for p in view.schedulers if p.state == p.state_before == "D"]
    if not stands_still(view) or view.port_open or view.phase != "capture" or in_driver:
        return None
    found = suspect(view)
    if found.rank is not None:
        return None
    stacks = bool(view.evidence.stacks)
    steps = ["deploy once with --disable-cuda-graph: if it starts, look at what the graph's batch sizes have in common"]
    if not stacks:
        steps.insert(0, "take the evidence again with --deep: the stacks of every rank decide")
    return Verdict(
        "GRAPH_CAPTURE",
        f"graph capture stands still{f' at {view.bar}' if view.bar else ''}, and no rank stands out",
        PATTERN,
        phase="capture",
        evidence=[*_capture_facts(view, found), *(_power_facts(view) if view.gpus_wait else [])],
        next_steps=steps,
    )


def _capture_facts(view: View, found: Suspect) -> list[str]:
    labels = [m.label for m in view.evidence.log.ranks if m.phase == "capture"]
    where = {s.label: m["name"] for s in view.evidence.stacks for f in s.frames[:5] if (m := COLLECTIVES.match(f))}
    facts = [f"in graph capture: {', '.join(labels)}", "no compiler runs"]
    facts += [f"{label} is in {name}" for label, name in sorted(where.items()) if label]
    return [*facts, *found.facts, *stack_facts(view)]
