"""Shards: written, finished after a crash, listed, fetched, verified; each kind of damage is found and named."""

from __future__ import annotations

import dataclasses
import errno
import hashlib
import io
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from fleetdump.agent import shardwriter
from fleetdump.agent.context import AgentContext, State
from fleetdump.agent.formats import ManifestLine, ManifestPiece, PieceRecord, Rid, ShardRecord, TokenRef, Writer
from fleetdump.agent.jsonl import read_journal
from fleetdump.agent.protocol import AgentFailure, Request
from fleetdump.agent.runmessages import FetchArgs, ShardInfo, ShardsArgs
from fleetdump.agent.shards import Closing, close_dead, fetch, needed_of, shards
from fleetdump.agent.shardwriter import NewPiece, ShardWriter, TokenShards
from fleetdump.agent.tensorfile import ids_sha256
from fleetdump.dataset.shards import ShardReader, verify_directory, verify_samples

TAP = Writer("main", "1f0c77aa", "r0")
DRIVER = Writer("main", "77aa1f0c", "driver")


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return tmp_path / "cap" / "r1"


def a_piece(number: int, rows: int = 2, start: int = 0) -> tuple[NewPiece, bytes]:
    rid = f"fleetdump/r1/s{number}/1"
    data = random.Random(number).randbytes(rows * 3 * 4 * 4)
    return NewPiece(f"{rid}:{start}", rid, start, rows, ids_sha256([number] * rows), "F32", [rows, 3, 4]), data


def add_and_sync(writer: ShardWriter, piece: tuple[NewPiece, bytes]) -> None:
    writer.add(piece)
    writer.sync()


def journal_of(run: Path, writer: Writer = TAP) -> list[Any]:
    return read_journal(run / writer.journal)[0]


def context(run: Path) -> AgentContext:
    return AgentContext(Request("shards", {}), State(run / "state"), stdin=io.BytesIO(), stdout=io.BytesIO())


def listed(run: Path, close: bool = True) -> dict[str, ShardInfo]:
    result = shards(ShardsArgs(run.name, str(run.parent), close), context(run))
    return {info.name: info for info in result.shards}


# --------------------------------------------------------------------------- writing
def test_a_closed_shard_has_what_was_added(run: Path) -> None:
    with ShardWriter(run, TAP, {"layers": "[1,3]", "final": "pre_norm"}) as writer:
        for number in range(5):
            writer.add(a_piece(number))
        assert [record.name for record in writer.sync()] == [a_piece(n)[0].name for n in range(5)]
    assert run.stat().st_mode & 0o777 == 0o700
    with ShardReader(run / TAP.shard(0)) as reader:
        assert reader.header.metadata == {
            "format": "fleetdump-1",
            "run": "r1",
            "writer": str(TAP),
            "layers": "[1,3]",
            "final": "pre_norm",
        }
        assert all(reader.read(piece.name) == data for piece, data in map(a_piece, range(5)))
    assert verify_directory(run).faults == []
    closed = journal_of(run)[-1]
    assert isinstance(closed, ShardRecord)
    assert closed.sha256 == hashlib.sha256((run / closed.shard).read_bytes()).hexdigest()


def test_a_piece_is_journalled_only_by_sync(run: Path) -> None:
    writer = ShardWriter(run, TAP)
    writer.add(a_piece(0))
    assert journal_of(run) == []
    writer.sync()
    assert [record.kind for record in journal_of(run)] == ["piece"]
    assert writer.sync() == []
    writer.close()
    writer.close()


def test_shards_close_when_full_of_bytes_or_of_names(run: Path) -> None:
    with ShardWriter(run, TAP, shard_bytes=8192 + 8 + 300, header_bytes=8192) as writer:
        for number in range(7):
            writer.add(a_piece(number))
    with ShardWriter(run, DRIVER, header_bytes=8192) as writer:
        for number in range(100):
            writer.add(a_piece(number))
    assert len([r for r in journal_of(run) if isinstance(r, ShardRecord)]) == 3  # 96 bytes each, 3 in 300
    assert 2 <= len([r for r in journal_of(run, DRIVER) if isinstance(r, ShardRecord)]) < 20
    assert verify_directory(run).faults == []


def test_data_of_another_size_than_its_shape_is_refused(run: Path) -> None:
    piece, data = a_piece(0)
    with ShardWriter(run, TAP) as writer, pytest.raises(ValueError, match="95 bytes"):
        writer.add((piece, data[:-1]))
    assert [path.name for path in run.iterdir()] == [TAP.journal]


def test_a_name_can_be_had_by_one_living_process_only(run: Path) -> None:
    with ShardWriter(run, TAP), pytest.raises(BlockingIOError):
        ShardWriter(run, TAP)
    ShardWriter(run, TAP).close()


def test_token_shards_hold_ids_and_mask(run: Path) -> None:
    tokens = TokenShards(run, DRIVER)
    ref = tokens.add(Rid("r1", "ü/7", 2), [5, 6, 7], [0, 1, 1])
    with pytest.raises(ValueError, match="mask"):
        tokens.add(Rid("r1", "x", 1), [5], [0, 1])
    tokens.sync()
    tokens.close()
    with ShardReader(run / ref.shard) as reader:
        assert reader.read(ref.ids) == b"\5\0\0\0\6\0\0\0\7\0\0\0"
        assert reader.read(ref.mask) == b"\0\1\1"
        assert ref.ids == "%C3%BC%2F7/2:ids"


@pytest.mark.parametrize("failing", ["write", "fsync", "journal"])
def test_what_cannot_be_made_durable_is_cut_off_and_the_next_piece_is_fine(
    run: Path, monkeypatch: pytest.MonkeyPatch, failing: str
) -> None:
    """A disk that is full for a while; tests/unit/test_tap.py has a really full one."""

    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with ShardWriter(run, TAP) as writer:
        writer.add(a_piece(0))
        writer.sync()
        with monkeypatch.context() as patch:
            if failing == "journal":
                patch.setattr(shardwriter, "append_lines", full)
            elif failing == "fsync":
                patch.setattr(os, "fsync", full)
            else:
                patch.setattr(shardwriter, "write_all", lambda file, data: (file.write(data[:50]), full()))
            with pytest.raises(OSError, match="No space"):
                add_and_sync(writer, a_piece(1))
        writer.add(a_piece(2))
    names = [record.name for record in journal_of(run) if isinstance(record, PieceRecord)]
    assert names == ["fleetdump/r1/s0/1:0", "fleetdump/r1/s2/1:0"]
    assert verify_directory(run).faults == []


@pytest.mark.parametrize("step", ["build_header", "append_lines", "fsync_directory", "file_sha256"])
def test_closing_may_fail_at_any_step_and_be_tried_again(run: Path, monkeypatch: pytest.MonkeyPatch, step: str) -> None:
    def fail(*_: Any) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    writer = ShardWriter(run, TAP)
    writer.add(a_piece(0))
    writer.sync()
    with monkeypatch.context() as patch:
        patch.setattr(shardwriter, step, fail)
        with pytest.raises(OSError, match="Input/output"):
            writer.close()
    writer.close()
    assert verify_directory(run).faults == []
    assert verify_directory(run).pieces == 1


# --------------------------------------------------------------------------- crashes
ENDLESS = """
import random, sys
from pathlib import Path
from fleetdump.agent.formats import Writer
from fleetdump.agent.shardwriter import NewPiece, ShardWriter
writer = ShardWriter(Path(sys.argv[1]), Writer("main", "1f0c77aa", "r0"), {}, shard_bytes=400_000)
number = 0
while True:
    for _ in range(3):
        rid = f"fleetdump/r1/s{number}/1"
        writer.add((NewPiece(rid + ":0", rid, 0, 5, "ab", "F32", [5, 10, 100]), random.Random(number).randbytes(20000)))
        number += 1
    writer.sync()
"""


@pytest.mark.parametrize("after", [0.0, 0.05, 0.11, 0.2])
def test_after_kill_9_every_journalled_piece_is_there(run: Path, after: float) -> None:
    child = subprocess.Popen([sys.executable, "-c", ENDLESS, str(run)])
    while not (run / TAP.journal).exists() or not journal_of(run):
        assert child.poll() is None
        time.sleep(0.01)
    time.sleep(after)
    assert close_dead(run, needed_of([])) == Closing(), "the writer lives"
    child.send_signal(signal.SIGKILL)
    child.wait()
    before = [record for record in journal_of(run) if isinstance(record, PieceRecord)]

    close_dead(run, needed_of([]))

    assert not list(run.glob("*.part"))
    result = verify_directory(run)
    assert result.faults == []
    assert result.pieces == len(before) > 0


def leave_part(run: Path, pieces: int = 3) -> Path:
    """A part as a writer leaves it that dies after ``pieces`` pieces and in the middle of the next."""
    writer = ShardWriter(run, TAP, {"layers": "[1]"})
    for number in range(pieces):
        writer.add(a_piece(number))
    writer.sync()
    writer.add(a_piece(pieces))
    writer._journal.close()
    return run / (TAP.shard(0) + ".part")


def test_a_part_is_closed_from_its_journal_with_its_own_metadata(run: Path) -> None:
    leave_part(run)
    assert listed(run, close=False)[TAP.shard(0) + ".part"].open
    info = listed(run)[TAP.shard(0)]
    assert not info.open
    assert info.sha256 == hashlib.sha256((run / info.name).read_bytes()).hexdigest()
    with ShardReader(run / info.name) as reader:
        assert list(reader.tensors) == [a_piece(n)[0].name for n in range(3)]
        assert reader.header.metadata["layers"] == "[1]"


@pytest.mark.parametrize("step", ["build_header", "fsync_directory", "file_sha256", "append_lines"])
def test_finishing_may_itself_be_interrupted(run: Path, monkeypatch: pytest.MonkeyPatch, step: str) -> None:
    leave_part(run)

    class Killed(BaseException):
        pass

    def die(*_: Any) -> None:
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(shardwriter, step, die)
        with pytest.raises(Killed):
            close_dead(run, needed_of([]))
    close_dead(run, needed_of([]))
    close_dead(run, needed_of([]))
    assert verify_directory(run).faults == []
    assert [record.kind for record in journal_of(run)] == ["piece"] * 3 + ["shard"]


def test_a_part_that_lost_its_end_keeps_the_pieces_that_are_whole(run: Path) -> None:
    part = leave_part(run)
    size = part.stat().st_size
    os.truncate(part, size - 2 * 96 - 1)  # the unjournalled piece, the third piece and one byte of the second
    close_dead(run, needed_of([]))
    with ShardReader(run / TAP.shard(0)) as reader:
        assert list(reader.tensors) == ["fleetdump/r1/s0/1:0"]
    assert [fault.what for fault in verify_directory(run).faults] == [
        "fleetdump/r1/s1/1:0 is in the journal, not in the header",
        "fleetdump/r1/s2/1:0 is in the journal, not in the header",
    ]


def test_a_part_without_a_piece_is_removed(run: Path) -> None:
    leave_part(run, pieces=0)
    (run / (TAP.shard(1) + ".part")).write_bytes(b"")
    assert list(listed(run)) == [TAP.journal]


def test_a_living_writers_part_is_left_alone(run: Path) -> None:
    with ShardWriter(run, TAP) as writer:
        writer.add(a_piece(0))
        writer.sync()
        assert listed(run)[TAP.shard(0) + ".part"].open


def spoil_journal(run: Path, how: str) -> None:
    """Make the journal of ``TAP`` something that cannot be read."""
    path = run / TAP.journal
    if how == "garbage":
        with open(path, "ab") as file:
            file.write(b"garbage\n")
        return
    path.unlink()
    if how == "directory":
        path.mkdir()
    else:
        path.symlink_to({"loop": path.name, "link": "foreign"}[how])


@pytest.mark.parametrize("how", ["garbage", "directory", "loop", "link"])
def test_a_broken_journal_is_one_finding_and_in_nobodys_way(run: Path, how: str) -> None:
    part = leave_part(run)
    before = part.read_bytes()
    (run / "foreign").write_bytes(b"whole\ntorn")
    tokens = TokenShards(run, DRIVER)
    tokens.add(Rid("r1", "a", 1), [1, 2], [0, 1])
    tokens.sync()
    os.rename(run / DRIVER.journal, run / "kept")  # so that this writer looks dead, with its part open
    shutil.copy(run / "kept", run / DRIVER.journal)
    spoil_journal(run, how)
    result = shards(ShardsArgs("r1", str(run.parent)), context(run))
    (fault,) = result.faults
    assert fault.startswith(f"{TAP.journal}: "), fault
    names = {info.name for info in result.shards}
    assert {part.name, DRIVER.shard(0)} <= names, "the other writer's shard was closed"
    assert part.read_bytes() == before
    assert (run / "foreign").read_bytes() == b"whole\ntorn", "nothing behind a link is cut"


def test_a_part_that_ends_inside_its_header_is_one_finding(run: Path) -> None:
    part = leave_part(run)
    os.truncate(part, 100)
    closing = close_dead(run, needed_of([]))
    assert closing.findings == [f"{part.name}: ends inside its header"]
    assert part.exists()


# --------------------------------------------------------------------------- listing, fetching
def test_files_are_listed_by_kind_and_foreign_ones_are_not(run: Path) -> None:
    with ShardWriter(run, TAP) as writer:
        writer.add(a_piece(0))
    TokenShards(run, DRIVER).close()
    (run / "notes.txt").write_text("mine")
    (run / "norm-main-1f0c77aa.safetensors").symlink_to("/etc/hostname")
    assert {name: info.kind for name, info in listed(run).items()} == {
        DRIVER.journal: "journal",
        TAP.journal: "journal",
        TAP.shard(0): "shard",
    }


def test_a_run_that_wrote_nothing_here_lists_nothing(run: Path) -> None:
    assert listed(run) == {}


def fetched(run: Path, name: str, offset: int = 0, run_name: str = "r1") -> tuple[dict[str, Any], bytes]:
    ctx = context(run)
    result = fetch(FetchArgs(run_name, str(run.parent), name, offset), ctx)
    assert isinstance(ctx.stdout, io.BytesIO)
    line, _, data = ctx.stdout.getvalue().partition(b"\n")
    assert result.sent == len(data)
    return json.loads(line), data


def test_fetch_sends_the_rest_of_a_file(run: Path) -> None:
    with ShardWriter(run, TAP) as writer:
        writer.add(a_piece(0))
    whole = (run / TAP.shard(0)).read_bytes()
    event, data = fetched(run, TAP.shard(0), 100)
    assert event["event"] == "blob"
    assert event["size"] == len(whole) - 100
    assert data == whole[100:]
    assert fetched(run, TAP.shard(0), len(whole))[1] == b""


@pytest.mark.parametrize(
    "name",
    [
        "../r2/journal-main-1f0c77aa-r0.jsonl",
        "/etc/passwd",
        "notes.txt",
        "",
        "norm-main-1f0c77aa.safetensors",  # a symbolic link
        "norm-main-00000001.safetensors",  # a named pipe
        "norm-main-00000002.safetensors",  # a directory
        "norm-main-00000003.safetensors",  # not there
    ],
)
def test_fetch_gives_nothing_but_plain_files_of_ours(run: Path, name: str) -> None:
    run.mkdir(parents=True)
    (run / "notes.txt").write_text("secret")
    (run / "norm-main-1f0c77aa.safetensors").symlink_to("/etc/passwd")
    os.mkfifo(run / "norm-main-00000001.safetensors")
    (run / "norm-main-00000002.safetensors").mkdir()
    with pytest.raises(AgentFailure):
        fetched(run, name)


@pytest.mark.parametrize("name", ["..", "a/b", "", "/etc"])
def test_fetch_and_shards_want_the_name_of_a_run(run: Path, name: str) -> None:
    with pytest.raises(AgentFailure):
        fetched(run, TAP.journal, run_name=name)
    with pytest.raises(AgentFailure):
        shards(ShardsArgs(name, str(run.parent)), context(run))


@pytest.mark.parametrize("offset", [-1, 10_000_000])
def test_fetch_beyond_the_file_is_a_conflict(run: Path, offset: int) -> None:
    with ShardWriter(run, TAP) as writer:
        writer.add(a_piece(0))
    with pytest.raises(AgentFailure) as failure:
        fetched(run, TAP.shard(0), offset)
    assert failure.value.error.code == "conflict"


# --------------------------------------------------------------------------- verifying
def written_sample(run: Path) -> ManifestLine:
    """A sample of two chunks with its token shard, and another one's piece between them."""
    ids, mask = [9] * 7, [0, 0, 0, 1, 1, 1, 1]
    with ShardWriter(run, TAP) as writer:
        records = writer.add(a_piece(1, rows=4), a_piece(2), a_piece(1, rows=3, start=4))
    with_tokens = TokenShards(run, DRIVER)
    ref: TokenRef = with_tokens.add(Rid("r1", "s1", 1), ids, mask)
    with_tokens.close()
    pieces = [
        ManifestPiece(r.shard, r.name, r.start, r.rows, r.offset, r.bytes, r.crc32, [0, 1, 2])
        for r in (records[0], records[2])
    ]
    return ManifestLine(
        id="s1", run="r1", server="main", host="h", attempt=1, tokens=7, supervised=4, ids_sha256=ids_sha256(ids),
        pieces=pieces, token_shard=ref, dtype="F32", hidden=4, layers={"input": [1, 3], "output": [0, 2]},
        final="pre_norm", norm="n", engine="e", patch_sha256="p", model_sha256="m", template_sha256="t",
        settings_sha256="s", t=1.0,
    )  # fmt: skip


def test_a_whole_sample_has_no_fault(run: Path) -> None:
    line = written_sample(run)
    assert verify_directory(run).faults == []
    assert verify_samples(run, [line]) == []


def flip(path: Path, offset: int, bits: int = 1) -> None:
    data = bytearray(path.read_bytes())
    data[offset] ^= bits
    path.write_bytes(bytes(data))


def replace(path: Path, old: bytes, new: bytes) -> None:
    path.write_bytes(path.read_bytes().replace(old, new))


@pytest.mark.parametrize(
    ("damage", "what"),
    [
        (lambda run: flip(run / TAP.shard(0), -1), "s1/1:4 has CRC-32"),
        (lambda run: flip(run / TAP.shard(0), 8 + (256 << 10)), "s1/1:0 has CRC-32"),
        (lambda run: flip(run / DRIVER.shard(0), -1), "s1/1:mask has CRC-32"),
        (lambda run: flip(run / TAP.shard(0), 5000, ord(" ") ^ ord("\t")), "has SHA-256"),
        (lambda run: replace(run / TAP.shard(0), b"s1/1:4", b"s1/1:5"), "s1/1:4 is in the journal, not in the header"),
        (lambda run: flip(run / TAP.shard(0), 8), "header cannot be parsed"),
        (lambda run: os.truncate(run / TAP.shard(0), 300_00), "has 30000 bytes"),
        (lambda run: (run / TAP.shard(0)).unlink(), "is missing"),
        (lambda run: (run / TAP.journal).unlink(), "no journal says"),
    ],
)
def test_damage_in_a_file_is_found(run: Path, damage: Any, what: str) -> None:
    written_sample(run)
    damage(run)
    faults = verify_directory(run).faults
    assert any(what in str(fault) for fault in faults), faults


@pytest.mark.parametrize(
    ("change", "what"),
    [
        ({"tokens": 8}, "rows 7 to 8 of 8 are missing"),
        ({"hidden": 5}, "not as the manifest says"),
        ({"dtype": "BF16"}, "not as the manifest says"),
        ({"layers": {"input": [1], "output": [0]}}, "slots [0, 1, 2] of 2"),
        ({"layers": {"input": [1, 3, 4], "output": [0, 2, 3]}}, "slots [3] of 4 are missing"),
        ({"ids_sha256": "00"}, "not the sample's ids"),
        ({"supervised": 3}, "supervises 4"),
        ({"pieces": []}, "rows 0 to 7 of 7 are missing"),
        ({"token_shard": TokenRef("tokens-main-77aa1f0c-driver-9.safetensors", "a", "b", 1, 2)}, "a is not there"),
        ({"token_shard": TokenRef(DRIVER.shard(0), "s1/1:ids", "s1/1:mask", 1, 2)}, "has CRC-32"),
        ({"token_shard": TokenRef(DRIVER.shard(0), "s1/1:mask", "s1/1:ids", 1, 2)}, "is U8"),
    ],
)
def test_a_manifest_line_that_promises_something_else_is_found(run: Path, change: dict[str, Any], what: str) -> None:
    line = dataclasses.replace(written_sample(run), **change)
    assert any(what in str(fault) for fault in verify_samples(run, [line]))


def test_gaps_and_foreign_pieces_of_a_sample_are_found(run: Path) -> None:
    line = written_sample(run)
    gap = dataclasses.replace(line, pieces=line.pieces[1:])
    fewer_slots = [dataclasses.replace(piece, slots=[0, 1]) for piece in line.pieces]
    gone = dataclasses.replace(line, pieces=[dataclasses.replace(line.pieces[0], name="x"), line.pieces[1]])
    assert any("rows 0 to 4 of 7 are missing" in str(fault) for fault in verify_samples(run, [gap]))
    fewer = dataclasses.replace(line, layers={"input": [1], "output": [0]}, pieces=fewer_slots)
    assert any("not as the manifest says" in str(fault) for fault in verify_samples(run, [fewer]))
    assert any("x is not there" in str(fault) for fault in verify_samples(run, [gone]))
