"""JSON lines, plain or compressed (gzip, zstd), a line at a time."""

from __future__ import annotations

import gzip
import io
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO, cast

from fleetdump.dataset.rows.broken import Broken
from fleetdump.dataset.rows.extras import pyarrow
from fleetdump.dataset.rows.text import loads
from fleetdump.errors import UsageError

MAX_LINE_BYTES = 32 << 20
"""Several times what a sample of a million tokens takes."""
GZIP_MAGIC = b"\x1f\x8b"
ZSTD_MAGIC = b"\x28\xb5\x2f\xfd"

_BOM = b"\xef\xbb\xbf"
_SKIP_BYTES = 1 << 20


def read_jsonl(path: Path, magic: bytes) -> Iterator[tuple[int, Any]]:
    """Number (from 1) and decoded JSON of each line that is not empty, or the ``Broken`` in its place. Of a line that
    is too long only the beginning is ever held in memory. Raises ``UsageError`` for a damaged file."""
    with _open(path, magic) as stream:
        for number, line in _lines(stream, path):
            yield number, _decode(line)


def _open(path: Path, magic: bytes) -> BinaryIO:
    if magic.startswith(GZIP_MAGIC):
        return cast(BinaryIO, gzip.open(path, "rb"))
    if magic.startswith(ZSTD_MAGIC):
        # Unlike others, this reader of zstd raises for a file that was cut off.
        return io.BufferedReader(pyarrow(path).input_stream(str(path), compression="zstd"), 1 << 20)
    return path.open("rb")


def _lines(stream: BinaryIO, path: Path) -> Iterator[tuple[int, bytes]]:
    number = 0
    try:
        while line := stream.readline(MAX_LINE_BYTES + 1):
            number += 1
            rest = line
            while rest and not rest.endswith(b"\n"):
                rest = stream.readline(_SKIP_BYTES)
            if number == 1:
                line = line.removeprefix(_BOM)
            if line.strip():
                yield number, line
    except (OSError, EOFError, zlib.error) as error:
        raise UsageError("the data is damaged", f"{path}:{number + 1}", str(error), "get an undamaged copy") from None


def _decode(line: bytes) -> Any:
    try:
        if len(line.rstrip(b"\r\n")) > MAX_LINE_BYTES:
            raise Broken("too_long", f"the line is longer than {MAX_LINE_BYTES >> 20} MiB")
        return loads(line.decode(), "bad_json")
    except UnicodeDecodeError as error:
        return Broken("not_utf8", f"byte {error.start} is 0x{line[error.start]:02x}")
    except Broken as broken:
        return broken
