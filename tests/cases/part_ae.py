"""Part AE: public reports that are in no other part, by an author who had not read the signatures.

Loads and compilers.
"""

from __future__ import annotations

from cases import tree as t
from cases.logtext import LOAD, sgl, vllm_log
from cases.table import DEAD, HANGS, HEALTHY, case
from fleetdump.agent.evidence_host import (
    DiskFacts,
    LockFacts,
    LockFile,
)
from fleetdump.agent.evidence_process import ThreadFacts
from fleetdump.agent.evidence_types import Evidence

MIB, GIB = 2**20, 2**30


@case(
    "fourth set, load begins and nothing more",
    "sglang#3419",
    first="LOADER_DEADLOCK PARENT_WAITS_READY",
    never=HEALTHY | {"LOADING_SLOW"} | DEAD,
)
def load_begins() -> Evidence:
    e = t.sglang(1, "weights")
    t.logged(e, sgl(1, *LOAD), 3900.0)
    t.sleep(t.head(e), t.PIPE, 27)
    t.cards(e, [0], 24.0, 450.0, 1400)
    return e


@case("fourth set, API server gave up while shards load", "vllm#35547", first="TIMEOUT_TOO_SHORT", never=HEALTHY)
def gave_up_loading() -> Evidence:
    e = t.vllm(8)
    text = vllm_log("10:01 [core.py:77] Initializing a V1 LLM engine (v0.15.1) with config: model='/models/x'")
    text += "\n".join(
        f"Loading safetensors checkpoint shards:  {n * 100 // 163}% Completed | {n}/163 [09:{n - 80}<05:20,  5.63s/it]"
        for n in range(100, 107)
    )
    text += (
        "\n(ApiServer_5 pid=30500) Process ApiServer_5:\n(ApiServer_5 pid=30500) Traceback (most recent call last):\n"
        '(ApiServer_5 pid=30500)   File "vllm/v1/engine/core_client.py", line 540, in __init__\n'
        "(ApiServer_5 pid=30500) TimeoutError: Timed out waiting for engines to send initial message on input socket.\n"
    )
    t.logged(e, text, 6.0)
    e.processes = e.processes[1:]
    e.launcher_alive, e.uptime = False, 620.0
    for p in t.ranks_of(e):
        p.read_bytes_delta, p.rss_delta = 800 * MIB, 700 * MIB
    return e


@case("fourth set, API server gave up while DeepGEMM compiles", "vllm#32116", first="TIMEOUT_TOO_SHORT", never=HEALTHY)
def gave_up_compiling() -> Evidence:
    e = t.vllm(2)
    text = vllm_log(
        "10:01 [core.py:77] Initializing a V1 LLM engine (v0.13.0) with config: model='/models/x'",
        "12:40 [default_loader.py:308] Loading weights took 140.22 seconds",
        "12:55 [deep_gemm_warmup.py:301] DeepGEMM warmup (relaxed) in progress",
    )
    text += (
        "(ApiServer_0 pid=30500) TimeoutError: Timed out waiting for engine core processes to start. This is often "
        "caused by slow weight loading for large models. Waited 600s (configured by VLLM_ENGINE_READY_TIMEOUT_S).\n"
    )
    t.logged(e, text, 45.0)
    e.processes = e.processes[1:]
    e.launcher_alive = False
    for n, p in enumerate(t.ranks_of(e)):
        t.burn(p)
        for k in range(4):
            compiler = t.child(33_000 + 10 * n + k, "compiler", "cicc", "R", ppid=p.pid)
            t.burn(compiler)
            e.processes.append(compiler)
    return e


@case(
    "fourth set, object store fills its cache disk",
    "vllm#31726",
    first="LOADING_SLOW",
    never=HANGS | {"DISK_FULL", "REMOTE_FS_HANG"},
)
def object_store() -> Evidence:
    e = t.vllm(8, quiet=48.0)
    text = vllm_log("10:01 [core.py:77] Initializing a V1 LLM engine (v0.10.1) with config: model='/bucket/x'")
    text += "Loading safetensors checkpoint shards:  31% Completed | 37/118 [21:06<1:04:13, 47.57s/it]\n"
    t.logged(e, text, 48.0)
    e.disks = [
        DiskFacts("root", "/", 3 * GIB, 500 * GIB, 9_000_000, "overlay"),
        DiskFacts("model", "/bucket", 2**50, 2**50, -1, "fuse.goofys"),
    ]
    for p in t.ranks_of(e):
        t.disk(p, "folio_wait_bit_common", "filemap_fault", "do_fault")
        p.state_before = "S"
        p.majflt_delta, p.read_bytes_delta, p.rss_delta = 230, 0, 29 * MIB
    return e


@case(
    "fourth set, broadcast ring is full while shards load",
    "gpustack#3888",
    first="LOADING_SLOW",
    never=HANGS | {"DEAD_READER_RING_FULL", "SHM_SMALL"},
)
def ring_while_loading() -> Evidence:
    e = t.vllm(8)
    text = vllm_log(
        "10:01 [core.py:77] Initializing a V1 LLM engine (v0.11.0) with config: model='/models/x'",
        *[
            f"{11 + n}:02 [shm_broadcast.py:466] No available shared memory broadcast block found in 60 seconds. This "
            "typically happens when some processes are hanging or doing some time-consuming work (e.g. compilation)."
            for n in range(9)
        ],
    )
    t.logged(e, text, 20.0)
    for n, p in enumerate(t.ranks_of(e)):
        t.disk(p, "io_schedule", "folio_wait_bit_common", "filemap_read")
        p.state_before = "R"
        p.rchar_delta = p.read_bytes_delta = (90 + n) * MIB
    return e


@case(
    "fourth set, cold image streams its files",
    "kind of A13",
    first="BUSY_NOT_HUNG LOADING_SLOW HEALTHY",
    never=HANGS | {"IMPORT_STALL", "REMOTE_FS_HANG"},
)
def cold_image() -> Evidence:
    e = t.sglang(0, "imports", (), quiet=230.0, uptime=240.0)
    e.target.ranks = 8
    e.log.lines, e.log.bytes, e.log.ranks = 2, 180, []
    head = t.head(e)
    head.pipes = []
    t.disk(head, "folio_wait_bit_common", "filemap_read", "vfs_read")
    head.state_before = "S"
    head.rchar_delta, head.read_bytes_delta, head.rss_delta = 41 * MIB, 40 * MIB, 9 * MIB
    return e


@case(
    "fourth set, baton held in an import", "flashinfer#2071", first="JIT_STALE_LOCK", never=HEALTHY | {"IMPORT_STALL"}
)
def baton_in_import() -> Evidence:
    e = t.sglang(4, "imports", (), quiet=1300.0)
    e.log.lines = 31
    where = [
        "wait (torch/utils/file_baton.py:50)",
        "_jit_compile (torch/utils/cpp_extension.py:2156)",
        "load_inline (torch/utils/cpp_extension.py:2057)",
        "<module> (tvm_ffi/_optional_torch_c_dlpack.py:566)",
        "_call_with_frames_removed (<frozen importlib._bootstrap>:488)",
    ]
    for p in t.ranks_of(e):
        t.sleep(p, t.SLEEP, voluntary=10.0)
    t.dump(e, dict.fromkeys(range(4), where))
    e.lock_files = [LockFile("/root/.cache/torch_extensions/py312_cu129/c_dlpack/lock", 86_000.0)]
    return e


@case(
    "fourth set, baton held in the first request",
    "sglang#38408",
    first="JIT_STALE_LOCK",
    never=HEALTHY | {"KERNEL_SPIN", "MISSING_RANK"},
)
def baton_in_request() -> Evidence:
    e = t.served(t.sglang(1, "serving", quiet=1750.0), 503, 200, running=1)
    t.sleep(t.rank(e, 0), t.SLEEP, voluntary=9.6)
    t.rank(e, 0).cpu = 0.001
    t.cards(e, [0], 118.0, 700.0, 61_000)
    e.lock_files = [LockFile("/root/.cache/torch_extensions/py310_cu130/sglang_expert_pack/lock", 9_800.0)]
    t.dump(
        e,
        {
            0: [
                "wait (torch/utils/file_baton.py:52)",
                "_jit_compile (torch/utils/cpp_extension.py:2170)",
                "load_jit (sglang/jit_kernel/utils.py:88)",
                "forward (sglang/srt/layers/quantization/mxfp4.py:410)",
                "event_loop_normal (scheduler.py:1100)",
            ]
        },
    )
    return e


@case(
    "fourth set, a second server builds the same kernels",
    "sglang-omni#1194",
    first="LOCK_WAIT",
    never=HEALTHY | {"JIT_STALE_LOCK", "HUB_LOCK"},
)
def other_server_builds() -> Evidence:
    e = t.sglang(2, "jit", quiet=500.0)
    path = "/root/.cache/flashinfer/0.6.1/100a/cached_ops/fused_moe_100/fused_moe_100.lock"
    for p in t.ranks_of(e):
        t.sleep(p, ("locks_lock_inode_wait", "73 0x2c 0x2"))
        e.locks.append(LockFacts("FLOCK", 8812, 52_001, p.pid, path, "ext4"))
    e.lock_files = [LockFile(path, 480.0, 52_001, locked=True, fstype="ext4")]
    return e


@case(
    "fourth set, builder waits for those who wait for it",
    "kind of H8 cross-lock",
    first="JIT_COLLECTIVE_CROSSLOCK",
    never=HEALTHY | {"JIT_STALE_LOCK"},
)
def crosslock() -> Evidence:
    e = t.sglang(8, "jit", quiet=1000.0)
    path = "/home/u/.cache/flashinfer/0.5.2/90a/cached_ops/trtllm_comm/trtllm_comm.lock"
    barrier = ["barrier (torch/distributed/distributed_c10d.py:4100)", "build_comm (flashinfer/comm/trtllm_ar.py:70)"]
    waits = ["acquire (filelock/_api.py:330)", "build (flashinfer/jit/core.py:120)", "init_workspace (comm.py:40)"]
    for p in t.ranks_of(e):
        if p.rank:
            t.sleep(p, ("locks_lock_inode_wait", "73 0x31 0x2"))
            e.locks.append(LockFacts("FLOCK", 771, t.pid_of(0), p.pid, path, "xfs"))
    t.sleep(t.rank(e, 0), t.EPOLL)
    t.dump(e, {n: waits if n else barrier for n in range(8)})
    e.lock_files = [LockFile(path, 990.0, t.pid_of(0), locked=True, fstype="xfs")]
    return e


@case(
    "fourth set, hub lock without a line", "huggingface_hub#2543", first="HUB_LOCK", never=HEALTHY | {"JIT_STALE_LOCK"}
)
def hub_lock_silent() -> Evidence:
    e = t.sglang(4, "weights", ("init begin", "init end", "weights begin"), quiet=2000.0)
    where = [
        "acquire (filelock/_api.py:344)",
        "WeakFileLock (huggingface_hub/utils/_fixes.py:98)",
        "_hf_hub_download_to_cache_dir (huggingface_hub/file_download.py:1100)",
        "download_weights_from_hf (weight_utils.py:300)",
    ]
    for p in t.ranks_of(e):
        t.sleep(p, t.SLEEP, voluntary=20.0)
    t.dump(e, dict.fromkeys(range(4), where))
    e.lock_files = [LockFile("/nfs/hf/hub/.locks/models--o--big/9ab.lock", 400_000.0, use="hub", fstype="nfs")]
    return e


@case(
    "fourth set, ring is full while a worker compiles",
    "vllm#27313",
    first="JIT_COMPILING",
    never=HANGS | {"DEAD_READER_RING_FULL"},
)
def ring_while_compiling() -> Evidence:
    e = t.served(t.vllm(2, quiet=30.0), 200, 200, running=1)
    t.logged(
        e,
        vllm_log(
            "10:01 [core.py:77] Initializing a V1 LLM engine (v0.11.0) with config: model='/models/x'",
            "12:49 [monitor.py:34] torch.compile takes 39.60 s in total",
            "12:59 [kv_cache_utils.py:1087] GPU KV cache size: 162,704 tokens",
            "43:49 [shm_broadcast.py:466] No available shared memory broadcast block found in 60 seconds. This "
            "typically "
            "happens when some processes are hanging or doing some time-consuming work (e.g. compilation).",
        ),
        30.0,
    )
    late = t.rank(e, 1)
    t.burn(late, user=0.7)
    for k, name in enumerate(("nvcc", "cicc", "ptxas")):
        compiler = t.child(34_000 + k, "compiler", name, "R" if k else "S", ppid=late.pid)
        if k:
            t.burn(compiler)
        e.processes.append(compiler)
    t.burn(t.rank(e, 0), user=0.8)
    t.cards(e, [100, 0], 160.0, 700.0)
    return e


@case("fourth set, inductor's pool is at work", "vllm#15360", first="JIT_COMPILING", never=HANGS | {"LOADING_SLOW"})
def inductor_pool() -> Evidence:
    e = t.vllm(1, quiet=95.0)
    t.logged(
        e,
        vllm_log(
            "10:01 [core.py:65] Initializing a V1 LLM engine (v0.8.1) with config: model='/models/x'",
            "11:10 [loader.py:429] Loading weights took 22.31 seconds",
            "11:21 [backends.py:409] Using cache directory: /root/.cache/vllm/torch_compile_cache/3f/rank_0_0 "
            "for vLLM's torch.compile",
            "11:21 [backends.py:419] Dynamo bytecode transform time: 10.98 s",
        ),
        95.0,
    )
    for k in range(6):
        worker = t.child(35_000 + k, "compile_worker", "python3", "R", ppid=t.pid_of(0))
        t.burn(worker, cpu=0.8)
        e.processes.append(worker)
    return e


@case(
    "fourth set, DeepGEMM compiles under traffic",
    "sglang#10856",
    first="JIT_COMPILING BUSY_NOT_HUNG HEALTHY",
    never=HANGS | {"API_LOOP_BLOCKED"},
)
def deepgemm_under_traffic() -> Evidence:
    e = t.served(t.sglang(8, "serving", quiet=2.0), 503, 200, running=2)
    for p in t.ranks_of(e):
        t.burn(p, user=0.9)
        p.threads = [ThreadFacts(p.pid + 500 + k, "pt_main_thread", "R", 0.9, 1.0, 0.99) for k in range(3)]
    text = (
        "[2026-11-28 05:40:01 TP0] Entering DeepGEMM JIT Pre-Compile session. It may take a long time "
        "(typically 10-20 mins)"
        " if you have not run `sglang.compile_deep_gemm`.\n"
        "DeepGEMM warmup:  11%|#1        | 1790/16384 [02:40<21:40, 11.2it/s]\r"
        "[2026-11-28 05:48:14] Health check failed. Server couldn't get a response from detokenizer for last 20 "
        "seconds. "
        "tic start time: 05:47:54. last_heartbeat time: 05:42:53\n"
    )
    t.logged(e, text, 2.0, more="DeepGEMM warmup:  12%|#2        | 1990/16384 [02:58<21:02, 11.4it/s]\r")
    e.log.ready, e.log.phase, e.log.running_requests = True, "serving", 2
    e.log.server_marks = ["http start", "http open", "model info", "ready"]
    t.cards(e, [0] * 8, 125.0, 700.0)
    return e
