"""The driver against a server that behaves as SGLang with the tap: exactly once, through every fault."""

from __future__ import annotations

import io
import json
import os
import random
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from extraction import StandIn, check_bytes, kill_driver, manifest_of, rejected_of, wait_for

from fleetdump.agent.access import authorization
from fleetdump.agent.clean import clean
from fleetdump.agent.context import AgentContext
from fleetdump.agent.drive import follow, manifest, start_driver, submit
from fleetdump.agent.driver import work
from fleetdump.agent.evidence_types import Target
from fleetdump.agent.formats import ManifestLine, row_line
from fleetdump.agent.generate import post
from fleetdump.agent.hostmessages import CleanArgs
from fleetdump.agent.loop import Timing
from fleetdump.agent.probes import net
from fleetdump.agent.procfs import is_alive
from fleetdump.agent.protocol import AgentFailure, Request, from_json
from fleetdump.agent.runmessages import FollowArgs, ManifestArgs, SubmitArgs
from fleetdump.agent.schedule import Sample, Schedule
from fleetdump.agent.server import load_record, save_record
from fleetdump.agent.shards import close_dead, needed_of
from fleetdump.agent.share import Share
from fleetdump.dataset.shards import verify_samples

FAST = Timing(turn=0.01, settle=0.5, pause=0.1, probe=0.05)


@pytest.fixture
def host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[StandIn]:
    monkeypatch.setattr("fleetdump.agent.schedule.BACKOFF_SECONDS", (0.01, 0.02))
    standin = StandIn(tmp_path)
    yield standin
    standin.kill()
    for path in (tmp_path / "state" / "runs").glob("*/*/driver.json"):
        kill_driver(Share(path.parent))


def drive(host: StandIn, share: Share) -> None:
    """Run the driver in this process, to its end."""
    lock = share.claim()
    assert lock is not None
    with lock:
        work(host.state, share, FAST)


def exactly_once(share: Share, ids: set[str], host: StandIn) -> None:
    lines = [line["id"] for line in manifest_of(share)]
    assert sorted(lines) == sorted(ids)
    assert share.progress().state == "done"
    check_bytes(share, host.capture)


SAMPLES = {f"c{n:02}": 3 + 37 * n for n in range(20)}


def test_every_sample_gets_its_line_and_its_bytes(host: StandIn) -> None:
    host.set_faults(chunk=100)
    host.start()
    share = host.share({**SAMPLES, "a/b ü": 7, "nothing": 0})
    drive(host, share)
    exactly_once(share, {*SAMPLES, "a/b ü"}, host)
    assert rejected_of(share) == {"nothing": "empty"}
    progress = share.progress()
    assert (progress.done, progress.rejected, progress.in_flight) == (21, 1, 0)
    assert progress.notes[-1] == "x: 1 of 2 tokens supervised: 'yes'"
    line = next(line for line in manifest_of(share) if line["id"] == "c19")
    assert [piece["start"] for piece in line["pieces"]] == [0, 100, 200, 300, 400, 500, 600, 700]
    assert line["layers"] == {"input": [1, 3], "output": [0, 2]}
    assert line["norm"] == f"norm-main-{host.launch_id}.safetensors"


def test_a_sample_is_there_when_every_stage_of_the_pipeline_has_written_it(host: StandIn) -> None:
    host.set_faults(chunk=100, stages=[[0], [1, 2]])
    host.start()
    share = host.share(SAMPLES)
    drive(host, share)
    exactly_once(share, set(SAMPLES), host)
    line = next(line for line in manifest_of(share) if line["id"] == "c05")
    assert [(p["start"], p["slots"]) for p in line["pieces"]] == [(0, [0]), (100, [0]), (0, [1, 2]), (100, [1, 2])]
    lines = [from_json(ManifestLine, line) for line in manifest_of(share)]
    assert verify_samples(Path(host.capture.dir) / "r1", lines) == []


def test_a_stage_that_writes_nothing_fails_the_sample_by_name(host: StandIn) -> None:
    host.set_faults(stages=[[0], [2]])
    host.start()
    share = host.share({"a": 5}, max_attempts=1)
    drive(host, share)
    assert rejected_of(share) == {"a": "capture_failed"}
    (outcome,) = [line.detail for line in share.read_attempts() if line.outcome == "rows_missing"]
    assert outcome.startswith("slots [1] of 3 did not come")


def test_long_samples_go_first_and_the_budget_holds(host: StandIn) -> None:
    host.set_faults(delay=0.03)
    host.start()
    share = host.share({"long": 900, **{f"s{n}": 100 for n in range(8)}, "too-big": 1500}, token_budget=400)
    drive(host, share)
    order = [request[0] for request in host.requests()]
    assert order[:2] == ["too-big", "long"]
    assert [int(r[4]) for r in host.requests()][:3] == [0, 0, 0]
    assert max(int(r[4]) for r in host.requests()) <= 3


def test_a_driver_that_is_done_does_nothing_again(host: StandIn) -> None:
    host.start()
    share = host.share(SAMPLES)
    drive(host, share)
    sent = len(host.requests())
    drive(host, share)
    assert len(host.requests()) == sent
    exactly_once(share, set(SAMPLES), host)


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        ({"error": ["c05"]}, "server_error"),
        ({"lose": ["c05"]}, "capture_failed"),
        ({"other_ids": ["c05"]}, "capture_failed"),
    ]
    + [({"skip": {"c05": reason}}, "capture_failed") for reason in ("io_error", "prefix_missing", "capture_error")],
)
def test_what_fails_three_times_is_rejected_and_the_rest_is_not(host: StandIn, fault: dict, reason: str) -> None:
    host.set_faults(**fault)
    host.start()
    share = host.share(SAMPLES)
    drive(host, share)
    exactly_once(share, set(SAMPLES) - {"c05"}, host)
    assert rejected_of(share) == {"c05": reason}
    assert [request[1] for request in host.requests() if request[0] == "c05"] == ["1", "2", "3"]


def test_a_fault_that_passes_costs_attempts_only(host: StandIn) -> None:
    host.set_faults(skip={"c05": "io_error"}, skip_until=2)
    host.start()
    share = host.share(SAMPLES)
    drive(host, share)
    exactly_once(share, set(SAMPLES), host)
    assert next(line["attempt"] for line in manifest_of(share) if line["id"] == "c05") == 3


def test_a_full_disk_is_waited_out_whatever_it_takes(host: StandIn) -> None:
    host.set_faults(skip=dict.fromkeys(SAMPLES, "disk_full"), skip_until=3)
    host.start()
    share = host.share(SAMPLES, max_attempts=2)
    drive(host, share)
    exactly_once(share, set(SAMPLES), host)
    assert rejected_of(share) == {}


def test_only_the_sample_that_kills_is_quarantined(host: StandIn) -> None:
    host.set_faults(poison=["c07"], delay=0.02)
    host.start()
    share = host.share(SAMPLES)
    over = threading.Event()

    def restart() -> None:
        while not over.wait(0.02):
            if host.process is not None and host.process.poll() is not None:
                host.start()

    restarter = threading.Thread(target=restart)
    restarter.start()
    try:
        drive(host, share)
    finally:
        over.set()
        restarter.join()
    exactly_once(share, set(SAMPLES) - {"c07"}, host)
    assert rejected_of(share) == {"c07": "killed_server"}
    alone = [request for request in host.requests() if request[0] == "c07"]
    assert [request[4] for request in alone][1:] == ["0", "0"]


def test_a_server_killed_from_outside_loses_nothing(host: StandIn) -> None:
    host.set_faults(delay=0.05)
    host.start()
    share = host.share(SAMPLES)
    start_driver(host.state, share)
    wait_for(lambda: len(manifest_of(share)) >= 3)
    host.kill()
    wait_for(lambda: "waiting for it" in share.progress().detail)
    assert share.progress().state == "running"
    host.start()
    wait_for(lambda: share.progress().state == "done")
    exactly_once(share, set(SAMPLES), host)
    assert rejected_of(share) == {}


@pytest.mark.parametrize("moment", [0, 4, 15])
def test_a_killed_driver_loses_and_repeats_nothing(host: StandIn, moment: int) -> None:
    host.set_faults(delay=0.03, chunk=64)
    host.start()
    share = host.share(SAMPLES)
    start_driver(host.state, share)
    wait_for(lambda: len(manifest_of(share)) >= moment)
    kill_driver(share)
    committed = {line["id"] for line in manifest_of(share)}
    before = len(host.requests())
    start_driver(host.state, share)
    wait_for(lambda: share.progress().state == "done")
    exactly_once(share, set(SAMPLES), host)
    sent_again = {request[0] for request in host.requests()[before:]}
    assert not committed & sent_again
    attempts = [(request[0], request[1]) for request in host.requests()]
    assert len(attempts) == len(set(attempts)), "a request id was used twice"


@pytest.mark.nightly
@pytest.mark.parametrize("seed", range(5))
def test_many_kills_of_driver_and_server_at_random_moments(host: StandIn, seed: int) -> None:
    chance = random.Random(seed)
    samples = {f"s{n:03}": chance.randint(1, 200) for n in range(150)}
    host.set_faults(delay=0.05, chunk=64)
    host.start()
    share = host.share(samples, token_budget=400)
    start_driver(host.state, share)
    faults = 0
    while share.progress().state != "done":
        time.sleep(chance.uniform(0.1, 1.0))
        if faults < 12:
            faults += 1
            if chance.random() < 0.6:
                kill_driver(share)
            else:
                host.kill()
                host.start()
        if share.progress().state == "stopped":
            start_driver(host.state, share)
    exactly_once(share, set(samples), host)
    assert rejected_of(share) == {}


def test_a_torn_manifest_line_does_not_count(host: StandIn) -> None:
    host.start()
    share = host.share(SAMPLES)
    drive(host, share)
    whole = share.manifest.read_bytes()
    share.manifest.write_bytes(whole[:-40])
    drive(host, share)
    exactly_once(share, set(SAMPLES), host)


def test_one_driver_a_share(host: StandIn) -> None:
    share = host.share(SAMPLES)
    lock = share.claim()
    assert lock is not None
    assert share.claim() is None
    lock.close()
    with share.claim() or pytest.fail("the claim outlives its holder"):
        pass


# --------------------------------------------------------------------------- verbs
def context(host: StandIn, rows: list[dict] = [], deadline: float = 30.0) -> AgentContext:  # noqa: B006
    request = Request("x", {}, deadline=deadline, body_lines=len(rows))
    body = io.BytesIO(b"".join(row_line(row) for row in rows))
    return AgentContext(request, host.state, stdin=body, stdout=io.BytesIO())


def events(ctx: AgentContext) -> list[dict]:
    assert isinstance(ctx.stdout, io.BytesIO)
    return [json.loads(line) for line in ctx.stdout.getvalue().splitlines()]


def submit_args(host: StandIn, rows: list[dict]) -> SubmitArgs:
    import hashlib

    digest = hashlib.sha256(b"".join(row_line(row) for row in rows)).hexdigest()
    return SubmitArgs("r1", "main", digest, host.capture)


ROWS = [{"id": f"x{n}", "input_ids": [n]} for n in range(3)]


def test_submit_follow_manifest(host: StandIn) -> None:
    host.start()
    share = host.share(SAMPLES)
    (share.root / "share.json").unlink()
    progress = submit(submit_args(host, ROWS), context(host, ROWS))
    assert progress.driver_alive or progress.state == "done"
    assert share.rows.read_bytes() == b"".join(row_line(row) for row in ROWS)
    ctx = context(host)
    assert [p.state for p in follow(FollowArgs("r1", interval=0.05), ctx).shares] == ["done"]
    assert events(ctx)[-1]["progress"]["done"] == len(SAMPLES)
    ctx = context(host)
    result = manifest(ManifestArgs("r1", "main"), ctx)
    lines = [json.loads(event["line"])["id"] for event in events(ctx) if event["event"] == "manifest"]
    assert sorted(lines) == sorted(SAMPLES)
    middle = events(ctx)[7]["end"]
    ctx = context(host)
    assert manifest(ManifestArgs("r1", "main", offset=middle), ctx).offset == result.offset
    assert len(events(ctx)) == len(SAMPLES) - 8
    with pytest.raises(AgentFailure) as caught:
        manifest(ManifestArgs("r1", "main", offset=middle - 1), context(host))
    assert caught.value.error.code == "conflict"


def test_the_same_share_again_changes_nothing_and_another_is_a_conflict(host: StandIn) -> None:
    host.start()
    share = host.share({"x0": 1})
    (share.root / "share.json").unlink()
    submit(submit_args(host, ROWS), context(host, ROWS))
    wait_for(lambda: share.progress().state == "done")
    before = share.manifest.read_bytes()
    submit(submit_args(host, ROWS), context(host, ROWS))
    assert share.manifest.read_bytes() == before
    with pytest.raises(AgentFailure) as caught:
        submit(submit_args(host, ROWS[:1]), context(host, ROWS[:1]))
    assert caught.value.error.code == "conflict"


@pytest.mark.parametrize(
    ("change", "code"),
    [
        ({"run": "../x"}, "usage"),
        ({"server": "a/b"}, "usage"),
        ({"server": "other"}, "not_found"),
        ({"share_sha256": "0"}, "failed"),
        ({"capture": {"layers": [2], "dir": "x"}}, "conflict"),
    ],
)
def test_a_submit_that_cannot_work_leaves_nothing_to_run(host: StandIn, change: dict, code: str) -> None:
    from fleetdump.agent.protocol import from_json, to_json

    host.start()
    args = from_json(SubmitArgs, {**to_json(submit_args(host, ROWS)), **change})
    with pytest.raises(AgentFailure) as caught:
        submit(args, context(host, ROWS))
    assert caught.value.error.code == code
    assert not list((host.state.root).glob("runs/*/*/share.json"))


def test_follow_revives_a_dead_driver(host: StandIn) -> None:
    host.set_faults(delay=0.05)
    host.start()
    share = host.share(SAMPLES)
    start_driver(host.state, share)
    wait_for(lambda: len(manifest_of(share)) >= 2)
    kill_driver(share)
    assert share.progress().state == "stopped"
    follow(FollowArgs("r1", interval=0.05), context(host))
    exactly_once(share, set(SAMPLES), host)


def test_follow_ends_at_its_deadline(host: StandIn) -> None:
    share = host.share(SAMPLES)  # no server at all
    started = time.monotonic()
    result = follow(FollowArgs("r1", interval=0.1), context(host, deadline=1.5))
    assert time.monotonic() - started < 3
    assert result.shares[0].state in ("running", "stopped", "tokenising")
    wait_for(lambda: "never launched" in share.progress().detail)
    assert os.getpgid(0) != os.getpgid(share.driver().pid)  # type: ignore[union-attr]


# --------------------------------------------------------------------------- schedule
def flying(schedule: Schedule, now: float = 0.0) -> list[str]:
    taken = []
    while (sample := schedule.take(now)) is not None:
        taken.append(sample.id)
    return taken


def test_schedule_suspects_fly_alone() -> None:
    a, b, c = (Sample(name, 10, 0) for name in "abc")
    schedule = Schedule.of([c], token_budget=100)
    schedule.suspect(a)
    schedule.suspect(b)
    assert flying(schedule) == ["a"]
    schedule.landed(a)
    assert flying(schedule) == ["b"]
    schedule.landed(b)
    assert flying(schedule) == ["c"]
    assert not schedule.idle()


def test_schedule_retries_wait_for_their_time() -> None:
    a = Sample("a", 10, 0)
    schedule = Schedule.of([], token_budget=100)
    schedule.again(a, not_before=5.0)
    assert flying(schedule, 4.9) == []
    assert flying(schedule, 5.0) == ["a"]


def test_a_tokeniser_that_cannot_run_fails_the_share_with_its_reason(host: StandIn) -> None:
    host.start()  # its interpreter has no transformers, or finds no model in that folder
    share = host.share({"x": 1})
    share.work.unlink()
    drive(host, share)
    assert share.progress().state == "failed"
    assert "the tokeniser ended with status 1" in share.progress().detail
    assert rejected_of(share) == {}


# --------------------------------------------------------------------------- a server that is stopped
def half_way(host: StandIn) -> Share:
    """A share with a living driver whose server was stopped on purpose in the middle."""
    host.set_faults(delay=0.1)
    host.start()
    share = host.share(SAMPLES, token_budget=1)
    start_driver(host.state, share)
    wait_for(lambda: len(manifest_of(share)) >= 2)
    host.kill()
    record = load_record(host.state, "main")
    assert record is not None
    record.stopped_at = time.time()
    save_record(host.state, record)
    wait_for(lambda: "is stopped: waiting" in share.progress().detail)
    assert 2 <= len(manifest_of(share)) < len(SAMPLES)
    return share


def test_a_waiting_driver_keeps_no_token_shard_open(host: StandIn) -> None:
    share = half_way(host)
    assert share.driver_alive()
    wait_for(lambda: not list(Path(host.capture.dir).glob("*/tokens-*.part")))
    close_dead(Path(host.capture.dir) / share.run, needed_of([]))  # the killed tap's
    check_bytes(share, host.capture)


def test_clean_ends_a_driver_whose_server_is_stopped(host: StandIn) -> None:
    share = half_way(host)
    driver = share.driver()
    assert driver is not None
    ctx = AgentContext(Request("clean", {}), host.state, stdin=io.BytesIO(), stdout=io.BytesIO())
    clean(CleanArgs([host.capture.dir], data=True, discard=[share.run]), ctx)
    assert not is_alive(driver.pid, driver.start_time)
    assert not host.state.root.exists()
    assert not list(Path(host.capture.dir).iterdir())


def test_a_stopped_driver_stays_away_while_its_claim_is_held(host: StandIn) -> None:
    share = half_way(host)
    driver = share.driver()
    claim = share.stop_driver()
    assert driver is not None
    assert claim is not None
    with claim:
        assert not is_alive(driver.pid, driver.start_time)
        start_driver(host.state, share)
        wait_for(lambda: "another driver works on this share" in share.log.read_text())
    assert share.claim() is not None


# --------------------------------------------------------------------------- a server with a key
def test_a_server_with_an_api_key_is_driven_and_the_key_is_nowhere(host: StandIn) -> None:
    host.start(api_key="k-4711-secret")
    record = load_record(host.state, "main")
    assert record is not None
    assert post(host.port, "/generate", {}).status == 401
    target = Target(record.pid, record.start_time, port=host.port)
    assert net.get(target, "/model_info", 5.0).status == 200
    assert authorization(record.pid, record.start_time + 1) == {}
    share = host.share(SAMPLES)
    drive(host, share)
    exactly_once(share, set(SAMPLES), host)
    files = [path for path in host.tmp.rglob("*") if path.is_file()]
    assert not [path for path in files if b"k-4711" in path.read_bytes()]
