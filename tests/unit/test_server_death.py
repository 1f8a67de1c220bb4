"""What a driver says of a server that died, and what the agent does for a controller that has it launched again."""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Callable, Iterator
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
from fleetdump.agent.gate import Silence
from fleetdump.agent.launch import launch
from fleetdump.agent.protocol import AgentFailure
from fleetdump.agent.restart import restart
from fleetdump.agent.runmessages import RunProgress
from fleetdump.agent.server import load_record, save_record
from fleetdump.agent.servermessages import LaunchArgs, RestartArgs, RunRestart, StopArgs
from fleetdump.agent.share import RESTARTS, Share, ShareSpec, note_restart, restarts_of
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


def test_a_server_that_dies_with_everything_is_doubted_and_no_sample_is_rejected_for_it(host: StandIn) -> None:
    """From the third death with one alone they count as the server's; when it works again, all are captured."""
    good = {f"a{n}": 10 + n for n in range(8)}
    host.set_faults(poison=list(good), delay=0.05)
    host.start()
    share = host.share(good, token_budget=33)  # two at a time: the longest, which are suspects then
    start_driver(host.state, share)
    told = []
    for _ in range(5):
        wait_for(lambda: share.progress().dead_launch == host.launch_id, SECONDS)
        told.append(share.progress().suspect)
        host.kill()
        host.start()
    wait_for(lambda: share.progress().dead_launch == host.launch_id, SECONDS)
    host.kill()
    host.set_faults(delay=0.0)
    host.start()
    wait_for(lambda: share.progress().state == "done", SECONDS)
    assert (told[0], sorted(told[1:3]), told[3:]) == ("", ["a6", "a7"], ["", ""])
    assert rejected_of(share) == {}
    assert len(manifest_of(share)) == len(good)


def test_several_samples_that_kill_are_found_out_one_after_the_other(host: StandIn) -> None:
    bad = [f"b{n}" for n in range(3)]
    host.set_faults(poison=bad, delay=0.05)
    host.start()
    share = host.share({**dict.fromkeys(bad, 30), **{f"a{n}": 10 for n in range(8)}}, token_budget=100)
    start_driver(host.state, share)

    def died_or_done() -> bool:
        return share.progress().dead_launch == host.launch_id or share.progress().state == "done"

    for _ in range(20):
        wait_for(died_or_done, SECONDS)
        if share.progress().state == "done":
            break
        host.kill()
        host.start()
    assert rejected_of(share) == dict.fromkeys(bad, "killed_server")
    assert len(manifest_of(share)) == 8


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


# --------------------------------------------------------------------------- a server that lives and gives nothing
def test_a_silence_is_told_when_it_is_longer_than_what_the_server_has_taken_before() -> None:
    silence = Silence()
    assert [silence.unusual(at, "L1") for at in (10.0, 12.0)] == [0.0, 2.0]
    silence.ends(13.0)
    assert [silence.unusual(at, "L1") for at in (13.0, 28.0, 29.0)] == [0.0, 0.0, 16.0]
    assert silence.unusual(30.0, "") == 0.0, "nothing is owed any more"
    silence.ends(90.0)
    assert [silence.unusual(at, "L1") for at in (100.0, 120.0)] == [0.0, 20.0], "it counts from the next request on"
    assert [silence.unusual(at, "L2") for at in (120.0, 121.0)] == [0.0, 1.0], "another launch owes what it was sent"


def test_a_driver_tells_that_nothing_comes_and_suspects_what_was_in_flight_when_that_launch_is_replaced(
    host: StandIn,
) -> None:
    """The controller's restart notes a stop of the launch, and yet it is no operator's: it hung with these samples."""
    host.set_faults(delay=0.05)
    host.start()
    share = host.share({f"a{n:02}": 10 for n in range(30)}, token_budget=30)
    start_driver(host.state, share)
    wait_for(lambda: len(manifest_of(share)) >= 3, SECONDS)
    host.set_faults(delay=3600.0)
    wait_for(lambda: share.progress().silent_seconds > 2.0, SECONDS)
    progress, hung = share.progress(), host.launch_id
    assert (progress.silent_launch, progress.dead_launch, progress.suspect) == (hung, "", "")
    in_flight = progress.in_flight
    assert in_flight == 3
    note_restart(share.root.parent, RestartLine("main", hung, "RANK_SPIN: rank 0 spins", "", "me@laptop", 1.0))
    record = load_record(host.state, "main")
    assert record is not None
    save_record(host.state, replace(record, stopped_at=1.0))
    host.kill()
    wait_for(partial(says, share, hung, ""), SECONDS)
    assert share.progress().silent_launch == ""
    host.set_faults(delay=0.05)
    host.start()
    wait_for(lambda: share.progress().state == "done", SECONDS)
    assert len(manifest_of(share)) == 30
    assert host.process is not None
    again = [line for line in host.requests() if line[1] == "2"]
    assert (len(again), {beside for *_, beside in again}) == (in_flight, {"0"}), "one at a time"


def test_the_sample_that_is_alone_with_a_silent_server_is_named(host: StandIn) -> None:
    host.set_faults(delay=3600.0)
    host.start()
    share = host.share({"a0": 30, "a1": 10})
    start_driver(host.state, share)
    wait_for(lambda: share.progress().silent_seconds > 1.0, SECONDS)
    assert share.progress().suspect == "", "two are in flight"
    host.kill()
    host.start()
    wait_for(lambda: share.progress().suspect in ("a0", "a1"), SECONDS)
    assert (share.progress().silent_launch, share.progress().dead_launch) == (host.launch_id, "")


def test_a_server_that_was_ready_and_answers_nobody_is_silent_to_a_driver_that_comes_later(host: StandIn) -> None:
    host.start()
    record = load_record(host.state, "main")
    assert record is not None
    host.kill()
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))
        port = nobody.getsockname()[1]
        mine = procfs.start_time(os.getpid()) or 0
        record = replace(record, pid=os.getpid(), start_time=mine, port=port, ready=False)
        save_record(host.state, record)
        share = host.share({"a": 10})
        start_driver(host.state, share)
        wait_for(lambda: "does not answer" in share.progress().detail, SECONDS)
        assert share.progress().silent_launch == "", "whoever starts it watches it"
        save_record(host.state, replace(record, ready=True))
        wait_for(lambda: share.progress().silent_launch == record.launch_id, SECONDS)


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


@pytest.mark.parametrize(
    ("text", "count"),
    [(b"\x00\xff\n", 1), (b'{"v":9}\n', 1), (b"[]\n[]\n", 2), (b'{"v":1,"server":"main","suspect":""}', 0)],
)
def test_a_line_that_cannot_be_read_counts_and_a_torn_one_does_not(host: StandIn, text: bytes, count: int) -> None:
    share = host.share({"a": 10})
    (share.root.parent / RESTARTS).write_bytes(text)
    assert restarts_of(share.root.parent, "main") == count


@pytest.mark.parametrize("make", [Path.mkdir, os.mkfifo])
def test_where_restarts_cannot_be_counted_there_are_none(
    server: ServerSpec, ctx: AgentContext, make: Callable[[Path], None]
) -> None:
    before = killed(ctx, server)
    args = in_run(ctx, before)
    path = ctx.state.root / "runs/r" / RESTARTS
    make(path)
    with pytest.raises(OSError) as caught:
        restart(args, ctx)
    assert caught.value.filename == str(path)
    record = load_record(ctx.state, "main")
    assert record is not None
    assert record.launch_id == before


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


@pytest.mark.parametrize("still_silent", [True, False])
def test_a_server_that_lives_is_replaced_only_while_nothing_comes_from_it(
    server: ServerSpec, ctx: AgentContext, still_silent: bool
) -> None:
    before = launch(LaunchArgs(server), ctx).state.launch_id
    pid = listening(ctx)
    share = Share(ctx.state.share("r", "main"))
    share.save_spec(ShareSpec("r", "main", "sha", 1, CaptureSpec([1], "/hs"), 0, 100, 3, "", "", "", 1.0))
    driver = share.claim()
    assert driver is not None
    with driver:
        silent = before if still_silent else ""
        share.save_progress(RunProgress("r", "main", "running", silent_launch=silent, silent_seconds=70.0))
        args = in_run(ctx, before, hangs=True)
        if still_silent:
            assert restart(args, ctx).launched.state.launch_id != before
        else:
            with pytest.raises(AgentFailure, match="the server is left alone"):
                restart(args, ctx)
    assert procfs.is_alive(pid) != still_silent
    assert restarts_of(ctx.state.root / "runs/r", "main") == int(still_silent)


def test_one_that_was_taken_to_hang_and_died_meanwhile_is_restarted(server: ServerSpec, ctx: AgentContext) -> None:
    before = killed(ctx, server)
    assert restart(in_run(ctx, before, hangs=True), ctx).launched.state.launch_id != before


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
