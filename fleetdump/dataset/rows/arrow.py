"""Parquet files, Arrow files (both kinds of IPC), and folders of them as Hugging Face's ``datasets`` saves them."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

from fleetdump.dataset.rows.broken import Broken
from fleetdump.dataset.rows.content import KEYS, MEDIA_KEYS
from fleetdump.dataset.rows.extras import pyarrow
from fleetdump.dataset.rows.jsonl import MAX_LINE_BYTES
from fleetdump.errors import UsageError

PARQUET_MAGIC = b"PAR1"
ARROW_FILE_MAGIC = b"ARRO"
ARROW_STREAM_MAGIC = b"\xff\xff\xff\xff"
MAGICS = (PARQUET_MAGIC, ARROW_FILE_MAGIC, ARROW_STREAM_MAGIC)
SUFFIXES = (".parquet", ".arrow")

_PARQUET_ROWS = 64
"""Rows that are decoded at a time."""
_PARQUET_BUFFER = 1 << 20

Result = TypeVar("Result")
Batches = Iterator[Any]
"""``pyarrow.RecordBatch`` after ``pyarrow.RecordBatch``."""


def files_of(folder: Path) -> list[Path]:
    """The data files of a data set on disk, in order: what ``save_to_disk`` lists in state.json, else all Parquet or
    Arrow files of the folder. Raises ``UsageError`` when it is not clear which they are."""
    if (folder / "dataset_dict.json").exists():
        splits = _list(folder / "dataset_dict.json", "splits")
        named = ", ".join(str(folder / str(split)) for split in splits)
        raise UsageError("the data set has several splits", str(folder), next_step=f"name one of them: {named}")
    if (folder / "state.json").exists():
        return _listed(folder)
    files = sorted(path for path in folder.iterdir() if path.suffix in SUFFIXES)
    for path in files:
        _require_file(path)
    kinds = sorted({re.sub(r"[0-9]+", "*", path.name) for path in files})
    if not files:
        raise UsageError(
            "the folder holds no data set",
            str(folder),
            "no state.json, *.parquet or *.arrow",
            "name a file or a folder",
        )
    if len(kinds) > 1:
        raise UsageError(
            "the folder mixes files that may not belong together",
            str(folder),
            f"they are {', '.join(kinds)}",
            "name one file, or put the files of one data set into a folder of their own",
        )
    return files


def read_arrow(files: Sequence[Path]) -> Iterator[tuple[int, Any]]:
    """Number (from 1, over all files) and content of each row, or the ``Broken`` in its place. At most a row group of
    Parquet is in memory at a time, and of Arrow what the kernel maps. Raises ``UsageError``: at once for a first file
    that cannot be read or has no column that we know, while reading for a damaged one."""
    batches = _open(files[0])
    return _read(files, batches)


def _read(files: Sequence[Path], first: Batches) -> Iterator[tuple[int, Any]]:
    number = 0
    for n, path in enumerate(files):
        for batch in _whole(path, _open(path) if n else first):
            for row in range(batch.num_rows):
                number += 1
                yield number, _row(batch, row)


def _whole(path: Path, batches: Batches) -> Batches:
    while (batch := _attempt(path, lambda: next(batches, None))) is not None:
        yield batch


def _open(path: Path) -> Batches:
    with path.open("rb") as stream:
        magic = stream.read(4)
    if magic not in MAGICS:
        raise UsageError("the file is neither Parquet nor Arrow", str(path), next_step="get an undamaged copy")
    return _attempt(path, lambda: _parquet(path) if magic == PARQUET_MAGIC else _ipc(path, magic))


def _parquet(path: Path) -> Batches:
    file = pyarrow(path, "parquet").ParquetFile(str(path), buffer_size=_PARQUET_BUFFER)
    columns = _columns(path, file.schema_arrow.names)
    # Asked for all row groups at once pyarrow keeps what it has read of every one.
    return (
        batch
        for group in range(file.num_row_groups)
        for batch in file.iter_batches(_PARQUET_ROWS, row_groups=[group], columns=columns, use_threads=False)
    )


def _ipc(path: Path, magic: bytes) -> Batches:
    source = pyarrow(path).memory_map(str(path))
    ipc = pyarrow(path, "ipc")
    if magic == ARROW_STREAM_MAGIC:
        reader = ipc.open_stream(source)
        columns = _columns(path, reader.schema.names)
        return (batch.select(columns) for batch in reader)
    file = ipc.open_file(source)
    columns = _columns(path, file.schema.names)
    return (file.get_batch(n).select(columns) for n in range(file.num_record_batches))


def _columns(path: Path, names: list[str]) -> list[str]:
    known = [name for name in dict.fromkeys(names) if name in KEYS]
    if not {*known} & {"messages", "conversations", "text", "input_ids"}:
        raise UsageError(
            "the data has none of the columns messages, conversations, text and input_ids",
            str(path),
            f"its columns are {', '.join(names)}",
            "rename the column that has the content",
        )
    twice = sorted(name for name in known if names.count(name) > 1)
    if twice:
        raise UsageError(
            f"the data has more than one column {twice[0]}",
            str(path),
            f"its columns are {', '.join(names)}",
            "rename or drop all but one",
        )
    return known


def _row(batch: Any, n: int) -> Any:
    one = batch.slice(n, 1)
    try:
        if one.nbytes > MAX_LINE_BYTES:
            raise Broken("too_long", f"the row is longer than {MAX_LINE_BYTES >> 20} MiB")
        return {name: _value(name, one.column(name)[0].as_py()) for name in one.schema.names}
    except UnicodeDecodeError as error:
        return Broken("not_utf8", f"byte {error.start} of a text is 0x{error.object[error.start]:02x}")
    except Broken as broken:
        return broken
    except (ValueError, OverflowError) as error:  # pyarrow: fields of one name in a struct, dates beyond Python's
        return Broken("not_json", str(error)[:300])


def _value(name: str, value: Any) -> Any:
    if name in MEDIA_KEYS:
        return bool(value)  # the pictures themselves are not looked at
    if name in ("input_ids", "loss_mask"):  # checked number by number later
        return [int(entry) if isinstance(entry, bool) else entry for entry in value] if _is_mask(value) else value
    return _plain(name, value)


def _is_mask(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and isinstance(value[0], bool)


def _plain(name: str, value: Any) -> Any:
    """``value`` as JSON would have it, without fields that are null: a column gives each message all fields that any
    has, and templates ask whether a field is there. Raises ``Broken``."""
    if isinstance(value, dict):
        return {key: _plain(name, inner) for key, inner in value.items() if inner is not None}
    if isinstance(value, list):
        return [_plain(name, inner) for inner in value]
    if isinstance(value, float) and not math.isfinite(value):
        raise Broken("not_json", f"{name} has {value}")
    if value is None or isinstance(value, (str, int, float)):
        return value
    raise Broken("not_json", f"{name} has a value of type {type(value).__name__}")


def _listed(folder: Path) -> list[Path]:
    state = _json(folder / "state.json")
    if state.get("_indices_files") or state.get("_indices_data_files"):
        raise UsageError(
            "the data set was saved with an index of its rows",
            str(folder),
            "old releases of `datasets` did that after select or shuffle",
            "load it, call flatten_indices() and save_to_disk() again",
        )
    entries = _list(folder / "state.json", "_data_files")
    names = [entry.get("filename") for entry in entries if isinstance(entry, dict)]
    files = [folder / name for name in names if isinstance(name, str) and Path(name).name == name]
    missing = [path for path in files if not path.is_file()]
    if not files or missing:
        why = f"{missing[0].name} is missing" if missing else "it lists none"
        raise UsageError("the data set is not complete", f"{folder / 'state.json'}", why, "get a complete copy")
    return files


def _json(path: Path) -> dict[str, Any]:
    _require_file(path)
    try:
        data = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise _unreadable(path, str(error)) from None
    if not isinstance(data, dict):
        raise _unreadable(path, "it is no JSON object")
    return data


def _list(path: Path, key: str) -> list[Any]:
    """The list that ``key`` has in the JSON file ``path``, empty where it is absent or null."""
    value = _json(path).get(key) or []
    if not isinstance(value, list):
        raise _unreadable(path, f"{key} is no list")
    return value


def _unreadable(path: Path, why: str) -> UsageError:
    return UsageError("the data set cannot be read", str(path), why, "get an undamaged copy")


def _require_file(path: Path) -> None:
    """A pipe or a device that is called like a file of a data set would be waited for, for ever."""
    if path.exists() and not path.is_file():
        raise UsageError(
            "this is no file", str(path), "a data set is made of files", "name the file that holds the data"
        )


def _attempt(path: Path, action: Callable[[], Result]) -> Result:
    try:
        return action()
    except (OSError, pyarrow(path).lib.ArrowException) as error:
        raise UsageError("the data is damaged", str(path), str(error)[:300], "get an undamaged copy") from None
