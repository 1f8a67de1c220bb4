"""The tensor matrix: a spanning set of its pairs on real servers, and its own judgement on captures that are wrong."""

from __future__ import annotations

import itertools
import json
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from demo.sglang_cpu import recipe
from fleetdump.agent.applicable import choose_edits
from fleetdump.agent.edit import release_within
from tests.sglang import tensor_matrix as matrix
from tests.sglang.matrix_pair import (
    LIMIT,
    SPEC,
    Outcome,
    Pair,
    Served,
    Wrong,
    check_cached,
    compare,
    last_words,
    require_marks,
    try_pair,
)

HIDDEN = 4
ARCHITECTURES = {
    "deepseek-v3": "DeepseekV3ForCausalLM",
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen2-moe": "Qwen2MoeForCausalLM",
    "qwen3-moe": "Qwen3MoeForCausalLM",
    "glm4-moe": "Glm4MoeForCausalLM",
    "glm4-moe-lite": "Glm4MoeLiteForCausalLM",
    "gpt-oss": "GptOssForCausalLM",
    "minimax-m2": "MiniMaxM2ForCausalLM",
    "qwen3-next": "Qwen3NextForCausalLM",
}


PAIRS = [
    pytest.param(
        pair, marks=[] if pair.release == matrix.SNAPSHOT else pytest.mark.nightly, id=pair.key.replace(" ", "-")
    )
    for pair in matrix.SPANNING
]
"""Every day the newest release: it has the other kind of edit than the installed one."""


# --------------------------------------------------------------------------- real servers
@pytest.mark.sglang
@pytest.mark.parametrize("pair", PAIRS)
def test_the_tap_is_right_on_a_spanning_set(pair: Pair, tmp_path: Path) -> None:
    if not recipe.PYTHON.exists():
        pytest.skip(f"no SGLang at {recipe.PYTHON}: run `make setup`")
    served = Served(pair, recipe.PYTHON, matrix.engine(pair.release), matrix.model(pair.model), tmp_path)
    outcome = try_pair(served)
    assert outcome.state == "passed", outcome
    assert bool(outcome.cached) == ("radix" in pair.settings)


# --------------------------------------------------------------------------- the set
def test_the_covering_set_covers_what_it_says() -> None:
    pairs = matrix.covering_set()
    assert len({pair.key for pair in pairs}) == len(pairs)
    single = {(pair.release, pair.model) for pair in pairs if pair.tp == 1}
    assert single == set(itertools.product(matrix.RELEASES, matrix.FAMILIES))
    for model in matrix.FAMILIES:
        mine = [pair for pair in pairs if pair.model == model]
        both = set(matrix.RELEASES) if model in matrix.REQUIRED else {matrix.LAST_RESIDUAL, matrix.SNAPSHOT}
        assert {pair.release for pair in mine if pair.tp == 2} == both
        for release in both:
            one, two = (next(p for p in mine if p.release == release and p.tp == tp) for tp in (1, 2))
            assert one.delivery != two.delivery
            assert ("radix" in one.settings) != ("radix" in two.settings)
        combinations = {(pair.delivery, "radix" in pair.settings) for pair in mine if pair.tp == 1}
        assert combinations == set(itertools.product(matrix.DELIVERIES, (False, True)))
    for setting, release in itertools.product(("overlap", "mixed"), (matrix.LAST_RESIDUAL, matrix.SNAPSHOT)):
        assert any(setting in pair.settings and pair.release == release for pair in pairs)


def test_the_quick_sets_span_kinds_of_edit_deliveries_ranks_and_settings() -> None:
    for pairs in (matrix.QUICK, matrix.SPANNING):
        assert set(pairs) <= set(matrix.covering_set())
        assert {"0.5.9", matrix.LAST_RESIDUAL, matrix.SNAPSHOT} <= {pair.release for pair in pairs}
        assert {pair.delivery for pair in pairs} == set(matrix.DELIVERIES)
        assert any("radix" in pair.settings for pair in pairs)
    assert {pair.tp for pair in matrix.QUICK} == {1, 2}


def test_a_pair_is_run_again_when_it_failed_or_the_patch_changed() -> None:
    mine = matrix.identity()
    assert matrix.is_done(Outcome("passed", patch=mine), True)
    assert matrix.is_done(Outcome("skipped", patch=mine), True)
    assert not matrix.is_done(Outcome("passed", patch="another"), True)
    assert not matrix.is_done(Outcome("failed", patch=mine), True)
    assert matrix.is_done(Outcome("failed", patch=mine), False)


def test_the_identity_is_of_what_decides_and_of_nothing_else() -> None:
    source = '''"""What it is."""\n\n\ndef f(x):\n    """What it does."""\n    return x  # as it is\n'''
    assert matrix.tree_of(source) == matrix.tree_of("def f(x):\n  return (x)")
    assert matrix.tree_of(source) != matrix.tree_of(source.replace("return x", "return -x"))


@pytest.mark.parametrize("part", ["files", "edits", "flags", "verified", "refused"])
def test_outcomes_are_older_when_what_decides_changes(part: str, monkeypatch: pytest.MonkeyPatch) -> None:
    before = matrix.identity()
    first = SPEC.edits[0]
    changed = {
        "files": {"files": {**SPEC.files, "fleetdump_tap.py": SPEC.files["fleetdump_tap.py"] + "\nX = 1\n"}},
        "edits": {"edits": [replace(first, insertions=first.insertions[:1]), *SPEC.edits[1:]]},
        "flags": {"release_args": SPEC.release_args[1:]},
        "verified": {"edits": [replace(first, verified=["0.5.99"]), *SPEC.edits[1:]]},
        "refused": {"refused_args": [], "version": "5"},
    }[part]
    monkeypatch.setattr(matrix, "SPEC", replace(SPEC, **changed))
    assert (matrix.identity() == before) == (part in ("verified", "refused"))


def test_results_survive_a_restart_and_say_what_went_wrong(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(matrix, "RESULTS", tmp_path / "results.json")
    one, two, three = (pair.key for pair in matrix.covering_set()[:3])
    rows = {
        one: Outcome("passed", max_rel_err=2e-6, patch=matrix.identity()),
        two: Outcome("failed", "rows that did not come", patch=matrix.identity()),
        three: Outcome("skipped", "ValueError: no such backend", patch="another"),
    }
    made = matrix.write_results({**rows, "a pair of long ago": Outcome("skipped")})
    assert matrix.read_results() == rows
    assert (made["pairs"], made["passed"], made["failed"], made["worst_max_rel_err"]) == (2, 1, 1, 2e-6)
    made = matrix.write_results(rows)
    assert made["skipped"] == [{"pair": three, "why": "ValueError: no such backend"}]
    assert made["older"] == 1
    assert len(made["not_run"]) == len(matrix.covering_set()) - 3


def test_runs_side_by_side_keep_each_others_outcomes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(matrix, "RESULTS", tmp_path / "results.json")
    keys = [pair.key for pair in matrix.covering_set()[:12]]
    with ThreadPoolExecutor(6) as pool:
        list(pool.map(lambda key: matrix.keep(key, Outcome("passed", max_rel_err=1e-6)), keys))
    assert set(matrix.read_results()) == set(keys)


# --------------------------------------------------------------------------- judging
@pytest.fixture
def served(tmp_path: Path) -> Served:
    """A pair whose server has died and left two samples of 3 and 5 rows in two pieces each, all as they should be."""
    model, run = tmp_path / "model", tmp_path / "cap" / "r1"
    model.mkdir()
    run.mkdir(parents=True)
    (model / "config.json").write_text(json.dumps({"architectures": ["LlamaForCausalLM"]}))
    source = np.random.default_rng(1)
    streams = {name: source.normal(size=(rows, 3, HIDDEN)).astype(np.float32) for name, rows in (("s0", 3), ("s1", 5))}
    save_file(streams, model / "reference.bin", metadata={"layers": "[0, 3]"})
    pieces = {}
    for name, stream in streams.items():
        pieces[f"fleetdump/r1/{name}/1:0"] = stream[:2].copy()
        pieces[f"fleetdump/r1/{name}/1:2"] = stream[2:].copy()
    save_file(pieces, run / "shard-1.safetensors", metadata={"layers": "[0, 3]"})
    return Served(Pair("0.5.20", "llama", 2), tmp_path / "python", tmp_path, model, tmp_path)


def change(served: Served, name: str, rows: np.ndarray | None) -> None:
    """Put other rows into a piece, or take it out."""
    path = served.folder / "cap" / "r1" / "shard-1.safetensors"
    pieces = load_file(path)
    pieces.pop(name)
    save_file({**pieces, **({} if rows is None else {name: rows})}, path)


def test_rows_as_they_should_be_have_no_error(served: Served) -> None:
    errors, pieces = compare(served, "r1", ["s0", "s1"])
    assert (len(errors), float(errors.max()), pieces) == (8, 0.0, 4)


def test_one_wrong_number_is_the_error_of_its_row_alone(served: Served) -> None:
    rows = served.reference("s1")[2:].copy()
    rows[1, 2, 3] += np.abs(rows[1, 2]).max() / 2
    change(served, "fleetdump/r1/s1/1:2", rows)
    errors, _ = compare(served, "r1", ["s0", "s1"])
    assert int((errors > LIMIT).sum()) == 1
    assert errors.max() == pytest.approx(0.5, rel=0.6)


@pytest.mark.parametrize("fault", ["missing", "short", "long"])
def test_rows_that_are_missing_or_too_many_are_wrong(served: Served, fault: str) -> None:
    rows = served.reference("s1")[2:]
    other = {"missing": None, "short": rows[:-1].copy(), "long": np.concatenate([rows, rows[:1]])}[fault]
    change(served, "fleetdump/r1/s1/1:2", other)
    with pytest.raises(Wrong, match="r1/s1"):
        compare(served, "r1", ["s0", "s1"])


def test_a_second_round_that_was_never_refused_had_no_cache(served: Served) -> None:
    with pytest.raises(Wrong, match="no prefix was cached"):
        check_cached(served, {"s0": "", "s1": ""})
    with pytest.raises(Wrong, match="another reason"):
        check_cached(served, {"s0": "prefix_missing: rows begin at 2", "s1": "capture_error: x"})
    assert check_cached(served, {"s0": "prefix_missing: rows begin at 2"}) == {"whole": 0, "prefix_missing": 1}


def test_a_rank_without_its_mark_and_a_fallback_class_are_wrong(served: Served) -> None:
    armed = [f"{SPEC.mark} rank={rank}/2 layers=[0,3] model=LlamaModel" for rank in range(2)]
    served.log.write_text(armed[0] + "\nLoad weight end. type=LlamaForCausalLM,")
    with pytest.raises(Wrong, match="rank=1/2"):
        require_marks(served)
    served.log.write_text("\n".join(armed) + "\nLoad weight end. type=TransformersForCausalLM,")
    with pytest.raises(Wrong, match="LlamaForCausalLM"):
        require_marks(served)
    served.log.write_text("\n".join(armed) + "\nLoad weight end. type=LlamaForCausalLM,")
    require_marks(served)


def test_the_last_words_of_a_log_are_the_error_that_ended_it(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text(
        "[2026-01-01 00:00:00] Ignore import error when loading sglang.srt.models.x: No module named 'vllm'\n"
        'Traceback (most recent call last):\n  File "/a/sglang/srt/x.py", line 1, in f\n    g()\n'
        "NotImplementedError: no linear attention on this device\n[2026-01-01 00:00:01] Received sigquit\n"
    )
    assert last_words(log) == "NotImplementedError: no linear attention on this device (in sglang/srt/x.py, f: g())"


# --------------------------------------------------------------------------- the patch's own claim
def test_what_the_patch_calls_verified_has_passed() -> None:
    """Each release in a ``verified`` list is backed by a pair of the kept results that runs that very edit."""
    detail = json.loads(matrix.RESULTS.read_text())["detail"]
    passed = [pair for pair in matrix.covering_set() if detail.get(pair.key, {}).get("state") == "passed"]
    backed = {
        (edit.module, edit.first_release, pair.release)
        for pair in passed
        for edit in choose_edits(SPEC, pair.release, [ARCHITECTURES[pair.model]])
        if release_within(pair.release, edit.first_release, edit.last_release)
    }
    claimed = {(edit.module, edit.first_release, release) for edit in SPEC.edits for release in edit.verified}
    assert claimed - backed == set()
