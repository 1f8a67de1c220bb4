"""The places of one controller on all hosts of its run: one of two gets all of them, and the other gives up what it
has."""

from __future__ import annotations

import contextlib
import functools
import secrets
import threading
import time
from collections.abc import Callable, Iterator, Sequence

from fleetdump.errors import DrivenError, LockedError, UsageError
from fleetdump.fleet import Host
from fleetdump.inventory import HostConfig
from fleetdump.tasks.steering import Controller, steered
from fleetdump.tasks.survey import sight

FIRST_SECONDS = 5.0
"""For so long the other hosts wait to hear who has the first."""
YIELD_SECONDS = 60.0
"""For so long, and up to twice, who has an earlier host waits for the other one to give up a later one."""
RETRY_SECONDS = 1.0

Rank = tuple[str, int, str]


class Places:
    """The places of one controller on all ``hosts``. Of two controllers one gets them all: who has the earlier host, or
    tries it, is given the time to get the later one too, on which the other is refused in turn. So the first host is
    taken first, and of two that begin in the same moment one is refused there and takes no other. ``tell`` (host, text)
    hears of places that are lost; ``lost``: one was, or could be had only when another controller had left it, so that
    that one may have moved samples since."""

    def __init__(self, me: Controller, hosts: Sequence[HostConfig], tell: Callable[[str, str], None]):
        self._me = me
        self._first = min(map(_rank, hosts), default=None)
        self._tell = tell
        self.lost = False
        self._decided = threading.Event()
        self._refusal: DrivenError | None = None
        self._here: set[Rank] = set()
        """The hosts on which it has its place, or tries to."""

    @contextlib.contextmanager
    def on(self, host: Host) -> Iterator[None]:
        """``steered``, once it is known whether the first host is ours, or cannot be had for now.

        Raises what ``steered`` does, and ``DrivenError`` for what the host refuses inside because of another
        controller. From then on the run is the other one's: the threads of all hosts are to ``require_undisputed``.
        """
        rank = _rank(host.config)
        if rank != self._first and not self._decided.is_set():
            self._decided.wait(FIRST_SECONDS)
            self._decided.set()
        self._here.add(rank)
        try:
            with self._taken(host, rank):
                self._decided.set()
                yield
        except LockedError as error:
            if not self._is_driven(host, error):
                raise
            driven = DrivenError.of(error)
            self._refusal = self._refusal or driven
            raise driven from error
        finally:
            self._here.discard(rank)
            if rank == self._first:
                self._decided.set()

    def require_undisputed(self) -> None:
        """Raise ``DrivenError`` once another controller was found on one of the hosts: it drives the run, what it does
        makes our ledger old, and no place is to be kept from it."""
        if self._refusal is not None:
            raise DrivenError.of(self._refusal)

    @property
    def disputed(self) -> bool:
        """Whether ``require_undisputed`` would raise."""
        return self._refusal is not None

    @contextlib.contextmanager
    def _taken(self, host: Host, rank: Rank) -> Iterator[None]:
        """``steered``, tried for a while where another controller is that has no earlier host."""
        # Two may wait for each other, where neither reaches the other's earlier host: one has the longer patience.
        give_up = time.monotonic() + YIELD_SECONDS * secrets.SystemRandom().uniform(1, 2)
        with contextlib.ExitStack() as place:
            while True:
                self.require_undisputed()
                try:
                    place.enter_context(steered(host, self._me, functools.partial(self._lose, host.config.name)))
                    break
                except DrivenError as error:
                    if min(tuple(self._here)) == rank or time.monotonic() > give_up:
                        raise
                    if not self.lost:
                        text = f"{error.what}, {error.why}: asking again for a while, since that one may give way"
                        self._tell(host.config.name, text)
                self.lost = True
                time.sleep(RETRY_SECONDS)
            self.require_undisputed()
            yield

    def _is_driven(self, host: Host, error: LockedError) -> bool:
        """Whether the host refused because another controller has the run there, with whatever data."""
        if isinstance(error, DrivenError):
            return True
        try:
            return sight(host, self._me.run, self._me).driven is not None
        except UsageError:
            return True

    def _lose(self, name: str, text: str) -> None:
        self.lost = True
        self._tell(name, text)


def _rank(host: HostConfig) -> Rank:
    """By address: two inventories may call the same hosts by other names."""
    return host.address, host.port or 0, host.name
