"""Which rows of a buffer are free. Standard library alone."""

from __future__ import annotations

import threading
import time
from collections import deque
from dataclasses import dataclass


@dataclass(slots=True)
class Span:
    """Rows ``start`` to ``stop`` of a ring."""

    start: int
    stop: int
    free: bool = False


class RowRing:
    """Which of ``capacity`` rows are in use: taken in a circle, each span without a gap, given back in any order. Rows
    become free in the order in which they were taken. For several threads."""

    def __init__(self, capacity: int):
        self.capacity = capacity
        self._spans: deque[Span] = deque()
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._stuck = False
        self._peak = 0
        self.waited = 0.0
        """Seconds that ``take`` has waited so far."""

    def take(self, rows: int, seconds: float) -> Span | None:
        """``rows`` rows, waiting at most ``seconds`` for them; None when there are none. After a wait in vain the next
        ones do not wait at all until there has been room: a stuck disk costs one wait."""
        with self._lock:
            span = self._try(rows)
            if span is None and seconds <= 0:
                return None
            if span is None and not self._stuck and rows <= self.capacity:
                began = time.monotonic()
                self._changed.wait_for(lambda: self._start(rows) is not None, seconds)
                self.waited += time.monotonic() - began
                span = self._try(rows)
            self._stuck = span is None
            return span

    def give_back(self, span: Span) -> None:
        """The rows may be used again."""
        with self._changed:
            span.free = True
            while self._spans and self._spans[0].free:
                self._spans.popleft()
            self._changed.notify_all()

    @property
    def used(self) -> int:
        """Rows that cannot be taken now."""
        with self._lock:
            return self._used()

    def fill(self) -> tuple[int, int]:
        """Rows that cannot be taken now, and the most of them since the last call."""
        with self._lock:
            used = self._used()
            peak, self._peak = max(self._peak, used), used
            return used, peak

    def _try(self, rows: int) -> Span | None:
        start = self._start(rows)
        if start is None:
            return None
        span = Span(start, start + rows)
        self._spans.append(span)
        self._peak = max(self._peak, self._used())
        return span

    def _start(self, rows: int) -> int | None:
        """Where ``rows`` rows could begin."""
        if not self._spans:
            return 0 if rows <= self.capacity else None
        head, tail = self._spans[-1].stop, self._spans[0].start
        if head <= tail:  # in use: from tail to the end, and from 0 to head
            return head if head + rows <= tail and head != tail else None
        if head + rows <= self.capacity:
            return head
        return 0 if rows <= tail else None

    def _used(self) -> int:
        if not self._spans:
            return 0
        used = self._spans[-1].stop - self._spans[0].start
        return used if used > 0 else used + self.capacity
