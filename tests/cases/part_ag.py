"""Part AG: the set of part AE goes on: processes that are gone, the host around a server, and open ports."""

from __future__ import annotations

from cases import builder as b
from cases import tree as t
from cases.logtext import INIT, LOADED, sgl, vllm_log
from cases.table import DEAD, HANGS, HEALTHY, case
from fleetdump.agent.evidence_engine import HttpProbe
from fleetdump.agent.evidence_host import (
    CgroupFacts,
    CpuFacts,
    DiskFacts,
    GpuFacts,
    GpuProcess,
    Pressure,
)
from fleetdump.agent.evidence_process import PipeEnd, SocketFacts, Stack, ThreadFacts
from fleetdump.agent.evidence_types import Evidence

MIB, GIB = 2**20, 2**30


@case("fourth set, engine core is gone, version answers", "vllm#39863", first="API_ALIVE_ENGINE_DEAD", never=HEALTHY)
def version_answers() -> Evidence:
    e = t.served(t.vllm(1, quiet=5.0))
    e.processes = e.processes[:1]
    t.logged(
        e,
        vllm_log(
            "10:01 [core.py:93] Initializing a V1 LLM engine (v0.19.0) with config: model='/models/x'",
            *[
                f"{20 + n}:05 [loggers.py:259] Engine 000: Avg prompt throughput: 0.0 tokens/s, Avg generation "
                f"throughput: "
                "0.0 tokens/s, Running: 0 reqs, Waiting: 3 reqs, GPU KV cache usage: 0.0%"
                for n in range(8)
            ],
            who="APIServer pid=31000",
        ),
        5.0,
    )
    e.http = [HttpProbe("/version", 200, 0.01), HttpProbe("/v1/completions", 0, 10.0, "timed out")]
    t.cards(e, [0], 70.0, used=3)
    return e


@case(
    "fourth set, a worker of four was killed in service",
    "vllm#45644",
    first="DEAD_READER_RING_FULL",
    never=HEALTHY | {"SHM_SMALL", "JIT_COMPILING"},
    rank=2,
)
def worker_killed() -> Evidence:
    e = t.served(t.vllm(4, quiet=31.0), 200, 200)
    t.logged(
        e,
        vllm_log(
            "10:01 [core.py:93] Initializing a V1 LLM engine (v0.18.0) with config: model='/models/x'",
            *[
                f"{30 + n}:49 [shm_broadcast.py:542] No available shared memory broadcast block found in 60 seconds."
                for n in range(11)
            ],
        ),
        31.0,
    )
    t.lose(e, 2)
    engine = e.processes[1]
    t.burn(engine, user=0.4)
    e.stacks = [
        Stack(
            engine.pid,
            "engine",
            "",
            "active",
            [
                "acquire_write (vllm/distributed/device_communicators/shm_broadcast.py:520)",
                "enqueue (shm_broadcast.py:600)",
                "collective_rpc (vllm/v1/executor/multiproc_executor.py:300)",
            ],
        )
    ]
    e.deep = True
    t.cards(e, [100, 100, 0, 100], 130.0, 700.0)
    return e


@case("fourth set, ring buffer does not fit", "kind of F1", first="SHM_SMALL", never=HEALTHY | {"DISK_FULL"})
def ring_does_not_fit() -> Evidence:
    e = t.vllm(4)
    t.logged(
        e,
        vllm_log(
            "10:01 [core.py:77] Initializing a V1 LLM engine (v0.11.0) with config: model='/models/x'",
        )
        + "(EngineCore_DP0 pid=31001) OSError: [Errno 28] No space left on device: '/psm_8a6bd1c2'\n",
        12.0,
    )
    e.disks = [
        DiskFacts("shm", "/dev/shm", 0, 64 * MIB, 100_000, "tmpfs"),
        DiskFacts("root", "/", 800 * GIB, 900 * GIB, 10**7, "overlay"),
    ]
    b.dead(e)
    return e


@case("fourth set, rendezvous port was taken", "kind of row 22", first="PORT_RACE", never=HEALTHY | {"PORT_IN_USE"})
def rendezvous_port() -> Evidence:
    e = t.sglang(2, "init", ("init begin",))
    t.logged(
        e,
        sgl(2, INIT[0])
        + (
            "[2026-11-28 03:12:44 TP0] Scheduler hit an exception: Traceback (most recent call last):\n"
            '  File "torch/distributed/rendezvous.py", line 189, in _create_c10d_store\n'
            "torch.distributed.DistNetworkError: The server socket has failed to listen on any local network address. "
            "port: 41877, useIpv6: false, code: -98, name: EADDRINUSE, message: address already in use\n"
            "[2026-11-28 03:12:44] Received sigquit from a child process. It usually means the child failed.\n"
        ),
        30.0,
    )
    b.dead(e)
    return e


@case(
    "fourth set, an older server has the memory", "sglang#1533 kind", first="ORPHAN_GPU", never=HEALTHY | {"MIXED_GPU"}
)
def older_server() -> Evidence:
    e = t.sglang(2, "kv_pool")
    t.logged(
        e,
        sgl(2, *LOADED)
        + (
            "[2026-11-28 03:13:20 TP1] Scheduler hit an exception: Traceback (most recent call last):\n"
            "RuntimeError: Not enough memory. Please try to increase --mem-fraction-static. Current value: "
            "self.server_args.mem_fraction_static=0.88\n"
            "[2026-11-28 03:13:20] Received sigquit from a child process. It usually means the child failed.\n"
        ),
        60.0,
    )
    b.dead(e)
    e.gpus = [GpuFacts(n, 0, 71_000, 80.0, 700.0, 81_559, "H100", processes_known=True) for n in range(2)]
    for card in e.gpus:
        card.processes = [GpuProcess(7001 + card.index, 70_900, "sglang::schedul", False, True)]
    return e


@case(
    "fourth set, Xid 62 and a driver that never returns",
    "1Cat-vLLM#430",
    first="XID DRIVER_D_STATE",
    also="XID DRIVER_D_STATE",
    never=HEALTHY | {"GRAPH_CAPTURE", "REMOTE_FS_HANG"},
)
def xid_62() -> Evidence:
    e = t.vllm(2)
    t.logged(
        e,
        vllm_log(
            "10:01 [core.py:77] Initializing a V1 LLM engine (v1.3.0) with config: model='/models/x'",
        )
        + "Capturing CUDA graphs (mixed prefill-decode, PIECEWISE):   0%|          | 0/3 [00:00<?, ?it/s]",
        2700.0,
    )
    for p in t.ranks_of(e):
        t.disk(p, "os_acquire_mutex", "nvidia_unlocked_ioctl", "__x64_sys_ioctl")
    e.kernel_log = [
        "[90122.4] NVRM: Xid (PCI:0000:1a:00): 62, pid=31011, name=VLLM::Worker_TP, 2027(3c40) 00000000 00000000",
        "[90122.4] NVRM: Xid (PCI:0000:1b:00): 62, pid=31012, name=VLLM::Worker_TP, 2027(3c40) 00000000 00000000",
    ]
    b.failed_probe(e, "nvidia-smi", "time limit of 10 s")
    return e


@case(
    "fourth set, engine asks the hub, log says it waits",
    "vllm#18260",
    first="HUB_BLOCKED",
    never=HEALTHY | {"LOADING_SLOW"},
)
def asks_the_hub() -> Evidence:
    e = t.vllm(1)
    t.logged(
        e,
        "".join(
            f"DEBUG 05-16 13:{12 + n // 6}:{n % 6}6 [core_client.py:425] Waiting for 1 core engine proc(s) to "
            f"start: {{0}}\n"
            for n in range(80)
        ),
        4.0,
        more="DEBUG 05-16 13:26:06 [core_client.py:425] Waiting for 1 core engine proc(s) to start: {0}\n",
    )
    worker = t.rank(e, 0)
    worker.sockets = [SocketFacts(61, "ESTABLISHED", "172.17.0.3:50210", "18.165.0.8:443")]
    t.sleep(worker, t.POLL, 61)
    t.dump(
        e,
        {
            0: [
                "read (ssl.py:1166)",
                "readinto (socket.py:720)",
                "getresponse (urllib3/connection.py:516)",
                "http_get (huggingface_hub/file_download.py:490)",
                "download_weights_from_hf (weight_utils.py:291)",
            ]
        },
    )
    return e


@case("fourth set, no descriptor left for a client", "kind of row 27", first="NOFILE", never=HEALTHY)
def no_descriptor() -> Evidence:
    e = t.served(t.sglang(2, "serving", quiet=1.0), 0, 0, "timed out")
    head = t.head(e)
    head.fd_count, head.fd_limit = 1024, 1024
    t.burn(head, user=0.5)
    e.log.repeated, e.log.growth = 900, 40_000
    e.log.repeated_line = "ERROR:asyncio:socket.accept() out of system resource"
    e.log.tail = ["OSError: [Errno 24] Too many open files"]
    return e


@case(
    "fourth set, tee was stopped at the terminal",
    "kind of row 32",
    first="STDOUT_PIPE_FULL",
    never=HEALTHY | {"PARENT_WAITS_READY", "GRAPH_CAPTURE"},
)
def tee_stopped() -> Evidence:
    e = t.sglang(4, "capture", quiet=800.0)
    for p in e.processes:
        p.stdout = p.stderr = "pipe:[99100]"
        p.pipes.append(PipeEnd(1, 99_100, "w", [30_900], peer_states="T", peer_names=["tee"]))
        p.pipes.append(PipeEnd(2, 99_100, "w", [30_900], peer_states="T", peer_names=["tee"]))
    for p in t.ranks_of(e):
        t.sleep(p, ("pipe_write", "1 0x2 0x7f 0x80"), 2)
    return e


@case(
    "fourth set, its log was rotated away",
    "kind of row 30",
    first="IDLE_OK HEALTHY LOG_ELSEWHERE",
    also="LOG_ELSEWHERE",
    never=HANGS,
)
def rotated() -> Evidence:
    e = t.served(t.sglang(4, "serving", quiet=190_000.0))
    for p in e.processes:
        p.stdout = p.stderr = "/data/run/out.txt.1 (deleted)"
        p.writes_log = p.errors_in_log = False
    t.cards(e, [0, 0, 0, 0], 118.0)
    return e


@case(
    "fourth set, quota of two cores for eight ranks",
    "kind of row 43",
    first="BUSY_NOT_HUNG JIT_COMPILING",
    also="CPU_STARVED",
    never=HANGS | DEAD,
)
def two_cores() -> Evidence:
    e = t.sglang(8, "jit", quiet=25.0, uptime=500.0)
    e.cgroup = CgroupFacts("/kubepods/pod1", 90 * GIB, 400 * GIB, {}, 2.0, 60, 60, 380.0)
    e.cpus = CpuFacts(96, 30.0, 12)
    e.pressure = [Pressure("cpu", "cgroup", 97.0, 60.0)]
    for p in t.ranks_of(e):
        p.state = p.state_before = "R"
        p.cpu, p.rss_delta = 0.24, 3 * MIB
        p.main = ThreadFacts(p.pid, p.name, "R", 0.24, 0.99, 0.9, 2.0, "0", "running")
    e.log.news = 1
    return e


@case(
    "fourth set, cache pages go to a dead filer",
    "kind of row 3 in service",
    first="REMOTE_FS_HANG",
    never=HEALTHY | {"DRIVER_D_STATE", "KERNEL_SPIN"},
)
def dead_filer() -> Evidence:
    e = t.served(t.sglang(4, "serving", quiet=600.0), 503, 200, running=4)
    t.disk(t.rank(e, 1), "rpc_wait_bit_killable", "nfs4_do_close", "nfs_file_flush", "filp_close")
    t.rank(e, 1).cpu = 0.0
    for n in (0, 2, 3):
        t.burn(t.rank(e, n), user=0.6)
    e.kernel_log = ["[771201.0] nfs: server filer-b not responding, still trying"]
    t.cards(e, [100, 0, 100, 100], 180.0)
    return e


@case(
    "fourth set, volume of the log is full in service",
    "ai-dynamo#4087 kind",
    first="DISK_FULL HEALTHY",
    also="DISK_FULL",
    never=HANGS,
)
def log_volume() -> Evidence:
    e = t.served(t.sglang(2, "serving", quiet=1200.0), 200, 200, running=7)
    e.log.unterminated = True
    e.disks = [DiskFacts("log", "/data", 0, 200 * GIB, 4_000_000, "xfs")]
    for p in t.ranks_of(e):
        t.burn(p, user=0.6)
    t.cards(e, [97, 98], 610.0, 700.0)
    return e


@case(
    "fourth set, warm-up sleeps", "sglang#17941 kind", first="WARMUP_STALL", never=HEALTHY | {"API_LOOP_BLOCKED"} | DEAD
)
def warmup_sleeps() -> Evidence:
    e = t.warming(t.sglang(1, "warmup", quiet=400.0))
    e.log.tail = ["[2026-11-28 03:20:01 TP0] Prefill batch. #new-seq: 1, #new-token: 6, #cached-token: 0"]
    t.sleep(t.rank(e, 0), t.FUTEX)
    t.cards(e, [0], 71.0, 450.0, 21_000)
    return e


@case(
    "fourth set, API loop fetches a picture",
    "kind of row 41",
    first="API_LOOP_BLOCKED",
    never=HEALTHY | {"HUB_BLOCKED"} | DEAD,
)
def fetches_a_picture() -> Evidence:
    e = t.served(t.sglang(2, "serving", quiet=300.0), 0, 0, "timed out")
    head = t.head(e)
    t.sleep(head, ("wait_woken", "45 0x37 0x7f"), 55)
    head.sockets = [SocketFacts(55, "ESTABLISHED", "10.0.0.4:41000", "203.0.113.9:80")]
    t.cards(e, [0, 0], 119.0)
    return e


@case(
    "fourth set, scheduler compiles a schema in its pool",
    "sglang#39125",
    first="GRAMMAR_COMPILE",
    never=HANGS | {"IDLE_OK"},
)
def schema_in_pool() -> Evidence:
    e = t.served(t.sglang(2, "serving", quiet=90.0), 200, 200)
    for p in t.ranks_of(e):
        p.cpu = 1.6
        p.threads = [ThreadFacts(p.pid + 70, "ThreadPoolExecu", "R", 0.99, 1.0, 1.0, 0.0, "0", "running")]
        e.stacks.append(
            Stack(
                p.pid,
                "scheduler",
                p.label,
                "idle",
                ["recv_requests (scheduler.py:1200)", "event_loop_overlap (scheduler.py:1100)"],
                active={
                    "ThreadPoolExecutor-1_0": [
                        "serialize_grammar (llguidance/_lib.py:40)",
                        "dispatch_json (constrained/llguidance_backend.py:150)",
                        "_init_value_dispatch (constrained/base_grammar_backend.py:130)",
                    ]
                },
            )
        )
    e.deep = True
    e.http.append(HttpProbe("/generate", 0, 10.0, "timed out"))
    e.log.zero_statistics = 0
    t.cards(e, [0, 0], 119.0)
    return e


@case(
    "fourth set, nothing may be read",
    "py-spy#8 kind",
    first="DIAG_BLIND UNKNOWN",
    also="DIAG_BLIND",
    never=HEALTHY | DEAD,
)
def nothing_may_be_read() -> Evidence:
    e = t.sglang(4, "")
    for p in e.processes:
        p.readable, p.main, p.pipes, p.writes_log, p.syscall_fd = False, None, [], None, -1
    e.log.exists, e.log.ranks, e.log.bytes, e.log.lines, e.log.phase = False, [], 0, 0, ""
    b.no_ptrace(e)
    b.failed_probe(e, "log", "Permission denied")
    b.failed_probe(e, "nvidia-smi", "not found")
    return e


@case(
    "fourth set, loaded decode between two statistics",
    "kind of E4",
    first="HEALTHY BUSY_NOT_HUNG",
    never=HANGS | {"UNKNOWN"},
)
def loaded_decode() -> Evidence:
    e = t.served(t.sglang(8, "serving", quiet=2.8), 200, 200, running=120)
    for p in t.ranks_of(e):
        t.burn(p, user=0.55, voluntary=900.0)
    e.log.growth, e.log.news, e.log.forwards = 420, 2, 2
    t.cards(e, [98] * 8, 640.0, 700.0)
    return e
