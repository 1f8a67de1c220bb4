"""Journal, norm and shard names of one run's capture directory, under the lock that says that we live.

Standard library alone.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from fleetdump_taprecords import HEAVY_TURN, Config, Norm, in_turns
from fleetdump_tapshard import Record, Shard, fsync_directory, safetensors_header

ENCODE = json.JSONEncoder(separators=(",", ":")).encode
"""``json.dumps`` makes an encoder each time, which costs as much again; a batch may have a thousand lines."""


TAIL_BYTES = 1 << 16
"""What is read at once of a journal's end, which may be long."""


@dataclass
class Appended:
    """How many of the records are in the journal, from the first on, and what went wrong. Who reads a line acts on it,
    so what is there stays; with all of them there, ``error`` says that a loss of power could take them."""

    count: int
    error: OSError | None = None


class Numbers:
    """The number of the next shard by the beginning of its name, for all runs of a process: it uses no name again,
    whatever was moved away or removed meanwhile."""

    def __init__(self) -> None:
        self._next: dict[str, int] = {}
        self._lock = threading.Lock()

    def take(self, beginning: Path, least: int) -> int:
        """The next one, at least ``least``."""
        with self._lock:
            number = max(self._next.get(str(beginning), 0), least)
            self._next[str(beginning)] = number + 1
            return number


class RunFiles:
    """Journal of one run, with the names of its shards."""

    def __init__(self, config: Config, run: str, base: str, directory: Path, numbers: Numbers):
        """Raises ``OSError``."""
        for folder in (Path(config.dir), Path(config.dir) / run, directory):
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._config = config
        self._directory = directory
        self._writer, self._journal = _lock_journal(directory, base)
        self._numbers = numbers
        self._torn: int | None = None
        """Where a line begins that could neither be written whole nor be cut off."""
        self._metadata = {
            "format": "fleetdump-1",
            "run": run,
            "writer": self._writer,
            "layers": json.dumps(config.layers),
            "final": "pre_norm",
        }

    def are_gone(self) -> bool:
        """Whether somebody has removed the directory under us."""
        try:
            there = os.stat(self._directory / f"journal-{self._writer}.jsonl")
            return there.st_ino != os.fstat(self._journal.fileno()).st_ino
        except (OSError, ValueError):
            return True

    def append(self, records: Sequence[Record]) -> Appended:
        """Append lines. For one thread at a time."""
        if self._journal.closed:
            return Appended(0, gone())
        data = b"".join(ENCODE(record).encode() + b"\n" for record in in_turns(records, HEAVY_TURN))
        written, error = self._write(data)
        if written < len(data):
            return Appended(data[:written].count(b"\n"), error)
        closes = records[0]["kind"] == "shard"
        if self._config.fsync == "group" or (self._config.fsync == "close" and closes):
            try:
                os.fsync(self._journal.fileno())
            except OSError as failed:
                error = failed
        return Appended(len(records), error)

    def _write(self, data: bytes) -> tuple[int, OSError | None]:
        """Bytes of whole lines that are in the journal then, and why not all are."""
        written = 0
        try:
            if self._torn is not None:
                self._journal.truncate(self._torn)
                self._torn = None
            end = self._journal.seek(0, os.SEEK_END)
            while written < len(data):
                written += self._journal.write(memoryview(data)[written:])
        except OSError as error:
            whole = data[:written].rfind(b"\n") + 1
            if written > whole:
                self._torn = end + whole
                with contextlib.suppress(OSError):  # else before the next line
                    self._journal.truncate(self._torn)
                    self._torn = None
            return whole, error
        return written, None

    def new_shard(self, slots: list[int]) -> Shard:
        """The next shard, empty; its pieces hold ``slots``."""
        prefix = f"shard-{self._writer}-"
        names = [name[len(prefix) :] for name in os.listdir(self._directory) if name.startswith(prefix)]
        there = [int(name.split(".")[0]) for name in names if name.split(".")[0].isdecimal()]  # a copy is not ours
        number = self._numbers.take(self._directory / prefix, max(there, default=-1) + 1)
        path = self._directory / f"{prefix}{number}.safetensors"
        metadata = {**self._metadata, "slots": json.dumps(slots)}
        return Shard(path, metadata, self._config.header_bytes, self._config.shard_bytes)

    def write_norm(self, norm: Norm | None) -> None:
        """Write the norm's file unless it is there."""
        path = self._directory / f"norm-{self._config.server}-{self._config.launch_id}.safetensors"
        if norm is not None and not path.exists():
            _write_norm(path, norm)

    def close(self) -> None:
        self._journal.close()


def gone() -> OSError:
    """What befalls those who write into files that somebody has removed."""
    return FileNotFoundError(errno.ENOENT, "the run's files were removed")


def _lock_journal(directory: Path, writer: str) -> tuple[str, BinaryIO]:
    """Open the journal under an flock that says that we live. Data-parallel replicas of one launch have the same rank:
    the later ones take ``<writer>.1`` and so on."""
    for replica in range(1000):
        name = f"{writer}.{replica}" if replica else writer
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC
        file = os.fdopen(os.open(directory / f"journal-{name}.jsonl", flags, 0o600), "r+b", buffering=0)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            file.close()
            if error.errno != errno.EWOULDBLOCK:
                raise
            continue
        _cut_torn_line(file)
        return name, file
    raise OSError(errno.EBUSY, f"every journal of {writer} is locked", str(directory))


def _cut_torn_line(file: BinaryIO) -> None:
    """Have the file end behind its last whole line."""
    end = size = file.seek(0, os.SEEK_END)
    while end > 0:
        begin = max(0, end - TAIL_BYTES)
        file.seek(begin)
        found = file.read(end - begin).rfind(b"\n")
        if found >= 0:
            end = begin + found + 1
            break
        end = begin
    if end < size:
        file.truncate(end)


def _write_norm(path: Path, norm: Norm) -> None:
    header = {
        "__metadata__": {"format": "fleetdump-1", "kind": "rms", "eps": repr(norm.eps)},
        "weight": {
            "dtype": norm.dtype,
            "shape": [len(norm.weight) // (4 if norm.dtype == "F32" else 2)],
            "data_offsets": [0, len(norm.weight)],
        },
    }
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    try:
        with open(temporary, "wb") as file:
            file.write(safetensors_header(header, 1024) + norm.weight)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise
    fsync_directory(path.parent)
