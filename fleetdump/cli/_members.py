"""What each host does in a run that is watched: its own shares, and then what others have more left of."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from fleetdump.agent.formats import server_of
from fleetdump.agent.runmessages import FINISHED, RunProgress
from fleetdump.errors import HostError, UnreachableError
from fleetdump.fleet import Host
from fleetdump.tasks.assignment import RunPlan
from fleetdump.tasks.attendance import Attendance
from fleetdump.tasks.extract import ExtractSettings, follow, submit
from fleetdump.tasks.intake import taking_in
from fleetdump.tasks.places import Places
from fleetdump.tasks.rebalance import START_SECONDS, Balancer, require_server, serves
from fleetdump.tasks.supervise import Supervisor
from fleetdump.tasks.survey import shares_on
from fleetdump.views.console import duration
from fleetdump.views.hosts import show_event
from fleetdump.views.run import RunView

STANDSTILL_SECONDS = 300.0
"""All servers that have work left are dead and stay so: for so long somebody may launch one, then the command ends."""


@dataclass
class Members:
    """What each host does in a run that is watched: its shares, and then what it takes over from hosts that have more
    left."""

    plan: RunPlan
    settings: ExtractSettings
    places: Places
    balancer: Balancer
    attendance: Attendance
    view: RunView
    supervisor: Supervisor
    _handed: dict[str, RunPlan] = field(default_factory=dict)
    """What a host was given last to take over, until it is known to have it."""
    _still_since: float | None = None

    def work(self, host: Host) -> list[RunProgress]:
        """A host's part, to its end; its shares as they are then."""
        name = host.config.name
        returns = self.attendance.arrived(name)
        try:
            with taking_in(host, self.plan.run, self.balancer.ledger):
                return self._take_part(host, returns)
        except UnreachableError:
            self.balancer.lost(name)
            raise
        finally:
            self.balancer.forget(name)

    def _take_part(self, host: Host, returns: bool) -> list[RunProgress]:
        states, more = self._return(host) if returns else self._begin(host)
        self.balancer.has_told(host.config.name)
        while True:
            if more is not None:
                states = [*states, *self._hand_over(host, more, states)]
            states, more = self._follow(host, states)
            if any(share.state == "failed" for share in states) and more is None:
                return states
            if more is None and (states or serves(host)):
                more = self.balancer.wait_for_work(host)
            if more is None:
                return states

    def _follow(self, host: Host, states: list[RunProgress]) -> tuple[list[RunProgress], RunPlan | None]:
        """To the end of the host's shares; or only until it has something to take over, shortly before that end."""
        more = None
        if not _is_over(states):
            states = self._states(host, ahead=START_SECONDS)
        if not _is_over(states) and all(share.state != "failed" for share in states):
            more = self.balancer.ask(host)
        if more is None and not _is_over(states):
            states = self._states(host)
        return states, more

    def _states(self, host: Host, ahead: float = 0.0) -> list[RunProgress]:
        """The host's shares when they have ended, or so many seconds before."""
        return follow(host, self.plan.run, lambda _, progress: self._note(host, progress), ahead=ahead)

    def _begin(self, host: Host) -> tuple[list[RunProgress], RunPlan | None]:
        """The host's own shares, and what they once gave away to nobody."""
        name = host.config.name
        self.balancer.back(host, self.plan)
        states = submit(host, self.plan, self.settings, self.balancer.ledger)
        for share in states:
            self._note(host, share)  # a share that is done already is never followed
        if not states and name in self.attendance.asked:
            require_server(host)
        return states, self.balancer.reclaim(host, list(self.plan.of_host(name))) if self.plan.resumed else None

    def _return(self, host: Host) -> tuple[list[RunProgress], RunPlan | None]:
        """As ``_begin``, for a host that was lost in the middle: it may have more shares by now than it began with."""
        plan, handed = replace(self.plan, resumed=True), self._handed.get(host.config.name)
        self.balancer.back(host, plan, *([handed] if handed else []))
        submit(host, plan, self.settings, self.balancer.ledger)
        states = shares_on(host, self.plan.run)
        for share in states:
            self._note(host, share)
        if handed is not None and handed.shares:
            return states, handed
        return states, self.balancer.reclaim(host, list(plan.of_host(host.config.name)))

    def _note(self, host: Host, progress: RunProgress) -> None:
        self.places.require_undisputed()
        self.balancer.note(host, progress)
        self.supervisor.note(host, progress)
        self.view.update(host.config.name, progress)
        is_dead = self.supervisor.is_left_dead(host.config.name, progress)
        if not is_dead and self._still_since is None:
            return
        if not self.balancer.only_waits_for(self.supervisor.is_left_dead):
            self._still_since = None
        elif is_dead:
            self._mind_standstill(host.config.name, server_of(progress.server))

    def _mind_standstill(self, name: str, server: str) -> None:
        """Raise ``HostError`` once nobody has been at work for long and nobody will be: else the command would wait for
        ever, and a script with it."""
        now, by_hand = time.monotonic(), f"fleetdump restart --host {name} --server {server}, or fleetdump deploy"
        if self._still_since is None:
            self._still_since = now
            text = f"{server} is dead and nobody else is at work: waiting {duration(STANDSTILL_SECONDS)} for it"
            show_event(name, {"event": "step", "text": f"{text}; next: {by_hand}"})
        if now - self._still_since >= STANDSTILL_SECONDS:
            raise HostError(
                f"server {server} is dead, and nobody else is at work on run {self.plan.run}",
                name,
                "it is not restarted any more (the reason stands above)",
                f"{by_hand}; its driver waits for that and nothing is lost; the same command goes on watching",
            )

    def _hand_over(self, host: Host, plan: RunPlan, own: Sequence[RunProgress]) -> list[RunProgress]:
        """``submit`` what the host takes over; what it refuses goes to the next one that asks, and then the host still
        ends what it has of its ``own``."""
        name = host.config.name
        self._handed[name] = plan
        try:
            states = submit(host, plan, self.settings, self.balancer.ledger)
        except HostError:
            self.balancer.give_back(plan)
            del self._handed[name]
            if not _is_over(own):
                self._states(host)
            raise
        del self._handed[name]
        return states


def _is_over(shares: Sequence[RunProgress]) -> bool:
    return all(share.state in FINISHED for share in shares)
