"""Orders to the drivers of a run: pause, resume, cancel; and who may drive a run from this machine."""

from __future__ import annotations

import io
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from extraction import StandIn, check_bytes, kill_driver, manifest_of, rejected_of, wait_for

from fleetdump.agent.context import AgentContext
from fleetdump.agent.drive import follow, order, start_driver
from fleetdump.agent.protocol import AgentFailure, FollowArgs, OrderArgs, Request, RunProgress
from fleetdump.agent.share import Share
from fleetdump.errors import LockedError
from fleetdump.tasks.runlock import CONTROLLER, sole

SECONDS = 60.0
SAMPLES = {f"c{n:02}": 20 for n in range(40)}


@pytest.fixture
def host(tmp_path: Path) -> Iterator[StandIn]:
    standin = StandIn(tmp_path)
    yield standin
    standin.kill()
    for path in (tmp_path / "state" / "runs").glob("*/*/driver.json"):
        kill_driver(Share(path.parent))


@pytest.fixture
def share(host: StandIn) -> Share:
    """A share of which a few samples are done, and a driver at work."""
    host.set_faults(delay=0.1)
    host.start()
    share = host.share(SAMPLES, token_budget=40)
    start_driver(host.state, share)
    wait_for(lambda: len(manifest_of(share)) >= 4, SECONDS)
    return share


def context(host: StandIn) -> AgentContext:
    request = Request("order", {}, operator="me@laptop", deadline=SECONDS)
    return AgentContext(request, host.state, stdin=io.BytesIO(), stdout=io.BytesIO())


def give(host: StandIn, what: str) -> RunProgress:
    (progress,) = order(OrderArgs("r1", what), context(host)).shares
    return progress


def wait_until_paused(share: Share) -> None:
    wait_for(lambda: share.progress().state == "paused" and share.progress().in_flight == 0, SECONDS)


def test_a_paused_run_sends_nothing_until_it_is_resumed(host: StandIn, share: Share) -> None:
    give(host, "pause")
    wait_until_paused(share)
    assert "by me@laptop; fleetdump resume" in share.progress().detail
    sent = len(host.requests())
    wait_for(lambda: len(manifest_of(share)) == sent, SECONDS)
    time.sleep(0.5)
    assert len(host.requests()) == sent < len(SAMPLES)
    give(host, "resume")
    wait_for(lambda: share.progress().state == "done", SECONDS)
    assert sorted(line["id"] for line in manifest_of(share)) == sorted(SAMPLES)
    check_bytes(share, host.capture)


def test_a_pause_outlives_the_driver(host: StandIn, share: Share) -> None:
    give(host, "pause")
    wait_until_paused(share)
    kill_driver(share)
    sent = len(host.requests())
    start_driver(host.state, share)
    wait_until_paused(share)
    assert len(host.requests()) == sent
    give(host, "resume")
    wait_for(lambda: share.progress().state == "done", SECONDS)


@pytest.mark.parametrize("dead", [False, True])
def test_what_is_not_done_of_a_cancelled_run_is_rejected_by_name(host: StandIn, share: Share, dead: bool) -> None:
    if dead:
        kill_driver(share)
    give(host, "cancel")
    wait_for(lambda: share.progress().state == "done", SECONDS)
    done = [line["id"] for line in manifest_of(share)]
    given_up = rejected_of(share)
    assert set(given_up.values()) == {"cancelled"}
    assert sorted([*done, *given_up]) == sorted(SAMPLES), "each in one of the two, once"
    check_bytes(share, host.capture)
    give(host, "resume")
    assert share.progress().state == "done", "it cannot be taken back"


def test_an_order_to_a_run_that_is_not_here_is_refused(host: StandIn) -> None:
    for args, code in ((OrderArgs("r2", "pause"), "not_found"), (OrderArgs("r2", "dance"), "usage")):
        with pytest.raises(AgentFailure) as caught:
            order(args, context(host))
        assert caught.value.error.code == code


def test_who_only_watches_starts_no_driver(host: StandIn, share: Share) -> None:
    kill_driver(share)
    request = Request("follow", {}, deadline=1.5)
    ctx = AgentContext(request, host.state, stdin=io.BytesIO(), stdout=io.BytesIO())
    (progress,) = follow(FollowArgs("r1", interval=0.1, revive=False), ctx).shares
    assert progress.state == "stopped"
    assert not share.driver_alive()


def test_one_process_drives_a_run(tmp_path: Path) -> None:
    run = tmp_path / "r1"
    with sole(run, CONTROLLER), pytest.raises(LockedError, match="is being driven already"), sole(run, CONTROLLER):
        pass
    with sole(run, CONTROLLER):
        pass
