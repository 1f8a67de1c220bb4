"""Checks of a host: each finding says ok, warning or blocker with the next step, and none can hold up the others."""

from __future__ import annotations

import json
import socket
import time
from dataclasses import replace
from pathlib import Path

import pytest

from fleetdump.agent import checks
from fleetdump.agent.checks import Checked
from fleetdump.agent.model import read_model
from fleetdump.agent.probe import Question, ask_all, probe
from fleetdump.agent.probes.bounded import Output, ProbeFailed
from fleetdump.agent.protocol import AgentFailure, Finding, ProbeArgs, ProbeResult, ServerSpec
from tests.unit.engineinstall import Install, context, install, spec


@pytest.fixture
def engine(tmp_path: Path) -> Install:
    return install(tmp_path / "venv")


@pytest.fixture
def server(engine: Install, tmp_path: Path) -> ServerSpec:
    model = tmp_path / "model"
    model.mkdir()
    config = {"architectures": ["TinyForCausalLM"], "num_hidden_layers": 6, "hidden_size": 8, "torch_dtype": "bfloat16"}
    (model / "config.json").write_text(json.dumps(config))
    (model / "model.safetensors").write_bytes(b"1234")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return ServerSpec("main", engine.python, str(model), free.getsockname()[1], args=["--device", "cpu"])


def by_key(result: ProbeResult) -> dict[str, Finding]:
    return {finding.key: finding for finding in result.findings}


def test_a_good_host_has_no_blocker(server: ServerSpec, tmp_path: Path) -> None:
    args = ProbeArgs([server], spec(), str(tmp_path / "not" / "yet"), 1000, [1, 6])

    result = probe(args, context(tmp_path))

    assert [f for f in result.findings if f.level == "blocker"] == []
    found = by_key(result)
    assert {"engine", "patch", "model", "port", "disk", "memory", "gpus", "ptrace", "nofile"} <= set(found)
    assert found["patch"].text == "patch probe 1 would apply"
    assert result.engine == "sglang 0.5.20"
    assert result.model is not None
    assert (result.model.num_layers, result.model.dtype) == (6, "bfloat16")
    assert result.memory_bytes > 0
    assert result.disk_free_bytes > 0
    assert not (tmp_path / "state").exists()


def test_every_mistake_is_found_in_one_go(server: ServerSpec, tmp_path: Path) -> None:
    install(tmp_path / "venv", "0.5.23")
    with socket.create_server(("127.0.0.1", server.port)):
        args = ProbeArgs([server], spec(), str(tmp_path), 1 << 60, [-1, 7])
        found = by_key(probe(args, context(tmp_path)))

    for key in ("patch", "layers", "port", "disk"):
        assert found[key].level == "blocker"
        assert found[key].fix
    assert "0.5.23" in found["patch"].text
    assert "[-1, 7]" in found["layers"].text
    assert "pid" in found["port"].text


def test_missing_engine_and_model_are_blockers(server: ServerSpec, tmp_path: Path) -> None:
    server.python, server.model_path = "/no/python", "/no/model"
    found = by_key(probe(ProbeArgs([server]), context(tmp_path)))

    assert found["engine"].level == found["model"].level == "blocker"


def test_a_question_that_hangs_or_fails_costs_its_own_limit_only(tmp_path: Path) -> None:
    began = time.monotonic()

    hung, failed, fine = ask_all(
        [
            Question("hung", 0.2, lambda: time.sleep(5) or Checked([])),  # type: ignore[func-returns-value]
            Question("failed", 5.0, lambda: Checked([][0])),
            Question("fine", 5.0, lambda: Checked([Finding("fine", "ok", "fine")])),
        ],
        context(tmp_path),
    )

    assert time.monotonic() - began < 2
    assert [c.findings[0].level for c in (hung, failed, fine)] == ["warning", "warning", "ok"]
    assert "no answer" in hung.findings[0].text


def test_the_identity_of_a_model_changes_with_its_weights_and_config(server: ServerSpec) -> None:
    folder = Path(server.model_path)
    first = read_model(server.model_path).sha256
    assert read_model(server.model_path).sha256 == first
    (folder / "model.safetensors").write_bytes(b"12345")
    second = read_model(server.model_path).sha256
    (folder / "config.json").write_text(json.dumps({"text_config": {"num_hidden_layers": 61, "vocab_size": 3}}))
    third = read_model(server.model_path)

    assert len({first, second, third.sha256}) == 3
    assert third.num_layers == 61
    for name in ("model.safetensors", "config.json"):
        (folder / name).unlink()
        with pytest.raises(AgentFailure):
            read_model(server.model_path)


@pytest.mark.parametrize(("args", "level"), [([], "blocker"), (["--load-format=dummy"], "ok")])
def test_only_random_weights_need_no_file(server: ServerSpec, args: list[str], level: str) -> None:
    (Path(server.model_path) / "model.safetensors").unlink()
    server.args = args
    assert checks.check_model(server, []).findings[0].level == level


def test_a_hub_name_is_not_looked_at() -> None:
    assert checks.check_model(ServerSpec("a", "python", "org/name", 1), []).findings[0].level == "warning"


@pytest.mark.parametrize(
    ("env", "warned"),
    [
        ({}, False),
        ({"http_proxy": "http://user:secret@proxy:3128"}, True),
        ({"HTTP_PROXY": "http://proxy:3128", "no_proxy": "example.org"}, True),
        ({"http_proxy": "http://proxy:3128", "NO_PROXY": "localhost, 127.0.0.1"}, False),
        ({"ALL_PROXY": "socks5://proxy", "no_proxy": "*"}, False),
    ],
)
def test_a_proxy_without_an_exception_for_loopback(
    env: dict[str, str], warned: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY", "no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)

    findings = checks.check_proxy(ServerSpec("a", "python", "/m", 1, env=env)).findings

    assert bool(findings) is warned
    assert "secret" not in repr(findings)


@pytest.mark.parametrize(
    ("changes", "level"),
    [({"tp": 2}, "ok"), ({"tp": 4}, "blocker"), ({"gpus": [1, 2]}, "blocker"), ({"gpus": [1], "tp": 2}, "blocker")],
)
def test_gpus_asked_for_and_there(changes: dict[str, object], level: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # There is no GPU on a test machine, so the answer of nvidia-smi is given.
    answer = Output(0, "NVIDIA H200, 143771, 4\nNVIDIA H200, 143771, 4\n", "")
    monkeypatch.setattr(checks, "run_command", lambda argv, limit: answer)
    wanted = ServerSpec("a", "python", "/m", 1, **changes)  # type: ignore[arg-type]

    checked = checks.check_gpus([wanted])

    assert checked.findings[-1].level == level
    assert checked.facts["gpus"] == ["NVIDIA H200 143771 MiB"] * 2


def test_no_gpu_is_a_warning_unless_all_servers_use_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(argv: list[str], limit: float) -> Output:
        raise ProbeFailed("nvidia-smi not found")

    monkeypatch.setattr(checks, "run_command", absent)

    on_gpu = ServerSpec("a", "python", "/m", 1)
    on_cpu = ServerSpec("b", "python", "/m", 2, args=["--device", "cpu"])
    assert checks.check_gpus([on_gpu, on_cpu]).findings[0].level == "warning"
    assert checks.check_gpus([on_cpu]).findings[0].level == "ok"


@pytest.mark.parametrize(
    ("scope", "capabilities", "level"),
    [("0", "0", "ok"), ("1", "0", "warning"), ("1", "80000", "ok"), ("2", "80000", "ok"), ("3", "80000", "warning")],
)
def test_ptrace_permission(scope: str, capabilities: str, level: str, monkeypatch: pytest.MonkeyPatch) -> None:
    texts = {"/proc/sys/kernel/yama/ptrace_scope": scope, "/proc/self/status": f"CapEff:\t{capabilities}\n"}
    monkeypatch.setattr(checks.procfs, "read_text", lambda path: texts[path])

    assert checks.check_ptrace().findings[0].level == level


def test_one_interpreter_with_two_python_paths_is_two_engines(server: ServerSpec, tmp_path: Path) -> None:
    other = install(tmp_path / "other", "0.5.23")
    second = replace(server, name="second", env={"PYTHONPATH": str(other.site), "HF_HOME": "/x"})

    result = probe(ProbeArgs([server, server, second], spec()), context(tmp_path))

    engines = [f.text.split(" on ")[0] for f in result.findings if f.key == "engine"]
    assert engines == ["sglang 0.5.20", "sglang 0.5.23"]
    assert second.interpreter.env == {"PYTHONPATH": str(other.site)}
