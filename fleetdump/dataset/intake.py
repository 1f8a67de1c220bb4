"""A data set taken in: what each row is known by stays in memory, what it says lies in a temporary file."""

from __future__ import annotations

import hashlib
import os
import tempfile
from array import array
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from fleetdump.agent.formats import Row, row_line
from fleetdump.agent.protocol import to_json
from fleetdump.agent.scrub import printable
from fleetdump.agent.steermessages import DataMark
from fleetdump.dataset.rows import BrokenRow
from fleetdump.dataset.rows.size import estimate_tokens
from fleetdump.errors import UsageError

MAX_REJECTS = 100
"""So many broken rows are left out unless told otherwise; more are a mistake that somebody should look at."""
NAMED_REJECTS = 3
FORMS = ("ids", "text", "messages")


@dataclass(frozen=True, slots=True)
class Taken:
    """A row of the data set. ``line`` as in ``BrokenRow``; ``form``: one of ``FORMS``; ``tokens`` is exact for a row of
    ids, else an estimate; ``digest`` is of the row's line for the hosts, which lies at ``offset`` of the spool."""

    line: int
    form: str
    tokens: int
    digest: str
    offset: int


class Rows(Mapping[str, Taken]):
    """Rows by id, in order. A million take about 250 MB: numbers lie in arrays, not in objects."""

    def __init__(self) -> None:
        self._index: dict[str, int] = {}
        self._lines, self._offsets, self._digests = array("Q"), array("Q"), array("Q")
        self._tokens, self._forms = array("I"), array("B")

    def __getitem__(self, row_id: str) -> Taken:
        n = self._index[row_id]
        digest = f"{self._digests[n]:016x}"
        return Taken(self._lines[n], FORMS[self._forms[n]], self._tokens[n], digest, self._offsets[n])

    def __contains__(self, row_id: object) -> bool:
        return row_id in self._index

    def __iter__(self) -> Iterator[str]:
        return iter(self._index)

    def __len__(self) -> int:
        return len(self._index)

    def append(self, row_id: str, row: Taken) -> None:
        """Take in a row whose id is new."""
        self._index[row_id] = len(self._index)
        self._lines.append(row.line)
        self._forms.append(FORMS.index(row.form))
        self._tokens.append(row.tokens)
        self._digests.append(int(row.digest, 16))
        self._offsets.append(row.offset)


class DataSet:
    """The rows of a data set in order, by id, and the broken ones."""

    def __init__(self, name: str = "") -> None:
        self.name = printable(name)
        """Of its file, for words: whatever bytes it is of, others see one harmless line."""
        self.rows = Rows()
        self.broken: list[BrokenRow] = []
        self._spool = tempfile.TemporaryFile()  # noqa: SIM115 (lives as long as the data set)
        self._size = 0

    def add(self, line: int, row: Row) -> None:
        """Take in one row; its id is new."""
        data = row_line(to_json(row))
        digest = hashlib.sha256(data).hexdigest()[:16]
        self.rows.append(row.id, Taken(line, _form(row), estimate_tokens(row), digest, self._size))
        self._size += self._spool.write(data)

    @property
    def mark(self) -> DataMark:
        """By which it is told from other data."""
        return mark_of(self.name, ((row_id, row.digest) for row_id, row in self.rows.items()))

    def lines(self, ids: Sequence[str]) -> Lines:
        """The lines of these rows for the hosts (``formats.row_line``)."""
        self._spool.flush()
        return Lines(self._spool.fileno(), array("Q", (self.rows[row_id].offset for row_id in ids)), self._spool)


@dataclass(frozen=True)
class Lines(Collection[str]):
    """Lines in a file at ``offsets``, read when they are wanted; any number of threads may."""

    descriptor: int
    offsets: Sequence[int]
    keep_open: object = None
    """The file of ``descriptor``."""

    def __len__(self) -> int:
        return len(self.offsets)

    def __iter__(self) -> Iterator[str]:
        for offset in self.offsets:
            yield _line_at(self.descriptor, offset)

    def __contains__(self, line: object) -> bool:
        return any(line == each for each in self)

    @property
    def sha256(self) -> str:
        """Over the lines in order."""
        digest = hashlib.sha256()
        for line in self:
            digest.update(line.encode())
        return digest.hexdigest()


def mark_of(name: str, rows: Iterable[tuple[str, str]]) -> DataMark:
    """The mark of (id, digest) of rows in order, from a file of that name."""
    digest, samples = hashlib.sha256(), 0
    for row_id, content in rows:
        samples += 1
        digest.update(f"{row_id}\0{content}\n".encode("utf-8", "surrogatepass"))
    return DataMark(name, samples, digest.hexdigest())


def take_in(rows: Iterable[tuple[int, Row | BrokenRow]], max_rejects: int = MAX_REJECTS, name: str = "") -> DataSet:
    """All rows, of a file of that name. Raises ``UsageError`` as soon as more than ``max_rejects`` are broken, and when
    none is usable."""
    data = DataSet(name)
    for line, row in rows:
        if isinstance(row, Row):
            data.add(line, row)
            continue
        data.broken.append(row)
        if len(data.broken) > max_rejects:
            raise _too_many(data, line, max_rejects)
    if not data.rows:
        why = _named(data.broken[:1]) if data.broken else "it is empty"
        raise UsageError("the data has no usable row", why=why, next_step="look at the data file")
    return data


def _line_at(descriptor: int, offset: int) -> str:
    data = b""
    while not data.endswith(b"\n"):
        # Most rows fit into the first piece; of what lies behind a row's end nothing is kept.
        piece = os.pread(descriptor, max(8192, 2 * len(data)), offset + len(data))
        if not piece:
            raise OSError(f"the spool ends inside a row at byte {offset}")
        end = piece.find(b"\n")
        data += piece if end < 0 else piece[: end + 1]
    return data.decode()


def _form(row: Row) -> str:
    if row.input_ids is not None:
        return "ids"
    return "text" if row.text is not None else "messages"


def _too_many(data: DataSet, line: int, max_rejects: int) -> UsageError:
    reasons = ", ".join(f"{reason} {count}" for reason, count in Counter(r.reason for r in data.broken).most_common())
    return UsageError(
        f"more than {max_rejects} of the first {line} rows are broken",
        why=f"{reasons}; {_named(data.broken[:NAMED_REJECTS])}",
        next_step="mend the data; or leave broken rows out, as many as --max-rejects N says",
    )


def _named(broken: Sequence[BrokenRow]) -> str:
    return "; ".join(f"line {row.line} ({row.reason}): {row.detail}" for row in broken)
