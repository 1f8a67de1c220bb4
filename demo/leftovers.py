"""What is on the 'host' before and after: hashes of the installed engine, processes and files of ours."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import signal
from pathlib import Path

from demo.sglang_cpu import recipe


def hash_site_packages() -> dict[str, str]:
    """SHA-256 of each file below the SGLang venv's site-packages that a patch could touch, by relative path.

    That is SGLang itself, and whatever lies at the top; bytecode is derived, and other packages are too big to hash
    but would show as a new name at the top.
    """
    site_packages = next((recipe.VENV / "lib").glob("python3*/site-packages"))
    names = {entry.name: "present" for entry in site_packages.iterdir() if entry.name != "__pycache__"}
    files = [entry for entry in site_packages.iterdir() if entry.is_file()]
    files += [path for path in (site_packages / "sglang").rglob("*") if path.is_file()]
    kept = (path for path in files if "__pycache__" not in path.parts)
    return names | {
        str(path.relative_to(site_packages)): hashlib.sha256(path.read_bytes()).hexdigest() for path in kept
    }


def launched_sessions(state_dir: Path) -> set[int]:
    """Session ids of what fleetdump started detached and what still lives: servers and drivers note pid and start time,
    and the pid is also the session's id."""
    records = [_read(path) for name in ("server.json", "driver.json") for path in state_dir.rglob(name)]
    return {
        int(record["pid"]) for record in records if start_time(int(record.get("pid", 0))) == record.get("start_time")
    }


def start_time(pid: int) -> int:
    """Field 22 of /proc/<pid>/stat, clock ticks after boot; 0 when there is no such process."""
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[19])
    except (OSError, IndexError, ValueError):
        return 0


def _read(path: Path) -> dict[str, int]:
    try:
        record: dict[str, int] = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return record


def processes_of(sessions: set[int], folder: Path) -> list[str]:
    """Living processes of ``sessions``, or whose command line or environment names ``folder``; each as text."""
    found = []
    for proc in Path("/proc").glob("[0-9]*"):
        if int(proc.name) == os.getpid():
            continue
        try:
            fields = (proc / "stat").read_text().rsplit(")", 1)[1].split()
            command = (proc / "cmdline").read_bytes()
            named = str(folder).encode() in command + (proc / "environ").read_bytes()
        except (OSError, IndexError):
            continue
        if fields[0] != "Z" and (named or int(fields[3]) in sessions):
            found.append(f"process {proc.name}: {command.replace(bytes(1), b' ').decode(errors='replace')[:120]}")
    return found


def files_below(folder: Path) -> list[str]:
    """Every file and every folder below ``folder`` that is not empty of files, as text."""
    return sorted(f"file {path}" for path in folder.rglob("*") if not path.is_dir())


def kill_sessions(sessions: set[int]) -> None:
    """SIGKILL every process of sessions that fleetdump started."""
    for proc in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError, IndexError, ValueError):
            session = int((proc / "stat").read_text().rsplit(")", 1)[1].split()[3])
            if session in sessions:
                os.kill(int(proc.name), signal.SIGKILL)
