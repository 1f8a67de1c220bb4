"""Launch and stop of real processes: detached, identified, rotated, and never somebody else's."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from fleetdump.agent import procfs
from fleetdump.agent.arguments import merge_arguments, option_value, options_meant
from fleetdump.agent.context import AgentContext
from fleetdump.agent.hostmessages import StatusArgs
from fleetdump.agent.jsonl import write_json
from fleetdump.agent.launch import launch
from fleetdump.agent.launchplan import plan
from fleetdump.agent.protocol import AgentFailure
from fleetdump.agent.server import ServerRecord, living, load_record, load_records, save_record, server_state
from fleetdump.agent.servermessages import LaunchArgs, LogsArgs, StopArgs
from fleetdump.agent.share import DriverRecord
from fleetdump.agent.specs import CaptureSpec, PatchSpec, ReleaseArg, ServerSpec
from fleetdump.agent.status import logs, status
from fleetdump.agent.stop import stop
from tests.unit.engineinstall import Install, context, install, runnable, wait_for


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Install:
    return runnable(install(tmp_path_factory.mktemp("engine") / "venv"))


@pytest.fixture
def ctx(tmp_path: Path) -> Iterator[AgentContext]:
    made = context(tmp_path)
    yield made
    for record in load_records(made.state):
        for member in living(record):
            with contextlib.suppress(ProcessLookupError):
                os.kill(member.pid, signal.SIGKILL)


@pytest.fixture
def server(engine: Install, tmp_path: Path) -> ServerSpec:
    model = tmp_path / "model"
    model.mkdir()
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    return ServerSpec("main", engine.python, str(model), port)


def listening(ctx: AgentContext, name: str = "main") -> int:
    """Wait until the fake server listens; its pid."""
    record = load_record(ctx.state, name)
    assert record is not None
    wait_for(lambda: procfs.port_owner(record.port) is not None)
    return record.pid


def failure(args: LaunchArgs, ctx: AgentContext) -> AgentFailure:
    with pytest.raises(AgentFailure) as caught:
        launch(args, ctx)
    return caught.value


# --------------------------------------------------------------------------- launch
def test_a_launched_server_leads_its_own_session_and_is_on_record(server: ServerSpec, ctx: AgentContext) -> None:
    result = launch(LaunchArgs(server), ctx)
    pid = listening(ctx)

    assert (result.reused, result.state.state, result.state.phase) == (False, "starting", "imports")
    assert os.getsid(pid) == pid
    assert os.readlink(f"/proc/{pid}/fd/0") == "/dev/null"
    assert os.readlink(f"/proc/{pid}/fd/1") == os.readlink(f"/proc/{pid}/fd/2") == result.log
    assert os.readlink(f"/proc/{pid}/cwd") == "/"
    environment = Path(f"/proc/{pid}/environ").read_bytes()
    assert b"PYTHONDONTWRITEBYTECODE=1\0" in environment
    record = load_record(ctx.state, "main")
    assert record is not None
    assert [m.pid for m in living(record)] == [pid]
    assert (ctx.state.root / "servers" / "main" / "server.json").stat().st_mode & 0o77 == 0


def test_the_same_launch_again_is_reused_and_another_is_a_conflict(server: ServerSpec, ctx: AgentContext) -> None:
    first = launch(LaunchArgs(server), ctx)
    listening(ctx)

    again = launch(LaunchArgs(server), ctx)
    assert (again.reused, again.state.pid) == (True, first.state.pid)

    patch = PatchSpec("p", "1", "00", [], server_args=["--x"])
    for other in (LaunchArgs(server, patch), LaunchArgs(server, capture=CaptureSpec([1], "/tmp/x"))):
        error = failure(other, ctx).error
        assert (error.code, "--replace" in error.next_step) == ("conflict", True)
    assert procfs.is_alive(first.state.pid, first.state.start_time)


def test_the_patchs_arguments_follow_the_release_and_the_users_own_win(server: ServerSpec, ctx: AgentContext) -> None:
    server.args = ["--cache", "off"]
    patch = PatchSpec("p", "1", "00", [], server_args=["--x", "--cache", "on"])
    patch.release_args = [ReleaseArg("--old", last_release="0.5.13"), ReleaseArg("--new", "0.5.14")]

    launched = launch(LaunchArgs(server, patch), ctx)

    assert launched.argv[-4:] == ["--cache", "off", "--x", "--new"]
    assert launched.added_args == ["--x", "--new"]
    assert launch(LaunchArgs(server, patch), ctx).added_args == ["--x", "--new"]
    assert launch(LaunchArgs(server, replace=True), ctx).added_args == []


def test_replace_stops_ours_rotates_the_log_and_starts_anew(server: ServerSpec, ctx: AgentContext) -> None:
    first = launch(LaunchArgs(server), ctx)
    listening(ctx)
    server.args = ["--other"]

    second = launch(LaunchArgs(server, replace=True), ctx)
    listening(ctx)

    assert not procfs.is_alive(first.state.pid, first.state.start_time)
    assert second.state.launch_id != first.state.launch_id
    assert "--other" in Path(second.log).read_text()
    assert "--other" not in Path(second.log + ".1").read_text()


def test_five_old_logs_are_kept(server: ServerSpec, ctx: AgentContext) -> None:
    for number in range(8):
        server.args = ["--crash", f"--n{number}"]
        launch(LaunchArgs(server), ctx)
        wait_for(lambda: server_state(load_record(ctx.state, "main")).state == "died")  # type: ignore[arg-type]

    folder = ctx.state.root / "servers" / "main"
    assert sorted(p.name for p in folder.glob("server.log*")) == ["server.log"] + [
        f"server.log.{n}" for n in range(1, 6)
    ]
    for age, path in enumerate(["server.log", "server.log.1", "server.log.2"]):
        assert f"--n{7 - age}" in (folder / path).read_text()
        assert f"--n{6 - age}" not in (folder / path).read_text()


def test_the_tap_gets_its_settings_by_file(server: ServerSpec, ctx: AgentContext, tmp_path: Path) -> None:
    capture = CaptureSpec([1, 3], str(tmp_path / "made" / "hs"))

    result = launch(LaunchArgs(server, capture=capture), ctx)
    pid = listening(ctx)

    path = ctx.state.root / "servers" / "main" / "tap.json"
    assert f"FLEETDUMP_TAP_CONFIG={path}\0".encode() in Path(f"/proc/{pid}/environ").read_bytes()
    settings = json.loads(path.read_text())
    assert settings == {
        "v": 1,
        "server": "main",
        "launch_id": result.state.launch_id,
        "ranks": 1,
        "layers": [1, 3],
        "dir": str(tmp_path / "made" / "hs"),
        "shard_bytes": 4 << 30,
        "header_bytes": 256 << 10,
        "idle_close_seconds": 2.0,
        "ring_bytes": 2 << 30,
        "device_bytes": 1 << 30,
        "threads": 8,
        "fsync": "group",
        "max_wait_seconds": 5.0,
    }
    assert (tmp_path / "made" / "hs").stat().st_mode & 0o777 == 0o700


def test_secrets_reach_the_server_but_no_file_and_no_answer(server: ServerSpec, ctx: AgentContext) -> None:
    server.args = ["--api-key", "sk-very-secret-value", "--admin-api-key=other-secret"]
    server.env = {"HF_TOKEN": "hf_secretsecretsecret"}

    result = launch(LaunchArgs(server), ctx)
    pid = listening(ctx)

    assert b"sk-very-secret-value" in Path(f"/proc/{pid}/cmdline").read_bytes()
    assert b"hf_secretsecretsecret" in Path(f"/proc/{pid}/environ").read_bytes()
    shown = repr(result) + "".join(logs(LogsArgs("main"), ctx).tail)
    stored = (ctx.state.root / "servers" / "main" / "server.json").read_text()
    for secret in ("sk-very-secret-value", "other-secret", "hf_secretsecretsecret"):
        assert secret not in shown + stored
    assert "HF_TOKEN" in stored


def test_variables_of_the_ssh_session_are_not_inherited_and_gpus_are_chosen(
    server: ServerSpec, ctx: AgentContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SSH_AUTH_SOCK", "/tmp/agent")
    monkeypatch.setenv("NCCL_DEBUG", "WARN")
    server.gpus = [2, 3]

    launch(LaunchArgs(server), ctx)

    environment = Path(f"/proc/{listening(ctx)}/environ").read_bytes()
    assert b"SSH_AUTH_SOCK" not in environment
    assert b"NCCL_DEBUG=WARN\0" in environment
    assert b"CUDA_VISIBLE_DEVICES=2,3\0" in environment


def test_a_taken_port_names_its_owner_before_anything_starts(server: ServerSpec, ctx: AgentContext) -> None:
    with socket.create_server(("127.0.0.1", server.port)):
        error = failure(LaunchArgs(server), ctx).error

    assert error.code == "conflict"
    assert f"pid {os.getpid()}" in error.why
    assert not (ctx.state.root / "servers").exists()


def test_what_is_missing_is_named_and_nothing_is_left_half_done(
    server: ServerSpec, ctx: AgentContext, tmp_path: Path
) -> None:
    cases = {
        "python": ServerSpec("main", "/no/python", server.model_path, server.port),
        "sglang": ServerSpec("main", sys.executable, server.model_path, server.port),
        "model": ServerSpec("main", server.python, "/no/model", server.port),
    }
    for spec in cases.values():
        assert failure(LaunchArgs(spec), ctx).error.code == "not_found"
    for spec in (
        ServerSpec("main", server.python, server.model_path, server.port, args=["--port", "1"]),
        ServerSpec("main", server.python, server.model_path, server.port, args=["--tp=4"]),
        ServerSpec("main", server.python, server.model_path, server.port, args=["--data_parallel_s", "2"]),
    ):
        assert failure(LaunchArgs(spec), ctx).error.code == "usage"
    assert not (ctx.state.root / "servers").exists()


def test_a_failed_replace_leaves_the_old_server_running(server: ServerSpec, ctx: AgentContext) -> None:
    first = launch(LaunchArgs(server), ctx)
    listening(ctx)
    server.model_path = "/no/model"

    assert failure(LaunchArgs(server, replace=True), ctx).error.code == "not_found"

    assert procfs.is_alive(first.state.pid, first.state.start_time)


@pytest.mark.parametrize(
    ("first", "more", "merged"),
    [
        (["--a", "1", "--b"], ["--b", "--c", "-1"], ["--a", "1", "--b", "--c", "-1"]),
        (["--chunk", "8"], ["--chunk", "-1"], ["--chunk", "8"]),
        (["--chunk=8"], ["--chunk", "-1"], ["--chunk=8"]),
        (["--b", "--b"], [], ["--b"]),
    ],
)
def test_arguments_of_the_patch_are_added_once_and_never_override(first, more, merged) -> None:
    assert merge_arguments(first, more) == merged


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("--tp-size", ["--tp-size"]),
        ("--tp", ["--tp-size"]),  # no option of SGLang, but argparse knows what is meant
        ("--tp_s", ["--tp-size"]),
        ("--model", ["--model"]),  # an option, although --model-path begins so
        ("--model-p", ["--model-path"]),
        ("--t", ["--tp-size", "--tensor-parallel-size"]),
        ("--", []),
        ("", []),
        ("--tp-size-per-node", []),
        ("tp-size", []),
    ],
)
def test_an_option_is_known_however_it_is_written(name: str, meant: list[str]) -> None:
    assert options_meant(name, ["--model", "--model-path", "--tp-size", "--tensor-parallel-size"]) == meant


def test_the_value_of_an_option_is_that_of_the_last() -> None:
    names = ("--tp-size", "--tensor-parallel-size")
    for words, value in (
        (["--tp-size", "2"], "2"),
        (["--tensor=4", "--port", "1"], "4"),
        (["--tp-size=2", "--tensor-parallel-size", "8"], "8"),
        (["--tp-sizes", "2"], "none"),
        (["--tp-size"], ""),
        (["2"], "none"),
    ):
        assert option_value(words, names, "none") == value


def test_a_configuration_file_does_not_decide_what_the_inventory_does(server: ServerSpec) -> None:
    """In SGLang the command line wins over the file of --config, where the same options may stand."""
    assert not {"--dp-size", "--pp-size"} & set(plan(LaunchArgs(server)).argv)
    server.args += ["--config", "/some/where.yaml"]
    argv = plan(LaunchArgs(server)).argv
    assert (option_value(argv, ["--dp-size"]), option_value(argv, ["--pp-size"])) == ("1", "1")


# --------------------------------------------------------------------------- stop
def test_stop_ends_a_server_and_says_so_in_its_record(server: ServerSpec, ctx: AgentContext) -> None:
    launch(LaunchArgs(server), ctx)
    listening(ctx)

    assert stop(StopArgs(), ctx).stopped == ["main"]

    record = load_record(ctx.state, "main")
    assert record is not None
    assert server_state(record).state == "stopped"
    assert stop(StopArgs(["main", "nothing"]), ctx).absent == ["main", "nothing"]


def test_what_ignores_sigterm_is_killed_after_the_grace(server: ServerSpec, ctx: AgentContext) -> None:
    server.args = ["--stubborn", "--children"]
    launch(LaunchArgs(server), ctx)
    listening(ctx)
    record = load_record(ctx.state, "main")
    assert record is not None
    assert len(living(record)) == 2

    assert stop(StopArgs(["main"], grace=0.5), ctx).killed == ["main"]

    assert living(record) == []


def test_orphans_of_a_dead_launcher_are_found_by_their_session(
    server: ServerSpec, ctx: AgentContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fleetdump.agent.stop.ORPHAN_GRACE", 0.3)
    server.args = ["--children"]
    launch(LaunchArgs(server), ctx)
    pid = listening(ctx)
    os.kill(pid, signal.SIGKILL)
    wait_for(lambda: not procfs.is_alive(pid))
    record = load_record(ctx.state, "main")
    assert record is not None
    assert len(living(record)) == 1
    assert server_state(record).state == "died"

    assert stop(StopArgs(), ctx).killed == ["main"]

    assert living(record) == []


def test_launching_again_clears_what_a_dead_launcher_left(
    server: ServerSpec, ctx: AgentContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also with other arguments and without ``replace``: nobody can use the remains, so nothing is replaced."""
    monkeypatch.setattr("fleetdump.agent.stop.ORPHAN_GRACE", 0.3)
    server.args = ["--children"]
    launch(LaunchArgs(server), ctx)
    pid = listening(ctx)
    before = load_record(ctx.state, "main")
    assert before is not None
    os.kill(pid, signal.SIGKILL)
    wait_for(lambda: not procfs.is_alive(pid))
    server.args = []

    again = launch(LaunchArgs(server), ctx)

    assert not again.reused
    assert living(before) == []


@pytest.mark.parametrize("field", ["start_time", "boot"])
def test_a_process_that_only_has_the_number_of_our_server_is_left_alone(
    server: ServerSpec, ctx: AgentContext, field: str
) -> None:
    launch(LaunchArgs(server), ctx)
    pid = listening(ctx)
    record = load_record(ctx.state, "main")
    assert record is not None
    right = (record.start_time, record.boot)
    record.start_time, record.boot = (1, record.boot) if field == "start_time" else (record.start_time, "other")
    save_record(ctx.state, record)

    assert stop(StopArgs(), ctx).absent == ["main"]

    assert procfs.is_alive(pid)
    record.start_time, record.boot = right
    save_record(ctx.state, record)


def test_a_server_whose_launch_was_cut_off_is_found_by_its_launch_id(server: ServerSpec, ctx: AgentContext) -> None:
    launch(LaunchArgs(server), ctx)
    pid = listening(ctx)
    record = load_record(ctx.state, "main")
    assert record is not None
    record.pid = record.start_time = 0
    save_record(ctx.state, record)

    assert stop(StopArgs(), ctx).stopped == ["main"]

    assert not procfs.is_alive(pid)


def test_stop_names_the_extractions_that_wait_for_the_server(server: ServerSpec, ctx: AgentContext) -> None:
    launch(LaunchArgs(server), ctx)
    listening(ctx)
    driver = DriverRecord(os.getpid(), procfs.start_time(os.getpid()) or 0, 0.0)
    for run, name, record in (
        ("r1", "main", driver),
        ("r2", "main", replace(driver, start_time=1)),
        ("r1", "main.2", driver),
        ("r3", "b", driver),
    ):
        write_json(ctx.state.share(run, name) / "driver.json", record)
        write_json(ctx.state.share(run, name) / "share.json", {})

    assert stop(StopArgs(), ctx).waiting == ["r1 on main", "r1 on main.2"]
    assert stop(StopArgs(), ctx).waiting == []


# --------------------------------------------------------------------------- status, logs
def test_status_tells_states_and_the_size_of_our_files(server: ServerSpec, ctx: AgentContext) -> None:
    empty = status(StatusArgs(), ctx)
    assert (empty.servers, empty.state_bytes) == ([], 0)
    assert not ctx.state.root.exists()

    launch(LaunchArgs(server), ctx)
    listening(ctx)
    record = load_record(ctx.state, "main")
    assert record is not None
    record.ready, record.phase = True, "serving"
    save_record(ctx.state, record)

    answer = status(StatusArgs(server.interpreter), ctx)
    assert [(s.state, s.phase) for s in answer.servers] == [("ready", "serving")]
    assert answer.servers[0].uptime > 0
    assert answer.state_bytes > 100
    assert answer.patch is not None
    assert answer.patch.state == "clean"
    os.kill(record.pid, signal.SIGKILL)
    wait_for(lambda: status(StatusArgs(), ctx).servers[0].state == "died")


def write_log(ctx: AgentContext, text: bytes) -> Path:
    path = ctx.state.server("main") / "server.log"
    path.write_bytes(text)
    return path


@pytest.mark.parametrize(
    ("text", "lines", "tail", "total"),
    [
        (b"", 5, [], 0),
        (b"a\nb\nc\n", 2, ["b", "c"], 3),
        (b"a\nb\nc", 2, ["b", "c"], 3),
        (b"a\n", 0, [], 1),
        (b"x" * (1 << 20) + b"\n" + b"y" * (1 << 20) + b"\nend\n", 2, ["y" * (1 << 20), "end"], 3),
        (b"\xff\n", 1, ["\ufffd"], 1),
        (b"token: --api-key abc123\n", 1, ["token: --api-key ***"], 1),
    ],
)
def test_logs_tail(ctx: AgentContext, text: bytes, lines: int, tail: list[str], total: int) -> None:
    write_log(ctx, text)

    result = logs(LogsArgs("main", lines), ctx)

    assert (result.tail, result.lines) == (tail, total)


def test_each_state_of_a_progress_bar_is_a_line_however_the_log_is_asked_for(ctx: AgentContext) -> None:
    text = b"[2026-11-30 00:00:00] Load weight begin.\r\nshards: 0%\rshards: 50%\rshards: 100%\n"
    expected = ["[2026-11-30 00:00:00] Load weight begin.", "shards: 0%", "shards: 50%", "shards: 100%"]
    path = write_log(ctx, text)
    assert logs(LogsArgs("main", 9), ctx).tail == expected
    assert logs(LogsArgs("main", 9, rank=0), ctx).tail == expected
    seen: list[str] = []
    ctx.emit = lambda event, **fields: seen.append(fields["line"])  # type: ignore[method-assign]
    thread = threading.Thread(target=logs, args=(LogsArgs("main", 1, follow=True), ctx))
    thread.start()
    wait_for(lambda: seen == expected[-1:], 60.0)
    time.sleep(0.3)
    with path.open("ab") as log:
        log.write(text)
    wait_for(lambda: seen[1:] == expected, 60.0)
    ctx.deadline = time.monotonic()
    thread.join()


def test_a_rank_that_the_server_has_not_is_said(ctx: AgentContext) -> None:
    write_log(ctx, b"x\n")
    record = ServerRecord("main", 1, 1, "l", 1, "127.0.0.1", "python3", "/m", 2, [], [], "", "i", 0.0, ranks=2)
    save_record(ctx.state, record)
    with pytest.raises(AgentFailure, match="server main has no rank 3") as caught:
        logs(LogsArgs("main", rank=3), ctx)
    assert "ranks 0 to 1" in caught.value.error.why
    assert logs(LogsArgs("main", rank=1), ctx).tail == []


def test_logs_of_an_unknown_server(ctx: AgentContext) -> None:
    with pytest.raises(AgentFailure) as caught:
        logs(LogsArgs("nothing"), ctx)
    assert caught.value.error.code == "not_found"


def test_following_survives_a_rotation_and_loses_no_line(tmp_path: Path) -> None:
    ctx = context(tmp_path)
    path = write_log(ctx, b"old 1\nold 2\n")
    seen: list[str] = []
    ctx.emit = lambda event, **fields: seen.append(fields["line"])  # type: ignore[method-assign]
    thread = threading.Thread(target=logs, args=(LogsArgs("main", 1, follow=True), ctx))
    thread.start()
    wait_for(lambda: seen == ["old 2"])
    time.sleep(0.3)

    with path.open("ab") as log:
        log.write(b"new 1\nhalf")
        log.flush()
        wait_for(lambda: len(seen) == 2)
        log.write(b" a line\nunfinished")
    os.replace(path, f"{path}.1")
    path.write_bytes(b"next 1\n")

    wait_for(lambda: len(seen) == 5)
    assert seen == ["old 2", "new 1", "half a line", "unfinished", "next 1"]
    ctx.deadline = time.monotonic()
    thread.join()


def test_a_server_outlives_the_process_that_launched_it(server: ServerSpec, ctx: AgentContext, tmp_path: Path) -> None:
    code = (
        "import sys; sys.path.insert(0, sys.argv[1])\n"
        "from pathlib import Path; from tests.unit.engineinstall import context\n"
        "from fleetdump.agent.launch import launch\nfrom fleetdump.agent.servermessages import LaunchArgs\n"
        "from fleetdump.agent.specs import ServerSpec\n"
        "spec = ServerSpec('main', sys.argv[2], sys.argv[3], int(sys.argv[4]))\n"
        "launch(LaunchArgs(spec), context(Path(sys.argv[5])))\n"
    )
    root = str(Path(__file__).parents[2])
    arguments = [root, server.python, server.model_path, str(server.port), str(tmp_path)]
    subprocess.run([sys.executable, "-c", code, *arguments], check=True, start_new_session=True)

    pid = listening(ctx)

    stat = procfs.read_stat(pid)
    assert stat is not None
    assert stat.ppid != os.getpid()
    assert stop(StopArgs(), ctx).stopped == ["main"]
