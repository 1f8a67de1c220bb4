"""Whether a host has the servers that a command names."""

from __future__ import annotations

from collections.abc import Iterable

from fleetdump.agent.hostmessages import StatusArgs, StatusResult
from fleetdump.fleet import Host


def require_known(host: Host, servers: Iterable[str]) -> None:
    """Raise ``UsageError`` for a name that neither the host nor its inventory entry knows; also what ``Host.call``
    raises. The host is asked only about names that the inventory does not have."""
    unlisted = set(servers) - {server.name for server in host.config.servers}
    if not unlisted:
        return
    status = host.call(StatusArgs(), StatusResult, verb="status")
    for name in sorted(unlisted - {server.name for server in status.servers}):
        host.config.server(name)
