"""Deliberately broken rows of many kinds: bytes of a line, and the reason that they must be rejected with."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

VOCABULARY = 2000
LIMIT = 100
"""Tokens of the longest sample."""

Make = Callable[[int], bytes]


@dataclass(frozen=True)
class Kind:
    """One way to be broken. ``make(n)`` gives the n-th line of the kind; ``once``: too large to be repeated."""

    name: str
    reason: str
    make: Make
    once: bool = False


def _object(**content: Any) -> Callable[[int], bytes]:
    """A row with an id of its own; callables are asked for their value."""

    def make(n: int) -> bytes:
        row = {key: value(n) if callable(value) else value for key, value in content.items()}
        return json.dumps({"id": f"{n} of {sorted(content)}", **row}).encode()

    return make


def _ids(ids: Any, mask: Any = None) -> Make:
    return _object(input_ids=ids, loss_mask=[1] * len(ids) if mask is None and isinstance(ids, list) else mask)


def _chat(*messages: Any) -> Make:
    return _object(messages=list(messages))


def _raw(text: str | bytes) -> Make:
    return lambda n: (text if isinstance(text, bytes) else text.encode()).replace(b"%n", str(n).encode())


USER = {"role": "user", "content": "hi"}

KINDS = (
    Kind("no JSON", "bad_json", _raw("row %n")),
    Kind("cut off", "bad_json", _raw('{"id": "cut %n", "text": "x')),
    Kind("two objects", "bad_json", _raw('{"text": "%n"} {"text": "%n"}')),
    Kind("single quotes", "bad_json", _raw("{'text': '%n'}")),
    Kind("NaN", "bad_json", _raw('{"text": "%n", "score": NaN}')),
    Kind("Infinity", "bad_json", _raw('{"text": "%n", "score": -Infinity}')),
    Kind("NUL bytes", "bad_json", _raw(b'{"text": "%n\0"}')),
    Kind("only NUL bytes", "bad_json", _raw(b"\0\0\0\0%n")),
    Kind("nested too deeply", "bad_json", lambda n: b'{"a":' * 50_000 + str(n).encode()),
    Kind("a number with 5000 digits", "bad_json", _raw('{"text": "%n", "id": ' + "9" * 5000 + "}")),
    Kind("Latin-1", "not_utf8", _raw(b'{"text": "caf\xe9 %n"}')),
    Kind("UTF-16", "not_utf8", lambda n: f'{{"text": "{n}"}}'.encode("utf-16")),
    Kind("NUL character", "bad_text", _object(text="a\0b")),
    Kind("NUL character of a message", "bad_text", _chat({"role": "user", "content": "\0"})),
    Kind("lone surrogate", "bad_text", _raw('{"text": "\\ud800 %n"}')),
    Kind("lone surrogate in a message", "bad_text", _raw('{"messages": [{"role": "user", "content": "\\udfff%n"}]}')),
    Kind("a list", "not_an_object", _raw("[%n]")),
    Kind("a number", "not_an_object", _raw("%n")),
    Kind("a text", "not_an_object", _raw('"%n"')),
    Kind("null", "not_an_object", _raw("null")),
    Kind("other keys", "no_content", _object(prompt="x", answer="y")),
    Kind("all null", "no_content", _object(text=None, messages=None, input_ids=None)),
    Kind("text is a number", "bad_text", _object(text=lambda n: n)),
    Kind("text is a list", "bad_text", _object(text=["x"])),
    Kind("empty text", "empty", _object(text="")),
    Kind("blank text", "empty", _object(text=" \n\t")),
    Kind("no messages", "empty", _object(messages=[])),
    Kind("nobody says anything", "empty", _chat({"role": "user", "content": ""})),
    Kind("messages is a text", "bad_messages", _object(messages="hi")),
    Kind("a message is a text", "bad_messages", _chat("hi")),
    Kind("a message is null", "bad_messages", _chat(None)),
    Kind("unknown role", "bad_messages", _chat({"role": "wizard", "content": "hi"})),
    Kind("no role", "bad_messages", _chat({"content": "hi"})),
    Kind("no content", "bad_messages", _chat({"role": "user"})),
    Kind("content is a number", "bad_messages", _chat({"role": "user", "content": 5})),
    Kind("reasoning is a list", "bad_messages", _chat({"role": "assistant", "content": "x", "reasoning_content": []})),
    Kind("an image", "multimodal", _chat({"role": "user", "content": [{"type": "image_url", "image_url": {}}]})),
    Kind("a column of images", "multimodal", _object(messages=[USER], images=["a.png"])),
    Kind("ids without a mask", "bad_ids", _object(input_ids=[5, 6])),
    Kind("negative id", "bad_ids", _ids([5, -1])),
    Kind("ids are fractions", "bad_ids", _ids([5.5, 6.0])),
    Kind("ids are true and false", "bad_ids", _ids([True, False])),
    Kind("an id is null", "bad_ids", _ids([5, None])),
    Kind("mask of another length", "bad_ids", _ids([5, 6, 7], [1, 1])),
    Kind("mask with a 2", "bad_ids", _ids([5, 6], [1, 2])),
    Kind("no ids", "empty", _ids([])),
    Kind("one id", "too_short", _ids([5])),
    Kind("tools is an object", "bad_tools", _object(text="hello", tools={"name": "f"})),
    Kind("tools is no JSON", "bad_tools", _object(text="hello", tools="[{")),
    Kind("empty id", "bad_id", _object(text="hello", id="")),
    Kind("long id", "bad_id", _object(text="hello", id=lambda n: f"{n:0201}")),
    Kind("id is a list", "bad_id", _object(text="hello", id=["a"])),
    Kind("id with a newline", "bad_id", _object(text="hello", id=lambda n: f"a\n{n}")),
    Kind("id of another row", "duplicate_id", _object(text="hello again", id="good 0")),
    Kind("100 MB", "too_long", lambda n: b'{"text": "' + b"x" * 100_000_000 + b'"}', once=True),
    # What only the host can see.
    Kind("id outside the vocabulary", "not_in_vocabulary", _ids([5, VOCABULARY])),
    Kind("ids longer than the context", "too_long", _ids([5] * (LIMIT + 1))),
    Kind("text longer than the context", "too_long", _object(text="x" * (LIMIT + 1))),
    Kind("text of one token", "too_short", _object(text="x")),
    Kind("the template fails", "template_error", _chat(USER, {"role": "assistant", "content": "raise"})),
)


@dataclass(frozen=True)
class Line:
    """A line of the data set; ``reason`` is empty for a good one."""

    data: bytes
    reason: str
    kind: str = ""


def lines(broken: int) -> Iterator[Line]:
    """``broken`` broken rows, the kinds in turn, each after a good one."""
    usual = [kind for kind in KINDS if not kind.once]
    order = [kind for kind in KINDS if kind.once]
    order += [usual[n % len(usual)] for n in range(broken - len(order))]
    for n, kind in enumerate(order):
        yield Line(json.dumps({"id": f"good {n}", "text": f"good text {n}"}).encode(), "")
        yield Line(kind.make(n), kind.reason, kind.name)
