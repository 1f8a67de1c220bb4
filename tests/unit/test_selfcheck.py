"""The self-check: each way in which captured tensors go wrong, made so on purpose, fails the checks that it should and
is named; what is only rounding passes. The server is a stand-in over real HTTP and real files."""

from __future__ import annotations

import fcntl
import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from selfcheckserver import DEPTH, LAUNCH, VOCABULARY, Break, Tapped, TinyModel, Written

from fleetdump.agent import selfcheck as verb
from fleetdump.agent.drive import _check_server
from fleetdump.agent.formats import Rid, Writer
from fleetdump.agent.model import vocabulary_size
from fleetdump.agent.protocol import AgentFailure
from fleetdump.agent.runmessages import SelfCheckArgs, SelfCheckResult, SubmitArgs
from fleetdump.agent.selfcheck import attention_ranks, next_token
from fleetdump.agent.selfcheck_prompts import ALONE, FUSED_TOKENS, LARGE, SMALL, plan
from fleetdump.agent.server import save_record
from fleetdump.agent.shardwriter import NewPiece, ShardWriter
from fleetdump.worker.outputhead import Checkpoint, NotFound, OutputHead
from fleetdump.worker.selfcheck import judge_logits, measure

MODEL = TinyModel()


@pytest.fixture
def in_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """The worker's numbers without a process of its own, which costs most of a check's time."""
    monkeypatch.setattr(verb, "run_worker", lambda record, job, seconds: measure(job))


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """The stand-in has written before it answers: what is not there then does not come."""
    monkeypatch.setattr(verb, "SETTLE_SECONDS", 0.3)


def failed(result: SelfCheckResult) -> set[str]:
    return {check.key for check in result.checks if check.level == "blocker"}


def text_of(result: SelfCheckResult, key: str) -> str:
    return next(check.text for check in result.checks if check.key == key)


# --------------------------------------------------------------------------- what passes
@pytest.mark.parametrize(
    "settings",
    [
        {"ranks": 2},
        {"ranks": 2, "stages": 2},
        {"layers": [1, 3, DEPTH]},  # by definition the same as the final state
        {"dtype": "BF16", "batch_noise": 0.002, "ranks": 2},
        {"dtype": "F16", "batch_noise": 0.0002},
    ],
    ids=str,
)
def test_right_tensors_pass_and_nothing_is_left(tmp_path: Path, settings: dict[str, Any]) -> None:
    tapped = Tapped(tmp_path, **settings)
    result = tapped.check()
    assert result.passed, result
    assert {check.level for check in result.checks} == {"ok"}
    assert [check.key for check in result.checks] == [
        "requests", "rows", "ids", "ranks", "batches", "values", "layers", "head",
    ]  # fmt: skip
    assert result.rows == sum(len(prompt.ids) for prompt in plan(VOCABULARY, 4096).prompts)
    assert tapped.record().selfcheck == "passed"
    assert list((tmp_path / "capture").iterdir()) == []
    assert list((tapped.state.root / "runs").iterdir()) == []


def few_rows_flip(written: Written) -> Written:
    """Of each prompt in the large batch 2 % of the rows went through other experts."""
    if written.forward_tokens > FUSED_TOKENS and len(written.rows) > 100:
        written.rows[::50, 1] *= -0.5
    return written


def test_in_16_bits_single_rows_may_flip_and_in_float32_none(tmp_path: Path, in_process: None) -> None:
    assert Tapped(tmp_path / "a", dtype="BF16", broken=few_rows_flip).check().passed
    result = Tapped(tmp_path / "b", broken=few_rows_flip).check()
    assert failed(result) == {"batches"}
    assert "slot 1" in text_of(result, "batches")


def final_of(samples: set[str]) -> Break:
    def broken(written: Written) -> Written:
        if written.rid.sample in samples:
            written.rows[:, -1] = written.rows[:, -2] * 1.5 + 1
        return written

    return broken


def test_98_percent_of_the_prompts_must_get_the_servers_token(tmp_path: Path, in_process: None) -> None:
    one, two = {"large-0"}, {"large-0", "large-1"}
    result = Tapped(tmp_path / "a", broken=final_of(one)).check()
    assert result.passed
    assert "77 of 78" in text_of(result, "head")
    assert failed(Tapped(tmp_path / "b", broken=final_of(two)).check()) == {"head"}


# --------------------------------------------------------------------------- what fails, and its cause
def streams(written: Written) -> list[Any]:
    return MODEL.streams(written.ids)


def partial(written: Written, wrong_on: Callable[[int], bool] = lambda rank: True) -> Written:
    """Up to 2,048 rows the last layer's addition is not yet summed over the ranks (but for the final state)."""
    if written.forward_tokens <= FUSED_TOKENS and wrong_on(written.rank):
        entering = streams(written)
        for slot, layer in enumerate([0, 3, 5]):
            if layer:
                share = 0.3 if written.rank else 0.7
                written.rows[:, slot] = entering[layer - 1] + share * (entering[layer] - entering[layer - 1])
    return written


def same_partial_sum_everywhere(written: Written) -> Written:
    rank, written.rank = written.rank, 0
    return replace(partial(written), rank=rank)


def ranks_in_another_order(written: Written) -> Written:
    if written.rank:
        written.rows = np.roll(written.rows, 3, axis=0)
    return written


def half_of_the_rows(written: Written) -> Written:
    if written.rank and len(written.rows) > 1:
        written.rows = written.rows[: len(written.rows) // 2]
    return written


def rows_mismatch(written: Written) -> Written:
    return replace(written, skip="rows_mismatch") if written.rid.sample.startswith(LARGE) else written


def disk_full(written: Written) -> Written:
    return replace(written, skip="disk_full") if written.rid.sample == "large-7" else written


def another_requests_rows(written: Written) -> Written:
    """In a batch of mixed lengths the rows begin one too late."""
    if "-" in written.rid.sample and not written.rid.sample.startswith("alone"):
        written.rows = np.roll(written.rows, 1, axis=0)
    return written


def other_ids(written: Written) -> Written:
    if written.rid.sample == "small-3":
        written.ids = [(token + 1) % VOCABULARY for token in written.ids]
    return written


def small_graphs(written: Written) -> Written | None:
    return written if written.forward_tokens > FUSED_TOKENS else None


def cached(written: Written) -> Written:
    """A prompt that was sent before leaves only its last row to be computed."""
    again = written.rid.sample.startswith((LARGE, SMALL)) and "alone" in written.rid.sample
    return replace(written, skip="prefix_missing") if again else written


def first_rows_cut(written: Written) -> Written:
    """The same by a patch that does not notice."""
    if written.rid.sample == "large-alone-300":
        return replace(written, start=299, rows=written.rows[299:])
    return written


def shifted(by: int) -> Break:
    def broken(written: Written) -> Written:
        entering = streams(written)
        written.rows[:, :3] = np.stack([entering[layer + by] for layer in (1, 3, 5)], axis=1)
        return written

    return broken


def final_state_too_early(written: Written) -> Written:
    written.rows[:, -1] = streams(written)[DEPTH - 1]
    return written


def final_state_far_too_early(written: Written) -> Written:
    written.rows[:, -1] = streams(written)[2]
    return written


def final_state_normed(written: Written) -> Written:
    final = written.rows[:, -1]
    written.rows[:, -1] = final / np.sqrt((final**2).mean(-1, keepdims=True)) * MODEL.norm
    return written


WRONG: list[tuple[Any, dict[str, Any], set[str], list[str]]] = [
    (partial, {"ranks": 2}, {"ranks", "batches"}, ["partial_sum"]),
    (partial, {"ranks": 2, "stages": 2}, {"ranks", "batches"}, ["partial_sum"]),
    (partial, {"ranks": 2, "dtype": "BF16"}, {"ranks", "batches"}, ["partial_sum"]),
    (same_partial_sum_everywhere, {"ranks": 2}, {"batches"}, ["partial_sum"]),
    (ranks_in_another_order, {"ranks": 2}, {"ranks"}, ["scattered_rows"]),
    (half_of_the_rows, {"ranks": 2}, {"ranks"}, ["scattered_rows"]),
    (rows_mismatch, {}, {"rows"}, ["scattered_rows"]),
    (another_requests_rows, {"dtype": "BF16"}, {"batches", "layers", "head"}, ["scattered_rows"]),
    (other_ids, {}, {"ids"}, ["scattered_rows"]),
    (small_graphs, {}, {"rows"}, ["graph_replay"]),
    (lambda written: None, {"ranks": 2, "writing_ranks": 1}, {"rows"}, ["tap_not_called"]),
    (disk_full, {}, {"rows"}, ["disk"]),
    (cached, {}, {"rows"}, ["prefix_cache"]),
    (first_rows_cut, {}, {"rows"}, ["prefix_cache"]),
    (shifted(1), {"layers": [1, 3, 5]}, {"layers"}, ["layer_convention"]),
    (shifted(-1), {"layers": [1, 3, 5]}, {"layers"}, ["layer_convention"]),
    (final_state_too_early, {}, {"layers", "head"}, ["layer_convention"]),
    (final_state_far_too_early, {}, {"head"}, ["layer_convention"]),
    (final_state_normed, {}, {"head"}, ["layer_convention"]),
]


@pytest.mark.parametrize(("broken", "settings", "checks", "causes"), WRONG)
def test_a_wrong_capture_fails_its_checks_and_its_cause_is_named(
    tmp_path: Path, in_process: None, broken: Break, settings: dict[str, Any], checks: set[str], causes: list[str]
) -> None:
    tapped = Tapped(tmp_path, broken=broken, **settings)
    result = tapped.check()
    assert (failed(result), result.causes) == (checks, causes), result.checks
    assert not result.passed
    assert "Likely cause: " in result.detail
    assert tapped.record().selfcheck == result.detail
    assert all(check.fix for check in result.checks if check.level == "blocker")


def at(row: int, slot: int, value: float) -> Break:
    def broken(written: Written) -> Written:
        if written.rid.sample == "alone-300":
            written.rows[row, slot] = value
        return written

    return broken


def all_rows_alike(written: Written) -> Written:
    if written.rid.sample == "alone-2100":
        written.rows[:, 2] = written.rows[7, 2]
    return written


def every_last_row_not_finite(written: Written) -> Written:
    """As a model whose last layer overflows: each prompt alone, in each batch and on each rank."""
    written.rows[-1, -1] = np.nan
    return written


@pytest.mark.parametrize(
    ("broken", "dtype", "said", "cause"),
    [
        (at(3, 1, np.nan), "BF16", "slot 1: 1 of 6442 rows not finite, first in alone-300", "not_finite"),
        (at(3, 0, np.inf), "F32", "not finite", "not_finite"),
        (every_last_row_not_finite, "BF16", "slot 3: 78 of 6442 rows not finite", "not_finite"),
        (at(9, 2, 0.0), "F32", "1 of 6442 rows all zero", "blank_rows"),
        (at(9, 2, 2.5), "BF16", "1 of 6442 rows one value only", "blank_rows"),
        (all_rows_alike, "F32", "1 prompts with the same row for all tokens, first in alone-2100", "blank_rows"),
    ],
)
def test_values_that_no_state_has(
    tmp_path: Path, in_process: None, broken: Break, dtype: str, said: str, cause: str
) -> None:
    """Other checks may fail for the same reason; none of them names another."""
    result = Tapped(tmp_path, broken=broken, dtype=dtype).check()
    assert "values" in failed(result)
    assert said in text_of(result, "values")
    assert result.causes == [cause], result.checks


class Damaged(Tapped):
    """A server whose disk does not keep what was written: ``damage`` happens to the files named by ``pattern``."""

    pattern = "shard-*.safetensors"
    damage: Callable[[Path], None]

    def _close_writers(self) -> None:
        super()._close_writers()
        for path in Path(self.capture.dir).glob(f"selfcheck-*/{self.pattern}"):
            self.damage(path)


def cut_off(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 40)


def cut_off_in_the_header(path: Path) -> None:
    os.truncate(path, 100)


def one_bit(path: Path) -> None:
    with path.open("r+b") as file:
        file.seek(-5, os.SEEK_END)
        byte = file.read(1)[0]
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte ^ 0x40]))


@pytest.mark.parametrize("damage", [cut_off, cut_off_in_the_header, one_bit, os.unlink])
def test_what_the_disk_does_not_give_back_is_named_and_is_no_fault_of_the_tap(
    tmp_path: Path, in_process: None, damage: Callable[[Path], None]
) -> None:
    tapped = Damaged(tmp_path)
    tapped.damage = damage
    result = tapped.check()
    assert (failed(result), result.causes) == ({"rows"}, ["disk"]), result.checks
    assert "shard-main-" in text_of(result, "rows")


def test_copies_of_ranks_that_the_disk_does_not_give_back(tmp_path: Path, in_process: None) -> None:
    def other_bits(written: Written) -> Written:
        written.rows *= 1 + 1e-7 * written.rank
        return written

    tapped = Damaged(tmp_path, ranks=2, broken=other_bits)
    tapped.pattern, tapped.damage = "ranks/shard-*.safetensors", cut_off
    result = tapped.check()
    assert (failed(result), result.causes) == ({"ranks"}, ["disk"]), result.checks
    tapped = Tapped(tmp_path / "right", ranks=2, broken=other_bits)
    assert tapped.check().passed, "no more than rounding"


def test_ranks_that_did_not_write_at_all(tmp_path: Path, in_process: None) -> None:
    result = Tapped(tmp_path, ranks=2, writing_ranks=1).check()
    assert failed(result) == {"ranks"}
    assert "ranks did not write" in text_of(result, "ranks")


def test_requests_that_fail_are_named_and_the_others_are_judged(tmp_path: Path, in_process: None) -> None:
    def refuse(rids: list[Rid]) -> bool:
        return rids[0].sample == "alone-2100"

    result = Tapped(tmp_path, refuse=refuse).check()
    assert failed(result) == {"requests"}
    assert "1 of 78 requests failed (alone-2100: HTTP 500" in result.detail
    assert text_of(result, "head").startswith("77 of 77")


# --------------------------------------------------------------------------- heads
def test_a_head_that_cannot_be_found_is_a_warning(tmp_path: Path, in_process: None) -> None:
    no_head = Tapped(tmp_path / "a")
    path = no_head.model_path / "model.safetensors"
    path.write_bytes(path.read_bytes().replace(b'"lm_head.weight"', b'"lm_head.qeight"'))
    no_answers = Tapped(tmp_path / "b", logprobs=False)
    no_model = Tapped(tmp_path / "c")
    no_model.model_path = tmp_path / "elsewhere"
    for tapped, why in ((no_head, "no tensor lm_head"), (no_answers, "no log-prob"), (no_model, "elsewhere")):
        result = tapped.check()
        assert result.passed, result
        head = result.checks[-1]
        assert (head.key, head.level) == ("head", "warning")
        assert head.text.startswith("not checked: ")
        assert why in head.text


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({}, lambda states: states @ MODEL.head.T),
        ({"logit_scale": 0.25}, lambda states: states @ MODEL.head.T * 0.25),
        ({"logits_scaling": 4}, lambda states: states @ MODEL.head.T / 4),
        ({"final_logit_softcapping": 3.0}, lambda states: 3 * np.tanh(states @ MODEL.head.T / 3)),
        ({"vocab_size": 250}, lambda states: (states @ MODEL.head.T)[:, :250]),
        ({"tie_word_embeddings": True}, lambda states: states @ MODEL.embeddings.T),
        ({"text_config": {"vocab_size": 80}}, lambda states: (states @ MODEL.head.T)[:, :80]),
    ],
)
def test_logits_are_those_of_the_served_model(tmp_path: Path, config: dict[str, Any], expected: Any) -> None:
    MODEL.save(tmp_path, **config)
    states = np.random.default_rng(1).normal(size=(3, MODEL.head.shape[1])).astype(np.float32)
    assert np.allclose(OutputHead(Checkpoint(tmp_path)).logits(states), expected(states), atol=1e-5)


def test_a_sharded_checkpoint_is_read_through_its_index_and_a_broken_one_is_not_found(tmp_path: Path) -> None:
    MODEL.save(tmp_path)
    os.rename(tmp_path / "model.safetensors", tmp_path / "model-1.safetensors")
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(
        '{"weight_map": {"model.lm_head.weight": "model-1.safetensors", "lm_head.weight": "model-1.safetensors"}}'
    )
    assert len(Checkpoint(tmp_path).weight(["lm_head.weight"])) == VOCABULARY
    (tmp_path / "model-1.safetensors").write_bytes(b"\x10")
    with pytest.raises(NotFound, match="cannot be read"):
        Checkpoint(tmp_path).weight(["lm_head.weight"])


def prompt_with(token: int, logprob: float) -> Any:
    from fleetdump.agent.selfcheck_facts import CapturedPrompt

    return CapturedPrompt("p", [1], [], token, logprob)


def test_a_tie_within_rounding_counts_as_agreement() -> None:
    logits = np.array([[20.0, 19.9, 3.0]], np.float32)
    behind = float(np.log(np.exp(logits[0] - 20).sum()))
    tied = judge_logits(logits, [prompt_with(1, -0.1 - behind)], 2.0**-8)
    assert (tied.agree, tied.ties) == (1, 1)
    exact = judge_logits(logits, [prompt_with(1, -0.1 - behind)], 2.0**-24)
    assert (exact.agree, exact.ties) == (0, 0)
    outside = judge_logits(logits, [prompt_with(7, 0.0)], 2.0**-8)
    assert outside.agree == 0


# --------------------------------------------------------------------------- prompts, ranks, answers
def test_the_prompts_are_those_of_the_manual() -> None:
    found = plan(VOCABULARY, 0)
    assert [len(prompt.ids) for prompt in found.alone()] == list(ALONE)
    assert max(ALONE) > FUSED_TOKENS
    small, large = found.batch(SMALL), found.batch(LARGE)
    assert sum(len(prompt.ids) for prompt in small) <= FUSED_TOKENS < sum(len(prompt.ids) for prompt in large)
    named = {prompt.name: prompt.ids for prompt in found.prompts}
    assert len(named) == len(found.prompts)
    assert {prompt.same_as for prompt in large} >= {"alone-1", "alone-7", "alone-300", "small-0"}
    assert all(named[prompt.same_as] == prompt.ids for prompt in found.prompts if prompt.same_as)
    assert plan(VOCABULARY, 0) == found, "the same prompts each time"
    first = [prompt.ids[0] for prompt in found.prompts if not prompt.same_as]
    assert len(set(first)) == len(first), "no prompt is the beginning of another"


def test_prompts_that_the_context_does_not_take_are_shortened_and_it_is_said(tmp_path: Path, in_process: None) -> None:
    result = Tapped(tmp_path, context=2048).check()
    assert result.passed
    assert "the context takes 2040 tokens" in text_of(result, "requests")
    assert "1 to 2040 tokens" in text_of(result, "requests")


def test_a_vocabulary_that_nobody_knows_is_a_small_one(tmp_path: Path) -> None:
    assert vocabulary_size(str(tmp_path)) == 0
    assert max(max(prompt.ids) for prompt in plan(0, 0).prompts) < 256
    MODEL.save(tmp_path)
    assert vocabulary_size(str(tmp_path)) == VOCABULARY


@pytest.mark.parametrize(
    ("info", "ranks"),
    [
        ({}, 4),
        ({"tp_size": 8, "dp_size": 1}, 8),
        ({"tp_size": 2, "dp_size": 4}, 2),  # replicas of two ranks each
        ({"tp_size": 8, "dp_size": 8, "enable_dp_attention": True}, 1),
        ({"tp_size": 8, "dp_size": 2, "enable_dp_attention": True}, 4),
        ({"tp_size": 8, "dp_size": 1, "attn_dp_size": 4, "enable_dp_attention": True}, 2),
        ({"tp_size": 8, "dp_size": 4, "attn_dp_size": 1, "enable_dp_attention": True}, 2),
        ({"tp_size": 8, "attn_cp_size": 2}, 4),
    ],
)
def test_how_many_ranks_hold_the_same_rows(info: dict[str, Any], ranks: int) -> None:
    assert attention_ranks(info, 4) == ranks


def test_an_answer_without_log_probabilities_is_none() -> None:
    answer = {"meta_info": {"output_token_logprobs": [[-0.5, 17, None]]}}
    assert next_token(answer) == (17, -0.5)
    for broken in (None, {}, {"meta_info": {"output_token_logprobs": []}}, "text"):
        assert next_token(broken) == (-1, 0.0)


def test_rows_are_read_from_an_open_shard_too(tmp_path: Path) -> None:
    from fleetdump.agent.selfcheck_capture import reference
    from fleetdump.worker.capturedrows import read_rows

    rows = np.arange(24, dtype=np.float32).reshape(4, 2, 3)
    with ShardWriter(tmp_path, Writer("main", LAUNCH, "r0")) as writer:
        new = [
            NewPiece("a:2", "a", 2, 2, "", "F32", [2, 2, 3], [0, 1]),
            NewPiece("a:0", "a", 0, 2, "", "F32", [2, 1, 3], [0]),  # the stages of a pipeline hold some slots each
            NewPiece("a:0b", "a", 0, 2, "", "F32", [2, 1, 3], [1]),
        ]
        parts = [rows[2:], rows[:2, :1], rows[:2, 1:]]
        writer.add(*((piece, part.tobytes()) for piece, part in zip(new, parts, strict=True)))
        pieces = [reference(piece) for piece in writer.sync()]
        assert list(tmp_path.glob("*.part"))
        assert (read_rows(tmp_path, pieces) == rows).all()
    assert not list(tmp_path.glob("*.part"))
    assert (read_rows(tmp_path, pieces) == rows).all()


# --------------------------------------------------------------------------- the verb
def test_one_check_of_a_server_at_a_time_and_what_a_killed_one_left_goes(tmp_path: Path, in_process: None) -> None:
    tapped = Tapped(tmp_path)
    lock = tapped.state.server("main") / "selfcheck.lock"
    mark = tapped.state.share("selfcheck-00000000-abcd", "main")
    left_over = tmp_path / "capture" / "selfcheck-00000000-abcd"
    left_over.mkdir(parents=True)
    with lock.open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        tapped.register(1)
        with pytest.raises(AgentFailure, match="another self-check of main runs") as refused:
            verb.selfcheck(SelfCheckArgs("main", tapped.capture), tapped.agent_context())
        assert refused.value.error.code == "locked"
        assert left_over.exists()
    assert tapped.check().passed
    assert not left_over.exists()
    assert not mark.exists()


def test_a_server_that_does_not_run_or_answer_has_no_check(tmp_path: Path) -> None:
    tapped = Tapped(tmp_path, refuse=lambda rids: True)
    with pytest.raises(AgentFailure, match="answers no request") as refused:
        tapped.check()
    assert "HTTP 500" in refused.value.error.why
    record = tapped.record()
    record.stopped_at = 1.0
    save_record(tapped.state, record)
    with pytest.raises(AgentFailure, match="does not run"):
        verb.selfcheck(SelfCheckArgs("main", tapped.capture), tapped.agent_context())
    with pytest.raises(AgentFailure, match="never launched"):
        verb.selfcheck(SelfCheckArgs("other", tapped.capture), tapped.agent_context())
    assert tapped.record().selfcheck == ""


def test_a_worker_that_cannot_run_is_an_error_and_no_verdict(tmp_path: Path) -> None:
    tapped = Tapped(tmp_path)
    tapped.python = "/bin/false"
    with pytest.raises(AgentFailure, match="could not run"):
        tapped.check()
    assert tapped.record().selfcheck == ""


# --------------------------------------------------------------------------- the command
SERVERS = ("main", "other")


def run_command(tapped: Tapped, *args: str) -> subprocess.CompletedProcess[str]:
    inventory = tapped.root / "inventory.yaml"
    servers = [{"name": name, "model_path": "/m", "port": 8000 + n, "gpus": [n]} for n, name in enumerate(SERVERS)]
    capture = {"layers": tapped.layers, "layer_ids": "input", "dir": tapped.capture.dir}
    defaults = {"connection": "local", "state_dir": str(tapped.root / "state"), "servers": servers, "capture": capture}
    defaults["python"] = sys.executable
    inventory.write_text(json.dumps({"defaults": defaults, "hosts": {"gpu01": {"address": "localhost"}}}))
    command = [sys.executable, "-m", "fleetdump", "selfcheck", "-i", str(inventory), *args]
    return subprocess.run(command, capture_output=True, text=True, timeout=120)


def test_the_command_shows_a_table_and_ends_with_1_when_a_check_fails(tmp_path: Path) -> None:
    tapped = Tapped(tmp_path)
    with tapped.serving():
        passed = run_command(tapped, "--server", "main")
        tapped.broken = final_state_far_too_early
        wrong = run_command(tapped, "--server", "main", "--json")
        both = run_command(tapped)
    assert passed.returncode == 0, passed.stderr
    assert "gpu01/main self-check passed in " in passed.stdout
    assert [line.split()[:2] for line in passed.stdout.splitlines()[1:]] == [
        ["ok", key] for key in ("requests", "rows", "ids", "ranks", "batches", "values", "layers", "head")
    ]
    (check,) = json.loads(wrong.stdout)["data"]
    assert wrong.returncode == 1
    assert (check["server"], check["result"]["passed"], check["result"]["causes"]) == (
        "main",
        False,
        ["layer_convention"],
    )
    assert both.returncode == 1
    assert "likely layer_convention" in both.stdout
    assert "next: see whether the patch counts layers" in both.stdout
    assert "gpu01/other self-check not made: " in both.stdout, "each server, whatever becomes of the others"
    assert "next: fleetdump deploy" in both.stdout


def test_the_command_refuses_a_server_that_the_inventory_does_not_have(tmp_path: Path) -> None:
    result = run_command(Tapped(tmp_path), "--server", "mein")
    assert result.returncode == 2
    assert "main" in result.stderr


@pytest.mark.parametrize("allowed", [False, True])
def test_a_server_whose_self_check_failed_gets_no_work_unless_told(tmp_path: Path, allowed: bool) -> None:
    tapped = Tapped(tmp_path)
    tapped.register(8000)
    args = SubmitArgs("r1", "main", "", tapped.capture, allow_failed_selfcheck=allowed)
    record = tapped.record()
    record.selfcheck = "passed"
    save_record(tapped.state, record)
    _check_server(args, tapped.state)

    record.selfcheck = "slots 0 and 1 hold the same values"
    save_record(tapped.state, record)

    if allowed:
        _check_server(args, tapped.state)
    else:
        with pytest.raises(AgentFailure, match="self-check") as refused:
            _check_server(args, tapped.state)
        assert "slots 0 and 1" in refused.value.error.why
