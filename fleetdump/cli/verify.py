"""``fleetdump verify``."""

from __future__ import annotations

import click

from fleetdump.agent.protocol import VerifyResult
from fleetdump.cli._fleet import FleetOptions, Verb, event_printer, fleet_options, run
from fleetdump.errors import ExitCode
from fleetdump.tasks.verify import DEADLINE
from fleetdump.tasks.verify import verify as verify_on
from fleetdump.views.hosts import show_verification


@click.command(short_help="Check every byte that the runs wrote, where it lies.")
@click.option("--run", "run_name", default="", metavar="NAME", help="Which run.  [default: all]")
@click.option("--repair", is_flag=True, help="Finish what a killed server or driver left open.")
@fleet_options
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
    run(
        options,
        Verb("verify", show_verification, code=_code, deadline=DEADLINE),
        lambda host: verify_on(host, run_name, repair, event_printer(host.config.name)),
    )


def _code(result: VerifyResult) -> ExitCode:
    return ExitCode.OK if all(one.is_whole for one in result.runs) else ExitCode.FAILED
