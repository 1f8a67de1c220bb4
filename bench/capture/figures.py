"""Figures out of measured values: medians, spread, the straight line through small batches. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Sequence


def median(values: Sequence[float]) -> float:
    return statistics.median(values)


def spread(values: Sequence[float]) -> float:
    """Half the distance of the quartiles, over the median."""
    low, middle, high = statistics.quantiles(values, n=4)
    return (high - low) / 2 / middle


def percentile(values: Sequence[float], share: float) -> float:
    """The smallest value that at least ``share`` of all do not exceed."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, max(0, -int(-share * len(ordered) // 1) - 1))]


def call_us(records: Sequence[Sequence[int]]) -> tuple[float, float, float]:
    """Microseconds of the tap's first call of a forward, of each further one before a layer, and of the last, from
    records of ``inserver.sitecustomize.Timed``: medians."""
    first, further, last = zip(*[(first, more / calls, last) for _, first, more, calls, last in records], strict=True)
    return median(first) / 1000, median(further) / 1000, median(last) / 1000


def line_through(records: Sequence[Sequence[int]], groups: int = 12) -> tuple[float, float]:
    """Microseconds a batch and a request: the least-squares line through ``groups`` points, each the medians of
    neighbours by size. Raises ``ValueError`` when all batches are of one size."""
    ordered = sorted((requests, (first + more + last) / 1000) for requests, first, more, _, last in records)
    size = max(1, len(ordered) // groups)
    parts = [ordered[at : at + size] for at in range(0, len(ordered) - size + 1, size)]
    requests = [median([count for count, _ in part]) for part in parts]
    slope, intercept = statistics.linear_regression(requests, [median([spent for _, spent in part]) for part in parts])
    return intercept, slope
