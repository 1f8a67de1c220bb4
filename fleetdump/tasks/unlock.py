"""``fleetdump unlock``: who holds a host's lock, and the end of one that nobody alive holds."""

from __future__ import annotations

from fleetdump.agent.hostmessages import UnlockArgs, UnlockResult
from fleetdump.errors import ExitCode
from fleetdump.fleet import Host
from fleetdump.tasks._task import task


@task
def unlock(host: Host, force: bool) -> UnlockResult:
    """Look at the lock, and remove it when its holder is dead; with ``force`` whoever holds it."""
    return host.call(UnlockArgs(force), UnlockResult, verb="unlock")


def exit_code(result: UnlockResult) -> ExitCode:
    """5 while it is held."""
    return ExitCode.LOCKED if result.state == "held" else ExitCode.OK
