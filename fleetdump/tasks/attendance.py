"""Who takes part in a run that is watched: the hosts it began with, those that join in the middle, and those that come
back after they could not be reached."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fleetdump.agent.formats import FormatError
from fleetdump.agent.jsonl import append_lines, decode_line, decode_record, open_lines, read_raw_lines
from fleetdump.errors import UnreachableError, of_local_file
from fleetdump.fleet import Outcome
from fleetdump.inventory import HostConfig

RETRY_SECONDS = (5.0, 15.0, 30.0, 60.0)
"""Before a host is tried for the first, second, … time again."""
JOINING = "joining.jsonl"
"""In the run's folder: who was asked to join, for the process that drives the run."""


@dataclass
class _Away:
    """A host that could not be reached, what its last try came to, and when the next one is due."""

    outcome: Outcome[Any]
    tries: int = 0
    due: float = 0.0

    def failed(self, outcome: Outcome[Any]) -> None:
        self.outcome = outcome
        self.due = time.monotonic() + RETRY_SECONDS[min(self.tries, len(RETRY_SECONDS) - 1)]
        self.tries += 1


@dataclass
class Attendance:
    """``hosts`` begin at once; ``joining`` gives those that were asked to join since it was last called, ``asked`` are
    the names of all that were. A host that cannot be reached is tried again for as long as another one is at work."""

    hosts: Sequence[HostConfig]
    joining: Callable[[], Iterable[HostConfig]] = tuple
    asked: set[str] = field(default_factory=set)
    _configs: dict[str, HostConfig] = field(init=False)
    _running: set[str] = field(init=False)
    _present: set[str] = field(init=False)
    """Of those that run, those that were reached, or may have been."""
    _away: dict[str, _Away] = field(default_factory=dict)
    _came: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        self._configs = {host.name: host for host in self.hosts}
        self._running, self._present = set(self._configs), set(self._configs)

    def arrived(self, name: str) -> bool:
        """The host was reached; whether it was before."""
        returns = name in self._came
        self._came.add(name)
        self._present.add(name)
        self._away.pop(name, None)
        return returns

    def ended(self, name: str, outcome: Outcome[Any]) -> bool:
        """A host has ended. Whether that is its last word; else it is away and will be tried again."""
        self._running.discard(name)
        self._present.discard(name)
        if not isinstance(outcome.error, UnreachableError):
            return True
        self._away.setdefault(name, _Away(outcome)).failed(outcome)
        return False

    def is_first_try(self, name: str) -> bool:
        """Whether an absence has just begun."""
        return name in self._away and self._away[name].tries == 1

    def later(self) -> list[HostConfig]:
        """The hosts that are to begin now."""
        begin = [host for host in self.joining() if host.name not in self._running]
        for host in begin:
            self._configs[host.name] = host
        self.asked.update(host.name for host in begin)
        self._present.update(host.name for host in begin)
        if self._present:
            due = [name for name, away in list(self._away.items()) if away.due <= time.monotonic()]
            begin += [self._configs[name] for name in due if name not in {*self._running, *(h.name for h in begin)}]
        self._running.update(host.name for host in begin)
        return begin

    def absent(self) -> dict[str, Outcome[Any]]:
        """What became of those that did not come back."""
        return {name: away.outcome for name, away in self._away.items()}


@dataclass
class JoinLine:
    """``joining.jsonl``: a host that is to join the run."""

    host: str
    t: float
    v: int = 1


def ask_to_join(run_dir: Path, names: Sequence[str]) -> None:
    """Leave word for the process of this machine that drives the run. Raises ``FleetdumpError`` where that fails."""
    try:
        with open_lines(run_dir / JOINING) as file:
            append_lines(file, [JoinLine(name, time.time()) for name in names])
    except OSError as error:
        error.filename = error.filename or str(run_dir / JOINING)
        raise of_local_file(error) from error


class JoinRequests:
    """Reads what others leave by ``ask_to_join`` from now on. What cannot be read of it is told, once, and passed
    over: the run goes on without."""

    def __init__(self, run_dir: Path, tell: Callable[[str], None]):
        self._file = run_dir / JOINING
        self._tell = tell
        self._told: set[str] = set()
        self._offset = self._file.stat().st_size if self._file.is_file() else 0

    def names(self) -> list[str]:
        """Hosts that were asked since the last call."""
        try:
            lines, self._offset = read_raw_lines(self._file, self._offset)
        except OSError as error:
            self._tell_once(f"{self._file} cannot be read: {error.strerror or error}; nobody can join the run by it")
            return []
        return list(dict.fromkeys(name for name in map(self._name, lines) if name))

    def _name(self, line: bytes) -> str:
        try:
            return decode_record(JoinLine, decode_line(line, str(self._file)), str(self._file)).host
        except FormatError as error:
            self._tell_once(f"a line is passed over: {error}; give the command with --add-host again")
            return ""

    def _tell_once(self, text: str) -> None:
        if text not in self._told:
            self._told.add(text)
            self._tell(text)
