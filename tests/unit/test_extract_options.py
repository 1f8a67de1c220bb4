"""``extract`` before it begins: idle options, hosts that cannot compute, settings and data that a run keeps."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from fleetdump.agent.steermessages import DataMark
from fleetdump.cli import _standingback
from fleetdump.cli import extract as command
from fleetdump.cli._standingback import Seen
from fleetdump.dataset.intake import DataSet
from fleetdump.dataset.rows import Row
from fleetdump.errors import DrivenError, ExitCode, FleetdumpError, HostError, LockedError, UsageError
from fleetdump.ledger import Ledger
from fleetdump.tasks.assignment import open_run, require_begun_with
from fleetdump.tasks.extract import ExtractSettings, runs_file, settle
from tests.unit.engineinstall import install

TARGETS = [("h1", "main")]


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A folder with an inventory of this machine, which has no engine, and data."""
    server = {"name": "main", "model_path": str(tmp_path / "no-model"), "port": 1, "args": []}
    host = {
        "connection": "local",
        "state_dir": str(tmp_path / "state"),
        "python": str(tmp_path / "engine/bin/python"),
        "servers": [server],
        "capture": {"layers": [1], "dir": str(tmp_path / "hs")},
    }
    (tmp_path / "i.yaml").write_text(json.dumps({"hosts": {"here": host, "there": {**host, "address": "there"}}}))
    (tmp_path / "data.jsonl").write_text('{"id": "s1", "text": "Hello."}\n')
    return tmp_path


def extract(place: Path, *more: str) -> Result:
    where = ["-i", str(place / "i.yaml"), "--runs-dir", str(place / "runs"), "--data", str(place / "data.jsonl")]
    return CliRunner().invoke(command.extract, [*where, "--run", "r", "--host", "here", *more])


def error_of(result: Result) -> FleetdumpError:
    assert isinstance(result.exception, FleetdumpError), result
    return result.exception


# --------------------------------------------------------------------------- options without effect
@pytest.mark.parametrize(
    ("args", "flag", "step"),
    [
        (["--controller-python", "/x/python"], "--controller-python", "--controller"),
        (["--detach", "--add-host", "there"], "--add-host", "leave --detach away"),
        (["--detach", "--restart", "2"], "--restart", "--controller"),
        (["--detach", "--patience", "600"], "--patience", "--controller"),
    ],
)
def test_an_option_that_would_say_nothing_is_refused(place: Path, args: list[str], flag: str, step: str) -> None:
    error = error_of(extract(place, *args))
    assert isinstance(error, UsageError)
    assert error.what == f"{flag} would have no effect"
    assert step in error.next_step
    assert error.why
    assert not (place / "runs").exists()


@pytest.mark.parametrize("args", [[], ["--detach"], ["--restart", "0"], ["--controller", "here", "--patience", "1"]])
def test_other_options_are_not_refused(place: Path, args: list[str]) -> None:
    assert isinstance(error_of(extract(place, *args)), HostError), "it goes as far as to ask the host"


# --------------------------------------------------------------------------- who drives it
def driven(monkeypatch: pytest.MonkeyPatch, error: Exception) -> list[str]:
    watched: list[str] = []

    def refuse(*_: object) -> None:
        raise error

    def watch(_: object, __: object, run: str) -> ExitCode:
        watched.append(run)
        return ExitCode.OK

    monkeypatch.setattr(command, "require_undriven", refuse)
    monkeypatch.setattr(_standingback, "watch", watch)
    monkeypatch.setattr(_standingback, "_look", lambda *_: Seen(begun=True, unfinished=False, driven=False))
    return watched


@pytest.mark.parametrize("detach", [False, True])
def test_a_run_that_is_driven_from_elsewhere_is_watched_or_left(
    place: Path, monkeypatch: pytest.MonkeyPatch, detach: bool
) -> None:
    watched = driven(monkeypatch, DrivenError("run r is being driven already", "here", "by anna@desk", "attach it"))
    result = extract(place, *(["--detach"] if detach else []))
    assert result.exit_code == 0, result
    assert watched == ([] if detach else ["r"])
    assert f"by anna@desk: {'nothing to begin' if detach else 'only watching'}" in result.stderr
    assert "next: attach it" in result.stderr
    assert not (place / "runs").exists()


def test_a_host_cannot_join_a_run_that_is_driven_from_elsewhere(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    watched = driven(monkeypatch, DrivenError("run r is being driven already", "here", "by anna@desk", "attach it"))
    monkeypatch.setattr(command, "_refuse_joining", lambda *_: None)
    error = error_of(extract(place, "--add-host", "there"))
    assert "there cannot join from here" in error.what
    assert "by anna@desk" in error.why
    assert "--add-host" in error.next_step
    assert watched == []


def test_a_host_that_somebody_changes_is_no_run_that_somebody_drives(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    watched = driven(monkeypatch, LockedError("the host is locked", "here", "anna@desk runs deploy there"))
    assert isinstance(error_of(extract(place)), LockedError)
    assert watched == []


# --------------------------------------------------------------------------- hosts that cannot compute
def test_a_host_without_an_engine_is_named_with_the_cause_and_the_next_command(place: Path) -> None:
    error = error_of(extract(place))
    assert error.what == "this host has no engine to compute with"
    assert str(place / "engine/bin/python") in error.why
    assert "fleetdump check --host here" in error.next_step
    assert "fleetdump deploy --host here" in error.next_step
    assert not (place / "runs").exists()


def test_a_host_without_the_model_is_named_with_the_cause(place: Path) -> None:
    install(place / "engine")
    error = error_of(extract(place))
    assert error.what == "this host has no model to compute with"
    assert "no-model" in error.why


# --------------------------------------------------------------------------- what a run keeps
def rows(*texts: str, name: str = "data.jsonl") -> DataSet:
    data = DataSet(name)
    for n, text in enumerate(texts):
        data.add(n + 1, Row(f"c{n}", text=text))
    return data


def begin(file: Path, settings: ExtractSettings) -> None:
    with Ledger(file) as ledger:
        open_run(ledger, "r", rows("a", "b"), TARGETS)
        settings.note(ledger)


@pytest.mark.parametrize(
    ("begun", "told", "what"),
    [
        ({"token_budget": 9}, {"token_budget": 10}, "--token-budget 9, not 10"),
        ({}, {"max_attempts": 4}, "--max-attempts 3, not 4"),
        ({"max_tokens": 100}, {"max_tokens": 50}, "--max-tokens 100, not 50"),
        ({}, {"max_tokens": 50}, "no --max-tokens, not 50"),
        ({}, {"too_long": "truncate"}, "--too-long drop, not truncate"),
    ],
)
def test_a_run_is_not_gone_on_with_by_other_settings(
    tmp_path: Path, begun: dict[str, Any], told: dict[str, Any], what: str
) -> None:
    file = runs_file(tmp_path, "r")
    begin(file, ExtractSettings(**begun))
    with pytest.raises(UsageError, match=what) as refused:
        settle(file, "r", told)
    assert "another --run name" in refused.value.next_step


def test_what_is_not_told_again_is_as_it_was_begun(tmp_path: Path) -> None:
    """Also for samples that are handed over later: they must not be cut elsewhere than their neighbours."""
    file = runs_file(tmp_path, "r")
    assert settle(file, "r", {}) == ExtractSettings()
    assert settle(file, "r", {"max_tokens": 7}) == ExtractSettings(7)
    begun = ExtractSettings(100, "truncate", 9, 4, allow_failed_selfcheck=True)
    begin(file, begun)
    kept = settle(file, "r", {})
    assert kept == ExtractSettings(100, "truncate", 9, 4), "a consent is given anew"
    assert settle(file, "r", {"max_tokens": 100, "token_budget": 9}) == kept


def test_other_data_under_the_name_of_a_run_is_told_with_both_named(tmp_path: Path) -> None:
    file = runs_file(tmp_path, "r")
    require_begun_with(file, "r", rows("x"))
    begin(file, ExtractSettings())
    require_begun_with(file, "r", rows("a", "b", name="copy.jsonl"))
    other = rows("a", "x", "c", name="other.jsonl")
    with pytest.raises(UsageError) as refused:
        require_begun_with(file, "r", other)
    before: DataMark = rows("a", "b").mark
    assert "1 changed (first: 'c1'), 1 new (first: 'c2')" in refused.value.why
    assert f"begun with data.jsonl (2 samples, SHA-256 {before.sha256[:12]})" in refused.value.why
    assert f"given other.jsonl (3 samples, SHA-256 {other.mark.sha256[:12]})" in refused.value.why
