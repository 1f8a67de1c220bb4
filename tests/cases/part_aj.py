"""Part AJ: a sixth set, kinds A to F of SGLang once more, in forms that no other part has."""

from __future__ import annotations

from cases import builder as b
from cases import tree as t
from cases.logtext import CAPTURE, INIT, LOAD, POOLED, sgl, vllm_log
from cases.table import DEAD, HANGS, HEALTHY, case
from fleetdump.agent.evidence_engine import HttpProbe, PortFacts
from fleetdump.agent.evidence_host import DiskFacts, GpuFacts, GpuProcess, MemoryFacts, Pressure
from fleetdump.agent.evidence_process import SocketFacts, Stack
from fleetdump.agent.evidence_types import Evidence

MIB, GIB = 2**20, 2**30


@case(
    "sixth set, second stage was aborted in service",
    "sglang#21486 kind",
    first="API_ALIVE_ENGINE_DEAD",
    never=HEALTHY | {"OOM_KILLED"},
)
def second_stage() -> Evidence:
    e = t.served(t.sglang(4, "serving", quiet=700.0), 200, 200)
    for n, p in enumerate(t.ranks_of(e)):
        p.label, p.rank = f"PP{n // 2} TP{n % 2}", n % 2
    e.target.ranks = 2
    e.log.ranks = []
    b.died_of(t.ranks_of(e)[2], 6)
    return e


@case("sixth set, idle and asleep", "sglang --sleep-on-idle", first="IDLE_OK", never=HANGS | {"UNKNOWN"})
def asleep() -> Evidence:
    e = t.served(t.sglang(2, "serving", quiet=50_000.0))
    for p in t.ranks_of(e):
        t.sleep(p, t.POLL, voluntary=1.0)
        p.cpu = 0.002
    t.cards(e, [0, 0], 68.0)
    return e


@case(
    "sixth set, Triton's cache on NFS",
    "flashinfer#993 kind",
    first="LOCK_WAIT",
    never=HEALTHY | {"REMOTE_FS_HANG", "JIT_STALE_LOCK"},
)
def triton_on_nfs() -> Evidence:
    e = t.sglang(2, "jit", quiet=700.0)
    for p in t.ranks_of(e):
        t.sleep(p, ("nfs4_proc_lock", "72 0x2a 0x7"))
    return e


@case(
    "sixth set, one rank sleeps in uvm",
    "open-gpu-kernel-modules#1333 kind",
    first="DRIVER_D_STATE",
    never=HEALTHY | {"REMOTE_FS_HANG"},
    rank=3,
)
def in_uvm() -> Evidence:
    e = t.sglang(4, "init", ("init begin",), quiet=1000.0)
    t.disk(t.rank(e, 3), "__mutex_lock", "uvm_api_register_gpu", "uvm_unlocked_ioctl_entry", "__x64_sys_ioctl")
    return e


@case(
    "sixth set, launcher asks the hub for a tokenizer", "row 28", first="HUB_BLOCKED", never=HEALTHY | {"IMPORT_STALL"}
)
def asks_for_tokenizer() -> Evidence:
    e = t.sglang(0, "imports", (), quiet=600.0, uptime=640.0)
    e.target.ranks, e.log.ranks, e.log.lines = 4, [], 3
    head = t.head(e)
    head.pipes = []
    head.sockets = [SocketFacts(12, "SYN_SENT", "10.0.0.4:41822", "3.165.190.77:443")]
    t.sleep(head, t.POLL, 12)
    e.stacks = [
        Stack(
            t.HEAD,
            "launcher",
            "",
            "idle",
            [
                "create_connection (urllib3/util/connection.py:73)",
                "_new_conn (urllib3/connection.py:200)",
                "hf_hub_download (huggingface_hub/file_download.py:1000)",
                "get_tokenizer (hf_transformers_utils.py:480)",
            ],
        )
    ]
    e.deep = True
    return e


@case("sixth set, peer of a download hung up", "row 28", first="HUB_BLOCKED", never=HEALTHY | {"LOADING_SLOW"})
def hung_up() -> Evidence:
    e = t.sglang(2, "weights", ("init begin", "init end", "weights begin"), quiet=1200.0)
    for p in t.ranks_of(e):
        p.sockets = [SocketFacts(60 + n, "CLOSE_WAIT", f"10.0.0.4:{43_000 + n}", "18.165.0.8:443") for n in range(4)]
    return e


@case(
    "sixth set, checkpoint does not fit the host",
    "sglang#25748 kind",
    first="LOADER_DEADLOCK",
    never=HEALTHY | {"LOADING_SLOW"},
)
def does_not_fit() -> Evidence:
    e = t.sglang(8, "weights", ("init begin", "init end", "weights begin"), quiet=900.0)
    e.memory = MemoryFacts(4 * GIB, 1000 * GIB, 0, [], 90.0, 55.0)
    e.pressure = [Pressure("memory", "host", 90.0, 55.0)]
    for p in t.ranks_of(e):
        p.rss = 118 * GIB
        p.majflt_delta = 3
    return e


@case("sixth set, a fast disk all the same", "kind of B2", first="LOADING_SLOW", never=HANGS | {"REMOTE_FS_HANG"})
def fast_disk() -> Evidence:
    e = t.sglang(8, "weights", quiet=70.0)
    t.logged(
        e,
        sgl(8, *LOAD) + "Loading safetensors checkpoint shards:   3% Completed | 5/163 [00:41<21:50,  8.3s/it]\n",
        70.0,
    )
    for p in t.ranks_of(e):
        t.disk(p, "folio_wait_bit_common", "filemap_fault", "do_read_fault")
        p.read_bytes_delta, p.majflt_delta = 600 * MIB, 4000
    return e


@case("sixth set, seven wait for the one that reads", "kind of B7", first="LOADING_SLOW", never=HANGS)
def one_reads() -> Evidence:
    e = t.sglang(8, "weights", quiet=200.0)
    t.logged(
        e,
        sgl(8, *LOAD) + "Loading safetensors checkpoint shards: 100% Completed | 62/62 [10:02<00:00,  9.7s/it]\n",
        200.0,
    )
    t.rank(e, 6).read_bytes_delta = t.rank(e, 6).rchar_delta = 160 * MIB
    return e


@case("sixth set, one rank compiles in the capture", "kind of C1", first="JIT_COMPILING", never=HANGS, rank=2)
def compiles_in_capture() -> Evidence:
    e = t.sglang(4, "capture", quiet=400.0)
    t.logged(e, sgl(4, *CAPTURE), 400.0)
    compiler = t.child(40_000, "compiler", "ptxas", "R", ppid=t.pid_of(2))
    t.burn(compiler)
    e.processes.append(compiler)
    return e


@case(
    "sixth set, one rank tunes on",
    "row 48",
    first="COLLECTIVE_DIVERGED MISSING_RANK PARENT_WAITS_READY",
    never=HEALTHY | DEAD,
    rank=1,
)
def tunes_on() -> Evidence:
    e = t.sglang(4, "jit", quiet=900.0)
    t.logged(e, sgl(4, *POOLED), 900.0)
    wait = ["barrier (torch/distributed/distributed_c10d.py:4600)", "flashinfer_autotune (model_runner.py:1800)"]
    tune = [
        "synchronize (torch/cuda/__init__.py:1083)",
        "choose_one (flashinfer/autotuner.py:420)",
        "trtllm_moe (fused_moe.py:900)",
    ]
    t.dump(e, {n: tune if n == 1 else wait for n in range(4)})
    t.cards(e, [0] * 4, 120.0)
    return e


@case(
    "sixth set, API loop chews on a long prompt",
    "row 41",
    first="API_LOOP_BLOCKED",
    never=HEALTHY | {"RANK_SPIN", "GRAMMAR_COMPILE"} | DEAD,
)
def chews() -> Evidence:
    e = t.served(t.sglang(2, "serving", quiet=130.0), 0, 0)
    t.burn(t.head(e))
    e.stacks = [
        Stack(
            t.HEAD,
            "launcher",
            "",
            "active+gil",
            [
                "_encode_plus (transformers/tokenization_utils.py:800)",
                "_tokenize_one_request (tokenizer_manager.py:500)",
            ],
        )
    ]
    e.deep = True
    return e


@case("sixth set, health gives up between batches", "sglang#26482 kind, healthy", first="BUSY_NOT_HUNG", never=HANGS)
def gives_up() -> Evidence:
    e = t.served(t.sglang(4, "serving", quiet=3.0), 503, 200, running=30)
    for p in t.ranks_of(e):
        t.burn(p, user=0.7)
    e.log.forwards, e.log.news, e.log.growth = 1, 0, 160
    t.cards(e, [100] * 4, 500.0, 700.0)
    return e


@case("sixth set, somebody trains on one card", "sglang#1533 kind", first="ORPHAN_GPU", never=HEALTHY | {"MIXED_GPU"})
def somebody_trains() -> Evidence:
    e = t.sglang(4, "init")
    line = "ValueError: The memory capacity is unbalanced. Some GPUs may be occupied by other processes."
    t.logged(
        e,
        sgl(4, *INIT)
        + f"[2026-11-28 03:12:01 TP2] Scheduler hit an exception: Traceback (most recent call last):\n{line}\n",
        30.0,
    )
    b.dead(e)
    e.gpus = [
        GpuFacts(n, 97 if n == 2 else 0, 38_000 if n == 2 else 4, 90.0, 700.0, 81_559, "H100", processes_known=True)
        for n in range(4)
    ]
    e.gpus[2].processes = [GpuProcess(909, 37_990, "python", False, False)]
    return e


@case("sixth set, two kinds of card", "sglang#4233 kind", first="MIXED_GPU", never=HEALTHY | {"ORPHAN_GPU"})
def two_kinds() -> Evidence:
    e = somebody_trains()
    e.gpus = [
        GpuFacts(n, 0, 4, 60.0, 700.0, 81_559 if n < 3 else 40_960, "H100" if n < 3 else "A100", processes_known=True)
        for n in range(4)
    ]
    return e


@case(
    "sixth set, somebody's kill -9",
    "vllm#21443 kind",
    first="PARENT_WAITS_DEAD_RANK",
    never=HEALTHY | {"OOM_KILLED"},
    rank=1,
)
def kill_9() -> Evidence:
    e = t.sglang(2, "capture")
    t.logged(e, sgl(2, *CAPTURE), 300.0)
    b.died_of(t.rank(e, 1), 9)
    return e


@case("sixth set, vLLM's store found its port taken", "row 22", first="PORT_RACE", never=HEALTHY | {"PORT_IN_USE"})
def store_port() -> Evidence:
    e = t.vllm(2)
    t.logged(
        e,
        vllm_log("10:01 [core.py:93] Initializing a V1 LLM engine (v0.18.0) with config: model='/models/x'")
        + (
            "(Worker_TP0 pid=31011) torch.distributed.DistNetworkError: The server socket has failed to listen "
            "on any local network "
            "address. port: 44217, useIpv6: false, code: -98, name: EADDRINUSE, message: address already in use\n"
        ),
        40.0,
    )
    b.dead(e)
    e.port = PortFacts(t.PORT)
    return e


@case(
    "sixth set, warm-up parts the ranks",
    "sglang#22607 kind",
    first="WARMUP_STALL COLLECTIVE_DIVERGED",
    never=HEALTHY | DEAD,
)
def parts_the_ranks() -> Evidence:
    e = t.warming(t.sglang(4, "warmup", quiet=500.0))
    one = ["all_reduce (torch/distributed/distributed_c10d.py:2800)", "check_hicache_events (hiradix_cache.py:300)"]
    two = ["broadcast (torch/distributed/distributed_c10d.py:2600)", "broadcast_pyobj (utils/common.py:1000)"]
    t.dump(e, {n: one if n < 2 else two for n in range(4)})
    return e


@case(
    "sixth set, watchdog ended a compilation",
    "sglang#24588 kind",
    first="TIMEOUT_TOO_SHORT",
    never=HEALTHY | {"OOM_KILLED"},
)
def watchdog_ended() -> Evidence:
    e = t.sglang(8, "jit")
    t.logged(
        e,
        sgl(8, *POOLED)
        + (
            "[2026-11-28 03:15:01 TP0] Entering DeepGEMM JIT Pre-Compile session.\n"
            "DeepGEMM warmup:  71%|#######   | 11632/16384 [09:58<04:04, 19.4it/s]\n"
            "[2026-11-28 03:25:01 TP0] Watchdog timeout (self.watchdog_timeout=300)\n"
            "[2026-11-28 03:25:06] Received sigquit from a child process. It usually means the child failed.\n"
        ),
        20.0,
    )
    b.dead(e)
    return e


@case(
    "sixth set, a request of one GPU waits for the host's disk",
    "row 31, look-alike",
    first="HEALTHY IDLE_OK BUSY_NOT_HUNG",
    never=HANGS | {"DISK_FULL"},
)
def nearly_full() -> Evidence:
    e = t.served(t.sglang(1, "serving", quiet=20.0))
    e.log.troubles = {"disk_full": "WARNING: 99 % of /data is used"}
    e.disks = [DiskFacts("log", "/data", 2 * GIB, 900 * GIB, 10**6, "xfs")]
    e.http.append(HttpProbe("/generate", 200, 1.2))
    return e
