"""Restart: the very command line and environment again, or a refusal that says why; real processes."""

from __future__ import annotations

import os
import signal
from dataclasses import replace
from pathlib import Path

import pytest

from fleetdump.agent import gpumemory, procfs
from fleetdump.agent.context import AgentContext
from fleetdump.agent.launch import launch
from fleetdump.agent.protocol import AgentFailure
from fleetdump.agent.restart import restart
from fleetdump.agent.server import load_record, save_record
from fleetdump.agent.servermessages import LaunchArgs, RestartArgs, StopArgs
from fleetdump.agent.specs import CaptureSpec, ServerSpec
from fleetdump.agent.stop import stop
from tests.unit.engineinstall import Install, wait_for
from tests.unit.test_server import ctx, engine, listening, server

__all__ = ["ctx", "engine", "server"]


def environ(pid: int) -> dict[str, str]:
    pairs = Path(f"/proc/{pid}/environ").read_text().split("\0")
    return dict(pair.split("=", 1) for pair in pairs if "=" in pair)


def again(ctx: AgentContext) -> int:
    """Restart server main; its new pid, once it listens."""
    result = restart(RestartArgs("main", 30.0), ctx)
    record = load_record(ctx.state, "main")
    assert record is not None
    assert result.launched.state.pid == record.pid
    wait_for(lambda: (owner := procfs.port_owner(record.port)) is not None and owner.pid == record.pid, 60.0)
    return record.pid


def refusal(ctx: AgentContext, name: str = "main") -> AgentFailure:
    with pytest.raises(AgentFailure) as caught:
        restart(RestartArgs(name), ctx)
    return caught.value


def test_a_living_server_comes_back_as_it_was_with_its_secrets(server: ServerSpec, ctx: AgentContext) -> None:
    secret = replace(server, args=["--api-key", "s3cret"], env={"HF_TOKEN": "hf_abcdefghijklmn"})
    launch(LaunchArgs(secret), ctx)
    first = listening(ctx)
    before, argv = environ(first), procfs.read_cmdline(first)
    log = Path(ctx.state.root / "servers/main/server.log")
    old = log.read_bytes()
    second = again(ctx)
    after = environ(second)
    assert (second != first, procfs.is_alive(first)) == (True, False)
    assert procfs.read_cmdline(second) == argv
    ids = before.pop("FLEETDUMP_LAUNCH_ID"), after.pop("FLEETDUMP_LAUNCH_ID")
    assert ids[0] != ids[1]
    assert after == before
    record = load_record(ctx.state, "main")
    assert record is not None
    assert (record.launch_id, record.ready, record.stopped_at) == (ids[1], False, 0.0)
    assert "s3cret" not in (ctx.state.root / "servers/main/server.json").read_text()
    assert log.with_name("server.log.1").read_bytes().startswith(old)


def test_the_tap_learns_its_new_launch(server: ServerSpec, ctx: AgentContext, tmp_path: Path) -> None:
    launch(LaunchArgs(server, capture=CaptureSpec([1], str(tmp_path / "hs"))), ctx)
    listening(ctx)
    again(ctx)
    record = load_record(ctx.state, "main")
    assert record is not None
    assert f'"launch_id":"{record.launch_id}"' in (ctx.state.root / "servers/main/tap.json").read_text()


def test_a_dead_server_without_secrets_comes_back(server: ServerSpec, ctx: AgentContext) -> None:
    launch(LaunchArgs(server), ctx)
    first = listening(ctx)
    os.killpg(first, signal.SIGKILL)
    wait_for(lambda: not procfs.is_alive(first), 60.0)
    assert again(ctx) != first


@pytest.mark.parametrize("log", ["", "/", "elsewhere/server.log"])
def test_a_record_that_names_no_log_of_ours_does_not_keep_a_server_down(
    server: ServerSpec, ctx: AgentContext, tmp_path: Path, log: str
) -> None:
    launch(LaunchArgs(server, capture=CaptureSpec([1], str(tmp_path / "hs"))), ctx)
    listening(ctx)
    stop(StopArgs(["main"]), ctx)
    record = load_record(ctx.state, "main")
    assert record is not None
    save_record(ctx.state, replace(record, log=log))
    pid = again(ctx)
    fresh = load_record(ctx.state, "main")
    assert fresh is not None
    assert fresh.log == record.log
    assert environ(pid)["FLEETDUMP_TAP_CONFIG"] == str(ctx.state.root / "servers/main/tap.json")


@pytest.mark.parametrize(
    ("changes", "why"),
    [({"env": {"HF_TOKEN": "hf_abcdefghijklmn"}}, "HF_TOKEN"), ({"args": ["--api-key", "s3cret"]}, "secret argument")],
)
def test_a_dead_server_with_a_secret_is_for_deploy(
    server: ServerSpec, ctx: AgentContext, changes: dict[str, object], why: str
) -> None:
    launch(LaunchArgs(replace(server, **changes)), ctx)  # type: ignore[arg-type]
    listening(ctx)
    stop(StopArgs(["main"]), ctx)
    error = refusal(ctx).error
    assert error.code == "conflict"
    assert why in error.why
    assert "deploy" in error.next_step


def test_a_process_that_is_not_what_was_launched_is_left_alone(server: ServerSpec, ctx: AgentContext) -> None:
    launch(LaunchArgs(server), ctx)
    pid = listening(ctx)
    record = load_record(ctx.state, "main")
    assert record is not None
    save_record(ctx.state, replace(record, argv=[*record.argv, "--other"]))
    assert refusal(ctx).error.code == "conflict"
    assert procfs.is_alive(pid)


def test_what_was_never_launched(ctx: AgentContext) -> None:
    assert refusal(ctx, "none").error.code == "not_found"


# --------------------------------------------------------------------------- GPU memory
@pytest.fixture
def nvidia_smi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A stand-in that prints files: memory in use of two GPUs, and the processes on them."""
    folder = tmp_path / "smi"
    folder.mkdir()
    tool = folder / "nvidia-smi"
    tool.write_text(
        f'#!/bin/sh\ncase "$1" in --query-gpu*) cat {folder}/gpus;; --query-comp*) cat {folder}/apps;; esac\n'
    )
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    monkeypatch.setattr(gpumemory, "POLL", 0.05)
    monkeypatch.setattr(gpumemory, "SETTLED_SECONDS", 0.3)
    return folder


def used(folder: Path, *mib: int) -> None:
    rows = [f"{index}, 0, {one}, 70, 700, 143771, NVIDIA H200, GPU-{index}" for index, one in enumerate(mib)]
    (folder / "gpus").write_text("\n".join(rows) + "\n")


def test_memory_is_seen_to_come_free(nvidia_smi: Path) -> None:
    used(nvidia_smi, 76_000, 500)
    (nvidia_smi / "apps").write_text(f"GPU-0, {os.getpid()}, 75000\n")
    before = gpumemory.in_use([os.getpid()])
    assert before[0].ours == 75_000
    used(nvidia_smi, 900, 500)
    (nvidia_smi / "apps").write_text("")
    assert gpumemory.wait_until_free(before) == (75_100 << 20, [])


def test_memory_that_stays_is_named_with_who_has_it(nvidia_smi: Path) -> None:
    used(nvidia_smi, 76_000, 500)
    (nvidia_smi / "apps").write_text(f"GPU-0, {os.getpid()}, 75000\n")
    before = gpumemory.in_use([os.getpid()])
    freed, held = gpumemory.wait_until_free(before, 0.3)
    assert freed == 0
    assert "GPU 0 still has 76000 MiB in use" in held[0]
    assert f"(pid {os.getpid()})" in held[0]


def test_in_a_container_the_end_of_the_change_is_waited_for(nvidia_smi: Path) -> None:
    used(nvidia_smi, 76_000)
    (nvidia_smi / "apps").write_text("")
    before = gpumemory.in_use([os.getpid()])
    used(nvidia_smi, 500)
    assert gpumemory.wait_until_free(before) == (75_500 << 20, [])


def test_a_host_without_gpus_waits_for_nothing(engine: Install) -> None:
    assert gpumemory.wait_until_free({}) == (0, [])
