"""``fleetdump verify``: is what the runs wrote on a host there and right?"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fleetdump.agent.runmessages import VerifyArgs, VerifyResult
from fleetdump.errors import HostError
from fleetdump.fleet import Host
from fleetdump.tasks._task import task

DEADLINE = 7 * 86400.0


@task
def verify(host: Host, run: str, repair: bool, on_event: Callable[[dict[str, Any]], None]) -> VerifyResult:
    """Check every byte of ``run`` (empty: of each run) where it lies; ``repair``: finish torn shards first. Nothing
    for a host that has no part in ``run``. Raises what ``Host.call`` raises."""
    try:
        return host.call(VerifyArgs(run, repair), VerifyResult, verb="verify", on_event=on_event, deadline=DEADLINE)
    except HostError as error:
        if error.code != "not_found":
            raise
        return VerifyResult([])
