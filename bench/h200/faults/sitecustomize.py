"""Faults for a real server, in its scheduler processes alone: put this folder on PYTHONPATH of the server.

FLEETDUMP_BENCH_FAULTS names a folder that the server looks into at layer 2 of each prefill. A file ``<fault>-<rank>``
there makes that tensor-parallel rank misbehave once: ``spin`` (Python code that never ends), ``collective`` (one
all-reduce that no other rank runs). FLEETDUMP_BENCH_DEFER=1 defers the all-reduce of each layer into the next one's
norm, as SGLang does where FlashInfer's fused kernel is there (its own rule: batches of at most 2,048 tokens).
FLEETDUMP_BENCH_NAIVE names a folder for what ``hidden_states + residual`` is at each layer, one file a rank and
forward: the expression that a deferred all-reduce makes wrong.
"""

from __future__ import annotations

import functools
import importlib.abc
import importlib.util
import itertools
import os
import sys
from pathlib import Path

MODEL = "sglang.srt.models.deepseek_v2"
FUSED_BATCH = 2048
COUNTER = itertools.count()


def rank() -> int:
    from sglang.srt.distributed import get_tensor_model_parallel_rank

    return get_tensor_model_parallel_rank()


def misbehave(folder: str, states) -> None:
    if (Path(folder) / f"spin-{rank()}").exists():
        while True:
            pass
    extra = Path(folder) / f"collective-{rank()}"
    if extra.exists():
        from sglang.srt.distributed import tensor_model_parallel_all_reduce

        extra.unlink()
        tensor_model_parallel_all_reduce(states.new_ones(1, states.shape[-1]))


def note_naive(folder: str, number: int, layer: int, states, residual) -> None:
    from safetensors.torch import save_file

    value = (states if residual is None else states + residual).detach().cpu().contiguous()
    save_file({"rows": value}, f"{folder}/r{rank()}-f{number:04d}-l{layer}.safetensors")


def wrap_layer(forward):
    faults, naive = os.environ.get("FLEETDUMP_BENCH_FAULTS", ""), os.environ.get("FLEETDUMP_BENCH_NAIVE", "")
    state = {"forward": 0}

    @functools.wraps(forward)
    def wrapped(self, positions, hidden_states, forward_batch, residual, *args, **kwargs):
        if forward_batch.forward_mode.is_extend():
            if self.layer_id == 0:
                state["forward"] = next(COUNTER)
            if naive:
                note_naive(naive, state["forward"], self.layer_id, hidden_states, residual)
            if faults and self.layer_id == 2:
                misbehave(faults, hidden_states)
        return forward(self, positions, hidden_states, forward_batch, residual, *args, **kwargs)

    return wrapped


def defer_all_reduce() -> None:
    from sglang.srt.layers.communicator import LayerCommunicator

    def should_fuse(self, forward_batch) -> bool:
        return not self.is_last_layer and 0 < forward_batch.input_ids.shape[0] <= FUSED_BATCH

    LayerCommunicator.should_fuse_mlp_allreduce_with_next_layer = should_fuse


class Loader(importlib.abc.Loader):
    """Loads the model file as it would be loaded, then puts the faults in."""

    def __init__(self, loader):
        self.loader = loader

    def create_module(self, spec):
        return self.loader.create_module(spec)

    def exec_module(self, module) -> None:
        self.loader.exec_module(module)
        module.DeepseekV2DecoderLayer.forward = wrap_layer(module.DeepseekV2DecoderLayer.forward)
        if os.environ.get("FLEETDUMP_BENCH_DEFER") == "1":
            defer_all_reduce()


class Finder(importlib.abc.MetaPathFinder):
    def find_spec(self, fullname, _path, _target=None):
        if fullname != MODEL:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        spec.loader = Loader(spec.loader)
        return spec


if os.environ.get("FLEETDUMP_BENCH_FAULTS"):
    sys.meta_path.insert(0, Finder())
