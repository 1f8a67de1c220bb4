"""Does a server move? From a series of samples to progress, idle time and the word "stalled". Pure.

Progress is what a hung server cannot fake: bytes read, memory that grows, page faults that read a file, a new marker
or log line, a compiler that uses CPU, a forward. CPU time of the server's own processes is never progress (hung
schedulers spin and idle ones poll), nor is anything written (threads wake each other through event descriptors).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Dict, List, Optional, Sequence

from fleetdump.agent.procfs import TICKS_PER_SECOND, ProcSample
from fleetdump.agent.specs import Patience

CONFIRM_SECONDS = 5.0
"""A stall is confirmed by a second sample at least this long after the one that first exceeded the patience."""
HEALTHY_STRETCH = 2.0
BATCH_STRETCH = 5.0
LONGEST_STRETCH = 4 * 3600.0
"""Seconds to which a patience is stretched at most, whatever starts or batches took: a stall must be seen some day."""
COMPILER_ROLES = ("compiler", "compile_worker")


@dataclass(frozen=True)
class Rates:
    """What counts as movement, per process and second. An idle scheduler reads up to 100 kB/s through its event
    descriptors (rchar), so the bar for rchar is higher than that for read_bytes, which only disks and mounts feed."""

    rchar: float = 512 * 1024
    read_bytes: float = 64 * 1024
    rss_bytes: float = 1 << 20
    gpu_bytes: float = 4 << 20
    majflt: float = 1.0
    """Where bytes were read too, however few."""
    majflt_alone: float = 5.0
    """While weights load, where no byte is counted: Lustre, NFS and FUSE serve mapped files so. Now and then any
    process faults, for code of its own that was pushed out of memory."""
    compiler_cores: float = 0.05


@dataclass
class Sample:
    """A server at one moment. ``at`` is a monotonic clock in seconds; ``news`` and ``forwards`` are those of
    ``LogMarks``; ``gpu_bytes`` is memory in use on its GPUs (None: unknown). ``busy``: it has a request to work on
    (only phase ``serving`` asks); ``slowest_batch``: seconds of its slowest recent batch."""

    at: float
    phase: str
    news: int = 0
    forwards: int = 0
    processes: List[ProcSample] = field(default_factory=list)
    gpu_bytes: Optional[int] = None
    busy: bool = False
    slowest_batch: float = 0.0


@dataclass
class Assessment:
    """``idle_seconds`` since the last progress, of ``patience`` allowed. ``reasons`` say what moved in the last
    interval (empty: nothing). ``stalled`` needs patience to be exceeded in two samples ``CONFIRM_SECONDS`` apart."""

    phase: str
    idle_seconds: float
    patience: float
    reasons: List[str]
    stalled: bool


def allowed(phase: str, patience: Patience, healthy: Optional[Dict[str, float]] = None, batch: float = 0.0) -> float:
    """Seconds without progress that ``phase`` may take: its patience, or twice what healthy starts took in it, and
    while serving five times the slowest recent batch; stretched to ``LONGEST_STRETCH`` at most."""
    base: float = getattr(patience, phase)
    stretched = HEALTHY_STRETCH * (healthy or {}).get(phase, 0.0)
    stretched = max(stretched, BATCH_STRETCH * batch if phase == "serving" else 0.0)
    return max(base, min(stretched, LONGEST_STRETCH))


def movement(before: Sample, after: Sample, rates: Rates) -> List[str]:
    """What moved between two samples, in words; empty when nothing did."""
    seconds = max(after.at - before.at, 1e-3)
    reasons = []
    if after.phase != before.phase:
        reasons.append(f"entered phase {after.phase}")
    if after.news > before.news:
        reasons.append("new log lines")
    if after.forwards > before.forwards:
        reasons.append("forward batches")
    if before.gpu_bytes is not None and after.gpu_bytes is not None:
        growth = (after.gpu_bytes - before.gpu_bytes) / seconds
        if growth >= rates.gpu_bytes:
            reasons.append(f"GPU memory grows by {_mib(growth)}")
    earlier = {(process.pid, process.start_time): process for process in before.processes}
    for process in after.processes:
        known = earlier.get((process.pid, process.start_time))
        if known:
            reasons += _process_movement(known, process, seconds, rates)
            reasons += _mapped_reads(known, process, seconds, rates, loads=after.phase == "weights")
    return reasons


def _mapped_reads(before: ProcSample, after: ProcSample, seconds: float, rates: Rates, loads: bool) -> List[str]:
    """Page faults of a mapped file that is read too slowly to count by its bytes, or whose bytes nobody counts."""
    faults = (after.majflt - before.majflt) / seconds
    read_bytes = (after.read_bytes - before.read_bytes) / seconds
    if read_bytes >= rates.read_bytes or faults < (rates.majflt if read_bytes > 0 else rates.majflt_alone):
        return []
    counts = read_bytes > 0 or loads
    return [f"{_name(after)} pages in {faults:.0f} times a second"] if counts else []


def _name(process: ProcSample) -> str:
    return f"{process.role} {process.rank}" if process.rank else f"{process.role} {process.pid}"


def _process_movement(before: ProcSample, after: ProcSample, seconds: float, rates: Rates) -> List[str]:
    who = _name(after)
    rchar = (after.rchar - before.rchar) / seconds
    read_bytes = (after.read_bytes - before.read_bytes) / seconds
    rss = (after.rss_bytes - before.rss_bytes) / seconds
    cores = (after.utime + after.stime - before.utime - before.stime) / TICKS_PER_SECOND / seconds
    reasons = []
    if rchar >= rates.rchar or read_bytes >= rates.read_bytes:
        reasons.append(f"{who} reads {_mib(max(rchar, read_bytes))}")
    if rss >= rates.rss_bytes:
        reasons.append(f"{who} grows by {_mib(rss)}")
    if after.role in COMPILER_ROLES and cores >= rates.compiler_cores:
        reasons.append(f"{after.comm} compiles")
    return reasons


class ProgressTracker:
    """Follows one server. ``gap_limit``: of a longer pause between two samples (the watcher was not scheduled, the
    machine was suspended) only this many seconds count as idle, for nobody looked meanwhile."""

    def __init__(
        self,
        patience: Patience,
        healthy: Optional[Dict[str, float]] = None,
        rates: Optional[Rates] = None,
        gap_limit: float = 5.0,
    ) -> None:
        self._patience = patience
        self.healthy = healthy
        """Seconds that healthy starts took in each phase; may be set once they are known."""
        self._rates = rates or Rates()
        self._gap_limit = gap_limit
        self._last: Optional[Sample] = None
        self._idle = 0.0
        self._overdue: Optional[float] = None
        """Idle seconds at the sample that first exceeded the patience."""

    def observe(self, sample: Sample) -> Assessment:
        """Take the next sample; samples come in the order of their ``at``."""
        reasons = movement(self._last, sample, self._rates) if self._last else ["first sample"]
        resting = sample.phase == "serving" and not sample.busy
        if reasons or resting:
            self._idle, self._overdue = 0.0, None
        elif self._last:
            self._idle += min(sample.at - self._last.at, self._gap_limit)
        self._last = sample
        limit = allowed(sample.phase, self._patience, self.healthy, sample.slowest_batch)
        if self._idle >= limit and self._overdue is None:
            self._overdue = self._idle
        stalled = self._overdue is not None and self._idle - self._overdue >= CONFIRM_SECONDS
        return Assessment(sample.phase, self._idle, limit, reasons, stalled)


def assess(
    samples: Sequence[Sample],
    patience: Patience,
    healthy: Optional[Dict[str, float]] = None,
    rates: Optional[Rates] = None,
    gap_limit: float = 5.0,
) -> Assessment:
    """Assessment after a whole series, in whatever order it is given. Raises ``ValueError`` for an empty one."""
    if not samples:
        raise ValueError("no samples to assess")
    tracker = ProgressTracker(patience, healthy, rates, gap_limit)
    return [tracker.observe(sample) for sample in sorted(samples, key=lambda sample: sample.at)][-1]


def _mib(rate: float) -> str:
    return f"{rate / (1 << 20):.1f} MiB/s"
