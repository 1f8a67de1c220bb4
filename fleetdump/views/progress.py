"""Servers that start, between their phases: how far the weights are read, or which phase lasts how long."""

from __future__ import annotations

import time
from typing import Any

from fleetdump.views.console import duration, err, size

WEIGHTS_SECONDS = 15.0
SIGN_SECONDS = 30.0
"""How long a start may go without a line."""
IDLE_SECONDS = 5.0


class StartLines:
    """Tells of servers that start, between their phases, that they still do: how far the weights are read, or which
    phase lasts how long. From any thread."""

    def __init__(self) -> None:
        self._told: dict[tuple[str, str], float] = {}
        self._phases: dict[tuple[str, str], tuple[str, float]] = {}
        """The phase of each server, and since when it is seen."""

    def update(self, host: str, event: dict[str, Any]) -> None:
        """An event of a watch: a ``phase`` is itself a sign of life, a ``tick`` is told after a silence."""
        if event.get("event") not in ("phase", "tick"):
            return
        server, phase, now = str(event.get("server")), str(event.get("phase")), time.monotonic()
        if self._phases.get((host, server), ("", now))[0] != phase:
            self._phases[host, server] = phase, now
        if event["event"] == "phase":
            self._told[host, server] = now
        limit = WEIGHTS_SECONDS if event.get("load_bytes") else SIGN_SECONDS
        if now - self._told.setdefault((host, server), now) < limit:
            return
        self._told[host, server] = now
        since = self._phases[host, server][1]
        text = _weights(event) if event.get("load_bytes") else _still(event, now - since)
        err.print(f"[{host}] {server}: {text}", markup=False)


def _weights(event: dict[str, Any]) -> str:
    text = f"weights {size(event['load_bytes'])}"
    if event.get("load_total"):
        text += f" of {size(event['load_total'])}"
    text += f", {size(event.get('load_rate', 0.0))}/s"
    return text + (f", {duration(event['load_eta'])} left" if event.get("load_eta") else "")


def _still(event: dict[str, Any], seconds: float) -> str:
    text = f"still {event.get('phase')}, for {duration(seconds)}, {event.get('lines', 0)} log lines"
    idle = float(event.get("idle_seconds", 0.0))
    return text + (f"; nothing moves for {duration(idle)}" if idle >= IDLE_SECONDS else "")
