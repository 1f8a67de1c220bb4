"""The checks of GPUs behind ``probe``: how many, whose processes are on them, what an earlier server of ours left."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Dict, List, Sequence, Set

from fleetdump.agent import procfs
from fleetdump.agent.arguments import option_value
from fleetdump.agent.context import State
from fleetdump.agent.evidence_host import GpuProcess
from fleetdump.agent.findings import Checked
from fleetdump.agent.neighbours import user_of
from fleetdump.agent.probes.bounded import ProbeFailed, run_command
from fleetdump.agent.probes.gpu import CSV, PROCESS_QUERY, parse_processes
from fleetdump.agent.protocol import Finding
from fleetdump.agent.scrub import scrub_argv
from fleetdump.agent.server import living, readable_records
from fleetdump.agent.specs import ServerSpec

QUERY = "index,name,memory.total,memory.used,driver_version,uuid"
SMALL_MIB = 1024
"""Used by others below which a GPU counts as free: a desktop, a monitoring agent."""
TAKEN = 0.5
"""Used by others from which on a server with default settings cannot start: it wants most of a GPU's memory."""


@dataclass
class _Gpu:
    """One GPU; memory in MiB."""

    index: int
    name: str
    total: int
    used: int
    driver: str
    uuid: str
    processes: List[GpuProcess] = field(default_factory=list)


def check_gpus(servers: Sequence[ServerSpec], state: State) -> Checked:
    """GPUs by nvidia-smi, and who uses them; none is fine where every server runs on the CPU."""
    try:
        gpus = _gpus()
    except ProbeFailed as failure:
        if servers and all(is_on_cpu(server) for server in servers):
            return Checked([Finding("gpus", "ok", "no GPU, and none is asked for")])
        return Checked([Finding("gpus", "warning", f"no GPU seen: {failure}", "check the driver, or the container's")])
    names = [f"{gpu.name} {gpu.total} MiB" for gpu in gpus]
    kinds = ", ".join(f"{count} x {name}" for name, count in Counter(names).items())
    driver = f", driver {gpus[0].driver}" if gpus else ""
    findings = [Finding("gpus", "ok", f"{kinds or 'no GPU'}{driver}")]
    ours = {member.pid for record in readable_records(state)[0] for member in living(record)}
    for server in servers:
        findings += _asked_for(server, len(gpus)) or _taken(server, gpus, ours)
    return Checked(findings, {"gpus": names})


def _gpus() -> List[_Gpu]:
    """Raises ``ProbeFailed`` without an answer; when the second question gets none, no processes are known."""
    overview = _ask(f"--query-gpu={QUERY}")
    gpus = [
        _Gpu(int(row[0]), row[1], _mib(row[2]), _mib(row[3]), row[4], row[5])
        for row in ([cell.strip() for cell in line.split(",")] for line in overview.splitlines())
        if len(row) == 6 and row[0].isdigit()
    ]
    try:
        by_uuid: Dict[str, List[GpuProcess]] = parse_processes(_ask(f"--query-compute-apps={PROCESS_QUERY}"))
    except ProbeFailed:
        by_uuid = {}
    for gpu in gpus:
        gpu.processes = by_uuid.get(gpu.uuid, [])
    return gpus


def _ask(question: str) -> str:
    output = run_command(["nvidia-smi", question, CSV], 7.0)
    if output.status:
        raise ProbeFailed(f"nvidia-smi ended with {output.status}: {(output.stderr or output.stdout).strip()[:200]}")
    return output.stdout


def _mib(text: str) -> int:
    return int(text) if text.isdigit() else 0


def _asked_for(server: ServerSpec, count: int) -> List[Finding]:
    missing = [gpu for gpu in server.gpus if gpu >= count]
    if missing:
        text = f"server {server.name} wants GPUs {missing}, the host has {count}"
        return [Finding("gpus", "blocker", text, "correct `gpus` in the inventory")]
    if (
        server.ranks > (len(server.gpus) or count)
        and not is_on_cpu(server)
        and not option_value(server.args, ("--nnodes",))
    ):
        text = f"server {server.name} has {server.ranks} ranks for {len(server.gpus) or count} GPUs"
        return [Finding("gpus", "blocker", text, "correct `tp`, `dp`, `pp` or `gpus` in the inventory")]
    return []


def _taken(server: ServerSpec, gpus: Sequence[_Gpu], ours: Set[int]) -> List[Finding]:
    """What others hold of the memory of the GPUs that the server would use."""
    wanted = server.gpus or ([] if is_on_cpu(server) else list(range(server.ranks)))
    busy: Dict[str, List[int]] = {}
    blocked = False
    for gpu in (gpu for gpu in gpus if gpu.index in wanted):
        known = [process for process in gpu.processes if process.pid in ours]
        foreign = gpu.used - sum(process.memory for process in known)
        # In a container the driver names pids of the host, or none at all: then our own server cannot be told apart.
        if foreign < SMALL_MIB or (ours and not any(procfs.read_process(p.pid) for p in gpu.processes)):
            continue
        busy.setdefault(_users(gpu, ours), []).append(gpu.index)
        blocked = blocked or foreign > TAKEN * gpu.total
    said = bool(option_value(server.args, ("--mem-fraction-static",)))
    level = "blocker" if blocked and not said else "warning"
    fix = "end those processes, or give the server other `gpus` in the inventory"
    return [
        Finding("gpus", level, f"GPU {', '.join(map(str, places))} is in use: {users}", fix)
        for users, places in busy.items()
    ]


def _users(gpu: _Gpu, ours: Set[int]) -> str:
    others = [process for process in gpu.processes if process.pid not in ours]
    return "; ".join(map(_describe, others)) or f"{gpu.used} MiB by no process that is seen here (another container?)"


def _describe(process: GpuProcess) -> str:
    sample = procfs.read_process(process.pid)
    if sample is None:
        return f"pid {process.pid} outside this container, {process.memory} MiB"
    command = " ".join(scrub_argv(sample.cmdline))[:80] or sample.comm
    return f"pid {process.pid} of user {user_of(process.pid)}, {process.memory} MiB: {command}"


def check_orphans(state: State) -> Checked:
    """Processes that an earlier server of ours left when its launcher died: nobody can use them again."""
    findings = []
    for record in readable_records(state)[0]:
        left = living(record)
        if left and all(member.pid != record.pid for member in left):
            pids = ", ".join(str(member.pid) for member in left[:8])
            text = f"server {record.name} died and left {len(left)} processes (pid {pids}), with the memory they hold"
            findings.append(Finding("orphans", "warning", text, "the next deploy ends them, or fleetdump stop"))
    return Checked(findings)


def is_on_cpu(server: ServerSpec) -> bool:
    """Whether its arguments put it on the CPU."""
    return "--device=cpu" in server.args or ["--device", "cpu"] in [
        server.args[n : n + 2] for n in range(len(server.args))
    ]
