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


def test_hosts_join_and_leave_a_run_that_is_watched(fleet: Fleet, hosts: list[CaptureHost]) -> None:
    leaving, joining = hosts
    leaving.set(delay=1.0)
    driving = fleet.start(*EXTRACT, "--host", leaving.name)
    wait_for(lambda: leaving.progress("r").get("done", 0) >= 4, SECONDS)
    watching = fleet.start(*EXTRACT, "--host", leaving.name, "--add-host", joining.name)
    wait_for(lambda: list(joining.lab.path("/lab-state").glob("*/runs/r/main.1/share.json")), SECONDS)
    drain = fleet.run("drain", "--run", "r", "--host", leaving.name, timeout=SECONDS)
    assert drain.code == 0, drain
    out, err = driving.communicate(timeout=SECONDS)
    assert driving.returncode == 0, out + err
    _, told = watching.communicate(timeout=SECONDS)
    assert f"asked the extract that is at work to let {joining.name} join" in told
    assert leaving.progress("r")["state"] == "done", "its driver has ended"
    done = done_by(fleet)
    assert 4 <= done[leaving.name] < 80, done


def test_late_lines_of_a_host_that_was_given_up_do_not_count_twice(fleet: Fleet, hosts: list[CaptureHost]) -> None:
    here, away = hosts
    here.set(delay=0.05)
    away.set(delay=1.0)
    extract = fleet.start(*EXTRACT, "--patience", "1")
    wait_for(lambda: away.progress("r").get("done", 0) >= 4, SECONDS)
    away.lab.stop_sshd()
    away.signal("root@notty")  # a link that is cut is found dead after 30 s, one whose other end dies at once
    try:
        wait_for(lambda: away.progress("r")["done"] >= 8, SECONDS)
        away.set(delay=5.0)
        out, err = extract.communicate(timeout=SECONDS)
    finally:
        away.lab.continue_sshd()
    assert extract.returncode == 3, out + err
    assert f"[{away.name}]" in err
    assert "what it has not done goes to the others too after 1s" in err
    assert "was given to others; next: give the same command again when it is back" in err
    again = fleet.run(*EXTRACT, timeout=SECONDS)
    assert again.code == 0, again
    collected = fleet.run("collect", "--run", "r", "--data", "--json", timeout=SECONDS)
    report = collected.records()[-1]["data"]
    assert (report["samples"], report["lost"], report["rejected"]) == (len(SAMPLES), 0, 0), report
    here_too = away.progress("r")["done"]
    assert 0 < report["duplicated"] <= here_too < len(SAMPLES) // 2, "it has given away what it had not begun"
    lines = [json.loads(line) for line in Path(fleet.folder / "runs/r/manifest.jsonl").read_text().splitlines()]
    assert [line["id"] for line in lines] == sorted(SAMPLES), "each once"
    watched = fleet.run("attach", "--run", "r", "--json", timeout=SECONDS)
    totals = [record for record in watched.records() if record.get("event") == "totals"][-1]
    assert (totals["done"], totals["samples"], totals["waiting"]) == (len(SAMPLES), len(SAMPLES), 0), watched
