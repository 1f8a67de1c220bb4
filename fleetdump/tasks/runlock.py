"""One process of this machine at a time does a thing with a run: collects it, or drives it."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from fleetdump.errors import DrivenError, LockedError, of_local_file


@dataclass(frozen=True)
class Role:
    """A thing that one process at a time does: ``file`` is its lock in the run's folder, ``doing`` in words,
    ``refusal`` what a second process raises."""

    file: str
    doing: str
    refusal: type[LockedError] = LockedError


COLLECTOR = Role("lock", "collected")
CONTROLLER = Role("controller.lock", "driven", DrivenError)


@contextmanager
def sole(run_dir: Path, role: Role) -> Iterator[None]:
    """Be the one process in that role for this run here, until the block or the process ends; the folder is made.
    Raises ``LockedError`` naming the process that is."""
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(run_dir / role.file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise of_local_file(error) from error
    with open(descriptor, "r+", encoding="ascii", errors="replace") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = lock.read(20).strip() or "unknown"
            raise role.refusal(
                f"run {run_dir.name} is being {role.doing} already",
                str(run_dir),
                f"by process {holder} of this machine",
                "wait until that one has ended, or end it; then give the command again",
            ) from None
        lock.truncate(0)
        lock.write(f"{os.getpid()}\n")
        lock.flush()
        yield
