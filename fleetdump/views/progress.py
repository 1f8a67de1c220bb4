"""Servers that start, between their phases: how far the weights are read, or which phase lasts how long."""

from __future__ import annotations

import threading
import time
from typing import Any

from fleetdump.tasks.watch import Outlier, slow_loaders
from fleetdump.views.console import duration, err, quoted, size

WEIGHTS_SECONDS = 15.0
SIGN_SECONDS = 30.0
"""How long a start may go without a line."""
IDLE_SECONDS = 5.0
SLOW_SECONDS = 15.0
"""How long a load must be slower than the others to be told of."""
GB = 1e9


class StartLines:
    """Tells of servers that start, between their phases, that they still do: how far the weights are read, or which
    phase lasts how long; and of one that loads far more slowly than the others. From any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._outliers = _SlowLoaders()
        self._told: dict[tuple[str, str], float] = {}
        self._phases: dict[tuple[str, str], tuple[str, float]] = {}
        """The phase of each server, and since when it is seen."""

    def update(self, host: str, event: dict[str, Any]) -> None:
        """An event of a watch: a ``phase`` is itself a sign of life, a ``tick`` is told after a silence."""
        if event.get("event") not in ("phase", "tick"):
            return
        with self._lock:
            self._update(host, event)

    def _update(self, host: str, event: dict[str, Any]) -> None:
        server, phase, now = str(event.get("server")), str(event.get("phase")), time.monotonic()
        if self._phases.get((host, server), ("", now))[0] != phase:
            self._phases[host, server] = phase, now
        for text in self._outliers.update(f"{host}/{server}", event, now):
            err.print(quoted(text), style="yellow")
        if event["event"] == "phase":
            self._told[host, server] = now
        limit = WEIGHTS_SECONDS if event.get("load_bytes") else SIGN_SECONDS
        if now - self._told.setdefault((host, server), now) < limit:
            return
        self._told[host, server] = now
        since = self._phases[host, server][1]
        text = _weights(event) if event.get("load_bytes") else _still(event, now - since)
        err.print(f"[{host}] {server}: {text}", markup=False)


class _SlowLoaders:
    """Who loads weights, how fast, and of whom it was told that the others are faster."""

    def __init__(self) -> None:
        self._rates: dict[str, float] = {}
        self._slow_since: dict[str, float] = {}
        self._told: set[str] = set()

    def update(self, name: str, event: dict[str, Any], now: float) -> list[str]:
        """What is to be told after an event of server ``name``: once of each server that has been slow for a while, for
        the first seconds of a load have no rate yet."""
        self._rates.pop(name, None)
        if event.get("phase") == "weights" and event.get("load_bytes"):
            self._rates[name] = float(event.get("load_rate", 0.0))
        found = {one.name: one for one in slow_loaders(self._rates)}
        self._slow_since = {slow: self._slow_since.get(slow, now) for slow in found}
        news = [one for one in found.values() if now - self._slow_since[one.name] >= SLOW_SECONDS]
        news = [one for one in news if one.name not in self._told]
        self._told.update(one.name for one in news)
        return [outlier_words(one) for one in news]


def outlier_words(one: Outlier) -> str:
    """A server beside the others: ``gpu07/main loads at 0.4 GB/s, the others at 2.9``."""
    return f"{one.name} loads at {one.rate / GB:.2g} GB/s, the others at {one.others / GB:.2g}"


def _weights(event: dict[str, Any]) -> str:
    text = f"weights {size(event['load_bytes'])}"
    if event.get("load_total"):
        text += f" of {size(event['load_total'])}"
    text += f", {size(event.get('load_rate', 0.0))}/s"
    return text + (f", {duration(event['load_eta'])} left" if event.get("load_eta") else "")


def _still(event: dict[str, Any], seconds: float) -> str:
    text = f"still {event.get('phase')}, for {duration(seconds)}, {event.get('lines', 0)} log lines"
    text += f"; healthy starts {event['usual_lines']}" if event.get("usual_lines") else ""
    idle = float(event.get("idle_seconds", 0.0))
    return text + (f"; nothing moves for {duration(idle)}" if idle >= IDLE_SECONDS else "")
