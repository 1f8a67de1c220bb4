"""Two shares of a run on one server: the second is made ready while the first is worked on, and sends nothing."""

from __future__ import annotations

import errno
import io
import itertools
from collections.abc import Iterator
from pathlib import Path

import pytest
from extraction import StandIn, kill_driver, manifest_of, wait_for

from fleetdump.agent.context import AgentContext
from fleetdump.agent.drive import follow, order, start_driver
from fleetdump.agent.driver import work
from fleetdump.agent.loop import Timing
from fleetdump.agent.procfs import is_alive
from fleetdump.agent.protocol import Request
from fleetdump.agent.runmessages import FollowArgs, OrderArgs, WithdrawArgs
from fleetdump.agent.servermessages import StopArgs
from fleetdump.agent.share import Share
from fleetdump.agent.stop import stop
from fleetdump.agent.turn import Turn
from fleetdump.agent.withdraw import withdraw

SECONDS = 60.0
FIRST = {f"a{n:02}": 20 for n in range(30)}
SECOND = {f"b{n:02}": 20 for n in range(10)}


@pytest.fixture
def host(tmp_path: Path) -> Iterator[StandIn]:
    standin = StandIn(tmp_path)
    standin.set_faults(delay=1.0)
    standin.start()
    yield standin
    standin.kill()
    for path in (tmp_path / "state" / "runs").glob("*/*/driver.json"):
        kill_driver(Share(path.parent))


@pytest.fixture
def shares(host: StandIn) -> tuple[Share, Share]:
    """The first is at work, slowly; the second has its driver."""
    made = host.share(SECOND, token_budget=40).root
    second = Share(made.rename(made.with_name("main.1")))
    first = host.share(FIRST, token_budget=40)
    start_driver(host.state, first)
    wait_for(lambda: len(manifest_of(first)) >= 2, SECONDS)
    start_driver(host.state, second)
    wait_for(lambda: "another share of the run" in second.progress().detail, SECONDS)
    return first, second


def context(host: StandIn) -> AgentContext:
    return AgentContext(Request("x", {}, deadline=SECONDS), host.state, stdin=io.BytesIO(), stdout=io.BytesIO())


def test_the_second_begins_when_the_first_is_done(host: StandIn, shares: tuple[Share, Share]) -> None:
    host.set_faults(delay=0.05)
    wait_for(lambda: all(share.progress().state == "done" for share in shares), SECONDS)
    sent = [(request[0], int(request[4])) for request in host.requests()]
    assert [name[0] for name, _ in sent] == ["a"] * len(FIRST) + ["b"] * len(SECOND)
    assert sent[len(FIRST)][1] == 0, "nothing of the first is in flight any more"


def test_a_dead_driver_leaves_its_turn(host: StandIn, shares: tuple[Share, Share]) -> None:
    first, second = shares
    kill_driver(first)
    host.set_faults(delay=0)
    wait_for(lambda: second.progress().state == "done", SECONDS)
    assert len(manifest_of(first)) < len(FIRST)


def test_a_disk_that_takes_no_file_is_waited_for(host: StandIn, monkeypatch: pytest.MonkeyPatch) -> None:
    host.set_faults(delay=0)
    share = host.share(SECOND)
    take, tries = Turn.take, itertools.count()

    def full_at_first(turn: Turn) -> bool:
        if next(tries) < 2:
            raise OSError(errno.ENOSPC, "No space left on device", str(share.root))
        return take(turn)

    monkeypatch.setattr(Turn, "take", full_at_first)
    work(host.state, share, Timing(turn=0.01, pause=0.1, probe=0.05))
    assert sorted(line["id"] for line in manifest_of(share)) == sorted(SECOND)


def test_who_waits_gives_away_all_that_it_has(host: StandIn, shares: tuple[Share, Share]) -> None:
    _, second = shares
    assert sorted(withdraw(WithdrawArgs("r1", "main.1", 1_000_000), context(host)).ids) == sorted(SECOND)
    host.set_faults(delay=0)
    wait_for(lambda: second.progress().state == "done", SECONDS)
    assert not manifest_of(second)


def test_who_follows_is_told_before_the_end_and_of_shares_that_came_meanwhile(host: StandIn) -> None:
    made = host.share(SECOND).root
    hidden = made.rename(made.with_name("not-yet"))
    (hidden / "share.json").rename(hidden / "spec")
    start_driver(host.state, host.share(FIRST, token_budget=40))
    late = Share(hidden.with_name("main.1"))
    ctx = context(host)
    states = {share.server: share.state for share in follow(FollowArgs("r1", interval=0.05, ahead=SECONDS), ctx).shares}
    assert states == {"main": "running"}

    hidden.rename(late.root)
    host.set_faults(delay=0)
    ended = follow(FollowArgs("r1", interval=0.05, ahead=1e-6), _ComesMeanwhile(host, late)).shares
    assert {share.server for share in ended} == {"main", "main.1"}


class _ComesMeanwhile(AgentContext):
    """The late share is there when the first progress was told."""

    def __init__(self, host: StandIn, late: Share):
        super().__init__(Request("x", {}, deadline=SECONDS), host.state, stdin=io.BytesIO(), stdout=io.BytesIO())
        self.late = late

    def emit(self, event: str, **fields: object) -> None:
        """As its base does."""
        hidden = self.late.root / "spec"
        if hidden.exists():
            hidden.rename(self.late.root / "share.json")
            start_driver(self.state, self.late)
        super().emit(event, **fields)


@pytest.mark.parametrize("order_given", ["drain", "pause"])
def test_drivers_of_a_drained_host_end_with_its_server_and_lose_nothing(
    host: StandIn, shares: tuple[Share, Share], order_given: str
) -> None:
    """Nobody is there to take over what they have: they would wait for ever on a host that is given back."""
    order(OrderArgs("r1", order_given, whole_run=False), context(host))
    wait_for(lambda: all(one.progress().state == "paused" for one in shares), SECONDS)
    wait_for(lambda: not shares[0].progress().in_flight, SECONDS)
    drivers = [(one.driver().pid, one.driver().start_time) for one in shares]  # type: ignore[union-attr]
    host.kill()
    names = ["r1 on main", "r1 on main.1"] if order_given == "drain" else []
    assert stop(StopArgs(), context(host)).left == names
    assert [is_alive(*driver) for driver in drivers] == [order_given == "pause"] * 2
    done = {line["id"] for one in shares for line in manifest_of(one)}
    begun = {line.id for one in shares for line in one.read_attempts()}
    given = [withdraw(WithdrawArgs("r1", one.server, 1 << 60), context(host)).ids for one in shares]
    assert not done & {*given[0], *given[1]}
    assert done | begun | {*given[0], *given[1]} == {*FIRST, *SECOND}, "what was not begun can be had without a driver"
