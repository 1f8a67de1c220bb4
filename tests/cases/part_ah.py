"""Part AH: a further set, after that of part AE was mended: mostly logs as they are, through the agent's own reader."""

from __future__ import annotations

from cases import builder as b
from cases import tree as t
from cases.logtext import CAPTURE, INIT, LOAD, LOADED, OPENED, STARTED, sgl, vllm_log
from cases.table import HANGS, HEALTHY, case
from fleetdump.agent.evidence_engine import PortFacts
from fleetdump.agent.evidence_host import CgroupFacts, DiskFacts, GpuFacts
from fleetdump.agent.evidence_types import Evidence

MIB, GIB = 2**20, 2**30


@case(
    "fifth set, two PCIe cards at NCCL's first word",
    "vllm#8058 kind",
    first="P2P_BLOCKED",
    never=HEALTHY | {"KERNEL_SPIN"},
)
def two_pcie_cards() -> Evidence:
    e = t.vllm(2)
    t.logged(e, vllm_log(*STARTED[:2]), 1300.0)
    for p in t.ranks_of(e):
        t.burn(p, user=0.6)
    t.cards(e, [100, 100], 84.0, 300.0, 2100)
    e.host.gpu_links = ["PHB"]
    return e


@case(
    "fifth set, idle workers say what a full ring would", "vllm#27313 kind", first="IDLE_OK", never=HANGS | {"UNKNOWN"}
)
def idle_workers() -> Evidence:
    e = t.served(t.vllm(2, quiet=40.0))
    line = "{}:02 [shm_broadcast.py:466] No available shared memory broadcast block found in 60 seconds."
    text = vllm_log(*STARTED) + OPENED
    for n in range(9):
        for r in range(2):
            text += f"(Worker_TP{r} pid={31011 + r}) INFO 11-28 04:{line.format(20 + n)}\n"
    t.logged(e, text, 40.0)
    for p in t.ranks_of(e):
        t.sleep(p, t.FUTEX, voluntary=4.0)
        p.cpu = 0.01
    t.cards(e, [0, 0], 70.0)
    return e


@case(
    "fifth set, vLLM captures one graph after the other",
    "kind of C1, healthy",
    first="BUSY_NOT_HUNG HEALTHY",
    never=HANGS,
)
def captures() -> Evidence:
    e = t.vllm(4)
    bar = "Capturing CUDA graphs (decode, FULL):  {0}%|###   | {1}/35 [00:0{2}<00:14,  1.60it/s]\r"
    t.logged(e, vllm_log(*STARTED[:6]) + bar.format(31, 11, 7), 2.0, more=bar.format(48, 17, 9))
    for p in t.ranks_of(e):
        t.burn(p, user=0.8)
    return e


@case(
    "fifth set, vLLM stands at half its graphs with a compiler",
    "sglang-omni#1194 kind",
    first="JIT_COMPILING",
    never=HANGS,
)
def captures_and_compiles() -> Evidence:
    e = t.vllm(4)
    bar = "Capturing CUDA graphs (mixed prefill-decode, PIECEWISE):  48%|###   | 17/35 [00:09<00:14,  1.60it/s]\r"
    t.logged(e, vllm_log(*STARTED[:6]) + bar, 320.0)
    for k in range(12):
        compiler = t.child(33_000 + k, "compiler", "cicc", "R", ppid=t.pid_of(0))
        t.burn(compiler)
        e.processes.append(compiler)
    for p in t.ranks_of(e)[1:]:
        t.burn(p)
    return e


@case("fifth set, engine dies of memory, API says so", "vllm#45626 kind", first="OOM_KILLED", never=HEALTHY)
def engine_dies() -> Evidence:
    e = t.vllm(1)
    t.logged(
        e,
        vllm_log(*STARTED)
        + OPENED
        + (
            "(APIServer pid=31000) ERROR 11-28 04:10:05 [core_client.py:600] Engine core proc EngineCore_DP0 "
            "died unexpectedly, "
            "shutting down client.\n(APIServer pid=31000) vllm.v1.engine.exceptions.EngineDeadError: EngineCore "
            "encountered an "
            "issue. See stack trace (above) for the root cause.\n"
        ),
        20.0,
    )
    b.dead(e)
    e.memory.oom_lines = [
        "[8123.4] Out of memory: Killed process 31001 (VLLM::EngineCor) total-vm:301GB, anon-rss:188GB"
    ]
    e.cgroup = CgroupFacts("/docker/ab", 0, 200 * GIB, {"oom": 1, "oom_kill": 1})
    return e


@case(
    "fifth set, GPU memory did not suffice",
    "no hang",
    first="LAUNCHER_DIED",
    never=HEALTHY | {"OOM_KILLED", "ORPHAN_GPU"},
)
def gpu_memory() -> Evidence:
    e = t.vllm(2)
    t.logged(
        e,
        vllm_log(*STARTED[:3])
        + (
            "(Worker_TP1 pid=31012) torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.62 GiB. GPU "
            "1 has a total "
            "capacity of 79.10 GiB of which 1.2 GiB is free.\n(EngineCore_DP0 pid=31001) RuntimeError: Engine core "
            "initialization failed. See root cause above. Failed core proc(s): {}\n"
        ),
        30.0,
    )
    b.dead(e)
    e.gpus = [GpuFacts(n, 0, 4, 60.0, 700.0, 81_559, "H100", processes_known=True) for n in range(2)]
    return e


@case("fifth set, vLLM's port was taken", "kind of row 21", first="PORT_IN_USE", never=HEALTHY | {"PORT_RACE"})
def port_taken() -> Evidence:
    e = t.vllm(1)
    t.logged(
        e,
        "INFO 11-28 03:09:58 [api_server.py:1900] vLLM API server version 0.18.0\n"
        "OSError: [Errno 98] Address already in use\n",
        30.0,
    )
    b.dead(e)
    e.port = PortFacts(t.PORT, True, 4410, "node", False)
    return e


@case("fifth set, CUDA says 802", "pytorch#35710 kind", first="FABRIC_MANAGER", never=HEALTHY)
def says_802() -> Evidence:
    e = t.sglang(8, "init", ("init begin",))
    t.logged(
        e,
        sgl(8, INIT[0])
        + (
            "[2026-11-28 03:12:01 TP4] Scheduler hit an exception: Traceback (most recent call last):\n"
            "RuntimeError: Unexpected error from cudaGetDeviceCount(). Did you run some cuda functions before calling "
            "NumCudaDevices() that might have already set an error? Error 802: system not yet initialized\n"
        ),
        15.0,
    )
    b.dead(e)
    e.host.fabric_manager = "inactive"
    return e


@case("fifth set, NCCL cannot make its segment", "vllm#1710 kind", first="SHM_SMALL", never=HEALTHY | {"DISK_FULL"})
def nccl_segment() -> Evidence:
    e = t.sglang(4, "init", ("init begin",))
    t.logged(
        e,
        sgl(4, INIT[0])
        + (
            "pod-7:1893:2011 [2] misc/shmutils.cc:72 NCCL WARN Error: failed to extend /dev/shm/nccl-Hk2a to "
            "9637892 bytes\n"
            "pod-7:1893:2011 [2] NCCL INFO misc/shmutils.cc:137 -> 2\n"
        ),
        200.0,
    )
    e.disks = [DiskFacts("shm", "/dev/shm", 6 * MIB, 64 * MIB, 10_000, "tmpfs")]
    return e


@case("fifth set, contained memory error in service", "kind of F5", first="XID", never=HEALTHY | {"P2P_BLOCKED"})
def contained() -> Evidence:
    e = t.served(t.sglang(8, "serving", quiet=90.0), 0, 200, running=3)
    e.kernel_log = [
        "[300100.7] NVRM: Xid (PCI:0000:9b:00): 94, pid=31014, name=sglang::schedul, Contained: SM (0x1). RST: No"
    ]
    t.lose(e, 3)
    t.logged(
        e,
        sgl(8, *CAPTURE)
        + (
            "[2026-11-28 09:12:01 TP3] Scheduler hit an exception: Traceback (most recent call last):\n"
            "torch.AcceleratorError: CUDA error: uncorrectable ECC error encountered\n"
        ),
        20.0,
    )
    return e


@case(
    "fifth set, three ranks fell to a segmentation fault",
    "kind of A1",
    first="PARENT_WAITS_DEAD_RANK",
    never=HEALTHY | {"PARENT_WAITS_READY", "OOM_KILLED"},
)
def three_fell() -> Evidence:
    e = t.sglang(8, "kv_pool")
    t.logged(e, sgl(8, *LOADED), 800.0)
    for n in (2, 5, 6):
        b.died_of(t.rank(e, n), 11)
    t.sleep(t.head(e), t.PIPE, 27)
    return e


@case(
    "fifth set, shards come from HDFS by fuse",
    "sglang#15608 kind",
    first="LOADING_SLOW",
    never=HANGS | {"REMOTE_FS_HANG"},
)
def hdfs() -> Evidence:
    e = t.sglang(8, "weights", ("init begin", "init end", "weights begin"), quiet=43.0)
    t.logged(
        e,
        sgl(8, *LOAD) + "Loading safetensors checkpoint shards:  55% Completed | 34/62 [11:10<20:04, 43.0s/it]\n",
        43.0,
    )
    e.disks = [DiskFacts("model", "/mnt/hdfs", 2**50, 2**50, -1, "fuse.hdfs")]
    for p in t.ranks_of(e):
        p.rchar_delta, p.state = 4 * MIB, "S"
    return e


@case(
    "fifth set, gateway answers for the server itself",
    "sglang#9155 kind",
    first="PROXY_WARMUP",
    never=HEALTHY | {"BAD_BIND_HOST"},
)
def gateway() -> Evidence:
    e = t.sglang(2, "warmup")
    t.opened(e, 503, 200)
    e.target.host = "0.0.0.0"
    e.proxy = {
        "http_proxy": "wwwgate.example:8080",
        "https_proxy": "wwwgate.example:8080",
        "no_proxy": "localhost,127.0.0.1",
    }
    t.logged(
        e,
        sgl(2, *CAPTURE)
        + (
            "[2026-11-28 03:16:40] INFO:     Started server process [31000]\n"
            "[2026-11-28 03:16:40] INFO:     Uvicorn running on http://0.0.0.0:9123 (Press CTRL+C to quit)\n"
            "[2026-11-28 03:18:41] requests.exceptions.HTTPError: 502 Server Error: Bad Gateway for url: "
            "http://0.0.0.0:9123/model_info\n"
        ),
        10.0,
    )
    return e
