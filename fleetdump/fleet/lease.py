"""A host that is held for as long as one command works on it, whatever becomes of this process."""

from __future__ import annotations

import contextlib
import queue
import secrets
import threading
from collections.abc import Callable, Iterator
from typing import Any

from fleetdump.agent.hostmessages import HoldArgs, HoldResult, ReleaseArgs, ReleaseResult
from fleetdump.errors import FleetdumpError
from fleetdump.fleet.host import Host


@contextlib.contextmanager
def held(host: Host, verb: str, deadline: float, on_lost: Callable[[str], None]) -> Iterator[None]:
    """Hold ``host`` for at most ``deadline`` seconds: other operators' changes are refused, or wait, and are told that
    ``verb`` is at work. Calls of ``host`` inside belong to it.

    Raises what ``Host.call`` raises, ``LockedError`` naming the holder among it. A hold that ends too early (taken away
    by ``unlock --force``, or its connection broke) stops nothing: ``on_lost`` is told, from another thread.
    """
    lease = secrets.token_hex(8)
    answers: queue.Queue[Exception | None] = queue.Queue()
    began, over = threading.Event(), threading.Event()

    def on_event(event: dict[str, Any]) -> None:
        if event.get("event") == "held":
            began.set()
            answers.put(None)

    def hold() -> None:
        why = "unlock --force took it away"
        try:
            host.call(HoldArgs(lease, verb), HoldResult, verb="hold", on_event=on_event, deadline=deadline)
        except Exception as error:  # handed to whoever waits for the answer
            answers.put(error)
            why = str(error)
        if began.is_set() and not over.is_set() and not host.closed:
            on_lost(f"this host is no longer held for {verb} ({why}): others may change it meanwhile")

    # A daemon: a connection that does not close must not keep the process from ending.
    threading.Thread(target=hold, name=f"hold-{host.config.name}", daemon=True).start()
    error = answers.get()
    if error is not None:
        raise error
    try:
        with host.under(lease):
            yield
    finally:
        over.set()
        with contextlib.suppress(FleetdumpError):  # a host that cannot be told finds out by itself
            host.call(ReleaseArgs(lease), ReleaseResult, verb="release")
