"""What every fleet command shares: the options that choose hosts, running on them, recap and exit code."""

from __future__ import annotations

import functools
import getpass
import math
import socket
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import click

from fleetdump.agent.formats import SERVER_NAME
from fleetdump.agent.protocol import to_json
from fleetdump.cli._interrupt import end_of_work, leave
from fleetdump.errors import ExitCode, FleetdumpError, LockedError, UnreachableError, kind_of, worst
from fleetdump.fleet import ConnectOptions, Host, Outcome, fan_out
from fleetdump.inventory import HostConfig, Inventory, load
from fleetdump.tasks.rollout import ALL_AT_ONCE, Rollout
from fleetdump.views.console import HostResult, err, print_error, print_json
from fleetdump.views.hosts import show_alike, show_event, show_not_started, show_recap
from fleetdump.views.interrupts import show_change_cut, show_look_cut
from fleetdump.views.progress import StartLines

T = TypeVar("T")
DEFAULT_INVENTORY = "inventory.yaml"


@dataclass(frozen=True)
class FleetOptions:
    """Host selection and output, as every fleet command takes them."""

    inventory: Path
    host: tuple[str, ...]
    exclude: tuple[str, ...]
    ad_hoc: bool
    as_json: bool
    accept_new: bool
    jobs: int
    lock_wait: float = 0.0

    def select(self, read_only: bool) -> list[HostConfig]:
        """The hosts that the command is for; read-only commands may name hosts that the inventory lacks."""
        inventory = load(self.inventory)
        return _selected(inventory, self, read_only)

    def connect_options(self) -> ConnectOptions:
        return ConnectOptions(
            accept_new=self.accept_new,
            operator=operator(),
            lock_wait=self.lock_wait,
            on_locked=lambda host, text: show_event(host, {"event": "step", "text": text}),
        )


def operator() -> str:
    """user@machine of the person at the keyboard, for locks and audit lines on the hosts."""
    try:
        user = getpass.getuser()
    except (KeyError, OSError):
        user = "unknown"
    return f"{user}@{socket.gethostname()}"


def fleet_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add the shared options to a click command and hand them over as one ``FleetOptions``."""

    @click.option(
        "-i",
        "--inventory",
        type=click.Path(path_type=Path),
        envvar="FLEETDUMP_INVENTORY",
        default=DEFAULT_INVENTORY,
        show_default=True,
        help="Inventory file; the environment variable FLEETDUMP_INVENTORY names another default.",
    )
    @click.option(
        "--host",
        multiple=True,
        metavar="PATTERN",
        help="Hosts: names, addresses, globs, gpu[01-08], @group, comma lists; may be repeated. Default: all.",
    )
    @click.option("--exclude", multiple=True, metavar="PATTERN", help="Leave these hosts out.")
    @click.option(
        "--ad-hoc",
        is_flag=True,
        help="Also a --host that the inventory does not have, with its defaults. Commands that only look take such a"
        " one by its address, or a name with a dot, without this.",
    )
    @click.option(
        "--json",
        "as_json",
        is_flag=True,
        help="One JSON object a line on stdout: a result a host, and before it events where a command goes on for a"
        " while.",
    )
    @click.option("--accept-new", is_flag=True, help="Accept and remember unknown host keys (never changed ones).")
    @click.option("--jobs", type=click.IntRange(1, 256), default=32, show_default=True, help="Hosts at a time.")
    @functools.wraps(command)
    def wrapper(
        *args: Any,
        inventory: Path,
        host: tuple[str, ...],
        exclude: tuple[str, ...],
        ad_hoc: bool,
        as_json: bool,
        accept_new: bool,
        jobs: int,
        lock_wait: float = 0.0,
        **kwargs: Any,
    ) -> Any:
        options = FleetOptions(inventory, host, exclude, ad_hoc, as_json, accept_new, jobs, lock_wait)
        return command(options, *args, **kwargs)

    return wrapper


class FiniteRange(click.FloatRange):
    """A number in a range: ``nan`` is in none, and click's own check lets it pass."""

    noun = "a number"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        number = float(super().convert(value, param, ctx))
        if not math.isfinite(number):
            self.fail(f"{value} is not {self.noun}", param, ctx)
        return number


class Seconds(FiniteRange):
    """A number of seconds in a range."""

    noun = "a number of seconds"


class ServerName(click.types.StringParamType):
    """What a server may be called; whether there is one of that name is for the host and its inventory entry."""

    name = "name"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        text = str(value)
        if text and not SERVER_NAME.match(text):
            self.fail(f"{text!r} is no server name: status and the inventory have the names", param, ctx)
        return text


lock_wait_option = click.option(
    "--lock-wait",
    type=Seconds(0, 7 * 86400),
    default=0.0,
    metavar="SECONDS",
    help="Wait so long for another operator's change of a host to end, instead of giving up at once (exit code 5).",
)
"""For commands that change hosts; beside ``fleet_options``, which takes its value."""


@dataclass(frozen=True)
class Verb:
    """One command's run over the fleet. ``show`` prints a host's data for people when it comes, ``show_all`` what is
    to be said of all hosts at the end; ``code`` gives a host's exit code; ``data`` turns it into what ``--json`` prints
    (the JSON of the dataclass by default). ``interrupted`` says how things stand after a Ctrl-C, by the names of hosts
    that had ended and of the others; by default whether something may have been changed on these."""

    name: str
    show: Callable[[str, Any], None]
    show_all: Callable[[dict[str, Any]], None] = lambda _: None
    code: Callable[[Any], ExitCode] = lambda _: ExitCode.OK
    data: Callable[[Any], Any] = to_json
    read_only: bool = False
    deadline: float = 600.0
    recap: bool = True
    interrupted: Callable[[list[str], list[str]], None] | None = None


def run(options: FleetOptions, verb: Verb, function: Callable[[Host], Any], rollout: Rollout = ALL_AT_ONCE) -> None:
    """Run ``function`` on every selected host, in the groups of ``rollout``, print each result as it comes, and exit
    with the worst code; after Ctrl-C at once, with what ``verb.interrupted`` says."""
    hosts = options.select(verb.read_only)
    report = Report(options, verb)
    try:
        _run(report, function, hosts, rollout)
        code = report.close()
    except KeyboardInterrupt:
        end_of_work()
        report.show_all()
        tell = verb.interrupted or (show_look_cut if verb.read_only else functools.partial(show_change_cut, verb.name))
        tell(report.ended, [host.name for host in hosts if host.name not in report.ended])
        leave()
    sys.exit(code)


def _run(report: Report, function: Callable[[Host], Any], hosts: list[HostConfig], rollout: Rollout) -> None:
    options, verb = report.options, report.verb
    groups = rollout.groups(hosts)
    for number, group in enumerate(groups):
        if number and not rollout.may_go_on(report.went_well):
            report.not_started(
                [host.name for rest in groups[number:] for host in rest], rollout.reason(report.went_well)
            )
            break
        fan_out(
            group,
            function,
            limit=options.jobs,
            deadline=verb.deadline + options.lock_wait,
            options=options.connect_options(),
            on_outcome=report.add,
        )


class Report:
    """Prints each host's outcome when it is added, and the recap when it is closed."""

    def __init__(self, options: FleetOptions, verb: Verb):
        self.options = options
        self.verb = verb
        self._results: list[HostResult] = []
        self._codes: list[ExitCode] = []
        self._values: dict[str, Any] = {}
        self._errors: dict[str, list[str]] = {}
        """Hosts by their error's kind; of each kind only the first is told in full."""

    def add(self, name: str, outcome: Outcome[Any]) -> None:
        """One host has ended."""
        result, code = _judge(self.verb, name, outcome)
        self._results.append(result)
        self._codes.append(code)
        if self.options.as_json:
            print_json(result)
        elif outcome.error is not None:
            alike = self._errors.setdefault(kind_of(outcome.error, name), [])
            alike.append(name)
            if len(alike) == 1:
                print_error(outcome.error)
        else:
            self._values[name] = outcome.value
            self.verb.show(name, outcome.value)

    @property
    def ended(self) -> list[str]:
        """Hosts that have, well or not."""
        return [result.host for result in self._results]

    @property
    def went_well(self) -> list[bool]:
        """For each host that has ended, in that order."""
        return [code == ExitCode.OK for code in self._codes]

    def not_started(self, hosts: list[str], why: str) -> None:
        """Hosts whose turn never came."""
        results = [HostResult(host, self.verb.name, "not started") for host in hosts]
        self._results += results
        for result in results if self.options.as_json else []:
            print_json(result)
        show_not_started(hosts, why)

    def show_all(self) -> None:
        """What is to be said of all hosts that have ended together."""
        for first, *others in self._errors.values():
            if others:
                show_alike(first, sorted(others))
        if self._values:
            self.verb.show_all(dict(sorted(self._values.items())))

    def close(self) -> ExitCode:
        """Print what is to be said of all hosts; the exit code that stands for them."""
        self.show_all()
        if self.verb.recap:
            show_recap(sorted(self._results, key=lambda result: result.host))
        return worst(self._codes)


def event_printer(host: str, starts: StartLines | None = None) -> Callable[[dict[str, Any]], None]:
    """Prints the steps of one host as they happen, on stderr, and signs of life of servers that start. ``starts`` is
    shared by hosts that are to be compared with each other."""
    lines = starts or StartLines()

    def show(event: dict[str, Any]) -> None:
        lines.update(host, event)
        show_event(host, event)

    return show


def _judge(verb: Verb, name: str, outcome: Outcome[Any]) -> tuple[HostResult, ExitCode]:
    if outcome.error is not None:
        return HostResult(name, verb.name, _status_of(outcome.error), outcome.error), outcome.error.exit_code
    code = verb.code(outcome.value)
    status = {ExitCode.OK: "ok", ExitCode.STALL: "stall"}.get(code, "failed")
    return HostResult(name, verb.name, status, None, verb.data(outcome.value)), code


def _status_of(error: FleetdumpError) -> str:
    if isinstance(error, UnreachableError):
        return "unreachable"
    return "locked" if isinstance(error, LockedError) else "failed"


def _selected(inventory: Inventory, options: FleetOptions, read_only: bool) -> list[HostConfig]:
    if not read_only or options.ad_hoc:
        return inventory.select(list(options.host), list(options.exclude), ad_hoc=options.ad_hoc)
    selection = inventory.select_read_only(list(options.host), list(options.exclude))
    for name in selection.unlisted:
        err.print(f"note: {name} is not in {options.inventory}; looking at it with the defaults", markup=False)
    return selection.hosts
