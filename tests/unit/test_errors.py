"""Errors of many hosts: one of a kind is told in full, the others are named."""

from __future__ import annotations

from pathlib import Path

import pytest

from fleetdump.cli._fleet import FleetOptions, Report, Verb
from fleetdump.errors import FleetdumpError, UnreachableError, kind_of
from fleetdump.fleet import Outcome


def dead(host: str, address: str, why: str = "timed out") -> UnreachableError:
    return UnreachableError("cannot connect", f"{host} ({address}:22)", f"{address} {why}", f"ping {host}")


@pytest.mark.parametrize(
    ("first", "second", "alike"),
    [
        (dead("gpu01", "10.0.0.1"), dead("gpu02", "10.0.0.2"), True),
        (dead("gpu1", "10.0.0.1"), dead("gpu11", "10.0.0.11"), True),
        (dead("gpu01", "10.0.0.1"), dead("gpu02", "10.0.0.2", "refused"), False),
        (
            dead("gpu01", "10.0.0.1"),
            FleetdumpError("cannot connect", "gpu02", "10.0.0.2 timed out", "ping gpu02"),
            False,
        ),
    ],
)
def test_errors_are_alike_when_only_the_host_differs(
    first: FleetdumpError, second: FleetdumpError, alike: bool
) -> None:
    names = [error.where.split()[0] for error in (first, second)]
    assert (kind_of(first, names[0]) == kind_of(second, names[1])) is alike


def test_a_dead_fleet_is_told_once(capsys: pytest.CaptureFixture[str]) -> None:
    options = FleetOptions(Path("inventory.yaml"), (), (), False, False, False, 8)
    report = Report(options, Verb("status", show=lambda _host, _value: None))
    for n in range(150):
        report.add(f"gpu{n:03}", Outcome(None, dead(f"gpu{n:03}", f"10.0.0.{n}"), 1.0))
    report.add("gpu150", Outcome(None, dead("gpu150", "10.0.0.150", "refused"), 1.0))
    report.close()
    told = capsys.readouterr().err.splitlines()
    assert len(told) == 8, "two errors of three lines, one line for the others, the recap"
    assert "gpu[001-149]: the same as gpu000 (149 hosts)" in told[-2]
