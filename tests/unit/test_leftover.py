"""What a run that is not done says of the samples that are left: who has them, and what to do."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from fleetdump.agent.formats import RejectedLine
from fleetdump.agent.runmessages import CANCEL, RunProgress
from fleetdump.cli import _driving
from fleetdump.cli._fleet import FleetOptions
from fleetdump.cli._lookaround import Around
from fleetdump.errors import ExitCode
from fleetdump.fleet import Outcome
from fleetdump.inventory import HostConfig
from fleetdump.ledger import Ledger, Planned
from fleetdump.tasks.assignment import RunPlan
from fleetdump.tasks.rebalance import Balancer, left_with_others
from fleetdump.tasks.supervise import Policy

HERE = cast(Any, SimpleNamespace(name="here", servers=(), address="10.0.0.1", port=None))
SHARES = {("away", "main"): cast(Any, None), ("here", "main"): cast(Any, None)}


@pytest.fixture
def ledger(tmp_path: Path) -> Iterator[Ledger]:
    """Samples a and b were given to host ``away``, c and d to ``here``."""
    with Ledger(tmp_path / "r" / "ledger.sqlite") as made:
        made.plan([Planned(name, "d", "away" if name < "c" else "here", "main") for name in "abcd"], [])
        yield made


def settle(ledger: Ledger, names: str) -> None:
    for name in names:
        ledger.reject("here", RejectedLine(name, "r", "main", "empty", "", 0, 0.0))


@pytest.mark.parametrize(("settled", "left"), [("", {"away": 2}), ("cd", {"away": 2}), ("a", {"away": 1}), ("ab", {})])
def test_what_is_with_a_host_that_was_not_asked_is_known(ledger: Ledger, settled: str, left: dict[str, int]) -> None:
    settle(ledger, settled)
    assert left_with_others(ledger, ["here"]) == left
    assert left_with_others(ledger, ["here", "away"]) == {}


@pytest.mark.parametrize("joins", [False, True])
def test_a_watch_ends_with_what_it_was_not_given(
    ledger: Ledger, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, joins: bool
) -> None:
    def fan_out(*_: object, on_outcome: Any, later: Any, **__: object) -> None:
        monkeypatch.setattr(later.__self__, "joining", lambda: [HostConfig("away", "127.0.0.1")] if joins else [])
        later()
        on_outcome("here", Outcome([], None, 1.0))

    settle(ledger, "cd")
    monkeypatch.setattr(_driving, "fan_out", fan_out)
    watching = SimpleNamespace(policy=Policy(), patience=600.0, joining=(), requests=SimpleNamespace(names=list))
    run = SimpleNamespace(name="r", folder=tmp_path / "r", watching=watching, controller=None, settings=None)
    options = FleetOptions(Path("inventory.yaml"), (), (), False, False, False, 1)
    balancer = Balancer("r", ledger, cast(Any, None))
    end = _driving._watch(options, [HERE], RunPlan("r", SHARES, 4, [], resumed=True), cast(Any, run), balancer)
    assert (end.left_over, end.with_others) == (2, {} if joins else {"away": 2})


class Drive:
    """``extract --exclude away``, of which nothing is real but the ledger and the words."""

    def __init__(self, tmp: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.waited_for: set[str] = set()
        self.end = _driving.End(ExitCode.OK, [])
        watching = SimpleNamespace(patience=600.0, requests=SimpleNamespace(names=list))
        self.run = SimpleNamespace(name="r", runs_dir=tmp, folder=tmp / "r", watching=watching, controller=None)
        self.run.detach = self.run.seated = False
        monkeypatch.setattr(_driving, "open_run", lambda *_: RunPlan("r", SHARES, 4, [], resumed=True))
        monkeypatch.setattr(_driving, "targets_of", lambda _: [])
        monkeypatch.setattr(_driving, "look_around", lambda *_: Around({}, knows_all=True))
        monkeypatch.setattr(_driving, "_watch", self.watch)

    def watch(self, *args: Any) -> _driving.End:
        balancer = cast(Balancer, args[-1])
        self.waited_for = set(balancer.pending)
        if self.end.code == ExitCode.OK:
            self.end.left_over = balancer.ledger.totals().lost
        self.end.with_others = left_with_others(balancer.ledger, ["here"])
        return self.end

    def __call__(self) -> ExitCode:
        return _driving.drive(cast(Any, None), [HERE], cast(Any, None), cast(Any, self.run))


@pytest.fixture
def drive(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Drive:
    return Drive(tmp_path, monkeypatch)


def test_what_an_excluded_host_has_is_not_called_nobodys(
    ledger: Ledger, drive: Drive, capsys: pytest.CaptureFixture[str]
) -> None:
    settle(ledger, "cd")
    assert drive() == ExitCode.FAILED
    told = capsys.readouterr().err
    assert "2 samples given to away are not known to be done" in told
    assert "without --exclude" in told
    assert "--patience 0" in told
    assert "nobody" not in told
    assert drive.waited_for == {"here"}, "nobody asks the other, so nobody waits for what it says"


def test_what_an_excluded_host_is_known_to_have_done_is_not_left(
    ledger: Ledger, drive: Drive, capsys: pytest.CaptureFixture[str]
) -> None:
    settle(ledger, "abcd")
    assert drive() == ExitCode.OK
    assert "not done" not in capsys.readouterr().err


def test_a_run_that_was_cancelled_from_elsewhere_is_said_to_be(
    ledger: Ledger, drive: Drive, capsys: pytest.CaptureFixture[str]
) -> None:
    settle(ledger, "abcd")
    drive.end = _driving.End(ExitCode.OK, [RunProgress("r", "main", "done", 2, 0, 2, order=CANCEL, whole_run=True)])
    assert drive() == ExitCode.OK
    told = capsys.readouterr().err
    assert "run r was cancelled; next: fleetdump collect --data" in told
    assert "interrupted" not in told


@pytest.mark.parametrize("code", [ExitCode.OK, ExitCode.UNREACHABLE])
def test_what_nobody_has_is_told_beside_it(
    ledger: Ledger, drive: Drive, capsys: pytest.CaptureFixture[str], code: ExitCode
) -> None:
    settle(ledger, "c")
    drive.end = _driving.End(code, [], 1)
    drive()
    told = capsys.readouterr().err
    assert "2 samples given to away" in told
    assert "1 sample" in told.split("given to away")[1]
    assert "nobody" in told
