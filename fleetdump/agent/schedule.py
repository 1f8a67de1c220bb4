"""Which sample to send next. Pure: no clock, no file, no network of its own.

Rules. Long samples first, strictly, so that the run does not end on one long sample and none starves. The tokens in
flight stay within the budget, or the part of it that the disk keeps up with; a sample longer than that goes alone. What
was in flight when the server died is suspected of having killed it and is sent one at a time, with nothing beside it.
"""

from __future__ import annotations

import heapq
from collections import deque
from dataclasses import dataclass, field
from typing import Deque, Dict, Iterable, List, Optional, Tuple

MAX_REQUESTS = 256
"""Requests in flight, whatever their size: one thread each."""

BACKOFF_SECONDS = (1.0, 5.0, 20.0, 60.0)
"""Pause before the second, third, … attempt."""

SLOWER, FASTER, LEAST_ALLOWED = 0.7, 1.1, 1 / 64
"""What a look at the taps (one a second) does to the part of the budget that may be in flight, and its least value."""

DEATHS_TO_REJECT = 2
"""A sample that was alone in flight at so many deaths of the server is the cause."""

DEATHS_TO_DOUBT = 3
"""So many deaths with one sample alone in flight, and none captured in between, are the server's own fault."""


class Sample:
    """One sample of the share that is not settled. ``offset``, ``line_bytes``: its line in work.jsonl. ``attempt``:
    number of the latest one, 0 before the first. ``failures`` count towards the limit, ``deaths`` are of the server
    while it was alone there."""

    __slots__ = ("attempt", "deaths", "failures", "id", "line_bytes", "offset", "tokens")

    def __init__(self, id: str, tokens: int, offset: int, line_bytes: int = 0):
        self.id = id
        self.tokens = tokens
        self.offset = offset
        self.line_bytes = line_bytes
        self.attempt = 0
        self.failures = 0
        self.deaths = 0


@dataclass
class Schedule:
    """Samples on their way: waiting, in flight (a request is out), or neither (answered, or settled)."""

    token_budget: int
    waiting: List[Sample] = field(default_factory=list)
    """Never failed, by tokens ascending: the next is at the end."""
    retries: List[Tuple[float, int, Sample]] = field(default_factory=list)
    """Heap of (not before, tie-breaker, sample)."""
    suspects: Deque[Sample] = field(default_factory=deque)
    in_flight: Dict[str, Sample] = field(default_factory=dict)
    tokens_in_flight: int = 0
    alone: str = ""
    """Id of the suspect that is being tried."""
    allowed: float = 1.0
    """Part of the budget that may be in flight."""
    _ticket: int = 0

    @classmethod
    def of(cls, samples: Iterable[Sample], token_budget: int) -> Schedule:
        return cls(token_budget, sorted(samples, key=lambda sample: sample.tokens))

    def take(self, now: float) -> Optional[Sample]:
        """The sample to send now (it is in flight from here on), None when there is none or no room."""
        if self.suspects:
            if self.in_flight:
                return None
            sample = self.suspects.popleft()
            self.alone = sample.id
            return self._fly(sample)
        if self.alone or len(self.in_flight) >= MAX_REQUESTS:
            return None
        if self.retries and self.retries[0][0] <= now:
            if self._fits(self.retries[0][2]):
                return self._fly(heapq.heappop(self.retries)[2])
            return None
        if self.waiting and self._fits(self.waiting[-1]):
            return self._fly(self.waiting.pop())
        return None

    def withdraw(self, tokens: int) -> List[Sample]:
        """Take out samples that were never sent, of about ``tokens`` together: every other one from the longest on, so
        that both sides keep their long ones first; all of them when that is not enough."""
        total = sum(sample.tokens for sample in self.waiting if not sample.attempt)
        step = 1 if tokens >= total else 2
        taken: List[Sample] = []
        kept: List[Sample] = []
        for place, sample in enumerate(reversed(self.waiting)):
            if tokens > 0 and not sample.attempt and place % step == 0:
                tokens -= sample.tokens
                taken.append(sample)
            else:
                kept.append(sample)
        self.waiting = kept[::-1]
        return taken

    def release(self) -> List[Sample]:
        """Take out all that was sent before and is to be sent again."""
        taken = [*(sample for _, _, sample in self.retries), *self.suspects]
        self.retries, self.suspects = [], deque()
        return taken

    def landed(self, sample: Sample) -> None:
        """Its request has ended, well or not."""
        if self.in_flight.pop(sample.id, None) is not None:
            self.tokens_in_flight -= sample.tokens
        if self.alone == sample.id:
            self.alone = ""

    def again(self, sample: Sample, not_before: float) -> None:
        """Send it once more, not before that time."""
        self._ticket += 1
        heapq.heappush(self.retries, (not_before, self._ticket, sample))

    def suspect(self, sample: Sample) -> None:
        """Send it once more, alone."""
        self.suspects.append(sample)

    def try_fresh(self) -> None:
        """Before the suspects send one that is none, alone: can the server do anything at all?"""
        if self.waiting:
            self.suspects.appendleft(self.waiting.pop(0))

    def mind_disk(self, behind: bool) -> None:
        """Send less while the disk is behind, slowly more again when it is not."""
        factor = SLOWER if behind else FASTER
        self.allowed = min(1.0, max(LEAST_ALLOWED, self.allowed * factor))

    def idle(self) -> bool:
        """Nothing waits and nothing is in flight."""
        return not (self.waiting or self.retries or self.suspects or self.in_flight)

    def _fits(self, sample: Sample) -> bool:
        return not self.in_flight or self.tokens_in_flight + sample.tokens <= self.allowed * self.token_budget

    def _fly(self, sample: Sample) -> Sample:
        self.in_flight[sample.id] = sample
        self.tokens_in_flight += sample.tokens
        return sample


def backoff(failures: int) -> float:
    """Seconds to wait after the ``failures``-th failure."""
    return BACKOFF_SECONDS[min(failures, len(BACKOFF_SECONDS)) - 1]
