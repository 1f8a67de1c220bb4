"""What a server says it runs with decides whether it gets work: asked by deploy, and by the driver if deploy was cut
off. The server is a small process that logs and answers as SGLang does, and ignores what it is told to ignore."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from fleetdump.agent import gate
from fleetdump.agent.configfile import config_arguments
from fleetdump.agent.context import State
from fleetdump.agent.launchplan import environment_of, refuse_arguments
from fleetdump.agent.protocol import AgentFailure
from fleetdump.agent.server import load_record, save_record
from fleetdump.agent.specs import CaptureSpec, PatchSpec, RefusedArg, ReleaseArg, ServerSpec
from fleetdump.errors import ExitCode, HostError
from fleetdump.fleet import ConnectOptions, Host, connect
from fleetdump.inventory import HostConfig
from fleetdump.tasks.check import CheckPlan, check
from fleetdump.tasks.deploy import DeployPlan, deploy
from fleetdump.tasks.server import stop
from tests.unit.engineinstall import Install, install, runnable

SERVER = b"""import argparse, http.server, json, os, sys
parser = argparse.ArgumentParser()
parser.add_argument("--port", type=int)
parser.add_argument("--endpoint", default="/server_info")
parser.add_argument("--ignore", action="append", default=[])
parser.add_argument("--says", action="append", default=[])
args, rest = parser.parse_known_args()
info = {arg[2:].replace("-", "_"): True for arg in rest if arg.startswith("--") and arg not in args.ignore}
info.update(dict.fromkeys(args.says, True))
def log(text):
    print("[2026-01-01 00:00:00] " + text, flush=True)
class Answer(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        known = self.path in ("/model_info", "/health", args.endpoint)
        body = json.dumps(info if self.path == args.endpoint else {}).encode()
        self.send_response(200 if known else 404)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
    def log_message(self, *_):
        pass
log("Load weight begin. avail mem=1 GB")
log("Load weight end. type=" + ("Other" if "--other-class" in rest else "TinyModel") + ", mem usage=1 GB")
log("Memory pool end. avail mem=1 GB")
server = http.server.HTTPServer(("127.0.0.1", args.port), Answer)
if "--graph" in rest:
    log("Prefill batch, #new-seq: 1, cuda graph: True")
log("The server is fired up and ready to roll!")
server.serve_forever()
"""
NEEDED = ReleaseArg(
    "--no-graph", why="a graph runs no Python", shows={"no_graph": "true"}, unlogged=["Prefill batch.*graph: True"]
)
SPLIT = RefusedArg(["--split-rows", "--scatter-rows"], "rows are split over ranks", ["none"])


def patch(**changes: Any) -> PatchSpec:
    """A patch that needs a flag and cannot be right with another; it changes nothing in the engine."""
    spec = PatchSpec("probe", "1", "00", [], files={"fleetdump_probe.py": ""}, release_args=[NEEDED])
    return replace(spec, refused_args=[SPLIT], **changes)


@pytest.fixture
def engine(tmp_path: Path) -> Install:
    made = runnable(install(tmp_path / "engine", extra={"sglang/launch_server.py": SERVER}))
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text(json.dumps({"architectures": ["TinyModel"], "num_hidden_layers": 6}))
    (model / "model.safetensors").write_bytes(b"w")
    return made


@pytest.fixture
def host(local_config: HostConfig, engine: Install) -> Iterator[Host]:
    with connect(local_config, ConnectOptions(operator="tester@here")) as made:
        yield made
        stop(made, [], lambda _: None)


def with_args(host: Host, engine: Install, *args: str, **changes: Any) -> Host:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    arguments = ["--device", "cpu", *args]
    server = ServerSpec("main", engine.python, str(engine.root.parent / "model"), port, args=arguments, **changes)
    return connect(replace(host.config, servers=(server,)), ConnectOptions(operator="tester@here"))


def state_of(host: Host) -> State:
    (bundles,) = Path(host.config.state_dir).expanduser().glob("*/agent")
    return State(bundles.parent)


# --------------------------------------------------------------------------- after the start
@pytest.mark.parametrize("endpoint", ["/server_info", "/get_server_info"])
def test_a_server_that_has_what_the_patch_needs_is_ready(host: Host, engine: Install, endpoint: str) -> None:
    steps: list[Any] = []
    report = deploy(with_args(host, engine, "--endpoint", endpoint), DeployPlan(patch()), steps.append)
    (server,) = report.servers
    assert (server.outcome, report.exit_code()) == ("ready", ExitCode.OK)
    assert "--no-graph, which the patch needs" in " ".join(str(s.get("text")) for s in steps)
    assert [step["step"] for step in steps if "all that the patch needs" in str(step.get("text"))] == ["settings"]
    record = load_record(state_of(host), "main")
    assert record is not None
    assert record.settings == "passed"


@pytest.mark.parametrize(
    ("arg", "words"),
    [
        ("--ignore=--no-graph", "--no-graph did not take effect: /server_info has no no_graph"),
        ("--graph", "--no-graph did not take effect: the log says: [2026-01-01 00:00:00] Prefill batch"),
        # As a configuration file may bring it in that could not be read beforehand.
        ("--says=split_rows", "--split-rows is on: /server_info has split_rows = true (rows are split over ranks)"),
    ],
)
def test_what_did_not_take_effect_fails_the_deploy_by_name(host: Host, engine: Install, arg: str, words: str) -> None:
    report = deploy(with_args(host, engine, arg), DeployPlan(patch()), lambda _: None)
    (server,) = report.servers
    assert (server.outcome, report.exit_code()) == ("wrong_settings", ExitCode.FAILED)
    assert server.detail.startswith(words)
    record = load_record(state_of(host), "main")
    assert record is not None
    assert record.settings.startswith(words)
    assert words in gate.capture_mismatch(replace(record, capture_layers=[1]), CaptureSpec([1], "/x"))


def test_the_class_that_was_loaded_is_compared_with_the_models(host: Host, engine: Install) -> None:
    (server,) = deploy(with_args(host, engine, "--other-class"), DeployPlan(patch()), lambda _: None).servers
    assert (server.outcome, server.detail) == ("wrong_model", "expected TinyModel, but TP0 loaded Other")


def test_the_driver_asks_where_deploy_was_cut_off(host: Host, engine: Install, tmp_path: Path) -> None:
    deploy(with_args(host, engine, "--graph"), DeployPlan(patch()), lambda _: None)
    state, capture = state_of(host), CaptureSpec([1], str(tmp_path))
    record = load_record(state, "main")
    assert record is not None
    unasked = replace(record, settings="", capture_layers=[1], capture_dir=str(tmp_path))
    save_record(state, unasked)
    found = gate.probe(state, "main", capture)
    assert (found.launch, "--no-graph did not take effect" in found.detail) == (None, True)
    save_record(state, replace(unasked, expectations=[]))
    assert gate.probe(state, "main", capture).launch is not None
    save_record(state, replace(unasked, port=1))
    assert gate.probe(state, "main", capture).launch is None


# --------------------------------------------------------------------------- before the start
@pytest.mark.parametrize(
    ("args", "config", "place"),
    [
        (["--split-rows"], None, "`args`"),
        (["--scatter-rows=2"], None, "`args`"),
        (["--split"], None, "`args`"),
        ([], "split-rows: true\n", "server.yaml"),
        ([], "device: cpu\nscatter-rows: 2\nlist: [1, 2]\n", "server.yaml"),
        ([], "scatter_rows: 2\n", "server.yaml"),
    ],
)
def test_what_cannot_be_right_is_refused_before_anything_starts(
    host: Host, engine: Install, tmp_path: Path, args: list[str], config: str | None, place: str
) -> None:
    if config is not None:
        give_yaml(engine)
        (tmp_path / "server.yaml").write_text(config)
        args = ["--config", str(tmp_path / "server.yaml")]
    wanted = with_args(host, engine, *args)
    findings = check(wanted, CheckPlan(patch())).findings
    (finding,) = [f for f in findings if f.key == "arguments" and f.level == "blocker"]
    assert place in finding.text
    assert "rows are split over ranks" in finding.text
    assert "--no-patch" in finding.fix

    before = engine.tree()
    with pytest.raises(HostError, match="cannot be right with") as caught:
        deploy(wanted, DeployPlan(patch()), lambda _: None)
    assert caught.value.exit_code == ExitCode.FAILED
    assert engine.tree() == before
    assert load_record(state_of(host), "main") is None


def give_yaml(engine: Install) -> None:
    """The engine's interpreter gets the tests' own yaml, as SGLang's has one."""
    link = engine.site / "yaml"
    if not link.exists():
        link.symlink_to(Path(yaml.__file__).parent)


@pytest.mark.parametrize(
    ("text", "arguments"),
    [
        ("", []),
        (
            "a: true\nb: false\nc: 1.5\nd: [x, 2]\ne: []\nf: none\n",
            ["--a", "--c", "1.5", "--d", "x", "2", "--f", "none"],
        ),
    ],
)
def test_a_configuration_file_is_read_as_sglang_reads_it(
    engine: Install, tmp_path: Path, text: str, arguments: list[str]
) -> None:
    give_yaml(engine)
    (tmp_path / "c.yaml").write_text(text)
    for args in (["--config", str(tmp_path / "c.yaml")], [f"--config={tmp_path / 'c.yaml'}"]):
        server = ServerSpec("main", engine.python, "/m", 1, args=args)
        assert config_arguments(server, environment_of(server)) == arguments


@pytest.mark.parametrize("text", [None, "a: [", "- a list", "\0"])
def test_a_configuration_file_that_cannot_be_read_is_a_warning(
    host: Host, engine: Install, tmp_path: Path, text: str | None
) -> None:
    give_yaml(engine)
    path = tmp_path / "c.yaml"
    if text is not None:
        path.write_text(text)
    wanted = with_args(host, engine, "--config", str(path))
    (server,) = wanted.config.servers
    refuse_arguments(patch(), server)
    with pytest.raises(AgentFailure, match="--config cannot be read"):
        config_arguments(server, environment_of(server))
    first, last = (f for f in check(wanted, CheckPlan(patch())).findings if f.key == "arguments")
    assert (first.level, last.level) == ("warning", "ok")
    assert str(path) in first.text


def test_a_flag_that_the_patch_can_do_without_is_left_out_on_demand(host: Host, engine: Install) -> None:
    optional = replace(NEEDED, optional="it is right without", optional_from="0.5.20")
    wanted = with_args(host, engine, "--graph", without=["--no-graph"])
    (server,) = deploy(wanted, DeployPlan(replace(patch(), release_args=[optional])), lambda _: None).servers
    assert server.outcome == "ready", server.detail
    stop(wanted, [], lambda _: None)
    with pytest.raises(HostError, match=r"needs --no-graph on sglang 0[.]5[.]20"):
        deploy(wanted, DeployPlan(patch()), lambda _: None)
