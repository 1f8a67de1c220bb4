"""``extract --controller``: the controller on a host of the fleet, with no more than that host's own access."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from capturefleet import CAPTURE_CONFIG, CaptureHost, make_hosts, write_data
from fleetengine import STATE, Fleet
from hosts import LabHost, wait_for

SAMPLES = {f"s{n:03}": 100 for n in range(80)}
SECONDS = 300.0
EXTRACT = ("extract", "--data", "data.jsonl", "--run", "r", "--token-budget", "400", "--allow-full-disk")
CONTROLLER = "fleetdump.__main__ import main"
"""Of the controller's command line."""


@pytest.fixture
def hosts(start_hosts: Callable[[int], list[LabHost]]) -> list[CaptureHost]:
    return make_hosts(start_hosts, 2)


@pytest.fixture
def fleet(tmp_path: Path, hosts: list[CaptureHost]) -> Fleet:
    """This machine learns the second host's key by --accept-new; the seat has it from nowhere but this machine."""
    made = Fleet(tmp_path, [host.lab for host in hosts], {hosts[1].name: {"host_key": ""}})
    made.write_inventory(capture=CAPTURE_CONFIG)
    write_data(tmp_path / "data.jsonl", SAMPLES)
    return made


def seat_on(host: CaptureHost) -> tuple[str, ...]:
    return (*EXTRACT, "--accept-new", "--controller", host.name, "--controller-python", sys.executable)


def log_of(host: CaptureHost) -> str:
    """What its controllers have said."""
    return "\n".join(path.read_text() for path in host.lab.path(STATE).glob("*/controllers/r/controller.log"))


def give_key(host: CaptureHost) -> None:
    """As its user would have one: the lab's own, which every host accepts."""
    ssh = host.lab.path("/root/.ssh")
    ssh.mkdir(mode=0o700, exist_ok=True)
    key = ssh / "id_ed25519"
    key.write_bytes(host.lab.identity_file.read_bytes())
    key.chmod(0o600)


def test_a_host_without_a_key_of_its_own_is_refused_before_anything_starts(
    fleet: Fleet, hosts: list[CaptureHost]
) -> None:
    seat, other = hosts
    refused = fleet.run(*seat_on(seat), timeout=SECONDS)
    assert refused.code == 1, refused
    assert "cannot work with 1 of 2 hosts" in refused.err, refused
    assert f"{other.name}: " in refused.err, refused
    assert "ssh-keygen" in refused.err, refused
    assert not (fleet.folder / "runs").exists()
    assert not list(seat.lab.path(STATE).glob("*/runs/*")), "no share was handed out"
    old = fleet.run(*EXTRACT, "--controller", seat.name, "--controller-python", "/usr/bin/false", timeout=SECONDS)
    assert old.code == 1, old
    assert "/usr/bin/false" in old.err, old


@pytest.mark.parametrize("dies", [False, pytest.param(True, marks=pytest.mark.nightly)])
def test_a_controller_on_a_host_moves_work_while_nobody_else_is_there(
    fleet: Fleet, hosts: list[CaptureHost], dies: bool
) -> None:
    """It takes as long as a slow host must have left for work to be worth moving (``rebalance.LEAST_SECONDS``)."""
    seat, slow = hosts
    give_key(seat)
    seat.set(delay=0.02)
    slow.set(delay=6.0)
    started = fleet.run(*seat_on(seat), timeout=SECONDS)
    assert started.code == 0, started
    assert f"the controller of run r works on {seat.name}" in started.err, started
    assert seat.lab.count(CONTROLLER) == 1

    second = fleet.start(*EXTRACT)
    try:
        said = ""
        give_up = time.monotonic() + SECONDS
        assert second.stderr is not None
        while "only watching" not in said and time.monotonic() < give_up:
            said += second.stderr.readline()
        assert f"by a controller on {seat.name}" in said, said
    finally:
        second.kill()
        second.communicate()
    if dies:
        assert seat.signal(CONTROLLER) == 1
        again = fleet.run(*seat_on(seat), timeout=SECONDS)
        assert again.code == 0, again
    status = fleet.run("status", timeout=SECONDS)
    assert "run r is driven from here" in status.out, status

    wait_for(lambda: not seat.lab.count(CONTROLLER), SECONDS, "the controller ends with the run")
    watched = fleet.run("attach", "--run", "r", "--json", timeout=SECONDS)
    assert watched.code == 0, watched
    assert [record["done"] for record in watched.records() if record.get("event") == "totals"][-1] == len(SAMPLES)
    collected = fleet.run("collect", "--run", "r", "--data", "--json", timeout=SECONDS)
    assert collected.code == 0, collected
    report = collected.records()[-1]["data"]
    assert (report["samples"], report["lost"], report["duplicated"], report["rejected"]) == (len(SAMPLES), 0, 0, 0)
    lines = [json.loads(line) for line in Path(fleet.folder / "runs/r/manifest.jsonl").read_text().splitlines()]
    assert sum(line["path"] == seat.name for line in lines) > len(SAMPLES) // 2 + 10, log_of(seat)


def test_a_host_joins_a_run_whose_controller_sits_on_a_host(fleet: Fleet, hosts: list[CaptureHost]) -> None:
    seat, joining = hosts
    give_key(seat)
    seat.set(delay=6.0)
    started = fleet.run(*seat_on(seat), "--host", seat.name, timeout=SECONDS)
    assert started.code == 0, started
    alone = ("--host", seat.name, "--add-host", joining.name)
    refused = fleet.run(*EXTRACT, "--accept-new", *alone, timeout=SECONDS)
    assert refused.code == 5, refused
    assert f"{joining.name} cannot join from here" in refused.err, refused
    assert "--controller" in refused.err, refused
    passed_on = fleet.run(*seat_on(seat), *alone, timeout=SECONDS)
    assert passed_on.code == 0, passed_on
    assert seat.lab.count(CONTROLLER) == 1, "one has taken the other's place"
    joined = list(joining.lab.path(STATE).glob("*/runs/r/*/share.json"))
    wait_for(lambda: list(joining.lab.path(STATE).glob("*/runs/r/main.1/share.json")), SECONDS, log_of(seat))
    assert not joined, "it had no part before"
    seat.set(delay=0.1)
    wait_for(lambda: not seat.lab.count(CONTROLLER), SECONDS, "the controller ends with the run")
    collected = fleet.run("collect", "--run", "r", "--data", "--json", timeout=SECONDS)
    report = collected.records()[-1]["data"]
    assert (report["samples"], report["lost"], report["duplicated"], report["rejected"]) == (len(SAMPLES), 0, 0, 0)
