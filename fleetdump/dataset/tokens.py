"""How many tokens a data set has, about: enough to plan disks by. The hosts count exactly, with the tokenizer."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from fleetdump.agent.formats import Row
from fleetdump.dataset.rows import BrokenRow

CHARACTERS_PER_TOKEN = 3.5
TOKENS_PER_MESSAGE = 6


@dataclass(frozen=True)
class DataSize:
    """Rows that can be read, those that cannot, and the tokens of the former, about."""

    rows: int
    broken: int
    tokens: int


def measure(rows: Iterable[Row | BrokenRow]) -> DataSize:
    """The size of a data set; raises what reading it raises."""
    good, broken, tokens = 0, 0, 0
    for row in rows:
        if isinstance(row, BrokenRow):
            broken += 1
        else:
            good, tokens = good + 1, tokens + estimate_tokens(row)
    return DataSize(good, broken, tokens)


def estimate_tokens(row: Row) -> int:
    """Exact for ids, by the number of characters for text and messages."""
    if row.input_ids is not None:
        return len(row.input_ids)
    if row.text is not None:
        return 1 + int(len(row.text) / CHARACTERS_PER_TOKEN)
    messages = row.messages or []
    characters = sum(len(str(message.get("content") or "")) for message in messages)
    return TOKENS_PER_MESSAGE * len(messages) + int(characters / CHARACTERS_PER_TOKEN)
