"""Captured rows of two servers against each other, against transformers, and against the naive expression.

``python tp2_reference.py MODEL PLAIN DEFERRED NAIVE ALONE``: two folders that ``fleetdump collect --data`` filled (the
same rows, all layers; DEFERRED from the server that defers all-reduces), what ``hidden_states + residual`` was in the
deferred server, and the tap's files of its prompts that were sent one at a time. Prints one JSON object. bf16 on one
GPU; errors are relative L2 distances of rows ``[hidden]``.

A token's experts *flipped* when transformers, given SGLang's own stream at every layer, chooses other experts for it
than transformers does by itself: there two right implementations go apart.
"""

from __future__ import annotations

import json
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

sys.path.insert(0, str(Path(__file__).parents[2]))
from demo.reference_check import Shards

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
FUSED_BATCH = 2048


def relative(got: torch.Tensor, want: torch.Tensor) -> torch.Tensor:
    """Row-wise ``|got - want| / |want|`` of ``[..., hidden]`` tensors, in float32."""
    return (got.float() - want.float()).norm(dim=-1) / want.float().norm(dim=-1).clamp_min(1e-30)


def spread(errors: torch.Tensor) -> dict[str, float]:
    """Median, 95th percentile, worst and number of the values."""
    if not errors.numel():
        return {"rows": 0}
    values = errors.flatten().float().cpu()
    return {
        "rows": values.numel(),
        "median": float(f"{values.median():.3e}"),
        "p95": float(f"{values.quantile(0.95):.3e}"),
        "worst": float(f"{values.max():.3e}"),
    }


def samples(folder: Path) -> dict[str, tuple[list[int], torch.Tensor]]:
    """Token ids and rows ``[tokens, layers + 1, hidden]`` of each sample in a collected folder."""
    (manifest,) = sorted(folder.rglob("manifest.jsonl"))[:1]
    shards = Shards(manifest.parent)
    found = {}
    for text in manifest.read_text().splitlines():
        line = json.loads(text)
        if "id" in line and "pieces" in line:
            ids = shards.tensor(line, line["token_shard"]["shard"], line["token_shard"]["ids"])
            found[line["id"]] = (ids.tolist(), shards.sample(line))
    return found


class Reference:
    """transformers on the same weights in bf16, by itself or led along a given stream."""

    def __init__(self, folder: Path):
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype="auto").eval().to(DEVICE)
        self.led: torch.Tensor | None = None
        self.outputs: list[torch.Tensor] = []
        self.experts: list[torch.Tensor] = []
        for number, layer in enumerate(self.model.model.layers):
            layer.register_forward_pre_hook(self._lead(number), with_kwargs=True)
            layer.register_forward_hook(self._keep)
            if hasattr(layer.mlp, "gate"):
                layer.mlp.register_forward_pre_hook(self._note_experts)

    @torch.no_grad()
    def run(self, ids: list[int], led: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        """The stream ``[tokens, layers + 1, hidden]`` and the chosen experts ``[tokens, MoE layers, k]``, sorted."""
        self.led, self.outputs, self.experts = led, [], []
        tokens = torch.tensor([ids], device=DEVICE)
        self.model.model(tokens, use_cache=False)
        first = self.model.model.embed_tokens(tokens[0])
        return torch.stack([first, *self.outputs], dim=1), torch.stack(self.experts, dim=1)

    def _lead(self, number: int) -> Any:
        def hook(_layer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            if self.led is None:
                return None
            stream = self.led[:, number].to(DEVICE, self.model.dtype)[None]  # float32 that holds bf16 values
            return ((stream, *args[1:]), kwargs) if args else (args, {**kwargs, "hidden_states": stream})

        return hook

    def _keep(self, _layer: Any, _args: Any, output: Any) -> None:
        states = output[0] if isinstance(output, tuple) else output
        self.outputs.append(states.reshape(-1, states.shape[-1]))

    def _note_experts(self, block: Any, args: tuple[Any, ...]) -> None:
        states = args[0].reshape(-1, args[0].shape[-1])
        chosen, _ = block.route_tokens_to_experts(block.gate(states))
        self.experts.append(chosen.sort(-1).values)


def against_transformers(model: Path, plain: dict[str, tuple[list[int], torch.Tensor]]) -> dict[str, Any]:
    reference = Reference(model)
    by_slot: dict[int, list[torch.Tensor]] = defaultdict(list)
    kept, flipped = [], []
    for ids, rows in plain.values():
        own, own_experts = reference.run(ids)
        _, led_experts = reference.run(ids, rows)
        errors = relative(rows.to(DEVICE), own)
        flips = (own_experts != led_experts).flatten(1).any(1)
        for slot in range(errors.shape[1]):
            by_slot[slot].append(errors[:, slot])
        kept.append(errors[~flips, -1])
        flipped.append(errors[flips, -1])
    return {
        "by_slot": {slot: spread(torch.cat(parts)) for slot, parts in by_slot.items()},
        "final_without_flips": spread(torch.cat(kept)),
        "final_with_flips": spread(torch.cat(flipped)),
    }


def plain_against_deferred(plain: dict[str, Any], deferred: dict[str, Any]) -> dict[str, Any]:
    """Samples whose batches were under SGLang's limit and over it: do both servers give the same rows?"""
    found = {}
    for kind in ("tiny", "short", "long"):
        names = [name for name in plain if name.startswith(kind)]
        errors = [relative(deferred[name][1], plain[name][1]) for name in names]
        same = sum(torch.equal(deferred[name][1], plain[name][1]) for name in names)
        found[kind] = {"samples": len(names), "bit_equal": same, **spread(torch.cat([e.flatten() for e in errors]))}
    return found


def naive_ranks(folder: Path) -> list[dict[str, Any]]:
    """Of each forward: how far ``hidden_states + residual`` differs between the ranks, by the size of the batch."""
    found = []
    for first in sorted(folder.glob("r0-*-l*.safetensors")):
        other = folder / first.name.replace("r0-", "r1-", 1)
        if not other.exists() or first.stem.endswith("-l0"):
            continue
        mine, theirs = load_file(first)["rows"], load_file(other)["rows"]
        if mine.shape != theirs.shape:
            continue
        errors = relative(mine, theirs)
        found.append(
            {"tokens": len(mine), "rows_that_differ": int((errors > 0).sum()), "median": float(errors.median())}
        )
    return found


def alone(folder: Path) -> dict[int, torch.Tensor]:
    """Rows ``[tokens, layers + 1, hidden]`` by length of the prompts that were sent one at a time."""
    pieces: dict[str, list[tuple[int, torch.Tensor]]] = defaultdict(list)
    for journal in folder.glob("journal-*.jsonl"):
        for line in map(json.loads, journal.read_text().splitlines()):
            if line["kind"] == "piece":
                with safe_open(folder / line["shard"], framework="pt") as shard:
                    pieces[line["rid"]].append((line["start"], shard.get_tensor(line["name"])))
    joined = [torch.cat([rows for _, rows in sorted(parts, key=lambda p: p[0])]) for parts in pieces.values()]
    return {len(rows): rows for rows in joined}


def naive_against_captured(naive: Path, captured: dict[int, torch.Tensor]) -> dict[str, Any]:
    """Rank 0's naive expression against the captured rows, of forwards that held one such prompt and nothing else."""
    errors: dict[str, list[torch.Tensor]] = {"under": [], "over": []}
    for file in sorted(naive.glob("r0-*-l*.safetensors")):
        layer, rows = int(file.stem.rpartition("-l")[2]), load_file(file)["rows"]
        if layer and len(rows) in captured:
            kind = "under" if len(rows) <= FUSED_BATCH else "over"
            errors[kind].append(relative(rows, captured[len(rows)][:, layer]))
    return {kind: spread(torch.cat(parts)) if parts else {"rows": 0} for kind, parts in errors.items()}


def summary(forwards: list[dict[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for kind, mine in (
        ("under", [f for f in forwards if f["tokens"] <= FUSED_BATCH]),
        ("over", [f for f in forwards if f["tokens"] > FUSED_BATCH]),
    ):
        found[kind] = {
            "layers_of_forwards": len(mine),
            "rows": sum(f["tokens"] for f in mine),
            "rows_that_differ": sum(f["rows_that_differ"] for f in mine),
            "largest_median": max((f["median"] for f in mine), default=0.0),
        }
    return found


def main() -> None:
    model, plain_folder, deferred_folder, naive, sent_alone = map(Path, sys.argv[1:6])
    plain, deferred = samples(plain_folder), samples(deferred_folder)
    found = {
        "samples": len(plain),
        "tokens": sum(len(ids) for ids, _ in plain.values()),
        "same_ids": all(plain[name][0] == deferred[name][0] for name in plain),
        "transformers_bf16": against_transformers(model, plain),
        "deferred_against_plain": plain_against_deferred(plain, deferred),
        "naive_between_ranks": summary(naive_ranks(naive)),
        "naive_against_captured": naive_against_captured(naive, alone(sent_alone)),
    }
    print(json.dumps(found))


if __name__ == "__main__":
    main()
