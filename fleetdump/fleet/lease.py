"""A host that is held for as long as one command works on it, whatever becomes of this process."""

from __future__ import annotations

import contextlib
import queue
import secrets
import threading
from collections.abc import Iterator
from typing import Any

from fleetdump.agent.protocol import HoldArgs, HoldResult, ReleaseArgs, ReleaseResult
from fleetdump.errors import FleetdumpError
from fleetdump.fleet.host import Host


@contextlib.contextmanager
def held(host: Host, verb: str, deadline: float) -> Iterator[None]:
    """Hold ``host`` for at most ``deadline`` seconds: other operators' changes are refused, or wait, and are told that
    ``verb`` is at work. Calls of ``host`` inside belong to it.

    Raises what ``Host.call`` raises, ``LockedError`` naming the holder among it. A connection that breaks meanwhile
    ends the hold, and shows in the next call.
    """
    lease = secrets.token_hex(8)
    answers: queue.Queue[Exception | None] = queue.Queue()

    def on_event(event: dict[str, Any]) -> None:
        if event.get("event") == "held":
            answers.put(None)

    def hold() -> None:
        try:
            host.call(HoldArgs(lease, verb), HoldResult, verb="hold", on_event=on_event, deadline=deadline)
        except Exception as error:  # handed to whoever waits for the answer
            answers.put(error)

    # A daemon: a connection that does not close must not keep the process from ending.
    threading.Thread(target=hold, name=f"hold-{host.config.name}", daemon=True).start()
    error = answers.get()
    if error is not None:
        raise error
    try:
        with host.under(lease):
            yield
    finally:
        with contextlib.suppress(FleetdumpError):  # a host that cannot be told finds out by itself
            host.call(ReleaseArgs(lease), ReleaseResult, verb="release")
