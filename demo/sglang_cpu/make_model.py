"""Make a tiny random DeepSeek-V3-architecture model and its byte-level tokenizer: `make_model.py FOLDER`.

Run by the interpreter of the SGLang venv. Weights are float32. Expert routing of random weights flips where two
experts score alike, and then no two implementations agree; here it can not. ``NUM_EXPERTS`` dimensions of the residual
stream carry +-1 by token id, no layer writes to them, and the gates read nothing else: each expert's score is above or
below one half by its own bit, and correction biases that all differ by ``BIAS_STEP`` order experts of equal bit.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import DeepseekV3Config, DeepseekV3ForCausalLM, PreTrainedTokenizerFast

SEED = 20260
SPECIAL_TOKENS = ("<|begin|>", "<|end|>", "<|pad|>", "<|system|>", "<|user|>", "<|assistant|>")
VOCABULARY = 320
NUM_EXPERTS = 8
GROUPS = 4
BITS = slice(0, NUM_EXPERTS)
"""Dimensions of the residual stream that only the embedding writes."""
GATE_GAIN = 4.0
BIAS_STEP = 0.015
LEAST_MARGIN = 1e-3

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{% if message['role'] == 'assistant' %}"
    "<|assistant|>{% generation %}{{ message['content'] }}<|end|>{% endgeneration %}"
    "{% else %}<|{{ message['role'] }}|>{{ message['content'] }}{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def make_tokenizer() -> PreTrainedTokenizerFast:
    """One token a byte of UTF-8, and one for each special token."""
    tokens = [*SPECIAL_TOKENS, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    tokens += [f"<|unused-{number}|>" for number in range(VOCABULARY - len(tokens))]
    tokenizer = Tokenizer(models.BPE(vocab={token: number for number, token in enumerate(tokens)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<|begin|>",
        eos_token="<|end|>",
        pad_token="<|pad|>",
        additional_special_tokens=list(SPECIAL_TOKENS[3:]),
        model_max_length=4096,
    )
    fast.chat_template = CHAT_TEMPLATE
    return fast


def model_config() -> DeepseekV3Config:
    rope = {
        "rope_type": "yarn",
        "rope_theta": 10000.0,
        "factor": 4.0,
        "beta_fast": 32,
        "beta_slow": 1,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 1024,
    }
    return DeepseekV3Config(
        vocab_size=VOCABULARY,
        hidden_size=128,
        intermediate_size=256,
        moe_intermediate_size=64,
        num_hidden_layers=6,
        num_attention_heads=4,
        num_key_value_heads=4,
        n_routed_experts=NUM_EXPERTS,
        n_shared_experts=1,
        num_experts_per_tok=2,
        first_k_dense_replace=1,
        q_lora_rank=64,
        kv_lora_rank=64,
        qk_nope_head_dim=32,
        qk_rope_head_dim=16,
        v_head_dim=32,
        n_group=GROUPS,
        topk_group=2,
        routed_scaling_factor=2.5,
        norm_topk_prob=True,
        max_position_embeddings=4096,
        rope_parameters=rope,
        bos_token_id=0,
        eos_token_id=1,
        pad_token_id=2,
        tie_word_embeddings=False,
    )


def fill_weights(model: DeepseekV3ForCausalLM) -> None:
    """Random weights from ``SEED``; then the routing of the module's docstring."""
    generator = torch.Generator().manual_seed(SEED)
    for name, weight in model.named_parameters():
        noise = torch.randn(weight.shape, generator=generator)
        if weight.dim() == 1:
            weight.copy_(1 + 0.1 * noise)
        else:
            weight.copy_(noise * (0.5 if "embed" in name else 0.08))
    bits = torch.randint(0, 2, (VOCABULARY, NUM_EXPERTS), generator=generator)
    model.model.embed_tokens.weight[:, BITS] = 2.0 * bits - 1.0
    for layer in model.model.layers:
        layer.self_attn.o_proj.weight[BITS] = 0
        layer.post_attention_layernorm.weight[BITS] = 1
        if not hasattr(layer.mlp, "gate"):
            layer.mlp.down_proj.weight[BITS] = 0
            continue
        layer.mlp.experts.down_proj[:, BITS] = 0
        layer.mlp.shared_experts.down_proj.weight[BITS] = 0
        layer.mlp.gate.weight.zero_()
        layer.mlp.gate.weight[:, BITS] = GATE_GAIN * torch.eye(NUM_EXPERTS)
        layer.mlp.gate.e_score_correction_bias.copy_(BIAS_STEP * distinct_biases(generator))


def distinct_biases(generator: torch.Generator) -> torch.Tensor:
    """A permutation of 0 to ``NUM_EXPERTS`` - 1 in which no two groups of experts have the same sum."""
    while True:
        biases = torch.randperm(NUM_EXPERTS, generator=generator).float()
        if len(set(biases.view(GROUPS, -1).sum(-1).tolist())) == GROUPS:
            return biases


def published_config(config: dict[str, object]) -> dict[str, object]:
    """config.json as the published DeepSeek models have it: SGLang reads keys that transformers drops."""
    rope = dict(config.pop("rope_parameters"))  # type: ignore[call-overload]
    theta = rope.pop("rope_theta")
    rope["type"] = rope.pop("rope_type")
    return {
        **config,
        "rope_scaling": rope,
        "rope_theta": theta,
        "moe_layer_freq": 1,
        "ep_size": 1,
        "topk_method": "noaux_tc",
        "scoring_func": "sigmoid",
        "num_nextn_predict_layers": 0,
    }


def least_margin(model: DeepseekV3ForCausalLM, ids: torch.Tensor) -> float:
    """The smallest difference of a chosen and a not chosen score over ``ids`` ``[1, tokens]``, groups included."""
    margins: list[float] = []

    def measure(gate: torch.nn.Module, _inputs: object, logits: torch.Tensor) -> None:
        scores = (logits.sigmoid() + gate.e_score_correction_bias).view(-1, GROUPS, NUM_EXPERTS // GROUPS)
        groups = scores.topk(2, -1).values.sum(-1).sort(-1, descending=True)
        margins.append(float((groups.values[:, 1] - groups.values[:, 2]).min()))
        in_best_groups = groups.indices[:, :2, None].expand(-1, -1, scores.shape[-1])
        experts = scores.gather(1, in_best_groups).flatten(1).sort(-1, descending=True).values
        margins.append(float((experts[:, 1] - experts[:, 2]).min()))

    gates = [layer.mlp.gate for layer in model.model.layers if hasattr(layer.mlp, "gate")]
    hooks = [gate.register_forward_hook(measure) for gate in gates]
    model(ids)
    for hook in hooks:
        hook.remove()
    return min(margins)


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    folder = parser.parse_args().folder
    torch.set_num_threads(1)  # a tiny model: more threads only wait for each other
    model = DeepseekV3ForCausalLM(model_config()).float().eval()
    fill_weights(model)
    margin = least_margin(model, torch.arange(VOCABULARY)[None])
    assert margin >= LEAST_MARGIN, f"router margin {margin:.2g} is below {LEAST_MARGIN}"
    make_tokenizer().save_pretrained(folder)
    model.save_pretrained(folder)
    config = folder / "config.json"
    config.write_text(json.dumps(published_config(json.loads(config.read_text())), indent=1))
    parameters = sum(weight.numel() for weight in model.parameters())
    print(f"{parameters} parameters, least router margin {margin:.4f}")


if __name__ == "__main__":
    main()
