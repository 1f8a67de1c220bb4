"""Which rows of a forward are ours, and how they go on from one forward to the next. Standard library alone.

The forward's thread only notes its requests (``Requests``); what takes a step a sample is for the courier's thread.
"""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from fleetdump_taprecords import Skip, in_turns, run_of

RID = re.compile(r"fleetdump/[A-Za-z0-9][A-Za-z0-9._-]{0,63}/[A-Za-z0-9._~%-]{1,2400}/[1-9][0-9]{0,8}\Z")
"""Run, sample (percent-encoded; ids have at most 200 characters) and attempt. It names a tensor, so it has to fit into
the smallest header."""
OUR_RID = "fleetdump/"
SELFCHECK_RID = "fleetdump/selfcheck-"
REMEMBERED_REQUESTS = 1 << 16
"""How many rids' next positions are kept, to join the chunks of a prompt."""


@dataclass(slots=True)
class Rows:
    """Rows of one request in a block: ``at`` is its first row there, ``start`` that row's position in the prompt."""

    rid: str
    at: int
    rows: int
    start: int


@dataclass(slots=True)
class Requests:
    """The requests of a forward in the order of its rows, each ``lengths`` long and at position ``starts`` of its
    prompt. ``wanted``: whether its rows go into the block, told by the beginning of its rid alone."""

    rids: Sequence[str]
    lengths: list[int]
    starts: list[int]
    wanted: list[bool]

    @classmethod
    def of(cls, rids: Sequence[str], lengths: Sequence[int], starts: Sequence[int], beginning: str) -> Requests:
        """Those of a batch whose ``lengths`` and ``starts`` may be padded. Raises ``ValueError`` when they are short,
        ``TypeError`` when there are none."""
        count = len(rids)
        made = cls(
            list(rids),
            list(map(int, lengths[:count])),
            list(map(int, starts[:count])),
            [rid.startswith(beginning) for rid in rids],
        )
        if not len(made.lengths) == len(made.starts) == count:
            raise ValueError(f"{count} requests, {len(made.lengths)} lengths, {len(made.starts)} positions")
        return made

    def ranges(self) -> list[tuple[int, int]]:
        """(first, rows) of the wanted rows in the forward's stream; ranges that touch are one."""
        if all(self.wanted):  # the usual case
            total = sum(self.lengths)
            return [(0, total)] if total else []
        ranges: list[tuple[int, int]] = []
        first = 0
        for rows, wanted in zip(self.lengths, self.wanted, strict=True):
            if wanted and ranges and sum(ranges[-1]) == first:
                ranges[-1] = (ranges[-1][0], ranges[-1][1] + rows)
            elif wanted and rows:
                ranges.append((first, rows))
            first += rows
        return ranges

    def rows(self) -> list[Rows]:
        """Our requests, where they lie when ``ranges`` are put one after the other."""
        found, at = [], 0
        for rid, rows, start, wanted in in_turns(zip(self.rids, self.lengths, self.starts, self.wanted, strict=True)):
            if wanted and RID.match(rid):
                found.append(Rows(rid, at, rows, start))
            at += rows if wanted else 0
        return found


class Ledger:
    """Up to where each request was captured. For one thread, which sees the forwards in their order."""

    def __init__(self) -> None:
        self._next: OrderedDict[str, int] = OrderedDict()

    def settle(self, found: Iterable[Rows]) -> tuple[list[Rows], list[Skip]]:
        """Which rows of a forward are to be written, and the requests that miss some before them."""
        wanted, skips = [], []
        for rows in in_turns(found):
            if self._is_repeat(rows):
                continue
            if not self._continues(rows):
                skips.append(Skip(rows.rid, "prefix_missing", f"rows begin at {rows.start}"))
            elif rows.rows:
                wanted.append(rows)
        return wanted, skips

    def forget(self, rids: Iterable[str]) -> None:
        """Rows of these requests were lost: what comes of them has no prefix, unless it begins anew."""
        for rid in rids:
            self._next.pop(rid, None)

    def _is_repeat(self, rows: Rows) -> bool:
        """Whether these rows were captured before: a retracted request goes on where a prefix cache still has it."""
        return rows.start > 0 and rows.start + rows.rows <= self._next.get(rows.rid, 0)

    def _continues(self, rows: Rows) -> bool:
        """Whether these rows follow on what was captured of the request. Position 0 begins anew (a retracted request
        is prefilled again)."""
        follows = rows.start == 0 or self._next.get(rows.rid) == rows.start
        if follows:
            self._next[rows.rid] = rows.start + rows.rows
            self._next.move_to_end(rows.rid)
            if len(self._next) > REMEMBERED_REQUESTS:
                self._next.popitem(last=False)
        return follows


def groups_of(wanted: Iterable[Rows], limit: int, most: int) -> list[list[Rows]]:
    """Neighbours of one run, at most ``limit`` rows together unless one alone has more; one of more than ``most`` rows
    goes in parts."""
    groups: list[list[Rows]] = []
    run, end, size = "", -1, 0
    for rows in in_turns(part for whole in wanted for part in _parts(whole, most)):
        its_run = run_of(rows.rid)
        if rows.at != end or size + rows.rows > limit or its_run != run:
            groups.append([])
            run, size = its_run, 0
        groups[-1].append(rows)
        end, size = rows.at + rows.rows, size + rows.rows
    return groups


def _parts(whole: Rows, most: int) -> list[Rows]:
    if whole.rows <= most:
        return [whole]
    cuts = range(0, whole.rows, most)
    return [Rows(whole.rid, whole.at + at, min(most, whole.rows - at), whole.start + at) for at in cuts]
