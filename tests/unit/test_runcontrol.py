"""Orders to the drivers of a run: pause, resume, cancel; and who may drive a run from this machine."""

from __future__ import annotations

import errno
import io
import json
import os
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
from extraction import StandIn, check_bytes, kill_driver, manifest_of, rejected_of, wait_for

from fleetdump.agent import audit, lock, main
from fleetdump.agent.context import AgentContext
from fleetdump.agent.drive import follow, order, start_driver, submit
from fleetdump.agent.protocol import AgentFailure, Request
from fleetdump.agent.runmessages import FollowArgs, OrderArgs, RunProgress, SubmitArgs
from fleetdump.agent.share import Share
from fleetdump.agent.withdraw import give_away
from fleetdump.cli import runcontrol
from fleetdump.cli._fleet import FleetOptions
from fleetdump.cli.runcontrol import _watched
from fleetdump.errors import ExitCode, LockedError, UnreachableError
from fleetdump.fleet import Outcome
from fleetdump.inventory import HostConfig
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


def give(host: StandIn, what: str, whole_run: bool = True) -> RunProgress:
    (progress,) = order(OrderArgs("r1", what, whole_run), context(host)).shares
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


def test_a_share_that_comes_later_rests_too_though_the_others_were_done(host: StandIn) -> None:
    host.start()
    share = host.share({"a": 5})
    start_driver(host.state, share)
    wait_for(lambda: share.progress().state == "done", SECONDS)
    give(host, "pause")
    later = Share(host.state.share("r1", "main.1"))
    # A sample of its own: one that is captured already needs no sending, and the share would be done.
    for name in ("rows.jsonl", "share.json", "work.jsonl"):
        (later.root / name).write_text((share.root / name).read_text().replace('"a"', '"b"'))
    sent = len(host.requests())
    start_driver(host.state, later)
    wait_until_paused(later)
    assert (later.progress().order, later.progress().whole_run) == ("pause", True)
    assert len(host.requests()) == sent


@pytest.mark.parametrize(
    "text", ["", "{", '{"v": 1}', '{"v": 9, "order": "pause"}', '{"v":1,"order":"dance","operator":"x","t":1.0}', None]
)
def test_an_order_that_cannot_be_read_holds_the_run_and_is_named(host: StandIn, share: Share, text: str | None) -> None:
    share.order_file.write_text(text) if text is not None else share.order_file.mkdir()
    wait_until_paused(share)
    progress = share.progress()
    assert (progress.order, progress.whole_run) == ("pause", True)
    assert str(share.order_file) in progress.detail
    assert ("fleetdump pause, resume or cancel" in progress.detail) != ("use that version" in progress.detail)
    sent = len(host.requests())
    assert sent < len(SAMPLES)
    if text is None:
        share.order_file.rmdir()
    give(host, "cancel")
    wait_for(lambda: share.progress().state == "done", SECONDS)
    assert set(rejected_of(share).values()) == {"cancelled"}
    assert len(host.requests()) == sent


def test_what_is_new_to_a_cancelled_run_is_refused(host: StandIn, share: Share) -> None:
    give(host, "cancel", whole_run=False)
    args = SubmitArgs("r1", "main.1", "0" * 64, host.capture)
    with pytest.raises(AgentFailure, match=r"cancelled on this host by me@laptop"):
        submit(args, context(host))
    assert give(host, "resume").order == "cancel"
    assert give(host, "cancel").whole_run, "of some hosts first, then of all"
    assert give(host, "cancel", whole_run=False).whole_run


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT, errno.EROFS])
def test_a_run_is_paused_on_a_disk_that_takes_no_more(
    host: StandIn, share: Share, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(lock, "_acquire", fail)
    monkeypatch.setattr(audit, "_append", fail)
    monkeypatch.setattr("fleetdump.agent.share.write_json", fail)
    answers = {}
    for what in ("pause", "cancel"):
        ctx = context(host)
        ctx.request.args = {"run": "r1", "order": what}
        main.serve(ctx)
        answers[what] = json.loads(ctx.stdout.getvalue())  # type: ignore[attr-defined]
    assert answers["pause"]["error"] is None
    wait_until_paused(share)
    assert answers["cancel"]["error"] is not None
    assert str(share.order_file) in json.dumps(answers["cancel"]), "the file that could not be written, not the lock"


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


def test_watching_ends_when_nobody_works_and_says_what_does(host: StandIn, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fleetdump.agent.drive.GONE_SECONDS", 0.3)
    host.share(SAMPLES)  # its driver never came as far as to say anything
    (progress,) = follow(FollowArgs("r1", interval=0.1, revive=False), context(host)).shares
    assert (progress.state, progress.done, progress.samples) == ("stopped", 0, len(SAMPLES))
    assert progress.detail.startswith("no driver lives: fleetdump resume --run r1, or extract")
    assert _watched([progress]) == ExitCode.FAILED


def shown(states: Sequence[RunProgress], what: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """What a person reads who gives the order to hosts that answer with these shares."""
    printed: list[str] = []

    def fan_out(hosts: object, function: object, on_outcome: Callable[..., None], **_: object) -> dict[str, object]:
        outcome = Outcome(list(states), None, 0.1)
        on_outcome("h1", outcome)
        return {"h1": outcome}

    for console in (runcontrol.out, runcontrol.err):
        monkeypatch.setattr(console, "print", lambda text="", **_: printed.append(str(text)))
    monkeypatch.setattr(runcontrol, "fan_out", fan_out)
    options = FleetOptions(Path("i.yaml"), (), (), False, False, False, 1)
    assert runcontrol.give_order(options, [], "r1", what) == ExitCode.OK
    return "\n".join(printed)


@pytest.mark.parametrize(
    ("states", "what", "said", "not_said"),
    [
        (["running"], "pause", "h1/main: pause ordered, 0/9 samples", "running"),
        (["running"], "pause", "next: fleetdump resume --run r1", "done;"),
        (["running"], "cancel", "h1/main: cancel ordered", "running"),
        (["stopped"], "pause", "pause ordered, 0/9 samples; no driver lives", "stopped,"),
        (["done", "done"], "pause", "all of run r1 is done", "resume"),
        (["done"], "pause", "h1/main: already done", "ordered"),
        (["done", "running"], "pause", "next: fleetdump resume", "all of run"),
    ],
)
def test_an_order_is_told_as_what_it_is(
    states: list[str], what: str, said: str, not_said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    shares = [
        RunProgress("r1", "main", state, 9, detail="no driver lives" if state == "stopped" else "") for state in states
    ]
    text = shown(shares, what, monkeypatch)
    assert said in text
    assert not_said not in text


@pytest.mark.parametrize("what", ["drain", "resume", "pause"])
def test_what_was_given_away_is_not_called_done(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor by the second of two orders, when the share has ended with what it kept."""
    text = shown([RunProgress("r1", "main", "done", 4, 4, given_away=5)], what, monkeypatch)
    assert "gave 5 samples away" in text
    assert "same extract command" in text
    assert "all of run" not in text


def test_what_a_share_gave_away_is_told(host: StandIn, share: Share) -> None:
    kill_driver(share)
    give_away(share, ["c01", "c02"])
    assert share.progress().given_away == 2


@pytest.mark.parametrize(
    ("others", "remain"),
    [
        ({}, False),
        ({"h2": []}, False),
        ({"h2": ["drain"]}, False),
        ({"h2": ["drain"], "h3": [""]}, True),
        ({"h2": None}, True),
    ],
)
def test_somebody_has_to_stay_in_the_run(
    others: dict[str, list[str] | None], remain: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    inventory = {"hosts": {name: {"address": name} for name in ("h1", *others)}}
    (tmp_path / "i.yaml").write_text(json.dumps(inventory))

    def ask(_: object, configs: Sequence[HostConfig], *__: object) -> dict[str, object]:
        assert [config.name for config in configs] == list(others)
        away = UnreachableError("the connection was lost")
        answers = {
            name: [RunProgress("r1", "main", "done", order=one) for one in told or []] for name, told in others.items()
        }
        return {name: (answers[name], away if others[name] is None else None) for name in others}

    monkeypatch.setattr(runcontrol, "ask", ask)
    options = FleetOptions(tmp_path / "i.yaml", ("h1",), (), False, False, False, 1)
    assert runcontrol._others_remain(options, options.select(read_only=False), "r1") == remain


def test_one_process_drives_a_run(tmp_path: Path) -> None:
    run = tmp_path / "r1"
    with sole(run, CONTROLLER), pytest.raises(LockedError, match="is being driven already"), sole(run, CONTROLLER):
        pass
    with sole(run, CONTROLLER):
        pass
