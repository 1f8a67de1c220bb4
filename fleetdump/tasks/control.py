"""``attach``, ``pause``, ``resume``, ``cancel``: watch a run that goes on by itself, or tell its drivers what to do."""

from __future__ import annotations

from collections.abc import Callable

from fleetdump.agent.runmessages import OrderArgs, OrderResult, RunProgress
from fleetdump.errors import HostError
from fleetdump.fleet import Host
from fleetdump.tasks._task import task
from fleetdump.tasks.extract import follow

DEADLINE = 60.0


@task
def order(host: Host, run: str, what: str, *, whole_run: bool = True) -> list[RunProgress]:
    """Tell the drivers of ``run`` on this host to ``pause``, ``resume`` or ``cancel``; the state of its shares, none
    for a host that has no part in the run. ``whole_run``: all hosts are told; a pause of some alone has them leave."""
    try:
        return host.call(OrderArgs(run, what, whole_run), OrderResult, verb="order", deadline=DEADLINE).shares
    except HostError as error:
        return _no_part(error)


@task
def attach(host: Host, run: str, on_progress: Callable[[str, RunProgress], None]) -> list[RunProgress]:
    """Watch the host's shares of the run until all are done or failed, and change nothing: dead drivers stay dead."""
    try:
        return follow(host, run, on_progress, revive=False)
    except HostError as error:
        return _no_part(error)


def _no_part(error: HostError) -> list[RunProgress]:
    if error.code != "not_found":
        raise error
    return []
