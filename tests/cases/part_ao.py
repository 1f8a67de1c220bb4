"""Part AO: look-alikes of what the seventh set taught: the same facts but the one that decides."""

from __future__ import annotations

from cases import gpuhost as g
from cases import tree as t
from cases.table import DEAD, HANGS, HEALTHY, case
from fleetdump.agent.evidence_host import GpuProcess
from fleetdump.agent.evidence_process import SocketFacts
from fleetdump.agent.evidence_types import Evidence


@case(
    "seventh, children that ended at once",
    "sgl-project/sglang#27368",
    first="PARENT_WAITS_DEAD_RANK",
    never=HEALTHY | {"OOM_KILLED", "IMPORT_STALL"},
)
def binding_to_a_node_was_refused() -> Evidence:
    e = g.sgl(2, 0, quiet=200.0, uptime=215.0)
    for p in e.processes:
        if p.role in ("scheduler", "detokenizer"):
            p.name = "python3"
            g.zombie(p, 0)
    head = t.head(e)
    head.pipes, head.readable = [], False
    t.sleep(head, g.POLLED)
    return e


@case(
    "seventh, a helper that ended",
    "a subprocess that nobody has waited for",
    first="BUSY_NOT_HUNG",
    never=HANGS | DEAD | {"IMPORT_STALL"},
)
def one_dead_child_of_a_young_launcher() -> Evidence:
    e = g.sgl(4, 0, quiet=30.0, uptime=31.0)
    e.processes = [t.head(e), t.child(t.HEAD + 5, "other", "python3", "Z")]
    t.head(e).pipes = []
    return e


@case(
    "seventh, frozen by version 1",
    "docker pause on an older host",
    first="STOPPED_PROCESS",
    never=HEALTHY | {"UNKNOWN"},
)
def frozen_by_the_older_freezer() -> Evidence:
    log = g.decode(g.ready(2), 4, 301.8)
    e = g.serving(2, log, 3900.0, health=0, other=0)
    for p in e.processes:
        t.disk(p, "__refrigerator")
    return e


@case(
    "seventh, asleep in a signal's place",
    "nothing is frozen",
    first="API_LOOP_BLOCKED UNKNOWN",
    never=HEALTHY | {"STOPPED_PROCESS"},
)
def only_asleep() -> Evidence:
    log = g.decode(g.ready(2), 4, 301.8)
    e = g.serving(2, log, 3900.0, health=0, other=0)
    for p in e.processes:
        t.sleep(p, ("do_signal_stop" if p.role == "resource_tracker" else "futex_do_wait", "202 0x1 0x189"))
    return e


@case(
    "seventh, memory that the driver allocates",
    "sgl-project/sglang#26568",
    first="BUSY_NOT_HUNG",
    never=HANGS | DEAD | {"UNKNOWN"},
)
def pinned_memory_that_counts_as_nobodys() -> Evidence:
    e = g.sgl(2, g.POOL, quiet=280.0)
    for p in t.ranks_of(e):
        t.burn(p, cpu=1.0, user=0.01)
        p.kernel_stack = [
            "clear_page_erms",
            "get_page_from_freelist",
            "__alloc_pages",
            "nv_alloc_system_pages",
            "nvidia_ioctl",
        ]
    return e


@case(
    "seventh, a kernel short of memory",
    "reclaim without end",
    first="PARENT_WAITS_READY LOADER_DEADLOCK",
    never=HEALTHY | {"LOADING_SLOW"},
)
def the_kernel_looks_for_memory_and_finds_none() -> Evidence:
    e = g.sgl(2, g.POOL, quiet=1500.0)
    for p in t.ranks_of(e):
        t.burn(p, cpu=1.0, user=0.01)
        p.kernel_stack = [
            "shrink_folio_list",
            "shrink_lruvec",
            "try_to_free_pages",
            "__alloc_pages_slowpath",
            "__alloc_pages",
        ]
    e.memory.available, e.memory.pressure_full = g.GIB, 88.0
    return e


@case(
    "seventh, kernels are compiled behind the same file",
    "triton",
    first="JIT_COMPILING",
    never=HANGS | DEAD | {"KERNEL_SPIN"},
)
def triton_makes_code() -> Evidence:
    log = g.decode(g.ready(2), 1, 12.2)
    e = g.serving(2, log, 190.0, health=503)
    for p in t.ranks_of(e):
        t.burn(p, 1.0, 0.97)
    frames = [
        "make_ptx (triton/backends/nvidia/compiler.py:380)",
        "compile (triton/compiler/compiler.py:300)",
        "run (triton/runtime/jit.py:744)",
    ]
    t.dump(e, {0: frames, 1: frames}, busy=(0, 1))
    g.h100(e, 0, 122.0)
    return e


@case(
    "seventh, GPUs still compute behind the broadcast",
    "overlapped scheduler",
    first="BUSY_NOT_HUNG",
    never=HANGS | DEAD | {"RANK_SPIN"},
)
def hosts_run_ahead_of_their_gpus() -> Evidence:
    log = g.decode(g.ready(4), 3, 900.0)
    e = g.serving(4, log, 70.0, health=503)
    t.burn(t.rank(e, 0), 1.0, 0.6)
    for n in (1, 2, 3):
        t.sleep(t.rank(e, n), t.FUTEX)
    forward = [
        "run_batch (sglang/srt/managers/scheduler.py:1904)",
        "event_loop_overlap (sglang/srt/managers/scheduler.py:921)",
    ]
    t.dump(e, {n: g.BROADCAST if n else forward for n in range(4)}, busy=(0,))
    g.h100(e, 100, 655.0)
    return e


@case(
    "seventh, one rank left the batch",
    "sgl-project/sglang#27221",
    first="COLLECTIVE_DIVERGED",
    never=HEALTHY | {"KERNEL_SPIN"},
    rank=6,
)
def one_rank_is_back_in_its_loop() -> Evidence:
    log = g.decode(g.ready(8), 44, 2011.0)
    e = g.serving(8, log, 200.0, health=0)
    for n, p in enumerate(t.ranks_of(e)):
        if n == 6:
            t.sleep(p, t.FUTEX)
            p.cpu = 0.0
        else:
            t.burn(p, 1.0, 0.55)
    forward = [
        "forward_batch_generation (sglang/srt/managers/tp_worker.py:371)",
        "run_batch (sglang/srt/managers/scheduler.py:1904)",
    ]
    t.dump(e, {n: g.BROADCAST if n == 6 else forward for n in range(8)}, busy=[n for n in range(8) if n != 6])
    g.h100(e, [0 if n == 6 else 100 for n in range(8)], 139.0)
    return e


@case(
    "seventh, a bar that never began",
    "kind of a stuck warm-up",
    first="LAUNCHER_DIED",
    never=HEALTHY | {"TIMEOUT_TOO_SHORT"},
)
def warm_up_timed_out_before_anything_moved() -> Evidence:
    log = g.opening(g.start(8, g.CAPTURE))
    log.raw("DeepGEMM warmup:   0%|          | 0/16384 [00:00<?, ?it/s]")
    log.say("Initialization failed. warmup error: Traceback (most recent call last):", after=600)
    log.raw(
        "requests.exceptions.ReadTimeout: HTTPConnectionPool(host='127.0.0.1', port=9123): Read timed "
        "out. (read timeout=600)",
        "",
    )
    e = g.gone(g.furnish(t.sglang(8, "warmup")))
    t.logged(e, log.text(), 33.0)
    return e


@case(
    "seventh, weights of the second host",
    "multi-node load",
    first="LOADING_SLOW",
    never=HANGS | DEAD | {"UNKNOWN"},
    phase="weights",
)
def second_host_loads() -> Evidence:
    log = g.start(16, g.WEIGHTS)
    log.lines = [line for line in log.lines if not any(f" TP{n}]" in line for n in range(8))]
    e = g.furnish(t.sglang(8, "weights"))
    e.target.ranks, e.target.nodes, e.target.node_rank = 16, 2, 1
    t.logged(e, log.text(), 150.0)
    for n, p in enumerate(t.ranks_of(e)):
        p.rank, p.label, p.read_bytes_delta = n + 8, f"TP{n + 8}", 90_000_000
    return e


@case(
    "seventh, one network and a closed port",
    "a firewall between two hosts",
    first="MISSING_RANK",
    never=HEALTHY | {"WRONG_INTERFACE"},
)
def same_address_and_no_answer() -> Evidence:
    log = g.start(16, 1)
    log.lines = [line for line in log.lines if not any(f" TP{n}]" in line for n in range(8))]
    e = g.furnish(t.sglang(8, "init"))
    e.target.ranks, e.target.nodes, e.target.node_rank = 16, 2, 1
    t.logged(e, log.text(), 540.0)
    for n, p in enumerate(t.ranks_of(e)):
        p.rank, p.label = n + 8, f"TP{n + 8}"
        t.sleep(p, g.POLLED)
        p.sockets = [
            SocketFacts(40, "ESTABLISHED", "10.0.1.14:41022", "10.0.1.13:20000"),
            SocketFacts(71, "SYN_SENT", "10.0.1.14:50112", "10.0.1.13:46871"),
        ]
    return e


@case(
    "seventh, the GPUs compute for a trainer",
    "a rollout server that hangs beside its trainer",
    first="RANK_SPIN",
    never=HEALTHY | DEAD,
)
def power_of_somebody_else() -> Evidence:
    log = g.decode(g.ready(4), 31, 1500.0)
    e = g.serving(4, log, 400.0, health=503)
    for p in t.ranks_of(e):
        t.burn(p, 1.0, 0.6)
    g.h100(e, 100, 620.0, 68_000)
    for n, gpu in enumerate(e.gpus):
        gpu.processes = [
            GpuProcess(t.pid_of(n), 3100, "sglang::schedul", ours=True),
            GpuProcess(90_001 + n, 64_000, "ray::MegatronTr"),
        ]
    g.lacking(e, "py-spy", "strace", "ras")
    return e
