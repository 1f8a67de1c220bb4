"""What healthy starts took on the hosts of a fleet, so that a host is compared with the others too."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fleetdump.agent.jsonl import encode_line, write_json
from fleetdump.agent.protocol import ProtocolError, from_json
from fleetdump.agent.servermessages import HealthyProfile, WatchResult, merged_profile

MOST_BYTES = 4 << 20
"""Of the file. It keeps the hosts that were seen last, as many as fit; a larger one is not ours."""
_UNUSABLE = (OSError, ValueError, RecursionError, TypeError, LookupError)
"""What reading a file of unknown content, and going through it, may raise."""
Known = dict[str, dict[str, HealthyProfile]]
"""Profiles by their key, by the name of the host."""


def own_file() -> Path:
    """Where what the hosts know is kept on this machine from one command to the next."""
    base = os.environ.get("XDG_CONFIG_HOME") or "~/.config"
    return Path(base).expanduser() / "fleetdump" / "healthy-starts.json"


@dataclass
class StartsFile:
    """The file: profiles by the name of the host."""

    hosts: dict[str, list[HealthyProfile]] = field(default_factory=dict)
    v: int = 1


class FleetStarts:
    """The healthy profiles of each host that a command has seen, and of those that commands before it saw, as far as
    ``file`` has them; from any thread. The file is a cache: the hosts have the truth, and one that cannot be read or
    written is done without."""

    def __init__(self, file: Path | None = None) -> None:
        self._file = file
        self._known: Known = _read(file) if file else {}
        self._seen: set[str] = set()
        self._lock = threading.Lock()

    def note(self, host: str, profiles: Iterable[HealthyProfile]) -> None:
        """What ``host`` remembers, a profile a kind of start."""
        with self._lock:
            self._seen.add(host)
            self._known[host] = {profile.key: profile for profile in profiles if profile.is_sane}

    def note_start(self, host: str, result: WatchResult) -> None:
        """A start of ``host`` that has just become ready; others count for nothing."""
        if result.outcome != "ready" or not result.kind:
            return
        lines = result.lines
        start = HealthyProfile(result.kind, 1, lines, lines, result.seconds, result.phase_seconds)
        if not start.is_sane:
            return
        with self._lock:
            self._seen.add(host)
            mine = self._known.setdefault(host, {})
            before = mine.get(result.kind)
            mine[result.kind] = merged_profile([before, start] if before else [start]) or start

    def of_others(self, host: str) -> list[HealthyProfile]:
        """What healthy starts took on all hosts but ``host``, merged: a profile a kind."""
        kinds: dict[str, list[HealthyProfile]] = {}
        with self._lock:
            for name, profiles in self._known.items():
                for profile in profiles.values() if name != host else ():
                    kinds.setdefault(profile.key, []).append(profile)
        return [merged for alike in kinds.values() if (merged := merged_profile(alike)) is not None]

    def save(self) -> None:
        """Keep it for the next command; hosts that this one has not seen stay as another may have left them."""
        if self._file is None or not self._seen:
            return
        with self._lock, suppress(OSError):
            if self._file.is_dir():
                return  # it cannot be replaced, and what was to replace it would stay beside it
            others = {host: mine for host, mine in _read(self._file).items() if host not in self._seen}
            hosts = {**others, **{host: mine for host, mine in self._known.items() if host in self._seen}}
            self._file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            write_json(self._file, StartsFile(_fitting(hosts)))


def _fitting(hosts: Known) -> dict[str, list[HealthyProfile]]:
    """The last of ``hosts``, as many as the file may hold."""
    kept: dict[str, list[HealthyProfile]] = {}
    left = MOST_BYTES - len(encode_line(StartsFile()))
    for host, profiles in reversed(hosts.items()):
        mine = list(profiles.values())
        left -= len(encode_line({host: mine}))
        if left < 0:
            break
        kept[host] = mine
    return dict(reversed(kept.items()))


def _read(file: Path) -> Known:
    """The file as far as it is of use: nothing of one that is no file of ours, all but the broken of its profiles."""
    with suppress(*_UNUSABLE):
        if file.is_file():  # a pipe would be waited for
            return {host: dict(_profiles(mine)) for host, mine in _hosts(file).items()}
    return {}


def _hosts(file: Path) -> dict[str, list[Any]]:
    """Raises one of ``_UNUSABLE``."""
    with file.open("rb") as opened:
        data = opened.read(MOST_BYTES + 1)
    if len(data) > MOST_BYTES:
        raise ValueError(f"larger than {MOST_BYTES >> 20} MiB")
    found = json.loads(data)
    if found["v"] != StartsFile().v:
        raise ValueError("another version's")
    return dict(found["hosts"])


def _profiles(values: Iterable[Any]) -> Iterator[tuple[str, HealthyProfile]]:
    for value in values:
        with suppress(ProtocolError):
            profile = from_json(HealthyProfile, value)
            if profile.is_sane:
                yield profile.key, profile
