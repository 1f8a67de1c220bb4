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


def call_us(records: Sequence[Sequence[int]]) -> list[float]:
    """Microseconds of each of the tap's calls of a forward, the one before layer 0 first and the one behind all layers
    last: medians over records of ``inserver.sitecustomize.Timed``."""
    return [median(times) / 1000 for times in zip(*[times for _, *times in records], strict=True)]


def inert_us(calls: Sequence[float], layers: int) -> float:
    """Microseconds a forward of ``layers`` layers, from those of each call of a model with fewer: the first and the one
    behind all layers are there once, the others, which are alike, more often."""
    first, *others, last = calls
    return first + last + median(others) * (layers - 1)


def line_through(records: Sequence[Sequence[int]], groups: int = 12) -> tuple[float, float]:
    """Microseconds a batch and a request: the least-squares line through ``groups`` points, each the medians of
    neighbours by size. Raises ``ValueError`` when all batches are of one size."""
    points = medians_by_size(records, groups)
    requests = [count for count, _ in points]
    slope, intercept = statistics.linear_regression(requests, [spent for _, spent in points])
    return intercept, slope


def medians_by_size(records: Sequence[Sequence[int]], groups: int = 12) -> list[tuple[float, float]]:
    """(requests, microseconds) of batches: medians of ``groups`` neighbours by size."""
    ordered = sorted(((requests, sum(times) / 1000) for requests, *times in records), key=lambda one: one[0])
    size = max(1, len(ordered) // groups)
    parts = [ordered[at : at + size] for at in range(0, len(ordered) - size + 1, size)]
    return [(median([count for count, _ in part]), median([spent for _, spent in part])) for part in parts]


def share_of(records: Sequence[Sequence[int]], batch: float, request: float) -> float:
    """What all batches took together, over ``batch`` microseconds for each of them and ``request`` for each request."""
    spent = sum(sum(times) for _, *times in records) / 1000
    return spent / sum(batch + request * requests for requests, *_ in records)
