"""``fleetdump attach``, ``pause``, ``resume`` and ``cancel``: a run that is under way on the hosts."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace

import click

from fleetdump.agent.runmessages import CANCEL, DRAIN, FINISHED, RunProgress
from fleetdump.cli._fleet import FleetOptions, Report, Verb, fleet_options, lock_wait_option
from fleetdump.cli._interrupt import interruptible
from fleetdump.cli._preflight import ask
from fleetdump.errors import ExitCode, FleetdumpError, UnreachableError, UsageError, worst
from fleetdump.fleet import Host, Outcome, fan_out
from fleetdump.hostpatterns import compress
from fleetdump.inventory import HostConfig
from fleetdump.suggest import did_you_mean
from fleetdump.tasks.control import DEADLINE, order
from fleetdump.tasks.control import attach as attach_to
from fleetdump.tasks.copies import Copies
from fleetdump.tasks.extract import FOLLOW_SECONDS, require_run_name
from fleetdump.tasks.survey import runs_on, shares_on
from fleetdump.views.console import count, err, out, print_error
from fleetdump.views.run import RunTotals, RunView, Whole

run_option = click.option("--run", "run_name", required=True, metavar="NAME", help="Which run; `status` names them.")


@click.command(short_help="Watch a run that is under way.")
@run_option
@fleet_options
def attach(options: FleetOptions, run_name: str) -> None:
    """Watch a run until it is done, and change nothing: any number of people may, from any machine with the inventory.
    Ctrl-C ends the watching alone.

    \b
    Example:
      fleetdump attach --run conversations
    """
    require_run_name(run_name)
    sys.exit(watch(options, options.select(read_only=True), run_name))


@click.command(short_help="Let the servers rest; nothing is lost.")
@run_option
@lock_wait_option
@fleet_options
def pause(options: FleetOptions, run_name: str) -> None:
    """Have the drivers send nothing more: what is in flight ends and counts. It lasts, also over restarts, until
    `resume`. A whole run that is paused keeps its work where it is; hosts that are chosen with --host or --exclude are
    to leave: an `extract` that watches gives what they have not begun to the others.

    \b
    Examples:
      fleetdump pause --run conversations
      fleetdump pause --run conversations --host @small
    """
    require_run_name(run_name)
    sys.exit(give_order(options, options.select(read_only=False), run_name, "pause", _all_are_meant(options)))


@click.command(short_help="Have hosts leave a run; the others take over.")
@run_option
@lock_wait_option
@fleet_options
def drain(options: FleetOptions, run_name: str) -> None:
    """Have hosts leave a run in the middle: what is in flight there ends and counts, everything else is given to the
    other hosts by the `extract` that watches, and the drivers stop. What is done stays to be collected, so collect
    before the host is given back. `resume` takes it back.

    \b
    Example:
      fleetdump drain --run conversations --host gpu07
    """
    require_run_name(run_name)
    nobody_stays = UsageError(
        "all hosts cannot leave a run",
        why=f"nobody would be left to take over what they have of run {run_name}",
        next_step="name those that leave with --host or --exclude, or have others join first (fleetdump extract "
        "--add-host); fleetdump pause lets the whole run rest",
    )
    if _all_are_meant(options):
        raise nobody_stays
    leaving = options.select(read_only=False)
    require_run(options, replace(options, host=(), exclude=()).select(read_only=True), run_name)
    if not _others_remain(options, leaving, run_name):
        raise nobody_stays
    sys.exit(give_order(options, leaving, run_name, DRAIN, whole_run=False))


@click.command(short_help="Go on with a paused run.")
@run_option
@lock_wait_option
@fleet_options
def resume(options: FleetOptions, run_name: str) -> None:
    """Take back a `pause` or a `drain`, and start drivers that died meanwhile.

    \b
    Example:
      fleetdump resume --run conversations
    """
    require_run_name(run_name)
    sys.exit(give_order(options, options.select(read_only=False), run_name, "resume", _all_are_meant(options)))


@click.command(short_help="End a run; what is done stays.")
@run_option
@click.option("--yes", is_flag=True, help="Do not ask; for a job or a script, where nobody can answer.")
@lock_wait_option
@fleet_options
def cancel(options: FleetOptions, run_name: str, yes: bool) -> None:
    """End a run for good. Samples that are done stay and can be collected; the others are listed as rejected, with
    `cancelled` as the reason.

    \b
    Examples:
      fleetdump cancel --run conversations
      fleetdump cancel --run conversations --yes
    """
    require_run_name(run_name)
    hosts = options.select(read_only=False)
    if not yes:
        require_run(options, hosts, run_name)
        _require_consent(run_name)
    sys.exit(give_order(options, hosts, run_name, "cancel", _all_are_meant(options)))


def _require_consent(run_name: str) -> None:
    """Ask. Raises ``click.Abort`` for a no, ``UsageError`` where nobody is there to answer: in a job, a script."""
    unanswered = UsageError(
        f"run {run_name} is not cancelled",
        why="it is asked first, and standard input has ended without an answer",
        next_step=f"fleetdump cancel --run {run_name} --yes does not ask",
    )
    if sys.stdin is None:  # closed by whoever started us
        raise unanswered
    try:
        click.confirm(f"Give up what is not done of run {run_name}? It cannot be resumed", abort=True, err=True)
    except click.Abort as abort:
        if not isinstance(abort.__context__, EOFError):
            raise
        err.print()
        raise unanswered from None


def require_run(options: FleetOptions, hosts: list[HostConfig], run_name: str) -> None:
    """Raise ``UsageError`` when no host has the run, ``UnreachableError`` when none of those that answer has it; both
    say which runs there are."""
    answers = ask(options, hosts, runs_on, DEADLINE)
    known = {run for runs, _ in answers.values() for run in runs or []}
    if run_name in known:
        return
    silent = [name for name, (runs, _) in answers.items() if runs is None]
    there_are = f"the runs there: {', '.join(sorted(known))}" if known else "there is no run at all"
    near = did_you_mean(run_name, known)
    step = "correct --run; fleetdump status shows what each host has"
    if not silent:
        raise UsageError(f"no host has run {run_name}{near}", why=there_are, next_step=step)
    where = ", ".join(compress(sorted(silent)))
    raise UnreachableError(
        f"no host that answers has run {run_name}{near}",
        where,
        f"{count(len(silent), 'host')} gave no answer; of the others: {there_are}",
        f"{step}; or, when the run is on {where}, give the command again when that answers",
    )


def _all_are_meant(options: FleetOptions) -> bool:
    return not (options.host or options.exclude)


def _others_remain(options: FleetOptions, leaving: list[HostConfig], run_name: str) -> bool:
    """Whether another host of the inventory has part in the run and is not told to leave, or cannot be asked."""
    names = {host.name for host in leaving}
    others = [host for host in replace(options, host=(), exclude=()).select(read_only=True) if host.name not in names]
    answers = ask(options, others, lambda host: shares_on(host, run_name), DEADLINE)
    return any(
        error is not None or any(one.order != DRAIN for one in shares or []) for shares, error in answers.values()
    )


def watch(options: FleetOptions, hosts: list[HostConfig], run_name: str) -> ExitCode:
    """Show the run as it goes until all of these hosts are done with it, or nobody works on it any more."""
    verb = Verb("attach", show_shares, code=_watched, deadline=FOLLOW_SECONDS + 900)
    copies = Copies(run_name)

    def once_each(totals: RunTotals) -> RunTotals:
        whole = Whole(copies.run_samples, lambda: copies.count)
        return whole.corrected(totals) if copies.there_are else totals

    with interruptible(goes_on(run_name)), RunView(options.as_json, corrected=once_each) as view, copies.counted():

        def on_progress(host: str, share: RunProgress) -> None:
            copies.note(host, share)
            view.update(host, share)

        def follow(host: Host) -> list[RunProgress]:
            copies.meet(host)
            return attach_to(host, run_name, on_progress)

        code, _ = _on_all(options, hosts, run_name, verb, follow)
    return code


def goes_on(run_name: str) -> str:
    """What becomes of a run that nobody watches any more, and what can be done about it."""
    return (
        f"the hosts go on with what they have of run {run_name}: fleetdump attach --run {run_name} watches it, "
        "fleetdump pause and cancel end that"
    )


def give_order(
    options: FleetOptions, hosts: list[HostConfig], run_name: str, what: str, whole_run: bool = True
) -> ExitCode:
    """Leave an order with the drivers of these hosts; ``whole_run`` as in ``OrderArgs``."""
    verb = Verb(what, lambda host, shares: _show_ordered(what, host, shares), code=code_of, deadline=DEADLINE)
    with interruptible(f"{what} may have reached some of the hosts: give it again, or see fleetdump status"):
        code, shares = _on_all(
            options, hosts, run_name, verb, lambda host: order(host, run_name, what, whole_run=whole_run)
        )
    given_away = sum(share.given_away for share in shares)
    if code == ExitCode.OK and all(share.state in FINISHED for share in shares) and given_away:
        text = (
            f"these hosts have done what they kept of run {run_name}, and gave {count(given_away, 'sample')} away: the"
        )
        text += " same extract command hands them to others and says when all is done"
        err.print(f"{text}; next: that, then fleetdump collect --run {run_name} --data", markup=False)
    elif code == ExitCode.OK and all(share.state in FINISHED for share in shares):
        err.print(f"all of run {run_name} is done; next: fleetdump collect --run {run_name} --data", markup=False)
    elif code == ExitCode.OK and what == "pause":
        err.print(f"next: fleetdump resume --run {run_name}", markup=False)
    elif code == ExitCode.OK and what == DRAIN:
        text = f"an extract of run {run_name} that watches gives their work to the others; where none does, give that"
        err.print(f"{text} command again. Then: fleetdump collect --run {run_name} --data", markup=False)
    return code


def _on_all(
    options: FleetOptions,
    hosts: list[HostConfig],
    run_name: str,
    verb: Verb,
    function: Callable[[Host], list[RunProgress]],
) -> tuple[ExitCode, list[RunProgress]]:
    """The exit code, and the shares of the hosts that answered."""
    report = Report(options, verb)
    outcomes: dict[str, Outcome[list[RunProgress]]] = fan_out(
        hosts,
        function,
        limit=options.jobs,
        deadline=verb.deadline + options.lock_wait,
        options=options.connect_options(),
        on_outcome=report.add,
    )
    code = report.close()
    shares = [share for outcome in outcomes.values() for share in outcome.value or []]
    if not shares:
        try:
            require_run(options, hosts, run_name)
        except FleetdumpError as error:
            print_error(error)
            code = worst([code, error.exit_code])
    return code, shares


def _show_ordered(what: str, host: str, shares: list[RunProgress]) -> None:
    """A line a share: its driver obeys within a second, so its state says nothing of that yet."""
    for share in shares:
        is_over = share.state in FINISHED
        text = f"{host}/{share.server}: {f'already {share.state}' if is_over else f'{what} ordered'}"
        text += f", {share.done}/{share.samples} samples"
        told = share.detail if share.state in ("stopped", "failed") else ""
        out.print(text + (f"; {told}" if told else ""), markup=False)


def show_shares(host: str, shares: list[RunProgress]) -> None:
    """A line a share, and what its tokeniser noted."""
    for share in shares:
        state = "cancelled" if share.state == "done" and share.order == CANCEL and share.rejected else share.state
        text = f"{host}/{share.server}: {state}, {share.done}/{share.samples} samples"
        if share.rejected:
            text += f", {share.rejected} rejected (their reasons: fleetdump collect)"
        out.print(text + (f"; {share.detail}" if share.detail else ""), markup=False)
        for note in share.notes:
            out.print(f"  {note}", markup=False)


def code_of(shares: list[RunProgress]) -> ExitCode:
    """Failed when one of the shares is."""
    return ExitCode.FAILED if any(share.state == "failed" for share in shares) else ExitCode.OK


def _watched(shares: list[RunProgress]) -> ExitCode:
    """Failed, too, when nobody works on one of the shares any more."""
    return ExitCode.FAILED if any(share.state == "stopped" for share in shares) else code_of(shares)
