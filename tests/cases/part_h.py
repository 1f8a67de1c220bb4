"""Part H: one log, many causes; growing logs of hung servers; two causes at once."""

from __future__ import annotations

from cases import builder as b
from cases.part_a import rank_killed_for_memory
from cases.part_e import idle_scheduler_polls, starved
from cases.part_f import download_lock_of_a_dead_process
from cases.table import HANGS, HEALTHY, case
from fleetdump.agent.evidence_host import LockFile
from fleetdump.agent.evidence_process import SyscallCount
from fleetdump.agent.evidence_types import Evidence

SPIN_FRAMES = ["DeepseekV2Model.forward (deepseek_v2.py:893)", "TpModelWorker.init (tp_worker.py:420)"]
WAIT_FRAMES = ["all_reduce (distributed_c10d.py:3252)", "get_available_gpu_memory (common.py:549)"]


@case(
    "H1",
    "Kimi-K2.5",
    first="PARENT_WAITS_READY",
    never=HEALTHY | {"KERNEL_SPIN", "P2P_BLOCKED"},
    rank=7,
    phase="kv_pool",
)
def kimi() -> Evidence:
    """Ranks 0 to 6 run a CPU loop that yields, rank 7 spins in user code; 76 GB on each idle GPU."""
    e = b.server(8)
    for n in range(7):
        b.poll_idle(b.rank(e, n))
    b.spin(b.rank(e, 7))
    b.gpus(e, *([0] * 8))
    b.blocked_in(b.launcher(e), "anon_pipe_read", "0 0x11 0x7f 0x4", 17)
    b.stacks(e, {**dict.fromkeys(range(7), WAIT_FRAMES), 7: SPIN_FRAMES}, {7: "active+gil"})
    b.trace(e, 0, SyscallCount("ZMQbg/IO/0", False, "write", 40, "eventfd"))
    b.trace(e, 7)
    return e


@case("H2", "Kimi-K2.5 variant", first="JIT_COMPILING", never=HANGS, rank=7)
def kimi_compiles() -> Evidence:
    e = kimi()
    e.stacks, e.stack_groups = [], []
    e.processes += [b.process(900 + n, "compiler", ppid=207, cpu=0.9, name="cicc") for n in range(3)]
    return e


@case(
    "H3",
    "Kimi-K2.5 variant",
    first="JIT_STALE_LOCK",
    never=HEALTHY | {"JIT_COMPILING", "JIT_COLLECTIVE_CROSSLOCK"},
    rank=7,
)
def kimi_waits_for_a_lock_file() -> Evidence:
    e = b.server(8)
    baton = ["wait (torch/utils/file_baton.py:49)", "_jit_compile (cpp_extension.py:2)", "load (cpp_extension.py:1)"]
    b.stacks(e, {**dict.fromkeys(range(7), WAIT_FRAMES), 7: baton})
    e.lock_files = [LockFile("/root/.cache/torch_extensions/x/lock", 7200.0)]
    return e


@case("H4 level", "Kimi-K2.5 variant", first="P2P_BLOCKED KERNEL_SPIN", never=HEALTHY | {"COLLECTIVE_DIVERGED"})
def kimi_waits_for_its_gpus() -> Evidence:
    e = b.server(8)
    b.wait_for_gpu(e, 90.0, 700.0, 76_000)
    b.stacks(e, {n: ["synchronize (cuda.py:1)", *SPIN_FRAMES] for n in range(8)}, dict.fromkeys(range(8), "active"))
    return e


@case(
    "H4 parted",
    "Kimi-K2.5 variant",
    first="COLLECTIVE_DIVERGED PARENT_WAITS_READY",
    never=HEALTHY | {"P2P_BLOCKED", "KERNEL_SPIN"},
)
def kimi_has_parted() -> Evidence:
    e = kimi_waits_for_its_gpus()
    frames = {n: ["broadcast (distributed_c10d.py:5)"] for n in range(8)} | {3: WAIT_FRAMES}
    b.stacks(e, frames, dict.fromkeys(range(8), "active"))
    return e


@case(
    "H5",
    "Kimi-K2.5 variant",
    first="OOM_KILLED PARENT_WAITS_DEAD_RANK",
    also="PARENT_WAITS_DEAD_RANK OOM_KILLED",
    never=HEALTHY,
    rank=7,
)
def kimi_lost_a_rank() -> Evidence:
    e = kimi()
    b.lose(e, 7)
    e.memory.oom_lines = ["[900.1] Out of memory: Killed process 207 (sglang::schedul) total-vm:1kB"]
    return e


@case("H6", "Kimi-K2.5 variant", first="LOADING_SLOW", never=HANGS)
def kimi_reads() -> Evidence:
    e = b.server(8)
    b.rank(e, 7).read_bytes_delta = 400_000_000
    return e


@case("H7", "Kimi-K2.5 variant", first="IDLE_OK", never=HANGS)
def kimi_is_idle() -> Evidence:
    e = b.server(8)
    b.serving(e)
    return e


@case("H8", "Kimi-K2.5 variant", first="PARENT_WAITS_READY", also="DIAG_BLIND", never=HEALTHY, rank=7, phase="kv_pool")
def kimi_without_ptrace() -> Evidence:
    e = kimi()
    e.stacks, e.stack_groups, e.traces = [], [], []
    b.failed_probe(e, "py-spy TP7", "Permission denied (os error 13), yama 1")
    b.failed_probe(e, "strace TP7", "ptrace(PTRACE_SEIZE, 207): Operation not permitted")
    return e


@case("H9 lock client", "growing log", first="HUB_LOCK", never=HEALTHY)
def log_grows_while_a_client_waits() -> Evidence:
    return download_lock_of_a_dead_process()


@case("H9 parent", "growing log", first="PARENT_WAITS_READY", never=HEALTHY)
def log_grows_while_a_child_sleeps() -> Evidence:
    e = b.server(2)
    e.log.growth, e.log.quiet_seconds, e.log.repeated = 500, 3.0, 50
    e.log.repeated_line = "waiting for the engine"
    return e


@case("H9 statistics", "growing log", first="RANK_SPIN UNKNOWN WARMUP_STALL KERNEL_SPIN", never=HEALTHY)
def log_grows_with_zeros() -> Evidence:
    e = starved()
    b.spin(b.rank(e, 1))
    return e


@case("H9 frozen log", "frozen log", first="IDLE_OK", never=HANGS)
def log_is_frozen_and_all_is_well() -> Evidence:
    return idle_scheduler_polls()


@case(
    "H10", "two causes", first="XID DRIVER_D_STATE", also="XID DRIVER_D_STATE PARENT_WAITS_DEAD_RANK OOM_KILLED",
    never=HEALTHY | {"PARENT_WAITS_READY"},
)  # fmt: skip
def dead_rank_and_a_sick_driver() -> Evidence:
    e = rank_killed_for_memory()
    e.kernel_log = [f"[9{n}0.0] NVRM: Xid (PCI:0000:1b:00): 45, pid={n}, Ch 00000010" for n in range(1, 7)]
    e.kernel_log.append("[990.0] INFO: task nvidia-smi:77 blocked for more than 122 seconds.")
    b.failed_probe(e, "nvidia-smi", "no answer within 9 s")
    return e
