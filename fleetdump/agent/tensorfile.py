"""Safetensors files and the hashes of what is in them (docs/formats.md).

Standard library alone, Python 3.8; shared by agent, driver and controller.
"""

from __future__ import annotations

import hashlib
import json
import os
import struct
import zlib
from dataclasses import dataclass
from typing import Any, BinaryIO, Dict, List, Sequence

from fleetdump.agent.formats import FormatError

DTYPE_BYTES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "I64": 8, "I32": 4, "U8": 1}
"""Bytes of one element of the safetensors dtypes that we write."""

DEFAULT_HEADER_BYTES = 256 << 10
MAX_HEADER_BYTES = 100_000_000
"""The safetensors library refuses larger headers."""


# --------------------------------------------------------------------------- hashes
def ids_bytes(ids: Sequence[int]) -> bytes:
    """Token ids as int32, little-endian."""
    return struct.pack(f"<{len(ids)}i", *ids)


def ids_sha256(ids: Sequence[int]) -> str:
    """SHA-256 of ``ids_bytes``, as journal and manifest have it."""
    return hashlib.sha256(ids_bytes(ids)).hexdigest()


def crc32(data: Any) -> int:
    """CRC-32 (zlib's) of anything with a buffer, as an unsigned integer."""
    return zlib.crc32(data) & 0xFFFFFFFF


def file_sha256(file: BinaryIO) -> str:
    """SHA-256 of the rest of ``file``."""
    digest = hashlib.sha256()
    for block in iter(lambda: file.read(1 << 20), b""):
        digest.update(block)
    return digest.hexdigest()


# --------------------------------------------------------------------------- safetensors
@dataclass
class Tensor:
    """A tensor of a shard. ``offset`` counts from the start of the data section."""

    name: str
    dtype: str
    shape: List[int]
    offset: int
    bytes: int


@dataclass
class Header:
    """A safetensors header. ``data_start`` is where the data section begins in the file."""

    metadata: Dict[str, str]
    tensors: List[Tensor]
    data_start: int


def header_entry_bytes(tensor: Tensor) -> int:
    """Upper bound of what ``tensor`` takes in a header."""
    return len(json.dumps(tensor.name)) + len(json.dumps(tensor.shape)) + 96


def build_header(metadata: Dict[str, str], tensors: Sequence[Tensor], reserve: int) -> bytes:
    """The first ``8 + reserve`` bytes of a safetensors file: length, JSON header, spaces. ``reserve`` is a multiple
    of 8. Raises ``FormatError`` when the header does not fit."""
    header: Dict[str, Any] = {"__metadata__": metadata}
    for tensor in tensors:
        header[tensor.name] = {
            "dtype": tensor.dtype,
            "shape": tensor.shape,
            "data_offsets": [tensor.offset, tensor.offset + tensor.bytes],
        }
    text = json.dumps(header, separators=(",", ":")).encode()
    if len(text) > reserve:
        raise FormatError(f"header of {len(tensors)} tensors takes {len(text)} bytes, {reserve} are reserved")
    return struct.pack("<Q", reserve) + text.ljust(reserve, b" ")


def read_header(file: BinaryIO, name: str) -> Header:
    """Parse and check the header of an open safetensors file ``name``: known dtypes, shapes that fit their bytes,
    tensors back to back from 0 to the end of the file. Raises ``FormatError``."""
    header = parse_header(file, name)
    _check_layout(header.tensors, file.seek(0, os.SEEK_END) - header.data_start, name)
    return header


def parse_header(file: BinaryIO, name: str) -> Header:
    """The header alone, whatever data follows: that of a ``.part`` has its metadata and no tensors. ``FormatError``."""
    file.seek(0)
    prefix = file.read(8)
    length = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else 0
    if not 0 < length <= MAX_HEADER_BYTES:
        raise FormatError(f"{name}: header length {length}")
    text = file.read(length)
    if len(text) < length:
        raise FormatError(f"{name}: ends inside its header")
    try:
        raw = json.loads(text.decode())
        metadata = raw.pop("__metadata__", {})
        tensors = [_tensor(key, value) for key, value in raw.items()]
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise FormatError(f"{name}: header cannot be parsed ({error!r})") from error
    tensors.sort(key=lambda tensor: (tensor.offset, tensor.bytes))
    return Header(metadata, tensors, 8 + length)


def _tensor(name: str, value: Dict[str, Any]) -> Tensor:
    start, end = value["data_offsets"]
    return Tensor(name, value["dtype"], value["shape"], start, end - start)


def _check_layout(tensors: Sequence[Tensor], data_bytes: int, name: str) -> None:
    end = 0
    for tensor in tensors:
        if tensor.offset != end:
            raise FormatError(f"{name}: {tensor.name} begins at {tensor.offset}, expected {end}")
        if tensor.bytes != tensor_bytes(tensor.dtype, tensor.shape, f"{name}: {tensor.name}"):
            raise FormatError(
                f"{name}: {tensor.name} has {tensor.bytes} bytes, not those of {tensor.dtype}{tensor.shape}"
            )
        end += tensor.bytes
    if end != data_bytes:
        raise FormatError(f"{name}: data section has {data_bytes} bytes, the header names {end}")


def tensor_bytes(dtype: str, shape: Sequence[int], where: str = "tensor") -> int:
    """Bytes of a tensor; raises ``FormatError`` for a dtype that we do not write or a negative size."""
    if dtype not in DTYPE_BYTES or any(size < 0 for size in shape):
        raise FormatError(f"{where}: unknown dtype or shape {dtype}{list(shape)}")
    size = DTYPE_BYTES[dtype]
    for length in shape:
        size *= length
    return size
