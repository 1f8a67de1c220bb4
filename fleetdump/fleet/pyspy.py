"""py-spy for hosts that lack it: its static binary, out of the wheel, from this machine's environment or by pip."""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
import os
import struct
import subprocess
import sys
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path

from fleetdump.agent.jsonl import replacing

REQUIREMENT = "py-spy>=0.4.1,<0.5"
"""As pyproject.toml's extra ``stacks`` has it."""
PIP_SECONDS = 60.0
_ELF_MACHINE = {"x86_64": 62, "aarch64": 183}
_PLATFORM = {"x86_64": "manylinux_2_5_x86_64", "aarch64": "manylinux_2_17_aarch64"}


class PySpyMissing(Exception):
    """There is none for that kind of machine; the text says why and what to do."""


@dataclass(frozen=True)
class Program:
    """A binary, and the SHA-256 that names it."""

    name: str
    data: bytes
    sha256: str


@functools.cache
def py_spy(machine: str) -> Program:
    """py-spy for hosts of kind ``machine`` (as ``uname -m`` says). Raises ``PySpyMissing``.

    The one that is installed here where it fits, else one that pip has fetched before or fetches now, from the index
    that this machine's pip is set to.
    """
    if machine not in _ELF_MACHINE:
        raise PySpyMissing(f"py-spy has no binary for {machine or 'an unknown kind of machine'}")
    data = _installed(machine) or _cached(machine) or _fetched(machine)
    return Program("py-spy", data, hashlib.sha256(data).hexdigest())


def _installed(machine: str) -> bytes | None:
    try:
        files = importlib.metadata.files("py-spy") or []
    except importlib.metadata.PackageNotFoundError:
        return None
    for file in files:
        path = Path(str(file.locate()))
        if path.name == "py-spy" and path.is_file():
            data = path.read_bytes()
            return data if runs_on(data, machine) else None
    return None


def runs_on(data: bytes, machine: str) -> bool:
    """Whether ``data`` is an ELF program for that kind of machine."""
    return data[:4] == b"\x7fELF" and len(data) > 20 and struct.unpack_from("<H", data, 18)[0] == _ELF_MACHINE[machine]


def _cache_path(machine: str) -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(base).expanduser() / "fleetdump" / f"py-spy-{machine}"


def _cached(machine: str) -> bytes | None:
    path = _cache_path(machine)
    data = path.read_bytes() if path.is_file() else b""
    return data if runs_on(data, machine) else None


def _fetched(machine: str) -> bytes:
    with tempfile.TemporaryDirectory(prefix="fleetdump-py-spy-") as folder:
        pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-input", "--disable-pip-version-check"]
        pip += ["--retries", "1", "--timeout", "10"]
        what = ["--no-deps", "--only-binary=:all:", "--platform", _PLATFORM[machine], "--dest", folder, REQUIREMENT]
        try:
            done = subprocess.run([*pip, *what], capture_output=True, text=True, timeout=PIP_SECONDS, check=False)
        except subprocess.TimeoutExpired as error:
            raise PySpyMissing(f"pip did not fetch py-spy within {PIP_SECONDS:.0f} s{_ADVICE}") from error
        wheels = list(Path(folder).glob("*.whl"))
        if done.returncode or not wheels:
            said = done.stderr.strip().splitlines() or ["no wheel came"]
            raise PySpyMissing(f"pip cannot fetch py-spy for {machine} hosts: {said[-1][:200]}{_ADVICE}")
        data = from_wheel(wheels[0])
    if not runs_on(data, machine):
        raise PySpyMissing(f"the wheel {wheels[0].name} has no binary for {machine}")
    _keep(_cache_path(machine), data)
    return data


_ADVICE = "; where this machine reaches no index, install py-spy beside fleetdump, or on the host"


def from_wheel(wheel: Path) -> bytes:
    """The program in py-spy's wheel. Raises ``PySpyMissing`` when it has none."""
    with zipfile.ZipFile(wheel) as archive:
        for name in archive.namelist():
            if name.endswith(".data/scripts/py-spy"):
                return archive.read(name)
    raise PySpyMissing(f"the wheel {wheel.name} holds no py-spy")


def _keep(path: Path, data: bytes) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path, mode=0o666) as file:
            file.write(data)
    except OSError:
        return  # it is fetched again next time
