"""``fleetdump revert``: the engine as it was shipped, byte for byte."""

from __future__ import annotations

from fleetdump.agent.hostmessages import StatusArgs, StatusResult
from fleetdump.agent.patchmessages import RevertResult
from fleetdump.errors import HostError
from fleetdump.fleet import Host
from fleetdump.tasks._task import task
from fleetdump.tasks.deploy import revert_patch
from fleetdump.tasks.steps import Event


@task
def revert(host: Host, on_event: Event, force: bool = False) -> list[RevertResult]:
    """Revert every engine of the host; raises ``HostError`` (conflict) while a server of ours runs on it, or anybody
    else's runs what the patch made."""
    status = host.call(StatusArgs(), StatusResult, verb="status")
    alive = [server for server in status.servers if server.state in ("starting", "ready")]
    if alive:
        names = ", ".join(f"{server.name} (pid {server.pid})" for server in alive)
        raise HostError(
            "the patch is in use",
            host.config.name,
            f"running: {names}",
            "fleetdump stop first, then fleetdump revert",
            code="conflict",
        )
    return revert_patch(host, on_event, force)
