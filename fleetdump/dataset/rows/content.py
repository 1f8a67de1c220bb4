"""One object of a data set into a ``Row``: ids win over messages, and messages over text."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fleetdump.agent.formats import Row
from fleetdump.dataset.rows.broken import Broken, kind_of
from fleetdump.dataset.rows.conversations import parse_messages, parse_tools
from fleetdump.dataset.rows.identity import ID_KEYS, content_id, own_id
from fleetdump.dataset.rows.text import check_text

MAX_TOKEN_ID = (1 << 31) - 1
MEDIA_KEYS = ("image", "images", "video", "videos", "audio", "audios")
CONVERSATION_KEYS = ("messages", "conversations")
KEYS = (*ID_KEYS, *CONVERSATION_KEYS, "text", "input_ids", "loss_mask", "tools", *MEDIA_KEYS)
"""What is read of a row; other keys are not carried on."""


def parse_row(data: Any) -> Row:
    """The row that ``data`` (decoded JSON) is; raises ``Broken``."""
    if not isinstance(data, dict):
        raise Broken("not_an_object", f"a row is one JSON object, this is {kind_of(data)}")
    row = Row(id="", **_content(data), tools=parse_tools(data.get("tools")))
    row.id = own_id(data) or content_id(row)
    return row


def _content(data: Mapping[str, Any]) -> dict[str, Any]:
    for key in MEDIA_KEYS:
        if data.get(key):
            raise Broken("multimodal", f"the row has {key}: only text is read")
    if data.get("input_ids") is not None:
        return _ids(data["input_ids"], data.get("loss_mask"))
    for key in CONVERSATION_KEYS:
        if data.get(key) is not None:
            return {"messages": parse_messages(data[key])}
    text = data.get("text")
    if text is None:
        raise Broken("no_content", "none of messages, conversations, input_ids and text is there")
    if not isinstance(text, str):
        raise Broken("bad_text", f"text is {kind_of(text)}")
    if not text.strip():
        raise Broken("empty", "text is empty")
    check_text(text, "text")
    return {"text": text}


def _ids(ids: Any, mask: Any) -> dict[str, Any]:
    for name, values, high in (("input_ids", ids, MAX_TOKEN_ID), ("loss_mask", mask, 1)):
        if not isinstance(values, list):
            raise Broken("bad_ids", f"{name} is {kind_of(values)}, not a list")
        for n, value in enumerate(values):
            if type(value) is not int or not 0 <= value <= high:
                raise Broken("bad_ids", f"{name}[{n}] is not a whole number in 0..{high}")
    if len(ids) != len(mask):
        raise Broken("bad_ids", f"{len(ids)} input_ids but {len(mask)} values of loss_mask")
    if not ids:
        raise Broken("empty", "input_ids is empty")
    if len(ids) == 1:
        raise Broken("too_short", "one token: nothing follows it that a draft model could learn")
    return {"input_ids": ids, "loss_mask": mask}
