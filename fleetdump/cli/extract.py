"""``fleetdump extract``."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import click

from fleetdump.agent.protocol import FINISHED, RunProgress
from fleetdump.cli._data import DataOptions, data_options
from fleetdump.cli._fleet import FleetOptions, Report, Verb, fleet_options, lock_wait_option
from fleetdump.cli._interrupt import say_and_leave
from fleetdump.cli._preflight import look_at, preview_on
from fleetdump.cli.runcontrol import code_of, give_order, goes_on, show_shares, watch
from fleetdump.dataset.intake import DataSet
from fleetdump.dataset.rows import BrokenRow
from fleetdump.errors import ExitCode, LockedError, UnreachableError
from fleetdump.fleet import Host, Outcome, fan_out
from fleetdump.inventory import HostConfig
from fleetdump.ledger import Ledger
from fleetdump.tasks.extract import (
    FOLLOW_SECONDS,
    ExtractSettings,
    RunPlan,
    Share,
    follow,
    is_begun,
    open_run,
    require_run_name,
    runs_file,
    submit,
    targets_of,
)
from fleetdump.tasks.plan import Limits, estimate, require_deployed, require_fit, sample_of
from fleetdump.tasks.rebalance import Balancer, serves
from fleetdump.tasks.rejected import write_rejected
from fleetdump.tasks.runlock import CONTROLLER, sole
from fleetdump.tasks.survey import is_cancelled, require_not_cancelled, survey
from fleetdump.views.console import count, err
from fleetdump.views.progress import RunView

SHOWN_BROKEN = 5
PREVIEW_ROWS = 50
"""So many rows are tokenised before a run, for a person to look at and to know how much will be written."""


@click.command(short_help="Run a data set through the fleet, each sample once.")
@data_options
@click.option("--run", "run_name", default="", metavar="NAME", help="Name of the run.  [default: the data file's name]")
@click.option("--token-budget", type=click.IntRange(1), default=32768, show_default=True, help="In flight, a server.")
@click.option("--max-attempts", type=click.IntRange(1, 20), default=3, show_default=True)
@click.option("--allow-full-disk", is_flag=True, help="Begin a run that is too large for the hosts' disks.")
@click.option("--allow-failed-selfcheck", is_flag=True, help="Use servers whose self-check failed.")
@click.option("--detach", is_flag=True, help="Start it and leave; `attach` watches.")
@click.option("--runs-dir", type=click.Path(path_type=Path), default=Path("runs"), show_default=True)
@lock_wait_option
@fleet_options
def extract(
    options: FleetOptions,
    data: DataOptions,
    run_name: str,
    token_budget: int,
    max_attempts: int,
    allow_full_disk: bool,
    allow_failed_selfcheck: bool,
    detach: bool,
    runs_dir: Path,
) -> None:
    """Tokenise DATA on the hosts with the model's chat template and run it through the patched servers.

    One host shows first what its tokeniser makes of some rows, and whether the run fits on the disks is checked. Each
    server gets its whole share at the start and works on without this command: close the laptop, and call the
    same command again later to watch or, after a crash, to take the run up where it stands.

    While it watches, a host that is done takes over what slower ones have not begun. To add a host to a run, deploy
    it and give the command again; to take one out, `pause` it (--host) first. While one extract of a run is at work on
    this machine, a second one only watches. Ctrl-C at a terminal asks once whether to leave the hosts at work, to
    pause, or to cancel.

    \b
    A row of DATA is one of:
      {"id": "a1", "messages": [{"role": "user", "content": "..."}, {"role": "assistant", "content": "..."}]}
      {"id": "a2", "text": "every token is supervised"}
      {"id": "a3", "input_ids": [1, 2, 3], "loss_mask": [0, 1, 1]}

    \b
    Examples:
      fleetdump extract --data conversations.jsonl
      fleetdump extract --data conversations.jsonl --run second --host @small --detach
      fleetdump extract --data ultrachat/train --max-tokens 4096 --too-long truncate
    """
    run_name = run_name or _run_name(data.path)
    hosts = options.select(read_only=False)
    settings = ExtractSettings(data.max_tokens, data.too_long, token_budget, max_attempts, allow_failed_selfcheck)
    require_run_name(run_name)
    rows = data.take_in()
    _name_broken(rows.broken)
    targets_of(hosts)  # before any host is asked: can there be a run at all?
    if not is_begun(runs_file(runs_dir, run_name)):
        _preflight(options, hosts, rows, data.limits, allow_full_disk)
    try:
        with sole(runs_dir / run_name, CONTROLLER):
            code = _drive(options, hosts, rows, Run(run_name, runs_dir, settings, detach))
    except LockedError as error:
        err.print(f"{error.what}, {error.why}: only watching", markup=False)
        code = watch(options, hosts, run_name)
    except KeyboardInterrupt:
        code = _after_interrupt(options, hosts, run_name)
    sys.exit(code)


@dataclass(frozen=True)
class Run:
    """What the command line says of the run."""

    name: str
    runs_dir: Path
    settings: ExtractSettings
    detach: bool


def _drive(options: FleetOptions, hosts: list[HostConfig], rows: DataSet, run: Run) -> ExitCode:
    """Hand out the shares and, unless detached, watch them being worked on."""
    run_name, runs_dir = run.name, run.runs_dir
    targets = targets_of(hosts)
    with Ledger(runs_file(runs_dir, run_name)) as ledger:
        plan = open_run(ledger, run_name, rows, targets)
        write_rejected(ledger, runs_dir / run_name)
        knows_all = _look_around(options, hosts, run_name, ledger)
        _announce(plan)
        with_shares = {host for host, _ in plan.shares}
        unclaimed = set(with_shares) if plan.resumed else set()
        balancer = Balancer(run_name, ledger, lambda ids: Share(rows.lines(ids)), with_shares, unclaimed, knows_all)
        # A host without a share joins the run, when somebody watches: it takes over from the others.
        taking_part = [host for host in hosts if host.name in with_shares or (host.servers and not run.detach)]

        def ended(name: str, outcome: Outcome[list[RunProgress]]) -> None:
            balancer.forget(name)
            final.extend(outcome.value or [])
            report.add(name, outcome)

        final: list[RunProgress] = []
        report = Report(options, Verb("extract", show_shares, code=code_of, deadline=FOLLOW_SECONDS))
        with RunView() as view:
            fan_out(
                taking_part,
                _detached(plan, run.settings, ledger) if run.detach else _attached(plan, run.settings, balancer, view),
                limit=max(options.jobs, len(taking_part)),
                deadline=FOLLOW_SECONDS + 900,
                options=options.connect_options(),
                on_outcome=ended,
            )
    code = report.close()
    if any(is_cancelled(share) for share in final):
        err.print(f"run {run_name} was cancelled; next: fleetdump collect --data, for what is done", markup=False)
    elif code == ExitCode.OK:
        next_step = "give the same command without --detach to watch it" if run.detach else "fleetdump collect --data"
        err.print(f"run {run_name} {'is under way' if run.detach else 'is done'}; next: {next_step}", markup=False)
    return code


def _look_around(options: FleetOptions, hosts: list[HostConfig], run_name: str, ledger: Ledger) -> bool:
    """Learn what the hosts know of the run and we do not; whether all of them have told. Raises ``UsageError`` for a
    cancelled run. A host that cannot be asked is reported with its share."""
    outcomes = fan_out(
        hosts, lambda host: survey(host, run_name, ledger), limit=options.jobs, options=options.connect_options()
    )
    require_not_cancelled(run_name, {name: outcome.value or [] for name, outcome in outcomes.items()})
    return all(outcome.error is None for outcome in outcomes.values())


def _after_interrupt(options: FleetOptions, hosts: list[HostConfig], run_name: str) -> ExitCode:
    """Ctrl-C at a terminal asks once what it was meant for; a second one, or no terminal, leaves the hosts alone."""
    if not (sys.stdin.isatty() and err.is_terminal):
        say_and_leave(goes_on(run_name))
    answers = click.Choice(["leave", "pause", "cancel"])
    text = f"The hosts go on with run {run_name}. Leave them, or pause or cancel it?"
    try:
        what = str(click.prompt(text, type=answers, default="leave", err=True))
    except click.Abort:
        what = "leave"
    if what == "leave":
        say_and_leave(goes_on(run_name))
    return give_order(options, hosts, run_name, what)


def _detached(plan: RunPlan, settings: ExtractSettings, ledger: Ledger) -> Callable[[Host], list[RunProgress]]:
    return lambda host: submit(host, plan, settings, ledger)


def _attached(
    plan: RunPlan, settings: ExtractSettings, balancer: Balancer, view: RunView
) -> Callable[[Host], list[RunProgress]]:
    """A host's part: its shares, and then what it takes over from hosts that have more left."""

    def work(host: Host) -> list[RunProgress]:
        def note(name: str, progress: RunProgress) -> None:
            balancer.note(host, progress)
            view.update(name, progress)

        try:
            states = submit(host, plan, settings, balancer.ledger)
            for share in states:
                note(host.config.name, share)  # a share that is done already is never followed
            more = balancer.reclaim(host, list(plan.of_host(host.config.name))) if plan.resumed else None
            while True:
                if more is not None:
                    states = [*states, *submit(host, more, settings, balancer.ledger)]
                if any(share.state not in FINISHED for share in states):
                    states = follow(host, plan.run, note)
                if any(share.state == "failed" for share in states):
                    return states
                more = balancer.wait_for_work(host) if states or serves(host) else None
                if more is None:
                    return states
        finally:
            balancer.forget(host.config.name)

    return work


def _announce(plan: RunPlan) -> None:
    verb = "going on with" if plan.resumed else "starting"
    err.print(
        f"{verb} run {plan.run}: {count(plan.samples, 'sample')} on {count(len(plan.shares), 'server')}", markup=False
    )


def _name_broken(broken: Sequence[BrokenRow]) -> None:
    for row in broken[:SHOWN_BROKEN]:
        err.print(f"  line {row.line} is left out ({row.reason}): {row.detail}", markup=False)
    if len(broken) > SHOWN_BROKEN:
        err.print(f"  and {len(broken) - SHOWN_BROKEN} more rows left out", markup=False)


def _preflight(
    options: FleetOptions, hosts: Sequence[HostConfig], rows: DataSet, limits: Limits, allow_full_disk: bool
) -> None:
    """Before there is a run: are the servers there, what does the tokeniser make of the data, and does it fit? Hosts
    that do not answer now get their share all the same, and are reported with it."""
    looked = look_at(options, hosts)
    for error in looked.errors.values():
        if not isinstance(error, UnreachableError):
            raise error
    require_deployed(looked.hosts)
    sample = preview_on(options, looked.configs[0], rows, sample_of(rows, PREVIEW_ROWS), limits)
    if not allow_full_disk:
        found = estimate(rows, looked.hosts, sample.factors, limits.within(sample.result.limit), {})
        require_fit(found.hosts)


def _run_name(data: Path) -> str:
    """The data file's name without its endings, as far as a run may be called so."""
    stem = data.name.split(".")[0]
    return re.sub(r"[^A-Za-z0-9._-]", "-", stem).strip("-._")[:64] or "run"
