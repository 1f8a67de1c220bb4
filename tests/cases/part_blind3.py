"""Part B3: a third blind author, hangs of the kinds A to H in other clothes, vLLM and refused probes among them."""

from __future__ import annotations

from cases import builder as b
from cases.table import HANGS, HEALTHY, case
from fleetdump.agent.evidence_engine import (
    FlightRecord,
    HttpProbe,
    LogFacts,
    OperationCounts,
    PortFacts,
    RankCount,
    RankMarks,
    RasFacts,
)
from fleetdump.agent.evidence_host import DiskFacts, GpuFacts, GpuProcess, LockFacts, LockFile, Pressure
from fleetdump.agent.evidence_process import PipeEnd, ProcessFacts, SocketFacts, Stack, SyscallCount, ThreadFacts
from fleetdump.agent.evidence_types import Evidence, Target, WatchFacts

REF = "blind3"
GIB = 2**30


def zombie(p: ProcessFacts, signal: int) -> None:
    p.state, p.role, p.rank, p.label, p.exit_signal = "Z", "other", None, "", signal
    p.main = None


def no_ptrace(e: Evidence) -> None:
    b.failed_probe(e, "py-spy", "Permission denied: try running again with elevated permissions")
    b.failed_probe(e, "strace", "ptrace(PTRACE_SEIZE): Operation not permitted")
    e.deep = True


def old(e: Evidence, quiet: float) -> None:
    e.log.quiet_seconds, e.uptime = quiet, quiet + 200.0
    e.watch = None


def second_node(e: Evidence) -> None:
    """Node 1 of two: its eight ranks are 8 to 15."""
    e.target.ranks, e.target.nodes, e.target.node_rank = 16, 2, 1
    for p in b.all_ranks(e):
        p.rank = (p.rank or 0) + 8
        p.label = f"TP{p.rank}"


# A ---------------------------------------------------------------------------------------------------------------


@case("blind3 A1 segfault, polling launcher", REF, first="PARENT_WAITS_DEAD_RANK",
      never=HEALTHY | {"PARENT_WAITS_READY", "OOM_KILLED"}, rank=2)  # fmt: skip
def a1() -> Evidence:
    e = b.server(4)
    old(e, 640)
    for p in b.all_ranks(e):
        b.blocked_in(p, "ep_poll", "232 0x12 0x7ffd 0x100")
    zombie(b.rank(e, 2), 11)
    parent = b.launcher(e)
    parent.pipes[2].peers = []
    parent.polled_fds = [10, 11, 12, 13]
    b.blocked_in(parent, "do_sys_poll", "7 0x7ffc 0x4 0xffffffff")
    e.log.tail = ["[2026-11-02 10:00:01 TP3] Memory pool end. avail mem=9.1 GB"]
    return e


@case("blind3 A1 vllm worker gone", REF, first="PARENT_WAITS_DEAD_RANK",
      never=HEALTHY | {"PARENT_WAITS_READY", "OOM_KILLED"}, rank=3)  # fmt: skip
def a1_vllm() -> Evidence:
    e = b.vllm_starting(4)
    old(e, 900)
    b.lose(e, 3)
    engine = e.processes[-1]
    engine.pipes[3].peers = []
    b.blocked_in(engine, "do_poll.constprop.0", "7 0x7ffe 0x4 0xffffffff")
    for p in b.all_ranks(e):
        b.blocked_in(p, "ep_poll", "232 0x1d")
    e.log.tail = ["(Worker_TP1 pid=201) INFO 11-02 10:14:31 [parallel_state.py:1200] rank 1 in world size 4 is assigned"]
    return e


@case("blind3 A3 detokenizer killed", REF, first="API_ALIVE_ENGINE_DEAD", never=HEALTHY | {"OOM_KILLED"})
def a3() -> Evidence:
    e = b.server(2)
    b.serving(e)
    b.listening(e, 503)
    e.log.ready, e.log.phase, e.log.running_requests = True, "serving", 3
    e.log.quiet_seconds, e.uptime = 25.0, 90_000.0
    detokenizer = b.process(300, "detokenizer", name="sglang::detoken")
    zombie(detokenizer, 9)
    e.processes.append(detokenizer)
    e.log.troubles = {"detokenizer_silent": "Health check failed. Server couldn't get a response from detokenizer for last 20 seconds."}
    return e


@case("blind3 A4 engine core is a zombie", REF, first="API_ALIVE_ENGINE_DEAD", never=HEALTHY | {"OOM_KILLED"})
def a4() -> Evidence:
    e = b.vllm(4)
    e.processes = [p for p in e.processes if p.role != "scheduler"]
    zombie(e.processes[-1], 9)
    b.launcher(e).name = "VLLM::APIServer"
    e.http = [HttpProbe("/health", 200, 0.004), HttpProbe("/v1/completions", 0, 10.0, "timeout")]
    e.log.tail = ['(APIServer pid=100) INFO: 10.0.0.9:55012 - "GET /health HTTP/1.1" 200 OK'] * 3
    e.log.growth, e.log.quiet_seconds = 90, 1.0
    b.failed_probe(e, "dmesg", "read kernel buffer failed: Operation not permitted")
    return e


@case("blind3 A5 only the cgroup counted it", REF, first="OOM_KILLED", never=HEALTHY | {"PORT_IN_USE"})
def a5() -> Evidence:
    e = b.vllm_starting(2)
    b.dead(e)
    e.log.crash = "RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): {'EngineCore_0': -9}"
    e.memory.oom_kills = 1
    e.cgroup.path, e.cgroup.memory_limit, e.cgroup.memory_bytes = "/kubepods.slice/pod7/app", 64 * GIB, 9 * GIB
    e.cgroup.memory_events = {"high": 0, "max": 4411, "oom": 2, "oom_kill": 1}
    b.failed_probe(e, "dmesg", "read kernel buffer failed: Operation not permitted")
    return e


@case("blind3 A7 ring of eight, one dead", REF, first="DEAD_READER_RING_FULL", never=HEALTHY | {"SHM_SMALL"}, rank=6)
def a7() -> Evidence:
    e = b.vllm(8)
    zombie(b.rank(e, 6), 7)
    engine = e.processes[-1]
    engine.state = engine.state_before = "R"
    engine.cpu = 1.0
    engine.main = ThreadFacts(150, "VLLM::EngineCor", "R", cpu=1.0, demand=1.0, user_share=0.45, syscall="24")
    for p in b.all_ranks(e):
        p.cpu = 0.0
        b.blocked_in(p, "futex_wait_queue", "202 0x7f")
    e.disks.append(DiskFacts("shm", "/dev/shm", 60 * GIB, 64 * GIB, 10**7, "tmpfs"))
    e.log.troubles = {"ring_full": "No available shared memory broadcast block found in 60 seconds. This typically happens when some processes are hanging"}
    e.log.running_requests, e.log.zero_statistics, e.log.quiet_seconds = 12, 30, 6.0
    e.http.append(HttpProbe("/v1/completions", 0, 10.0, "timeout"))
    no_ptrace(e)
    return e


@case("blind3 A8 two sizes of one card", REF, first="MIXED_GPU", never=HEALTHY | {"ORPHAN_GPU"})
def a8() -> Evidence:
    e = b.server(4)
    b.dead(e)
    line = "ValueError: The memory capacity is unbalanced. Some GPUs may be occupied by other processes. pre_model_load_memory=39.1, local_gpu_memory=78.9"
    e.log.crash, e.log.crash_label, e.log.troubles = line, "TP2", {"memory_unbalanced": line}
    for n in range(4):
        size, name = (81_920, "NVIDIA A100-SXM4-80GB") if n > 1 else (40_960, "NVIDIA A100-SXM4-40GB")
        e.gpus.append(GpuFacts(n, 0, 4, 55.0, 400.0, size, name, processes_known=True))
    return e


@case("blind3 A10 three pipeline stages", REF, first="WARMUP_STALL COLLECTIVE_DIVERGED", never=HEALTHY)
def a10() -> Evidence:
    e = b.server(1)
    e.processes += [b.process(201, "scheduler", rank=0), b.process(202, "scheduler", rank=0)]
    for n, p in enumerate(b.all_ranks(e)):
        p.label = f"PP{n} TP0"
    b.launcher(e).pipes += [PipeEnd(11, 9001, "r", [201]), PipeEnd(12, 9002, "r", [202])]
    e.log.ranks = [RankMarks(f"PP{n} TP0", 0, "capture", [*b.AFTER_WEIGHTS, "capture begin", "capture end"]) for n in range(3)]
    b.listening(e, 503)
    e.log.running_requests = 1
    e.log.quiet_seconds, e.uptime = 420.0, 900.0
    e.watch = WatchFacts("warmup", 420.0, 300.0)
    loop = "event_loop_pp (scheduler_pp_mixin.py:71)"
    frames = [
        ["wait (torch/distributed/distributed_c10d.py:90)", "send_tensor_dict (parallel_state.py:1290)", loop],
        ["recv_object (parallel_state.py:1171)", "recv_tensor_dict (parallel_state.py:1330)", loop],
        ["recv_object (parallel_state.py:1171)", "recv_tensor_dict (parallel_state.py:1330)", loop],
    ]
    e.stacks = [Stack(200 + n, "scheduler", f"PP{n} TP0", "idle", f) for n, f in enumerate(frames)]
    e.stack_groups, e.deep = b.group(e.stacks), True
    b.gpus(e, 0, 0, 0)
    return e


@case("blind3 A11 template renders for ever", REF, first="API_LOOP_BLOCKED", never=HEALTHY | {"RANK_SPIN", "KERNEL_SPIN"})
def a11() -> Evidence:
    e = b.vllm(2)
    parent = b.launcher(e)
    parent.name = "VLLM::APIServer"
    b.spin(parent)
    e.http = [HttpProbe("/health", 0, 5.0, "timeout"), HttpProbe("/v1/models", 0, 5.0, "timeout")]
    e.log.quiet_seconds, e.uptime = 700.0, 50_000.0
    e.stacks = [Stack(100, "launcher", "", "active+gil", ["_search (regex/regex.py:1)", "apply_chat_template (chat_utils.py:1590)", "create_chat_completion (serving_chat.py:210)"])]
    b.gpus(e, 0, 0)
    e.deep = True
    return e


@case("blind3 A13 imports from a dead filer", REF, first="REMOTE_FS_HANG IMPORT_STALL", never=HEALTHY | {"PARENT_WAITS_READY"})
def a13() -> Evidence:
    e = Evidence(Target(4100, ranks=8, port=30000, log="/scratch/run.out"), 1796000000.0, 6.0, uptime=1500.0)
    p = ProcessFacts(4100, 1, "launcher", "python3.11", 77, "D", state_before="D", cmdline="python3.11 -m sglang.launch_server --tp 8")
    p.main = ThreadFacts(4100, "python3.11", "D", wchan="rpc_wait_bit_killable", syscall="262 0xffffff9c 0x7f 0x7f 0x0")
    p.kernel_stack = ["rpc_wait_bit_killable", "__rpc_execute", "nfs4_call_sync_sequence", "nfs4_proc_getattr", "vfs_statx"]
    e.processes = [p]
    e.log = LogFacts("/scratch/run.out", True, 0, quiet_seconds=1490.0, phase="imports")
    e.port = PortFacts(30000)
    e.kernel_log = ["[88123.0] nfs: server filer-2 not responding, still trying"]
    return e


@case("blind3 S5 vllm worker stopped", REF, first="STOPPED_PROCESS", never=HEALTHY | {"DEAD_READER_RING_FULL"}, rank=3)
def stopped() -> Evidence:
    e = b.vllm(4)
    for p in b.all_ranks(e):
        b.spin(p, user=0.5)
    p = b.rank(e, 3)
    p.state = p.state_before = "T"
    p.cpu, p.main = 0.0, ThreadFacts(p.pid, p.name, "T", wchan="do_signal_stop")
    e.log.troubles = {"ring_full": "No available shared memory broadcast block found in 60 seconds."}
    e.log.running_requests, e.log.zero_statistics = 9, 22
    e.gpus = [GpuFacts(n, 0 if n == 3 else 100, 70_000, 140.0, 700.0) for n in range(4)]
    e.http.append(HttpProbe("/v1/completions", 0, 10.0, "timeout"))
    b.failed_probe(e, "py-spy", "Failed to suspend process 203")
    return e


# B ---------------------------------------------------------------------------------------------------------------


@case("blind3 B1 vllm loader asleep", REF, first="LOADER_DEADLOCK", never=HEALTHY | {"LOADING_SLOW"}, phase="weights")
def b1() -> Evidence:
    e = b.vllm_starting(4)
    old(e, 1500)
    e.log.phase = "weights"
    for p in b.all_ranks(e):
        p.rss = 180 * GIB
        b.blocked_in(p, "futex_wait_queue_me", "202 0x7f 0x189")
    e.memory.total, e.memory.available = 768 * GIB, 6 * GIB
    e.memory.pressure_some, e.memory.pressure_full = 78.0, 55.0
    e.pressure = [Pressure("memory", "host", 78.0, 55.0)]
    frames = ["wait (threading.py:327)", "result (concurrent/futures/_base.py:451)", "multi_thread_safetensors_weights_iterator (weight_utils.py:760)", "load_weights (default_loader.py:290)"]
    b.stacks(e, {0: frames, 1: frames, 2: frames})
    b.failed_probe(e, "py-spy 203", "time limit")
    e.log.tail = ["(Worker_TP0 pid=200) INFO 11-02 10:00:01 [gpu_model_runner.py:3010] Starting to load model /models/m..."]
    b.gpus(e, 0, 0, 0, 0)
    return e


@case("blind3 B4 lustre page faults", REF, first="LOADING_SLOW", never=HANGS | {"REMOTE_FS_HANG", "DRIVER_D_STATE"})
def b4() -> Evidence:
    e = b.server(8)
    b.at_phase(e, "weights", "init begin", "init end", "weights begin")
    old(e, 2400)
    for p in b.all_ranks(e):
        b.disk_sleep(p, "folio_wait_bit_common", "filemap_fault", "ll_filemap_fault", "__do_fault")
        p.state_before = "R" if p.pid % 2 else "D"
        p.cpu, p.majflt_delta, p.rss_delta, p.rchar_delta = 0.07, 3100, 65_000_000, 412
    e.disks.append(DiskFacts("model", "/lustre/models", 10**14, 10**15, 10**9, "lustre"))
    e.log.tail = ["Multi-thread loading shards: 100% Completed | 96/96"]
    b.gpus(e, *[0] * 8)
    return e


@case("blind3 B7 one rank still reads juicefs", REF, first="LOADING_SLOW", never=HANGS | {"REMOTE_FS_HANG"})
def b7() -> Evidence:
    e = b.server(4)
    b.at_phase(e, "weights", "init begin", "init end", "weights begin")
    old(e, 800)
    for n in (0, 2, 3):
        e.log.ranks[n].marks.append("weights end")
        e.log.ranks[n].phase = "kv_pool"
    p = b.rank(e, 1)
    p.rchar_delta, p.cpu = 21_000_000, 0.05
    b.blocked_in(p, "request_wait_answer", "17 0x2c 0x7f", 44)
    e.disks.append(DiskFacts("model", "/jfs", 10**14, 10**15, 10**9, "fuse.juicefs"))
    return e


@case("blind3 B6b ptxas after the weights", REF, first="JIT_COMPILING", never=HANGS | {"LOADING_SLOW"})
def b6b() -> Evidence:
    e = b.server(2)
    old(e, 700)
    e.processes.append(b.process(400, "compiler", ppid=201, name="ninja"))
    for n in range(6):
        c = b.process(410 + n, "compiler", ppid=400, name="ptxas" if n % 2 else "cudafe++", start_time=900)
        b.spin(c)
        e.processes.append(c)
    b.gpus(e, 0, 0)
    e.lock_files = [LockFile("/root/.cache/flashinfer/0.3.1/90a/cached_ops/tmp/fused_moe.lock", 690.0, 201, locked=True)]
    return e


# C ---------------------------------------------------------------------------------------------------------------


@case("blind3 C2 DeepGEMM inside a rank", REF, first="JIT_COMPILING BUSY_NOT_HUNG", never=HANGS)
def c2() -> Evidence:
    e = b.server(8)
    b.at_phase(e, "jit", *b.AFTER_WEIGHTS, "pool end")
    old(e, 9)
    e.uptime = 800.0
    p = b.rank(e, 0)
    p.cpu = 11.3
    p.threads = [ThreadFacts(5000 + n, "pt_main_thread", "R", cpu=0.94, demand=1.0, user_share=0.97, syscall="running") for n in range(12)]
    p.write_bytes_delta = 400_000
    e.log.tail = ["DeepGEMM JIT Pre-Compile session: (2/5) 12%|#2        | 2011/16384"]
    b.gpus(e, *[0] * 8)
    no_ptrace(e)
    return e


@case("blind3 C5 torch extension lock, blind", REF, first="JIT_STALE_LOCK", never=HEALTHY | {"LOCK_WAIT"})
def c5() -> Evidence:
    e = b.server(4)
    b.at_phase(e, "jit", *b.AFTER_WEIGHTS)
    old(e, 3000)
    for p in b.all_ranks(e):
        p.main = ThreadFacts(p.pid, p.name, "S", cpu=0.001, voluntary=10.0, wchan="hrtimer_nanosleep", syscall="230 0x1 0x0 0x7f")
    e.lock_files = [LockFile("/root/.cache/torch_extensions/py312_cu128/fused_ops/lock", 90_000.0)]
    e.log.tail = ["Using /root/.cache/torch_extensions/py312_cu128 as PyTorch extensions root..."]
    b.gpus(e, 0, 0, 0, 0)
    no_ptrace(e)
    return e


@case("blind3 C7 flock on an NFS home", REF, first="LOCK_WAIT", never=HEALTHY | {"JIT_STALE_LOCK"})
def c7() -> Evidence:
    e = b.server(8)
    b.at_phase(e, "jit", *b.AFTER_WEIGHTS)
    old(e, 1400)
    for p in b.all_ranks(e):
        b.blocked_in(p, "nfs4_retry_setlk_simple", "73 0x31 0x2", 49)
    e.lock_files = [LockFile("/home/u/.cache/flashinfer/0.2.9/90/cached_ops/gqa.lock", 4000.0, fstype="nfs4")]
    e.disks.append(DiskFacts("home", "/home/u", 10**12, 10**13, 10**8, "nfs4"))
    return e


@case("blind3 C9 vllm worker compiles Triton", REF, first="JIT_COMPILING", never=HANGS, rank=2)
def c9() -> Evidence:
    e = b.vllm(4)
    for p in b.all_ranks(e):
        b.spin(p, user=0.6)
    b.spin(b.rank(e, 2), user=0.93)
    waits = ["all_reduce (pynccl.py:120)", "forward (linear.py:1300)", "execute_model (gpu_worker.py:500)"]
    compiles = ["make_llir (nvidia/compiler.py:340)", "compile (triton/compiler/compiler.py:320)", "run (triton/runtime/jit.py:590)", "unified_attention (triton_unified_attention.py:800)", "execute_model (gpu_worker.py:500)"]
    b.stacks(e, {0: waits, 1: waits, 2: compiles, 3: waits}, {0: "active", 1: "active", 2: "active+gil", 3: "active"})
    e.gpus = [GpuFacts(n, 0 if n == 2 else 100, 70_000, 150.0, 700.0) for n in range(4)]
    e.log.running_requests, e.log.zero_statistics, e.log.quiet_seconds = 4, 3, 4.0
    return e


@case("blind3 C11 second node at 0/23", REF, first="GRAPH_CAPTURE", never=HEALTHY | {"JIT_COMPILING"})
def c11() -> Evidence:
    e = b.server(8)
    second_node(e)
    b.at_phase(e, "capture", *b.AFTER_WEIGHTS, "pool end", "capture begin")
    old(e, 1200)
    b.wait_for_gpu(e, power=118.0, limit=700.0, memory=71_000)
    e.host.gpu_links = ["NV18"]
    e.log.tail = ["Capturing batches (bs=160 avail_mem=8.21 GB):   0%|          | 0/23 [00:00<?, ?it/s]"]
    b.failed_probe(e, "py-spy", "not found")
    return e


@case("blind3 H8 one rank spins in capture, blind", REF, first="MISSING_RANK PARENT_WAITS_READY", never=HEALTHY | {"LOADER_DEADLOCK"}, rank=2)
def s8_blind() -> Evidence:
    e = b.server(4)
    b.at_phase(e, "capture", *b.AFTER_WEIGHTS, "pool end", "capture begin")
    old(e, 600)
    b.spin(b.rank(e, 2))
    b.gpus(e, 0, 0, 0, 0)
    e.log.tail = ["Capturing batches (bs=4 avail_mem=60.10 GB):  50%|#####     | 2/4"]
    no_ptrace(e)
    return e


@case("blind3 crosslock of four", REF, first="JIT_COLLECTIVE_CROSSLOCK", never=HEALTHY | {"JIT_STALE_LOCK"})
def crosslock() -> Evidence:
    e = b.server(4)
    b.at_phase(e, "jit", *b.AFTER_WEIGHTS)
    old(e, 900)
    b.blocked_in(b.rank(e, 3), "locks_lock_inode_wait", "73 0x40 0x2", 64)
    e.locks = [LockFacts("FLOCK", 777, 200, 203, "/root/.cache/sgl_kernel/build.lock", "xfs")]
    e.lock_files = [LockFile("/root/.cache/sgl_kernel/build.lock", 905.0, 200, fstype="xfs", locked=True)]
    waits = ["wait (distributed_c10d.py:80)", "all_gather_object (distributed_c10d.py:2900)", "warm_up (moe_runner.py:60)"]
    b.stacks(e, {0: waits, 1: waits, 2: waits, 3: ["acquire (filelock/_api.py:330)", "build (jit/core.py:200)", "warm_up (moe_runner.py:48)"]})
    b.gpus(e, 0, 0, 0, 0)
    return e


# D ---------------------------------------------------------------------------------------------------------------


@case("blind3 D1 four cards on two sockets", REF, first="P2P_BLOCKED", never=HEALTHY | {"GRAPH_CAPTURE"})
def d1() -> Evidence:
    e = b.server(4)
    b.at_phase(e, "init", "init begin")
    old(e, 500)
    for r in e.log.ranks:
        r.nccl, r.last_line = "init end", "ncclCommInitRankConfig comm 0x5 rank 0 nranks 4 - Init COMPLETE"
    b.wait_for_gpu(e, power=62.0, limit=350.0, memory=740)
    e.host.gpu_links, e.host.acs_redirects = ["PIX", "SYS"], 6
    return e


@case("blind3 D7 rank 4 never came to NCCL", REF, first="MISSING_RANK", never=HEALTHY | {"P2P_BLOCKED"}, rank=4)
def d7() -> Evidence:
    e = b.server(8)
    b.at_phase(e, "init", "init begin")
    old(e, 700)
    for r in e.log.ranks:
        if r.rank != 4:
            r.nccl, r.interface = "init begin", "enp24s0:10.4.0.7"
            b.blocked_in(b.rank(e, r.rank), "inet_csk_accept", "288 0x55", 85)
    b.gpus(e, *[0] * 8)
    return e


@case("blind3 D8 docker bridge on both hosts", REF, first="WRONG_INTERFACE", never=HEALTHY | {"PARENT_WAITS_DEAD_RANK"})
def d8() -> Evidence:
    e = b.server(8)
    second_node(e)
    b.at_phase(e, "init", "init begin")
    old(e, 600)
    for r in e.log.ranks:
        r.nccl, r.interface = "bootstrap", "docker0:172.17.0.1"
    for p in b.all_ranks(e):
        p.sockets.append(SocketFacts(60, "SYN_SENT", "172.17.0.1:51200", "172.17.0.1:39011"))
    e.host.addresses = {"lo": ["127.0.0.1"], "docker0": ["172.17.0.1"], "ens1f0": ["10.20.0.12"]}
    e.host.name_resolves_to = ["10.20.0.12"]
    return e


@case("blind3 F2 vllm without the fabric state", REF, first="FABRIC_MANAGER", never=HEALTHY | {"MIXED_GPU"})
def f2() -> Evidence:
    e = b.vllm_starting(8)
    b.dead(e)
    line = "RuntimeError: Unexpected error from cudaGetDeviceCount(). Error 802: system not yet initialized"
    e.log.crash, e.log.troubles = line, {"cuda_802": line}
    e.gpus = [GpuFacts(n, 0, 4, 70.0, 700.0, 81_559, "NVIDIA H100 80GB HBM3", processes_known=True) for n in range(8)]
    e.host.fabric_manager = "failed"
    return e


@case("blind3 D10 communicator takes its minute", REF, first="BUSY_NOT_HUNG", never=HANGS)
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


@case("blind3 D11 one rank sends twice as much", REF, first="COLLECTIVE_DIVERGED", never=HEALTHY, rank=1)
def d11() -> Evidence:
    e = b.vllm(4)
    b.wait_for_gpu(e, power=150.0, limit=700.0, memory=70_000)
    e.flight = [FlightRecord(n, 812, "nccl:all_reduce", "started", [8192 if n == 1 else 4096]) for n in range(4)]
    e.log.troubles = {"nccl_watchdog": "[rank2]: Watchdog caught collective operation timeout: WorkNCCL(SeqNum=812, OpType=ALLREDUCE, NumelIn=4096)"}
    e.log.running_requests, e.log.quiet_seconds = 3, 900.0
    e.http.append(HttpProbe("/v1/completions", 0, 10.0, "timeout"))
    return e


@case("blind3 D13 one of eight checks its cache", REF, first="COLLECTIVE_DIVERGED", never=HEALTHY | {"RANK_SPIN"}, rank=5)
def d13() -> Evidence:
    e = b.unanswering(8)
    for p in b.all_ranks(e):
        p.cpu = 0.0
        b.blocked_in(p, "futex_do_wait", "202 0x1 0x189")
    odd = ["all_reduce (distributed_c10d.py:2810)", "check_prefetch_progress (hiradix_cache.py:700)", "get_next_batch_to_run (scheduler.py:1500)", "event_loop_overlap (scheduler.py:780)"]
    rest = ["broadcast (distributed_c10d.py:2700)", "broadcast_pyobj (common.py:1455)", "recv_requests (scheduler.py:990)", "event_loop_overlap (scheduler.py:770)"]
    b.stacks(e, {n: odd if n == 5 else rest for n in range(8)})
    b.gpus(e, *[0] * 8)
    return e


@case("blind3 S2 patch loops in the warm-up", REF, first="MISSING_RANK WARMUP_STALL", never=HEALTHY | {"KERNEL_SPIN", "P2P_BLOCKED", "IDLE_OK"}, rank=1)
def s2() -> Evidence:
    e = b.server(4)
    b.listening(e, 503)
    b.wait_for_gpu(e, power=133.0, limit=700.0, memory=60_000)
    b.spin(b.rank(e, 1))
    e.gpus[1].utilization, e.gpus[1].power = 0, 121.0
    e.log.quiet_seconds, e.uptime, e.log.running_requests = 500.0, 800.0, 1
    e.watch = WatchFacts("warmup", 500.0, 300.0)
    there = ["_get_pruned_states (logits_processor.py:469)", "forward (logits_processor.py:300)", "forward_extend (model_runner.py:2000)"]
    b.stacks(e, {n: ["forward (qwen3_moe.py:912)", "forward_extend (model_runner.py:2000)"] if n == 1 else there for n in range(4)},
             {0: "active", 1: "active+gil", 2: "active", 3: "active"})  # fmt: skip
    for n in (0, 2, 3):
        b.trace(e, n, SyscallCount("sglang::schedul", True, "ioctl", 2, "/dev/nvidiactl"))
    b.trace(e, 1)
    counts = [RankCount(n, 12 if n == 1 else 31, 200 + n) for n in range(4)]
    e.ras = RasFacts("MISMATCH", 3, [OperationCounts("AllReduce", "0x4f", counts)])
    e.host.gpu_links = ["NV18"]
    return e


@case("blind3 D14 vllm custom all-reduce", REF, first="KERNEL_SPIN", never=HEALTHY | {"P2P_BLOCKED", "COLLECTIVE_DIVERGED"})
def d14() -> Evidence:
    e = b.vllm(8)
    b.wait_for_gpu(e, power=165.0, limit=700.0, memory=74_000)
    frames = ["synchronize (torch/cuda/streams.py:231)", "get_output (gpu_model_runner.py:210)", "execute_model (gpu_worker.py:500)"]
    b.stacks(e, {n: frames for n in range(8)}, {n: "active" for n in range(8)})
    for s in e.stacks:
        s.native = ["libcuda.so.580", "cuEventSynchronize", *frames]
    e.ras = RasFacts("OK", 4)
    e.log.running_requests, e.log.zero_statistics = 16, 40
    e.log.growth, e.log.quiet_seconds, e.log.news_seconds = 180, 3.0, 410.0
    e.host.gpu_links = ["NV18"]
    e.http.append(HttpProbe("/v1/completions", 0, 10.0, "timeout"))
    return e


# E ---------------------------------------------------------------------------------------------------------------


@case("blind3 E1 idle among old rubbish", REF, first="IDLE_OK HEALTHY",
      never=HANGS | {"PROXY_WARMUP", "DISK_FULL", "RANK_CRASHED", "OOM_KILLED", "LOCK_WAIT", "HUB_LOCK"})  # fmt: skip
def e1() -> Evidence:
    e = b.server(8)
    b.serving(e)
    e.log.quiet_seconds, e.uptime = 9_000.0, 200_000.0
    e.proxy = {"http_proxy": "squid.example:3128", "no_proxy": "localhost"}
    e.lock_files = [
        LockFile("/root/.cache/flashinfer/90/cached_ops/tmp/x.lock", 260_000.0),
        LockFile("/root/.cache/huggingface/hub/.locks/models--o--m/e1.lock", 260_000.0, use="hub"),
    ]
    done = b.process(600, "compile_worker", ppid=203, name="python3", state="Z")
    e.processes.append(done)
    e.disks.append(DiskFacts("home", "/root", 9 * GIB, 1000 * GIB, 10**6, "ext4"))
    b.gpus(e, *[0] * 8)
    for n in range(8):
        b.trace(e, n, SyscallCount("sglang::schedul", True, "ppoll", 11_000), SyscallCount("sglang::schedul", True, "getpid", 11_000))
    return e


@case("blind3 E2 proxy wants a password, environment hidden", REF, first="PROXY_WARMUP", never=HEALTHY)
def e2() -> Evidence:
    e = b.server(1)
    b.listening(e, 503)
    e.target.host = "0.0.0.0"
    e.log.server_marks = ["http start", "http open"]
    e.log.quiet_seconds, e.uptime = 2.0, 300.0
    e.log.troubles = {"proxy_refused": "AssertionError: res=<Response [407]>, <title>ERROR: Cache Access Denied</title> squid.example"}
    e.log.repeated, e.log.repeated_line, e.log.growth = 40, "GET http://0.0.0.0:8000/model_info 407", 300
    b.poll_idle(b.rank(e, 0))
    b.launcher(e).sockets = [SocketFacts(31, "CLOSE_WAIT", "10.0.0.4:51111", "10.9.9.9:3128")]
    b.failed_probe(e, "environ", "Permission denied")
    b.gpus(e, 0)
    return e


@case("blind3 E4 long prompts, health times out", REF, first="BUSY_NOT_HUNG HEALTHY", never=HANGS | {"API_LOOP_BLOCKED", "KERNEL_SPIN"})
def e4() -> Evidence:
    e = b.server(4)
    b.serving(e)
    b.listening(e, 0, "timeout")
    e.log.ready, e.log.phase, e.log.running_requests = True, "serving", 2
    e.log.growth, e.log.news, e.log.forwards, e.log.quiet_seconds = 700, 3, 3, 1.5
    for p in b.all_ranks(e):
        b.spin(p, user=0.6)
    e.gpus = [GpuFacts(n, 100, 130_000, 655.0, 700.0) for n in range(4)]
    e.log.troubles = {"detokenizer_silent": "Health check failed. Server couldn't get a response from detokenizer for last 20 seconds. tic start time: 10:12:01"}
    return e


@case("blind3 E5 schema in the engine core's pool", REF, first="GRAMMAR_COMPILE", never=HANGS | {"API_LOOP_BLOCKED", "IDLE_OK"})
def e5() -> Evidence:
    e = b.vllm(2)
    engine = e.processes[-1]
    engine.cpu = 1.01
    engine.threads = [ThreadFacts(170, "ThreadPoolExec", "R", cpu=1.0, demand=1.0, user_share=1.0, syscall="running")]
    grammar = ["compile_json_schema (xgrammar/compiler.py:150)", "compile_grammar (backend_xgrammar.py:90)", "_async_create_grammar (structured_output/__init__.py:120)"]
    e.stacks = [Stack(150, "engine", "", "idle", ["get (queue.py:171)", "_process_input_queue (core.py:800)"], active={"ThreadPoolExecutor-0_0": grammar})]
    e.deep = True
    b.gpus(e, 0, 0)
    e.log.running_requests, e.log.zero_statistics, e.log.quiet_seconds = 3, 8, 5.0
    e.http.append(HttpProbe("/v1/completions", 0, 6.0, "timeout"))
    return e


@case("blind3 E7 scheduler walks its tree for ever", REF, first="RANK_SPIN MISSING_RANK", never=HEALTHY | {"KERNEL_SPIN"}, rank=0)
def e7() -> Evidence:
    e = b.unanswering(2)
    e.log.quiet_seconds, e.log.running_requests = 800.0, 6
    b.spin(b.rank(e, 0))
    other = b.rank(e, 1)
    other.cpu = 0.0
    b.blocked_in(other, "futex_wait_queue", "202 0x1 0x189")
    e.stacks = [Stack(200, "scheduler", "TP0", "active+gil", ["_match_prefix_helper (radix_cache.py:600)", "match_prefix (radix_cache.py:300)", "event_loop_normal (scheduler.py:750)"])]
    e.deep = True
    b.failed_probe(e, "py-spy 201", "time limit")
    b.gpus(e, 0, 0)
    return e


# F, G --------------------------------------------------------------------------------------------------------------


@case("blind3 F1 bus error without a word", REF, first="SHM_SMALL", never=HEALTHY | {"OOM_KILLED"})
def f1() -> Evidence:
    e = b.server(4)
    b.at_phase(e, "init", "init begin")
    old(e, 400)
    zombie(b.rank(e, 3), 7)
    b.launcher(e).pipes[3].peers = []
    e.disks.append(DiskFacts("shm", "/dev/shm", 0, 64 * 2**20, 10**5, "tmpfs"))
    return e


@case("blind3 F4 killed and still in uvm", REF, first="DRIVER_D_STATE", never=HEALTHY | {"REMOTE_FS_HANG"}, rank=2)
def f4() -> Evidence:
    e = b.unanswering(8)
    p = b.rank(e, 2)
    b.disk_sleep(p, "rwsem_down_write_slowpath", "down_write", "uvm_va_space_destroy", "uvm_release", "__fput")
    p.kill_pending, p.cpu = True, 0.0
    e.kernel_log = ["[99122.1] INFO: task sglang::schedul:202 blocked for more than 122 seconds."]
    b.failed_probe(e, "nvidia-smi", "time limit of 10 s")
    return e


@case("blind3 F7 vllm waits for a hub lock", REF, first="HUB_LOCK", never=HEALTHY | {"LOCK_WAIT"})
def f7() -> Evidence:
    e = b.vllm_starting(1)
    e.processes = [b.launcher(e)]
    b.launcher(e).pipes = []
    b.launcher(e).main = ThreadFacts(100, "python3", "S", voluntary=20.0, wchan="hrtimer_nanosleep", syscall="230 0x1")
    path = "/nfs/hf/hub/.locks/models--org--m/0a1b.lock"
    e.log.repeated, e.log.repeated_line = 45, f"Still waiting to acquire lock on {path} (elapsed: 450.0 seconds)"
    e.log.waits_for_lock, e.log.growth, e.log.quiet_seconds = path, 110, 4.0
    e.log.news_seconds, e.uptime = 455.0, 500.0
    e.lock_files = [LockFile(path, 86_400.0, use="hub", fstype="nfs4")]
    return e


@case("blind3 F10 no inodes in tmp", REF, first="DISK_FULL", never=HEALTHY)
def f10() -> Evidence:
    e = b.server(2)
    b.at_phase(e, "jit", *b.AFTER_WEIGHTS)
    e.log.quiet_seconds = 20.0
    e.log.crash, e.log.crash_label = "OSError: [Errno 28] No space left on device: '/tmp/tmpab12'", "TP1"
    e.log.troubles = {"disk_full": "OSError: [Errno 28] No space left on device: '/tmp/tmpab12'"}
    e.disks.append(DiskFacts("tmp", "/tmp", 300 * GIB, 400 * GIB, 0, "ext4"))
    b.blocked_in(b.launcher(e), "hrtimer_nanosleep", "230 0x0")
    return e


@case("blind3 G11 logged out", REF, first="LOGIND_KILL", never=HEALTHY | {"OOM_KILLED", "PTY_SIGHUP"})
def g11() -> Evidence:
    e = b.server(8)
    b.serving(e)
    b.dead(e)
    e.port, e.http = PortFacts(8000), []
    e.host.cgroup = e.cgroup.path = "/user.slice/user-1004.slice/session-14.scope"
    e.host.logins = [
        "1795999987.9 systemd-logind[901]: Session 14 logged out. Waiting for processes to exit.",
        "1795999988.2 systemd[1]: session-14.scope: Killing process 100 (python3) with signal SIGTERM.",
        "1795999988.9 systemd-logind[901]: Removed session 14.",
    ]
    e.log.quiet_seconds = 12.0
    return e


# two causes ------------------------------------------------------------------------------------------------------


@case("blind3 two: double bit error and a dead rank", REF, first="XID", also="XID PARENT_WAITS_DEAD_RANK", never=HEALTHY | {"PARENT_WAITS_READY"})
def two_xid() -> Evidence:
    e = b.server(8)
    old(e, 500)
    zombie(b.rank(e, 4), 6)
    b.blocked_in(b.launcher(e), "pipe_wait", "0 0xa 0x7f 0x4", 10)
    e.kernel_log = [
        "[51200.3] NVRM: Xid (PCI:0000:4b:00): 48, pid=204, name=sglang::schedul, DBE (double bit error) ECC Error",
        "[51200.9] NVRM: Xid (PCI:0000:4b:00): 63, pid='<unknown>', name=<unknown>, Row Remapper: New row marked for remapping",
    ]
    return e


@case("blind3 two: full disk and the lock it left", REF, first="DISK_FULL", also="DISK_FULL JIT_STALE_LOCK", never=HEALTHY)
def two_disk() -> Evidence:
    e = b.server(2)
    b.at_phase(e, "jit", *b.AFTER_WEIGHTS)
    old(e, 1800)
    for p in b.all_ranks(e):
        p.main = ThreadFacts(p.pid, p.name, "S", voluntary=10.0, wchan="hrtimer_nanosleep", syscall="230 0x1")
    e.disks.append(DiskFacts("home", "/home/u", 0, 50 * GIB, 10**6, "xfs"))
    e.lock_files = [LockFile("/home/u/.cache/torch_extensions/py311_cu126/ops/lock", 7_300.0, fstype="xfs")]
    frames = ["wait (torch/utils/file_baton.py:52)", "_jit_compile (torch/utils/cpp_extension.py:2150)", "load (torch/utils/cpp_extension.py:1600)"]
    b.stacks(e, {0: frames, 1: frames})
    return e


@case("blind3 two: the old server has port and memory", REF, first="PORT_IN_USE ORPHAN_GPU", also="PORT_IN_USE ORPHAN_GPU", never=HEALTHY | {"MIXED_GPU"})
def two_old() -> Evidence:
    e = b.vllm_starting(2)
    b.dead(e)
    e.port = PortFacts(8000, True, 5555, "VLLM::APIServer", False)
    line = "OSError: [Errno 98] Address already in use"
    oom = "ValueError: Free memory on device cuda:0 (5.1/79.2 GiB) on startup is less than desired GPU memory utilization"
    e.log.crash, e.log.troubles = line, {"port_in_use": line, "out_of_memory": oom}
    e.gpus = [GpuFacts(n, 0, 74_000, 90.0, 700.0, 81_559, "NVIDIA H100 80GB HBM3", processes_known=True) for n in range(2)]
    for g in e.gpus:
        g.processes = [GpuProcess(5600 + g.index, 73_900, "VLLM::Worker_TP", False, True)]
    return e


@case("blind3 two: memory took the engine, the API lives", REF, first="OOM_KILLED API_ALIVE_ENGINE_DEAD", also="OOM_KILLED API_ALIVE_ENGINE_DEAD", never=HEALTHY)
def two_oom() -> Evidence:
    e = b.vllm(2)
    e.processes = [b.launcher(e)]
    e.uptime = 7_000.0
    e.memory.oom_kills = 1
    e.memory.oom_lines = ["[7777.0] Memory cgroup out of memory: Killed process 150 (VLLM::EngineCor) total-vm:98000000kB, anon-rss:61000000kB"]
    e.cgroup.memory_events = {"oom": 1, "oom_kill": 1}
    e.http.append(HttpProbe("/v1/chat/completions", 0, 10.0, "timeout"))
    return e
