"""Host keys, checked strictly: pinned, known, or refused. Nothing is ever accepted in silence."""

from __future__ import annotations

import contextlib
import fcntl
import os
import threading
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

import paramiko
from paramiko.hostkeys import HostKeyEntry, HostKeys

SYSTEM_FILES = (Path("/etc/ssh/ssh_known_hosts"), Path("/etc/ssh/ssh_known_hosts2"))
USER_FILES = (Path("~/.ssh/known_hosts"), Path("~/.ssh/known_hosts2"))


def own_file() -> Path:
    """The known_hosts file that fleetdump itself writes; the user's own is only read."""
    base = os.environ.get("XDG_CONFIG_HOME") or "~/.config"
    return Path(base).expanduser() / "fleetdump" / "known_hosts"


@dataclass
class HostKeyRefused(paramiko.SSHException):
    """The server's key is not the one that we know (``changed``), or we know none."""

    name: str
    key: paramiko.PKey
    changed: bool
    expected: str = ""

    def __str__(self) -> str:
        return f"host key of {self.name} {'changed' if self.changed else 'is unknown'}: {describe(self.key)}"


def describe(key: paramiko.PKey) -> str:
    """Type and fingerprint of a key, as ``ssh-keygen -l`` prints them."""
    return f"{key.get_name()} {key.fingerprint}"


@dataclass
class KnownHosts:
    """Keys of the user's and the system's known_hosts files and of ``file``, which is ours to append to.

    The files are read once; threads share one instance.
    """

    file: Path = field(default_factory=own_file)
    read_only: tuple[Path, ...] = USER_FILES + SYSTEM_FILES

    def __post_init__(self) -> None:
        self._plain: dict[str, list[paramiko.PKey]] = {}
        self._hashed: list[tuple[str, paramiko.PKey]] = []
        self._lock = threading.Lock()
        for path in (*self.read_only, self.file):
            self._load(path.expanduser())

    def keys_of(self, name: str) -> list[paramiko.PKey]:
        """Every key that the files have for ``name`` (``host`` or ``[host]:port``)."""
        with self._lock:
            hidden = [key for digest, key in self._hashed if HostKeys.hash_host(name, digest) == digest]
            return self._plain.get(name, []) + hidden

    def add(self, name: str, key: paramiko.PKey) -> None:
        """Remember ``key`` for ``name`` in our own file."""
        with self._lock:
            self.file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            with self.file.open("a", encoding="utf-8") as stream:
                fcntl.flock(stream, fcntl.LOCK_EX)
                stream.write(f"{name} {key.get_name()} {key.get_base64()}\n")
            self._plain.setdefault(name, []).append(key)

    def _load(self, path: Path) -> None:
        try:
            lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
        except OSError:
            return
        for number, line in enumerate(lines, 1):
            # Markers (@revoked, @cert-authority) and broken lines never make a key known.
            if not line.strip() or line.lstrip().startswith(("#", "@")):
                continue
            with contextlib.suppress(Exception):
                entry = HostKeyEntry.from_line(line, number)
                if entry is not None and entry.key is not None:
                    self._remember(entry.hostnames or [], entry.key)

    def _remember(self, names: Iterable[str], key: paramiko.PKey) -> None:
        for name in names:
            if name.startswith("|1|"):
                self._hashed.append((name, key))
            else:
                self._plain.setdefault(name, []).append(key)


class StrictPolicy(paramiko.MissingHostKeyPolicy):
    """Decides on every key. The client is given no known keys of its own, so paramiko asks this policy each time."""

    def __init__(self, known: KnownHosts, *, alias: str = "", pin: str = "", accept_new: bool = False):
        self._known = known
        self._alias = alias
        self._pin = pin
        self._accept_new = accept_new

    def missing_host_key(self, _client: paramiko.SSHClient, hostname: str, key: paramiko.PKey) -> None:
        """Return when the key is right; raise ``HostKeyRefused`` else. A pin outweighs every file."""
        name = self._alias or hostname
        if self._pin:
            if key.fingerprint != self._pin:
                raise HostKeyRefused(name, key, changed=True, expected=f"{self._pin} (pinned in the inventory)")
            return
        known = self._known.keys_of(name)
        if key in known:
            return
        if known:
            raise HostKeyRefused(name, key, changed=True, expected=", ".join(describe(k) for k in known))
        if not self._accept_new:
            raise HostKeyRefused(name, key, changed=False)
        self._known.add(name, key)

    def preferred_types(self, name: str) -> list[str]:
        """Key types to ask the server for first: those that we could recognise."""
        return [] if self._pin else [key.get_name() for key in self._known.keys_of(self._alias or name)]


def order_key_types(offered: Iterable[str], preferred: Iterable[str]) -> list[str]:
    """``offered`` with the signature types of ``preferred`` key types in front."""
    wanted = [t for key in preferred for t in (("rsa-sha2-512", "rsa-sha2-256") if key == "ssh-rsa" else (key,))]
    offered = list(offered)
    return [t for t in wanted if t in offered] + [t for t in offered if t not in wanted]
