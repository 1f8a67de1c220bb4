"""Every public case and every code has its test."""

from __future__ import annotations

import json
import re
from pathlib import Path

from cases import parts, test_recorded
from cases.index import CODES_OF_THE_REPORTS, OF_CONNECTIONS, ORCHESTRATION, PUBLIC
from cases.table import CASES
from fleetdump.agent.evidence_types import Evidence
from fleetdump.agent.protocol import from_json
from fleetdump.diagnosis import diagnose
from fleetdump.diagnosis.codes import CODES

ROOT = Path(__file__).parents[2]
NAMES = {one.name for one in CASES}
assert parts.PARTS  # the parts fill the table when they are imported


def numbers() -> set[str]:
    return {re.sub(r"(?<=\d)[ab]$", "", name.split()[0]) for name in NAMES}


def test_every_public_case_is_in_the_table() -> None:
    assert set(PUBLIC) <= numbers()


def test_every_case_of_orchestration_has_a_test() -> None:
    for number, tests in ORCHESTRATION.items():
        for one in tests:
            if one.startswith("case "):
                assert one.removeprefix("case ") in NAMES, number
            else:
                path, _, function = one.partition("::")
                assert f"def {function}(" in (ROOT / path).read_text(), one


def test_every_code_of_the_reports_exists() -> None:
    assert set(CODES_OF_THE_REPORTS) <= set(CODES)


def test_every_code_is_said_of_some_case_and_no_other_code_is() -> None:
    bundles = [one.build() for one in CASES]
    bundles += [from_json(Evidence, json.loads(path.read_text())) for path in test_recorded.CASES.glob("*.json")]
    said = {verdict.code for evidence in bundles for verdict in diagnose(evidence)}
    assert said == set(CODES) - OF_CONNECTIONS
