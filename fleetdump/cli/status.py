"""``fleetdump status``."""

from __future__ import annotations

import click

from fleetdump.agent.protocol import StatusResult
from fleetdump.cli._fleet import FleetOptions, Verb, fleet_options, run
from fleetdump.errors import ExitCode
from fleetdump.tasks.server import status as status_of
from fleetdump.views.hosts import show_status


@click.command(short_help="Servers, runs and patch of each host.")
@fleet_options
def status(options: FleetOptions) -> None:
    """Show everything of ours on each host: servers, runs, patch, disk used. Exit code 1 when a server has died.

    \b
    Example:
      fleetdump status --host @small
    """
    run(options, Verb("status", show_status, code=_code, read_only=True, deadline=60.0), status_of)


def _code(found: StatusResult) -> ExitCode:
    """A dead server has failed, as ``deploy`` and ``diagnose`` say too."""
    return ExitCode.FAILED if any(server.state == "died" for server in found.servers) else ExitCode.OK
