"""JSON lines and small JSON files that survive a crash (docs/formats.md): append, read, replace.

A line without its newline does not exist. Standard library alone, Python 3.8; shared by agent, driver and controller.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import stat
from pathlib import Path
from typing import Any, BinaryIO, Dict, Iterator, List, Optional, Sequence, Tuple, Type, TypeVar

from fleetdump.agent.formats import FORMAT_VERSION, JOURNAL_KINDS, FormatError, JournalRecord
from fleetdump.agent.protocol import ProtocolError, from_json, to_json

T = TypeVar("T")

_APPEND = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
"""No link: cutting a torn line off would cut into a file of somebody else."""


SMALL = 16 << 20
"""Bytes of the largest file that ``read_small`` takes for one of ours."""


def open_plain(path: str, flags: int) -> int:
    """Opener (of ``open``) for plain files alone: the other end of a pipe is not waited for. What it creates is 0600.
    Raises ``OSError``."""
    descriptor = os.open(path, flags | os.O_NONBLOCK | os.O_CLOEXEC, 0o600)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "not a plain file", path)
    return descriptor


def read_small(path: Path) -> bytes:
    """All of a small file of ours. Raises ``OSError``, also for what is no plain file, or a large one."""
    with open(path, "rb", opener=open_plain) as file:
        data = file.read(SMALL + 1)
    if len(data) > SMALL:
        raise OSError(errno.EFBIG, f"larger than {SMALL >> 20} MiB", str(path))
    return data


def encode_line(record: Any) -> bytes:
    """One JSON line (with its newline) of a record dataclass or plain data."""
    return json.dumps(to_json(record), separators=(",", ":")).encode() + b"\n"


def open_lines(path: Path) -> BinaryIO:
    """Open a ``.jsonl`` file for appending (created 0600), a torn last line cut off; for its one writer alone."""
    file = os.fdopen(os.open(path, _APPEND, 0o600), "r+b", buffering=0)
    _cut_torn_line(file)
    return file


def open_journal(path: Path) -> Optional[BinaryIO]:
    """``open_lines`` under an exclusive flock that lasts until the file is closed or its process ends. None when
    another process holds it: that file's writer lives."""
    file = os.fdopen(os.open(path, _APPEND, 0o600), "r+b", buffering=0)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.close()
        return None
    _cut_torn_line(file)
    return file


def writer_lives(path: Path) -> bool:
    """Whether a process holds the journal at ``path``; nothing is changed, made or waited for."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(descriptor)
    return False


def append_lines(file: BinaryIO, records: Sequence[Any]) -> None:
    """Append records to a file of ``open_lines`` and fsync it. If that fails (``OSError``), what was written of them
    is cut off again, so that a later append cannot run into a torn line."""
    end = file.seek(0, os.SEEK_END)
    try:
        write_all(file, b"".join(encode_line(record) for record in records))
        os.fsync(file.fileno())
    except OSError:
        file.truncate(end)
        raise


def read_lines(path: Path, offset: int = 0) -> Tuple[List[Dict[str, Any]], int]:
    """Whole lines from byte ``offset`` on, decoded, and the offset after the last of them (to go on from). A torn last
    line is left out; a missing file is empty. Raises ``FormatError`` for a whole line that is not an object of our
    version."""
    lines, end = read_raw_lines(path, offset)
    records = []
    for line in lines:
        records.append(decode_line(line, f"{path}: byte {offset}"))
        offset += len(line)
    return records, end


def read_raw_lines(path: Path, offset: int = 0) -> Tuple[List[bytes], int]:
    """``read_lines`` for who goes on after a line that says nothing: the lines as they stand. Raises ``OSError``."""
    try:
        with open(path, "rb", opener=open_plain) as file:
            file.seek(offset)
            data = file.read()
    except FileNotFoundError:
        return [], offset
    lines = data[: data.rfind(b"\n") + 1].splitlines(keepends=True)
    return lines, offset + sum(map(len, lines))


def read_journal(path: Path, offset: int = 0) -> Tuple[List[JournalRecord], int]:
    """Journal records from byte ``offset`` on, and the offset to go on from; raises ``FormatError``."""
    lines, end = read_lines(path, offset)
    records = []
    for line in lines:
        kind = JOURNAL_KINDS.get(str(line.get("kind")))
        if kind is None:
            raise FormatError(f"{path}: unknown kind of journal line {line.get('kind')!r}")
        records.append(decode_record(kind, line, str(path)))
    return records, end


def decode_record(kind: Type[T], data: Dict[str, Any], where: str) -> T:
    """Build record class ``kind`` from a decoded line; raises ``FormatError`` naming ``where``."""
    try:
        return from_json(kind, data)
    except ProtocolError as error:
        raise FormatError(f"{where}: {error}") from error


def write_all(file: BinaryIO, data: Any) -> None:
    """Write all of ``data`` (anything with a buffer) to an unbuffered file, which may take it in parts."""
    view = memoryview(data).cast("B")
    while view:
        view = view[file.write(view) :]


def create_anew(path: Path, mode: int = 0o600) -> int:
    """The descriptor of a new file at ``path``, for its one writer. What is there is removed, be it the file of a
    process that died, a pipe or a link: it is neither opened nor followed. Raises ``OSError`` that names the path,
    ``IsADirectoryError`` for a folder, which is left."""
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path)
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)


@contextlib.contextmanager
def replacing(
    path: Path, *, mode: int = 0o600, durable: bool = True, temporary: Optional[Path] = None
) -> Iterator[BinaryIO]:
    """A new file, written in the block, that takes the place of ``path`` at once when the block has ended; ``durable``:
    fsynced, and its directory too. When anything fails ``path`` is as it was and nothing of the new file stays, so that
    a full disk is not kept full. ``temporary`` is its name until then (by default with our pid), ``mode`` as of
    ``os.open``; see ``create_anew`` for what is in its place."""
    temporary = temporary or path.with_name(f"{path.name}.{os.getpid()}.tmp")
    try:
        with os.fdopen(create_anew(temporary, mode), "wb") as file:
            yield file
            file.flush()
            if durable:
                os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise
    if durable:
        fsync_directory(path.parent)


def write_json(path: Path, data: Any) -> None:
    """Replace ``path`` by ``data`` as JSON, 0600."""
    with replacing(path) as file:
        file.write(encode_line(data))


def fsync_directory(path: Path) -> None:
    """Make names created or renamed in ``path`` durable."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _cut_torn_line(file: BinaryIO) -> None:
    file.truncate(_whole_bytes(file))
    file.seek(0, os.SEEK_END)


def _whole_bytes(file: BinaryIO) -> int:
    """Length of ``file`` without a torn last line."""
    end = file.seek(0, os.SEEK_END)
    while end:
        start = max(0, end - (1 << 16))
        file.seek(start)
        newline = file.read(end - start).rfind(b"\n")
        if newline >= 0:
            return start + newline + 1
        end = start
    return 0


def decode_line(line: bytes, where: str) -> Dict[str, Any]:
    """The object of our version in one line; raises ``FormatError`` naming ``where``."""
    try:
        record = json.loads(line.decode())
    except (ValueError, RecursionError) as error:
        raise FormatError(f"{where}: not JSON ({error})") from error
    if not isinstance(record, dict):
        raise FormatError(f"{where}: expected an object")
    if record.get("v") != FORMAT_VERSION:
        raise FormatError(f"{where}: version {record.get('v')!r}, this fleetdump reads {FORMAT_VERSION}")
    return record
