"""``fleetdump verify``."""

from __future__ import annotations

import sys

import click

from fleetdump.agent.runmessages import VerifyResult
from fleetdump.cli._fleet import FleetOptions, Report, Verb, event_printer, fleet_options
from fleetdump.cli._interrupt import interruptible
from fleetdump.errors import ExitCode, UsageError
from fleetdump.fleet import Outcome, fan_out
from fleetdump.tasks.extract import require_run_name
from fleetdump.tasks.verify import DEADLINE
from fleetdump.tasks.verify import verify as verify_on
from fleetdump.views.hosts import show_verification


@click.command(short_help="Check every byte that the runs wrote, where it lies.")
@click.option("--run", "run_name", default="", metavar="NAME", help="Which run.  [default: all]")
@click.option("--repair", is_flag=True, help="Finish what a killed server or driver left open.")
@fleet_options
@interruptible("nothing that a sample consists of is changed by it; the same command reads all again")
def verify(options: FleetOptions, run_name: str, repair: bool) -> None:
    """Read all shards on the hosts and compare them with their journals and manifests: sizes, SHA-256, the CRC-32 of
    each piece, every sample's pieces.

    A shard that a killed server left open (.part) is torn. --repair closes it behind the last piece that its journal
    names; nothing that a sample consists of is changed. collect does the same on its way.

    \b
    Examples:
      fleetdump verify
      fleetdump verify --run conversations --repair
    """
    if run_name:
        require_run_name(run_name)
    report = Report(options, Verb("verify", show_verification, code=_code, deadline=DEADLINE))
    outcomes: dict[str, Outcome[VerifyResult]] = fan_out(
        options.select(read_only=False),
        lambda host: verify_on(host, run_name, repair, event_printer(host.config.name)),
        limit=options.jobs,
        deadline=DEADLINE,
        options=options.connect_options(),
        on_outcome=report.add,
    )
    code = report.close()
    if run_name and code == ExitCode.OK and not any(one.value and one.value.runs for one in outcomes.values()):
        raise UsageError(
            f"no host has run {run_name}", next_step="fleetdump status shows the runs of each host; correct --run"
        )
    sys.exit(code)


def _code(result: VerifyResult) -> ExitCode:
    return ExitCode.OK if all(one.is_whole for one in result.runs) else ExitCode.FAILED
