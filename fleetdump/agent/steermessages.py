"""Messages about who drives a run. Shared with the controller."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Optional


@dataclass
class DataMark:
    """Which data a run is driven with: ``name`` of its file, and its samples with a SHA-256 over ids and contents in
    order, by which two of them are compared."""

    name: str
    samples: int
    sha256: str

    @property
    def in_words(self) -> str:
        """For people."""
        return f"{self.name} ({self.samples} samples, SHA-256 {self.sha256[:12]})"


@dataclass
class Steering:
    """``steering/<run>.json``: the one controller of ``run`` at this moment. ``controller`` tells it from others;
    ``operator`` (user@machine), ``pid`` and ``folder`` say where it is, ``since`` (this host's clock) when it took the
    run, ``agent_pid`` which process of this host holds its place."""

    run: str
    controller: str
    operator: str
    pid: int
    folder: str
    data: DataMark
    since: float
    agent_pid: int
    v: int = 1

    @property
    def in_words(self) -> str:
        """Who it is, where, since when, and with what."""
        since = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(self.since))
        who = self.operator or "somebody"
        return f"by {who} (process {self.pid} in {self.folder}) since {since}, with {self.data.in_words}"

    def next_step(self, host: str) -> str:
        """What another who wants to drive the run can do; ``host`` is where this is known."""
        return (
            f"fleetdump attach --run {self.run} watches it; pause, resume, cancel and drain are given as ever. To drive"
            " it from here end that process. One whose machine sleeps or is gone loses its place in some 15 minutes;"
            f" kill {self.agent_pid} on {host} takes it at once"
        )


@dataclass
class SteerArgs:
    """Be the one controller of ``run`` on this host for as long as this call lasts: a ``steering`` event says that it
    is so, and until then and from then on nobody else hands out or moves its samples here. It ends with the connection,
    with the deadline, or with another call that is ``over``. The same ``controller`` takes its own place anew."""

    run: str
    controller: str
    pid: int = 0
    folder: str = ""
    data: Optional[DataMark] = None
    over: bool = False


@dataclass
class SteerResult:
    """How long it lasted; 0 for ``over``."""

    seconds: float
