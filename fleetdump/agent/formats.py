"""File formats shared by agent, driver and controller (docs/formats.md): names and records.

Lines of records are read and written by ``jsonl``, tensors by ``tensorfile``.

Standard library alone, Python 3.8. Nothing here opens a network or a process.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from typing import Any, Dict, List, Optional, Sequence, Tuple, Type, TypeVar, Union
from urllib.parse import quote, unquote

FORMAT_VERSION = 1
FORMAT_NAME = "fleetdump-1"
RID_PREFIX = "fleetdump"
RUN_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}\Z")
SERVER_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,31}\Z")
PART_SUFFIX = ".part"
"""A shard's name while it is open."""
SELFCHECK_PREFIX = "selfcheck-"
"""Runs of the self-check begin so: they hold nothing that anybody collects, and no user's run may be called so."""


RANKS_FOLDER = "ranks"
"""In a self-check's run, for what the ranks write that write nothing otherwise: a second copy of the same rows."""


class FormatError(ValueError):
    """A file that breaks docs/formats.md; the text names the file, the place and what is wrong."""


# --------------------------------------------------------------------------- names
@dataclass
class Rid:
    """The request id fleetdump gives to SGLang: which run, which sample, which attempt (from 1)."""

    run: str
    sample: str
    attempt: int

    def __str__(self) -> str:
        return f"{RID_PREFIX}/{self.run}/{self.short}"

    @property
    def short(self) -> str:
        """``<sample>/<attempt>`` with the sample percent-encoded: the rid within its run."""
        return f"{quote(self.sample, safe='')}/{self.attempt}"

    @classmethod
    def parse(cls, text: str) -> Optional[Rid]:
        """The parts of ``text``, or None when it is not a rid of ours. The run is checked: it names a folder."""
        parts = text.split("/")
        if len(parts) != 4 or parts[0] != RID_PREFIX or not RUN_NAME.match(parts[1]) or not parts[2]:
            return None
        if not re.match(r"[1-9][0-9]{0,8}\Z", parts[3]):
            return None
        return cls(parts[1], unquote(parts[2]), int(parts[3]))


@dataclass(frozen=True)
class Writer:
    """Who writes a shard: ``role`` is ``r<rank>`` for a tap and ``driver`` for a driver; ``instance`` is the launch id
    of the tap's server, or the driver's own 8 hex digits."""

    server: str
    instance: str
    role: str

    def __str__(self) -> str:
        return f"{self.server}-{self.instance}-{self.role}"

    @property
    def prefix(self) -> str:
        """First part of this writer's shard names: ``tokens`` for a driver, ``shard`` for a tap."""
        return "tokens" if self.role == "driver" else "shard"

    @property
    def journal(self) -> str:
        return f"journal-{self}.jsonl"

    def shard(self, number: int) -> str:
        """Name of this writer's shard ``number`` (from 0) when closed."""
        return f"{self.prefix}-{self}-{number}.safetensors"

    @classmethod
    def parse(cls, text: str) -> Optional[Writer]:
        """The parts of a writer's name, or None when ``text`` is not one."""
        match = re.match(
            r"([A-Za-z0-9][A-Za-z0-9_-]{0,31})-([0-9a-f]{8})-(r[0-9]{1,4}(?:\.[0-9]{1,3})?|driver)\Z", text
        )
        return cls(match.group(1), match.group(2), match.group(3)) if match else None


@dataclass(frozen=True)
class FileName:
    """A file of a run's capture directory, taken apart. ``kind``: shard, tokens, norm, journal."""

    kind: str
    writer: Optional[Writer] = None
    number: int = 0
    part: bool = False

    @classmethod
    def parse(cls, name: str) -> Optional[FileName]:
        """None when ``name`` is not a file of ours."""
        part = name.endswith(PART_SUFFIX)
        stem = name[: -len(PART_SUFFIX)] if part else name
        match = re.match(r"(shard|tokens)-(.+)-([0-9]{1,9})\.safetensors\Z", stem)
        if match:
            writer = Writer.parse(match.group(2))
            if writer is None or writer.prefix != match.group(1):
                return None
            return cls(match.group(1), writer, int(match.group(3)), part)
        if part:
            return None
        match = re.match(r"(journal)-(.+)\.jsonl\Z", name)
        if match:
            writer = Writer.parse(match.group(2))
            return cls(match.group(1), writer) if writer else None
        return cls("norm") if re.match(r"norm-.+-[0-9a-f]{8}\.safetensors\Z", name) else None


def is_run_name(text: str) -> bool:
    """Whether a user's run may be called ``text``; it becomes the name of folders."""
    return bool(RUN_NAME.match(text)) and ".." not in text and not text.startswith(SELFCHECK_PREFIX)


SHARE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,31}(\.[1-9][0-9]{0,5})?\Z")
"""A server's first share of a run is called as the server; what it takes over from others later ``<server>.<n>``."""


def server_of(share: str) -> str:
    """The server that works on the share of that name."""
    return share.partition(".")[0]


def share_id(share_sha256: str, submitted_at: float) -> str:
    """Name of one submit of a share: a run that was cleaned away and begun anew is told from the one before."""
    return f"{share_sha256[:16]}-{submitted_at:.6f}"


def is_share(name: str, share_sha256: str) -> bool:
    """Whether ``name``, a ``share_id``, is of a submit of exactly these rows."""
    return name.partition("-")[0] == share_sha256[:16]


def norm_name(server: str, launch_id: str) -> str:
    """Name of the file with the final norm of one launch of a server."""
    return f"norm-{server}-{launch_id}.safetensors"


# --------------------------------------------------------------------------- journal
@dataclass
class PieceRecord:
    """Journal line ``piece``; see docs/formats.md. ``slots``: which of a sample's slots the tensor holds, ascending;
    none for a driver's ids and masks."""

    name: str
    rid: str
    start: int
    rows: int
    ids_sha256: str
    shard: str
    dtype: str
    shape: List[int]
    offset: int
    bytes: int
    crc32: int
    t: float
    slots: List[int] = field(default_factory=list)
    kind: str = "piece"
    v: int = FORMAT_VERSION


@dataclass
class ShardRecord:
    """Journal line ``shard``: a closed shard's size and SHA-256."""

    shard: str
    bytes: int
    sha256: str
    t: float
    kind: str = "shard"
    v: int = FORMAT_VERSION


@dataclass
class SkipRecord:
    """Journal line ``skip``: a request of ours whose rows were not (all) written, with the reason."""

    rid: str
    reason: str
    detail: str
    t: float
    kind: str = "skip"
    v: int = FORMAT_VERSION


JournalRecord = Union[PieceRecord, ShardRecord, SkipRecord]
JOURNAL_KINDS: Dict[str, Type[Any]] = {
    "piece": PieceRecord,
    "shard": ShardRecord,
    "skip": SkipRecord,
}


# --------------------------------------------------------------------------- manifest
@dataclass
class ManifestPiece:
    """A piece of a sample, as the manifest names it: a tensor ``[rows, len(slots), hidden]``. Offsets count from the
    shard's data section."""

    shard: str
    name: str
    start: int
    rows: int
    offset: int
    bytes: int
    crc32: int
    slots: List[int]


Piece = TypeVar("Piece", PieceRecord, ManifestPiece)


@dataclass
class Coverage:
    """What keeps pieces from being a sample, in words: ``missing`` may yet come, ``surplus`` no other piece mends."""

    missing: str = ""
    surplus: str = ""


def by_stage(pieces: Sequence[Piece]) -> Dict[Tuple[int, ...], List[Piece]]:
    """Pieces by the slots that they hold, which is by pipeline stage; each stage's in order of position."""
    stages: Dict[Tuple[int, ...], List[Piece]] = {}
    for piece in sorted(pieces, key=lambda piece: (piece.slots, piece.start)):
        stages.setdefault(tuple(piece.slots), []).append(piece)
    return stages


def coverage(pieces: Sequence[Piece], tokens: int, slots: int) -> Coverage:
    """Whether ``pieces`` hold each of ``slots`` slots of each of ``tokens`` rows exactly once."""
    stages = by_stage(pieces)
    held = [slot for stage in stages for slot in stage]
    found = Coverage()
    if sorted(held) != sorted(set(held) & set(range(slots))):
        found.surplus = f"slots {sorted(held)} of {slots}"
    for stage in stages.values():
        covered = 0
        for piece in stage:
            if piece.start < covered or piece.rows < 1 or piece.start + piece.rows > tokens:
                found.surplus = found.surplus or (
                    f"{piece.name} has rows {piece.start} to {piece.start + piece.rows} of {tokens}, after {covered}"
                )
            if piece.start > covered:
                found.missing = found.missing or f"rows {covered} to {piece.start} of {tokens}"
            covered = max(covered, piece.start + piece.rows)
        if covered < tokens:
            found.missing = found.missing or f"rows {covered} to {tokens} of {tokens}"
    lacking = sorted(set(range(slots)) - set(held))
    if lacking and not found.missing:
        found.missing = f"slots {lacking} of {slots}" if held else f"rows 0 to {tokens} of {tokens}"
    return found


@dataclass
class TokenRef:
    """Where a sample's ids (I32 ``[tokens]``) and loss mask (U8 ``[tokens]``) lie."""

    shard: str
    ids: str
    mask: str
    ids_crc32: int
    mask_crc32: int


@dataclass
class ManifestLine:
    """A sample that exists; see docs/formats.md. ``layers`` has the keys ``input`` and ``output``."""

    id: str
    run: str
    server: str
    host: str
    attempt: int
    tokens: int
    supervised: int
    ids_sha256: str
    pieces: List[ManifestPiece]
    token_shard: TokenRef
    dtype: str
    hidden: int
    layers: Dict[str, List[int]]
    final: str
    norm: str
    engine: str
    patch_sha256: str
    model_sha256: str
    template_sha256: str
    settings_sha256: str
    t: float
    path: str = ""
    """Set in the merged manifest: the folder of the pulled shards, relative to the data root."""
    v: int = FORMAT_VERSION


@dataclass
class RejectedLine:
    """A sample that will not exist, and why."""

    id: str
    run: str
    server: str
    reason: str
    detail: str
    attempts: int
    t: float
    v: int = FORMAT_VERSION


@dataclass
class AttemptLine:
    """``attempts.jsonl``: ``outcome`` is ``sent`` (written before the request goes out, so that a number is never used
    twice), or why the attempt ended without a sample."""

    id: str
    attempt: int
    outcome: str
    detail: str
    t: float
    v: int = FORMAT_VERSION


@dataclass
class WithdrawnLine:
    """``withdrawn.jsonl``: a sample that this share has given away; its driver never works on it again."""

    id: str
    t: float
    v: int = FORMAT_VERSION


@dataclass
class RestartLine:
    """``restarts.jsonl`` of a run: a controller had a server launched again. ``launch_id`` is the launch before,
    ``verdict`` what was said of its end, ``suspect`` the sample that was alone in flight then, if one was."""

    server: str
    launch_id: str
    verdict: str
    suspect: str
    operator: str
    t: float
    v: int = FORMAT_VERSION


@dataclass
class Row:
    """One row of a data set on its way to a host: conversation, text or ids; exactly one of the three is set."""

    id: str
    messages: Optional[List[Dict[str, Any]]] = None
    text: Optional[str] = None
    input_ids: Optional[List[int]] = None
    loss_mask: Optional[List[int]] = None
    tools: Optional[List[Dict[str, Any]]] = None
    extra: Dict[str, Any] = field(default_factory=dict)


def row_line(row: Dict[str, Any]) -> bytes:
    """The one form of a row (``Row`` as plain data) that is hashed, sent and kept in rows.jsonl. ASCII alone, so that a
    lone surrogate, which has no UTF-8 form, gets as far as the tokeniser and is rejected there by name."""
    return json.dumps(row, sort_keys=True, separators=(",", ":")).encode() + b"\n"
