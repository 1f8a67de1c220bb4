"""Messages about who drives a run. Shared with the controller."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Optional

from fleetdump.agent.times import utc


@dataclass
class DataMark:
    """Which data a run is driven with: ``name`` of its file, and its samples with a SHA-256 over ids and contents in
    order, by which two of them are compared."""

    name: str
    samples: int
    sha256: str

    @property
    def in_words(self) -> str:
        """For people; empty when it says nothing."""
        if not self.sha256:
            return self.name
        return f"{self.name or 'data'} ({self.samples} samples, SHA-256 {self.sha256[:12]})"


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
        """Who it is, where, since when, and with what; what is not known is left out."""
        process = f"process {self.pid}" if self.pid > 0 else ""
        where = " ".join(filter(None, [process, f"in {self.folder}" if self.folder else ""]))
        since, data = utc(self.since), self.data.in_words
        return (
            f"by {self.operator or 'somebody'}"
            + (f" ({where})" if where else "")
            + (f" since {since}" if since else "")
            + (f", with {data}" if data else "")
        )

    def next_step(self, host: str) -> str:
        """What another who wants to drive the run can do; ``host`` is where this is known."""
        holder = f"steering/{self.run}.json in its state directory (lslocks names it) and end that"
        at_once = f"kill {self.agent_pid} on {host} takes it at once"
        if self.agent_pid <= 1:  # to kill 0 or -1 would end whoever does it, and more
            at_once = f"to take it at once, look on {host} which process locks {holder}"
        return (
            f"fleetdump attach --run {self.run} watches it; pause, resume, cancel and drain are given as ever. To drive"
            " it from here end that process. One whose machine sleeps or is gone loses its place in some 15 minutes;"
            f" {at_once}"
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
