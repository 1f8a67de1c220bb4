"""Part AB: kinds A to H by a third author who had not read the diagnosis: compilers, locks and collectives."""

from __future__ import annotations

from cases import builder as b
from cases.table import HANGS, HEALTHY, case
from fleetdump.agent.evidence_engine import FlightRecord, HttpProbe, OperationCounts, RankCount, RasFacts
from fleetdump.agent.evidence_host import DiskFacts, GpuFacts, LockFacts, LockFile
from fleetdump.agent.evidence_process import SocketFacts, SyscallCount, ThreadFacts
from fleetdump.agent.evidence_types import Evidence, WatchFacts

KIND = "kind of the one named"


@case("blind C2 DeepGEMM inside a rank", KIND, first="JIT_COMPILING BUSY_NOT_HUNG", never=HANGS)
def c2() -> Evidence:
    e = b.server(8)
    b.at_phase(e, "jit", *b.AFTER_WEIGHTS, "pool end")
    b.silent(e, 15)
    e.uptime = 800.0
    p = b.rank(e, 0)
    p.cpu = 11.3
    p.threads = [
        ThreadFacts(5000 + n, "pt_main_thread", "R", cpu=0.94, demand=1.0, user_share=0.97, syscall="running")
        for n in range(12)
    ]
    p.write_bytes_delta = 400_000
    e.log.tail = ["DeepGEMM JIT Pre-Compile session: (2/5) 12%|#2        | 2011/16384"]
    b.gpus(e, *[0] * 8)
    b.no_ptrace(e)
    return e


@case("blind C5 torch extension lock, blind", KIND, first="JIT_STALE_LOCK", never=HEALTHY | {"LOCK_WAIT"})
def c5() -> Evidence:
    e = b.server(4)
    b.at_phase(e, "jit", *b.AFTER_WEIGHTS)
    b.silent(e, 3000)
    for p in b.all_ranks(e):
        p.main = ThreadFacts(
            p.pid, p.name, "S", cpu=0.001, voluntary=10.0, wchan="hrtimer_nanosleep", syscall="230 0x1 0x0 0x7f"
        )
    e.lock_files = [LockFile("/root/.cache/torch_extensions/py312_cu128/fused_ops/lock", 90_000.0)]
    e.log.tail = ["Using /root/.cache/torch_extensions/py312_cu128 as PyTorch extensions root..."]
    b.gpus(e, 0, 0, 0, 0)
    b.no_ptrace(e)
    return e


@case("blind C7 flock on an NFS home", KIND, first="LOCK_WAIT", never=HEALTHY | {"JIT_STALE_LOCK"})
def c7() -> Evidence:
    e = b.server(8)
    b.at_phase(e, "jit", *b.AFTER_WEIGHTS)
    b.silent(e, 1400)
    for p in b.all_ranks(e):
        b.blocked_in(p, "nfs4_retry_setlk_simple", "73 0x31 0x2", 49)
    e.lock_files = [LockFile("/home/u/.cache/flashinfer/0.2.9/90/cached_ops/gqa.lock", 4000.0, fstype="nfs4")]
    e.disks.append(DiskFacts("home", "/home/u", 10**12, 10**13, 10**8, "nfs4"))
    return e


@case("blind C9 vllm worker compiles Triton", KIND, first="JIT_COMPILING", never=HANGS, rank=2)
def c9() -> Evidence:
    e = b.vllm(4)
    for p in b.all_ranks(e):
        b.spin(p, user=0.6)
    b.spin(b.rank(e, 2), user=0.93)
    waits = ["all_reduce (pynccl.py:120)", "forward (linear.py:1300)", "execute_model (gpu_worker.py:500)"]
    compiles = [
        "make_llir (nvidia/compiler.py:340)",
        "compile (triton/compiler/compiler.py:320)",
        "run (triton/runtime/jit.py:590)",
        "unified_attention (triton_unified_attention.py:800)",
        "execute_model (gpu_worker.py:500)",
    ]
    b.stacks(e, {0: waits, 1: waits, 2: compiles, 3: waits}, {0: "active", 1: "active", 2: "active+gil", 3: "active"})
    e.gpus = [GpuFacts(n, 0 if n == 2 else 100, 70_000, 150.0, 700.0) for n in range(4)]
    e.log.running_requests, e.log.zero_statistics, e.log.quiet_seconds = 4, 3, 4.0
    return e


@case("blind C11 second node at 0/23", KIND, first="GRAPH_CAPTURE", never=HEALTHY | {"JIT_COMPILING"})
def c11() -> Evidence:
    e = b.server(8)
    b.second_of_two_hosts(e)
    b.at_phase(e, "capture", *b.AFTER_WEIGHTS, "pool end", "capture begin")
    b.silent(e, 1200)
    b.wait_for_gpu(e, power=118.0, limit=700.0, memory=71_000)
    e.host.gpu_links = ["NV18"]
    e.log.tail = ["Capturing batches (bs=160 avail_mem=8.21 GB):   0%|          | 0/23 [00:00<?, ?it/s]"]
    b.failed_probe(e, "py-spy", "not found")
    return e


@case(
    "blind H8 one rank spins in capture, blind",
    KIND,
    first="MISSING_RANK PARENT_WAITS_READY",
    never=HEALTHY | {"LOADER_DEADLOCK"},
    rank=2,
)
def s8_blind() -> Evidence:
    e = b.server(4)
    b.at_phase(e, "capture", *b.AFTER_WEIGHTS, "pool end", "capture begin")
    b.silent(e, 600)
    b.spin(b.rank(e, 2))
    b.gpus(e, 0, 0, 0, 0)
    e.log.tail = ["Capturing batches (bs=4 avail_mem=60.10 GB):  50%|#####     | 2/4"]
    b.no_ptrace(e)
    return e


@case("blind crosslock of four", KIND, first="JIT_COLLECTIVE_CROSSLOCK", never=HEALTHY | {"JIT_STALE_LOCK"})
def crosslock() -> Evidence:
    e = b.server(4)
    b.at_phase(e, "jit", *b.AFTER_WEIGHTS)
    b.silent(e, 900)
    b.blocked_in(b.rank(e, 3), "locks_lock_inode_wait", "73 0x40 0x2", 64)
    e.locks = [LockFacts("FLOCK", 777, 200, 203, "/root/.cache/sgl_kernel/build.lock", "xfs")]
    e.lock_files = [LockFile("/root/.cache/sgl_kernel/build.lock", 905.0, 200, fstype="xfs", locked=True)]
    waits = [
        "wait (distributed_c10d.py:80)",
        "all_gather_object (distributed_c10d.py:2900)",
        "warm_up (moe_runner.py:60)",
    ]
    b.stacks(
        e,
        {
            0: waits,
            1: waits,
            2: waits,
            3: ["acquire (filelock/_api.py:330)", "build (jit/core.py:200)", "warm_up (moe_runner.py:48)"],
        },
    )
    b.gpus(e, 0, 0, 0, 0)
    return e


@case("blind D1 four cards on two sockets", KIND, first="P2P_BLOCKED", never=HEALTHY | {"GRAPH_CAPTURE"})
def d1() -> Evidence:
    e = b.server(4)
    b.at_phase(e, "init", "init begin")
    b.silent(e, 500)
    for r in e.log.ranks:
        r.nccl, r.last_line = "init end", "ncclCommInitRankConfig comm 0x5 rank 0 nranks 4 - Init COMPLETE"
    b.wait_for_gpu(e, power=62.0, limit=350.0, memory=740)
    e.host.gpu_links, e.host.acs_redirects = ["PIX", "SYS"], 6
    return e


@case("blind D7 rank 4 never came to NCCL", KIND, first="MISSING_RANK", never=HEALTHY | {"P2P_BLOCKED"}, rank=4)
def d7() -> Evidence:
    e = b.server(8)
    b.at_phase(e, "init", "init begin")
    b.silent(e, 700)
    for r in e.log.ranks:
        if r.rank != 4:
            r.nccl, r.interface = "init begin", "enp24s0:10.4.0.7"
            b.blocked_in(b.rank(e, r.rank), "inet_csk_accept", "288 0x55", 85)
    b.gpus(e, *[0] * 8)
    return e


@case("blind D8 docker bridge on both hosts", KIND, first="WRONG_INTERFACE", never=HEALTHY | {"PARENT_WAITS_DEAD_RANK"})
def d8() -> Evidence:
    e = b.server(8)
    b.second_of_two_hosts(e)
    b.at_phase(e, "init", "init begin")
    b.silent(e, 600)
    for r in e.log.ranks:
        r.nccl, r.interface = "bootstrap", "docker0:172.17.0.1"
    for p in b.all_ranks(e):
        p.sockets.append(SocketFacts(60, "SYN_SENT", "172.17.0.1:51200", "172.17.0.1:39011"))
    e.host.addresses = {"lo": ["127.0.0.1"], "docker0": ["172.17.0.1"], "ens1f0": ["10.20.0.12"]}
    e.host.name_resolves_to = ["10.20.0.12"]
    return e


@case("blind F2 vllm without the fabric state", KIND, first="FABRIC_MANAGER", never=HEALTHY | {"MIXED_GPU"})
def f2() -> Evidence:
    e = b.vllm_starting(8)
    b.dead(e)
    line = "RuntimeError: Unexpected error from cudaGetDeviceCount(). Error 802: system not yet initialized"
    e.log.crash, e.log.troubles = line, {"cuda_802": line}
    e.gpus = [GpuFacts(n, 0, 4, 70.0, 700.0, 81_559, "NVIDIA H100 80GB HBM3", processes_known=True) for n in range(8)]
    e.host.fabric_manager = "failed"
    return e


@case("blind D10 communicator takes its minute", KIND, first="BUSY_NOT_HUNG", never=HANGS)
def d10() -> Evidence:
    e = b.server(8)
    b.at_phase(e, "init", "init begin")
    for r in e.log.ranks:
        r.nccl = "init begin"
    for p in b.all_ranks(e):
        p.cpu, p.state = 0.55, "R"
        p.main = ThreadFacts(p.pid, p.name, "R", cpu=0.55, demand=0.6, user_share=0.3, voluntary=210.0, syscall="16")
    e.log.quiet_seconds, e.uptime = 62.0, 95.0
    e.watch = WatchFacts("init", 62.0, 300.0)
    b.gpus(e, *[0] * 8)
    return e


@case("blind D11 one rank sends twice as much", KIND, first="COLLECTIVE_DIVERGED", never=HEALTHY, rank=1)
def d11() -> Evidence:
    e = b.vllm(4)
    b.wait_for_gpu(e, power=150.0, limit=700.0, memory=70_000)
    e.flight = [FlightRecord(n, 812, "nccl:all_reduce", "started", [8192 if n == 1 else 4096]) for n in range(4)]
    e.log.troubles = {
        "nccl_watchdog": "[rank2]: Watchdog caught collective operation "
        "timeout: WorkNCCL(SeqNum=812, OpType=ALLREDUCE, NumelIn=4096)"
    }
    e.log.running_requests, e.log.quiet_seconds = 3, 900.0
    e.http.append(HttpProbe("/v1/completions", 0, 10.0, "timeout"))
    return e


@case(
    "blind D13 one of eight checks its cache", KIND, first="COLLECTIVE_DIVERGED", never=HEALTHY | {"RANK_SPIN"}, rank=5
)
def d13() -> Evidence:
    e = b.unanswering(8)
    for p in b.all_ranks(e):
        p.cpu = 0.0
        b.blocked_in(p, "futex_do_wait", "202 0x1 0x189")
    odd = [
        "all_reduce (distributed_c10d.py:2810)",
        "check_prefetch_progress (hiradix_cache.py:700)",
        "get_next_batch_to_run (scheduler.py:1500)",
        "event_loop_overlap (scheduler.py:780)",
    ]
    rest = [
        "broadcast (distributed_c10d.py:2700)",
        "broadcast_pyobj (common.py:1455)",
        "recv_requests (scheduler.py:990)",
        "event_loop_overlap (scheduler.py:770)",
    ]
    b.stacks(e, {n: odd if n == 5 else rest for n in range(8)})
    b.gpus(e, *[0] * 8)
    return e


@case(
    "blind S2 patch loops in the warm-up",
    KIND,
    first="MISSING_RANK WARMUP_STALL",
    never=HEALTHY | {"KERNEL_SPIN", "P2P_BLOCKED", "IDLE_OK"},
    rank=1,
)
def s2() -> Evidence:
    e = b.server(4)
    b.listening(e, 503)
    b.wait_for_gpu(e, power=133.0, limit=700.0, memory=60_000)
    b.spin(b.rank(e, 1))
    e.gpus[1].utilization, e.gpus[1].power = 0, 121.0
    e.log.quiet_seconds, e.uptime, e.log.running_requests = 500.0, 800.0, 1
    e.watch = WatchFacts("warmup", 500.0, 300.0)
    there = [
        "_get_pruned_states (logits_processor.py:469)",
        "forward (logits_processor.py:300)",
        "forward_extend (model_runner.py:2000)",
    ]
    elsewhere = ["forward (qwen3_moe.py:912)", "forward_extend (model_runner.py:2000)"]
    states = {0: "active", 1: "active+gil", 2: "active", 3: "active"}
    b.stacks(e, {n: elsewhere if n == 1 else there for n in range(4)}, states)
    for n in (0, 2, 3):
        b.trace(e, n, SyscallCount("sglang::schedul", True, "ioctl", 2, "/dev/nvidiactl"))
    b.trace(e, 1)
    counts = [RankCount(n, 12 if n == 1 else 31, 200 + n) for n in range(4)]
    e.ras = RasFacts("MISMATCH", 3, [OperationCounts("AllReduce", "0x4f", counts)])
    e.host.gpu_links = ["NV18"]
    return e


@case(
    "blind D14 vllm custom all-reduce",
    KIND,
    first="KERNEL_SPIN",
    never=HEALTHY | {"P2P_BLOCKED", "COLLECTIVE_DIVERGED"},
)
def d14() -> Evidence:
    e = b.vllm(8)
    b.wait_for_gpu(e, power=165.0, limit=700.0, memory=74_000)
    frames = [
        "synchronize (torch/cuda/streams.py:231)",
        "get_output (gpu_model_runner.py:210)",
        "execute_model (gpu_worker.py:500)",
    ]
    b.stacks(e, dict.fromkeys(range(8), frames), dict.fromkeys(range(8), "active"))
    for s in e.stacks:
        s.native = ["libcuda.so.580", "cuEventSynchronize", *frames]
    e.ras = RasFacts("OK", 4)
    e.log.running_requests, e.log.zero_statistics = 16, 40
    e.log.growth, e.log.quiet_seconds, e.log.news_seconds = 180, 3.0, 410.0
    e.host.gpu_links = ["NV18"]
    e.http.append(HttpProbe("/v1/completions", 0, 10.0, "timeout"))
    return e
