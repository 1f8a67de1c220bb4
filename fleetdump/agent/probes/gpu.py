"""GPUs as nvidia-smi sees them, within a time limit: the tool itself can hang in the driver."""

from __future__ import annotations

from typing import List

from fleetdump.agent.evidence_types import GpuFacts
from fleetdump.agent.probes.bounded import ProbeFailed, run_command

QUERY = "index,utilization.gpu,memory.used,power.draw,power.limit"


def gpus() -> List[GpuFacts]:
    """One entry a GPU. Raises ``ProbeFailed`` when there is no nvidia-smi or it fails."""
    output = run_command(["nvidia-smi", f"--query-gpu={QUERY}", "--format=csv,noheader,nounits"], 8.0)
    if output.status:
        raise ProbeFailed(f"nvidia-smi ended with {output.status}: {(output.stderr or output.stdout).strip()[:200]}")
    return parse_gpus(output.stdout)


def parse_gpus(text: str) -> List[GpuFacts]:
    """The CSV answer; a field that the driver does not know ("[N/A]") counts as 0."""
    rows = [[cell.strip() for cell in line.split(",")] for line in text.splitlines() if line.strip()]
    return [
        GpuFacts(int(_number(row[0])), int(_number(row[1])), int(_number(row[2])), _number(row[3]), _number(row[4]))
        for row in rows
        if len(row) == 5
    ]


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return 0.0
