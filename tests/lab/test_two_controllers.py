"""Two ``extract`` of one run from different places: one drives it, the other watches or is refused, and says who."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from capturefleet import CAPTURE_CONFIG, CaptureHost, make_hosts, write_data
from fleetengine import Fleet
from hosts import LabHost, wait_for

SAMPLES = {f"s{n:03}": 100 for n in range(40)}
SECONDS = 300.0
EXTRACT = ("extract", "--data", "data.jsonl", "--run", "r", "--token-budget", "400", "--allow-full-disk")
OTHER_DATA = ("extract", "--data", "other.jsonl", *EXTRACT[3:])
HERE, ELSEWHERE = ("--runs-dir", "here"), ("--runs-dir", "elsewhere")


@pytest.fixture
def hosts(start_hosts: Callable[[int], list[LabHost]], tmp_path: Path) -> tuple[Fleet, list[CaptureHost]]:
    """Two of them, and a data set."""
    made = make_hosts(start_hosts, 2)
    fleet = Fleet(tmp_path, [host.lab for host in made])
    fleet.write_inventory(capture=CAPTURE_CONFIG)
    write_data(tmp_path / "data.jsonl", SAMPLES)
    return fleet, made


@pytest.fixture
def host(start_hosts: Callable[[int], list[LabHost]]) -> CaptureHost:
    (made,) = make_hosts(start_hosts, 1)
    made.set(delay=5.0)
    return made


@pytest.fixture
def fleet(tmp_path: Path, host: CaptureHost) -> Fleet:
    made = Fleet(tmp_path, [host.lab])
    made.write_inventory(capture=CAPTURE_CONFIG)
    write_data(tmp_path / "data.jsonl", SAMPLES)
    write_data(tmp_path / "other.jsonl", {**SAMPLES, "s000": 99, "more": 5})
    return made


def collected_whole(fleet: Fleet, where: tuple[str, ...]) -> dict[str, Any]:
    """The report of a collect, which has every sample once."""
    collected = fleet.run("collect", "--run", "r", *where, "--data", "--json", timeout=SECONDS)
    report: dict[str, Any] = collected.records()[-1]["data"]
    assert (report["samples"], report["lost"], report["duplicated"]) == (len(SAMPLES), 0, 0), report
    return report


def test_a_second_extract_from_elsewhere_watches_and_other_data_is_refused(fleet: Fleet, host: CaptureHost) -> None:
    first = fleet.start(*EXTRACT, *HERE)
    wait_for(lambda: host.progress("r").get("done", 0) >= 2, SECONDS)
    for where, words in ((HERE, "rows: 1 changed (first: 's000'), 1 new"), (ELSEWHERE, "driven with other data")):
        refused = fleet.run(*OTHER_DATA, *where)
        assert refused.code == 2, refused
        for fragment in (words, "data.jsonl (40 samples, SHA-256 ", "other.jsonl (41 samples, SHA-256 ", "--run name"):
            assert fragment in refused.err, refused
    beginning = fleet.run(*EXTRACT, *ELSEWHERE, "--detach")
    assert beginning.code == 0, beginning
    assert "nothing to begin" in beginning.err, beginning
    watching = fleet.start(*EXTRACT, *ELSEWHERE)
    status = fleet.run("status")
    assert "run r is driven by " in status.out, status
    host.set(delay=0.1)
    out, err = first.communicate(timeout=SECONDS)
    assert first.returncode == 0, out + err
    out, err = watching.communicate(timeout=SECONDS)
    assert watching.returncode == 0, out + err
    for fragment in (f"process {first.pid} in {fleet.folder}/here/r) since 20", "only watching", "fleetdump attach"):
        assert fragment in err, err
    assert not (fleet.folder / "elsewhere").exists(), "it has begun nothing"
    assert collected_whole(fleet, HERE)["rejected"] == 0
    lines = [json.loads(line) for line in (fleet.folder / "here/r/manifest.jsonl").read_text().splitlines()]
    assert [line["id"] for line in lines] == sorted(SAMPLES)


def test_who_was_killed_drives_nothing_any_more(fleet: Fleet, host: CaptureHost) -> None:
    first = fleet.start(*EXTRACT, *HERE)
    wait_for(lambda: host.progress("r").get("done", 0) >= 2, SECONDS)
    first.kill()
    first.communicate()
    host.set(delay=0.1)
    other = fleet.run(*EXTRACT, *ELSEWHERE, timeout=SECONDS)
    assert other.code == 0, other
    assert "run r is done" in other.err, other


def test_two_that_start_in_the_same_moment_both_end_well(hosts: tuple[Fleet, list[CaptureHost]]) -> None:
    fleet, _ = hosts
    both = [fleet.start(*EXTRACT, *where) for where in (HERE, ELSEWHERE)]
    told = [process.communicate(timeout=SECONDS) for process in both]
    assert [process.returncode for process in both] == [0, 0], told
    assert sum("only watching" in err for _, err in told) == 1, told
    winner, loser = (ELSEWHERE, HERE) if "only watching" in told[0][1] else (HERE, ELSEWHERE)
    collected_whole(fleet, winner)
    taken_up = fleet.run(*EXTRACT, *loser, timeout=SECONDS)
    assert taken_up.code == 0, taken_up


def test_a_run_of_another_folder_is_taken_over_with_the_hosts_it_has(hosts: tuple[Fleet, list[CaptureHost]]) -> None:
    """Begun without the second host; the other folder knows nothing of that and chooses both."""
    fleet, (first, second) = hosts
    first.set(delay=5.0)
    begun = fleet.start(*EXTRACT, *HERE, "--exclude", second.lab.name)
    wait_for(lambda: first.progress("r").get("done", 0) >= 2, SECONDS)
    begun.kill()
    begun.communicate()
    first.set(delay=0.1)
    other = fleet.run(*EXTRACT, *ELSEWHERE, timeout=SECONDS)
    assert other.code == 0, other
    assert "going on with run r: 40 samples on 1 server" in other.err, other
    collected_whole(fleet, ELSEWHERE)
