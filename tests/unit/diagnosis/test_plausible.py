"""Numbers that no server can have neither stop a diagnosis nor make it wrong."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from cases import test_recorded

from fleetdump.agent.evidence_types import Evidence
from fleetdump.diagnosis import STALL, diagnose
from fleetdump.diagnosis.plausible import MOST_RANKS, plausible

HUGE = 10**400


def ranked(place: int, rank: int) -> Callable[[Evidence], None]:
    def change(e: Evidence) -> None:
        schedulers = [p for p in e.processes if p.role == "scheduler"]
        if schedulers:
            schedulers[place].rank = rank

    return change


def targeted(**values: int) -> Callable[[Evidence], None]:
    def change(e: Evidence) -> None:
        for name, value in values.items():
            setattr(e.target, name, value)

    return change


def statistics(e: Evidence) -> None:
    e.log.zero_statistics = 10**12


CHANGES = {
    "first rank -1": ranked(0, -1),
    "last rank -1": ranked(-1, -1),
    "first rank 10^12": ranked(0, 10**12),
    "last rank 10^12": ranked(-1, 10**12),
    "3e7 ranks": targeted(ranks=30_000_000),
    "10^400 ranks": targeted(ranks=HUGE),
    "-1 ranks": targeted(ranks=-1),
    "10^400 hosts": targeted(nodes=HUGE),
    "host 10^400": targeted(node_rank=HUGE),
    "10^400 ranks on the last of as many hosts": targeted(ranks=HUGE, nodes=HUGE, node_rank=HUGE - 1),
    "10^12 lines of statistics": statistics,
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
@pytest.mark.parametrize("name", test_recorded.EXPECTED)
def test_recorded_servers(name: str, change: Callable[[Evidence], None]) -> None:
    """The verdict's kind stays; a healthy server gets the same code."""
    codes, severity, _, _ = test_recorded.EXPECTED[name]
    e = test_recorded.load(name)
    change(e)
    verdicts = diagnose(e)
    assert (verdicts[0].severity == STALL) == (severity == STALL), verdicts[0].code
    if severity != STALL:
        assert verdicts[0].code in codes


def test_what_is_plausible_stays_and_what_is_given_is_not_changed() -> None:
    e = test_recorded.load("h200_idle")
    assert plausible(e) == e
    e.target.ranks, e.processes[-1].rank, e.log.zero_statistics = MOST_RANKS + 1, -1, e.log.lines + 1
    better = plausible(e)
    assert (better.target.ranks, better.processes[-1].rank, better.log.zero_statistics) == (2, None, 0)
    assert (e.target.ranks, e.processes[-1].rank, e.log.zero_statistics) == (MOST_RANKS + 1, -1, e.log.lines + 1)
