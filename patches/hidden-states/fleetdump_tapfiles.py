"""The tap's files (docs/formats.md of fleetdump): a bounded queue, one thread that writes, shards and journals.

Standard library alone. The forward's thread only calls ``TapWriter.put`` and ``TapWriter.skip``, which do no I/O.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import json
import logging
import os
import struct
import threading
import time
import zlib
from collections import Counter, defaultdict, deque
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

logger = logging.getLogger(__name__)

HEADER_SLACK = 4096
"""Bytes of the header reserve kept for the metadata."""
ENTRY_BYTES = 160
"""What a tensor takes in the header beside its name, at most."""
PUT_PATIENCE = 5.0
"""Seconds that a forward may wait for room in the queue."""


@dataclass
class Config:
    """``tap.json``, written by fleetdump's agent when it launches the server."""

    server: str
    launch_id: str
    layers: list[int]
    dir: str
    shard_bytes: int
    header_bytes: int
    idle_close_seconds: float
    queue_bytes: int
    ranks: int
    v: int = 1

    @classmethod
    def load(cls, path: str) -> Config:
        """Raises ``OSError``, ``ValueError`` or ``TypeError`` when the file is not a configuration of this version."""
        config = cls(**json.loads(Path(path).read_text()))
        if config.v != 1:
            raise ValueError(f"{path}: version {config.v}")
        return config


@dataclass
class Norm:
    """The model's final norm: ``weight`` is the bytes of a ``[hidden]`` tensor of ``dtype``."""

    weight: bytes
    dtype: str
    eps: float


@dataclass
class Piece:
    """Rows of one request from one forward: ``data`` is the bytes of a ``[rows, len(slots), hidden]`` tensor of
    ``dtype``, ``ids`` those rows' token ids as int32 LE."""

    rid: str
    start: int
    dtype: str
    shape: list[int]
    slots: list[int]
    ids: bytes
    data: memoryview

    @property
    def run(self) -> str:
        return run_of(self.rid)


@dataclass
class Skip:
    """A request of ours whose rows are not written; ``reason`` is one of docs/formats.md."""

    rid: str
    reason: str
    detail: str

    @property
    def run(self) -> str:
        return run_of(self.rid)


def run_of(rid: str) -> str:
    """The run of a rid of ours."""
    return rid.split("/")[1]


class TapWriter:
    """The queue and its thread. ``rank`` names the writer; ``norm`` is written once into each run's directory.
    ``folder``: where in a run's directory it writes, which is nowhere deeper for what belongs to the data."""

    def __init__(self, config: Config, rank: int, norm: Norm | None, folder: str = ""):
        self._config = config
        self._rank = rank
        self._folder = folder
        self._norm = norm
        self._changed = threading.Condition()
        self._queue: deque[Piece | Skip] = deque()
        self._queued_bytes = 0
        self._stuck = False
        self._stopping = False
        self._runs: dict[str, _RunFiles] = {}
        self._counts: dict[str, _Counts] = defaultdict(_Counts)
        self._thread = threading.Thread(target=self._loop, name="fleetdump-tap", daemon=True)
        self._thread.start()

    def put(self, pieces: list[Piece]) -> None:
        """Hand over what one forward gave. Waits a bounded time for room, and not again before there has been some;
        without room the pieces become skips."""
        size = sum(piece.data.nbytes for piece in pieces)
        with self._changed:
            if not self._has_room(size) and not self._stuck:
                self._changed.wait_for(lambda: self._has_room(size), PUT_PATIENCE)
            self._stuck = not self._has_room(size)
            if self._stuck:
                self._queue += [Skip(p.rid, "backpressure", f"{self._queued_bytes} bytes wait") for p in pieces]
            else:
                self._queue += pieces
                self._queued_bytes += size
            self._changed.notify_all()

    def skip(self, skips: list[Skip]) -> None:
        """Have requests journalled as skipped."""
        with self._changed:
            self._queue += skips
            self._changed.notify_all()

    def stop(self, seconds: float = 10.0) -> None:
        """Write what is queued, close everything and end the thread."""
        with self._changed:
            self._stopping = True
            self._changed.notify_all()
        self._thread.join(seconds)

    def _has_room(self, size: int) -> bool:
        return not self._queued_bytes or self._queued_bytes + size <= self._config.queue_bytes

    def _loop(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._queue or self._stopping, min(1.0, self._config.idle_close_seconds))
                stopping = self._stopping and not self._queue
            for name in list(self._runs) if stopping else ():
                self._close(name)
            if stopping:
                return
            try:
                self._write_queued()
                self._housekeeping()
            except Exception:
                logger.exception("fleetdump-tap: the writer goes on after")

    def _write_queued(self) -> None:
        """Write what is in the queue by now, then fsync and journal it as one group."""
        for _ in range(len(self._queue)):
            item = self._queue[0]
            try:
                self._files(item.run).take(item)
            except Exception as error:
                # Not even the run's directory could be made: no journal can tell it, the driver's time-out does.
                logger.error("fleetdump-tap: %s of %s is lost: %r", type(item).__name__, item.rid, error)
            with self._changed:
                self._queue.popleft()
                self._queued_bytes -= item.data.nbytes if isinstance(item, Piece) else 0
                self._changed.notify_all()
        for files in self._runs.values():
            files.sync()

    def _housekeeping(self) -> None:
        now = time.monotonic()
        for name, files in list(self._runs.items()):
            files.report(self._queued_bytes)
            if now - files.last_used > self._config.idle_close_seconds:
                self._close(name)

    def _close(self, run: str) -> None:
        try:
            self._runs.pop(run).close()
        except Exception as error:
            logger.error("fleetdump-tap: closing the shard of run %s failed, the agent will finish it: %r", run, error)

    def _files(self, run: str) -> _RunFiles:
        files = self._runs.get(run)
        if files is not None and files.is_gone():
            self._close(run)
            files = None
        if files is None:
            files = self._runs[run] = _RunFiles(
                self._config, run, self._folder, self._rank, self._norm, self._counts[run]
            )
        return files


class _RunFiles:
    """Journal and open shard of one run, until the run is idle. Raises ``OSError`` only when made or closed."""

    def __init__(self, config: Config, run: str, folder: str, rank: int, norm: Norm | None, counts: _Counts):
        root = Path(config.dir) / run
        root.mkdir(mode=0o700, parents=True, exist_ok=True)
        self.directory = root / folder
        self.directory.mkdir(mode=0o700, exist_ok=True)
        self.last_used = time.monotonic()
        self._config = config
        self.writer, self._journal = _lock_journal(self.directory, f"{config.server}-{config.launch_id}-r{rank}")
        self._metadata = {
            "format": "fleetdump-1",
            "run": run,
            "writer": self.writer,
            "layers": json.dumps(config.layers),
            "final": "pre_norm",
        }
        self._shard: _Shard | None = None
        self._skips: list[Skip] = []
        self._counts = counts
        self._reported = 0.0
        self._norm = norm

    def is_gone(self) -> bool:
        """Whether somebody has removed the directory under us."""
        try:
            return (
                os.stat(self.directory / f"journal-{self.writer}.jsonl").st_ino
                != os.fstat(self._journal.fileno()).st_ino
            )
        except OSError:
            return True

    def take(self, item: Piece | Skip) -> None:
        """Write a piece's bytes or note a skip; ``sync`` makes either durable."""
        self.last_used = time.monotonic()
        if isinstance(item, Skip):
            self._skips.append(item)
            return
        try:
            self._write_norm()
            if self._shard is not None and not self._shard.has_room(item, self._config):
                self.sync()
                self._close_shard()
            if self._shard is None:
                metadata = {**self._metadata, "slots": json.dumps(item.slots)}
                self._shard = _Shard(self._next_path(), metadata, self._config.header_bytes)
            self._shard.write(item)
        except OSError as error:
            self._skips.append(_lost(item.rid, error))

    def sync(self) -> None:
        """fsync the new pieces and journal them. What cannot be made durable becomes a skip; a skip that cannot be
        journalled is only counted."""
        if self._shard is not None and self._shard.unsynced:
            records = self._shard.unsynced
            try:
                os.fsync(self._shard.file.fileno())
                self._append(records)
            except OSError as error:
                self._shard.drop_unsynced()
                self._skips += [_lost(record["rid"], error) for record in records]
            else:
                self._shard.accept_unsynced()
                self._counts.rows += sum(record["rows"] for record in records)
                self._counts.bytes += sum(record["bytes"] for record in records)
        skips, self._skips = self._skips, []
        self._counts.skips.update(skip.reason for skip in skips)
        if skips:
            logger.warning("fleetdump-tap: skipped %s", [(s.rid, s.reason, s.detail) for s in skips[:5]])
            with contextlib.suppress(OSError):
                self._append([_line("skip", **asdict(skip)) for skip in skips])

    def report(self, queued_bytes: int) -> None:
        """Replace the status file, at most once a second; best effort."""
        now = time.monotonic()
        if now - self._reported < 1.0:
            return
        self._reported = now
        path = self.directory / f"status-{self.writer}.json"
        temporary = path.with_name(path.name + ".tmp")
        with contextlib.suppress(OSError):
            temporary.write_text(json.dumps(self._status(queued_bytes)) + "\n")
            os.replace(temporary, path)

    def _status(self, queued_bytes: int) -> dict[str, Any]:
        return {
            "v": 1,
            "writer": self.writer,
            "pid": os.getpid(),
            "rows": self._counts.rows,
            "bytes": self._counts.bytes,
            "skips": self._counts.skips,
            "queue_bytes": queued_bytes,
            "t": time.time(),
        }

    def close(self) -> None:
        """Close the shard and let the journal's lock go."""
        with self._journal:
            self.sync()
            self._close_shard()
            self._reported = 0.0
            self.report(0)

    def _close_shard(self) -> None:
        shard, self._shard = self._shard, None
        if shard is not None:
            self._append([_line("shard", **shard.close())])

    def _write_norm(self) -> None:
        if self._norm is not None:
            path = self.directory / f"norm-{self._config.server}-{self._config.launch_id}.safetensors"
            if not path.exists():
                _write_norm(path, self._norm)
            self._norm = None

    def _append(self, lines: list[dict[str, Any]]) -> None:
        end = self._journal.seek(0, os.SEEK_END)
        try:
            _write_all(
                self._journal, "".join(json.dumps(line, separators=(",", ":")) + "\n" for line in lines).encode()
            )
            os.fsync(self._journal.fileno())
        except OSError:
            self._journal.truncate(end)
            raise

    def _next_path(self) -> Path:
        prefix = f"shard-{self.writer}-"
        numbers = [
            int(name[len(prefix) :].split(".")[0]) for name in os.listdir(self.directory) if name.startswith(prefix)
        ]
        return self.directory / f"{prefix}{max(numbers, default=-1) + 1}.safetensors"


@dataclass
class _Counts:
    """Of one run, since this process began."""

    rows: int = 0
    bytes: int = 0
    skips: Counter[str] = field(default_factory=Counter)


class _Shard:
    """An open ``.part``: its journal lines are ``synced`` (in the journal) or ``unsynced`` (written only)."""

    def __init__(self, path: Path, metadata: dict[str, str], header_bytes: int):
        """The header is written at once: then its room is on the disk, and whoever must finish the part finds the
        metadata in it."""
        self.path = path
        self.part = path.with_name(path.name + ".part")
        self.metadata = metadata
        self.header_bytes = header_bytes
        self.synced: list[dict[str, Any]] = []
        self.unsynced: list[dict[str, Any]] = []
        self.end = 0
        self.entry_bytes = HEADER_SLACK
        self.names: set[str] = set()
        descriptor = os.open(self.part, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        self.file: BinaryIO = os.fdopen(descriptor, "r+b", buffering=0)
        try:
            _write_all(self.file, self._header())
            _fsync_directory(path.parent)
        except OSError:
            self.file.close()
            self.part.unlink()
            raise

    def has_room(self, piece: Piece, config: Config) -> bool:
        """A piece of a name that is in the shard (a retracted request runs again) goes into the next one."""
        name = _name(piece)
        return (
            name not in self.names
            and self.entry_bytes + len(name) + ENTRY_BYTES <= self.header_bytes
            and 8 + self.header_bytes + self.end + piece.data.nbytes <= config.shard_bytes
        )

    def write(self, piece: Piece) -> None:
        """Append a piece's bytes; when that fails, cut the file back to where it was."""
        try:
            self.file.seek(8 + self.header_bytes + self.end)
            _write_all(self.file, piece.data)
        except OSError:
            self._cut()
            raise
        name = _name(piece)
        self.unsynced.append(
            _line(
                "piece",
                name=name,
                rid=piece.rid,
                start=piece.start,
                rows=piece.shape[0],
                ids_sha256=hashlib.sha256(piece.ids).hexdigest(),
                shard=self.path.name,
                dtype=piece.dtype,
                shape=piece.shape,
                slots=piece.slots,
                offset=self.end,
                bytes=piece.data.nbytes,
                crc32=zlib.crc32(piece.data),
            )
        )
        self.names.add(name)
        self.end += piece.data.nbytes
        self.entry_bytes += len(name) + ENTRY_BYTES

    def accept_unsynced(self) -> None:
        self.synced += self.unsynced
        self.unsynced = []

    def drop_unsynced(self) -> None:
        """Cut the file back to its last journalled piece."""
        self.end = self.unsynced[0]["offset"]
        self.names -= {record["name"] for record in self.unsynced}
        self.unsynced = []
        self._cut()

    def close(self) -> dict[str, Any]:
        """Header, fsync, rename; gives the fields of the shard's journal line."""
        with self.file:
            self.file.truncate(8 + self.header_bytes + self.end)
            self.file.seek(0)
            _write_all(self.file, self._header())
            os.fsync(self.file.fileno())
            os.rename(self.part, self.path)
            _fsync_directory(self.path.parent)
            self.file.seek(0)
            digest = hashlib.sha256()
            while block := self.file.read(1 << 20):
                digest.update(block)
        return {"shard": self.path.name, "bytes": 8 + self.header_bytes + self.end, "sha256": digest.hexdigest()}

    def _header(self) -> bytes:
        entries = {
            r["name"]: {
                "dtype": r["dtype"],
                "shape": r["shape"],
                "data_offsets": [r["offset"], r["offset"] + r["bytes"]],
            }
            for r in self.synced
        }
        return _safetensors_header({"__metadata__": self.metadata, **entries}, self.header_bytes)

    def _cut(self) -> None:
        # Should even that fail, the next piece is written over the rest and closing truncates.
        with contextlib.suppress(OSError):
            self.file.truncate(8 + self.header_bytes + self.end)


def _name(piece: Piece) -> str:
    return f"{piece.rid}:{piece.start}"


def _line(kind: str, **fields: Any) -> dict[str, Any]:
    return {"v": 1, "kind": kind, **fields, "t": time.time()}


def _lost(rid: str, error: OSError) -> Skip:
    full = error.errno in (errno.ENOSPC, errno.EDQUOT)
    return Skip(rid, "disk_full" if full else "io_error", str(error))


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
        file.write(_safetensors_header(header, 1024) + norm.weight)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)
    _fsync_directory(path.parent)


def _safetensors_header(header: dict[str, Any], reserve: int) -> bytes:
    text = json.dumps(header, separators=(",", ":")).encode()
    if len(text) > reserve:
        raise ValueError(f"a header of {len(text)} bytes does not fit into {reserve}")
    return struct.pack("<Q", reserve) + text.ljust(reserve, b" ")


def _write_all(file: BinaryIO, data: bytes | memoryview) -> None:
    view = memoryview(data).cast("B")
    while view:
        view = view[file.write(view) :]


def _fsync_directory(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
