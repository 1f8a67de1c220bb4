"""A random model of DeepSeek-V3's architecture, with weights: ``python make_small_model.py OUT``.

8 layers, hidden 1024, 32 experts, made by transformers and saved as bf16 safetensors, so that transformers can compute
what SGLang should have captured. Its tokenizer has one token a byte.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from make_model import complete_config, save_tokenizer
from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

COMMON = {
    "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "n_shared_experts": 1,
    "norm_topk_prob": True, "routed_scaling_factor": 2.5, "hidden_act": "silu", "rms_norm_eps": 1e-6,
    "rope_interleave": True, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0, "max_position_embeddings": 32768,
    "tie_word_embeddings": False, "attention_bias": False,
}  # fmt: skip
SHAPE = {
    "vocab_size": 4096, "hidden_size": 1024, "intermediate_size": 2816, "moe_intermediate_size": 256,
    "num_hidden_layers": 8, "num_attention_heads": 16, "num_key_value_heads": 16, "q_lora_rank": 384,
    "n_routed_experts": 32, "n_group": 4, "topk_group": 2, "num_experts_per_tok": 4, "first_k_dense_replace": 2,
}  # fmt: skip


def random_weights(config: DeepseekV3Config) -> DeepseekV3ForCausalLM:
    """Weights of a scale at which every layer adds about as much as the stream has."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    with torch.device(device):
        model = DeepseekV3ForCausalLM(config)
    source = torch.Generator(device).manual_seed(1)

    def noise(like: torch.Tensor) -> torch.Tensor:
        return torch.randn(like.shape, generator=source, device=like.device)

    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 1:
                parameter.copy_(1 + 0.1 * noise(parameter))
            elif name.endswith("gate.weight"):
                parameter.copy_(0.06 * noise(parameter))
            elif "embed_tokens" in name:
                parameter.copy_(noise(parameter))
            else:
                parameter.copy_(noise(parameter) * (0.6 / parameter.shape[-1] ** 0.5))
        model = model.to(torch.bfloat16)
        for name, buffer in model.named_buffers():
            if "e_score_correction_bias" in name:
                buffer.data = 0.01 * noise(buffer.float())
    return model


def main() -> None:
    out = Path(sys.argv[1])
    out.mkdir(parents=True, exist_ok=True)
    save_tokenizer(out)
    random_weights(DeepseekV3Config(**COMMON, **SHAPE)).save_pretrained(out)
    complete_config(out)


if __name__ == "__main__":
    main()
