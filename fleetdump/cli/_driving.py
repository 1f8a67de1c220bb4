"""``extract`` at work: hand the shares out, and watch until every host has ended that takes part."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from fleetdump.agent.formats import server_of
from fleetdump.agent.runmessages import FINISHED, RunProgress
from fleetdump.cli._fleet import FleetOptions, Report, Verb
from fleetdump.cli.runcontrol import code_of, show_shares
from fleetdump.dataset.intake import DataSet
from fleetdump.errors import DrivenError, ExitCode, HostError, LockedError, UnreachableError, UsageError, worst
from fleetdump.fleet import Host, Outcome, fan_out
from fleetdump.fleet.fanout import MAX_THREADS
from fleetdump.hostpatterns import compress
from fleetdump.inventory import HostConfig
from fleetdump.ledger import Ledger
from fleetdump.tasks.attendance import Attendance, JoinRequests
from fleetdump.tasks.extract import (
    FOLLOW_SECONDS,
    ExtractSettings,
    RunPlan,
    Share,
    Target,
    follow,
    open_run,
    runs_file,
    submit,
    targets_of,
)
from fleetdump.tasks.intake import taking_in
from fleetdump.tasks.rebalance import START_SECONDS, Balancer, left_with_others, require_server, serves
from fleetdump.tasks.rejected import write_rejected
from fleetdump.tasks.steering import Controller, Places
from fleetdump.tasks.supervise import Policy, Supervisor
from fleetdump.tasks.survey import Surveyed, is_cancelled, require_not_cancelled, shares_on, sight, survey
from fleetdump.views.console import count, duration, err, out, print_error
from fleetdump.views.hosts import show_event
from fleetdump.views.run import RunView, Whole

STANDSTILL_SECONDS = 300.0
"""All servers that have work left are dead and stay so: for so long somebody may launch one, then the command ends."""


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
        around = _look_around(options, hosts, run.name, ledger, run.controller)
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
    report = _report(options)
    places, standing_back = _places(hosts, run), StandingBack()

    def hand_out(host: Host) -> list[RunProgress]:
        with standing_back.told_by(host, run), places.on(host):
            return submit(host, plan, run.settings, ledger)

    def ended(name: str, outcome: Outcome[list[RunProgress]]) -> None:
        if not standing_back.takes(outcome):
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
    standing_back.stand()
    return End(report.close(), [share for outcome in outcomes.values() for share in outcome.value or []])


def _watch(options: FleetOptions, hosts: list[HostConfig], plan: RunPlan, run: Run, balancer: Balancer) -> End:
    """Each host gets its shares, then what others have more of; until all are done, or nobody is left to do it."""
    attendance = Attendance(hosts, _joining_later(options, run), set(run.watching.joining))
    supervisor = Supervisor(run.name, run.watching.policy, _teller(options))
    report, final, standing_back = _report(options), list[RunProgress](), StandingBack()

    def ended(name: str, outcome: Outcome[list[RunProgress]]) -> None:
        if attendance.ended(name, outcome):
            balancer.forget(name)
            final.extend(outcome.value or [])
            if not standing_back.takes(outcome):
                report.add(name, outcome)
            return
        balancer.lost(name)
        if attendance.is_first_try(name):
            _tell_absence(name, outcome, balancer.patience)

    whole = Whole(plan.samples, balancer.ledger.copies)
    with RunView(options.as_json, moves=True, corrected=whole.corrected) as view:
        members, places = Members(plan, run, balancer, attendance, view, supervisor), _places(hosts, run)

        def work(host: Host) -> list[RunProgress]:
            with standing_back.told_by(host, run), places.on(host):
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
    standing_back.stand()
    if places.lost:
        _require_ours(options, hosts, run, balancer.ledger)
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


class StandingBack:
    """Another controller drives the run, as some host found while this one meant to: what that one does makes our
    ledger old, so nothing is judged by it."""

    def __init__(self) -> None:
        self._driven: DrivenError | None = None

    @contextlib.contextmanager
    def told_by(self, host: Host, run: Run) -> Iterator[None]:
        """What the host refuses inside because of the other one is raised as ``DrivenError``."""
        try:
            yield
        except DrivenError:
            raise
        except LockedError as error:
            if not _is_driven(host, run):
                raise
            raise DrivenError.of(error) from error

    def takes(self, outcome: Outcome[list[RunProgress]]) -> bool:
        """Whether that is how a host has ended."""
        if isinstance(outcome.error, DrivenError):
            self._driven = self._driven or outcome.error
            return True
        return False

    def stand(self) -> None:
        """Once all hosts have ended: raise ``DrivenError`` if one of them has found another controller."""
        if self._driven is not None:
            raise self._driven


def _is_driven(host: Host, run: Run) -> bool:
    """Whether another controller has the run on the host, with whatever data."""
    try:
        return sight(host, run.name, run.controller).driven is not None
    except UsageError:
        return True


def _teller(options: FleetOptions) -> Callable[[str, dict[str, Any]], None]:
    """Shows what is done about a server that died; scripts get its steps as objects too."""

    def tell(host: str, event: dict[str, Any]) -> None:
        if options.as_json and event.get("event") == "step":
            out.print(json.dumps({"host": host, **event}), markup=False)
        show_event(host, event)

    return tell


@dataclass(frozen=True)
class Around:
    """What the hosts that have told know of the run; ``knows_all``: none is missing."""

    hosts: dict[str, Surveyed]
    knows_all: bool

    @property
    def share_ids(self) -> dict[Target, str]:
        """Of all their shares."""
        return {(name, share.server): share.share_id for name, has in self.hosts.items() for share in has.shares}

    def note(self, ledger: Ledger) -> None:
        """Have the ledger know what they took over."""
        for name, has in self.hosts.items():
            has.note(ledger, name)


def _look_around(
    options: FleetOptions, hosts: list[HostConfig], run_name: str, ledger: Ledger, me: Controller | None = None
) -> Around:
    """Learn what the hosts know of the run and we do not. Raises ``UsageError`` for a cancelled run, ``DrivenError``
    for one that another controller drives. A host that cannot be asked is reported with its share."""
    outcomes = fan_out(
        hosts, lambda host: survey(host, run_name, ledger, me), limit=options.jobs, options=options.connect_options()
    )
    for outcome in outcomes.values():
        if isinstance(outcome.error, (DrivenError, UsageError)):
            raise outcome.error
    told = {name: outcome.value for name, outcome in outcomes.items() if outcome.value is not None}
    require_not_cancelled(run_name, {name: has.shares for name, has in told.items()})
    return Around(told, len(told) == len(outcomes))


def _require_ours(options: FleetOptions, hosts: list[HostConfig], run: Run, ledger: Ledger) -> None:
    """A place was lost: raise ``DrivenError`` when another controller drives the run now, or has moved samples since.
    What became of them our ledger does not know."""
    around = _look_around(options, hosts, run.name, ledger, run.controller)
    moved_to = sorted(name for name, has in around.hosts.items() if has.taken_over)
    if moved_to:
        raise DrivenError(
            f"run {run.name} was driven by another controller meanwhile",
            ", ".join(compress(moved_to)),
            f"it has given samples to {', '.join(compress(moved_to))} that this one knows nothing of",
            f"fleetdump collect --run {run.name} says whether samples are missing",
        )


@dataclass
class Members:
    """What each host does in a run that is watched: its shares, and then what it takes over from hosts that have more
    left."""

    plan: RunPlan
    run: Run
    balancer: Balancer
    attendance: Attendance
    view: RunView
    supervisor: Supervisor
    _handed: dict[str, RunPlan] = field(default_factory=dict)
    """What a host was given last to take over, until it is known to have it."""
    _still_since: float | None = None

    def work(self, host: Host) -> list[RunProgress]:
        """A host's part, to its end; its shares as they are then."""
        name = host.config.name
        returns = self.attendance.arrived(name)
        try:
            with taking_in(host, self.run.name, self.balancer.ledger):
                return self._take_part(host, returns)
        except UnreachableError:
            self.balancer.lost(name)
            raise
        finally:
            self.balancer.forget(name)

    def _take_part(self, host: Host, returns: bool) -> list[RunProgress]:
        states, more = self._return(host) if returns else self._begin(host)
        self.balancer.has_told(host.config.name)
        while True:
            if more is not None:
                states = [*states, *self._hand_over(host, more, states)]
            states, more = self._follow(host, states)
            if any(share.state == "failed" for share in states) and more is None:
                return states
            if more is None and (states or serves(host)):
                more = self.balancer.wait_for_work(host)
            if more is None:
                return states

    def _follow(self, host: Host, states: list[RunProgress]) -> tuple[list[RunProgress], RunPlan | None]:
        """To the end of the host's shares; or only until it has something to take over, shortly before that end."""
        more = None
        if not _is_over(states):
            states = self._states(host, ahead=START_SECONDS)
        if not _is_over(states) and all(share.state != "failed" for share in states):
            more = self.balancer.ask(host)
        if more is None and not _is_over(states):
            states = self._states(host)
        return states, more

    def _states(self, host: Host, ahead: float = 0.0) -> list[RunProgress]:
        """The host's shares when they have ended, or so many seconds before."""
        return follow(host, self.run.name, lambda _, progress: self._note(host, progress), ahead=ahead)

    def _begin(self, host: Host) -> tuple[list[RunProgress], RunPlan | None]:
        """The host's own shares, and what they once gave away to nobody."""
        name = host.config.name
        self.balancer.back(host, self.plan)
        states = submit(host, self.plan, self.run.settings, self.balancer.ledger)
        for share in states:
            self._note(host, share)  # a share that is done already is never followed
        if not states and name in self.attendance.asked:
            require_server(host)
        return states, self.balancer.reclaim(host, list(self.plan.of_host(name))) if self.plan.resumed else None

    def _return(self, host: Host) -> tuple[list[RunProgress], RunPlan | None]:
        """As ``_begin``, for a host that was lost in the middle: it may have more shares by now than it began with."""
        plan, handed = replace(self.plan, resumed=True), self._handed.get(host.config.name)
        self.balancer.back(host, plan, *([handed] if handed else []))
        submit(host, plan, self.run.settings, self.balancer.ledger)
        states = shares_on(host, self.run.name)
        for share in states:
            self._note(host, share)
        if handed is not None and handed.shares:
            return states, handed
        return states, self.balancer.reclaim(host, list(plan.of_host(host.config.name)))

    def _note(self, host: Host, progress: RunProgress) -> None:
        self.balancer.note(host, progress)
        self.supervisor.note(host, progress)
        self.view.update(host.config.name, progress)
        is_dead = self.supervisor.is_left_dead(host.config.name, progress)
        if not is_dead and self._still_since is None:
            return
        if not self.balancer.only_waits_for(self.supervisor.is_left_dead):
            self._still_since = None
        elif is_dead:
            self._mind_standstill(host.config.name, server_of(progress.server))

    def _mind_standstill(self, name: str, server: str) -> None:
        """Raise ``HostError`` once nobody has been at work for long and nobody will be: else the command would wait for
        ever, and a script with it."""
        now, by_hand = time.monotonic(), f"fleetdump restart --host {name} --server {server}, or fleetdump deploy"
        if self._still_since is None:
            self._still_since = now
            text = f"{server} is dead and nobody else is at work: waiting {duration(STANDSTILL_SECONDS)} for it"
            show_event(name, {"event": "step", "text": f"{text}; next: {by_hand}"})
        if now - self._still_since >= STANDSTILL_SECONDS:
            raise HostError(
                f"server {server} is dead, and nobody else is at work on run {self.run.name}",
                name,
                "it is not restarted any more (the reason stands above)",
                f"{by_hand}; its driver waits for that and nothing is lost; the same command goes on watching",
            )

    def _hand_over(self, host: Host, plan: RunPlan, own: Sequence[RunProgress]) -> list[RunProgress]:
        """``submit`` what the host takes over; what it refuses goes to the next one that asks, and then the host still
        ends what it has of its ``own``."""
        name = host.config.name
        self._handed[name] = plan
        try:
            states = submit(host, plan, self.run.settings, self.balancer.ledger)
        except HostError:
            self.balancer.give_back(plan)
            del self._handed[name]
            if not _is_over(own):
                self._states(host)
            raise
        del self._handed[name]
        return states


def _is_over(shares: Sequence[RunProgress]) -> bool:
    return all(share.state in FINISHED for share in shares)


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
