"""Drives the tap through made-up forwards; runs under SGLang's interpreter, which has torch.

What a CPU server cannot show (fused all-reduce, two-batch overlap, padding, scattered rows) is played here: ``sglang``
is a stand-in, tensors are real. Usage: tap_forwards.py PATCH_DIR ROOT; each case runs in a forked process with
ROOT/<case>/tap.json and leaves ROOT/<case>/{out.json,log}. ROOT's folders say which cases.
"""

import json
import os
import sys
import traceback
import types

import torch

HIDDEN, LAYERS = 4, 3
reduced = []


def all_reduce(tensor):
    """As a two-rank all-reduce of equal parts, in place as the real one may be."""
    reduced.append(tensor.shape[0])
    return tensor.mul_(2)


def stand_in(case):
    """The parallel layout and the model of ``case``; makes ``sglang`` importable as one of its releases is."""
    layout = {"tp_rank": 0, "tp_size": 2, "attn_tp_rank": 0, "attn_dp_size": 1, "attn_cp_size": 1}
    layout.update(pp_rank=0, pp_size=1)
    layout.update(LAYOUTS.get(case, {}))
    args = types.SimpleNamespace(**{"speculative_algorithm": None, **FLAGS.get(case, {})})
    if case.startswith("flag_"):
        setattr(args, case[len("flag_") :], True)
    if case.startswith("old_"):
        old_release(layout, args)
    else:
        module("sglang.srt.runtime_context", get_parallel=lambda: types.SimpleNamespace(**layout))
        sys.modules["sglang.srt.runtime_context"].get_server_args = lambda: args
        module("sglang.srt.distributed", tensor_model_parallel_all_reduce=all_reduce)
    norm = type("GemmaRMSNorm" if case == "gemma" else "RMSNorm", (types.SimpleNamespace,), {})
    made = types.SimpleNamespace(
        layers=[layer_of(case)] * LAYERS,
        norm=norm(weight=torch.ones(HIDDEN, dtype=torch.bfloat16), variance_epsilon=1e-6),
    )
    if case in STAGES:
        made.start_layer, made.end_layer = STAGES[case]
        made.norm = made.norm if made.end_layer == LAYERS else None
    return made


OTHER_RANK = {"tp_rank": 1, "attn_tp_rank": 1}
DATA_PARALLEL = {"attn_dp_size": 2}
LAYOUTS = {
    "other_rank": OTHER_RANK,
    "selfcheck_other_rank": OTHER_RANK,
    "first_stage": {"pp_size": 2},
    "last_stage": {"pp_size": 2, "pp_rank": 1},
    "empty_stage": {"pp_size": 3, "pp_rank": 1},
    "partial_stage": {"pp_size": 2},
    "old_first_stage": {"pp_size": 2},
    "context_parallel": {"attn_cp_size": 2},
    "dp_attention": DATA_PARALLEL,
    "old_dp_attention": DATA_PARALLEL,
    "dp_owed": DATA_PARALLEL,
    "dp_owed_idle": DATA_PARALLEL,
    "dp_owed_foreign": DATA_PARALLEL,
    "dp_owed_padded": DATA_PARALLEL,
    "dp_owed_broken": DATA_PARALLEL,
    "dp_owed_decode": DATA_PARALLEL,
    "no_layout": {"pp_size": None},
}
STAGES = {
    "first_stage": (0, 2),
    "last_stage": (2, 3),
    "empty_stage": (1, 2),
    "partial_stage": (0, 2),
    "old_first_stage": (0, 2),
}
"""Layers that a pipeline stage runs, of LAYERS."""


def graphs(prefill):
    phases = {"prefill": types.SimpleNamespace(backend=prefill), "decode": types.SimpleNamespace(backend="full")}
    return {"cuda_graph_config": types.SimpleNamespace(**phases)}


FLAGS = {
    "plain": graphs("disabled"),
    "prefill_graph": graphs("breakable"),
    "prefill_graph_0510": {"disable_piecewise_cuda_graph": False},
    "no_prefill_graph_0510": {"disable_piecewise_cuda_graph": True},
}


def module(name, **contents):
    """Make ``name`` and its parents importable."""
    for end in [at for at, letter in enumerate(name) if letter == "."]:
        sys.modules.setdefault(name[:end], types.ModuleType(name[:end]))
    made = sys.modules[name] = types.ModuleType(name)
    vars(made).update(contents)
    setattr(sys.modules[name.rpartition(".")[0]], name.rpartition(".")[2], made)


def old_release(layout, args):
    """0.5.5: functions instead of the one object, no context parallelism."""
    module(
        "sglang.srt.distributed",
        get_tensor_model_parallel_rank=lambda: layout["tp_rank"],
        get_tensor_model_parallel_world_size=lambda: layout["tp_size"],
        tensor_model_parallel_all_reduce=all_reduce,
    )
    group = types.SimpleNamespace(world_size=layout["pp_size"], rank_in_group=layout["pp_rank"])
    module("sglang.srt.distributed.parallel_state", get_pp_group=lambda: group)
    module(
        "sglang.srt.layers.dp_attention",
        get_attention_tp_rank=lambda: layout["attn_tp_rank"],
        get_attention_dp_size=lambda: layout["attn_dp_size"],
    )
    module("sglang.srt.server_args", get_global_server_args=lambda: args)


def layer_of(case):
    """How a layer says whether its rows are split over ranks: not at all (llama), by modes, or by its boundary."""
    if case == "plain_layers":
        return types.SimpleNamespace()
    if case in ("boundary", "scattered_boundary", "scattered_boundary_0521"):
        axis = {"boundary": "ATTN_DP", "scattered_boundary": "ATTN_TP", "scattered_boundary_0521": "ATTN_TP_SCATTER"}
        rows = types.SimpleNamespace(sharded=[types.SimpleNamespace(name=axis[case])])
        return types.SimpleNamespace(attn_boundary=types.SimpleNamespace(incoming_residual_rows=rows))
    mode = types.SimpleNamespace(name="SCATTERED" if case == "scattered" else "TP_ATTN_FULL")
    return types.SimpleNamespace(layer_scatter_modes=types.SimpleNamespace(layer_input_mode=mode))


def batch(requests, mode="EXTEND", **changes):
    """``requests``: (rid, rows, first position)."""
    fields = {
        "forward_mode": types.SimpleNamespace(name=mode),
        "rids": [rid for rid, _, _ in requests],
        "extend_seq_lens_cpu": torch.tensor([rows for _, rows, _ in requests] + [0, 0]),
        "extend_prefix_lens_cpu": [start for _, _, start in requests],
        "input_ids": torch.arange(sum(rows for _, rows, _ in requests)),
        "can_run_tbo": False,
        "spec_info": None,
        "attn_cp_metadata": None,
        "_original_forward_mode": None,
    }
    return types.SimpleNamespace(**{**fields, **changes})


def forward(batch, rows=None, fused=False, stop=LAYERS, snapshot=None):
    """One forward: at layer i every hidden state is i + 1 and the residual 10 (none before the first layer)."""
    import fleetdump_tap as tap

    rows = int(batch.extend_seq_lens_cpu.sum()) if rows is None else rows
    first, end = getattr(model, "start_layer", 0), getattr(model, "end_layer", LAYERS)
    for i in range(first, end + 1):
        hidden = torch.full((rows, HIDDEN), float(i + 1))
        if fused and 0 < i < LAYERS:
            hidden._sglang_needs_allreduce_fusion = True
        residual = None if i == 0 else torch.full((rows, HIDDEN), 10.0)
        kept = hidden.clone()
        place = {"snapshot": snapshot} if snapshot else {"residual": residual}
        if i == end:
            tap.after_layers(model, hidden, batch, **place)
        elif i < stop and batch is not tap.idle:
            tap.before_layer(model, i, hidden, batch, **place)
        assert torch.equal(hidden, kept), "the tap changed what the model computes with"


def old_batch(requests, noted=None):
    """A batch of a release whose ForwardBatch has no rids, after the scheduler (unless ``noted``: with another one)."""
    import fleetdump_tap as tap

    made = batch(requests)
    reqs = [types.SimpleNamespace(rid=rid) for rid in made.rids]
    starts = made.extend_prefix_lens_cpu if noted is None else noted
    tap.note_requests(types.SimpleNamespace(reqs=reqs, prefix_lens=starts))
    del made.rids
    return made


def ours(sample, rows, start=0):
    return (f"fleetdump/r/{sample}/1", rows, start)


def checks(sample, rows):
    return (f"fleetdump/selfcheck-r/{sample}/1", rows, 0)


def snapshot(hidden, _):
    """From 0.5.21: completes what the stream owes, on all ranks."""
    reduced.append(hidden.shape[0])
    return hidden * 100


def owing(requests, mode="EXTEND", **changes):
    """A batch of data-parallel attention from 0.5.21 on, where some rank prefills."""
    return batch(requests, mode, **{"residual_stream": None, "is_extend_in_batch": True, **changes})


def while_capturing_a_graph(requests):
    import fleetdump_tap as tap

    tap.is_capturing_graph = lambda: True
    forward(batch([], rids=None))
    tap.is_capturing_graph = lambda: False
    forward(batch(requests))


def while_compiling(requests):
    import fleetdump_tap as tap

    tap.is_compiling = lambda: True
    forward(batch(requests))


def failing(*_):
    raise NotImplementedError("a finalize handoff requires main-output capture")


CASES = {
    "plain": lambda: forward(batch([ours("a", 2), ("HEALTH_CHECK_1", 1, 0), ours("b", 3)])),
    "fused": lambda: forward(batch([ours("a", 2)]), fused=True),
    "other_rank": lambda: forward(batch([ours("a", 2)]), fused=True),
    "selfcheck_other_rank": lambda: forward(batch([ours("a", 2), checks("a", 2)]), fused=True),
    "snapshot": lambda: forward(batch([ours("a", 2)]), snapshot=snapshot),
    "snapshot_fails": lambda: forward(batch([ours("a", 2)]), snapshot=failing),
    "chunks": lambda: [forward(batch([ours("a", 2, at)], "MIXED")) for at in (0, 2, 4)],
    "repeat": lambda: [forward(batch([ours("a", rows, at)])) for at, rows in ((0, 4), (4, 2), (5, 1), (2, 4))],
    "again": lambda: [forward(batch([ours("a", 4)])) for _ in range(2)],
    "unsorted": lambda: forward(batch([ours("a", 2)])),
    "prefix_missing": lambda: [forward(batch([ours("a", 2, at), ours("b", 2)])) for at in (6, 8)],
    "padded_rows": lambda: forward(batch([ours("a", 3)]), rows=8),
    "scattered_rows": lambda: forward(batch([ours("a", 3)]), rows=2),
    "two_batch_overlap": lambda: forward(batch([ours("a", 3)], can_run_tbo=True), fused=True, stop=1),
    "loop_cut_short": lambda: forward(batch([ours("a", 3)]), stop=1),
    "speculative": lambda: forward(batch([ours("a", 3)], spec_info=object())),
    "converted": lambda: forward(
        batch([ours("a", 3)], _original_forward_mode=types.SimpleNamespace(name="DECODE")), fused=True
    ),
    "decode": lambda: forward(batch([ours("a", 3)], "DECODE")),
    "target_verify": lambda: forward(batch([ours("a", 3)], "TARGET_VERIFY")),
    "nobodys": lambda: forward(batch([("x", 3, 0)]), fused=True),
    "no_rids": lambda: forward(batch([ours("a", 3)], rids=None)),
    "broken_batch": lambda: forward(batch([ours("a", 3)], extend_prefix_lens_cpu=None)),
    "broken_ids": lambda: forward(batch([ours("a", 3)], input_ids=None)),
    "gemma": lambda: forward(batch([ours("a", 2)])),
    "plain_layers": lambda: forward(batch([ours("a", 2)])),
    "boundary": lambda: forward(batch([ours("a", 2)])),
    "dp_attention": lambda: forward(batch([ours("a", 2)])),
    "old_rids": lambda: forward(old_batch([("x", 1, 0), ours("a", 2)])),
    "old_fused": lambda: forward(old_batch([ours("a", 2)]), fused=True),
    "old_other_batch": lambda: forward(old_batch([ours("a", 2)], noted=[0])),
    "old_broken_note": lambda: forward(old_batch([(None, 1, 0)])),
    "old_dp_attention": lambda: forward(old_batch([ours("a", 2)])),
    "dp_owed": lambda: forward(owing([ours("a", 2)]), snapshot=snapshot),
    "dp_owed_idle": lambda: forward(owing([], "IDLE", rids=None), snapshot=snapshot),
    "dp_owed_foreign": lambda: forward(owing([("x", 3, 0)]), snapshot=snapshot),
    "dp_owed_padded": lambda: forward(
        owing([ours("a", 1, 9)], _original_forward_mode=types.SimpleNamespace(name="DECODE")), snapshot=snapshot
    ),
    "dp_owed_broken": lambda: forward(owing([ours("a", 2)], extend_prefix_lens_cpu=None), snapshot=snapshot),
    "dp_owed_decode": lambda: forward(owing([ours("a", 2)], "DECODE", is_extend_in_batch=False), snapshot=snapshot),
    "cp_metadata": lambda: forward(batch([ours("a", 3)], attn_cp_metadata=object()), fused=True),
    "nsa_cp_metadata": lambda: forward(batch([ours("a", 3)], nsa_cp_metadata=object()), fused=True),
    "capturing": lambda: while_capturing_a_graph([ours("a", 3)]),
    "compiling": lambda: while_compiling([ours("a", 3)]),
    "no_layout": lambda: forward(batch([ours("a", 3)]), fused=True),
    "prefill_graph": lambda: forward(batch([ours("a", 3)]), fused=True),
    "prefill_graph_0510": lambda: forward(batch([ours("a", 3)]), fused=True),
    "no_prefill_graph_0510": lambda: forward(batch([ours("a", 2)])),
    "scattered_boundary": lambda: forward(batch([ours("a", 3)]), fused=True),
    "scattered_boundary_0521": lambda: forward(batch([ours("a", 3)]), fused=True),
    "first_stage": lambda: forward(batch([ours("a", 2)])),
    "last_stage": lambda: forward(batch([ours("a", 2)])),
    "empty_stage": lambda: forward(batch([ours("a", 2)])),
    "partial_stage": lambda: forward(batch([ours("a", 2)]), fused=True),
    "old_first_stage": lambda: forward(old_batch([ours("a", 2)])),
    "context_parallel": lambda: forward(batch([ours("a", 3)]), fused=True),
    "scattered": lambda: forward(batch([ours("a", 3)]), fused=True),
}


def play(case, folder):
    """Run one case in this process, for good."""
    global model
    os.environ["FLEETDUMP_TAP_CONFIG"] = f"{folder}/tap.json"
    os.dup2(os.open(f"{folder}/log", os.O_WRONLY | os.O_CREAT, 0o600), 2)
    model = stand_in(case)
    CASES[case]() if case in CASES else forward(batch([ours("a", 3)]), fused=True)
    writer = sys.modules["fleetdump_tap"]._tap._writer
    if writer is not None:
        writer.stop()
    with open(f"{folder}/out.json", "w") as file:
        json.dump({"reduced": reduced}, file)


patch_dir, root = sys.argv[1:]
sys.path.insert(0, patch_dir)
model = None
for case in sorted(os.listdir(root)):
    child = os.fork()
    if not child:
        try:
            play(case, f"{root}/{case}")
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    os.waitpid(child, 0)
