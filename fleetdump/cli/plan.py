"""``fleetdump plan``."""

from __future__ import annotations

import json
import sys

import click

from fleetdump.agent.protocol import to_json
from fleetdump.cli._data import DataOptions, data_options
from fleetdump.cli._fleet import FiniteRange, FleetOptions, fleet_options
from fleetdump.cli._interrupt import NOTHING, interruptible
from fleetdump.cli._preflight import Looked, Previewed, ask, look_at, preview_on
from fleetdump.errors import worst
from fleetdump.tasks.assignment import Target
from fleetdump.tasks.plan import (
    BURST_DEADLINE,
    BURST_PROMPTS,
    SAMPLE_ROWS,
    estimate,
    measure,
    require_fit,
    sample_of,
)
from fleetdump.views.console import out, print_error
from fleetdump.views.plan import show_estimate, warnings


@click.command(short_help="What would a data set take? Nothing is run.")
@data_options
@click.option(
    "--sample", "sample_rows", type=click.IntRange(1), default=SAMPLE_ROWS, show_default=True, help="Rows to tokenise."
)
@click.option("--tokens-per-second", type=FiniteRange(min=0.001), help="Of each server, as you know it.")
@click.option(
    "--measure", "measured", is_flag=True, help="Measure it: a burst of some seconds on the deployed servers."
)
@click.option(
    "--token-budget", type=click.IntRange(1), default=32768, show_default=True, help="In flight, in the burst."
)
@click.option("--allow-full-disk", is_flag=True, help="No failure when the disks are too small.")
@fleet_options
@interruptible(NOTHING)
def plan(
    options: FleetOptions,
    data: DataOptions,
    sample_rows: int,
    tokens_per_second: float | None,
    measured: bool,
    token_budget: int,
    allow_full_disk: bool,
) -> None:
    """Samples, tokens, a histogram of lengths, bytes, disk and hours of each host for DATA.

    A sample of the rows is tokenised on one host with the model's own tokenizer and chat template (no server need run);
    the other rows' lengths follow from it. Fails when a host's capture.dir has too little room.

    \b
    Examples:
      fleetdump plan --data conversations.jsonl
      fleetdump plan --data ultrachat/train --max-tokens 4096 --measure
    """
    if measured and tokens_per_second is not None:
        raise click.UsageError("--measure or --tokens-per-second, not both")
    rows = data.take_in()
    looked = look_at(options, options.select(read_only=True))
    for error in looked.errors.values():
        print_error(error)
    sample = preview_on(options, looked.configs[0], rows, sample_of(rows, sample_rows), data.limits)
    if measured:
        rates = _measured(options, looked, sample, token_budget)
    else:
        rates = dict.fromkeys(looked.targets, tokens_per_second or 0.0)
    found = estimate(rows, looked.hosts, sample.factors, data.limits.within(sample.result.limit), rates)
    if options.as_json:
        facts = {"fits": found.fits, "template_sha256": sample.result.template_sha256}
        record = {**to_json(found), **facts, "warnings": warnings(sample.result)}
        out.print(json.dumps(record), markup=False)
    else:
        show_estimate(found)
    if not allow_full_disk:
        require_fit(found.hosts)
    sys.exit(worst([error.exit_code for error in looked.errors.values()]))


def _measured(options: FleetOptions, looked: Looked, sample: Previewed, token_budget: int) -> dict[Target, float]:
    """Of each server, in prompts as long as the sample's rows; raises the error of a host that cannot."""
    lengths = [length for length in sample.result.lengths if length] or [1]
    prompts = [lengths[n % len(lengths)] for n in range(BURST_PROMPTS)]
    answers = ask(options, looked.configs, lambda host: measure(host, prompts, token_budget), BURST_DEADLINE)
    rates: dict[Target, float] = {}
    for host, (value, error) in answers.items():
        if error is not None:
            raise error
        rates.update({(host, server): rate for server, rate in (value or {}).items()})
    return rates
