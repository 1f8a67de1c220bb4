"""Part AI: the set of part AH goes on."""

from __future__ import annotations

from cases import builder as b
from cases import tree as t
from cases.logtext import CAPTURE, LOADED, OPENED, STARTED, sgl, vllm_log
from cases.part_ae import baton_in_request, deepgemm_under_traffic, inductor_pool, ring_while_compiling
from cases.part_ag import no_descriptor, nothing_may_be_read
from cases.table import DEAD, HANGS, HEALTHY, case
from fleetdump.agent.evidence_engine import FlightRecord, HttpProbe, OperationCounts, RankCount, RasFacts
from fleetdump.agent.evidence_host import GpuFacts, LockFacts, LockFile
from fleetdump.agent.evidence_process import PipeEnd, SocketFacts
from fleetdump.agent.evidence_types import Evidence


@case(
    "fifth set, API server sleeps behind control Z",
    "kind of row 33",
    first="STOPPED_PROCESS",
    never=HEALTHY | {"API_LOOP_BLOCKED"},
)
def control_z() -> Evidence:
    e = t.served(t.vllm(2, quiet=300.0), 0, 0)
    t.head(e).state = t.head(e).state_before = "T"
    return e


@case(
    "fifth set, a debugger was forgotten in a worker",
    "kind of row 33",
    first="TRACER_ATTACHED STOPPED_PROCESS",
    also="TRACER_ATTACHED",
    never=HEALTHY | {"KERNEL_SPIN"},
    rank=1,
)
def debugger() -> Evidence:
    e = t.vllm(4)
    t.logged(e, vllm_log(*STARTED[:4]), 900.0)
    p = t.rank(e, 1)
    p.state = p.state_before = "t"
    p.tracer_pid = 60_001
    for n in (0, 2, 3):
        t.burn(t.rank(e, n), user=0.6)
    t.cards(e, [100, 0, 100, 100], 120.0)
    return e


@case("fifth set, nvidia-smi cannot find a handle", "LLaVA#1466 kind", first="XID", never=HEALTHY | {"DRIVER_D_STATE"})
def no_handle() -> Evidence:
    e = t.served(t.sglang(8, "serving", quiet=500.0), 0, 200, running=9)
    for p in t.ranks_of(e):
        t.burn(p, user=0.6)
    b.failed_probe(e, "nvidia-smi", "exit 15: Unable to determine the device handle for GPU0000:1B:00.0: Unknown Error")
    e.kernel_log = ["[51200.3] NVRM: Xid (PCI:0000:1b:00): 79, GPU has fallen off the bus."]
    return e


@case("fifth set, the other host is told 127.0.1.1", "vllm#7074 kind", first="WRONG_INTERFACE", never=HEALTHY | DEAD)
def told_loopback() -> Evidence:
    e = t.sglang(8, "init", ("init begin",))
    b.second_of_two_hosts(e)
    t.logged(
        e,
        "".join(f"[2026-11-28 03:10:11 TP{8 + r}] Init torch distributed begin.\n" for r in range(8))
        + (
            "RuntimeError: Gloo connectFullMesh failed with "
            "[../third_party/gloo/gloo/transport/tcp/pair.cc:144] no error, "
            "remote=[127.0.1.1]:33211\n"
        ),
        400.0,
    )
    for p in t.ranks_of(e):
        p.sockets = [SocketFacts(50, "SYN_SENT", "127.0.0.1:50000", "127.0.1.1:33211")]
    e.host.addresses = {"lo": ["127.0.0.1"], "bond0": ["10.4.0.9"]}
    e.host.name_resolves_to = ["127.0.1.1"]
    return e


@case("fifth set, a GPU works for nobody", "rtx6kpro#15 kind", first="GPU_WEDGED", never=HEALTHY | {"KERNEL_SPIN"})
def for_nobody() -> Evidence:
    e = t.vllm(2)
    t.logged(e, vllm_log(*STARTED[:1]), 400.0)
    e.gpus = [
        GpuFacts(
            n,
            100 if n else 0,
            624 if n else 4,
            119.0 if n else 15.0,
            600.0,
            97_000,
            "RTX PRO 6000",
            processes_known=True,
        )
        for n in range(2)
    ]
    return e


@case(
    "fifth set, it was told another host's address",
    "kind of BAD_BIND_HOST",
    first="BAD_BIND_HOST",
    never=HEALTHY | {"PORT_IN_USE"},
)
def other_address() -> Evidence:
    e = t.sglang(2, "http")
    t.logged(
        e,
        sgl(2, *CAPTURE)
        + (
            "[2026-11-28 03:16:40] INFO:     Started server process [31000]\n"
            "[2026-11-28 03:16:41] ERROR:    [Errno 99] error while attempting to bind on address ('10.9.0.4', 9123): "
            "cannot assign requested address\n"
        ),
        20.0,
    )
    b.dead(e)
    return e


@case(
    "fifth set, one rank builds and the others wait for its lock",
    "flashinfer#972 kind, healthy",
    first="JIT_COMPILING",
    never=HANGS | {"LOCK_WAIT"},
)
def builds() -> Evidence:
    e = t.sglang(8, "jit", quiet=200.0)
    path = "/root/.cache/flashinfer/0.5.2/90a/cached_ops/batch_prefill/batch_prefill.lock"
    for k, name in enumerate(("ninja", "nvcc", "cicc", "cicc", "ptxas")):
        compiler = t.child(33_000 + k, "compiler", name, "S" if k < 2 else "R", ppid=t.pid_of(4))
        if k >= 2:
            t.burn(compiler)
        e.processes.append(compiler)
    for p in t.ranks_of(e):
        if p.rank != 4:
            t.sleep(p, ("locks_lock_inode_wait", "73 0x31 0x2"))
            e.locks.append(LockFacts("FLOCK", 771, t.pid_of(4), p.pid, path, "ext4"))
    e.lock_files = [LockFile(path, 190.0, t.pid_of(4), locked=True, fstype="ext4")]
    return e


@case(
    "fifth set, one rank has launched one less",
    "kind of row 9",
    first="MISSING_RANK RANK_SPIN COLLECTIVE_DIVERGED",
    never=HEALTHY | {"KERNEL_SPIN", "P2P_BLOCKED"},
    rank=5,
)
def one_less() -> Evidence:
    e = t.served(t.vllm(8, quiet=500.0), 200, 200, running=4)
    e.http.append(HttpProbe("/v1/completions", 0, 10.0, "timed out"))
    counts = [RankCount(n, 7000 if n == 5 else 7001, t.pid_of(n)) for n in range(8)]
    e.ras = RasFacts("MISMATCH", 3, [OperationCounts("AllReduce", "0x7f", counts)])
    for p in t.ranks_of(e):
        t.burn(p, user=0.6)
    t.sleep(t.rank(e, 5), t.FUTEX)
    t.rank(e, 5).cpu = 0.0
    t.cards(e, [0 if n == 5 else 100 for n in range(8)], 170.0, 700.0)
    return e


@case(
    "fifth set, watchdog speaks and nobody ends",
    "pytorch#97191 kind",
    first="KERNEL_SPIN COLLECTIVE_DIVERGED",
    never=HEALTHY,
)
def watchdog() -> Evidence:
    e = t.served(t.vllm(4, quiet=900.0), 200, 200)
    t.logged(
        e,
        vllm_log(*STARTED)
        + OPENED
        + (
            "[rank2]:[E1128 04:40:11.1 ProcessGroupNCCL.cpp:632] [Rank 2] Watchdog caught collective operation "
            "timeout: "
            "WorkNCCL(SeqNum=812, OpType=ALLREDUCE, NumelIn=4096, NumelOut=4096, Timeout(ms)=600000) ran for 600010 "
            "milliseconds before timing out.\n"
        ),
        900.0,
    )
    for p in t.ranks_of(e):
        t.burn(p, user=0.6)
    t.cards(e, [100] * 4, 150.0, 700.0)
    e.flight = [FlightRecord(n, 812, "all_reduce", "started", [4096]) for n in range(4)]
    return e


@case(
    "fifth set, launcher keeps the writing end",
    "sglang#34233",
    first="PIPE_EOF_IMPOSSIBLE",
    also="PIPE_EOF_IMPOSSIBLE",
    never=HEALTHY | {"PARENT_WAITS_READY"},
)
def keeps_the_end() -> Evidence:
    e = t.sglang(2, "kv_pool", quiet=1000.0)
    b.died_of(t.rank(e, 1), 9)
    head = t.head(e)
    t.sleep(head, t.PIPE, 28)
    head.pipes = [PipeEnd(27, 70_000, "r", [t.pid_of(0)]), PipeEnd(28, 70_001, "r", [], own_writer=True)]
    return e


@case("fifth set, an idle server of eight replicas", "kind of E1", first="IDLE_OK", never=HANGS | DEAD)
def replicas() -> Evidence:
    e = t.served(t.sglang(8, "serving", quiet=7000.0))
    for p in t.ranks_of(e):
        p.label, p.rank = f"DP{p.rank} TP0", 0
    e.log.ranks = []
    e.target.ranks = 1
    e.processes.append(t.child(t.HEAD + 5, "data_parallel_controller", "sglang::data_pa"))
    t.cards(e, [0] * 8, 70.0)
    return e


# What only looks like cases of parts AE to AH: the same facts but the one that decides.
@case(
    "look-alike, lock is younger than the standstill",
    "kind of row 12",
    first="LOCK_WAIT",
    never=HEALTHY | {"JIT_STALE_LOCK"},
)
def younger_lock() -> Evidence:
    e = baton_in_request()
    e.lock_files[0].age_seconds = 600.0
    return e


@case(
    "look-alike, lock on a shared file system", "kind of row 12", first="LOCK_WAIT", never=HEALTHY | {"JIT_STALE_LOCK"}
)
def shared_lock() -> Evidence:
    e = baton_in_request()
    e.lock_files[0].fstype = "nfs4"
    return e


@case(
    "look-alike, inductor's pool sleeps",
    "vllm#15360 kind",
    first="PARENT_WAITS_READY",
    never=HEALTHY | {"JIT_COMPILING"},
)
def pool_sleeps() -> Evidence:
    e = inductor_pool()
    for p in e.processes:
        if p.role == "compile_worker":
            t.sleep(p, t.FUTEX)
            p.cpu = 0.0
    return e


@case(
    "look-alike, DeepGEMM's bar has stopped",
    "sglang#10856 kind",
    first="UNKNOWN RANK_SPIN",
    never=HEALTHY | {"JIT_COMPILING"},
)
def bar_has_stopped() -> Evidence:
    e = deepgemm_under_traffic()
    for p in t.ranks_of(e):
        p.threads = []
    e.log.news, e.log.growth, e.log.quiet_seconds = 0, 0, 1500.0
    return e


@case(
    "look-alike, descriptors are scarce and the server answers",
    "kind of row 27",
    first="IDLE_OK",
    never=HANGS | {"NOFILE"},
)
def answers_with_few_descriptors() -> Evidence:
    e = no_descriptor()
    e.http = [HttpProbe("/health", 200, 0.2), HttpProbe("/model_info", 200, 0.01)]
    return e


@case("look-alike, ring was full an hour ago", "vllm#27313 kind", first="IDLE_OK", never=HANGS | {"UNKNOWN"})
def ring_was_full() -> Evidence:
    e = ring_while_compiling()
    e.processes = [p for p in e.processes if p.role != "compiler"]
    e.log.quiet_seconds = 3600.0
    for p in t.ranks_of(e):
        t.sleep(p, t.FUTEX)
        p.cpu = 0.0
    t.cards(e, [0, 0], 70.0)
    return e


@case(
    "look-alike, only the log may be read",
    "py-spy#8 kind",
    first="PARENT_WAITS_READY",
    also="DIAG_BLIND",
    never=HEALTHY | DEAD,
)
def only_the_log() -> Evidence:
    e = nothing_may_be_read()
    t.logged(e, sgl(4, *LOADED), 900.0)
    return e


@case(
    "look-alike, only CPU times may be read and one rank spins",
    "py-spy#8 kind",
    first="PARENT_WAITS_READY",
    also="DIAG_BLIND",
    never=HEALTHY | DEAD,
    rank=2,
)
def only_cpu_times() -> Evidence:
    e = nothing_may_be_read()
    t.burn(t.rank(e, 2))
    return e
