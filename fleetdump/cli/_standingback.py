"""``extract`` of a run that another controller drives: watch it to its end, from before the first share on."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

from fleetdump.agent.runmessages import FINISHED
from fleetdump.cli._driving import Run
from fleetdump.cli._fleet import FleetOptions
from fleetdump.cli._interrupt import interruptible
from fleetdump.cli._preflight import LOOK_DEADLINE, ask
from fleetdump.cli.runcontrol import goes_on, watch
from fleetdump.errors import DrivenError, ExitCode, UsageError
from fleetdump.inventory import HostConfig
from fleetdump.tasks.runlock import CONTROLLER, sole
from fleetdump.tasks.survey import Sight, sight
from fleetdump.views.console import err

LOOK_SECONDS = 2.0
"""Between two looks for what the other controller has handed out."""


@dataclass(frozen=True)
class Seen:
    """Of the run on all hosts that answered: whether it has shares, whether one of them is not at its end, and whether
    another controller is at work."""

    begun: bool
    unfinished: bool
    driven: bool


def stand_back(options: FleetOptions, hosts: list[HostConfig], run: Run, error: DrivenError) -> ExitCode:
    """Another controller drives the run with the same data: watch for as long as it does, unless only the beginning was
    wanted. Raises ``UsageError`` when it drives it with other data."""
    err.print(f"{error.what}, {error.why}: {'nothing to begin' if run.detach else 'only watching'}", markup=False)
    err.print(f"next: {error.next_step}", markup=False)
    if run.detach:
        return ExitCode.OK
    with interruptible(goes_on(run.name)):
        return _watch_to_the_end(options, hosts, run)


def _watch_to_the_end(options: FleetOptions, hosts: list[HostConfig], run: Run) -> ExitCode:
    """Hosts get their shares one by one, and may get more later: the run has ended when its controller has, or as soon
    as something of it needs somebody (``watch`` says what)."""
    code, waiting = None, False
    while True:
        seen = _look(options, hosts, run)
        if seen.unfinished or (seen.begun and not seen.driven and code is None):
            code = watch(options, hosts, run.name)
            if code != ExitCode.OK or not seen.driven:
                return code
        elif not seen.driven:
            return code if code is not None else _tell_nothing_begun(run.name)
        elif not seen.begun and not waiting:
            waiting = True
            err.print(f"no host has a share of run {run.name} yet: waiting for the first", markup=False)
        time.sleep(LOOK_SECONDS)


def _look(options: FleetOptions, hosts: Sequence[HostConfig], run: Run) -> Seen:
    here = _is_driven_here(run)
    answers = ask(options, hosts, lambda host: sight(host, run.name, run.controller), LOOK_DEADLINE)
    sights: list[Sight] = []
    for value, error in answers.values():
        if isinstance(error, UsageError):
            raise error
        sights += [value] if value is not None else []
    shares = [share for one in sights for share in one.shares]
    return Seen(
        begun=bool(shares),
        unfinished=any(share.state not in FINISHED for share in shares),
        driven=here or any(one.driven is not None for one in sights),
    )


def _is_driven_here(run: Run) -> bool:
    """By another process of this folder, which may have no place on a host yet."""
    if not run.folder.is_dir():
        return False
    try:
        with sole(run.folder, CONTROLLER):
            return False
    except DrivenError:
        return True


def _tell_nothing_begun(run_name: str) -> ExitCode:
    err.print(
        f"the other controller of run {run_name} has ended and no host that answers has a share of it: nothing was "
        "begun; next: the same command again",
        markup=False,
    )
    return ExitCode.FAILED
