"""Part AK: a seventh set, made blind: launchers and weights as met on GPU hosts."""

from __future__ import annotations

from cases import gpuhost as g
from cases import tree as t
from cases.table import DEAD, HANGS, HEALTHY, case
from fleetdump.agent.evidence_engine import HttpProbe
from fleetdump.agent.evidence_host import CgroupFacts, DiskFacts, GpuFacts, Pressure
from fleetdump.agent.evidence_process import Stack
from fleetdump.agent.evidence_types import Evidence

GIB = g.GIB


@case(
    "seventh noexec",
    "sgl-project/sglang#40627",
    first="PARENT_WAITS_DEAD_RANK PIPE_EOF_IMPOSSIBLE",
    never=HEALTHY | {"OOM_KILLED", "PARENT_WAITS_READY", "IMPORT_STALL"},
)
def children_that_could_not_be_executed() -> Evidence:
    e = g.sgl(4, 0, quiet=640.0, uptime=655.0)
    for p in e.processes:
        if p.role in ("scheduler", "detokenizer"):
            p.name = "python3"
            g.zombie(p, 0)
    head = t.head(e)
    for pipe in head.pipes:
        pipe.peers, pipe.own_writer = [], True
    t.sleep(head, g.POLLED)
    head.polled_fds = [27, 28, 29, 30]
    g.h100(e, [], 0)
    e.gpus = [GpuFacts(n, 0, 4, 71.0, 700.0, 81_559, "NVIDIA H100 80GB HBM3", processes_known=True) for n in range(4)]
    return e


@case(
    "seventh launcher killed",
    "sgl-project/sglang#23627",
    first="LAUNCHER_DIED",
    never=HEALTHY | {"RANK_CRASHED", "OOM_KILLED"},
)
def ranks_that_outlive_their_launcher() -> Evidence:
    log = g.ready(4)
    for n in range(12):
        g.decode(log, 31 - n, 1180.4 + n)
    e = g.serving(4, log, 7300.0)
    e.processes = [p for p in e.processes if p.role == "scheduler"]
    for p in e.processes:
        p.ppid = 1
    e.launcher_alive, e.port.open, e.port.ours = False, False, False
    e.http = [HttpProbe("/health", 0, 0.0, "refused")]
    g.h100(e, 0, 121.0)
    return e


@case(
    "seventh template",
    "sgl-project/sglang#30770",
    first="API_LOOP_BLOCKED",
    never=HEALTHY | DEAD | {"RANK_SPIN", "WARMUP_STALL"},
)
def chat_template_on_the_event_loop() -> Evidence:
    log = g.ready(2)
    g.decode(log, 3, 402.7)
    log.say('INFO:     10.8.0.22:51818 - "POST /v1/chat/completions HTTP/1.1" 200 OK')
    e = g.serving(2, log, 210.0, health=0, other=0)
    t.burn(t.head(e), cpu=1.0, user=0.998)
    e.stacks = [
        Stack(
            t.HEAD,
            "launcher",
            "",
            "active+gil",
            [
                "encode (transformers/tokenization_utils_base.py:2731)",
                "_process_messages (sglang/srt/entrypoints/openai/serving_chat.py:871)",
                "_convert_to_internal_request (sglang/srt/entrypoints/openai/serving_chat.py:388)",
                "handle_request (sglang/srt/entrypoints/openai/serving_base.py:84)",
                "run (uvicorn/server.py:67)",
                "launch_server (sglang/srt/entrypoints/http_server.py:1310)",
            ],
        )
    ]
    e.deep = True
    g.h100(e, 0, 122.0)
    g.lacking(e, "strace")
    return e


@case(
    "seventh detokenizer",
    "kubernetes memory limit; sgl-project/sglang#20287",
    first="OOM_KILLED API_ALIVE_ENGINE_DEAD",
    also="OOM_KILLED API_ALIVE_ENGINE_DEAD",
    never=HEALTHY | {"API_LOOP_BLOCKED", "RANK_SPIN"},
)
def detokenizer_killed_by_the_memory_limit() -> Evidence:
    log = g.ready(2)
    g.decode(log, 12, 731.0)
    log.say(
        "Health check failed. Server couldn't get a response from detokenizer for last 20 seconds. tic "
        "start time: 22:31:08. last_heartbeat time: 22:30:51",
        after=30,
    )
    log.say('INFO:     10.42.7.1:58012 - "GET /health HTTP/1.1" 503 Service Unavailable')
    e = g.serving(2, log, 9.0, health=503)
    g.zombie(next(p for p in e.processes if p.role == "detokenizer"), 9)
    e.memory.oom_kills = 1
    e.memory.oom_lines = [
        (
            "[918273.441] Memory cgroup out of memory: Killed process 31040 (sglang::detoken) "
            "total-vm:41822180kB, anon-rss:18220416kB, file-rss:61120kB, shmem-rss:0kB, UID:0 "
            "pgtables:44120kB oom_score_adj:998"
        )
    ]
    e.kernel_log = list(e.memory.oom_lines)
    e.cgroup = CgroupFacts(
        "/kubepods/burstable/pod3f/c1", 63 * GIB, 64 * GIB, {"max": 18233, "oom": 1, "oom_kill": 1}, 48.0, 50
    )
    g.h100(e, 0, 120.0)
    g.lacking(e, "py-spy")
    return e


@case(
    "seventh name server",
    "sgl-project/sglang#11796",
    first="IMPORT_STALL",
    never=HEALTHY | {"HUB_BLOCKED", "PARENT_WAITS_READY", "PARENT_WAITS_DEAD_RANK"},
)
def import_that_waits_for_a_name_server() -> Evidence:
    e = g.sgl(1, 0, quiet=700.0, uptime=702.0)
    e.processes = [t.head(e)]
    head = t.head(e)
    head.pipes = []
    t.sleep(head, ("do_sys_poll", "7 0x7ffe11 0x1 0x1388"))
    t.logged(
        e,
        "/opt/venv/lib/python3.12/site-packages/torch/cuda/__init__.py:63: FutureWarning: The pynvml "
        "package is deprecated.\n",
        700.0,
    )
    e.stacks = [
        Stack(
            t.HEAD,
            "launcher",
            "",
            "idle",
            [
                "getaddrinfo (socket.py:978)",
                "create_connection (socket.py:849)",
                "connect (http/client.py:1013)",
                "detect (opentelemetry/sdk/extension/aws/resource/ec2.py:77)",
                "<module> (corp_tracing/bootstrap.py:12)",
                "_call_with_frames_removed (<frozen importlib._bootstrap>:488)",
                "exec_module (<frozen importlib._bootstrap_external>:999)",
                "_find_and_load (<frozen importlib._bootstrap>:1360)",
                "<module> (sglang/launch_server.py:6)",
            ],
        )
    ]
    e.deep = True
    return e


@case(
    "seventh dead export",
    "NFS hard mount, server gone",
    first="REMOTE_FS_HANG",
    never=HEALTHY | {"LOADING_SLOW", "DRIVER_D_STATE", "LOADER_DEADLOCK"},
)
def weights_on_an_export_whose_server_is_gone() -> Evidence:
    e = g.sgl(4, g.WEIGHTS, quiet=812.0)
    log = g.start(4, g.WEIGHTS)
    log.raw("Loading safetensors checkpoint shards:  37% Completed | 6/16 [01:12<02:01, 12.1s/it]")
    t.logged(e, log.text(), 812.0)
    for p in t.ranks_of(e):
        t.disk(
            p,
            "rpc_wait_bit_killable",
            "__rpc_execute",
            "rpc_execute",
            "rpc_run_task",
            "nfs4_do_call_sync",
            "nfs4_proc_getattr",
        )
    e.kernel_log = [
        "[441210.220] nfs: server 10.20.0.5 not responding, still trying",
        "[441331.008] INFO: task sglang::schedul:31011 blocked for more than 120 seconds.",
        "[441331.010]       Tainted: P           OE      6.8.0-71-generic #71-Ubuntu",
    ]
    e.disks = [d for d in e.disks if d.use != "model"]
    e.probes.append(g.silent_probe("disk model", "no answer within 3 s: /models/q"))
    e.pressure = [Pressure("io", "host", 99.0, 97.5)]
    g.h100(e, 0, 118.0, 5200)
    return e


@case(
    "seventh lustre",
    "Lustre evictions under load",
    first="LOADING_SLOW",
    never=HANGS | DEAD | {"REMOTE_FS_HANG", "DRIVER_D_STATE"},
)
def eager_reads_from_a_busy_lustre() -> Evidence:
    log = g.start(8, g.WEIGHTS)
    log.raw("Loading safetensors checkpoint shards:  61% Completed | 99/163 [14:41<10:29,  9.83s/it]")
    e = g.sgl(8, g.WEIGHTS)
    t.logged(e, log.text(), 171.0)
    e.disks = [d for d in e.disks if d.use != "model"] + [DiskFacts("model", "/lustre/m", 10**14, 10**15, -1, "lustre")]
    for n, p in enumerate(t.ranks_of(e)):
        if n % 3:
            t.disk(p, "cl_sync_io_wait", "ll_io_read_page", "ll_readpage", "filemap_read")
        p.state_before = "DSR"[n % 3]
        p.rchar_delta, p.rss_delta = 61_000_000 + n * 700_000, 58_000_000
    e.kernel_log = [
        (
            "[88121.330] LustreError: 11-0: lfs01-OST0004-osc-ffff9a: operation ost_read to node "
            "10.4.0.7@o2ib failed: rc = -107"
        ),
        "[88123.918] Lustre: lfs01-OST0004-osc-ffff9a: Connection restored to 10.4.0.7@o2ib",
    ]
    g.h100(e, 0, 117.0, 44_100)
    return e


@case(
    "seventh host cache",
    "sgl-project/sglang#26568",
    first="BUSY_NOT_HUNG",
    never=HANGS | DEAD | {"UNKNOWN", "KERNEL_SPIN"},
)
def host_memory_is_being_pinned() -> Evidence:
    e = g.sgl(4, g.POOL, quiet=195.0)
    log = g.start(4, g.POOL)
    log.each("Allocating 240.00 GB host memory for hierarchical KV cache.")
    t.logged(e, log.text(), 195.0)
    for p in t.ranks_of(e):
        t.burn(p, cpu=1.0, user=0.02)
        p.rss, p.rss_delta = 121 * GIB, 6 * GIB
        p.kernel_stack = [
            "clear_huge_page",
            "__do_huge_pmd_anonymous_page",
            "handle_mm_fault",
            "faultin_page",
            "__gup_longterm_locked",
            "os_lock_user_pages",
            "nvidia_ioctl",
        ]
    e.memory.available, e.memory.pressure_some = 1300 * GIB, 0.4
    g.h100(e, 0, 124.0)
    g.lacking(e, "py-spy", "strace")
    return e
