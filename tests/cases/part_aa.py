"""Part AA: kinds A to H by a third author who had not read the diagnosis.

Before any rank works: deaths, imports, weights.
"""

from __future__ import annotations

from cases import builder as b
from cases.table import HANGS, HEALTHY, case
from fleetdump.agent.evidence_engine import HttpProbe, LogFacts, PortFacts, RankMarks
from fleetdump.agent.evidence_host import DiskFacts, GpuFacts, LockFile, Pressure
from fleetdump.agent.evidence_process import PipeEnd, ProcessFacts, Stack, ThreadFacts
from fleetdump.agent.evidence_types import Evidence, Target, WatchFacts

KIND = "kind of the one named"
GIB = 2**30


@case("blind A1 segfault, polling launcher", KIND, first="PARENT_WAITS_DEAD_RANK",
      never=HEALTHY | {"PARENT_WAITS_READY", "OOM_KILLED"}, rank=2)  # fmt: skip
def a1() -> Evidence:
    e = b.server(4)
    b.silent(e, 640)
    for p in b.all_ranks(e):
        b.blocked_in(p, "ep_poll", "232 0x12 0x7ffd 0x100")
    b.died_of(b.rank(e, 2), 11)
    parent = b.launcher(e)
    parent.pipes[2].peers = []
    parent.polled_fds = [10, 11, 12, 13]
    b.blocked_in(parent, "do_sys_poll", "7 0x7ffc 0x4 0xffffffff")
    e.log.tail = ["[2026-11-02 10:00:01 TP3] Memory pool end. avail mem=9.1 GB"]
    return e


@case("blind A1 vllm worker gone", KIND, first="PARENT_WAITS_DEAD_RANK",
      never=HEALTHY | {"PARENT_WAITS_READY", "OOM_KILLED"}, rank=3)  # fmt: skip
def a1_vllm() -> Evidence:
    e = b.vllm_starting(4)
    b.silent(e, 900)
    b.lose(e, 3)
    engine = e.processes[-1]
    engine.pipes[3].peers = []
    b.blocked_in(engine, "do_poll.constprop.0", "7 0x7ffe 0x4 0xffffffff")
    for p in b.all_ranks(e):
        b.blocked_in(p, "ep_poll", "232 0x1d")
    e.log.tail = [
        "(Worker_TP1 pid=201) INFO 11-02 10:14:31 [parallel_state.py:1200] rank 1 in world size 4 is assigned"
    ]
    return e


@case("blind A3 detokenizer killed", KIND, first="API_ALIVE_ENGINE_DEAD", never=HEALTHY | {"OOM_KILLED"})
def a3() -> Evidence:
    e = b.server(2)
    b.serving(e)
    b.listening(e, 503)
    e.log.ready, e.log.phase, e.log.running_requests = True, "serving", 3
    e.log.quiet_seconds, e.uptime = 25.0, 90_000.0
    detokenizer = b.process(300, "detokenizer", name="sglang::detoken")
    b.died_of(detokenizer, 9)
    e.processes.append(detokenizer)
    e.log.troubles = {
        "detokenizer_silent": "Health check failed. Server couldn't get a "
        "response from detokenizer for last 20 seconds."
    }
    return e


@case("blind A4 engine core is a zombie", KIND, first="API_ALIVE_ENGINE_DEAD", never=HEALTHY | {"OOM_KILLED"})
def a4() -> Evidence:
    e = b.vllm(4)
    e.processes = [p for p in e.processes if p.role != "scheduler"]
    b.died_of(e.processes[-1], 9)
    b.launcher(e).name = "VLLM::APIServer"
    e.http = [HttpProbe("/health", 200, 0.004), HttpProbe("/v1/completions", 0, 10.0, "timeout")]
    e.log.tail = ['(APIServer pid=100) INFO: 10.0.0.9:55012 - "GET /health HTTP/1.1" 200 OK'] * 3
    e.log.growth, e.log.quiet_seconds = 90, 1.0
    b.failed_probe(e, "dmesg", "read kernel buffer failed: Operation not permitted")
    return e


@case("blind A5 only the cgroup counted it", KIND, first="OOM_KILLED", never=HEALTHY | {"PORT_IN_USE"})
def a5() -> Evidence:
    e = b.vllm_starting(2)
    b.dead(e)
    e.log.crash = (
        "RuntimeError: Engine core initialization failed. See root cause "
        "above. Failed core proc(s): {'EngineCore_0': -9}"
    )
    e.memory.oom_kills = 1
    e.cgroup.path, e.cgroup.memory_limit, e.cgroup.memory_bytes = "/kubepods.slice/pod7/app", 64 * GIB, 9 * GIB
    e.cgroup.memory_events = {"high": 0, "max": 4411, "oom": 2, "oom_kill": 1}
    b.failed_probe(e, "dmesg", "read kernel buffer failed: Operation not permitted")
    return e


@case("blind A7 ring of eight, one dead", KIND, first="DEAD_READER_RING_FULL", never=HEALTHY | {"SHM_SMALL"}, rank=6)
def a7() -> Evidence:
    e = b.vllm(8)
    b.died_of(b.rank(e, 6), 7)
    engine = e.processes[-1]
    engine.state = engine.state_before = "R"
    engine.cpu = 1.0
    engine.main = ThreadFacts(150, "VLLM::EngineCor", "R", cpu=1.0, demand=1.0, user_share=0.45, syscall="24")
    for p in b.all_ranks(e):
        p.cpu = 0.0
        b.blocked_in(p, "futex_wait_queue", "202 0x7f")
    e.disks.append(DiskFacts("shm", "/dev/shm", 60 * GIB, 64 * GIB, 10**7, "tmpfs"))
    e.log.troubles = {
        "ring_full": "No available shared memory broadcast block found in 60 "
        "seconds. This typically happens when some processes are hanging"
    }
    e.log.running_requests, e.log.zero_statistics, e.log.quiet_seconds = 12, 30, 6.0
    e.http.append(HttpProbe("/v1/completions", 0, 10.0, "timeout"))
    b.no_ptrace(e)
    return e


@case("blind A8 two sizes of one card", KIND, first="MIXED_GPU", never=HEALTHY | {"ORPHAN_GPU"})
def a8() -> Evidence:
    e = b.server(4)
    b.dead(e)
    line = (
        "ValueError: The memory capacity is unbalanced. Some GPUs may be "
        "occupied by other processes. pre_model_load_memory=39.1, local_gpu_memory=78.9"
    )
    e.log.crash, e.log.crash_label, e.log.troubles = line, "TP2", {"memory_unbalanced": line}
    for n in range(4):
        size, name = (81_920, "NVIDIA A100-SXM4-80GB") if n > 1 else (40_960, "NVIDIA A100-SXM4-40GB")
        e.gpus.append(GpuFacts(n, 0, 4, 55.0, 400.0, size, name, processes_known=True))
    return e


@case("blind A10 three pipeline stages", KIND, first="WARMUP_STALL COLLECTIVE_DIVERGED", never=HEALTHY)
def a10() -> Evidence:
    e = b.server(1)
    e.processes += [b.process(201, "scheduler", rank=0), b.process(202, "scheduler", rank=0)]
    for n, p in enumerate(b.all_ranks(e)):
        p.label = f"PP{n} TP0"
    b.launcher(e).pipes += [PipeEnd(11, 9001, "r", [201]), PipeEnd(12, 9002, "r", [202])]
    e.log.ranks = [
        RankMarks(f"PP{n} TP0", 0, "capture", [*b.AFTER_WEIGHTS, "capture begin", "capture end"]) for n in range(3)
    ]
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


@case(
    "blind A11 template renders for ever", KIND, first="API_LOOP_BLOCKED", never=HEALTHY | {"RANK_SPIN", "KERNEL_SPIN"}
)
def a11() -> Evidence:
    e = b.vllm(2)
    parent = b.launcher(e)
    parent.name = "VLLM::APIServer"
    b.spin(parent)
    e.http = [HttpProbe("/health", 0, 5.0, "timeout"), HttpProbe("/v1/models", 0, 5.0, "timeout")]
    e.log.quiet_seconds, e.uptime = 700.0, 50_000.0
    e.stacks = [
        Stack(
            100,
            "launcher",
            "",
            "active+gil",
            [
                "_search (regex/regex.py:1)",
                "apply_chat_template (chat_utils.py:1590)",
                "create_chat_completion (serving_chat.py:210)",
            ],
        )
    ]
    b.gpus(e, 0, 0)
    e.deep = True
    return e


@case(
    "blind A13 imports from a dead filer",
    KIND,
    first="REMOTE_FS_HANG IMPORT_STALL",
    never=HEALTHY | {"PARENT_WAITS_READY"},
)
def a13() -> Evidence:
    e = Evidence(Target(4100, ranks=8, port=30000, log="/scratch/run.out"), 1796000000.0, 6.0, uptime=1500.0)
    p = ProcessFacts(
        4100,
        1,
        "launcher",
        "python3.11",
        77,
        "D",
        state_before="D",
        cmdline="python3.11 -m sglang.launch_server --tp 8",
    )
    p.main = ThreadFacts(4100, "python3.11", "D", wchan="rpc_wait_bit_killable", syscall="262 0xffffff9c 0x7f 0x7f 0x0")
    p.kernel_stack = [
        "rpc_wait_bit_killable",
        "__rpc_execute",
        "nfs4_call_sync_sequence",
        "nfs4_proc_getattr",
        "vfs_statx",
    ]
    e.processes = [p]
    e.log = LogFacts("/scratch/run.out", True, 0, quiet_seconds=1490.0, phase="imports")
    e.port = PortFacts(30000)
    e.kernel_log = ["[88123.0] nfs: server filer-2 not responding, still trying"]
    return e


@case("blind S5 vllm worker stopped", KIND, first="STOPPED_PROCESS", never=HEALTHY | {"DEAD_READER_RING_FULL"}, rank=3)
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


@case("blind B1 vllm loader asleep", KIND, first="LOADER_DEADLOCK", never=HEALTHY | {"LOADING_SLOW"}, phase="weights")
def b1() -> Evidence:
    e = b.vllm_starting(4)
    b.silent(e, 1500)
    e.log.phase = "weights"
    for p in b.all_ranks(e):
        p.rss = 180 * GIB
        b.blocked_in(p, "futex_wait_queue_me", "202 0x7f 0x189")
    e.memory.total, e.memory.available = 768 * GIB, 6 * GIB
    e.memory.pressure_some, e.memory.pressure_full = 78.0, 55.0
    e.pressure = [Pressure("memory", "host", 78.0, 55.0)]
    frames = [
        "wait (threading.py:327)",
        "result (concurrent/futures/_base.py:451)",
        "multi_thread_safetensors_weights_iterator (weight_utils.py:760)",
        "load_weights (default_loader.py:290)",
    ]
    b.stacks(e, {0: frames, 1: frames, 2: frames})
    b.failed_probe(e, "py-spy 203", "time limit")
    e.log.tail = [
        "(Worker_TP0 pid=200) INFO 11-02 10:00:01 [gpu_model_runner.py:3010] Starting to load model /models/m..."
    ]
    b.gpus(e, 0, 0, 0, 0)
    return e


@case("blind B4 lustre page faults", KIND, first="LOADING_SLOW", never=HANGS | {"REMOTE_FS_HANG", "DRIVER_D_STATE"})
def b4() -> Evidence:
    e = b.server(8)
    b.at_phase(e, "weights", "init begin", "init end", "weights begin")
    b.silent(e, 2400)
    for p in b.all_ranks(e):
        b.disk_sleep(p, "folio_wait_bit_common", "filemap_fault", "ll_filemap_fault", "__do_fault")
        p.state_before = "R" if p.pid % 2 else "D"
        p.cpu, p.majflt_delta, p.rss_delta, p.rchar_delta = 0.07, 3100, 65_000_000, 412
    e.disks.append(DiskFacts("model", "/lustre/models", 10**14, 10**15, 10**9, "lustre"))
    e.log.tail = ["Multi-thread loading shards: 100% Completed | 96/96"]
    b.gpus(e, *[0] * 8)
    return e


@case("blind B7 one rank still reads juicefs", KIND, first="LOADING_SLOW", never=HANGS | {"REMOTE_FS_HANG"})
def b7() -> Evidence:
    e = b.server(4)
    b.at_phase(e, "weights", "init begin", "init end", "weights begin")
    b.silent(e, 800)
    for n in (0, 2, 3):
        e.log.ranks[n].marks.append("weights end")
        e.log.ranks[n].phase = "kv_pool"
    p = b.rank(e, 1)
    p.rchar_delta, p.cpu = 21_000_000, 0.05
    b.blocked_in(p, "request_wait_answer", "17 0x2c 0x7f", 44)
    e.disks.append(DiskFacts("model", "/jfs", 10**14, 10**15, 10**9, "fuse.juicefs"))
    return e


@case("blind B6b ptxas after the weights", KIND, first="JIT_COMPILING", never=HANGS | {"LOADING_SLOW"})
def b6b() -> Evidence:
    e = b.server(2)
    b.silent(e, 700)
    e.processes.append(b.process(400, "compiler", ppid=201, name="ninja"))
    for n in range(6):
        c = b.process(410 + n, "compiler", ppid=400, name="ptxas" if n % 2 else "cudafe++", start_time=900)
        b.spin(c)
        e.processes.append(c)
    b.gpus(e, 0, 0)
    e.lock_files = [
        LockFile("/root/.cache/flashinfer/0.3.1/90a/cached_ops/tmp/fused_moe.lock", 690.0, 201, locked=True)
    ]
    return e
