"""Who takes what over from whom, and who does not; the hosts are what they answer."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from fleetdump.agent.protocol import HeldResult, RunProgress, WithdrawArgs, WithdrawResult
from fleetdump.cli import extract
from fleetdump.errors import HostError, UsageError
from fleetdump.fleet import Host
from fleetdump.ledger import Ledger, Planned
from fleetdump.tasks import rebalance
from fleetdump.tasks.extract import ExtractSettings, RunPlan
from fleetdump.tasks.rebalance import Balancer
from fleetdump.tasks.survey import require_not_cancelled, survey


@dataclass
class Answering:
    """A host by its answers: ``gives`` is what its shares would give away next, ``given`` what they have already."""

    name: str
    shares: list[RunProgress] = field(default_factory=list)
    given: list[str] = field(default_factory=list)
    gives: list[str] = field(default_factory=list)
    held: dict[str, list[str]] = field(default_factory=dict)

    @property
    def config(self) -> Any:
        return SimpleNamespace(name=self.name, servers=(SimpleNamespace(name="main"),))

    def call(self, args: Any, kind: type, *, verb: str, **_: Any) -> Any:
        if verb == "status":
            return SimpleNamespace(shares=self.shares)
        if verb == "held":
            return HeldResult(self.held[args.share], f"sha of {args.share}")
        assert isinstance(args, WithdrawArgs)
        if args.tokens:
            self.given, self.gives = [*self.given, *self.gives], []
        return WithdrawResult(list(self.given))

    @property
    def host(self) -> Host:
        return cast(Host, self)


def busy(state: str = "running", order: str = "", whole_run: bool = False, rate: float = 1.0) -> RunProgress:
    share = RunProgress("r", "main", state, samples=4, tokens=4000, tokens_per_second=rate)
    share.order, share.whole_run = order, whole_run
    return share


def done(order: str = "", whole_run: bool = False, server: str = "main") -> RunProgress:
    return RunProgress("r", server, "done", order=order, whole_run=whole_run)


@pytest.fixture
def ledger(tmp_path: Path) -> Iterator[Ledger]:
    with Ledger(tmp_path / "ledger.sqlite") as made:
        made.plan([Planned(name, "d", "slow", "main", 1000) for name in "abcd"], [("slow", "main", "s")])
        yield made


@pytest.fixture
def balancer(ledger: Ledger) -> Balancer:
    return Balancer("r", ledger, lambda ids: cast(Any, SimpleNamespace(sha256="+".join(ids))))


class Waited(Exception):
    """The balancer would look again later."""


@pytest.fixture(autouse=True)
def no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    def sleep(_: float) -> None:
        raise Waited

    monkeypatch.setattr(rebalance.time, "sleep", sleep)


def taken(plan: RunPlan | None) -> list[tuple[str, str]]:
    return list(plan.shares) if plan is not None else []


SLOW = ["c", "d"]


@pytest.mark.parametrize("state", [busy(), busy("paused", "pause", False, 0.0), busy("stopped", rate=0.0)])
def test_who_is_done_takes_over_from_the_slow_the_leaving_and_the_dead(balancer: Balancer, state: RunProgress) -> None:
    slow, fast = Answering("slow", gives=SLOW), Answering("fast", [done()])
    balancer.note(slow.host, state)
    assert taken(balancer.wait_for_work(fast.host)) == [("fast", "main.1")]
    assert balancer.ledger.homes()["c"] == ("fast", "main.1")


@pytest.mark.parametrize("order", ["pause", "cancel"])
def test_of_a_run_that_rests_as_a_whole_nothing_moves(balancer: Balancer, order: str) -> None:
    slow, other, fast = Answering("slow", gives=SLOW), Answering("other", gives=SLOW), Answering("fast", [done()])
    balancer.note(slow.host, busy("paused", order, True, 0.0))
    balancer.note(other.host, busy())  # its state is from before the order
    with pytest.raises(Waited):
        balancer.wait_for_work(fast.host)
    assert (slow.given, other.given) == ([], [])


@pytest.mark.parametrize(("order", "whole_run", "is_out"), [("pause", True, False), ("pause", False, True)])
def test_who_was_told_to_pause_after_it_was_done_takes_nothing(
    balancer: Balancer, order: str, whole_run: bool, is_out: bool
) -> None:
    slow, fast = Answering("slow", gives=SLOW), Answering("fast", [done(order, whole_run)])
    balancer.note(slow.host, busy())
    if is_out:
        assert balancer.wait_for_work(fast.host) is None
    else:
        with pytest.raises(Waited):
            balancer.wait_for_work(fast.host)
    assert slow.given == []


def test_what_one_host_was_told_to_give_up_is_given_to_nobody(balancer: Balancer) -> None:
    slow, fast = Answering("slow", given=SLOW), Answering("fast", [done()])
    balancer.note(slow.host, busy("running", "cancel", False))
    with pytest.raises(Waited):
        balancer.wait_for_work(fast.host)
    assert balancer.reclaim(slow.host, ["main"]) is None


def test_what_was_given_away_to_nobody_is_given_on_only_when_every_host_has_told(balancer: Balancer) -> None:
    slow, fast = Answering("slow", given=["b"], gives=["c"]), Answering("fast", [done()])
    balancer.note(slow.host, busy())
    balancer.knows_all = False
    assert balancer.reclaim(slow.host, ["main"]) is None
    assert taken(balancer.wait_for_work(fast.host)) == [("fast", "main.1")]
    homes = balancer.ledger.homes()
    assert (homes["b"], homes["c"]) == (("slow", "main"), ("fast", "main.1")), "b may be anybody's"
    balancer.knows_all = True
    assert taken(balancer.reclaim(slow.host, ["main"])) == [("slow", "main.1")]


def test_what_a_leaving_host_gave_to_nobody_goes_to_another_whenever_that_asks(balancer: Balancer) -> None:
    """The controller died between taking it and giving it on: the leaving host's share is done then, and rests."""
    slow, fast = Answering("slow", [done("pause")], given=SLOW), Answering("fast", [done()])
    balancer.unclaimed.add("slow")
    balancer.note(slow.host, done("pause"))
    with pytest.raises(Waited):
        balancer.wait_for_work(fast.host)
    assert balancer.reclaim(slow.host, ["main"]) is None
    assert balancer.wait_for_work(slow.host) is None
    balancer.forget("slow")
    assert taken(balancer.wait_for_work(fast.host)) == [("fast", "main.1")]
    assert balancer.wait_for_work(fast.host) is None
    assert [balancer.ledger.homes()[name] for name in SLOW] == [("fast", "main.1")] * 2


def test_a_run_whose_shares_are_done_already_is_not_waited_for(
    balancer: Balancer, monkeypatch: pytest.MonkeyPatch
) -> None:
    balancer.pending = {"slow", "fast"}
    hosts = [Answering("slow", [done()]), Answering("fast", [done()])]
    monkeypatch.setattr(extract, "submit", lambda host, *_: list(host.shares))
    view = SimpleNamespace(update=lambda *_: None)
    plan = RunPlan("r", {}, 4, [], resumed=True)
    noted: list[str] = []
    keep: Callable[..., None] = balancer.note
    monkeypatch.setattr(balancer, "note", lambda host, progress: (noted.append(host.config.name), keep(host, progress)))
    monkeypatch.setattr(balancer, "wait_for_work", lambda _: None)
    work = extract._attached(plan, ExtractSettings(), balancer, cast(Any, view))
    for host in hosts:
        assert [share.state for share in work(host.host)] == ["done"]
    assert noted == ["slow", "fast"]


# --------------------------------------------------------------------------- what the hosts know better
def test_what_another_controller_has_moved_is_not_moved_again(balancer: Balancer, ledger: Ledger) -> None:
    slow = Answering("slow", [done()], given=["c", "d"])
    fast = Answering("fast", [done(), done(server="main.1")], held={"main.1": ["c"]})
    third = Answering("third", [done(server="main.1")], held={"main.1": ["d"]})
    for host in (slow, fast, third):
        survey(host.host, "r", ledger)
        survey(host.host, "r", ledger)
    assert balancer.reclaim(slow.host, ["main"]) is None
    homes = ledger.homes()
    assert (homes["b"], homes["c"], homes["d"]) == (("slow", "main"), ("fast", "main.1"), ("third", "main.1"))
    assert ledger.share_sha256("fast", "main.1") == "sha of main.1"


def test_our_own_moves_are_not_asked_for(ledger: Ledger) -> None:
    ledger.move(["d"], "fast", "main.1", "ours")
    survey(Answering("fast", [done(server="main.1")]).host, "r", ledger)
    assert ledger.share_sha256("fast", "main.1") == "ours"


@pytest.mark.parametrize(("order", "whole_run"), [("cancel", False), ("pause", True), ("", False)])
def test_a_run_that_was_not_cancelled_as_a_whole_goes_on(order: str, whole_run: bool) -> None:
    require_not_cancelled("r", {"h1": [done(order, whole_run)], "h2": []})


def test_a_run_that_was_cancelled_where_one_host_was_away_is_not_taken_up(
    ledger: Ledger, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers: dict[str, tuple[Sequence[RunProgress], HostError | None]] = {
        "h1": ([done("cancel", True)], None),
        "h2": ([], HostError("away")),
    }
    monkeypatch.setattr(
        extract,
        "fan_out",
        lambda *_, **__: {name: SimpleNamespace(value=value, error=error) for name, (value, error) in answers.items()},
    )
    options = SimpleNamespace(jobs=1, connect_options=lambda: None)
    with pytest.raises(UsageError, match="h1: run r was cancelled") as caught:
        extract._look_around(cast(Any, options), [], "r", ledger)
    assert "fleetdump cancel --run r" in caught.value.next_step
    answers["h1"] = ([done()], None)
    assert not extract._look_around(cast(Any, options), [], "r", ledger), "h2 has not told"
    answers["h2"] = ([], None)
    assert extract._look_around(cast(Any, options), [], "r", ledger)
