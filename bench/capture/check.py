"""Compares what two arms captured of the same prompts, sent one at a time: ``python check.py NAIVE_DIR RUN_DIR``.

Runs under the server's interpreter (torch, safetensors). Prints {"tensors", "different", "max_difference"}: rows of one
request and chunk are one tensor an arm, and the two are compared bit for bit; the difference is relative to the largest
value.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from safetensors import safe_open


def tapped(run: Path) -> dict[str, torch.Tensor]:
    found = {}
    for path in run.glob("shard-*.safetensors"):
        with safe_open(path, "pt") as shard:
            names = shard.keys()
            found.update({name.replace("/", "_").replace(":", "."): shard.get_tensor(name) for name in names})
    return found


def main(naive: Path, run: Path) -> None:
    ours, different, most = tapped(run), 0, 0.0
    plain = {path.name.removesuffix(".pt"): torch.load(path) for path in naive.glob("*.pt")}
    if not plain or plain.keys() != ours.keys():
        sys.exit(f"the arms captured other chunks: {sorted(plain.keys() ^ ours.keys())[:6]} of {len(plain)}")
    for name, states in plain.items():
        wanted = torch.stack(list(states.values()), dim=1)
        if not torch.equal(wanted, ours[name]):
            different += 1
            difference = (wanted.double() - ours[name].double()).abs().max() / wanted.double().abs().max()
            most = max(most, difference.item())
    print(json.dumps({"tensors": len(plain), "different": different, "max_difference": most}))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
