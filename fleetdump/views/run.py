"""A run as it goes. On a terminal its totals with rates and ETA, and a line a host, kept up to date in place; elsewhere
the totals now and then; for scripts an object an event."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from rich.console import Group
from rich.live import Live
from rich.text import Text

from fleetdump.agent.formats import server_of
from fleetdump.agent.protocol import to_json
from fleetdump.agent.runmessages import FINISHED, RunProgress
from fleetdump.views.console import count, duration, err, out, quoted, size, visible

TOLD_SECONDS = 5.0
"""How often a line is printed where the output is no terminal, and an event of a share whose figures alone change."""
QUIET_SECONDS = 30.0
"""Without a sample for so long the view says so, and what to do."""
PHASES = {
    "tokenising": "is still tokenising",
    "closing": "closes its shards",
    "paused": "is paused",
    "stopped": "has no driver",
}
"""What a share is at in each state in which it sends nothing."""
SPARE_LINES = 4
"""Of a screen: the totals, what is cut off, and the prompt."""


@dataclass(frozen=True)
class RunTotals:
    """What shares of a run are together: those of a host, or all. ``waiting`` samples were not sent yet, ``in_flight``
    are at the servers. ``disk_free_bytes`` is what the fullest capture.dir has left, None while no driver has said;
    ``eta_seconds`` is 0 when it is not known."""

    samples: int
    done: int
    rejected: int
    retries: int
    waiting: int
    in_flight: int
    tokens_done: int
    tokens_per_second: float
    bytes_written: int
    bytes_per_second: float
    disk_free_bytes: int | None
    eta_seconds: float
    states: list[str]

    @property
    def settled(self) -> int:
        """Samples of which nothing more will come."""
        return self.done + self.rejected

    def text(self) -> str:
        """One line for people."""
        text = f"{self.done}/{self.samples} samples"
        if not set(self.states) <= set(FINISHED):
            text += f", {self.tokens_per_second:.0f} tok/s, {_per_second(self.bytes_per_second)}"
        text += f", {size(self.bytes_written)}"
        if self.waiting or self.in_flight:
            text += f", queue {self.waiting} + {self.in_flight} in flight"
        if self.disk_free_bytes is not None:
            text += f", {size(self.disk_free_bytes)} left on disk"
        if self.rejected or self.retries:
            text += f", {self.rejected} rejected, {self.retries} retries"
        if self.eta_seconds and self.settled < self.samples:
            text += f", ETA {duration(self.eta_seconds)}"
        return f"{text} ({', '.join(self.states)})"


def totals_of(shares: Sequence[RunProgress], *, moves: bool = False) -> RunTotals:
    """The sum of shares. ``moves``: who is done takes over from the others, so that all end together; else the
    slowest share is the last."""
    at_work = [share for share in shares if share.state not in FINISHED]
    rate = sum(share.tokens_per_second for share in at_work)
    if moves:
        eta = sum(map(_tokens_left, at_work)) / rate if rate else 0.0
    else:
        eta = max((share.eta_seconds for share in at_work), default=0.0)
    in_flight = sum(share.in_flight for share in shares)
    samples, done, rejected = (sum(getattr(s, name) for s in shares) for name in ("samples", "done", "rejected"))
    return RunTotals(
        samples=samples,
        done=done,
        rejected=rejected,
        retries=sum(share.retries for share in shares),
        waiting=max(0, samples - done - rejected - in_flight),
        in_flight=in_flight,
        tokens_done=sum(share.tokens_done for share in shares),
        tokens_per_second=rate,
        bytes_written=sum(share.bytes_written for share in shares),
        bytes_per_second=sum(share.bytes_per_second for share in at_work),
        disk_free_bytes=min((s.disk_free_bytes for s in shares if s.disk_free_bytes is not None), default=None),
        eta_seconds=eta,
        states=sorted({share.state for share in shares}),
    )


def _tokens_left(share: RunProgress) -> float:
    if share.tokens_per_second:
        return share.eta_seconds * share.tokens_per_second
    return max(0.0, share.tokens - share.tokens_done)


@dataclass(frozen=True)
class Whole:
    """A run as its ledger knows it: its samples, and how many of the hosts' are copies (``Ledger.copies``)."""

    samples: int
    copies: Callable[[], int]

    def corrected(self, totals: RunTotals) -> RunTotals:
        """``totals`` of all its shares with each sample counted once."""
        done = max(0, min(totals.done - self.copies(), self.samples - totals.rejected))
        waiting = max(0, self.samples - done - totals.rejected - totals.in_flight)
        return replace(totals, samples=self.samples, done=done, waiting=waiting)


class RunView:
    """Shows ``update``s from any thread; a context manager. ``moves`` as for ``totals_of``; ``corrected`` is what is
    made of the sum of shares, so that no sample counts twice. ``as_json`` prints objects on stdout instead:
    ``progress`` of a share when its state changes, and every ``TOLD_SECONDS`` while its figures do; ``totals`` of the
    run as often, and at the end."""

    def __init__(
        self,
        as_json: bool = False,
        *,
        moves: bool = False,
        corrected: Callable[[RunTotals], RunTotals] = lambda totals: totals,
    ) -> None:
        self._as_json = as_json
        self._corrected = corrected
        self._moves = moves
        self._shares: dict[tuple[str, str], RunProgress] = {}
        self._told: dict[tuple[str, str], float] = {}
        self._lock = threading.Lock()
        self._printed = time.monotonic()
        """When the totals were told last; not before all hosts can have answered."""
        self._settled = 0
        self._moved = time.monotonic()
        live = err.is_terminal and not as_json
        self._live = Live(get_renderable=self._render, console=err, refresh_per_second=2) if live else None

    def __enter__(self) -> RunView:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._live is not None:
            self._live.stop()
        elif self._shares:
            self._tell_totals()

    def update(self, host: str, share: RunProgress) -> None:
        """A share's newest state."""
        with self._lock:
            before = self._shares.get((host, share.server))
            self._shares[host, share.server] = share
            now = time.monotonic()
            settled = sum(s.done + s.rejected for s in self._shares.values())
            if settled != self._settled or before is None or before.state != share.state:
                self._settled, self._moved = settled, now
            if self._live is not None:
                return
            self._tell(host, before, share)
            if now - self._printed < TOLD_SECONDS:
                return
            self._printed = now
            self._tell_totals()

    # ------------------------------------------------------------------ lines and events
    def _tell(self, host: str, before: RunProgress | None, share: RunProgress) -> None:
        """What a share says of itself is told once; to scripts its figures too."""
        if not self._as_json:
            if share.detail and (before is None or before.detail != share.detail):
                err.print(f"[{host}/{share.server}] {share.detail}", markup=False)
            return
        key, now = (host, share.server), time.monotonic()
        says_the_same = before is not None and _words(before) == _words(share)
        if says_the_same and (before == share or now - self._told[key] < TOLD_SECONDS):
            return
        self._told[key] = now
        figures = {name: value for name, value in to_json(share).items() if name != "notes"}
        out.print(json.dumps({"host": host, "event": "progress", **figures}), markup=False)

    def _tell_totals(self) -> None:
        if self._as_json:
            run = next(iter(self._shares.values())).run
            out.print(json.dumps({"event": "totals", "run": run, **to_json(self._totals())}), markup=False)
        else:
            err.print(self._text(), markup=False)

    def _totals(self) -> RunTotals:
        return self._corrected(totals_of(list(self._shares.values()), moves=self._moves))

    def _text(self) -> str:
        totals = self._totals()
        quiet = time.monotonic() - self._moved
        if quiet < QUIET_SECONDS or totals.settled >= totals.samples:
            return totals.text()
        dead = next(((host, share) for (host, _), share in sorted(self._shares.items()) if share.dead_launch), None)
        if dead is not None:
            where = f"--host {dead[0]} --server {server_of(dead[1].server)}"
            return f"{totals.text()}; no sample for {duration(quiet)}: a server is dead; fleetdump restart {where}"
        if not any(share.state == "running" for share in self._shares.values()):
            return f"{totals.text()}; no sample for {duration(quiet)}: {self._before_work()}"
        return f"{totals.text()}; no sample for {duration(quiet)}: fleetdump diagnose says what the server does"

    def _before_work(self) -> str:
        """What the shares are at while none of them sends anything."""
        at_work = [(host, share) for (host, _), share in sorted(self._shares.items()) if share.state not in FINISHED]
        (host, first), more = at_work[0], len(at_work) - 1
        told = f" ({first.detail})" if first.detail else ""
        others = f"; {count(more, 'other share')} at work on nothing either" if more else ""
        return f"{host}/{first.server} {PHASES.get(first.state, first.state)}{told}{others}"

    def _render(self) -> Group:
        with self._lock:
            hosts: dict[str, list[RunProgress]] = {}
            for (host, _), share in sorted(self._shares.items()):
                hosts.setdefault(host, []).append(share)
            if not hosts:
                return Group()
            totals = Text(visible(self._text()), style="bold")
        blocks = [list(host_lines(host, shares)) for host, shares in hosts.items()]
        room = err.size.height - SPARE_LINES
        if sum(map(len, blocks)) > room:
            blocks.sort(key=len, reverse=True)  # those that have something to say
        shown = [block for n, block in enumerate(blocks) if sum(map(len, blocks[: n + 1])) <= room]
        left = len(blocks) - len(shown)
        more = [Text(f"and {count(left, 'more host')}", style="dim")] if left else []
        return Group(totals, *(line for block in shown for line in block), *more)


def host_lines(host: str, shares: Sequence[RunProgress]) -> Iterator[Text]:
    """A line for the host, and one for each of its shares that has something to say."""
    yield _line(f"[bold]{quoted(host)}[/] {quoted(totals_of(shares).text())}")
    for share in shares:
        if share.detail:
            yield _line(f"  [yellow]{quoted(share.server)}: {quoted(share.detail)}[/]")
        if share.last_error and share.state not in FINISHED:
            yield _line(f"  [dim]{quoted(share.server)}: last error: {quoted(share.last_error)}[/]")


def _line(markup: str) -> Text:
    return Text.from_markup(visible(markup), emoji=False, overflow="ellipsis")


def _words(share: RunProgress) -> tuple[object, ...]:
    """What of a share is told at once when it changes."""
    return share.state, share.detail, share.order, share.whole_run, share.last_error, share.driver_alive


def _per_second(rate: float) -> str:
    return f"{rate / 1e9:.2f} GB/s" if rate >= 1e7 or not rate else f"{rate / 1e6:.2g} MB/s"
