"""While a controller is attached: a host that has nothing left takes over what others have not begun.

Whoever is done asks for work; the share that would take longest gives so much that both would end together. Its driver
withdraws the samples first, durable on its host, so that they are worked on by one server alone. A host whose server is
dead, or that alone is paused because it shall leave, has no rate: it gives everything that it has not begun. A host
that joins has nothing to begin with, and so takes over at once. An unreachable host cannot withdraw, and keeps its
work. While a whole run is paused nothing moves; who was told to leave, or cancelled, takes nothing over.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from fleetdump.agent.formats import server_of
from fleetdump.agent.protocol import (
    CANCEL,
    FINISHED,
    RunProgress,
    StatusArgs,
    StatusResult,
    WithdrawArgs,
    WithdrawResult,
)
from fleetdump.errors import HostError, UnreachableError
from fleetdump.fleet import Host
from fleetdump.ledger import Ledger
from fleetdump.tasks._task import task
from fleetdump.tasks.extract import RunPlan, Share, Target
from fleetdump.tasks.survey import shares_on

WITHDRAW_DEADLINE = 60.0
LEAST_SECONDS = 20.0
"""What a share would end with by itself within so long stays where it is."""
LOOK_SECONDS = 2.0
ASK_SECONDS = 30.0
"""Before a share that had nothing to give is asked again."""
JOIN_SECONDS = 120.0
"""For so long from its beginning a run waits for hosts that have not said yet how much they have."""


@task
def serves(host: Host) -> bool:
    """Whether one of our servers lives on the host: without one it cannot join a run."""
    living = ("ready", "starting")
    return any(server.state in living for server in host.call(StatusArgs(), StatusResult, verb="status").servers)


@dataclass
class Known:
    """A share as its host last said it is."""

    progress: RunProgress
    host: Host

    @property
    def target(self) -> Target:
        return self.host.config.name, self.progress.server

    @property
    def left(self) -> float:
        """Tokens that are not done."""
        return max(0.0, float(self.progress.tokens - self.progress.tokens_done))

    @property
    def is_busy(self) -> bool:
        """Whether there is, or may be, work left that was not begun."""
        return self.progress.state not in (*FINISHED, "closing") and (self.left > 0 or not self.progress.tokens)

    @property
    def rate(self) -> float:
        """Tokens a second; 0 for a server that is dead, stopped or paused."""
        return self.progress.tokens_per_second if self.progress.state == "running" else 0.0

    @property
    def run_rests(self) -> bool:
        """Whether the whole run was paused or cancelled."""
        return bool(self.progress.order) and self.progress.whole_run

    @property
    def seconds(self) -> float:
        """Until it would be done by itself."""
        return self.left / self.rate if self.rate else float("inf")


@dataclass
class Balancer:
    """Moves samples between the shares of one run; used by the threads of all hosts. ``share_of`` makes a share of ids,
    ``pending`` are hosts that have shares and have not said yet how much is left of them, ``unclaimed`` those that were
    not asked yet what they gave away to nobody. ``knows_all``: every host has told which samples it has; otherwise what
    was given away earlier may be in the hands of one that has not."""

    run: str
    ledger: Ledger
    share_of: Callable[[Sequence[str]], Share]
    pending: set[str] = field(default_factory=set)
    unclaimed: set[str] = field(default_factory=set)
    knows_all: bool = True
    least_seconds: float = LEAST_SECONDS
    _began: float = field(default_factory=time.monotonic)
    _asked: dict[Target, float] = field(default_factory=dict)
    _known: dict[Target, Known] = field(default_factory=dict)
    _best_rate: dict[str, float] = field(default_factory=dict)
    _homeless: list[tuple[Target, list[str]]] = field(default_factory=list)
    """Samples that leaving hosts gave away to nobody, with the share that had them."""
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def note(self, host: Host, progress: RunProgress) -> None:
        """A share's newest state."""
        name = host.config.name
        self._known[name, progress.server] = Known(progress, host)
        self.pending.discard(name)
        self._best_rate[name] = max(self._best_rate.get(name, 0.0), progress.tokens_per_second)

    def forget(self, name: str) -> None:
        """That host has ended, or could not be reached: nothing can be asked of it."""
        self.pending.discard(name)
        self.unclaimed.discard(name)
        for target in [target for target in self._known if target[0] == name]:
            del self._known[target]

    def wait_for_work(self, host: Host) -> RunPlan | None:
        """What the host, which has nothing to do, takes over now; None when all others are done or nearly so, or when
        the host is to do nothing more."""
        while True:
            with self._lock:
                others = self._busy_beside(host)
                victims = [known for known in others if self._may_give(known)]
                if (victims or self._homeless) and not any(known.run_rests for known in others):
                    # The host is done, and so no longer followed: it may have been told something since.
                    told = [share for share in shares_on(host, self.run) if share.order]
                    if any(not share.whole_run for share in told):
                        return None
                    plan = None if told else self._next_plan(host, victims)
                    if plan is not None:
                        return plan
            waits = self.pending or self.unclaimed
            if not others and not (waits and time.monotonic() - self._began < JOIN_SECONDS):
                return None
            time.sleep(LOOK_SECONDS)

    def _next_plan(self, host: Host, victims: Sequence[Known]) -> RunPlan | None:
        while self._homeless:
            target, given = self._homeless.pop()
            ids = self.ledger.still_home(given, *target)
            if ids:
                return self._move(ids, host, self._server(host))
        return next((plan for plan in (self._take_over(host, known) for known in victims) if plan is not None), None)

    def reclaim(self, host: Host, shares: Sequence[str]) -> RunPlan | None:
        """What the host's shares gave away to a controller that died before it gave them on: the host's own again; or,
        when the host was told to leave, that of the next one that asks for work."""
        try:
            with self._lock:
                return self._reclaim(host, shares) if self.knows_all else None
        finally:
            self.unclaimed.discard(host.config.name)

    def _reclaim(self, host: Host, shares: Sequence[str]) -> RunPlan | None:
        leaves = any(share.order and not share.whole_run for share in shares_on(host, self.run))
        for share in shares:
            target = host.config.name, share
            known = self._known.get(target)
            if known is not None and known.progress.order == CANCEL:
                continue
            given = host.call(WithdrawArgs(self.run, share, 0), WithdrawResult, verb="withdraw")
            ids = self.ledger.still_home(given.ids, *target)
            if ids and leaves:
                self._homeless.append((target, ids))
            elif ids:
                return self._move(ids, host, server_of(share))
        return None

    def _busy_beside(self, host: Host) -> list[Known]:
        """Shares of other hosts that have work left, the one that would take longest first."""
        busy = [known for (name, _), known in list(self._known.items()) if name != host.config.name and known.is_busy]
        return sorted(busy, key=lambda known: known.seconds, reverse=True)

    def _may_give(self, known: Known) -> bool:
        """Whether the share has much left, is not cancelled, and was not asked in vain just now."""
        is_asked = time.monotonic() - self._asked.get(known.target, -ASK_SECONDS) < ASK_SECONDS
        return known.seconds >= self.least_seconds and known.progress.order != CANCEL and not is_asked

    def _take_over(self, host: Host, known: Known) -> RunPlan | None:
        mine = self._best_rate.get(host.config.name) or known.rate or 1.0
        tokens = int(known.left * mine / (mine + known.rate)) if known.rate else int(known.left)
        try:
            given = self._withdraw(known.host, known.progress.server, max(1, tokens))
        except (HostError, UnreachableError):
            return None  # its own thread says what is wrong there
        ids = self.ledger.still_home(given, *known.target)
        if ids:
            return self._move(ids, host, self._server(host))
        self._asked[known.target] = time.monotonic()
        return None

    def _withdraw(self, host: Host, share: str, tokens: int) -> list[str]:
        """Samples that the share has given away: now, and earlier where no host can have them unknown to us."""

        def ask(tokens: int) -> list[str]:
            args = WithdrawArgs(self.run, share, tokens)
            return host.call(args, WithdrawResult, verb="withdraw", deadline=WITHDRAW_DEADLINE).ids

        earlier = set() if self.knows_all else set(ask(0))
        return [sample for sample in ask(tokens) if sample not in earlier]

    def _server(self, host: Host) -> str:
        """The host's server that was fastest, or its first."""
        name = host.config.name
        mine = [
            (known.progress.tokens_done, server_of(share)) for (at, share), known in self._known.items() if at == name
        ]
        return max(mine)[1] if mine else host.config.servers[0].name

    def _move(self, ids: Sequence[str], host: Host, server: str) -> RunPlan:
        """Give samples that no driver works on to this host's server, as a share of their own."""
        name = host.config.name
        taken = {share.server for share in self.ledger.shares(name)}
        number = next(n for n in range(1, 1_000_000) if f"{server}.{n}" not in taken)
        share, target = self.share_of(ids), (name, f"{server}.{number}")
        self.ledger.move(ids, *target, share.sha256)
        return RunPlan(self.run, {target: share}, len(ids), [], resumed=True)
