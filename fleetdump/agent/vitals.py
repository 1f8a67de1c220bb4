"""What is wrong with a server that runs, or starts: from facts to faults with their causes. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import List, Optional

from fleetdump.agent.logmarks import LogMarks
from fleetdump.agent.progress import Assessment
from fleetdump.agent.runmessages import RunProgress, TapStatus
from fleetdump.agent.servermessages import FAULTS, Fault, HealthyProfile

DISK_FULL_BYTES = 64 << 20
DISK_FILLING_SECONDS = 3600.0
"""A capture disk that is full sooner, and before the extraction ends, is worth a word."""
GB = 1e9


@dataclass
class Health:
    """How ``/health`` answers: ``status`` 0 is no answer at all, then ``error`` says why. ``failing_seconds`` since
    the first of the answers in a row that were not well (0: the last one was, or nobody has asked yet)."""

    status: int = 200
    error: str = ""
    failing_seconds: float = 0.0
    forwards_then: int = 0
    """The forward counter when it began to fail."""


@dataclass
class Disk:
    """The file system of the capture directory. ``eta``: seconds until it is full at its present rate (0: it does not
    fill), ``rate`` in bytes a second."""

    path: str
    free: int
    eta: float = 0.0
    rate: float = 0.0
    inodes_free: int = -1


@dataclass
class RunFacts:
    """What one look at a server showed. ``port_open`` is None while it starts. ``lost``: members of it that were there
    and are gone. ``oom_kills``: kills for want of memory in its control group since the watch began.
    ``driver_seen``: its extraction's driver was alive during this watch."""

    state: str
    pid: int
    port: int
    marks: LogMarks
    assessment: Assessment
    forwards: int = 0
    lost: List[str] = field(default_factory=list)
    oom_kills: int = 0
    port_open: Optional[bool] = None
    health: Health = field(default_factory=Health)
    share: Optional[RunProgress] = None
    driver_seen: bool = False
    driver_said: str = ""
    taps: List[TapStatus] = field(default_factory=list)
    disk: Optional[Disk] = None
    gpu_trouble: str = ""
    healthy: Optional[HealthyProfile] = None


def faults(now: RunFacts) -> List[Fault]:
    """Everything that is wrong, what explains the rest first; nothing for a server that an operator stopped."""
    if now.state == "stopped":
        return []
    found = _of_the_host(now) + _of_the_extraction(now)
    if now.state == "died":
        found.append(Fault("died", death(now.marks, now.lost, False, now.oom_kills)))
    elif now.lost:
        found.append(Fault("rank_lost", death(now.marks, now.lost, True, now.oom_kills)))
    else:
        found += _of_the_server(now)
    return sorted(found, key=lambda fault: FAULTS.index(fault.code))


def death(marks: LogMarks, lost: List[str], launcher_alive: bool, oom_kills: int = 0) -> str:
    """Who is gone, and what the log and the kernel say of it."""
    crash, parts = marks.crashed, []
    if crash and crash.kind in ("exception", "child_exception", "child_death", "warmup"):
        parts.append(f"{crash.rank}: {crash.reason}" if crash.rank else crash.reason)
    if lost:
        parts.append(f"gone: {', '.join(lost)}")
    if not launcher_alive:
        parts.append("the launcher is gone")
    if marks.last_error and not (crash and crash.reason == marks.last_error):
        parts.append(f"last error in the log: {marks.last_error}")
    parts += [f"the log says: {line}" for line in marks.troubles.values()]
    if oom_kills:
        parts.append("its control group ran out of memory and the kernel killed a process there (oom_kill)")
    return "; ".join(parts) or (crash.reason if crash else "")


def usual_lines(profile: Optional[HealthyProfile]) -> str:
    """``healthy starts 636 to 641``; empty where none is known."""
    return f"healthy starts {profile.lines_span}" if profile is not None else ""


def _of_the_server(now: RunFacts) -> List[Fault]:
    if now.assessment.stalled:
        return [Fault("stall", _stall(now))]
    if now.port_open is False:
        return [Fault("port_closed", f"port {now.port} is closed, though the launcher (pid {now.pid}) lives")]
    return [_health(now)] if now.health.failing_seconds > 0 else []


def _stall(now: RunFacts) -> str:
    idle, marks = f"{now.assessment.idle_seconds:.0f} s", now.marks
    limit = f"(patience {now.assessment.patience:.0f} s)"
    if now.state == "ready":
        running = f"{now.share.in_flight} requests" if now.share and now.share.in_flight else "a request"
        return f"the forward counter stands at {now.forwards} for {idle} with {running} running {limit}"
    parts = [f"no progress for {idle} in phase {marks.phase} {limit}, {marks.lines} lines", usual_lines(now.healthy)]
    if marks.slowest():
        parts.append(f"behind the others: {', '.join(marks.slowest())}")
    return "; ".join(filter(None, parts))


def _health(now: RunFacts) -> Fault:
    health = now.health
    answer = f"answers {health.status}" if health.status else f"does not answer ({health.error})"
    said = f"/health {answer} since {health.failing_seconds:.0f} s"
    moved = now.forwards - health.forwards_then
    if moved > 0:
        return Fault("busy", f"{said}, but {moved} forwards have run since: busy, not hung", note=True)
    slow = health.status == 503 or health.error == "timeout"
    wait = f"; it counts as hung after {now.assessment.patience:.0f} s without a forward" if slow else ""
    return Fault("health_fails", f"{said}, and no forward has run since{wait}", note=slow)


def _of_the_extraction(now: RunFacts) -> List[Fault]:
    found, share = [], now.share
    if share is not None and share.state == "stopped":
        text = f"the driver of run {share.run} is gone, {share.done} of {share.samples} samples are done"
        said = f"; it said last: {now.driver_said}" if now.driver_said else ""
        found.append(
            Fault("driver_gone", f"{text}{said}; fleetdump extract --run {share.run} goes on", not now.driver_seen)
        )
    failing = [tap for tap in now.taps if tap.failing]
    if failing:
        roles = ", ".join(tap.role for tap in failing)
        found.append(Fault("capture_fails", f"the tap of {roles} writes nothing: {failing[0].last_error}"))
    return found


def _of_the_host(now: RunFacts) -> List[Fault]:
    found = [Fault("gpu_lost", now.gpu_trouble)] if now.gpu_trouble else []
    disk = now.disk
    if disk is None:
        return found
    if disk.free < DISK_FULL_BYTES or disk.inodes_free == 0:
        lacks = "inode" if disk.inodes_free == 0 else "room"
        found.append(Fault("disk_full", f"no {lacks} left on the disk of {disk.path}"))
    elif 0 < disk.eta < DISK_FILLING_SECONDS and not _ends_before(now.share, disk.eta):
        minutes = max(1, round(disk.eta / 60))
        text = (
            f"the disk of {disk.path} is full in {minutes} min: {disk.free / GB:.1f} GB free, {disk.rate / GB:.2f} GB/s"
        )
        found.append(Fault("disk_filling", text))
    return found


def _ends_before(share: Optional[RunProgress], seconds: float) -> bool:
    return share is not None and 0 < share.eta_seconds < seconds
