"""What a diagnosis says."""

from __future__ import annotations

from dataclasses import dataclass, field

DIRECT, MEASURED, PATTERN, LOG_ONLY = "direct", "measured", "pattern", "log only"
"""Confidence. Direct: the cause itself was seen (a pipe's other end, a lock's holder, a kernel line, a process's state,
the code in which a thread stands). Measured: two samples say so (CPU, switches, bytes, power). Pattern: stacks, marks
or settings look like a known case, and others may look the same. Log only: nothing but text of the log."""

CERTAINTY = (DIRECT, MEASURED, PATTERN, LOG_ONLY)
"""From the surest on."""

OK, WAIT, STALL = "ok", "wait", "stall"
"""Severity: nothing is wrong; it works and takes its time; it will not go on by itself."""


@dataclass
class Verdict:
    """One named cause. ``phase`` is one of ``specs.PHASES`` (or empty), ``rank`` a tensor-parallel rank or None.

    ``evidence`` are the facts that support it, ``ruled_out`` what the same facts exclude, ``next_steps`` what to do.
    """

    code: str
    title: str
    confidence: str
    severity: str = STALL
    phase: str = ""
    rank: int | None = None
    server: str = ""
    evidence: list[str] = field(default_factory=list)
    ruled_out: list[str] = field(default_factory=list)
    next_steps: list[str] = field(default_factory=list)
    references: list[str] = field(default_factory=list)
    """Public reports of the same kind, each as owner/repository#number."""
