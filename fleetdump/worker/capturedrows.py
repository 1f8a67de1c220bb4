"""Captured rows and checkpoint tensors as float32 arrays, straight from safetensors files, a ``.part`` included.

The safetensors library reads neither a ``.part`` nor, into numpy, bfloat16.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from fleetdump.agent.formats import FormatError
from fleetdump.agent.selfcheck_capture import open_shard
from fleetdump.agent.selfcheck_facts import PieceRef
from fleetdump.agent.tensorfile import Header, parse_header

Array = Any
"""A numpy array; its shape and dtype are said where it is made."""

STORED = {"F32": "<f4", "F16": "<f2", "BF16": "<u2"}
"""numpy's types of the safetensors dtypes that states and weights have; bfloat16 as the upper half of a float32."""


def read_rows(directory: Path, pieces: Sequence[PieceRef]) -> Array:
    """Float32 ``[tokens, slots, hidden]`` of a prompt whose ``pieces`` hold every row and slot, in any order."""
    tokens = max(piece.start + piece.shape[0] for piece in pieces)
    slots = 1 + max(max(piece.slots) for piece in pieces)
    rows: Array = np.full((tokens, slots, pieces[0].shape[2]), np.nan, np.float32)
    for piece in pieces:
        rows[piece.start : piece.start + piece.shape[0], piece.slots] = read_piece(directory, piece)
    return rows


def read_piece(directory: Path, piece: PieceRef) -> Array:
    """Float32 array of the piece's own shape. Raises ``FormatError`` for a file that ends inside it."""
    with open_shard(directory / piece.shard) as file:
        file.seek(parse_header(file, piece.shard).data_start + piece.offset)
        dtype = np.dtype(STORED[piece.dtype])
        size = int(np.prod(piece.shape)) * dtype.itemsize
        data = file.read(size)
    if len(data) < size:
        raise FormatError(f"{piece.shard}: ends inside the piece at {piece.offset}")
    return as_float32(np.frombuffer(data, dtype), piece.dtype).reshape(piece.shape)


def read_header_of(path: Path) -> Header:
    """The header of a closed safetensors file."""
    with open(path, "rb") as file:
        return parse_header(file, str(path))


def as_float32(stored: Array, dtype: str) -> Array:
    """Values of an array of one of the ``STORED`` types, in its shape."""
    if dtype == "BF16":
        return (stored.astype(np.uint32) << 16).view(np.float32)
    return stored.astype(np.float32)
