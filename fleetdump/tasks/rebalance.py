"""While a controller is attached: a host that soon has nothing left takes over what others have not begun.

Whoever will be done in some seconds asks for work, so that its server never rests; the share that would take longest
gives so much that both would end together, and who has got it begins with it when its own is done. The giving driver
withdraws the samples first, durable on its host, so that they are worked on by one server alone. A host whose server is
dead, or that alone is paused, has no rate: it gives everything that it has not begun. One that is drained does so at
once, whether somebody waits for it or not. A host that joins has nothing to begin with, and so takes over at once.

An unreachable host cannot withdraw. When it has been away for longer than the patience, what it is not known to have
done is computed by others too, and whichever line of a sample comes first counts; when it is back, it gives away what
it has not begun, before anything else. While a whole run is paused nothing moves; who was told to leave, or cancelled,
takes nothing over.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from fleetdump.agent.formats import server_of
from fleetdump.agent.hostmessages import StatusArgs, StatusResult
from fleetdump.agent.runmessages import CANCEL, DRAIN, FINISHED, RunProgress, WithdrawArgs, WithdrawResult
from fleetdump.errors import HostError, LockedError, UnreachableError
from fleetdump.fleet import Host
from fleetdump.ledger import Ledger
from fleetdump.tasks._task import task
from fleetdump.tasks.assignment import RunPlan, Share, Target
from fleetdump.tasks.survey import shares_on

WITHDRAW_DEADLINE = 60.0
LEAST_SECONDS = 20.0
"""What a share would end with by itself within so long stays where it is."""
START_SECONDS = 8.0
"""From when a host asks for work to its first sample of what it has taken over: the samples are withdrawn, sent and
tokenised, a driver starts. So long before its own work ends it asks."""
STARTING = ("tokenising", "running")
FRESH_SECONDS = 60.0
"""For so long a share that has done nothing yet is thought to be as fast as its host was before: else it would be taken
for one whose server is dead, and give all away that it has just taken over."""
LOOK_SECONDS = 2.0
ASK_SECONDS = 30.0
"""Before a share that had nothing to give is asked again."""
JOIN_SECONDS = 120.0
"""For so long from its beginning a run waits for hosts that have not said yet how much they have."""
PATIENCE_SECONDS = 600.0
"""Without a host for so long, others compute what it has not done."""
ALL_TOKENS = 1 << 60


@task
def serves(host: Host) -> bool:
    """Whether one of our servers lives on the host: without one it cannot join a run."""
    living = ("ready", "starting")
    return any(server.state in living for server in host.call(StatusArgs(), StatusResult, verb="status").servers)


def require_server(host: Host) -> None:
    """Raise ``HostError`` when no server of ours lives on a host that is to join a run."""
    if not serves(host):
        raise HostError(
            "no server of ours runs there",
            host.config.name,
            "a host joins a run with its servers",
            f"fleetdump deploy --host {host.config.name}, then the same command again",
        )


def left_with_others(ledger: Ledger, asked: Collection[str]) -> dict[str, int]:
    """How many samples that are not known to be done each host has that was not ``asked``: it may be at work on them,
    so nobody takes them over, and they are not without a host either."""
    return {host: samples for host, samples in ledger.unsettled_by_host().items() if host not in asked}


@dataclass
class Known:
    """A share as its host last said it is."""

    progress: RunProgress
    host: Host
    is_fresh: bool = False
    """It has done nothing yet, and has not had the time to."""
    usual_rate: float = 0.0
    """What its host has shown before, in tokens a second."""

    @property
    def target(self) -> Target:
        return self.host.config.name, self.progress.server

    @property
    def place(self) -> Target:
        """Its server, which may have several shares."""
        return self.host.config.name, server_of(self.progress.server)

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
        measured = self.progress.tokens_per_second if self.progress.state == "running" else 0.0
        return measured or (self.usual_rate if self.is_fresh else 0.0)

    @property
    def leaves(self) -> bool:
        """Whether its host is to leave the run."""
        return self.progress.order == DRAIN

    @property
    def run_rests(self) -> bool:
        """Whether the whole run was paused or cancelled."""
        return bool(self.progress.order) and self.progress.whole_run

    @property
    def seconds(self) -> float:
        """Until it would be done by itself."""
        return self.left / self.rate if self.rate else float("inf")


def fair_part(known: Known, rate: float, busy: float = 0.0) -> int:
    """Tokens of a share with which it and one who takes them over at ``rate`` tokens a second end together; all of
    them where nobody works. Who takes them over has work of its own for ``busy`` seconds and cannot begin before
    ``START_SECONDS`` from now, and is given so much less."""
    if not known.rate:
        return max(1, int(known.left))
    return int(max(0.0, known.left - max(START_SECONDS, busy) * known.rate) * rate / (rate + known.rate))


@dataclass
class Balancer:
    """Moves samples between the shares of one run; used by the threads of all hosts. ``share_of`` makes a share of ids,
    ``pending`` are hosts that have shares and have not said yet how much is left of them, or what they gave away to
    nobody. ``knows_all``: every host has told which samples it has; otherwise what was given away earlier may be in the
    hands of one that has not."""

    run: str
    ledger: Ledger
    share_of: Callable[[Sequence[str]], Share]
    pending: set[str] = field(default_factory=set)
    knows_all: bool = True
    least_seconds: float = LEAST_SECONDS
    patience: float = PATIENCE_SECONDS
    stopped: Callable[[], bool] = lambda: False
    """Whether nothing is to be moved any more."""
    _began: float = field(default_factory=time.monotonic)
    _asked: dict[Target, float] = field(default_factory=dict)
    _known: dict[Target, Known] = field(default_factory=dict)
    _seen: dict[Target, float] = field(default_factory=dict)
    """Since when each share is known (``time.monotonic``)."""
    _best_rate: dict[str, float] = field(default_factory=dict)
    _homeless: list[tuple[Target, list[str]]] = field(default_factory=list)
    """Samples that were given away to nobody, with the share that had them."""
    _away: dict[str, float] = field(default_factory=dict)
    """Hosts with unfinished work that cannot be reached, since when (``time.monotonic``)."""
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def note(self, host: Host, progress: RunProgress) -> None:
        """A share's newest state."""
        name = host.config.name
        is_fresh = self._is_fresh(name, progress)
        known = self._known[name, progress.server] = Known(progress, host, is_fresh, self._best_rate.get(name, 0.0))
        self._best_rate[name] = max(self._best_rate.get(name, 0.0), progress.tokens_per_second)
        if known.leaves and known.is_busy and self._may_ask(known):
            self._asked[known.target] = time.monotonic()
            # Not here: whoever tells us how the share stands must not wait for its driver.
            threading.Thread(target=self._release, args=(known,), name=f"release-{name}", daemon=True).start()

    def _is_fresh(self, name: str, progress: RunProgress) -> bool:
        seen = self._seen.setdefault((name, progress.server), time.monotonic())
        begins = progress.state in STARTING and not progress.tokens_done and not progress.dead_launch
        return begins and time.monotonic() - seen < FRESH_SECONDS

    def has_told(self, name: str) -> None:
        """That host has said all that it has."""
        self.pending.discard(name)

    def forget(self, name: str) -> None:
        """That host has ended: nothing can be asked of it."""
        self.pending.discard(name)
        for target in [target for target in self._known if target[0] == name]:
            del self._known[target]

    def lost(self, name: str) -> None:
        """That host cannot be reached. What it was told to give up for good is nobody's."""
        given_up = [known for known in self._of(name) if known.progress.order == CANCEL]
        self.forget(name)
        if not given_up and self.ledger.unsettled(name):
            self._away.setdefault(name, time.monotonic())

    def back(self, host: Host, *plans: RunPlan) -> None:
        """The host can be reached. What others were given of its work it gives away as far as it has not begun it;
        what it never got is no more in ``plans``. Raises ``UnreachableError``."""
        name = host.config.name
        self._away.pop(name, None)
        for share in self.ledger.overtaken(name):
            try:
                self._withdraw(host, share, ALL_TOKENS)
                self.ledger.submitted(name, share)
            except HostError as error:
                if error.code != "not_found":
                    continue  # its driver does not answer: it may compute what others do too, until it is told
                for plan in plans:
                    plan.shares.pop((name, share), None)
            self.ledger.told(name, share)

    def give_back(self, plan: RunPlan) -> None:
        """A host has refused what it was to take over: it is the next one's that asks."""
        with self._lock:
            for target in plan.shares:
                ids = [sample for sample, share in self.ledger.unsettled(target[0]) if share == target[1]]
                self._homeless.append((target, ids))

    def left_over(self) -> int:
        """Samples that were given away and that nobody has taken."""
        with self._lock:
            return sum(len(self.ledger.still_home(ids, *target)) for target, ids in self._homeless)

    def only_waits_for(self, is_meant: Callable[[str, RunProgress], bool]) -> bool:
        """Whether all work that is left is with the servers of such shares, (host, state), and no host may come that
        could take it."""
        busy = [known for known in list(self._known.values()) if known.is_busy]
        meant = {known.place for known in busy if is_meant(known.target[0], known.progress)}
        return bool(meant) and not self._away and not self.pending and meant == {known.place for known in busy}

    def wait_for_work(self, host: Host) -> RunPlan | None:
        """What the host, which has nothing to do, takes over now; None when all others are done or nearly so, or when
        the host is to do nothing more."""
        while True:
            plan = self.ask(host)
            if plan is not None or self._is_out(host.config.name):
                return plan
            others = self._busy_beside(host) or self._away
            if not others and not (self.pending and time.monotonic() - self._began < JOIN_SECONDS):
                return None
            time.sleep(LOOK_SECONDS)

    def ask(self, host: Host) -> RunPlan | None:
        """What the host takes over now, if there is anything; it may have work of its own for some seconds. One that
        turns out to have so much that others may ask it for some takes nothing."""
        name = host.config.name
        with self._lock:
            others = self._busy_beside(host)
            victims = [known for known in others if self._may_give(known)]
            is_there = victims or self._homeless or self._given_up()
            if not is_there or self._is_out(name) or any(known.run_rests for known in others):
                return None
            # It is not followed just now: it may have been told something since.
            shares = shares_on(host, self.run)
            for share in shares:
                self.note(host, share)
            if any(share.order for share in shares) or self._seconds(name) >= self.least_seconds:
                return None
            return self._next_plan(host, victims)

    def _is_out(self, name: str) -> bool:
        """Whether that host alone was told to pause, to leave or to cancel, or all has stopped: it takes nothing."""
        return self.stopped() or any(known.progress.order and not known.progress.whole_run for known in self._of(name))

    def _seconds(self, name: str) -> float:
        """Until that host has nothing to do. A server has its shares one after the other."""
        by_server: dict[str, float] = {}
        for known in self._of(name):
            server = server_of(known.progress.server)
            by_server[server] = by_server.get(server, 0.0) + (known.seconds if known.is_busy else 0.0)
        return max(by_server.values(), default=0.0)

    def _next_plan(self, host: Host, victims: Sequence[Known]) -> RunPlan | None:
        while self._homeless:
            target, given = self._homeless.pop()
            ids = self.ledger.still_home(given, *target)
            if ids:
                return self._move(ids, host, self._server(host))
        plans = (self._take_over(host, known) for known in victims)
        copies = (self._copy(host, name) for name in self._given_up())
        # One after the other: what is taken over is moved at once, so nobody is asked once there is something.
        return next((plan for plan in itertools.chain(plans, copies) if plan is not None), None)

    def _of(self, name: str) -> list[Known]:
        return [known for (at, _), known in list(self._known.items()) if at == name]

    # ------------------------------------------------------------------ hosts that are away or leave
    def _given_up(self) -> list[str]:
        """Hosts that have been away for longer than the patience."""
        return [name for name, since in list(self._away.items()) if time.monotonic() - since >= self.patience]

    def _copy(self, host: Host, name: str) -> RunPlan | None:
        """What a host that is away has not done, as far as is known, to be computed by this one too."""
        self._away.pop(name, None)
        ids = [sample for sample, _ in self.ledger.unsettled(name)]
        if not ids:
            return None
        with self.ledger.transaction():
            self.ledger.overtake(name)
            return self._move(ids, host, self._server(host))

    def _release(self, known: Known) -> None:
        """Take from a leaving host what it has not in flight; it is the next one's that asks."""
        with suppress(HostError, LockedError, UnreachableError), self._lock:  # its own thread says what is wrong there
            given = self._withdraw(known.host, known.progress.server, ALL_TOKENS)
            ids = self.ledger.still_home(given, *known.target)
            if ids:
                self._homeless.append((known.target, ids))

    def reclaim(self, host: Host, shares: Sequence[str]) -> RunPlan | None:
        """What the host's shares gave away to a controller that died before it gave them on: the host's own again; or,
        when the host was told to leave, that of the next one that asks for work."""
        with self._lock:
            return self._reclaim(host, shares) if self.knows_all else None

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
        """Whether the share has much left, is not cancelled, and was not asked in vain just now. Of one that has just
        begun nobody knows, unless its host has worked before."""
        if known.is_fresh and not known.rate:
            return False
        return known.seconds >= self.least_seconds and known.progress.order != CANCEL and self._may_ask(known)

    def _may_ask(self, known: Known) -> bool:
        return time.monotonic() - self._asked.get(known.target, -ASK_SECONDS) >= ASK_SECONDS

    def _take_over(self, host: Host, known: Known) -> RunPlan | None:
        name = host.config.name
        tokens = fair_part(known, self._best_rate.get(name) or known.rate or 1.0, self._seconds(name))
        if not tokens:
            return None
        try:
            given = self._withdraw(known.host, known.progress.server, tokens)
        except (HostError, LockedError, UnreachableError):
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
        # Until its host says how it stands: others must not think that all is done, and leave.
        self.note(host, RunProgress(self.run, target[1], "tokenising", samples=len(ids)))
        return RunPlan(self.run, {target: share}, len(ids), [], resumed=True)
