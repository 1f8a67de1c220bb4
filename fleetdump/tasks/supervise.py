"""While a controller watches a run: a server that died is diagnosed, and launched again as it was, so many times.

The driver says that its server is dead, and goes on by itself once another launch is ready. In between, the evidence is
taken before anything of it is gone, the verdict is told and kept beside the run on the host, and the server comes back
by the same verb as ``fleetdump restart``: under the host's lock, audited, watched and proven. What an operator stopped
or launched meanwhile is left alone. Restarts are counted on the host, so that whoever watches next counts on.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from fleetdump.agent.formats import server_of
from fleetdump.agent.hostmessages import StatusArgs, StatusResult
from fleetdump.agent.runmessages import RunProgress
from fleetdump.agent.servermessages import RunRestart
from fleetdump.diagnosis import Verdict
from fleetdump.errors import FleetdumpError, LockedError, UnreachableError
from fleetdump.fleet import Host
from fleetdump.tasks.deploy import stop_servers
from fleetdump.tasks.restart import Restarted, restart_of_run
from fleetdump.tasks.server import Diagnosis, Target, diagnose_host

BACKOFF_SECONDS = (0.0, 10.0, 60.0, 300.0)
"""Before the first, second, … restart of a server in a run that no sample is suspected of."""
LOCKED_SECONDS = 60.0
"""Before a host is asked again that another operator was changing."""
SAMPLE_SECONDS = 2.0
"""Between the two samples of a server that is dead already."""
AT_ONCE = 4
"""Servers of one host that are brought back at a time: each is watched on a channel of the host's one connection, and
its drivers need channels too."""
TRY_AGAIN = ("stall", "timeout")
"""Outcomes of a start that the next one may not have. One that dies is a death of its own, and the driver tells it."""
NOT_AS_IT_WAS = ("wrong_model", "no_mark", "wrong_settings", "selfcheck_failed")
"""Outcomes of a start with which it may answer and capture wrongly."""

OnEvent = Callable[[str, dict[str, Any]], None]


@dataclass(frozen=True)
class Policy:
    """``restarts``: how often each server of a run is restarted; ``selfcheck``: its captured numbers are proven again
    before it is left to itself."""

    restarts: int = 2
    selfcheck: bool = True


@dataclass
class _Death:
    """A server that is dead, as its driver said, and how often it was restarted before."""

    host: Host
    server: str
    launch_id: str
    suspect: str
    restarts: int

    @classmethod
    def of(cls, host: Host, progress: RunProgress) -> _Death:
        server = server_of(progress.server)
        return cls(host, server, progress.dead_launch, progress.suspect, progress.restarts)


@dataclass
class Supervisor:
    """Looks after the dead servers of one run; ``note`` may be called from any thread and returns at once. ``tell``
    gets what happens as events (``step``), by host."""

    run: str
    policy: Policy
    tell: OnEvent
    sleep: Callable[[float], None] = time.sleep
    _treated: dict[tuple[str, str], str] = field(default_factory=dict)
    """The launch of each server, by host and name, whose death is being seen to or has been."""
    _left: dict[tuple[str, str], str] = field(default_factory=dict)
    """The launch of each server that was seen to to the end."""
    _turns: dict[str, threading.Semaphore] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def note(self, host: Host, progress: RunProgress) -> None:
        """A share's newest state: does its driver wait for a server that died?"""
        if progress.state != "running" or not progress.dead_launch:
            return
        death = _Death.of(host, progress)
        key = host.config.name, death.server
        with self._lock:
            if self._treated.get(key) == death.launch_id:
                return
            self._treated[key] = death.launch_id
            turns = self._turns.setdefault(host.config.name, threading.Semaphore(AT_ONCE))
        # A daemon: what was begun on the host ends there, and must not keep the command from ending.
        threading.Thread(target=self._see_to, args=(death, turns), name=f"dead-{'-'.join(key)}", daemon=True).start()

    def is_left_dead(self, host: str, progress: RunProgress) -> bool:
        """Whether a share waits for a dead server about which nothing more is done here."""
        launch = progress.dead_launch if progress.state == "running" else ""
        return bool(launch) and self._left.get((host, server_of(progress.server))) == launch

    def _see_to(self, death: _Death, turns: threading.Semaphore) -> None:
        try:
            with turns:
                self.bring_back(death)
        except UnreachableError:  # its driver will tell again when the host is back
            with self._lock:
                self._treated.pop((death.host.config.name, death.server), None)
            return
        except FleetdumpError as error:
            self._say(death, f"not restarted: {error}; next: {error.next_step or self._by_hand(death)}")
        self._left[death.host.config.name, death.server] = death.launch_id

    def bring_back(self, death: _Death) -> None:
        """Diagnose, restart, and again while it does not come up and may be restarted. Raises ``UnreachableError``."""
        verdict = self._diagnose(death)
        while self._may_restart(death):
            if not death.suspect:
                self.sleep(BACKOFF_SECONDS[min(death.restarts, len(BACKOFF_SECONDS) - 1)])
            report = self._restart(death, verdict)
            if report is None or report.outcome not in TRY_AGAIN:
                return
            death.restarts += not death.suspect
            death.launch_id, death.suspect = report.launch_id, ""
            verdict = report.verdicts[0] if report.verdicts else None

    # ------------------------------------------------------------------ steps
    def _diagnose(self, death: _Death) -> Verdict | None:
        """What the server died of; a host that cannot say is no reason to leave it dead."""
        alone = f" with sample {death.suspect} alone in flight" if death.suspect else ""
        self._say(death, f"the server died{alone}; taking evidence")
        try:
            (found,) = diagnose_host(death.host, Target(death.server, seconds=SAMPLE_SECONDS))
        except UnreachableError:
            raise
        except FleetdumpError as error:
            self._say(death, f"no evidence: {error}")
            return None
        self._tell_verdict(death, found)
        return found.verdicts[0] if found.verdicts else None

    def _tell_verdict(self, death: _Death, found: Diagnosis) -> None:
        if found.verdicts:
            best = found.verdicts[0]
            self._say(death, f"{best.title} ({best.code}, confidence: {best.confidence})", verdict=best.code)
            for step in best.next_steps:
                self._say(death, f"next: {step}")
        if found.evidence_dir:
            self._say(death, f"evidence on the host: {found.evidence_dir}")

    def _may_restart(self, death: _Death) -> bool:
        """A death that one sample alone is suspected of does not count: it is rejected after the second of them."""
        if death.suspect and self.policy.restarts:
            return True
        if death.restarts < self.policy.restarts:
            return True
        why = f"it was restarted {death.restarts} times in this run" if self.policy.restarts else "--restart is 0"
        text = "its driver waits for it, and what it has not begun goes to other hosts"
        self._say(death, f"not restarted: {why}; {text}; next: {self._by_hand(death)}")
        return False

    def _restart(self, death: _Death, verdict: Verdict | None) -> Restarted | None:
        """One restart and how it went; None when it may not be done."""
        count = "" if death.suspect else f" ({death.restarts + 1} of {self.policy.restarts} in this run)"
        self._say(death, f"restarting it{count}")
        why = RunRestart(
            self.run, death.launch_id, f"{verdict.code}: {verdict.title}" if verdict else "", death.suspect
        )
        while True:
            try:
                report = restart_of_run(death.host, death.server, why, self.policy.selfcheck, self._events(death))
                break
            except LockedError as error:  # whoever changes the host may be bringing it back
                self._say(death, f"{error}; asking again in {LOCKED_SECONDS:.0f} s")
                self.sleep(LOCKED_SECONDS)
        self._tell_outcome(death, report)
        return report if report.launch_id else None

    def _tell_outcome(self, death: _Death, report: Restarted) -> None:
        if report.outcome == "ready":
            self._say(death, f"restarted, ready in {report.seconds:.0f} s; the run goes on")
            return
        step = f"; next: {report.next_step}" if report.next_step else ""
        self._say(death, f"the restart did not bring it back: {report.outcome}: {report.detail}{step}")
        for verdict in report.verdicts[:1]:
            self._say(
                death, f"{verdict.title} ({verdict.code}, confidence: {verdict.confidence})", verdict=verdict.code
            )
        if report.outcome in NOT_AS_IT_WAS and self._is_still(death, report.launch_id):
            stop_servers(death.host, self._events(death), [death.server])
            self._say(death, "stopped, so that nothing wrong is captured; next: fleetdump deploy says what is missing")

    def _is_still(self, death: _Death, launch_id: str) -> bool:
        """Whether that launch is the server's latest: what comes after it is somebody else's."""
        servers = death.host.call(StatusArgs(), StatusResult, verb="status").servers
        return any((server.name, server.launch_id) == (death.server, launch_id) for server in servers)

    def _by_hand(self, death: _Death) -> str:
        return f"fleetdump restart --host {death.host.config.name} --server {death.server}, or fleetdump deploy"

    def _events(self, death: _Death) -> Callable[[dict[str, Any]], None]:
        return lambda event: self.tell(death.host.config.name, event)

    def _say(self, death: _Death, text: str, **more: str) -> None:
        event = {"event": "step", "step": "server-death", "server": death.server, "text": f"{death.server}: {text}"}
        self.tell(death.host.config.name, {**event, **more})
