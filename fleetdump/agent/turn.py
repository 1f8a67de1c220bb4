"""Whose turn it is to send to a server: the shares of a run that one server has are worked on one after the other.

A host takes work over before its own ends, so that its server never rests. Two drivers at once would have twice the
token budget in flight, and what is suspected of killing the server would not be alone there.
"""

from __future__ import annotations

import fcntl
from pathlib import Path
from typing import BinaryIO, Optional


def try_lock(path: Path) -> Optional[BinaryIO]:
    """An exclusive lock on the file, which the kernel drops when it is closed or the process ends, however it ends.
    None when another process has it; does not wait."""
    lock = open(path, "ab")  # noqa: SIM115 (outlives this call)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        lock.close()
        return None
    return lock


class Turn:
    """The lock on ``path``. A context manager: whoever leaves it lets the next one send."""

    def __init__(self, path: Path):
        self._path = path
        self._lock: Optional[BinaryIO] = None

    def take(self) -> bool:
        """Whether it is ours, from now on until the end; does not wait."""
        if self._lock is None:
            self._lock = try_lock(self._path)
        return self._lock is not None

    def __enter__(self) -> Turn:
        return self

    def __exit__(self, *_: object) -> None:
        if self._lock is not None:
            self._lock.close()
            self._lock = None
