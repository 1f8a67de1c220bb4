"""``fleetdump check``."""

from __future__ import annotations

from typing import get_args

import click

from fleetdump.agent.protocol import ProbeResult
from fleetdump.cli._fleet import FleetOptions, Verb, fleet_options, run
from fleetdump.errors import ExitCode
from fleetdump.patches import find_patch, load_patch
from fleetdump.tasks.check import check as check_host
from fleetdump.tasks.deploy import Delivery
from fleetdump.views.hosts import show_findings, show_probe


def _code(probe: ProbeResult) -> ExitCode:
    return ExitCode.FAILED if any(f.level == "blocker" for f in probe.findings) else ExitCode.OK


@click.command(short_help="Would a deploy work? Nothing is changed.")
@click.option("--patch", default="hidden-states", show_default=True, help="Patch (name or folder) that must apply.")
@click.option("--no-patch", is_flag=True, help="Check for a server without a patch.")
@click.option(
    "--delivery",
    type=click.Choice(get_args(Delivery)),
    default="in-place",
    show_default=True,
    help="How the patch is to come into the engine (see deploy).",
)
@fleet_options
def check(options: FleetOptions, patch: str, no_patch: bool, delivery: Delivery) -> None:
    """Reach each host and check python, SGLang, patch, model, port, disk, memory and tools.

    \b
    Example:
      fleetdump check --host gpu[01-08]
    """
    spec = None if no_patch else load_patch(find_patch(patch))
    run(
        options,
        Verb("check", show_probe, show_findings, code=_code, read_only=True, deadline=120.0),
        lambda host: check_host(host, spec, delivery=delivery),
    )
