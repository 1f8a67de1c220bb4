"""Part B: weights."""

from __future__ import annotations

from cases import builder as b
from cases.table import HANGS, HEALTHY, case
from fleetdump.agent.evidence_host import DiskFacts, GpuFacts
from fleetdump.agent.evidence_types import Evidence

LOADING = ("init begin", "init end", "weights begin")
FULL_BAR = ["Loading safetensors checkpoint shards: 100% Completed | 94/94 [50:11<00:00, 32.0s/it]"]


def loading(ranks: int = 8) -> Evidence:
    e = b.server(ranks)
    b.at_phase(e, "weights", *LOADING)
    return e


@case("B1", "sgl-project/sglang#25748", first="LOADER_DEADLOCK", never=HEALTHY | {"LOADING_SLOW"}, phase="weights")
def loader_holds_the_whole_checkpoint() -> Evidence:
    e = loading()
    e.log.tail = ["found local snapshot, skip download"]
    for p in b.all_ranks(e):
        p.rss = 100 << 30
    e.memory.total, e.memory.available, e.memory.pressure_full = 1 << 40, 4 << 30, 40.0
    return e


@case("B1 stacks alone", "sgl-project/sglang#25748", first="LOADER_DEADLOCK", never=HEALTHY | {"LOADING_SLOW"})
def loader_sleeps_in_its_threads() -> Evidence:
    e = loading()
    b.stacks(
        e,
        {
            n: ["wait (threading.py:1)", "result (futures.py:2)", "safetensors_weights_iterator (weight_utils.py:3)"]
            for n in range(8)
        },
    )
    return e


def mapped_reads(e: Evidence) -> None:
    for n, p in enumerate(b.all_ranks(e)):
        p.rchar_delta, p.read_bytes_delta, p.majflt_delta = 400, 150_000_000, 9000
        p.state, p.state_before = "RD"[n % 2], "DR"[n % 2]
    e.gpus = [GpuFacts(n, 0, 76_000, 120.0, 700.0) for n in range(8)]


@case("B2", "vllm-project/vllm#40988", first="LOADING_SLOW", never=HANGS | HEALTHY, phase="weights")
def random_faults_after_the_bar_is_full() -> Evidence:
    e = loading()
    e.log.tail = FULL_BAR
    mapped_reads(e)
    return e


@case("B2 trickle", "vllm-project/vllm#40988", first="LOADING_SLOW", never=HANGS, phase="weights")
def mapped_reads_trickle() -> Evidence:
    e = loading(2)
    b.rank(e, 0).read_bytes_delta, b.rank(e, 0).majflt_delta = 500_000, 120
    return e


@case("B4", "vllm-project/vllm#24469", first="LOADING_SLOW", never=HANGS | {"REMOTE_FS_HANG", "DRIVER_D_STATE"})
def mapped_reads_over_nfs() -> Evidence:
    e = loading()
    mapped_reads(e)
    e.disks.append(DiskFacts("model", "/models/m", 10**12, 10**13, 10**6, "nfs4"))
    for p in b.all_ranks(e):
        b.disk_sleep(p, "nfs_wait_bit_killable", "nfs_readpage")
    return e


@case("B6a", "sgl-project/sglang#9917", first="LOADING_SLOW", never=HANGS, phase="weights")
def idle_looking_but_reading() -> Evidence:
    e = loading()
    e.log.tail = FULL_BAR
    b.rank(e, 3).read_bytes_delta = 90_000_000
    return e


@case("B6b", "sgl-project/sglang#122", first="JIT_COMPILING", never=HANGS | {"LOADING_SLOW"})
def idle_looking_but_compiling() -> Evidence:
    e = loading()
    e.log.tail = FULL_BAR
    e.processes += [b.process(900 + n, "compiler", ppid=200 + n, cpu=0.9, name="cicc") for n in range(4)]
    return e


@case("B7 burst", "sgl-project/sglang#15608", first="LOADING_SLOW", never=HANGS, phase="weights")
def bursts_from_a_remote_file_system() -> Evidence:
    e = loading()
    e.log.tail = ["Loading safetensors checkpoint shards:  60% Completed | 9/15 [04:01<03:20, 43.0s/it]"]
    e.disks.append(DiskFacts("model", "/mnt/dfs", 10**12, 10**13, 10**6, "fuse.hdfs"))
    b.rank(e, 0).rchar_delta = 40_000_000
    return e


@case("B7 end", "sgl-project/sglang#15608", first="PARENT_WAITS_READY UNKNOWN", never=HEALTHY | {"LOADING_SLOW"})
def silent_after_the_last_shard() -> Evidence:
    e = loading()
    e.log.tail = FULL_BAR
    return e
