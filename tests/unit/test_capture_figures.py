"""The arithmetic of the capture bench, its prompts, and what it reads of the tap's journals."""

from __future__ import annotations

import importlib.util
import json
import time
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from bench.capture import figures
from bench.capture.journal import Journals
from bench.capture.load import OTHERS, Prompts
from bench.capture.server import INSERVER


def test_spread_is_half_the_quartiles_distance_over_the_median() -> None:
    assert figures.spread([8, 9, 10, 11, 12]) == pytest.approx(0.15)


def test_a_percentile_is_a_value_that_occurred() -> None:
    values = [float(n) for n in range(1, 101)]
    assert [figures.percentile(values, share) for share in (0.5, 0.99, 1.0)] == [50.0, 99.0, 100.0]


def test_calls_are_told_apart_and_scaled_to_a_full_model() -> None:
    calls = figures.call_us([[1, 9000, 100, 2000, 100, 800]] * 3)
    assert calls == [9.0, 0.1, 2.0, 0.1, 0.8]
    assert figures.inert_us(calls, layers=61) == pytest.approx(9 + 0.8 + 60 * 0.1)


def test_the_line_through_small_batches_has_a_batchs_cost_and_a_samples() -> None:
    records = [[size, 60_000, 30_000 + 4_000 * size, 10_000] for size in range(1, 300)]
    records[7][1] += 5_000_000  # one batch that waited for something
    batch, sample = figures.line_through(records)
    assert batch == pytest.approx(100, abs=3)
    assert sample == pytest.approx(4, rel=0.01)


def test_batches_of_one_size_are_not_told_apart_by_their_time() -> None:
    records = [[1, 10_000 * (1 + number % 2)] for number in range(40)] + [[9, 70_000]] * 40
    assert figures.medians_by_size(records, groups=4) == [(1, 15), (1, 15), (9, 70), (9, 70)]


def test_what_batches_took_is_compared_with_what_they_may() -> None:
    """Two batches, of 10 requests and of none: 250 + 50 us and 200 us are allowed."""
    assert figures.share_of([[10, 100_000, 25_000], [0, 125_000]], 200.0, 5.0) == pytest.approx(250 / 450)


def test_every_prompt_is_one_of_its_own_and_named() -> None:
    prompts = Prompts(vocabulary=50, length=6, group=3)
    bodies = [json.loads(prompts.body(OTHERS)) for _ in range(100)]
    ids = [tuple(prompt) for body in bodies for prompt in body["input_ids"]]
    rids = [rid for body in bodies for rid in body["rid"]]
    assert len(set(ids)) == len(set(rids)) == 300
    assert {len(prompt) for prompt in ids} == {6}
    assert all(3 <= token < 50 for prompt in ids for token in prompt)


def test_the_timer_tells_the_calls_of_a_forward_and_without_a_tap_its_own_share() -> None:
    hook = hook_module()
    tap = SimpleNamespace(
        idle=None, before_layer=lambda *_, **__: time.sleep(0.02), after_layers=lambda *_, **__: time.sleep(0.01)
    )
    skipping = SimpleNamespace(**vars(tap))
    skipping.before_layer = lambda model, layer, hidden, batch, **_: setattr(skipping, "idle", batch)
    records: list[list[int]] = []
    batch = SimpleNamespace(rids=["a", "b"])
    for each in (tap, skipping, None):
        timed = hook.Timed(each, records)
        called = 0
        for layer in range(3):  # as the patched line does
            if batch is not timed.idle:
                timed.before_layer(None, layer, None, batch)
                called += 1
        timed.after_layers(None, None, batch)
        assert called == (3 if each is tap else 1)
    (requests, *before, last), skipped, empty = records
    assert requests == 2
    assert [len(record) for record in records] == [5, 5, 5]
    assert min(before) >= 20_000_000
    assert min(last, skipped[-1]) >= 10_000_000
    assert max(*skipped[1:-1], *empty[1:]) < 10_000_000


def test_journals_are_counted_and_finished_shards_deleted(tmp_path: Path) -> None:
    run, naive = tmp_path / "capture" / "fast", tmp_path / "naive"
    run.mkdir(parents=True)
    naive.mkdir()
    for name in ("shard-a-0.safetensors", "shard-a-1.safetensors.part"):
        (run / name).touch()
    for name in ("fleetdump_fast_1.pt", "fleetdump_check_1.pt"):
        (naive / name).touch()
    piece = {"name": "n", "rid": "fleetdump/fast/1/1", "start": 0, "ids_sha256": "", "shard": "shard-a-0.safetensors"}
    piece.update(rows=8, dtype="F32", shape=[8, 1, 1], offset=0, bytes=32, crc32=0)
    lines: list[dict[str, Any]] = [
        {"kind": "piece", **piece},
        {"kind": "shard", "shard": "shard-a-0.safetensors", "bytes": 1, "sha256": ""},
    ]
    text = "".join(json.dumps({"v": 1, "t": 1.0, **line}) + "\n" for line in lines)
    (run / "journal-a.jsonl").write_text(text)
    with Journals(tmp_path / "capture", naive, ["fast"]) as journals:
        journals.wait_for(8)
        deadline = time.monotonic() + 60
        while (run / "shard-a-0.safetensors").exists() or (naive / "fleetdump_fast_1.pt").exists():
            assert time.monotonic() < deadline
            time.sleep(0.01)
        skip = {"v": 1, "kind": "skip", "rid": "fleetdump/fast/2/1", "reason": "backpressure", "detail": "", "t": 2.0}
        with (run / "journal-a.jsonl").open("a") as file:
            file.write(json.dumps(skip) + "\n")
        with pytest.raises(RuntimeError, match="backpressure"):
            journals.wait_for(16)
    assert journals.bytes == 32
    assert (run / "shard-a-1.safetensors.part").exists()
    assert (naive / "fleetdump_check_1.pt").exists()


def hook_module() -> ModuleType:
    """What the bench puts into the server, without its import hook."""
    spec = importlib.util.spec_from_file_location("bench_hook", INSERVER / "sitecustomize.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
