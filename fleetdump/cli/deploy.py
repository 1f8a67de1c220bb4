"""``fleetdump deploy``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, get_args

import click

from fleetdump.agent.specs import PatchSpec
from fleetdump.cli._fleet import FleetOptions, Verb, event_printer, fleet_options, lock_wait_option, run
from fleetdump.cli._patch import PatchChoice, patch_options
from fleetdump.errors import ExitCode
from fleetdump.fleet import Host
from fleetdump.patches import find_patch, load_patch
from fleetdump.tasks.changes import HostChanges
from fleetdump.tasks.deploy import hold_limit, plan_only
from fleetdump.tasks.deployplan import DeployPlan, DeployReport, OnStall
from fleetdump.tasks.fallback import deploy_or_fall_back
from fleetdump.tasks.fleetstarts import FleetStarts, own_file
from fleetdump.tasks.rollout import Rollout
from fleetdump.tasks.steps import History
from fleetdump.views.deploys import show_changes, show_host_diff, show_works
from fleetdump.views.hosts import show_deploy
from fleetdump.views.interrupts import show_interrupted, show_look_cut
from fleetdump.views.progress import StartLines

NO_PATCH = "none"
FORECAST_DEADLINE = 300.0


def _fallbacks(_ctx: click.Context, _param: click.Parameter, value: str | None) -> tuple[PatchSpec | None, ...]:
    names = [] if value is None else [name.strip() for name in value.split(",")]
    if not all(names):
        raise click.BadParameter(f"{value!r} leaves a patch without a name; {NO_PATCH} is SGLang as shipped")
    if NO_PATCH in names[:-1]:
        raise click.BadParameter(f"{NO_PATCH} can only be the last one: it needs no other after it")
    return tuple(None if name == NO_PATCH else load_patch(find_patch(name)) for name in names)


@click.command(short_help="Patch, launch, watch, self-check.")
@patch_options
@click.option("--check", "check_only", is_flag=True, help="Only say what would change on each host; change nothing.")
@click.option("--diff", "with_diff", is_flag=True, help="Show what changes in SGLang's files, and command lines.")
@click.option("--replace", is_flag=True, help="Stop servers of ours that run in another way, or that hang, first.")
@click.option("--canary", type=click.IntRange(0), default=0, metavar="N", help="Go on only if the first N hosts pass.")
@click.option("--batch", type=click.IntRange(0), default=0, metavar="N", help="N hosts at a time.  [default: all]")
@click.option(
    "--max-failures",
    type=click.IntRange(0),
    default=0,
    metavar="N",
    show_default=True,
    help="Begin no further batch once more hosts have failed.",
)
@click.option(
    "--on-stall",
    type=click.Choice(get_args(OnStall)),
    default="keep",
    show_default=True,
    help="After the evidence is taken: keep the server for a look, stop it, or stop it and revert the patch.",
)
@click.option(
    "--fallback",
    "fallbacks",
    metavar="PATCH[,PATCH]",
    callback=_fallbacks,
    help=f"Where a patch does not work, try these instead; '{NO_PATCH}' at last is SGLang as shipped.",
)
@click.option("--force", is_flag=True, help="Patch files of SGLang that somebody else edited; revert gives them back.")
@click.option("--no-selfcheck", is_flag=True, help="Do not send the few prompts that prove the captured numbers.")
@lock_wait_option
@fleet_options
def deploy(
    options: FleetOptions,
    choice: PatchChoice,
    check_only: bool,
    with_diff: bool,
    replace: bool,
    canary: int,
    batch: int,
    max_failures: int,
    on_stall: OnStall,
    fallbacks: tuple[PatchSpec | None, ...],
    force: bool,
    no_selfcheck: bool,
) -> None:
    """Bring every server of the chosen hosts up, patched, and prove it.

    A server counts as ready when its port answers, SGLang says so, and every rank shows the patch's mark and the
    expected model class. One that makes no progress is diagnosed at once (exit code 4). A host that is as wanted is
    left alone; a deploy that was cut off is taken up by the same command.

    \b
    Examples:
      fleetdump deploy --host gpu01
      fleetdump deploy --check --diff
      fleetdump deploy --canary 1 --batch 8 --max-failures 2
      fleetdump deploy --replace --on-stall revert
      fleetdump deploy --fallback ./patches/v2,none
      fleetdump deploy --patch ./patches/mine --no-selfcheck
      fleetdump deploy --delivery import-hook
    """
    starts = FleetStarts(own_file())
    plan = DeployPlan(choice.spec, replace, on_stall, not no_selfcheck, choice.delivery, force, fallbacks, starts)
    if check_only:
        _check(options, plan, with_diff)
    try:
        _deploy(options, plan, Rollout(canary, batch, max_failures), with_diff)
    finally:
        starts.save()


def _check(options: FleetOptions, plan: DeployPlan, with_diff: bool) -> None:
    verb = Verb(
        "deploy",
        lambda _host, _changes: None,
        lambda changes: show_changes(changes, with_diff),
        code=lambda changes: ExitCode.FAILED if changes.conflicts else ExitCode.OK,
        data=HostChanges.summary,
        deadline=FORECAST_DEADLINE,
        interrupted=show_look_cut,
    )
    run(options, verb, lambda host: plan_only(host, plan))


def _deploy(options: FleetOptions, plan: DeployPlan, rollout: Rollout, with_diff: bool) -> None:
    history = History()
    longest = max((hold_limit(host) for host in options.select(read_only=False)), default=0.0)
    deadline = longest * (1 + len(plan.fallbacks))
    starts = StartLines()

    def work(host: Host) -> DeployReport:
        name = host.config.name
        return deploy_or_fall_back(host, plan, _listener(name, history, starts, with_diff))

    verb = Verb(
        "deploy",
        show_deploy,
        show_works,
        DeployReport.exit_code,
        deadline=deadline,
        interrupted=lambda _ended, waiting: show_interrupted(history.hosts, waiting),
    )
    run(options, verb, work, rollout)


def _listener(host: str, history: History, starts: StartLines, with_diff: bool) -> Callable[[dict[str, Any]], None]:
    """Notes and shows the steps of one host; ``starts`` compares it with the others."""
    show = event_printer(host, starts)

    def listen(event: dict[str, Any]) -> None:
        history.add(host, event)
        if event.get("event") == "diff" and with_diff:
            show_host_diff(host, str(event["text"]))
        show(event)

    return listen
