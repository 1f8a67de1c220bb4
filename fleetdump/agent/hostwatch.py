"""What a watch asks beside the processes, each without waiting for it: /health, the disk, the GPUs.

Each of these can hang (a server in a long prefill, a dead mount, a driver). So a question runs in a thread of its own,
and what counts is the last answer.
"""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from typing import Callable, Deque, Dict, Generic, List, Optional, Tuple, TypeVar

from fleetdump.agent.evidence_host import GpuFacts
from fleetdump.agent.evidence_types import Target
from fleetdump.agent.probes import gpu, net
from fleetdump.agent.probes.bounded import ProbeFailed
from fleetdump.agent.vitals import Disk, Health

T = TypeVar("T")

HEALTH_SECONDS = 15.0
"""Between two checks of a server that is well: from SGLang 0.5.1 on each is a request of one token."""
HEALTH_LIMIT = 20.0
"""As long as SGLang itself waits before it answers 503."""
DISK_SECONDS = 2.0
DISK_WINDOW = 60.0
DISK_SURE_SECONDS = 8.0
"""A rate of filling needs samples this far apart."""
GPU_SECONDS = 10.0
SURE_FAILURES = 2
"""A busy host may keep nvidia-smi from answering in time, once."""


class Asker(Generic[T]):
    """Asks one question again and again in a thread; one that does not come back is not asked twice."""

    def __init__(self, question: Callable[[], T], every: float) -> None:
        self._question, self._every = question, every
        self._next = 0.0
        self._thread: Optional[threading.Thread] = None
        self._answers: Deque[T] = deque()

    def poll(self) -> List[T]:
        """What was answered since the last poll; asks again when it is time."""
        now = time.monotonic()
        if not self.waits() and now >= self._next:
            self._next = now + self._every
            self._thread = threading.Thread(target=self._ask, name="asker", daemon=True)
            self._thread.start()
        return [self._answers.popleft() for _ in range(len(self._answers))]

    def hurry(self) -> None:
        """Ask at the next poll."""
        self._next = 0.0

    def waits(self) -> bool:
        """Whether a question has no answer yet."""
        return self._thread is not None and self._thread.is_alive()

    def _ask(self) -> None:
        self._answers.append(self._question())


class HealthWatch:
    """``/health`` of one ready server."""

    def __init__(self, target: Target) -> None:
        self._asker = Asker(lambda: net.get(target, "/health", HEALTH_LIMIT), HEALTH_SECONDS)
        self._health = Health()
        self._failing_since = 0.0

    def look(self, now: float, forwards: int, doubtful: bool) -> Health:
        """``doubtful``: nothing moves, so ask at once. ``now`` is a ``time.monotonic()`` value."""
        if doubtful or self._failing_since:
            self._asker.hurry()
        for answer in self._asker.poll():
            if answer.status == 200:
                self._failing_since, self._health = 0.0, Health()
            elif not self._failing_since:
                self._failing_since = now - answer.seconds
                self._health = Health(answer.status, answer.error, 0.0, forwards)
            else:
                self._health.status, self._health.error = answer.status, answer.error
        if self._failing_since:
            self._health.failing_seconds = max(0.001, now - self._failing_since)
        return self._health


class DiskWatch:
    """The file system of one path, and how fast it fills."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._asker = Asker(self._ask, DISK_SECONDS)
        self._seen: Deque[Tuple[float, int]] = deque()
        self._last: Optional[Disk] = None

    def look(self) -> Optional[Disk]:
        """None until it has answered."""
        for at, free, inodes in filter(None, self._asker.poll()):
            self._seen.append((at, free))
            while at - self._seen[0][0] > DISK_WINDOW:
                self._seen.popleft()
            self._last = Disk(self._path, free, *filling(self._seen), inodes)
        return self._last

    def _ask(self) -> Optional[Tuple[float, int, int]]:
        try:
            stat = os.statvfs(self._path)
        except OSError:
            return None
        return time.monotonic(), stat.f_bavail * stat.f_frsize, stat.f_favail if stat.f_files else -1


def filling(seen: Deque[Tuple[float, int]]) -> Tuple[float, float]:
    """(seconds until nothing is free, bytes a second) from (time, free bytes) in order; zeros when it does not fill."""
    if len(seen) < 2 or seen[-1][0] - seen[0][0] < DISK_SURE_SECONDS:
        return 0.0, 0.0
    rate = (seen[0][1] - seen[-1][1]) / (seen[-1][0] - seen[0][0])
    return (seen[-1][1] / rate, rate) if rate > 0 else (0.0, 0.0)


class GpuWatch:
    """The host's GPUs: memory in use, and whether one that was there is gone."""

    def __init__(self) -> None:
        self._asker = Asker(self._ask, GPU_SECONDS)
        self._known: Dict[int, GpuFacts] = {}
        self._absent = False
        self._failures = 0
        self.trouble = ""
        self.used: Optional[int] = None
        """Bytes in use on all of them; None without GPUs."""

    def look(self) -> None:
        """Take in what was answered; a host without nvidia-smi is asked once."""
        if self._absent:
            return
        for found, error in self._asker.poll():
            self._take(found, error)

    def _take(self, found: List[GpuFacts], error: str) -> None:
        self._failures = self._failures + 1 if error else 0
        if error:
            self._absent = not self._known
            if self._failures >= SURE_FAILURES and self._known:
                self.trouble = f"nvidia-smi no longer answers: {error}"
            self.used = None
            return
        here = {one.index: one for one in found}
        self._known = {**here, **self._known}
        gone = sorted(set(self._known) - set(here))
        names = ", ".join(f"GPU {index} ({self._known[index].name})" for index in gone)
        self.trouble = f"no longer there: {names}; dmesg says why (Xid 79: fallen off the bus)" if gone else ""
        self.used = sum(one.memory_used for one in found) << 20

    @staticmethod
    def _ask() -> Tuple[List[GpuFacts], str]:
        try:
            return gpu.gpus(), ""
        except ProbeFailed as error:
            return [], str(error)
