"""Joining a sample's pieces from the taps' journals: every way in which rows can be wrong is seen."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from fleetdump.agent.formats import PieceRecord, Rid, ShardRecord, SkipRecord, coverage
from fleetdump.agent.journals import Journals, PieceFault, join
from fleetdump.agent.jsonl import append_lines, encode_line, open_lines
from fleetdump.agent.tensorfile import ids_sha256

IDS = list(range(100, 110))
HIDDEN = 8
SLOTS = 3


def piece(start: int, rows: int, attempt: int = 1, writer: str = "main-0000000a-r0", **changes: object) -> PieceRecord:
    rid = f"fleetdump/r/a/{attempt}"
    record = PieceRecord(
        name=f"{rid}:{start}",
        rid=rid,
        start=start,
        rows=rows,
        ids_sha256=ids_sha256(IDS[start : start + rows]),
        shard=f"shard-{writer}-0.safetensors",
        dtype="BF16",
        shape=[rows, SLOTS, HIDDEN],
        offset=0,
        bytes=rows * SLOTS * HIDDEN * 2,
        crc32=1,
        t=0.0,
        slots=[*range(SLOTS)],
    )
    return replace(record, **changes)  # type: ignore[arg-type]


def stage(start: int, rows: int, slots: list[int], dtype: str = "BF16") -> PieceRecord:
    """What one pipeline stage, the one that holds ``slots``, wrote."""
    shape, writer = [rows, len(slots), HIDDEN], f"main-0000000a-r{slots[0]}"
    return piece(
        start, rows, writer=writer, slots=slots, shape=shape, bytes=rows * len(slots) * HIDDEN * 2, dtype=dtype
    )


def test_pieces_join_by_position_whatever_their_order() -> None:
    pieces = [piece(7, 3), piece(0, 4), piece(4, 3)]
    joined = join(pieces, IDS, SLOTS)
    assert joined is not None
    assert [p.start for p in joined] == [0, 4, 7]


@pytest.mark.parametrize("pieces", [[], [piece(0, 4)], [piece(4, 6)], [piece(0, 4), piece(5, 5)]])
def test_missing_rows_mean_wait(pieces: list[PieceRecord]) -> None:
    assert join(pieces, IDS, SLOTS) is None


@pytest.mark.parametrize(
    ("pieces", "what"),
    [
        ([piece(0, 6), piece(4, 6)], "rows 4 to 10 of 10, after 6"),
        ([piece(0, 10), piece(0, 10, writer="main-0000000a-r1")], "rows 0 to 10 of 10, after 10"),
        ([piece(0, 10), stage(0, 10, [2])], r"slots \[0, 1, 2, 2\] of 3"),
        ([stage(0, 10, [0, 1]), stage(0, 10, [2, 3])], r"slots \[0, 1, 2, 3\] of 3"),
        ([stage(0, 10, [0, 0, 1])], r"slots \[0, 0, 1\] of 3"),
        ([stage(0, 10, [0, 1]), stage(0, 10, [2], dtype="F16")], "F16"),
        ([piece(0, 10, ids_sha256="0")], "other ids"),
        ([piece(0, 10, shape=[9, SLOTS, HIDDEN])], "shape"),
        ([piece(0, 10, shape=[10, SLOTS + 1, HIDDEN])], "shape"),
        ([piece(0, 10, bytes=7)], "bytes"),
        ([piece(0, 5), replace(piece(5, 5), dtype="F16")], "F16"),
        ([piece(5, 6)], "rows 5 to 11 of 10"),
        ([piece(-1, 1)], "rows -1 to 0 of 10"),
    ],
)
def test_what_more_pieces_cannot_mend_is_a_fault(pieces: list[PieceRecord], what: str) -> None:
    with pytest.raises(PieceFault, match=what):
        join(pieces, IDS, SLOTS)


def test_rows_behind_the_prompt_are_not_the_samples() -> None:
    after = piece(10, 1, ids_sha256="0")
    assert join([piece(0, 10), after], IDS, SLOTS) == [piece(0, 10)]


def test_the_stages_of_a_pipeline_join_slot_by_slot() -> None:
    first, last = [stage(0, 4, [0]), stage(4, 6, [0])], [stage(0, 4, [1, 2]), stage(4, 6, [1, 2])]
    assert join([last[1], first[0], first[1], last[0]], IDS, SLOTS) == [*first, *last]
    assert join([*first, last[0]], IDS, SLOTS) is None
    assert join(first, IDS, SLOTS) is None


def test_what_is_missing_is_named() -> None:
    assert coverage([], 10, SLOTS).missing == "rows 0 to 10 of 10"
    assert coverage([piece(0, 4), piece(6, 4)], 10, SLOTS).missing == "rows 4 to 6 of 10"
    assert coverage([piece(0, 4)], 10, SLOTS).missing == "rows 4 to 10 of 10"
    assert coverage([stage(0, 10, [0]), stage(0, 10, [2])], 10, SLOTS).missing == "slots [1] of 3"


def write(directory: Path, writer: str, *records: object) -> None:
    directory.mkdir(exist_ok=True)
    with open_lines(directory / f"journal-{writer}.jsonl") as file:
        append_lines(file, records)


def test_tailing_takes_whole_lines_of_this_server_alone(tmp_path: Path) -> None:
    journals = Journals(tmp_path / "r", "main", lambda rid: rid.sample == "a", listing=0)
    assert journals.poll() == []
    write(tmp_path / "r", "main-0000000a-r0", piece(0, 4))
    write(tmp_path / "r", "main-2-0000000b-r0", piece(4, 6))  # another server, main-2
    write(tmp_path / "r", "main-0000000c-driver", piece(4, 6))  # not a tap
    assert journals.poll() == ["fleetdump/r/a/1"]
    assert [p.start for p in journals.captured["fleetdump/r/a/1"].pieces] == [0]
    path = tmp_path / "r" / "journal-main-0000000a-r0.jsonl"
    line = encode_line(piece(4, 6))
    with open(path, "ab") as file:
        file.write(line[:50])
    assert journals.poll() == []
    with open(path, "ab") as file:
        file.write(line[50:])
    assert journals.poll() == ["fleetdump/r/a/1"]
    assert [p.start for p in journals.captured["fleetdump/r/a/1"].pieces] == [0, 4]


def test_records_of_no_interest_are_dropped_and_others_are_kept_apart(tmp_path: Path) -> None:
    journals = Journals(tmp_path, "main", lambda rid: rid == Rid("r", "a", 2))
    skip = SkipRecord("fleetdump/r/a/2", "io_error", "", 0.0)
    closed = ShardRecord("shard-main-0000000a-r0-0.safetensors", 5, "ab", 0.0)
    write(tmp_path, "main-0000000a-r0", piece(0, 4, attempt=1), piece(0, 4, attempt=2), skip, closed)
    assert journals.poll() == ["fleetdump/r/a/2"]
    assert journals.captured["fleetdump/r/a/2"].skip == skip
    assert journals.closed == {closed.shard: closed}
    journals.forget("fleetdump/r/a/2")
    assert journals.captured == {}


def test_a_retracted_request_begins_anew(tmp_path: Path) -> None:
    journals = Journals(tmp_path, "main", lambda _: True, listing=0)
    write(tmp_path, "main-0000000a-r0", piece(0, 4), piece(4, 2), piece(0, 8), piece(8, 2))
    journals.poll()
    assert [p.start for p in join(journals.captured["fleetdump/r/a/1"].pieces, IDS, SLOTS) or []] == [0, 8]


def test_each_stage_of_a_pipeline_begins_anew_by_itself(tmp_path: Path) -> None:
    journals = Journals(tmp_path, "main", lambda _: True, listing=0)
    write(tmp_path, "main-0000000a-r0", stage(0, 4, [0]), stage(4, 6, [0]))
    write(tmp_path, "main-0000000a-r1", stage(0, 4, [1, 2]), stage(0, 8, [1, 2]), stage(8, 2, [1, 2]))
    journals.poll()
    joined = join(journals.captured["fleetdump/r/a/1"].pieces, IDS, SLOTS) or []
    assert [(p.start, p.slots) for p in joined] == [(0, [0]), (4, [0]), (0, [1, 2]), (8, [1, 2])]


def test_journals_of_all_launches_are_read(tmp_path: Path) -> None:
    journals = Journals(tmp_path, "main", lambda _: True, listing=0)
    write(tmp_path, "main-0000000a-r0", piece(0, 4))
    journals.poll()
    write(tmp_path, "main-0000000b-r0", piece(0, 10, attempt=2, writer="main-0000000b-r0"))
    assert journals.poll() == ["fleetdump/r/a/2"]
