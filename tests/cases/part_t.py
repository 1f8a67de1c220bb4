"""Part T: the second blind set goes on."""

from __future__ import annotations

from cases import tree as t
from cases.table import DEAD, HANGS, HEALTHY, case
from fleetdump.agent.evidence_engine import (
    FlightRecord,
    OperationCounts,
    RankCount,
    RasFacts,
)
from fleetdump.agent.evidence_host import (
    DiskFacts,
    GpuFacts,
    GpuProcess,
    LockFacts,
)
from fleetdump.agent.evidence_process import (
    PipeEnd,
    SocketFacts,
    Stack,
    SyscallCount,
    ThreadFacts,
    Trace,
)
from fleetdump.agent.evidence_types import Evidence, ProbeRecord


@case("R19 recorder", "kind of D11", first="COLLECTIVE_DIVERGED", never=HEALTHY | DEAD | {"KERNEL_SPIN"})
def recorder_shows_other_operations_of_four() -> Evidence:
    e = t.served(t.sglang(4, "serving"), 0, 200, running=3)
    for p in t.ranks_of(e):
        t.burn(p, user=0.7)
    t.cards(e, [100] * 4, 210.0)
    e.flight = [FlightRecord(n, 77, "all_reduce" if n else "broadcast", "started", [16, 4096]) for n in range(4)]
    return e


@case("R20 links", "kind of D3", first="P2P_BLOCKED", never=HEALTHY | DEAD | {"KERNEL_SPIN"})
def eight_cards_on_pcie_switches() -> Evidence:
    e = t.sglang(8, "init", ("init begin",), quiet=400.0)
    for p in t.ranks_of(e):
        t.burn(p, user=0.95)
    t.cards(e, [100] * 8, 70.0, 300.0, 2000)
    e.host.gpu_links = ["PHB", "PXB", "SYS"]
    return e


@case("R21 group of four", "kind of S3", first="MISSING_RANK COLLECTIVE_DIVERGED", never=HEALTHY | DEAD, rank=1)
def in_a_wait_of_python_s_own_while_three_reduce() -> Evidence:
    e = t.served(t.vllm(4), 0, 200, running=3)
    for p in t.ranks_of(e):
        t.sleep(p, t.FUTEX)
    reduce = ["tensor_model_parallel_all_reduce (communication_op.py:13)", "forward (linear.py:1300)"]
    t.dump(
        e,
        {
            **dict.fromkeys(range(4), reduce),
            1: ["wait (threading.py:359)", "get (queue.py:180)", "export (hook.py:60)"],
        },
    )
    return e


@case("R22 name resolves to loopback", "kind of D8", first="WRONG_INTERFACE", never=HEALTHY | DEAD)
def log_warns_of_the_host_s_name() -> Evidence:
    e = t.sglang(4, "init", ("init begin",))
    e.target.ranks, e.target.nodes = 8, 2
    t.logged(e, "".join(f"[2026-05-01 10:00:10 TP{n}] Init torch distributed begin.\n" for n in range(4))
             + "[W] [Gloo] Unable to resolve hostname to a (local) address. Using the loopback "
               "address as fallback.\n", 300.0)  # fmt: skip
    return e


@case("R23 stage two late", "kind of A10", first="WARMUP_STALL", never=HEALTHY | DEAD, phase="warmup")
def second_stage_never_receives() -> Evidence:
    e = t.warming(t.sglang(2, "warmup"), 0)
    for n, p in enumerate(t.ranks_of(e)):
        p.rank, p.label = 0, f"PP{n} TP0"
        t.sleep(p, t.FUTEX)
    e.target.ranks, e.log.ranks, e.log.quiet_seconds = 1, [], 250.0
    return e


@case("R24 card lost", "kind of F5", first="XID", never=HEALTHY)
def nvidia_smi_names_a_card_that_is_gone() -> Evidence:
    e = t.served(t.sglang(8, "serving"), 0, 200, running=3)
    e.probes = [
        ProbeRecord(
            "nvidia-smi", False, 0.4, "Unable to determine the device handle for GPU0000:9B:00.0: Unknown Error"
        )
    ]
    for p in t.ranks_of(e):
        t.burn(p)
    return e


@case("R25 uvm", "kind of F4", first="DRIVER_D_STATE", never=HEALTHY)
def nvidia_smi_and_a_rank_sleep_for_ever() -> Evidence:
    e = t.sglang(2, "kv_pool")
    t.disk(t.rank(e, 0), "__mutex_lock.constprop.0", "uvm_va_space_mm_register", "uvm_unlocked_ioctl")
    e.probes = [ProbeRecord("nvidia-smi", False, 10.0, "no answer in 10 s")]
    return e


@case("R26 user of another", "kind of A8", first="ORPHAN_GPU", never=HEALTHY)
def a_notebook_holds_half_of_a_card() -> Evidence:
    e = t.sglang(4, "init", ("init begin",))
    text = "".join(f"[2026-05-01 10:00:1{n} TP{n}] Init torch distributed begin.\n" for n in range(4))
    text += (
        "[2026-05-01 10:00:30 TP2] Scheduler hit an exception: Traceback (most recent call "
        "last):\nValueError: The memory capacity is unbalanced. Some GPUs may be occupied by other processes.\n"
    )
    t.logged(e, text, 50.0)
    e.launcher_alive, e.processes = False, []
    e.gpus = [
        GpuFacts(n, 0, 38_000 if n == 2 else 4, 80.0, 700.0, 80_000, "H100", processes_known=True) for n in range(4)
    ]
    e.gpus[2].processes = [GpuProcess(6100, 38_000, "python3")]
    return e


@case("R27 kinds of card", "kind of A8", first="MIXED_GPU", never=HEALTHY | {"ORPHAN_GPU"})
def one_card_is_smaller() -> Evidence:
    e = t.sglang(2, "init", ("init begin",))
    t.logged(
        e,
        "[2026-05-01 10:00:30 TP1] Scheduler hit an exception: Traceback (most recent call "
        "last):\nRuntimeError: The memory capacity is unbalanced. Some GPUs may be occupied by other processes.\n",
        50.0,
    )
    e.launcher_alive, e.processes = False, []
    e.gpus = [GpuFacts(0, 0, 4, 80.0, 400.0, 40_960, "A100-40G"), GpuFacts(1, 0, 4, 80.0, 400.0, 81_920, "A100-80G")]
    return e


@case("R28 container default", "kind of F1", first="SHM_SMALL", never=HEALTHY)
def nccl_cannot_make_its_segment() -> Evidence:
    e = t.sglang(2, "init", ("init begin",))
    t.logged(
        e,
        "[2026-05-01 10:00:10 TP0] Init torch distributed begin.\nnode:77:77 [0] NCCL WARN Error: "
        "failed to extend /dev/shm/nccl-x1 to 33030532 bytes, error: No space left on device (28)\n",
        60.0,
    )
    e.disks = [DiskFacts("shm", "/dev/shm", 60 << 20, 64 << 20, 999, "tmpfs")]
    return e


@case("R29 pipe to tee", "kind of row 32", first="STDOUT_PIPE_FULL", never=HEALTHY, rank=1)
def a_rank_cannot_write_since_tee_is_stopped() -> Evidence:
    e = t.sglang(2, "kv_pool")
    p = t.rank(e, 1)
    t.sleep(p, ("anon_pipe_write", "1 0x2 0x7f 0x60"), 2)
    p.stderr, p.pipes = "pipe:[99]", [PipeEnd(2, 99, "w", [701], peer_states="T", peer_names=["tee"])]
    return e


@case("R30 attached strace", "kind of row 33", first="IDLE_OK HEALTHY", also="TRACER_ATTACHED", never=HANGS | DEAD)
def somebody_watches_a_healthy_server() -> Evidence:
    e = t.served(t.sglang(2, "serving"))
    t.rank(e, 0).tracer_pid = 5050
    return e


@case("R31 DP", "kind of A3", first="API_ALIVE_ENGINE_DEAD", never=HEALTHY)
def one_of_four_replicas_is_a_zombie() -> Evidence:
    e = t.served(t.sglang(4, "serving"))
    e.target.ranks = 1
    for n, p in enumerate(t.ranks_of(e)):
        p.rank, p.label = 0, f"DP{n} TP0"
    e.log.ranks = []
    dead = t.ranks_of(e)[2]
    dead.state, dead.exit_signal, dead.main = "Z", 6, None
    return e


@case("R32 POSIX lock", "kind of row 12", first="LOCK_WAIT", never=HEALTHY | DEAD | {"JIT_STALE_LOCK"})
def a_rank_waits_for_a_lock_of_a_living_stranger() -> Evidence:
    e = t.sglang(2, "jit", (*t.LOADED, "jit"))
    t.sleep(t.rank(e, 0), ("fcntl_setlk", "72 0x30 0x7 0x7f"), 48)
    t.sleep(t.rank(e, 1), t.EPOLL)
    e.locks = [LockFacts("POSIX", 1234, 6006, t.pid_of(0), "/scratch/triton/x.lock", "ext4")]
    return e


@case("R33 gloo bytes", "look-alike of E1", first="IDLE_OK HEALTHY", never=HANGS | DEAD | {"UNKNOWN"})
def ranks_exchange_wake_ups_and_answer() -> Evidence:
    e = t.served(t.sglang(2, "serving"))
    e.deep = True
    polls = SyscallCount("sglang::schedul", True, "poll", 23_000)
    bytes_ = SyscallCount("pt_gloo_runloop", False, "write", 4000, "pipe")
    e.traces = [Trace(t.pid_of(0), "TP0", 2.0, [polls, bytes_])]
    return e


@case("R34 mismatch while starting", "kind of S3b", first="COLLECTIVE_DIVERGED", never=HEALTHY | DEAD | {"KERNEL_SPIN"})
def both_cards_wait_and_the_counts_differ() -> Evidence:
    e = t.warming(t.sglang(2, "warmup"))
    for p in t.ranks_of(e):
        t.burn(p, user=0.6)
        e.traces.append(
            Trace(p.pid, p.label, 2.0, [SyscallCount("sglang::schedul", True, "ioctl", 2, "/dev/nvidiactl")])
        )
    t.cards(e, [100, 100], 150.0)
    e.deep = True
    e.ras = RasFacts(
        "MISMATCH",
        1,
        [OperationCounts("AllReduce", "9", [RankCount(0, 18, t.pid_of(0)), RankCount(1, 17, t.pid_of(1))])],
    )
    return e


@case("R35 mirror is silent", "kind of row 28", first="HUB_BLOCKED", never=HEALTHY | DEAD)
def the_download_of_vllm_gets_no_bytes() -> Evidence:
    e = t.vllm(1)
    e.processes = e.processes[:1]
    t.logged(e, "INFO 05-01 10:00:01 [api_server.py:1800] vLLM API server version 0.11.0\n", 900.0)
    t.sleep(t.head(e), ("poll_schedule_timeout.constprop.0", "7 0x7f 0x1 0x2710"), 30)
    t.head(e).sockets = [SocketFacts(30, "ESTABLISHED", "10.0.0.4:41000", "[2001:db8::9]:443")]
    e.stacks = [
        Stack(
            t.HEAD,
            "launcher",
            "",
            "idle",
            ["read (ssl.py:1100)", "iter_raw (httpx/_models.py:900)", "xet_get (huggingface_hub/file_download.py:500)"],
        )
    ]
    e.deep = True
    return e


@case("R36 swap", "look-alike of B1", first="LOADING_SLOW BUSY_NOT_HUNG", never=HANGS | DEAD)
def one_thread_of_each_rank_still_reads() -> Evidence:
    e = t.sglang(2, "weights", t.LOADED[:3], quiet=1000.0)
    for p in t.ranks_of(e):
        p.threads = [ThreadFacts(p.pid + 5, "safetensors-0", "D", 0.1, 0.2, 0.2, 30.0, "folio_wait_bit_common")]
        p.read_bytes_delta = 12 << 20
    e.memory.pressure_full = 12.0
    return e
