"""``fleetdump extract``."""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from pathlib import Path

import click

from fleetdump.cli._controller import take_seat, try_seat
from fleetdump.cli._data import DataOptions, data_options
from fleetdump.cli._driving import Run, Watching, drive, named_hosts
from fleetdump.cli._fleet import FleetOptions, Seconds, fleet_options, lock_wait_option
from fleetdump.cli._interrupt import say_and_leave
from fleetdump.cli._preflight import look_at, preview_on
from fleetdump.cli.runcontrol import give_order, goes_on, watch
from fleetdump.dataset.intake import DataSet
from fleetdump.dataset.rows import BrokenRow
from fleetdump.errors import ExitCode, LockedError, UnreachableError, UsageError
from fleetdump.inventory import HostConfig
from fleetdump.tasks.attendance import JoinRequests, ask_to_join
from fleetdump.tasks.controller import arguments
from fleetdump.tasks.extract import (
    ExtractSettings,
    is_begun,
    require_run_name,
    runs_file,
    targets_of,
)
from fleetdump.tasks.plan import Limits, estimate, require_deployed, require_fit, sample_of
from fleetdump.tasks.rebalance import PATIENCE_SECONDS
from fleetdump.tasks.runlock import CONTROLLER, sole
from fleetdump.tasks.supervise import Policy
from fleetdump.views.console import err

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
    help="Without a host for so long, others compute what it has not done, while this command watches.",
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
    it and give the command again with --add-host; `drain` takes one out. While one extract of a run is at work on this
    machine, a second one only watches. Ctrl-C at a terminal asks once whether to leave the hosts at work, to pause, or
    to cancel. Without it nothing expires: a driver whose server died waits until it is launched again.
    For a laptop that sleeps --controller leaves all this to a process on a host of the fleet (docs/run.md).

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
    run_name = run_name or _run_name(data.path)
    hosts, joining = options.select(read_only=False), named_hosts(options, add_host)
    hosts += [host for host in joining if host not in hosts]
    settings = ExtractSettings(data.max_tokens, data.too_long, token_budget, max_attempts, allow_failed_selfcheck)
    require_run_name(run_name)
    rows = data.take_in()
    _name_broken(rows.broken)
    targets_of(hosts)  # before any host is asked: can there be a run at all?
    try:
        seat = try_seat(options, hosts, run_name, seat_name, controller_python) if seat_name else None
    except LockedError as error:
        if joining:  # its controller is on a host, where nobody can leave word
            raise
        sys.exit(_only_watch(options, hosts, run_name, error))
    if not is_begun(runs_file(runs_dir, run_name)):
        _refuse_joining(run_name, joining)
        _preflight(options, hosts, rows, data.limits, allow_full_disk)
    requests = JoinRequests(runs_dir / run_name, lambda text: err.print(text, markup=False))
    policy = Policy(restarts, selfcheck=not allow_failed_selfcheck)
    watching = Watching(policy, patience, [one.name for one in joining], requests)
    run = Run(run_name, runs_dir, settings, watching, detach or seat is not None, seated=seat is not None)
    try:
        with sole(runs_dir / run_name, CONTROLLER):
            code = drive(options, hosts, rows, run)
            if seat is not None:
                argv = arguments(run_name, settings, ["--restart", str(restarts), "--patience", str(patience)])
                take_seat(options, seat, rows, runs_file(runs_dir, run_name), argv)
    except LockedError as error:
        if joining:
            _leave_word(run, error)
        code = _only_watch(options, hosts, run_name, error)
    except KeyboardInterrupt:
        code = _after_interrupt(options, hosts, run_name)
    sys.exit(code)


def _refuse_joining(run_name: str, joining: Sequence[HostConfig]) -> None:
    if joining:
        raise UsageError(
            f"run {run_name} is not under way here",
            why="--add-host has hosts join a run in the middle",
            next_step="leave it away: the run begins with all hosts that are chosen; or correct --run and --runs-dir",
        )


def _leave_word(run: Run, error: LockedError) -> None:
    """Ask the process that drives the run to let hosts join. Raises ``error`` where that is on another machine."""
    if error.where != str(run.folder):
        raise error
    ask_to_join(run.folder, run.watching.joining)
    err.print(f"asked the extract that is at work to let {', '.join(run.watching.joining)} join", markup=False)


def _only_watch(options: FleetOptions, hosts: list[HostConfig], run_name: str, error: LockedError) -> ExitCode:
    err.print(f"{error.what}, {error.why}: only watching", markup=False)
    return watch(options, hosts, run_name)


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
