"""Whether ``check`` knows what a forward takes of the tap's buffers, and says what to set."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from fleetdump.agent import checks_forward, checks_host
from fleetdump.agent.forwardsize import Forward, judge, largest_forward, smaller
from fleetdump.agent.hostmessages import ProbeArgs
from fleetdump.agent.specs import ServerSpec

CHUNK = "--chunked-prefill-size"
ROW = 4 * 7168 * 2
GIB = 1 << 30


@pytest.mark.parametrize(
    ("argv", "gpu_mib", "rows", "given"),
    [
        ([], None, 4096, False),
        ([], 16_000, 2048, False),
        ([], 46_068, 4096, False),
        ([], 81_559, 8192, False),
        ([], 143_771, 8192, False),
        ([], 183_359, 16384, False),
        ([], 0, 16384, False),
        ([CHUNK, "512"], 143_771, 512, True),
        ([f"{CHUNK}=32768"], 143_771, 32768, True),
        (["--chunked-prefill", "1024"], 143_771, 1024, True),
        ([CHUNK, "-1"], 143_771, 16384, False),
        ([CHUNK, "-1", "--max-prefill-tokens", "65536"], 143_771, 65536, True),
        ([CHUNK, "8192", "--enable-dp-attention"], 143_771, 1024, True),
    ],
)
def test_the_largest_forward_is_sglangs(argv: list[str], gpu_mib: int | None, rows: int, given: bool) -> None:
    forward = largest_forward(argv, 8, gpu_mib)
    assert (forward.rows, forward.given) == (rows, given)


def test_buffers_of_two_forwards_are_right_and_of_one_are_slow() -> None:
    forward = Forward(8192, True, CHUNK)
    assert judge(forward, ROW, GIB, 2 * GIB)[0].level == "ok"
    [slow] = judge(forward, ROW, 8192 * ROW, 2 * GIB)
    assert (slow.level, "waits for the one before" in slow.text) == ("warning", True)
    assert slow.fix == "set capture.device_bytes: 896MiB"


@pytest.mark.parametrize(("given", "level"), [(True, "blocker"), (False, "warning")])
def test_a_forward_that_does_not_fit_is_told_with_both_ways_out(given: bool, level: str) -> None:
    [finding] = judge(Forward(32768, given, CHUNK), ROW, GIB, 2 * GIB)
    assert finding.level == level
    assert f"{GIB // ROW} fit into capture.device_bytes ({GIB})" in finding.text
    assert finding.fix == f"set capture.device_bytes: 3584MiB, or give the server {CHUNK} 9344"
    assert 2 * smaller(GIB // ROW) * ROW <= GIB
    [finding] = judge(Forward(32768, given, CHUNK), ROW, 100 * ROW, 2 * GIB)
    assert CHUNK not in finding.fix, "no chunk is that small"


def test_a_ring_without_room_for_a_row_is_told() -> None:
    [finding] = judge(Forward(8, True, CHUNK), ROW, GIB, ROW - 1)
    assert (finding.level, "capture.ring_bytes" in finding.fix) == ("blocker", True)


@pytest.mark.parametrize(
    ("args", "levels"),
    [
        (["--device", "cpu"], ["ok"]),
        (["--device", "cpu", CHUNK, "100000"], ["blocker"]),
        (["--device", "cpu", CHUNK, "100000", "--dtype", "bfloat16"], ["warning"]),
        (["--device", "cpu", CHUNK, "much"], ["blocker"]),
    ],
)
def test_check_reads_model_and_arguments(tmp_path: Path, args: list[str], levels: list[str]) -> None:
    config = {"architectures": ["LlamaForCausalLM"], "num_hidden_layers": 2, "hidden_size": 512, "dtype": "float32"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    server = ServerSpec("a", "python", str(tmp_path), 1, args=args)
    asked = ProbeArgs([server], capture_dir="/x", layers=[1], ring_bytes=GIB, device_bytes=300 << 20)
    assert [finding.level for finding in checks_forward.check_forward(server, asked).findings] == levels


def test_a_model_that_cannot_be_read_is_left_to_its_own_check() -> None:
    server = ServerSpec("a", "python", "/nowhere", 1)
    assert checks_forward.check_forward(server, ProbeArgs([server], layers=[1], device_bytes=GIB)).findings == []


def test_every_stage_and_replica_has_a_writer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks_host, "_memory", lambda: (1 << 40, 1 << 40))
    servers = [ServerSpec("a", "python", "m", 1, dp=2, pp=4), ServerSpec("b", "python", "m", 2)]
    [finding] = checks_host.check_capture_memory(ProbeArgs(servers, ring_bytes=GIB, device_bytes=GIB)).findings
    assert "each of 9 writing processes" in finding.text


def test_on_the_cpu_all_that_capture_takes_is_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks_host, "_memory", lambda: (1 << 40, 6 * GIB))
    on_cpu = ServerSpec("a", "python", "m", 1, args=["--device", "cpu"])
    asked = ProbeArgs([on_cpu], ring_bytes=2 * GIB, device_bytes=GIB)
    [finding] = checks_host.check_capture_memory(asked).findings
    assert finding.text.startswith("capture takes at most 3.0 GiB of memory for its one writing process")
    assert "GPU" not in finding.text
    assert finding.level == "warning", "3 GiB and 4 to spare are more than 6"
    [finding] = checks_host.check_capture_memory(replace(asked, servers=[replace(on_cpu, args=[])])).findings
    assert "2.0 GiB of pinned memory" in finding.text
    assert "1.0 GiB of its GPU" in finding.text
