"""``extract --add-host``: the request reaches the process that drives the run, or its giver hears that it does not."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from click.testing import CliRunner, Result

from fleetdump.cli import _driving
from fleetdump.cli import extract as command
from fleetdump.cli._fleet import FleetOptions
from fleetdump.errors import DrivenError, ExitCode, UsageError
from fleetdump.tasks.attendance import JoinRequests, ask_to_join


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run that has begun; returns its folder."""
    (tmp_path / "i.yaml").write_text(json.dumps({"hosts": {name: {"address": name} for name in "abc"}}))
    (tmp_path / "data.jsonl").write_text('{"id": "s1", "text": "Hello."}\n')
    for name, stands_for in {"targets_of": lambda _: [], "is_begun": lambda _: True}.items():
        monkeypatch.setattr(command, name, stands_for)
    made = tmp_path / "runs" / "r"
    made.mkdir(parents=True)
    return made


def extract(folder: Path, *more: str) -> Result:
    root = folder.parents[1]
    where = ["-i", str(root / "i.yaml"), "--runs-dir", str(folder.parent), "--data", str(root / "data.jsonl")]
    return CliRunner().invoke(command.extract, [*where, "--run", "r", *more])


def test_what_was_asked_while_the_run_was_being_taken_over_is_seen(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[str] = []

    @contextmanager
    def sole(*_: object) -> Iterator[None]:
        ask_to_join(folder, ["c"])
        yield

    def drive(*args: Any) -> ExitCode:
        seen.extend(args[-1].watching.requests.names())
        return ExitCode.OK

    monkeypatch.setattr(command, "sole", sole)
    monkeypatch.setattr(command, "drive", drive)
    ask_to_join(folder, ["b"])
    assert extract(folder).exit_code == 0
    assert seen == ["c"]


@pytest.mark.parametrize("joining", [True, False])
def test_where_a_controller_sits_on_a_host_nobody_can_be_asked(
    folder: Path, monkeypatch: pytest.MonkeyPatch, joining: bool
) -> None:
    def try_seat(*_: object, **__: object) -> None:
        raise DrivenError("run r is being driven already", "a", "by a controller on a (pid 7)")

    monkeypatch.setattr(command, "try_seat", try_seat)
    monkeypatch.setattr(command, "stand_back", lambda *_: ExitCode.OK)
    result = extract(folder, "--controller", "a", *(["--add-host", "c"] if joining else []))
    assert isinstance(result.exception, DrivenError) == joining
    assert result.exit_code == (1 if joining else 0)


def test_ctrl_c_where_standard_input_is_closed_asks_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def leave(words: str) -> None:
        raise SystemExit(words)

    monkeypatch.setattr(command, "say_and_leave", leave)
    monkeypatch.setattr("sys.stdin", None)
    with pytest.raises(SystemExit, match="the hosts go on with what they have of run r"):
        command._after_interrupt(cast(Any, None), [], "r")


def run_of(folder: Path) -> Any:
    requests = JoinRequests(folder, pytest.fail)
    return cast(Any, SimpleNamespace(name="r", watching=SimpleNamespace(requests=requests)))


def test_a_name_that_nobody_knows_keeps_no_other_from_joining(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[UsageError] = []
    monkeypatch.setattr(_driving, "print_error", said.append)
    options = FleetOptions(folder.parents[1] / "i.yaml", (), (), False, False, False, 1)
    look = _driving._joining_later(options, run_of(folder))
    ask_to_join(folder, ["nobody", "b", "a,b"])
    assert [host.name for host in look()] == ["b", "a"]
    assert len(said) == 1
    assert look() == []


def test_who_asks_after_the_last_look_is_told(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    monkeypatch.setattr(_driving.err, "print", lambda text, **_: said.append(text))
    run = run_of(folder)
    _driving._tell_too_late(run)
    assert said == []
    ask_to_join(folder, ["c"])
    _driving._tell_too_late(run)
    assert "c did not join" in said[0]
