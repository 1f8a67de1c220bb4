"""Exactly once, through every fault: 30 of them here, the rest of ``make test-faults`` at night, and with them those
that take minutes."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import pytest
from capturefleet import CAPTURE_CONFIG, make_hosts
from faultround import play
from fleetengine import Fleet
from hosts import LabHost

HOSTS, FAULTS, SAMPLES = 4, 30, 1200
ROUNDS = [(0, False), *(pytest.param(seed, True, marks=pytest.mark.nightly) for seed in range(1, 7))]
KINDS, LONG_KINDS = 10, 2


@pytest.mark.parametrize(("seed", "is_long"), ROUNDS)
def test_every_sample_is_there_once_and_right(
    tmp_path: Path, start_hosts: Callable[[int], list[LabHost]], seed: int, is_long: bool
) -> None:
    hosts = make_hosts(start_hosts, HOSTS)
    fleet = Fleet(tmp_path, [host.lab for host in hosts])
    fleet.write_inventory(capture=CAPTURE_CONFIG)
    figures = play(fleet, hosts, seed, FAULTS, SAMPLES, is_long=is_long)
    record(seed, asdict(figures))
    assert (figures.lost, figures.duplicated, figures.corrupt, figures.tool_hangs) == (0, 0, 0, 0), figures
    assert figures.rejected == 0, figures
    assert figures.faults == sum(figures.kinds.values()) == FAULTS
    assert len(figures.kinds) == KINDS + LONG_KINDS * is_long, "every kind is among them"


def record(seed: int, figures: dict[str, object]) -> None:
    """Add a line to the file that FLEETDUMP_FAULTS names, for ``tests.lab.faultsummary``."""
    if path := os.environ.get("FLEETDUMP_FAULTS"):
        with open(path, "a") as file:
            file.write(json.dumps({"seed": seed, **figures}) + "\n")
