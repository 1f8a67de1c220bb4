"""Work that was not begun moves, while a controller is attached: from slow and leaving hosts, to hosts that join."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from capturefleet import CAPTURE_CONFIG, CaptureHost, make_hosts, write_data
from fleetengine import Fleet
from hosts import LabHost, wait_for

SAMPLES = {f"s{n:03}": 100 for n in range(120)}
SECONDS = 300.0
EXTRACT = ("extract", "--data", "data.jsonl", "--run", "r", "--token-budget", "400", "--allow-full-disk")


@pytest.fixture
def hosts(start_hosts: Callable[[int], list[LabHost]]) -> list[CaptureHost]:
    return make_hosts(start_hosts, 2)


@pytest.fixture
def fleet(tmp_path: Path, hosts: list[CaptureHost]) -> Fleet:
    made = Fleet(tmp_path, [host.lab for host in hosts])
    made.write_inventory(capture=CAPTURE_CONFIG)
    write_data(tmp_path / "data.jsonl", SAMPLES)
    return made


def done_by(fleet: Fleet) -> dict[str, int]:
    """Samples of each host in the merged manifest, which has all of them once."""
    collected = fleet.run("collect", "--run", "r", "--data", "--json", timeout=SECONDS)
    assert collected.code == 0, collected
    report = collected.records()[-1]["data"]
    assert (report["samples"], report["lost"], report["duplicated"], report["rejected"]) == (len(SAMPLES), 0, 0, 0)
    lines = [json.loads(line) for line in Path(fleet.folder / "runs/r/manifest.jsonl").read_text().splitlines()]
    assert [line["id"] for line in lines] == sorted(SAMPLES)
    return {host.name: sum(line["path"] == host.name for line in lines) for host in fleet.hosts}


def test_a_slow_host_gives_work_to_a_fast_one(fleet: Fleet, hosts: list[CaptureHost]) -> None:
    fast, slow = hosts
    fast.set(delay=0.05)
    slow.set(delay=4.0)
    extract = fleet.run(*EXTRACT, timeout=SECONDS)
    assert extract.code == 0, extract
    assert f"{fast.name}/main.1: done" in extract.out, extract
    done = done_by(fleet)
    assert done[fast.name] > len(SAMPLES) // 2 + 10, done
    assert done[slow.name] > 0, done
    again = fleet.run(*EXTRACT, timeout=SECONDS)
    assert again.code == 0, again
    assert done_by(fleet) == done, "nothing is done again"


def test_a_host_joins_and_another_leaves(fleet: Fleet, hosts: list[CaptureHost]) -> None:
    leaving, _ = hosts
    leaving.set(delay=2.0)
    alone = fleet.run(*EXTRACT, "--host", leaving.name, "--detach", timeout=SECONDS)
    assert alone.code == 0, alone
    wait_for(lambda: leaving.progress("r").get("done", 0) >= 4, SECONDS)
    pause = fleet.run("pause", "--run", "r", "--host", leaving.name, timeout=SECONDS)
    assert pause.code == 0, pause
    extract = fleet.start(*EXTRACT)
    try:
        wait_for(lambda: leaving.progress("r").get("done") == leaving.progress("r").get("samples"), SECONDS)
    finally:
        extract.kill()  # a controller may die at any moment
        extract.communicate()
    last = fleet.run(*EXTRACT, timeout=SECONDS)
    assert last.code == 0, last
    done = done_by(fleet)
    assert 4 <= done[leaving.name] < 30, done
