"""``fleetdump selfcheck``."""

from __future__ import annotations

import click

from fleetdump.cli._fleet import FleetOptions, ServerName, Verb, event_printer, fleet_options, run
from fleetdump.tasks.selfcheck import DEADLINE, exit_code
from fleetdump.tasks.selfcheck import selfcheck as check_servers
from fleetdump.views.selfcheck import show_checks


@click.command(short_help="Prove with a few prompts that what is captured is right.")
@click.option(
    "--server",
    "servers",
    type=ServerName(),
    multiple=True,
    help="Only this server; may be repeated. Default: all of the host.",
)
@fleet_options
def selfcheck(options: FleetOptions, servers: tuple[str, ...]) -> None:
    """Send a few prompts to running servers and check what their taps write: every row, under the right ids, the same
    on all ranks and in all batches, and the server's own next tokens from the final state.

    deploy does the same. What fails is named with its likely cause, and that server gets no work from extract until a
    check passes. The prompts' tensors are removed at the end. Exit code 1 when a check failed.

    \b
    Examples:
      fleetdump selfcheck --host gpu01
      fleetdump selfcheck --host @small --server r0 --json
    """
    run(
        options,
        Verb("selfcheck", show_checks, code=exit_code, deadline=DEADLINE + 60),
        lambda host: check_servers(host, list(servers), event_printer(host.config.name)),
    )
