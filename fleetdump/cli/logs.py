"""``fleetdump logs``."""

from __future__ import annotations

import click

from fleetdump.agent.protocol import LogsResult
from fleetdump.cli._fleet import FleetOptions, Verb, fleet_options, run
from fleetdump.tasks.server import FOLLOW_LIMIT
from fleetdump.tasks.server import logs as logs_of
from fleetdump.views.console import out


@click.command(short_help="Last lines of a server's log; -f follows.")
@click.option("--server", default="", help="Server name; may be left out where the host has one.")
@click.option("-n", "--lines", type=click.IntRange(0, 100_000), default=50, show_default=True)
@click.option("-f", "--follow", is_flag=True, help="Go on with new lines until Ctrl-C.")
@fleet_options
def logs(options: FleetOptions, server: str, lines: int, follow: bool) -> None:
    """Show the log of a server on each chosen host.

    \b
    Example:
      fleetdump logs --host gpu01 -f
    """
    if follow and options.as_json:
        raise click.UsageError("--follow prints lines as they come: it cannot be had as --json")

    def show(host: str, result: LogsResult) -> None:
        for line in result.tail:
            print_line(host, line)

    def print_line(host: str, line: str) -> None:
        out.print(f"[{host}] {line}", markup=False)

    run(
        options,
        Verb("logs", show, read_only=True, deadline=FOLLOW_LIMIT + 60, recap=False),
        lambda host: logs_of(host, server, lines, follow, lambda line: print_line(host.config.name, line)),
    )
