"""How far the weights are: bytes that the ranks have read, against the size of the model on the disk. Pure, but for
``model_bytes``."""

from __future__ import annotations

import contextlib
import os
from collections import deque
from dataclasses import dataclass
from typing import Deque, Dict, List, Optional, Tuple

from fleetdump.agent.guard import Guard, Stuck
from fleetdump.agent.logmarks import Bar
from fleetdump.agent.model import WEIGHT_SUFFIXES
from fleetdump.agent.procfs import ProcSample

WINDOW_SECONDS = 15.0
"""The rate is that of the last so many seconds."""
STAT_SECONDS = 2.0


@dataclass
class Loading:
    """``done`` of ``total`` bytes, at ``rate`` bytes a second; ``eta`` in seconds, 0 while nobody can tell."""

    done: float
    total: int
    rate: float
    eta: float


def model_bytes(path: str) -> int:
    """Size of the weight files in a model's folder; 0 for a hub name, or where the folder does not answer."""
    folder = os.path.expanduser(path)

    def total() -> int:
        with os.scandir(folder) as entries:
            return sum(entry.stat().st_size for entry in entries if entry.name.endswith(WEIGHT_SUFFIXES))

    guard = Guard(STAT_SECONDS)
    with contextlib.suppress(OSError, Stuck):
        return guard.call(total)
    return 0


class LoadMeter:
    """Follows the weights of one start. A loader that calls read() reads the whole model in each rank (``rchar``), one
    that maps files reads each page once for all ranks (``read_bytes``); the shard bar says what both have done."""

    def __init__(self, total: int) -> None:
        self._total = total
        self._before: Dict[Tuple[int, int], Tuple[int, int]] = {}
        self._seen: Deque[Tuple[float, float]] = deque()

    def observe(self, at: float, phase: str, processes: List[ProcSample], bar: Optional[Bar]) -> Optional[Loading]:
        """Take a sample at clock value ``at``; None unless the server loads weights."""
        ranks = [process for process in processes if process.role == "scheduler"] or processes
        if phase != "weights":
            self._before = {(one.pid, one.start_time): (one.rchar, one.read_bytes) for one in ranks}
            self._seen.clear()
            return None
        done = self._done(ranks, bar)
        self._seen.append((at, done))
        while at - self._seen[0][0] > WINDOW_SECONDS:
            self._seen.popleft()
        began, base = self._seen[0]
        rate = (done - base) / (at - began) if at > began else 0.0
        left = max(0.0, self._total - done)
        return Loading(done, self._total, rate, left / rate if rate > 0 and self._total else 0.0)

    def _done(self, ranks: List[ProcSample], bar: Optional[Bar]) -> float:
        start = [self._before.get((one.pid, one.start_time), (0, 0)) for one in ranks]
        copied = max((one.rchar - rchar for one, (rchar, _) in zip(ranks, start)), default=0)
        paged = sum(one.read_bytes - read for one, (_, read) in zip(ranks, start))
        of_shards = bar is not None and "shard" in bar.label.lower() and bar.total
        shards = self._total * bar.done / bar.total if bar is not None and of_shards else 0.0
        done = max(float(copied), float(paged), shards)
        return min(done, self._total) if self._total else done
