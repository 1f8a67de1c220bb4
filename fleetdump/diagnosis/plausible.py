"""Numbers of a bundle that no server can have are taken for unknown: bundles come from anywhere."""

from __future__ import annotations

import dataclasses

from fleetdump.agent.evidence_process import ProcessFacts
from fleetdump.agent.evidence_types import Evidence, Target

MOST_RANKS = 1 << 14
"""More than the largest servers have by far, and few enough to be gone through one by one."""


def plausible(evidence: Evidence) -> Evidence:
    """The same evidence (a copy where anything changes): a number of ranks that nobody has becomes the number that is
    seen, a host that is none of the server's hosts the only one, a rank outside of them no rank (None), and a count of
    log lines above all lines of the log 0."""
    target = _target(evidence)
    processes = [_ranked(process, target.ranks) for process in evidence.processes]
    log = evidence.log
    if log.lines and log.zero_statistics > log.lines:
        log = dataclasses.replace(log, zero_statistics=0)
    return dataclasses.replace(evidence, target=target, processes=processes, log=log)


def _target(evidence: Evidence) -> Target:
    target = evidence.target
    if not 1 <= target.ranks <= MOST_RANKS:
        seen = {p.rank for p in evidence.processes if p.rank is not None and 0 <= p.rank < MOST_RANKS}
        target = dataclasses.replace(target, ranks=max(seen, default=0) + 1, nodes=1, node_rank=0)
    if not 0 <= target.node_rank < target.nodes:
        target = dataclasses.replace(target, nodes=1, node_rank=0)
    return target


def _ranked(process: ProcessFacts, ranks: int) -> ProcessFacts:
    known = process.rank is None or 0 <= process.rank < ranks
    return process if known else dataclasses.replace(process, rank=None)
