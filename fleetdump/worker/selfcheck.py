"""Are captured tensors the model's hidden states? Run by the agent with the server's interpreter, a job on stdin.

The final state is proven: logits = lm_head(rmsnorm(last row) * weight), in float32, must give the log-probabilities
that the server itself computed for the next token. The chosen layers are checked for what goes wrong in practice:
values that are not finite, all zero, the same in every row, or the same in two layers.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from fleetdump.agent.protocol import Finding, from_json, to_json
from fleetdump.worker.tokenise import local_model

VOCABULARY_SLICE = 8192
"""Rows of lm_head that are in memory as float32 at a time."""


@dataclass
class CheckedSample:
    """``pieces``: [shard, tensor name] in order of position; ``top``: [log-probability, token id] of the server."""

    id: str
    pieces: list[list[str]]
    norm: str
    top: list[list[float]]


@dataclass
class CheckJob:
    """What to judge. ``layers`` are the captured entry ids; ``tolerance`` bounds the log-probabilities' difference."""

    model_path: str
    directory: str
    layers: list[int]
    tolerance: float
    samples: list[CheckedSample]


def judge(job: CheckJob) -> tuple[list[Finding], float]:
    """Findings on all samples, and the largest difference of log-probabilities."""
    directory = Path(job.directory)
    tensors = {sample.id: load_sample(directory, sample) for sample in job.samples}
    model = Path(local_model(job.model_path))
    findings = [check_values(tensors), check_layers(tensors, job.layers, number_of_layers(model))]
    head = OutputHead(model)
    worst, where = 0.0, ""
    for sample in job.samples:
        weight, eps = load_norm(directory / sample.norm)
        final = tensors[sample.id][-1, -1].float()
        difference = max_difference(head.log_probabilities(rms_norm(final, eps) * weight), sample.top)
        if not difference <= worst:  # a NaN is the worst
            worst, where = difference, sample.id
    findings.append(_judge_difference(worst, where, job.tolerance))
    return findings, worst


def load_sample(directory: Path, sample: CheckedSample) -> torch.Tensor:
    """``[tokens, k+1, hidden]`` in the captured dtype."""
    pieces = []
    for shard, name in sample.pieces:
        with safe_open(directory / shard, framework="pt") as tensors:
            pieces.append(tensors.get_tensor(name))
    return torch.cat(pieces)


def load_norm(path: Path) -> tuple[torch.Tensor, float]:
    """Weight of the final norm as float32 ``[hidden]``, and its eps."""
    with safe_open(path, framework="pt") as tensors:
        return tensors.get_tensor("weight").float(), float(tensors.metadata()["eps"])


def rms_norm(state: torch.Tensor, eps: float) -> torch.Tensor:
    """``state`` (float32, last dimension hidden) over its root mean square."""
    return state * torch.rsqrt(state.pow(2).mean(-1, keepdim=True) + eps)


def check_values(tensors: dict[str, torch.Tensor]) -> Finding:
    """Finite, not all zero, and not one and the same row for different tokens."""
    for name, tensor in tensors.items():
        values = tensor.float()
        for slot in range(values.shape[1]):
            rows = values[:, slot]
            if not torch.isfinite(rows).all():
                return _bad("values", f"{name}, slot {slot}: not all values are finite")
            if (rows == 0).all(dim=1).any():
                return _bad("values", f"{name}, slot {slot}: a row is all zero")
            if len(rows) > 2 and (rows == rows[0]).all():
                return _bad("values", f"{name}, slot {slot}: all {len(rows)} rows are the same")
    return Finding("values", "ok", "finite, not zero, not constant")


def number_of_layers(model: Path) -> int:
    """From config.json, also where the language model's settings lie in ``text_config``; -1 when it does not say."""
    config = json.loads((model / "config.json").read_text(encoding="utf-8"))
    return int(config.get("num_hidden_layers") or config.get("text_config", {}).get("num_hidden_layers", -1))


def check_layers(tensors: dict[str, torch.Tensor], layers: list[int], depth: int) -> Finding:
    """No two slots hold the same rows: that would be one layer captured twice. The exception is by definition: the
    entry id ``depth`` (the stream after the last layer) is what the final slot holds."""
    meanings = [*layers, depth]
    for name, tensor in tensors.items():
        for second in range(1, tensor.shape[1]):
            for first in range(second):
                if meanings[first] != meanings[second] and torch.equal(tensor[:, first], tensor[:, second]):
                    return _bad("layers", f"{name}: slots {first} and {second} hold the same values")
    return Finding("layers", "ok", "each layer differs from the others")


class OutputHead:
    """lm_head of a checkpoint (or its tied embeddings), read slice by slice."""

    def __init__(self, model: Path):
        self.path, self.key = self._find(model)

    def log_probabilities(self, state: torch.Tensor) -> torch.Tensor:
        """``[vocabulary]`` float32 for a normed state ``[hidden]``."""
        return torch.log_softmax(torch.cat([block @ state for block in self._blocks()]), dim=0)

    def _blocks(self) -> Iterator[torch.Tensor]:
        with safe_open(self.path, framework="pt") as tensors:
            rows = tensors.get_slice(self.key)
            for start in range(0, rows.get_shape()[0], VOCABULARY_SLICE):
                yield rows[start : start + VOCABULARY_SLICE].float()

    @staticmethod
    def _find(model: Path) -> tuple[Path, str]:
        index = model / "model.safetensors.index.json"
        if index.exists():
            places = {key: model / file for key, file in json.loads(index.read_bytes())["weight_map"].items()}
        else:
            places = {}
            for path in sorted(model.glob("*.safetensors")):
                with safe_open(path, framework="pt") as tensors:
                    places.update(dict.fromkeys(tensors.keys(), path))
        for ending in ("lm_head.weight", "embed_tokens.weight"):
            for key, path in places.items():
                if key.endswith(ending):
                    return path, key
        raise SystemExit(f"{model}: no lm_head.weight and no embed_tokens.weight in its safetensors files")


def max_difference(ours: torch.Tensor, top: list[list[float]]) -> float:
    """Largest difference between our log-probabilities and the server's best tokens."""
    return max(abs(float(ours[int(token)]) - logprob) for logprob, token in top)


def _judge_difference(worst: float, where: str, tolerance: float) -> Finding:
    text = f"largest difference to the server's log-probabilities {worst:.2g} (tolerance {tolerance:g})"
    if worst <= tolerance:
        return Finding("logits", "ok", text)
    return _bad("logits", f"{text} at {where}: the final state is not what the server's own head reads")


def _bad(key: str, text: str) -> Finding:
    return Finding(key, "blocker", text, "do not extract with this patch and engine: what it writes is wrong")


def main() -> None:
    """Entry point of ``python -m fleetdump.worker.selfcheck``."""
    job = from_json(CheckJob, json.load(sys.stdin))
    with torch.inference_mode():
        findings, worst = judge(job)
    answer: dict[str, Any] = {"findings": [to_json(finding) for finding in findings], "max_logprob_diff": worst}
    print(json.dumps(answer))


if __name__ == "__main__":
    main()
