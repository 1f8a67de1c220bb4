"""Orders to a run that there is not: nothing is asked first, and the runs that there are stand in the error."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from fleetdump.agent.bootstrap import state_root
from fleetdump.cli import runcontrol
from fleetdump.errors import FleetdumpError, UnreachableError, UsageError

COMMANDS = ("attach", "pause", "resume", "cancel", "drain")


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """An inventory of this machine, which has a run, ``known``."""
    share = Path(state_root(str(tmp_path / "home"))) / "runs" / "known" / "main"
    share.mkdir(parents=True)
    (share / "share.json").write_text("{}")
    write_inventory(tmp_path, {})
    return tmp_path


def write_inventory(place: Path, more: dict[str, object]) -> None:
    here = {"connection": "local", "state_dir": str(place / "home"), "agent_python": sys.executable}
    (place / "i.yaml").write_text(json.dumps({"hosts": {"here": here, **more}}))


@pytest.fixture
def with_a_silent_host(place: Path) -> Iterator[Path]:
    """Beside it one that takes no connection."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
        write_inventory(place, {"gpu02": {"address": "127.0.0.1", "port": port, "connect_timeout": 2}})
        yield place


def call(place: Path, command: str, run: str, *more: str) -> Result:
    verb = getattr(runcontrol, command)
    only = ["--host", "here"] if command == "drain" and "--host" not in more else []
    return CliRunner().invoke(verb, ["-i", str(place / "i.yaml"), "--run", run, *only, *more], input="y\n")


def said(result: Result) -> str:
    if isinstance(result.exception, FleetdumpError):
        error = result.exception
        return f"{error.where}: {error.what}\n{error.why}\n{error.next_step}"
    return str(result.stderr)


@pytest.mark.parametrize("command", COMMANDS)
def test_the_runs_that_there_are_are_named_and_nothing_is_asked(place: Path, command: str) -> None:
    result = call(place, command, "knowm")
    assert "no host has run knowm; did you mean 'known'?" in said(result)
    assert "the runs there: known" in said(result)
    assert "correct --run" in said(result)
    assert "Give up" not in result.output
    assert isinstance(result.exception, (UsageError, SystemExit))
    assert result.exit_code in (1, 2)
    if isinstance(result.exception, SystemExit):
        assert result.exception.code == 2


@pytest.mark.parametrize("command", COMMANDS)
def test_a_host_that_does_not_answer_is_said_to_be_the_one_that_may_have_it(
    with_a_silent_host: Path, command: str
) -> None:
    result = call(with_a_silent_host, command, "other")
    if command == "drain":
        assert isinstance(result.exception, UnreachableError)
    assert "no host that answers has run other" in said(result)
    assert "1 host gave no answer" in said(result)
    assert "the runs there: known" in said(result)
    assert "gpu02" in said(result)
    assert "Give up" not in result.output


def test_where_there_is_no_run_at_all_that_is_said(tmp_path: Path) -> None:
    write_inventory(tmp_path, {})
    assert "there is no run at all" in said(call(tmp_path, "cancel", "r"))
    assert "there is no run at all" in said(call(tmp_path, "cancel", "r", "--yes"))


def test_of_a_run_that_there_is_it_is_asked(place: Path) -> None:
    result = CliRunner().invoke(
        runcontrol.cancel, ["-i", str(place / "i.yaml"), "--run", "known"], input="n\n", standalone_mode=False
    )
    assert "Give up what is not done of run known?" in result.output
    assert not list(place.glob("home/*/runs/known/order.json"))


@pytest.mark.parametrize("stdin", [subprocess.DEVNULL, None])
def test_where_nobody_can_be_asked_it_is_said_how_to_cancel_without(place: Path, stdin: int | None) -> None:
    """As in a job without a terminal, and where standard input is closed altogether."""
    command = [sys.executable, "-m", "fleetdump", "cancel", "-i", str(place / "i.yaml"), "--run", "known"]
    closed = ["sh", "-c", 'exec "$@" <&-', "sh"] if stdin is None else []
    done = subprocess.run([*closed, *command], stdin=stdin, capture_output=True, text=True)
    assert done.returncode == 2, done.stderr
    assert "run known is not cancelled" in done.stderr
    assert "fleetdump cancel --run known --yes" in done.stderr
    assert "interrupted" not in done.stderr
    assert "Traceback" not in done.stderr
    assert not list(place.glob("home/*/runs/known/order.json"))
