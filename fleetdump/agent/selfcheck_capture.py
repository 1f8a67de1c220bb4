"""What the taps wrote of a self-check: the journals of its run, and below ``ranks/`` those of the attention ranks that
hold the same rows as the ones that write the run."""

from __future__ import annotations

import zlib
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO, Dict, Iterator, List, Optional, Tuple

from fleetdump.agent.formats import (
    PART_SUFFIX,
    RANKS_FOLDER,
    FileName,
    FormatError,
    PieceRecord,
    Rid,
    SkipRecord,
)
from fleetdump.agent.journals import Captured, Journals, PieceFault, join
from fleetdump.agent.jsonl import read_journal
from fleetdump.agent.selfcheck_facts import PieceRef, PromptFate, RankCopy, RankFacts
from fleetdump.agent.selfcheck_prompts import Plan, Prompt
from fleetdump.agent.tensorfile import ids_sha256, parse_header

READ_BYTES = 1 << 20

_Key = Tuple[str, Tuple[int, ...]]
"""A piece's name and slots: what the ranks must have in common."""


class CheckCapture:
    """Reads as it grows (``poll``) what became of the prompts of ``plan``, sent as run ``run`` of ``server``.

    ``slots``: chosen layers and the final state; ``ranks``: how many attention ranks hold each row.
    """

    def __init__(self, directory: Path, server: str, plan: Plan, slots: int, ranks: int):
        self.directory = directory
        self._prompts = {prompt.name: prompt for prompt in plan.prompts}
        self._slots = slots
        self._ranks = ranks
        self._journals = Journals(directory, server, lambda rid: rid.sample in self._prompts)
        self._offsets: Dict[Path, int] = {}
        self._copies: Dict[str, Dict[_Key, PieceRecord]] = {}
        """By writer."""
        self._rank_skips: Dict[str, str] = {}
        """Reasons of the ranks, by rid."""

    def poll(self) -> bool:
        """Read what is new; whether there was something."""
        return bool(self._journals.poll()) | self._poll_ranks()

    def rid(self, prompt: Prompt) -> str:
        return str(Rid(self.directory.name, prompt.name, 1))

    def is_settled(self, prompt: Prompt) -> bool:
        """Whether nothing more is to come of ``prompt``: it is whole, with all its copies, or can't be."""
        captured = self._captured(prompt)
        if captured.skip is not None:
            return True
        try:
            pieces = join(captured.pieces, prompt.ids, self._slots)
        except PieceFault:
            return True
        if pieces is None:
            return False
        return self.rid(prompt) in self._rank_skips or not any(self._lacking(piece) for piece in pieces)

    def settle_fate(self, prompt: Prompt, fate: PromptFate) -> Optional[List[PieceRef]]:
        """Write into ``fate`` what was captured; the pieces when that is the whole prompt."""
        captured = self._captured(prompt)
        pieces = captured.pieces
        fate.rows = min(sum(p.rows for p in pieces if slot in p.slots) for slot in range(self._slots))
        fate.first = min((piece.start for piece in pieces), default=-1)
        fate.other_ids = any(_has_other_ids(piece, prompt.ids) for piece in pieces)
        if captured.skip is not None:
            fate.skip, fate.detail = captured.skip.reason, captured.skip.detail
            return None
        try:
            whole = join(pieces, prompt.ids, self._slots)
        except PieceFault as fault:
            fate.fault = "" if fate.other_ids else str(fault)
            return None
        if whole is None:
            return None
        fate.unreadable = next(filter(None, (why_unreadable(self.directory, piece) for piece in whole)), "")
        return [reference(piece) for piece in whole]

    def compare_ranks(self) -> Tuple[RankFacts, List[RankCopy]]:
        """Which rows the ranks have in common, and the pairs of copies whose bytes differ, by CRC-32."""
        skips = sorted(set(self._rank_skips.values()))
        facts, copies = RankFacts(self._ranks, sorted(self._copies), skips), []
        for prompt in self._prompts.values():
            for piece in self._captured(prompt).pieces:
                lacking = self._lacking(piece)
                facts.lacking += piece.rows if lacking else 0
                facts.rows += 0 if lacking else piece.rows
                others = [(writer, other) for writer, other in self._copies_of(piece) if other.crc32 != piece.crc32]
                facts.differing += piece.rows if others else 0
                for writer, other in others:
                    theirs = reference(other, f"{RANKS_FOLDER}/")
                    unreadable = why_unreadable(self.directory, piece)
                    unreadable = unreadable or why_unreadable(self.directory / RANKS_FOLDER, other)
                    if unreadable:
                        facts.unreadable = unreadable
                    else:
                        copies.append(RankCopy(prompt.name, writer, reference(piece), theirs))
        return facts, copies

    def open_shards(self) -> bool:
        """Whether a tap still has a shard of this run open."""
        return any(self.directory.glob("**/*.part"))

    # ------------------------------------------------------------------ the parts
    def _captured(self, prompt: Prompt) -> Captured:
        """Without what lies behind the prompt's end: a decoding step beside chunks is a prefill of one row."""
        rid = Rid(self.directory.name, prompt.name, 1)
        found = self._journals.captured.get(str(rid)) or Captured(rid)
        return Captured(rid, [piece for piece in found.pieces if piece.start < len(prompt.ids)], found.skip)

    def _lacking(self, piece: PieceRecord) -> bool:
        """Whether some rank has not (yet) written these very rows."""
        return len(list(self._copies_of(piece))) < self._ranks - 1

    def _copies_of(self, piece: PieceRecord) -> Iterator[Tuple[str, PieceRecord]]:
        for writer, pieces in self._copies.items():
            copy = pieces.get(_key(piece))
            if copy is not None and copy.shape == piece.shape:
                yield writer, copy

    def _poll_ranks(self) -> bool:
        news = False
        for path in sorted((self.directory / RANKS_FOLDER).glob("journal-*.jsonl")):
            name = FileName.parse(path.name)
            if name is None or name.writer is None:
                continue
            records, self._offsets[path] = read_journal(path, self._offsets.get(path, 0))
            pieces = self._copies.setdefault(str(name.writer), {})
            for record in records:
                if isinstance(record, PieceRecord):
                    pieces[_key(record)] = record
                elif isinstance(record, SkipRecord):
                    self._rank_skips[record.rid] = f"{record.reason} ({record.detail})"
            news = news or bool(records)
        return news


def open_shard(path: Path) -> BinaryIO:
    """A shard, closed or still a ``.part``: it is closed, and so renamed, between any two looks."""
    with suppress(FileNotFoundError):
        return open(path, "rb")
    with suppress(FileNotFoundError):
        return open(path.with_name(path.name + PART_SUFFIX), "rb")
    return open(path, "rb")


def why_unreadable(directory: Path, piece: PieceRecord) -> str:
    """Why the disk does not hold the bytes that a rank journalled; "" when it does."""
    digest, left = 0, piece.bytes
    try:
        with open_shard(directory / piece.shard) as file:
            file.seek(parse_header(file, piece.shard).data_start + piece.offset)
            while left > 0:
                data = file.read(min(left, READ_BYTES))
                if not data:
                    return f"{piece.shard} ends inside {piece.name}"
                digest, left = zlib.crc32(data, digest), left - len(data)
    except (OSError, FormatError) as error:
        return f"{piece.shard} cannot be read: {error}"
    return "" if digest == piece.crc32 else f"{piece.shard} has other bytes than were journalled of {piece.name}"


def reference(piece: PieceRecord, folder: str = "") -> PieceRef:
    """Where the worker finds a piece."""
    return PieceRef(folder + piece.shard, piece.offset, piece.dtype, piece.shape, piece.start, piece.slots)


def _key(piece: PieceRecord) -> _Key:
    return piece.name, tuple(piece.slots)


def _has_other_ids(piece: PieceRecord, ids: List[int]) -> bool:
    return piece.ids_sha256 != ids_sha256(ids[piece.start : piece.start + piece.rows])
