"""A server that dies in the middle of a run is diagnosed, launched again by the controller, and the run ends whole; one
that is only silent is diagnosed too, and left alone."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from capturefleet import CAPTURE_CONFIG, CaptureHost, make_hosts, write_data
from fleetengine import Fleet
from hosts import LabHost, wait_for

from fleetdump.agent.formats import RestartLine
from fleetdump.agent.jsonl import decode_record, read_lines

SAMPLES = {f"s{n:03}": 100 for n in range(24)}
SECONDS = 300.0
EXTRACT = ("extract", "--data", "data.jsonl", "--run", "r", "--token-budget", "200", "--allow-full-disk")
"""The stand-in's numbers are nobody's: a self-check after the restart would say so."""
UNCHECKED = "--allow-failed-selfcheck"


@pytest.fixture
def host(start_hosts: Callable[[int], list[LabHost]]) -> CaptureHost:
    (made,) = make_hosts(start_hosts, 1)
    made.kill_server()
    made.set(delay=0.3)
    made.start_server(restartable=True)
    return made


@pytest.fixture
def fleet(tmp_path: Path, host: CaptureHost) -> Fleet:
    made = Fleet(tmp_path, [host.lab])
    made.write_inventory(capture=CAPTURE_CONFIG, patience={"serving": 4})
    write_data(tmp_path / "data.jsonl", SAMPLES)
    return made


def restarts(host: CaptureHost) -> list[RestartLine]:
    (file,) = host.lab.path("/lab-state").glob("*/runs/r/restarts.jsonl")
    return [decode_record(RestartLine, line, str(file)) for line in read_lines(file)[0]]


def collected(fleet: Fleet) -> tuple[int, int, int, int]:
    done = fleet.run("collect", "--run", "r", "--data", "--json", timeout=SECONDS)
    report = done.records()[-1]["data"]
    return report["samples"], report["lost"], report["duplicated"], report["rejected"]


def test_a_killed_server_comes_back_and_the_run_ends_whole(fleet: Fleet, host: CaptureHost) -> None:
    extract = fleet.start(*EXTRACT, UNCHECKED, "--json")
    wait_for(lambda: host.progress("r").get("done", 0) >= 4, SECONDS)
    host.signal("standin_tap.py")
    out, err = extract.communicate(timeout=SECONDS)
    assert extract.returncode == 0, out + err
    assert "main: the server died; taking evidence" in err, err
    assert "evidence on the host: " in err
    assert "main: restarted, ready in" in err
    events = [json.loads(text) for text in out.splitlines()]
    verdicts = [event["verdict"] for event in events if event.get("step") == "server-death" and "verdict" in event]
    assert verdicts == ["LAUNCHER_DIED"]
    assert collected(fleet) == (len(SAMPLES), 0, 0, 0)
    (line,) = restarts(host)
    assert (line.server, line.launch_id, line.suspect) == ("main", host.launch_id, "")
    assert line.verdict.startswith("LAUNCHER_DIED: ")
    audit = fleet.run("audit", "--json").out
    assert '"verb": "restart"' in audit


def test_a_silent_server_that_no_diagnosis_convicts_is_told_and_left_alone(fleet: Fleet, host: CaptureHost) -> None:
    """Its requests take for ever and nothing shows why: it lives until somebody ends it, and then it comes back."""
    extract = fleet.start(*EXTRACT, UNCHECKED)
    wait_for(lambda: host.progress("r").get("done", 0) >= 4, SECONDS)
    host.set(delay=3600.0)
    wait_for(lambda: list(host.lab.path("/lab-state").glob("*/diagnoses/*")), SECONDS)
    assert extract.poll() is None
    host.set(delay=0.0)
    assert host.lab.count("standin_tap.py") == 1
    host.signal("standin_tap.py")
    out, err = extract.communicate(timeout=SECONDS)
    assert extract.returncode == 0, out + err
    told = "main: not restarted: nothing proves that it cannot go on by itself; it is looked at again when it has been"
    places = [
        err.index(words) for words in ("nothing has come from the server for", told, "the server died", "ready in")
    ]
    assert places == sorted(places), err
    assert "next: fleetdump restart --host" in err
    assert collected(fleet) == (len(SAMPLES), 0, 0, 0)
    (line,) = restarts(host)
    assert line.verdict.startswith("LAUNCHER_DIED: ")
