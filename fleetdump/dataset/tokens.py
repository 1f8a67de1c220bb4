"""How many tokens a data set has, about: enough to plan disks by. The hosts count exactly, with the tokenizer."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from fleetdump.agent.formats import Row
from fleetdump.dataset.rows import BrokenRow
from fleetdump.dataset.rows.size import estimate_tokens


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
