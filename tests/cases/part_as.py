"""Part AS: an eleventh set: work that only CPU time and power tell of, and hangs that look as busy."""

from __future__ import annotations

from cases import gpuhost as g
from cases import tree as t
from cases.table import DEAD, HANGS, HEALTHY, case
from fleetdump.agent.evidence_process import ProcessFacts, ThreadFacts
from fleetdump.agent.evidence_types import Evidence

ALIVE = HANGS | DEAD | {"UNKNOWN"}


def busy_threads(p: ProcessFacts, count: int, user: float = 0.97) -> None:
    """As many threads beside the main one burn a core each."""
    more = [ThreadFacts(p.pid + 3000 + n, "python3", "R", 0.97, 0.99, user, 3.0, "0", "running") for n in range(count)]
    p.threads, p.cpu = [*more, *p.threads], p.cpu + count


@case("eleventh, weights are packed on the CPU", "AWQ and GGUF", first="BUSY_NOT_HUNG LOADING_SLOW", never=ALIVE)
def repacked_by_all_cores() -> Evidence:
    e = g.sgl(2, g.WEIGHTS, quiet=200.0)
    for p in t.ranks_of(e):
        t.burn(p, 1.0, 0.99)
        busy_threads(p, 15)
    g.h100(e, 0, 119.0, 40_000)
    g.lacking(e, "py-spy", "strace")
    return e


@case("eleventh, one rank packs and one waits", "the same on one rank", first="BUSY_NOT_HUNG LOADING_SLOW", never=ALIVE)
def one_rank_uses_many_cores() -> Evidence:
    e = g.sgl(2, g.WEIGHTS, quiet=200.0)
    t.sleep(t.rank(e, 0), t.FUTEX)
    t.burn(t.rank(e, 1), 1.0, 0.99)
    busy_threads(t.rank(e, 1), 15)
    g.h100(e, 0, 119.0, 40_000)
    g.lacking(e, "py-spy", "strace")
    return e


@case(
    "eleventh, kernels are compiled for the first request",
    "sgl-project/sglang#9867",
    first="BUSY_NOT_HUNG JIT_COMPILING",
    never=ALIVE,
)
def compiled_in_process_during_warm_up() -> Evidence:
    log = g.opening(g.start(8, g.CAPTURE))
    log.say("Entering DeepGEMM JIT Pre-Compile session. It may take a long time (typically 10-20 mins).", "TP0")
    log.raw("DeepGEMM warmup:   0%|          | 0/16384 [00:00<?, ?it/s]")
    e = g.furnish(t.warming(t.sglang(8, "warmup"), 503))
    t.logged(e, log.text(), 220.0)
    for p in t.ranks_of(e):
        t.sleep(p, t.FUTEX)
    busy_threads(t.rank(e, 0), 15)
    g.h100(e, 0, 121.0)
    g.lacking(e, "py-spy", "strace")
    return e


@case("eleventh, attention over a million tokens", "power between waiting and full", first="BUSY_NOT_HUNG", never=ALIVE)
def one_batch_at_half_power() -> Evidence:
    log = g.ready(8)
    log.say(
        "Prefill batch, #new-seq: 1, #new-token: 8192, #cached-token: 917504, token usage: 0.91, #running-req: 0, ",
        "TP0",
    )
    e = g.serving(8, log, 100.0, health=0)
    for p in t.ranks_of(e):
        t.burn(p, 1.0, 0.6)
    g.h100(e, 100, 365.0)
    g.lacking(e, "py-spy", "strace", "ras")
    return e


@case("eleventh, memory is registered with the network", "mooncake", first="BUSY_NOT_HUNG", never=ALIVE)
def registered_by_the_kernel() -> Evidence:
    e = g.sgl(4, g.POOL, quiet=400.0)
    for p in t.ranks_of(e):
        t.burn(p, 1.0, 0.02)
        p.kernel_stack = []
    g.h100(e, 0, 121.0)
    g.lacking(e, "py-spy", "strace", "dmesg")
    return e


@case(
    "eleventh, three cores a rank and no end",
    "sgl-project/sglang#3752",
    first="KERNEL_SPIN RANK_SPIN COLLECTIVE_DIVERGED",
    never=HEALTHY | DEAD | {"JIT_COMPILING"},
)
def hang_with_busy_helpers() -> Evidence:
    log = g.decode(g.ready(8), 31, 1500.0)
    e = g.serving(8, log, 290.0, health=0)
    for p in t.ranks_of(e):
        t.burn(p, 1.0, 0.6)
        busy_threads(p, 2, 0.5)
    g.h100(e, 100, 138.0)
    g.lacking(e, "py-spy", "strace", "ras")
    return e


@case(
    "eleventh, a kernel computes for ever",
    "half power, a quarter of an hour",
    first="KERNEL_SPIN RANK_SPIN",
    never=HEALTHY | DEAD,
)
def no_batch_takes_so_long() -> Evidence:
    e = one_batch_at_half_power()
    e.log.quiet_seconds = 900.0
    return e


@case(
    "eleventh, a kernel that spins in the kernel",
    "a driver's loop",
    first="PARENT_WAITS_READY",
    never=HEALTHY | DEAD | {"JIT_COMPILING"},
)
def registered_for_ever() -> Evidence:
    e = registered_by_the_kernel()
    e.log.quiet_seconds = 3000.0
    e.uptime = 3600.0
    return e


@case(
    "eleventh, threads that wait actively",
    "OMP_WAIT_POLICY=active",
    first="PARENT_WAITS_READY LOADER_DEADLOCK",
    never=HEALTHY | DEAD | {"LOADING_SLOW", "JIT_COMPILING"},
)
def waiting_threads_burn_cores() -> Evidence:
    e = g.sgl(2, g.WEIGHTS, quiet=3000.0)
    for p in t.ranks_of(e):
        t.sleep(p, t.FUTEX)
        busy_threads(p, 31, 1.0)
    g.h100(e, 0, 119.0, 40_000)
    g.lacking(e, "py-spy", "strace")
    return e


@case(
    "eleventh, a rank spins and others sleep",
    "kind of H1 at the weights",
    first="PARENT_WAITS_READY",
    rank=1,
    never=HEALTHY | DEAD | {"LOADING_SLOW"},
)
def one_core_is_no_work() -> Evidence:
    e = g.sgl(4, g.WEIGHTS, quiet=400.0)
    for p in t.ranks_of(e):
        t.sleep(p, t.FUTEX)
    t.burn(t.rank(e, 1), 1.0, 1.0)
    busy_threads(t.rank(e, 1), 1)
    g.h100(e, 0, 119.0, 40_000)
    g.lacking(e, "py-spy", "strace")
    return e
