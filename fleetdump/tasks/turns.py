"""Starting several things on a host, a few at a time."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

S = TypeVar("S")
R = TypeVar("R")


def in_turns(
    limit: int,
    starts: Sequence[Callable[[], S | None]],
    follow: Callable[[S], R],
    on_wait: Callable[[], None] = lambda: None,
) -> list[R]:
    """Call ``starts`` one after the other, in this thread, and ``follow`` what each has started in a thread of its own;
    at most ``limit`` are followed at a time. What ``follow`` returns, in the order of ``starts``, without those that
    started nothing (None).

    ``on_wait`` is called once, when a start has to wait for the end of another for the first time. What ``starts`` or
    ``follow`` raise ends the starting, and is raised when all that were begun have ended.
    """
    free = threading.Semaphore(limit)
    followed = []

    def follow_one(started: S) -> R:
        try:
            return follow(started)
        finally:
            free.release()

    waited = False
    with ThreadPoolExecutor(max_workers=limit) as pool:
        for start in starts:
            if not free.acquire(blocking=False):
                if not waited:
                    waited = True
                    on_wait()
                free.acquire()
            started = start()
            if started is None:
                free.release()
            else:
                followed.append(pool.submit(follow_one, started))
    return [one.result() for one in followed]
