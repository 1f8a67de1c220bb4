"""``extract --controller HOST``: the run's controller as a process on a host of the fleet, which goes on rebalancing
when this machine sleeps.

It gets what a user at that host would have: this package's code, an inventory as seen from there, the rows, the ledger.
It gets no key: it reaches the other hosts with what HOST has itself, and that is tried out before anything starts.
"""

from __future__ import annotations

import base64
import json
import math
import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import fleetdump
from fleetdump.agent.hostmessages import ControllerArgs, ControllerResult, StatusArgs, StatusResult
from fleetdump.dataset.intake import DataSet
from fleetdump.errors import DrivenError, HostError, UsageError
from fleetdump.fleet import Host
from fleetdump.inventory import HostConfig
from fleetdump.inventory.dump import dump
from fleetdump.tasks._task import task
from fleetdump.tasks.extract import FIXED, ExtractSettings
from fleetdump.tasks.steering import Controller, require_same_data

DEADLINE = 300.0
DATA_DEADLINE = 3600.0
LOCK_WAIT = 300
CHUNK_BYTES = 1 << 16
CHUNK_ROWS = 200
NAMED = 5
INVENTORY, DATA, LEDGER, RUNS = "inventory.yaml", "data.jsonl", "ledger.sqlite", "runs"


@dataclass(frozen=True)
class Seat:
    """Where the controller of ``run`` is to be: ``host`` with an interpreter, and the fleet as seen from there.
    ``replaces``: it takes the place of one that lives there, which does not know all of the fleet."""

    run: str
    host: HostConfig
    python: str
    fleet: Sequence[HostConfig]
    replaces: bool = False

    @property
    def inventory(self) -> str:
        """As the file that is brought there."""
        return dump(self.fleet)


def fleet_from(seat: str, resolved: Mapping[str, HostConfig]) -> list[HostConfig]:
    """The hosts as a process on host ``seat`` reaches them: itself directly; the others as this machine does, but with
    its own keys, whose paths here mean nothing there. Raises ``UsageError`` for a host that only this machine has."""
    here = sorted(name for name, host in resolved.items() if host.connection == "local" and name != seat)
    if here:
        raise UsageError(
            f"a controller on {seat} cannot reach {', '.join(here)}",
            why="connection: local means the machine where the command is given",
            next_step="leave it out with --exclude, or give it an address in the inventory",
        )
    return [_itself(host) if name == seat else replace(host, identity_file=None) for name, host in resolved.items()]


def _itself(host: HostConfig) -> HostConfig:
    return replace(host, connection="local", user=None, port=None, identity_file=None, proxy_jump=None, exec_prefix=())


@task
def try_out(host: Host, seat: Seat) -> None:
    """Bring code and inventory to the host, and have it ask every host of the fleet from there. Raises what
    ``Host.call`` raises (the interpreter is too old or lacks a package, a controller of the run lives there), and
    ``HostError`` naming the hosts that cannot be reached from there, with each one's reason."""
    argv = ["status", "--json", "--inventory", INVENTORY]
    files = Files({INVENTORY: seat.inventory.encode(), **code_files()})
    answer = _call(host, ControllerArgs(seat.run, seat.python, argv, replace=seat.replaces), files, DEADLINE)
    records = _records(answer.out)
    missing = [record for record in records.values() if record["status"] != "ok"]
    silent = sorted({config.name for config in seat.fleet} - set(records))
    if not missing and not silent:
        return
    reasons = [f"{record['host']}: {_reason(record)}" for record in missing[:NAMED]]
    if silent:
        reasons.append(f"{', '.join(silent[:NAMED])}: no answer; {answer.err.strip()[-600:]}")
    raise HostError(
        f"a controller there cannot work with {len(missing) + len(silent)} of {len(seat.fleet)} hosts",
        host.config.name,
        "\n".join(reasons),
        f"give the user on {host.config.name} a key of its own that those hosts accept (fleetdump copies none, and a "
        f"forwarded agent ends with your login): ssh-keygen there, its .pub into their authorized_keys; "
        f"~/.ssh/config of {host.config.name} says which key is for whom. A host that is down: leave it out with "
        "--exclude",
    )


@task
def seat_controller(host: Host, seat: Seat, files: Files, argv: Sequence[str]) -> ControllerResult:
    """Bring the rest and start the controller, detached. Raises what ``Host.call`` raises, and ``HostError`` when it
    ends at once."""
    argv = [*argv, "--inventory", INVENTORY]
    args = ControllerArgs(seat.run, seat.python, argv, detach=True, replace=seat.replaces)
    result = _call(host, args, files, DATA_DEADLINE)
    if not result.pid or not _lives(host, seat.run):
        raise HostError(
            "the controller ended at once",
            f"{host.config.name}: {result.log}",
            result.err,
            f"the hosts work on run {seat.run} without one; when that is mended give the same command again",
        )
    return result


def _lives(host: Host, run: str) -> bool:
    """Asked by another call than the one that started it."""
    status = host.call(StatusArgs(), StatusResult, verb="status")
    return any(one.run == run and one.alive for one in status.controllers)


def arguments(run: str, settings: ExtractSettings, more: Sequence[str]) -> list[str]:
    """The command line of the controller: that of this one, in the words that are fixed by now."""
    argv = ["extract", "--data", DATA, "--run", run, "--runs-dir", RUNS]
    usual = vars(ExtractSettings())
    for name, value in vars(settings).items():
        if name in FIXED and value != usual[name]:  # what a run there was begun with stands in its ledger
            argv += [f"--{name.replace('_', '-')}", str(value)]
    argv += ["--allow-failed-selfcheck"] if settings.allow_failed_selfcheck else []
    # The call that starts it has that host's lock until the controller has said its first word.
    return [*argv, "--lock-wait", str(LOCK_WAIT), *more]


def require_alone(host: Host, run: str, status: StatusResult, me: Controller | None = None, replaced: str = "") -> None:
    """Raise ``DrivenError`` when another controller than ``me`` drives ``run``, as the host knows: one that lives on
    it, or one that has its place there from elsewhere; ``UsageError`` when that one drives it with other data. The
    controller ``replaced`` (``controller_there``) is no hindrance."""
    name = host.config.name
    driven_by = [one for one in status.steering if one.run == run and (me is None or one.controller != me.id)]
    if me is not None:
        for by in driven_by:
            require_same_data(run, me.data, by.data, name)
    driven_by = [one for one in driven_by if not replaced or one.controller != replaced]
    may_live = {one.pid for one in status.steering if replaced and one.controller == replaced}
    for one in status.controllers:
        if one.run == run and one.alive and not _is_this(host, one.pid) and one.pid not in may_live:
            raise DrivenError(
                f"run {run} is being driven already",
                host.config.name,
                f"by a controller on {host.config.name} (pid {one.pid}), for {one.operator}",
                f"it ends with the run; pause, cancel and drain are given as ever; to have another one, end it there "
                f"(kill {one.pid}) and give the command again",
            )
    for by in driven_by:
        raise DrivenError(f"run {run} is being driven already", name, by.in_words, by.next_step(name))


def controller_there(run: str, status: StatusResult) -> str:
    """Which controller of the run lives on the host, as all hosts know it (``Controller.id``); empty when none does, or
    it has not come to its hosts yet."""
    living = {one.pid for one in status.controllers if one.run == run and one.alive}
    found = (one.controller for one in status.steering if one.run == run and one.pid in living)
    return next(found, "")


def _is_this(host: Host, pid: int) -> bool:
    return host.config.connection == "local" and pid == os.getpid()


# --------------------------------------------------------------------------- what is brought
class Files(Collection[str]):
    """Files as the body of a ``controller`` call: lines of JSON, made when they are read."""

    def __init__(self, whole: Mapping[str, bytes], rows: Mapping[str, Collection[str]] | None = None):
        self._whole = whole
        self._rows = rows or {}

    def __len__(self) -> int:
        whole = sum(max(1, math.ceil(len(data) / CHUNK_BYTES)) for data in self._whole.values())
        return whole + sum(math.ceil(len(lines) / CHUNK_ROWS) for lines in self._rows.values())

    def __iter__(self) -> Iterator[str]:
        for name, data in self._whole.items():
            for start in range(0, max(1, len(data)), CHUNK_BYTES):
                yield _line(name, data[start : start + CHUNK_BYTES])
        for name, lines in self._rows.items():
            some: list[str] = []
            for line in lines:
                some.append(line)
                if len(some) == CHUNK_ROWS:
                    yield _line(name, "".join(some).encode())
                    some.clear()
            if some:
                yield _line(name, "".join(some).encode())

    def __contains__(self, line: object) -> bool:
        return any(line == each for each in self)


def run_files(run: str, data: DataSet, ledger: Path) -> Files:
    """Rows and ledger of a run, which may lie elsewhere. The rows go as ``extract`` has read them: one form whatever
    the data was, and no library for it is needed there."""
    whole = {f"{RUNS}/{run}/{LEDGER}": ledger.read_bytes()} if ledger.exists() else {}
    return Files(whole, {DATA: data.lines(list(data.rows))})


def code_files() -> dict[str, bytes]:
    """This very package."""
    package = Path(fleetdump.__file__).parent
    paths = sorted(package.rglob("*.py"))
    return {f"code/fleetdump/{path.relative_to(package).as_posix()}": path.read_bytes() for path in paths}


def _line(name: str, data: bytes) -> str:
    return json.dumps({"file": name, "data": base64.b64encode(data).decode()})


# --------------------------------------------------------------------------- answers
def _call(host: Host, args: ControllerArgs, files: Files, deadline: float) -> ControllerResult:
    return host.call(args, ControllerResult, verb="controller", body=files, deadline=deadline)


def _records(text: str) -> dict[str, dict[str, object]]:
    """The objects of ``--json``, by host."""
    lines = [json.loads(line) for line in text.splitlines() if line.startswith("{")]
    return {str(line["host"]): line for line in lines}


def _reason(record: Mapping[str, object]) -> str:
    error = record.get("error")
    if not isinstance(error, dict):
        return str(record["status"])
    return "; ".join(str(error[part]) for part in ("what", "why", "next_step") if error.get(part))
