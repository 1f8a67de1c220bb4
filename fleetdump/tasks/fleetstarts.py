"""What healthy starts took on the hosts of a fleet, so that a host is compared with the others too."""

from __future__ import annotations

import contextlib
import json
import os
import threading
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from fleetdump.agent.jsonl import write_json
from fleetdump.agent.protocol import ProtocolError, from_json
from fleetdump.agent.servermessages import HealthyProfile, WatchResult, merged_profile

MOST_HOSTS = 1000
"""Of which the file keeps what they know; those that were seen last."""


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
        self._known: dict[str, dict[str, HealthyProfile]] = _read(file) if file else {}
        self._seen: set[str] = set()
        self._lock = threading.Lock()

    def note(self, host: str, profiles: Iterable[HealthyProfile]) -> None:
        """What ``host`` remembers, a profile a kind of start."""
        with self._lock:
            self._seen.add(host)
            self._known[host] = {profile.key: profile for profile in profiles}

    def note_start(self, host: str, result: WatchResult) -> None:
        """A start of ``host`` that has just become ready; others count for nothing."""
        if result.outcome != "ready" or not result.kind:
            return
        lines = result.lines
        start = HealthyProfile(result.kind, 1, lines, lines, result.seconds, result.phase_seconds)
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
        with self._lock, contextlib.suppress(OSError):
            others = {host: mine for host, mine in _read(self._file).items() if host not in self._seen}
            hosts = {**others, **{host: mine for host, mine in self._known.items() if host in self._seen}}
            kept = {host: list(hosts[host].values()) for host in list(hosts)[-MOST_HOSTS:]}
            self._file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            write_json(self._file, StartsFile(kept))


def _read(file: Path) -> dict[str, dict[str, HealthyProfile]]:
    with contextlib.suppress(OSError, ValueError, ProtocolError):
        found = from_json(StartsFile, json.loads(file.read_bytes()))
        return {host: {profile.key: profile for profile in profiles} for host, profiles in found.hosts.items()}
    return {}
