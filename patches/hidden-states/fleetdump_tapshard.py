"""One open shard of the tap (docs/formats.md of fleetdump): a safetensors file whose header comes last.

Standard library alone. ``os.pwritev``, ``zlib.crc32`` and SHA-256 release the GIL: they get megabytes at a time.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import struct
import time
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from fleetdump_taprecords import HEAVY_TURN, Piece, in_turns

HEADER_SLACK = 4096
"""Bytes of the header reserve kept for the metadata."""
ENTRY_BYTES = 160
"""What a tensor takes in the header beside its name, at most."""
BLOCK_BYTES = 8 << 20
"""What is checksummed and then written at once: it is still in the processor's cache."""
MAX_VIEWS = 512
"""Buffers of one ``os.pwritev``; the kernel takes 1024."""

Record = dict[str, Any]
"""A line of the journal."""


class Shard:
    """A ``.part`` that one thread at a time may ``write`` to. Its records are pending until the run's journal has them
    (``accept``) or will never have them (``reject``)."""

    def __init__(self, path: Path, metadata: dict[str, str], header_bytes: int, shard_bytes: int):
        """The header is written at once: then its room is on the disk, and whoever must finish the part finds the
        metadata in it."""
        self.path = path
        self.part = path.with_name(path.name + ".part")
        self.accepted: list[Record] = []
        self._written = 0
        self._settled = 0
        self.error: OSError | None = None
        """Why the shard takes no more: what is behind its accepted records is garbage."""
        self.unsynced = False
        self.newest = 0
        """Number of the newest load in it."""
        self._metadata = metadata
        self._start = 8 + header_bytes
        self._room = shard_bytes - self._start
        self._end = 0
        self._entry_bytes = HEADER_SLACK
        self._names: set[str] = set()
        self._renamed = False
        self._closed: Record | None = None
        """Its journal line, once it is closed; the disk may have no room for the line yet."""
        self._file = os.open(self.part, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            self._write_header()
            fsync_directory(path.parent)
        except OSError:
            self.give_up()
            self.part.unlink()
            raise

    @property
    def pending(self) -> int:
        """Records that are neither accepted nor rejected. Each count has one writer: the shard's borrower, and
        whoever journals."""
        return self._written - self._settled

    def takes(self, pieces: Sequence[Piece]) -> int:
        """How many of ``pieces`` fit, from the first on. A shard without a piece takes one of any size; a piece of a
        name that it has (a retracted request runs again) goes into the next one."""
        names: set[str] = set()
        end, entries = self._end, self._entry_bytes
        for count, piece in enumerate(pieces):
            name = piece.name
            end, entries = end + piece.data.nbytes, entries + len(name) + ENTRY_BYTES
            full = (end > self._room or entries > self._start - 8) and (self._names or names)
            if full or name in self._names or name in names:
                return count
            names.add(name)
        return len(pieces)

    def write(self, pieces: Sequence[Piece]) -> list[Record]:
        """Append the bytes of ``pieces``, which it ``takes``, and give their journal lines. When that fails
        (``OSError``) none of them is there, and the file ends where it did."""
        records, at = [], self._end
        try:
            for views, checksums in _blocks(pieces):
                written = sum(view.nbytes for view in views)
                _write_all(self._file, views, self._start + at)
                at += written
                records += checksums
        except OSError:
            # Should even that fail, the next piece is written over the rest and closing truncates.
            with contextlib.suppress(OSError):
                os.ftruncate(self._file, self._start + self._end)
            raise
        pairs = in_turns(zip(pieces, records, strict=True), HEAVY_TURN)
        lines = [self._record(piece, checksum) for piece, checksum in pairs]
        self._written += len(lines)
        self.unsynced = True
        return lines

    def sync(self) -> None:
        """What was written is on the disk."""
        os.fsync(self._file)
        self.unsynced = False

    def accept(self, records: Sequence[Record]) -> None:
        """The journal has these lines, the first of those that it had not."""
        self.accepted += records
        self._settled += len(records)

    def reject(self, records: Sequence[Record], error: OSError) -> None:
        """The journal will not have these lines, nor any later one of this shard."""
        self.error = self.error or error
        self._settled += len(records)

    def close(self, durable: bool) -> Record | None:
        """Cut behind the last accepted piece, header, fsync (if ``durable``), rename, SHA-256; gives the shard's
        journal line. None, and the part is removed, when it has no piece. May be called again after an ``OSError``, and
        when the line could not be journalled: it is the same then."""
        if self._closed is not None:
            return self._closed
        if not self.accepted:
            self.part.unlink()
            self.give_up()
            return None
        last = self.accepted[-1]
        size = self._start + int(last["offset"]) + int(last["bytes"])
        os.ftruncate(self._file, size)
        self._write_header()
        if durable:
            os.fsync(self._file)
        if not self._renamed:
            os.rename(self.part, self.path)
            self._renamed = True
        if durable:
            fsync_directory(self.path.parent)
        self._closed = line("shard", shard=self.path.name, bytes=size, sha256=self._sha256())
        self.give_up()
        return self._closed

    def give_up(self) -> None:
        """Close the file as it is."""
        file, self._file = self._file, -1
        if file >= 0:
            os.close(file)

    def _record(self, piece: Piece, checksum: int) -> Record:
        name = piece.name
        record = line(
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
            offset=self._end,
            bytes=piece.data.nbytes,
            crc32=checksum,
        )
        self._names.add(name)
        self._end += piece.data.nbytes
        self._entry_bytes += len(name) + ENTRY_BYTES
        return record

    def _write_header(self) -> None:
        entries = {
            record["name"]: {
                "dtype": record["dtype"],
                "shape": record["shape"],
                "data_offsets": [record["offset"], record["offset"] + record["bytes"]],
            }
            for record in self.accepted
        }
        header = safetensors_header({"__metadata__": self._metadata, **entries}, self._start - 8)
        _write_all(self._file, [memoryview(header)], 0)

    def _sha256(self) -> str:
        digest, block, at = hashlib.sha256(), memoryview(bytearray(BLOCK_BYTES)), 0
        while count := os.preadv(self._file, [block], at):
            digest.update(block[:count])
            at += count
        return digest.hexdigest()


def line(kind: str, **fields: Any) -> Record:
    """A line of the journal."""
    return {"v": 1, "kind": kind, **fields, "t": time.time()}


def safetensors_header(header: dict[str, Any], reserve: int) -> bytes:
    """The first ``8 + reserve`` bytes of a safetensors file; ``ValueError`` when it does not fit."""
    text = json.dumps(header, separators=(",", ":")).encode()
    if len(text) > reserve:
        raise ValueError(f"a header of {len(text)} bytes does not fit into {reserve}")
    return struct.pack("<Q", reserve) + text.ljust(reserve, b" ")


def fsync_directory(path: Path) -> None:
    """The names in a directory are on the disk."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _blocks(pieces: Sequence[Piece]) -> Iterator[tuple[list[memoryview], list[int]]]:
    """Views of about ``BLOCK_BYTES`` together, in order, and the CRC-32 of the pieces that end in them."""
    views: list[memoryview] = []
    checksums: list[int] = []
    size = 0
    for piece in pieces:
        checksum = 0
        for at in range(0, piece.data.nbytes, BLOCK_BYTES):
            view = piece.data[at : at + BLOCK_BYTES]
            checksum = zlib.crc32(view, checksum)
            views.append(view)
            size += view.nbytes
            if at + view.nbytes == piece.data.nbytes:
                checksums.append(checksum)
            if size >= BLOCK_BYTES or len(views) == MAX_VIEWS:
                yield views, checksums
                views, checksums, size = [], [], 0
    if views:
        yield views, checksums


def _write_all(file: int, views: list[memoryview], at: int) -> None:
    while views:
        count = os.pwritev(file, views, at)
        at += count
        while views and count >= views[0].nbytes:
            count -= views.pop(0).nbytes
        if views:
            views[0] = views[0][count:]
