"""Which servers are vLLM's. How far its start is, the agent reads from its log, as SGLang's."""

from __future__ import annotations

from fleetdump.agent.evidence_types import Evidence

_NAMES = ("VLLM::", "vllm")


def is_vllm(evidence: Evidence) -> bool:
    """By its processes' own names, or by the launcher's command line."""
    named = any(p.name.startswith(_NAMES) for p in evidence.processes)
    return named or any(p.role == "launcher" and "vllm" in p.cmdline.lower() for p in evidence.processes)
