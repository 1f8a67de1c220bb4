"""``fleetdump audit``."""

from __future__ import annotations

import click

from fleetdump.cli._fleet import FleetOptions, Verb, fleet_options, run
from fleetdump.tasks.server import audit as audit_of
from fleetdump.views.hosts import show_audit


@click.command(short_help="Who changed each host, when, and how it ended.")
@click.option("-n", "entries", type=click.IntRange(1, 100_000), default=20, show_default=True, help="Latest changes.")
@fleet_options
def audit(options: FleetOptions, entries: int) -> None:
    """Show the latest changes of each host from its audit log, and who changes it at this moment.

    \b
    Example:
      fleetdump audit --host gpu01 -n 50
    """
    run(options, Verb("audit", show_audit, read_only=True, deadline=60.0), lambda host: audit_of(host, entries))
