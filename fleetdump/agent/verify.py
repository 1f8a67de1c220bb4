"""Verb ``verify``: is all that the runs have written on this host there and right? Reads every byte of it.

With ``repair`` what dead writers left open is finished first, up to the last good line of its journal (``shards``).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Dict, Iterator, List, Optional, Set, Tuple

from fleetdump.agent.context import AgentContext
from fleetdump.agent.formats import PART_SUFFIX, FileName, FormatError, ManifestLine, PieceRecord
from fleetdump.agent.jsonl import decode_line, decode_record, writer_lives
from fleetdump.agent.protocol import AgentFailure
from fleetdump.agent.records import in_words
from fleetdump.agent.runmessages import RunVerification, VerifyArgs, VerifyResult
from fleetdump.agent.shardcheck import Fault, JournalIndex, verify_part, verify_shard
from fleetdump.agent.shards import close_dead, note_needed
from fleetdump.agent.share import Share, ShareSpec, runs_of, shares_of

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
    if not shares:
        result.faults.append(f"{ctx.state.root / 'runs' / run}: no share.json, so nobody knows where its shards lie")
    for directory, theirs in _by_directory(shares, result).items():
        _verify_directory(directory, theirs, repair, result, ctx)
    result.faults, result.more_faults = result.faults[:MAX_FAULTS], max(0, len(result.faults) - MAX_FAULTS)
    return result


def _by_directory(shares: List[Share], result: RunVerification) -> Dict[Path, List[Tuple[Share, ShareSpec]]]:
    """The shares by the directory that they write to; one whose share.json cannot be read is a fault."""
    found: Dict[Path, List[Tuple[Share, ShareSpec]]] = {}
    for share in shares:
        try:
            spec = share.spec()
        except AgentFailure as failure:
            result.faults.append(in_words(failure))
            continue
        if spec is not None:
            found.setdefault(spec.directory, []).append((share, spec))
    return found


def _verify_directory(
    directory: Path, shares: List[Tuple[Share, ShareSpec]], repair: bool, result: RunVerification, ctx: AgentContext
) -> None:
    # First: what a living driver commits meanwhile has its journal lines by then.
    ends = {share.root: share.manifest_size() for share, _ in shares}
    index = JournalIndex.read(directory)
    result.faults += map(str, index.faults)
    needed: Dict[str, Set[str]] = {}
    for share, spec in shares:
        check = _ManifestCheck(share, index, needed, result)
        check.read(ends[share.root])
        check.is_all_there(spec)
    living, torn = _parts(directory)
    result.open += living
    if repair and torn:
        ctx.emit("step", text=f"{result.run}: finishing {len(torn)} shards of dead writers")
        closing = close_dead(directory, lambda names: {name: needed.get(name, set()) for name in names})
        index.closed.update(closing.closed)
        result.repaired += [name for name in torn if not (directory / name).exists()]
        result.faults += [finding for finding in closing.findings if finding not in result.faults]
    else:
        result.torn += torn
    told = set(result.faults)
    told = set(result.faults)
    for number, name in enumerate(sorted({*index.closed, *index.pieces})):
        if number % 20 == 0:
            ctx.emit("step", text=f"{result.run}: verifying {name} ({number} are done)")
        faults = map(str, _verify_one(directory, name, index))
        result.faults += [fault for fault in faults if fault not in told]
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


class _ManifestCheck:
    """One share's manifest: every line names pieces, ids and a mask that journals name alike, no id stands twice, and
    no sample is missing that the driver had settled. What lines need is noted in ``needed``."""

    def __init__(self, share: Share, index: JournalIndex, needed: Dict[str, Set[str]], result: RunVerification):
        self._share = share
        self._index = index
        self._needed = needed
        self._result = result
        self._seen: Set[str] = set()
        self._unknown: Dict[str, Set[str]] = {}
        """Samples that a broken journal keeps from being checked, by the shard."""
        self._records: Dict[str, Dict[str, PieceRecord]] = {}

    def read(self, end: int) -> None:
        """Check the lines that lie before byte ``end``; one that cannot be read is one fault."""
        number = 0
        for number, raw in enumerate(_lines_before(self._share.manifest, end), 1):
            try:
                line = decode_record(ManifestLine, decode_line(raw, "line"), "line")
            except FormatError as error:
                self._fault(f"line {number}: {error}")
                continue
            self._take(line)
        for shard, samples in sorted(self._unknown.items()):
            self._result.faults.append(f"{shard}: {len(samples)} samples in it cannot be checked without its journal")

    def is_all_there(self, spec: ShareSpec) -> None:
        """Compare with what the driver reported: a manifest that was deleted or cut is not a run without samples."""
        progress = self._share.progress()
        size = self._share.manifest_size()
        if size < progress.manifest_bytes or (self._share.attempts.exists() and not self._share.manifest.exists()):
            gone = f"has {size} bytes of {progress.manifest_bytes}" if self._share.manifest.exists() else "is gone"
            self._fault(f"{gone}; fleetdump extract makes it again from what the taps wrote")
            return
        missing = spec.rows - len(self._seen) - progress.rejected - len(self._share.read_withdrawn())
        if progress.state == "done" and missing > 0:
            self._fault(f"{missing} of {spec.rows} samples are neither in it nor rejected, though the share is done")

    def _take(self, line: ManifestLine) -> None:
        self._result.samples += 1
        if line.id in self._seen:
            self._fault(f"sample {line.id} stands twice")
        self._seen.add(line.id)
        note_needed(line, self._needed)
        tokens = line.token_shard
        for piece in line.pieces:
            record = self._record(piece.shard, piece.name)
            place = (piece.offset, piece.bytes, piece.crc32)
            self._compare(
                line.id, piece.shard, piece.name, record and (record.offset, record.bytes, record.crc32), place
            )
        for name, checksum in ((tokens.ids, tokens.ids_crc32), (tokens.mask, tokens.mask_crc32)):
            record = self._record(tokens.shard, name)
            self._compare(line.id, tokens.shard, name, record and record.crc32, checksum)

    def _compare(self, sample: str, shard: str, name: str, journalled: Any, promised: Any) -> None:
        if journalled == promised:
            return
        if journalled is None and not self._index.is_readable(shard):
            self._unknown.setdefault(shard, set()).add(sample)
        else:
            self._result.faults.append(f"{shard}: sample {sample}: no journal has {name} so")

    def _record(self, shard: str, name: str) -> Optional[PieceRecord]:
        if shard not in self._records:
            self._records[shard] = {piece.name: piece for piece in self._index.pieces.get(shard, [])}
        return self._records[shard].get(name)

    def _fault(self, what: str) -> None:
        self._result.faults.append(f"{self._share.manifest}: {what}")


def _lines_before(path: Path, end: int) -> Iterator[bytes]:
    """Whole lines that lie before byte ``end``."""
    if not end:
        return
    with open(path, "rb") as file:
        for raw in file:
            end -= len(raw)
            if end < 0 or not raw.endswith(b"\n"):
                return
            yield raw
