"""Verb ``verify``: is all that the runs have written on this host there and right? Reads every byte of it.

With ``repair`` what dead writers left open is finished first, up to the last good line of its journal (``shards``).
"""

from __future__ import annotations

from pathlib import Path
from typing import Dict, Iterator, List, Set, Tuple

from fleetdump.agent.context import AgentContext
from fleetdump.agent.formats import PART_SUFFIX, FileName, FormatError, ManifestLine, PieceRecord
from fleetdump.agent.jsonl import decode_record, read_lines, writer_lives
from fleetdump.agent.protocol import AgentFailure, RunVerification, VerifyArgs, VerifyResult
from fleetdump.agent.shardcheck import Fault, JournalIndex, verify_part, verify_shard
from fleetdump.agent.shards import close_dead, needed_pieces
from fleetdump.agent.share import Share, runs_of, shares_of

MAX_FAULTS = 100
"""Of a run, told one by one."""


def verify(args: VerifyArgs, ctx: AgentContext) -> VerifyResult:
    """Verify one run of this host, or all. ``AgentFailure`` not_found for a run that is not here."""
    runs = runs_of(ctx.state)
    if args.run and args.run not in runs:
        known = ", ".join(runs) or "none"
        raise AgentFailure("not_found", "this host has no such run", args.run, f"runs here: {known}")
    return VerifyResult([_verify_run(run, args.repair, ctx) for run in ([args.run] if args.run else runs)])


def _verify_run(run: str, repair: bool, ctx: AgentContext) -> RunVerification:
    result = RunVerification(run)
    shares = shares_of(ctx.state, run)
    directories = {spec.directory for spec in (share.spec() for share in shares) if spec is not None}
    if not shares:
        result.faults.append(f"{ctx.state.root / 'runs' / run}: no share.json, so nobody knows where its shards lie")
    try:
        # First: what a living driver commits meanwhile has its journal lines by then.
        for share in shares:
            _verify_manifest(share, result)
        for directory in sorted(directories):
            if directory.is_dir():
                _verify_directory(directory, repair, result, ctx)
    except FormatError as error:
        result.faults.append(str(error))
    result.faults, result.more_faults = result.faults[:MAX_FAULTS], max(0, len(result.faults) - MAX_FAULTS)
    return result


def _verify_directory(directory: Path, repair: bool, result: RunVerification, ctx: AgentContext) -> None:
    living, torn = _parts(directory)
    if repair and torn:
        ctx.emit("step", text=f"{result.run}: finishing {len(torn)} shards of dead writers")
        close_dead(directory, needed_pieces(ctx.state, result.run))
        left = {name for name in torn if (directory / name).exists()}
        result.repaired += [name for name in torn if name not in left]
        result.faults += [
            f"{name}: its journal has lost pieces that samples need; left as it is" for name in sorted(left)
        ]
    else:
        result.torn += torn
    index = JournalIndex.read(directory)
    result.open += living
    for number, name in enumerate(sorted({*index.closed, *index.pieces})):
        if number % 20 == 0:
            ctx.emit("step", text=f"{result.run}: verifying {name} ({number} are done)")
        result.faults += map(str, _verify_one(directory, name, index))
        result.shards += 1
        result.pieces += len(index.pieces.get(name, []))
        result.bytes += sum(piece.bytes for piece in index.pieces.get(name, []))


def _verify_one(directory: Path, name: str, index: JournalIndex) -> List[Fault]:
    pieces = index.pieces.get(name, [])
    if name in index.closed:
        return verify_shard(directory / name, index.closed[name], pieces)
    part = directory / (name + PART_SUFFIX)
    return verify_part(part if part.exists() else directory / name, pieces)


def _parts(directory: Path) -> Tuple[List[str], List[str]]:
    """Shards that living writers have open, and those that dead ones left open."""
    living: List[str] = []
    torn: List[str] = []
    for path in sorted(directory.glob("*" + PART_SUFFIX)):
        name = FileName.parse(path.name)
        if name is None or name.writer is None:
            continue
        (living if writer_lives(directory / name.writer.journal) else torn).append(path.name)
    return living, torn


def _verify_manifest(share: Share, result: RunVerification) -> None:
    """Every line names pieces, ids and a mask that journals name alike, and no id stands twice."""
    spec = share.spec()
    if spec is None:
        return
    try:
        lines = [decode_record(ManifestLine, line, str(share.manifest)) for line in read_lines(share.manifest)[0]]
    except FormatError as error:
        result.faults.append(str(error))
        return
    index = JournalIndex.read(spec.directory) if spec.directory.is_dir() else JournalIndex()
    known: Dict[Tuple[str, str], PieceRecord] = {
        (piece.shard, piece.name): piece for pieces in index.pieces.values() for piece in pieces
    }
    seen: Set[str] = set()
    for line in lines:
        result.samples += 1
        if line.id in seen:
            result.faults.append(f"{share.manifest}: sample {line.id} stands twice")
        seen.add(line.id)
        result.faults += _unbacked(line, known)


def _unbacked(line: ManifestLine, known: Dict[Tuple[str, str], PieceRecord]) -> Iterator[str]:
    """What the line names and no journal has so."""
    for piece in line.pieces:
        record = known.get((piece.shard, piece.name))
        if record is None or (record.offset, record.bytes, record.crc32) != (piece.offset, piece.bytes, piece.crc32):
            yield f"{piece.shard}: sample {line.id}: no journal has {piece.name} so"
    tokens = line.token_shard
    for name, checksum in ((tokens.ids, tokens.ids_crc32), (tokens.mask, tokens.mask_crc32)):
        record = known.get((tokens.shard, name))
        if record is None or record.crc32 != checksum:
            yield f"{tokens.shard}: sample {line.id}: no journal has {name} so"
