"""``fleetdump extract``."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from pathlib import Path

import click

from fleetdump.agent.protocol import RunProgress
from fleetdump.cli._fleet import FleetOptions, Report, Verb, fleet_options, lock_wait_option
from fleetdump.dataset.rows import read_rows
from fleetdump.errors import ExitCode
from fleetdump.fleet import Host, fan_out
from fleetdump.ledger import Ledger
from fleetdump.tasks.extract import (
    FOLLOW_SECONDS,
    ExtractSettings,
    RunPlan,
    follow,
    open_run,
    require_run_name,
    runs_file,
    submit,
    take_in,
    targets_of,
)
from fleetdump.views.console import err, out
from fleetdump.views.progress import RunView

SHOWN_BROKEN = 5


@click.command(short_help="Run a data set through the fleet, each sample once.")
@click.option("--data", required=True, type=click.Path(path_type=Path), help="JSONL (.gz) rows; docs/data.md.")
@click.option("--run", "run_name", default="", metavar="NAME", help="Name of the run.  [default: the data file's name]")
@click.option("--max-tokens", type=click.IntRange(0), default=0, help="Reject longer samples.  [default: no limit]")
@click.option("--token-budget", type=click.IntRange(1), default=32768, show_default=True, help="In flight, a server.")
@click.option("--max-attempts", type=click.IntRange(1, 20), default=3, show_default=True)
@click.option("--allow-failed-selfcheck", is_flag=True, help="Use servers whose self-check failed.")
@click.option("--detach", is_flag=True, help="Start it and leave; call extract again to watch.")
@click.option("--runs-dir", type=click.Path(path_type=Path), default=Path("runs"), show_default=True)
@lock_wait_option
@fleet_options
def extract(
    options: FleetOptions,
    data: Path,
    run_name: str,
    max_tokens: int,
    token_budget: int,
    max_attempts: int,
    allow_failed_selfcheck: bool,
    detach: bool,
    runs_dir: Path,
) -> None:
    """Tokenise DATA on the hosts with the model's chat template and run it through the patched servers.

    Each server gets its whole share at the start and works on without this command: close the laptop, and call the
    same command again later to watch or, after a crash, to take the run up where it stands.

    \b
    A row of DATA is one of:
      {"id": "a1", "messages": [{"role": "user", "content": "..."}, {"role": "assistant", "content": "..."}]}
      {"id": "a2", "text": "every token is supervised"}
      {"id": "a3", "input_ids": [1, 2, 3], "loss_mask": [0, 1, 1]}

    \b
    Examples:
      fleetdump extract --data conversations.jsonl
      fleetdump extract --data conversations.jsonl --run second --host @small --detach
    """
    run_name = run_name or _run_name(data)
    hosts = options.select(read_only=False)
    settings = ExtractSettings(max_tokens, token_budget, max_attempts, allow_failed_selfcheck)
    require_run_name(run_name)
    rows = take_in(read_rows(data))
    targets = targets_of(hosts)
    with Ledger(runs_file(runs_dir, run_name)) as ledger:
        plan = open_run(ledger, run_name, rows, targets)
        _announce(plan)
        taking_part = [host for host in hosts if plan.of_host(host.name)]
        report = Report(options, Verb("extract", _show, code=_code, deadline=FOLLOW_SECONDS))
        with RunView() as view:
            fan_out(
                taking_part,
                _worker(plan, settings, ledger, None if detach else view.update),
                limit=options.jobs,
                deadline=FOLLOW_SECONDS + 900,
                options=options.connect_options(),
                on_outcome=report.add,
            )
    code = report.close()
    if code == ExitCode.OK:
        next_step = "give the same command without --detach to watch it" if detach else "fleetdump collect --data"
        err.print(f"run {run_name} {'is under way' if detach else 'is done'}; next: {next_step}", markup=False)
    sys.exit(code)


def _worker(
    plan: RunPlan, settings: ExtractSettings, ledger: Ledger, on_progress: Callable[[str, RunProgress], None] | None
) -> Callable[[Host], list[RunProgress]]:
    def work(host: Host) -> list[RunProgress]:
        submitted = submit(host, plan, settings, ledger)
        if on_progress is None or all(share.state == "done" for share in submitted):
            return submitted
        return follow(host, plan.run, on_progress)

    return work


def _announce(plan: RunPlan) -> None:
    verb = "going on with" if plan.resumed else "starting"
    err.print(f"{verb} run {plan.run}: {plan.samples} samples on {len(plan.shares)} server(s)", markup=False)
    for row in plan.broken[:SHOWN_BROKEN]:
        err.print(f"  line {row.line} is left out ({row.reason}): {row.detail}", markup=False)
    if len(plan.broken) > SHOWN_BROKEN:
        err.print(f"  and {len(plan.broken) - SHOWN_BROKEN} more rows left out", markup=False)


def _show(host: str, shares: list[RunProgress]) -> None:
    for share in shares:
        text = f"{host}/{share.server}: {share.state}, {share.done}/{share.samples} samples"
        if share.rejected:
            text += f", {share.rejected} rejected (their reasons: fleetdump collect)"
        out.print(text + (f"; {share.detail}" if share.detail else ""), markup=False)
        for note in share.notes:
            out.print(f"  {note}", markup=False)


def _code(shares: list[RunProgress]) -> ExitCode:
    return ExitCode.FAILED if any(share.state == "failed" for share in shares) else ExitCode.OK


def _run_name(data: Path) -> str:
    """The data file's name without its endings, as far as a run may be called so."""
    stem = data.name.split(".")[0]
    return re.sub(r"[^A-Za-z0-9._-]", "-", stem).strip("-._")[:64] or "run"
