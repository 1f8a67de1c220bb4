"""Tasks over the real agent on this machine: what is refused leaves nothing behind, what is half done is undone."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fleetdump.agent.protocol import ServerSpec
from fleetdump.errors import FleetdumpError, HostError, UsageError
from fleetdump.fleet import ConnectOptions, Host, connect
from fleetdump.inventory import HostConfig
from fleetdump.tasks.deploy import DeployPlan, deploy
from fleetdump.tasks.revert import revert
from fleetdump.tasks.server import Target, diagnose_host, logs, status, stop
from tests.unit.engineinstall import Install, install, runnable, spec


@pytest.fixture
def engine(tmp_path: Path) -> Install:
    made = runnable(install(tmp_path / "engine"))
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text(json.dumps({"architectures": ["TinyModel"], "num_hidden_layers": 6}))
    (model / "model.safetensors").write_bytes(b"w")
    return made


def server(engine: Install, **changes: Any) -> ServerSpec:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    values = {"name": "main", "model_path": str(engine.root.parent / "model"), "args": ["--device", "cpu"]}
    return ServerSpec(**{"python": engine.python, "port": port, **values, **changes})


@pytest.fixture
def host(local_config: HostConfig, engine: Install) -> Iterator[Host]:
    """This machine with one server that was never launched; what a test leaves running is stopped."""
    config = replace(local_config, servers=(server(engine),))
    with connect(config, ConnectOptions(operator="tester@here")) as made:
        yield made
        stop(made, [], ignore)


def with_servers(host: Host, *servers: ServerSpec) -> Host:
    return connect(replace(host.config, servers=servers), ConnectOptions(operator="tester@here"))


def ignore(_: object) -> None:
    """Events are not looked at."""


def alive(host: Host) -> list[str]:
    return [server.name for server in status(host).servers if server.state in ("starting", "ready")]


def test_a_refused_launch_undoes_the_patch_and_the_servers_before_it(host: Host, engine: Install) -> None:
    shipped = {name: digest for name, (digest, *_) in engine.tree().items()}
    bad = server(engine, name="second", args=["--device", "cpu", "--port", "1"])
    both = with_servers(host, server(engine, name="first"), bad)
    steps: list[str] = []
    with pytest.raises(HostError, match="--port"):
        deploy(both, DeployPlan(spec()), lambda event: steps.append(event.get("step", "")))
    assert steps.index("patch") < steps.index("launch") < steps.index("stop") < steps.index("revert")
    assert {name: digest for name, (digest, *_) in engine.tree().items()} == shipped
    assert alive(host) == []


@pytest.mark.parametrize("changes", [{"model_path": "/no/model"}, {"python": "/no/python"}, {"port": 0}])
def test_a_blocked_host_is_left_alone(host: Host, engine: Install, changes: dict[str, Any]) -> None:
    before = engine.tree()
    steps: list[dict[str, Any]] = []
    with socket.create_server(("127.0.0.1", 0)) as taken:
        if "port" in changes:
            changes = {"port": taken.getsockname()[1]}
        blocked = with_servers(host, server(engine, **changes))
        with pytest.raises(HostError) as caught:
            deploy(blocked, DeployPlan(spec(), replace=True), steps.append)
    assert caught.value.code == "blocked"
    assert caught.value.next_step
    assert steps == []
    assert engine.tree() == before


def test_a_name_that_nobody_knows_is_wrong_usage(host: Host) -> None:
    with pytest.raises(UsageError, match="'mian'; did you mean 'main'"):
        stop(host, ["mian"], ignore)
    assert stop(host, ["main"], ignore).absent == ["main"]


def test_looking_at_a_server_that_was_never_launched_says_what_to_do(host: Host) -> None:
    for look in (lambda: logs(host, "", 5, False, ignore), lambda: diagnose_host(host, Target(seconds=0.1))):
        with pytest.raises(FleetdumpError) as caught:
            look()
        assert "fleetdump deploy" in caught.value.next_step


def test_which_server_is_asked_when_there_are_several(host: Host, engine: Install) -> None:
    two = with_servers(host, server(engine, name="a"), server(engine, name="b"))
    with pytest.raises(UsageError, match="which server") as caught:
        logs(two, "", 5, False, ignore)
    assert "a, b" in caught.value.why


def test_nothing_to_revert_is_no_failure(host: Host, engine: Install) -> None:
    before = engine.tree()
    (result,) = revert(host, ignore)
    assert not result.changed
    assert engine.tree() == before
