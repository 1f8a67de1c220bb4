"""What a driver says of a server that died, and what the agent does for a controller that has it launched again."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from extraction import StandIn, kill_driver, manifest_of, rejected_of, wait_for

from fleetdump.agent import procfs
from fleetdump.agent.context import AgentContext
from fleetdump.agent.drive import start_driver
from fleetdump.agent.formats import RestartLine
from fleetdump.agent.launch import launch
from fleetdump.agent.protocol import AgentFailure
from fleetdump.agent.restart import restart
from fleetdump.agent.runmessages import RunProgress
from fleetdump.agent.server import load_record, save_record
from fleetdump.agent.servermessages import LaunchArgs, RestartArgs, RunRestart, StopArgs
from fleetdump.agent.share import RESTARTS, Share, note_restart, restarts_of
from fleetdump.agent.specs import CaptureSpec, ServerSpec
from fleetdump.agent.stop import stop
from tests.unit.test_restart import environ
from tests.unit.test_server import ctx, engine, listening, server

__all__ = ["ctx", "engine", "server"]

SECONDS = 60.0


# --------------------------------------------------------------------------- the driver's word
@pytest.fixture
def host(tmp_path: Path) -> Iterator[StandIn]:
    standin = StandIn(tmp_path)
    yield standin
    standin.kill()
    for path in (tmp_path / "state" / "runs").glob("*/*/driver.json"):
        kill_driver(Share(path.parent))


def says(share: Share, launch_id: str, suspect: str) -> bool:
    progress = share.progress()
    return (progress.dead_launch, progress.suspect) == (launch_id, suspect)


def test_a_driver_names_the_launch_that_died_and_the_sample_that_was_alone_with_it(host: StandIn) -> None:
    """Also where ``restart`` ends the ranks that a dead launcher left, which notes a stop of that launch."""
    host.set_faults(poison=["bad"], delay=0.05)
    host.start()
    share = host.share({"bad": 30, **{f"a{n}": 10 for n in range(8)}}, token_budget=60)
    start_driver(host.state, share)
    for suspect in ("", "bad", "bad"):
        wait_for(partial(says, share, host.launch_id, suspect), SECONDS)
        record = load_record(host.state, "main")
        assert record is not None
        save_record(host.state, replace(record, stopped_at=1.0))
        wait_for(lambda: "is stopped: waiting" in share.progress().detail, SECONDS)
        host.kill()
        host.start()
    wait_for(lambda: share.progress().state == "done", SECONDS)
    assert rejected_of(share) == {"bad": "killed_server"}
    assert len(manifest_of(share)) == 8
    assert says(share, "", "")


def test_a_server_that_was_stopped_is_not_dead(host: StandIn) -> None:
    host.set_faults(delay=0.2)
    host.start()
    share = host.share({f"a{n}": 10 for n in range(40)}, token_budget=20)
    start_driver(host.state, share)
    wait_for(lambda: len(manifest_of(share)) >= 2, SECONDS)
    record = load_record(host.state, "main")
    assert record is not None
    save_record(host.state, replace(record, stopped_at=1.0))
    host.kill()
    wait_for(lambda: "is stopped: waiting" in share.progress().detail, SECONDS)
    assert says(share, "", "")


def test_of_a_share_that_nobody_works_on_no_server_is_said_to_be_dead(host: StandIn) -> None:
    share = host.share({"a": 10})
    share.save_progress(RunProgress("r1", "main", "running", dead_launch="L1", suspect="a"))
    assert share.progress().state == "stopped"
    assert says(share, "", "")


# --------------------------------------------------------------------------- the count
@pytest.mark.parametrize(
    ("lines", "count"),
    [([], 0), ([("main", "")], 1), ([("main", ""), ("main", "s1"), ("r1", ""), ("main", "")], 2)],
)
def test_restarts_are_counted_by_server_beside_the_shares(
    host: StandIn, lines: list[tuple[str, str]], count: int
) -> None:
    share = host.share({"a": 10})
    for name, suspect in lines:
        note_restart(share.root.parent, RestartLine(name, "L", "OOM_KILLED", suspect, "me@laptop", 1.0))
    assert share.progress().restarts == count
    assert Share.of(host.state, "r1", "main.2").progress().restarts == count, "a share that came later too"


@pytest.mark.parametrize("text", [b"\x00\xff\n", b'{"v":9}\n', b"[]\n", b'{"v":1,"server":"main","suspect":""}'])
def test_a_count_that_cannot_be_read_is_none(host: StandIn, text: bytes) -> None:
    share = host.share({"a": 10})
    (share.root.parent / RESTARTS).write_bytes(text)
    assert restarts_of(share.root.parent, "main") == 0


# --------------------------------------------------------------------------- the restart
def killed(ctx: AgentContext, server: ServerSpec, capture: CaptureSpec | None = None) -> str:
    """Launch and kill -9; the launch's id."""
    launch(LaunchArgs(server, capture=capture), ctx)
    pid = listening(ctx)
    os.killpg(pid, signal.SIGKILL)
    wait_for(lambda: not procfs.is_alive(pid), SECONDS)
    record = load_record(ctx.state, "main")
    assert record is not None
    return record.launch_id


def in_run(ctx: AgentContext, launch_id: str, **more: Any) -> RestartArgs:
    ctx.state.share("r", "main")
    return RestartArgs("main", of_run=RunRestart("r", launch_id, "OOM_KILLED: no memory", **more))


def test_a_restart_of_a_run_is_noted_there(server: ServerSpec, ctx: AgentContext) -> None:
    before = killed(ctx, server)
    result = restart(in_run(ctx, before), ctx)
    assert result.launched.state.launch_id != before
    assert restarts_of(ctx.state.root / "runs/r", "main") == 1
    assert "OOM_KILLED: no memory" in (ctx.state.root / "runs/r" / RESTARTS).read_text()


@pytest.mark.parametrize("by", ["launched again", "stopped"])
def test_what_an_operator_did_meanwhile_stays(server: ServerSpec, ctx: AgentContext, by: str) -> None:
    before = killed(ctx, server)
    restart(RestartArgs("main"), ctx)
    pid = listening(ctx)
    if by == "stopped":
        stop(StopArgs(["main"]), ctx)
        record = load_record(ctx.state, "main")
        assert record is not None
        before = record.launch_id
    with pytest.raises(AgentFailure, match="server main is left alone") as caught:
        restart(in_run(ctx, before), ctx)
    assert caught.value.error.code == "conflict"
    assert by in caught.value.error.why
    assert procfs.is_alive(pid) == (by == "launched again")
    assert restarts_of(ctx.state.root / "runs/r", "main") == 0


# --------------------------------------------------------------------------- what a dead server's record lacks
SECRETS = {"args": ["--tag", "x", "--api-key", "s3cret", "--token=t0p"], "env": {"HF_TOKEN": "hf_abcdefghijklmn"}}


def test_a_dead_server_comes_back_with_what_the_inventory_has(
    server: ServerSpec, ctx: AgentContext, tmp_path: Path
) -> None:
    full = replace(server, **SECRETS, gpus=[0, 1], tp=2)  # type: ignore[arg-type]
    capture = CaptureSpec([1], str(tmp_path / "hs"))
    launch(LaunchArgs(full, capture=capture), ctx)
    argv = procfs.read_cmdline(listening(ctx))
    stop(StopArgs(["main"]), ctx)
    restart(RestartArgs("main", spec=full, capture=capture), ctx)
    pid = listening(ctx)
    assert procfs.read_cmdline(pid) == argv
    after = environ(pid)
    assert (after["HF_TOKEN"], after["CUDA_VISIBLE_DEVICES"]) == ("hf_abcdefghijklmn", "0,1")
    assert after["FLEETDUMP_TAP_CONFIG"].endswith("servers/main/tap.json")


@pytest.mark.parametrize(
    "now",
    [
        {"args": ["--tag", "x", "--api-key", "other", "--token=t0p"]},
        {"env": {"HF_TOKEN": "hf_other_other"}},
        {"gpus": [2, 3]},
    ],
)
def test_an_inventory_that_says_otherwise_now_is_not_taken_for_the_launch(
    server: ServerSpec, ctx: AgentContext, now: dict[str, Any]
) -> None:
    full = replace(server, **SECRETS, gpus=[0, 1])  # type: ignore[arg-type]
    launch(LaunchArgs(full), ctx)
    listening(ctx)
    stop(StopArgs(["main"]), ctx)
    with pytest.raises(AgentFailure, match="cannot be launched as it was") as caught:
        restart(RestartArgs("main", spec=replace(full, **now)), ctx)
    assert "the inventory has another launch" in caught.value.error.why
