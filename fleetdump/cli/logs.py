"""``fleetdump logs``."""

from __future__ import annotations

from dataclasses import replace

import click

from fleetdump.agent.servermessages import LogsResult
from fleetdump.agent.specs import PHASES
from fleetdump.cli._fleet import FleetOptions, ServerName, Verb, fleet_options, run
from fleetdump.fleet.fanout import MAX_THREADS
from fleetdump.tasks.server import FOLLOW_LIMIT, LogView
from fleetdump.tasks.server import logs as logs_of
from fleetdump.views.console import out
from fleetdump.views.interrupts import show_nothing_cut


@click.command(short_help="Last lines of a server's log; -f follows.")
@click.option("--server", type=ServerName(), default="", help="Server name; may be left out where the host has one.")
@click.option(
    "-n", "--lines", type=click.IntRange(0, 100_000), default=50, show_default=True, help="So many of the last lines."
)
@click.option("-f", "--follow", is_flag=True, help="Go on with new lines until Ctrl-C.")
@click.option("--rank", type=click.IntRange(0), default=None, help="Only lines of this tensor-parallel rank.")
@click.option("--phase", type=click.Choice(PHASES), default=None, help="Only lines logged in this phase of the start.")
@fleet_options
def logs(options: FleetOptions, server: str, lines: int, follow: bool, rank: int | None, phase: str | None) -> None:
    """Show the log of a server on each chosen host, each line with its host in front.

    \b
    Examples:
      fleetdump logs --host gpu01 -f
      fleetdump logs --host @small --rank 3 --phase weights -n 200
    """
    if follow and options.as_json:
        raise click.UsageError("--follow prints lines as they come: it cannot be had as --json")

    def show(host: str, result: LogsResult) -> None:
        for line in result.tail:
            print_line(host, line)

    def print_line(host: str, line: str) -> None:
        out.print(f"[{host}] {line}", markup=False)

    if follow:  # each host is followed to the end: none may wait for another's turn
        options = replace(options, jobs=MAX_THREADS)
    view = LogView(server, lines, follow, -1 if rank is None else rank, phase or "")
    run(
        options,
        Verb(
            "logs",
            show,
            read_only=True,
            deadline=FOLLOW_LIMIT + 60,
            recap=False,
            interrupted=show_nothing_cut if follow else None,
        ),
        lambda host: logs_of(host, view, lambda line: print_line(host.config.name, line)),
    )
