"""Is a shard what its journal says? Shared by the host's ``verify`` and the controller's check of what it pulled.

Standard library alone, Python 3.8.
"""

from __future__ import annotations

import errno
import hashlib
import os
import stat
import zlib
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, Dict, List, Sequence, Tuple

from fleetdump.agent.formats import FileName, FormatError, PieceRecord, ShardRecord
from fleetdump.agent.jsonl import read_journal
from fleetdump.agent.tensorfile import Header, parse_header, read_header

BLOCK_BYTES = 1 << 20


@dataclass(frozen=True)
class Fault:
    """What is wrong with a file: ``file`` is its name, ``what`` says what and where in it."""

    file: str
    what: str

    def __str__(self) -> str:
        return f"{self.file}: {self.what}"


@dataclass
class JournalIndex:
    """What the journals of one directory say: pieces by shard in the order of their offsets, and closed shards.
    ``broken``: why a journal cannot be read, by its name; nothing of it is in the index."""

    pieces: Dict[str, List[PieceRecord]] = field(default_factory=lambda: defaultdict(list))
    closed: Dict[str, ShardRecord] = field(default_factory=dict)
    broken: Dict[str, str] = field(default_factory=dict)

    @classmethod
    def read(cls, directory: Path) -> JournalIndex:
        """Read every journal in ``directory``."""
        index = cls()
        for path in sorted(directory.glob("journal-*.jsonl")):
            try:
                records, _ = read_journal(plain_file(path))
            except (FormatError, OSError) as error:
                index.broken[path.name] = _why(error, path)
                continue
            for record in records:
                if isinstance(record, PieceRecord):
                    index.pieces[record.shard].append(record)
                elif isinstance(record, ShardRecord):
                    index.closed[record.shard] = record
        for pieces in index.pieces.values():
            pieces.sort(key=lambda piece: piece.offset)
        return index

    def is_readable(self, shard: str) -> bool:
        """Whether the journal of the shard's writer could be read (or is not there at all)."""
        parsed = FileName.parse(shard)
        return parsed is None or parsed.writer is None or parsed.writer.journal not in self.broken

    @property
    def faults(self) -> List[Fault]:
        """One for each broken journal."""
        return [Fault(name, f"cannot be read: {why}") for name, why in sorted(self.broken.items())]


def plain_file(path: Path) -> Path:
    """``path``; raises ``OSError`` for what is no plain file: a pipe would be waited for, a link leads elsewhere."""
    mode = os.lstat(path).st_mode
    if not stat.S_ISREG(mode):
        raise OSError(errno.EINVAL, "not a plain file", str(path))
    return path


def verify_shard(path: Path, closed: ShardRecord, pieces: Sequence[PieceRecord]) -> List[Fault]:
    """Size, SHA-256, header and the CRC-32 of every piece of one shard; empty when all is well."""
    try:
        size = plain_file(path).stat().st_size
        if size != closed.bytes:
            return [Fault(path.name, f"has {size} bytes, its journal says {closed.bytes}")]
        with open(path, "rb") as file:
            header = read_header(file, path.name)
            faults = _compare_header(path.name, header, pieces)
            return faults or _verify_bytes(path.name, file, header, closed, pieces)
    except FileNotFoundError:
        return [Fault(path.name, "is missing")]
    except (FormatError, OSError) as error:
        return [fault_of(path, error)]


def verify_part(path: Path, pieces: Sequence[PieceRecord]) -> List[Fault]:
    """The CRC-32 of every journalled piece of a shard that is not closed."""
    try:
        with open(plain_file(path), "rb") as file:
            file.seek(parse_header(file, path.name).data_start)
            return _verify_pieces(path.name, file, pieces)[0]
    except FileNotFoundError:
        return [Fault(path.name, "is missing")]
    except (FormatError, OSError) as error:
        return [fault_of(path, error)]


def _compare_header(name: str, header: Header, pieces: Sequence[PieceRecord]) -> List[Fault]:
    in_header = {(t.name, t.dtype, tuple(t.shape), t.offset, t.bytes) for t in header.tensors}
    in_journal = {(p.name, p.dtype, tuple(p.shape), p.offset, p.bytes) for p in pieces}
    faults = [
        Fault(name, f"{extra[0]} is in the header, not in the journal") for extra in sorted(in_header - in_journal)
    ]
    return faults + [
        Fault(name, f"{lost[0]} is in the journal, not in the header") for lost in sorted(in_journal - in_header)
    ]


def fault_of(path: Path, error: Exception) -> Fault:
    """What reading ``path`` raised, as a finding."""
    return Fault(path.name, _why(error, path))


def _why(error: Exception, path: Path) -> str:
    """The error in words, without the file's name at its beginning."""
    if isinstance(error, OSError):
        return error.strerror or str(error)
    text = str(error)
    for prefix in (f"{path}: ", f"{path.name}: "):
        if text.startswith(prefix):
            return text[len(prefix) :]
    return text


def _verify_bytes(
    name: str, file: BinaryIO, header: Header, closed: ShardRecord, pieces: Sequence[PieceRecord]
) -> List[Fault]:
    """One pass over the file: its SHA-256 and each piece's CRC-32."""
    file.seek(0)
    digest = hashlib.sha256(file.read(header.data_start))
    faults, digest = _verify_pieces(name, file, pieces, digest)
    if digest.hexdigest() != closed.sha256:
        faults.append(Fault(name, f"has SHA-256 {digest.hexdigest()}, its journal says {closed.sha256}"))
    return faults


def _verify_pieces(
    name: str, file: BinaryIO, pieces: Sequence[PieceRecord], digest: Any = None
) -> Tuple[List[Fault], Any]:
    """CRC-32 of ``pieces``, which follow on one another from where ``file`` is; ``digest`` takes their bytes too."""
    faults = []
    digest = digest or hashlib.sha256()
    for piece in pieces:
        left, checksum = piece.bytes, 0
        while left:
            block = file.read(min(left, BLOCK_BYTES))
            if not block:
                break
            digest.update(block)
            checksum = zlib.crc32(block, checksum)
            left -= len(block)
        if left:
            faults.append(Fault(name, f"{piece.name} ends {left} bytes early"))
        elif checksum != piece.crc32:
            faults.append(Fault(name, f"{piece.name} has CRC-32 {checksum:08x}, its journal says {piece.crc32:08x}"))
    return faults, digest
