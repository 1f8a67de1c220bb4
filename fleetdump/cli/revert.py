"""``fleetdump revert``."""

from __future__ import annotations

import click

from fleetdump.agent.patchmessages import RevertResult
from fleetdump.cli._fleet import FleetOptions, Verb, event_printer, fleet_options, lock_wait_option, run
from fleetdump.tasks.revert import revert as revert_on
from fleetdump.views.console import count, out


def _show(host: str, results: list[RevertResult]) -> None:
    for result in results:
        if result.changed:
            text = f"reverted, byte for byte: {count(len(result.verified), 'file')}"
        else:
            text = f"nothing to revert ({result.after.state})"
        out.print(f"{host}: {text}", markup=False)


@click.command(short_help="Restore SGLang byte for byte.")
@click.option("--force", is_flag=True, help="Also files that somebody edited after our patch; a copy is kept there.")
@lock_wait_option
@fleet_options
def revert(options: FleetOptions, force: bool) -> None:
    """Take our patch out of SGLang again and verify the restored files.

    \b
    Example:
      fleetdump revert --host gpu01
    """
    run(
        options,
        Verb("revert", _show, deadline=300.0),
        lambda host: revert_on(host, event_printer(host.config.name), force),
    )
