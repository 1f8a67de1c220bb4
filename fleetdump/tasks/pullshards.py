"""Bring the shards of one host home: every closed file that kept samples lie in, each checked after the copy."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

from fleetdump.agent.formats import FormatError, ManifestLine
from fleetdump.agent.jsonl import fsync_directory
from fleetdump.agent.runmessages import FetchArgs, FetchResult, ShardInfo, ShardsArgs, ShardsResult
from fleetdump.agent.tensorfile import crc32, file_sha256
from fleetdump.dataset.lines import LineFault, Source, check_line
from fleetdump.dataset.shards import ShardReader, verify_samples
from fleetdump.fleet import Host
from fleetdump.ledger import Ledger

SHARDS_DEADLINE = 600.0
FETCH_DEADLINE = 24 * 3600.0
PULLED_KINDS = ("shard", "tokens", "norm")
Fetch = Callable[[str, int, BinaryIO], int]
"""Bring a file's bytes: (name, offset, open file) to the number of bytes that came."""


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
    has_run: bool = False
    goes_on: bool = False
    """Somebody works on the run there: a driver, or who drives it."""


def pull_shards(host: Host, run: str, folder: Path, ledger: Ledger, report: PullReport) -> None:
    """Bring over every closed file that kept samples lie in, and check it; what is wrong goes into ``report``."""
    capture_dir = host.config.capture.spec().dir
    listed = host.call(ShardsArgs(run, capture_dir), ShardsResult, verb="shards", deadline=SHARDS_DEADLINE)
    report.faults += [f"{host.config.name}: {fault}" for fault in listed.faults]
    there = {shard.name: shard for shard in listed.shards if shard.kind in PULLED_KINDS}
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
            report.bytes += pull_file(partial(_fetch, host, run, capture_dir), shard, folder)
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


def pull_file(fetch: Fetch, shard: ShardInfo, folder: Path) -> int:
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
