"""Part AL: the seventh set: collectives and networks."""

from __future__ import annotations

from cases import gpuhost as g
from cases import tree as t
from cases.table import DEAD, HEALTHY, case
from fleetdump.agent.evidence_host import GpuFacts, GpuProcess
from fleetdump.agent.evidence_process import SocketFacts
from fleetdump.agent.evidence_types import Evidence
from fleetdump.agent.probes.stacks import group


@case(
    "seventh clocks",
    "sgl-project/sglang#27221",
    first="COLLECTIVE_DIVERGED",
    never=HEALTHY | {"RANK_SPIN", "KERNEL_SPIN"},
)
def ranks_disagree_on_what_was_aborted() -> Evidence:
    log = g.ready(8)
    for n in range(4):
        g.decode(log, 60 + n, 3121.5, 210)
    e = g.serving(8, log, 260.0, health=0)
    for n, p in enumerate(t.ranks_of(e)):
        if n < 5:
            t.burn(p, 1.0, 0.55)
        else:
            t.sleep(p, t.FUTEX)
            p.cpu = 0.0
    forward = [
        "_resolve_future_token_ids (sglang/srt/managers/overlap_utils.py:44)",
        "forward_batch_generation (sglang/srt/managers/tp_worker.py:371)",
        "run_batch (sglang/srt/managers/scheduler.py:1904)",
        "event_loop_overlap (sglang/srt/managers/scheduler.py:921)",
    ]
    t.dump(e, {n: forward if n < 5 else g.BROADCAST for n in range(8)}, busy=range(5))
    g.h100(e, [100] * 5 + [0] * 3, 139.0)
    g.lacking(e, "ras", "strace")
    return e


@case(
    "seventh two nodes",
    "sgl-project/sglang#34582",
    first="MISSING_RANK WARMUP_STALL",
    never=HEALTHY | {"KERNEL_SPIN", "RANK_SPIN", "P2P_BLOCKED", "API_LOOP_BLOCKED"},
)
def every_local_rank_waits_in_the_same_gather() -> Evidence:
    log = g.opening(g.start(8, g.CAPTURE))
    log.say("DataParallelController watchdog timeout (self.watchdog_timeout=60, self.soft=True)", after=60)
    e = g.furnish(t.warming(t.sglang(8, "warmup"), 503))
    e.target.ranks, e.target.nodes = 16, 2
    t.logged(e, log.text(), 420.0)
    for p in t.ranks_of(e):
        t.sleep(p, t.FUTEX)
    t.dump(
        e,
        {
            n: [
                "all_gather_into_tensor (torch/distributed/distributed_c10d.py:3820)",
                "prepare_mlp_sync_batch_raw (sglang/srt/managers/scheduler_dp_attn_mixin.py:131)",
                "get_next_batch_to_run (sglang/srt/managers/scheduler.py:1551)",
                "event_loop_overlap (sglang/srt/managers/scheduler.py:906)",
            ]
            for n in range(8)
        },
    )
    g.h100(e, 0, 121.0)
    return e


@case(
    "seventh iommu",
    "vllm-project/vllm#33041",
    first="P2P_BLOCKED",
    never=HEALTHY | DEAD | {"RANK_SPIN", "PARENT_WAITS_READY", "GPU_WEDGED"},
)
def first_all_reduce_over_pcie() -> Evidence:
    log = g.start(2, 2)
    for n in range(2):
        log.raw(
            f"gpu-b07:{t.pid_of(n)}:{t.pid_of(n)} [{n}] NCCL INFO Bootstrap : Using enp1s0:10.1.10.95<0>",
            f"gpu-b07:{t.pid_of(n)}:31702 [{n}] NCCL INFO NET/Plugin: Could not find: libnccl-net.so. "
            f"Using internal net plugin.",
            f"gpu-b07:{t.pid_of(n)}:31702 [{n}] NCCL INFO Channel 00/0 : {n}[{n}] -> {1 - n}[{1 - n}] via P2P/CUMEM",
            f"gpu-b07:{t.pid_of(n)}:31702 [{n}] NCCL INFO ncclCommInitRankConfig comm 0x55d0c7a06bf0 rank "
            f"{n} nranks 2 cudaDev {n} nvmlDev {n} busId {n + 1}000 commId 0x41a0d6c6f1e11b2c - Init COMPLETE",
        )
    e = g.sgl(2, 2)
    t.logged(e, log.text(), 380.0)
    for p in t.ranks_of(e):
        t.burn(p, 0.99, 0.62)
    e.gpus = [
        GpuFacts(
            n,
            100,
            1180,
            91.0 + n,
            600.0,
            97_887,
            "NVIDIA RTX PRO 6000 Blackwell Workstation Edition",
            processes_known=True,
            processes=[GpuProcess(t.pid_of(n), 1100, "sglang::schedul", ours=True)],
        )
        for n in range(2)
    ]
    e.host.gpu_links = ["NODE"]
    g.lacking(e, "lspci", "py-spy", "strace")
    return e


@case(
    "seventh gateway bridge",
    "sgl-project/sglang#6294",
    first="WRONG_INTERFACE",
    never=HEALTHY | {"P2P_BLOCKED", "RANK_SPIN"},
)
def bridge_that_other_hosts_do_not_have() -> Evidence:
    log = g.start(16, 2)
    log.lines = [line for line in log.lines if not any(f"TP{n}]" in line for n in range(8))]
    for n in range(8):
        log.raw(
            f"gpu-b07:{31011 + n}:{31011 + n} [{n}] NCCL INFO NCCL_SOCKET_IFNAME set by environment to eth",
            f"gpu-b07:{31011 + n}:{31011 + n} [{n}] NCCL INFO Bootstrap : Using eth1:172.18.0.4<0>",
        )
    e = g.furnish(t.sglang(8, "init"))
    e.target.ranks, e.target.nodes, e.target.node_rank = 16, 2, 1
    t.logged(e, log.text(), 540.0)
    for n, p in enumerate(t.ranks_of(e)):
        p.rank, p.label = n + 8, f"TP{n + 8}"
        t.sleep(p, g.POLLED)
        p.sockets = [
            SocketFacts(40, "ESTABLISHED", "10.0.1.14:41022", "10.0.1.13:20000"),
            SocketFacts(71, "SYN_SENT", "172.18.0.4:50112", "172.18.0.3:46871"),
        ]
    e.host.addresses = {"lo": ["127.0.0.1"], "eth0": ["10.0.1.14"], "eth1": ["172.18.0.4"]}
    e.host.name_resolves_to = ["10.0.1.14"]
    e.env_names.append("NCCL_SOCKET_IFNAME")
    g.h100(e, 0, 115.0, 1400)
    return e


@case("seventh ephemeral port", "sgl-project/sglang#37215", first="PORT_RACE", never=HEALTHY | {"PORT_IN_USE"})
def store_of_a_replica_lost_its_port() -> Evidence:
    log = g.Text(1)
    log.say("server_args=ServerArgs(model_path='/models/q', tp_size=1, dp_size=8, port=9123, nccl_port=None)")
    log.say("Launch DP0 starting at GPU #0.").say("Launch DP3 starting at GPU #3.")
    log.say("Init torch distributed begin.", "DP0 TP0").say("Init torch distributed begin.", "DP3 TP0")
    log.raw(
        "[W1127 22:14:31.771 socket.cpp:767] [c10d] The server socket has failed to bind to [::]:43517 "
        "(errno: 98 - Address already in use).",
        "[E1127 22:14:31.771 socket.cpp:805] [c10d] The server socket has failed to listen on any local "
        "network address.",
    )
    log.say("Scheduler hit an exception: Traceback (most recent call last):", "DP3 TP0")
    log.raw(
        '  File "/opt/venv/lib/python3.12/site-packages/torch/distributed/rendezvous.py", line 189, in '
        "_create_c10d_store",
        "    return TCPStore(",
        "torch.distributed.DistNetworkError: The server socket has failed to listen on any local network "
        "address. port: 43517, useIpv6: false, code: -98, name: EADDRINUSE, message: address already in use",
        "",
    )
    log.say("Received sigquit from a child process. It usually means the child failed.")
    log.raw("Killed")
    e = g.gone(g.furnish(t.sglang(8, "init")))
    t.logged(e, log.text(), 80.0)
    e.gpus = [GpuFacts(n, 0, 4, 70.0, 700.0, 81_559, "NVIDIA H800", processes_known=True) for n in range(8)]
    return e


@case(
    "seventh module load",
    "sgl-project/sglang#33642",
    first="KERNEL_SPIN",
    never=HEALTHY | DEAD | {"RANK_SPIN", "API_LOOP_BLOCKED", "JIT_COMPILING"},
)
def module_load_behind_a_kernel_that_waits() -> Evidence:
    log = g.ready(8)
    g.decode(log, 1, 12.2)
    e = g.serving(8, log, 190.0, health=503)
    for p in t.ranks_of(e):
        t.burn(p, 1.0, 0.4)
    frames = [
        "_init_handles (triton/compiler/compiler.py:461)",
        "run (triton/runtime/jit.py:744)",
        "verify (sglang/srt/speculative/eagle_worker_v2.py:702)",
        "forward_batch_generation (sglang/srt/speculative/eagle_worker_v2.py:610)",
        "event_loop_overlap_disagg_decode (sglang/srt/disaggregation/decode.py:851)",
    ]
    t.dump(e, dict.fromkeys(range(8), frames), busy=range(8))
    for s in e.stacks:
        s.native = [
            "0x7f31aa2 (libcuda.so.570.172.08)",
            "cuModuleLoadData (libcuda.so.570.172.08)",
            "loadBinary (triton/backends/nvidia/driver.c)",
            *frames,
        ]
    e.native_groups = group(e.stacks, native=True)
    e.ras.status, e.ras.communicators = "OK", 3
    g.h100(e, 100, 141.0)
    return e
