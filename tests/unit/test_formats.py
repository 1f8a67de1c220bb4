"""Names, journals, JSON lines and safetensors headers: what is written can be read, what is broken is refused."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleetdump.agent.formats import (
    FileName,
    FormatError,
    PieceRecord,
    Rid,
    ShardRecord,
    SkipRecord,
    Writer,
    is_run_name,
    norm_name,
)
from fleetdump.agent.jsonl import append_lines, open_journal, open_lines, read_journal, read_lines, write_json
from fleetdump.agent.tensorfile import Tensor, build_header, ids_sha256, parse_header, read_header

SAMPLE_IDS = st.text(st.characters(exclude_categories=["Cs", "Cc"]), min_size=1, max_size=50)


@given(SAMPLE_IDS, st.integers(1, 99))
def test_every_sample_id_survives_the_rid(sample: str, attempt: int) -> None:
    rid = Rid("run-1.a", sample, attempt)
    assert Rid.parse(str(rid)) == rid
    assert str(rid).count("/") == 3


@pytest.mark.parametrize(
    "text",
    [
        "HEALTH_CHECK_1",
        "fleetdump/r/s",
        "fleetdump/r/s/0",
        "fleetdump/r/s/x",
        "fleetdump/r/s/²",
        "fleetdump/r/s/1/2",
        "fleetdump/../s/1",
        "fleetdump//s/1",
        "fleetdump/.hidden/s/1",
        "fleetdump/r//1",
        "fleetdump/r/s/1\n",
    ],
)
def test_a_foreign_rid_is_nobodys(text: str) -> None:
    assert Rid.parse(text) is None


@pytest.mark.parametrize("server", ["main", "r0", "a-1234abcd-r7", "x_-"])
@pytest.mark.parametrize("role", ["r0", "r15", "r0.2", "driver"])
def test_file_names_say_who_wrote_them(server: str, role: str) -> None:
    writer = Writer(server, "1f0c77aa", role)
    assert Writer.parse(str(writer)) == writer
    assert FileName.parse(writer.shard(12)) == FileName(writer.prefix, writer, 12)
    assert FileName.parse(writer.shard(3) + ".part") == FileName(writer.prefix, writer, 3, part=True)
    assert FileName.parse(writer.journal) == FileName("journal", writer)
    assert FileName.parse(norm_name(server, "1f0c77aa")) == FileName("norm")


@pytest.mark.parametrize(
    "name",
    [
        "../x",
        "shard-main-1f0c77aa-driver-0.safetensors",
        "tokens-main-1f0c77aa-r0-0.safetensors",
        "shard-main-1f0c77aa-r0-0.safetensors.part.part",
        "journal-main-1f0c77aa-r0.jsonl.part",
        "shard-main-1f0c77aa-r0-0.safetensors\n",
        "notes.txt",
        "journal-../../etc-1f0c77aa-r0.jsonl",
    ],
)
def test_other_names_are_not_ours(name: str) -> None:
    assert FileName.parse(name) is None


# --------------------------------------------------------------------------- JSON lines
def a_piece(**changes: object) -> PieceRecord:
    fields = {
        "name": "fleetdump/r/s/1:0",
        "rid": "fleetdump/r/s/1",
        "start": 0,
        "rows": 2,
        "ids_sha256": "ab",
        "shard": "shard-main-1f0c77aa-r0-0.safetensors",
        "dtype": "F32",
        "shape": [2, 4, 8],
        "offset": 0,
        "bytes": 256,
        "crc32": 3735928559,
        "t": 1.5,
    }
    return PieceRecord(**{**fields, **changes})  # type: ignore[arg-type]


def test_a_journal_is_read_as_it_was_written_and_in_parts(tmp_path: Path) -> None:
    path = tmp_path / "journal-main-1f0c77aa-r0.jsonl"
    records = [a_piece(), SkipRecord("fleetdump/r/ü/1", "disk_full", "[Errno 28] ü", 2.0)]
    with open_lines(path) as file:
        append_lines(file, records)
        first, end = read_journal(path)
        append_lines(file, [ShardRecord("s", 10, "ff", 3.0)])
    assert first == records
    assert read_journal(path, end)[0] == [ShardRecord("s", 10, "ff", 3.0)]
    assert read_journal(path, path.stat().st_size) == ([], path.stat().st_size)


@pytest.mark.parametrize("keep", range(1, 60, 7))
def test_a_torn_last_line_is_ignored_by_readers_and_cut_by_the_next_writer(tmp_path: Path, keep: int) -> None:
    path = tmp_path / "m.jsonl"
    with open_lines(path) as file:
        append_lines(file, [{"v": 1, "n": 1}])
    with open(path, "ab") as file:
        file.write(json.dumps({"v": 1, "text": "x" * 60}).encode()[:keep])
    assert read_lines(path) == ([{"v": 1, "n": 1}], 14)
    with open_lines(path) as file:
        append_lines(file, [{"v": 1, "n": 2}])
    assert [line["n"] for line in read_lines(path)[0]] == [1, 2]


def test_a_torn_line_longer_than_a_block_is_cut(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    path.write_bytes(b'{"v":1}\n' + b"x" * 200_000)
    open_lines(path).close()
    assert path.read_bytes() == b'{"v":1}\n'


def test_a_missing_file_is_empty(tmp_path: Path) -> None:
    assert read_lines(tmp_path / "none.jsonl", 5) == ([], 5)


@pytest.mark.parametrize(
    ("line", "why"),
    [
        (b"{}\n", "version"),
        (b'{"v":2,"kind":"piece"}\n', "version 2"),
        (b"[1]\n", "object"),
        (b"\xff\n", "not JSON"),
        (b"\n", "not JSON"),
        (b'{"v":1,"kind":"other"}\n', "unknown kind"),
        (b'{"v":1,"kind":"shard","shard":"s"}\n', "missing key"),
    ],
)
def test_a_broken_whole_line_is_an_error_with_its_place(tmp_path: Path, line: bytes, why: str) -> None:
    path = tmp_path / "j.jsonl"
    path.write_bytes(line)
    with pytest.raises(FormatError, match=why) as error:
        read_journal(path)
    assert "j.jsonl" in str(error.value)


def test_the_lock_of_a_journal_lasts_as_long_as_its_process(tmp_path: Path) -> None:
    path = tmp_path / "j.jsonl"
    code = (
        "import sys, time; from pathlib import Path; from fleetdump.agent.jsonl import open_journal\n"
        "file = open_journal(Path(sys.argv[1])); print('locked', flush=True); time.sleep(60)"
    )
    child = subprocess.Popen([sys.executable, "-c", code, str(path)], stdout=subprocess.PIPE)
    try:
        assert child.stdout is not None
        assert child.stdout.readline() == b"locked\n"
        assert open_journal(path) is None
    finally:
        child.kill()
        child.communicate()
    journal = open_journal(path)
    assert journal is not None
    journal.close()


def test_write_json_replaces_whole_files_only(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    write_json(path, {"n": 1})
    with pytest.raises(TypeError):
        write_json(path, {"n": object()})
    assert json.loads(path.read_text()) == {"n": 1}
    assert path.stat().st_mode & 0o777 == 0o600


# --------------------------------------------------------------------------- safetensors
def a_file(*tensors: Tensor, data: bytes = b"", reserve: int = 1024) -> io.BytesIO:
    return io.BytesIO(build_header({"format": "fleetdump-1"}, tensors, reserve) + data)


def test_the_safetensors_library_reads_our_files(tmp_path: Path) -> None:
    numpy = pytest.importorskip("numpy")
    safetensors = pytest.importorskip("safetensors")
    path = tmp_path / "a.safetensors"
    tensors = [Tensor("fleetdump/r/ü/1:0", "F32", [1, 2], 0, 8), Tensor("m", "U8", [3], 8, 3)]
    path.write_bytes(a_file(*tensors, data=numpy.array([1.5, -2], "<f4").tobytes() + b"abc").getvalue())
    with safetensors.safe_open(path, "np") as file:
        assert file.metadata() == {"format": "fleetdump-1"}
        assert file.get_tensor("fleetdump/r/ü/1:0").tolist() == [[1.5, -2]]
        assert file.get_tensor("m").tobytes() == b"abc"


def test_our_reader_reads_the_safetensors_librarys_files(tmp_path: Path) -> None:
    numpy = pytest.importorskip("numpy")
    save_file = pytest.importorskip("safetensors.numpy").save_file
    save_file({"a": numpy.zeros((2, 3), "<f4"), "b": numpy.zeros(5, "u1")}, tmp_path / "a.safetensors", {"k": "v"})
    with open(tmp_path / "a.safetensors", "rb") as file:
        header = read_header(file, "a")
    assert header.metadata == {"k": "v"}
    assert {(t.name, t.dtype, tuple(t.shape), t.bytes) for t in header.tensors} == {
        ("a", "F32", (2, 3), 24),
        ("b", "U8", (5,), 5),
    }


def test_a_header_that_does_not_fit_its_reserve_is_refused() -> None:
    with pytest.raises(FormatError, match="reserved"):
        build_header({}, [Tensor("x" * 100, "U8", [1], 0, 1)], 64)


@pytest.mark.parametrize(
    ("file", "why"),
    [
        (io.BytesIO(b""), "header length"),
        (io.BytesIO(b"\xff" * 8), "header length"),
        (io.BytesIO(b"\x10" + b"\0" * 7 + b"{}"), "ends inside"),
        (io.BytesIO(b"\x02" + b"\0" * 7 + b"[]"), "parsed"),
        (io.BytesIO(b"\x08" + b"\0" * 7 + b'{"a":{}}'), "parsed"),
        (a_file(Tensor("a", "U8", [1], 0, 1)), "data section"),
        (a_file(Tensor("a", "U8", [1], 0, 1), data=b"12"), "data section"),
        (a_file(Tensor("a", "U8", [1], 1, 1), data=b"12"), "begins at 1"),
        (a_file(Tensor("a", "F32", [1], 0, 1), data=b"1"), "not those of"),
        (a_file(Tensor("a", "X9", [1], 0, 1), data=b"1"), "unknown dtype"),
        (a_file(Tensor("a", "U8", [-1], 0, -1), data=b""), "unknown dtype or shape"),
    ],
)
def test_a_broken_safetensors_file_is_named_and_explained(file: io.BytesIO, why: str) -> None:
    with pytest.raises(FormatError, match=why) as error:
        read_header(file, "broken.safetensors")
    assert "broken.safetensors" in str(error.value)


def test_the_header_of_an_open_part_has_its_metadata() -> None:
    part = a_file(data=b"what no header names yet")
    assert parse_header(part, "p").metadata == {"format": "fleetdump-1"}
    with pytest.raises(FormatError):
        read_header(part, "p")


def test_ids_are_hashed_as_int32_little_endian() -> None:
    assert ids_sha256([1, 258]) == "fb8bbe2ad3ab5292f19bc5d75bbab9b5fbddc5a78ce47ab41b2d3d59bca08596"


@pytest.mark.parametrize("name", ["", ".r", "a..b", "a/b", "r" * 65, "selfcheck-1f0c77aa-ab12"])
def test_what_no_run_may_be_called(name: str) -> None:
    assert not is_run_name(name)
    assert is_run_name("selfcheck.1")
