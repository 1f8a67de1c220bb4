"""Compare captured shards with hidden states that transformers computes from the same weights.

Runs under SGLang's interpreter (torch, transformers, safetensors); none of fleetdump's code is used.
Usage: compare_hidden_states.py MODEL RUN_DIR PROMPTS.json, where PROMPTS maps rid to ids. Prints one JSON object: rows,
samples, the largest error of a row over the largest absolute value of its reference (per slot, in float64), and how
many rows exceed 1e-4.
"""

import glob
import json
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


def pieces_of(run_dir):
    """Tensors by piece name, and the layers, from the closed shards."""
    tensors, layers = {}, None
    for path in glob.glob(f"{run_dir}/shard-*.safetensors"):
        with safe_open(path, "pt") as shard:
            layers = json.loads(shard.metadata()["layers"])
            for name in shard.keys():  # noqa: SIM118 (not a dict)
                tensors[name] = shard.get_tensor(name)
    return tensors, layers


def main():
    model_path, run_dir, prompts_path = sys.argv[1:]
    with open(prompts_path) as file:
        prompts = json.load(file)
    tensors, layers = pieces_of(run_dir)
    dtype = next(iter(tensors.values())).dtype
    model = AutoModelForCausalLM.from_pretrained(model_path, dtype=dtype).eval()
    errors, pieces = [], 0
    for rid, ids in prompts.items():
        mine = sorted((int(name.rsplit(":", 1)[1]), t) for name, t in tensors.items() if name.rsplit(":", 1)[0] == rid)
        pieces += len(mine)
        ends = [start + len(t) for start, t in mine]
        assert [start for start, _ in mine] == [0, *ends[:-1]], (rid, mine and ends)
        assert ends[-1] == len(ids), (rid, ends, len(ids))
        got = torch.cat([t for _, t in mine]).double()
        want = reference(model, ids, layers).double()
        errors.append(((got - want).abs().amax(2) / want.abs().amax(2)).amax(1))
    rows = torch.cat(errors)
    over = int((rows > 1e-4).sum())
    print(
        json.dumps(
            {
                "samples": len(prompts),
                "pieces": pieces,
                "rows": len(rows),
                "max_rel_err": rows.max().item(),
                "median": rows.median().item(),
                "over": over,
            }
        )
    )


if __name__ == "__main__":
    main()
