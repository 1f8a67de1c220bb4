"""Exactly once, through every fault: 30 of them here, the rest of ``make test-faults`` at night."""

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
SEEDS = [0, *(pytest.param(seed, marks=pytest.mark.nightly) for seed in range(1, 7))]


@pytest.mark.parametrize("seed", SEEDS)
def test_every_sample_is_there_once_and_right(
    tmp_path: Path, start_hosts: Callable[[int], list[LabHost]], seed: int
) -> None:
    hosts = make_hosts(start_hosts, HOSTS)
    fleet = Fleet(tmp_path, [host.lab for host in hosts])
    fleet.write_inventory(capture=CAPTURE_CONFIG)
    figures = play(fleet, hosts, seed, FAULTS, SAMPLES)
    record(seed, asdict(figures))
    assert (figures.lost, figures.duplicated, figures.corrupt, figures.tool_hangs) == (0, 0, 0, 0), figures
    assert figures.rejected == 0, figures
    assert figures.faults == FAULTS


def record(seed: int, figures: dict[str, object]) -> None:
    """Add a line to the file that FLEETDUMP_FAULTS names, for ``tests.lab.faultsummary``."""
    if path := os.environ.get("FLEETDUMP_FAULTS"):
        with open(path, "a") as file:
            file.write(json.dumps({"seed": seed, **figures}) + "\n")
