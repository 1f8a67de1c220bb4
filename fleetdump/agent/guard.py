"""Calls that may block for ever in the kernel, each given up after a time limit.

Reading another process's memory through /proc (its command line, its environment) takes that process's memory lock,
and ``stat`` on a dead network mount never returns: no signal but SIGKILL ends such a call. It is made in a helper
thread, which is left behind when it does not come back. On a host with too much to do that thread may not have run
yet: that says nothing about the kernel, so it is given more time.
"""

from __future__ import annotations

import contextlib
import queue
import threading
from typing import Any, Callable, Optional, TypeVar

T = TypeVar("T")

STARVED_LIMITS = 6
"""So many limits long a helper is waited for that has not been given a processor or the interpreter."""


class Stuck(Exception):
    """The call did not return within its limit; its thread waits on in the kernel and ends with the process."""


class Guard:
    """Makes calls for one thread, one after another, in a helper thread that is kept between them: a call costs some
    50 microseconds. ``limit`` is in seconds."""

    def __init__(self, limit: float) -> None:
        self._limit = limit
        self._helper: Optional[threading.Thread] = None
        self._inbox: queue.SimpleQueue[Any] = queue.SimpleQueue()

    def call(self, function: Callable[[], T]) -> T:
        """The value of ``function``; raises what it raises, or ``Stuck``."""
        if self._helper is None or not self._helper.is_alive():  # none yet, or we are a fork that has no threads
            self._inbox = queue.SimpleQueue()
            self._helper = threading.Thread(target=_serve, args=(self._inbox,), name="guarded", daemon=True)
            self._helper.start()
        outcome: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._inbox.put((function, outcome))
        value, error = self._wait(outcome)
        if error is not None:
            raise error
        result: T = value
        return result

    def _wait(self, outcome: queue.SimpleQueue[Any]) -> Any:
        for _ in range(STARVED_LIMITS):
            with contextlib.suppress(queue.Empty):
                return outcome.get(timeout=self._limit)
            if not _is_starved(self._helper):
                break
        self._inbox.put(None)
        self._helper = None
        raise Stuck(f"no answer within {self._limit:g} s")

    def close(self) -> None:
        """Let the helper end."""
        self._inbox.put(None)
        self._helper = None


def _is_starved(helper: Optional[threading.Thread]) -> bool:
    """Whether the thread waits for a processor (it can run) or for the interpreter (a futex), not for the kernel."""
    task = f"/proc/self/task/{getattr(helper, 'native_id', 0)}"
    try:
        with open(f"{task}/stat") as stat, open(f"{task}/wchan") as wchan:
            return stat.read().rpartition(")")[2].split()[0] == "R" or wchan.read().startswith("futex")
    except (OSError, IndexError):
        return False


def _serve(inbox: queue.SimpleQueue[Any]) -> None:
    while True:
        job = inbox.get()
        if job is None:
            return
        function, outcome = job
        try:
            outcome.put((function(), None))
        except Exception as error:  # handed to whoever asked
            outcome.put((None, error))
