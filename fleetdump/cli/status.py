"""``fleetdump status``."""

from __future__ import annotations

import click

from fleetdump.agent.hostmessages import StatusResult
from fleetdump.cli._fleet import FleetOptions, Verb, fleet_options, run
from fleetdump.errors import ExitCode
from fleetdump.tasks.server import status as status_of
from fleetdump.views.status import show_statuses


def _show(_host: str, _status: StatusResult) -> None:
    """All hosts are shown together, in columns."""


@click.command(short_help="Servers, runs and patch of each host.")
@fleet_options
def status(options: FleetOptions) -> None:
    """Show everything of ours on each host: a line a server (state, phase, uptime, patch, capture rate, queue of what
    waits for the disk, disk left, errors), and the runs. `fleetdump watch` shows the same as it changes.
    Exit code 1 when a server has died.

    \b
    Example:
      fleetdump status --host @small
    """
    run(options, Verb("status", _show, show_all=show_statuses, code=_code, read_only=True, deadline=60.0), status_of)


def _code(found: StatusResult) -> ExitCode:
    """A dead server has failed, as ``deploy`` and ``diagnose`` say too."""
    return ExitCode.FAILED if any(server.state == "died" for server in found.servers) else ExitCode.OK
