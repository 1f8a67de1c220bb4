"""Part Z: a third set of unseen cases: sparse bundles, older kernels, other models of processes, near misses."""

from __future__ import annotations

from cases import builder as b
from cases.table import DEAD, HANGS, HEALTHY, case
from fleetdump.agent.evidence_engine import (
    HttpProbe,
    PortFacts,
)
from fleetdump.agent.evidence_host import GpuFacts, LockFacts, LockFile
from fleetdump.agent.evidence_process import (
    PipeEnd,
    ProcessFacts,
    Stack,
    ThreadFacts,
)
from fleetdump.agent.evidence_types import Evidence

BATON = ["wait (file_baton.py:43)", "_jit_compile (cpp_extension.py:9)"]


@case("Z01 sparse spin", "kind of H1", first="PARENT_WAITS_READY", never=HEALTHY | DEAD, rank=6, phase="kv_pool")
def one_of_eight_spins() -> Evidence:
    e = b.sparse(8)
    b.spin_alone(e, 6)
    e.processes[0].pipes = [PipeEnd(33, 77, "r", [2006])]
    return e


@case("Z02 sparse death", "kind of A1", first="PARENT_WAITS_DEAD_RANK", never=HEALTHY | {"PARENT_WAITS_READY"}, rank=2)
def zombie_keeps_its_rank() -> Evidence:
    e = b.sparse(4)
    dead = e.processes[3]
    dead.state, dead.name, dead.exit_signal = "Z", "sglang", 9
    return e


@case("Z03 sparse all asleep", "kind of B7", first="PARENT_WAITS_READY UNKNOWN", never=HEALTHY | DEAD)
def nobody_does_anything() -> Evidence:
    e = b.sparse(4)
    e.log.quiet_seconds = 0.0
    return e


@case("Z04 sparse healthy", "kind of E1", first="IDLE_OK", never=HANGS | {"UNKNOWN"})
def health_is_all_there_is() -> Evidence:
    e = b.sparse(2)
    e.log.phase, e.log.ready = "serving", True
    e.port = PortFacts(30000, True, 1000, "python3", True)
    e.http = [HttpProbe("/health", 200, 1.01)]
    return e


@case("Z05 other user's port", "kind of F8", first="RANK_SPIN", never=HEALTHY | {"PORT_IN_USE", "PARENT_WAITS_READY"},
      rank=0)  # fmt: skip
def owner_of_the_port_is_hidden() -> Evidence:
    e = b.unanswering(2)
    e.port = PortFacts(8000, True)
    b.spin(b.rank(e, 0))
    b.blocked_in(b.rank(e, 1), "futex_wait_queue", "202 0x1")
    return e


@case("Z06 loaded machine", "kind of S2", first="RANK_SPIN", never=HEALTHY, rank=1)
def spin_that_gets_half_a_core() -> Evidence:
    e = b.unanswering(2)
    b.spin(b.rank(e, 1), cpu=0.5)
    b.blocked_in(b.rank(e, 0), "futex_do_wait", "202 0x1")
    e.log.quiet_seconds = 30.0
    return e


@case("Z07 compiled code", "look-alike of C9", first="RANK_SPIN", never=HEALTHY | {"JIT_COMPILING"}, rank=0)
def spin_inside_what_the_compiler_made() -> Evidence:
    e = b.unanswering(2)
    b.spin(b.rank(e, 0))
    b.blocked_in(b.rank(e, 1), "futex_do_wait", "202 0x1")
    frames = ["call (torch/_inductor/output_code.py:600)", "_fn (torch/_dynamo/eval_frame.py:900)", "forward (m.py:4)"]
    b.stacks(e, {0: frames, 1: ["all_reduce (distributed_c10d.py:4)", "forward (m.py:9)"]}, {0: "active+gil"})
    return e


@case("Z08 long prefill on the CPU", "look-alike of S2", first="BUSY_NOT_HUNG", never=HANGS | {"UNKNOWN", "RANK_SPIN"})
def all_ranks_compute_for_half_a_minute() -> Evidence:
    e = b.unanswering(2)
    e.log.quiet_seconds = 30.0
    for p in b.all_ranks(e):
        b.spin(p)
    return e


@case("Z09 warm-up in time", "look-alike of A10", first="BUSY_NOT_HUNG", never=HANGS | {"UNKNOWN"}, phase="warmup")
def first_request_takes_a_while() -> Evidence:
    e = b.server(2)
    b.listening(e, 503)
    e.watch, e.log.quiet_seconds = None, 12.0
    for p in b.all_ranks(e):
        b.spin(p)
    return e


@case("Z10 two stages", "kind of A10", first="WARMUP_STALL", never=HEALTHY | {"COLLECTIVE_DIVERGED"}, phase="warmup")
def second_stage_never_gets_its_tensor() -> Evidence:
    e = b.server(1)
    b.listening(e, 503)
    b.rank(e, 0).label = "PP0 TP0"
    e.processes.append(b.process(300, "scheduler", rank=0))
    e.processes[-1].label = "PP1 TP0"
    e.stacks = [
        Stack(200, "scheduler", "PP0 TP0", "idle", ["wait (distributed_c10d.py:9)", "isend (distributed_c10d.py:1)"]),
        Stack(300, "scheduler", "PP1 TP0", "idle", ["irecv (distributed_c10d.py:5)", "recv_proxy (scheduler_pp.py:6)"]),
    ]
    return e


@case("Z11 engine of vLLM killed", "kind of A4", first="OOM_KILLED API_ALIVE_ENGINE_DEAD",
      also="API_ALIVE_ENGINE_DEAD OOM_KILLED", never=HEALTHY)  # fmt: skip
def engine_core_killed_for_memory() -> Evidence:
    e = b.vllm(1)
    engine = e.processes[-1]
    engine.state = engine.state_before = "Z"
    engine.exit_signal = 9
    e.processes = [b.launcher(e), engine]
    e.memory.oom_lines = ["[888.0] Out of memory: Killed process 150 (VLLM::EngineCor) total-vm:900kB"]
    return e


@case("Z12 worker of vLLM spins", "kind of S2", first="RANK_SPIN", never=HEALTHY | {"API_LOOP_BLOCKED"}, rank=2)
def one_worker_of_vllm_spins() -> Evidence:
    e = b.vllm(4)
    b.listening(e, 0, "timeout")
    e.log.ready, e.log.phase, e.log.quiet_seconds = True, "serving", 300.0
    for p in b.all_ranks(e):
        b.blocked_in(p, "futex_do_wait", "202 0x1")
    b.spin(b.rank(e, 2))
    return e


@case("Z13 old pipe names", "kind of row 32", first="STDOUT_PIPE_FULL", never=HEALTHY, rank=1)
def writer_on_an_older_kernel() -> Evidence:
    e = b.sparse(2)
    p = e.processes[2]
    p.stdout = p.stderr = "pipe:[901]"
    p.pipes = [PipeEnd(1, 901, "w", [3000], peer_states="S")]
    p.main, p.syscall_fd = ThreadFacts(p.pid, "x", "S", wchan="pipe_wait", syscall="1 0x1 0x7f 0x1000"), 1
    return e


@case("Z14 debugger stopped all", "kind of row 33", first="TRACER_ATTACHED", never=HEALTHY)
def debugger_left_behind_in_the_launcher() -> Evidence:
    e = b.sparse(2)
    e.processes[0].state, e.processes[0].tracer_pid = "t", 777
    return e


@case("Z15 all stopped", "kind of row 33", first="STOPPED_PROCESS", never=HEALTHY | {"PARENT_WAITS_READY"})
def job_control_stopped_the_group() -> Evidence:
    e = b.sparse(2)
    for p in e.processes:
        p.state = p.state_before = "T"
    return e


@case("Z16 flock by name", "kind of C7", first="LOCK_WAIT", never=HEALTHY | {"JIT_STALE_LOCK"}, rank=1)
def waiter_on_a_parallel_file_system() -> Evidence:
    e = b.sparse(2)
    e.locks = [LockFacts("FLOCK", 5, 0, 2001, "/lustre/home/u/.cache/x.lock", "lustre")]
    return e


@case("Z17 hub on another host", "kind of F7", first="HUB_LOCK LOCK_WAIT", never=HEALTHY | {"JIT_STALE_LOCK"})
def download_lock_held_by_another_process() -> Evidence:
    e = b.server(1, phase="imports")
    e.log.ranks, e.processes, e.watch = [], [b.launcher(e)], None
    e.log.waits_for_lock, e.log.repeated, e.log.growth, e.log.news_seconds = "/hf/hub/.locks/m/x.lock", 30, 200, 500.0
    return e


@case("Z18 stale torch extension", "kind of C5", first="JIT_STALE_LOCK", never=HEALTHY, rank=0)
def baton_of_a_crashed_build() -> Evidence:
    e = b.sparse(1)
    e.uptime = 900.0
    e.stacks = [
        Stack(2000, "scheduler", "TP0", "idle", ["wait (file_baton.py:43)", "_jit_compile (cpp_extension.py:9)"])
    ]
    e.lock_files = [LockFile("/root/.cache/torch_extensions/py312_cu130/ops/lock", 86_400.0)]
    return e


@case("Z19 fresh lock", "look-alike of C5", first="LOCK_WAIT JIT_COMPILING PARENT_WAITS_READY UNKNOWN",
      never=HEALTHY | {"JIT_STALE_LOCK"})  # fmt: skip
def lock_file_of_this_very_start() -> Evidence:
    e = b.sparse(2)
    e.uptime = 900.0
    e.stacks = [
        Stack(2001, "scheduler", "TP1", "idle", ["wait (file_baton.py:43)", "_jit_compile (cpp_extension.py:9)"])
    ]
    e.lock_files = [LockFile("/root/.cache/torch_extensions/ops/lock", 400.0, holder=2000)]
    return e


@case("Z20 ptxas under the launcher", "kind of C1", first="JIT_COMPILING", never=HANGS)
def autotune_compiles_without_a_rank() -> Evidence:
    e = b.sparse(4)
    e.processes.append(ProcessFacts(4000, 1000, "compiler", "ptxas", 12, "R", cpu=0.4))
    return e


@case("Z21 first batch compiles", "kind of C4", first="JIT_COMPILING", never=HANGS | {"RANK_SPIN"}, phase="warmup")
def warmup_compiles_a_kernel() -> Evidence:
    e = b.server(2)
    b.listening(e, 503)
    for p in b.all_ranks(e):
        b.spin(p)
    frames = ["make_ptx (triton/backends/nvidia/compiler.py:30)", "run (triton/runtime/jit.py:5)", "decode (attn.py:2)"]
    b.stacks(e, dict.fromkeys(range(2), frames), dict.fromkeys(range(2), "active"))
    return e


@case("Z22 P2P at eight", "kind of D4", first="P2P_BLOCKED", never=HEALTHY | {"KERNEL_SPIN"}, phase="init")
def eight_consumer_gpus() -> Evidence:
    e = b.sparse(8)
    b.at_phase(e, "init", "init begin")
    for n in range(8):
        b.spin_alone(e, n)
    e.gpus = [GpuFacts(n, 100, 900, 95.0, 450.0) for n in range(8)]
    e.host.gpu_links = ["NODE", "SYS", "PHB"]
    return e
