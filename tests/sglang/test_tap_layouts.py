"""The tap in real servers, in each layout and way of scheduling that the CPU engine runs, against transformers."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from demo.sglang_cpu import recipe
from fleetdump.agent.edit import release_within
from fleetdump.agent.flagrules import patch_arguments
from fleetdump.agent.formats import FileName, PieceRecord, by_stage
from fleetdump.agent.journals import Journals, join
from fleetdump.agent.logmarks import parse_log
from fleetdump.dataset.shards import verify_directory
from tests.sglang.cpuserver import RunningServer, SglangEnv, no_other_models, session_pids, start_server
from tests.sglang.test_tap_real import (
    HERE,
    LIMIT,
    SPEC,
    close_when_dead,
    generate,
    patched,
    some_prompts,
    tap_json,
)

pytestmark = pytest.mark.sglang

LAYERS = [0, 3, 6]
SHIM = HERE / "shim"


@dataclass(frozen=True)
class Case:
    """A server's layout; ``schedulers`` is how many of its processes must say the mark."""

    tp: int = 1
    schedulers: int = 1
    flags: tuple[str, ...] = ()
    shims: tuple[str, ...] = ()
    without: tuple[str, ...] = ()
    """Of the flags that a server on the CPU or the patch has."""
    environment: dict[str, str] = field(default_factory=dict)


CHUNKS = ("--chunked-prefill-size", "64")


@dataclass(frozen=True)
class WheelEnv(SglangEnv):
    """The installed interpreter and, before what it has installed, a release of SGLang in the folder ``wheel``."""

    wheel: Path = Path()

    @property
    def site_packages(self) -> Path:
        return self.wheel


@dataclass
class Captured:
    """What a server left: its run's directory and journals, what is whole of each prompt (else the reason), how that
    compares with transformers, the server's log."""

    run: Path
    journals: Journals
    pieces: dict[str, list[PieceRecord]]
    report: dict[str, Any]
    log: str


def capture(
    env: SglangEnv, case: Case, folder: Path, play: Callable[[RunningServer], dict[str, list[int]]]
) -> Captured:
    """Start a server, ``play`` with it, kill it. What ``play`` returns, ids by rid, must come out right."""
    env = replace(env, args=tuple(arg for arg in env.args if arg not in case.without))
    flags = [arg for arg in patch_arguments(SPEC, env.version) if arg not in case.without]
    log, run = folder / "server.log", folder / "cap" / "r1"
    with patched(env), start_server(env, log, case.tp, [*flags, *case.flags], variables(env, case, folder)) as server:
        prompts = play(server)
        journals = Journals(run, "main", lambda _: True)
        pieces = wait_for_samples(journals, prompts)
        for pid in session_pids(server.pid):
            os.kill(pid, signal.SIGKILL)
    close_when_dead(run)
    assert verify_directory(run).faults == []
    return Captured(run, journals, pieces, compare(env, run, prompts, pieces), log.read_text())


def variables(env: SglangEnv, case: Case, folder: Path) -> dict[str, str]:
    """The server's environment, with a tap.json that captures below ``folder``."""
    tap = tap_json(folder, LAYERS, case.schedulers)
    paths = [*([str(SHIM)] if case.shims else []), *([str(env.wheel)] if isinstance(env, WheelEnv) else [])]
    shims = {"FLEETDUMP_TEST_SHIM": ",".join(case.shims), "FLEETDUMP_TEST_NAIVE": str(folder / "naive")}
    own = {"FLEETDUMP_TAP_CONFIG": str(tap), "PYTHONPATH": os.pathsep.join(paths)}
    return {**own, **shims, **recipe.server_env(bound_ranks(env, case)), **case.environment}


def bound_ranks(env: SglangEnv, case: Case) -> int:
    """How many entries SGLang wants in its list of cores a rank: until 0.5.18 the stages of a pipeline share them."""
    return case.tp if release_within(env.version, "", "0.5.18") else case.schedulers


def wait_for_samples(journals: Journals, prompts: dict[str, list[int]]) -> dict[str, list[PieceRecord]]:
    """Each prompt's pieces, as a driver joins them."""
    end, whole = time.monotonic() + 120, {}
    while len(whole) < len(prompts):
        assert time.monotonic() < end, f"not captured: {sorted(set(prompts) - set(whole))}"
        journals.poll()
        for rid, captured in journals.captured.items():
            assert captured.skip is None or rid not in prompts, captured.skip
            pieces = join(captured.pieces, prompts[rid], len(LAYERS) + 1) if rid in prompts else None
            if pieces is not None:
                whole[rid] = pieces
        time.sleep(0.1)
    return whole


def compare(
    env: SglangEnv, run: Path, prompts: dict[str, list[int]], pieces: dict[str, list[PieceRecord]]
) -> dict[str, Any]:
    """The report of compare_hidden_states.py."""
    chosen = [[piece.shard, piece.name] for mine in pieces.values() for piece in mine]
    prompts_file, pieces_file = run.parent / "prompts.json", run.parent / "pieces.json"
    prompts_file.write_text(json.dumps(prompts))
    pieces_file.write_text(json.dumps(chosen))
    command = [str(env.python), str(HERE / "compare_hidden_states.py"), str(env.model), str(run)]
    done = subprocess.run([*command, prompts_file, pieces_file], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return dict(json.loads(done.stdout))


def send_all(server: RunningServer) -> dict[str, list[int]]:
    """Prompts around the size of a chunk: a long one alone (a replica idles beside it), then the others."""
    prompts = some_prompts("r1", 16)
    alone = max(prompts, key=lambda rid: len(prompts[rid]))
    generate(server, {alone: prompts[alone]})
    generate(server, {rid: ids for rid, ids in prompts.items() if rid != alone})
    return prompts


LAYOUTS = {
    "pipeline": Case(schedulers=2, flags=("--pp-size", "2", *CHUNKS)),
    "pipeline-tp": Case(tp=2, schedulers=4, flags=("--pp-size", "2", *CHUNKS)),
    "replicas": Case(schedulers=2, flags=("--dp-size", "2", *CHUNKS)),
    "attention": Case(
        tp=2,
        schedulers=2,
        flags=("--enable-dp-attention", "--dp-size", "2", "--chunked-prefill-size", "128"),
        shims=("data-parallel-attention",),
    ),
}
WRITERS = {
    "pipeline": ["r0", "r1"],
    "pipeline-tp": ["r0", "r2"],
    "replicas": ["r0", "r0.1"],
    "attention": ["r0", "r1"],
}
SLOTS = {"pipeline": [(0,), (1, 2, 3)], "pipeline-tp": [(0,), (1, 2, 3)]}


@pytest.mark.parametrize(
    "layout", ["pipeline", *(pytest.param(n, marks=pytest.mark.nightly) for n in LAYOUTS if n != "pipeline")]
)
def test_every_layout_captures_what_transformers_computes(sglang_env: SglangEnv, tmp_path: Path, layout: str) -> None:
    case = LAYOUTS[layout]
    captured = capture(sglang_env, case, tmp_path, send_all)
    assert captured.report["max_rel_err"] <= LIMIT, captured.report
    assert captured.log.count(SPEC.mark) == case.schedulers
    assert parse_log(captured.log.encode(), SPEC.mark).marked == sorted(parse_log(captured.log.encode()).ranks)
    roles = {
        writer.role for path in captured.run.iterdir() if (writer := getattr(FileName.parse(path.name), "writer", None))
    }
    assert sorted(roles) == WRITERS[layout]
    for pieces in captured.pieces.values():
        assert list(by_stage(pieces)) == SLOTS.get(layout, [(0, 1, 2, 3)])


LAYOUTS_OF_RELEASES = {
    "0.5.9 pipeline": replace(LAYOUTS["pipeline"], shims=("pipeline-events",)),  # no rids in the ForwardBatch
    "0.5.23 pipeline": LAYOUTS["pipeline"],  # the stream is SGLang's own account, and may owe a sum
    "0.5.23 attention": LAYOUTS["attention"],
}
"""Data-parallel attention of 0.5.9 needs CUDA (pinned memory, a Triton kernel that copies rows): test_tap_real plays
its forwards (``old_dp_attention``)."""


@pytest.mark.nightly
@pytest.mark.parametrize("name", LAYOUTS_OF_RELEASES)
def test_layouts_on_other_releases(sglang_installed: SglangEnv, tmp_path: Path, name: str) -> None:
    case, release = LAYOUTS_OF_RELEASES[name], name.split()[0]
    captured = capture(wheel_of(release, sglang_installed, tmp_path), case, tmp_path, send_all)
    assert captured.report["max_rel_err"] <= LIMIT, captured.report
    assert captured.log.count(SPEC.mark) == case.schedulers


@pytest.mark.nightly
def test_sums_that_0_5_23_owes_without_any_fusion(sglang_installed: SglangEnv, tmp_path: Path) -> None:
    env = wheel_of("0.5.23", sglang_installed, tmp_path)
    captured = capture(env, Case(tp=2, schedulers=2, flags=CHUNKS, shims=("naive",)), tmp_path, send_all)
    assert captured.report["max_rel_err"] <= LIMIT, captured.report
    assert largest_naive_error(tmp_path) > 0.01


def wheel_of(release: str, installed: SglangEnv, folder: Path) -> WheelEnv:
    """A copy of ``release``, which FLEETDUMP_TEST_WHEELS has unpacked in a folder of its name."""
    wheels = os.environ.get("FLEETDUMP_TEST_WHEELS")
    if not wheels:
        pytest.skip("FLEETDUMP_TEST_WHEELS names no folder with unpacked releases")
    wheel = folder / "wheel"
    shutil.copytree(Path(wheels) / release, wheel, symlinks=True)
    env = {**installed.env, **no_other_models(wheel, "DeepseekV3ForCausalLM")}
    return WheelEnv(installed.python, installed.model, release, env=env, wheel=wheel)


def largest_naive_error(folder: Path) -> float:
    """Of ``hidden_states + residual``, over the largest value."""
    return max(float(line) for line in (folder / "naive").read_text().split())


EVERYTHING = Case(
    tp=2,
    schedulers=2,
    flags=("--enable-mixed-chunk", *CHUNKS),
    shims=("deferred-sums", "naive"),
    without=("--disable-radix-cache", "--disable-overlap-schedule"),
    environment={"SGLANG_TEST_RETRACT": "1", "SGLANG_TEST_RETRACT_INTERVAL": "2"},
)
"""Sums deferred into the next norm, chunks beside decodes, a prefix cache, overlapped scheduling, requests that are
retracted."""
TWICE = {f"fleetdump/r1/twice/{attempt}": [7] * 70 for attempt in (1, 2)}


def play_everything(server: RunningServer) -> dict[str, list[int]]:
    """Our prompts while others decode; then one prompt twice, of which the prefix cache serves the second."""
    prompts = some_prompts("r1", 16)
    others = {f"others-{n}": [9 + n] * 40 for n in range(8)}
    decoding = threading.Thread(target=generate, args=(server, others, 48))
    decoding.start()
    for rids in (list(prompts)[:8], list(prompts)[8:]):
        generate(server, {rid: prompts[rid] for rid in rids}, extra_key=rids)
    for rid, ids in TWICE.items():
        generate(server, {rid: ids})
    decoding.join()
    first, _ = TWICE
    return {**prompts, first: TWICE[first]}


def test_every_way_of_scheduling_at_once(sglang_env: SglangEnv, tmp_path: Path) -> None:
    captured = capture(sglang_env, EVERYTHING, tmp_path, play_everything)
    assert captured.report["max_rel_err"] <= LIMIT, captured.report
    assert "'disable_overlap_schedule': False" in captured.log
    _, second = TWICE
    skip = captured.journals.captured[second].skip
    assert skip is not None
    assert (skip.reason, skip.detail) == ("prefix_missing", "rows begin at 69")
    assert largest_naive_error(tmp_path) > 0.01, "no sum was deferred: this test shows nothing"
