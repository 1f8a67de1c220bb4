"""One run's capture directory as the tap writes it (docs/formats.md of fleetdump): journal, norm, open shards.

Standard library alone. Several writer threads write at once, each into a shard that it has borrowed; the journal has
their lines in the order of the forwards, whoever is done first: a reader takes a piece that begins at position 0 for a
new beginning of its request.
"""

from __future__ import annotations

import errno
import logging
import threading
import time
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from fleetdump_tapjournal import Appended, Numbers, RunFiles, gone
from fleetdump_taprecords import Config, Load, Norm, Piece, Skip
from fleetdump_tapshard import Record, Shard, line

logger = logging.getLogger(__name__)

RETRY_SECONDS = 5.0
"""Between two attempts to close a shard that the disk did not let be closed."""


@dataclass
class Counts:
    """Of one tap process, since it began: what its journals have, and what went wrong."""

    rows: int = 0
    bytes: int = 0
    skips: Counter[str] = field(default_factory=Counter)
    errors: int = 0
    last_error: str = ""
    failing: bool = False
    """Whether nothing was written since the last error."""
    numbers: Numbers = field(default_factory=Numbers)
    """Of its shards."""
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def take(self, records: Sequence[Record]) -> None:
        """Count journalled pieces."""
        with self._lock:
            self.rows += sum(record["rows"] for record in records)
            self.bytes += sum(record["bytes"] for record in records)
            self.failing = self.failing and not records

    def skip(self, skips: Sequence[Skip]) -> None:
        """Count skips, and say so in the log."""
        logger.warning("fleetdump-tap: skipped %s", [(s.rid, s.reason, s.detail) for s in skips[:5]])
        with self._lock:
            self.skips.update(skip.reason for skip in skips)

    def fail(self, error: Exception) -> None:
        """Note what keeps pieces from being written."""
        with self._lock:
            self.errors, self.last_error, self.failing = self.errors + 1, str(error) or repr(error), True


_Entry = tuple[Shard, list[Record]]


@dataclass
class Order:
    """A load's place among the loads of its run, and what has become of it."""

    number: int
    written: list[_Entry] = field(default_factory=list)
    skips: list[Skip] = field(default_factory=list)
    done: bool = False


class Run:
    """Name, writers' name and files of one run. ``expect`` is called in the order of the forwards; ``write``, ``skip``
    and ``tidy`` by any thread; none of them raises ``OSError``."""

    def __init__(self, config: Config, name: str, writer: str, norm: Norm | None, counts: Counts, folder: str = ""):
        self.directory = Path(config.dir) / name / folder
        self.last_used = time.monotonic()
        self._config = config
        self._name = name
        self._base = writer
        self._norm = norm
        self._counts = counts
        self._lock = threading.Lock()
        """Of the fields below; never held while a file is written."""
        self._order: deque[Order] = deque()
        self._expected = 0
        self._files: RunFiles | None = None
        self._free: list[Shard] = []
        self._closing: list[Shard] = []
        self._live: set[Shard] = set()
        """All shards of ``_files`` that are not closed."""
        self._retry_at = 0.0
        self._opening = threading.Lock()
        self._journalling = threading.Lock()

    # ------------------------------------------------------------------ writing
    def expect(self) -> Order:
        """A place in the journal's order for a load to come."""
        with self._lock:
            self._expected += 1
            order = Order(self._expected)
            self._order.append(order)
            self.last_used = time.monotonic()
        return order

    def write(self, loads: Sequence[tuple[Load, Order]]) -> None:
        """Write loads, make them durable as one group, and journal them in their turn."""
        borrowed: list[Shard] = []
        for load, order in loads:
            self._write_load(load, order, borrowed)
        for shard in borrowed:
            self._sync(shard)
        with self._lock:
            for _, order in loads:
                order.done = True
        self._settle()
        self._give_back(borrowed)

    def skip(self, skips: Sequence[Skip]) -> None:
        """Journal skips; one that cannot be journalled is only counted."""
        self._counts.skip(skips)
        try:
            files = self._open()
        except OSError as error:
            self._not_journalled(len(skips), len(skips), error)
            return
        with self._journalling:
            appended = files.append([line("skip", **asdict(skip)) for skip in skips])
        if appended.error is not None:
            self._not_journalled(len(skips) - appended.count, len(skips), appended.error)

    def _not_journalled(self, lost: int, skips: int, error: OSError) -> None:
        self._counts.fail(error)
        # 0 of them: the lines are there, and a loss of power could take them.
        logger.error("fleetdump-tap: of %d skips of run %s %d are not journalled: %s", skips, self._name, lost, error)

    def _write_load(self, load: Load, order: Order, borrowed: list[Shard]) -> None:
        try:
            self._write_pieces(load.pieces(), order, borrowed)
        except Exception as error:
            logger.exception("fleetdump-tap: the writer goes on after")
            order.skips += [Skip(rid, "io_error", repr(error)) for rid in load.rids]
        finally:
            load.release()

    def _write_pieces(self, pieces: Sequence[Piece], order: Order, borrowed: list[Shard]) -> None:
        """After an error the rest of the load is lost; the next load tries again, since room may have come."""
        try:
            while pieces:
                shard = self._shard_for(pieces[0], order, borrowed)
                count = shard.takes(pieces)
                order.written.append((shard, shard.write(pieces[:count])))
                pieces = pieces[count:]
        except OSError as error:
            self._counts.fail(error)
            order.skips += [_lost(piece.rid, error) for piece in pieces]

    def _shard_for(self, piece: Piece, order: Order, borrowed: list[Shard]) -> Shard:
        """The last borrowed shard if it takes the piece, else another one, which is borrowed. In each shard the pieces
        lie in the order of the journal, so that what the journal does not take is the shard's end."""
        if borrowed and borrowed[-1].error is None and borrowed[-1].takes([piece]):
            borrowed[-1].newest = order.number
            return borrowed[-1]
        files = self._open()
        while True:
            shard = self._free_shard(order) or self._new_shard(files, piece.slots)
            shard.newest = order.number
            borrowed.append(shard)
            if shard.error is None and shard.takes([piece]):
                return shard

    def _free_shard(self, order: Order) -> Shard | None:
        with self._lock:
            earlier = [shard for shard in self._free if shard.newest < order.number]
            shard = max(earlier, key=lambda shard: shard.newest, default=None)
            if shard is not None:
                self._free.remove(shard)
            return shard

    def _new_shard(self, files: RunFiles, slots: list[int]) -> Shard:
        shard = files.new_shard(slots)
        with self._lock:
            if files is self._files:
                self._live.add(shard)
            else:
                shard.error = gone()
        return shard

    def _sync(self, shard: Shard) -> None:
        if self._config.fsync != "group" or not shard.unsynced:
            return
        try:
            shard.sync()
        except OSError as error:
            self._counts.fail(error)
            shard.error = error

    def _give_back(self, borrowed: Sequence[Shard]) -> None:
        """The last one may take more pieces, those before it were full."""
        with self._lock:
            gone = [shard for shard in borrowed if shard not in self._live]
            for shard in borrowed:
                if shard in self._live:
                    takes_more = shard is borrowed[-1] and shard.error is None
                    (self._free if takes_more else self._closing).append(shard)
        for shard in gone:
            shard.give_up()

    # ------------------------------------------------------------------ the journal
    def _settle(self) -> None:
        """Journal the loads that are done and whose turn it is."""
        with self._journalling:
            with self._lock:
                ready = []
                while self._order and self._order[0].done:
                    ready.append(self._order.popleft())
                self.last_used = time.monotonic()
                files = self._files
                written = [entry for order in ready for entry in order.written]
                good = [(shard, records) for shard, records in written if shard.error is None]
            if not ready:
                return
            records = [record for _, records in good for record in records]
            appended = self._append(files, records)
            lost = self._accept(written, good, appended)
            skips = [skip for order in ready for skip in order.skips] + lost
            self._counts.take(records[: appended.count])
            if appended.error is not None:
                self._counts.fail(appended.error)
        if skips:
            self.skip(skips)

    def _accept(self, written: Sequence[_Entry], good: Sequence[_Entry], appended: Appended) -> list[Skip]:
        """Tell the shards which of their records the journal has; skips for the others."""
        left, lost = appended.count, []
        journalled = {id(records) for _, records in good}
        with self._lock:
            for shard, records in written:
                count = min(left, len(records)) if id(records) in journalled else 0
                left -= count
                shard.accept(records[:count])
                if count < len(records):
                    shard.reject(records[count:], appended.error or gone())
                    lost += [_lost(record["rid"], shard.error or gone()) for record in records[count:]]
        return lost

    def _append(self, files: RunFiles | None, records: Sequence[Record]) -> Appended:
        if files is None:
            return Appended(0, gone())
        return files.append(records) if records else Appended(0)

    # ------------------------------------------------------------------ opening and closing
    def _open(self) -> RunFiles:
        """The run's files, made anew when somebody has removed them. Raises ``OSError``."""
        with self._opening:
            if self._files is not None and not self._files.are_gone():
                return self._files
            self._abandon()
            files = RunFiles(self._config, self._name, self._base, self.directory, self._counts.numbers)
            try:
                files.write_norm(self._norm)
            except OSError:
                files.close()
                raise
            with self._lock:
                self._files = files
            return files

    def _abandon(self) -> None:
        """Nobody can read what is open: give it up. Whoever has borrowed a shard finds it with an error."""
        with self._journalling:
            with self._lock:
                files, self._files = self._files, None
                shards = self._free + self._closing
                self._free, self._closing = [], []
                for shard in self._live:
                    shard.error = gone()
                self._live.clear()
            for shard in shards:
                shard.give_up()
            if files is not None:
                files.close()

    def is_idle(self) -> bool:
        """Whether nothing is expected and nothing is open."""
        with self._lock:
            return not self._order and self._files is None

    def rest(self, seconds: float) -> None:
        """When nothing came for ``seconds``, let the shards be closed."""
        with self._lock:
            if not self._order and time.monotonic() - self.last_used >= seconds:
                self._closing += self._free
                self._free = []

    def has_to_close(self) -> bool:
        """Whether ``close_one`` has something to do."""
        with self._lock:
            return self._retry_at <= time.monotonic() and any(not shard.pending for shard in self._closing)

    def close_one(self) -> None:
        """Close one shard that takes no more and whose records are all settled."""
        with self._lock:
            ready = [shard for shard in self._closing if not shard.pending]
            files = self._files
            if not ready or files is None:
                return
            shard = ready[0]
            self._closing.remove(shard)
        try:
            record = shard.close(durable=self._config.fsync != "never")
            if record is not None:
                self._journal_close(files, record)
        except OSError as error:
            self._counts.fail(error)
            self._close_again(shard, error)
        else:
            with self._lock:
                self._live.discard(shard)

    def _journal_close(self, files: RunFiles, record: Record) -> None:
        """Raises ``OSError`` when the line is not there."""
        with self._journalling:
            appended = files.append([record])
        if appended.error is not None:
            if not appended.count:
                raise appended.error
            self._counts.fail(appended.error)

    def _close_again(self, shard: Shard, error: OSError) -> None:
        """Later; a shard that somebody has removed never."""
        logger.error("fleetdump-tap: %s is not closed: %s", shard.part, error)
        with self._lock:
            if shard in self._live and not isinstance(error, FileNotFoundError):
                self._closing.append(shard)
                self._retry_at = time.monotonic() + RETRY_SECONDS
                return
            self._live.discard(shard)
        shard.give_up()

    def let_go(self) -> None:
        """Close the journal when nothing is open: its lock says that we may write. Not now, if the disk keeps somebody
        who journals waiting."""
        if not self._journalling.acquire(blocking=False):
            return
        try:
            with self._lock:
                if self._order or self._live or self._files is None:
                    return
                files, self._files = self._files, None
            files.close()
        finally:
            self._journalling.release()


def _lost(rid: str, error: OSError) -> Skip:
    full = error.errno in (errno.ENOSPC, errno.EDQUOT)
    return Skip(rid, "disk_full" if full else "io_error", str(error))
