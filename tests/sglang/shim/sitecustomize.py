"""Changes to a real SGLang on the CPU, for tests; applied in each of its processes as a module is imported.

First on the PYTHONPATH of the server. FLEETDUMP_TEST_SHIM says which, by comma:

``data-parallel-attention``: two methods that padding asks an attention backend for and that torch_native lacks.
``deferred-sums``: layers hand their MLP's output on unreduced, as they do where flashinfer fuses the all-reduce with
    the next norm. It sets what SGLang sets; the next layer then takes SGLang's own way without flashinfer.
``pipeline-events``: the pipeline of 0.5.9 makes CUDA's events whatever the device is; it gets the CPU's.
``naive``: beside each captured stream, ``hidden_states + residual`` is computed as it stands, and the largest
    difference between the two over the largest value is appended to the file FLEETDUMP_TEST_NAIVE, a line each.
"""

import os

import sglang_cpu_shim

CHOSEN = os.environ.get("FLEETDUMP_TEST_SHIM", "").split(",")


def lengths_of_padding(module):
    for name in ("get_cpu_graph_seq_len_fill_value", "get_cuda_graph_seq_len_fill_value"):
        if name not in vars(module.TorchNativeAttnBackend):  # the base class only says that there is none
            setattr(module.TorchNativeAttnBackend, name, lambda _: 1)


def defer_sums(module):
    def always(self, _batch):
        return not self.is_last_layer

    module.LayerCommunicator.should_fuse_mlp_allreduce_with_next_layer = always


def events_of_the_cpu(module):
    torch = module.torch

    class Torch:
        cuda = torch.cpu

        def __getattr__(self, name):
            return getattr(torch, name)

    module.torch = Torch()


def record_naive(module):
    complete = module._Stream.complete

    def naive_of(stream, batch):
        hidden = getattr(stream.states, "contribution", stream.states)  # from 0.5.21 perhaps opaque
        hidden = getattr(hidden, "value", hidden)
        batch_stream = getattr(batch, "residual_stream", None)
        residual = stream.residual if batch_stream is None else batch_stream.residual
        if residual is None:
            return hidden.clone()
        # Else the rows of all replicas are in one sum.
        return hidden + residual if residual.shape == hidden.shape else None

    def completing(stream, batch):
        naive = naive_of(stream, batch)
        complete(stream, batch)
        ours = stream.states if stream.residual is None else stream.states + stream.residual
        if len(ours) and naive is not None:
            with open(os.environ["FLEETDUMP_TEST_NAIVE"], "a") as file:
                file.write(f"{float((ours - naive).abs().max() / ours.abs().max())}\n")

    module._Stream.complete = completing


SHIMS = {
    "sglang.srt.layers.attention.torch_native_backend": ("data-parallel-attention", lengths_of_padding),
    "sglang.srt.layers.communicator": ("deferred-sums", defer_sums),
    "sglang.srt.managers.scheduler_pp_mixin": ("pipeline-events", events_of_the_cpu),
    "fleetdump_tap": ("naive", record_naive),
}
# The recipe's own shim, loaded at every start of this interpreter, changes modules as they are imported.
sglang_cpu_shim.AFTER.update({module: change for module, (which, change) in SHIMS.items() if which in CHOSEN})
