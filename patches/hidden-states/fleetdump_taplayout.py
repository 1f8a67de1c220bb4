"""Where a scheduler process stands in SGLang's parallel layout, and what cannot be captured rightly in it.

All of it is decided from what every tensor-parallel rank knows alike, so that they decide alike.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

REFUSED_FLAGS = {
    "enable_two_batch_overlap": "two-batch overlap runs layers outside the loop",
    "enable_attn_tp_input_scattered": "--enable-attn-tp-input-scattered splits the rows",
    "enable_layernorm_sp": "--enable-layernorm-sp splits the rows",
    "speculative_algorithm": "speculative decoding",
}
"""Server arguments that are true or set where the loop does not see every row of every layer."""

@dataclass
class Layout:
    """This process's place in the parallel place. ``attn_dp_size`` counts groups that hold different requests."""

    tp_rank: int
    tp_size: int
    attn_tp_rank: int
    attn_dp_size: int
    attn_cp_size: int
    pp_size: int


def layout() -> Layout:
    """The parallel layout; releases before 0.5.14 have functions instead of one object."""
    try:
        from sglang.srt.runtime_context import get_parallel
    except ImportError:
        return _layout_of_functions()
    parallel = get_parallel()
    return Layout(
        parallel.tp_rank,
        parallel.tp_size,
        parallel.attn_tp_rank,
        parallel.attn_dp_size,
        parallel.attn_cp_size,
        parallel.pp_size,
    )


def _layout_of_functions() -> Layout:
    from sglang.srt.distributed import get_tensor_model_parallel_rank, get_tensor_model_parallel_world_size
    from sglang.srt.distributed.parallel_state import get_pp_group
    from sglang.srt.layers import dp_attention

    context_parallel = getattr(dp_attention, "get_attention_cp_size", lambda: 1)  # none before 0.5.9
    return Layout(
        get_tensor_model_parallel_rank(),
        get_tensor_model_parallel_world_size(),
        dp_attention.get_attention_tp_rank(),
        dp_attention.get_attention_dp_size(),
        context_parallel(),
        get_pp_group().world_size,
    )


def _server_args() -> Any:
    try:
        from sglang.srt.runtime_context import get_server_args
    except ImportError:  # before 0.5.15
        from sglang.srt.server_args import get_global_server_args as get_server_args
    return get_server_args()


def refusal(model: Any, place: Layout, batch: Any, layers: list[int]) -> str:
    """Why this server cannot be captured rightly; empty when it can. The same on all ranks."""
    total = len(model.layers)
    if len(set(layers)) != len(layers) or not all(0 <= layer <= total for layer in layers):
        return f"layers {layers} of a model with {total}"
    if place.pp_size > 1:
        return "pipeline parallelism splits the layers"
    if place.attn_cp_size > 1:
        return "context parallelism splits the rows"
    args = _server_args()
    for flag, reason in REFUSED_FLAGS.items():
        if getattr(args, flag, None):
            return reason
    if place.attn_dp_size > 1 and not hasattr(batch, "rids"):
        return "with DP attention this release does not say whose rows a forward has"
    if place.attn_dp_size > 1 and hasattr(batch, "residual_stream"):
        return "with DP attention this release may owe a sum over ranks that do not all run the request"
    scattered = [number for number, layer in enumerate(model.layers) if _is_scattered(layer)]
    return f"rows are split over the ranks at layers {scattered}" if scattered else ""


def _is_scattered(layer: Any) -> bool:
    """Whether the ranks of an attention group hold different rows where ``layer`` begins (a2a expert parallelism)."""
    modes = getattr(layer, "layer_scatter_modes", None)
    if modes is not None:
        return bool(modes.layer_input_mode.name == "SCATTERED")
    boundary = getattr(layer, "attn_boundary", None)
    if boundary is None:
        return False  # a model without expert parallelism
    # ATTN_TP was ATTN_TP_SCATTER in 0.5.21.
    return any(axis.name.startswith(("ATTN_TP", "ATTN_CP")) for axis in boundary.incoming_residual_rows.sharded)


def batch_refusal(batch: Any) -> str:
    """Why this forward cannot be captured rightly; empty when it can. The same on all ranks."""
    if getattr(batch, "can_run_tbo", False):
        return "two-batch overlap runs layers outside the loop"
    if getattr(batch, "spec_info", None) is not None:
        return "speculative decoding"
    if any(getattr(batch, name, None) is not None for name in ("attn_cp_metadata", "nsa_cp_metadata")):
        return "context parallelism splits the rows"
    if getattr(batch, "_original_forward_mode", None) is not None:
        return "the batch was padded into another mode"
    return "a graph is being captured" if _is_graph_capturing() else ""


def _is_graph_capturing() -> bool:
    import torch

    if torch.compiler.is_compiling():
        return True
    return bool(torch.cuda.is_available() and torch.cuda.is_current_stream_capturing())
