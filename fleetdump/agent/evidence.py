"""Evidence of one server: what it does now, read-only first; strace and stacks only when two samples show no progress.

Nothing is signalled and nothing is changed. Every probe has its own time limit, and how it went is evidence too.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any, Callable, Dict, List, Optional, Tuple

from fleetdump.agent import healthy, procfs
from fleetdump.agent.arguments import option_value
from fleetdump.agent.context import AgentContext, State
from fleetdump.agent.evidence_report import write_bundle
from fleetdump.agent.evidence_types import (
    DiskFacts,
    Evidence,
    FlightRecord,
    HostFacts,
    PortFacts,
    ProcessFacts,
    RasFacts,
    Stack,
    Target,
    Trace,
    WatchFacts,
)
from fleetdump.agent.probes import flight, gpu, host, net, process, ras, reach, stacks, strace
from fleetdump.agent.probes.bounded import Pending, Probes
from fleetdump.agent.probes.logfile import LogReader
from fleetdump.agent.progress import Rates
from fleetdump.agent.protocol import AgentFailure, EvidenceArgs, EvidenceResult, HealthyProfile, to_json
from fleetdump.agent.records import in_words
from fleetdump.agent.scrub import proxy_address
from fleetdump.agent.server import ServerRecord, load_record, readable_records, server_states

TENSOR_PARALLEL = ("--tp-size", "--tp", "--tensor-parallel-size")
HEALTHY_LIMIT = 9.0
PROXY_NAMES = ("http_proxy", "https_proxy", "all_proxy")
ENVIRONMENT_PREFIXES = ("SGLANG_", "SGL_", "NCCL_", "GLOO_", "CUDA_", "TORCH", "OMP_", "HF_", "TRANSFORMERS_", "PYTHON")


def evidence(args: EvidenceArgs, ctx: AgentContext) -> EvidenceResult:
    """Verb ``evidence``: look at a server of ours by name, or at any by port or launcher pid."""
    target = find_target(args, ctx)
    watch = WatchFacts(patiences=args.patience)
    data, folder = collect(target, ctx, seconds=args.seconds, deep=args.deep, watch_facts=watch)
    return EvidenceResult(data, folder)


def collect(
    target: Target, ctx: AgentContext, *, seconds: float, deep: bool, watch_facts: Optional[WatchFacts]
) -> Tuple[Dict[str, Any], str]:
    """Take the evidence of ``target``: two samples ``seconds`` apart, stage 2 when they show no progress or ``deep``.

    Returns the JSON of ``Evidence`` and the folder of its bundle, ``diagnoses/<time>-<name>/``. Takes about
    ``seconds`` + 10 s at most, even when probes hang.
    """
    collector = Collector(target, max(0.5, seconds), watch_facts, ctx.state)
    found = collector.stage_one()
    if deep or is_starved(found) or not (made_progress(found) or is_healthy(found)):
        collector.stage_two(found)
    folder = write_bundle(found, ctx.state)
    return to_json(found), str(folder)


def made_progress(found: Evidence) -> bool:
    """Whether anything that counts as progress moved between the samples. CPU time never does."""
    if found.log.news or found.log.forwards:
        return True
    rates, seconds = Rates(), found.seconds
    return any(
        p.rchar_delta > rates.rchar * seconds
        or p.read_bytes_delta > rates.read_bytes * seconds
        or p.rss_delta > rates.rss_bytes * seconds
        or (p.role == "compiler" and p.cpu > rates.compiler_cores)
        for p in found.processes
    )


def is_healthy(found: Evidence) -> bool:
    """Whether ``/health`` generated a token: an idle server makes no progress and needs no tracing."""
    return any(answer.path == "/health" and answer.status == 200 for answer in found.http)


def is_starved(found: Evidence) -> bool:
    """Whether the engine's own statistics say that requests get no tokens, whatever ``/health`` says."""
    return found.log.zero_statistics > 1


# --------------------------------------------------------------------------- which server
def find_target(args: EvidenceArgs, ctx: AgentContext) -> Target:
    """The server that ``args`` name. Raises ``AgentFailure`` (not_found, usage)."""
    if args.server:
        record = load_record(ctx.state, args.server)
        if record is None:
            known = ", ".join(one.name for one in server_states(ctx.state)) or "none"
            raise AgentFailure(
                "not_found",
                f"server {args.server} was never launched here",
                why=f"servers of ours on this host: {known}",
                next_step="launch it with `fleetdump deploy`, or name any other server with --port or --pid",
            )
        return target_of(record)
    if args.port:
        owner = procfs.port_owner(args.port)
        if owner is None or not owner.pid:
            raise AgentFailure(
                "not_found",
                f"nobody listens on port {args.port}" if owner is None else f"the owner of port {args.port} is hidden",
                next_step="name a server of ours with --server, or the launcher's process with --pid",
            )
        return target_of_pid(owner.pid, args.port)
    if args.pid:
        return target_of_pid(args.pid)
    records, unreadable = readable_records(ctx.state)
    if len(records) != 1 or unreadable:
        names = ", ".join(r.name for r in records) or "none"
        why = "; ".join([f"servers of ours: {names}", *map(in_words, unreadable.values())])
        raise AgentFailure("usage", "which server?", why=why, next_step="use --server or --port")
    return target_of(records[0])


def target_of(record: ServerRecord) -> Target:
    """A server of ours, by its record."""
    return Target(
        pid=record.pid,
        start_time=record.start_time,
        session=record.pid,
        server=record.name,
        port=record.port,
        host=record.host,
        log=record.log,
        ranks=record.tp,
        python=record.python,
        watched_paths=[record.capture_dir] if record.capture_dir else [],
        stopped_at=record.stopped_at,
    )


def target_of_pid(pid: int, port: int = 0) -> Target:
    """Any server: ``pid`` is its launcher or one of its processes; the rest comes from its command line.

    Raises ``AgentFailure`` when there is no such process.
    """
    sample = procfs.read_process(pid)
    if sample is None:
        raise AgentFailure("not_found", f"no process {pid} here")
    while sample.role != "launcher":
        parent = procfs.read_process(sample.ppid) if sample.ppid > 1 else None
        if parent is None:
            break
        sample = parent
    if sample.role != "launcher":
        sample = procfs.read_process(pid) or sample
    stdout = procfs.read_link(f"{procfs.PROC}/{sample.pid}/fd/1") or ""
    return Target(
        pid=sample.pid,
        start_time=sample.start_time,
        session=sample.pid if sample.sid == sample.pid else 0,
        port=port or int(option_value(sample.cmdline, ("--port",), "30000")),
        host=option_value(sample.cmdline, ("--host",), "127.0.0.1"),
        log=stdout if stdout.startswith("/") and stdout != "/dev/null" else "",
        ranks=int(option_value(sample.cmdline, TENSOR_PARALLEL, "1")),
        nodes=int(option_value(sample.cmdline, ("--nnodes",), "1")),
        node_rank=int(option_value(sample.cmdline, ("--node-rank",), "0")),
        python=os.path.join(procfs.read_link(f"{procfs.PROC}/{sample.pid}/cwd") or "", (sample.cmdline or [""])[0]),
    )


# --------------------------------------------------------------------------- collecting
class Collector:
    """Takes the evidence of one server: first ``stage_one``, then, where it is wanted, ``stage_two``."""

    def __init__(self, target: Target, seconds: float, watch: Optional[WatchFacts], state: State) -> None:
        self._target = target
        self._seconds = seconds
        self._watch = watch
        self._state = state
        self._probes = Probes()

    def stage_one(self) -> Evidence:
        """Reads only: everything that needs no right but the reader's and stops nobody."""
        target, probes = self._target, self._probes
        reader = LogReader(target.log, target.ranks)
        first = self._snapshot()
        began = time.monotonic()
        probes.run("log", reader.first, None, 5.0)
        slow = self._start_slow(sorted(first.processes))
        time.sleep(max(0.0, self._seconds - (time.monotonic() - began)))
        second = self._snapshot()
        found = Evidence(
            target=target,
            taken_at=time.time(),
            seconds=round(second.at - first.at, 3),
            hostname=os.uname().nodename,
            launcher_alive=procfs.is_alive(target.pid, target.start_time or None),
            uptime=_uptime(target.pid),
            watch=self._watch,
            probes=probes.records,
        )
        found.processes = probes.run("processes", lambda: process.compare(first, second, target.log), [], 5.0)
        found.log = probes.run("log again", reader.second, found.log, 5.0)
        # Asked only now: the server logs these requests, and its log must not seem to move because of them.
        living = [p.pid for p in found.processes if p.state not in "ZX"]
        found.port, found.http = probes.run("port", lambda: self._port(living), (PortFacts(target.port), []), 8.0)
        self._take_slow(found, slow)
        return found

    def _snapshot(self) -> process.Snapshot:
        empty = process.Snapshot(time.monotonic())
        take = lambda: process.snapshot(self._target.pid, self._target.session, time.monotonic())  # noqa: E731
        return self._probes.run("sample", take, empty, 5.0)

    def _start_slow(self, pids: List[int]) -> Dict[str, Pending[Any]]:
        """Probes that may take their time run while the second sample is waited for."""
        target = self._target

        def start(name: str, function: Callable[[], Any], default: Any, limit: float) -> Pending[Any]:
            return self._probes.start(name, function, default, limit)

        living = [pid for pid in pids if procfs.is_alive(pid)]
        anyone = target.pid if target.pid in living else next(iter(living), os.getpid())
        places = {"log": os.path.dirname(target.log) or "/", "tmp": "/tmp", "shm": "/dev/shm", "home": _home()}  # noqa: S108
        model = _model_folder(target.pid)
        places.update({"model": model} if model else {})
        places.update({f"capture {n}": path for n, path in enumerate(target.watched_paths)})
        pending: Dict[str, Pending[Any]] = {
            "dmesg": start("dmesg", host.kernel_log, [], 4.0),
            "memory": start("memory", lambda: host.memory(anyone), None, 3.0),
            "gpus": start("nvidia-smi", lambda: gpu.inspect(living), [], 9.0),
            "links": start("nvidia-smi topology", gpu.links, [], 9.0),
            "host": start("host", lambda: reach.host_facts(anyone), None, 6.0),
            "ras": start("nccl ras", lambda: ras.ras(living), None, ras.LIMIT + 1.0),
            "locks": start("locks", lambda: host.locks(set(living)), [], 3.0),
            "lock files": start(
                "lock files", lambda: host.lock_files(_home(), living, host.environment(anyone)), [], 3.0
            ),
            "flight": start("flight recorder", lambda: self._flight(anyone), [], 3.0),
            "environment": start("environment", lambda: host.environment(anyone), {}, 3.0),
        }
        if target.server and self._watch and self._watch.healthy is None:
            pending["healthy starts"] = start("healthy starts", self._healthy, None, HEALTHY_LIMIT)
        for use, path in places.items():
            pending[f"disk {use}"] = start(f"disk {use}", _disk_probe(use, path), None, 3.0)
        return pending

    def _healthy(self) -> Optional[HealthyProfile]:
        """What healthy starts of this server of ours took; a watcher has brought it along already."""
        record = load_record(self._state, self._target.server)
        return healthy.profile(self._state, healthy.kind_of(record, HEALTHY_LIMIT)[1]) if record else None

    def _flight(self, pid: int) -> List[FlightRecord]:
        return flight.flight(host.environment(pid), time.time() - _uptime(self._target.pid))

    def _port(self, pids: List[int]) -> Tuple[PortFacts, List[Any]]:
        facts = net.port_facts(self._target, pids)
        answers = net.http_answers(self._target, pids) if facts.open and facts.ours else []
        return facts, answers

    def _take_slow(self, found: Evidence, slow: Dict[str, Pending[Any]]) -> None:
        taken = {name: self._probes.result(pending) for name, pending in slow.items()}
        found.kernel_log = taken["dmesg"]
        found.memory = taken["memory"] or found.memory
        found.memory.oom_lines = host.oom_lines(found.kernel_log, self._target.start_time)
        found.gpus = taken["gpus"]
        found.host = taken["host"] or HostFacts()
        found.host.gpu_links = taken["links"]
        found.ras = taken["ras"] or RasFacts()
        found.flight = taken["flight"]
        found.locks = taken["locks"]
        found.lock_files = taken["lock files"]
        found.disks = [taken[name] for name in slow if name.startswith("disk ") and taken[name]]
        if found.watch and "healthy starts" in taken:
            found.watch.healthy = taken["healthy starts"]
        environment = taken["environment"]
        found.env_names = sorted(name for name in environment if name.startswith(ENVIRONMENT_PREFIXES))
        found.proxy = _proxies(environment)

    def stage_two(self, found: Evidence) -> None:
        """Looks that stop threads for moments: stacks of launcher and ranks, system calls of launcher and ranks."""
        found.deep = True
        # A stopped process has nothing to show, and some tracers would wake it.
        chosen = [p for p in found.processes if p.role in ("launcher", "scheduler") and p.state not in "ZXTt"]
        names = {p.pid: p.label or p.role for p in found.processes}
        probes = self._probes
        # One tracer a process at a time: all stacks first (fast), then all traces at once.
        py_spy = probes.run("py-spy", lambda: stacks.find_py_spy(self._target.python), "", 2.0)
        if py_spy:
            dumps = [
                probes.start(f"py-spy {names[p.pid]}", _stack_probe(p, py_spy), Stack(0, "", "", ""), 8.0)
                for p in chosen
            ]
            found.stacks = [stack for stack in map(probes.result, dumps) if stack.pid]
            if not (made_progress(found) or is_healthy(found)):  # it stops a rank for a second or more
                self._native(found, [p for p in chosen if process.is_wanted_native(p)], py_spy, names)
            found.stack_groups = stacks.group(found.stacks)
        self._trace(found, chosen, names)

    def _native(self, found: Evidence, ranks: List[ProcessFacts], py_spy: str, names: Dict[int, str]) -> None:
        """C and C++ frames of ranks that burn a core: whether they wait for a GPU, and in what."""
        none: List[str] = []
        pending = {
            p.pid: self._probes.start(f"py-spy --native {names[p.pid]}", _native_probe(p, py_spy), none, 8.0)
            for p in ranks
        }
        native = {pid: self._probes.result(one) for pid, one in pending.items()}
        for stack in found.stacks:
            stack.native = native.get(stack.pid, [])

    def _trace(self, found: Evidence, chosen: List[ProcessFacts], names: Dict[int, str]) -> None:
        probes = self._probes
        traces = [
            probes.start(f"strace {names[p.pid]}", _trace_probe(p, names), Trace(0, "", 0.0), 6.0) for p in chosen
        ]
        found.traces = [trace for trace in map(probes.result, traces) if trace.pid]


def _native_probe(target: ProcessFacts, py_spy: str) -> Callable[[], List[str]]:
    return lambda: stacks.native_frames(target, py_spy)


def _disk_probe(use: str, path: str) -> Callable[[], DiskFacts]:
    return lambda: host.disk(use, path)


def _stack_probe(target: ProcessFacts, py_spy: str) -> Callable[[], Stack]:
    return lambda: stacks.main_stack(target, py_spy)


def _trace_probe(target: ProcessFacts, names: Dict[int, str]) -> Callable[[], Trace]:
    return lambda: strace.trace(target, names)


def _home() -> str:
    return str(Path.home())


def _model_folder(pid: int) -> str:
    """The model's folder, as the launcher was told; empty for a name of a hub."""
    path = option_value(procfs.read_cmdline(pid, "S"), ("--model-path", "--model"), "")
    return path if path.startswith("/") else ""


def _uptime(pid: int) -> float:
    stat = procfs.read_stat(pid)
    since_boot = float((procfs.read_text("/proc/uptime") or "0").split()[0])
    return round(since_boot - stat.start_time / procfs.TICKS_PER_SECOND, 1) if stat else 0.0


def _proxies(environment: Dict[str, str]) -> Dict[str, str]:
    lowered = {name.lower(): value for name, value in environment.items()}
    found = {name: proxy_address(lowered[name]) for name in PROXY_NAMES if lowered.get(name)}
    if found and "no_proxy" in lowered:
        found["no_proxy"] = lowered["no_proxy"]
    return found
