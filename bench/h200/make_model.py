"""Write the folder of a DeepSeek-V3-architecture model without weights: ``make_model.py FOLDER LAYERS EXPERTS``.

All widths are DeepSeek-V3's (hidden 7168, so k = 3 layers and the final state are 57,344 bytes a token); layers and
experts are few, so that it fits on one GPU. SGLang makes random weights with ``--load-format dummy``. Its byte-level
tokenizer is never asked: the bench sends token ids. Needs transformers.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import DeepseekV3Config, PreTrainedTokenizerFast

SPECIAL_TOKENS = ("<pad>", "<bos>", "<eos>")
VOCABULARY = 32768


def save_tokenizer(folder: Path) -> None:
    """One token a byte."""
    vocabulary = {token: n for n, token in enumerate([*SPECIAL_TOKENS, *sorted(pre_tokenizers.ByteLevel.alphabet())])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<bos>", eos_token="<eos>", pad_token="<pad>")
    fast.save_pretrained(folder)


def complete_config(folder: Path) -> None:
    """Add what SGLang reads from config.json and transformers does not write, or no longer."""
    written = json.loads((folder / "config.json").read_text())
    extra = {"torch_dtype": "bfloat16", "rope_theta": 10000.0, "scoring_func": "sigmoid", "topk_method": "noaux_tc"}
    extra.update(moe_layer_freq=1, ep_size=1)
    (folder / "config.json").write_text(json.dumps({**extra, **written}, indent=1) + "\n")


def main(folder: Path, layers: int, experts: int) -> None:
    save_tokenizer(folder)
    config = DeepseekV3Config(
        vocab_size=VOCABULARY,
        hidden_size=7168,
        intermediate_size=18432,
        moe_intermediate_size=2048,
        num_hidden_layers=layers,
        num_attention_heads=128,
        num_key_value_heads=128,
        q_lora_rank=1536,
        kv_lora_rank=512,
        qk_nope_head_dim=128,
        qk_rope_head_dim=64,
        v_head_dim=128,
        n_routed_experts=experts,
        n_shared_experts=1,
        num_experts_per_tok=8,
        n_group=8 if experts % 64 == 0 else 4,
        topk_group=4,
        first_k_dense_replace=1,
        norm_topk_prob=True,
        routed_scaling_factor=2.5,
        rope_interleave=True,
        max_position_embeddings=32768,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )
    config.architectures = ["DeepseekV3ForCausalLM"]
    config.dtype = "bfloat16"
    config.save_pretrained(folder)
    complete_config(folder)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
