"""A host that a deploy holds: others are told who has it, its own calls and ``stop`` go through, it ends with it."""

from __future__ import annotations

import json
import os
import queue
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from fleetdump.agent.hostmessages import (
    AuditArgs,
    AuditResult,
    CleanArgs,
    CleanResult,
    StatusArgs,
    StatusResult,
    UnlockArgs,
    UnlockResult,
)
from fleetdump.agent.servermessages import StopArgs, StopResult
from fleetdump.errors import LockedError, UsageError
from fleetdump.fleet import ConnectOptions, Host, connect
from fleetdump.fleet.lease import held
from fleetdump.inventory import HostConfig
from fleetdump.tasks.deploy import deploy
from fleetdump.tasks.deployplan import DeployPlan
from fleetdump.tasks.fallback import deploy_or_fall_back
from tests.unit.engineinstall import install, runnable, spec
from tests.unit.test_tasks import server


@pytest.fixture
def other(local_config: HostConfig, local_host: Host) -> Iterator[Host]:
    """Another operator's way to the host of ``local_host``."""
    with connect(local_config, ConnectOptions(operator="anna@desk")) as made:
        yield made


def change(host: Host) -> CleanResult:
    """Any verb that changes the host, and has nothing to do here."""
    return host.call(CleanArgs(runs=["none"]), CleanResult, verb="clean")


def never(text: str) -> None:
    raise AssertionError(text)


def holder(host: Host) -> str:
    return host.call(AuditArgs(), AuditResult, verb="audit").holder


def test_a_held_host_is_its_holders_until_the_end(local_host: Host, other: Host) -> None:
    with held(local_host, "deploy", 120, never):
        with pytest.raises(LockedError, match=r"tester@here runs deploy there since .* \(pid \d+\)"):
            change(other)
        with pytest.raises(LockedError), held(other, "deploy", 60, never):
            raise AssertionError("two hold it")
        assert "tester@here runs deploy" in holder(other)
        change(local_host)
        assert other.call(StatusArgs(), StatusResult, verb="status").servers == []
        assert other.call(StopArgs(), StopResult, verb="stop").stopped == [], "the brake works at any time"
    change(other)
    assert holder(local_host) == ""


def test_a_holder_whose_hold_is_taken_away_is_told(local_host: Host, other: Host) -> None:
    told: queue.Queue[str] = queue.Queue()
    with held(local_host, "deploy", 120, told.put):
        assert other.call(UnlockArgs(force=True), UnlockResult, verb="unlock").state == "removed"
        text = told.get(timeout=60)
        change(other)
        change(local_host)
    assert "no longer held for deploy (unlock --force took it away)" in text
    assert told.empty()


_CONTROLLER = """
import sys, time
from fleetdump.fleet import ConnectOptions, connect
from fleetdump.fleet.lease import held
from fleetdump.inventory import HostConfig
config = HostConfig("here", "localhost", connection="local", state_dir=sys.argv[1], agent_python="python3")
with connect(config, ConnectOptions(operator="tester@here")) as host, held(host, "deploy", 600, print):
    print("held", flush=True)
    time.sleep(600)
"""


def test_a_holder_that_is_killed_leaves_nothing_locked(local_config: HostConfig, other: Host) -> None:
    command = [sys.executable, "-c", _CONTROLLER, local_config.state_dir]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=env) as controller:
        assert controller.stdout is not None
        assert controller.stdout.readline() == "held\n"
        assert "tester@here runs deploy" in holder(other)
        controller.kill()
    end = time.monotonic() + 60
    while holder(other):
        assert time.monotonic() < end, "it is held for ever"
    change(other)


def test_a_host_without_servers_cannot_be_deployed(local_host: Host) -> None:
    with pytest.raises(UsageError, match="no server"):
        deploy(local_host, DeployPlan(None), lambda _: None)


def test_where_a_patch_does_not_fit_the_next_one_is_tried(local_config: HostConfig, tmp_path: Path) -> None:
    engine = runnable(install(tmp_path / "engine"))
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text(json.dumps({"architectures": ["TinyModel"], "num_hidden_layers": 6}))
    (model / "model.safetensors").write_bytes(b"w")
    shipped = engine.tree()
    old = spec()
    old = replace(old, edits=[replace(old.edits[0], last_release="0.5.1")])
    config = replace(local_config, servers=(server(engine, args=["--device", "cpu", "--crash"]),))
    told: list[str] = []
    with connect(config) as host:
        report = deploy_or_fall_back(
            host, DeployPlan(old, fallbacks=(None,)), lambda event: told.append(str(event.get("text")))
        )
    (attempt,) = report.attempts
    assert (attempt.patch, "0.5.1" in attempt.why) == ("probe@1", True)
    assert [one.outcome for one in report.servers] == ["died"]
    assert any("trying no patch" in text for text in told)
    assert engine.tree() == shipped
