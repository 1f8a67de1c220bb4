"""Checks of a host: each finding says ok, warning or blocker with the next step, and none can hold up the others."""

from __future__ import annotations

import errno
import json
import os
import resource
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fleetdump.agent import checks_disk, checks_gpu, checks_host, checks_model, checks_net
from fleetdump.agent.evidence_host import DiskFacts
from fleetdump.agent.findings import Checked
from fleetdump.agent.hostmessages import ProbeArgs, ProbeResult
from fleetdump.agent.model import read_model
from fleetdump.agent.probe import Question, ask_all, probe
from fleetdump.agent.probes.bounded import Output, ProbeFailed
from fleetdump.agent.procfs import start_time
from fleetdump.agent.protocol import AgentFailure, Finding
from fleetdump.agent.server import ServerRecord, boot_id, save_record
from fleetdump.agent.specs import ServerSpec
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


def test_an_interpreter_that_is_not_there_is_one_blocker_and_nothing_else_suffers(
    server: ServerSpec, tmp_path: Path
) -> None:
    server.python = str(tmp_path / "nowhere" / "python")
    result = probe(ProbeArgs([server], spec(), str(tmp_path), 0, [1]), context(tmp_path))
    (blocker,) = [finding for finding in result.findings if finding.level == "blocker"]
    assert server.python in blocker.text
    assert blocker.fix
    assert "could not be checked" not in " ".join(finding.text for finding in result.findings)


def test_a_good_host_has_no_blocker(server: ServerSpec, tmp_path: Path) -> None:
    args = ProbeArgs([server], spec(), str(tmp_path / "not" / "yet"), 1000, [1, 6], measure_writes=True)

    result = probe(args, context(tmp_path))

    assert [f for f in result.findings if f.level == "blocker"] == []
    found = by_key(result)
    assert {"engine", "patch", "model", "port", "disk", "memory", "gpus", "ptrace", "limits", "writes"} <= set(found)
    assert found["patch"].text == "patch probe 1 would apply"
    assert result.engine == "sglang 0.5.20"
    assert result.model is not None
    assert (result.model.num_layers, result.model.dtype) == (6, "bfloat16")
    assert result.memory_bytes > 0
    assert result.disk_free_bytes > 0
    assert abs(result.time - time.time()) < 60
    assert not (tmp_path / "state").exists()
    assert not list(tmp_path.glob(".fleetdump*"))


def test_every_mistake_is_found_in_one_go(server: ServerSpec, tmp_path: Path) -> None:
    install(tmp_path / "venv", "0.5.23")
    with socket.create_server(("127.0.0.1", server.port)):
        args = ProbeArgs([server], spec(), str(tmp_path), 1 << 50, [-1, 7])
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
    assert checks_model.check_model(server, []).findings[0].level == level


@pytest.mark.parametrize(
    ("env", "warned"),
    [
        ({}, False),
        ({"http_proxy": "http://user:secret@proxy:3128"}, True),
        ({"HTTP_PROXY": "http://proxy:3128", "no_proxy": "example.org"}, True),
        ({"http_proxy": "http://proxy:3128", "NO_PROXY": "localhost, 127.0.0.1"}, False),
        ({"ALL_PROXY": "socks5://proxy", "no_proxy": "*"}, False),
        ({"http_proxy": "http://proxy:3128", "no_proxy": "127.0.0.0/8"}, False),
        ({"http_proxy": "http://proxy:3128", "no_proxy": "localhost"}, True),
    ],
)
def test_a_proxy_without_an_exception_for_loopback(
    env: dict[str, str], warned: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY", "no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)

    for host in ("127.0.0.1", "0.0.0.0"):
        findings = checks_net.check_proxy(ServerSpec("a", "python", "/m", 1, host=host, env=env)).findings

        assert bool(findings) is warned
        assert "secret" not in repr(findings)
        assert not warned or "NO_PROXY: 127.0.0.1" in findings[0].fix


@pytest.mark.parametrize(
    ("release", "port", "env", "fix"),
    [
        ("0.5.10", 60000, {}, ""),
        ("0.5.11", 55535, {}, ""),
        ("0.5.11", 55536, {}, "at most 55535, or add SGLANG_GRPC_PORT: 55535"),
        ("0.5.15.post1", 65535, {}, "at most 55535"),
        ("0.5.14", 60000, {"SGLANG_GRPC_PORT": "50051"}, ""),
        ("0.5.14", 8000, {"SGLANG_GRPC_PORT": "70000"}, "give SGLANG_GRPC_PORT a free port"),
        ("0.5.16", 60000, {}, ""),
        ("0.5.23", 60000, {}, ""),
    ],
)
def test_a_port_without_room_for_grpc_above_it(
    release: str, port: int, env: dict[str, str], fix: str, engine: Install, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As ``ServerArgs`` of 0.5.11 to 0.5.15 has it: refused although nobody asked for gRPC."""
    monkeypatch.delenv("SGLANG_GRPC_PORT", raising=False)
    install(engine.root, release)
    findings = checks_net.check_grpc_port(ServerSpec("a", engine.python, "/m", port, env=env)).findings
    assert [finding.level for finding in findings] == (["blocker"] if fix else [])
    assert not fix or fix in findings[0].fix


def test_the_port_for_grpc_is_among_the_questions(server: ServerSpec, tmp_path: Path) -> None:
    install(Path(server.python).parents[1], "0.5.14")
    server.port = 55536
    found = [finding for finding in probe(ProbeArgs([server]), context(tmp_path)).findings if finding.key == "port"]
    assert "blocker" in {finding.level for finding in found}


@pytest.mark.parametrize(
    ("changes", "level"),
    [({"tp": 2}, "ok"), ({"tp": 4}, "blocker"), ({"gpus": [1, 2]}, "blocker"), ({"gpus": [1], "tp": 2}, "blocker")],
)
def test_gpus_asked_for_and_there(
    changes: dict[str, object], level: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checks_gpu, "run_command", nvidia_smi([4, 4]))
    wanted = ServerSpec("a", "python", "/m", 1, **changes)  # type: ignore[arg-type]

    checked = checks_gpu.check_gpus([wanted], context(tmp_path).state)

    assert checked.findings[-1].level == level
    assert checked.facts["gpus"] == ["NVIDIA H200 143771 MiB"] * 2
    assert "2 x NVIDIA H200 143771 MiB, driver 550.1" in checked.findings[0].text


def nvidia_smi(used: list[int], *processes: tuple[int, int, int]) -> Callable[[list[str], float], Output]:
    """There is no GPU on a test machine, so the answers of nvidia-smi are given: MiB used of each GPU, and (GPU, pid,
    MiB) of processes."""
    gpus = [f"{n}, NVIDIA H200, 143771, {mib}, 550.1, GPU-{n}\n" for n, mib in enumerate(used)]
    apps = [f"GPU-{gpu}, {pid}, {mib}\n" for gpu, pid, mib in processes]
    return lambda argv, limit: Output(0, "".join(gpus if "--query-gpu" in argv[1] else apps), "")


@pytest.mark.parametrize(
    ("changes", "mib", "level"),
    [
        ({}, 100, "ok"),
        ({}, 4000, "warning"),
        ({}, 90_000, "blocker"),
        ({"gpus": [0]}, 90_000, "ok"),
        ({"args": ["--mem-fraction-static", "0.3"]}, 90_000, "warning"),
        ({"args": ["--device", "cpu"]}, 90_000, "ok"),
    ],
)
def test_a_gpu_that_somebody_else_uses(
    changes: dict[str, Any], mib: int, level: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with subprocess.Popen(["sleep", "60"]) as other:
        monkeypatch.setattr(checks_gpu, "run_command", nvidia_smi([4, mib], (1, other.pid, mib)))
        wanted = ServerSpec(
            "a", "python", "/m", 1, **{"tp": 2, **changes, **({"tp": 1} if changes.get("gpus") else {})}
        )
        finding = checks_gpu.check_gpus([wanted], context(tmp_path).state).findings[-1]
        other.kill()
    assert finding.level == level
    if level != "ok":
        assert f"GPU 1 is in use: pid {other.pid} of user" in finding.text
        assert "sleep 60" in finding.text
        assert finding.fix


def test_memory_of_no_process_that_is_seen_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks_gpu, "run_command", nvidia_smi([90_000, 4]))
    finding = checks_gpu.check_gpus([ServerSpec("a", "python", "/m", 1, tp=2)], context(tmp_path).state).findings[-1]
    assert (finding.level, finding.text.partition(":")[0]) == ("blocker", "GPU 0 is in use")
    assert "another container" in finding.text


def test_what_an_earlier_server_left_is_ours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank whose launcher was killed: named, and no stranger on its GPU."""
    ctx = context(tmp_path)
    script = "import subprocess, sys; p = subprocess.Popen(['sleep', '60']); print(p.pid, flush=True); p.wait()"
    argv = [sys.executable, "-c", script]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True, start_new_session=True) as launcher:
        assert launcher.stdout is not None
        rank = int(launcher.stdout.readline())
        record = ServerRecord(
            name="main", pid=launcher.pid, start_time=start_time(launcher.pid) or 0, launch_id="0", port=1,
            host="", python="", model_path="", tp=1, argv=[], env=[], log="", identity="", started_at=time.time(),
            boot=boot_id(),
        )  # fmt: skip
        save_record(ctx.state, record)
        assert checks_gpu.check_orphans(ctx.state).findings == []
        launcher.kill()
    monkeypatch.setattr(checks_gpu, "run_command", nvidia_smi([90_000], (0, rank, 90_000)))
    try:
        (orphans,) = checks_gpu.check_orphans(ctx.state).findings
        gpus = checks_gpu.check_gpus([ServerSpec("main", "python", "/m", 1)], ctx.state).findings
    finally:
        os.kill(rank, signal.SIGKILL)
    assert (orphans.level, f"pid {rank}" in orphans.text) == ("warning", True)
    assert [finding.level for finding in gpus] == ["ok"]


def test_no_gpu_is_a_warning_unless_all_servers_use_the_cpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(argv: list[str], limit: float) -> Output:
        raise ProbeFailed("nvidia-smi not found")

    monkeypatch.setattr(checks_gpu, "run_command", absent)
    state = context(tmp_path).state
    on_gpu = ServerSpec("a", "python", "/m", 1)
    on_cpu = ServerSpec("b", "python", "/m", 2, args=["--device", "cpu"])
    assert checks_gpu.check_gpus([on_gpu, on_cpu], state).findings[0].level == "warning"
    assert checks_gpu.check_gpus([on_cpu], state).findings[0].level == "ok"


# --------------------------------------------------------------------------- the capture directory
def disk_args(server: ServerSpec, place: Path, **changes: Any) -> ProbeArgs:
    return replace(ProbeArgs([server], None, str(place), layers=[1, 3], shard_bytes=4 << 30), **changes)


def facts(**changes: Any) -> DiskFacts:
    values = {"free_bytes": 100 << 30, "total_bytes": 200 << 30, "free_inodes": 1 << 20, "fstype": "xfs"}
    return DiskFacts("capture", "/nvme", **{**values, **changes})


A_TOKEN = 3 * 8 * 2 + 5
"""Two layers and the final state of 8 bfloat16, an id and a mask byte."""


@pytest.mark.parametrize(
    ("tokens", "there", "levels", "words"),
    [
        (0, {}, ["ok"], f"room for {(100 << 30) / A_TOKEN / 1e6:.1f} M tokens of {A_TOKEN} bytes"),
        (10**9, {}, ["ok"], "about 49.4 GiB are needed for roughly 1000.00 M tokens"),
        (2 * 10**9, {}, ["warning"], "about 98.7 GiB are needed"),
        (3 * 10**9, {}, ["blocker"], "about 148.1 GiB are needed"),
        (0, {"free_bytes": 1 << 20}, ["blocker"], "1 MiB free"),
        (33_658, {}, ["ok"], f"2 MiB are needed for roughly 33,658 tokens of {A_TOKEN} bytes, 64 MiB at least"),
        (0, {"free_inodes": 9000}, ["warning"], "only 9000 inodes"),
        (10**9, {"free_inodes": 30}, ["blocker"], "up to 39 files"),
        (0, {"free_inodes": -1}, ["ok"], "xfs"),
        (0, {"fstype": "nfs4"}, ["ok", "warning"], "lies on nfs4"),
        (0, {"fstype": "tmpfs"}, ["ok", "warning"], "lies in memory"),
    ],
)
def test_room_for_the_data_set(
    tokens: int, there: dict[str, Any], levels: list[str], words: str, server: ServerSpec, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(checks_disk.host, "disk", lambda use, path: facts(**there))
    found = checks_disk.check_disk(disk_args(server, tmp_path, tokens=tokens)).findings
    assert [finding.level for finding in found] == levels
    assert words in found[-1].text, found
    assert all(finding.fix for finding in found if finding.level != "ok")


@pytest.mark.parametrize(("dtype", "factor"), [("auto", 2), ("float32", 4), ("half", 2)])
def test_bytes_of_a_token_follow_the_servers_dtype(dtype: str, factor: int, server: ServerSpec, tmp_path: Path) -> None:
    server.args += ["--dtype", dtype]
    assert checks_disk.bytes_a_token(disk_args(server, tmp_path)) == 3 * 8 * factor + 5


def test_the_disk_is_timed_and_nothing_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks_disk, "PROBE_BYTES", 4 << 20)
    written, seconds = checks_disk.measure_writes(str(tmp_path))
    assert written >= 4 << 20
    assert seconds > 0
    assert list(tmp_path.iterdir()) == []

    def no_nameless(path: str, flags: int, mode: int = 0o777) -> int:
        if flags & os.O_TMPFILE == os.O_TMPFILE:
            raise OSError(errno.EOPNOTSUPP, "Operation not supported")
        return real(path, flags, mode)

    real = os.open
    monkeypatch.setattr(os, "open", no_nameless)  # as on a network file system
    assert checks_disk.measure_writes(str(tmp_path))[0] >= 4 << 20
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("rate", "level"), [(50e6, "warning"), (2e9, "ok")])
def test_a_slow_disk_is_told_with_what_it_will_cost(
    rate: float, level: str, server: ServerSpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checks_disk.host, "disk", lambda use, path: facts())
    monkeypatch.setattr(checks_disk, "measure_writes", lambda folder: (round(rate), 1.0))
    (found,) = checks_disk.check_writes(disk_args(server, tmp_path, tokens=10**10)).findings
    assert found.level == level
    assert "take" in found.text.partition(": ")[2]


@pytest.mark.parametrize(
    ("tokens", "told"),
    [
        (33_658, "take less than a second"),
        (10**8, "take 53 s at least"),
        (10**9, "take 9 min at least"),
        (10**10, "take 1.5 h at least"),
    ],
)
def test_the_time_that_writing_takes_has_its_own_unit(
    tokens: int, told: str, server: ServerSpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checks_disk.host, "disk", lambda use, path: facts())
    monkeypatch.setattr(checks_disk, "measure_writes", lambda folder: (100 * 10**6, 1.0))
    (found,) = checks_disk.check_writes(disk_args(server, tmp_path, tokens=tokens)).findings
    assert found.text.endswith(told)


def test_a_folder_that_may_not_be_written_is_not_timed(server: ServerSpec, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks_disk.os, "access", lambda path, mode: False)
    args = disk_args(server, Path("/"))
    assert checks_disk.check_writes(args).findings == []
    assert checks_disk.check_disk(args).findings[0].level == "blocker"


# --------------------------------------------------------------------------- limits
@pytest.mark.parametrize(
    ("limits", "infiniband", "pattern", "warned"),
    [
        ({}, False, "core", []),
        ({"NOFILE": (1024, 4096)}, False, "core", ["4096 open files"]),
        ({"MEMLOCK": (65536, 65536)}, False, "core", []),
        ({"MEMLOCK": (65536, 65536)}, True, "core", ["64 KiB of locked memory"]),
        ({"CORE": (-1, -1)}, False, "/var/core.%p", ["core dumps are unlimited"]),
        ({"CORE": (-1, -1)}, False, "|/usr/lib/systemd-coredump %P", []),
    ],
)
def test_limits(
    limits: dict[str, tuple[int, int]], infiniband: bool, pattern: str, warned: list[str], tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    usual = {"NOFILE": (1024, 1 << 20), "MEMLOCK": (-1, -1), "CORE": (0, -1)}
    by_number = {getattr(resource, f"RLIMIT_{name}"): value for name, value in {**usual, **limits}.items()}
    monkeypatch.setattr(checks_host.resource, "getrlimit", lambda which: by_number[which])
    monkeypatch.setattr(checks_host, "INFINIBAND", str(tmp_path if infiniband else tmp_path / "none"))
    monkeypatch.setattr(checks_host.procfs, "read_text", lambda path: pattern)
    (tmp_path / "mlx5_0").mkdir()
    found = [finding for finding in checks_host.check_limits().findings if finding.level == "warning"]
    assert len(found) == len(warned)
    assert all(word in finding.text and finding.fix for finding, word in zip(found, warned, strict=True))


def test_a_missing_py_spy_is_no_warning_where_ours_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks_host.shutil, "which", lambda name: None if name == "py-spy" else f"/usr/bin/{name}")
    monkeypatch.setattr(checks_host.platform, "machine", lambda: "x86_64")
    assert [finding.level for finding in checks_host.check_tools().findings] == ["ok"]
    monkeypatch.setattr(checks_host.platform, "machine", lambda: "ppc64le")
    (found,) = checks_host.check_tools().findings
    assert "py-spy is missing" in found.text


@pytest.mark.parametrize(
    ("scope", "capabilities", "level"),
    [("0", "0", "ok"), ("1", "0", "warning"), ("1", "80000", "ok"), ("2", "80000", "ok"), ("3", "80000", "warning")],
)
def test_ptrace_permission(scope: str, capabilities: str, level: str, monkeypatch: pytest.MonkeyPatch) -> None:
    texts = {"/proc/sys/kernel/yama/ptrace_scope": scope, "/proc/self/status": f"CapEff:\t{capabilities}\n"}
    monkeypatch.setattr(checks_host.procfs, "read_text", lambda path: texts[path])

    assert checks_host.check_ptrace().findings[0].level == level


def test_one_interpreter_with_two_python_paths_is_two_engines(server: ServerSpec, tmp_path: Path) -> None:
    other = install(tmp_path / "other", "0.5.23")
    second = replace(server, name="second", env={"PYTHONPATH": str(other.site), "HF_HOME": "/x"})

    result = probe(ProbeArgs([server, server, second], spec()), context(tmp_path))

    engines = [f.text.split(" on ")[0] for f in result.findings if f.key == "engine"]
    assert engines == ["sglang 0.5.20", "sglang 0.5.23"]
    assert second.interpreter.env == {"PYTHONPATH": str(other.site)}
