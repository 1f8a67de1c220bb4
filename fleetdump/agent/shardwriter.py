"""Write safetensors shards that survive a crash, and finish those of writers that did not (docs/formats.md).

Standard library alone, Python 3.8. The tap has a writer of the same files of its own: it runs without this package.
"""

from __future__ import annotations

import contextlib
import errno
import os
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, Dict, List, Optional, Sequence, Tuple

from fleetdump.agent.formats import (
    FORMAT_NAME,
    PART_SUFFIX,
    FileName,
    JournalRecord,
    PieceRecord,
    Rid,
    ShardRecord,
    TokenRef,
    Writer,
)
from fleetdump.agent.jsonl import append_lines, fsync_directory, open_journal, write_all
from fleetdump.agent.tensorfile import (
    DEFAULT_HEADER_BYTES,
    Header,
    Tensor,
    build_header,
    crc32,
    file_sha256,
    header_entry_bytes,
    ids_bytes,
    ids_sha256,
    parse_header,
    tensor_bytes,
)

DISK_FULL = (errno.ENOSPC, errno.EDQUOT)
"""Errors of a disk that takes no more: they pass when somebody makes room."""
HEADER_SLACK = 4096
"""Bytes of the header reserve kept for ``__metadata__`` and the braces."""


@dataclass
class NewPiece:
    """A tensor to be written: the first fields of a ``PieceRecord``, which come before its place is known."""

    name: str
    rid: str
    start: int
    rows: int
    ids_sha256: str
    dtype: str
    shape: List[int]
    slots: List[int] = field(default_factory=list)


class ShardWriter:
    """One writer's shards in one run's capture directory, and its journal.

    ``add`` puts bytes into the open ``.part``; only ``sync`` makes them exist: data fsynced, then journalled. A full
    shard closes by itself on the next ``add``; ``close`` ends the last one and gives the journal up. A method that
    raises ``OSError`` (disk full, I/O error, directory gone) has cut the shard back to its last journalled piece:
    whatever was added since the last ``sync`` is gone, and the writer may be used again. Not for several threads.
    """

    def __init__(
        self,
        directory: Path,
        writer: Writer,
        metadata: Optional[Dict[str, str]] = None,
        shard_bytes: int = 4 << 30,
        header_bytes: int = DEFAULT_HEADER_BYTES,
    ):
        """Create ``directory`` (0700) and lock the journal. ``BlockingIOError``: a living process has that name."""
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        journal = open_journal(directory / writer.journal)
        if journal is None:
            raise BlockingIOError(f"{directory / writer.journal} belongs to a living process")
        self._journal = journal
        self._directory = directory
        self._writer = writer
        self._metadata = {**shard_metadata(directory.name, writer), **(metadata or {})}
        self._shard_bytes = shard_bytes
        self._header_bytes = header_bytes
        self._shard: Optional[_OpenShard] = None

    def __enter__(self) -> ShardWriter:
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()

    def add(self, *parts: Tuple[NewPiece, bytes]) -> List[PieceRecord]:
        """Write tensors side by side into one shard; they exist after the next ``sync``. ``ValueError``: the bytes are
        not those of dtype and shape."""
        for piece, data in parts:
            if len(data) != tensor_bytes(piece.dtype, piece.shape, piece.name):
                raise ValueError(f"{piece.name}: {len(data)} bytes are not {piece.dtype}{piece.shape}")
        if self._shard is not None and (self._shard.sealing or self._full(self._shard, parts)):
            self.close_shard()
        if self._shard is None:
            self._shard = _OpenShard.create(self._directory / self._next_name(), self._metadata, self._header_bytes)
        try:
            return [self._shard.write(piece, data) for piece, data in parts]
        except OSError:
            self._shard.drop_unsynced()
            raise

    def sync(self) -> List[PieceRecord]:
        """Make what was added since the last ``sync`` durable; returns it."""
        if self._shard is None or not self._shard.unsynced:
            return []
        try:
            os.fsync(self._shard.file.fileno())
            append_lines(self._journal, self._shard.unsynced)
        except OSError:
            self._shard.drop_unsynced()
            raise
        return self._shard.accept_unsynced()

    def close_shard(self) -> Optional[ShardRecord]:
        """Sync, write the header, rename, journal the shard's SHA-256. None when no shard is open. After an ``OSError``
        it may be called again."""
        self.sync()
        if self._shard is None:
            return None
        self._shard.sealing = True
        record = _seal(self._shard.path, self._shard.file, self._shard.tensors, self._shard.header, self._journal)
        self._shard.file.close()
        self._shard = None
        return record

    def close(self) -> None:
        """Close the shard and unlock the journal; closing twice does nothing. After an ``OSError`` it may be called
        again; if it is not, the part is finished from outside when this process has ended."""
        if not self._journal.closed:
            self.close_shard()
            self._journal.close()

    def _full(self, shard: _OpenShard, parts: Sequence[Tuple[NewPiece, bytes]]) -> bool:
        added = sum(header_entry_bytes(Tensor(p.name, p.dtype, p.shape, shard.end, len(d))) for p, d in parts)
        data = 8 + self._header_bytes + shard.end + sum(len(d) for _, d in parts)
        return shard.entry_bytes + added > self._header_bytes - HEADER_SLACK or data > self._shard_bytes

    def _next_name(self) -> str:
        found = [FileName.parse(name) for name in os.listdir(self._directory)]
        numbers = [f.number for f in found if f and f.kind == self._writer.prefix and f.writer == self._writer]
        return self._writer.shard(max(numbers, default=-1) + 1)


class TokenShards:
    """A driver's token shards: ids and loss mask of each sample. The methods raise what ``ShardWriter``'s raise."""

    def __init__(self, directory: Path, writer: Writer, shard_bytes: int = 4 << 30):
        self._shards = ShardWriter(directory, writer, shard_bytes=shard_bytes)

    def add(self, rid: Rid, ids: Sequence[int], mask: Sequence[int]) -> TokenRef:
        """Write a sample's ids (I32 ``[tokens]``) and loss mask (U8 ``[tokens]``); they exist after ``sync``."""
        if len(ids) != len(mask):
            raise ValueError(f"{rid}: {len(ids)} ids, but {len(mask)} mask values")
        digest, name, tokens = ids_sha256(ids), rid.short, len(ids)
        id_piece, mask_piece = self._shards.add(
            (NewPiece(f"{name}:ids", name, 0, tokens, digest, "I32", [tokens]), ids_bytes(ids)),
            (NewPiece(f"{name}:mask", name, 0, tokens, digest, "U8", [tokens]), bytes(mask)),
        )
        return TokenRef(id_piece.shard, id_piece.name, mask_piece.name, id_piece.crc32, mask_piece.crc32)

    def sync(self) -> None:
        """Make what was added durable: only then may a manifest line name it."""
        self._shards.sync()

    def rest(self) -> None:
        """Close the open shard; the next ``add`` begins another."""
        self._shards.close_shard()

    def close(self) -> None:
        """Close the last shard and unlock the journal."""
        self._shards.close()


def shard_metadata(run: str, writer: Writer) -> Dict[str, str]:
    """``__metadata__`` that every shard has."""
    return {"format": FORMAT_NAME, "run": run, "writer": str(writer)}


def finish_part(part: Path, records: Sequence[JournalRecord], journal: BinaryIO) -> Optional[ShardRecord]:
    """Close the ``.part`` of a dead writer from its journal's ``records``: cut after the last piece that is all there,
    header, rename, journal line. The caller holds ``journal``'s lock. None: it had no piece and was removed. May be
    interrupted anywhere and called again."""
    name = closed_name(part)
    pieces = sorted((r for r in records if isinstance(r, PieceRecord) and r.shard == name), key=lambda r: r.offset)
    if not pieces:
        part.unlink()
        return None
    with open(part, "r+b", buffering=0) as file:
        header = parse_header(file, str(part))
        data_bytes = file.seek(0, os.SEEK_END) - header.data_start
        whole = [_tensor(piece) for piece in pieces if piece.offset + piece.bytes <= data_bytes]
        return _seal(part, file, whole, header, journal)


def journal_closed(path: Path, journal: BinaryIO) -> ShardRecord:
    """Journal a closed shard whose writer died between its renaming and its journal line."""
    with open(path, "rb") as file:
        record = ShardRecord(path.name, os.fstat(file.fileno()).st_size, file_sha256(file), time.time())
    append_lines(journal, [record])
    return record


def closed_name(part: Path) -> str:
    """Name of the shard when it is closed."""
    return part.name[: -len(PART_SUFFIX)]


@dataclass
class _OpenShard:
    """A ``.part`` and what is in it. ``tensors`` are journalled, ``unsynced`` are not yet; one that has once been
    ``sealing`` takes no more."""

    path: Path
    file: BinaryIO
    header: Header
    tensors: List[Tensor] = field(default_factory=list)
    unsynced: List[PieceRecord] = field(default_factory=list)
    sealing: bool = False
    _entry_bytes: int = 0
    _unsynced_bytes: int = 0
    _unsynced_entry_bytes: int = 0
    """Running sums: a shard may have a million tensors."""

    @classmethod
    def create(cls, path: Path, metadata: Dict[str, str], header_bytes: int) -> _OpenShard:
        """A new part of shard ``path``. Its header is written at once: so the room for it is on the disk, and whoever
        must finish the part finds the metadata in it."""
        part = path.with_name(path.name + PART_SUFFIX)
        descriptor = os.open(part, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        file = os.fdopen(descriptor, "r+b", buffering=0)
        try:
            write_all(file, build_header(metadata, [], header_bytes))
            fsync_directory(part.parent)
        except OSError:
            file.close()
            part.unlink()
            raise
        return cls(part, file, Header(metadata, [], 8 + header_bytes))

    @property
    def end(self) -> int:
        """Bytes of the data section."""
        return _end(self.tensors) + self._unsynced_bytes

    @property
    def entry_bytes(self) -> int:
        """Room that the tensors take in the header, at most."""
        return self._entry_bytes + self._unsynced_entry_bytes

    def write(self, piece: NewPiece, data: bytes) -> PieceRecord:
        """Append a piece's bytes."""
        record = PieceRecord(
            **vars(piece),
            shard=closed_name(self.path),
            offset=self.end,
            bytes=len(data),
            crc32=crc32(data),
            t=time.time(),
        )
        self.file.seek(self.header.data_start + self.end)
        write_all(self.file, data)
        self.unsynced.append(record)
        self._unsynced_bytes += record.bytes
        self._unsynced_entry_bytes += header_entry_bytes(_tensor(record))
        return record

    def accept_unsynced(self) -> List[PieceRecord]:
        """They are on the disk and in the journal."""
        records, self.unsynced = self.unsynced, []
        self.tensors += map(_tensor, records)
        self._entry_bytes += self._unsynced_entry_bytes
        self._unsynced_bytes = self._unsynced_entry_bytes = 0
        return records

    def drop_unsynced(self) -> None:
        """Cut the file back to its last journalled piece. Should even that fail, the next piece overwrites the rest."""
        self.unsynced = []
        self._unsynced_bytes = self._unsynced_entry_bytes = 0
        with contextlib.suppress(OSError):
            self.file.truncate(self.header.data_start + self.end)


def _seal(part: Path, file: BinaryIO, tensors: Sequence[Tensor], header: Header, journal: BinaryIO) -> ShardRecord:
    """Make a ``.part`` the closed shard."""
    file.truncate(header.data_start + _end(tensors))
    file.seek(0)
    write_all(file, build_header(header.metadata, tensors, header.data_start - 8))
    os.fsync(file.fileno())
    path = part.with_name(closed_name(part))
    if part.exists():  # not when this is called again because the lines below failed
        os.rename(part, path)
    fsync_directory(path.parent)
    return journal_closed(path, journal)


def _tensor(piece: PieceRecord) -> Tensor:
    return Tensor(piece.name, piece.dtype, piece.shape, piece.offset, piece.bytes)


def _end(tensors: Sequence[Tensor]) -> int:
    return tensors[-1].offset + tensors[-1].bytes if tensors else 0
