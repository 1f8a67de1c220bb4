"""A line of a host's manifest or rejects, checked before anything believes it. Pure."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from typing import Any, NoReturn, TypeVar

from fleetdump.agent.formats import (
    FileName,
    FormatError,
    ManifestLine,
    ManifestPiece,
    RejectedLine,
    coverage,
    server_of,
)
from fleetdump.agent.jsonl import decode_record
from fleetdump.agent.tensorfile import tensor_bytes

LARGEST_INT = 2**53
"""Larger numbers are not the same in every JSON reader."""
NAME_BYTES = 255 - len(".partial")
"""Longest name that a file of a run can have here, with room for the ending of a copy that is under way."""

T = TypeVar("T")


@dataclass(frozen=True)
class Source:
    """Where lines come from, and what they must say. ``server`` is the share's name (``formats.SHARE_NAME``)."""

    run: str
    host: str
    server: str

    def __str__(self) -> str:
        return f"{self.host}/{self.server}"


class LineFault(ValueError):
    """A manifest or reject line that cannot be taken in; the text says why."""


def check_line(text: str, source: Source) -> ManifestLine:
    """The manifest line in ``text``; raises ``LineFault`` when it is torn, of another run or server, or says what
    cannot be: pieces with a gap, an overlap or another number of rows than tokens, impossible sizes, layers or
    files."""
    line = _decode(ManifestLine, text)
    _check_source(line.run, line.server, source)
    try:
        _check_layers(line)
        _check_pieces(line)
        for piece in line.pieces:
            _check_place(line, piece)
        for name in (line.token_shard.shard, line.norm, *(piece.shard for piece in line.pieces)):
            _check_file_name(name)
        _check_norm(line.norm)
        if not 0 <= line.supervised <= line.tokens:
            raise LineFault(f"{line.supervised} of {line.tokens} tokens supervised")
    except LineFault as fault:
        raise LineFault(f"sample {line.id[:80]!r}: {fault}") from fault
    return line


def check_reject(text: str, source: Source) -> RejectedLine:
    """The reject in ``text``; raises ``LineFault`` when it is torn, or of another run or server."""
    line = _decode(RejectedLine, text)
    _check_source(line.run, line.server, source)
    return line


def _check_pieces(line: ManifestLine) -> None:
    if line.tokens < 1:
        raise LineFault("it has no token")
    found = coverage(line.pieces, line.tokens, len(line.layers["input"]) + 1)
    if found.surplus:
        raise LineFault(found.surplus[:200])
    if found.missing:
        raise LineFault(f"{found.missing} are missing")


def _check_layers(line: ManifestLine) -> None:
    if set(line.layers) != {"input", "output"} or len(line.layers["input"]) != len(line.layers["output"]):
        raise LineFault("layers are not as many inputs as outputs")


def _check_place(line: ManifestLine, piece: ManifestPiece) -> None:
    """A piece is ``[rows, slots, hidden]``: no other number of bytes holds it."""
    if piece.offset < 0 or line.hidden < 1:
        raise LineFault(f"{piece.name[:80]!r} has offset {piece.offset}, hidden {line.hidden}")
    try:
        expected = tensor_bytes(line.dtype, [piece.rows, len(piece.slots), line.hidden])
    except FormatError as error:
        raise LineFault(str(error)[:200]) from error
    if piece.bytes != expected:
        raise LineFault(f"{piece.name[:80]!r} has {piece.bytes} bytes, expected {expected}")


def _check_file_name(name: str) -> None:
    """It becomes the name of a file here."""
    if not name or not name.isprintable() or "/" in name or name[0] == "." or len(name.encode()) > NAME_BYTES:
        raise LineFault(f"{name[:80]!r} is no name of a file of the run")


def _check_norm(name: str) -> None:
    parsed = FileName.parse(name)
    if parsed is None or parsed.kind != "norm":
        raise LineFault(f"{name[:80]!r} is no norm file")


def _decode(kind: type[T], text: str) -> T:
    data = load_line(text)
    try:
        return decode_record(kind, data, "line")
    except FormatError as error:
        raise LineFault(f"cannot be read: {str(error)[:200]}: {text[:80]!r}") from error


def load_line(text: str) -> dict[str, Any]:
    """The object in one line of JSON; raises ``LineFault`` for everything else, and for numbers and strings that could
    not be stored or written again: beyond 2^53, NaN, infinite, lone surrogates."""
    try:
        text.encode()
        data = json.loads(text, parse_int=_int, parse_float=_float, parse_constant=_no_number)
        json.dumps(data, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        raise LineFault(f"cannot be read: it is not Unicode text: {text[:80]!r}") from error
    except (ValueError, RecursionError) as error:
        raise LineFault(f"cannot be read: {str(error)[:200]}: {text[:80]!r}") from error
    if not isinstance(data, dict) or data.get("v") != 1:
        raise LineFault(f"not a line of version 1: {text[:80]!r}")
    return data


def _int(digits: str) -> int:
    if len(digits) > len(str(-LARGEST_INT)) or abs(int(digits)) > LARGEST_INT:
        raise ValueError(f"{digits[:40]} is too large a number")
    return int(digits)


def _float(digits: str) -> float:
    number = float(digits)
    if not math.isfinite(number):
        raise ValueError(f"{digits[:40]} is too large a number")
    return number


def _no_number(name: str) -> NoReturn:
    raise ValueError(f"{name} is no number")


def _check_source(run: str, server: str, source: Source) -> None:
    if (run, server) != (source.run, server_of(source.server)):
        raise LineFault(f"is of run {run[:80]!r}, server {server[:80]!r}")
