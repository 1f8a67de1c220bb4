"""GPU memory that a server had, seen to come free after its end: processes that are gone may leave it taken for a
while, and one that was killed in the driver may leave it for good."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Collection, Dict, List, Tuple

from fleetdump.agent.evidence_host import GpuFacts
from fleetdump.agent.probes import gpu
from fleetdump.agent.probes.bounded import ProbeFailed

FREE_SECONDS = 20.0
SETTLED_SECONDS = 2.0
POLL = 0.5
MOSTLY = 0.9
"""Of what a server had: the driver keeps some for whoever else has a context there."""
MIB = 1 << 20


@dataclass
class GpuUse:
    """One GPU: MiB in use, by whom (where nvidia-smi sees it), and how much of that was the server's."""

    used: int
    ours: int = 0
    others: List[str] = field(default_factory=list)


def in_use(pids: Collection[int]) -> Dict[int, GpuUse]:
    """Each GPU, ``pids`` being the server's; empty without nvidia-smi, or while it does not answer."""
    try:
        found = gpu.occupied(list(pids))
    except ProbeFailed:
        return {}
    return {one.index: _use(one) for one in found}


def _use(facts: GpuFacts) -> GpuUse:
    ours = sum(process.memory for process in facts.processes if process.ours)
    others = [f"{process.name or 'a process'} (pid {process.pid})" for process in facts.processes if not process.ours]
    return GpuUse(facts.memory_used, ours, others)


def wait_until_free(before: Dict[int, GpuUse], seconds: float = FREE_SECONDS) -> Tuple[int, List[str]]:
    """(bytes that came free, in words each GPU that still has what was the server's) after at most ``seconds``.

    In a container nvidia-smi does not tell whose memory it is: then it is waited until no more comes free.
    """
    end = time.monotonic() + seconds
    last, since = before, time.monotonic()
    while before:
        now = in_use([])
        known = [index for index in before if before[index].ours and index in now]
        left = [index for index in known if not _is_free(before[index], now[index])]
        if {index: use.used for index, use in now.items()} != {index: use.used for index, use in last.items()}:
            last, since = now, time.monotonic()
        settled = not known and time.monotonic() - since >= SETTLED_SECONDS
        if (known and not left) or settled or time.monotonic() >= end:
            freed = sum(max(0, before[index].used - use.used) for index, use in now.items() if index in before)
            return freed * MIB, [_held(index, now[index]) for index in left]
        time.sleep(POLL)
    return 0, []


def _is_free(before: GpuUse, now: GpuUse) -> bool:
    return now.used <= before.used - MOSTLY * before.ours


def _held(index: int, use: GpuUse) -> str:
    who = ", ".join(use.others) or "no process that nvidia-smi knows: `nvidia-smi --gpu-reset`, or a reboot, frees it"
    return f"GPU {index} still has {use.used} MiB in use: {who}"
