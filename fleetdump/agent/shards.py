"""Verbs ``shards`` and ``fetch``: what a run has written on this host, and its bytes.

A writer holds an exclusive flock on its journal for as long as it may write (docs/formats.md). Whoever gets that lock
knows the writer dead, and has become the one who may finish its files.
"""

from __future__ import annotations

import contextlib
import json
import os
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Callable, Dict, Iterator, List, Mapping, Optional, Sequence, Set, Tuple

from fleetdump.agent.context import AgentContext
from fleetdump.agent.formats import (
    RUN_NAME,
    FileName,
    FormatError,
    JournalRecord,
    ManifestLine,
    PieceRecord,
    ShardRecord,
    Writer,
)
from fleetdump.agent.jsonl import decode_record, open_journal, open_plain, read_journal
from fleetdump.agent.protocol import AgentFailure
from fleetdump.agent.runmessages import FetchArgs, FetchResult, ShardInfo, ShardsArgs, ShardsResult
from fleetdump.agent.shardcheck import Fault, fault_of, plain_file
from fleetdump.agent.shardwriter import DISK_FULL, closed_name, finish_part, journal_closed
from fleetdump.agent.share import Share, shares_of

Needed = Mapping[str, Set[str]]
"""Names of the pieces that manifests name, by shard."""
NeededOf = Callable[[Set[str]], Needed]
"""What samples need of these shards (closed names)."""


@dataclass
class Closing:
    """What ``close_dead`` did. ``kept``: parts left as they are, since their journal has lost pieces that samples need
    and finishing them would cut those off. ``faults``: what could not be worked on, a file each."""

    closed: Dict[str, ShardRecord] = field(default_factory=dict)
    kept: List[str] = field(default_factory=list)
    faults: List[Fault] = field(default_factory=list)

    @property
    def findings(self) -> List[str]:
        """All that is not as it should be, in words."""
        lost = [f"{name}: its journal has lost pieces that samples need; left as it is" for name in self.kept]
        return lost + [str(fault) for fault in self.faults]


def shards(args: ShardsArgs, ctx: AgentContext) -> ShardsResult:
    """Every file of the run, sorted by name; with ``close`` the parts of dead writers are finished first. A file that
    stands in the way of its own finishing is among the faults, and in the way of no other."""
    directory = _run_directory(args.capture_dir, args.run)
    journals = ClosedShards.read(directory)
    faults = [str(fault) for fault in journals.faults]
    if args.close:
        closing = close_dead(directory, needed_of(shares_of(ctx.state, args.run)), journals=journals)
        journals.records.update(closing.closed)
        faults += [finding for finding in closing.findings if finding not in faults]
    return ShardsResult(_list(directory, journals), faults)


def needed_of(shares: Sequence[Share]) -> NeededOf:
    """What the manifests of ``shares`` need, read when it is asked for."""

    def read(names: Set[str]) -> Needed:
        needed: Dict[str, Set[str]] = {}
        marks = [name.encode() for name in names]
        for share in shares if names else ():
            for raw in _lines_of(share.manifest):
                if any(mark in raw for mark in marks):
                    _note_pieces(raw, share.manifest, needed)
        return {name: needed.get(name, set()) for name in names}

    return read


def _lines_of(path: Path) -> Iterator[bytes]:
    with contextlib.suppress(FileNotFoundError), open(path, "rb") as file:
        yield from file


def _note_pieces(raw: bytes, manifest: Path, needed: Dict[str, Set[str]]) -> None:
    """Add what one manifest line names; a line that cannot be read names nothing."""
    with contextlib.suppress(ValueError, FormatError, RecursionError):
        note_needed(decode_record(ManifestLine, json.loads(raw), manifest.name), needed)


def note_needed(line: ManifestLine, needed: Dict[str, Set[str]]) -> None:
    """Add the pieces, ids and mask that ``line`` names."""
    tokens = line.token_shard
    for shard, name in [
        *((p.shard, p.name) for p in line.pieces),
        (tokens.shard, tokens.ids),
        (tokens.shard, tokens.mask),
    ]:
        needed.setdefault(shard, set()).add(name)


@dataclass
class ClosedShards:
    """The closed shards of a directory by name, and the journals that cannot be read."""

    records: Dict[str, ShardRecord] = field(default_factory=dict)
    faults: List[Fault] = field(default_factory=list)

    @classmethod
    def read(cls, directory: Path) -> ClosedShards:
        """Look into every journal; nothing where the run has written nothing."""
        found = cls()
        for path in sorted(directory.glob("journal-*.jsonl")):
            try:
                records, _ = read_journal(plain_file(path))
            except (FormatError, OSError) as error:
                found.faults.append(fault_of(path, error))
                continue
            found.records.update({record.shard: record for record in records if isinstance(record, ShardRecord)})
        return found


def close_dead(
    directory: Path, needed_of: NeededOf, server: str = "", journals: Optional[ClosedShards] = None
) -> Closing:
    """Finish what dead writers (of one ``server``, or of all) left in a run's capture directory. Raises ``OSError``
    only for a disk that takes no more; whatever is wrong with one file is told of that file alone."""
    known = (journals or ClosedShards.read(directory)).records
    unfinished: Dict[Writer, Set[str]] = {}
    for path, name in _names(directory):
        if name.writer is None or name.kind != name.writer.prefix or server not in ("", name.writer.server):
            continue
        if name.part or path.name not in known:
            unfinished.setdefault(name.writer, set()).add(closed_name(path) if name.part else path.name)
    needed = needed_of({name for names in unfinished.values() for name in names})
    result = Closing()
    for writer in sorted(unfinished, key=str):
        with _told(result, directory / writer.journal):
            _finish_dead_writer(directory, writer, needed, result)
    return result


def _finish_dead_writer(directory: Path, writer: Writer, needed: Needed, result: Closing) -> None:
    """Bring a dead writer's files to their final state: parts closed or removed, each closed shard in the journal. A
    living one's are left alone. May be interrupted anywhere and called again."""
    path = directory / writer.journal
    if path.exists() or path.is_symlink():
        plain_file(path)
    journal = open_journal(path)
    if journal is None:
        return
    with closing(journal):
        records, _ = read_journal(path)
        journalled = {record.shard for record in records if isinstance(record, ShardRecord)}
        for shard, name in _shards_of(directory, writer):
            if name.part and lost_pieces(shard, records, needed):
                result.kept.append(shard.name)
            elif name.part or shard.name not in journalled:
                with _told(result, shard):
                    record = finish_part(shard, records, journal) if name.part else journal_closed(shard, journal)
                    if record is not None:
                        result.closed[record.shard] = record


@contextlib.contextmanager
def _told(result: Closing, path: Path) -> Iterator[None]:
    """What is wrong with ``path`` goes into the result; a full disk is nobody's fault and is raised."""
    try:
        yield
    except (FormatError, OSError) as error:
        if isinstance(error, OSError) and error.errno in DISK_FULL:
            raise
        result.faults.append(fault_of(path, error))


def lost_pieces(path: Path, records: Sequence[JournalRecord], needed: Needed) -> Set[str]:
    """The pieces of a part that samples need and its journal does not have."""
    shard = closed_name(path)
    return needed.get(shard, set()) - {r.name for r in records if isinstance(r, PieceRecord) and r.shard == shard}


def fetch(args: FetchArgs, ctx: AgentContext) -> FetchResult:
    """Send a file from ``offset`` to its end as one ``blob`` event; it must be one of ours in that run's directory."""
    directory = _run_directory(args.capture_dir, args.run)
    if FileName.parse(args.name) is None:
        raise AgentFailure("usage", "not the name of a file of ours", args.name, next_step="take names from 'shards'")
    try:
        file = open(directory / args.name, "rb", opener=_open_unlinked)  # noqa: SIM115 (closed below)
    except OSError as error:
        raise AgentFailure("not_found", "the file cannot be opened", str(directory / args.name), str(error)) from error
    with file:
        status = os.fstat(file.fileno())
        if not 0 <= args.offset <= status.st_size:
            why = f"it has {status.st_size} bytes, asked for from {args.offset} on"
            raise AgentFailure(
                "conflict", "the file is shorter than what was fetched of it", args.name, why, "fetch anew"
            )
        file.seek(args.offset)
        size = status.st_size - args.offset
        ctx.blob(file, size, name=args.name, offset=args.offset)
    return FetchResult(sent=size, size=status.st_size)


def _open_unlinked(path: str, flags: int) -> int:
    return open_plain(path, flags | os.O_NOFOLLOW)


def _run_directory(capture_dir: str, run: str) -> Path:
    if not RUN_NAME.match(run):
        raise AgentFailure("usage", "not the name of a run", run)
    return Path(os.path.expanduser(capture_dir)) / run


def _names(directory: Path) -> List[Tuple[Path, FileName]]:
    """Plain files of ours, sorted by name; nothing when the run has written nothing here."""
    if not directory.is_dir():
        return []
    parsed = ((Path(entry.path), FileName.parse(entry.name)) for entry in os.scandir(directory) if _is_plain(entry))
    return sorted(((path, name) for path, name in parsed if name is not None), key=lambda item: item[0].name)


def _is_plain(entry: os.DirEntry[str]) -> bool:
    return entry.is_file(follow_symlinks=False)


def _shards_of(directory: Path, writer: Writer) -> List[Tuple[Path, FileName]]:
    return [(path, name) for path, name in _names(directory) if name.writer == writer and name.kind == writer.prefix]


def _list(directory: Path, journals: ClosedShards) -> List[ShardInfo]:
    infos = []
    for path, name in _names(directory):
        try:
            size = path.stat().st_size
        except FileNotFoundError:  # a living writer closed it meanwhile
            continue
        closed = journals.records.get(path.name)
        infos.append(ShardInfo(path.name, name.kind, size, closed.sha256 if closed else "", name.part))
    return infos
