"""docs/evidence.md: its example is a bundle, and it names every field there is."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path

from fleetdump.agent import evidence_engine, evidence_host, evidence_process, evidence_types
from fleetdump.agent.evidence_types import Evidence
from fleetdump.agent.probes.logtroubles import TROUBLES
from fleetdump.agent.protocol import from_json
from fleetdump.diagnosis import diagnose
from fleetdump.diagnosis.codes import CODES

DOCUMENT = Path(__file__).parents[3] / "docs" / "evidence.md"


def example() -> Evidence:
    match = re.search(r"```json\n(.*?)```", DOCUMENT.read_text(), re.S)
    assert match
    return from_json(Evidence, json.loads(match[1]))


def test_the_example_gives_the_verdicts_that_it_promises() -> None:
    promised = re.search(r"The verdicts on it are `(\w+)` and `(\w+)`, rank (\d)", DOCUMENT.read_text())
    assert promised
    verdicts = diagnose(example())
    assert [v.code for v in verdicts] == [promised[1], promised[2]]
    assert verdicts[0].rank == int(promised[3])


def test_every_field_is_named() -> None:
    named = set(re.findall(r"`(\w+)`", DOCUMENT.read_text()))
    modules = (evidence_types, evidence_process, evidence_engine, evidence_host)
    kinds = [k for m in modules for k in vars(m).values() if dataclasses.is_dataclass(k) and k.__module__ == m.__name__]
    fields = {field.name for kind in kinds for field in dataclasses.fields(kind)}
    assert len(kinds) > 20
    assert fields <= named, fields - named


def test_every_code_is_listed_with_its_meaning() -> None:
    text = DOCUMENT.read_text()
    rows = dict(re.findall(r"^\| ([A-Z][A-Z0-9_]+) \| (.*) \|$", text, re.M))
    assert rows == {name: code.meaning for name, code in CODES.items()}


def test_a_bundle_of_the_required_fields_alone_is_one() -> None:
    """What the document marks with an exclamation mark is all that must be there."""
    evidence = from_json(Evidence, {"target": {"pid": 1}, "taken_at": 1.0, "seconds": 5.0})
    assert [v.code for v in diagnose(evidence)] == ["UNKNOWN"]


def test_every_trouble_is_named() -> None:
    text = DOCUMENT.read_text()
    assert all(name in text for name, _ in TROUBLES)
