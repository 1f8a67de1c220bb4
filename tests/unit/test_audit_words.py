"""``fleetdump audit`` says of each change which it was: a run's orders and the moves of its samples by name."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from extraction import StandIn, kill_driver

from fleetdump.agent import main
from fleetdump.agent.audit import audit
from fleetdump.agent.context import AgentContext
from fleetdump.agent.hostmessages import AuditArgs, AuditEntry, AuditResult
from fleetdump.agent.protocol import Request, to_json
from fleetdump.agent.runmessages import ORDERS, OrderArgs, SubmitArgs, WithdrawArgs
from fleetdump.agent.share import Share
from fleetdump.views.hosts import change_in_words, show_audit


@pytest.fixture
def host(tmp_path: Path) -> Iterator[StandIn]:
    standin = StandIn(tmp_path)
    yield standin
    standin.kill()
    for path in (tmp_path / "state" / "runs").glob("*/*/driver.json"):
        kill_driver(Share(path.parent))


def told(host: StandIn) -> list[str]:
    request = Request("audit", {}, deadline=60.0)
    ctx = AgentContext(request, host.state, stdin=io.BytesIO(), stdout=io.BytesIO())
    return [change_in_words(entry) for entry in audit(AuditArgs(), ctx).entries]


def call(host: StandIn, verb: str, args: object) -> None:
    request = Request(verb, to_json(args), operator="me@laptop", deadline=60.0)
    main.serve(AgentContext(request, host.state, stdin=io.BytesIO(), stdout=io.BytesIO()))


def test_every_order_and_every_move_of_a_host_is_told_by_its_name(host: StandIn) -> None:
    share = host.share({"a": 5, "b": 5})
    spec = share.spec()
    assert spec is not None
    for tokens in (0, 5, 1 << 60, 1 << 60):
        call(host, "withdraw", WithdrawArgs("r1", "main", tokens))
    call(host, "submit", SubmitArgs("r1", "main", spec.share_sha256, host.capture))
    call(host, "submit", SubmitArgs("r1", "main.2", "0" * 64, host.capture))
    for order in ORDERS:
        call(host, "order", OrderArgs("r1", order, whole_run=order != "drain"))
    assert told(host) == [
        "move samples away from main of run r1",
        "move samples away from main of run r1",
        "submit main of run r1",
        "hand over samples to main.2 of run r1",
        "pause run r1",
        "resume run r1",
        "cancel run r1",
        "drain run r1, some hosts alone",
    ], "to ask, and to give nothing, is no change"


def test_what_is_moved_is_moved_where_no_line_can_be_written(host: StandIn, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    share = host.share({"a": 5})
    monkeypatch.setattr("fleetdump.agent.audit._append", full)
    call(host, "withdraw", WithdrawArgs("r1", "main", 5))
    assert share.read_withdrawn() == ["a"]


@pytest.mark.parametrize(
    ("verb", "args", "words"),
    [
        ("launch", {"server": {"name": "main"}}, "launch main"),
        ("restart", {"server": "main", "run": "r1"}, "restart main"),
        ("clean", {}, "clean"),
        ("order", {}, "order run "),
        ("order", {"run": ["x"], "order": "[red]"}, "[red] run ['x']"),
    ],
)
def test_whatever_a_line_says_it_is_shown(
    verb: str, args: dict[str, Any], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    entry = AuditEntry(1796000000.0, "me@laptop", verb, args, True, 1.0)
    assert change_in_words(entry) == words
    show: Callable[[str, AuditResult], None] = show_audit
    show("gpu01", AuditResult([entry]))
    assert f"me@laptop  {words}" in capsys.readouterr().out


@pytest.mark.parametrize(("code", "words"), [("conflict", "failed (conflict) in 2s"), ("", "failed in 2s")])
def test_a_change_that_failed_is_shown_with_its_code(code: str, words: str, capsys: pytest.CaptureFixture[str]) -> None:
    entry = AuditEntry(1796000000.0, "me@laptop", "revert", {}, False, 2.0, code)
    show_audit("gpu01", AuditResult([entry]))
    assert f"revert  {words}" in capsys.readouterr().out
