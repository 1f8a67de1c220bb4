"""State files that are broken, of another version, or that cannot be written: what goes on, and what names the file."""

from __future__ import annotations

import contextlib
import errno
import io
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from fleetdump.agent import audit, detach, healthy, jsonl, lock, main, restart, server, share
from fleetdump.agent.context import AgentContext, State
from fleetdump.agent.formats import RestartLine
from fleetdump.agent.hostmessages import StatusArgs
from fleetdump.agent.launch import made_dirs
from fleetdump.agent.protocol import AgentFailure, Request, to_json
from fleetdump.agent.server import ServerRecord, load_record, load_records, save_record
from fleetdump.agent.servermessages import EvidenceArgs, LogsArgs, RunRestart, StopArgs
from fleetdump.agent.share import Share, ShareSpec
from fleetdump.agent.specs import CaptureSpec
from fleetdump.agent.status import logs, status
from fleetdump.agent.stop import stop
from fleetdump.agent.targets import find_target

BROKEN = {
    "empty": b"",
    "torn": b'{"v": 1, "na',
    "no object": b"[1]",
    "null": b"null",
    "no text": b"\xff\xfe\x00",
    "wrong type": b'{"v": 1, "name": 7, "pid": "x", "run": 5, "dirs": 3, "since": {}}',
    "too deep": b"[" * 100_000,
    "other version": b'{"v": 2}',
}
broken = pytest.mark.parametrize("data", BROKEN.values(), ids=BROKEN.keys())


@pytest.fixture
def ctx(tmp_path: Path) -> AgentContext:
    return AgentContext(
        Request("stop", {}, operator="tester@here"), State(tmp_path / "state"), io.BytesIO(), io.BytesIO()
    )


@pytest.fixture
def sleeper(ctx: AgentContext, tmp_path: Path) -> Iterator[ServerRecord]:
    """Server ``main``: a process in its own session, on record."""
    log = ctx.state.server("main") / "server.log"
    argv = [sys.executable, "-S", "-c", "import time; time.sleep(600)"]
    pid, started = detach.spawn_detached(argv, log_path=log)
    record = ServerRecord(
        "main", pid, started, "abcd", 1, "127.0.0.1", sys.executable, "/m", 1, [], [], str(log), "id", time.time(),
        boot=server.boot_id(),
    )  # fmt: skip
    save_record(ctx.state, record)
    yield record
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)
    with contextlib.suppress(ChildProcessError):
        os.waitpid(pid, 0)


def submitted(state: State, run: str) -> Share:
    made = Share(state.share(run, "main"))
    made.save_spec(ShareSpec(run, "main", "00", 3, CaptureSpec([1], "/nowhere"), 0, 10, 3, "", "", "", 1.0))
    return made


def broken_record(state: State, data: bytes, name: str = "bad") -> Path:
    path = state.server(name) / "server.json"
    path.write_bytes(data)
    return path


# --------------------------------------------------------------------------- advice: as if it were not there
@broken
@pytest.mark.parametrize("name", ["progress.json", "driver.json"])
def test_a_share_goes_on_without_its_advice(ctx: AgentContext, name: str, data: bytes) -> None:
    (submitted(ctx.state, "r1").root / name).write_bytes(data)
    submitted(ctx.state, "r2")
    found = status(StatusArgs(), ctx).shares
    assert [(one.run, one.server, one.state) for one in found] == [("r1", "main", "stopped"), ("r2", "main", "stopped")]


def test_a_living_drivers_progress_is_read(ctx: AgentContext) -> None:
    made = submitted(ctx.state, "r1")
    claim = made.claim()
    assert claim is not None
    with claim:
        (made.root / "progress.json").write_bytes(b"")
        assert made.progress().driver_alive


@broken
def test_healthy_starts_that_can_be_read_still_count(ctx: AgentContext, data: bytes) -> None:
    start = healthy.HealthyStart("k", 62, 1.0, {}, "sglang 0.5.20")
    assert healthy.remember(ctx.state, start)
    with open(ctx.state.root / healthy.FILE, "ab") as file:
        file.write(data + b"\n" + b'{"key": "k", "v": 1}\n')
    assert healthy.remember(ctx.state, start)
    known = healthy.profile(ctx.state, "k")
    assert known is not None
    assert known.starts == 2


def test_a_healthy_file_that_cannot_be_opened(ctx: AgentContext) -> None:
    (ctx.state.directory() / healthy.FILE).mkdir()
    assert healthy.profile(ctx.state, "k") is None
    assert not healthy.remember(ctx.state, healthy.HealthyStart("k", 62, 1.0, {}, ""))


@broken
def test_made_dirs_are_advice(ctx: AgentContext, data: bytes) -> None:
    (ctx.state.directory() / "made_dirs.json").write_bytes(data)
    assert made_dirs(ctx.state) == []


@broken
def test_a_holder_that_nobody_can_read_holds_nothing(ctx: AgentContext, data: bytes) -> None:
    (ctx.state.directory("lock") / "holder.json").write_bytes(data)
    with lock.host_lock(ctx):
        holder = lock.read_holder(ctx.state.root / "lock")
    assert holder is not None
    assert holder.pid == os.getpid()


@pytest.mark.parametrize("since", ["-1e300", "1e300", "NaN", "-Infinity", "0"])
def test_an_absurd_since_is_not_told(ctx: AgentContext, since: str) -> None:
    with lock.host_lock(ctx):
        path = ctx.state.root / "lock" / "holder.json"
        data = json.loads(path.read_text())
        path.write_text(json.dumps({**data, "since": "?"}).replace('"?"', since))
        with pytest.raises(AgentFailure) as caught, lock.host_lock(ctx):
            pass
    assert caught.value.error.code == "locked"
    assert len(caught.value.error.why) < 100
    assert "since" not in caught.value.error.why


# --------------------------------------------------------------------------- records: named, and in nobody's way
@broken
def test_a_broken_server_record_is_named(ctx: AgentContext, data: bytes) -> None:
    path = broken_record(ctx.state, data)
    for read in (lambda: load_record(ctx.state, "bad"), lambda: load_records(ctx.state)):
        with pytest.raises(AgentFailure) as caught:
            read()
        error = caught.value.error
        assert error.where == str(path)
        assert (error.code, bool(error.why), bool(error.next_step)) == ("failed", True, True)
        assert ("another version" in error.why) == (data == BROKEN["other version"])


@broken
def test_a_broken_share_record_is_named(ctx: AgentContext, data: bytes) -> None:
    made = submitted(ctx.state, "r1")
    (made.root / "share.json").write_bytes(data)
    with pytest.raises(AgentFailure) as caught:
        made.spec()
    assert caught.value.error.where == str(made.root / "share.json")
    assert caught.value.error.next_step
    (shown,) = status(StatusArgs(), ctx).shares
    assert str(made.root / "share.json") in shown.detail


def test_a_record_of_another_servers_name_is_broken(ctx: AgentContext, sleeper: ServerRecord) -> None:
    path = broken_record(ctx.state, json.dumps({**to_json(sleeper), "name": "../x"}).encode())
    with pytest.raises(AgentFailure) as caught:
        load_record(ctx.state, "bad")
    assert caught.value.error.where == str(path)


@broken
def test_status_lists_the_others_and_says_which_is_broken(
    ctx: AgentContext, sleeper: ServerRecord, data: bytes
) -> None:
    path = broken_record(ctx.state, data)
    found = status(StatusArgs(), ctx).servers
    assert [(one.name, one.state) for one in found] == [("bad", "broken"), ("main", "starting")]
    assert str(path) in found[0].detail


def test_stop_of_another_server_works(ctx: AgentContext, sleeper: ServerRecord) -> None:
    broken_record(ctx.state, b"")
    assert stop(StopArgs(["main"]), ctx).stopped == ["main"]


def test_what_died_is_stopped_too(ctx: AgentContext, sleeper: ServerRecord) -> None:
    """So that no run's controller brings it back, nor is its later stop taken for another one."""
    os.killpg(sleeper.pid, signal.SIGKILL)
    os.waitpid(sleeper.pid, 0)
    wanted = RunRestart("r1", sleeper.launch_id, "", "")
    restart._require_launch(sleeper, wanted)
    assert stop(StopArgs(["main"]), ctx).absent == ["main"]
    record = load_record(ctx.state, "main")
    assert record is not None
    assert record.stopped_at
    with pytest.raises(AgentFailure, match="left alone"):
        restart._require_launch(record, wanted)
    stop(StopArgs(["main"]), ctx)
    assert load_record(ctx.state, "main") == record


def test_stop_of_all_stops_the_others_and_then_names_the_broken(ctx: AgentContext, sleeper: ServerRecord) -> None:
    path = broken_record(ctx.state, b"")
    with pytest.raises(AgentFailure) as caught:
        stop(StopArgs(), ctx)
    assert server.living(sleeper) == []
    assert caught.value.error.where == str(path)
    assert "main" in caught.value.error.what


def test_logs_and_evidence_of_others_go_on(ctx: AgentContext, sleeper: ServerRecord) -> None:
    path = broken_record(ctx.state, b"")
    assert find_target(EvidenceArgs(server="main"), ctx).pid == sleeper.pid
    with pytest.raises(AgentFailure) as caught:
        find_target(EvidenceArgs(), ctx)
    assert str(path) in caught.value.error.why
    for look in (
        lambda: logs(LogsArgs("none"), ctx),
        lambda: find_target(EvidenceArgs(server="none"), ctx),
    ):
        with pytest.raises(AgentFailure) as caught:
            look()
        assert caught.value.error.code == "not_found"
        assert "main" in caught.value.error.why


# --------------------------------------------------------------------------- what is no plain file
@pytest.mark.parametrize("name", ["progress.json", "driver.json", "share.json", "../order.json", "../restarts.jsonl"])
def test_a_pipe_among_the_files_of_a_run_is_not_waited_for(ctx: AgentContext, name: str) -> None:
    path = submitted(ctx.state, "r1").root / name
    path.unlink(missing_ok=True)
    os.mkfifo(path)
    within_a_minute(lambda: status(StatusArgs(), ctx))


@pytest.mark.parametrize(
    "name",
    [
        "servers/main/server.json",
        "controllers/r1/controller.json",
        "lock/holder.json",
        "lease/holder.json",
        audit.FILE,
        healthy.FILE,
    ],
)
def test_a_pipe_in_the_state_directory_is_not_waited_for(ctx: AgentContext, name: str) -> None:
    path = ctx.state.root / name
    path.parent.mkdir(parents=True)
    os.mkfifo(path)
    within_a_minute(
        lambda: (
            status(StatusArgs(), ctx),
            healthy.profile(ctx.state, "k"),
            audit.last_operator(ctx.state, ["stop"], 0.0),
        )
    )


def within_a_minute(look: Callable[[], object]) -> None:
    """Fails instead of hanging: an ``open`` that waits for the other end of a pipe is interrupted."""

    def hangs(*_: object) -> None:
        raise AssertionError("it waits")

    before = signal.signal(signal.SIGALRM, hangs)
    signal.alarm(60)
    try:
        look()
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def test_a_record_of_absurd_size_is_not_read(ctx: AgentContext) -> None:
    path = broken_record(ctx.state, b"")
    with open(path, "r+b") as file:
        file.truncate(jsonl.SMALL + 1)
    with pytest.raises(AgentFailure, match=r"server\.json cannot be read") as caught:
        load_record(ctx.state, "bad")
    assert "larger than" in caught.value.error.why


# --------------------------------------------------------------------------- restarts of a run
@broken
def test_restarts_that_cannot_be_read_count(ctx: AgentContext, data: bytes) -> None:
    made = submitted(ctx.state, "r1")
    share.note_restart(made.root.parent, RestartLine("main", "L1", "", "", "me", 1.0))
    with open(made.root.parent / share.RESTARTS, "ab") as file:
        file.write(data + b"\n")
    share.note_restart(made.root.parent, RestartLine("other", "L1", "", "", "me", 1.0))
    share.note_restart(made.root.parent, RestartLine("main", "L2", "", "s7", "me", 1.0))
    (told,) = status(StatusArgs(), ctx).shares
    assert told.restarts == 2


# --------------------------------------------------------------------------- a full disk
def full(*_: Any, **__: Any) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.parametrize("where", ["lock", "audit", "record", "all"])
@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT, errno.EROFS])
def test_a_server_is_stopped_on_a_full_disk(
    ctx: AgentContext,
    sleeper: ServerRecord,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    where: str,
    code: int,
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise OSError(code, os.strerror(code))

    if where in ("lock", "all"):
        monkeypatch.setattr(lock, "_acquire", fail)
    if where in ("audit", "all"):
        monkeypatch.setattr(audit, "_append", fail)
    if where in ("record", "all"):
        monkeypatch.setattr(server, "write_json", fail)
    main.serve(ctx)
    answer = json.loads(ctx.stdout.getvalue())  # type: ignore[attr-defined]
    assert answer["error"] is None
    assert answer["result"]["stopped"] == ["main"]
    assert server.living(sleeper) == []
    said = capsys.readouterr().err
    assert os.strerror(code) in said
    assert str(ctx.state.root) in said


def test_a_full_disk_does_not_take_a_lock_from_its_holder(
    ctx: AgentContext, sleeper: ServerRecord, monkeypatch: pytest.MonkeyPatch
) -> None:
    with lock.host_lock(ctx):
        monkeypatch.setattr(lock, "_acquire", full)
        main.serve(ctx)
    assert json.loads(ctx.stdout.getvalue())["error"]["code"] == "locked"  # type: ignore[attr-defined]
    assert server.living(sleeper)


@pytest.mark.parametrize("what", ["lock", "audit", "record", "share"])
def test_an_error_of_a_full_disk_names_the_path(
    ctx: AgentContext, sleeper: ServerRecord, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    made = submitted(ctx.state, "r1")
    spec = made.spec()
    assert spec is not None
    ctx.request.verb = "clean"
    monkeypatch.setattr(lock.json, "dumps", full) if what == "lock" else None
    monkeypatch.setattr(audit, "_append", full)
    monkeypatch.setattr(server, "write_json", full)
    monkeypatch.setattr(share, "write_json", full)

    def take() -> None:
        with lock.host_lock(ctx):
            pass

    actions = {
        "lock": take,
        "audit": lambda: audit.record(ctx, ok=True, started=1.0, seconds=1.0),
        "record": lambda: save_record(ctx.state, sleeper),
        "share": lambda: made.save_spec(spec),
    }
    with pytest.raises(OSError, match="No space left") as caught:
        actions[what]()
    assert str(ctx.state.root) in str(caught.value.filename)
