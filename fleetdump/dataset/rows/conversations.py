"""Conversations in their two spellings, role/content and ShareGPT's from/value, as chat templates take them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fleetdump.dataset.rows.broken import Broken, kind_of
from fleetdump.dataset.rows.text import check_text, loads

ROLES = {
    "system": "system",
    "user": "user",
    "human": "user",
    "assistant": "assistant",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "bing": "assistant",
    "bard": "assistant",
    "tool": "tool",
    "observation": "tool",
}
"""Role of a message, by what ``role`` or ``from`` says."""
REASONING_KEYS = ("reasoning_content", "reasoning", "thinking")
"""Where data sets keep what an assistant thought; the chat template decides what becomes of it."""


def parse_messages(data: Any) -> list[dict[str, Any]]:
    """Messages with ``role`` and ``content``, and what else each had (reasoning, ``tool_calls``, ``name``…). A key that
    is null is left out: templates ask whether a key is there. Raises ``Broken``."""
    if not isinstance(data, list):
        raise Broken("bad_messages", f"the conversation is {kind_of(data)}, not a list")
    messages = [_message(n, item) for n, item in enumerate(data)]
    if not any(_says_something(message) for message in messages):
        raise Broken("empty", "the conversation is empty")
    return messages


def parse_tools(data: Any) -> list[dict[str, Any]] | None:
    """Descriptions of tools, None when there are none. Data sets also store them as a JSON text."""
    if isinstance(data, str):
        data = loads(data, "bad_tools") if data.strip() else None
    if not data and isinstance(data, list | None):
        return None
    if not isinstance(data, list) or not all(isinstance(tool, dict) for tool in data):
        raise Broken("bad_tools", "tools is not a list of objects")
    return data


def _message(n: int, data: Any) -> dict[str, Any]:
    if not isinstance(data, dict):
        raise Broken("bad_messages", f"message {n} is {kind_of(data)}, not an object")
    role_key, content_key = ("role", "content") if data.get("role") is not None else ("from", "value")
    role = data.get(role_key)
    if not isinstance(role, str) or role not in ROLES:
        raise Broken("bad_messages", f"message {n}: role {str(role)[:40]!r} is none of {', '.join(ROLES)}")
    others = {key: value for key, value in data.items() if key not in _SPELLINGS and value is not None}
    _check_reasoning(n, others)
    if "tool_calls" in others:
        others["tool_calls"] = _tool_calls(n, others["tool_calls"])
    content = _content(n, content_key, data.get(content_key), bool(others.get("tool_calls")))
    return {"role": ROLES[role], "content": content, **others}


_SPELLINGS = ("role", "content", "from", "value")


def _content(n: int, key: str, content: Any, has_calls: bool) -> Any:
    if isinstance(content, str):
        check_text(content, f"message {n}: {key}")
    elif isinstance(content, list):
        for part in content:
            _check_part(n, part)
    elif not (content is None and has_calls):
        raise Broken("bad_messages", f"message {n}: {key} is {kind_of(content)}, not text")
    return content


def _check_part(n: int, part: Any) -> None:
    if not isinstance(part, dict):
        raise Broken("bad_messages", f"message {n}: a part of its content is {kind_of(part)}, not an object")
    if part.get("type") != "text":
        raise Broken("multimodal", f"message {n} has a part of type {str(part.get('type'))[:40]!r}: only text is read")
    if not isinstance(part.get("text"), str):
        raise Broken("bad_messages", f"message {n}: a text part has no text")
    check_text(part["text"], f"message {n}")


def _check_reasoning(n: int, message: Mapping[str, Any]) -> None:
    for key in REASONING_KEYS:
        if key not in message:
            continue
        if not isinstance(message[key], str):
            raise Broken("bad_messages", f"message {n}: {key} is {kind_of(message[key])}, not text")
        check_text(message[key], f"message {n}: {key}")


def _tool_calls(n: int, calls: Any) -> list[dict[str, Any]]:
    if isinstance(calls, str):
        calls = loads(calls, "bad_messages") if calls.strip() else []
    if not isinstance(calls, list) or not all(isinstance(call, dict) for call in calls):
        raise Broken("bad_messages", f"message {n}: tool_calls is not a list of objects")
    return calls


def _says_something(message: Mapping[str, Any]) -> bool:
    content = message["content"]
    text = "".join(part["text"] for part in content) if isinstance(content, list) else content or ""
    return bool(text.strip() or message.get("tool_calls"))
