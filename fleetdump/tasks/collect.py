"""``fleetdump collect``: take in the hosts' manifests, bring the shards home, and prove that all of it is right.

``pull`` works on one host and may run on many at once; ``merge`` then writes the run's one manifest and the report.
A host that cannot be reached is not in the way of the others: what it has is counted as lost until it is collected.
"""

from __future__ import annotations

import fcntl
import json
import math
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, NoReturn, TypeVar

from fleetdump.agent.formats import FileName, FormatError, ManifestLine, ManifestPiece, RejectedLine, coverage
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
from fleetdump.agent.tensorfile import crc32, file_sha256, tensor_bytes
from fleetdump.dataset.shards import ShardReader, verify_samples
from fleetdump.errors import FleetdumpError, HostError, LockedError, of_local_file
from fleetdump.fleet import Host
from fleetdump.ledger import Delivered, Ledger, ShareRow
from fleetdump.tasks._task import task

MANIFEST_DEADLINE = 600.0
SHARDS_DEADLINE = 600.0
FETCH_DEADLINE = 24 * 3600.0
SETTINGS = ("dtype", "hidden", "layers", "final", "engine", "patch_sha256", "model_sha256", "template_sha256")
PULLED_KINDS = ("shard", "tokens", "norm")
Fetch = Callable[[str, int, BinaryIO], int]
"""Bring a file's bytes: (name, offset, open file) to the number of bytes that came."""

LARGEST_INT = 2**53
"""Larger numbers are not the same in every JSON reader."""
NAME_BYTES = 255 - len(".partial")
"""Longest name that a file of a run can have here, with room for the ending of a copy that is under way."""

T = TypeVar("T")
LISTED = 1000
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


@contextmanager
def only_collector(run_dir: Path) -> Iterator[None]:
    """Be the one process that collects this run here, until the block or the process ends; the folder is made. Raises
    ``LockedError`` naming the process that is."""
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(run_dir / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise of_local_file(error) from error
    with open(descriptor, "r+", encoding="ascii", errors="replace") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = lock.read(20).strip() or "unknown"
            raise LockedError(
                f"run {run_dir.name} is being collected already",
                str(run_dir),
                f"by process {holder} of this machine",
                "wait until that one has ended, or end it; then collect again",
            ) from None
        lock.truncate(0)
        lock.write(f"{os.getpid()}\n")
        lock.flush()
        yield


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
            ledger.meet_share(host.config.name, progress.server, progress.share_id)
    there = {progress.server for progress in status.shares if progress.run == run}
    return [share for share in ledger.shares(host.config.name) if share.server in there]


def _pull_lines(host: Host, run: str, share: ShareRow, ledger: Ledger, report: PullReport) -> None:
    """Lines and the offset behind them go into the ledger in one transaction: neither is lost nor taken twice. Files
    that are not those read before (restored from a copy, say) are read anew."""
    try:
        _pull_lines_from(host, run, share, ledger, report)
    except HostError as error:
        if error.code != "conflict" or not (share.offset or share.rejected_offset):
            raise
        _pull_lines_from(host, run, replace(share, offset=0, rejected_offset=0), ledger, report)


def _pull_lines_from(host: Host, run: str, share: ShareRow, ledger: Ledger, report: PullReport) -> None:
    source = Source(run, host.config.name, share.server)
    events: list[dict[str, Any]] = []
    result = host.call(
        ManifestArgs(run, share.server, share.offset, share.rejected_offset),
        ManifestResult,
        verb="manifest",
        on_event=events.append,
        deadline=MANIFEST_DEADLINE,
    )
    if result.progress.share_id != share.share_id:
        report.faults.append(f"{source}: the run was begun anew there while it was read: collect again")
        return
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
        _check_known(line.id, ledger)
    except LineFault as fault:
        return [f"{source}: manifest: {fault}"]
    ledger.deliver(source.host, line, text)
    return []


def take_reject(ledger: Ledger, source: Source, text: str) -> list[str]:
    """Check a reject line and take it in; what is wrong with it, in words."""
    try:
        line = _decode(RejectedLine, text)
        _check_source(line.run, line.server, source)
        _check_known(line.id, ledger)
    except LineFault as fault:
        return [f"{source}: rejected: {fault}"]
    ledger.reject(source.host, line)
    return []


def check_line(text: str, source: Source) -> ManifestLine:
    """The manifest line in ``text``; raises ``LineFault`` when it is torn, of another run or server, or says what
    cannot be: pieces with a gap, an overlap or another number of rows than tokens, impossible sizes, layers or
    files."""
    line = _decode(ManifestLine, text)
    _check_source(line.run, line.server, source)
    try:
        _check_layers(line)
        _check_pieces(line)
        for piece in line.pieces:
            _check_place(line, piece)
        for name in (line.token_shard.shard, line.norm, *(piece.shard for piece in line.pieces)):
            _check_file_name(name)
        _check_norm(line.norm)
        if not 0 <= line.supervised <= line.tokens:
            raise LineFault(f"{line.supervised} of {line.tokens} tokens supervised")
    except LineFault as fault:
        raise LineFault(f"sample {line.id[:80]!r}: {fault}") from fault
    return line


def _check_pieces(line: ManifestLine) -> None:
    if line.tokens < 1:
        raise LineFault("it has no token")
    found = coverage(line.pieces, line.tokens, len(line.layers["input"]) + 1)
    if found.surplus:
        raise LineFault(found.surplus[:200])
    if found.missing:
        raise LineFault(f"{found.missing} are missing")


def _check_layers(line: ManifestLine) -> None:
    if set(line.layers) != {"input", "output"} or len(line.layers["input"]) != len(line.layers["output"]):
        raise LineFault("layers are not as many inputs as outputs")


def _check_place(line: ManifestLine, piece: ManifestPiece) -> None:
    """A piece is ``[rows, slots, hidden]``: no other number of bytes holds it."""
    if piece.offset < 0 or line.hidden < 1:
        raise LineFault(f"{piece.name[:80]!r} has offset {piece.offset}, hidden {line.hidden}")
    try:
        expected = tensor_bytes(line.dtype, [piece.rows, len(piece.slots), line.hidden])
    except FormatError as error:
        raise LineFault(str(error)[:200]) from error
    if piece.bytes != expected:
        raise LineFault(f"{piece.name[:80]!r} has {piece.bytes} bytes, expected {expected}")


def _check_file_name(name: str) -> None:
    """It becomes the name of a file here."""
    if not name or not name.isprintable() or "/" in name or name[0] == "." or len(name.encode()) > NAME_BYTES:
        raise LineFault(f"{name[:80]!r} is no name of a file of the run")


def _check_norm(name: str) -> None:
    parsed = FileName.parse(name)
    if parsed is None or parsed.kind != "norm":
        raise LineFault(f"{name[:80]!r} is no norm file")


def _decode(kind: type[T], text: str) -> T:
    data = _load(text)
    try:
        return decode_record(kind, data, "line")
    except FormatError as error:
        raise LineFault(f"cannot be read: {str(error)[:200]}: {text[:80]!r}") from error


def _load(text: str) -> dict[str, Any]:
    """The object in one line of JSON; raises ``LineFault`` for everything else, and for numbers and strings that could
    not be stored or written again: beyond 2^53, NaN, infinite, lone surrogates."""
    try:
        text.encode()
        data = json.loads(text, parse_int=_int, parse_float=_float, parse_constant=_no_number)
        json.dumps(data, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        raise LineFault(f"cannot be read: it is not Unicode text: {text[:80]!r}") from error
    except (ValueError, RecursionError) as error:
        raise LineFault(f"cannot be read: {str(error)[:200]}: {text[:80]!r}") from error
    if not isinstance(data, dict) or data.get("v") != 1:
        raise LineFault(f"not a line of version 1: {text[:80]!r}")
    return data


def _int(digits: str) -> int:
    if len(digits) > len(str(-LARGEST_INT)) or abs(int(digits)) > LARGEST_INT:
        raise ValueError(f"{digits[:40]} is too large a number")
    return int(digits)


def _float(digits: str) -> float:
    number = float(digits)
    if not math.isfinite(number):
        raise ValueError(f"{digits[:40]} is too large a number")
    return number


def _no_number(name: str) -> NoReturn:
    raise ValueError(f"{name} is no number")


def _check_known(sample: str, ledger: Ledger) -> None:
    if ledger.is_planned and not ledger.knows(sample):
        raise LineFault(f"sample {sample[:80]!r} is not of this data set")


def _check_source(run: str, server: str, source: Source) -> None:
    if (run, server) != (source.run, source.server):
        raise LineFault(f"is of run {run[:80]!r}, server {server[:80]!r}")


# --------------------------------------------------------------------------- shards of one host
def _pull_shards(host: Host, run: str, folder: Path, ledger: Ledger, report: PullReport) -> None:
    """Bring over every closed file that kept samples lie in, and check it."""
    capture_dir = host.config.capture.spec().dir
    listed = host.call(ShardsArgs(run, capture_dir), ShardsResult, verb="shards", deadline=SHARDS_DEADLINE).shards
    there = {shard.name: shard for shard in listed if shard.kind in PULLED_KINDS}
    lines = list(_good_lines(ledger, run, host.config.name))
    needed = ledger.needed_shards(host.config.name) | {line.norm for line in lines if line.norm}
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    for name in sorted(needed):
        shard = there.get(name)
        if shard is None and ledger.is_verified(host.config.name, name) and (folder / name).exists():
            continue  # brought home before the host was cleaned
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
        ledger.pulled(host.config.name, name, folder / name, verified=not faults)
    report.faults += [f"{host.config.name}: {fault}" for fault in verify_samples(folder, lines)]


def _good_lines(ledger: Ledger, run: str, host: str) -> Iterator[ManifestLine]:
    """What was delivered by one host. A line that a ledger should not have is left out: ``merge`` names it."""
    for sample in ledger.delivered(host):
        with suppress(LineFault):
            yield check_line(sample.line, Source(run, host, sample.server))


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
    damaged: list[str] = []
    with open(temporary, "w", encoding="utf-8") as out:
        for sample in ledger.delivered():
            try:
                line, values = _merged(sample, with_path=options.to is not None)
            except LineFault as fault:
                damaged.append(f"{sample.id} (its line in the ledger: {fault})")
                continue
            tokens += line["tokens"]
            for key, value in values.items():
                settings[key].setdefault(value, set()).add(f"{sample.host}/{sample.server}")
            out.write(json.dumps(line, separators=(",", ":"), ensure_ascii=False) + "\n")
        out.flush()
        os.fsync(out.fileno())
    os.replace(temporary, target)
    fsync_directory(target.parent)
    totals = ledger.totals()
    return CollectReport(
        run=options.run,
        samples=totals.delivered - len(damaged),
        expected=totals.expected,
        lost=totals.lost + len(damaged),
        duplicated=totals.duplicated,
        rejected=totals.rejected,
        tokens=tokens,
        manifest=str(target),
        missing=[*damaged, *(f"{sample} (given to {host}/{server})" for sample, host, server in ledger.lost(LISTED))][
            :LISTED
        ],
        rejects=[f"{sample}: {reason}" for sample, reason in ledger.rejected()[:LISTED]],
        mismatches=list(_mismatches(settings)),
    )


def _merged(sample: Delivered, *, with_path: bool) -> tuple[dict[str, Any], dict[str, str]]:
    """A sample's line for the merged manifest, and its settings as text; raises ``LineFault``."""
    line = _load(sample.line or "")
    if line.get("id") != sample.id or type(line.get("tokens")) is not int:
        raise LineFault("it is of another sample, or without tokens")
    absent = [key for key in SETTINGS if key not in line]
    if absent:
        raise LineFault(f"it has no {absent[0]}")
    if with_path:
        line["path"] = sample.host
    return line, {key: json.dumps(line[key], sort_keys=True) for key in SETTINGS}


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
            next_step="fleetdump extract with the same data goes on where the run stands; then collect again",
        )
