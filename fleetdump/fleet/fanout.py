"""The same work on many hosts at once, in which a dead host delays and hides no other."""

from __future__ import annotations

import collections
import contextlib
import queue
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, TypeVar

from fleetdump.errors import FleetdumpError, HostError, UnreachableError, of_local_file
from fleetdump.fleet.host import ConnectOptions, Host, connect

if TYPE_CHECKING:
    from fleetdump.inventory import HostConfig

R = TypeVar("R")

MAX_THREADS = 128
"""Hosts that may be connecting or at work at a time; what ``limit`` bounds is the work alone, so that hosts which
never answer do not take the places of those that do."""

CONNECT_FACTOR = 6
"""Connecting may take this many times ``connect_timeout`` in all: TCP, handshake, login, jump hosts, retries."""


@dataclass(frozen=True)
class Outcome(Generic[R]):
    """What became of one host: ``value``, or ``error`` when it is not None. ``seconds`` counts from its connect."""

    value: R | None
    error: FleetdumpError | None
    seconds: float


def fan_out(
    configs: Sequence[HostConfig],
    function: Callable[[Host], R],
    *,
    limit: int = 32,
    deadline: float = 600.0,
    options: ConnectOptions | None = None,
    on_outcome: Callable[[str, Outcome[R]], None] | None = None,
    later: Callable[[], Sequence[HostConfig]] = lambda: (),
) -> dict[str, Outcome[R]]:
    """Connect to every host and run ``function`` there, on at most ``limit`` at a time; outcomes by host name, in the
    order of ``configs``.

    Each host has ``deadline`` seconds of its own for ``function``. One that does not return by then is reported as
    timed out, its connection is closed and its thread is left behind. ``on_outcome`` is called in this thread as each
    host ends. ``later`` is asked in this thread, about twice a second, which hosts are to begin now, for the first
    time or once more after they ended; when none is at work and none is to begin, that was all. An interrupt (Ctrl-C)
    closes all connections, which ends the agents, and is raised again.
    """
    fleet = _Fleet(function, limit, deadline, options or ConnectOptions())
    try:
        for name, outcome in fleet.outcomes(configs, later):
            if on_outcome is not None:
                on_outcome(name, outcome)
    except BaseException:
        fleet.abandon_all()
        raise
    return {name: fleet.done[name] for name in dict.fromkeys([*(config.name for config in configs), *fleet.done])}


class _Job(Generic[R]):
    """One host's thread. ``expires`` is a ``time.monotonic()`` value, None while the host waits for its turn."""

    def __init__(self, fleet: _Fleet[R], config: HostConfig):
        self.config = config
        self.started = time.monotonic()
        self.expires: float | None = self.started + CONNECT_FACTOR * config.connect_timeout
        self._fleet = fleet
        self._host: Host | None = None
        self._working = False
        self._given_up = False
        self._lock = threading.Lock()
        # A daemon: a thread that never returns must not keep the process from ending.
        threading.Thread(target=self._run, name=f"host-{config.name}", daemon=True).start()

    def _run(self) -> None:
        value, error = None, None
        try:
            value = self._work()
        except FleetdumpError as known:
            error = known
        except Exception as unknown:
            error = _unexpected(self.config.name, unknown)
        finally:
            self._stop_working()
        self._fleet.ended.put((self, Outcome(value, error, time.monotonic() - self.started)))

    def _work(self) -> R:
        with connect(self.config, self._fleet.options) as host:
            self._host = host
            self.expires = None
            self._fleet.turns.acquire()
            with self._lock:
                self._working = True
            self.expires = time.monotonic() + self._fleet.deadline
            if self._given_up:
                raise UnreachableError("given up", self.config.name)
            return self._fleet.function(host)

    def give_up(self) -> Outcome[R]:
        """Stop waiting for this host."""
        self._given_up = True
        working = self._working
        self._stop_working()
        if self._host is not None:
            # In a thread: closing a connection whose peer is gone may block as well.
            threading.Thread(target=self._close, daemon=True).start()
        what = f"no end within {self._fleet.deadline:.0f} s" if working else "the connection did not come about in time"
        error = UnreachableError(what, self.config.name, next_step="look at the host; the others are not affected")
        return Outcome(None, error, time.monotonic() - self.started)

    def _close(self) -> None:
        with contextlib.suppress(Exception):
            if self._host is not None:
                self._host.close()

    def _stop_working(self) -> None:
        with self._lock:
            if self._working:
                self._working = False
                self._fleet.turns.release()


class _Fleet(Generic[R]):
    """The hosts of one ``fan_out``: who waits, who runs, who is done."""

    def __init__(self, function: Callable[[Host], R], limit: int, deadline: float, options: ConnectOptions):
        self.function = function
        self.deadline = deadline
        self.options = options
        self.turns = threading.Semaphore(limit)
        self.ended: queue.Queue[tuple[_Job[R], Outcome[R]]] = queue.Queue()
        self.done: dict[str, Outcome[R]] = {}
        self._running: dict[str, _Job[R]] = {}

    def outcomes(
        self, configs: Sequence[HostConfig], later: Callable[[], Sequence[HostConfig]]
    ) -> Iterator[tuple[str, Outcome[R]]]:
        """Start and collect until every host has an outcome, and none comes later."""
        waiting = collections.deque(configs)
        while True:
            waiting.extend(later())
            if not (waiting or self._running):
                return
            while waiting and len(self._running) < MAX_THREADS:
                config = waiting.popleft()
                self._running[config.name] = _Job(self, config)
            yield from self._collect()

    def _collect(self) -> Iterator[tuple[str, Outcome[R]]]:
        with contextlib.suppress(queue.Empty):
            job, outcome = self.ended.get(timeout=0.5)
            if self._running.get(job.config.name) is job:
                yield self._record(job, outcome)
        now = time.monotonic()
        for job in [job for job in self._running.values() if job.expires is not None and job.expires < now]:
            yield self._record(job, job.give_up())

    def _record(self, job: _Job[R], outcome: Outcome[R]) -> tuple[str, Outcome[R]]:
        del self._running[job.config.name]
        self.done[job.config.name] = outcome
        return job.config.name, outcome

    def abandon_all(self) -> None:
        for job in self._running.values():
            job.give_up()


def _unexpected(name: str, error: Exception) -> FleetdumpError:
    if isinstance(error, OSError) and error.filename:
        return of_local_file(error, name)
    place = traceback.extract_tb(error.__traceback__)[-1]
    return HostError(
        f"{type(error).__name__}: {error}",
        name,
        f"at {place.filename}:{place.lineno}",
        "report this: it is a defect of fleetdump",
        code="bug",
    )
