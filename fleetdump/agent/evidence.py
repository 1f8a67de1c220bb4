"""Evidence of one server: what it does now, read-only first; strace and stacks only when two samples show no progress.

Nothing is signalled and nothing is changed. Every probe has its own time limit, and how it went is evidence too.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any, Callable, Dict, List, Optional, Sequence, Tuple

from fleetdump.agent import healthy, procfs
from fleetdump.agent.arguments import option_value
from fleetdump.agent.context import AgentContext, State
from fleetdump.agent.evidence_engine import (
    FlightRecord,
    HttpProbe,
    PortFacts,
    RasFacts,
)
from fleetdump.agent.evidence_files import harmless
from fleetdump.agent.evidence_host import DiskFacts, HostFacts
from fleetdump.agent.evidence_process import ProcessFacts, Stack, Trace
from fleetdump.agent.evidence_report import write_bundle
from fleetdump.agent.evidence_types import (
    Evidence,
    ProbeRecord,
    Target,
    WatchFacts,
)
from fleetdump.agent.probes import cgroup, flight, gpu, host, net, process, ras, reach, stacks, strace
from fleetdump.agent.probes.bounded import Pending, Probes
from fleetdump.agent.probes.logfile import LogReader
from fleetdump.agent.progress import Rates
from fleetdump.agent.protocol import to_json
from fleetdump.agent.scrub import proxy_address
from fleetdump.agent.server import load_record
from fleetdump.agent.servermessages import EvidenceArgs, EvidenceResult, HealthyProfile
from fleetdump.agent.targets import find_target
from fleetdump.agent.tools import brought

HEALTHY_LIMIT = 9.0
STATISTICS_SILENCE = 60.0
"""Seconds in which vLLM would have written statistics six times."""
PROXY_NAMES = ("http_proxy", "https_proxy", "all_proxy")
AT_A_TIME = 4
STACKS_OF = ("launcher", "scheduler", "engine")
"""Roles whose stacks and system calls stage 2 takes; beside them the process that was named by its pid."""
GPU_SECONDS = 4.0
"""Between two looks at the GPUs' memory, at most: nvidia-smi itself takes up to a second with eight of them."""
ENVIRONMENT_PREFIXES = (
    "SGLANG_", "SGL_", "VLLM_", "NCCL_", "GLOO_", "UCX_", "NVSHMEM_", "CUDA_", "NVIDIA_", "TORCH", "PYTORCH_",
    "TRITON_", "FLASHINFER_", "DG_", "MAX_JOBS", "OMP_", "MKL_", "OPENBLAS_", "KMP_", "HF_", "HUGGINGFACE_",
    "TRANSFORMERS_", "MODELSCOPE_", "PYTHON", "LD_", "MALLOC_", "MASTER_", "RANK", "WORLD_SIZE", "LOCAL_RANK",
    "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "NO_PROXY", "TMPDIR", "XDG_CACHE_HOME", "FLEETDUMP_",
)  # fmt: skip
"""Variables whose names say something about a hang; in small letters too, for those of proxies."""


def evidence(args: EvidenceArgs, ctx: AgentContext) -> EvidenceResult:
    """Verb ``evidence``: look at a server of ours by name, or at any by port, pid or what its processes are called."""
    target = find_target(args, ctx)
    watch = WatchFacts(patiences=args.patience)
    data, folder = collect(target, ctx, seconds=args.seconds, deep=args.deep, watch_facts=watch)
    lacks = any(not p["ok"] and p["detail"].startswith(stacks.MISSING) for p in data["probes"])
    return EvidenceResult(data, folder, "py-spy" if lacks else "")


def collect(
    target: Target, ctx: AgentContext, *, seconds: float, deep: bool, watch_facts: Optional[WatchFacts]
) -> Tuple[Dict[str, Any], str]:
    """Take the evidence of ``target``: two samples ``seconds`` apart, stage 2 when they show no progress or ``deep``.

    Returns the JSON of ``Evidence`` and the folder of its bundle, ``diagnoses/<time>-<name>/``; the folder is empty
    when it cannot be written, which is evidence too (a full disk). Takes about ``seconds`` + 10 s at most, even when
    probes hang.
    """
    collector = Collector(target, max(0.5, seconds), watch_facts, ctx.state)
    found = collector.stage_one()
    if deep or is_starved(found) or not (made_progress(found) or is_healthy(found)):
        collector.stage_two(found)
    folder = ""
    try:
        folder = str(write_bundle(found, ctx.state))
    except OSError as error:
        found.probes.append(ProbeRecord("bundle", False, 0.0, f"cannot be stored on the host: {error}"))
    return harmless(to_json(found)), folder


def made_progress(found: Evidence) -> bool:
    """Whether anything that counts as progress moved between the samples. CPU time never does, nor does what the
    launcher reads once it serves HTTP (a module that it imports late)."""
    if found.log.news or found.log.forwards:
        return True
    rates, seconds = Rates(), found.seconds
    return any(
        p.rchar_delta > rates.rchar * seconds
        or p.read_bytes_delta > rates.read_bytes * seconds
        or p.rss_delta > rates.rss_bytes * seconds
        or (p.role == "compiler" and p.cpu > rates.compiler_cores)
        for p in found.processes
        if not (p.role == "launcher" and found.port.open)
    )


def is_healthy(found: Evidence) -> bool:
    """Whether ``/health`` generated a token: an idle server makes no progress and needs no tracing."""
    return any(answer.path == "/health" and answer.status == 200 for answer in found.http)


def is_starved(found: Evidence) -> bool:
    """Whether the engine's own statistics say that requests get no tokens, whatever ``/health`` says: in lines of
    zeros or, of vLLM, by their absence while requests run. (SGLang's last line counts requests that have ended since.)
    """
    silent = found.log.running_requests > 0 and found.log.quiet_seconds >= STATISTICS_SILENCE
    return found.log.zero_statistics > 1 or (silent and any(p.name.startswith("VLLM::") for p in found.processes))


# --------------------------------------------------------------------------- collecting
class Collector:
    """Takes the evidence of one server: first ``stage_one``, then, where it is wanted, ``stage_two``."""

    def __init__(self, target: Target, seconds: float, watch: Optional[WatchFacts], state: State) -> None:
        self._target = target
        self._seconds = seconds
        self._watch = watch
        self._state = state
        self._probes = Probes()
        self._environment: Dict[str, str] = {}

    def stage_one(self) -> Evidence:
        """Reads only: everything that needs no right but the reader's and stops nobody."""
        target, probes = self._target, self._probes
        log = _log_path(target)
        reader = LogReader(log, max(1, target.ranks // max(1, target.nodes)))  # of the ranks that are on this host
        first = self._snapshot()
        began = time.monotonic()
        probes.run("log", reader.first, None, 5.0)
        slow = self._start_slow(first)
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
        compared = probes.run("processes", lambda: process.compare(first, second, log), process.Compared(), 8.0)
        found.processes = compared.processes
        self._say_what_is_missing(compared)
        found.log = probes.run("log again", reader.second, found.log, 5.0)
        found.log.path = target.log
        # Asked only now: the server logs these requests, and its log must not seem to move because of them.
        self._ask_server(found)
        self._take_slow(found, slow)
        return found

    def _snapshot(self) -> process.Snapshot:
        target = self._target
        stat = procfs.read_stat(target.pid)
        # A later process may have the dead launcher's number.
        pid = target.pid if stat and target.start_time in (0, stat.start_time) else 0
        empty = process.Snapshot(time.monotonic())
        take = lambda: process.snapshot(pid, target.session, time.monotonic())  # noqa: E731
        return self._probes.run("sample", take, empty, 8.0)

    def _say_what_is_missing(self, compared: process.Compared) -> None:
        """What this user may not see, what does not answer, and who is not listed."""
        living = [p for p in compared.processes if p.state not in "ZX"]
        hidden = [p for p in living if not p.readable and p.pid not in compared.blocked]
        if hidden:
            who = f"{len(hidden)} of {len(living)} processes of the server belong to another user than {os.geteuid()}"
            what = "their descriptors, I/O counters, system calls and environment may not be read"
            self._probes.failed("access", f"{who}: {what}; run as root or as that user")
        for pid in compared.blocked:
            self._probes.failed(f"process {pid}", "its memory cannot be read: the kernel does not answer (memory lock)")
        if compared.left_out:
            self._probes.failed("bystanders", f"{compared.left_out} processes of no known role are not listed")

    def _start_slow(self, first: process.Snapshot) -> Dict[str, Pending[Any]]:
        """Probes that may take their time run while the second sample is waited for."""
        target, start = self._target, self._probes.start
        living = [pid for pid, sample in sorted(first.processes.items()) if sample.state not in "ZX"]
        anyone = target.pid if target.pid in living else next(iter(living), os.getpid())
        whole = [pid for pid in living if first.processes[pid].role != "scheduler"] or living
        nothing: Dict[str, str] = {}
        environment = self._probes.run("environment", lambda: host.environment([anyone, *whole]), nothing, 3.0)
        home = environment.get("HOME") or str(Path.home())
        root, between = target.root, min(self._seconds, GPU_SECONDS)
        pending: Dict[str, Pending[Any]] = {
            "dmesg": start("dmesg", host.kernel_log, [], 4.0),
            "memory": start("memory", lambda: host.memory(anyone), None, 3.0),
            "cgroup": start("cgroup", lambda: (cgroup.cgroup(anyone), anyone), None, 3.0),
            "gpus": start("nvidia-smi", lambda: gpu.inspect(living, between), [], 9.0 + between),
            "links": start("nvidia-smi topology", gpu.links, [], 9.0),
            "host": start("host", lambda: reach.host_facts(anyone), None, 6.0),
            "ras": start("nccl ras", lambda: ras.ras(living, environment), None, ras.LIMIT + 1.0),
            "locks": start("locks", lambda: host.locks(set(living)), [], 3.0),
            "lock files": start("lock files", lambda: host.lock_files(home, environment, root), [], 3.0),
            "flight": start("flight recorder", lambda: self._flight(environment), [], 3.0),
        }
        if target.server and self._watch and self._watch.healthy is None:
            pending["healthy starts"] = start("healthy starts", self._healthy, None, HEALTHY_LIMIT)
        for use, path in self._places(home).items():
            pending[f"disk {use}"] = start(f"disk {use}", _disk_probe(use, path, root), None, 3.0)
        self._environment = environment
        return pending

    def _places(self, home: str) -> Dict[str, str]:
        """Directories whose file systems matter, by their use."""
        target = self._target
        places = {"log": os.path.dirname(target.log) or "/", "tmp": "/tmp", "shm": "/dev/shm", "home": home}  # noqa: S108
        model = _model_folder(target.pid)
        places.update({"model": model} if model else {})
        return {**places, **{f"capture {n}": path for n, path in enumerate(target.watched_paths)}}

    def _healthy(self) -> Optional[HealthyProfile]:
        """What healthy starts of this server of ours took; a watcher has brought it along already."""
        record = load_record(self._state, self._target.server)
        return healthy.profile(self._state, healthy.kind_of(record, HEALTHY_LIMIT)[1]) if record else None

    def _flight(self, environment: Dict[str, str]) -> List[FlightRecord]:
        return flight.flight(environment, time.time() - _uptime(self._target.pid), self._target.root)

    def _ask_server(self, found: Evidence) -> None:
        """Its port, then its status endpoints, all at once."""
        target, probes = self._target, self._probes
        living = [p.pid for p in found.processes if p.state not in "ZX"]
        found.port = probes.run("port", lambda: net.port_facts(target, living), PortFacts(target.port), 5.0)
        if not (found.port.open and found.port.ours):
            return
        asked = [
            probes.start(f"GET {paths[0]}", _endpoint_probe(target, living[0], paths, limit), None, 2 * limit + 1.0)
            for paths, limit in net.ENDPOINTS
        ]
        found.http = [answer for answer in map(probes.result, asked) if answer]

    def _take_slow(self, found: Evidence, slow: Dict[str, Pending[Any]]) -> None:
        taken = {name: self._probes.result(pending) for name, pending in slow.items()}
        found.kernel_log = taken["dmesg"]
        found.memory = taken["memory"] or found.memory
        if taken["cgroup"]:
            before, pid = taken["cgroup"]
            found.cgroup = cgroup.since(before, cgroup.cgroup(pid)) if procfs.is_alive(pid) else before
            found.pressure = cgroup.pressures(pid)
        found.cpus = cgroup.cpus()
        start = self._target.start_time or min((p.start_time for p in found.processes), default=0)
        found.memory.oom_lines = host.oom_lines(found.kernel_log, start, found.memory, found.cgroup.path)
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
        found.env_names = sorted(name for name in self._environment if name.upper().startswith(ENVIRONMENT_PREFIXES))
        found.proxy = _proxies(self._environment)

    def stage_two(self, found: Evidence) -> None:
        """Looks that stop threads for moments: stacks of launcher and ranks, system calls of launcher and ranks."""
        found.deep = True
        # A stopped process has nothing to show, and some tracers would wake it.
        named = [p for p in found.processes if p.role in STACKS_OF or p.pid == self._target.pid]
        chosen = [p for p in named if p.state not in "ZXTt"]
        names = {p.pid: p.label or (p.name if p.role == "other" else p.role) for p in found.processes}
        probes = self._probes
        # One tracer a process at a time: all stacks first (fast), then all traces at once.
        py_spy = probes.run(
            "py-spy", lambda: stacks.find_py_spy(self._target.python, brought(self._state, "py-spy")), "", 2.0
        )
        if py_spy:
            dumps = [(f"py-spy {names[p.pid]}", _stack_probe(p, py_spy)) for p in chosen]
            found.stacks = [stack for stack in self._few_at_a_time(dumps, Stack(0, "", "", "")) if stack.pid]
            # It stops a rank for a second or more.
            if is_starved(found) or not (made_progress(found) or is_healthy(found)):
                self._native(found, [p for p in chosen if p.role == "scheduler"], py_spy, names)
            found.stack_groups = stacks.group(found.stacks)
            found.native_groups = stacks.group(found.stacks, native=True)
        self._trace(found, chosen, names)

    def _native(self, found: Evidence, ranks: List[ProcessFacts], py_spy: str, names: Dict[int, str]) -> None:
        """C and C++ frames of every rank: whether it waits for a GPU, and in what."""
        none: List[str] = []
        dumps = [(f"py-spy --native {names[p.pid]}", _native_probe(p, py_spy)) for p in ranks]
        native = dict(zip([p.pid for p in ranks], self._few_at_a_time(dumps, none)))
        for stack in found.stacks:
            stack.native = native.get(stack.pid, [])

    def _few_at_a_time(self, probes: List[Tuple[str, Callable[[], Any]]], default: Any) -> List[Any]:
        """Results of probes that each want a core and some memory."""
        results: List[Any] = []
        for begin in range(0, len(probes), AT_A_TIME):
            some = probes[begin : begin + AT_A_TIME]
            started = [self._probes.start(name, look, default, 8.0) for name, look in some]
            results += [self._probes.result(one) for one in started]
        return results

    def _trace(self, found: Evidence, chosen: List[ProcessFacts], names: Dict[int, str]) -> None:
        probes = self._probes
        traces = [
            probes.start(f"strace {names[p.pid]}", _trace_probe(p, names), Trace(0, "", 0.0), 6.0) for p in chosen
        ]
        found.traces = [trace for trace in map(probes.result, traces) if trace.pid]


def _native_probe(target: ProcessFacts, py_spy: str) -> Callable[[], List[str]]:
    return lambda: stacks.native_frames(target, py_spy)


def _log_path(target: Target) -> str:
    """By which name the log can be read from here. A log that was found by the launcher's standard output is read
    through that descriptor where its name leads nowhere (deleted, or in another mount namespace)."""
    named, opened = target.root + target.log, f"{procfs.PROC}/{target.pid}/fd/1"
    if not target.log:
        return ""
    return opened if not target.server and not os.path.exists(named) and os.path.exists(opened) else named


def _disk_probe(use: str, path: str, root: str) -> Callable[[], DiskFacts]:
    return lambda: host.disk(use, path, root)


def _endpoint_probe(target: Target, pid: int, paths: Sequence[str], limit: float) -> Callable[[], HttpProbe]:
    return lambda: net.status_endpoint(target, pid, paths, limit)


def _stack_probe(target: ProcessFacts, py_spy: str) -> Callable[[], Stack]:
    return lambda: stacks.main_stack(target, py_spy)


def _trace_probe(target: ProcessFacts, names: Dict[int, str]) -> Callable[[], Trace]:
    return lambda: strace.trace(target, names)


def _model_folder(pid: int) -> str:
    """The model's folder, as the launcher was told; empty for a name of a hub."""
    path = option_value(procfs.read_cmdline(pid), ("--model-path", "--model"), "")
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
