"""Part A: launchers and process trees."""

from __future__ import annotations

from cases import builder as b
from cases.table import HANGS, HEALTHY, case
from fleetdump.agent.evidence_engine import HttpProbe, PortFacts
from fleetdump.agent.evidence_host import GpuFacts, GpuProcess
from fleetdump.agent.evidence_process import (
    PipeEnd,
    SocketFacts,
    Stack,
    ThreadFacts,
)
from fleetdump.agent.evidence_types import Evidence, ProbeRecord

CICC = "[910.1] Out of memory: Killed process {} (cicc) total-vm:4000000kB"


@case(
    "A1 zombie rank", "sgl-project/sglang#20287", first="OOM_KILLED PARENT_WAITS_DEAD_RANK",
    also="PARENT_WAITS_DEAD_RANK OOM_KILLED", never=HEALTHY | {"PARENT_WAITS_READY"}, rank=5,
)  # fmt: skip
def rank_killed_for_memory() -> Evidence:
    e = b.server(8)
    dead = b.rank(e, 5)
    dead.state, dead.role, dead.rank, dead.label, dead.exit_signal = "Z", "other", None, "", 9
    b.blocked_in(b.launcher(e), "anon_pipe_read", "0 0xa 0x7f 0x4", 10)
    e.memory.oom_kills = 1
    return e


@case(
    "A1 absent rank", "sgl-project/sglang#20287", first="PARENT_WAITS_DEAD_RANK",
    never=HEALTHY | {"PARENT_WAITS_READY", "OOM_KILLED"}, rank=5,
)  # fmt: skip
def rank_gone_without_a_word() -> Evidence:
    e = b.server(8)
    b.lose(e, 5)
    b.blocked_in(b.launcher(e), "pipe_read", "0 0xa 0x7f 0x4", 10)
    return e


@case("A2 end of file impossible", "sgl-project/sglang#34233", first="PIPE_EOF_IMPOSSIBLE", never=HEALTHY)
def only_the_reader_could_write() -> Evidence:
    e = b.server(2)
    b.lose(e, 1)
    parent = b.launcher(e)
    parent.pipes[1] = PipeEnd(11, b.PIPE + 1, "r", [], own_writer=True)
    b.blocked_in(parent, "anon_pipe_read", "0 0xb 0x7f 0x4", 11)
    return e


@case("A3", "sgl-project/sglang#21486", first="API_ALIVE_ENGINE_DEAD", never=HEALTHY, rank=0)
def scheduler_aborted_behind_a_healthy_server() -> Evidence:
    e = b.server(2)
    b.serving(e)
    dead = b.rank(e, 0)
    dead.state, dead.role, dead.rank, dead.label, dead.exit_signal = "Z", "other", None, "", 6
    e.log.tail = ["NCCL watchdog ended the process", 'INFO: 127.0.0.1:1 - "GET /health HTTP/1.1" 200 OK']
    return e


@case("A4", "vllm-project/vllm#21443", first="API_ALIVE_ENGINE_DEAD", never=HEALTHY)
def engine_core_killed() -> Evidence:
    e = b.vllm(1)
    e.processes = [b.launcher(e)]
    e.http.append(HttpProbe("/v1/completions", 0, 6.0, "timeout"))
    return e


@case("A4 workers left", "vllm-project/vllm#21443", first="API_ALIVE_ENGINE_DEAD", never=HEALTHY)
def engine_core_killed_before_its_workers() -> Evidence:
    e = b.vllm(2)
    e.processes = [p for p in e.processes if p.role != "engine"]
    return e


@case("A5", "vllm-project/vllm#45626", first="OOM_KILLED", never=HEALTHY | {"PORT_IN_USE"})
def compilers_ate_the_memory() -> Evidence:
    e = b.server(1)
    e.log.ranks, e.log.tail = [], ["engine core could not be initialised, failed processes: {}"]
    b.dead(e)
    e.memory.oom_lines = ["[911.0] Out of memory: Killed process 150 (VLLM::EngineCor) total-vm:9000000kB"]
    e.memory.oom_lines += [CICC.format(1000 + n) for n in range(22)]
    return e


@case("A7", "vllm-project/vllm#45644", first="DEAD_READER_RING_FULL", never=HEALTHY, rank=1)
def reader_of_the_ring_is_dead() -> Evidence:
    e = b.vllm(2)
    b.lose(e, 1)
    engine = e.processes[-1]
    b.spin(engine)
    e.stacks = [Stack(150, "engine", "", "active", ["acquire_write (shm.py:1)", "enqueue (shm.py:2)", "rpc (ex.py:3)"])]
    e.log.troubles = {"ring_full": "no available shared memory broadcast block found in 60 seconds"}
    return e


@case("A7 no stacks", "vllm-project/vllm#45644", first="DEAD_READER_RING_FULL", never=HEALTHY, rank=1)
def reader_of_the_ring_is_dead_without_ptrace() -> Evidence:
    e = reader_of_the_ring_is_dead()
    e.stacks = []
    return e


UNBALANCED = "The memory capacity is unbalanced. Some GPUs may be occupied by other processes."


@case("A8 orphan", "sgl-project/sglang#1533", first="ORPHAN_GPU", never=HEALTHY | {"MIXED_GPU"})
def memory_of_an_earlier_run() -> Evidence:
    e = b.server(4, crash=f"ValueError: {UNBALANCED}", crash_label="TP2", troubles={"memory_unbalanced": UNBALANCED})
    b.lose(e, 2)
    e.gpus = [GpuFacts(n, 0, 400, 70.0, 400.0, 80_000, "H100", processes_known=True) for n in range(4)]
    for n in (0, 1, 3):
        e.gpus[n].processes = [GpuProcess(b.FIRST_RANK + n, 400, "sglang::schedul", ours=True)]
    e.gpus[2].processes = [GpuProcess(77, 38_000, "python3")]
    return e


@case("A8 mixed", "sgl-project/sglang#4233", first="MIXED_GPU", never=HEALTHY | {"ORPHAN_GPU"})
def gpus_of_two_kinds() -> Evidence:
    e = b.server(2, crash=f"ValueError: {UNBALANCED}", crash_label="TP0", troubles={"memory_unbalanced": UNBALANCED})
    b.dead(e)
    e.gpus = [GpuFacts(0, 0, 0, 20.0, 300.0, 24_000, "A"), GpuFacts(1, 0, 0, 20.0, 400.0, 80_000, "B")]
    return e


@case("A10", "sgl-project/sglang#17941", first="WARMUP_STALL", never=HEALTHY | {"COLLECTIVE_DIVERGED"}, phase="warmup")
def pipeline_stages_wait_for_each_other() -> Evidence:
    e = b.server(1)
    b.listening(e, 0, "timeout")
    stage = b.rank(e, 0)
    stage.label = "PP0"
    e.processes += [b.process(300 + n, "scheduler", rank=0) for n in (1, 2)]
    e.processes[-2].label, e.processes[-1].label = "PP1", "PP2"
    e.stacks = [
        Stack(200, "scheduler", "PP0", "idle", ["send (distributed_c10d.py:1)", "send_tensor_dict (ps.py:2)"]),
        Stack(301, "scheduler", "PP1", "idle", ["recv (distributed_c10d.py:5)", "recv_tensor_dict (ps.py:6)"]),
        Stack(302, "scheduler", "PP2", "idle", ["recv (distributed_c10d.py:5)", "recv_tensor_dict (ps.py:6)"]),
    ]
    e.log.running_requests = 1
    return e


@case("A11", "sgl-project/sglang#40809", first="API_LOOP_BLOCKED", never=HEALTHY | {"RANK_SPIN"})
def event_loop_of_the_http_server_is_stuck() -> Evidence:
    e = b.server(2)
    b.serving(e)
    e.http = [HttpProbe("/health", 503, 6.0), HttpProbe("/model_info", 0, 2.0, "timeout")]
    b.spin(b.launcher(e))
    e.log.troubles = {"detokenizer_silent": "Health check failed: no response from detokenizer for the last 20 s"}
    return e


@case("A13 shared disk", "sgl-project/sglang#11796", first="IMPORT_STALL REMOTE_FS_HANG", never=HEALTHY)
def import_from_a_dead_share() -> Evidence:
    e = importing()
    b.disk_sleep(b.launcher(e), "nfs_wait_bit_killable", "nfs4_proc_getattr")
    return e


@case("A13 local disk", "sgl-project/sglang#11796", first="IMPORT_STALL", never=HEALTHY)
def import_that_sleeps_on_a_disk() -> Evidence:
    e = importing()
    b.disk_sleep(b.launcher(e), "folio_wait_bit_common")
    return e


@case("A13 network", "sgl-project/sglang#11796", first="IMPORT_STALL", never=HEALTHY)
def import_that_connects_to_nowhere() -> Evidence:
    e = importing()
    b.launcher(e).sockets = [SocketFacts(5, "SYN_SENT", "192.0.2.10:40000", "203.0.113.9:8888")]
    frames = [
        "create_connection (socket.py:1)",
        "<module> (plugin.py:3)",
        "exec_module (<frozen importlib._bootstrap>:9)",
    ]
    e.stacks = [Stack(b.LAUNCHER, "launcher", "", "idle", frames)]
    return e


def importing() -> Evidence:
    """One process, no mark in the log."""
    e = b.server(1, phase="imports", lines=0, bytes=0)
    e.log.ranks, e.processes, e.watch = [], [b.launcher(e)], None
    return e


@case("PIPE stdout", "reference row 32", first="STDOUT_PIPE_FULL", never=HEALTHY, rank=0)
def log_reader_is_stopped() -> Evidence:
    e = b.server(2)
    writer = b.rank(e, 0)
    writer.stdout = writer.stderr = "pipe:[555]"
    writer.pipes = [PipeEnd(1, 555, "w", [42], peer_states="T")]
    b.blocked_in(writer, "pipe_write", "1 0x1 0x7f 0x100", 1)
    return e


@case("STOPPED", "reference row 33", first="STOPPED_PROCESS", never=HEALTHY, rank=1)
def rank_stopped() -> Evidence:
    e = b.server(2)
    b.rank(e, 1).state = "T"
    b.rank(e, 0).main = ThreadFacts(200, "x", "S", wchan="futex_do_wait")
    e.probes = [ProbeRecord("nvidia-smi", False, 0.0, "nvidia-smi not found")]
    return e


def ended() -> Evidence:
    """``fleetdump stop`` ended it; the log still ends in what its processes said as they went down."""
    e = b.server(2)
    e.launcher_alive, e.processes = False, []
    e.log.crash = "Subprocess scheduler_0 (pid=200) crashed with exit code -9."
    e.target.stopped_at = e.taken_at - 60.0
    return e


@case("A stopped", "fleetdump stop", first="NOT_RUNNING", never=HANGS | {"LAUNCHER_DIED", "RANK_CRASHED", "UNKNOWN"})
def stopped_by_its_operator() -> Evidence:
    return ended()


@case("A stopped, port taken since", "fleetdump stop", first="NOT_RUNNING", never=HANGS | {"PORT_IN_USE"})
def stopped_and_its_port_given_to_another() -> Evidence:
    e = ended()
    e.port = PortFacts(e.target.port, True, 4711, "python")
    return e


@case("A died", "no fleetdump stop", first="LAUNCHER_DIED", never=HEALTHY | {"NOT_RUNNING"})
def died_without_a_stop() -> Evidence:
    e = ended()
    e.target.stopped_at = 0.0
    return e


@case("A stop that left a rank", "fleetdump stop", first="LAUNCHER_DIED", never=HEALTHY | {"NOT_RUNNING"})
def stopped_but_a_rank_lives() -> Evidence:
    e = ended()
    e.processes = [b.process(200, "scheduler", rank=0)]
    return e
