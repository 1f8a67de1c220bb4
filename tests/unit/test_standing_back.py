"""An ``extract`` whose run another controller drives: it judges and hands out nothing, and watches to the end."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from fleetdump.agent.runmessages import HeldResult, RunProgress
from fleetdump.agent.steermessages import DataMark
from fleetdump.cli import _driving, _lookaround, _standingback
from fleetdump.cli._lookaround import Around, require_ours
from fleetdump.cli._standingback import Seen
from fleetdump.dataset.intake import DataSet
from fleetdump.dataset.rows import Row
from fleetdump.errors import DrivenError, ExitCode, UnreachableError, UsageError
from fleetdump.inventory import HostConfig
from fleetdump.ledger import Ledger
from fleetdump.tasks.extract import ExtractSettings
from fleetdump.tasks.runlock import CONTROLLER, sole
from fleetdump.tasks.steering import Controller
from fleetdump.tasks.survey import Sight, Surveyed

DRIVEN = DrivenError("run r is being driven already", "h1", "by anna@desk", "fleetdump attach --run r watches it")
SECONDS = 60.0
DATA = DataMark("data.jsonl", 2, "ab" * 32)
OPTIONS = cast(Any, SimpleNamespace(jobs=1, as_json=False, connect_options=lambda: None))


@pytest.fixture
def run(tmp_path: Path) -> Any:
    watching = SimpleNamespace(patience=600.0, requests=SimpleNamespace(names=list), policy=None, joining=())
    made = SimpleNamespace(name="r", runs_dir=tmp_path, folder=tmp_path / "r", watching=watching, detach=False)
    made.seated, made.settings, made.controller = False, ExtractSettings(), Controller("r", tmp_path / "r", DATA)
    return made


# --------------------------------------------------------------------------- to its end
NOTHING, WAITS = Seen(False, False, False), Seen(False, False, True)
WORKS, BETWEEN = Seen(True, True, True), Seen(True, False, True)
LEFT_ALONE, DONE = Seen(True, True, False), Seen(True, False, False)


@pytest.mark.parametrize(
    ("looks", "code", "watched"),
    [
        ([WAITS, WAITS, WORKS, DONE], ExitCode.OK, 1),
        ([WORKS, BETWEEN, WORKS, BETWEEN, DONE], ExitCode.OK, 2),
        ([WAITS, NOTHING], ExitCode.FAILED, 0),
        ([NOTHING], ExitCode.FAILED, 0),
        ([LEFT_ALONE], ExitCode.OK, 1),
        ([BETWEEN, DONE], ExitCode.OK, 1),
    ],
)
def test_it_watches_for_as_long_as_the_other_one_is_at_work(
    run: Any,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    looks: list[Seen],
    code: ExitCode,
    watched: int,
) -> None:
    calls: list[str] = []
    coming = iter(looks)
    monkeypatch.setattr(_standingback, "LOOK_SECONDS", 0.0)
    monkeypatch.setattr(_standingback, "_look", lambda *_: next(coming))
    monkeypatch.setattr(_standingback, "watch", lambda *args: calls.append(args[2]) or ExitCode.OK)
    assert _standingback.stand_back(OPTIONS, [], run, DRIVEN) == code
    assert calls == ["r"] * watched
    assert next(coming, None) is None
    told = capsys.readouterr().err
    assert "by anna@desk: only watching" in told
    assert ("waiting for the first" in told) == (WAITS in looks)
    assert ("nothing was begun; next: the same command again" in " ".join(told.split())) == (code == ExitCode.FAILED)


def test_what_needs_somebody_ends_the_watching(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_standingback, "_look", lambda *_: WORKS)
    monkeypatch.setattr(_standingback, "watch", lambda *_: ExitCode.FAILED)
    assert _standingback.stand_back(OPTIONS, [], run, DRIVEN) == ExitCode.FAILED


def test_what_it_sees_is_of_all_hosts_that_answer_and_of_this_folder(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    answers: dict[str, Any] = {"h1": (Sight([], None), None), "h2": (None, UnreachableError("away"))}
    monkeypatch.setattr(_standingback, "ask", lambda *_: answers)
    assert _standingback._look(OPTIONS, [], run) == NOTHING
    assert not run.folder.exists()
    with sole(run.folder, CONTROLLER):
        assert _standingback._look(OPTIONS, [], run) == WAITS
    answers["h2"] = Sight([RunProgress("r", "main", "tokenising")], DRIVEN), None
    assert _standingback._look(OPTIONS, [], run) == WORKS
    answers["h3"] = None, UsageError("other data")
    with pytest.raises(UsageError, match="other data"):
        _standingback._look(OPTIONS, [], run)


# --------------------------------------------------------------------------- found in the middle
def data_set(*texts: str) -> DataSet:
    data = DataSet("data.jsonl")
    for line, text in enumerate(texts, 1):
        data.add(line, Row(f"s{line}", text=text))
    return data


@pytest.mark.parametrize("handed_out", [False, True])
def test_a_start_that_came_too_late_leaves_no_plan(run: Any, monkeypatch: pytest.MonkeyPatch, handed_out: bool) -> None:
    def refused(*args: Any) -> None:
        if handed_out:
            args[-1].ledger.submitted("h1", "main")
        raise DRIVEN

    monkeypatch.setattr(_driving, "targets_of", lambda _: [("h1", "main")])
    monkeypatch.setattr(_driving, "look_around", lambda *_: Around({}, knows_all=True))
    monkeypatch.setattr(_driving, "_watch", refused)
    with pytest.raises(DrivenError):
        _driving.drive(OPTIONS, [HostConfig("h1", "10.0.0.1")], data_set("one", "two"), run)
    with Ledger(run.folder / "ledger.sqlite") as ledger:
        assert ledger.is_planned == handed_out
        assert ledger.samples == (2 if handed_out else 0)


def test_the_hosts_are_asked_before_anything_is_planned(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """They have the run from another folder, with a server that is not chosen now."""
    has = Around({"h1": Surveyed([RunProgress("r", "main", "running", share_id="0" * 16 + "-1")])}, knows_all=True)
    monkeypatch.setattr(_driving, "targets_of", lambda _: [("h1", "main"), ("h2", "main")])
    monkeypatch.setattr(_driving, "look_around", lambda *_: has)
    monkeypatch.setattr(_driving, "_watch", lambda *_: pytest.fail("handed out"))
    with pytest.raises(UsageError, match="not what run r was begun with"):
        _driving.drive(OPTIONS, [HostConfig("h1", "10.0.0.1")], data_set("one", "two"), run)
    with Ledger(run.folder / "ledger.sqlite") as ledger:
        assert (ledger.is_planned, ledger.samples, ledger.shares()) == (False, 0, [])


@pytest.mark.parametrize("moved", [False, True])
def test_after_a_lost_place_what_others_moved_is_not_judged_by_our_ledger(
    run: Any, monkeypatch: pytest.MonkeyPatch, moved: bool
) -> None:
    has = Surveyed([], {"main.1": HeldResult(["s1"], "sha")} if moved else {})
    monkeypatch.setattr(_lookaround, "look_around", lambda *_: Around({"h1": has}, knows_all=True))
    if not moved:
        require_ours(OPTIONS, [], cast(Any, None), run.controller)
        return
    with pytest.raises(DrivenError, match="run r was driven by another controller meanwhile"):
        require_ours(OPTIONS, [], cast(Any, None), run.controller)
