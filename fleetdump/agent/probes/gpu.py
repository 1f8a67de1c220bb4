"""GPUs as nvidia-smi sees them, within a time limit: the tool itself can hang in the driver."""

from __future__ import annotations

import re
import time
from typing import Dict, List, Optional

from fleetdump.agent import procfs
from fleetdump.agent.evidence_host import GpuFacts, GpuProcess
from fleetdump.agent.probes.bounded import ProbeFailed, run_command

QUERY = "index,utilization.gpu,memory.used,power.draw,power.limit,memory.total,name,uuid"
PROCESS_QUERY = "gpu_uuid,pid,used_gpu_memory"
CSV = "--format=csv,noheader,nounits"
LIMIT = 4.0
SERVER_NAMES = ("sglang", "VLLM", "vllm", "ray::")
_LINK = re.compile(r"\b(?:NV\d+|PIX|PXB|PHB|NODE|SYS)\b")
_FABRIC = re.compile(r"^\s+Fabric\s*\n\s+State\s*: (?P<state>.*)$", re.MULTILINE)


def gpus() -> List[GpuFacts]:
    """One entry a GPU, without its processes. Raises ``ProbeFailed`` when there is no nvidia-smi or it fails."""
    return parse_gpus(_overview())


def _overview() -> str:
    output = run_command(["nvidia-smi", f"--query-gpu={QUERY}", CSV], 8.0)
    if output.status:
        raise ProbeFailed(f"nvidia-smi ended with {output.status}: {(output.stderr or output.stdout).strip()[:200]}")
    return output.stdout


def inspect(ours: List[int], seconds: float) -> List[GpuFacts]:
    """``gpus`` with the processes on each, the state of the fabric and of its links, and how their memory changed over
    ``seconds``; ``ours`` are the server's pids.

    Raises ``ProbeFailed`` as ``gpus`` does; when nvidia-smi does not answer the further questions, the rest stands.
    """
    began = time.monotonic()
    found = occupied(ours)
    states = _FABRIC.findall(_ask(["-q"]) or "")
    for gpu, state in zip(found, states if len(states) == len(found) else []):
        gpu.fabric = "" if state.strip() == "N/A" else state.strip()
    down = parse_inactive_links(_ask(["nvlink", "--status"]) or "")
    for gpu in found:
        gpu.links_down = down.get(gpu.index, 0)
    time.sleep(max(0.0, began + seconds - time.monotonic()))
    later = {gpu.index: gpu.memory_used for gpu in parse_gpus(_ask([f"--query-gpu={QUERY}", CSV]) or "")}
    for gpu in found:
        gpu.memory_delta = later.get(gpu.index, gpu.memory_used) - gpu.memory_used
    return found


def occupied(ours: List[int]) -> List[GpuFacts]:
    """``gpus`` with the processes on each, where nvidia-smi tells; ``ours`` are the server's pids. Raises
    ``ProbeFailed`` as ``gpus`` does."""
    overview = _overview()
    found, uuids = parse_gpus(overview), parse_uuids(overview)
    listed = _ask([f"--query-compute-apps={PROCESS_QUERY}", CSV])
    if listed is not None:
        by_uuid = parse_processes(listed)
        for gpu in found:
            gpu.processes_known = True
            gpu.processes = [identify(one, ours) for one in by_uuid.get(uuids.get(gpu.index, ""), [])]
    return found


def parse_inactive_links(text: str) -> Dict[int, int]:
    """GPU index to the number of its NVLinks that are inactive while others of it work."""
    down: Dict[int, int] = {}
    for block in re.split(r"(?m)^(?=GPU \d+:)", text):
        index = re.match(r"GPU (\d+):", block)
        inactive, active = (
            len(re.findall(r"Link \d+:\s*<inactive>", block)),
            len(re.findall(r"Link \d+:\s*[\d.]+ ", block)),
        )
        if index and active:
            down[int(index[1])] = inactive
    return down


def links() -> List[str]:
    """Kinds of link between the GPUs. Raises ``ProbeFailed`` when nvidia-smi does not tell."""
    text = _ask(["topo", "-m"])
    if text is None:
        raise ProbeFailed("nvidia-smi topo -m does not answer")
    return parse_links(text)


def _ask(arguments: List[str]) -> Optional[str]:
    try:
        output = run_command(["nvidia-smi", *arguments], LIMIT)
    except ProbeFailed:
        return None
    return None if output.status else output.stdout


def parse_gpus(text: str) -> List[GpuFacts]:
    """The CSV answer; a field that the driver does not know ("[N/A]") counts as 0, a shorter row is read as far as
    it goes."""
    return [
        GpuFacts(
            int(_number(row[0])), int(_number(row[1])), int(_number(row[2])), _number(row[3]), _number(row[4]),
            int(_number(row[5])) if len(row) > 5 else 0, row[6] if len(row) > 6 else "",
        )
        for row in _rows(text)
        if len(row) >= 5
    ]  # fmt: skip


def parse_uuids(text: str) -> Dict[int, str]:
    """GPU index to UUID, of the same answer."""
    return {int(_number(row[0])): row[7] for row in _rows(text) if len(row) > 7}


def parse_processes(text: str) -> Dict[str, List[GpuProcess]]:
    """Processes by the UUID of their GPU."""
    found: Dict[str, List[GpuProcess]] = {}
    for row in _rows(text):
        if len(row) == 3 and row[1].isdigit():
            found.setdefault(row[0], []).append(GpuProcess(int(row[1]), int(_number(row[2]))))
    return found


def parse_links(text: str) -> List[str]:
    """Kinds of link in the matrix that ``nvidia-smi topo -m`` prints, between GPUs only."""
    rows = [line for line in text.splitlines() if re.match(r"\s*GPU\d+\s", line)]
    kinds = [_LINK.findall(" ".join(row.split()[1 : len(rows) + 1])) for row in rows]
    return sorted({kind for of in kinds for kind in of})


def identify(process: GpuProcess, ours: List[int]) -> GpuProcess:
    """Whose process it is, by /proc; in a container the pid is the host's and names nothing here."""
    sample = procfs.read_process(process.pid)
    process.ours = process.pid in ours
    if sample is not None:
        process.name = sample.comm
        title = sample.cmdline[0] if sample.cmdline else sample.comm
        served = title.startswith(SERVER_NAMES) or sample.role == "scheduler"
        process.orphan = served and not process.ours and sample.ppid == 1
    return process


def _rows(text: str) -> List[List[str]]:
    return [[cell.strip() for cell in line.split(",")] for line in text.splitlines() if line.strip()]


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return 0.0
