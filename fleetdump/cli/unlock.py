"""``fleetdump unlock``."""

from __future__ import annotations

import click

from fleetdump.cli._fleet import FleetOptions, Verb, fleet_options, run
from fleetdump.tasks.unlock import exit_code
from fleetdump.tasks.unlock import unlock as unlock_on
from fleetdump.views.console import err
from fleetdump.views.locks import show_unlock


@click.command(short_help="Who holds a host's lock; removes a dead one.")
@click.option("--force", is_flag=True, help="Remove it also from somebody who lives and goes on changing the host.")
@fleet_options
def unlock(options: FleetOptions, force: bool) -> None:
    """Show who holds the lock of each host, with what and since when; remove it when its holder is dead.

    A dead holder's lock is taken over by the next command anyway: this is for a look, for what stands in the lock's
    place and is none, and, with --force, for a holder that lives and is stuck. Exit code 5 while it is held.

    \b
    Examples:
      fleetdump unlock --host gpu01
      fleetdump unlock --host gpu01 --force
    """
    if force:
        err.print(
            "warning: whoever holds the lock is not ended; if they still change the host, two do so at once",
            style="yellow",
        )
    run(
        options,
        Verb("unlock", show_unlock, code=exit_code, read_only=not force, deadline=60.0),
        lambda host: unlock_on(host, force),
    )
