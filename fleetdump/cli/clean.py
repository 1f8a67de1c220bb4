"""``fleetdump clean``."""

from __future__ import annotations

from pathlib import Path

import click

from fleetdump.agent.protocol import CleanResult
from fleetdump.cli._fleet import FleetOptions, Verb, fleet_options, lock_wait_option, run
from fleetdump.tasks.clean import clean as clean_on
from fleetdump.views.console import out, size


def _show(host: str, result: CleanResult) -> None:
    out.print(f"{host}: removed {len(result.removed)} item(s), {size(result.freed_bytes)}", markup=False)
    for kept in result.kept:
        out.print(f"  kept {kept}", markup=False)


@click.command(short_help="Remove everything of ours from the hosts.")
@click.option("--data", is_flag=True, help="Also remove the shards (only what was collected).")
@click.option("--discard-uncollected", is_flag=True, help="With --data: delete samples that exist nowhere else.")
@click.option("--runs-dir", type=click.Path(path_type=Path), default=Path("runs"), show_default=True)
@lock_wait_option
@fleet_options
def clean(options: FleetOptions, data: bool, discard_uncollected: bool, runs_dir: Path) -> None:
    """Remove fleetdump's files from the hosts, after stop and revert.

    \b
    Example:
      fleetdump stop && fleetdump revert && fleetdump clean --data
    """
    run(
        options,
        Verb("clean", _show, deadline=400.0),
        lambda host: clean_on(host, runs_dir, data, discard_uncollected),
    )
