"""``fleetdump selfcheck``: prove what servers capture, with a few prompts each."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from fleetdump.agent.runmessages import SelfCheckArgs, SelfCheckResult
from fleetdump.errors import ExitCode, HostError
from fleetdump.fleet import Host
from fleetdump.tasks._task import task

DEADLINE = 600.0
"""Seconds for one server: the first long prompt may compile kernels for minutes."""


@dataclass
class ServerCheck:
    """One server's self-check: its result, or why there is none and what to do."""

    server: str
    result: SelfCheckResult | None = None
    error: str = ""
    next_step: str = ""

    @property
    def passed(self) -> bool:
        return self.result is not None and self.result.passed


@task
def selfcheck(host: Host, servers: list[str], on_event: Callable[[dict[str, Any]], None]) -> list[ServerCheck]:
    """Check the named servers of the host (all of its inventory when there are none), each whatever becomes of the
    others. Raises ``UsageError`` for a name that the inventory does not have, or when it does not say what to capture.
    """
    names = servers or [server.name for server in host.config.servers]
    for name in names:
        host.config.server(name)

    def check(name: str) -> ServerCheck:
        try:
            return ServerCheck(name, check_server(host, name, on_event))
        except HostError as error:
            return ServerCheck(name, None, str(error), error.next_step)

    with ThreadPoolExecutor(max_workers=max(1, len(names))) as pool:
        return list(pool.map(check, names))


def check_server(host: Host, server: str, on_event: Callable[[dict[str, Any]], None]) -> SelfCheckResult:
    """Send the prompts and judge; a check that fails is a result, one that cannot be made a ``HostError``."""
    on_event({"event": "step", "step": "selfcheck", "server": server, "text": f"self-check of {server}"})
    args = SelfCheckArgs(server=server, capture=host.config.capture.spec())
    return host.call(args, SelfCheckResult, verb="selfcheck", deadline=DEADLINE)


def exit_code(checks: list[ServerCheck]) -> ExitCode:
    """1 when a server's check failed or could not be made."""
    return ExitCode.OK if all(check.passed for check in checks) else ExitCode.FAILED
