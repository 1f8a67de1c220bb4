"""``extract --controller``: try a host out as the controller's seat before a run, and put it there once it is under
way."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from fleetdump.agent.hostmessages import StatusArgs, StatusResult
from fleetdump.cli._fleet import FleetOptions
from fleetdump.cli._preflight import LOOK_DEADLINE, ask
from fleetdump.dataset.intake import DataSet
from fleetdump.errors import DrivenError, UsageError
from fleetdump.fleet import Host
from fleetdump.inventory import HostConfig
from fleetdump.suggest import did_you_mean
from fleetdump.tasks.controller import (
    DATA_DEADLINE,
    DEADLINE,
    Seat,
    controller_there,
    fleet_from,
    require_alone,
    run_files,
    seat_controller,
    try_out,
)
from fleetdump.tasks.steering import Controller
from fleetdump.views.console import err


def require_undriven(options: FleetOptions, hosts: Sequence[HostConfig], me: Controller) -> None:
    """Raise ``DrivenError`` when another controller drives the run, as one of the hosts knows; ``UsageError`` when that
    one drives it with other data. Hosts that do not answer are asked again with their shares."""

    def look(host: Host) -> None:
        require_alone(host, me.run, host.call(StatusArgs(), StatusResult, verb="status"), me)

    for _, error in ask(options, hosts, look, LOOK_DEADLINE).values():
        if isinstance(error, (DrivenError, UsageError)):
            raise error


def try_seat(
    options: FleetOptions, hosts: Sequence[HostConfig], me: Controller, name: str, python: str, *, joining: bool = False
) -> Seat:
    """The seat on host ``name``, once it has shown that a controller there reaches all of ``hosts``; nothing has begun
    by then. With ``joining`` it may replace one that lives there and does not know all of ``hosts``. Raises
    ``DrivenError`` when the run has another controller, and what ``tasks.controller`` does."""
    host = _of_the_run(hosts, name)
    known = {config.name: config for config in hosts}
    replaced = _controller_on(options, host, me.run) if joining else ""

    def look(one: Host) -> HostConfig:
        require_alone(one, me.run, one.call(StatusArgs(), StatusResult, verb="status"), me, replaced)
        return one.resolved()

    answers = ask(options, hosts, look, DEADLINE)
    for one, (_, error) in answers.items():
        if error is not None and (one == host.name or isinstance(error, (DrivenError, UsageError))):
            raise error
    # One that does not answer now is tried from there all the same.
    fleet = fleet_from(host.name, {one: answers[one][0] or known[one] for one in known})
    seat = Seat(me.run, host, python, fleet, bool(replaced))
    err.print(f"trying {host.name} as the controller's host: does it reach the others?", markup=False)
    _, error = ask(options, [host], lambda one: try_out(one, seat), DEADLINE + 60.0)[host.name]
    if error is not None:
        raise error
    return seat


def _controller_on(options: FleetOptions, host: HostConfig, run: str) -> str:
    def look(one: Host) -> str:
        return controller_there(run, one.call(StatusArgs(), StatusResult, verb="status"))

    there, error = ask(options, [host], look, LOOK_DEADLINE)[host.name]
    if error is not None:
        raise error
    return there or ""


def take_seat(options: FleetOptions, seat: Seat, data: DataSet, ledger: Path, argv: Sequence[str]) -> None:
    """Start the controller of a run that is under way. Raises what ``seat_controller`` does."""
    err.print(f"bringing {len(data.rows)} rows to {seat.host.name}", markup=False)
    files = run_files(seat.run, data, ledger)
    value, error = ask(options, [seat.host], lambda one: seat_controller(one, seat, files, argv), DATA_DEADLINE)[
        seat.host.name
    ]
    if error is not None:
        raise error
    assert value is not None
    err.print(
        f"the controller of run {seat.run} works on {seat.host.name} (pid {value.pid}, log {value.log}) until the run "
        f"is done; next: fleetdump attach --run {seat.run}",
        markup=False,
    )


def _of_the_run(hosts: Sequence[HostConfig], name: str) -> HostConfig:
    """The host of that name or address. It has to take part: whoever looks for the run's controller asks its hosts."""
    for host in hosts:
        if name in (host.name, host.address):
            return host
    near = did_you_mean(name, (host.name for host in hosts))
    raise UsageError(
        f"--controller {name} is no host of this run{near}",
        why="another extract of the run looks for a controller on the hosts that take part",
        next_step="name one of them, as the inventory calls it",
    )
