"""Make samples exist: ids and mask into a token shard, then the manifest line. The driver is the only caller; its loop
commits in a thread."""

from __future__ import annotations

import hashlib
import json
import time
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Collection, Dict, List, Optional, Sequence, Set, Tuple

from fleetdump.agent.context import machine_id
from fleetdump.agent.formats import (
    FileName,
    ManifestLine,
    ManifestPiece,
    PieceRecord,
    RejectedLine,
    Rid,
    TokenRef,
    Writer,
    norm_name,
)
from fleetdump.agent.generate import Threads
from fleetdump.agent.jsonl import append_lines, open_lines
from fleetdump.agent.schedule import Sample
from fleetdump.agent.shardwriter import TokenShards
from fleetdump.agent.share import Share, ShareSpec
from fleetdump.agent.tensorfile import ids_sha256

FINAL = "pre_norm"


@dataclass
class Ready:
    """A sample whose rows are all durable, by which attempt, in which pieces (by pipeline stage, then position)."""

    sample: Sample
    rid: Rid
    pieces: List[PieceRecord]


@dataclass
class Totals:
    """What the manifest holds."""

    samples: int = 0
    tokens: int = 0
    bytes: int = 0


class Committer:
    """The one writer of a share's manifest, rejects and token shards.

    Life cycle: create (reads what exists, cuts torn last lines), ``commit`` and ``reject`` batches, ``close``. Every
    method may raise ``OSError`` (full disk); nothing of the failed batch exists then, and the call can be repeated.
    """

    def __init__(self, share: Share, spec: ShareSpec, template_sha256: str, writer: Writer):
        self._share = share
        self._spec = spec
        self._template_sha256 = template_sha256
        self._host = machine_id()
        self._manifest = open_lines(share.manifest)
        self._rejected = open_lines(share.rejected)
        self.totals = Totals()
        self.shards: Set[str] = set()
        """Tap shards that the manifest names."""
        self.settled: Set[str] = set()
        """Ids in the manifest or among the rejected."""
        self.rejected = 0
        self._written: Dict[str, TokenRef] = {}
        """By rid: durable in a token shard, not yet in the manifest."""
        self._read_back()
        self._tokens = TokenShards(spec.directory, writer, spec.capture.shard_bytes)

    def commit(self, batch: Sequence[Ready]) -> None:
        """Let the samples of ``batch`` exist, all at once: two fsyncs a batch, whatever its size."""
        if not batch:
            return
        samples = [self._share.read_sample(ready.sample) for ready in batch]
        self._write_tokens(batch, samples)
        lines = [self._line(ready, ids, mask) for ready, (ids, mask) in zip(batch, samples)]
        append_lines(self._manifest, lines)
        self._written.clear()
        for line in lines:
            self._count(line.id, line.tokens, [(piece.shard, piece.bytes) for piece in line.pieces])

    def reject(self, batch: Sequence[RejectedLine]) -> None:
        """Say of samples that they will not exist."""
        if batch:
            append_lines(self._rejected, batch)
            self.rejected += len(batch)
            self.settled.update(line.id for line in batch)

    def rejection(self, sample_id: str, reason: str, detail: str, attempts: int) -> RejectedLine:
        """A line for ``reject``."""
        clean = detail.encode("utf-8", "replace").decode()
        return RejectedLine(sample_id, self._spec.run, self._spec.server, reason, clean, attempts, time.time())

    @property
    def manifest_bytes(self) -> int:
        return self._share.manifest_size()

    def rest(self) -> None:
        """Nothing will come for a while: close the token shard, so that what exists can be collected."""
        self._tokens.rest()

    def close_tokens(self) -> None:
        """Close the token shard: nothing is committed after this."""
        self._tokens.close()

    def close(self) -> None:
        """Give up all files; an open token shard stays a ``.part`` if the disk does not let it be closed."""
        with suppress(OSError):
            self._tokens.close()
        self._manifest.close()
        self._rejected.close()

    def _write_tokens(self, batch: Sequence[Ready], samples: Sequence[Tuple[List[int], List[int]]]) -> None:
        """Ids and masks of ``batch``, durable. What a failed manifest append left is used again: a shard cannot hold
        two tensors of one name."""
        added = {}
        for ready, (ids, mask) in zip(batch, samples):
            if str(ready.rid) not in self._written:
                added[str(ready.rid)] = self._tokens.add(ready.rid, ids, mask)
        self._tokens.sync()
        self._written.update(added)

    def _line(self, ready: Ready, ids: Sequence[int], mask: Sequence[int]) -> ManifestLine:
        token_ref = self._written[str(ready.rid)]
        return manifest_line(self._spec, self._host, self._template_sha256, ready, ids, mask, token_ref)

    def _read_back(self) -> None:
        with open(self._share.manifest, "rb") as file:
            for line in file:
                data = json.loads(line)
                self._count(data["id"], data["tokens"], [(piece["shard"], piece["bytes"]) for piece in data["pieces"]])
        with open(self._share.rejected, "rb") as file:
            for line in file:
                self.settled.add(json.loads(line)["id"])
                self.rejected += 1

    def _count(self, sample_id: str, tokens: int, pieces: Sequence[Any]) -> None:
        self.settled.add(sample_id)
        self.totals.samples += 1
        self.totals.tokens += tokens
        for shard, size in pieces:
            self.shards.add(shard)
            self.totals.bytes += size


@dataclass
class Written:
    """A commit has ended: these lines exist now. ``error``: why the rest of them does not."""

    rejects: List[RejectedLine] = field(default_factory=list)
    batch: List[Ready] = field(default_factory=list)
    error: Optional[OSError] = None


class CommitThread:
    """Commits in one of ``threads``, a batch at a time; each result is a ``Written``, which is to be handed back by
    ``ended``. Until then nobody else uses the committer's files."""

    def __init__(self, committer: Committer, threads: Threads):
        self.is_busy = False
        self._committer = committer
        self._threads = threads
        self._rested = True
        """The token shard is closed: nothing was committed since."""

    def begin(self, rejects: Collection[RejectedLine], batch: Collection[Ready], rest: bool) -> None:
        """Let these become lines, unless a batch is under way. ``rest``: nothing will come for a while."""
        rest = rest and not self._rested
        if self.is_busy or not (rejects or batch or rest):
            return
        self.is_busy = True
        lines, ready = list(rejects), list(batch)
        self._rested = rest
        self._threads.run(lambda: self._write(lines, ready, rest))

    def ended(self, written: Written) -> None:
        """The next batch may begin."""
        self.is_busy = False
        if written.error is not None:
            self._rested = False

    def _write(self, rejects: List[RejectedLine], batch: List[Ready], rest: bool) -> Written:
        written = Written()
        try:
            self._committer.reject(rejects)
            written.rejects = rejects
            self._committer.commit(batch)
            written.batch = batch
            if rest:
                self._committer.rest()
        except OSError as error:
            written.error = error
        return written


def manifest_line(
    spec: ShareSpec,
    host: str,
    template_sha256: str,
    ready: Ready,
    ids: Sequence[int],
    mask: Sequence[int],
    token_ref: TokenRef,
) -> ManifestLine:
    """The line that makes ``ready`` exist; pure but for the time."""
    first = ready.pieces[0]
    layers = {"input": spec.capture.layers, "output": [layer - 1 for layer in spec.capture.layers]}
    settings = {
        "dtype": first.dtype,
        "layers": layers["input"],
        "final": FINAL,
        "hidden": first.shape[2],
        "engine": spec.engine,
        "patch_sha256": spec.patch_sha256,
        "model_sha256": spec.model_sha256,
        "template_sha256": template_sha256,
    }
    return ManifestLine(
        id=ready.sample.id,
        run=spec.run,
        server=spec.server,
        host=host,
        attempt=ready.rid.attempt,
        tokens=len(ids),
        supervised=sum(mask),
        ids_sha256=ids_sha256(ids),
        pieces=[_manifest_piece(piece) for piece in ready.pieces],
        token_shard=token_ref,
        dtype=first.dtype,
        hidden=first.shape[2],
        layers=layers,
        final=FINAL,
        norm=_norm_of(first),
        engine=spec.engine,
        patch_sha256=spec.patch_sha256,
        model_sha256=spec.model_sha256,
        template_sha256=template_sha256,
        settings_sha256=settings_sha256(settings),
        t=time.time(),
    )


def settings_sha256(settings: Dict[str, Any]) -> str:
    """Identity of what samples of one data set must share: SHA-256 of its JSON, keys sorted."""
    return hashlib.sha256(json.dumps(settings, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def _manifest_piece(piece: PieceRecord) -> ManifestPiece:
    place = (piece.offset, piece.bytes, piece.crc32)
    return ManifestPiece(piece.shard, piece.name, piece.start, piece.rows, *place, piece.slots)


def _norm_of(piece: PieceRecord) -> str:
    parsed: Optional[FileName] = FileName.parse(piece.shard)
    return norm_name(parsed.writer.server, parsed.writer.instance) if parsed and parsed.writer else ""
