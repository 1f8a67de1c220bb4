"""Part AF: the set of part AE goes on: graphs and collectives."""

from __future__ import annotations

from cases import builder as b
from cases import tree as t
from cases.logtext import CAPTURE, INIT, sgl, vllm_log
from cases.table import DEAD, HANGS, HEALTHY, case
from fleetdump.agent.evidence_process import SocketFacts
from fleetdump.agent.evidence_types import Evidence


@case(
    "fourth set, error hidden in the capture",
    "sglang#11275",
    first="GRAPH_CAPTURE COLLECTIVE_DIVERGED PARENT_WAITS_READY",
    never=HEALTHY | {"JIT_COMPILING"} | DEAD,
    rank=3,
)
def hidden_error() -> Evidence:
    e = t.sglang(8, "capture", quiet=700.0)
    text = sgl(8, *CAPTURE)
    text += "Capturing batches (bs=512 avail_mem=3.10 GB):   0%|          | 0/52 [00:04<?, ?it/s]\n"
    text += "".join(f"[2026-11-28 03:15:27 DP{n} TP{n}] Registering 0 cuda graph addresses\n" for n in range(8))
    t.logged(e, text, 700.0)
    where = [
        "all_gather_object (torch/distributed/distributed_c10d.py:2900)",
        "register_graph_buffers (custom_all_reduce.py:260)",
        "capture (custom_all_reduce.py:190)",
    ]
    stuck = ["__exit__ (torch/cuda/graphs.py:190)", "capture_one_batch_size (cuda_graph_runner.py:700)"]
    t.dump(e, {n: stuck if n == 3 else where for n in range(8)})
    t.cards(e, [0] * 8, 150.0)
    return e


@case(
    "fourth set, two hosts of vLLM at the first graph",
    "vllm#17167",
    first="GRAPH_CAPTURE",
    never=HEALTHY | {"JIT_COMPILING"} | DEAD,
)
def first_graph() -> Evidence:
    e = t.vllm(8)
    e.target.ranks, e.target.nodes = 16, 2
    t.logged(
        e,
        vllm_log(
            "10:01 [core.py:65] Initializing a V1 LLM engine (v0.8.4) with config: model='/models/x'",
            "12:10 [loader.py:458] Loading weights took 88.20 seconds",
            "12:33 [monitor.py:33] torch.compile takes 19.01 s in total",
            "12:41 [kv_cache_utils.py:634] GPU KV cache size: 401,120 tokens",
        )
        + "Capturing CUDA graph shapes:   0%|          | 0/67 [00:00<?, ?it/s]",
        1500.0,
    )
    for p in t.ranks_of(e):
        t.burn(p, user=0.7)
    t.cards(e, [100] * 8, 210.0)
    return e


@case("fourth set, graphs come one by one", "kind of C1, healthy", first="BUSY_NOT_HUNG HEALTHY", never=HANGS)
def graphs_come() -> Evidence:
    e = t.sglang(4, "capture", quiet=3.0, uptime=300.0)
    bar = "Capturing batches (bs={0} avail_mem=9.5 GB):  {1}%|##        | {2}/23 [01:0{2}<03:10, 11.9s/it]\r"
    t.logged(e, sgl(4, *CAPTURE) + bar.format(160, 4, 1), 3.0, more=bar.format(152, 9, 2))
    for p in t.ranks_of(e):
        t.burn(p, user=0.8)
    t.cards(e, [35, 40, 31, 33], 240.0)
    return e


@case(
    "fourth set, one rank is in a penalty",
    "sglang#12076",
    first="RANK_SPIN MISSING_RANK COLLECTIVE_DIVERGED",
    never=HEALTHY,
    rank=6,
)
def in_a_penalty() -> Evidence:
    e = t.served(t.sglang(8, "serving", quiet=900.0), 503, 200, running=11)
    verify = [
        "broadcast (torch/distributed/distributed_c10d.py:2700)",
        "verify (eagle_info.py:310)",
        "forward_batch_generation (eagle_worker.py:268)",
        "run_batch (scheduler.py:2100)",
    ]
    odd = [
        "_apply (penaltylib/min_new_tokens.py:78)",
        "apply (penaltylib/orchestrator.py:150)",
        "apply_logits_bias (sampling_batch_info.py:226)",
        "verify (eagle_info.py:259)",
    ]
    for p in t.ranks_of(e):
        t.burn(p, user=0.6 if p.rank != 6 else 1.0)
    t.dump(e, {n: odd if n == 6 else verify for n in range(8)}, "active")
    t.cards(e, [100, 100, 100, 100, 100, 100, 0, 100], 190.0)
    return e


@case(
    "fourth set, every rank of this host dispatches to experts",
    "sglang#26482",
    first="KERNEL_SPIN MISSING_RANK COLLECTIVE_DIVERGED",
    never=HEALTHY | {"API_LOOP_BLOCKED", "WARMUP_STALL"},
)
def dispatch() -> Evidence:
    e = t.served(t.sglang(8, "serving", quiet=400.0), 503, 200, running=3)
    e.target.ranks, e.target.nodes = 16, 2
    for p in t.ranks_of(e):
        t.burn(p, user=0.97)
    t.dump(
        e,
        {
            n: [
                "dispatch (deep_ep/buffer_v2.py:545)",
                "_dispatch_core (moe/token_dispatcher/deepep.py:330)",
                "forward (models/deepseek_v2.py:900)",
                "run_batch (scheduler.py:2500)",
            ]
            for n in range(8)
        },
        "active",
    )
    t.cards(e, [100] * 8, 205.0, 700.0)
    e.log.troubles = {"detokenizer_silent": "Health check failed. Server couldn't get a response from detokenizer"}
    return e


@case(
    "fourth set, one data-parallel rank is not in the step",
    "vllm#44185",
    first="COLLECTIVE_DIVERGED MISSING_RANK",
    never=HEALTHY | DEAD,
    rank=2,
)
def data_parallel_step() -> Evidence:
    e = t.served(t.sglang(4, "serving", quiet=700.0), 0, 200, running=5)
    step = [
        "all_gather_into_tensor (torch/distributed/distributed_c10d.py:3900)",
        "prepare_mlp_sync_batch (scheduler_dp_attn_mixin.py:140)",
        "event_loop_overlap (scheduler.py:1130)",
    ]
    alone = [
        "all_reduce (torch/distributed/distributed_c10d.py:2810)",
        "draft (eagle_worker.py:480)",
        "run_batch (scheduler.py:2490)",
        "event_loop_overlap (scheduler.py:1150)",
    ]
    for p in t.ranks_of(e):
        p.label = f"DP{p.rank} TP{p.rank}"
        t.sleep(p, t.EPOLL if p.rank != 2 else t.FUTEX)
        p.cpu = 0.0
    t.dump(e, {n: alone if n == 2 else step for n in range(4)})
    t.cards(e, [0, 0, 0, 0], 120.0)
    return e


@case(
    "fourth set, both workers reduce for ever",
    "vllm#2731",
    first="KERNEL_SPIN COLLECTIVE_DIVERGED P2P_BLOCKED",
    never=HEALTHY | {"IDLE_OK", "API_LOOP_BLOCKED"},
)
def both_reduce() -> Evidence:
    e = t.served(t.vllm(2, quiet=4.0), 200, 200)
    t.logged(
        e,
        vllm_log(
            "10:01 [core.py:65] Initializing a V1 LLM engine (v0.8.5) with config: model='/models/x'",
            *[
                f"{20 + n}:05 [loggers.py:111] Engine 000: Avg prompt throughput: 0.0 tokens/s, Avg generation "
                f"throughput: "
                "0.0 tokens/s, Running: 9 reqs, Waiting: 31 reqs, GPU KV cache usage: 61.2%, Prefix cache hit "
                "rate: 3.0%"
                for n in range(8)
            ],
            who="APIServer pid=31000",
        ),
        4.0,
    )
    e.log.phase = e.log.phase or "serving"
    for p in t.ranks_of(e):
        t.burn(p, user=0.65)
    t.dump(
        e,
        {
            n: [
                "all_reduce (torch/distributed/distributed_c10d.py:2050)",
                "forward (vllm/model_executor/layers/linear.py:548)",
                "execute_model (vllm/v1/worker/gpu_model_runner.py:1100)",
            ]
            for n in range(2)
        },
        "active",
    )
    t.cards(e, [100, 100], 92.0, 300.0)
    return e


@case(
    "fourth set, fabric is not ready on eight B200",
    "vllm#50430",
    first="FABRIC_MANAGER",
    never=HEALTHY | {"P2P_BLOCKED", "MIXED_GPU"},
)
def fabric() -> Evidence:
    e = t.vllm(8)
    t.logged(
        e,
        vllm_log(
            "10:01 [core.py:93] Initializing a V1 LLM engine (v0.24.0) with config: model='/models/x'",
            "10:10 [pynccl.py:113] vLLM is using nccl==2.28.9",
        ),
        1400.0,
    )
    for p in t.ranks_of(e):
        t.burn(p, user=0.5)
    t.cards(e, [0] * 8, 190.0, used=1200)
    for card in e.gpus:
        card.fabric = "In Progress"
    e.host.fabric_manager = "failed"
    e.host.gpu_links = ["NV18"]
    return e


@case(
    "fourth set, loopback of a host without IPv4",
    "sglang#7478",
    first="IPV6_LOOPBACK WRONG_INTERFACE",
    never=HEALTHY | DEAD,
)
def ipv6() -> Evidence:
    e = t.sglang(8, "init", ("init begin",), quiet=60.0)
    e.target.ranks, e.target.nodes, e.target.host = 16, 2, "::"
    e.host.addresses = {"lo": ["127.0.0.1", "::1"], "eth0": ["2001:db8:7::15"]}
    text = sgl(8, INIT[0])
    text += "".join(
        f"[W1128 03:1{n}:01.8 socket.cpp:464] [c10d] The IPv6 network addresses of (node-0.example, 20000) cannot be "
        "retrieved (gai error: -2 - Name or service not known).\n"
        f"[W1128 03:1{n}:09.2 socket.cpp:764] [c10d] The client socket has failed to connect to [127.0.0.1]:57063 "
        "(errno: 99 - Cannot assign requested address).\n"
        for n in range(6)
    )
    t.logged(e, text, 60.0)
    for p in t.ranks_of(e):
        t.sleep(p, t.SLEEP, voluntary=1.0)
        p.sockets = [SocketFacts(44, "SYN_SENT", "127.0.0.1:40122", "127.0.0.1:57063")] if p.rank == 2 else []
    return e


@case(
    "fourth set, the first host never answers",
    "sglang#2561",
    first="MISSING_RANK WRONG_INTERFACE",
    never=HEALTHY | DEAD | {"HUB_BLOCKED"},
)
def first_host_absent() -> Evidence:
    e = t.sglang(8, "init", ("init begin",), quiet=420.0)
    b.second_of_two_hosts(e)
    for p in t.ranks_of(e):
        p.sockets = [SocketFacts(39, "SYN_SENT", "10.8.0.6:51514", "10.8.0.5:8000")]
        t.sleep(p, t.POLL, 39)
    e.host.addresses = {"lo": ["127.0.0.1"], "ib0": ["10.8.0.6"]}
    return e
