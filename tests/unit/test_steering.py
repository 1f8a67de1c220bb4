"""One controller a run on each host: it keeps its place while it lives, and nobody else moves samples meanwhile."""

from __future__ import annotations

import fcntl
import io
import json
import os
import queue
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from extraction import StandIn, full_disk

from fleetdump.agent import lock
from fleetdump.agent.context import AgentContext
from fleetdump.agent.drive import submit
from fleetdump.agent.hostmessages import StatusArgs, StatusResult
from fleetdump.agent.protocol import AgentFailure, Request
from fleetdump.agent.runmessages import SubmitArgs, WithdrawArgs
from fleetdump.agent.steermessages import DataMark, SteerArgs, Steering
from fleetdump.agent.turn import Turn, steer, steering_of_all
from fleetdump.agent.withdraw import withdraw
from fleetdump.dataset.intake import DataSet
from fleetdump.dataset.rows import Row
from fleetdump.errors import DrivenError, UsageError
from fleetdump.fleet import ConnectOptions, Host, connect
from fleetdump.inventory import HostConfig
from fleetdump.tasks.controller import require_alone
from fleetdump.tasks.steering import Controller, require_same_data, steered

SECONDS = 60.0
DATA = DataMark("data.jsonl", 40, "ab" * 32)


def controller(folder: Path, data: DataMark = DATA) -> Controller:
    folder.mkdir(parents=True, exist_ok=True)
    made = Controller("r1", folder, data)
    made.begin()
    return made


@pytest.fixture
def other(local_config: HostConfig) -> Iterator[Host]:
    """Another operator's way to the host of ``local_host``."""
    with connect(local_config, ConnectOptions(operator="anna@desk")) as made:
        yield made


def never(text: str) -> None:
    raise AssertionError(text)


def steering(host: Host) -> list[Steering]:
    return host.call(StatusArgs(), StatusResult, verb="status").steering


# --------------------------------------------------------------------------- between two controllers
def test_a_run_has_one_controller_on_a_host_and_the_second_hears_who(
    local_host: Host, other: Host, tmp_path: Path
) -> None:
    first, second = controller(tmp_path / "a/runs/r1"), controller(tmp_path / "b/runs/r1")
    with steered(local_host, first, never):
        (told,) = steering(other)
        assert (told.run, told.operator, told.pid, told.data) == ("r1", "tester@here", os.getpid(), DATA)
        assert told.folder == str(first.folder)
        with pytest.raises(DrivenError, match="r1 is being driven already") as refused, steered(other, second, never):
            raise AssertionError("two drive it")
        for words in ("tester@here", f"process {os.getpid()}", str(first.folder), "since 20", "data.jsonl (40 samples"):
            assert words in refused.value.why
        assert f"kill {told.agent_pid} on" in refused.value.next_step
        with steered(other, replace(second, run="r2"), never):
            assert [one.run for one in steering(other)] == ["r1", "r2"], "another run is another matter"
    assert steering(other) == []
    with steered(other, second, never):
        assert [one.operator for one in steering(local_host)] == ["anna@desk"]


def test_a_later_process_of_the_same_folder_takes_the_place_anew(local_host: Host, other: Host, tmp_path: Path) -> None:
    """As after a cut link: the host does not know yet that the first one is gone."""
    first = controller(tmp_path / "runs/r1")
    told: queue.Queue[str] = queue.Queue()
    with steered(local_host, first, told.put), steered(other, controller(tmp_path / "runs/r1"), never):
        assert "another may take it" in told.get(timeout=SECONDS)
        assert [one.operator for one in steering(local_host)] == ["anna@desk"]
    assert steering(other) == []


_STEER = """
import sys
from pathlib import Path
from fleetdump.agent.steermessages import DataMark
from fleetdump.fleet import ConnectOptions, connect
from fleetdump.inventory import HostConfig
from fleetdump.tasks.steering import Controller, steered
config = HostConfig("here", "localhost", connection="local", state_dir=sys.argv[1], agent_python="python3")
with connect(config, ConnectOptions(operator="dead@desk")) as host:
    with steered(host, Controller("r1", Path(sys.argv[2]), DataMark("d", 1, "")), print):
        print("steering", flush=True)
        sys.stdin.read()
"""


def test_a_killed_controller_leaves_its_place(local_host: Host, local_config: HostConfig, tmp_path: Path) -> None:
    dying = controller(tmp_path / "dies/runs/r1")
    argv = [sys.executable, "-c", _STEER, local_config.state_dir, str(dying.folder)]
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == b"steering\n"
            assert [one.operator for one in steering(local_host)] == ["dead@desk"]
        finally:
            process.send_signal(signal.SIGKILL)
            process.wait()
    with steered(local_host, controller(tmp_path / "runs/r1"), never):
        assert [one.operator for one in steering(local_host)] == ["tester@here"]


def test_who_it_is_is_told_by_the_folder_and_not_by_a_copy_of_it(tmp_path: Path) -> None:
    assert Controller("r1", tmp_path / "never", DATA).id == ""
    one = controller(tmp_path / "a")
    assert controller(tmp_path / "a").id == one.id
    (tmp_path / "b").mkdir()
    (tmp_path / "b/controller.id").write_text((tmp_path / "a/controller.id").read_text())
    assert controller(tmp_path / "b").id != one.id
    assert controller(tmp_path / "c").id != one.id


# --------------------------------------------------------------------------- the host's side
@pytest.fixture
def host(tmp_path: Path) -> Iterator[StandIn]:
    standin = StandIn(tmp_path)
    yield standin
    standin.kill()


def context(host: StandIn, me: str = "", **more: Any) -> AgentContext:
    request = Request("any", {}, operator="me@laptop", controller=me, **{"deadline": SECONDS, **more})
    return AgentContext(request, host.state, stdin=io.BytesIO(), stdout=io.BytesIO())


class Emitting(AgentContext):
    """Calls ``during`` once the verb says that it has its place."""

    during: Callable[[], None]

    def emit(self, event: str, **fields: Any) -> None:
        super().emit(event, **fields)
        if event == "steering":
            self.during()


def while_driven(host: StandIn, during: Callable[[], None]) -> None:
    request = Request("steer", {}, operator="first@desk", deadline=1.5)
    ctx = Emitting(request, host.state, stdin=io.BytesIO(), stdout=io.BytesIO())
    ctx.during = during
    steer(SteerArgs("r1", "first", 7, "/a/runs/r1", DATA), ctx)


def test_nobody_else_hands_out_or_moves_samples_of_a_run_that_is_driven(host: StandIn) -> None:
    share = host.share({"a": 5, "b": 5})
    spec = share.spec()
    assert spec is not None
    moves: list[tuple[Callable[..., Any], Any]] = [
        (submit, SubmitArgs("r1", "main", spec.share_sha256, host.capture)),
        (submit, SubmitArgs("r1", "main.1", "0" * 64, host.capture)),
        (withdraw, WithdrawArgs("r1", "main", 10)),
    ]
    refused = []

    def others() -> None:
        for verb, args in moves:
            for who in ("", "second"):
                with pytest.raises(AgentFailure) as caught:
                    verb(args, context(host, who))
                refused.append((caught.value.error.code, "first@desk" in caught.value.error.why))
        assert withdraw(WithdrawArgs("r1", "main", 0), context(host, "second")).ids == [], "to ask is free"
        assert withdraw(WithdrawArgs("r1", "main", 1), context(host, "first")).ids != []

    while_driven(host, others)
    assert refused == [("locked", True)] * 6
    assert len(withdraw(WithdrawArgs("r1", "main", 100), context(host, "second")).ids) == 2, "nobody drives it any more"


@pytest.mark.parametrize("text", ["", "{", '{"v": 9}'])
def test_a_place_that_cannot_be_read_is_somebodys_all_the_same(host: StandIn, text: str) -> None:
    def others() -> None:
        (path,) = (host.state.root / "steering").glob("*.json")
        path.write_text(text)
        (told,) = steering_of_all(host.state)
        assert (told.run, told.in_words) == ("r1", "by somebody")
        with pytest.raises(AgentFailure, match="driven already") as refused:
            steer(SteerArgs("r1", "second"), context(host))
        assert f"kill {os.getpid()} on" in refused.value.error.next_step, "as the kernel knows"
        with pytest.raises(AgentFailure, match="driven already"):
            submit(SubmitArgs("r1", "main", "0" * 64, host.capture), context(host))

    while_driven(host, others)
    assert steering_of_all(host.state) == []


@pytest.mark.parametrize("pid", [0, -1, 1])
def test_nobody_is_told_to_kill_what_is_no_agent(pid: int) -> None:
    """``kill 0`` ends the process group of whoever types it, ``kill -1`` all that he has."""
    words = Steering("r1", "?", "", 0, "", DataMark("", 0, ""), 0.0, pid).next_step("gpu01")
    assert "kill" not in words
    assert "gpu01 which process locks steering/r1.json" in words


@pytest.mark.parametrize("since", [1e300, float("nan"), float("inf"), -1e18, 0.0])
def test_a_time_that_no_clock_has_said_is_left_out(host: StandIn, since: float) -> None:
    def others() -> None:
        (path,) = (host.state.root / "steering").glob("*.json")
        path.write_text(json.dumps({**json.loads(path.read_text()), "since": since}))
        (told,) = steering_of_all(host.state)
        words = "by first@desk (process 7 in /a/runs/r1), with data.jsonl (40 samples, SHA-256 abababababab)"
        assert told.in_words == words

    while_driven(host, others)


# --------------------------------------------------------------------------- what else may be in its place
def _folder(state: Path) -> None:
    (state / "steering/r1.json").mkdir(parents=True)


def _file(state: Path) -> None:
    (state / "steering").write_text("")


def _dangling(state: Path) -> None:
    (state / "steering").symlink_to("nowhere")


def _guard(state: Path) -> None:
    (state / "steering/lock.guard").mkdir(parents=True)


def _guard_link(state: Path) -> None:
    (state / "steering").mkdir()
    (state / "steering/lock.guard").symlink_to("nowhere/at-all")


@pytest.mark.parametrize("damage", [_folder, _file, _dangling, _guard, _guard_link])
def test_what_is_in_the_way_of_a_place_is_named_with_what_moves_it_away(
    host: StandIn, damage: Callable[[Path], None]
) -> None:
    damage(host.state.directory())
    with pytest.raises(AgentFailure) as refused:
        steer(SteerArgs("r1", "first", 7, "/a", DATA), context(host))
    error = refused.value.error
    assert error.code == "failed"
    assert steering_of_all(host.state) == []
    command = error.next_step.partition("move it away: ")[2]
    subprocess.run(shlex.split(command), check=True)
    while_driven(host, lambda: None)


def test_a_pipe_or_a_link_of_the_name_that_a_place_is_written_by_is_replaced(host: StandIn) -> None:
    temporary = host.state.directory("steering") / f"r1.json.{os.getpid()}.tmp"
    os.mkfifo(temporary)
    while_driven(host, lambda: None)
    (host.state.root / "theirs").write_text("theirs")
    temporary.symlink_to("../theirs")
    while_driven(host, lambda: None)
    assert (host.state.root / "theirs").read_text() == "theirs"


def test_a_turn_is_no_pipe_and_no_link(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link").symlink_to("nowhere")
    for name in ("pipe", "link"):
        with pytest.raises(OSError, match=name):
            Turn(tmp_path / name).take()
    assert not (tmp_path / "nowhere").exists()


def test_a_controller_that_hangs_while_it_takes_its_place_is_named(
    host: StandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    guard = host.state.directory("steering") / "lock.guard"
    monkeypatch.setattr(lock, "GUARD_SECONDS", 0.3)
    with open(guard, "ab") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        with pytest.raises(AgentFailure, match="was not given back") as refused:
            steer(SteerArgs("r1", "first", 7, "/a", DATA), context(host))
    assert (refused.value.error.where, f"process {os.getpid()}" in refused.value.error.why) == (str(guard), True)
    while_driven(host, lambda: None)


def test_what_a_dead_controller_left_is_no_place(host: StandIn) -> None:
    def kept() -> None:
        (path,) = (host.state.root / "steering").glob("*.json")
        left.append(path.read_text())

    left: list[str] = []
    while_driven(host, kept)
    (host.state.root / "steering/r1.json").write_text(left[0])
    assert steering_of_all(host.state) == []
    began = time.monotonic()
    while_driven(host, lambda: None)
    assert time.monotonic() - began < SECONDS
    assert not (host.state.root / "steering/r1.json").exists()


def test_a_place_that_is_cleaned_away_ends_quietly(host: StandIn) -> None:
    while_driven(host, lambda: shutil.rmtree(host.state.root / "steering"))
    assert steering_of_all(host.state) == []


def test_a_full_disk_has_no_room_for_a_controller_and_keeps_nothing_of_it(host: StandIn) -> None:
    folder = host.state.directory("steering")
    with full_disk(0), pytest.raises(OSError, match="File too large"):
        steer(SteerArgs("r1", "first", 7, "/a", DATA), context(host))
    assert {path.name for path in folder.iterdir()} <= {"lock.guard"}


# --------------------------------------------------------------------------- what is compared
def test_other_data_is_refused_with_both_named() -> None:
    theirs = DataMark("old.jsonl", 40, "11" * 32)
    require_same_data("r1", DATA, replace(theirs, sha256=DATA.sha256))
    with pytest.raises(UsageError) as refused:
        require_same_data("r1", DATA, theirs, "gpu01")
    for words in ("old.jsonl (40 samples, SHA-256 111111111111)", "data.jsonl (40 samples, SHA-256 abababababab)"):
        assert words in refused.value.why
    assert "another --run name" in refused.value.next_step


def test_the_mark_of_data_is_of_ids_and_contents_in_order() -> None:
    def mark(*rows: tuple[str, str]) -> str:
        data = DataSet("x")
        for line, (row_id, text) in enumerate(rows, 1):
            data.add(line, Row(row_id, text=text))
        assert (data.mark.name, data.mark.samples) == ("x", len(rows))
        return data.mark.sha256

    one = mark(("a", "1"), ("b", "2"))
    assert mark(("a", "1"), ("b", "2")) == one
    others = [
        mark(("b", "2"), ("a", "1")),
        mark(("a", "1"), ("b", "3")),
        mark(("a", "1")),
        mark(("a", "1"), ("c", "2")),
    ]
    assert len({one, *others}) == 5


@pytest.mark.parametrize("data", [DATA, DataMark("old.jsonl", 9, "11" * 32)])
def test_who_begins_a_run_that_is_driven_elsewhere_hears_it_before(tmp_path: Path, data: DataMark) -> None:
    me = controller(tmp_path / "r1")
    host: Any = SimpleNamespace(config=HostConfig("gpu01", "10.0.0.1"))
    by = Steering("r1", "other", "anna@desk", 7, "/a/runs/r1", data, 1.0, 70)
    status = StatusResult("node", [], [], steering=[by])
    with pytest.raises(DrivenError if data == DATA else UsageError, match="r1 is being driven"):
        require_alone(host, "r1", status, me)
    require_alone(host, "r2", status, replace(me, run="r2"))
    require_alone(host, "r1", replace(status, steering=[replace(by, controller=me.id)]), me)


def test_a_folder_of_any_name_has_a_controller_and_one_line_of_words(local_host: Host, tmp_path: Path) -> None:
    me = controller(tmp_path / os.fsdecode(b"da\xff\nnext: run this"))
    with steered(local_host, me, lambda _: None):
        (place,) = local_host.call(StatusArgs(), StatusResult, verb="status").steering
    assert place.controller == me.id
    assert place.in_words.isprintable()
