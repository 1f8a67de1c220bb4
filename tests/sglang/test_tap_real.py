"""The tap inside the real SGLang against transformers, and its decisions on forwards that a CPU server never makes."""

from __future__ import annotations

import json
import os
import random
import signal
import struct
import subprocess
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from fleetdump.agent.applicable import choose_edits
from fleetdump.agent.edit import apply_edits
from fleetdump.agent.flagrules import patch_arguments
from fleetdump.agent.formats import PieceRecord, SkipRecord
from fleetdump.agent.jsonl import read_journal
from fleetdump.agent.shards import close_dead, needed_of
from fleetdump.dataset.shards import ShardReader, verify_directory
from fleetdump.patches import load_patch
from tests.sglang.cpuserver import RunningServer, SglangEnv, session_pids, start_server

HERE = Path(__file__).parent
PATCH = HERE.parents[1] / "patches" / "hidden-states"
SPEC = load_patch(PATCH)
LIMIT = 1e-4
"""Largest error of a row over the largest absolute value of its reference, in float32."""

pytestmark = pytest.mark.sglang


def tap_json(path: Path, layers: list[int], ranks: int = 1) -> Path:
    """Write a tap.json beside a capture directory ``cap``."""
    config = {"v": 1, "server": "main", "launch_id": "1f0c77aa", "layers": layers, "dir": str(path / "cap")}
    sizes = {"shard_bytes": 1_000_000, "header_bytes": 65536, "idle_close_seconds": 1.0, "ring_bytes": 1 << 26}
    (path / "tap.json").write_text(json.dumps({**config, **sizes, "ranks": ranks}))
    return path / "tap.json"


# --------------------------------------------------------------------------- made-up forwards
@dataclass
class Played:
    """What one case of tap_forwards.py left: ``pieces`` maps (sample, start) to rows of one value a slot."""

    pieces: dict[tuple[str, int], list[list[float]]]
    skips: dict[str, tuple[str, str]]
    reduced: list[int]
    log: str
    run: Path


CAPTURED = {
    "plain": ([1, 13, 14], [], {("a", 0): 2, ("b", 0): 3}),
    "fused": ([1, 16, 14], [2], {("a", 0): 2}),  # the partial sum is completed, on a clone
    "snapshot": ([100, 300, 400], [2, 2, 2], {("a", 0): 2}),
    "padded_rows": ([1, 13, 14], [], {("a", 0): 3}),
    "chunks": ([1, 13, 14], [], {("a", 0): 2, ("a", 2): 2, ("a", 4): 2}),
    "repeat": ([1, 13, 14], [], {("a", 0): 4, ("a", 4): 2}),  # retracted, and partly in the prefix cache
    "unsorted": ([14, 1, 14], [], {("a", 0): 2}),  # what would enter a layer behind the last one is the final state
    "gemma": ([1, 13, 14], [], {("a", 0): 2}),
    "plain_layers": ([1, 13, 14], [], {("a", 0): 2}),
    "boundary": ([1, 13, 14], [], {("a", 0): 2}),
    "dp_attention": ([1, 13, 14], [], {("a", 0): 2}),
    "dp_owed": ([100, 300, 400], [2, 2, 2], {("a", 0): 2}),
    "old_rids": ([1, 13, 14], [], {("a", 0): 2}),  # named by the scheduler's batch
    "old_fused": ([1, 16, 14], [2], {("a", 0): 2}),
    "old_dp_attention": ([1, 13, 14], [], {("a", 0): 2}),
    "no_prefill_graph_0510": ([1, 13, 14], [], {("a", 0): 2}),
    "first_stage": ([1], [], {("a", 0): 2}),
    "old_first_stage": ([1], [], {("a", 0): 2}),
    "last_stage": ([13, 14], [], {("a", 0): 2}),
}
"""Values of the slots, rows of each collective, rows by sample and position."""
SKIPPED = {
    "scattered_rows": ("rows_mismatch", "3 tokens"),
    "two_batch_overlap": ("capture_error", "two-batch overlap"),
    "loop_cut_short": ("capture_error", "the loop ran 2"),
    "speculative": ("capture_error", "speculative"),
    "cp_metadata": ("capture_error", "context parallelism"),
    "nsa_cp_metadata": ("capture_error", "context parallelism"),
    "snapshot_fails": ("capture_error", "finalize handoff"),
    "broken_ids": ("capture_error", "NoneType"),
    "partial_stage": ("capture_error", "the pipeline stage hands on a partial sum"),
}
REFUSED = {
    "context_parallel": "splits the rows",
    "scattered": "split over the ranks at layers [0, 1, 2]",
    "scattered_boundary": "split over the ranks",
    "scattered_boundary_0521": "split over the ranks",
    "flag_enable_two_batch_overlap": "two-batch overlap",
    "flag_enable_attn_tp_input_scattered": "--enable-attn-tp-input-scattered",
    "flag_enable_layernorm_sp": "--enable-layernorm-sp",
    "flag_enable_nsa_prefill_context_parallel": "context parallelism",
    "flag_enable_dsa_prefill_context_parallel": "context parallelism",
    "flag_enable_prefill_context_parallel": "context parallelism",
    "flag_enable_prefill_cp": "context parallelism",
    "flag_speculative_algorithm": "speculative",
    "flag_enable_torch_compile": "--enable-torch-compile",
    "flag_enable_pdmux": "--enable-pdmux",
    "flag_enable_piecewise_cuda_graph": "prefill CUDA graph",
    "prefill_graph": "prefill CUDA graph",
    "prefill_graph_0510": "prefill CUDA graph",
    "no_layout": "TypeError",
}
LEFT_ALONE = ["decode", "target_verify", "nobodys", "no_rids", "broken_batch", "old_other_batch", "old_broken_note"]
LEFT_ALONE += ["converted", "empty_stage", "compiling", "dp_owed_decode"]
JOINED = {"dp_owed_idle": 0, "dp_owed_foreign": 3, "dp_owed_padded": 1, "dp_owed_broken": 2}
"""Nothing of ours, or nothing that can be told, in a forward whose sums run over ranks that have: rows."""
MORE = ["other_rank", "selfcheck_other_rank", "prefix_missing", "again", "capturing"]


@pytest.fixture(scope="module")
def play(sglang_installed: SglangEnv, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Played]:
    """Plays all cases at once (importing torch takes longest) and gives what one left."""
    root = tmp_path_factory.mktemp("forwards")
    for case in [*CAPTURED, *SKIPPED, *REFUSED, *LEFT_ALONE, *JOINED, *MORE]:
        (root / case).mkdir()
        tap_json(root / case, [3, 0] if case == "unsorted" else [0, 2])
    command = [str(sglang_installed.python), str(HERE / "tap_forwards.py"), str(PATCH), str(root)]
    subprocess.run(command, check=True, timeout=240)

    def played(case: str) -> Played:
        run, log = root / case / "cap" / "r", (root / case / "log").read_text()
        assert (root / case / "out.json").exists(), log
        records = [record for path in run.glob("journal-*.jsonl") for record in read_journal(path)[0]]
        pieces = {(r.rid.split("/")[2], r.start): values(run, r) for r in records if isinstance(r, PieceRecord)}
        skips = {r.rid.split("/")[2]: (r.reason, r.detail) for r in records if isinstance(r, SkipRecord)}
        return Played(pieces, skips, json.loads((root / case / "out.json").read_text())["reduced"], log, run)

    return played


def values(run: Path, piece: PieceRecord) -> list[list[float]]:
    """Rows of slots; every number of a slot must be the same."""
    with ShardReader(run / piece.shard) as reader:
        rows, slots, hidden = piece.shape
        flat = struct.unpack(f"<{rows * slots * hidden}f", reader.read(piece.name))
    rows_of = [flat[at : at + hidden] for at in range(0, len(flat), hidden)]
    assert all(len(set(slot)) == 1 for slot in rows_of)
    return [[slot[0] for slot in rows_of[at : at + slots]] for at in range(0, len(rows_of), slots)]


@pytest.mark.parametrize("case", CAPTURED)
def test_the_stream_is_captured_where_it_should_be(play: Callable[[str], Played], case: str) -> None:
    value, reduced, rows = CAPTURED[case]
    played = play(case)
    assert "fleetdump-tap 1 armed rank=0/2 pp=" in played.log
    assert f"layers={'[3,0]' if case == 'unsorted' else '[0,2]'} model=SimpleNamespace" in played.log
    assert (played.skips, played.reduced) == ({}, reduced)
    assert {key: len(got) for key, got in played.pieces.items()} == rows
    assert all(row == value for got in played.pieces.values() for row in got)


def test_other_ranks_take_part_in_the_collective_and_write_nothing(play: Callable[[str], Played]) -> None:
    played = play("other_rank")
    assert "armed rank=1/2" in played.log
    assert played.reduced == [2]
    assert (played.pieces, played.skips) == ({}, {})
    assert not played.run.parent.exists()


def test_other_ranks_write_what_a_self_check_compares(play: Callable[[str], Played]) -> None:
    played = play("selfcheck_other_rank")
    assert played.reduced == [4]
    ranks = played.run.parent / "selfcheck-r" / "ranks"
    assert [path.name for path in played.run.parent.iterdir()] == ["selfcheck-r"]
    assert [path.name for path in ranks.parent.iterdir()] == ["ranks"]
    assert (ranks.stat().st_mode & 0o777, ranks.parent.stat().st_mode & 0o777) == (0o700, 0o700)
    records = read_journal(ranks / "journal-main-1f0c77aa-r1.jsonl")[0]
    assert [values(ranks, record) for record in records if isinstance(record, PieceRecord)] == [[[1, 16, 14]] * 2]
    assert verify_directory(ranks).faults == []


@pytest.mark.parametrize("case", JOINED)
def test_sums_over_replicas_are_completed_by_ranks_that_have_nothing_of_ours(
    play: Callable[[str], Played], case: str
) -> None:
    played = play(case)
    assert played.reduced == [JOINED[case]] * 3
    assert (played.pieces, played.skips) == ({}, {})


def test_a_graph_of_prefill_being_captured_is_the_end_of_capturing(play: Callable[[str], Played]) -> None:
    played = play("capturing")
    assert "fleetdump-tap 1 armed" in played.log
    assert "fleetdump-tap 1 refused (a replayed prefill CUDA graph runs no Python) rank=0/2" in played.log
    assert played.skips["a"] == ("capture_error", "a replayed prefill CUDA graph runs no Python")


def test_a_stage_says_which_slots_it_holds(play: Callable[[str], Played]) -> None:
    for case, writer, slots in (("first_stage", "r0", [0]), ("last_stage", "r2", [1, 2]), ("plain", "r0", [0, 1, 2])):
        journal = play(case).run / f"journal-main-1f0c77aa-{writer}.jsonl"
        pieces = [record for record in read_journal(journal)[0] if isinstance(record, PieceRecord)]
        assert [piece.slots for piece in pieces] == [slots] * len(pieces) != []
        with ShardReader(journal.with_name(pieces[0].shard)) as reader:
            assert json.loads(reader.header.metadata["slots"]) == slots
    assert not list(play("first_stage").run.glob("norm-*")), "the first stage has no final norm"
    assert list(play("last_stage").run.glob("norm-*"))


def test_a_cached_prefix_is_a_skip_and_the_batchs_others_are_not(play: Callable[[str], Played]) -> None:
    played = play("prefix_missing")
    assert played.skips == {"a": ("prefix_missing", "rows begin at 8")}
    assert {sample for sample, _ in played.pieces} == {"b"}


def test_a_request_that_begins_anew_is_written_anew(play: Callable[[str], Played]) -> None:
    records = read_journal(play("again").run / "journal-main-1f0c77aa-r0.jsonl")[0]
    assert [record.start for record in records if isinstance(record, PieceRecord)] == [0, 0]


@pytest.mark.parametrize("case", SKIPPED)
def test_what_cannot_be_captured_rightly_is_a_skip_and_the_model_goes_on(
    play: Callable[[str], Played], case: str
) -> None:
    reason, detail = SKIPPED[case]
    played = play(case)
    assert played.pieces == {}
    assert played.skips["a"][0] == reason
    assert detail in played.skips["a"][1]
    assert played.reduced == []


@pytest.mark.parametrize("case", REFUSED)
def test_a_server_that_cannot_be_captured_is_refused_in_the_log(play: Callable[[str], Played], case: str) -> None:
    played = play(case)
    assert "fleetdump-tap 1 refused" in played.log
    assert REFUSED[case] in played.log
    assert SPEC.mark not in played.log
    assert played.pieces == {}
    assert played.skips["a"][0] == "capture_error"
    assert played.reduced == []


def test_a_norm_of_gemmas_kind_is_saved_as_the_factor_that_it_multiplies_by(play: Callable[[str], Played]) -> None:
    for case, dtype, factor in (("gemma", "F32", 2.0), ("plain", "BF16", 1.0)):
        played = play(case)
        with ShardReader(played.run / "norm-main-1f0c77aa.safetensors") as reader:
            raw = reader.read("weight")
            assert reader.tensors["weight"].dtype == dtype
        # bfloat16 is the upper half of a float32
        raw = raw if dtype == "F32" else b"".join(b"\0\0" + raw[at : at + 2] for at in range(0, len(raw), 2))
        assert set(struct.unpack("<4f", raw)) == {factor}


@pytest.mark.parametrize("case", LEFT_ALONE)
def test_other_forwards_are_left_alone(play: Callable[[str], Played], case: str) -> None:
    played = play(case)
    assert (played.pieces, played.skips, played.reduced) == ({}, {}, [])


# --------------------------------------------------------------------------- the real server
@contextmanager
def patched(env: SglangEnv) -> Iterator[None]:
    """The environment with our patch in it, put there as fleetdump does: by os.replace."""
    edits = choose_edits(SPEC, env.version, ["DeepseekV3ForCausalLM"])
    modules = {edit.module: env.site_packages / f"{edit.module.replace('.', '/')}.py" for edit in edits}
    originals = {path: path.read_bytes() for path in modules.values()}
    beside = [env.site_packages / name for name in SPEC.files]
    try:
        for module, path in modules.items():
            mine = [edit for edit in edits if edit.module == module]
            put(path, apply_edits(originals[path].decode(), mine, env.version, "fleetdump").source.encode())
        for path in beside:
            put(path, SPEC.files[path.name].encode())
        yield
    finally:
        for path, original in originals.items():
            put(path, original)
        for path in beside:
            path.unlink(missing_ok=True)


def put(path: Path, content: bytes) -> None:
    temporary = path.with_name(path.name + ".new")
    temporary.write_bytes(content)
    os.replace(temporary, path)


def some_prompts(run: str, count: int) -> dict[str, list[int]]:
    """Prompts by rid, with lengths around the chunk size of 64."""
    source = random.Random(run)
    lengths = [1, 63, 64, 65, 150, *(source.randrange(2, 120) for _ in range(count))][:count]
    return {f"fleetdump/{run}/s{n}/1": [source.randrange(3, 300) for _ in range(k)] for n, k in enumerate(lengths)}


def generate(server: RunningServer, prompts: dict[str, list[int]], tokens: int = 1, **more: Any) -> list[Any]:
    """Send all prompts as one batch, ``tokens`` to be generated of each; returns the server's answers."""
    sampling = {"temperature": 0, "max_new_tokens": tokens}
    body = {"rid": list(prompts), "input_ids": list(prompts.values()), "sampling_params": sampling, **more}
    request = urllib.request.Request(
        f"{server.url}/generate", json.dumps(body).encode(), {"content-type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=300) as answer:
        return list(json.loads(answer.read()))


def wait_for_rows(journal: Path, rows: int) -> None:
    end = time.monotonic() + 30
    while sum(record.rows for record in read_journal(journal)[0] if isinstance(record, PieceRecord)) < rows:
        assert time.monotonic() < end, "the rows did not come"
        time.sleep(0.1)


def close_when_dead(run: Path) -> None:
    """Close what the killed ranks left. The kernel lets a big process's locks go a while after it is a zombie."""
    end = time.monotonic() + 30
    close_dead(run, needed_of([]))
    while list(run.glob("*.part")):
        assert time.monotonic() < end, "a killed rank still holds its journal"
        time.sleep(0.2)
        close_dead(run, needed_of([]))


@pytest.mark.nightly  # every day test_tap_layouts shows TP 2 with all that makes it harder, the demo TP 1
@pytest.mark.parametrize("tp", [1, 2])
def test_captured_states_are_those_of_transformers(sglang_env: SglangEnv, tmp_path: Path, tp: int) -> None:
    """Batches, chunks and one rank's death in the middle of writing, on one server."""
    environment = {"FLEETDUMP_TAP_CONFIG": str(tap_json(tmp_path, [0, 3, 6], tp))}
    flags = [*patch_arguments(SPEC, sglang_env.version), "--chunked-prefill-size", "64"]
    prompts, log = some_prompts("r1", 9), tmp_path / "server.log"
    run = tmp_path / "cap" / "r1"
    with patched(sglang_env), start_server(sglang_env, log, tp, flags, environment) as server:
        text = log.read_text()
        assert all(f"{SPEC.mark} rank={n}/{tp} pp=0/1 layers=[0,3,6] model=DeepseekV2Model" in text for n in range(tp))
        assert not (tmp_path / "cap").exists(), "warm-up and health probes are not ours"
        assert len(generate(server, prompts)) == len(prompts)
        # An answer does not wait for the disk: what is not yet journalled when the server is killed is lost, rightly.
        wait_for_rows(run / "journal-main-1f0c77aa-r0.jsonl", sum(map(len, prompts.values())))
        for pid in session_pids(server.pid):
            os.kill(pid, signal.SIGKILL)
    close_when_dead(run)
    assert verify_directory(run).faults == []
    (tmp_path / "prompts.json").write_text(json.dumps(prompts))
    command = [str(sglang_env.python), str(HERE / "compare_hidden_states.py"), str(sglang_env.model), str(run)]
    done = subprocess.run([*command, str(tmp_path / "prompts.json")], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["rows"] == sum(map(len, prompts.values()))
    assert report["pieces"] > report["samples"], "no prompt was cut into chunks"
    assert report["max_rel_err"] <= LIMIT, report
