"""Synthetic evidence: a server of n ranks, all in one state, from which a case changes what matters to it."""

from __future__ import annotations

from fleetdump.agent.evidence_engine import (
    HttpProbe,
    LogFacts,
    PortFacts,
    RankMarks,
)
from fleetdump.agent.evidence_host import DiskFacts, GpuFacts
from fleetdump.agent.evidence_process import (
    PipeEnd,
    ProcessFacts,
    SocketFacts,
    Stack,
    SyscallCount,
    ThreadFacts,
    Trace,
)
from fleetdump.agent.evidence_types import (
    Evidence,
    ProbeRecord,
    Target,
    WatchFacts,
)
from fleetdump.agent.probes.stacks import group
from fleetdump.agent.servermessages import HealthyProfile

LAUNCHER, FIRST_RANK = 100, 200
PIPE = 9000
AFTER_WEIGHTS = ["init begin", "init end", "weights begin", "weights end"]
RECV_REQUESTS = ["Scheduler.recv_requests (scheduler.py:10)", "Scheduler.event_loop_normal (scheduler.py:20)"]


def process(pid: int, role: str, *, ppid: int = LAUNCHER, rank: int | None = None, **changes: object) -> ProcessFacts:
    """A living process, asleep."""
    label = f"TP{rank}" if rank is not None else ""
    facts = ProcessFacts(pid, ppid, role, f"sglang::{role}"[:15], 500, "S", rank, label, state_before="S")
    facts.main = ThreadFacts(pid, facts.name, "S", wchan="futex_do_wait", syscall="202 0x1 0x189")
    for name, value in changes.items():
        setattr(facts, name, value)
    return facts


def spin(facts: ProcessFacts, cpu: float = 0.99, user: float = 1.0) -> None:
    """Its main thread burns a core and makes no system call."""
    facts.state = facts.state_before = "R"
    facts.cpu = cpu
    facts.main = ThreadFacts(facts.pid, facts.name, "R", cpu=cpu, demand=1.0, user_share=user, syscall="running")


def poll_idle(facts: ProcessFacts) -> None:
    """The receive loop of an idle scheduler: two thirds of a core, thousands of switches."""
    facts.cpu = 0.7
    facts.main = ThreadFacts(facts.pid, facts.name, "S", cpu=0.7, demand=0.75, user_share=0.5, voluntary=2700.0)


def server(ranks: int = 8, **log: object) -> Evidence:
    """A server after its weights, all ranks alive and asleep in gloo, port closed, its log at 217 lines and silent."""
    marks = [RankMarks(f"TP{n}", n, "kv_pool", list(AFTER_WEIGHTS)) for n in range(ranks)]
    evidence = Evidence(
        Target(LAUNCHER, 500, LAUNCHER, "main", 8000, log="/srv/server.log", ranks=ranks),
        taken_at=1796000000.0,
        seconds=5.0,
        hostname="gpu-a",
        uptime=400.0,
        disks=[DiskFacts("log", "/srv", 10**11, 10**12, 10**6, "ext4")],
        port=PortFacts(8000),
    )
    evidence.log = LogFacts(
        "/srv/server.log", True, 40_000, lines=217, phase="kv_pool", quiet_seconds=180.0, ranks=marks
    )
    for name, value in log.items():
        setattr(evidence.log, name, value)
    launcher = process(LAUNCHER, "launcher", ppid=1, writes_log=True, stdout="/srv/server.log")
    launcher.main = ThreadFacts(LAUNCHER, "python", "S", wchan="poll_schedule_timeout", syscall="7 0x7f0 0x1 0x1388")
    launcher.pipes = [PipeEnd(10 + n, PIPE + n, "r", [FIRST_RANK + n]) for n in range(ranks)]
    evidence.processes = [launcher, *(process(FIRST_RANK + n, "scheduler", rank=n) for n in range(ranks))]
    evidence.watch = WatchFacts("kv_pool", 130.0, 120.0, HealthyProfile("k", 3, 636, 641, 300.0, {"kv_pool": 74.0}))
    return evidence


def rank(evidence: Evidence, number: int) -> ProcessFacts:
    """The scheduler of that rank."""
    return next(p for p in evidence.processes if p.rank == number)


def launcher(evidence: Evidence) -> ProcessFacts:
    return evidence.processes[0]


def lose(evidence: Evidence, number: int) -> None:
    """That rank's process is gone."""
    evidence.processes.remove(rank(evidence, number))


def stacks(evidence: Evidence, frames: dict[int, list[str]], states: dict[int, str] | None = None) -> None:
    """py-spy's answer for some ranks, grouped as the agent groups it."""
    states = states or {}
    evidence.stacks = [
        Stack(FIRST_RANK + n, "scheduler", f"TP{n}", states.get(n, "idle"), list(of)) for n, of in frames.items()
    ]
    evidence.stack_groups = group(evidence.stacks)
    evidence.deep = True


def trace(evidence: Evidence, number: int, *calls: SyscallCount) -> None:
    """strace's answer for one rank."""
    evidence.traces.append(Trace(FIRST_RANK + number, f"TP{number}", 2.0, list(calls)))


def listening(evidence: Evidence, health: int = 200, error: str = "") -> None:
    """The port is open; ``/health`` answers ``health`` (0: ``error``)."""
    evidence.port = PortFacts(evidence.target.port, True, LAUNCHER, "", True)
    evidence.http = [HttpProbe("/health", health, 1.0, error), HttpProbe("/model_info", 200, 0.01)]
    evidence.log.server_marks = ["http start", "http open", "model info"]
    evidence.log.phase = "warmup"


def serving(evidence: Evidence) -> None:
    """Ready and open."""
    listening(evidence)
    evidence.log.ready, evidence.log.phase = True, "serving"
    evidence.watch = None
    for p in evidence.processes:
        if p.role == "scheduler":
            poll_idle(p)


def gpus(evidence: Evidence, *utilization: int) -> None:
    """nvidia-smi: busy GPUs at little power, as behind a waiting kernel."""
    evidence.gpus = [GpuFacts(n, u, 76_000, 130.0 if u else 120.0, 700.0) for n, u in enumerate(utilization)]


def at_phase(evidence: Evidence, phase: str, *marks: str) -> None:
    """Every rank has entered ``phase`` with ``marks``; so has the server."""
    evidence.log.phase = phase
    evidence.log.ranks = [
        RankMarks(p.label, p.rank or 0, phase, list(marks)) for p in evidence.processes if p.role == "scheduler"
    ]


def all_ranks(evidence: Evidence) -> list[ProcessFacts]:
    return [p for p in evidence.processes if p.role == "scheduler"]


def wait_for_gpu(evidence: Evidence, power: float = 80.0, limit: float = 300.0, memory: int = 2200) -> None:
    """Every rank waits for its GPU in a busy loop; every GPU is fully used at little power."""
    for p in all_ranks(evidence):
        spin(p, user=0.6)
    evidence.gpus = [GpuFacts(n, 100, memory, power, limit) for n in range(len(all_ranks(evidence)))]


def blocked_in(facts: ProcessFacts, wchan: str, syscall: str, fd: int = -1) -> None:
    """Its main thread sleeps there."""
    facts.main = ThreadFacts(facts.pid, facts.name, "S", wchan=wchan, syscall=syscall)
    facts.syscall_fd = fd


def disk_sleep(facts: ProcessFacts, *kernel_stack: str) -> None:
    """State D in both samples."""
    facts.state = facts.state_before = "D"
    facts.main = ThreadFacts(facts.pid, facts.name, "D", wchan=kernel_stack[0], syscall="0 0x3")
    facts.kernel_stack = list(kernel_stack)


def dead(evidence: Evidence) -> None:
    """No process of the server is left."""
    evidence.launcher_alive, evidence.processes = False, []


def connecting(facts: ProcessFacts, remote: str, state: str = "SYN_SENT") -> None:
    facts.sockets.append(SocketFacts(20 + len(facts.sockets), state, "192.0.2.10:40000", remote))


def failed_probe(evidence: Evidence, name: str, why: str) -> None:
    evidence.probes.append(ProbeRecord(name, False, 0.1, why))


def vllm(ranks: int = 2) -> Evidence:
    """A vLLM server that serves: API process, engine core, one worker a rank (its log has no marks that we know)."""
    evidence = server(ranks)
    evidence.log.ranks = []
    launcher(evidence).cmdline = "python -m vllm.entrypoints.openai.api_server --model /models/m"
    for p in all_ranks(evidence):
        p.name = "VLLM::Worker_TP"
    evidence.processes.append(process(150, "engine", name="VLLM::EngineCor"))
    serving(evidence)
    return evidence


def vllm_starting(ranks: int = 4) -> Evidence:
    """vLLM before its port: the engine core reads one pipe a worker, the API process waits for the engine core."""
    e = vllm(ranks)
    e.port.open = e.port.ours = e.log.ready = False
    e.http, e.log.server_marks, e.log.phase = [], [], "imports"
    e.log.tail = ["(EngineCore_DP0 pid=150) INFO backend resolved to nccl"]
    parent, engine = launcher(e), e.processes[-1]
    parent.pipes = [PipeEnd(9, 8000, "r", [150])]
    engine.pipes = [PipeEnd(20 + n, PIPE + n, "r", [FIRST_RANK + n]) for n in range(ranks)]
    for p in all_ranks(e):
        p.ppid = 150
        blocked_in(p, "futex_do_wait", "202 0x1 0x189")
    blocked_in(parent, "do_epoll_wait", "232 0x9")
    return e


def unanswering(ranks: int) -> Evidence:
    """It has served; now ``/health`` times out with requests running."""
    e = server(ranks)
    serving(e)
    listening(e, 0, "timeout")
    e.log.ready, e.log.phase, e.log.running_requests = True, "serving", 5
    e.log.quiet_seconds = 400.0
    return e


def sparse(ranks: int) -> Evidence:
    """As a person writes it by hand: nothing but what matters; silent for 300 s after the weights."""
    e = Evidence(Target(1000, ranks=ranks, port=30000), 1796000000.0, 5.0)
    main = ThreadFacts(1000, "python3", "S", wchan="pipe_wait", syscall="0 0x21 0x7f 0x4")
    e.processes = [ProcessFacts(1000, 1, "launcher", "python3", 10, "S", main=main, syscall_fd=33)]
    for n in range(ranks):
        thread = ThreadFacts(2000 + n, "sglang", "S", wchan="futex_wait_queue_me")
        e.processes.append(
            ProcessFacts(2000 + n, 1000, "scheduler", "sglang::schedul", 11, "S", n, f"TP{n}", main=thread)
        )
    e.log = LogFacts("/var/log/llm/server.log", True, 9000, lines=217, quiet_seconds=300.0, phase="kv_pool")
    e.log.ranks = [RankMarks(f"TP{n}", n, "kv_pool", ["weights begin", "weights end"]) for n in range(ranks)]
    e.port = PortFacts(30000)
    return e


def spin_alone(e: Evidence, n: int, cpu: float = 1.0) -> None:
    """The main thread of that rank burns a core, and only that is known."""
    p = next(p for p in e.processes if p.rank == n)
    p.state, p.cpu, p.main = "R", cpu, ThreadFacts(p.pid, "sglang", "R", cpu=cpu, user_share=1.0, syscall="running")


def died_of(p: ProcessFacts, signal: int) -> None:
    """It is a zombie, of which the kernel keeps 15 characters of the name and the signal that ended it."""
    p.state, p.role, p.rank, p.label, p.exit_signal = "Z", "other", None, "", signal
    p.main = None


def no_ptrace(e: Evidence) -> None:
    """Stage 2 was tried and refused."""
    failed_probe(e, "py-spy", "Permission denied: try running again with elevated permissions")
    failed_probe(e, "strace", "ptrace(PTRACE_SEIZE): Operation not permitted")
    e.deep = True


def silent(e: Evidence, quiet: float) -> None:
    """Nobody watched; the log is silent for ``quiet`` seconds."""
    e.log.quiet_seconds, e.uptime = quiet, quiet + 200.0
    e.watch = None


def second_of_two_hosts(e: Evidence) -> None:
    """Its eight ranks are 8 to 15."""
    e.target.ranks, e.target.nodes, e.target.node_rank = 16, 2, 1
    for p in all_ranks(e):
        p.rank = (p.rank or 0) + 8
        p.label = f"TP{p.rank}"
