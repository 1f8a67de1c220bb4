"""Follows the journals of a capture directory, and deletes shards as they finish."""

from __future__ import annotations

import contextlib
import threading
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from fleetdump.agent.formats import PieceRecord, ShardRecord, SkipRecord
from fleetdump.agent.jsonl import read_journal

POLL_SECONDS = 0.01
IDLE_SECONDS = 60.0
"""Without a new line for so long, rows are not waited for any longer."""


class Journals:
    """A thread that reads what the tap journals of ``runs`` below ``directory``. A shard is deleted when its line is
    there, and a file of the naive arm in ``naive`` when it has its name, so that any load fits on the disk."""

    def __init__(self, directory: Path, naive: Path, runs: Sequence[str]):
        self._runs = runs
        self.rows = 0
        self.bytes = 0
        self.skips: Counter[str] = Counter()
        self._directory = directory
        self._naive = naive
        self._read: dict[Path, int] = {}
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._follow, daemon=True)

    def __enter__(self) -> Journals:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def wait_for(self, rows: int) -> None:
        """Wait until ``rows`` in all are journalled. Raises ``RuntimeError`` when rows were skipped, or none came for
        a minute."""
        heard, seen = time.monotonic(), self.rows
        while self.rows < rows:
            if self.skips:
                raise RuntimeError(f"the tap skipped requests: {dict(self.skips)}")
            if self.rows != seen:
                heard, seen = time.monotonic(), self.rows
            if time.monotonic() - heard > IDLE_SECONDS:
                raise RuntimeError(f"{rows} rows were captured, {self.rows} are journalled, and no more come")
            time.sleep(POLL_SECONDS)

    def _follow(self) -> None:
        while not self._stop.wait(POLL_SECONDS):
            for run in self._runs:
                for journal in self._directory.glob(f"{run}/journal-*.jsonl"):
                    self._take(journal)
                for path in self._naive.glob(f"fleetdump_{run}_*.pt"):
                    path.unlink()

    def _take(self, journal: Path) -> None:
        records, self._read[journal] = read_journal(journal, self._read.get(journal, 0))
        for record in records:
            if isinstance(record, PieceRecord):
                self.bytes += record.bytes
                self.rows += record.rows
            elif isinstance(record, SkipRecord):
                self.skips[record.reason] += 1
            elif isinstance(record, ShardRecord):
                with contextlib.suppress(FileNotFoundError):
                    (journal.parent / record.shard).unlink()
