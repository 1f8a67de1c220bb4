"""The agent as it travels to a host: one deterministic tar.gz, named by its SHA-256."""

from __future__ import annotations

import functools
import gzip
import hashlib
import io
import tarfile
from dataclasses import dataclass
from pathlib import Path

import fleetdump

_PARTS = ("__init__.py", "agent", "worker")
_PACKAGE = Path(fleetdump.__file__).parent


@dataclass(frozen=True)
class Bundle:
    """``data`` is a tar.gz of ``fleetdump/__init__.py``, ``fleetdump/agent/`` and ``fleetdump/worker/``."""

    sha256: str
    data: bytes


@functools.cache
def bundle() -> Bundle:
    """The bundle of this installation, built once a process; the same files give the same bytes on any machine."""
    return build(_PACKAGE)


@functools.cache
def bootstrap() -> str:
    """Source of the bootstrap, the first line of every call."""
    return (_PACKAGE / "agent" / "bootstrap.py").read_text(encoding="utf-8")


def build(package: Path) -> Bundle:
    """Pack the agent's and the worker's Python files of ``package`` (the directory ``fleetdump``)."""
    raw = io.BytesIO()
    with tarfile.open(fileobj=raw, mode="w", format=tarfile.USTAR_FORMAT) as archive:
        for path in sorted(_sources(package)):
            data = path.read_bytes()
            entry = tarfile.TarInfo(f"fleetdump/{path.relative_to(package).as_posix()}")
            entry.size, entry.mode = len(data), 0o600
            archive.addfile(entry, io.BytesIO(data))
    data = gzip.compress(raw.getvalue(), mtime=0)
    return Bundle(hashlib.sha256(data).hexdigest(), data)


def _sources(package: Path) -> list[Path]:
    found: list[Path] = []
    for part in _PARTS:
        path = package / part
        found += [path] if path.is_file() else path.rglob("*.py")
    return found
