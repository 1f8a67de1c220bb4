"""The tap's writer threads, without SGLang: order, faults of the disk, what is reported, what is given back."""

from __future__ import annotations

import dataclasses
import errno
import json
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from test_tap import ROWS, WRITER, a_piece, config, directory, journal, tapfiles, taprecords, wait_for

from fleetdump.agent.formats import PieceRecord, ShardRecord, SkipRecord
from fleetdump.agent.shards import close_dead, needed_of
from fleetdump.dataset.shards import verify_directory

__all__ = ["config"]  # the fixture

taprun, tapshard = sys.modules["fleetdump_taprun"], sys.modules["fleetdump_tapshard"]


@pytest.fixture
def start(config: Any) -> Iterator[Callable[..., Any]]:
    """Starts tap writers and stops them in the end."""
    started = []

    def start(gauge: Any = taprecords.Gauge, **changes: Any) -> Any:
        changed = dataclasses.replace(config, **{"threads": 4, **changes})
        started.append(tapfiles.TapWriter(changed, 0, None, gauge=gauge))
        return started[-1]

    yield start
    for writer in started:
        writer.stop()


class HeldLoad(taprecords.PlainLoad):  # type: ignore[misc]
    """A load whose rows come when the test says so."""

    def __init__(self, *pieces: Any):
        super().__init__(list(pieces))
        self.come = threading.Event()
        self.released = threading.Event()

    def pieces(self) -> Any:
        assert self.come.wait(60)
        return self.loaded

    def release(self) -> None:
        self.released.set()


def shipped(*loads: Any) -> Any:
    return taprecords.PlainShipment(loads)


def starts(config: Any) -> list[int]:
    return [record.start for record in journal(config) if isinstance(record, PieceRecord)]


def skips(config: Any) -> list[tuple[str, str]]:
    return [(r.rid.split("/")[2], r.reason) for r in journal(config) if isinstance(r, SkipRecord)]


# --------------------------------------------------------------------------- order and threads
def test_lines_come_in_the_order_of_the_forwards_whoever_is_done_first(config: Any, start: Any) -> None:
    """A piece that begins at 0 voids what its request had before: it must not come after the others."""
    writer = start()
    first = HeldLoad(a_piece(1))
    writer.take(shipped(first))
    for at in range(1, 20):
        writer.put([a_piece(1, start=at * ROWS)])
        time.sleep(0.01)
    assert not (directory(config) / WRITER.journal).exists() or starts(config) == []
    first.come.set()
    assert writer.drain(60)
    assert starts(config) == [at * ROWS for at in range(20)]
    writer.stop()
    assert verify_directory(directory(config)).faults == []


def test_threads_write_into_shards_of_their_own_and_few_are_open_without_need(config: Any, start: Any) -> None:
    writer = start()
    held = [HeldLoad(a_piece(n)) for n in range(3)]
    for number, load in enumerate(held):
        writer.take(shipped(load))
        wait_for(lambda started=number + 1: writer._writers == started, 60)
    for load in held:
        load.come.set()
    assert writer.drain(60)
    for number in range(10, 40):
        writer.put([a_piece(number)])
        assert writer.drain(60)
    writer.stop()
    shards = {record.shard for record in journal(config) if isinstance(record, ShardRecord)}
    assert 1 <= len(shards) <= 3
    assert verify_directory(directory(config)).faults == []


def test_a_stuck_load_keeps_neither_the_forward_nor_other_runs(config: Any, start: Any) -> None:
    writer = start()
    stuck = HeldLoad(a_piece(1))
    writer.take(shipped(stuck))
    wait_for(lambda: writer._writers, 60)
    writer.put([a_piece(2, run="r2")])
    wait_for(lambda: (directory(config, "r2") / WRITER.journal).exists() and len(journal(config, "r2")) == 1, 60)
    assert not writer.drain(0.1)
    stuck.come.set()
    assert writer.drain(60)


def test_a_load_that_cannot_be_read_is_a_skip_and_gives_its_memory_back(config: Any, start: Any) -> None:
    class Broken(HeldLoad):
        def pieces(self) -> Any:
            raise RuntimeError("CUDA error: an illegal memory access")

    writer, load = start(), Broken(a_piece(1))
    writer.take(shipped(load))
    writer.put([a_piece(2)])
    assert writer.drain(60)
    assert load.released.is_set()
    assert skips(config) == [("s1", "io_error")]
    assert starts(config) == [0]


@pytest.mark.parametrize("share", [1 << 30, 1])
def test_threads_are_woken_for_what_others_will_not_do_soon(
    config: Any, start: Any, monkeypatch: pytest.MonkeyPatch, share: int
) -> None:
    """Each thread that runs takes the interpreter from the model's."""
    monkeypatch.setattr(tapfiles, "SHARE_BYTES", share)
    monkeypatch.setattr(tapfiles, "REPORT_SECONDS", 60.0)  # what waits for a second is nobody's little work
    at_once, peak, real, lock = [0], [0], os.pwritev, threading.Lock()

    def pwritev(*args: Any) -> int:
        with lock:
            at_once[0] += 1
            peak[0] = max(peak[0], at_once[0])
        time.sleep(0.02)
        with lock:
            at_once[0] -= 1
        return real(*args)

    monkeypatch.setattr(os, "pwritev", pwritev)
    writer = start()
    for number in range(40):
        writer.put([a_piece(number)])
        time.sleep(0.005)
    assert writer.drain(60)
    assert (peak[0] > 1) is (share == 1)
    assert starts(config) == [0] * 40


# --------------------------------------------------------------------------- faults of the disk
@pytest.mark.parametrize("call", ["pwritev", "fsync", "listdir"])
@pytest.mark.parametrize("error", [errno.ENOSPC, errno.EIO, errno.EROFS, errno.EACCES])
def test_what_a_fault_of_the_disk_hits_is_skipped_and_writing_goes_on_after_it(
    config: Any, start: Any, monkeypatch: pytest.MonkeyPatch, call: str, error: int
) -> None:
    monkeypatch.setattr(taprun, "RETRY_SECONDS", 0.1)
    one_piece_a_shard = {"shard_bytes": 8 + config.header_bytes + 1}
    writer = start(status_dir=str(Path(config.dir).parent), **one_piece_a_shard)
    broken, real = threading.Event(), getattr(os, call)

    def fail(*args: Any) -> Any:
        if broken.is_set():
            raise OSError(error, os.strerror(error))
        return real(*args)

    monkeypatch.setattr(os, call, fail)
    writer.put([a_piece(1)])
    assert writer.drain(60)
    broken.set()
    for number in range(2, 6):
        writer.put([a_piece(number), a_piece(number, start=ROWS)])
        assert writer.drain(60)
    status = wait_for(lambda: next((s for s in [status_of(config)] if s.get("errors")), None), 20)
    assert status["failing"]
    assert os.strerror(error) in status["last_error"]
    broken.clear()
    for number in range(6, 9):
        writer.put([a_piece(number)])
        assert writer.drain(60)
    writer.stop()
    close_dead(directory(config), needed_of([]))
    assert verify_directory(directory(config)).faults == []
    written = {record.rid.split("/")[2] for record in journal(config) if isinstance(record, PieceRecord)}
    assert written >= {"s1", "s6", "s7", "s8"}
    assert not written & {"s2", "s3", "s4", "s5"}
    assert {reason for _, reason in skips(config)} <= {"disk_full" if error == errno.ENOSPC else "io_error"}
    assert not status_of(config)["failing"]


def test_a_shard_that_cannot_be_closed_is_closed_later(
    config: Any, start: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(taprun, "RETRY_SECONDS", 0.1)
    failures, real = [1, 2, 3], os.rename

    def rename(*args: Any) -> None:
        if failures:
            raise OSError(errno.EIO, f"failure {failures.pop()}")
        real(*args)

    monkeypatch.setattr(os, "rename", rename)
    writer = start(idle_close_seconds=0.1)
    writer.put([a_piece(1)])
    wait_for(lambda: any(isinstance(r, ShardRecord) for r in journal(config)) if writer.drain(60) else False, 60)
    writer.stop()
    assert failures == []
    assert verify_directory(directory(config)).faults == []


def test_a_directory_removed_under_busy_threads_is_made_anew(config: Any, start: Any) -> None:
    writer = start()
    held = HeldLoad(a_piece(1))
    writer.put([a_piece(0)])
    assert writer.drain(60)
    writer.take(shipped(held))
    wait_for(lambda: writer._writers, 60)
    for path in directory(config).iterdir():
        path.unlink()
    directory(config).rmdir()
    writer.put([a_piece(2)])
    wait_for(directory(config).exists, 20)
    held.come.set()
    assert writer.drain(60)
    writer.put([a_piece(3)])
    assert writer.drain(60)
    writer.stop()
    assert verify_directory(directory(config)).faults == []
    written = [record.rid.split("/")[2] for record in journal(config) if isinstance(record, PieceRecord)]
    assert "s3" in written
    assert not list(directory(config).glob("*.part"))


@pytest.mark.parametrize("policy", ["group", "close", "never"])
def test_the_fsync_policy_says_what_is_made_durable(
    config: Any, start: Any, monkeypatch: pytest.MonkeyPatch, policy: str
) -> None:
    synced: list[str] = []
    real = os.fsync

    def fsync(file: int) -> None:
        synced.append(Path(os.readlink(f"/proc/self/fd/{file}")).suffix)
        real(file)

    monkeypatch.setattr(os, "fsync", fsync)
    writer = start(fsync=policy)
    writer.put([a_piece(1)])
    assert writer.drain(60)
    assert (".jsonl" in synced) == (".part" in synced) == (policy == "group")
    synced.clear()
    writer.stop()
    assert (".jsonl" in synced) == (".part" in synced) == (policy != "never")
    assert verify_directory(directory(config)).faults == []


@pytest.mark.parametrize(
    "wrong", [{"fsync": "sometimes"}, {"threads": 0}, {"header_bytes": 4095}, {"v": 2}, {"queue_bytes": 1}]
)
def test_a_configuration_with_unknown_values_is_refused(config: Any, tmp_path: Path, wrong: dict[str, Any]) -> None:
    path = tmp_path / "tap.json"
    path.write_text(json.dumps({**dataclasses.asdict(config), **wrong}))
    with pytest.raises((ValueError, TypeError)):
        taprecords.Config.load(str(path))


# --------------------------------------------------------------------------- the status file
def status_of(config: Any) -> dict[str, Any]:
    paths = list(Path(config.dir).parent.glob("tap-r0-*.json"))
    return json.loads(paths[0].read_text()) if paths else {}


def test_the_status_says_what_was_written_skipped_and_waits(config: Any, start: Any) -> None:
    earlier = Path(config.dir).parent / "tap-r0-1.json"
    earlier.write_text('{"launch_id": "00000000"}')
    gauge = taprecords.Gauge(1000, 400, 600, 0.0)
    writer = start(lambda: gauge, status_dir=str(Path(config.dir).parent))
    writer.put([a_piece(1), a_piece(2)])
    writer.skip([taprecords.Skip("fleetdump/r1/s/1", "prefix_missing", "rows begin at 64")])
    wait_for(lambda: not earlier.exists(), 60)
    wait_for(lambda: status_of(config).get("rows") == 2 * ROWS and status_of(config)["skips"], 60)
    status = status_of(config)
    assert (status["role"], status["pid"], status["launch_id"]) == ("r0", os.getpid(), "1f0c77aa")
    assert status["bytes"] == 2 * a_piece(1).data.nbytes
    assert status["skips"] == {"prefix_missing": 1}
    assert (status["ring_bytes"], status["queue_bytes"], status["slow_down"]) == (1000, 400, True)
    gauge = taprecords.Gauge(1000, 0, 100, 0.0)
    wait_for(lambda: not status_of(config)["slow_down"], 60)
    gauge = taprecords.Gauge(1000, 0, 0, 1.5)  # a forward has waited
    wait_for(lambda: status_of(config)["slow_down"], 60)
    assert status_of(config)["waited_seconds"] == 1.5


# --------------------------------------------------------------------------- a shard
def test_a_large_piece_is_written_in_blocks_and_small_ones_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tapshard, "BLOCK_BYTES", 1000)
    sizes, real = [], os.pwritev

    def pwritev(file: int, views: Any, at: int) -> int:
        sizes.append((len(views), sum(view.nbytes for view in views)))
        return real(file, [memoryview(b"".join(views))[:701]], at)  # a short write

    shard = tapshard.Shard(tmp_path / "shard-main-1f0c77aa-r0-0.safetensors", {}, 8192, 1 << 20)
    monkeypatch.setattr(os, "pwritev", pwritev)
    pieces = [a_piece(1, rows=50), *(a_piece(n, rows=1) for n in range(2, 30))]
    records = shard.write(pieces)
    shard.accept(records)
    blocks = list(sizes)
    record = shard.close(durable=True)
    assert record is not None
    assert all(record["crc32"] == tapshard.zlib.crc32(p.data) for record, p in zip(records, pieces, strict=True))
    data = (tmp_path / record["shard"]).read_bytes()
    assert tapshard.hashlib.sha256(data).hexdigest() == record["sha256"]
    assert data[8 + 8192 :] == b"".join(piece.data for piece in pieces)
    assert max(views for views, _ in blocks) > 5
    assert max(size for _, size in blocks) < 2 * 1000
