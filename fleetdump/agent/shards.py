"""Verbs ``shards`` and ``fetch``: what a run has written on this host, and its bytes.

A writer holds an exclusive flock on its journal for as long as it may write (docs/formats.md). Whoever gets that lock
knows the writer dead, and has become the one who may finish its files.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import stat
from contextlib import closing
from pathlib import Path
from typing import Dict, List, Mapping, Optional, Sequence, Set, Tuple

from fleetdump.agent.context import AgentContext, State
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
from fleetdump.agent.jsonl import decode_record, open_journal, read_journal
from fleetdump.agent.protocol import (
    AgentFailure,
    FetchArgs,
    FetchResult,
    ShardInfo,
    ShardsArgs,
    ShardsResult,
)
from fleetdump.agent.shardwriter import closed_name, finish_part, journal_closed
from fleetdump.agent.share import shares_of

Needed = Mapping[str, Set[str]]
"""Names of the pieces that manifests name, by shard."""


def shards(args: ShardsArgs, ctx: AgentContext) -> ShardsResult:
    """Every file of the run, sorted by name; with ``close`` the parts of dead writers are finished first."""
    directory = _run_directory(args.capture_dir, args.run)
    try:
        if args.close:
            close_dead(directory, needed_pieces(ctx.state, args.run))
        return ShardsResult(_list(directory))
    except FormatError as error:
        advice = "look at that file; samples in other shards are not affected"
        raise AgentFailure("failed", "the run's shards cannot be listed", str(directory), str(error), advice) from error


def needed_pieces(state: State, run: str) -> Dict[str, Set[str]]:
    """The pieces that the run's manifests on this host name, by shard; lines that cannot be read name none."""
    needed: Dict[str, Set[str]] = {}
    for share in shares_of(state, run):
        for raw in share.manifest.read_bytes().splitlines() if share.manifest.is_file() else ():
            with contextlib.suppress(ValueError, FormatError, RecursionError):
                for piece in decode_record(ManifestLine, json.loads(raw), share.manifest.name).pieces:
                    needed.setdefault(piece.shard, set()).add(piece.name)
    return needed


def close_dead(directory: Path, needed: Optional[Needed] = None) -> None:
    """Finish what dead writers left in a run's capture directory. A part whose journal has lost lines of ``needed``
    pieces is left as it is: finishing it would cut them off. Raises ``FormatError`` for a broken journal, ``OSError``.
    """
    digests = _digests(directory)
    unfinished = {
        str(name.writer): name.writer
        for path, name in _names(directory)
        if name.writer is not None and name.kind == name.writer.prefix and (name.part or path.name not in digests)
    }
    for _, writer in sorted(unfinished.items()):
        finish_dead_writer(directory, writer, needed or {})


def lost_pieces(path: Path, records: Sequence[JournalRecord], needed: Needed) -> Set[str]:
    """The pieces of a part that samples need and its journal does not have."""
    shard = closed_name(path)
    return needed.get(shard, set()) - {r.name for r in records if isinstance(r, PieceRecord) and r.shard == shard}


def finish_dead_writer(directory: Path, writer: Writer, needed: Optional[Needed] = None) -> bool:
    """Bring a dead writer's files to their final state: parts closed or removed, each closed shard in the journal.
    False, and nothing done, when the writer lives. May be interrupted anywhere and called again. Raises
    ``FormatError`` for a broken journal, ``OSError``."""
    journal = open_journal(directory / writer.journal)
    if journal is None:
        return False
    with closing(journal):
        records, _ = read_journal(directory / writer.journal)
        journalled = {record.shard for record in records if isinstance(record, ShardRecord)}
        for path, name in _shards_of(directory, writer):
            if name.part and lost_pieces(path, records, needed or {}):
                continue
            if name.part:
                finish_part(path, records, journal)
            elif path.name not in journalled:
                journal_closed(path, journal)
    return True


def fetch(args: FetchArgs, ctx: AgentContext) -> FetchResult:
    """Send a file from ``offset`` to its end as one ``blob`` event; it must be one of ours in that run's directory."""
    directory = _run_directory(args.capture_dir, args.run)
    if FileName.parse(args.name) is None:
        raise AgentFailure("usage", "not the name of a file of ours", args.name, next_step="take names from 'shards'")
    try:
        file = open(directory / args.name, "rb", opener=_open_plain)  # noqa: SIM115 (closed below)
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


def _open_plain(path: str, flags: int) -> int:
    """Opener for plain files alone: no symbolic link, no waiting for the other end of a pipe."""
    descriptor = os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "not a plain file", path)
    return descriptor


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


def _list(directory: Path) -> List[ShardInfo]:
    names = _names(directory)
    digests = _digests(directory)
    infos = []
    for path, name in names:
        try:
            size = path.stat().st_size
        except FileNotFoundError:  # a living writer closed it meanwhile
            continue
        infos.append(ShardInfo(path.name, name.kind, size, digests.get(path.name, ""), name.part))
    return infos


def _digests(directory: Path) -> Dict[str, str]:
    """SHA-256 of closed shards, from the journals."""
    digests: Dict[str, str] = {}
    for path, name in _names(directory):
        if name.kind == "journal":
            records, _ = read_journal(path)
            digests.update({record.shard: record.sha256 for record in records if isinstance(record, ShardRecord)})
    return digests
