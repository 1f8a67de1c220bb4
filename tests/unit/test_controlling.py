"""A controller on a host of the fleet: what is brought there, how it is started, and who may drive a run."""

from __future__ import annotations

import base64
import errno
import io
import json
import os
import re
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from fleetdump.agent import controlling, detach
from fleetdump.agent.clean import clean
from fleetdump.agent.context import AgentContext, State
from fleetdump.agent.controlling import OLDEST_PYTHON, PACKAGES, RECORD, controller, controllers_of, stop_controllers
from fleetdump.agent.hostmessages import CleanArgs, ControllerArgs, ControllerResult, ControllerState, StatusResult
from fleetdump.agent.procfs import is_alive
from fleetdump.agent.protocol import AgentFailure, Request
from fleetdump.agent.steermessages import DataMark, Steering
from fleetdump.dataset.intake import DataSet, take_in
from fleetdump.dataset.rows import Row, numbered_rows
from fleetdump.errors import DrivenError, LockedError, UsageError
from fleetdump.inventory import HostConfig, load
from fleetdump.inventory.dump import dump
from fleetdump.ledger import Ledger
from fleetdump.tasks.assignment import open_run
from fleetdump.tasks.controller import (
    DATA,
    Files,
    arguments,
    code_files,
    controller_there,
    fleet_from,
    require_alone,
    run_files,
)
from fleetdump.tasks.extract import ExtractSettings
from fleetdump.tasks.runlock import CONTROLLER, sole
from fleetdump.tasks.steering import Controller

ROOT = Path(__file__).resolve().parents[2]
SECONDS = 60.0
PROGRAM = """
import json, os, sys, time
def main():
    with open("seen.json.tmp", "w") as file:
        json.dump({"argv": sys.argv[1:], "cwd": os.getcwd(), "env": dict(os.environ)}, file)
    os.rename("seen.json.tmp", "seen.json")
    print(sys.argv[1])
    time.sleep(600 if "stay" in sys.argv else 0)
    sys.exit(3 if "fail" in sys.argv else 0)
"""
INIT = {"code/fleetdump/__init__.py": b""}
CODE = {**INIT, "code/fleetdump/__main__.py": PROGRAM.encode()}
"""Stands for the package that is brought."""


# --------------------------------------------------------------------------- the agent's side
@pytest.fixture
def state(tmp_path: Path) -> Iterator[State]:
    made = State(tmp_path / "state")
    yield made
    stop_controllers(made, [])


def call(state: State, *argv: str, files: dict[str, bytes] | None = None, **changes: Any) -> ControllerResult:
    brought = Files(CODE if files is None else files)
    body = "".join(f"{line}\n" for line in brought).encode()
    request = Request("controller", {}, operator="me@laptop", deadline=SECONDS, body_lines=len(brought))
    args = ControllerArgs(**{"run": "r", "python": sys.executable, "argv": list(argv), **changes})
    return controller(args, AgentContext(request, state, stdin=io.BytesIO(body), stdout=io.BytesIO()))


def seen(state: State) -> dict[str, Any]:
    return dict(json.loads((state.root / "controllers/r/seen.json").read_text()))


def test_it_runs_in_its_folder_without_a_forwarded_agent(state: State, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SSH_AUTH_SOCK", "/tmp/forwarded")
    result = call(state, "hello", "fail")
    assert (result.code, result.out) == (3, "hello\n")
    told = seen(state)
    assert told["argv"] == ["hello", "fail"]
    assert told["cwd"] == str(state.root / "controllers/r")
    assert "SSH_AUTH_SOCK" not in told["env"]
    assert controllers_of(state) == []


def test_one_that_is_started_lives_on_and_stands_in_the_way_of_another(state: State) -> None:
    started = call(state, "stay", detach=True)
    (told,) = controllers_of(state)
    assert (told.run, told.pid, told.alive, told.operator) == ("r", started.pid, True, "me@laptop")
    assert os.getsid(started.pid) == started.pid
    give_up = time.monotonic() + SECONDS
    while not Path(started.log).read_text() and time.monotonic() < give_up:
        time.sleep(0.05)
    with pytest.raises(AgentFailure, match="lives here already") as refused:
        call(state, "again")
    assert refused.value.error.code == "conflict"
    assert ", since 20" in refused.value.error.where
    folder = state.root / "controllers/r"
    record = json.loads((folder / "controller.json").read_text())
    (folder / "controller.json").write_text(json.dumps({**record, "started_at": 1e300}))
    with pytest.raises(AgentFailure, match="lives here already") as refused:
        call(state, "again")
    assert refused.value.error.where == f"pid {started.pid}"
    stop_controllers(state, ["r"])
    assert not is_alive(record["pid"], record["start_time"])
    assert [one.alive for one in controllers_of(state)] == [False]


def test_one_takes_the_others_place_when_it_is_to(state: State) -> None:
    first = call(state, "stay", detach=True)
    tried = call(state, "hello", replace=True)
    assert (tried.out, tried.pid) == ("hello\n", 0)
    assert [one.alive for one in controllers_of(state)] == [True], "to try it out ends nobody"
    second = call(state, "stay", detach=True, replace=True)
    (told,) = controllers_of(state)
    assert (told.pid, told.alive) == (second.pid, True)
    assert second.pid != first.pid
    assert not Path(f"/proc/{first.pid}/fd/0").exists()


@pytest.mark.parametrize("data", [b"", b"[" * 100_000, None])
def test_where_nobody_can_say_whether_one_lives_none_is_started(state: State, data: bytes | None) -> None:
    record = state.directory("controllers", "r") / RECORD
    record.mkdir() if data is None else record.write_bytes(data)
    with pytest.raises(AgentFailure, match=r"controller\.json cannot be read") as refused:
        call(state, "stay", detach=True)
    assert str(record.parent) in refused.value.error.next_step


@pytest.mark.parametrize("data", [b"", b"garbage", None])
def test_a_controller_whose_record_is_lost_is_known_by_its_lock(state: State, data: bytes | None) -> None:
    """A second one must not be started elsewhere, and ``clean`` must end it."""
    folder = state.directory("controllers", "r")
    (folder / RECORD).mkdir() if data is None else (folder / RECORD).write_bytes(data)
    assert controllers_of(state) == []
    with sole(folder / "runs/r", CONTROLLER):
        (told,) = controllers_of(state)
        assert (told.run, told.pid, told.alive) == ("r", os.getpid(), True)
    assert controllers_of(state) == []


def test_one_that_cannot_be_recorded_does_not_live(state: State, monkeypatch: pytest.MonkeyPatch) -> None:
    spawned: list[tuple[int, int]] = []

    def spawn(*args: Any, **more: Any) -> tuple[int, int]:
        spawned.append(detach.spawn_detached(*args, **more))
        return spawned[-1]

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(controlling, "spawn_detached", spawn)
    monkeypatch.setattr(controlling, "write_json", full)
    with pytest.raises(AgentFailure) as refused:
        call(state, "stay", detach=True)
    error = refused.value.error
    assert (error.code, error.why) == ("failed", os.strerror(errno.ENOSPC))
    assert error.where.endswith(RECORD)
    assert error.next_step
    give_up = time.monotonic() + SECONDS
    while is_alive(*spawned[0]) and time.monotonic() < give_up:
        time.sleep(0.05)
    assert not is_alive(*spawned[0])
    assert not (state.root / "controllers/r/seen.json").exists(), "nothing of it has run"


@pytest.mark.parametrize("runs", [[], ["r"]])
def test_clean_ends_it_and_removes_what_was_brought(state: State, runs: list[str]) -> None:
    started = call(state, "stay", detach=True)
    request = Request("clean", {}, deadline=SECONDS)
    ctx = AgentContext(request, state, stdin=io.BytesIO(), stdout=io.BytesIO())
    folder = str(state.root / "controllers/r")
    wanted = folder if runs else str(state.root)
    assert wanted in clean(CleanArgs(runs=runs, dry_run=True), ctx).removed
    other = clean(CleanArgs(runs=["other"]), ctx)
    assert (other.removed, [one.alive for one in controllers_of(state)]) == ([], [True])
    assert folder in clean(CleanArgs(runs=runs), ctx).removed
    assert not Path(folder).exists()
    assert not Path(f"/proc/{started.pid}/fd/0").exists()


def test_one_that_ends_at_once_says_why(state: State) -> None:
    broken = {**INIT, "code/fleetdump/__main__.py": b"raise ImportError('no such thing')"}
    result = call(state, "x", files=broken, detach=True)
    assert result.pid == 0
    assert "no such thing" in result.err


def test_only_whole_files_of_its_own_folder_are_brought(state: State) -> None:
    for name in ("../x", "/etc/x", "a/../../x", "", ".hidden", "a//b"):
        with pytest.raises(AgentFailure, match="no name of a file"):
            call(state, "x", files={name: b"1"})
    assert not (state.root / "x").exists()
    big = os.urandom(200_000)
    call(state, "x", files={**CODE, "code/fleetdump/old.py": b"", "runs/r/ledger.sqlite": b"new", DATA: big})
    folder = state.root / "controllers/r"
    assert (folder / DATA).read_bytes() == big
    assert (folder / "code/fleetdump/old.py").read_bytes() == b""
    (folder / "runs/r/ledger.sqlite").write_bytes(b"worked on")
    call(state, "x", files={**CODE, "runs/r/ledger.sqlite": b"new"})
    assert (folder / "runs/r/ledger.sqlite").read_bytes() == b"worked on"
    assert not (folder / "code/fleetdump/old.py").exists(), "another version's modules are gone"
    assert (folder / DATA).stat().st_mode & 0o777 == 0o600


def fake_python(folder: Path, answer: object) -> str:
    path = folder / "python-of-the-host"
    path.write_text(f"#!/bin/sh\necho '{json.dumps(answer)}'\n")
    path.chmod(0o755)
    return str(path)


@pytest.mark.parametrize(
    ("answer", "why"),
    [([[3, 9], []], "it is Python 3.9; a controller needs 3.10"), ([[3, 12], ["fabric", "rich"]], "it lacks fabric")],
)
def test_a_python_that_cannot_is_named_with_what_to_do(state: State, tmp_path: Path, answer: object, why: str) -> None:
    with pytest.raises(AgentFailure) as refused:
        call(state, "x", python=fake_python(tmp_path, answer))
    error = refused.value.error
    assert error.code == "not_found"
    assert why in error.why
    assert "--controller-python" in error.next_step
    assert not (state.root / "controllers").exists(), "nothing was brought"
    with pytest.raises(AgentFailure, match="does not answer"):
        call(state, "x", python="/no/such/python")


def test_the_packages_and_the_python_are_those_of_the_project() -> None:
    project = (ROOT / "pyproject.toml").read_text()
    names = re.findall(r'^  "([a-z]+)>=', project[project.index("\ndependencies") :].partition("]")[0], re.MULTILINE)
    assert {"yaml" if name == "pyyaml" else name for name in names} == set(PACKAGES)
    assert f'requires-python = ">={".".join(map(str, OLDEST_PYTHON))}"' in project


# --------------------------------------------------------------------------- what is brought
def test_an_inventory_is_the_same_when_it_was_written_and_read_again(tmp_path: Path) -> None:
    hosts = [replace(host, groups=()) for host in load(ROOT / "inventory/example.yaml").hosts]
    hosts[0] = replace(
        hosts[0], exec_prefix=("docker", "exec"), proxy_jump="me@bastion:2222", host_key="SHA256:" + "a" * 43
    )
    (tmp_path / "inventory.yaml").write_text(dump(hosts))
    assert list(load(tmp_path / "inventory.yaml").hosts) == hosts


def test_from_the_seat_it_is_itself_and_the_keys_of_the_laptop_are_not_there() -> None:
    seat = HostConfig(
        "a", "10.0.0.1", user="root", identity_file="~/.ssh/laptop", exec_prefix=("docker",), proxy_jump="b"
    )
    other = HostConfig("b", "10.0.0.2", user="me", port=2222, identity_file="~/.ssh/laptop", exec_prefix=("docker",))
    first, second = fleet_from("a", {"a": seat, "b": other})
    assert (first.connection, first.exec_prefix, first.proxy_jump, first.user) == ("local", (), None, None)
    assert second == replace(other, identity_file=None)
    with pytest.raises(UsageError, match="cannot reach c"):
        fleet_from("a", {"a": seat, "c": HostConfig("c", "localhost", connection="local")})


ROWS: list[dict[str, Any]] = [
    {"messages": [{"role": "user", "content": "Hi \u2028 \U0001f600"}, {"role": "assistant", "content": "Hello."}]},
    {"id": "a2", "conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello."}]},
    {
        "id": "a3",
        "tools": '[{"type": "function", "function": {"name": "weather"}}]',
        "messages": [
            {"role": "user", "content": "Rain?", "name": "x"},
            {
                "role": "assistant",
                "content": None,
                "reasoning": "Easy.",
                "tool_calls": [{"type": "function", "function": {"name": "weather", "arguments": '{"city": "Ulm"}'}}],
            },
            {"role": "observation", "content": "no"},
        ],
    },
    {"id": "a4", "text": "as it stands", "other": 1},
    {"id": "a5", "input_ids": [1, 17, 4], "loss_mask": [0, 1, 1], "messages": None},
]


def test_the_rows_that_are_brought_make_the_same_run(tmp_path: Path) -> None:
    (tmp_path / "data.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in [*ROWS, {"id": "broken"}]))
    data = take_in(numbered_rows(tmp_path / "data.jsonl"))
    targets = [("a", "main"), ("b", "main")]
    with Ledger(tmp_path / "ledger.sqlite") as ledger:
        plan = open_run(ledger, "r", data, targets)
    brought = run_files("r", data, tmp_path / "ledger.sqlite")
    lines = [json.loads(line) for line in brought]
    assert len(lines) == len(brought)
    for name in (DATA, "runs/r/ledger.sqlite"):
        content = b"".join(base64.b64decode(line["data"]) for line in lines if line["file"] == name)
        target = tmp_path / "there" / name
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(content)
    again = take_in(numbered_rows(tmp_path / "there" / DATA))
    with Ledger(tmp_path / "there/runs/r/ledger.sqlite") as ledger:
        resumed = open_run(ledger, "r", again, targets)
    assert resumed.resumed
    assert {target: share.sha256 for target, share in resumed.shares.items()} == {
        target: share.sha256 for target, share in plan.shares.items()
    }


def test_the_code_that_is_brought_is_this_package() -> None:
    files = code_files()
    assert files["code/fleetdump/cli/extract.py"] == (ROOT / "fleetdump/cli/extract.py").read_bytes()
    assert not any("__pycache__" in name for name in files)


# --------------------------------------------------------------------------- who drives
@pytest.mark.parametrize(
    ("change", "is_refused"),
    [
        (lambda one: one, True),
        (lambda one: replace(one, alive=False), False),
        (lambda one: replace(one, run="other"), False),
    ],
)
def test_a_run_that_is_driven_from_a_host_is_not_driven_twice(
    change: Callable[[ControllerState], ControllerState], is_refused: bool
) -> None:
    one = change(ControllerState("r", os.getpid(), True, "me@laptop", 1.0))
    status = StatusResult("node", [], [], controllers=[one])
    host: Any = SimpleNamespace(config=HostConfig("gpu01", "10.0.0.1"))
    if not is_refused:
        require_alone(host, "r", status)
        return
    with pytest.raises(LockedError, match="driven already"):
        require_alone(host, "r", status)
    itself: Any = SimpleNamespace(config=HostConfig("gpu01", "10.0.0.1", connection="local"))
    require_alone(itself, "r", status)
    with pytest.raises(LockedError, match="driven already"):
        require_alone(itself, "r", replace(status, controllers=[replace(one, pid=one.pid + 1)]))


def test_a_controller_that_is_to_be_replaced_stands_in_nobodys_way(tmp_path: Path) -> None:
    """On its own host it is known by its process, on the others by what that host calls it."""
    folder = tmp_path / "r"
    folder.mkdir()
    me = Controller("r", folder, DataMark("data.jsonl", 1, "a"))
    me.begin()
    seat: Any = SimpleNamespace(config=HostConfig("gpu01", "10.0.0.1"))
    other: Any = SimpleNamespace(config=HostConfig("gpu02", "10.0.0.2"))
    by = Steering("r", "seat", "root@gpu01", 70, "/x/runs/r", me.data, 1.0, 71)
    there = StatusResult("gpu01", [], [], controllers=[ControllerState("r", 70, True, "me@laptop", 1.0)], steering=[by])
    elsewhere = StatusResult("gpu02", [], [], steering=[by])
    assert controller_there("r", there) == "seat"
    assert controller_there("r2", there) == ""
    assert controller_there("r", elsewhere) == ""
    for host, status in ((seat, there), (other, elsewhere)):
        require_alone(host, "r", status, me, "seat")
        for name in ("", "another"):
            with pytest.raises(DrivenError):
                require_alone(host, "r", status, me, name)
    with pytest.raises(UsageError, match="with other data"):
        require_alone(other, "r", elsewhere, replace(me, data=DataMark("other.jsonl", 1, "b")), "seat")


def test_a_controller_is_told_what_a_run_there_may_not_know(tmp_path: Path) -> None:
    """Its ledger knows what the run was begun with; this machine may not."""
    assert "--token-budget" not in arguments("r", ExtractSettings(), [])
    told = arguments("r", ExtractSettings(100, "truncate", 9, 4, allow_failed_selfcheck=True), ["--restart", "1"])
    for words in ("--max-tokens 100", "--too-long truncate", "--token-budget 9", "--max-attempts 4", "--restart 1"):
        assert words in " ".join(told)
    assert "--allow-failed-selfcheck" in told
    assert list(run_files("r", _one_row(), tmp_path / "no-ledger")), "rows alone"


def _one_row() -> DataSet:
    data = DataSet("x")
    data.add(1, Row("a", text="b"))
    return data
