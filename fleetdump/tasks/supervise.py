"""While a controller watches a run: a server that died or hangs is diagnosed, and launched again as it was, so many
times.

The driver says that its server is dead, and goes on by itself once another launch is ready. In between, the evidence is
taken before anything of it is gone, the verdict is told and kept beside the run on the host, and the server comes back
by the same verb as ``fleetdump restart``: under the host's lock, audited, watched and proven. What an operator stopped
or launched meanwhile is left alone. Restarts are counted on the host, so that whoever watches next counts on.

A server may live and never answer again: a rank of it was killed, or spins. The driver says for how long nothing has
come, which alone proves nothing. When that is longer than a batch may take, the same diagnosis is made, and only one
that has seen or measured that the server cannot go on has it restarted. Any other is told, and made again later.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from fleetdump.agent.formats import server_of
from fleetdump.agent.hostmessages import StatusArgs, StatusResult
from fleetdump.agent.runmessages import RunProgress
from fleetdump.agent.servermessages import RunRestart
from fleetdump.diagnosis import DIRECT, MEASURED, STALL, Verdict
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
SILENT_SAMPLE_SECONDS = 10.0
"""Between those of one that lives."""
LOOK_AGAIN, AFTERMATH = 2.0, 40.0
"""A silence is looked at again when it is so many times as long as at the last look, and these seconds more: each look
asks for /health, and when that fails, 20 s later, the server's log says so and seems to move."""
ONE_SILENCE = 10.0
"""Seconds by which the beginnings of one silence may differ, as told at different times."""
SURE = (DIRECT, MEASURED)
PARTS_DEAD = ("OOM_KILLED", "API_ALIVE_ENGINE_DEAD", "PARENT_WAITS_DEAD_RANK", "LAUNCHER_DIED")
"""Verdicts that a process is gone without which the server cannot answer, whatever else is the matter."""
HANGS = ("RANK_CRASHED", "RANK_SPIN", "MISSING_RANK", "COLLECTIVE_DIVERGED", "KERNEL_SPIN")
"""Verdicts that all processes live and none will go on by itself. Only as the first verdict (nothing outside of the
server explains it), and at two looks, with none in between at which it worked: what computes for very long looks like
some of them."""
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
    """A server that is dead, or lives and gives nothing for ``silent`` seconds (0: it is dead), as its driver said, and
    how often it was restarted before."""

    host: Host
    server: str
    launch_id: str
    suspect: str
    restarts: int
    silent: float = 0.0
    since: float = 0.0
    """When it fell silent, by the clock of who was told."""

    @classmethod
    def of(cls, host: Host, progress: RunProgress, now: float) -> _Death:
        server, silent = server_of(progress.server), 0.0 if progress.dead_launch else progress.silent_seconds
        launch_id = progress.dead_launch or progress.silent_launch
        return cls(host, server, launch_id, progress.suspect, progress.restarts, silent, now - silent)

    @property
    def key(self) -> tuple[str, str]:
        return self.host.config.name, self.server


@dataclass
class _Look:
    """The last look at a silent server: which launch, silent since when (``Supervisor.clock``) and for how many seconds
    then, and who ``hangs`` in which way by its first verdict, or by an earlier look's (empty: nobody surely)."""

    launch_id: str
    since: float
    silent: float
    hangs: str = ""

    @property
    def again(self) -> float:
        """Seconds of silence at which the next one is due."""
        return LOOK_AGAIN * self.silent + AFTERMATH


@dataclass
class Supervisor:
    """Looks after the dead and the silent servers of one run; ``note`` may be called from any thread and returns at
    once. ``tell`` gets what happens as events (``step``), by host."""

    run: str
    policy: Policy
    tell: OnEvent
    sleep: Callable[[float], None] = time.sleep
    clock: Callable[[], float] = time.monotonic
    _treated: dict[tuple[str, str], str] = field(default_factory=dict)
    """The launch of each server, by host and name, whose death is being seen to or has been."""
    _left: dict[tuple[str, str], str] = field(default_factory=dict)
    """The launch of each server that was seen to to the end."""
    _looks: dict[tuple[str, str], _Look] = field(default_factory=dict)
    _busy: set[tuple[str, str]] = field(default_factory=set)
    """Servers that are being seen to now."""
    _turns: dict[str, threading.Semaphore] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def note(self, host: Host, progress: RunProgress) -> None:
        """A share's newest state: does its driver wait for a server that died, or gives nothing?"""
        death = _Death.of(host, progress, self.clock())
        if progress.state != "running" or not death.launch_id:
            return
        with self._lock:
            if not self._is_due(death):
                return
            self._busy.add(death.key)
            if not death.silent:
                self._treated[death.key] = death.launch_id
            turns = self._turns.setdefault(host.config.name, threading.Semaphore(AT_ONCE))
        # A daemon: what was begun on the host ends there, and must not keep the command from ending.
        name = f"dead-{'-'.join(death.key)}"
        threading.Thread(target=self._see_to, args=(death, turns), name=name, daemon=True).start()

    def _is_due(self, death: _Death) -> bool:
        if death.key in self._busy:
            return False
        if not death.silent:
            return self._treated.get(death.key) != death.launch_id
        if self._left.get(death.key) == death.launch_id:
            return False
        last = self._last_look(death)
        return death.silent >= (last.again if last else death.host.config.patience.serving)

    def _last_look(self, death: _Death) -> _Look | None:
        """The last one at this very silence."""
        last = self._looks.get(death.key)
        if last is None or last.launch_id != death.launch_id or abs(last.since - death.since) > ONE_SILENCE:
            return None
        return last

    def is_left_dead(self, host: str, progress: RunProgress) -> bool:
        """Whether a share waits for a server about which nothing more is done here, though it is dead or hangs."""
        launch = progress.dead_launch or progress.silent_launch if progress.state == "running" else ""
        return bool(launch) and self._left.get((host, server_of(progress.server))) == launch

    def _see_to(self, death: _Death, turns: threading.Semaphore) -> None:
        is_over = True
        try:
            with turns:
                is_over = self.bring_back(death)
        except UnreachableError:  # its driver will tell again when the host is back
            self._treated.pop(death.key, None)
            is_over = False
        except FleetdumpError as error:
            self._say(death, f"not restarted: {error}; next: {error.next_step or self._by_hand(death)}")
        finally:
            with self._lock:
                if is_over:
                    self._left[death.key] = death.launch_id
                self._busy.discard(death.key)

    def bring_back(self, death: _Death) -> bool:
        """Diagnose, restart, and again while it does not come up and may be restarted. Whether that is the end of it:
        what is only silent may go on by itself, and is looked at again. Raises ``UnreachableError``."""
        verdicts = self._diagnose(death)
        verdict = verdicts[0] if verdicts else None
        if death.silent:
            verdict = self._end_of(death, verdicts)
            if verdict is None:
                return False
        while self._may_restart(death):
            if not death.suspect:
                self.sleep(BACKOFF_SECONDS[min(death.restarts, len(BACKOFF_SECONDS) - 1)])
            report = self._restart(death, verdict)
            if report is None:
                return not death.silent
            if report.outcome not in TRY_AGAIN:
                return True
            death.restarts += not death.suspect
            death.launch_id, death.suspect, death.silent = report.launch_id, "", 0.0
            verdict = report.verdicts[0] if report.verdicts else None
        return True

    # ------------------------------------------------------------------ steps
    def _diagnose(self, death: _Death) -> list[Verdict]:
        """What the server died of, or what holds it up; a host that cannot say is no reason to leave it dead."""
        alone = f" with sample {death.suspect} alone in flight" if death.suspect else ""
        what = f"nothing has come from the server for {death.silent:.0f} s" if death.silent else "the server died"
        self._say(death, f"{what}{alone}; taking evidence")
        seconds = SILENT_SAMPLE_SECONDS if death.silent else SAMPLE_SECONDS
        try:
            (found,) = diagnose_host(death.host, Target(death.server, seconds=seconds))
        except UnreachableError:
            raise
        except FleetdumpError as error:
            self._say(death, f"no evidence: {error}")
            return []
        self._tell_verdict(death, found)
        return found.verdicts

    def _end_of(self, death: _Death, verdicts: Sequence[Verdict]) -> Verdict | None:
        """The verdict by which a silent server will not answer any more; None, and told, where it may."""
        sure = [verdict for verdict in verdicts if verdict.severity == STALL and verdict.confidence in SURE]
        dead = next((verdict for verdict in sure if verdict.code in PARTS_DEAD), None)
        first = next((verdict for verdict in verdicts[:1] if verdict in sure and verdict.code in HANGS), None)
        hangs, last = f"{first.code} {first.rank}" if first else "", self._last_look(death)
        works = any(verdict.severity != STALL and verdict.confidence in SURE for verdict in verdicts[:1])
        before = last.hangs if last and not works else ""
        look = self._looks[death.key] = _Look(death.launch_id, death.since, death.silent, hangs or before)
        if dead is not None:
            return dead
        if hangs and hangs == before:
            return first
        why = "that it hangs must be seen twice" if hangs else "nothing proves that it cannot go on by itself"
        again = f"it is looked at again when it has been silent for {look.again:.0f} s"
        self._say(death, f"not restarted: {why}; {again}" + ("" if hangs else f"; next: {self._by_hand(death)}"))
        return None

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
        said = f"{verdict.code}: {verdict.title}" if verdict else ""
        why = RunRestart(self.run, death.launch_id, said, death.suspect, bool(death.silent))
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
