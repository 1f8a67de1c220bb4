"""Part D: collectives, peer access, network."""

from __future__ import annotations

from cases import builder as b
from cases.table import HANGS, HEALTHY, case
from fleetdump.agent.evidence_engine import (
    FlightRecord,
    OperationCounts,
    RankCount,
    RasFacts,
)
from fleetdump.agent.evidence_host import GpuFacts
from fleetdump.agent.evidence_process import SyscallCount
from fleetdump.agent.evidence_types import Evidence

AT_SYNC = ["synchronize (torch/cuda/__init__.py:9)", "ModelRunner.init (model_runner.py:1)"]


def initialising(ranks: int = 2, nccl: str = "init begin") -> Evidence:
    e = b.server(ranks)
    b.at_phase(e, "init", "init begin")
    for m in e.log.ranks:
        m.nccl = nccl
        m.last_line = "NCCL INFO ncclCommInitRank comm 0x1 rank 0 nranks 2"
    return e


@case("D1", "NVIDIA/nccl#2079", first="P2P_BLOCKED", never=HEALTHY | {"KERNEL_SPIN", "COLLECTIVE_DIVERGED"})
def access_control_drops_peer_writes() -> Evidence:
    e = initialising(2, "init end")
    b.wait_for_gpu(e)
    e.host.gpu_links, e.host.acs_redirects = ["PHB"], 4
    return e


@case("D3", "pytorch/pytorch#75658", first="P2P_BLOCKED", never=HEALTHY | {"COLLECTIVE_DIVERGED"}, phase="init")
def four_pcie_gpus_at_idle_power() -> Evidence:
    e = initialising(4, "")
    b.wait_for_gpu(e, 84.0, 300.0, 2200)
    e.host.gpu_links = ["PHB", "SYS"]
    return e


@case("D4", "sgl-project/sglang#3666", first="P2P_BLOCKED", never=HEALTHY | {"KERNEL_SPIN", "MISSING_RANK"})
def all_ranks_stop_at_nccl() -> Evidence:
    e = initialising(2, "")
    for m in e.log.ranks:
        m.last_line = "NCCL version 2.21.5+cuda12.4"
    b.blocked_in(b.launcher(e), "anon_pipe_read", "0 0xa 0x7f 0x4", 10)
    return e


@case("D5", "local-inference-lab/rtx6kpro#15", first="GPU_WEDGED", never=HEALTHY | {"XID", "ORPHAN_GPU"})
def gpu_is_busy_for_nobody() -> Evidence:
    e = b.server(2)
    b.dead(e)
    b.gpus(e, 100, 0)
    for gpu in e.gpus:
        gpu.processes_known, gpu.memory_used, gpu.power = True, 624, 120.0
    return e


@case("D7 missing", "NVIDIA/nccl#394", first="MISSING_RANK", never=HEALTHY | {"P2P_BLOCKED"}, rank=0)
def one_rank_never_reaches_nccl() -> Evidence:
    e = initialising(8)
    e.log.ranks[0].nccl, e.log.ranks[0].last_line = "", "NCCL version 2.18"
    for n in range(1, 8):
        b.spin(b.rank(e, n))
    return e


@case("D7 bridge", "NVIDIA/nccl#377", first="WRONG_INTERFACE MISSING_RANK", also="WRONG_INTERFACE", never=HEALTHY)
def every_node_chose_its_private_bridge() -> Evidence:
    e = initialising(16, "bootstrap")
    e.target.ranks, e.target.nodes = 32, 2
    for m in e.log.ranks:
        m.interface = "br0:172.17.0.1"
    return e


@case("D8", "sgl-project/sglang#3226", first="WRONG_INTERFACE", never=HEALTHY | {"PARENT_WAITS_DEAD_RANK"})
def hostname_resolves_to_loopback() -> Evidence:
    e = initialising(8, "")
    e.target.ranks, e.target.nodes, e.target.node_rank = 16, 2, 1
    for p in b.all_ranks(e):
        assert p.rank is not None
        p.rank += 8
        p.label = f"TP{p.rank}"
    b.at_phase(e, "init", "init begin")
    e.host.name_resolves_to = ["127.0.1.1"]
    b.connecting(b.all_ranks(e)[0], "127.0.0.1:31111")
    e.log.troubles = {"loopback_fallback": "gloo: unable to resolve the hostname, falling back to the loopback address"}
    return e


@case("D9", "reference row 6", first="IPV6_LOOPBACK", never=HEALTHY | {"WRONG_INTERFACE"})
def host_without_ipv4() -> Evidence:
    e = initialising(2, "")
    e.host.addresses = {"lo": ["127.0.0.1", "::1"], "eth0": ["2001:db8::7"]}
    b.trace(e, 1, SyscallCount("python", True, "connect", 40))
    b.connecting(b.rank(e, 1), "127.0.0.1:29500")
    return e


@case("D10", "NVIDIA/nccl#1646", first="BUSY_NOT_HUNG", never=HANGS)
def set_up_of_the_communicator_is_slow() -> Evidence:
    e = initialising(8)
    e.log.quiet_seconds = 62.0
    assert e.watch is not None
    e.watch.idle_seconds = 62.0
    return e


@case("D10 goes on", "NVIDIA/nccl#1646", first="BUSY_NOT_HUNG", never=HANGS)
def set_up_of_the_communicator_has_ended() -> Evidence:
    e = initialising(8, "init end")
    e.log.news = 8
    return e


@case("D11", "pytorch/pytorch#97191", first="COLLECTIVE_DIVERGED", never=HEALTHY | {"P2P_BLOCKED"})
def sizes_differ_on_one_rank() -> Evidence:
    e = b.server(4)
    b.serving(e)
    b.listening(e, 0, "timeout")
    e.log.ready, e.log.phase = True, "serving"
    e.log.troubles = {"nccl_watchdog": "Watchdog caught collective operation timeout: WorkNCCL(SeqNum=812)"}
    b.wait_for_gpu(e, 130.0, 700.0, 70_000)
    e.flight = [FlightRecord(n, 812, "all_reduce", "started", [7168 * (2 if n == 0 else 1)]) for n in range(4)]
    return e


@case("D13", "sgl-project/sglang#22607", first="COLLECTIVE_DIVERGED", never=HEALTHY, rank=0)
def one_rank_asks_the_cache_the_others_the_requests() -> Evidence:
    e = b.server(4)
    b.listening(e, 0, "timeout")
    e.log.ready, e.log.phase = True, "serving"
    for p in b.all_ranks(e):
        b.blocked_in(p, "do_epoll_wait", "232 0x9")
    requests = ["broadcast (distributed_c10d.py:5)", "broadcast_pyobj (common.py:2)", "recv_requests (scheduler.py:3)"]
    cache = ["all_reduce (distributed_c10d.py:1)", "check_prefetch_progress (hiradix_cache.py:2)"]
    b.stacks(e, {**dict.fromkeys(range(4), requests), 0: cache})
    return e


def serving_and_waiting(ras: str) -> Evidence:
    e = b.server(4)
    b.listening(e, 0, "timeout")
    e.log.ready, e.log.phase, e.log.running_requests = True, "serving", 6
    b.wait_for_gpu(e, 130.0, 700.0, 70_000)
    b.stacks(e, dict.fromkeys(range(4), AT_SYNC), dict.fromkeys(range(4), "active"))
    e.ras = RasFacts(ras, 2)
    return e


@case("D14", "sgl-project/sglang#30209", first="KERNEL_SPIN", never=HEALTHY | {"COLLECTIVE_DIVERGED", "P2P_BLOCKED"})
def custom_all_reduce_polls_its_flags() -> Evidence:
    e = serving_and_waiting("OK")
    for stack in e.stacks:
        stack.native = ["cuStreamSynchronize (libcuda.so)", "cross_device_reduce_1stage (custom_all_reduce.cuh)"]
    return e


@case("D15 counts", "cases/real S3b", first="COLLECTIVE_DIVERGED", never=HEALTHY | {"KERNEL_SPIN"}, rank=2)
def one_rank_has_launched_one_more() -> Evidence:
    e = serving_and_waiting("MISMATCH")
    counts = [RankCount(n, 18 if n == 2 else 17, b.FIRST_RANK + n) for n in range(4)]
    e.ras.mismatches = [OperationCounts("AllReduce", "0-0", counts)]
    return e


@case(
    "D16", "vllm-project/vllm#51986", first="PARENT_WAITS_READY WARMUP_STALL KERNEL_SPIN UNKNOWN",
    never=HEALTHY | {"LOADING_SLOW", "JIT_COMPILING"},
)  # fmt: skip
def workspace_set_up_is_tried_again_and_again() -> Evidence:
    e = b.server(8)
    e.log.growth, e.log.quiet_seconds, e.log.repeated, e.log.news_seconds = 900, 12.0, 20, 600.0
    e.log.repeated_line = "initialising the all-reduce workspace, attempt 20"
    e.gpus = [GpuFacts(n, 0, 40_000, 120.0, 700.0, memory_delta=300) for n in range(8)]
    return e


@case("D17", "reference row 22", first="PORT_RACE", never=HEALTHY | {"PORT_IN_USE"})
def inner_port_was_taken() -> Evidence:
    line = "torch.distributed.DistNetworkError: The server socket cannot be initialized on port 39123: EADDRINUSE"
    e = b.server(2, crash=line, crash_label="TP0", troubles={"port_in_use": line})
    b.dead(e)
    return e


@case("D18", "reference row 21", first="BAD_BIND_HOST", never=HEALTHY | {"PORT_IN_USE"})
def address_of_another_host() -> Evidence:
    e = b.server(1, phase="http", troubles={"cannot_bind": "[Errno 99] error while attempting to bind on address"})
    b.dead(e)
    e.target.host = "198.51.100.7"
    e.host.addresses = {"lo": ["127.0.0.1"], "eth0": ["192.0.2.10"]}
    return e
