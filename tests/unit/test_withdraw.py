"""A share gives away what it has not begun: no sample is worked on by two, none by nobody."""

from __future__ import annotations

import io
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
from extraction import StandIn, kill_driver, manifest_of, wait_for

from fleetdump.agent.context import AgentContext
from fleetdump.agent.drive import order, start_driver
from fleetdump.agent.formats import RejectedLine
from fleetdump.agent.protocol import AgentFailure, Request
from fleetdump.agent.runmessages import HeldArgs, OrderArgs, VerifyArgs, WithdrawArgs
from fleetdump.agent.schedule import Sample, Schedule
from fleetdump.agent.share import Share
from fleetdump.agent.verify import verify
from fleetdump.agent.withdraw import held, withdraw
from fleetdump.ledger import Ledger, Planned

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
    host.set_faults(delay=0.2)
    host.start()
    share = host.share(SAMPLES, token_budget=40)
    start_driver(host.state, share)
    wait_for(lambda: len(manifest_of(share)) >= 4, SECONDS)
    return share


def context(host: StandIn) -> AgentContext:
    return AgentContext(Request("x", {}, deadline=SECONDS), host.state, stdin=io.BytesIO(), stdout=io.BytesIO())


def given(host: StandIn, tokens: int) -> list[str]:
    return withdraw(WithdrawArgs("r1", "main", tokens), context(host)).ids


@pytest.mark.parametrize("driver", ["living", "dead", "restarted"])
def test_what_is_given_away_is_done_by_nobody_else_here(host: StandIn, share: Share, driver: str) -> None:
    if driver == "dead":
        kill_driver(share)
    away = given(host, 200)
    assert 9 <= len(away) <= 11, "about 200 tokens"
    assert given(host, 0) == away, "asking gives nothing more away"
    if driver != "living":
        kill_driver(share)
        start_driver(host.state, share)
    host.set_faults(delay=0)
    wait_for(lambda: share.progress().state == "done", SECONDS)
    done = [line["id"] for line in manifest_of(share)]
    assert sorted([*done, *away]) == sorted(SAMPLES)
    assert not set(away) & {request[0] for request in host.requests()}
    progress = share.progress()
    assert (progress.samples, progress.tokens) == (len(done), 20 * len(done))
    assert verify(VerifyArgs("r1"), context(host)).runs[0].is_whole


def test_a_share_that_is_told_to_leave_gives_all_that_it_has_not_begun_and_is_done(host: StandIn, share: Share) -> None:
    order(OrderArgs("r1", "pause", whole_run=False), context(host))
    away = given(host, 1_000_000)
    wait_for(lambda: share.progress().state == "done", SECONDS)
    assert sorted([*away, *(line["id"] for line in manifest_of(share))]) == sorted(SAMPLES)
    assert len(away) > 20


def drained(host: StandIn, share: Share) -> list[str]:
    """What the share gives away until nothing of it is left here, as a controller asks for it again and again."""
    order(OrderArgs("r1", "drain", whole_run=False), context(host))
    wait_for(lambda: share.progress().detail.startswith("leaving, by"), SECONDS)
    away = given(host, 1_000_000)
    for _ in range(100):
        if share.progress().state in ("closing", "done"):
            break
        time.sleep(0.2)
        away = given(host, 1_000_000)
    wait_for(lambda: share.progress().state == "done", SECONDS)
    assert sorted([*away, *(line["id"] for line in manifest_of(share))]) == sorted(SAMPLES), "each in one place"
    wait_for(partial(ended, share), SECONDS)
    return away


def ended(share: Share) -> bool:
    """Whether no driver has the share."""
    claim = share.claim()
    if claim is not None:
        claim.close()
    return claim is not None


def test_a_host_that_is_drained_gives_away_also_what_has_failed_here(host: StandIn, share: Share) -> None:
    host.set_faults(delay=0.1, error=sorted(SAMPLES))
    wait_for(lambda: len(share.read_attempts()) > 20, SECONDS)
    begun = {line.id for line in share.read_attempts() if line.outcome != "sent"}
    assert begun & set(drained(host, share))
    assert not share.rejected.exists() or share.rejected.read_bytes() == b""


def test_a_host_that_is_drained_with_a_dead_server_gives_away_what_was_in_flight_there(
    host: StandIn, share: Share
) -> None:
    host.kill()
    wait_for(lambda: share.progress().dead_launch != "", SECONDS)
    lost = [line.id for line in share.read_attempts()][-1]
    assert lost in drained(host, share)
    assert verify(VerifyArgs("r1"), context(host)).runs[0].is_whole


def test_a_drain_is_taken_back(host: StandIn, share: Share) -> None:
    host.set_faults(delay=0)
    order(OrderArgs("r1", "drain", whole_run=False), context(host))
    order(OrderArgs("r1", "resume", whole_run=False), context(host))
    wait_for(lambda: share.progress().state == "done", SECONDS)
    assert len(manifest_of(share)) == len(SAMPLES)


def test_a_schedule_releases_what_is_to_be_sent_again_and_keeps_what_is_out() -> None:
    flying, again, suspect = (Sample(name, 10, 0) for name in ("flying", "again", "suspect"))
    schedule = Schedule.of([flying], token_budget=1000)
    assert schedule.take(0.0) is flying
    schedule.again(again, 5.0)
    schedule.suspect(suspect)
    assert schedule.release() == [again, suspect]
    assert schedule.release() == []
    assert schedule.in_flight == {"flying": flying}


@pytest.mark.parametrize("told", ["pause", "unreadable", "cancel"])
def test_what_rests_with_the_whole_run_or_is_cancelled_is_not_given_away(
    host: StandIn, share: Share, told: str
) -> None:
    if told == "unreadable":
        share.order_file.write_text("{")
    else:
        order(OrderArgs("r1", told), context(host))
    assert given(host, 1_000_000) == []
    assert not share.request.exists(), "the driver is not even asked"


def test_a_share_tells_what_it_was_given_and_has_still(host: StandIn, share: Share) -> None:
    away = given(host, 200)
    result = held(HeldArgs("r1", "main"), context(host))
    assert sorted([*result.ids, *away]) == sorted(SAMPLES)
    spec = share.spec()
    assert spec is not None
    assert result.share_sha256 == spec.share_sha256


def test_a_share_that_is_not_here_has_nothing_to_give(host: StandIn) -> None:
    for args in (WithdrawArgs("r1", "main.2", 5), WithdrawArgs("r1", "../x", 5)):
        with pytest.raises(AgentFailure) as caught:
            withdraw(args, context(host))
        assert caught.value.error.code == "not_found"


def test_a_schedule_gives_every_other_sample_and_none_that_was_sent() -> None:
    samples = [Sample(f"s{n}", 10 * n, 0) for n in range(1, 9)]
    samples[7].attempt = 1
    schedule = Schedule.of(samples, token_budget=1000)
    assert [sample.id for sample in schedule.withdraw(90)] == ["s6", "s4"]
    assert [sample.id for sample in schedule.waiting] == ["s1", "s2", "s3", "s5", "s7", "s8"]
    assert [sample.id for sample in schedule.withdraw(10_000)] == ["s7", "s5", "s3", "s2", "s1"]
    assert [sample.id for sample in schedule.waiting] == ["s8"]


# --------------------------------------------------------------------------- on the controller
def test_moved_samples_have_another_home_and_the_shares_stay_what_was_sent(tmp_path: Path) -> None:
    with Ledger(tmp_path / "ledger.sqlite") as ledger:
        ledger.plan([Planned(name, "d", "h1", "main", 10) for name in "abcd"], [("h1", "main", "s1")])
        assert ledger.still_home(["d", "b", "z"], "h1", "main") == ["b", "d"]
        ledger.move(["b", "d"], "h2", "main.1", "s2")
        assert ledger.still_home(["d", "b", "a"], "h1", "main") == ["a"]
        assert ledger.homes() == {
            "a": ("h1", "main"),
            "b": ("h2", "main.1"),
            "c": ("h1", "main"),
            "d": ("h2", "main.1"),
        }
        assert (ledger.share_sha256("h1", "main"), ledger.share_sha256("h2", "main.1")) == ("s1", "s2")
        assert not ledger.was_submitted("h2", "main.1"), "so that it is sent, should the controller die now"


def test_shares_that_others_were_given_are_known_until_they_are_told(tmp_path: Path) -> None:
    file = tmp_path / "ledger.sqlite"
    with Ledger(file) as ledger:
        samples = [Planned(name, "d", "h1", share, 10) for name, share in zip("abc", ("r0", "r1", "r1"), strict=True)]
        ledger.plan(
            [*samples, Planned("z", "d", "h2", "r0")], [("h1", "r0", "s"), ("h1", "r1", "s"), ("h2", "r0", "s")]
        )
        ledger.reject("h1", RejectedLine("b", "r", "r1", "empty", "", 0, 1.0))
        assert ledger.unsettled("h1") == [("a", "r0"), ("c", "r1")]
        ledger.overtake("h1")
        ledger.overtake("h1")
    with Ledger(file) as ledger:  # another process
        assert (ledger.overtaken("h1"), ledger.overtaken("h2")) == (["r0", "r1"], [])
        ledger.told("h1", "r0")
        assert ledger.overtaken("h1") == ["r1"]
