"""``fleetdump clean``."""

from __future__ import annotations

from pathlib import Path

import click

from fleetdump.agent.hostmessages import CleanResult
from fleetdump.cli._data import runs_dir_option
from fleetdump.cli._fleet import FleetOptions, Verb, fleet_options, lock_wait_option, run
from fleetdump.errors import ExitCode
from fleetdump.tasks.clean import CleanPlan
from fleetdump.tasks.clean import clean as clean_on
from fleetdump.tasks.extract import require_run_name
from fleetdump.views.console import count, out, size
from fleetdump.views.interrupts import show_look_cut


def _show(host: str, result: CleanResult, done: str) -> None:
    out.print(f"{host}: {done} {count(len(result.removed), 'item')}, {size(result.freed_bytes)}", markup=False)
    for path in result.removed:
        out.print(f"  {path}", markup=False)
    for kept in result.kept:
        out.print(f"  kept {kept}", markup=False)
    for error in result.obstacles:
        why = f" ({error.why})" if error.why else ""
        out.print(f"  it would be refused: {error.what}: {error.where}{why}; next: {error.next_step}", markup=False)


def _code(result: CleanResult) -> ExitCode:
    return ExitCode.FAILED if result.obstacles else ExitCode.OK


@click.command(short_help="Remove everything of ours from the hosts.")
@click.option("--data", is_flag=True, help="Also remove the shards (only what was collected and verified).")
@click.option(
    "--discard",
    multiple=True,
    metavar="RUN",
    help="With --data: give up the samples of this run that were not collected; may be repeated.",
)
@click.option("--check", "dry_run", is_flag=True, help="Only list what would go, and what stands in the way.")
@runs_dir_option
@lock_wait_option
@fleet_options
def clean(options: FleetOptions, data: bool, discard: tuple[str, ...], dry_run: bool, runs_dir: Path) -> None:
    """Remove fleetdump's files from the hosts, after stop and revert, and list them.

    \b
    Examples:
      fleetdump clean --check --data
      fleetdump stop && fleetdump revert && fleetdump clean --data
    """
    if discard and not data:
        raise click.UsageError("--discard is about shards: it goes with --data")
    for name in discard:
        require_run_name(name)
    plan = CleanPlan(data, discard, dry_run)
    done = "would remove" if dry_run else "removed"
    run(
        options,
        Verb(
            "clean",
            lambda host, result: _show(host, result, done),
            code=_code,
            deadline=400.0,
            interrupted=show_look_cut if dry_run else None,
        ),
        lambda host: clean_on(host, runs_dir, plan),
    )
