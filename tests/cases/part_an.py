"""Part AN: the seventh set: compilers, locks and graph capture."""

from __future__ import annotations

from cases import gpuhost as g
from cases import tree as t
from cases.table import DEAD, HANGS, HEALTHY, case
from fleetdump.agent.evidence_host import DiskFacts, LockFile
from fleetdump.agent.evidence_process import PipeEnd, ThreadFacts
from fleetdump.agent.evidence_types import Evidence


@case(
    "seventh baton",
    "pytorch/pytorch#189339",
    first="JIT_STALE_LOCK",
    never=HEALTHY | {"JIT_COMPILING", "LOCK_WAIT", "HUB_LOCK"},
)
def baton_of_a_cancelled_job() -> Evidence:
    log = g.start(8, g.LOADED)
    log.each("Using /root/.cache/torch_extensions/py312_cu128 as PyTorch extensions root...")
    e = g.sgl(8, g.LOADED)
    t.logged(e, log.text(), 1260.0)
    for p in t.ranks_of(e):
        t.sleep(p, g.NANOSLEEP, voluntary=9.9)
    e.lock_files = [
        LockFile("/root/.cache/torch_extensions/py312_cu128/moe_fused_gate/lock", 432_000.0),
        LockFile("/root/.triton/cache/x/.lock", 90.0, 0),
    ]
    g.h100(e, 0, 121.0)
    g.lacking(e, "py-spy", "strace")
    e.deep = True
    return e


@case(
    "seventh lock over NFS",
    "flashinfer-ai/flashinfer#3777",
    first="LOCK_WAIT",
    never=HEALTHY | {"JIT_COMPILING", "REMOTE_FS_HANG"},
)
def build_lock_granted_to_another_host() -> Evidence:
    log = g.start(8, g.POOL)
    e = g.sgl(8, g.POOL)
    t.logged(e, log.text(), 930.0)
    path = "/home/svc/.cache/flashinfer/0.4.1/90a/cached_ops/tmp/batch_prefill_with_kv_cache_dtype_bf16.lock"
    for p in t.ranks_of(e):
        t.sleep(p, ("nfs4_retry_setlk", "73 0x5c 0x2"), 92)
        p.kernel_stack = ["nfs4_retry_setlk", "nfs4_proc_lock", "do_setlk", "nfs_flock", "__x64_sys_flock"]
    e.lock_files = [LockFile(path, 2900.0, t.pid_of(0), "compile", "nfs4")]
    e.disks = [d for d in e.disks if d.use != "home"] + [DiskFacts("home", "/home/svc", 10**13, 10**14, -1, "nfs4")]
    g.h100(e, 0, 119.0)
    g.lacking(e, "py-spy")
    return e


@case(
    "seventh compile loop",
    "vllm-project/vllm-ascend#9287",
    first="JIT_COMPILING BUSY_NOT_HUNG",
    never=HANGS | DEAD | {"DEAD_READER_RING_FULL", "API_LOOP_BLOCKED", "UNKNOWN"},
)
def vllm_compiles_for_minutes() -> Evidence:
    e = g.furnish(t.vllm(4))
    e.processes = [p for p in e.processes if p.role != "detokenizer"]
    text = "INFO 11-27 22:14:01 [__init__.py:216] Automatically detected platform cuda.\n"
    text += (
        "(EngineCore_DP0 pid=31001) INFO 11-27 22:14:31 [core.py:77] Initializing a V1 LLM engine (v0.11.2) "
        "with config: model='/models/q'\n"
    )
    text += "".join(
        (
            f"(Worker_TP{n} pid={t.pid_of(n)}) INFO 11-27 22:16:02 [gpu_model_runner.py:2653] Model loading "
            f"took 57.3 GiB and 71.2 seconds\n"
        )
        for n in range(4)
    )
    text += (
        "(Worker_TP0 pid=31011) INFO 11-27 22:16:20 [backends.py:548] Using cache directory: "
        "/root/.cache/vllm/torch_compile_cache/9a3/rank_0_0/backbone for vLLM's torch.compile\n"
    )
    text += "".join(
        (
            f"(EngineCore_DP0 pid=31001) INFO 11-27 22:{17 + n}:20 [shm_broadcast.py:466] No available shared "
            f"memory broadcast block found in 60 seconds. This typically happens when some processes "
            f"are hanging or doing some time-consuming work (e.g. compilation).\n"
        )
        for n in range(5)
    )
    t.logged(e, text, 33.0)
    for p in t.ranks_of(e):
        t.burn(p, cpu=0.98, user=0.97, voluntary=14.0)
    for n in range(24):
        p = t.child(32_000 + n, "compile_worker", "python3", ppid=t.pid_of(n % 4))
        if n % 3 == 0:
            t.burn(p, 0.9, 0.9)
            p.cpu = 0.9
        e.processes.append(p)
    g.h100(e, 0, 122.0)
    g.lacking(e, "py-spy", "strace")
    return e


@case(
    "seventh nvrtc",
    "sgl-project/sglang#9867",
    first="JIT_COMPILING BUSY_NOT_HUNG",
    never=HANGS | DEAD | {"UNKNOWN", "KERNEL_SPIN", "CPU_STARVED"},
)
def kernels_compiled_inside_the_ranks() -> Evidence:
    log = g.start(8, g.POOL)
    log.say(
        "Entering DeepGEMM JIT Pre-Compile session. It may take a long time (typically 10-20 mins) if "
        "you have not run `sglang.compile_deep_gemm`.",
        "TP0",
    )
    log.raw("DeepGEMM warmup:   0%|          | 0/16384 [00:00<?, ?it/s]")
    e = g.sgl(8, g.POOL)
    t.logged(e, log.text(), 340.0)
    for n, p in enumerate(t.ranks_of(e)):
        t.sleep(p, t.FUTEX)
        if n == 0:
            p.cpu = 15.6
            p.threads = [
                ThreadFacts(p.pid + 2000 + k, "python3", "R", 0.97, 0.99, 0.96, 2.0, "0", "running") for k in range(16)
            ] + p.threads
    t.dump(
        e,
        {
            0: [
                "wait (threading.py:355)",
                "result (concurrent/futures/_base.py:451)",
                "execute (sglang/srt/layers/deep_gemm_wrapper/compile_utils.py:181)",
                "_compile_deep_gemm_one_type_all (sglang/srt/layers/deep_gemm_wrapper/compile_utils.py:140)",
            ],
            **{
                n: [
                    "barrier (torch/distributed/distributed_c10d.py:4818)",
                    "_maybe_compile_deep_gemm_one_type_all (sglang/srt/layers/deep_gemm_wrapper/compile_utils.py:118)",
                ]
                for n in range(1, 8)
            },
        },
    )
    e.stacks[0].active = {
        f"ThreadPoolExecutor-3_{k}": [
            "build (deep_gemm/jit/compiler.py:151)",
            "compile (deep_gemm/jit_kernels/gemm.py:77)",
        ]
        for k in range(16)
    }
    g.h100(e, 0, 120.0)
    g.lacking(e, "strace")
    return e


@case(
    "seventh crosslock",
    "modelscope/ms-swift#5763",
    first="JIT_COLLECTIVE_CROSSLOCK",
    never=HEALTHY | {"JIT_COMPILING", "JIT_STALE_LOCK"},
)
def lock_held_across_a_barrier() -> Evidence:
    e = g.sgl(4, g.LOADED, quiet=1500.0)
    holder = t.rank(e, 0)
    t.sleep(holder, t.FUTEX)
    for n in (1, 2, 3):
        t.sleep(t.rank(e, n), g.NANOSLEEP, voluntary=20.0)
    e.lock_files = [
        LockFile(
            "/root/.cache/tvm-ffi/sgl_kernel_jit_hadamard_9c1d/lock", 1497.0, holder.pid, "compile", "overlay", True
        )
    ]
    t.dump(
        e,
        {
            0: [
                "barrier (torch/distributed/distributed_c10d.py:4818)",
                "barrier (sglang/srt/distributed/parallel_state.py:1322)",
                "load_jit (sglang/jit_kernel/utils.py:233)",
            ],
            **{
                n: [
                    "acquire (filelock/_api.py:344)",
                    "__enter__ (filelock/_api.py:375)",
                    "load_jit (sglang/jit_kernel/utils.py:214)",
                ]
                for n in (1, 2, 3)
            },
        },
    )
    g.h100(e, 0, 121.0)
    return e


@case(
    "seventh sidecar",
    "pytorch/pytorch#189290",
    first="MISSING_RANK PARENT_WAITS_READY PIPE_EOF_IMPOSSIBLE",
    rank=1,
    never=HEALTHY | {"JIT_COMPILING", "PARENT_WAITS_DEAD_RANK", "RANK_CRASHED"},
)
def compile_sidecar_of_one_rank_is_dead() -> Evidence:
    log = g.start(4, g.CAPTURE)
    log.raw("Capturing batches (bs=64 avail_mem=4.55 GB):   0%|          | 0/12 [00:00<?, ?it/s]")
    e = g.sgl(4, g.CAPTURE)
    t.logged(e, log.text(), 1900.0)
    for p in t.ranks_of(e):
        t.sleep(p, t.FUTEX)
    one = t.rank(e, 1)
    sidecar = t.child(32_100, "compile_worker", "pt_main_thread", ppid=one.pid)
    g.zombie(sidecar, 11)
    e.processes.append(sidecar)
    for n in range(8):
        e.processes.append(t.child(32_110 + n, "compile_worker", "pt_main_thread", ppid=1))
    one.pipes = [PipeEnd(61, 77_120, "r", [32_110 + n for n in range(8)], own_writer=False)]
    t.dump(
        e,
        {
            1: [
                "wait (threading.py:355)",
                "result (concurrent/futures/_base.py:451)",
                "wait (torch/_inductor/async_compile.py:571)",
                "compile_to_module (torch/_inductor/graph.py:2275)",
                "capture_one_batch_size (sglang/srt/model_executor/cuda_graph_runner.py:655)",
            ],
            **{
                n: [
                    "barrier (torch/distributed/distributed_c10d.py:4818)",
                    "barrier (sglang/srt/distributed/parallel_state.py:1322)",
                    "capture_one_batch_size (sglang/srt/model_executor/cuda_graph_runner.py:700)",
                ]
                for n in (0, 2, 3)
            },
        },
    )
    e.kernel_log = [
        (
            "[70122.118] pt_main_thread[32100]: segfault at 0 ip 00007f1e8c2a11f3 sp 00007ffd3b6aa0d0 error "
            "4 in libtriton.so[7f1e8a000000+9a31000]"
        )
    ]
    g.h100(e, 0, 122.0)
    return e
