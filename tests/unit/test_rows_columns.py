"""The same rows from every format: JSON lines, Parquet, Arrow and saved data sets say the same."""

from __future__ import annotations

import gzip
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from fleetdump.agent.formats import Row, row_line
from fleetdump.agent.protocol import to_json
from fleetdump.dataset.rows import BrokenRow, arrow, read_rows
from fleetdump.errors import UsageError

CONVERSATION = [
    {"role": "user", "content": "What is 2 + 2?"},
    {"role": "assistant", "content": "4", "reasoning_content": "easy"},
]
CALL = [
    {"role": "user", "content": "Weather?"},
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"type": "function", "function": {"name": "weather", "arguments": '{"city": "Ulm"}'}}],
    },
]
TOOLS = [{"type": "function", "function": {"name": "weather"}}]
ROWS: list[dict[str, Any]] = [
    {"id": "think", "messages": CONVERSATION, "score": 0.5},
    {"id": "call", "messages": CALL, "tools": json.dumps(TOOLS)},
    {"id": "share", "conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello"}]},
    {"id": "text", "text": "Grüße"},
    {"id": "ids", "input_ids": [1, 17, 4], "loss_mask": [0, 1, 1]},
    {"text": "without an id"},
]


def jsonl(folder: Path, rows: list[dict[str, Any]]) -> Path:
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def gz(folder: Path, rows: list[dict[str, Any]]) -> Path:
    path = folder / "rows.jsonl.gz"
    path.write_bytes(gzip.compress(jsonl(folder, rows).read_bytes()))
    return path


def zst(folder: Path, rows: list[dict[str, Any]]) -> Path:
    path = folder / "rows.jsonl.zst"
    data = jsonl(folder, rows).read_bytes()
    half = data.index(b"\n") + 1
    path.write_bytes(b"".join(pa.compress(part, codec="zstd", asbytes=True) for part in (data[:half], data[half:])))
    return path


def parquet(folder: Path, rows: list[dict[str, Any]]) -> Path:
    path = folder / "rows.parquet"
    pq.write_table(pa.Table.from_pylist(_all_keys(rows)), path, row_group_size=4)
    return path


def arrow_file(folder: Path, rows: list[dict[str, Any]]) -> Path:
    return _ipc(folder / "rows.arrow", rows, pa.ipc.new_file)


def arrow_stream(folder: Path, rows: list[dict[str, Any]]) -> Path:
    return _ipc(folder / "rows.arrow", rows, pa.ipc.new_stream)


def saved(folder: Path, rows: list[dict[str, Any]]) -> Path:
    """As ``datasets.Dataset.save_to_disk`` writes it; the order of the files is state.json's."""
    folder = folder / "saved"
    folder.mkdir()
    names = ["data-00001-of-00002.arrow", "data-00000-of-00002.arrow"]
    rows = _all_keys(rows)
    schema = pa.Table.from_pylist(rows).schema
    for name, part in zip(names, (rows[:3], rows[3:]), strict=True):
        _ipc(folder / name, part, pa.ipc.new_stream, schema)
    (folder / "dataset_info.json").write_text("{}")
    (folder / "state.json").write_text(json.dumps({"_data_files": [{"filename": name} for name in names]}))
    return folder


def shards(folder: Path, rows: list[dict[str, Any]]) -> Path:
    """A folder of Parquet files, as repositories of data sets have it."""
    folder = folder / "shards"
    folder.mkdir()
    for n, part in enumerate((rows[:3], rows[3:])):
        pq.write_table(pa.Table.from_pylist(_all_keys(part)), folder / f"train-{n:05}-of-00002.parquet")
    return folder


def _all_keys(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    keys = dict.fromkeys(key for row in rows for key in row)
    return [{key: row.get(key) for key in keys} for row in rows]


def _ipc(path: Path, rows: list[dict[str, Any]], writer: Any, schema: Any = None) -> Path:
    table = pa.Table.from_pylist(_all_keys(rows), schema=schema)
    with writer(str(path), table.schema) as out:
        out.write_table(table, max_chunksize=2)
    return path


Write = Callable[[Path, list[dict[str, Any]]], Path]
FORMATS = (jsonl, gz, zst, parquet, arrow_file, arrow_stream, saved, shards)
COLUMNS = (parquet, arrow_file, arrow_stream)


@pytest.mark.parametrize("write", FORMATS)
def test_every_format_gives_the_same_rows_and_ids(tmp_path: Path, write: Write) -> None:
    rows = list(read_rows(write(tmp_path, ROWS)))
    assert [row.id for row in rows if isinstance(row, Row)][:5] == ["think", "call", "share", "text", "ids"]
    (tmp_path / "plain").mkdir()
    assert rows == list(read_rows(jsonl(tmp_path / "plain", ROWS)))
    assert rows[0] == Row("think", messages=CONVERSATION)
    assert rows[1] == Row("call", messages=CALL, tools=TOOLS)


@pytest.mark.parametrize("write", COLUMNS)
def test_a_mask_of_booleans(tmp_path: Path, write: Write) -> None:
    (row,) = read_rows(write(tmp_path, [{"input_ids": [1, 2], "loss_mask": [False, True]}]))
    assert isinstance(row, Row)
    assert [type(entry) for entry in row.loss_mask or []] == [int, int]


@pytest.mark.parametrize("write", COLUMNS)
@pytest.mark.parametrize(
    ("column", "reason"),
    [
        ({"text": [None]}, "no_content"),
        ({"text": [""]}, "empty"),
        ({"text": ["a\0b"]}, "bad_text"),
        ({"text": [5]}, "bad_text"),
        ({"text": pa.array([b"caf\xe9"]).view(pa.string())}, "not_utf8"),
        ({"input_ids": [[1, -1]], "loss_mask": [[0, 1]]}, "bad_ids"),
        ({"input_ids": [[1, None]], "loss_mask": [[0, 1]]}, "bad_ids"),
        ({"input_ids": [[1.5, 2.0]], "loss_mask": [[0, 1]]}, "bad_ids"),
        ({"input_ids": [[1, 2]]}, "bad_ids"),
        ({"messages": [[]]}, "empty"),
        ({"messages": [[{"role": "wizard", "content": "x"}]]}, "bad_messages"),
        ({"messages": [[{"role": "user", "content": b"x"}]]}, "not_json"),
        ({"messages": [[{"role": "user", "content": "x", "score": float("nan")}]]}, "not_json"),
        ({"text": ["x"], "images": [[b"png"]]}, "multimodal"),
        ({"text": ["x"], "id": [1.5]}, "bad_id"),
        ({"text": ["x"], "id": [b"raw"]}, "not_json"),
    ],
)
def test_a_broken_row_of_columns(tmp_path: Path, write: Write, column: dict[str, Any], reason: str) -> None:
    path = tmp_path / "bad"
    table = pa.table(column)
    if write is parquet:
        pq.write_table(table, path)
    else:
        with (pa.ipc.new_file if write is arrow_file else pa.ipc.new_stream)(str(path), table.schema) as out:
            out.write_table(table)
    (row,) = read_rows(path)
    assert isinstance(row, BrokenRow), row
    assert (row.line, row.reason) == (1, reason)
    assert row.detail


@pytest.mark.parametrize("write", FORMATS)
def test_broken_rows_have_their_numbers_over_all_files_and_their_neighbours_survive(
    tmp_path: Path, write: Write
) -> None:
    texts = ["a", " ", "c", "d", "a\0", "f", "c"]
    rows = list(read_rows(write(tmp_path, [{"text": text} for text in texts])))
    assert [row.line for row in rows if isinstance(row, BrokenRow)] == [2, 5, 7]
    assert [row.reason for row in rows if isinstance(row, BrokenRow)] == ["empty", "bad_text", "duplicate_id"]
    assert [row.text for row in rows if isinstance(row, Row)] == ["a", "c", "d", "f"]


def test_a_field_that_is_null_is_absent_as_deep_as_it_lies(tmp_path: Path) -> None:
    def call(**arguments: Any) -> dict[str, Any]:
        return {"role": "assistant", "content": None, "tool_calls": [{"function": {"arguments": arguments}}]}

    first, second = read_rows(parquet(tmp_path, [{"messages": [call(city="Ulm")]}, {"messages": [call(day=3)]}]))
    assert isinstance(first, Row)
    assert isinstance(second, Row)
    assert (first.messages, second.messages) == ([call(city="Ulm")], [call(day=3)])


def test_a_row_that_is_too_long_is_not_decoded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arrow, "MAX_LINE_BYTES", 1000)
    first, second = read_rows(parquet(tmp_path, [{"text": "x" * 2000}, {"text": "y"}]))
    assert isinstance(first, BrokenRow)
    assert (first.line, first.reason) == (1, "too_long")
    assert isinstance(second, Row)


# --------------------------------------------------------------------------- folders and files that are refused
def folder_of(*names: str) -> Callable[[Path], None]:
    def make(folder: Path) -> None:
        for name in names:
            pq.write_table(pa.table({"text": ["x"]}), folder / name)

    return make


def saved_splits(names: str) -> Callable[[Path], None]:
    return lambda folder: (folder / "dataset_dict.json").write_text(f'{{"splits": {names}}}') and None


def pipe(name: str) -> Callable[[Path], None]:
    """Nobody writes to it: whoever opens it to read waits for ever."""
    return lambda folder: os.mkfifo(folder / name)


def state(**content: Any) -> Callable[[Path], None]:
    return lambda folder: (folder / "state.json").write_text(json.dumps(content)) and None


@pytest.mark.parametrize(
    ("make", "fragment", "step"),
    [
        (folder_of(), "holds no data set", "name a file"),
        (saved_splits('["train", "test"]'), "several splits", "set/train"),
        (folder_of("train-0.parquet", "train-1.parquet", "test-0.parquet"), "mixes files", "name one file"),
        (state(_data_files=[{"filename": "gone.arrow"}]), "not complete", "complete copy"),
        (state(_data_files=[]), "not complete", "complete copy"),
        (state(_data_files=[{"filename": "../other.arrow"}]), "not complete", "complete copy"),
        (state(_indices_files=[{"filename": "indices.arrow"}]), "index of its rows", "flatten_indices"),
        (lambda folder: (folder / "state.json").write_text("{") and None, "cannot be read", "undamaged"),
        (lambda folder: (folder / "state.json").write_text("[" * 100_000) and None, "cannot be read", "undamaged"),
        (lambda folder: (folder / "state.json").write_text("[5]") and None, "no JSON object", "undamaged"),
        *(
            (state(_data_files=wrong), "_data_files is no list", "undamaged")
            for wrong in (5, "x.arrow", {"a": 1}, True)
        ),
        (saved_splits("5"), "splits is no list", "undamaged"),
        (saved_splits('{"train": 1}'), "splits is no list", "undamaged"),
        (pipe("x.parquet"), "this is no file", "name the file"),
        (pipe("x.arrow"), "this is no file", "name the file"),
        (pipe("state.json"), "this is no file", "name the file"),
        (pipe("dataset_dict.json"), "this is no file", "name the file"),
        (lambda folder: (folder / "x.parquet").mkdir(), "this is no file", "name the file"),
    ],
)
def test_a_folder_that_is_not_clear_is_refused(
    tmp_path: Path, make: Callable[[Path], None], fragment: str, step: str
) -> None:
    folder = tmp_path / "set"
    folder.mkdir()
    make(folder)
    with pytest.raises(UsageError, match=fragment) as caught:
        read_rows(folder)
    assert step in caught.value.next_step


def test_columns_that_nobody_knows_are_named(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="its columns are prompt, answer") as caught:
        read_rows(parquet(tmp_path, [{"prompt": "x", "answer": "y"}]))
    assert "rename" in caught.value.next_step


def test_a_column_that_is_there_twice_is_named(tmp_path: Path) -> None:
    table = pa.table([["a"], ["b"], [1], [2]], names=["text", "text", "score", "score"])
    stream, parquet_file = tmp_path / "twice.arrow", tmp_path / "twice.parquet"
    with pa.ipc.new_stream(stream, table.schema) as out:
        out.write_table(table)
    pq.write_table(table, parquet_file)
    for path in (stream, parquet_file):
        with pytest.raises(UsageError, match="more than one column text") as caught:
            list(read_rows(path))
        assert "drop all but one" in caught.value.next_step
    only = pa.table([["a"], [1], [2]], names=["text", "score", "score"])
    pq.write_table(only, parquet_file)
    assert len(list(read_rows(parquet_file))) == 1, "what is not read may be there twice"


def test_a_value_that_python_cannot_hold_is_a_broken_row(tmp_path: Path) -> None:
    pair = pa.StructArray.from_arrays([pa.array(["user"]), pa.array(["tool"])], names=["role", "role"])
    messages = pa.ListArray.from_arrays([0, 1], pair)
    far = pa.array([2**62], pa.timestamp("s"))
    path = tmp_path / "rows.arrow"
    for column, value in (("messages", messages), ("text", far)):
        table = pa.table([value], names=[column])
        with pa.ipc.new_stream(path, table.schema) as out:
            out.write_table(table)
        (row,) = read_rows(path)
        assert isinstance(row, BrokenRow)
        assert row.reason == "not_json"


@pytest.mark.parametrize("write", [parquet, arrow_file, arrow_stream, zst])
@pytest.mark.parametrize("keep", [0.5, 0.95])
def test_a_file_that_was_cut_off_is_an_error_not_fewer_rows(tmp_path: Path, write: Write, keep: float) -> None:
    path = write(tmp_path, [{"text": f"{n} {'x' * n}"} for n in range(40)])
    data = path.read_bytes()
    path.write_bytes(data[: int(len(data) * keep)])
    with pytest.raises(UsageError, match="damaged"):
        list(read_rows(path))


@pytest.mark.parametrize("write", [parquet, arrow_stream, zst])
def test_without_pyarrow_it_is_named(tmp_path: Path, write: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path, [{"text": "x"}])
    for name in [name for name in sys.modules if name.split(".")[0] == "pyarrow"]:
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(UsageError, match="pyarrow is needed") as caught:
        read_rows(path)
    assert "pip install pyarrow" in caught.value.next_step


def test_every_row_can_be_sent(tmp_path: Path) -> None:
    for row in read_rows(parquet(tmp_path, ROWS)):
        assert isinstance(row, Row)
        row_line(to_json(row))


# --------------------------------------------------------------------------- memory
PEAK = """
import sys
from pathlib import Path
import pyarrow.parquet
from fleetdump.dataset.rows import read_rows
def peak():
    (line,) = [line for line in open("/proc/self/status") if line.startswith("VmHWM")]
    return int(line.split()[1]) >> 10
before = peak()
count = sum(1 for _ in read_rows(Path(sys.argv[1])))
print(count, peak() - before)
"""


def huge_line(folder: Path) -> Path:
    path = folder / "rows.jsonl"
    with path.open("wb") as out:
        out.write(b'{"text": "')
        for _ in range(100):
            out.write(b"x" * (1 << 20))
        out.write(b'"}\n{"text": "short"}\n')
    return path


def huge_line_zst(folder: Path) -> Path:
    path = folder / "rows.jsonl.zst"
    path.write_bytes(pa.compress(huge_line(folder).read_bytes(), codec="zstd", asbytes=True))
    return path


def many_rows(folder: Path) -> Path:
    """300 MB of text in row groups of 10 MB."""
    path = folder / "rows.parquet"
    with pq.ParquetWriter(path, pa.schema([("text", pa.string())]), compression="none", use_dictionary=False) as out:
        for group in range(30):
            out.write_table(pa.table({"text": [f"{group} {n} {'x' * 10000}" for n in range(1000)]}))
    return path


@pytest.mark.parametrize(("make", "rows"), [(huge_line, 2), (huge_line_zst, 2), (many_rows, 30_000)])
def test_memory_is_bounded(tmp_path: Path, make: Callable[[Path], Path], rows: int) -> None:
    done = subprocess.run(
        [sys.executable, "-c", PEAK, str(make(tmp_path))], capture_output=True, text=True, check=True, timeout=300
    )
    count, mebibytes = map(int, done.stdout.split())
    assert count == rows
    assert mebibytes < 90, f"{mebibytes} MiB more than before"
