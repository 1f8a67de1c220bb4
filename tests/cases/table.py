"""The table of cases: a function that builds evidence, and beside it what the diagnosis must and must not say."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from fleetdump.agent.evidence_types import Evidence

HEALTHY = frozenset({"IDLE_OK", "HEALTHY", "BUSY_NOT_HUNG"})
"""Codes that call a server well; forbidden wherever one hangs."""
HANGS = frozenset({
    "PARENT_WAITS_READY", "PARENT_WAITS_DEAD_RANK", "API_ALIVE_ENGINE_DEAD", "WARMUP_STALL", "RANK_SPIN", "P2P_BLOCKED",
    "COLLECTIVE_DIVERGED", "KERNEL_SPIN", "LOADER_DEADLOCK", "JIT_STALE_LOCK", "MISSING_RANK", "GRAPH_CAPTURE",
})  # fmt: skip
"""Codes that call a server hung; forbidden wherever one is well or only slow."""


DEAD = frozenset({
    "PARENT_WAITS_DEAD_RANK", "API_ALIVE_ENGINE_DEAD", "RANK_CRASHED", "LAUNCHER_DIED", "OOM_KILLED",
})  # fmt: skip
"""Codes that call a process dead; forbidden wherever all of them live."""


@dataclass(frozen=True)
class Case:
    """``first``: codes that may come first. ``never``: codes that must not appear at all. ``also``: codes that must
    appear. ``rank`` and ``phase`` of the first verdict where the case gives them."""

    name: str
    reference: str
    build: Callable[[], Evidence]
    first: frozenset[str]
    never: frozenset[str]
    also: frozenset[str]
    rank: int | None
    phase: str


CASES: list[Case] = []


def case(
    name: str,
    reference: str,
    *,
    first: str,
    never: frozenset[str] = frozenset(),
    also: str = "",
    rank: int | None = None,
    phase: str = "",
) -> Callable[[Callable[[], Evidence]], Callable[[], Evidence]]:
    """Add a case; ``first`` and ``also`` are codes with blanks between."""

    def add(build: Callable[[], Evidence]) -> Callable[[], Evidence]:
        CASES.append(
            Case(name, reference, build, frozenset(first.split()), never, frozenset(also.split()), rank, phase)
        )
        return build

    return add
