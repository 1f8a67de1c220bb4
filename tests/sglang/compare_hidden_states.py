"""Compare captured shards with hidden states that transformers computes from the same weights.

Runs under SGLang's interpreter (torch, transformers, safetensors); none of fleetdump's code is used.
Usage: compare_hidden_states.py MODEL RUN_DIR PROMPTS.json [PIECES.json], where PROMPTS maps rid to ids and PIECES lists
[shard, tensor name] of those that count, instead of all. Prints one JSON object: rows, samples, the largest error of a
row over the largest absolute value of its reference (per slot, in float64), and how many rows exceed 1e-4.
"""

import glob
import json
import os
import sys

import torch
from safetensors import safe_open
from transformers import AutoModelForCausalLM


def reference(model, ids, layers):
    """``[tokens, k+1, hidden]``: input of each of ``layers``, then the output of the last layer."""
    inputs, outputs = {}, {}
    hooks = []
    for number, layer in enumerate(model.model.layers):
        hooks.append(layer.register_forward_pre_hook(lambda _, args, n=number: inputs.__setitem__(n, args[0][0])))
        hooks.append(
            layer.register_forward_hook(
                lambda _, __, out, n=number: outputs.__setitem__(n, (out[0] if isinstance(out, tuple) else out)[0])
            )
        )
    with torch.no_grad():
        model.model(torch.tensor([ids]))
    for hook in hooks:
        hook.remove()
    last = outputs[len(outputs) - 1]
    return torch.stack([inputs.get(layer, last) for layer in layers] + [last], dim=1)


def pieces_of(run_dir, chosen):
    """From the closed shards: by rid and slots (a pipeline's stages have some each) tensors by position; the layers."""
    pieces, layers = {}, None
    for path in glob.glob(f"{run_dir}/shard-*.safetensors"):
        with safe_open(path, "pt") as shard:
            layers = json.loads(shard.metadata()["layers"])
            slots = tuple(json.loads(shard.metadata()["slots"]))
            for name in shard.keys():  # noqa: SIM118 (not a dict)
                if chosen is not None and [os.path.basename(path), name] not in chosen:
                    continue
                rid, start = name.rsplit(":", 1)
                pieces.setdefault(rid, {}).setdefault(slots, []).append((int(start), shard.get_tensor(name)))
    return pieces, layers


def joined(pieces, rid, tokens, slots):
    """``[tokens, slots, hidden]`` of a request, in float64; every row of every slot must be there once."""
    whole, stages = None, pieces[rid]
    assert sorted(slot for stage in stages for slot in stage) == list(range(slots)), (rid, list(stages))
    for stage, mine in stages.items():
        mine.sort(key=lambda piece: piece[0])
        ends = [start + len(rows) for start, rows in mine]
        assert [start for start, _ in mine] == [0, *ends[:-1]], (rid, stage, mine and ends)
        assert ends[-1] == tokens, (rid, stage, ends, tokens)
        if whole is None:
            whole = torch.full((tokens, slots, mine[0][1].shape[2]), float("nan"), dtype=torch.float64)
        whole[:, list(stage)] = torch.cat([rows for _, rows in mine]).double()
    return whole


def main():
    model_path, run_dir, prompts_path, *pieces_path = sys.argv[1:]
    chosen = None
    if pieces_path:
        with open(pieces_path[0]) as file:
            chosen = json.load(file)
    with open(prompts_path) as file:
        prompts = json.load(file)
    pieces, layers = pieces_of(run_dir, chosen)
    of_all = [rows for stages in pieces.values() for stage in stages.values() for _, rows in stage]
    dtype = of_all[0].dtype
    model = AutoModelForCausalLM.from_pretrained(model_path, dtype=dtype).eval()
    errors = []
    for rid, ids in prompts.items():
        got = joined(pieces, rid, len(ids), len(layers) + 1)
        want = reference(model, ids, layers).double()
        errors.append(((got - want).abs().amax(2) / want.abs().amax(2)).amax(1))
    rows = torch.cat(errors)
    over = int((rows > 1e-4).sum())
    print(
        json.dumps(
            {
                "samples": len(prompts),
                "pieces": len(of_all),
                "stages": max(map(len, pieces.values())),
                "rows": len(rows),
                "max_rel_err": rows.max().item(),
                "median": rows.median().item(),
                "over": over,
            }
        )
    )


if __name__ == "__main__":
    main()
