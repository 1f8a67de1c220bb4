"""The host's lock: who holds it is asked of the kernel; damage is named; ``unlock`` shows and removes."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from fleetdump.agent import lock
from fleetdump.agent.context import AgentContext
from fleetdump.agent.hostmessages import CleanArgs, CleanResult, UnlockArgs, UnlockResult
from fleetdump.agent.protocol import AgentFailure, Request, to_json
from fleetdump.agent.unlock import unlock
from fleetdump.fleet import connect
from fleetdump.inventory import HostConfig
from tests.unit.engineinstall import context, wait_for

HOLDER = """
import sys, time
from pathlib import Path
from fleetdump.agent import lock
from fleetdump.agent.context import AgentContext, State
from fleetdump.agent.protocol import Request
ctx = AgentContext(Request("launch", {}, operator="anna@desk"), State(Path(sys.argv[1])))
with lock.host_lock(ctx):
    print("held", flush=True)
    time.sleep(600)
"""


@pytest.fixture
def ctx(tmp_path: Path) -> AgentContext:
    return context(tmp_path)


@pytest.fixture
def hold(ctx: AgentContext) -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Another process that holds the lock."""
    held: list[subprocess.Popen[str]] = []

    def begin(*before: str) -> subprocess.Popen[str]:
        argv = [*before, sys.executable, "-c", HOLDER, str(ctx.state.root)]
        process = subprocess.Popen(argv, stdout=subprocess.PIPE, text=True, start_new_session=True)
        held.append(process)
        assert process.stdout is not None
        assert process.stdout.readline() == "held\n"
        return process

    yield begin
    for process in held:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def refusal(ctx: AgentContext) -> AgentFailure:
    with pytest.raises(AgentFailure) as caught, lock.host_lock(ctx):
        pass
    return caught.value


def test_a_living_holder_is_named_and_its_end_frees_the_lock(ctx: AgentContext, hold: Callable[..., object]) -> None:
    process = hold()
    error = refusal(ctx).error
    assert error.code == "locked"
    assert f"anna@desk runs launch there since 0 s (pid {process.pid})" in error.why
    assert "unlock" in error.next_step
    process.kill()  # type: ignore[attr-defined]
    process.wait()  # type: ignore[attr-defined]
    with lock.host_lock(ctx):
        pass


@pytest.mark.skipif(os.geteuid() != 0, reason="a pid namespace needs root")
def test_a_holder_in_another_pid_namespace_holds(ctx: AgentContext, hold: Callable[..., object]) -> None:
    """As in a container that shares the state directory: its pids mean nothing here, and must not be asked."""
    hold("unshare", "--pid", "--fork", "--kill-child", "--mount-proc")
    holder = lock.read_holder(ctx.state.root / "lock")
    assert holder is not None
    assert not lock.is_alive(holder.pid, holder.start_time), "by its pid it would be taken for dead"
    assert refusal(ctx).error.code == "locked"
    assert unlock(UnlockArgs(), ctx).alive


def test_a_file_system_without_flock_falls_back_to_the_pid(ctx: AgentContext, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr(fcntl, "flock", refuse)
    with lock.host_lock(ctx):
        assert lock.held_by(ctx.state.root / "lock").endswith(f"(pid {os.getpid()})")


# --------------------------------------------------------------------------- damage
def _file(directory: Path) -> None:
    directory.write_text("not a lock")


def _link(directory: Path) -> None:
    (directory.parent / "elsewhere").mkdir()
    directory.symlink_to("elsewhere")


def _dangling(directory: Path) -> None:
    directory.symlink_to("nowhere")


def _guard(directory: Path) -> None:
    directory.with_name("lock.guard").mkdir()


def _guard_link(directory: Path) -> None:
    (directory.parent / "elsewhere").mkdir()
    directory.with_name("lock.guard").symlink_to("elsewhere")


@pytest.mark.parametrize("damage", [_file, _link, _dangling, _guard, _guard_link])
def test_what_stands_in_the_locks_place_is_named_and_unlock_removes_it(
    ctx: AgentContext, damage: Callable[[Path], None]
) -> None:
    directory = ctx.state.directory() / "lock"
    damage(directory)
    error = refusal(ctx).error
    assert error.code == "failed"
    assert "unlock --force" in error.next_step
    looked = unlock(UnlockArgs(), ctx)
    assert (looked.state, bool(looked.damage)) == ("held", True)
    assert unlock(UnlockArgs(force=True), ctx).state == "removed"
    with lock.host_lock(ctx):
        pass
    assert not (ctx.state.root / "elsewhere").exists() or not any((ctx.state.root / "elsewhere").iterdir())


def test_a_folder_for_an_audit_log_is_named_before_anything_changes(tmp_path: Path) -> None:
    """Through a real call: what the user sees is no traceback."""
    state = str(tmp_path / "state")
    config = HostConfig(name="here", address="", connection="local", state_dir=state, agent_python=sys.executable)
    with connect(config) as host:
        host.call(UnlockArgs(), UnlockResult, verb="unlock")
        (root,) = [path.parent for path in (tmp_path / "state").glob("*/agent")]
        (root / "audit.jsonl").mkdir()
        with pytest.raises(Exception, match="the audit log cannot be written") as caught:
            host.call(CleanArgs(), CleanResult, verb="clean")
    assert "Traceback" not in str(caught.value)
    assert "mv " in caught.value.next_step  # type: ignore[attr-defined]


# --------------------------------------------------------------------------- the guard of a take-over
FLOCK = """
import fcntl, os, sys, time
file = open(sys.argv[1], "ab")
fcntl.flock(file, fcntl.LOCK_EX)
if len(sys.argv) > 2 and os.fork():
    os._exit(0)
print(os.getpid(), flush=True)
sys.stdin.read()
"""


@contextlib.contextmanager
def flocked(path: Path, *more: str) -> Iterator[int]:
    """Another process has the file's lock, until the end or until its stdin is closed; gives its pid."""
    argv = [sys.executable, "-c", FLOCK, str(path), *more]
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        yield int(process.stdout.readline())


def test_the_holder_of_a_lock_is_known_from_the_kernel(tmp_path: Path) -> None:
    path = tmp_path / "file"
    assert lock.flock_holder(path) == 0
    with flocked(path) as pid:
        assert lock.flock_holder(path) == pid
        (tmp_path / "other").touch()
        assert lock.flock_holder(tmp_path / "other") == 0
    assert lock.flock_holder(path) == 0
    with flocked(path, "as a child whose parent took it"):
        assert lock.writer_lives(path)
        assert lock.flock_holder(path) == 0, "the number that the kernel gives is of a process that has ended"


def test_a_take_over_that_hangs_is_named_and_not_waited_for_for_ever(
    ctx: AgentContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    dead = lock.Holder("ghost@desk", "here", 2**22 + 1, 1, "launch", time.time() - 60)
    (ctx.state.directory("lock") / "holder.json").write_text(json.dumps(to_json(dead)))
    guard = ctx.state.root / "lock.guard"
    monkeypatch.setattr(lock, "GUARD_SECONDS", 0.3)
    with flocked(guard) as pid:
        error = refusal(ctx).error
        assert (error.code, error.where) == ("failed", str(guard))
        assert f"process {pid} has the lock" in error.why
        assert f"kill -9 {pid}" in error.next_step
        with pytest.raises(AgentFailure, match="was not given back"):
            unlock(UnlockArgs(), ctx)
    with lock.host_lock(ctx):
        pass


def test_a_take_over_that_ends_is_waited_for(ctx: AgentContext) -> None:
    guard = ctx.state.directory() / "lock.guard"
    with contextlib.ExitStack() as held:
        held.enter_context(flocked(guard))
        timer = threading.Timer(0.3, held.close)
        timer.start()
        with lock.takeover_guard(ctx.state.root / "lock"):
            pass
        timer.join()


# --------------------------------------------------------------------------- unlock
def test_a_free_host(ctx: AgentContext) -> None:
    assert unlock(UnlockArgs(), ctx) == UnlockResult("free")


def test_a_dead_holder_is_shown_and_removed(ctx: AgentContext) -> None:
    dead = lock.Holder("ghost@desk", "here", 2**22 + 1, 1, "launch", time.time() - 60)
    (ctx.state.directory("lock") / "holder.json").write_text(json.dumps(to_json(dead)))
    result = unlock(UnlockArgs(), ctx)
    assert (result.state, result.operator, result.pid, result.alive) == ("removed", "ghost@desk", 2**22 + 1, False)
    assert unlock(UnlockArgs(), ctx).state == "free"
    (line,) = (ctx.state.root / "audit.jsonl").read_text().splitlines()
    assert json.loads(line)["ok"]


def test_a_living_holder_is_left_unless_forced(ctx: AgentContext, hold: Callable[..., object]) -> None:
    process = hold()
    result = unlock(UnlockArgs(), ctx)
    assert (result.state, result.operator, result.alive) == ("held", "anna@desk", True)
    assert not (ctx.state.root / "audit.jsonl").exists()
    forced = unlock(UnlockArgs(force=True), ctx)
    assert (forced.state, forced.alive, process.poll()) == ("removed", True, None)  # type: ignore[attr-defined]
    with lock.host_lock(ctx):
        pass


def test_a_holder_that_loses_its_lock_by_force_does_not_take_the_next_ones(ctx: AgentContext) -> None:
    """Its release must not remove the lock that somebody took meanwhile."""
    other = AgentContext(Request("revert", {}, operator="bert@desk"), ctx.state)
    directory = ctx.state.root / "lock"
    with lock.host_lock(ctx):
        unlock(UnlockArgs(force=True), ctx)
        pid = os.fork()
        if pid == 0:
            with lock.host_lock(other):
                (ctx.state.root / "in").touch()
                time.sleep(600)
            os._exit(0)
        wait_for((ctx.state.root / "in").exists, 60.0)
    try:
        holder = lock.read_holder(directory)
        assert holder is not None
        assert holder.operator == "bert@desk"
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
