"""What a check of this host finds: facts and findings, each ok, warning or blocker with the next step."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Dict, List

from fleetdump.agent.protocol import AgentFailure, Finding

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30


@dataclass
class Checked:
    """What one check found, and the fields of ``ProbeResult`` that it knows."""

    findings: List[Finding]
    facts: Dict[str, Any] = field(default_factory=dict)


def blocked(key: str, failure: AgentFailure) -> Finding:
    """A verb's failure as a finding: what would stop a deploy."""
    error = failure.error
    text = " ".join(part for part in (error.what, f"({error.where})" if error.where else "") if part)
    return Finding(key, "blocker", f"{text}: {error.why}" if error.why else text, error.next_step)
