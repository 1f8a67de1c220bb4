"""``fleetdump check``."""

from __future__ import annotations

import click

from fleetdump.agent.protocol import ProbeResult
from fleetdump.cli._fleet import FleetOptions, Verb, fleet_options, run
from fleetdump.cli._patch import PatchChoice, patch_options
from fleetdump.errors import ExitCode
from fleetdump.tasks.check import check as check_host
from fleetdump.views.hosts import show_findings, show_probe


def _code(probe: ProbeResult) -> ExitCode:
    return ExitCode.FAILED if any(f.level == "blocker" for f in probe.findings) else ExitCode.OK


@click.command(short_help="Would a deploy work? Nothing is changed.")
@patch_options
@fleet_options
def check(options: FleetOptions, choice: PatchChoice) -> None:
    """Reach each host and check python, SGLang, patch, model, port, disk, memory and tools.

    \b
    Example:
      fleetdump check --host gpu[01-08]
    """
    run(
        options,
        Verb("check", show_probe, show_findings, code=_code, read_only=True, deadline=120.0),
        lambda host: check_host(host, choice.spec, delivery=choice.delivery),
    )
