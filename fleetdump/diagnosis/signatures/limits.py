"""Limits of the host or container that a server runs into: shared memory, open files."""

from __future__ import annotations

from fleetdump.diagnosis.registry import Step, signature
from fleetdump.diagnosis.types import DIRECT, LOG_ONLY, MEASURED, PATTERN, Verdict
from fleetdump.diagnosis.view import View
from fleetdump.diagnosis.words import asked, size

SHM_SMALL = 256 << 20
"""A container's default /dev/shm has 64 MiB; a rank's NCCL and torch segments need more than that together."""
SHM_LEFT = 16 << 20
SIGBUS = 7
NEARLY = 0.97


@signature(Step.HOST)
def shm_small(view: View) -> Verdict | None:
    """Shared memory is small or full, and a rank died of it, says so, or stands in its set-up."""
    shm = next((d for d in view.evidence.disks if d.path == "/dev/shm" or d.use == "shm"), None)  # noqa: S108
    line = view.trouble("shm_failed")
    if shm is None or not shm.total_bytes or view.healthy or not view.failing:
        return None
    small, full = shm.total_bytes <= SHM_SMALL, shm.free_bytes < SHM_LEFT
    bus = [p for p in view.zombies if p.exit_signal == SIGBUS]
    early = view.phase in ("imports", "init") and view.evidence.target.ranks > 1
    if not (small or full) or not (line or bus or view.trouble("bus_error") or early or (full and view.missing_ranks)):
        return None
    told = bool(line or bus or view.trouble("bus_error"))
    facts = [f"{shm.path}: {size(shm.total_bytes)} in all, {size(shm.free_bytes)} free"]
    facts += [f"{p.label or p.name} was ended by SIGBUS (7): a mapped page had no memory behind it" for p in bus]
    facts += [f"log: {text}" for text in (line, view.trouble("bus_error")) if text]
    return Verdict(
        "SHM_SMALL",
        f"shared memory is too small (/dev/shm: {size(shm.total_bytes)}, {size(shm.free_bytes)} free) for its ranks",
        DIRECT if told else PATTERN,
        phase=view.phase,
        rank=view.missing_ranks[0] if bus and len(view.missing_ranks) == 1 else None,
        evidence=facts,
        next_steps=["start the container with --ipc=host or --shm-size=32g (Kubernetes: an emptyDir of medium Memory)"],
    )


@signature(Step.HOST)
def open_files(view: View) -> Verdict | None:
    """A process has as many descriptors open as it may."""
    full = [p for p in view.members if p.fd_limit and p.fd_count >= NEARLY * p.fd_limit]
    line = view.trouble("too_many_files")
    silent = view.port_open and bool(view.evidence.http) and not any(h.status for h in view.evidence.http)
    if view.healthy or not (view.failing or (full and silent)) or not (full or line):
        return None
    facts = [f"{p.label or p.role}: {p.fd_count} descriptors open, {p.fd_limit} allowed" for p in full]
    return Verdict(
        "NOFILE",
        "a process of the server may open no more files",
        DIRECT if full and line else MEASURED if full else LOG_ONLY,
        phase=view.phase,
        rank=full[0].rank if full else None,
        evidence=[*facts, *(map(asked, view.evidence.http) if silent else []), *([f"log: {line}"] if line else [])],
        next_steps=["raise the limit (ulimit -n 65536, LimitNOFILE, docker --ulimit nofile) and deploy again"],
    )
