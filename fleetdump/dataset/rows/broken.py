"""What is wrong with a row, as data: reading a data set goes on after it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class BrokenRow:
    """A row that no host gets. ``line`` is its line in a JSON-lines file, else its number in the data set; both count
    from 1.

    ``reason``: bad_json, not_utf8, too_long, not_an_object, no_content, empty, too_short, bad_messages, bad_ids,
    bad_text, bad_tools, bad_id, multimodal, not_json (a value that JSON has no form for) or duplicate_id.
    """

    line: int
    reason: str
    detail: str = ""


class Broken(Exception):
    """Why a line is no row."""

    def __init__(self, reason: str, detail: str):
        super().__init__(reason, detail)
        self.reason = reason
        self.detail = detail

    def at(self, line: int) -> BrokenRow:
        """The same, with its place in the data set."""
        return BrokenRow(line, self.reason, self.detail)


def kind_of(value: Any) -> str:
    """What a value is, in the words of a detail."""
    names = {dict: "an object", list: "a list", str: "a text", bool: "true or false", type(None): "missing"}
    names.update({int: "a number", float: "a number"})
    return names.get(type(value), f"of type {type(value).__name__}")
