"""Part C: compilers, locks, graph capture."""

from __future__ import annotations

from cases import builder as b
from cases.table import HANGS, HEALTHY, case
from fleetdump.agent.evidence_host import LockFacts, LockFile
from fleetdump.agent.evidence_process import ThreadFacts
from fleetdump.agent.evidence_types import Evidence

BEFORE_CAPTURE = ("init begin", "init end", "weights begin", "weights end", "kv pool end")
FORWARD = ["DeepseekV2Model.forward (deepseek_v2.py:90)", "ModelRunner.forward (model_runner.py:1)"]
STALE = LockFile("/root/.cache/flashinfer/90/cached_ops/x/lock", 7200.0)


def capturing(ranks: int = 8) -> Evidence:
    e = b.server(ranks)
    b.at_phase(e, "capture", *BEFORE_CAPTURE, "capture begin")
    e.log.tail = ["Capturing batches (bs=160):   0%|          | 0/23 [00:00<?, ?it/s]"]
    return e


@case("C1", "sgl-project/sglang-omni#1194", first="JIT_COMPILING", never=HANGS | {"LOCK_WAIT"}, phase="capture")
def compilers_inside_capture() -> Evidence:
    e = capturing()
    ninja = b.process(890, "compiler", ppid=200, cpu=0.0, name="ninja")
    e.processes += [ninja, *(b.process(900 + n, "compiler", ppid=890, cpu=1.0, name="cicc") for n in range(16))]
    e.locks = [LockFacts("FLOCK", 77, 200, 201, "/tmp/gpu0.start.lock")]
    b.gpus(e, *([0] * 8))
    return e


@case("C2", "sgl-project/sglang#5580", first="JIT_COMPILING", never=HANGS, phase="jit")
def deep_gemm_precompiles() -> Evidence:
    e = b.server(8)
    b.at_phase(e, "jit", *BEFORE_CAPTURE, "jit")
    e.log.tail = ["DeepGEMM JIT pre-compile:  12%|#         | 2000/16384 [01:00<07:00, 33.0it/s]"]
    e.log.news = 12
    return e


@case("C4", "sgl-project/sglang#7339", first="JIT_COMPILING", never=HANGS)
def compiler_for_the_first_cached_token() -> Evidence:
    e = b.server(2)
    b.serving(e)
    b.listening(e, 0, "timeout")
    e.log.ready, e.log.phase, e.log.running_requests = True, "serving", 1
    e.processes.append(b.process(900, "compiler", ppid=200, cpu=0.97, name="cicc"))
    return e


@case("C5", "flashinfer-ai/flashinfer#972", first="JIT_STALE_LOCK", never=HEALTHY)
def lock_of_a_killed_run() -> Evidence:
    e = b.server(8)
    e.log.tail = ["Loading JIT ops: batch_prefill_with_kv_cache"]
    e.lock_files = [STALE]
    for p in b.all_ranks(e):
        p.main = ThreadFacts(p.pid, p.name, "S", voluntary=10.0, wchan="hrtimer_nanosleep", syscall="230 0x0")
    b.gpus(e, *([0] * 8))
    return e


@case("C5 removed", "sgl-project/sglang#4389", first="LOCK_WAIT", never=HEALTHY | {"JIT_STALE_LOCK"})
def still_waiting_after_the_old_lock_was_removed() -> Evidence:
    e = b.server(8)
    b.stacks(e, {n: ["wait (torch/utils/file_baton.py:49)", "_jit_compile (cpp_extension.py:1)"] for n in range(8)})
    e.lock_files = [LockFile(STALE.path, 60.0, holder=4711)]
    return e


@case("C7", "flashinfer-ai/flashinfer#993", first="LOCK_WAIT", never=HEALTHY | {"JIT_STALE_LOCK"}, rank=3)
def lock_on_nfs_is_never_granted() -> Evidence:
    e = b.server(8)
    e.locks = [LockFacts("FLOCK", 77, 0, 203, "/home/u/.cache/flashinfer/x.lock", "nfs4")]
    b.blocked_in(b.rank(e, 3), "nfs4_proc_lock", "73 0x5 0x2", 5)
    return e


@case("C7 unseen", "flashinfer-ai/flashinfer#993", first="LOCK_WAIT", never=HEALTHY, rank=3)
def lock_that_proc_does_not_show() -> Evidence:
    e = b.server(8)
    b.blocked_in(b.rank(e, 3), "locks_lock_inode_wait", "73 0x5 0x2", 5)
    return e


@case("C8 cross lock", "reference row 13", first="JIT_COLLECTIVE_CROSSLOCK", never=HEALTHY, rank=1)
def holder_waits_for_the_waiter() -> Evidence:
    e = b.server(2)
    e.locks = [LockFacts("FLOCK", 77, 200, 201, "/root/.cache/build.lock")]
    b.stacks(
        e,
        {
            0: ["barrier (distributed_c10d.py:1)", "load_jit (ops.py:2)"],
            1: ["flock (lock.py:1)", "load_jit (ops.py:4)"],
        },
    )
    return e


@case("C9", "sgl-project/sglang#24588", first="JIT_COMPILING", never=HANGS, rank=1)
def one_rank_compiles_while_serving() -> Evidence:
    e = b.server(8)
    b.serving(e)
    b.listening(e, 0, "timeout")
    e.log.ready, e.log.phase, e.log.running_requests = True, "serving", 4
    for n in range(8):
        b.spin(b.rank(e, n))
    compiling = [
        "make_llir (triton/backends/nvidia/compiler.py:300)",
        "compile (triton/compiler/compiler.py:280)",
        "JITFunction.run (triton/runtime/jit.py:623)",
    ]
    b.stacks(e, {**dict.fromkeys(range(8), FORWARD), 1: compiling}, dict.fromkeys(range(8), "active"))
    b.gpus(e, 100, 0, *([100] * 6))
    return e


@case("C11a", "sgl-project/sglang#4007", first="JIT_COMPILING", never=HANGS, phase="capture")
def capture_on_two_nodes_with_compilers() -> Evidence:
    e = two_nodes()
    e.processes += [b.process(900 + n, "compiler", ppid=200 + n, cpu=0.9, name="ptxas") for n in range(8)]
    return e


@case(
    "C11b",
    "sgl-project/sglang#4417",
    first="GRAPH_CAPTURE",
    never=HEALTHY | {"JIT_COMPILING", "P2P_BLOCKED"},
    phase="capture",
)
def capture_on_two_nodes_with_busy_gpus() -> Evidence:
    e = two_nodes()
    b.wait_for_gpu(e, 130.0, 700.0, 70_000)
    return e


def two_nodes() -> Evidence:
    e = capturing(8)
    e.target.ranks, e.target.nodes = 16, 2
    return e


@case("C12", "vllm-project/vllm#46933", first="GRAPH_CAPTURE", never=HEALTHY, phase="capture")
def stacks_differ_by_one_frame() -> Evidence:
    e = capturing(2)
    e.log.tail = ["registering 0 cuda graph addresses"]
    b.stacks(
        e, {0: ["synchronize (cuda.py:1)", *FORWARD], 1: ["copy_ (offload.py:7)", "synchronize (cuda.py:1)", *FORWARD]}
    )
    return e
