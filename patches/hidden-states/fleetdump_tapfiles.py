"""The tap's writer threads (docs/formats.md of fleetdump): what the forward hands over goes to disk, beside it.

Standard library alone. The forward's thread only calls ``TapWriter.take``, which takes no lock. What the others have to
do in Python they do in few and short steps: they share the interpreter's lock with it.
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
from queue import SimpleQueue
from typing import Any

from fleetdump_taprecords import Config, Gauge, Load, Norm, Piece, PlainLoad, PlainShipment, Shipment, Skip, run_of
from fleetdump_taprun import Counts, Order, Run

logger = logging.getLogger(__name__)

GROUP_BYTES = 128 << 20
"""What one thread writes before it fsyncs, if so much waits."""
SHARE_BYTES = 32 << 20
"""What must wait before a further thread is woken for it."""
REPORT_SECONDS = 1.0
SLOW_DOWN_FILL = 0.5
"""How full the ring may get before the driver is to send less."""


@dataclass
class _Waiting:
    run: Run
    load: Load
    order: Order


class TapWriter:
    """Threads: a courier that brings what forwards hand over into memory, writers that write it, a keeper that journals
    skips and closes what is idle, and a reporter, which touches no run's files: it speaks while a disk hangs.

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
        self._coming: deque[Shipment] = deque()
        """Handed over; what is being unloaded stays at its head."""
        self._bell: SimpleQueue[None] = SimpleQueue()
        """Rings once for each of them, and to stop: neither takes a lock that a thread could hold."""
        lock = threading.Lock()
        self._work = threading.Condition(lock)
        """Of the writers. There is one for each kind of thread: who is woken for nothing takes the interpreter, too."""
        self._asked = threading.Condition(lock)
        """Of the keeper."""
        self._settled = threading.Condition(lock)
        """Of who waits in ``drain``."""
        self._queue: deque[_Waiting] = deque()
        self._queued = 0
        """Bytes in it."""
        self._overdue = False
        """Whether what waits must not wait for the threads that are at work."""
        self._skips: list[Skip] = []
        self._runs: dict[str, Run] = {}
        self._writers = 0
        self._closing = 0
        self._keeping = False
        self._stopping = False
        self._kept = threading.Event()
        """Set when the keeper has ended."""
        self._status = _Status(config, self._role, self._counts, gauge)
        self._threads = [
            threading.Thread(target=target, name=f"fleetdump-tap-{number}", daemon=True)
            for number, target in enumerate([self._keep, self._report, self._unload, *[self._write] * config.threads])
        ]
        for thread in self._threads:
            thread.start()

    def take(self, shipment: Shipment) -> None:
        """Have a forward's rows written. Those of a run are journalled in the order in which they come here."""
        self._coming.append(shipment)
        self._bell.put(None)

    def put(self, pieces: Sequence[Piece]) -> None:
        """Have pieces written that lie in memory of their own."""
        runs = dict.fromkeys(run_of(piece.rid) for piece in pieces)
        self.take(PlainShipment([PlainLoad([p for p in pieces if run_of(p.rid) == run]) for run in runs]))

    def skip(self, skips: Sequence[Skip]) -> None:
        """Have requests journalled as skipped."""
        if skips:
            with self._asked:
                self._skips += skips
                self._asked.notify()

    def drain(self, seconds: float) -> bool:
        """Wait until everything that was handed over is journalled; whether it was in time. Shards stay open."""
        with self._settled:
            return self._settled.wait_for(self._is_drained, seconds)

    def stop(self, seconds: float = 10.0) -> None:
        """Write what is queued, close everything and end the threads."""
        end = time.monotonic() + seconds
        with self._asked:
            self._stopping = True
            self._asked.notify()
        self._bell.put(None)
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
    def _unload(self) -> None:
        while True:
            self._bell.get()
            if not self._coming:  # it rang to stop
                return
            try:
                self._coming[0].unload(self._deliver, self.skip)
            except Exception:
                logger.exception("fleetdump-tap: the courier goes on after")
            with self._settled:
                self._coming.popleft()
                self._settled.notify_all()

    def _deliver(self, load: Load) -> None:
        with self._work:
            run = self._run(load.run)
            self._queue.append(_Waiting(run, load, run.expect()))
            self._queued += load.bytes
            self._wake()

    # ------------------------------------------------------------------ writer threads
    def _write(self) -> None:
        while True:
            with self._work:
                self._work.wait_for(lambda: self._wants_thread() or self._is_over())
                run, group = self._to_close(), self._group()
                if not group and run is None:
                    return
                self._writers += bool(group)
                self._closing += not group
                self._wake()
            try:
                if group:
                    group[0].run.write([(waiting.load, waiting.order) for waiting in group])
                elif run is not None:
                    run.close_one()
            except Exception:
                logger.exception("fleetdump-tap: the writer goes on after")
            with self._settled:
                self._writers -= bool(group)
                self._closing -= not group
                self._settled.notify_all()

    def _wake(self) -> None:
        """Wake a thread if there is something for one more."""
        if self._wants_thread():
            self._work.notify()

    def _wants_thread(self) -> bool:
        """Whether one more thread should work: those that do are enough for what is little, as they will be free soon
        and can write it as one group."""
        more = not self._writers or self._overdue or self._queued >= SHARE_BYTES
        return bool(self._queue and more) or (self._closing < self._most_closing and self._to_close() is not None)

    @property
    def _most_closing(self) -> int:
        return max(1, self._config.threads // 2)

    def _group(self) -> list[_Waiting]:
        """The next loads of one run: this thread's part of what waits, at most about ``GROUP_BYTES``; none when closing
        shards would be left behind."""
        if self._closing < self._most_closing and self._to_close() is not None:
            return []
        group: list[_Waiting] = []
        size, idle = 0, self._config.threads - self._writers - self._closing
        fair = max(SHARE_BYTES, self._queued // max(1, idle))
        while self._queue and size < min(fair, GROUP_BYTES) and (not group or self._queue[0].run is group[0].run):
            group.append(self._queue.popleft())
            size += group[-1].load.bytes
        self._queued -= size
        self._overdue = False
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
            with self._asked:
                self._asked.wait_for(lambda: self._skips or self._stopping, self._tick())
                skips, self._skips = self._skips, []
                skipped = [(self._run(name), name) for name in dict.fromkeys(skip.run for skip in skips)]
                self._keeping = True
            try:
                for run, name in skipped:
                    run.skip([skip for skip in skips if skip.run == name])
                self._tidy()
            except Exception:
                logger.exception("fleetdump-tap: the keeper goes on after")
            with self._settled:
                self._keeping = False
                self._settled.notify_all()
                if self._is_over() and not self._writers and not self._closing:
                    self._work.notify_all()
                    self._kept.set()
                    return
            if self._stopping:
                time.sleep(0.01)

    def _tick(self) -> float:
        return min(REPORT_SECONDS, self._config.idle_close_seconds)

    def _tidy(self) -> None:
        """Close what is idle, forget runs that have nothing open."""
        with self._work:
            runs = list(self._runs.items())
        for _, run in runs:
            run.rest(0.0 if self._stopping else self._config.idle_close_seconds)
            run.let_go()
        with self._work:
            for name, run in runs:
                if run.is_idle():
                    del self._runs[name]

    # ------------------------------------------------------------------ reporter
    def _report(self) -> None:
        ended = False
        while not ended:
            ended = self._kept.wait(REPORT_SECONDS)
            with self._work:
                # A thread that hangs (a network file system) must not keep what waits behind it.
                self._overdue = bool(self._queue)
                self._wake()
            try:
                self._status.report()
            except Exception:
                logger.exception("fleetdump-tap: the reporter goes on after")


class _Status:
    """``tap-<role>-<pid>.json``; best effort."""

    def __init__(self, config: Config, role: str, counts: Counts, gauge: Callable[[], Gauge]):
        self._config = config
        self._role = role
        self._counts = counts
        self._gauge = gauge
        self._written = 0.0
        self._bytes = 0
        self._waited = 0.0

    def report(self) -> None:
        now = time.monotonic()
        if not self._config.status_dir:
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
            with suppress(OSError, ValueError, KeyError, TypeError):
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
