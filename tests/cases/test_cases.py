"""Every case of the table: the first verdict is one of its set, and no forbidden code appears."""

from __future__ import annotations

import pytest

from cases import parts
from cases.table import CASES, Case
from fleetdump.agent.evidence_types import Evidence
from fleetdump.agent.protocol import from_json, to_json
from fleetdump.diagnosis import OK, STALL, diagnose

WELL = {"IDLE_OK", "HEALTHY", "BUSY_NOT_HUNG", "LOADING_SLOW", "JIT_COMPILING", "GRAMMAR_COMPILE", "NOT_RUNNING"}


def by_name(one: Case) -> str:
    return one.name.replace(" ", "-")


@pytest.mark.parametrize("one", CASES, ids=by_name)
def test_first_verdict(one: Case) -> None:
    verdicts = diagnose(one.build())
    codes = [v.code for v in verdicts]
    assert codes[0] in one.first, codes
    assert len(set(codes)) == len(codes), codes
    assert not one.never & set(codes), codes
    assert one.also <= set(codes), codes
    best = verdicts[0]
    if one.rank is not None:
        assert best.rank == one.rank
    if one.phase:
        assert best.phase == one.phase
    assert best.evidence
    assert best.severity == OK or best.next_steps
    assert (best.severity == STALL) == (best.code not in WELL)


@pytest.mark.parametrize("one", CASES, ids=by_name)
def test_a_bundle_survives_the_disk(one: Case) -> None:
    evidence = one.build()
    again = from_json(Evidence, to_json(evidence))
    assert diagnose(again) == diagnose(evidence)


def test_names_are_unique() -> None:
    assert parts.PARTS, "they fill the table"
    assert len({one.name for one in CASES}) == len(CASES)
