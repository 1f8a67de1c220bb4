"""``extract`` at work: hand the shares out, and watch until every host has ended that takes part."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from fleetdump.agent.runmessages import RunProgress
from fleetdump.cli._fleet import FleetOptions, Report, Verb
from fleetdump.cli._lookaround import look_around, require_ours
from fleetdump.cli._members import Members
from fleetdump.cli.runcontrol import code_of, show_shares
from fleetdump.dataset.intake import DataSet
from fleetdump.errors import DrivenError, ExitCode, UsageError, worst
from fleetdump.fleet import Host, Outcome, fan_out
from fleetdump.fleet.fanout import MAX_THREADS
from fleetdump.hostpatterns import compress
from fleetdump.inventory import HostConfig
from fleetdump.ledger import Ledger
from fleetdump.tasks.assignment import RunPlan, Share, open_run, targets_of
from fleetdump.tasks.attendance import Attendance, JoinRequests
from fleetdump.tasks.extract import FOLLOW_SECONDS, ExtractSettings, runs_file, submit
from fleetdump.tasks.places import Places
from fleetdump.tasks.rebalance import Balancer, left_with_others
from fleetdump.tasks.rejected import write_rejected
from fleetdump.tasks.steering import Controller
from fleetdump.tasks.supervise import Policy, Supervisor
from fleetdump.tasks.survey import is_cancelled
from fleetdump.views.console import count, duration, err, out, print_error
from fleetdump.views.hosts import show_event
from fleetdump.views.run import RunView, Whole


@dataclass(frozen=True)
class Watching:
    """What is done while the command watches: ``policy`` for servers that die, ``patience`` (seconds) with hosts that
    cannot be reached, the hosts that were told to join, and what others ask for from before the run is ours on."""

    policy: Policy
    patience: float
    joining: Sequence[str]
    requests: JoinRequests


@dataclass(frozen=True)
class Run:
    """What the command line says of the run."""

    name: str
    runs_dir: Path
    settings: ExtractSettings
    watching: Watching
    detach: bool
    seated: bool
    """It gets a controller on a host of the fleet."""
    controller: Controller
    """This process, as the hosts know it."""

    @property
    def folder(self) -> Path:
        return self.runs_dir / self.name


def named_hosts(options: FleetOptions, patterns: tuple[str, ...]) -> list[HostConfig]:
    """The hosts of the inventory, as it is now, that these patterns mean."""
    return replace(options, host=patterns, exclude=()).select(read_only=False) if patterns else []


@dataclass
class End:
    """What became of a run: the exit code of its hosts, their shares, how many samples none of them has, and how many
    each host has of these that the command was not given (``with_others``)."""

    code: ExitCode
    shares: list[RunProgress]
    left_over: int = 0
    with_others: dict[str, int] = field(default_factory=dict)

    @property
    def exit_code(self) -> ExitCode:
        """Of the command: a run of which samples are left over is not done."""
        return worst([self.code, ExitCode.FAILED]) if self.left_over else self.code


def drive(options: FleetOptions, hosts: list[HostConfig], rows: DataSet, run: Run) -> ExitCode:
    """Hand out the shares and, unless detached, watch them being worked on."""
    with Ledger(runs_file(run.runs_dir, run.name)) as ledger:
        targets = targets_of(hosts)
        # A run that this ledger has is compared with the data before any host is asked; another one they know better.
        known = open_run(ledger, run.name, rows, targets) if ledger.is_planned else None
        around = look_around(options, hosts, run.name, ledger, run.controller)
        plan = known or open_run(ledger, run.name, rows, targets, around.share_ids)
        around.note(ledger)
        if not plan.resumed:
            run.settings.note(ledger)
        write_rejected(ledger, run.folder)
        _announce(plan, goes_on=plan.resumed or bool(around.share_ids))
        with_shares = {host for host, _ in plan.shares} & {host.name for host in hosts}
        try:
            if run.detach:
                end = _hand_out(options, [host for host in hosts if host.name in with_shares], plan, run, ledger)
            else:
                balancer = Balancer(
                    run.name, ledger, lambda ids: Share(rows.lines(ids)), set(with_shares), around.knows_all
                )
                balancer.patience = run.watching.patience
                # A host without a share joins the run: it takes over from the others.
                taking_part = [host for host in hosts if host.name in with_shares or host.servers]
                end = _watch(options, taking_part, plan, run, balancer)
        except DrivenError:
            if not plan.resumed and not any(share.submitted_at for share in ledger.shares()):
                ledger.forget_plan()
            raise
    _tell_too_late(run)
    if end.left_over:
        _tell_what_is_left(run.name, end)
    elif any(is_cancelled(share) for share in end.shares):
        err.print(f"run {run.name} was cancelled; next: fleetdump collect --data, for what is done", markup=False)
    elif end.code == ExitCode.OK and not run.seated:
        watch_it = f"fleetdump attach --run {run.name}, or the same command without --detach, which also moves work"
        next_step = watch_it if run.detach else "fleetdump collect --data"
        err.print(f"run {run.name} {'is under way' if run.detach else 'is done'}; next: {next_step}", markup=False)
    return end.exit_code


def _tell_what_is_left(run_name: str, end: End) -> None:
    elsewhere = sum(end.with_others.values())
    if elsewhere:
        names = ", ".join(compress(sorted(end.with_others)))
        err.print(
            f"run {run_name} is not done: {count(elsewhere, 'sample')} given to {names} are not known to be done, and "
            f"this command was not given {names}; next: the same command without --exclude, or with a --host that "
            "means them too; add --patience 0 when they cannot be reached: then the other hosts compute them at once",
            markup=False,
        )
    nobodys = end.left_over - elsewhere if end.code == ExitCode.OK else end.left_over
    if nobodys > 0:
        _tell_left_over(run_name, nobodys)


def _report(options: FleetOptions) -> Report:
    return Report(options, Verb("extract", show_shares, code=code_of, deadline=FOLLOW_SECONDS))


def _hand_out(options: FleetOptions, hosts: list[HostConfig], plan: RunPlan, run: Run, ledger: Ledger) -> End:
    """Each host gets its shares, and is left to itself."""
    report, places = _report(options), _places(hosts, run)

    def hand_out(host: Host) -> list[RunProgress]:
        with places.on(host):
            return submit(host, plan, run.settings, ledger)

    def ended(name: str, outcome: Outcome[list[RunProgress]]) -> None:
        if not isinstance(outcome.error, DrivenError):
            report.add(name, outcome)

    with RunView(options.as_json):
        outcomes = fan_out(
            hosts,
            hand_out,
            limit=max(options.jobs, len(hosts)),
            deadline=FOLLOW_SECONDS + 900,
            options=options.connect_options(),
            on_outcome=ended,
        )
    places.require_undisputed()
    return End(report.close(), [share for outcome in outcomes.values() for share in outcome.value or []])


def _watch(options: FleetOptions, hosts: list[HostConfig], plan: RunPlan, run: Run, balancer: Balancer) -> End:
    """Each host gets its shares, then what others have more of; until all are done, or nobody is left to do it."""
    attendance = Attendance(hosts, _joining_later(options, run), set(run.watching.joining))
    supervisor = Supervisor(run.name, run.watching.policy, _teller(options))
    report, final, places = _report(options), list[RunProgress](), _places(hosts, run)
    balancer.stopped = lambda: places.disputed

    def ended(name: str, outcome: Outcome[list[RunProgress]]) -> None:
        if attendance.ended(name, outcome):
            balancer.forget(name)
            final.extend(outcome.value or [])
            if not isinstance(outcome.error, DrivenError):
                report.add(name, outcome)
            return
        balancer.lost(name)
        if attendance.is_first_try(name):
            _tell_absence(name, outcome, balancer.patience)

    whole = Whole(plan.samples, balancer.ledger.copies)
    with RunView(options.as_json, moves=True, corrected=whole.corrected) as view:
        members = Members(plan, run.settings, places, balancer, attendance, view, supervisor)

        def work(host: Host) -> list[RunProgress]:
            with places.on(host):
                return members.work(host)

        fan_out(
            hosts,
            work,
            limit=max(options.jobs, MAX_THREADS),
            deadline=FOLLOW_SECONDS + 900,
            options=options.connect_options(),
            on_outcome=ended,
            later=attendance.later,
        )
    places.require_undisputed()
    if places.lost:
        require_ours(options, hosts, balancer.ledger, run.controller)
    for name, outcome in attendance.absent().items():
        report.add(name, outcome)
        if balancer.ledger.shares(name):
            _tell_left(balancer.ledger, run.name, name)
    code, left_over = report.close(), balancer.left_over()
    if code == ExitCode.OK:  # every host has told what it has: what none of them has must not be called done
        left_over = max(left_over, balancer.ledger.totals().lost)
    return End(code, final, left_over, left_with_others(balancer.ledger, {*attendance.asked, *(h.name for h in hosts)}))


def _places(hosts: Sequence[HostConfig], run: Run) -> Places:
    """While this process has a host's place, no other hands out or moves samples of the run there."""
    return Places(run.controller, hosts, lambda name, text: show_event(name, {"event": "step", "text": text}))


def _teller(options: FleetOptions) -> Callable[[str, dict[str, Any]], None]:
    """Shows what is done about a server that died; scripts get its steps as objects too."""

    def tell(host: str, event: dict[str, Any]) -> None:
        if options.as_json and event.get("event") == "step":
            out.print(json.dumps({"host": host, **event}), markup=False)
        show_event(host, event)

    return tell


def _joining_later(options: FleetOptions, run: Run) -> Callable[[], list[HostConfig]]:
    """Hosts that another call with --add-host names, as the inventory has them then."""

    def named(name: str) -> list[HostConfig]:
        try:
            return named_hosts(options, (name,))
        except UsageError as error:
            print_error(error)
            return []

    def look() -> list[HostConfig]:
        return list({host.name: host for name in run.watching.requests.names() for host in named(name)}.values())

    return look


def _tell_too_late(run: Run) -> None:
    """Who asked after the last look, or while the shares were handed out that nobody watches."""
    names = run.watching.requests.names()
    if names:
        text = f"{', '.join(names)} did not join, nobody watches run {run.name} any more; next: the same command again"
        err.print(text, markup=False)


def _tell_absence(name: str, outcome: Outcome[list[RunProgress]], patience: float) -> None:
    text = "trying again; what it has not done goes to the others too"
    text += f" after {duration(patience)}" if patience else " now"
    show_event(name, {"event": "step", "text": f"{outcome.error}; {text}"})


def _tell_left(ledger: Ledger, run_name: str, name: str) -> None:
    """What a host that never came back keeps to itself, as far as is known."""
    left = len(ledger.unsettled(name))
    text = f"{count(left, 'sample')} of run {run_name} are not known to be done" if left else "its work is done"
    step = "give the same command again when it is back; with --patience 0 others compute them at once" if left else ""
    if not left and ledger.overtaken(name):
        text = f"what it had not done of run {run_name} was given to others"
        step = "give the same command again when it is back, so that it does not compute that too"
    show_event(name, {"event": "step", "text": f"{text}; next: {step}" if step else text})


def _tell_left_over(run_name: str, left_over: int) -> None:
    what = f"{count(left_over, 'sample')} are with nobody: given away, refused, or their lines cannot be read"
    step = (
        f"fleetdump collect --run {run_name} names lines that cannot be read; else deploy another host and give the "
        f"same command with --add-host; or fleetdump resume --run {run_name} --host with one that leaves, and the same"
    )
    err.print(f"run {run_name} is not done: {what}; next: {step}", markup=False)


def _announce(plan: RunPlan, *, goes_on: bool) -> None:
    verb = "going on with" if goes_on else "starting"
    err.print(
        f"{verb} run {plan.run}: {count(plan.samples, 'sample')} on {count(len(plan.shares), 'server')}", markup=False
    )
