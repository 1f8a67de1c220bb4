"""``fleetdump collect``."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import click

from fleetdump.agent.jsonl import replacing
from fleetdump.agent.protocol import to_json
from fleetdump.cli._data import runs_dir_option
from fleetdump.cli._fleet import FleetOptions, Report, Verb, fleet_options
from fleetdump.cli._interrupt import interruptible
from fleetdump.errors import ExitCode, FleetdumpError, UsageError, worst
from fleetdump.fleet import fan_out
from fleetdump.ledger import Ledger
from fleetdump.tasks.collect import pull
from fleetdump.tasks.extract import require_run_name, runs_file
from fleetdump.tasks.merge import CollectReport, PullOptions, merge, not_here_words, require_whole
from fleetdump.tasks.missing import write_missing
from fleetdump.tasks.pullshards import PullReport
from fleetdump.tasks.rejected import write_rejected
from fleetdump.tasks.runlock import COLLECTOR, sole
from fleetdump.views.console import out, print_error, size

DEADLINE = 7 * 86400.0
SHOWN = 5


@click.command(short_help="Bring manifests and shards home, merged and verified.")
@click.option("--run", "run_name", default="", metavar="NAME", help="Which run.  [default: the only one]")
@click.option("--data", is_flag=True, help="Pull the shards too, each verified after the copy.")
@click.option(
    "--to", type=click.Path(path_type=Path), default=None, help="Where shards go.  [default: the runs folder]"
)
@runs_dir_option
@fleet_options
@interruptible("what was brought here is kept; the same command goes on where it was")
def collect(options: FleetOptions, run_name: str, data: bool, to: Path | None, runs_dir: Path) -> None:
    """Pull what is new in the hosts' manifests, check every line, and merge them: each sample once.

    Gaps, duplicates and settings that differ between hosts are named. It may be called while the run goes on, and
    again after any interruption; it continues where it was. The report is also written to collect.json beside the
    merged manifest; missing.jsonl in the run's folder lists every sample whose data is not here (docs/run.md).
    --json prints an object a host and then that report, as {"command": "collect", "data": ...}.

    \b
    Examples:
      fleetdump collect
      fleetdump collect --run conversations --data --to /mnt/hidden-states
    """
    hosts = options.select(read_only=False)
    run_name = run_name or _only_run(runs_dir)
    require_run_name(run_name)
    if to is not None and not data:
        raise click.UsageError("--to says where shards go: add --data")
    pull_options = PullOptions(run_name, (to or runs_dir) if data else None)

    def show(host: str, report: PullReport) -> None:
        if is_new and not report.has_run:
            return
        text = f"{host}: {report.lines} new samples, {report.shards} files, {size(report.bytes)}"
        out.print(
            text + (f"; still running: {', '.join(report.unfinished)}" if report.unfinished else ""), markup=False
        )

    ledger_file = runs_file(runs_dir, run_name)
    is_new = not ledger_file.parent.exists()
    with sole(ledger_file.parent, COLLECTOR), Ledger(ledger_file) as ledger:
        report = Report(options, Verb("collect", show, code=_code, deadline=DEADLINE))
        outcomes = fan_out(
            hosts,
            lambda host: pull(host, pull_options, ledger),
            limit=options.jobs,
            deadline=DEADLINE,
            options=options.connect_options(),
            on_outcome=report.add,
        )
        if is_new and not ledger.shares():
            shutil.rmtree(ledger_file.parent)
            sys.exit(worst([report.close(), _unknown_run(run_name, runs_dir)]))
        found = [outcome.value for outcome in outcomes.values() if outcome.value is not None]
        merged = merge(ledger, pull_options, runs_dir, goes_on=any(pulled.goes_on for pulled in found))
        merged.not_here = write_missing(ledger, ledger_file.parent, with_files=data)
        _write(merged)
        write_rejected(ledger, ledger_file.parent)
    code = report.close()
    if options.as_json:
        out.print(json.dumps({"command": "collect", "data": to_json(merged)}), markup=False)
    else:
        _show_merged(merged)
    try:
        require_whole(merged, found)
    except FleetdumpError as error:
        print_error(error)
        code = worst([code, error.exit_code])
    sys.exit(code)


def _runs(runs_dir: Path) -> list[str]:
    return sorted(path.parent.name for path in runs_dir.glob("*/ledger.sqlite"))


def _only_run(runs_dir: Path) -> str:
    runs = _runs(runs_dir)
    if len(runs) == 1:
        return runs[0]
    why = f"{runs_dir} has {', '.join(runs)}" if runs else f"{runs_dir} has no run"
    raise UsageError("which run?", why=why, next_step="add --run NAME, and --runs-dir if it lies elsewhere")


def _unknown_run(run_name: str, runs_dir: Path) -> ExitCode:
    known = ", ".join(_runs(runs_dir)) or "no run"
    error = UsageError(f"no host that answered has run {run_name!r}", why=f"{runs_dir} has {known}")
    error.next_step = "correct --run, --runs-dir or --host"
    print_error(error)
    return error.exit_code


def _write(merged: CollectReport) -> None:
    path = Path(merged.manifest).with_name("collect.json")
    with replacing(path, mode=0o666) as file:
        file.write(json.dumps(to_json(merged), indent=1).encode() + b"\n")


def _show_merged(merged: CollectReport) -> None:
    not_done = f" {merged.not_done} not done yet," if merged.not_done else ""
    out.print(
        f"run {merged.run}: {merged.samples} of {merged.expected} samples, {merged.tokens} tokens,{not_done}"
        f" {merged.lost} lost, {merged.duplicated} duplicated, {merged.rejected} rejected; {merged.manifest}",
        markup=False,
    )
    if merged.not_here:
        out.print(f"  {not_here_words(merged)}", markup=False)
    listed = (
        ("not done" if merged.not_done else "missing", merged.missing, merged.lost + merged.not_done),
        ("rejected", merged.rejects, merged.rejected),
        ("differs", merged.mismatches, len(merged.mismatches)),
    )
    for label, lines, count in listed:
        for line in lines[:SHOWN]:
            out.print(f"  {label}: {line}", markup=False)
        if count > SHOWN:
            more = Path(merged.manifest).with_name("collect.json")
            out.print(f"  {label}: and {count - SHOWN} more; {more} names the first {len(lines)}", markup=False)


def _code(report: PullReport) -> ExitCode:
    return ExitCode.FAILED if report.faults else ExitCode.OK
