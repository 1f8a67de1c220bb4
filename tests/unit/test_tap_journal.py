"""The tap's journal on disks that fail: a line that was readable stays, no name is used twice, a hang is told."""

from __future__ import annotations

import dataclasses
import errno
import json
import os
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from test_tap import WRITER, a_piece, config, directory, journal, start, taprecords, wait_for

from fleetdump.agent.formats import PieceRecord, ShardRecord
from fleetdump.agent.journals import Journals
from fleetdump.dataset.shards import verify_directory

__all__ = ["config", "start"]  # the fixtures

tapjournal = sys.modules["fleetdump_tapjournal"]

RECORDS = [{"kind": "piece", "number": number, "text": "x" * number} for number in range(4)]


class FailingJournal:
    """A journal's file: writes ``room`` bytes, the last of them short, and then fails until ``room`` is raised."""

    def __init__(self, file: Any, room: int, cuts: bool):
        self.file, self.room, self.cuts = file, room, cuts

    def write(self, data: Any) -> int:
        if self.room == 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        count = self.file.write(data[: self.room])
        self.room -= count
        return count

    def truncate(self, size: int) -> int:
        if not self.cuts:
            raise OSError(errno.EIO, "Input/output error")
        return self.file.truncate(size)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.file, name)


def whole_lines(path: Path) -> list[Any]:
    text = path.read_text()
    return [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]


@pytest.mark.parametrize("cuts", [True, False])
def test_what_is_written_of_a_batch_of_lines_stays_and_the_torn_rest_goes(
    config: Any, tmp_path: Path, cuts: bool
) -> None:
    """Cut at each byte; ``cuts``: whether the file can be cut while the disk is full."""
    size = sum(len(json.dumps(record, separators=(",", ":"))) + 1 for record in RECORDS)
    for room in range(size):
        files = tapjournal.RunFiles(config, f"r{room}", str(WRITER), tmp_path / f"r{room}", tapjournal.Numbers())
        path = tmp_path / f"r{room}" / WRITER.journal
        assert files.append(RECORDS[:1]) == tapjournal.Appended(1)
        file = files._journal = FailingJournal(files._journal, room, cuts)
        appended = files.append(RECORDS)
        assert (appended.error.errno, appended.count < len(RECORDS)) == (errno.ENOSPC, True)
        expected = [RECORDS[0], *RECORDS[: appended.count]]
        assert whole_lines(path) == expected
        assert files.append(RECORDS).count == 0
        assert whole_lines(path) == expected, "a torn line became whole"
        file.room, file.cuts = 1 << 20, True
        assert files.append(RECORDS) == tapjournal.Appended(len(RECORDS))
        assert whole_lines(path) == [*expected, *RECORDS]
        assert path.read_text().endswith("\n")
        files.close()


def test_a_torn_line_of_a_long_journal_is_cut_off_when_it_is_opened(config: Any, tmp_path: Path) -> None:
    for whole, torn in [(b"", b""), (b"", b"x" * 200_000), (b"{}\n" * 50_000, b""), (b"{}\n" * 50_000, b"y" * 200_000)]:
        folder = tmp_path / f"r{len(whole)}-{len(torn)}"
        folder.mkdir()
        (folder / WRITER.journal).write_bytes(whole + torn)
        tapjournal.RunFiles(config, "r", str(WRITER), folder, tapjournal.Numbers()).close()
        assert (folder / WRITER.journal).read_bytes() == whole


def fsync_of(monkeypatch: pytest.MonkeyPatch, run: str, act: Callable[[], None]) -> None:
    """Have ``act`` called in place of each fsync of that run's journal; what it raises is what the fsync raises."""
    real = os.fsync

    def fsync(file: int) -> None:
        name = os.readlink(f"/proc/self/fd/{file}")
        if name.endswith(".jsonl") and f"/{run}/" in name:
            act()
        real(file)

    monkeypatch.setattr(os, "fsync", fsync)


def test_a_line_that_a_driver_may_have_read_is_never_taken_back(
    config: Any, start: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Network file systems and quotas tell an fsync that there was no room."""
    seen, gate, failing = threading.Event(), threading.Event(), [True]

    def act() -> None:
        if failing:
            seen.set()
            assert gate.wait(60)
            failing.clear()
            raise OSError(errno.ENOSPC, "No space left on device")

    writer = start(idle_close_seconds=0.2)
    fsync_of(monkeypatch, "r1", act)
    reader = Journals(directory(config), "main", lambda rid: True, 0.0)
    writer.put([a_piece(1), a_piece(2)])
    assert seen.wait(60)
    read = reader.poll()
    assert len(read) == 2
    gate.set()
    assert writer.drain(60)
    for number in (3, 4):
        writer.put([a_piece(number)])
        assert writer.drain(60)
    assert len(reader.poll()) >= 2
    assert [record.rid for record in journal(config) if isinstance(record, PieceRecord)][:2] == read
    status = writer._counts
    assert (status.errors, status.last_error) == (1, "[Errno 28] No space left on device")
    writer.stop(60)
    assert verify_directory(directory(config)).faults == []


def test_a_name_is_not_used_again_when_finished_shards_were_moved_away(config: Any, start: Any, tmp_path: Path) -> None:
    writer, kept = start(idle_close_seconds=0.1), tmp_path / "kept"
    kept.mkdir()
    for number in range(3):
        writer.put([a_piece(number)])
        names = wait_for(
            lambda: [path.name for path in directory(config).glob("*.safetensors") if "norm" not in path.name]
        )
        wait_for(lambda number=number: sum(isinstance(r, ShardRecord) for r in journal(config)) == number + 1)
        wait_for(lambda: not writer._runs)  # the run was let go, and is opened anew
        for name in names:
            assert not (kept / name).exists()
            (directory(config) / name).rename(kept / name)
    assert sorted(path.name for path in kept.iterdir()) == [WRITER.shard(number) for number in range(3)]


def test_a_part_that_somebody_removed_is_no_shard(config: Any, start: Any) -> None:
    writer = start(idle_close_seconds=0.3)
    writer.put([a_piece(1)])
    for part in wait_for(lambda: list(directory(config).glob("*.part"))):
        part.unlink()
    wait_for(lambda: writer._counts.errors == 1)
    wait_for(lambda: not writer._runs)
    assert not [record for record in journal(config) if isinstance(record, ShardRecord)]


def test_a_disk_that_hangs_silences_neither_the_status_nor_other_runs(
    config: Any, start: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hung, gate = threading.Event(), threading.Event()

    def act() -> None:
        hung.set()
        assert gate.wait(120)

    fsync_of(monkeypatch, "r1", act)
    writer = start(status_dir=str(tmp_path), threads=2, idle_close_seconds=0.2)
    try:
        writer.put([a_piece(1)])
        assert hung.wait(60)
        writer.put([a_piece(2, run="r2")])
        wait_for(lambda: journal(config, "r2"), 60)
        before = status_of(tmp_path)["t"]
        wait_for(lambda: status_of(tmp_path)["t"] > before, 60)
        assert status_of(tmp_path)["rows"] == 4
    finally:
        gate.set()
    assert writer.drain(60)


def status_of(folder: Path) -> Any:
    (path,) = wait_for(lambda: list(folder.glob("tap-r0-*.json")), 60)
    return json.loads(path.read_text())


@pytest.mark.parametrize("content", ["[]", "null", "1", '{"launch_id": []}', "{}", "no json"])
def test_what_lies_where_the_status_goes_does_not_keep_it_from_there(start: Any, tmp_path: Path, content: str) -> None:
    (tmp_path / "tap-r0-1.json").write_text(content)
    start(status_dir=str(tmp_path))
    wait_for(lambda: (tmp_path / f"tap-r0-{os.getpid()}.json").exists(), 60)


SETTINGS = {"server": "main", "launch_id": "1f0c77aa", "layers": [1], "dir": "/nowhere", "ranks": 1}
SIZES = {"shard_bytes": 1 << 20, "header_bytes": 16384, "ring_bytes": 1 << 20, "idle_close_seconds": 2.0}


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *[(name, value) for name in ("shard_bytes", "ring_bytes", "device_bytes", "threads") for value in (0, -1)],
        ("header_bytes", 100),
        ("idle_close_seconds", 0),
        ("max_wait_seconds", -1),
        ("fsync", "sometimes"),
    ],
)
def test_a_setting_that_cannot_work_is_refused_by_name(tmp_path: Path, name: str, value: Any) -> None:
    path = tmp_path / "tap.json"
    path.write_text(json.dumps({**SETTINGS, **SIZES}))
    assert dataclasses.asdict(taprecords.Config.load(str(path)))["status_dir"] == str(tmp_path)
    path.write_text(json.dumps({**SETTINGS, **SIZES, name: value}))
    with pytest.raises(ValueError, match=f"{name} '?{value}"):
        taprecords.Config.load(str(path))
