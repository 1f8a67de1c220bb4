"""``fleetdump check``."""

from __future__ import annotations

from pathlib import Path

import click

from fleetdump.agent.hostmessages import ProbeResult
from fleetdump.cli._fleet import FleetOptions, Verb, fleet_options, run
from fleetdump.cli._patch import PatchChoice, patch_options
from fleetdump.dataset.rows import read_rows
from fleetdump.dataset.tokens import DataSize, measure
from fleetdump.errors import ExitCode
from fleetdump.tasks.check import CheckPlan, tokens_by_host
from fleetdump.tasks.check import check as check_host
from fleetdump.views.checks import show_check
from fleetdump.views.console import err


def _code(probe: ProbeResult) -> ExitCode:
    return ExitCode.FAILED if any(f.level == "blocker" for f in probe.findings) else ExitCode.OK


@click.command(short_help="Would a deploy work? Nothing is changed.")
@patch_options
@click.option(
    "--data", type=click.Path(path_type=Path), help="Check the disks against this data set, shared out over the hosts."
)
@fleet_options
def check(options: FleetOptions, choice: PatchChoice, data: Path | None) -> None:
    """Reach each host and check what a deploy needs: python, SGLang, patch, model and layer ids, GPUs and who is on
    them, port, proxies, memory, limits, clock, tools, and the capture directory's room and speed.

    What hosts have in common is told once. With --data the room is that of the hosts' shares: about how many tokens
    the rows have, times the bytes of a token.

    \b
    Examples:
      fleetdump check --host gpu[01-08]
      fleetdump check --data conversations.jsonl
    """
    shares: dict[str, int] = {}
    if data is not None:
        size = measure(read_rows(data))
        _tell(data, size)
        shares = tokens_by_host(options.select(read_only=True), size.tokens)
    run(
        options,
        Verb("check", lambda _host, _probe: None, show_check, code=_code, read_only=True, deadline=120.0),
        lambda host: check_host(
            host, CheckPlan(choice.spec, choice.delivery, shares.get(host.config.name, 0), measure_writes=True)
        ),
    )


def _tell(data: Path, size: DataSize) -> None:
    broken = f"; {size.broken} cannot be read (extract names them)" if size.broken else ""
    about = f"roughly {size.tokens:,} tokens by the length of their texts (fleetdump plan asks the tokenizer)"
    err.print(f"{data}: {size.rows} rows, {about}{broken}", markup=False)
