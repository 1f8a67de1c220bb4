"""Read and verify shards that were pulled from hosts (docs/formats.md). Plain standard library: no torch, no numpy."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import BinaryIO

from fleetdump.agent.formats import FileName, FormatError, ManifestLine, coverage
from fleetdump.agent.shardcheck import Fault, JournalIndex, verify_shard
from fleetdump.agent.tensorfile import Header, Tensor, crc32, read_header, tensor_bytes


@dataclass
class Verification:
    """What ``verify_directory`` read, and what it found wrong."""

    shards: int = 0
    pieces: int = 0
    bytes: int = 0
    faults: list[Fault] = field(default_factory=list)


class ShardReader:
    """A closed shard, open for reading; a context manager. ``tensors`` maps names to their place.

    Raises ``FormatError`` for a broken header, ``OSError``.
    """

    def __init__(self, path: Path):
        self.path = path
        self._file: BinaryIO = open(path, "rb")  # noqa: SIM115 (closed by __exit__)
        try:
            self.header: Header = read_header(self._file, path.name)
        except BaseException:
            self._file.close()
            raise
        self.tensors: dict[str, Tensor] = {tensor.name: tensor for tensor in self.header.tensors}

    def __enter__(self) -> ShardReader:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()

    def read(self, name: str) -> bytes:
        """A tensor's bytes; ``KeyError`` when the shard has none of that name."""
        tensor = self.tensors[name]
        self._file.seek(self.header.data_start + tensor.offset)
        return self._file.read(tensor.bytes)


def verify_directory(directory: Path) -> Verification:
    """Verify every closed shard of a directory against its journals, reading each file once. A journal that cannot be
    read is a fault, and its shards are then not closed by any."""
    index = JournalIndex.read(directory)
    result = Verification(faults=index.faults)
    for name in sorted(index.closed):
        pieces = index.pieces[name]
        result.faults += verify_shard(directory / name, index.closed[name], pieces)
        result.shards += 1
        result.pieces += len(pieces)
        result.bytes += index.closed[name].bytes
    for path in sorted(directory.iterdir()):
        parsed = FileName.parse(path.name)
        if parsed and parsed.kind in ("shard", "tokens") and path.name not in index.closed:
            result.faults.append(Fault(path.name, "no journal says that it was closed"))
    return result


def verify_samples(directory: Path, lines: Iterable[ManifestLine]) -> list[Fault]:
    """Check that what each manifest line names stands in the shards' headers, covers the sample's tokens without gap
    and has the promised shape. It reads headers, ids and masks; the pieces' bytes are ``verify_shard``'s."""
    readers: dict[str, ShardReader | None] = {}
    faults = []
    try:
        for line in lines:
            faults += [
                Fault(shard, f"sample {line.id}: {what}") for shard, what in _check_sample(directory, line, readers)
            ]
    finally:
        for reader in readers.values():
            if reader is not None:
                reader.__exit__(None, None, None)
    return faults


def _check_sample(
    directory: Path, line: ManifestLine, readers: dict[str, ShardReader | None]
) -> Iterable[tuple[str, str]]:
    """(shard, what is wrong) for one sample."""
    found = coverage(line.pieces, line.tokens, len(line.layers["input"]) + 1)
    for lack in (found.surplus, f"{found.missing} are missing" if found.missing else ""):
        if lack:
            yield line.pieces[-1].shard if line.pieces else "manifest", lack
    for piece in line.pieces:
        reader = _reader(directory, piece.shard, readers)
        tensor = reader.tensors.get(piece.name) if reader else None
        if tensor is None:
            yield piece.shard, f"{piece.name} is not there"
            continue
        shape = [piece.rows, len(piece.slots), line.hidden]
        if tensor != Tensor(piece.name, line.dtype, shape, piece.offset, piece.bytes):
            yield (
                piece.shard,
                f"{piece.name} is {tensor.dtype}{tensor.shape} at {tensor.offset}, not as the manifest says",
            )
    yield from _check_tokens(directory, line, readers)


def _check_tokens(
    directory: Path, line: ManifestLine, readers: dict[str, ShardReader | None]
) -> Iterable[tuple[str, str]]:
    tokens = line.token_shard
    reader = _reader(directory, tokens.shard, readers)
    for name, dtype, checksum in ((tokens.ids, "I32", tokens.ids_crc32), (tokens.mask, "U8", tokens.mask_crc32)):
        tensor = reader.tensors.get(name) if reader else None
        if reader is None or tensor is None:
            yield tokens.shard, f"{name} is not there"
            continue
        data = reader.read(name)
        if tensor.dtype != dtype or len(data) != tensor_bytes(dtype, [line.tokens]):
            yield tokens.shard, f"{name} is {tensor.dtype}{tensor.shape}"
        elif crc32(data) != checksum:
            yield tokens.shard, f"{name} has CRC-32 {crc32(data):08x}, the manifest says {checksum:08x}"
        elif name == tokens.ids and hashlib.sha256(data).hexdigest() != line.ids_sha256:
            yield tokens.shard, f"{name} are not the sample's ids"
        elif name == tokens.mask and sum(data) != line.supervised:
            yield tokens.shard, f"{name} supervises {sum(data)} tokens, the manifest says {line.supervised}"


def _reader(directory: Path, name: str, readers: dict[str, ShardReader | None]) -> ShardReader | None:
    if name not in readers:
        try:
            readers[name] = ShardReader(directory / name)
        except (FormatError, OSError):
            readers[name] = None
    return readers[name]
