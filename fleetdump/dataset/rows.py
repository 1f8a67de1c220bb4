"""Rows of a data set: JSON lines in, ``Row`` out; what is wrong with a line is data (``BrokenRow``), not an exception.

A row has ``messages`` or ``conversations`` (role/content or ShareGPT's from/value; with ``tools`` or without),
``input_ids`` and ``loss_mask``, or ``text``. Where it has several, ids win over messages and messages over text.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import re
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from io import BufferedIOBase
from pathlib import Path
from typing import Any, NoReturn

from fleetdump.agent.formats import Row
from fleetdump.errors import UsageError

MAX_LINE_BYTES = 64 << 20
MAX_ID_LENGTH = 200
MAX_TOKEN_ID = (1 << 31) - 1
ID_KEYS = ("id", "conversation_id", "uuid")
ROLES = {
    "system": "system",
    "user": "user",
    "human": "user",
    "assistant": "assistant",
    "gpt": "assistant",
    "tool": "tool",
}
"""Role of a message, by what ``role`` or ``from`` says."""

_BOM = b"\xef\xbb\xbf"
_GZIP = b"\x1f\x8b"
_OTHER_FORMATS = {b"PAR1": "Parquet", b"ARRO": "Arrow", b"PK\x03\x04": "zip", b"\x28\xb5\x2f\xfd": "zstd"}
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f]")
_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")


@dataclass(frozen=True)
class BrokenRow:
    """A line that is no row. ``line`` counts from 1.

    ``reason``: bad_json, not_utf8, too_long, not_an_object, no_content, empty, bad_messages, bad_ids, bad_text,
    bad_tools, bad_id or duplicate_id.
    """

    line: int
    reason: str
    detail: str = ""


class _Broken(Exception):
    """Why a line is no row."""

    def __init__(self, reason: str, detail: str):
        super().__init__(reason, detail)
        self.reason = reason
        self.detail = detail


def read_rows(path: Path) -> Iterator[Row | BrokenRow]:
    """Rows of a JSON-lines file (plain or gzip) in order; empty lines are skipped, an id is given out once.

    A row without an id of its own (``id``, ``conversation_id``, ``uuid``) gets the first 16 hex digits of its content's
    SHA-256. Raises ``UsageError`` at once for a file that cannot be read or is no JSON-lines file, and while reading
    for a damaged gzip file.
    """
    with _open(path):
        pass
    return _rows(path)


def _rows(path: Path) -> Iterator[Row | BrokenRow]:
    first_line: dict[str, int] = {}
    with _open(path) as stream:
        for number, line in _lines(stream, path):
            try:
                row = _parse(line)
            except _Broken as broken:
                yield BrokenRow(number, broken.reason, broken.detail)
                continue
            if row.id in first_line:
                yield BrokenRow(number, "duplicate_id", f"{row.id!r} is the id of line {first_line[row.id]} too")
                continue
            first_line[row.id] = number
            yield row


# --------------------------------------------------------------------------- the file
def _open(path: Path) -> BufferedIOBase:
    try:
        if path.exists() and not path.is_file():
            raise UsageError("the data is not a file", str(path), next_step="name one JSON-lines file")
        with path.open("rb") as stream:
            magic = stream.read(4)
        if magic in _OTHER_FORMATS:
            raise UsageError(
                f"the data is a {_OTHER_FORMATS[magic]} file", str(path), "only JSON lines are read", "convert it first"
            )
        return gzip.open(path, "rb") if magic.startswith(_GZIP) else path.open("rb")
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise UsageError("the data cannot be read", str(path), why, "check the path and its permissions") from None


def _lines(stream: BufferedIOBase, path: Path) -> Iterator[tuple[int, bytes]]:
    """Number and bytes of each line that is not empty; of a line that is too long only its first part is kept."""
    number = 0
    try:
        while line := stream.readline(MAX_LINE_BYTES + 1):
            number += 1
            rest = line
            while len(rest) > MAX_LINE_BYTES and not rest.endswith(b"\n"):
                rest = stream.readline(MAX_LINE_BYTES + 1)
            if number == 1:
                line = line.removeprefix(_BOM)
            if line.strip():
                yield number, line
    except (OSError, EOFError, zlib.error) as error:
        raise UsageError("the data is damaged", f"{path}:{number + 1}", str(error), "get an undamaged copy") from None


# --------------------------------------------------------------------------- a line
def _parse(line: bytes) -> Row:
    data = _decode(line)
    row = Row(id="", **_content(data), tools=_tools(data.get("tools")))
    row.id = _own_id(data) or _content_id(row)
    return row


def _decode(line: bytes) -> dict[str, Any]:
    if len(line.rstrip(b"\r\n")) > MAX_LINE_BYTES:
        raise _Broken("too_long", f"the line is longer than {MAX_LINE_BYTES >> 20} MiB")
    try:
        text = line.decode()
    except UnicodeDecodeError as error:
        raise _Broken("not_utf8", f"byte {error.start} is 0x{line[error.start]:02x}") from None
    data = _loads(text, "bad_json")
    if not isinstance(data, dict):
        raise _Broken("not_an_object", f"a line holds one JSON object, this is {_kind(data)}")
    return data


def _loads(text: str, reason: str) -> Any:
    """Strict JSON: no NaN, and nothing that cannot be written again as UTF-8."""
    try:
        data = json.loads(text, parse_constant=_refuse_constant)
        if _SURROGATE.search(text):
            json.dumps(data, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        raise _Broken("bad_text", "half of a surrogate pair (\\ud800 to \\udfff)") from None
    except RecursionError:
        raise _Broken(reason, "nested too deeply") from None
    except ValueError as error:
        raise _Broken(reason, f"no JSON: {error}") from None
    return data


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not allowed")


def _content(data: Mapping[str, Any]) -> dict[str, Any]:
    if data.get("input_ids") is not None:
        return _ids(data["input_ids"], data.get("loss_mask"))
    for key in ("messages", "conversations"):
        if data.get(key) is not None:
            return {"messages": _messages(data[key])}
    text = data.get("text")
    if text is None:
        raise _Broken("no_content", "none of messages, conversations, input_ids and text is there")
    if not isinstance(text, str):
        raise _Broken("bad_text", f"text is {_kind(text)}")
    if not text.strip():
        raise _Broken("empty", "text is empty")
    return {"text": text}


def _ids(ids: Any, mask: Any) -> dict[str, Any]:
    for name, values, high in (("input_ids", ids, MAX_TOKEN_ID), ("loss_mask", mask, 1)):
        if not isinstance(values, list):
            raise _Broken("bad_ids", f"{name} is {_kind(values)}, not a list")
        for n, value in enumerate(values):
            if type(value) is not int or not 0 <= value <= high:
                raise _Broken("bad_ids", f"{name}[{n}] is not a whole number in 0..{high}")
    if len(ids) != len(mask):
        raise _Broken("bad_ids", f"{len(ids)} input_ids but {len(mask)} values of loss_mask")
    if not ids:
        raise _Broken("empty", "input_ids is empty")
    return {"input_ids": ids, "loss_mask": mask}


def _messages(data: Any) -> list[dict[str, Any]]:
    if not isinstance(data, list):
        raise _Broken("bad_messages", f"the conversation is {_kind(data)}, not a list")
    messages = [_message(n, item) for n, item in enumerate(data)]
    if not any(_says_something(message) for message in messages):
        raise _Broken("empty", "the conversation is empty")
    return messages


def _message(n: int, data: Any) -> dict[str, Any]:
    if not isinstance(data, dict):
        raise _Broken("bad_messages", f"message {n} is {_kind(data)}, not an object")
    role_key, content_key = ("role", "content") if "role" in data else ("from", "value")
    role = data.get(role_key)
    if not isinstance(role, str) or role not in ROLES:
        raise _Broken("bad_messages", f"message {n}: role {str(role)[:40]!r} is none of {', '.join(ROLES)}")
    content = data.get(content_key)
    if not (isinstance(content, str) or _is_text_parts(content) or (content is None and data.get("tool_calls"))):
        raise _Broken("bad_messages", f"message {n}: {content_key} is {_kind(content)}, not text")
    others = {key: value for key, value in data.items() if key not in (role_key, content_key)}
    return {"role": ROLES[role], "content": content, **others}


def _is_text_parts(content: Any) -> bool:
    """Whether ``content`` is a list of ``{"type": "text", "text": ...}``."""
    return isinstance(content, list) and all(
        isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str) for part in content
    )


def _says_something(message: Mapping[str, Any]) -> bool:
    content = message["content"]
    text = "".join(part["text"] for part in content) if isinstance(content, list) else content or ""
    return bool(text.strip() or message.get("tool_calls"))


def _tools(data: Any) -> list[dict[str, Any]] | None:
    """A list of tool descriptions; data sets also store it as a JSON text."""
    if isinstance(data, str):
        data = _loads(data, "bad_tools") if data.strip() else None
    if not data and isinstance(data, list | None):
        return None
    if not isinstance(data, list) or not all(isinstance(tool, dict) for tool in data):
        raise _Broken("bad_tools", "tools is not a list of objects")
    return data


def _own_id(data: Mapping[str, Any]) -> str:
    """The row's id as text, or "" when it has none."""
    key = next((key for key in ID_KEYS if data.get(key) is not None), None)
    if key is None:
        return ""
    value = data[key]
    if isinstance(value, bool) or not isinstance(value, (str, int)):
        raise _Broken("bad_id", f"{key} is {_kind(value)}, neither text nor a whole number")
    text = str(value)
    if not 1 <= len(text) <= MAX_ID_LENGTH or _CONTROL.search(text):
        raise _Broken("bad_id", f"{key} must have 1 to {MAX_ID_LENGTH} characters and no control character")
    return text


def _content_id(row: Row) -> str:
    content = [row.messages, row.text, row.input_ids, row.loss_mask, row.tools]
    text = json.dumps(content, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _kind(value: Any) -> str:
    names = {dict: "an object", list: "a list", str: "a text", bool: "true or false", type(None): "missing"}
    return names.get(type(value), "a number")
