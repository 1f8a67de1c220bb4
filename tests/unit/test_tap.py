"""The tap's files, without SGLang: what its writer thread leaves is what the agent and the controller read."""

from __future__ import annotations

import dataclasses
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest

from fleetdump.agent.formats import FileName, PieceRecord, ShardRecord, SkipRecord, Writer
from fleetdump.agent.jsonl import open_journal, read_journal
from fleetdump.agent.shards import close_dead, needed_of
from fleetdump.agent.tensorfile import ids_bytes, ids_sha256, read_header
from fleetdump.dataset.shards import ShardReader, verify_directory

PATCH = Path(__file__).resolve().parents[2] / "patches" / "hidden-states"
sys.path.insert(0, str(PATCH))

import fleetdump_tapfiles as tapfiles  # type: ignore[import-not-found]  # noqa: E402
import fleetdump_taprecords as taprecords  # type: ignore[import-not-found]  # noqa: E402
import fleetdump_taprows as taprows  # type: ignore[import-not-found]  # noqa: E402

WRITER = Writer("main", "1f0c77aa", "r0")
ROWS = 4


@pytest.fixture
def config(tmp_path: Path) -> Any:
    return taprecords.Config("main", "1f0c77aa", [1, 3], str(tmp_path / "cap"), 1 << 30, 16384, 60.0, 1 << 20, 1)


@pytest.fixture
def start(config: Any) -> Iterator[Callable[..., Any]]:
    """Starts tap writers and stops them in the end."""
    started = []

    def start(folder: str = "", **changes: Any) -> Any:
        norm = None if folder else taprecords.Norm(b"\0\0\x80\x3f" * 8, "F32", 1e-6)
        started.append(tapfiles.TapWriter(dataclasses.replace(config, **changes), 0, norm, folder))
        return started[-1]

    yield start
    for writer in started:
        writer.stop()


def a_piece(number: int, start: int = 0, run: str = "r1", rows: int = ROWS) -> Any:
    data = random.Random(number).randbytes(rows * 3 * 8 * 4)
    ids = ids_bytes([number] * rows)
    return taprecords.Piece(
        f"fleetdump/{run}/s{number}/1", start, "F32", [rows, 3, 8], [0, 1, 2], ids, memoryview(data)
    )


def directory(config: Any, run: str = "r1") -> Path:
    return Path(config.dir) / run


def journal(config: Any, run: str = "r1") -> list[Any]:
    return read_journal(directory(config, run) / WRITER.journal)[0]


def wait_for(condition: Callable[[], Any], seconds: float = 10.0) -> Any:
    end = time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < end, "it did not happen in time"
        time.sleep(0.01)
    return value


# --------------------------------------------------------------------------- the files
def test_pieces_become_a_shard_that_every_reader_takes(config: Any, start: Any) -> None:
    writer = start()
    writer.put([a_piece(1), a_piece(2)])
    assert writer.drain(60)
    writer.put([a_piece(1, start=ROWS)])
    assert writer.drain(60)  # a stop beside it may close the shard first, and write the piece into a second one
    writer.stop()
    records = journal(config)
    assert [record.kind for record in records] == ["piece", "piece", "piece", "shard"]
    assert records[0].ids_sha256 == ids_sha256([1] * ROWS)
    assert verify_directory(directory(config)).faults == []
    with ShardReader(directory(config) / WRITER.shard(0)) as reader:
        assert list(reader.tensors) == [f"fleetdump/r1/s{n}/1:{at}" for n, at in ((1, 0), (2, 0), (1, ROWS))]
        assert reader.read("fleetdump/r1/s2/1:0") == a_piece(2).data
        assert json.loads(reader.header.metadata["layers"]) == [1, 3]
        assert reader.header.metadata["final"] == "pre_norm"
        assert json.loads(reader.header.metadata["slots"]) == [0, 1, 2]
    assert [record.slots for record in records if isinstance(record, PieceRecord)] == [[0, 1, 2]] * 3
    assert all(FileName.parse(path.name) for path in directory(config).iterdir())


def test_the_norm_is_saved_once_a_run(config: Any, start: Any) -> None:
    start().put([a_piece(1)])
    path = directory(config) / "norm-main-1f0c77aa.safetensors"
    wait_for(path.exists)
    with open(path, "rb") as file:
        header = read_header(file, path.name)
    assert [(t.name, t.dtype, t.shape) for t in header.tensors] == [("weight", "F32", [8])]
    assert header.metadata["kind"] == "rms"
    assert float(header.metadata["eps"]) == 1e-6


def test_what_ranks_write_for_a_check_lies_apart_and_is_complete(config: Any, start: Any) -> None:
    writer = start(folder="ranks")
    writer.put([a_piece(1)])
    writer.stop()
    assert [path.name for path in directory(config).iterdir()] == ["ranks"]
    assert oct(directory(config).stat().st_mode & 0o777) == "0o700"
    assert verify_directory(directory(config) / "ranks").pieces == 1
    assert verify_directory(directory(config)).pieces == 0


def test_each_run_has_a_directory_of_its_own(config: Any, start: Any) -> None:
    writer = start()
    writer.put([a_piece(1, run="r1"), a_piece(2, run="r2")])
    writer.stop()
    assert verify_directory(directory(config, "r1")).pieces == 1
    assert verify_directory(directory(config, "r2")).pieces == 1


def test_a_shard_closes_when_full_of_bytes_or_of_names(config: Any, start: Any) -> None:
    piece_bytes = a_piece(1).data.nbytes
    writer = start(shard_bytes=8 + 16384 + 3 * piece_bytes)
    writer.put([a_piece(n) for n in range(7)])
    writer.stop()
    writer = start(header_bytes=8192, launch_id="00000002")
    writer.put([a_piece(n) for n in range(60)])
    writer.stop()
    closed = [r.shard for p in directory(config).glob("journal-*") for r in read_journal(p)[0] if r.kind == "shard"]
    assert sum("1f0c77aa" in name for name in closed) == 3
    assert sum("00000002" in name for name in closed) > 2
    assert verify_directory(directory(config)).faults == []


def test_the_longest_name_fits_into_the_smallest_header(config: Any, start: Any) -> None:
    piece, writer = a_piece(1), start(header_bytes=taprecords.LEAST_HEADER)
    sample = quote("\N{PILE OF POO}" * 200, safe="")
    piece.rid = f"fleetdump/{'r' * 64}/{sample}/999999999"
    assert taprows.RID.match(piece.rid)
    piece.start = 10**9
    writer.put([piece])
    writer.stop()
    run = directory(config, "r" * 64)
    assert verify_directory(run).faults == []
    assert verify_directory(run).shards == 1
    assert not list(run.glob("*.part"))


def test_a_request_that_runs_again_does_not_break_the_header(config: Any, start: Any) -> None:
    writer = start()
    writer.put([a_piece(1), a_piece(1)])
    writer.stop()
    result = verify_directory(directory(config))
    assert (result.shards, result.pieces, result.faults) == (2, 2, [])


def test_an_idle_shard_closes_and_lets_its_lock_go(config: Any, start: Any) -> None:
    writer = start(idle_close_seconds=0.2)
    writer.put([a_piece(1)])
    wait_for(lambda: any(isinstance(r, ShardRecord) for r in journal(config)))
    lock = wait_for(lambda: open_journal(directory(config) / WRITER.journal))
    lock.close()
    writer.put([a_piece(2)])
    wait_for((directory(config) / WRITER.shard(1)).exists)
    writer.stop()
    assert verify_directory(directory(config)).faults == []


def test_replicas_with_the_same_rank_do_not_meet(config: Any, start: Any) -> None:
    first, second = start(), start()
    first.put([a_piece(1)])
    wait_for(lambda: (directory(config) / WRITER.journal).exists() and journal(config))
    second.put([a_piece(2)])
    assert second.drain(60)
    first.stop()
    second.stop()
    assert (directory(config) / "journal-main-1f0c77aa-r0.1.jsonl").exists()
    assert verify_directory(directory(config)).pieces == 2
    assert verify_directory(directory(config)).faults == []


# --------------------------------------------------------------------------- faults
def test_skips_are_journalled_and_counted(config: Any, start: Any) -> None:
    writer = start()
    writer.skip([taprecords.Skip("fleetdump/r1/s/1", "prefix_missing", "rows begin at 64")])
    writer.stop()
    assert [(r.rid, r.reason, r.detail) for r in journal(config) if isinstance(r, SkipRecord)] == [
        ("fleetdump/r1/s/1", "prefix_missing", "rows begin at 64")
    ]


def test_a_removed_run_directory_is_made_anew(config: Any, start: Any) -> None:
    writer = start()
    writer.put([a_piece(1)])
    wait_for(lambda: (directory(config) / WRITER.journal).exists() and journal(config))
    shutil.rmtree(directory(config))
    writer.put([a_piece(2)])
    writer.stop()
    result = verify_directory(directory(config))
    assert (result.pieces, result.faults) == (1, [])


def test_a_capture_directory_that_cannot_be_made_does_not_end_the_writer(config: Any, start: Any) -> None:
    Path(config.dir).write_text("in the way")
    writer = start()
    writer.put([a_piece(1)])
    assert writer.drain(60)
    Path(config.dir).unlink()
    writer.put([a_piece(2)])
    writer.stop()
    assert verify_directory(directory(config)).pieces == 1


FULL_DISK = """
import json, sys, time
sys.path[:0] = sys.argv[1:3]
from pathlib import Path
import fleetdump_tapfiles as tapfiles, fleetdump_taprecords as taprecords
from test_tap import WRITER, a_piece
from fleetdump.agent.jsonl import read_journal
from fleetdump.dataset.shards import verify_directory
config = taprecords.Config("main", "1f0c77aa", [1, 3], sys.argv[3], 1 << 30, 16384, 60.0, 1 << 24, 1)
writer = tapfiles.TapWriter(config, 0, None)
run = Path(sys.argv[3]) / "r1"
def settle():
    assert writer.drain(60)
writer.put([a_piece(1)]); settle()
filler = Path(sys.argv[3]) / "filler"
try:
    with open(filler, "wb", buffering=0) as file:
        while True: file.write(bytes(4096))
except OSError: pass
for n in range(2, 5):
    writer.put([a_piece(n, rows=200)]); settle()
filler.unlink()
writer.put([a_piece(5, rows=200)]); settle()
writer.stop()
records = read_journal(run / WRITER.journal)[0]
print(json.dumps({"kinds": [(r.kind, getattr(r, "reason", "")) for r in records],
                  "names": [r.rid.split("/")[2] for r in records if r.kind == "piece"],
                  "faults": [str(f) for f in verify_directory(run).faults]}))
"""


@pytest.mark.skipif(os.geteuid() != 0 or not shutil.which("unshare"), reason="mounts a small tmpfs: needs root")
def test_a_full_disk_skips_and_later_requests_are_written_again(tmp_path: Path) -> None:
    script = 'mount -t tmpfs -o size=1m none "$0" && exec "$@"'
    arguments = [str(PATCH), str(Path(__file__).parent), str(tmp_path)]
    command = ["unshare", "-m", "sh", "-c", script, str(tmp_path), sys.executable, "-c", FULL_DISK, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["names"] == ["s1", "s5"]
    assert ["skip", "disk_full"] in report["kinds"]
    assert report["faults"] == []


ENDLESS = """
import sys
sys.path[:0] = sys.argv[1:3]
import fleetdump_tapfiles as tapfiles, fleetdump_taprecords as taprecords
from test_tap import a_piece
config = taprecords.Config("main", "1f0c77aa", [1, 3], sys.argv[3], 100_000, 16384, 60.0, 1 << 20, 1)
writer = tapfiles.TapWriter(config, 0, None)
number = 0
while True:
    writer.put([a_piece(number, rows=50)]); number += 1
"""


@pytest.mark.parametrize("after", [0.02, 0.1, 0.2])
def test_after_kill_9_the_agent_closes_what_the_tap_left(config: Any, after: float) -> None:
    arguments = [str(PATCH), str(Path(__file__).parent), config.dir]
    child = subprocess.Popen([sys.executable, "-c", ENDLESS, *arguments])
    wait_for(lambda: (directory(config) / WRITER.journal).exists() and journal(config), 30)
    time.sleep(after)
    child.send_signal(signal.SIGKILL)
    child.wait()
    close_dead(directory(config), needed_of([]))
    result = verify_directory(directory(config))
    assert result.faults == []
    assert result.pieces == sum(isinstance(record, PieceRecord) for record in journal(config))
    assert not list(directory(config).glob("*.part"))
