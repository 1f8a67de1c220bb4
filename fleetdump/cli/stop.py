"""``fleetdump stop``."""

from __future__ import annotations

import click

from fleetdump.agent.servermessages import StopResult
from fleetdump.cli._fleet import FleetOptions, ServerName, Verb, event_printer, fleet_options, lock_wait_option, run
from fleetdump.tasks.server import stop as stop_on
from fleetdump.views.console import out, size


def _show(host: str, result: StopResult) -> None:
    words = [
        f"{label} {', '.join(names)}"
        for label, names in (("stopped", result.stopped), ("killed", result.killed), ("not running:", result.absent))
        if names
    ]
    out.print(f"{host}: {'; '.join(words) or 'nothing of ours was running'}", markup=False)
    if result.killed:
        out.print(
            "  killed: it did not end by itself within the grace; nothing that was captured is lost", markup=False
        )
    if result.gpu_freed:
        out.print(f"  {size(result.gpu_freed)} of GPU memory came free", markup=False)
    for held in result.gpu_held:
        out.print(f"  not freed: {held}", markup=False)
    for extraction in result.waiting:
        out.print(f"  extraction {extraction} waits, and goes on after the next deploy", markup=False)
    for extraction in result.left:
        out.print(f"  extraction {extraction} had left this host: its driver was ended", markup=False)


@click.command(short_help="Stop our servers.")
@click.option(
    "--server",
    "servers",
    type=ServerName(),
    multiple=True,
    help="Only this server; may be repeated. Default: all of ours.",
)
@lock_wait_option
@fleet_options
def stop(options: FleetOptions, servers: tuple[str, ...]) -> None:
    """Stop servers that fleetdump started (and no others), each verified by pid and start time.

    \b
    Example:
      fleetdump stop --host gpu01
    """
    run(
        options,
        Verb("stop", _show, deadline=180.0),
        lambda host: stop_on(host, list(servers), event_printer(host.config.name)),
    )
