"""Ids of rows: the row's own, else one made of its content; each is given out once."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from typing import Any

from fleetdump.agent.formats import Row
from fleetdump.dataset.rows.broken import Broken, kind_of

ID_KEYS = ("id", "conversation_id", "uuid")
MAX_ID_LENGTH = 200
CONTENT_ID_DIGITS = 16

_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f]")


def own_id(data: Mapping[str, Any]) -> str:
    """The row's id as text, or "" when it has none; raises ``Broken``."""
    key = next((key for key in ID_KEYS if data.get(key) is not None), None)
    if key is None:
        return ""
    value = data[key]
    if isinstance(value, bool) or not isinstance(value, (str, int)):
        raise Broken("bad_id", f"{key} is {kind_of(value)}, neither text nor a whole number")
    text = str(value)
    if not 1 <= len(text) <= MAX_ID_LENGTH or _CONTROL.search(text):
        raise Broken("bad_id", f"{key} must have 1 to {MAX_ID_LENGTH} characters and no control character")
    return text


def content_id(row: Row) -> str:
    """The first 16 hex digits of the SHA-256 of what the row says: the same in each file and on each day."""
    content = [row.messages, row.text, row.input_ids, row.loss_mask, row.tools]
    text = json.dumps(content, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:CONTENT_ID_DIGITS]


class SeenIds:
    """The ids given out so far, and where. Only a hash of each is kept, so that a million are no burden."""

    def __init__(self) -> None:
        self._lines: dict[int, int] = {}

    def take(self, row_id: str, line: int) -> None:
        """Give ``row_id`` to the row in ``line``; raises ``Broken`` when an earlier row has it."""
        key = int.from_bytes(hashlib.blake2b(row_id.encode(), digest_size=12).digest(), "big")
        first = self._lines.setdefault(key, line)
        if first != line:
            raise Broken("duplicate_id", f"{row_id!r} is the id of line {first} too")
