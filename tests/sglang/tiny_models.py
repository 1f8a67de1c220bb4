"""Tiny random models of every family that the patch knows, and what transformers computes with them in float32.

``python -m tests.sglang.tiny_models FOLDER NAME...``, run by the interpreter of the SGLang venv from the repository's
root. For each name it writes FOLDER/NAME/: a model directory as it is published (weights, config.json, a byte-level
tokenizer) with two files beside it that SGLang does not read:

* ``prompts.json``: ids by sample name, of mixed lengths around the chunks of ``CHUNK`` tokens;
* ``reference.bin``, a safetensors file: for each sample ``NAME``, float32 ``[tokens, slots, hidden]``, the stream that
  enters each layer of the file's ``layers`` and, last, the one before the final norm; and ``NAME:logits``,
  ``[vocabulary]``, of the last token. (Another suffix, since SGLang loads every ``*.safetensors`` of a model.)

Where experts score alike, rounding decides which are chosen and no two implementations agree. A seed is therefore taken
only if noise of the size of rounding, put into the embeddings, stays as small in every row.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import save_file
from transformers import PretrainedConfig, PreTrainedModel

from demo.sglang_cpu import make_model

CHUNK = 64
LENGTHS = (1, 2, 17, 63, 64, 65, 96, 127, 128, 129, 150, 200, 257, 31, 5, 80)
"""Tokens of the 16 prompts."""
NOISE = 2e-7
STABLE = 2e-5
"""Largest change of a row over the largest absolute value of it, with ``NOISE`` in the embeddings."""
SEEDS = 50

COMMON: dict[str, Any] = {
    "vocab_size": make_model.VOCABULARY,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 2,
    "tie_word_embeddings": False,
}
EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
ROUTED = {"n_routed_experts": 8, "n_shared_experts": 1, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
LATENT = {
    "q_lora_rank": 64,
    "kv_lora_rank": 64,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 16,
    "v_head_dim": 32,
    "num_key_value_heads": 4,
}


def rope(theta: float = 10000.0, partial: float = 1.0) -> dict[str, Any]:
    """``theta`` is the default of SGLang's model: old releases read a key that transformers no longer keeps."""
    share = {"partial_rotary_factor": partial} if partial < 1 else {}
    return {"rope_parameters": {"rope_type": "default", "rope_theta": theta, **share}, **share}


# Class of transformers, values of its config beside COMMON, and keys of config.json that SGLang alone reads.
FAMILIES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "llama": ("Llama", rope(), {}),
    "qwen2": ("Qwen2", rope(1e6), {}),
    "qwen3": ("Qwen3", {"head_dim": 32, **rope(1e6)}, {}),
    "qwen2-moe": ("Qwen2Moe", {**EXPERTS, "shared_expert_intermediate_size": 128, **rope()}, {}),
    "qwen3-moe": ("Qwen3Moe", {**EXPERTS, "head_dim": 32, "norm_topk_prob": True, **rope()}, {}),
    "glm4-moe": (
        "Glm4Moe",
        {**ROUTED, "head_dim": 32, "attention_bias": True, "use_qk_norm": True, **rope(partial=0.5)},
        {},
    ),
    "glm4-moe-lite": (
        "Glm4MoeLite",
        {**ROUTED, **LATENT, **rope()},
        {"first_k_dense_replace": 1, "moe_layer_freq": 1, "topk_method": "noaux_tc", "scoring_func": "sigmoid"},
    ),
    "gpt-oss": (
        "GptOss",
        {"num_local_experts": 8, "num_experts_per_tok": 2, "head_dim": 32, "sliding_window": 32, **rope()},
        {},
    ),
    "minimax-m2": (
        "MiniMaxM2",
        {"num_local_experts": 8, "num_experts_per_tok": 2, "head_dim": 32, **rope(partial=0.5)},
        {"rotary_dim": 16, "use_qk_norm": True, "use_routing_bias": True, "scoring_func": "sigmoid"},
    ),
    "qwen3-next": (
        "Qwen3Next",
        {
            **EXPERTS,
            "num_hidden_layers": 8,
            "head_dim": 32,
            "shared_expert_intermediate_size": 64,
            "linear_key_head_dim": 32,
            "linear_value_head_dim": 32,
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            **rope(partial=0.5),
        },
        {"full_attention_interval": 4},
    ),
}
NAMES = ("deepseek-v3", *FAMILIES)

Publish = Callable[[dict[str, Any]], dict[str, Any]]


def configuration(name: str) -> tuple[str, PretrainedConfig, Publish]:
    """Prefix of the classes in transformers, the config, and how its config.json is published."""
    if name == "deepseek-v3":
        return "DeepseekV3", make_model.model_config(), make_model.published_config
    prefix, values, published = FAMILIES[name]
    config: PretrainedConfig = getattr(transformers, f"{prefix}Config")(**{**COMMON, **values})
    return prefix, config, lambda written: {**written, **published}


def fill(name: str, model: PreTrainedModel, seed: int) -> None:
    """Random weights under which the residual stream neither dies out nor explodes."""
    if name == "deepseek-v3":
        make_model.fill_weights(model)  # has a seed of its own, and experts that can not score alike
        return
    generator = torch.Generator().manual_seed(seed)
    for key, weight in [*model.named_parameters(), *model.named_buffers()]:
        if key.endswith(("inv_freq", "A_log")):
            continue
        noise = torch.randn(weight.shape, generator=generator)
        if "norm" in key:
            unit = 0.0 if name == "qwen3-next" and "linear_attn" not in key else 1.0  # its norms multiply by 1 + weight
            weight.copy_(unit + 0.1 * noise)
        elif weight.dim() == 1:
            weight.copy_(0.1 * noise)
        else:
            weight.copy_(noise * (0.5 if "embed" in key else 0.08))


def captured_layers(config: PretrainedConfig) -> list[int]:
    """The layers whose input is compared: the first, one in the middle, and what leaves the last."""
    total: int = config.num_hidden_layers
    return [0, total // 2, total]


def some_prompts() -> dict[str, list[int]]:
    source = random.Random(CHUNK)
    return {f"s{n}": [source.randrange(3, 300) for _ in range(length)] for n, length in enumerate(LENGTHS)}


@torch.no_grad()
def reference(model: PreTrainedModel, ids: list[int], noise: float = 0.0) -> tuple[torch.Tensor, torch.Tensor]:
    """``[tokens, slots, hidden]`` and the logits of the last token. ``noise`` is relative, in the embeddings."""
    streams: list[torch.Tensor] = []
    layers = model.model.layers
    hooks = [layer.register_forward_pre_hook(lambda _, args: streams.append(args[0][0])) for layer in layers]
    hooks.append(layers[-1].register_forward_hook(lambda *call: streams.append(_tensor(call[2])[0])))
    embedded = model.get_input_embeddings()(torch.tensor([ids]))
    if noise:
        embedded = embedded * (1 + noise * torch.randn(embedded.shape, generator=torch.Generator().manual_seed(1)))
    logits = model(inputs_embeds=embedded, use_cache=False).logits[0, -1]
    for hook in hooks:
        hook.remove()
    slots = [*captured_layers(model.config), model.config.num_hidden_layers]
    return torch.stack([streams[slot] for slot in slots], dim=1), logits


def _tensor(output: Any) -> torch.Tensor:
    made: torch.Tensor = output[0] if isinstance(output, tuple) else output
    return made


def instability(model: PreTrainedModel, prompts: dict[str, list[int]], exact: dict[str, torch.Tensor]) -> float:
    """The largest relative change of a row when the embeddings change by ``NOISE``."""
    worst = 0.0
    for sample, ids in prompts.items():
        other, _ = reference(model, ids, NOISE)
        change = (other - exact[sample]).abs().amax(2) / exact[sample].abs().amax(2)
        worst = max(worst, change.max().item())
    return worst


def make(name: str, folder: Path) -> None:
    """Write the model, its prompts and reference; raises RuntimeError when no seed gives a stable one."""
    prefix, config, publish = configuration(name)
    config._attn_implementation = "eager"
    model: PreTrainedModel = getattr(transformers, f"{prefix}ForCausalLM")(config).float().eval()
    prompts = some_prompts()
    for seed in range(SEEDS):
        with torch.no_grad():
            fill(name, model, seed)
        computed = {sample: reference(model, ids) for sample, ids in prompts.items()}
        exact = {sample: streams for sample, (streams, _) in computed.items()}
        change = instability(model, prompts, exact)
        if change <= STABLE:
            break
    else:
        raise RuntimeError(f"{name}: of {SEEDS} seeds none has experts that rounding cannot swap")
    temporary = folder.with_name(folder.name + ".part")
    shutil.rmtree(temporary, ignore_errors=True)
    make_model.make_tokenizer().save_pretrained(temporary)
    model.save_pretrained(temporary)
    written = json.loads((temporary / "config.json").read_text())
    (temporary / "config.json").write_text(json.dumps(publish(written), indent=1))
    (temporary / "prompts.json").write_text(json.dumps(prompts))
    tensors = {f"{sample}:logits": logits.contiguous() for sample, (_, logits) in computed.items()}
    layers = json.dumps(captured_layers(config))
    save_file({**exact, **tensors}, temporary / "reference.bin", metadata={"layers": layers})
    shutil.rmtree(folder, ignore_errors=True)
    temporary.rename(folder)
    print(f"{name}: seed {seed}, rounding changes a row by {change:.1e} at most", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("names", nargs="+", choices=NAMES)
    arguments = parser.parse_args()
    torch.set_num_threads(1)  # tiny models: more threads only wait for each other
    arguments.folder.mkdir(parents=True, exist_ok=True)
    for name in arguments.names:
        make(name, arguments.folder / name)


if __name__ == "__main__":
    main()
