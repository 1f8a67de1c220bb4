"""Is the server there to be driven? The driver asks before it sends, and after a connection broke; and it keeps count
of how long nothing has come of what it has sent."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import Dict, Optional

from fleetdump.agent.access import authorization
from fleetdump.agent.context import State
from fleetdump.agent.generate import is_ready
from fleetdump.agent.procfs import is_alive
from fleetdump.agent.protocol import AgentFailure
from fleetdump.agent.records import in_words
from fleetdump.agent.server import PASSED, ServerRecord, load_record
from fleetdump.agent.settings import faults_of
from fleetdump.agent.specs import CaptureSpec


@dataclass
class Launch:
    """One launch of the server, as far as the driver is concerned."""

    launch_id: str
    pid: int
    start_time: int
    port: int
    headers: Dict[str, str] = field(default_factory=dict, repr=False)
    """What its requests need to be let in."""

    def lives(self) -> bool:
        """Whether the launcher process runs; it serves HTTP, so without it nothing is answered."""
        return is_alive(self.pid, self.start_time)


@dataclass
class Probe:
    """What a look at the server found: a launch that serves, or in words why there is none. ``stopped``: id of a launch
    that ``fleetdump stop`` ended; ``died``: of one that ended by itself; ``mute``: of one that lives, was ready once,
    and does not answer."""

    launch: Optional[Launch]
    detail: str = ""
    stopped: str = ""
    died: str = ""
    mute: str = ""


USUAL_STRETCH = 5.0
"""A silence is nothing unusual until it is so much longer than the longest one after which the server went on."""


@dataclass
class Silence:
    """For how long a launch has given nothing, neither a reply nor a row, while it owed some. Pure: times are seconds
    of a monotonic clock."""

    launch_id: str = ""
    since: Optional[float] = None
    longest: float = 0.0
    """After which that launch went on."""

    def ends(self, now: float) -> None:
        """Something came."""
        if self.since is not None:
            self.longest = max(self.longest, now - self.since)
            self.since = now

    def unusual(self, now: float, owing: str) -> float:
        """Seconds until ``now`` in which the launch ``owing`` gave nothing; 0 where nobody owes anything (empty), or it
        is no more than that launch has taken before."""
        if not owing:
            self.since = None
            return 0.0
        if owing != self.launch_id:
            self.launch_id, self.since, self.longest = owing, None, 0.0
        if self.since is None:
            self.since = now
        seconds = now - self.since
        return seconds if seconds > USUAL_STRETCH * self.longest else 0.0


def probe(state: State, server: str, capture: CaptureSpec) -> Probe:
    """Look at the server now; may take as long as its /health does."""
    record = load_record(state, server)
    if record is None:
        return Probe(None, f"server {server} was never launched here: waiting for fleetdump deploy")
    headers = authorization(record.pid, record.start_time)
    launch = Launch(record.launch_id, record.pid, record.start_time, record.port, headers)
    if record.stopped_at or not launch.lives():
        how = "is stopped" if record.stopped_at else f"died (pid {record.pid})"
        stopped, died = (record.launch_id, "") if record.stopped_at else ("", record.launch_id)
        return Probe(None, f"server {server} {how}: waiting for it to be launched again", stopped, died)
    mismatch = capture_mismatch(record, capture)
    if mismatch:
        return Probe(None, mismatch)
    if not is_ready(record.port):
        waits = f"server {server} does not answer on port {record.port}"
        return Probe(None, waits, mute=record.launch_id) if record.ready else Probe(None, f"{waits} yet")
    wrong = _settings_fault(record)
    return Probe(None, wrong) if wrong else Probe(launch)


def _settings_fault(record: ServerRecord) -> str:
    """What ``deploy`` would have found, for a launch whose deploy was cut off before it asked."""
    if record.settings == PASSED:
        return ""
    try:
        return "; ".join(faults_of(record))
    except AgentFailure as failure:
        return in_words(failure)


def capture_mismatch(record: ServerRecord, capture: CaptureSpec) -> str:
    """Why this launch cannot work on a share with these settings, empty when it can."""
    if not record.capture_layers:
        return f"server {record.name} was launched without the capture patch"
    if record.settings not in ("", PASSED):
        return f"server {record.name} would not capture rightly: {record.settings}"
    if record.capture_layers != capture.layers:
        return f"server {record.name} captures layers {record.capture_layers}, the share wants {capture.layers}"
    if os.path.expanduser(record.capture_dir) != os.path.expanduser(capture.dir):
        return f"server {record.name} captures to {record.capture_dir}, the share wants {capture.dir}"
    return ""
