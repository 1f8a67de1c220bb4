"""``fleetdump deploy``."""

from __future__ import annotations

from typing import get_args

import click

from fleetdump.cli._fleet import FleetOptions, Verb, event_printer, fleet_options, run
from fleetdump.patches import find_patch, load_patch
from fleetdump.tasks.deploy import WATCH_LIMIT, Delivery, DeployPlan, DeployReport, OnStall
from fleetdump.tasks.deploy import deploy as deploy_host
from fleetdump.views.hosts import show_deploy


@click.command(short_help="Patch, launch, watch, self-check.")
@click.option("--patch", default="hidden-states", show_default=True, help="Patch (name or folder) to apply.")
@click.option("--no-patch", is_flag=True, help="Launch the engine as shipped; reverts a patch of ours.")
@click.option("--replace", is_flag=True, help="Stop our own running server first.")
@click.option(
    "--on-stall",
    type=click.Choice(get_args(OnStall)),
    default="keep",
    show_default=True,
    help="After the evidence is taken: keep the server for a look, stop it, or stop it and revert the patch.",
)
@click.option(
    "--delivery",
    type=click.Choice(get_args(Delivery)),
    default="in-place",
    show_default=True,
    help="Change SGLang's files, or none: a hook in the launched process rewrites the module as it is imported.",
)
@click.option("--force", is_flag=True, help="Patch files of SGLang that somebody else edited; revert gives them back.")
@click.option("--no-selfcheck", is_flag=True, help="Do not send the few prompts that prove the captured numbers.")
@fleet_options
def deploy(
    options: FleetOptions,
    patch: str,
    no_patch: bool,
    replace: bool,
    on_stall: OnStall,
    delivery: Delivery,
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
    spec = None if no_patch else load_patch(find_patch(patch))
    plan = DeployPlan(spec, replace, on_stall, not no_selfcheck, delivery, force)
    run(
        options,
        Verb("deploy", show_deploy, code=DeployReport.exit_code, deadline=WATCH_LIMIT + 900),
        lambda host: deploy_host(host, plan, event_printer(host.config.name)),
    )
