"""Who takes what over from whom, and who does not; the hosts are what they answer."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from fleetdump.agent.formats import RejectedLine
from fleetdump.agent.runmessages import HeldResult, RunProgress, WithdrawArgs, WithdrawResult
from fleetdump.cli import _driving, _lookaround, _members
from fleetdump.cli._fleet import FleetOptions
from fleetdump.cli._lookaround import look_around
from fleetdump.cli._members import Members
from fleetdump.errors import ExitCode, HostError, UnreachableError, UsageError
from fleetdump.fleet import Host, Outcome
from fleetdump.ledger import Ledger, Planned
from fleetdump.tasks import rebalance
from fleetdump.tasks.assignment import RunPlan
from fleetdump.tasks.attendance import Attendance, JoinRequests
from fleetdump.tasks.extract import ExtractSettings
from fleetdump.tasks.places import Places
from fleetdump.tasks.rebalance import START_SECONDS, Balancer, Known, fair_part
from fleetdump.tasks.supervise import Policy
from fleetdump.tasks.survey import Surveyed, require_not_cancelled, survey


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
        servers = (SimpleNamespace(name="main"),)
        return SimpleNamespace(name=self.name, servers=servers, address="10.0.0.1", port=None)

    def call(self, args: Any, kind: type, *, verb: str, **_: Any) -> Any:
        if verb == "status":
            return SimpleNamespace(shares=self.shares, controllers=[], steering=[])
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
    balancer.pending.add("slow")
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
    noted: list[str] = []
    keep: Callable[..., None] = balancer.note
    monkeypatch.setattr(balancer, "note", lambda host, progress: (noted.append(host.config.name), keep(host, progress)))
    monkeypatch.setattr(balancer, "wait_for_work", lambda _: None)
    work = members(balancer, monkeypatch, hosts).work
    for host in hosts:
        assert [share.state for share in work(host.host)] == ["done"]
    assert noted == ["slow", "fast"]


# --------------------------------------------------------------------------- hosts that leave, and that are away
def members(balancer: Balancer, monkeypatch: pytest.MonkeyPatch, hosts: Sequence[Answering]) -> Members:
    """What the hosts do that take part, without their manifests."""
    monkeypatch.setattr(_members, "taking_in", lambda *_: nullcontext())
    monkeypatch.setattr(_members, "submit", lambda host, *_: list(host.shares))
    anything = cast(Any, SimpleNamespace(update=lambda *_: None, note=lambda *_: None, is_left_dead=lambda *_: False))
    plan, undisputed = RunPlan("r", {}, 4, [], resumed=True), Places(cast(Any, None), [], pytest.fail)
    return Members(
        plan, ExtractSettings(), undisputed, balancer, Attendance([host.config for host in hosts]), anything, anything
    )


def test_who_is_drained_gives_all_at_once_and_takes_nothing(balancer: Balancer) -> None:
    slow, fast = Answering("slow", [busy("paused", "drain", False)], gives=SLOW), Answering("fast", [done()])
    balancer.note(fast.host, busy())
    balancer.note(slow.host, slow.shares[0])
    (release,) = [thread for thread in threading.enumerate() if thread.name == "release-slow"] or [None]
    if release is not None:
        release.join(60.0)
    assert slow.given == SLOW, "nobody has asked for it yet"
    assert balancer.wait_for_work(slow.host) is None
    assert taken(balancer.wait_for_work(fast.host)) == [("fast", "main.1")]
    assert balancer.left_over() == 0


def away(balancer: Balancer, *delivered: str) -> None:
    """Host ``slow`` is lost, with these of its samples known to be done."""
    for name in delivered:
        balancer.ledger.reject("slow", RejectedLine(name, "r", "main", "empty", "", 1, 1.0))
    balancer.lost("slow")


def test_what_a_lost_host_has_not_done_is_copied_when_the_patience_is_over(balancer: Balancer) -> None:
    fast = Answering("fast", [done()])
    balancer.note(Answering("slow").host, busy())
    away(balancer, "a", "b")
    with pytest.raises(Waited):
        balancer.wait_for_work(fast.host)
    balancer.patience = 0.0
    assert taken(balancer.wait_for_work(fast.host)) == [("fast", "main.1")]
    assert list(balancer.ledger.homes().values()) == [("slow", "main")] * 2 + [("fast", "main.1")] * 2
    assert balancer.ledger.overtaken("slow") == ["main"]
    assert balancer.wait_for_work(fast.host) is None, "once"


def test_a_lost_host_that_has_done_all_is_not_waited_for(balancer: Balancer) -> None:
    away(balancer, *"abcd")
    assert balancer.wait_for_work(Answering("fast", [done()]).host) is None


def test_what_a_host_was_told_to_give_up_is_not_copied_when_it_is_lost(balancer: Balancer) -> None:
    balancer.patience = 0.0
    balancer.note(Answering("slow").host, busy("running", "cancel", False))
    away(balancer)
    assert balancer.wait_for_work(Answering("fast", [done()]).host) is None


def test_nothing_is_copied_of_a_run_that_rests(balancer: Balancer) -> None:
    balancer.patience = 0.0
    away(balancer)
    balancer.note(Answering("other").host, busy("paused", "pause", True, 0.0))
    with pytest.raises(Waited):
        balancer.wait_for_work(Answering("fast", [done()]).host)
    assert balancer.ledger.overtaken("slow") == []


def test_a_host_that_is_back_in_time_keeps_its_work(balancer: Balancer) -> None:
    slow = Answering("slow", gives=SLOW)
    away(balancer)
    balancer.back(slow.host)
    balancer.patience = 0.0
    assert balancer.wait_for_work(Answering("fast", [done()]).host) is None
    assert slow.given == []


def test_a_host_that_is_back_too_late_gives_away_what_it_has_not_begun(balancer: Balancer) -> None:
    slow = Answering("slow", [busy()], gives=SLOW)
    balancer.patience = 0.0
    away(balancer)
    assert balancer.wait_for_work(Answering("fast", [done()]).host) is not None
    balancer.back(slow.host)
    assert slow.given == SLOW
    assert balancer.ledger.overtaken("slow") == []
    assert balancer.reclaim(slow.host, ["main"]) is None, "others have it"


@dataclass
class Refusing(Answering):
    """A host whose agent answers with an error."""

    code: str = "not_found"

    def call(self, *_: Any, **__: Any) -> Any:
        raise HostError("no", self.name, code=self.code)


@pytest.mark.parametrize(("code", "kept"), [("not_found", []), ("timeout", ["main"])])
def test_a_share_that_never_arrived_is_not_sent_once_others_have_it(
    balancer: Balancer, code: str, kept: list[str]
) -> None:
    balancer.patience = 0.0
    away(balancer)
    assert balancer.wait_for_work(Answering("fast", [done()]).host) is not None
    shares: dict[Any, Any] = {("slow", "main"): None, ("fast", "main"): None}
    balancer.back(Refusing("slow", code=code).host, RunPlan("r", shares, 4, [], False))
    assert list(shares) == [("fast", "main")] if code == "not_found" else [("slow", "main"), ("fast", "main")]
    assert balancer.ledger.overtaken("slow") == kept, "whoever did not answer is told the next time"


def test_what_a_host_refuses_to_take_over_is_the_next_ones(balancer: Balancer, monkeypatch: pytest.MonkeyPatch) -> None:
    slow, fast = Answering("slow", gives=SLOW), Answering("fast", [done()])
    balancer.note(slow.host, busy())
    work = members(balancer, monkeypatch, [fast]).work

    def refuse(host: Answering, plan: RunPlan, *_: object) -> list[RunProgress]:
        if plan.shares:
            raise HostError("only 3 MiB are free", host.name)
        return host.shares

    monkeypatch.setattr(_members, "submit", refuse)
    with pytest.raises(HostError, match="only 3 MiB"):
        work(fast.host)
    assert balancer.left_over() == 2
    assert taken(balancer.wait_for_work(Answering("third", [done()]).host)) == [("third", "main.1")]


def test_what_was_on_its_way_to_a_host_that_was_lost_is_sent_again_when_it_is_back(
    balancer: Balancer, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow, fast = Answering("slow", gives=SLOW), Answering("fast", [done()])
    balancer.note(slow.host, busy())
    sent: list[list[Any]] = []

    def submit(host: Answering, plan: RunPlan, *_: object) -> list[RunProgress]:
        sent.append(list(plan.shares))
        if plan.shares and len(sent) < 3:
            raise UnreachableError("lost", host.name)
        return host.shares

    work = members(balancer, monkeypatch, [fast]).work
    monkeypatch.setattr(_members, "submit", submit)
    with pytest.raises(UnreachableError):
        work(fast.host)
    balancer.forget("slow")
    balancer.note(slow.host, done())
    work(fast.host)
    assert sent == [[], [("fast", "main.1")], [], [("fast", "main.1")]]


# --------------------------------------------------------------------------- what the hosts know better
def test_what_another_controller_has_moved_is_not_moved_again(balancer: Balancer, ledger: Ledger) -> None:
    slow = Answering("slow", [done()], given=["c", "d"])
    fast = Answering("fast", [done(), done(server="main.1")], held={"main.1": ["c"]})
    third = Answering("third", [done(server="main.1")], held={"main.1": ["d"]})
    for host in (slow, fast, third):
        for _ in range(2):
            survey(host.host, "r", ledger).note(ledger, host.host.config.name)
    assert balancer.reclaim(slow.host, ["main"]) is None
    homes = ledger.homes()
    assert (homes["b"], homes["c"], homes["d"]) == (("slow", "main"), ("fast", "main.1"), ("third", "main.1"))
    assert ledger.share_sha256("fast", "main.1") == "sha of main.1"


def test_our_own_moves_are_not_asked_for(ledger: Ledger) -> None:
    ledger.move(["d"], "fast", "main.1", "ours")
    survey(Answering("fast", [done(server="main.1")]).host, "r", ledger).note(ledger, "fast")
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
        _lookaround,
        "fan_out",
        lambda *_, **__: {
            name: SimpleNamespace(value=None if error else Surveyed(list(shares)), error=error)
            for name, (shares, error) in answers.items()
        },
    )
    options = SimpleNamespace(jobs=1, connect_options=lambda: None)
    with pytest.raises(UsageError, match="h1: run r was cancelled") as caught:
        look_around(cast(Any, options), [], "r", ledger)
    assert "fleetdump cancel --run r" in caught.value.next_step
    answers["h1"] = ([done()], None)
    assert not look_around(cast(Any, options), [], "r", ledger).knows_all, "h2 has not told"
    answers["h2"] = ([], None)
    assert look_around(cast(Any, options), [], "r", ledger).knows_all


@pytest.mark.parametrize("busy", [0.0, 5.0, 15.0])
@pytest.mark.parametrize(("rate", "mine"), [(1.0, 1.0), (0.25, 1.0), (100.0, 2500.0)])
def test_giver_and_taker_end_together_though_the_taker_starts_later(rate: float, mine: float, busy: float) -> None:
    share = RunProgress("r", "main", "running", tokens=int(400 * rate), tokens_per_second=rate)
    given = fair_part(Known(share, cast(Host, Answering("slow"))), mine, busy)
    assert max(START_SECONDS, busy) + given / mine == pytest.approx(
        (share.tokens - given) / rate, abs=2 / min(rate, mine)
    )


def test_who_has_no_rate_gives_all_and_who_is_nearly_done_nothing() -> None:
    host = cast(Host, Answering("slow"))
    assert fair_part(Known(RunProgress("r", "main", "stopped", tokens=700), host), 5.0) == 700
    nearly = RunProgress("r", "main", "running", tokens=700, tokens_per_second=700 / START_SECONDS)
    assert fair_part(Known(nearly, host), 5.0) == 0


def share_named(server: str, rate: float) -> RunProgress:
    share = busy(rate=rate)
    share.server = server
    return share


def test_only_one_share_is_asked_when_it_gives(balancer: Balancer, ledger: Ledger) -> None:
    """What was taken from a second one would be moved, and sent to nobody."""
    ledger.move(["d"], "other", "main", "s2")
    slow, other = Answering("slow", gives=["c"]), Answering("other", gives=["d"])
    balancer.note(slow.host, busy())
    balancer.note(other.host, busy())
    assert taken(balancer.wait_for_work(Answering("fast", [done()]).host)) == [("fast", "main.1")]
    assert sorted([slow.given, other.given]) in ([[], ["c"]], [[], ["d"]])


@dataclass
class Asked(Answering):
    """How many tokens it was asked for."""

    tokens: list[int] = field(default_factory=list)

    def call(self, args: Any, kind: type, *, verb: str, **more: Any) -> Any:
        if isinstance(args, WithdrawArgs):
            self.tokens.append(args.tokens)
        return super().call(args, kind, verb=verb, **more)


def test_a_share_that_has_just_begun_does_not_give_all_away(
    balancer: Balancer, ledger: Ledger, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [1000.0]
    monkeypatch.setattr(rebalance.time, "monotonic", lambda: now[0])
    slow, fast = Asked("slow", gives=["a"]), Answering("fast", [done()])
    balancer.note(slow.host, busy(rate=0.0))
    with pytest.raises(Waited):
        balancer.wait_for_work(fast.host)
    assert slow.tokens == [], "nobody knows how fast it is"

    ledger.move(SLOW, "slow", "main.1", "s2")
    balancer.note(slow.host, busy(rate=10.0))
    balancer.forget("slow")  # its first share is done
    balancer.note(slow.host, share_named("main.1", rate=0.0))
    slow.gives = ["c"]
    assert taken(balancer.wait_for_work(fast.host)) == [("fast", "main.1")]
    assert slow.tokens == [int((4000 - START_SECONDS * 10.0) / 2)], "it will be as fast as its host was before"

    fast.shares.append(done(server="main.1"))
    now[0] += rebalance.FRESH_SECONDS
    balancer.note(slow.host, share_named("main.1", rate=0.0))
    slow.gives = ["d"]
    assert taken(balancer.wait_for_work(fast.host)) == [("fast", "main.2")]
    assert slow.tokens[-1] == 4000, "its server must be dead"


# --------------------------------------------------------------------------- before the own work ends
def nearly(left: int, rate: float = 10.0, server: str = "main") -> RunProgress:
    return RunProgress("r", server, "running", tokens=1000 + left, tokens_done=1000, tokens_per_second=rate)


def test_who_asks_before_its_end_is_given_less_by_what_it_has_to_do(balancer: Balancer) -> None:
    slow, fast = Asked("slow", gives=SLOW), Answering("fast", [nearly(100), nearly(50, server="main.9")])
    balancer.note(slow.host, busy(rate=1.0))
    assert taken(balancer.ask(fast.host)) == [("fast", "main.1")]
    assert slow.tokens == [int((4000 - 15.0 * 1.0) * 10 / 11)], "its shares are done one after the other, in 15 s"


@pytest.mark.parametrize("own", [nearly(500), nearly(100, rate=0.0)])
def test_who_has_become_slow_takes_nothing(balancer: Balancer, own: RunProgress) -> None:
    slow, fast = Asked("slow", gives=SLOW), Answering("fast", [own])
    balancer.note(fast.host, nearly(50))
    balancer.note(slow.host, busy())
    assert balancer.ask(fast.host) is None
    assert slow.tokens == []


def test_what_waits_for_its_turn_is_given_on_when_its_host_has_become_slow(
    balancer: Balancer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No sample of it was begun, so that all of it is the next one's that asks."""
    now = [1000.0]
    monkeypatch.setattr(rebalance.time, "monotonic", lambda: now[0])
    slow, fast, third = Answering("slow", gives=SLOW), Answering("fast", [nearly(50)]), Answering("third", [done()])
    balancer.note(slow.host, busy())
    assert taken(balancer.ask(fast.host)) == [("fast", "main.1")]
    balancer.forget("slow")
    now[0] += rebalance.FRESH_SECONDS
    balancer.note(fast.host, nearly(50, rate=0.1))
    balancer.note(fast.host, share_named("main.1", rate=0.0))
    fast.gives = SLOW
    assert taken(balancer.wait_for_work(third.host)) == [("third", "main.1")]
    assert [balancer.ledger.homes()[name] for name in SLOW] == [("third", "main.1")] * 2


def test_nobody_leaves_while_what_was_taken_over_is_on_its_way(balancer: Balancer) -> None:
    slow, fast = Answering("slow", gives=SLOW), Answering("fast", [done()])
    balancer.note(slow.host, busy())
    assert balancer.wait_for_work(fast.host) is not None
    balancer.forget("slow")
    with pytest.raises(Waited):
        balancer.wait_for_work(Answering("third", [done()]).host)


def test_a_host_takes_over_before_its_end_and_is_then_followed_to_the_end(
    balancer: Balancer, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow, fast = Answering("slow", gives=SLOW), Answering("fast", [nearly(50)])
    balancer.note(slow.host, busy())
    work = members(balancer, monkeypatch, [fast]).work
    steps: list[str] = []

    def follow(host: Answering, run: str, note: Callable[..., None], *, ahead: float = 0.0) -> list[RunProgress]:
        steps.append("until shortly before the end" if ahead == START_SECONDS else "to the end")
        if not ahead:
            host.shares = [done(server=share.server) for share in host.shares]
        for share in host.shares:
            note("fast", share)
        return host.shares

    def submit(host: Answering, plan: RunPlan, *_: object) -> list[RunProgress]:
        steps.extend(f"takes {share}" for _, share in plan.shares)
        host.shares = [*host.shares, *(nearly(50, server=share) for _, share in plan.shares)]
        return host.shares

    monkeypatch.setattr(_members, "follow", follow)
    monkeypatch.setattr(_members, "submit", submit)
    monkeypatch.setattr(balancer, "wait_for_work", lambda _: None)
    assert [share.state for share in work(fast.host)] == ["done", "done"]
    ahead = "until shortly before the end"
    assert steps == [ahead, "takes main.1", ahead, "to the end"]


def test_who_refuses_what_it_asked_for_still_ends_its_own(balancer: Balancer, monkeypatch: pytest.MonkeyPatch) -> None:
    slow, fast = Answering("slow", gives=SLOW), Answering("fast", [nearly(50)])
    balancer.note(slow.host, busy())
    work = members(balancer, monkeypatch, [fast]).work
    followed: list[float] = []

    def follow(host: Answering, run: str, note: object, *, ahead: float) -> list[RunProgress]:
        followed.append(ahead)
        return host.shares

    def refuse(host: Answering, plan: RunPlan, *_: object) -> list[RunProgress]:
        if plan.shares:
            raise HostError("only 3 MiB are free", host.name)
        return host.shares

    monkeypatch.setattr(_members, "follow", follow)
    monkeypatch.setattr(_members, "submit", refuse)
    with pytest.raises(HostError, match="only 3 MiB"):
        work(fast.host)
    assert followed == [START_SECONDS, 0.0]
    assert balancer.left_over() == 2


def test_once_another_controller_drives_the_run_nobody_waits_for_work_or_takes_any(balancer: Balancer) -> None:
    slow, fast = Answering("slow", gives=SLOW), Answering("fast", [done()])
    balancer.note(slow.host, busy())
    balancer._away["gone"] = 0.0
    balancer.stopped = lambda: True
    assert balancer.ask(fast.host) is None
    assert balancer.wait_for_work(fast.host) is None
    assert slow.gives == SLOW


# --------------------------------------------------------------------------- what no host has
@pytest.mark.parametrize(("lines", "left_over"), [("abcd", 0), ("abc", 1), ("abcabc", 1)])
def test_a_run_is_not_done_when_its_hosts_are_and_a_sample_is_with_none_of_them(
    balancer: Balancer, monkeypatch: pytest.MonkeyPatch, lines: str, left_over: int
) -> None:
    """Whatever was forgotten on the way: what the hosts have lines of must be what was planned, and copies hide none
    that is missing."""
    share = RunProgress("r", "main", "done", 4, len(lines))
    for sample in lines:
        balancer.ledger.reject("slow", RejectedLine(sample, "r", "main", "too_long", "", 0, 0.0))

    def fan_out(*_: object, on_outcome: Callable[[str, Outcome[list[RunProgress]]], None], **__: object) -> None:
        on_outcome("slow", Outcome([share], None, 1.0))

    monkeypatch.setattr(_driving, "fan_out", fan_out)
    run = cast(Any, SimpleNamespace(name="r", folder=Path("nowhere"), settings=ExtractSettings(), seated=False))
    run.controller = None
    run.watching = _driving.Watching(Policy(), 600.0, (), JoinRequests(Path(), pytest.fail))
    plan = RunPlan("r", {}, 4, [], resumed=False)
    options = FleetOptions(Path("inventory.yaml"), (), (), False, False, False, 1)
    end = _driving._watch(options, [cast(Any, Answering("slow").config)], plan, run, balancer)
    assert (end.code, end.left_over) == (ExitCode.OK, left_over)
    assert end.exit_code == (ExitCode.FAILED if left_over else ExitCode.OK)


# --------------------------------------------------------------------------- when nobody is at work any more
@pytest.fixture
def standing(balancer: Balancer, monkeypatch: pytest.MonkeyPatch) -> Members:
    """A run whose servers with a dead launch are not brought back."""
    monkeypatch.setattr(_members, "STANDSTILL_SECONDS", 0.0)
    supervisor = SimpleNamespace(note=lambda *_: None, is_left_dead=lambda _, progress: bool(progress.dead_launch))
    # Its second share waits for its turn on the same server, and knows nothing of the death.
    balancer.note(Answering("slow").host, replace(busy(rate=0.0), server="main.1"))
    plan, undisputed = RunPlan("r", {}, 4, [], resumed=True), Places(cast(Any, None), [], pytest.fail)
    parts = (undisputed, balancer, None, SimpleNamespace(update=lambda *_: None), supervisor)
    return Members(plan, ExtractSettings(), *cast(Any, parts))


def test_a_run_whose_servers_are_all_dead_ends_with_what_to_do(standing: Members) -> None:
    dead = busy(rate=0.0)
    dead.dead_launch = "L1"
    with pytest.raises(HostError, match="nobody else is at work") as caught:
        standing._note(Answering("slow").host, dead)
    assert "fleetdump restart --host slow --server main" in caught.value.next_step
    assert caught.value.exit_code == ExitCode.FAILED
    standing._note(Answering("slow").host, busy())
    assert standing._still_since is None, "the next death has its own time"


@pytest.mark.parametrize("other", ["works", "away", "pending"])
def test_while_another_host_may_do_the_work_it_is_waited_for(standing: Members, other: str) -> None:
    dead = busy(rate=0.0)
    dead.dead_launch = "L1"
    if other == "works":
        standing.balancer.note(Answering("fast").host, busy())
    elif other == "away":
        standing.balancer._away["fast"] = 0.0
    else:
        standing.balancer.pending.add("fast")
    standing._note(Answering("slow").host, dead)
    standing.balancer.forget("fast")
    standing.balancer._away.clear()
    with pytest.raises(HostError):
        standing._note(Answering("slow").host, dead)
