"""A log that grows, read as far as it goes."""

from __future__ import annotations

import os

from fleetdump.agent.logmarks import LogMarks, LogParser

CHUNK = 1 << 20


class LogFollower:
    """Reads a log as it grows; one that was truncated or replaced is read from its start again."""

    def __init__(self, path: str, mark: str, ranks: int) -> None:
        self._path, self._mark, self._ranks = path, mark, ranks
        self._parser = LogParser(mark, ranks)
        self._inode = 0
        self._offset = 0

    @property
    def marks(self) -> LogMarks:
        return self._parser.marks

    def read(self) -> LogMarks:
        """Read what has come since; a log that is not there (yet) has no marks."""
        try:
            with open(self._path, "rb") as file:
                stat = os.fstat(file.fileno())
                if stat.st_ino != self._inode or stat.st_size < self._offset:
                    self._parser = LogParser(self._mark, self._ranks)
                    self._inode, self._offset = stat.st_ino, 0
                file.seek(self._offset)
                for data in iter(lambda: file.read(CHUNK), b""):
                    self._parser.feed(data)
                    self._offset += len(data)
        except FileNotFoundError:
            pass
        return self.marks
