"""Where a scheduler process stands in SGLang's parallel layout, and what cannot be captured rightly in it.

All of it is decided from what every tensor-parallel rank of a pipeline stage knows alike, so that they decide alike.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

CONTEXT_PARALLEL = "context parallelism splits the rows"
PREFILL_GRAPH = "a replayed prefill CUDA graph runs no Python"
REFUSED_FLAGS = {
    "enable_two_batch_overlap": "two-batch overlap runs layers outside the loop",
    "enable_attn_tp_input_scattered": "--enable-attn-tp-input-scattered splits the rows",
    "enable_layernorm_sp": "--enable-layernorm-sp splits the rows",
    "enable_nsa_prefill_context_parallel": CONTEXT_PARALLEL,  # 0.5.6 to 0.5.13
    "enable_dsa_prefill_context_parallel": CONTEXT_PARALLEL,  # from 0.5.14, with the two names below
    "enable_prefill_context_parallel": CONTEXT_PARALLEL,
    "enable_prefill_cp": CONTEXT_PARALLEL,
    "speculative_algorithm": "speculative decoding",
    "enable_torch_compile": "--enable-torch-compile: a compiled loop runs no Python",
    "enable_pdmux": "--enable-pdmux prefills in a loop of its own",
    "enable_piecewise_cuda_graph": PREFILL_GRAPH,  # 0.5.5 to 0.5.9
}
"""Server arguments that are true or set where the loop does not see every row of every layer."""


@dataclass
class Layout:
    """This process's place in the parallel layout. ``attn_dp_size`` counts groups that hold different requests."""

    tp_rank: int
    tp_size: int
    attn_tp_rank: int
    attn_dp_size: int
    attn_cp_size: int
    pp_rank: int
    pp_size: int

    @property
    def rank(self) -> int:
        """This process among all of its replica."""
        return self.pp_rank * self.tp_size + self.tp_rank

    @property
    def is_last_stage(self) -> bool:
        return self.pp_rank == self.pp_size - 1


UNKNOWN_PLACE = Layout(0, 1, 0, 1, 1, 0, 1)
"""Until the first forward, and where SGLang does not tell: a server of one process."""


@dataclass
class Stage:
    """What a process sees of a sample: which slots (ascending), and by layer the slot that is taken before it. What
    would enter layer ``len(model.layers)`` is the stream behind the last one, as in the final slot."""

    slots: list[int]
    before: dict[int, int]
    last: bool


def stage_of(model: Any, place: Layout, entries: list[int]) -> Stage:
    """The part of ``entries`` (entry ids) and the final state that passes through the layers of this process."""
    layers = [*range(model.start_layer, model.end_layer)] if place.pp_size > 1 else [*range(len(model.layers))]
    mine = [*layers, len(model.layers)] if place.is_last_stage else layers
    before = {entry: slot for slot, entry in enumerate(entries) if entry in mine}
    final = [len(entries)] if place.is_last_stage else []
    return Stage([*sorted(before.values()), *final], before, place.is_last_stage)


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
        parallel.pp_rank,
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
        get_pp_group().rank_in_group,
        get_pp_group().world_size,
    )


def _server_args() -> Any:
    try:
        from sglang.srt.runtime_context import get_server_args
    except ImportError:  # before 0.5.15
        from sglang.srt.server_args import get_global_server_args as get_server_args
    return get_server_args()


def refusal(model: Any, place: Layout, layers: list[int]) -> str:
    """Why this server cannot be captured rightly; empty when it can. The same on all ranks."""
    total = len(model.layers)
    if len(set(layers)) != len(layers) or not all(0 <= layer <= total for layer in layers):
        return f"layers {layers} of a model with {total}"
    if place.attn_cp_size > 1:
        return CONTEXT_PARALLEL
    args = _server_args()
    for flag, reason in REFUSED_FLAGS.items():
        if getattr(args, flag, None):
            return reason
    if _replays_prefill(args):
        return PREFILL_GRAPH
    scattered = [number for number, layer in enumerate(model.layers) if _is_scattered(layer)]
    return f"rows are split over the ranks at layers {scattered}" if scattered else ""


def largest_forward() -> int:
    """The most rows that one forward of this server can have, 0 when nobody knows: without chunks a prompt that comes
    alone may have more tokens than ``--max-prefill-tokens``."""
    return max(0, int(getattr(_server_args(), "chunked_prefill_size", None) or 0))


def _replays_prefill(args: Any) -> bool:
    """Whether prefill runs from CUDA graphs: the default from 0.5.10 on."""
    config = getattr(args, "cuda_graph_config", None)  # from 0.5.14
    if config is not None:
        return bool(config.prefill.backend != "disabled")
    return getattr(args, "disable_piecewise_cuda_graph", True) is False  # 0.5.10 to 0.5.13


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
        return CONTEXT_PARALLEL
    return ""


def sums_over_replicas(place: Layout, batch: Any) -> bool:
    """Whether the loop may owe a sum to which ranks with other requests contribute, or with none (an idle batch). From
    0.5.21 under DP attention: then all ranks of a stage must complete it alike, whosever the requests are, and what
    they all know is whether any of them prefills."""
    return place.attn_dp_size > 1 and hasattr(batch, "residual_stream") and bool(batch.is_extend_in_batch)


def prompt_mode(batch: Any) -> bool:
    """Whether the batch has prompt rows. Under DP attention a batch without any may be padded into a prefill."""
    original = getattr(batch, "_original_forward_mode", None)
    return (batch.forward_mode if original is None else original).name in ("EXTEND", "MIXED")


def is_compiling() -> bool:
    """Whether torch.compile is tracing the caller: it must find nothing to trace."""
    return bool(torch.compiler.is_compiling())


def is_capturing_graph() -> bool:
    """Whether the forward is being recorded into a CUDA graph."""
    return bool(torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing())
