"""A second builder, of servers as different from ``builder``'s as the schema allows: other pids, names of an older
kernel for where a thread sleeps, no watcher, no healthy profile, and nothing filled in that a case does not need."""

from __future__ import annotations

import tempfile
from collections.abc import Iterable
from pathlib import Path

from fleetdump.agent.evidence_engine import (
    HttpProbe,
    LogFacts,
    PortFacts,
    RankMarks,
)
from fleetdump.agent.evidence_host import GpuFacts
from fleetdump.agent.evidence_process import (
    PipeEnd,
    ProcessFacts,
    Stack,
    ThreadFacts,
)
from fleetdump.agent.evidence_types import Evidence, Target
from fleetdump.agent.probes.logfile import LogReader
from fleetdump.agent.probes.stacks import group

HEAD = 31_000
PORT = 9123
FUTEX = ("futex_wait_queue_me", "202 0x7f1200 0x80")
EPOLL = ("ep_poll", "232 0x5 0x7ffe 0x40")
POLL = ("poll_schedule_timeout.constprop.0", "7 0x7ffd 0x2 0xffffffff")
PIPE = ("pipe_wait", "0 0x1b 0x7ffd 0x4")
SLEEP = ("hrtimer_nanosleep", "230 0x0 0x0 0x7ffe")
LOADED = ("init begin", "init end", "weights begin", "weights end")


def pid_of(rank: int) -> int:
    return HEAD + 11 + rank


def child(pid: int, role: str, name: str, state: str = "S", **changes: object) -> ProcessFacts:
    """A process of the server, asleep in a futex."""
    facts = ProcessFacts(pid, HEAD, role, name[:15], 88_000, state, state_before=state, thread_count=90)
    facts.main = ThreadFacts(pid, facts.name, state, wchan=FUTEX[0], syscall=FUTEX[1])
    for key, value in changes.items():
        setattr(facts, key, value)
    return facts


def sglang(
    ranks: int, phase: str, marks: Iterable[str] = LOADED, quiet: float = 900.0, uptime: float = 1500.0
) -> Evidence:
    """A starting SGLang server of that many ranks, all asleep; its port is closed and its launcher polls its pipes."""
    e = Evidence(Target(HEAD, 88_000, HEAD, "", PORT, ranks=ranks, log="/data/run/out.txt"), 1.8e9, 6.0, "node17")
    e.uptime = uptime
    head = child(HEAD, "launcher", "python3.12", ppid=1, writes_log=True, stdout="/data/run/out.txt")
    sleep(head, POLL)
    head.pipes = [PipeEnd(27 + n, 70_000 + n, "r", [pid_of(n)]) for n in range(ranks)]
    e.processes = [head]
    for n in range(ranks):
        e.processes.append(child(pid_of(n), "scheduler", "sglang::schedul", rank=n, label=f"TP{n}"))
    e.log = LogFacts("/data/run/out.txt", True, 91_000, lines=388, quiet_seconds=quiet, phase=phase)
    e.log.ranks = [RankMarks(f"TP{n}", n, phase, list(marks)) for n in range(ranks)]
    e.port = PortFacts(PORT)
    return e


def vllm(ranks: int, quiet: float = 900.0) -> Evidence:
    """A starting vLLM server: API process, engine core, workers; its log has no marks that we know."""
    e = sglang(ranks, "imports", (), quiet)
    e.log.ranks, e.log.phase = [], ""
    e.processes[0].name, e.processes[0].cmdline = (
        "vllm",
        "/opt/v/bin/python /opt/v/bin/vllm serve /models/x --port 9123",
    )
    e.processes[0].pipes = []
    for p in e.processes[1:]:
        p.name, p.ppid, p.cmdline = "VLLM::Worker_TP", HEAD + 1, f"VLLM::Worker_TP{p.rank}"
    e.processes.insert(1, child(HEAD + 1, "engine", "VLLM::EngineCor", cmdline="VLLM::EngineCore_DP0"))
    return e


def ranks_of(e: Evidence) -> list[ProcessFacts]:
    return [p for p in e.processes if p.role == "scheduler"]


def rank(e: Evidence, number: int) -> ProcessFacts:
    return next(p for p in e.processes if p.role == "scheduler" and p.rank == number)


def head(e: Evidence) -> ProcessFacts:
    return e.processes[0]


def sleep(p: ProcessFacts, where: tuple[str, str], fd: int = -1, voluntary: float = 0.0) -> None:
    """Its main thread sleeps there."""
    p.state = p.state_before = "S"
    p.main = ThreadFacts(p.pid, p.name, "S", wchan=where[0], syscall=where[1], voluntary=voluntary)
    p.syscall_fd = fd


def burn(p: ProcessFacts, cpu: float = 0.97, user: float = 0.99, voluntary: float = 0.0) -> None:
    """Its main thread uses a core."""
    p.state = p.state_before = "R"
    p.cpu = cpu
    p.main = ThreadFacts(p.pid, p.name, "R", cpu, 0.98, user, voluntary, "0", "running")


def idle_loop(p: ProcessFacts) -> None:
    """A scheduler that polls for requests."""
    sleep(p, POLL, voluntary=3100.0)
    assert p.main
    p.cpu = p.main.cpu = 0.62
    p.main.demand, p.main.user_share = 0.66, 0.5


def disk(p: ProcessFacts, *kernel_stack: str) -> None:
    """State D in both samples."""
    p.state = p.state_before = "D"
    p.main = ThreadFacts(p.pid, p.name, "D", wchan=kernel_stack[0], syscall="0 0x9 0x7f 0x1000")
    p.kernel_stack = list(kernel_stack)


def lose(e: Evidence, *ranks: int) -> None:
    """Those ranks' processes are gone."""
    e.processes = [p for p in e.processes if p.role != "scheduler" or p.rank not in ranks]


def opened(e: Evidence, health: int, other: int, error: str = "") -> None:
    """The port is open: the status of /health, and of endpoints that need no engine (0: ``error``)."""
    e.port = PortFacts(PORT, True, HEAD, head(e).name, True)
    e.http = [HttpProbe("/health", health, 5.0 if not health else 0.4, "" if health else error)]
    e.http.append(HttpProbe("/model_info", other, 5.0 if not other else 0.01, "" if other else error))
    sleep(head(e), EPOLL)


def served(e: Evidence, health: int = 200, other: int = 200, error: str = "timed out", running: int = 0) -> Evidence:
    """It became ready long ago; its schedulers poll for requests."""
    opened(e, health, other, error)
    e.uptime = 250_000.0
    e.log.ready, e.log.phase, e.log.running_requests = True, "serving", running
    e.log.server_marks = ["http start", "http open", "model info", "ready"]
    for p in ranks_of(e):
        idle_loop(p)
    return e


def warming(e: Evidence, health: int = 503) -> Evidence:
    """The port has just opened and the first request is under way."""
    opened(e, health, 200)
    e.log.phase, e.log.server_marks = "warmup", ["http start", "http open", "model info"]
    return e


def dump(e: Evidence, frames: dict[int, list[str]], state: str = "idle", busy: Iterable[int] = ()) -> None:
    """py-spy's stacks of some ranks; those in ``busy`` run."""
    for n, of in frames.items():
        how = "active" if n in busy else state
        e.stacks.append(Stack(pid_of(n), "scheduler", rank(e, n).label, how, list(of)))
    e.stack_groups = group(e.stacks)
    e.deep = True


def cards(e: Evidence, utilization: Iterable[int], watts: float, cap: float = 1000.0, used: int = 120_000) -> None:
    """nvidia-smi of as many GPUs."""
    e.gpus = [GpuFacts(n, u, used, watts, cap, 180_000, "B200") for n, u in enumerate(utilization)]


def logged(e: Evidence, text: str, quiet: float, more: str = "") -> None:
    """What the agent's own reader says of that log; ``more`` came between the two samples."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "log"
        path.write_text(text)
        reader = LogReader(str(path), max(1, e.target.ranks // e.target.nodes))
        reader.first()
        with path.open("a") as file:
            file.write(more)
        e.log = reader.second()
    e.log.path, e.log.quiet_seconds = e.target.log, quiet
