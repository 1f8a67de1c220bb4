"""A real SGLang of two ranks, launched and watched: healthy start, idle, busy, hung in a request, and a dead rank.

``make test-nightly`` starts it 50 times more and records what the watch said in bench/results/healthy_starts.json.
"""

from __future__ import annotations

import http.client
import json
import os
import signal
import threading
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

import pytest

from demo.sglang_cpu import recipe
from fleetdump.agent import hostwatch, procfs, progress
from fleetdump.agent.context import AgentContext
from fleetdump.agent.launch import launch
from fleetdump.agent.server import ServerRecord, load_record
from fleetdump.agent.servermessages import LaunchArgs, MonitorArgs, StopArgs, WatchArgs, WatchResult
from fleetdump.agent.specs import PHASES, Patience, ServerSpec
from fleetdump.agent.stop import stop
from fleetdump.agent.watch import watch
from tests.sglang.cpuserver import SglangEnv, free_port
from tests.unit.engineinstall import context, wait_for
from tests.unit.test_monitor import Watch

PATIENCE = 6.0
HEALTHY_NIGHTLY = 50
HEALTHY_PATIENCE = 0.25
"""Of the default patience: what is a narrow escape with that, counts as a false stall."""
HEALTHY_RESULTS = Path(__file__).parents[2] / "bench" / "results" / "healthy_starts.json"


class Started:
    """A server of ours, and how its start was seen."""

    def __init__(self, env: SglangEnv, ctx: AgentContext, tp: int = 2, patience: Patience | None = None) -> None:
        self.ctx = ctx
        variables = {**env.env, **recipe.server_env(tp)}
        spec = ServerSpec(
            "main", str(env.python), str(env.model), free_port(), tp=tp, args=list(env.args), env=variables
        )
        launched = launch(LaunchArgs(spec), ctx)
        args = WatchArgs("main", patience or Patience(), tp, "", launched.architecture, 400.0, 0.5, False)
        self.seen: WatchResult = watch(args, context_of(ctx))

    @property
    def record(self) -> ServerRecord:
        record = load_record(self.ctx.state, "main")
        assert record is not None
        return record

    def rank(self, number: int) -> int:
        (pid,) = (one.pid for one in procfs.tree(self.record.pid) if one.rank and one.rank.tp == number)
        return pid

    def generate(self) -> None:
        """One request, whose answer nobody waits for."""

        def ask() -> None:
            connection = http.client.HTTPConnection("127.0.0.1", self.record.port, timeout=120.0)
            body = json.dumps({"text": "The sea", "sampling_params": {"max_new_tokens": 4}})
            try:
                connection.request("POST", "/generate", body, {"Content-Type": "application/json"})
                connection.getresponse().read()
            except (OSError, http.client.HTTPException):
                pass

        threading.Thread(target=ask, daemon=True).start()


def context_of(ctx: AgentContext) -> AgentContext:
    """A call of its own on the same state."""
    made = context(ctx.state.root.parent.parent, deadline=600.0)
    made.state = ctx.state
    return made


@pytest.fixture(scope="module")
def server(sglang_installed: SglangEnv, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Started]:
    ctx = context(tmp_path_factory.mktemp("watched"), deadline=600.0)
    try:
        yield Started(sglang_installed, ctx)
    finally:
        stop(StopArgs(grace=20.0), context_of(ctx))


@pytest.fixture
def live(server: Started, monkeypatch: pytest.MonkeyPatch) -> Iterator[Watch]:
    monkeypatch.setattr(progress, "CONFIRM_SECONDS", 1.0)
    monkeypatch.setattr(hostwatch, "HEALTH_SECONDS", 1.0)
    monkeypatch.setattr(hostwatch, "HEALTH_LIMIT", 4.0)
    watching = Watch(server.ctx.state, MonitorArgs(["main"], Patience(**dict.fromkeys(PHASES, PATIENCE)), 200.0, 0.3))
    yield watching
    watching.end()


def test_a_real_start_is_ready_in_all_its_phases(server: Started) -> None:
    seen = server.seen
    assert (seen.outcome, seen.phase) == ("ready", "serving"), seen
    assert {"imports", "init", "weights", "kv_pool"} <= set(seen.phase_seconds)
    assert server.record.kind
    assert server.record.held_by.startswith("nohup and setsid")


def test_an_idle_and_a_busy_server_are_well(server: Started, live: Watch) -> None:
    before = live.until(lambda one: one.state == "ready").forwards
    time.sleep(PATIENCE + 3.0)
    server.generate()
    after = live.until(lambda one: one.forwards > before)
    assert [fault for one in live.seen() for fault in one.faults if not fault.note] == []
    assert after.state == "ready"


def test_a_rank_that_hangs_in_a_request_and_one_that_dies(server: Started, live: Watch) -> None:
    live.until(lambda one: one.state == "ready")
    victim = server.rank(1)
    os.kill(victim, signal.SIGSTOP)
    try:
        server.generate()
        assert "the forward counter stands at" in live.fault("stall")
    finally:
        os.kill(victim, signal.SIGCONT)
    live.until(lambda one: not one.faults, 120.0)
    os.kill(victim, signal.SIGKILL)
    text = live.fault("rank_lost")
    assert f"scheduler TP1 (pid {victim})" in text
    wait_for(lambda: not procfs.is_alive(server.record.pid), 200.0)
    assert "the launcher is gone" in live.fault("died")


@pytest.mark.nightly
def test_no_false_stall_in_fifty_real_starts(sglang_installed: SglangEnv, tmp_path: Path) -> None:
    """One and two ranks by turns; the first starts have no profile that would stretch their patience."""
    patience = Patience(**{phase: seconds * HEALTHY_PATIENCE for phase, seconds in asdict(Patience()).items()})
    ctx = context(tmp_path, deadline=600.0)
    wrong, seconds, loads = [], [], []
    for number in range(HEALTHY_NIGHTLY):
        try:
            seen = Started(sglang_installed, context_of(ctx), 1 + number % 2, patience).seen
        finally:
            stop(StopArgs(grace=20.0), context_of(ctx))
        seconds.append(seen.seconds)
        loads.append(os.getloadavg()[0])
        if seen.outcome != "ready":
            wrong.append(f"start {number}: {seen.outcome} in {seen.phase}: {seen.detail}")
    record = {
        "at": time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime()),
        "load": {"min": round(min(loads), 1), "max": round(max(loads), 1)},
        "starts": HEALTHY_NIGHTLY,
        "patience": asdict(patience),
        "seconds": {"min": round(min(seconds), 1), "max": round(max(seconds), 1)},
        "wrong": wrong,
    }
    HEALTHY_RESULTS.write_text(json.dumps(record, indent=1) + "\n")
    assert not wrong
