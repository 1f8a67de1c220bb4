"""``fleetdump deploy``."""

from __future__ import annotations

from typing import get_args

import click

from fleetdump.cli._fleet import FleetOptions, Verb, event_printer, fleet_options, lock_wait_option, run
from fleetdump.cli._patch import PatchChoice, patch_options
from fleetdump.tasks.deploy import WATCH_LIMIT, DeployPlan, DeployReport, OnStall
from fleetdump.tasks.deploy import deploy as deploy_host
from fleetdump.views.hosts import show_deploy


@click.command(short_help="Patch, launch, watch, self-check.")
@patch_options
@click.option("--replace", is_flag=True, help="Stop our own running server first.")
@click.option(
    "--on-stall",
    type=click.Choice(get_args(OnStall)),
    default="keep",
    show_default=True,
    help="After the evidence is taken: keep the server for a look, stop it, or stop it and revert the patch.",
)
@click.option("--force", is_flag=True, help="Patch files of SGLang that somebody else edited; revert gives them back.")
@click.option("--no-selfcheck", is_flag=True, help="Do not send the few prompts that prove the captured numbers.")
@lock_wait_option
@fleet_options
def deploy(
    options: FleetOptions,
    choice: PatchChoice,
    replace: bool,
    on_stall: OnStall,
    force: bool,
    no_selfcheck: bool,
) -> None:
    """Bring every server of the chosen hosts up, patched, and prove it.

    A server counts as ready when its port answers, SGLang says so, and every rank shows the patch's mark and the
    expected model class. One that makes no progress is diagnosed at once (exit code 4).

    \b
    Examples:
      fleetdump deploy --host gpu01
      fleetdump deploy --replace --on-stall revert
      fleetdump deploy --patch ./patches/mine --no-selfcheck
      fleetdump deploy --delivery import-hook
    """
    plan = DeployPlan(choice.spec, replace, on_stall, not no_selfcheck, choice.delivery, force)
    run(
        options,
        Verb("deploy", show_deploy, code=DeployReport.exit_code, deadline=WATCH_LIMIT + 900),
        lambda host: deploy_host(host, plan, event_printer(host.config.name)),
    )
