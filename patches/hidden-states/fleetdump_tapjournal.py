"""Journal, norm and shard names of one run's capture directory, under the lock that says that we live.

Standard library alone.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import BinaryIO

from fleetdump_taprecords import HEAVY_TURN, Config, Norm, in_turns
from fleetdump_tapshard import Record, Shard, fsync_directory, safetensors_header

ENCODE = json.JSONEncoder(separators=(",", ":")).encode
"""``json.dumps`` makes an encoder each time, which costs as much again; a batch may have a thousand lines."""


class RunFiles:
    """Journal of one run, with the names of its shards."""

    def __init__(self, config: Config, run: str, base: str, directory: Path):
        """Raises ``OSError``."""
        for folder in (Path(config.dir), Path(config.dir) / run, directory):
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._config = config
        self._directory = directory
        self._writer, self._journal = _lock_journal(directory, base)
        self._lock = threading.Lock()
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

    def append(self, records: Sequence[Record]) -> None:
        """Append lines; when that fails none of them is there. For one thread at a time."""
        if self._journal.closed:
            raise gone()
        end = self._journal.seek(0, os.SEEK_END)
        try:
            text = "".join(ENCODE(record) + "\n" for record in in_turns(records, HEAVY_TURN))
            data = memoryview(text.encode())
            while data:
                data = data[self._journal.write(data) :]
            closes = records[0]["kind"] == "shard"
            if self._config.fsync == "group" or (self._config.fsync == "close" and closes):
                os.fsync(self._journal.fileno())
        except OSError:
            self._journal.truncate(end)
            raise

    def new_shard(self, slots: list[int]) -> Shard:
        """The next shard, empty; its pieces hold ``slots``."""
        prefix = f"shard-{self._writer}-"
        with self._lock:
            names = [name[len(prefix) :] for name in os.listdir(self._directory) if name.startswith(prefix)]
            numbers = [
                int(name.split(".")[0]) for name in names if name.split(".")[0].isdecimal()
            ]  # a copy is not ours
            number = max(numbers, default=-1) + 1
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
        file.truncate(file.read().rfind(b"\n") + 1)
        return name, file
    raise OSError(errno.EBUSY, f"every journal of {writer} is locked", str(directory))


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
    with open(temporary, "wb") as file:
        file.write(safetensors_header(header, 1024) + norm.weight)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)
    fsync_directory(path.parent)
