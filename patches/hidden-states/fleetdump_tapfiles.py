"""The tap's writer threads (docs/formats.md of fleetdump): what the forward hands over goes to disk, beside it.

Standard library alone. The forward's thread only calls ``TapWriter.take``, ``put`` and ``skip``, which do no I/O and
wait for no thread that does.
"""

from __future__ import annotations

import json
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fleetdump_taprecords import Config, Gauge, Load, Norm, Piece, PlainLoad, Skip, run_of
from fleetdump_taprun import Counts, Order, Run

logger = logging.getLogger(__name__)

GROUP_BYTES = 128 << 20
"""What one thread writes before it fsyncs, if so much waits."""
REPORT_SECONDS = 1.0
SLOW_DOWN_FILL = 0.5
"""How full the ring may get before the driver is to send less."""


@dataclass
class _Waiting:
    run: Run
    load: Load
    order: Order


class TapWriter:
    """Two queues and their threads: a courier that fetches loads, writers that write them. And a keeper that journals
    skips, closes what is idle and reports.

    ``rank`` names the writer; ``norm`` is written once into each run's directory. ``folder``: where in a run's
    directory it writes, which is nowhere deeper for what belongs to the data. ``gauge``: how full the
    memory of loads is.
    """

    def __init__(
        self,
        config: Config,
        rank: int,
        norm: Norm | None,
        folder: str = "",
        gauge: Callable[[], Gauge] = Gauge,
    ):
        self._config = config
        self._role = f"r{rank}"
        self._norm = norm
        self._folder = folder
        self._counts = Counts()
        lock = threading.Lock()
        self._changed = threading.Condition(lock)
        self._arrived = threading.Condition(lock)
        self._coming: deque[_Waiting] = deque()
        """To be fetched; what is being fetched stays at its head."""
        self._queue: deque[_Waiting] = deque()
        self._skips: list[Skip] = []
        self._runs: dict[str, Run] = {}
        self._writers = 0
        self._closing = 0
        self._keeping = False
        self._stopping = False
        self._status = _Status(config, self._role, self._counts, gauge)
        self._threads = [
            threading.Thread(target=target, name=f"fleetdump-tap-{number}", daemon=True)
            for number, target in enumerate([self._keep, self._fetch, *[self._write] * config.threads])
        ]
        for thread in self._threads:
            thread.start()

    def take(self, loads: Sequence[Load]) -> None:
        """Have loads written. Those of a run are journalled in the order in which they come here."""
        with self._changed:
            for load in loads:
                run = self._run(load.run)
                self._coming.append(_Waiting(run, load, run.expect()))
            self._arrived.notify()

    def put(self, pieces: Sequence[Piece]) -> None:
        """Have pieces written that lie in memory of their own."""
        runs = dict.fromkeys(run_of(piece.rid) for piece in pieces)
        self.take([PlainLoad([piece for piece in pieces if run_of(piece.rid) == run]) for run in runs])

    def skip(self, skips: Sequence[Skip]) -> None:
        """Have requests journalled as skipped."""
        if skips:
            with self._changed:
                self._skips += skips
                self._changed.notify_all()

    def drain(self, seconds: float) -> bool:
        """Wait until everything that was handed over is journalled; whether it was in time. Shards stay open."""
        with self._changed:
            return self._changed.wait_for(self._is_drained, seconds)

    def stop(self, seconds: float = 10.0) -> None:
        """Write what is queued, close everything and end the threads."""
        end = time.monotonic() + seconds
        with self._changed:
            self._stopping = True
            self._changed.notify_all()
            self._arrived.notify_all()
        for thread in self._threads:
            thread.join(max(0.0, end - time.monotonic()))

    def _is_drained(self) -> bool:
        return not (self._coming or self._queue or self._skips or self._writers or self._keeping)

    def _run(self, name: str) -> Run:
        run = self._runs.get(name)
        if run is None:
            writer = f"{self._config.server}-{self._config.launch_id}-{self._role}"
            run = self._runs[name] = Run(self._config, name, writer, self._norm, self._counts, self._folder)
        return run

    # ------------------------------------------------------------------ courier
    def _fetch(self) -> None:
        while True:
            with self._changed:
                self._arrived.wait_for(lambda: self._coming or self._stopping)
                if not self._coming:
                    return
                waiting = self._coming[0]
            try:
                waiting.load.fetch()
            except Exception as error:
                logger.exception("fleetdump-tap: the courier goes on after")
                waiting.order.lost = repr(error)
            with self._changed:
                self._coming.popleft()
                self._queue.append(waiting)
                self._changed.notify()

    # ------------------------------------------------------------------ writer threads
    def _write(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._queue or self._to_close() or self._is_over())
                run, group = self._to_close(), self._group()
                if not group and run is None:
                    return
                self._writers += bool(group)
                self._closing += not group
            try:
                if group:
                    group[0].run.write([(waiting.load, waiting.order) for waiting in group])
                elif run is not None:
                    run.close_one()
            except Exception:
                logger.exception("fleetdump-tap: the writer goes on after")
            with self._changed:
                self._writers -= bool(group)
                self._closing -= not group
                self._changed.notify_all()

    def _group(self) -> list[_Waiting]:
        """The next loads of one run: this thread's part of what waits, at most about ``GROUP_BYTES``; none when closing
        shards would be left behind."""
        if self._to_close() is not None and self._closing < max(1, self._config.threads // 2):
            return []
        group: list[_Waiting] = []
        size, idle = 0, self._config.threads - self._writers - self._closing
        most = -(-len(self._queue) // max(1, idle))
        while len(group) < most and size < GROUP_BYTES and (not group or self._queue[0].run is group[0].run):
            group.append(self._queue.popleft())
            size += group[-1].load.bytes
        return group

    def _to_close(self) -> Run | None:
        """A run with a shard that can be closed now."""
        return next((run for run in self._runs.values() if run.has_to_close()), None)

    def _is_over(self) -> bool:
        runs = self._runs.values()
        return (
            self._stopping and not (self._coming or self._queue or self._skips) and all(run.is_idle() for run in runs)
        )

    # ------------------------------------------------------------------ keeper
    def _keep(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._skips or self._stopping, self._tick())
                skips, self._skips = self._skips, []
                skipped = [(self._run(name), name) for name in dict.fromkeys(skip.run for skip in skips)]
                self._keeping = True
            try:
                for run, name in skipped:
                    run.skip([skip for skip in skips if skip.run == name])
                self._tidy()
                self._status.report(self._stopping)
            except Exception:
                logger.exception("fleetdump-tap: the keeper goes on after")
            with self._changed:
                self._keeping = False
                self._changed.notify_all()
                if self._is_over() and not self._writers and not self._closing:
                    return
            if self._stopping:
                time.sleep(0.01)

    def _tick(self) -> float:
        return min(REPORT_SECONDS, self._config.idle_close_seconds)

    def _tidy(self) -> None:
        """Close what is idle, forget runs that have nothing open."""
        with self._changed:
            runs = list(self._runs.items())
        for _, run in runs:
            run.rest(0.0 if self._stopping else self._config.idle_close_seconds)
            run.let_go()
        with self._changed:
            for name, run in runs:
                if run.is_idle():
                    del self._runs[name]


class _Status:
    """``tap-<role>-<pid>.json``, replaced at most once a second; best effort."""

    def __init__(self, config: Config, role: str, counts: Counts, gauge: Callable[[], Gauge]):
        self._config = config
        self._role = role
        self._counts = counts
        self._gauge = gauge
        self._written = 0.0
        self._bytes = 0
        self._waited = 0.0

    def report(self, at_once: bool) -> None:
        now = time.monotonic()
        if not self._config.status_dir or (now - self._written < REPORT_SECONDS and not at_once):
            return
        path = Path(self._config.status_dir) / f"tap-{self._role}-{os.getpid()}.json"
        if not self._written:
            self._sweep(path.parent)
        status = self._fields(now - self._written)
        self._written = now
        temporary = path.with_name(path.name + ".tmp")
        with suppress(OSError):
            temporary.write_text(json.dumps(status) + "\n")
            os.replace(temporary, path)

    def _sweep(self, directory: Path) -> None:
        """Remove what earlier launches have left."""
        for path in directory.glob(f"tap-{self._role}-*.json"):
            with suppress(OSError, ValueError, KeyError):
                if json.loads(path.read_text())["launch_id"] != self._config.launch_id:
                    path.unlink()

    def _fields(self, seconds: float) -> dict[str, Any]:
        counts, gauge = self._counts, self._gauge()
        written, self._bytes = counts.bytes - self._bytes, counts.bytes
        waited, self._waited = gauge.waited - self._waited, gauge.waited
        return {
            "v": 1,
            "server": self._config.server,
            "launch_id": self._config.launch_id,
            "role": self._role,
            "pid": os.getpid(),
            "rows": counts.rows,
            "bytes": counts.bytes,
            "bytes_per_second": written / seconds,
            "ring_bytes": gauge.capacity,
            "queue_bytes": gauge.used,
            "slow_down": waited > 0 or gauge.peak > SLOW_DOWN_FILL * gauge.capacity > 0,
            "waited_seconds": gauge.waited,
            "skips": dict(counts.skips),
            "errors": counts.errors,
            "last_error": counts.last_error,
            "failing": counts.failing,
            "t": time.time(),
        }
