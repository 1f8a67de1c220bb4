"""``fleetdump extract``."""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import click
from click.core import ParameterSource

from fleetdump.cli._controller import require_undriven, take_seat, try_seat
from fleetdump.cli._data import DataOptions, data_options, runs_dir_option
from fleetdump.cli._driving import Run, Watching, drive, named_hosts
from fleetdump.cli._fleet import FleetOptions, Seconds, fleet_options, lock_wait_option
from fleetdump.cli._interrupt import say_and_leave
from fleetdump.cli._preflight import look_at, preview_on
from fleetdump.cli._standingback import stand_back
from fleetdump.cli.runcontrol import give_order, goes_on
from fleetdump.dataset.intake import DataSet
from fleetdump.dataset.rows import BrokenRow
from fleetdump.errors import DrivenError, ExitCode, UnreachableError, UsageError
from fleetdump.inventory import HostConfig
from fleetdump.tasks.assignment import is_begun, require_begun_with, targets_of
from fleetdump.tasks.attendance import JoinRequests, ask_to_join
from fleetdump.tasks.controller import arguments
from fleetdump.tasks.extract import require_run_name, runs_file, settle
from fleetdump.tasks.plan import Limits, estimate, require_deployed, require_fit, sample_of
from fleetdump.tasks.rebalance import PATIENCE_SECONDS
from fleetdump.tasks.runlock import CONTROLLER, sole
from fleetdump.tasks.steering import Controller
from fleetdump.tasks.supervise import Policy
from fleetdump.views.console import err

SHOWN_BROKEN = 5
PREVIEW_ROWS = 50
"""So many rows are tokenised before a run, for a person to look at and to know how much will be written."""


@click.command(short_help="Run a data set through the fleet, each sample once.")
@data_options
@click.option("--run", "run_name", default="", metavar="NAME", help="Name of the run.  [default: the data file's name]")
@click.option(
    "--token-budget",
    type=click.IntRange(1),
    metavar="TOKENS",
    help="So many may be in flight at a server; a run keeps what it was begun with.  [default: 32768]",
)
@click.option(
    "--max-attempts",
    type=click.IntRange(1, 20),
    metavar="N",
    help="A sample that has failed so often is rejected; a run keeps what it was begun with.  [default: 3]",
)
@click.option("--allow-full-disk", is_flag=True, help="Begin a run that is too large for the hosts' disks.")
@click.option("--allow-failed-selfcheck", is_flag=True, help="Use servers whose self-check failed.")
@click.option(
    "--restart",
    "restarts",
    type=click.IntRange(0, 100),
    default=2,
    show_default=True,
    metavar="N",
    help="How often a server that dies or hangs is launched again in this run, while this command watches.",
)
@click.option(
    "--patience",
    type=Seconds(0, 7 * 86400),
    default=PATIENCE_SECONDS,
    show_default=True,
    metavar="SECONDS",
    help="How long a host may be unreachable before others compute what it has not done, while this command watches. "
    "(The inventory's patience, for servers that do not get on, is another one.)",
)
@click.option(
    "--add-host",
    "add_host",
    multiple=True,
    metavar="PATTERN",
    help="Have these hosts join the run, which is under way; as --host, may be repeated.",
)
@click.option("--detach", is_flag=True, help="Start it and leave; `attach` watches.")
@click.option(
    "--controller",
    "seat_name",
    default="",
    metavar="HOST",
    help="Start it and leave its controller on this host of the inventory, with that host's own SSH access.",
)
@click.option(
    "--controller-python",
    default="python3",
    show_default=True,
    metavar="PATH",
    help="What runs the controller there: Python >= 3.10 with fleetdump's packages. Nothing is installed.",
)
@runs_dir_option
@lock_wait_option
@fleet_options
@click.pass_context
def extract(
    ctx: click.Context,
    options: FleetOptions,
    data: DataOptions,
    run_name: str,
    token_budget: int | None,
    max_attempts: int | None,
    allow_full_disk: bool,
    allow_failed_selfcheck: bool,
    restarts: int,
    patience: float,
    add_host: tuple[str, ...],
    detach: bool,
    seat_name: str,
    controller_python: str,
    runs_dir: Path,
) -> None:
    """Tokenise DATA on the hosts with the model's chat template and run it through the patched servers.

    One host shows first what its tokeniser makes of some rows, and whether the run fits on the disks is checked. Each
    server gets its whole share at the start and works on without this command: close the laptop, and call the
    same command again later to watch or, after a crash, to take the run up where it stands.

    While it watches, a host that is done takes over what slower ones have not begun, and a server that dies is
    diagnosed and launched again as it was (--restart). A host that cannot be reached is tried again; after a while
    (--patience) the others compute what it has not done, and each sample counts once. To add a host to a run, deploy
    it and give the command again with --add-host; `drain` takes one out. While one extract of a run is at work,
    wherever it was given, a second one only watches and says who drives the run; with other data it is refused. Ctrl-C
    at a terminal asks once whether to leave the hosts at work, to pause, or to cancel. Without an extract nothing
    expires: a driver whose server died waits until it is launched again. For a laptop that sleeps --controller leaves
    all this to a process on a host of the fleet (docs/run.md). An option that would have no effect is refused.

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
      fleetdump extract --data conversations.jsonl --add-host gpu09
      fleetdump extract --data conversations.jsonl --controller gpu01 --controller-python /opt/fleetdump/bin/python
    """
    _refuse_idle(ctx)
    run_name = run_name or _run_name(data.path)
    hosts, joining = options.select(read_only=False), named_hosts(options, add_host)
    hosts += [host for host in joining if host not in hosts]
    require_run_name(run_name)
    ledger_file = runs_file(runs_dir, run_name)
    told = {
        "max_tokens": data.max_tokens,
        "too_long": data.too_long or None,
        "token_budget": token_budget,
        "max_attempts": max_attempts,
    }
    settings = settle(ledger_file, run_name, {name: value for name, value in told.items() if value is not None})
    settings = replace(settings, allow_failed_selfcheck=allow_failed_selfcheck)
    rows = data.take_in()
    _name_broken(rows.broken)
    targets_of(hosts)  # before any host is asked: can there be a run at all?
    requests = JoinRequests(runs_dir / run_name, lambda text: err.print(text, markup=False))
    watching = Watching(
        Policy(restarts, selfcheck=not allow_failed_selfcheck), patience, [h.name for h in joining], requests
    )
    me = Controller(run_name, runs_dir / run_name, rows.mark)
    argv = arguments(run_name, settings, ["--restart", str(restarts), "--patience", str(patience)])
    run = Run(run_name, runs_dir, settings, watching, detach or bool(seat_name), bool(seat_name), me)
    try:
        seat = None
        if seat_name:
            seat = try_seat(options, hosts, me, seat_name, controller_python, joining=bool(joining))
        if seat is not None and seat.replaces:
            take_seat(options, seat, rows, ledger_file, argv)
            sys.exit(ExitCode.OK)
        if not is_begun(ledger_file):
            _refuse_joining(run_name, joining)
            if seat is None:
                require_undriven(options, hosts, me)
            _preflight(options, hosts, rows, data.limits, allow_full_disk)
        with sole(run.folder, CONTROLLER):
            me.begin()
            code = drive(options, hosts, rows, run)
            if seat is not None:
                take_seat(options, seat, rows, ledger_file, argv)
    except DrivenError as error:
        require_begun_with(ledger_file, run_name, rows)
        if joining:
            _leave_word(run, error)
        code = stand_back(options, hosts, run, error)
    except KeyboardInterrupt:
        code = _after_interrupt(options, hosts, run_name)
    sys.exit(code)


def _refuse_idle(ctx: click.Context) -> None:
    """Raise ``UsageError`` for an option that would say nothing beside the others."""
    given = {name for name in ctx.params if ctx.get_parameter_source(name) == ParameterSource.COMMANDLINE}
    seated = bool(ctx.params["seat_name"])
    if "controller_python" in given and not seated:
        raise _idle("--controller-python", "it is for a controller on a host", "name that host with --controller")
    if not ctx.params["detach"] or seated:
        return
    for name, flag, what in (
        ("add_host", "--add-host", "a host joins by taking work over from others"),
        ("restarts", "--restart", "servers are launched again"),
        ("patience", "--patience", "others take over from a host that is away"),
    ):
        if name in given:
            why = f"{what} while a command watches, and with --detach none does"
            raise _idle(flag, why, "leave --detach away, or have a controller stay on a host, with --controller")


def _idle(flag: str, why: str, step: str) -> UsageError:
    return UsageError(f"{flag} would have no effect", why=why, next_step=f"leave {flag} away; or {step}")


def _refuse_joining(run_name: str, joining: Sequence[HostConfig]) -> None:
    if joining:
        raise UsageError(
            f"run {run_name} is not under way here",
            why="--add-host has hosts join a run in the middle",
            next_step="leave it away: the run begins with all hosts that are chosen; or correct --run and --runs-dir",
        )


def _leave_word(run: Run, error: DrivenError) -> None:
    """Ask the process that drives the run to let hosts join. Raises ``DrivenError`` where it is not one of this
    folder."""
    if error.where != str(run.folder):
        raise DrivenError(
            f"{', '.join(run.watching.joining)} cannot join from here: {error.what}",
            error.where,
            error.why,
            "give the command with --add-host where that one is; where that is a host of the fleet, give it here with "
            "--controller and that host: the controller there is then replaced by one that knows them",
        )
    ask_to_join(run.folder, run.watching.joining)
    err.print(f"asked the extract that is at work to let {', '.join(run.watching.joining)} join", markup=False)


def _after_interrupt(options: FleetOptions, hosts: list[HostConfig], run_name: str) -> ExitCode:
    """Ctrl-C at a terminal asks once what it was meant for; a second one, or no terminal, leaves the hosts alone."""
    if sys.stdin is None or not (sys.stdin.isatty() and err.is_terminal):
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
