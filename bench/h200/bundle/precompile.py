"""Compile the JIT kernels of SGLang 0.5.14 that a DeepSeek-V3 model needs, for sm_90, on a machine without a GPU.

Run by build.sh with SGLang, torch and nvcc at hand. torch is told that there is an H200. Where the kernels are not
ready-made each costs the server about 10 s at its first use.
"""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

import torch

H200 = types.SimpleNamespace(
    name="NVIDIA H200", major=9, minor=0, total_memory=150 << 30, multi_processor_count=132, warp_size=32
)


def pretend() -> None:
    torch.cuda.is_available = lambda: True
    torch.cuda.device_count = lambda: 1
    torch.cuda.current_device = lambda: 0
    torch.cuda.get_device_capability = lambda _=None: (9, 0)
    torch.cuda.get_device_name = lambda _=None: H200.name
    torch.cuda.get_device_properties = lambda _=None: H200
    torch.cuda.mem_get_info = lambda _=None: (140 << 30, 141 << 30)


def kernels() -> dict[str, Callable[[], Any]]:
    from sglang.jit_kernel import (
        activation,
        clamp_position,
        concat_mla,
        grouped_topk,
        kvcache,
        moe_align,
        moe_fused_gate,
        norm,
        resolve_future_token_ids,
        rope,
        set_mla_kv_buffer,
    )
    from sglang.jit_kernel.dsv4 import moe
    from sglang.jit_kernel.utils import is_arch_support_pdl

    dtype = torch.bfloat16
    return {
        "activation": lambda: activation._jit_activation_module(dtype),
        "clamp_position": lambda: clamp_position._jit_clamp_position_module(torch.int64),
        "mask_topk": moe._jit_mask_topk_module,
        "concat_mla_k": concat_mla._jit_concat_mla_k_module,
        "concat_mla_absorb_q": concat_mla._jit_concat_mla_absorb_q_module,
        "set_mla_kv_buffer": lambda: set_mla_kv_buffer._jit_set_mla_kv_buffer_module(1024, 128, is_arch_support_pdl()),
        "fused_add_rmsnorm": lambda: norm._jit_fused_add_rmsnorm_module(dtype, False),
        "rotary_embedding": rope._jit_rotary_embedding_module,
        "fused_rope": lambda: rope._jit_fused_rope_module(False, 64, dtype),
        "moe_align": lambda: moe_align._jit_moe_align_module(torch.int32),
        "moe_fused_gate": moe_fused_gate._jit_moe_fused_gate_module,
        "grouped_topk": grouped_topk._jit_grouped_topk_module,
        "resolve_ids_64": lambda: resolve_future_token_ids._jit_resolve_future_token_ids_module(torch.int64),
        "resolve_ids_32": lambda: resolve_future_token_ids._jit_resolve_future_token_ids_module(torch.int32),
        "kvcache": lambda: kvcache._jit_kvcache_module(1152),
    }


if __name__ == "__main__":
    pretend()
    for name, compile_kernel in kernels().items():
        compile_kernel()
        print(name, flush=True)
