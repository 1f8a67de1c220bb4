"""An independent check of collected hidden states, with nothing of fleetdump: `reference_check.py --help`.

Run by the SGLang venv's interpreter. It reads the merged manifest and the pulled shards as plain JSON and safetensors,
tokenises the conversations again with transformers, computes the same model in float32 on the same weights with hooks
on its layers, and compares every row of every sample and slot. Slot j is what layer ``input[j] - 1`` gave (the stream
that enters layer ``input[j]``); the last slot is what the last layer gave, before the final norm.

A row is left out, and listed, when for any of its routers the least chosen and the best not chosen score are closer
than ``MARGIN``: there two right implementations may choose different experts. So are the rows after it in its sample,
which see it through attention.
"""

from __future__ import annotations

import argparse
import json
import math
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from transformers import AutoModelForCausalLM, AutoTokenizer

MARGIN = 1e-5


@dataclass
class Outcome:
    """What the check found; lists name samples."""

    samples: int = 0
    tokens: int = 0
    bytes: int = 0
    max_abs_err: float = 0.0
    max_rel_err: float = 0.0
    worst: str = ""
    least_router_margin: float = math.inf
    rows_excluded: int = 0
    excluded: list[str] = field(default_factory=list)
    lost: list[str] = field(default_factory=list)
    duplicated: list[str] = field(default_factory=list)
    wrong_ids: list[str] = field(default_factory=list)
    wrong_masks: list[str] = field(default_factory=list)


class Reference:
    """transformers' own computation, with each layer's output and the routers' margins of the last prompt."""

    def __init__(self, folder: Path):
        self.tokenizer = AutoTokenizer.from_pretrained(folder)
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        self._outputs: dict[int, torch.Tensor] = {}
        self._margins: list[torch.Tensor] = []
        for number, layer in enumerate(self.model.model.layers):
            layer.register_forward_hook(self._keep(number))
            if hasattr(layer.mlp, "gate"):
                layer.mlp.gate.register_forward_hook(self._measure)

    def tokens(self, messages: list[dict[str, Any]]) -> tuple[list[int], list[int]]:
        """Token ids and loss mask of a conversation."""
        encoded = self.tokenizer.apply_chat_template(
            messages, return_dict=True, return_assistant_tokens_mask=True, add_generation_prompt=False
        )
        return list(encoded["input_ids"]), list(encoded["assistant_masks"])

    @torch.no_grad()
    def states(self, ids: list[int], entries: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
        """Hidden states ``[tokens, len(entries) + 1, hidden]`` and the least margin of each row ``[tokens]``."""
        self._outputs.clear()
        self._margins.clear()
        self.model.model(torch.tensor([ids]), use_cache=False)
        last = len(self.model.model.layers) - 1
        embedded = self.model.model.embed_tokens(torch.tensor(ids))
        slots = [self._outputs[entry - 1] if entry else embedded for entry in entries]
        margins = torch.stack(self._margins).min(0).values if self._margins else torch.full((len(ids),), math.inf)
        return torch.stack([*slots, self._outputs[last]], dim=1), margins

    def _keep(self, number: int) -> Any:
        def hook(_module: object, _inputs: object, output: Any) -> None:
            self._outputs[number] = (output[0] if isinstance(output, tuple) else output).reshape(
                -1, output[0].shape[-1]
            )

        return hook

    def _measure(self, gate: Any, _inputs: object, logits: torch.Tensor) -> None:
        config = self.model.config
        scores = (logits.sigmoid() + gate.e_score_correction_bias).view(len(logits), config.n_group, -1)
        groups = scores.topk(2, -1).values.sum(-1).sort(-1, descending=True)
        best = groups.indices[:, : config.topk_group, None].expand(-1, -1, scores.shape[-1])
        experts = scores.gather(1, best).flatten(1).sort(-1, descending=True).values
        chosen = config.num_experts_per_tok
        margins = [experts[:, chosen - 1] - experts[:, chosen]]
        if config.topk_group < config.n_group:
            margins.append(groups.values[:, config.topk_group - 1] - groups.values[:, config.topk_group])
        self._margins.append(torch.stack(margins).min(0).values)


class Shards:
    """Pulled shards, each opened once."""

    def __init__(self, root: Path):
        self._root = root
        self._open: dict[Path, Any] = {}

    def tensor(self, line: dict[str, Any], shard: str, name: str) -> torch.Tensor:
        path = self._root / line.get("path", "") / shard
        if path not in self._open:
            self._open[path] = safe_open(path, framework="pt")
        return self._open[path].get_tensor(name)

    def sample(self, line: dict[str, Any]) -> torch.Tensor:
        """All pieces of a sample ``[tokens, slots, hidden]``; rows that none of them has raise ValueError."""
        sample = torch.full((line["tokens"], len(line["layers"]["input"]) + 1, line["hidden"]), float("nan"))
        for piece in line["pieces"]:
            rows = slice(piece["start"], piece["start"] + piece["rows"])
            sample[rows, piece["slots"]] = self.tensor(line, piece["shard"], piece["name"]).float()
        if sample.isnan().any():
            raise ValueError(f"{line['id']}: rows are missing")
        return sample


def compare(outcome: Outcome, name: str, got: torch.Tensor, want: torch.Tensor, margins: torch.Tensor) -> None:
    """Fold one sample's errors into ``outcome``; both ``[tokens, slots, hidden]``."""
    outcome.least_router_margin = min(outcome.least_router_margin, float(margins.min()))
    close = (margins < MARGIN).nonzero()
    end = int(close[0]) if len(close) else len(margins)
    outcome.rows_excluded += len(margins) - end
    if end < len(margins):
        outcome.excluded.append(f"{name}: rows {end} to {len(margins) - 1}, margin {float(margins[end]):.2g}")
    if not end:
        return
    errors = (got[:end].double() - want[:end].double()).abs().amax(-1)
    relative = errors / want[:end].double().abs().amax(-1).clamp_min(1e-30)
    worst = float(relative.max()) if bool(relative.isfinite().all()) else math.inf
    if worst > outcome.max_rel_err:
        row, slot = divmod(int(relative.argmax()), relative.shape[1])
        outcome.max_rel_err, outcome.worst = worst, f"{name} row {row} slot {slot}"
    outcome.max_abs_err = max(outcome.max_abs_err, float(errors.max()))


def check(manifest: Path, data: Path, model: Path, conversations: Path) -> Outcome:
    """Compare everything; a sample of another shape than it should have is a ValueError."""
    reference, shards, outcome = Reference(model), Shards(data), Outcome()
    lines = [json.loads(line) for line in manifest.open(encoding="utf-8")]
    wanted = {row["id"]: row["messages"] for row in map(json.loads, conversations.open(encoding="utf-8"))}
    seen: set[str] = set()
    for line in lines:
        name = line["id"]
        if name in seen:
            outcome.duplicated.append(name)
            continue
        seen.add(name)
        ids, mask = reference.tokens(wanted[name])
        tokens = line["token_shard"]
        if shards.tensor(line, tokens["shard"], tokens["ids"]).tolist() != ids:
            outcome.wrong_ids.append(name)
            continue
        if shards.tensor(line, tokens["shard"], tokens["mask"]).tolist() != mask:
            outcome.wrong_masks.append(name)
        got = shards.sample(line)
        want, margins = reference.states(ids, line["layers"]["input"])
        if got.shape != want.shape or got.dtype != want.dtype:
            raise ValueError(f"{name}: {tuple(got.shape)} {got.dtype}, expected {tuple(want.shape)} {want.dtype}")
        compare(outcome, name, got, want, margins)
        outcome.samples += 1
        outcome.tokens += len(ids)
        outcome.bytes += got.numel() * got.element_size()
    outcome.lost = sorted(set(wanted) - seen)
    return outcome


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--manifest", type=Path, required=True, help="the merged manifest")
    parser.add_argument("--data", type=Path, required=True, help="folder below which each line's path lies")
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--conversations", type=Path, required=True)
    arguments = parser.parse_args()
    torch.set_num_threads(1)  # a tiny model: more threads only wait for each other
    outcome = check(arguments.manifest, arguments.data, arguments.model, arguments.conversations)
    print(json.dumps(asdict(outcome)))


if __name__ == "__main__":
    main()
