"""Read what the taps of one server wrote: tail their journals, and join a sample's pieces.

The tap appends, the driver reads; nothing here writes.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Callable, Dict, List, Optional, Sequence

from fleetdump.agent.formats import (
    FileName,
    JournalRecord,
    PieceRecord,
    Rid,
    ShardRecord,
    SkipRecord,
    by_stage,
    coverage,
)
from fleetdump.agent.jsonl import read_journal
from fleetdump.agent.tensorfile import ids_sha256, tensor_bytes

LISTING_SECONDS = 0.2
"""Between two looks for new journals, unless told otherwise: a server that is launched again begins one."""


class PieceFault(ValueError):
    """Pieces that can never make up their sample; the text says which and why."""


@dataclass
class Captured:
    """What the journals say of one attempt: its pieces in the order of writing, or why there are none."""

    rid: Rid
    pieces: List[PieceRecord] = field(default_factory=list)
    skip: Optional[SkipRecord] = None

    def add(self, piece: PieceRecord, writer: str) -> None:
        """Take in a piece. A request that SGLang retracts is prefilled again from its first token by the same rank:
        what that rank captured of it before is dropped. (Each stage of a pipeline prefills it again.)"""
        if piece.start == 0:
            self.pieces = [before for before in self.pieces if writer_of(before.shard) != writer]
        self.pieces.append(piece)


@dataclass
class _Tail:
    writer: str
    path: Path
    offset: int = 0


class Journals:
    """The journals of all taps that server ``server`` has had, in the run's capture directory ``directory``.

    ``wanted`` says whether an attempt is still of interest; records of others are dropped, so that a long run's
    journals are not kept in memory. Use: ``poll()`` now and then, then look at ``captured`` and ``closed``.
    """

    def __init__(self, directory: Path, server: str, wanted: Callable[[Rid], bool], listing: float = LISTING_SECONDS):
        self.directory = directory
        self.server = server
        self.wanted = wanted
        self.captured: Dict[str, Captured] = {}
        """By rid; ``forget`` removes what is settled."""
        self.closed: Dict[str, ShardRecord] = {}
        """Closed shards by name."""
        self._tails: Dict[str, _Tail] = {}
        self._listing = listing
        self._next_listing = 0.0

    def poll(self) -> List[str]:
        """Read what is new; returns the rids that it concerns. Raises ``FormatError`` for a broken journal."""
        self._find_tails()
        changed: Dict[str, None] = {}
        for tail in self._tails.values():
            records, tail.offset = read_journal(tail.path, tail.offset)
            for record in records:
                rid = self._take(record, tail.writer)
                if rid:
                    changed[rid] = None
        return list(changed)

    def forget(self, rid: str) -> None:
        """The attempt is settled: its records are not needed any more."""
        self.captured.pop(rid, None)

    def _find_tails(self) -> None:
        if time.monotonic() < self._next_listing:
            return
        self._next_listing = time.monotonic() + self._listing
        try:
            names = sorted(path.name for path in self.directory.iterdir())
        except FileNotFoundError:
            return
        for name in names:
            if name in self._tails:
                continue
            parsed = FileName.parse(name)
            if parsed is None or parsed.kind != "journal" or parsed.writer is None:
                continue
            if parsed.writer.server == self.server and parsed.writer.role != "driver":
                self._tails[name] = _Tail(str(parsed.writer), self.directory / name)

    def _take(self, record: JournalRecord, writer: str) -> str:
        """The rid that ``record`` is about, empty when none of interest."""
        if isinstance(record, ShardRecord):
            self.closed[record.shard] = record
            return ""
        rid = Rid.parse(record.rid)
        if rid is None or not self.wanted(rid):
            return ""
        captured = self.captured.setdefault(record.rid, Captured(rid))
        if isinstance(record, SkipRecord):
            captured.skip = record
        else:
            captured.add(record, writer)
        return record.rid


def writer_of(shard: str) -> str:
    """The writer's name in a shard's name."""
    parsed = FileName.parse(shard)
    return str(parsed.writer) if parsed and parsed.writer else ""


def join(pieces: Sequence[PieceRecord], ids: Sequence[int], slots: int) -> Optional[List[PieceRecord]]:
    """The pieces of one attempt by stage and position, once they hold every slot of every row of ``ids``; None while
    some are missing.

    ``slots``: how many a sample has (chosen layers and the final state). Pieces behind the prompt's end are not the
    sample's: SGLang may decode a step too many, and beside chunks that step is a prefill of one row. Raises
    ``PieceFault`` for what more pieces cannot mend: rows twice or beyond the end, other ids than were sent, shapes or
    dtypes that do not fit.
    """
    prompts = [piece for piece in pieces if piece.start < len(ids)]
    ordered = [piece for stage in by_stage(prompts).values() for piece in stage]
    found = coverage(prompts, len(ids), slots)
    if found.surplus:
        raise PieceFault(found.surplus)
    for piece in ordered:
        _check_piece(piece, ordered[0], ids)
    return None if found.missing else ordered


def _check_piece(piece: PieceRecord, first: PieceRecord, ids: Sequence[int]) -> None:
    if len(piece.shape) != 3 or piece.shape[:2] != [piece.rows, len(piece.slots)]:
        raise PieceFault(f"{piece.name} has shape {piece.shape}, expected [{piece.rows}, {len(piece.slots)}, hidden]")
    if (piece.dtype, piece.shape[2]) != (first.dtype, first.shape[2]):
        raise PieceFault(f"{piece.name} is {piece.dtype} {piece.shape}, {first.name} is {first.dtype} {first.shape}")
    if piece.bytes != tensor_bytes(piece.dtype, piece.shape, piece.name):
        raise PieceFault(f"{piece.name} has {piece.bytes} bytes, not those of {piece.dtype} {piece.shape}")
    if piece.ids_sha256 != ids_sha256(ids[piece.start : piece.start + piece.rows]):
        raise PieceFault(f"{piece.name} was computed from other ids than were sent")
