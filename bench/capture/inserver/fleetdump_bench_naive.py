"""The tap that everybody writes first: ``.cpu()`` at each layer and ``torch.save`` in the forward, one file a sample.

It is an arm of ``bench.capture_overhead``. Its calls are those of ``fleetdump_tap``, and so are the rows that it takes:
of requests whose rid is fleetdump's, the residual stream that enters the chosen layers and that leaves the last one.
"""

from __future__ import annotations

import os
from typing import Any

import torch

LAYERS = [int(layer) for layer in os.environ.get("FLEETDUMP_BENCH_LAYERS", "").split(",") if layer]
FOLDER = os.environ.get("FLEETDUMP_BENCH_NAIVE", "")

idle = None
"""The forward without a request of ours: the patched line looks here. This tap does not know it."""

_states: list[torch.Tensor] = []


def before_layer(_: Any, layer_id: int, hidden_states: Any, forward_batch: Any, residual: Any = None) -> None:
    if layer_id == 0:
        _states.clear()
    if layer_id in LAYERS and _is_ours(forward_batch):
        _states.append(_stream(hidden_states, residual).cpu())


def after_layers(_: Any, hidden_states: Any, forward_batch: Any, residual: Any = None) -> None:
    if not _is_ours(forward_batch):
        return
    states = [*_states, _stream(hidden_states, residual).cpu()]
    lengths, starts, first = forward_batch.extend_seq_lens_cpu, forward_batch.extend_prefix_lens_cpu, 0
    for rid, rows, start in zip(forward_batch.rids, lengths, starts, strict=True):
        sample = {f"layer_{slot}": state[first : first + rows].clone() for slot, state in enumerate(states)}
        path = os.path.join(FOLDER, f"{rid.replace('/', '_')}.{int(start)}.pt")
        torch.save(sample, path + ".tmp")
        os.rename(path + ".tmp", path)
        first += rows


def _is_ours(batch: Any) -> bool:
    return batch.forward_mode.name == "EXTEND" and bool(batch.rids) and batch.rids[0].startswith("fleetdump/")


def _stream(hidden_states: torch.Tensor, residual: torch.Tensor | None) -> torch.Tensor:
    return hidden_states if residual is None else hidden_states + residual
