"""Tasks over the real agent on this machine: what is refused leaves nothing behind, what is half done is undone."""

from __future__ import annotations

import json
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fleetdump.agent.context import State
from fleetdump.agent.hostmessages import StatusArgs, StatusResult
from fleetdump.agent.jsonl import encode_line
from fleetdump.agent.runmessages import RunProgress, ShardInfo
from fleetdump.agent.server import ServerRecord, save_record
from fleetdump.agent.servermessages import LaunchArgs, LaunchResult
from fleetdump.agent.share import Share, ShareSpec
from fleetdump.agent.specs import CaptureSpec, ServerSpec
from fleetdump.errors import ExitCode, FleetdumpError, HostError, UsageError
from fleetdump.fleet import ConnectOptions, Host, connect
from fleetdump.inventory import HostConfig
from fleetdump.ledger import Ledger
from fleetdump.tasks.clean import CleanPlan, clean
from fleetdump.tasks.deploy import DeployPlan, deploy
from fleetdump.tasks.patches import dry_run
from fleetdump.tasks.restart import exit_code, restart
from fleetdump.tasks.revert import revert
from fleetdump.tasks.server import LogView, Target, diagnose_host, logs, status, stop
from fleetdump.tasks.verify import verify
from fleetdump.tasks.watch import Listener, WatchPlan, watch
from tests.unit.engineinstall import Install, install, runnable, spec
from tests.unit.manifests import manifest_line, text_of


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
    going = engine.root.parent / "going"
    shutil.copytree(engine.root.parent / "model", going)
    both = with_servers(host, server(engine, name="first"), server(engine, name="second", model_path=str(going)))
    steps: list[str] = []

    def on_event(event: dict[str, Any]) -> None:
        if event.get("event") == "step":
            steps.append(event["step"])
            if event["step"] == "launch":
                shutil.rmtree(going)

    with pytest.raises(HostError, match="model directory does not exist"):
        deploy(both, DeployPlan(spec()), on_event)
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
    looks: list[Callable[[], object]] = [
        lambda: logs(host, LogView("mian"), ignore),
        lambda: watch(host, WatchPlan(("main", "mian"), seconds=1), Listener(ignore)),
        lambda: diagnose_host(host, Target("mian", seconds=0.1)),
    ]
    for look in looks:
        with pytest.raises(UsageError, match="'mian'; did you mean 'main'"):
            look()


def test_a_server_that_the_inventory_lost_can_be_looked_at(host: Host) -> None:
    state = State.of(host.config.state_dir)
    log = state.server("old") / "server.log"
    log.write_text("last words\n")
    save_record(state, ServerRecord("old", 1, 1, "l", 1, "127.0.0.1", "python3", "/m", 1, [], [], str(log), "i", 0.0))
    assert logs(host, LogView("old"), ignore).tail == ["last words"]
    (old,) = watch(host, WatchPlan(("old",), seconds=1), Listener(ignore)).servers
    assert old.server == "old"


def test_a_restart_of_nothing_is_no_success(host: Host) -> None:
    servers = restart(host, [], False, ignore)
    assert (servers, exit_code(servers)) == ([], ExitCode.FAILED)


def test_a_run_that_the_host_has_no_part_in_is_no_failure_of_the_host(host: Host) -> None:
    assert verify(host, "none", False, ignore).runs == []


@pytest.mark.parametrize(
    "names", [("verify", "--run"), ("logs", "--server"), ("watch", "--server"), ("stop", "--server")]
)
def test_a_name_that_no_host_knows_exits_2(local_config: HostConfig, tmp_path: Path, names: tuple[str, str]) -> None:
    inventory = tmp_path / "inventory.yaml"
    defaults = {"connection": "local", "state_dir": local_config.state_dir, "agent_python": sys.executable}
    servers = [{"name": "main", "python": sys.executable, "model_path": "/none", "port": 30000}]
    inventory.write_text(json.dumps({"defaults": defaults, "hosts": {"here": {"servers": servers}}}))
    command = [sys.executable, "-m", "fleetdump", *names, "none", "-i", str(inventory)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, "Traceback" in done.stderr) == (2, False), done
    assert "none" in done.stderr
    assert "next:" in done.stderr
    assert not list(Path(local_config.state_dir).glob("*/audit.jsonl")), "nothing was changed"


def test_looking_at_a_server_that_was_never_launched_says_what_to_do(host: Host) -> None:
    for look in (lambda: logs(host, LogView(lines=5), ignore), lambda: diagnose_host(host, Target(seconds=0.1))):
        with pytest.raises(FleetdumpError) as caught:
            look()
        assert "fleetdump deploy" in caught.value.next_step


def test_which_server_is_asked_when_there_are_several(host: Host, engine: Install) -> None:
    two = with_servers(host, server(engine, name="a"), server(engine, name="b"))
    with pytest.raises(UsageError, match="which server") as caught:
        logs(two, LogView(lines=5), ignore)
    assert "a, b" in caught.value.why


def test_nothing_to_revert_is_no_failure(host: Host, engine: Install) -> None:
    before = engine.tree()
    (result,) = revert(host, ignore)
    assert not result.changed
    assert engine.tree() == before


def test_the_import_hook_takes_a_patch_in_the_files_out_and_leaves_them_so(host: Host, engine: Install) -> None:
    shipped = {name: digest for name, (digest, *_) in engine.tree().items()}
    crashing = with_servers(host, server(engine, args=["--device", "cpu", "--crash"]))
    deploy(crashing, DeployPlan(spec()), ignore)
    assert "fleetdump:probe@1" in engine.model.read_text()
    steps: list[str] = []

    report = deploy(
        crashing, DeployPlan(spec(), delivery="import-hook"), lambda event: steps.append(event.get("step", ""))
    )

    assert (report.patch, report.patch_verified, report.servers[0].outcome) == ("probe@1", True, "died")
    assert steps.index("revert") < steps.index("launch")
    assert "patch" not in steps
    assert {name: digest for name, (digest, *_) in engine.tree().items()} == shipped
    hook = next(Path(report.servers[0].log).parent.glob("hook"))
    assert "fleetdump:probe@1" in (hook / "edited-source" / "sglang" / "srt" / "models" / "tiny.py").read_text()


def test_a_running_server_with_the_other_delivery_is_not_patched_under(host: Host, engine: Install) -> None:
    args = LaunchArgs(host.config.servers[0], spec(), delivery="import-hook")
    assert host.call(args, LaunchResult, verb="launch").state.delivery == "import-hook"
    before = engine.tree()

    with pytest.raises(HostError, match="delivery import-hook -> in-place"):
        deploy(host, DeployPlan(spec()), ignore)

    assert engine.tree() == before
    assert alive(host) == ["main"]


def test_force_patches_a_file_that_somebody_else_edited_and_revert_gives_it_back(host: Host, engine: Install) -> None:
    crashing = with_servers(host, server(engine, args=["--device", "cpu", "--crash"]))
    mine = engine.model.read_bytes() + b"# mine\n"
    engine.model.write_bytes(mine)

    with pytest.raises(HostError, match="edited by somebody else") as caught:
        deploy(crashing, DeployPlan(spec()), ignore)
    assert "--force" in caught.value.next_step
    deploy(crashing, DeployPlan(spec(), force=True), ignore)

    assert engine.model.read_bytes() != mine
    revert(crashing, ignore)
    assert engine.model.read_bytes() == mine


def test_a_dry_run_changes_nothing_and_shows_the_diff(host: Host, engine: Install) -> None:
    before = engine.tree()
    (result,) = dry_run(host, spec(), "in-place", False)
    assert "+import fleetdump_probe" in result.diff
    assert engine.tree() == before


# --------------------------------------------------------------------------- clean --data
RUN_FILES = ("s0", "tokens", "norm-main-0000000a.safetensors")


def committed(host: Host, capture: Path, names: str) -> Share:
    """A share of ``main`` that has committed the samples, of which its last progress.json knows the first alone."""
    host.call(StatusArgs(), StatusResult, verb="status")
    share = Share(state_of(host) / "runs" / "r1" / "main")
    share.root.mkdir(parents=True)
    share.save_spec(ShareSpec("r1", "main", "00", 2, CaptureSpec([1], str(capture)), 0, 1, 1, "", "", "", 0.0))
    share.manifest.write_bytes(b"".join(encode_line(manifest_line(name)) for name in names))
    share.save_progress(RunProgress("r1", "main", "running", samples=len(names), done=1))
    return share


def state_of(host: Host) -> Path:
    (bundles,) = Path(host.config.state_dir).expanduser().glob("*/agent")
    return bundles.parent


def pulled(host: Host, runs: Path, data: Path, names: str) -> None:
    """What a collect of the samples leaves on the controller."""
    data.mkdir()
    with Ledger(runs / "r1" / "ledger.sqlite") as ledger:
        for name in names:
            line = manifest_line(name)
            ledger.deliver(host.config.name, line, text_of(line))
        for file in RUN_FILES:
            (data / file).write_bytes(b"12345")
            ledger.put_shard(host.config.name, ShardInfo(file, "shard", 5, "ab"))
            ledger.pulled(host.config.name, file, data / file, verified=True)


@pytest.mark.parametrize("fault", ["no ledger", "half collected", "removed here"])
def test_clean_counts_what_is_committed_there_and_what_still_lies_here(host: Host, tmp_path: Path, fault: str) -> None:
    share = committed(host, tmp_path / "hs", "ab")
    runs, data = tmp_path / "runs", tmp_path / "data"
    if fault != "no ledger":
        pulled(host, runs, data, "a" if fault == "half collected" else "ab")
    if fault == "removed here":
        (data / "s0").unlink()

    with pytest.raises(HostError) as caught:
        clean(host, runs, CleanPlan(data=True))

    assert caught.value.code == "conflict"
    assert f"run r1: {1 if fault == 'half collected' else 2} of 2 samples" in str(caught.value)
    assert "fleetdump collect --data --run r1" in caught.value.next_step
    assert share.manifest.exists()

    clean(host, runs, CleanPlan(data=True, discard=("r1",)))
    assert not share.root.exists()


def test_clean_goes_on_when_everything_lies_here(host: Host, tmp_path: Path) -> None:
    share = committed(host, tmp_path / "hs", "ab")
    pulled(host, tmp_path / "runs", tmp_path / "data", "ab")
    clean(host, tmp_path / "runs", CleanPlan(data=True))
    assert not share.root.exists()


def test_a_server_that_another_operator_stops_meanwhile_is_not_diagnosed(host: Host, engine: Install) -> None:
    steps: list[str] = []

    def stop_it_once(event: dict[str, Any]) -> None:
        steps.append(event.get("step", ""))
        if event.get("event") == "tick" and "stopped" not in steps:
            steps.append("stopped")
            with connect(host.config, ConnectOptions(operator="anna@desk")) as other:
                stop(other, [], ignore)

    report = deploy(host, DeployPlan(None, on_stall="stop"), stop_it_once)

    (found,) = report.servers
    assert (found.outcome, found.verdicts, found.evidence_dir) == ("stopped", [], "")
    assert "stopped by fleetdump stop (operator anna@desk)" in found.detail
    assert report.exit_code() == 1
    assert "diagnose" not in steps
    assert "stop" not in steps, "what another operator has ended is not ours to stop"
    (diagnosis,) = diagnose_host(host, Target(server="main", seconds=0.5))
    assert [(v.code, v.severity) for v in diagnosis.verdicts] == [("NOT_RUNNING", "ok")]
