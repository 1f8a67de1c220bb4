"""Changes to a real SGLang on the CPU, for tests; applied in each of its processes as a module is imported.

First on the PYTHONPATH of the server. FLEETDUMP_TEST_SHIM says which, by comma:

``data-parallel-attention``: two methods that padding asks an attention backend for and that torch_native lacks.
``deferred-sums``: layers hand their MLP's output on unreduced, as they do where flashinfer fuses the all-reduce with
    the next norm. It sets what SGLang sets; the next layer then takes SGLang's own way without flashinfer.
``naive``: beside each captured stream, ``hidden_states + residual`` is computed as it stands, and the largest
    difference between the two over the largest value is appended to the file FLEETDUMP_TEST_NAIVE, a line each.
"""

import importlib.abc
import importlib.util
import os
import sys

CHOSEN = os.environ.get("FLEETDUMP_TEST_SHIM", "").split(",")


def lengths_of_padding(module):
    for name in ("get_cpu_graph_seq_len_fill_value", "get_cuda_graph_seq_len_fill_value"):
        if name not in vars(module.TorchNativeAttnBackend):  # the base class only says that there is none
            setattr(module.TorchNativeAttnBackend, name, lambda _: 1)


def defer_sums(module):
    def always(self, _batch):
        return not self.is_last_layer

    module.LayerCommunicator.should_fuse_mlp_allreduce_with_next_layer = always


def record_naive(module):
    complete = module._Stream.value

    def value(stream):
        hidden = getattr(stream.hidden_states, "contribution", stream.hidden_states)  # from 0.5.21 perhaps opaque
        hidden = getattr(hidden, "value", hidden)
        batch_stream = getattr(stream.forward_batch, "residual_stream", None)
        residual = stream.residual if batch_stream is None else batch_stream.residual
        naive = hidden.clone() if residual is None else None
        if residual is not None and residual.shape == hidden.shape:  # else the rows of all replicas are in one sum
            naive = hidden + residual
        ours = complete(stream)
        if len(ours) and naive is not None:
            with open(os.environ["FLEETDUMP_TEST_NAIVE"], "a") as file:
                file.write(f"{float((ours - naive).abs().max() / ours.abs().max())}\n")
        return ours

    module._Stream.value = value


SHIMS = {
    "sglang.srt.layers.attention.torch_native_backend": ("data-parallel-attention", lengths_of_padding),
    "sglang.srt.layers.communicator": ("deferred-sums", defer_sums),
    "fleetdump_tap": ("naive", record_naive),
}


class Loader(importlib.abc.Loader):
    def __init__(self, inner, change):
        self.inner, self.change = inner, change

    def create_module(self, spec):
        return self.inner.create_module(spec)

    def exec_module(self, module):
        self.inner.exec_module(module)
        self.change(module)

    def __getattr__(self, attribute):
        return getattr(self.inner, attribute)


class Finder(importlib.abc.MetaPathFinder):
    busy = False

    def find_spec(self, name, _path=None, _target=None):
        which, change = SHIMS.get(name, ("", None))
        if self.busy or change is None or which not in CHOSEN:
            return None
        self.busy = True
        try:
            spec = importlib.util.find_spec(name)
        finally:
            self.busy = False
        if spec is not None and spec.loader is not None:
            spec.loader = Loader(spec.loader, change)
        return spec


sys.meta_path.insert(0, Finder())
