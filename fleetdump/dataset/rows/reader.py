"""A data set of any format, row by row."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from fleetdump.agent.formats import Row
from fleetdump.dataset.rows.arrow import MAGICS, files_of, read_arrow
from fleetdump.dataset.rows.broken import Broken, BrokenRow
from fleetdump.dataset.rows.content import parse_row
from fleetdump.dataset.rows.extras import pyarrow
from fleetdump.dataset.rows.identity import SeenIds
from fleetdump.dataset.rows.jsonl import ZSTD_MAGIC, read_jsonl
from fleetdump.errors import UsageError

Items = Iterator[tuple[int, Any]]
"""A row's number and its content as decoded JSON, or the ``Broken`` in its place."""


def numbered_rows(path: Path) -> Iterator[tuple[int, Row | BrokenRow]]:
    """Rows of JSON lines (plain, gzip, zstd), Parquet or Arrow, or of a folder that ``datasets`` saved, in order and
    with their number (``BrokenRow.line``); empty lines are skipped, an id is given out once.

    A row without an id of its own (``id``, ``conversation_id``, ``uuid``) gets the first 16 hex digits of its content's
    SHA-256. Raises ``UsageError`` at once for data that cannot be read or is of no such format, and while reading for
    a damaged file.
    """
    return _rows(_items(path))


def read_rows(path: Path) -> Iterator[Row | BrokenRow]:
    """``numbered_rows`` without the numbers."""
    numbered = numbered_rows(path)
    return (row for _, row in numbered)


def _items(path: Path) -> Items:
    try:
        if path.is_dir():
            return read_arrow(files_of(path))
        if path.exists() and not path.is_file():
            raise UsageError("the data is not a file", str(path), next_step="name a file, or a folder of a data set")
        with path.open("rb") as stream:
            magic = stream.read(4)
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise UsageError("the data cannot be read", str(path), why, "check the path and its permissions") from None
    if magic in MAGICS:
        return read_arrow([path])
    _refuse_others(path, magic)
    return read_jsonl(path, magic)


def _refuse_others(path: Path, magic: bytes) -> None:
    if magic == ZSTD_MAGIC:
        pyarrow(path)
    if magic == b"PK\x03\x04":
        raise UsageError("the data is a zip file", str(path), next_step="unpack it first")
    if path.suffix == ".json" and magic.lstrip().startswith(b"["):
        fix = f"one object a line is needed: jq -c '.[]' {path.name} > {path.stem}.jsonl"
        raise UsageError("the data is one JSON list", str(path), next_step=fix)


def _rows(items: Items) -> Iterator[tuple[int, Row | BrokenRow]]:
    seen = SeenIds()
    for number, item in items:
        yield number, _row(number, item, seen)


def _row(number: int, item: Any, seen: SeenIds) -> Row | BrokenRow:
    try:
        if isinstance(item, Broken):
            raise item
        row = parse_row(item)
        seen.take(row.id, number)
    except Broken as broken:
        return broken.at(number)
    return row
