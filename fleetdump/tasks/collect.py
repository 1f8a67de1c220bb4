"""``fleetdump collect``: take in the hosts' manifests, bring the shards home, and prove that all of it is right.

``pull`` works on one host and may run on many at once; ``merge`` then writes the run's one manifest and the report.
A host that cannot be reached is not in the way of the others: what it has is counted as lost until it is collected.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

from fleetdump.agent.formats import FormatError, ManifestLine, RejectedLine
from fleetdump.agent.jsonl import decode_record, fsync_directory
from fleetdump.agent.protocol import (
    FetchArgs,
    FetchResult,
    ManifestArgs,
    ManifestResult,
    ShardInfo,
    ShardsArgs,
    ShardsResult,
    StatusArgs,
    StatusResult,
)
from fleetdump.agent.tensorfile import crc32, file_sha256
from fleetdump.dataset.shards import ShardReader, verify_samples
from fleetdump.errors import FleetdumpError
from fleetdump.fleet import Host
from fleetdump.ledger import Ledger, ShareRow
from fleetdump.tasks._task import task

MANIFEST_DEADLINE = 600.0
SHARDS_DEADLINE = 600.0
FETCH_DEADLINE = 24 * 3600.0
SETTINGS = ("dtype", "hidden", "layers", "final", "engine", "patch_sha256", "model_sha256", "template_sha256")
PULLED_KINDS = ("shard", "tokens", "norm")
Fetch = Callable[[str, int, BinaryIO], int]
"""Bring a file's bytes: (name, offset, open file) to the number of bytes that came."""

T = TypeVar("T")
LISTED = 20
"""Most ids that a report names; it counts them all."""


@dataclass(frozen=True)
class Source:
    """Where lines come from, and what they must say."""

    run: str
    host: str
    server: str

    def __str__(self) -> str:
        return f"{self.host}/{self.server}"


@dataclass
class PullReport:
    """What came from one host in this call. ``faults`` say what is wrong there, one sentence each."""

    host: str
    lines: int = 0
    rejected: int = 0
    shards: int = 0
    bytes: int = 0
    unfinished: list[str] = field(default_factory=list)
    """Shares that are not done: more lines will come."""
    faults: list[str] = field(default_factory=list)


@dataclass
class CollectReport:
    """The run as it is known here after a collect. ``lost`` counts samples that are neither delivered nor rejected,
    ``missing`` names the first of them; ``mismatches`` name settings that differ between servers."""

    run: str
    samples: int
    expected: int
    lost: int
    duplicated: int
    rejected: int
    tokens: int
    manifest: str
    missing: list[str] = field(default_factory=list)
    rejects: list[str] = field(default_factory=list)
    mismatches: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class PullOptions:
    """``to``: where shards go (``<to>/<run>/<host>/``), None to leave them on the hosts."""

    run: str
    to: Path | None = None


class LineFault(ValueError):
    """A manifest or reject line that cannot be taken in; the text says why."""


# --------------------------------------------------------------------------- one host
@task
def pull(host: Host, options: PullOptions, ledger: Ledger) -> PullReport:
    """Take in what is new in the host's manifests and, with ``options.to``, its shards. Raises what ``Host.call``
    raises; then everything pulled so far is kept, and the next call goes on from there."""
    report = PullReport(host.config.name)
    for share in _shares(host, options.run, ledger):
        _pull_lines(host, options.run, share, ledger, report)
    if options.to is not None:
        _pull_shards(host, options.run, options.to / options.run / host.config.name, ledger, report)
    return report


def _shares(host: Host, run: str, ledger: Ledger) -> list[ShareRow]:
    """The host's shares of the run: those that it says it has, so that a deleted ledger is rebuilt by collecting."""
    status = host.call(StatusArgs(), StatusResult, verb="status")
    for progress in status.shares:
        if progress.run == run:
            ledger.add_share(host.config.name, progress.server)
    there = {progress.server for progress in status.shares if progress.run == run}
    return [share for share in ledger.shares(host.config.name) if share.server in there]


def _pull_lines(host: Host, run: str, share: ShareRow, ledger: Ledger, report: PullReport) -> None:
    """Lines and the offset behind them go into the ledger in one transaction: neither is lost nor taken twice."""
    source = Source(run, host.config.name, share.server)
    events: list[dict[str, Any]] = []
    result = host.call(
        ManifestArgs(run, share.server, share.offset, share.rejected_offset),
        ManifestResult,
        verb="manifest",
        on_event=events.append,
        deadline=MANIFEST_DEADLINE,
    )
    with ledger.transaction():
        for event in events:
            if event.get("event") == "manifest":
                report.lines += 1
                report.faults += take_line(ledger, source, event["line"])
            elif event.get("event") == "rejected":
                report.rejected += 1
                report.faults += take_reject(ledger, source, event["line"])
        ledger.advance(host.config.name, share.server, result.offset, result.rejected_offset)
    if result.progress.state != "done":
        report.unfinished.append(f"{source}: {result.progress.state} {result.progress.detail}".strip())


def take_line(ledger: Ledger, source: Source, text: str) -> list[str]:
    """Check a manifest line and take it in; what is wrong with it, in words."""
    try:
        line = check_line(text, source)
        if ledger.is_planned and not ledger.knows(line.id):
            raise LineFault(f"sample {line.id!r} is not of this data set")
    except LineFault as fault:
        return [f"{source}: manifest: {fault}"]
    ledger.deliver(source.host, line, text)
    return []


def take_reject(ledger: Ledger, source: Source, text: str) -> list[str]:
    """Check a reject line and take it in; what is wrong with it, in words."""
    try:
        line = _decode(RejectedLine, text)
        _check_source(line.run, line.server, source)
    except LineFault as fault:
        return [f"{source}: rejected: {fault}"]
    ledger.reject(source.host, line)
    return []


def check_line(text: str, source: Source) -> ManifestLine:
    """The manifest line in ``text``; raises ``LineFault`` when it is torn, of another run or server, or says of its
    pieces what cannot be: a gap, an overlap, another number of rows than tokens."""
    line = _decode(ManifestLine, text)
    _check_source(line.run, line.server, source)
    position = 0
    for piece in line.pieces:
        if piece.start != position or piece.rows < 1:
            raise LineFault(f"sample {line.id!r}: {piece.name} starts at {piece.start}, expected {position}")
        position += piece.rows
    if position != line.tokens:
        raise LineFault(f"sample {line.id!r}: pieces hold {position} rows of {line.tokens} tokens")
    for name in (line.token_shard.shard, line.norm, *(piece.shard for piece in line.pieces)):
        if "/" in name or name.startswith("."):  # it becomes the name of a file here
            raise LineFault(f"sample {line.id!r}: {name!r} is no name of a file of the run")
    if not 0 <= line.supervised <= line.tokens:
        raise LineFault(f"sample {line.id!r}: {line.supervised} of {line.tokens} tokens supervised")
    return line


def _decode(kind: type[T], text: str) -> T:
    try:
        data = json.loads(text)
        if not isinstance(data, dict) or data.get("v") != 1:
            raise LineFault(f"not a line of version 1: {text[:80]!r}")
        return decode_record(kind, data, "line")
    except ValueError as error:
        if isinstance(error, LineFault):
            raise
        raise LineFault(f"cannot be read: {error}: {text[:80]!r}") from error


def _check_source(run: str, server: str, source: Source) -> None:
    if (run, server) != (source.run, source.server):
        raise LineFault(f"is of run {run}, server {server}")


# --------------------------------------------------------------------------- shards of one host
def _pull_shards(host: Host, run: str, folder: Path, ledger: Ledger, report: PullReport) -> None:
    """Bring over every closed file that kept samples lie in, and check it."""
    capture_dir = host.config.capture.spec().dir
    listed = host.call(ShardsArgs(run, capture_dir), ShardsResult, verb="shards", deadline=SHARDS_DEADLINE).shards
    there = {shard.name: shard for shard in listed if shard.kind in PULLED_KINDS}
    lines = [decode_record(ManifestLine, json.loads(d.line), d.id) for d in ledger.delivered(host.config.name)]
    needed = ledger.needed_shards(host.config.name) | {line.norm for line in lines if line.norm}
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    for name in sorted(needed):
        shard = there.get(name)
        if shard is None or shard.open:
            what = "is still open" if name in there or f"{name}.part" in there else "is missing there"
            report.faults.append(f"{host.config.name}: {name} {what}")
            continue
        ledger.put_shard(host.config.name, shard)
        if ledger.is_verified(host.config.name, name) and (folder / name).exists():
            continue
        try:
            report.bytes += _pull_file(partial(_fetch, host, run, capture_dir), shard, folder)
        except DamagedCopy as damage:
            report.faults.append(f"{host.config.name}: {damage}")
            continue
        faults = verify_pieces(folder, name, lines)
        report.faults += [f"{host.config.name}: {fault}" for fault in faults]
        report.shards += 1
        ledger.pulled(host.config.name, name, verified=not faults)
    report.faults += [f"{host.config.name}: {fault}" for fault in verify_samples(folder, lines)]


def _fetch(host: Host, run: str, capture_dir: str, name: str, offset: int, out: BinaryIO) -> int:
    """Append the file's bytes from ``offset`` on to ``out``; returns how many came."""

    def write(_: Mapping[str, Any], blocks: Iterator[bytes]) -> None:
        for block in blocks:
            out.write(block)

    args = FetchArgs(run, capture_dir, name, offset)
    return host.call(args, FetchResult, verb="fetch", blob=write, deadline=FETCH_DEADLINE).sent


class DamagedCopy(Exception):
    """A file that does not come over whole; the text names it and what differs."""


def _pull_file(fetch: Fetch, shard: ShardInfo, folder: Path) -> int:
    """Copy one file, going on where an earlier copy stopped; ``fetch(name, offset, out)`` brings the bytes. Returns
    how many came over. A copy whose SHA-256 differs is made once more from the start; raises ``DamagedCopy``."""
    partial_copy, target = folder / f"{shard.name}.partial", folder / shard.name
    came = 0
    for _ in range(2):
        with open(partial_copy, "ab") as out:
            if out.tell() > shard.bytes:
                out.truncate(0)
            came += fetch(shard.name, out.tell(), out)
            out.flush()
            os.fsync(out.fileno())
        problem = _difference(partial_copy, shard)
        if not problem:
            os.replace(partial_copy, target)
            fsync_directory(folder)
            return came
        partial_copy.unlink()
    raise DamagedCopy(f"{shard.name} {problem}")


def _difference(path: Path, shard: ShardInfo) -> str:
    """How a copy differs from what the host says, empty when it does not. A norm file has no journal line: its size
    alone can be compared."""
    size = path.stat().st_size
    if size != shard.bytes:
        return f"has {size} bytes here, {shard.bytes} on the host"
    if not shard.sha256:
        return ""
    with open(path, "rb") as file:
        digest = file_sha256(file)
    return "" if digest == shard.sha256 else f"has SHA-256 {digest} here, {shard.sha256} on the host"


def verify_pieces(folder: Path, shard: str, lines: list[ManifestLine]) -> list[str]:
    """CRC-32 of every piece in ``shard`` that a manifest line names; what is wrong, in words."""
    named = [(line.id, piece) for line in lines for piece in line.pieces if piece.shard == shard]
    if not named:
        return []
    faults = []
    try:
        with ShardReader(folder / shard) as reader:
            for sample, piece in named:
                if piece.name not in reader.tensors:
                    faults.append(f"{shard}: sample {sample}: {piece.name} is not there")
                elif crc32(reader.read(piece.name)) != piece.crc32:
                    faults.append(f"{shard}: sample {sample}: {piece.name} has another CRC-32 than its manifest line")
    except (FormatError, OSError) as error:
        faults.append(f"{shard}: {error}")
    return faults


# --------------------------------------------------------------------------- the run
def merge(ledger: Ledger, options: PullOptions, runs_dir: Path) -> CollectReport:
    """Write the run's merged manifest (each sample once, in the data set's order, replaced at once) and say what is
    there and what is not."""
    target = (options.to or runs_dir) / options.run / "manifest.jsonl"
    target.parent.mkdir(parents=True, exist_ok=True)
    temporary = target.with_name("manifest.jsonl.tmp")
    settings: dict[str, dict[str, set[str]]] = {key: {} for key in SETTINGS}
    tokens = 0
    with open(temporary, "w", encoding="utf-8") as out:
        for sample in ledger.delivered():
            line = json.loads(sample.line)
            tokens += line["tokens"]
            for key in SETTINGS:
                values = settings[key].setdefault(json.dumps(line[key], sort_keys=True), set())
                values.add(f"{sample.host}/{sample.server}")
            if options.to is not None:
                line["path"] = sample.host
            out.write(json.dumps(line, separators=(",", ":"), ensure_ascii=False) + "\n")
        out.flush()
        os.fsync(out.fileno())
    os.replace(temporary, target)
    fsync_directory(target.parent)
    totals = ledger.totals()
    return CollectReport(
        run=options.run,
        samples=totals.delivered,
        expected=totals.expected,
        lost=totals.lost,
        duplicated=totals.duplicated,
        rejected=totals.rejected,
        tokens=tokens,
        manifest=str(target),
        missing=[f"{sample} (given to {host}/{server})" for sample, host, server in ledger.lost(LISTED)],
        rejects=[f"{sample}: {reason}" for sample, reason in ledger.rejected()[:LISTED]],
        mismatches=list(_mismatches(settings)),
    )


def _mismatches(settings: Mapping[str, Mapping[str, set[str]]]) -> Iterator[str]:
    """Settings with more than one value, each value with the servers that have it."""
    for key, values in settings.items():
        if len(values) > 1:
            named = [f"{value[:40]} on {', '.join(sorted(servers))}" for value, servers in sorted(values.items())]
            yield f"{key} differs: {'; '.join(named)}"


def require_whole(report: CollectReport, pulls: list[PullReport]) -> None:
    """Raise ``FleetdumpError`` when the run is not wholly and rightly here: something lost, mixed or damaged."""
    faults = [fault for pulled in pulls for fault in pulled.faults]
    problems = [*report.mismatches, *faults]
    if report.lost:
        problems.insert(0, f"{report.lost} of {report.expected} samples are not there, first {report.missing[0]}")
    if problems:
        raise FleetdumpError(
            f"run {report.run} is not complete",
            why="; ".join(problems[:5]) + (f" (and {len(problems) - 5} more)" if len(problems) > 5 else ""),
            next_step="fleetdump status shows what is still running; collect again when it is done",
        )
