"""Before a run: ``plan`` says what it takes, and ``extract`` begins none that cannot work."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from capturefleet import CAPTURE, CAPTURE_CONFIG, CaptureHost, make_hosts
from fleetengine import Done, Fleet
from hosts import LabHost

pytestmark = pytest.mark.lab

USAGE, UNREACHABLE = 2, 3
LENGTHS = [20, 30, 40, 50, 60, 70, 80, 2000]
BYTES_PER_TOKEN = 3 * 128 * 4 + 5


@pytest.fixture
def host(start_hosts: Callable[[int], list[LabHost]]) -> Iterator[CaptureHost]:
    (made,) = make_hosts(start_hosts, 1)
    yield made
    made.kill_server()


@pytest.fixture
def fleet(tmp_path: Path, host: CaptureHost) -> Fleet:
    """One host, and two Parquet files of rows with ids, one of which is broken."""
    made = Fleet(tmp_path, [host.lab])
    made.write_inventory(capture=CAPTURE_CONFIG)
    folder = tmp_path / "ids"
    folder.mkdir()
    for n in range(2):
        rows = [{"id": f"{length}", "input_ids": [5] * length, "loss_mask": [1] * length} for length in LENGTHS[n::2]]
        rows.append({"id": f"bad {n}", "input_ids": [5, 6], "loss_mask": [1]})
        pq.write_table(pa.Table.from_pylist(rows), folder / f"train-{n:05}-of-00002.parquet")
    return made


def begun(fleet: Fleet) -> bool:
    return (fleet.folder / "runs").exists()


def refused(done: Done, *fragments: str) -> None:
    assert done.code == USAGE, done
    assert "error: " in done.err, done
    assert "next: " in done.err, done
    for fragment in fragments:
        assert fragment in done.err, f"{fragment!r} is not in:\n{done}"


def test_plan(fleet: Fleet) -> None:
    done = fleet.run("plan", "--data", "ids", "--max-tokens", "100", "--tokens-per-second", "5", "--json")
    (plan,) = done.records()
    assert done.code == 0, done
    assert (plan["samples"], plan["dropped"], plan["broken"], plan["tokens"]) == (7, 1, 2, 350)
    assert plan["bytes"] == 350 * BYTES_PER_TOKEN + 7 * 2048
    assert (plan["exact"], plan["fits"], plan["seconds"]) == (True, True, 70.0)
    assert [(bar["up_to"], bar["samples"]) for bar in plan["histogram"]] == [(128, 7)]
    assert "masks by given" in done.err
    assert not begun(fleet)
    done = fleet.run("plan", "--data", "ids", "--max-tokens", "100", "--too-long", "truncate", "--measure")
    assert done.code == 0, done
    for fragment in ("8 samples, 450 tokens", "1 samples cut", "bad_ids 2", "\nabout "):
        assert fragment in done.out, done
    (host,) = fleet.hosts
    assert host.run("ls", CAPTURE).split() == []
    assert not begun(fleet)


def test_extract_begins_no_run_that_does_not_fit(fleet: Fleet) -> None:
    (host,) = fleet.hosts
    host.run("mkdir", "-p", CAPTURE)
    host.run("mount", "-t", "tmpfs", "-o", "size=512k", "none", CAPTURE)
    extract = ("extract", "--data", "ids", "--max-tokens", "100")
    refused(fleet.run("plan", *extract[1:]), "does not fit on 1 of 1 hosts", host.name, "--allow-full-disk")
    refused(fleet.run(*extract), "does not fit on 1 of 1 hosts", host.name, "--allow-full-disk")
    assert not begun(fleet)
    assert fleet.run(*extract, "--detach", "--allow-full-disk").code in (0, 1)
    assert begun(fleet)


def test_limits_rejects_and_spans_of_a_run(fleet: Fleet) -> None:
    extract = ("extract", "--data", "ids")
    refused(fleet.run(*extract, "--max-rejects", "1"), "more than 1 of the first", "bad_ids 2", "--max-rejects")
    assert not begun(fleet)
    done = fleet.run(*extract, "--max-tokens", "100")
    assert done.code == 0, done
    before, _, after = done.err.partition("starting run ids")
    assert "20: 20 of 20 tokens supervised" in before  # a person sees the spans before the run begins
    assert after
    done = fleet.run("collect")
    assert "7" in done.out, done
    rejected = [json.loads(line) for line in (fleet.folder / "runs/ids/rejected.jsonl").read_text().splitlines()]
    assert [(row["line"], row["id"], row["reason"]) for row in rejected] == [
        (5, "", "bad_ids"),
        (9, "2000", "too_long"),
        (10, "", "bad_ids"),
    ]
    refused(fleet.run(*extract, "--max-tokens", "50"), "begun with --max-tokens 100, not 50")
    assert fleet.run(*extract).code == 0


def test_extract_before_deploy_begins_no_run(fleet: Fleet, host: CaptureHost) -> None:
    host.kill_server()
    host.lab.run("sh", "-c", "rm -r /lab-state/*/servers")
    refused(fleet.run("extract", "--data", "ids"), "1 of 1 servers was never launched", "fleetdump deploy")
    assert not begun(fleet)


def test_a_host_that_does_not_answer_hides_no_other(fleet: Fleet, start_hosts: Callable[[int], list[LabHost]]) -> None:
    (dead,) = start_hosts(1)
    fleet.hosts.append(dead)
    fleet.write_inventory(capture=CAPTURE_CONFIG)
    dead.kill()
    done = fleet.run("plan", "--data", "ids", "--json")
    (plan,) = done.records()
    assert done.code == UNREACHABLE, done
    assert [need["host"] for need in plan["hosts"]] == [fleet.hosts[0].name]
    assert dead.name in done.err
