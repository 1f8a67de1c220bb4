"""``fleetdump status``."""

from __future__ import annotations

import click

from fleetdump.cli._fleet import FleetOptions, Verb, fleet_options, run
from fleetdump.tasks.server import status as status_of
from fleetdump.views.hosts import show_status


@click.command(short_help="Servers, runs and patch of each host.")
@fleet_options
def status(options: FleetOptions) -> None:
    """Show everything of ours on each host: servers, runs, patch, disk used.

    \b
    Example:
      fleetdump status --host @small
    """
    run(options, Verb("status", show_status, read_only=True, deadline=60.0), status_of)
