"""The figures of one server that holds SGLang's own forward, the tapped and the naive one."""

from __future__ import annotations

import http.client
import json
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.capture import figures
from bench.capture.journal import Journals
from bench.capture.limits import plain_write
from bench.capture.load import OTHERS, Load, Prompts, for_requests, for_seconds, post, run_load
from bench.capture.server import NAIVE, ORIGINAL, TAPPED, Engine, Server

FAST, DISK = "fast", "disk"
"""Runs: one lies in memory, the other on the disk."""
LAYERS_OF_A_FULL_MODEL = 61
"""DeepSeek-V3's."""
CHECKED_LENGTHS = (5, 64, 300, 1000)
WANTED_US = 200.0, 5.0
"""Of the forward's thread, a batch and a small sample, at most."""
MIB = 1 << 20


@dataclass(frozen=True)
class Settings:
    """How much is measured, and where captured rows go."""

    layers: list[int]
    """Entry ids that are captured."""
    capture_dir: Path
    fast_dir: Path
    disk_dir: Path
    write_to: str
    """The run that is written where the disk's speed is not the question: ``fast`` or ``disk``."""
    shard_bytes: int
    repetitions: int
    seconds: float
    """Of one arm's load in a repetition."""
    long_seconds: float
    clients: int
    """Requests in flight."""
    naive_clients: int
    length: int
    """Tokens a prompt."""
    latency_requests: int
    small_samples: int
    limit_bytes: int
    """Written to the disk in a repetition of ``limit``."""
    window: int
    """Tokens in flight until they are journalled, in ``limit``."""


class Bench:
    """The figures of one server, part by part."""

    def __init__(self, settings: Settings, engine: Engine, server: Server, journals: Journals):
        self.settings = settings
        self.engine = engine
        self.server = server
        self.journals = journals
        self.config = json.loads((engine.model / "config.json").read_text())
        self.prompts = Prompts(self.config["vocab_size"], settings.length)
        self.rates: dict[str, list[float]] = {ORIGINAL: [], TAPPED: [], NAIVE: []}
        self._captured = 0

    # ----------------------------------------------------------------- parts, each gives some of the keys
    def warm_up(self) -> dict[str, Any]:
        """Compile what compiles at first use; between SGLang's own forward and the first capture stands the memory
        that the tap will be compared with."""
        self.load(ORIGINAL, OTHERS, for_requests(2 * self.settings.clients))
        self.load(ORIGINAL, OTHERS, for_requests(2), clients=1)
        self.without_tap = self.server.memory()
        for arm in (TAPPED, NAIVE):
            self.load(arm, self.ours, for_requests(self.settings.clients))
        self.drain()
        return {}

    def inert(self) -> dict[str, Any]:
        """The tap's calls in forwards without a request of ours, less what the timer alone takes in its place."""
        records: dict[bool, list[list[int]]] = {True: [], False: []}
        for _ in range(self.settings.repetitions):
            for empty in records:
                with self.server.timed(empty):
                    self.load(TAPPED, OTHERS, for_requests(20), clients=1)
                records[empty] += self.server.times()
        timer, both = figures.call_us(records[True]), figures.call_us(records[False])
        calls = [total - own for total, own in zip(both, timer, strict=True)]
        return {
            "inert_us_per_forward": round(figures.inert_us(calls, LAYERS_OF_A_FULL_MODEL), 2),
            "inert_us_of_calls": [round(call, 3) for call in calls],
            "inert_forwards": len(records[False]),
        }

    def syncs(self) -> dict[str, Any]:
        """Places in the tap where the forward's thread waits for the GPU."""
        with self.server.syncs_noted():
            self.load(TAPPED, self.ours, for_requests(2 * self.settings.clients))
            self.drain()
        return {"gpu_syncs_in_forward": self.server.syncs()}

    def alternate(self) -> dict[str, Any]:
        """Tokens a second of the three arms, one after the other, again and again."""
        for _ in range(self.settings.repetitions):
            for arm, rids in ((ORIGINAL, OTHERS), (TAPPED, self.ours), (NAIVE, self.ours)):
                # The naive arm is so slow that one batch in flight keeps it busy, and more would only take long.
                clients = self.settings.naive_clients if arm == NAIVE else 0
                self.rates[arm].append(self.load(arm, rids, for_seconds(self.settings.seconds), clients).rate)
                self.drain()
        own, tapped, naive = (self.rates[arm] for arm in (ORIGINAL, TAPPED, NAIVE))
        ratios = [b / a for a, b in zip(own, tapped, strict=True)]
        return {
            "write_ratio_alternating": round(figures.median(ratios), 4),
            "naive_ratio": round(figures.median(tapped) / figures.median(naive), 3),
            "spread": round(figures.spread(ratios), 4),
            "repetitions": self.settings.repetitions,
            "tokens_per_second": {arm: [round(rate) for rate in rates] for arm, rates in self.rates.items()},
        }

    def long(self) -> dict[str, Any]:
        """One long stretch of capturing until the last row is journalled, against the repetitions of SGLang's own
        forward before it (three, if there were none) and three behind it; memory on the way."""
        own = self.rates[ORIGINAL] or self._original(3)
        before, rows, size = self.server.memory(), self.journals.rows, self.journals.bytes
        start = time.perf_counter()
        done, readings = self._stretch(TAPPED, self.ours)
        self.drain()
        spent = time.perf_counter() - start
        assert self.journals.rows - rows == done.tokens, "every row is journalled"
        readings.append(self.server.memory())
        after = self._original(3)
        return {
            "write_ratio": round(done.tokens / spent / figures.median([*own, *after]), 4),
            "original_before_and_after": [[round(rate) for rate in rates] for rates in (own, after)],
            "written_gbps": round((self.journals.bytes - size) / spent / 1e9, 3),
            "written_seconds": round(spent, 1),
            "drain_seconds": round(spent - done.seconds, 3),
            "written_to": self.settings.write_to,
            "waited_seconds": self.server.tap_status().get("waited_seconds"),
            "bytes_per_token": (self.journals.bytes - size) // done.tokens,
            **self._memory(before, readings),
        }

    def growth(self) -> dict[str, Any]:
        """What SGLang's own forward adds to the memory of the process in a stretch as long as that of ``long``, before
        it: what grows under any forward (requests that are done pile up until a decoding step) has grown by then."""
        _, readings = self._stretch(ORIGINAL, OTHERS)
        return {"host_growth_original_mb": self._growth(readings), "original_memory_readings": readings}

    def _stretch(self, arm: str, rids: str) -> tuple[Load, list[dict[str, int]]]:
        """Load of ``long_seconds``, and the memory on the way."""
        readings: list[dict[str, int]] = []
        next_reading, lasts = time.time(), for_seconds(self.settings.long_seconds)

        def more(load: Load) -> bool:
            nonlocal next_reading
            if time.time() >= next_reading:
                readings.append(self.server.memory())
                next_reading = time.time() + self.settings.long_seconds / 20
            return lasts(load)

        return self.load(arm, rids, more), readings

    def _original(self, count: int) -> list[float]:
        """Tokens a second of SGLang's own forward."""
        return [self.load(ORIGINAL, OTHERS, for_seconds(self.settings.seconds)).rate for _ in range(count)]

    def _memory(self, before: dict[str, int], readings: list[dict[str, int]]) -> dict[str, Any]:
        """What the tap added to the process, and what grew meanwhile."""
        resident = [reading["resident"] for reading in readings]
        peak = max(reading.get("allocated_peak", 0) for reading in readings)
        return {
            "host_memory_mb": round((max(resident) - self.without_tap["resident"]) / MIB),
            "gpu_memory_mb": round((peak - self.without_tap.get("allocated_peak", 0)) / MIB),
            "host_growth_mb": self._growth(readings),
            "gpu_reserved_growth_mb": round((readings[-1].get("reserved", 0) - before.get("reserved", 0)) / MIB),
            "gpu_mallocs": readings[-1].get("mallocs", 0) - before.get("mallocs", 0),
            "gpu_alloc_retries": readings[-1].get("retries", 0) - before.get("retries", 0),
            "memory_readings": readings,
        }

    def _growth(self, readings: list[dict[str, int]]) -> float:
        """MiB that the process is larger in the last third of ``readings`` than in the first."""
        third = max(1, len(readings) // 3)
        first, last = (
            figures.median([reading["resident"] for reading in part]) for part in (readings[:third], readings[-third:])
        )
        return round((last - first) / MIB, 1)

    def latency(self) -> dict[str, Any]:
        """Seconds from a request to its answer, one request at a time."""
        seconds: dict[str, list[float]] = {ORIGINAL: [], TAPPED: []}
        for _ in range(self.settings.repetitions):
            for arm, rids in ((ORIGINAL, OTHERS), (TAPPED, self.ours)):
                done = self.load(arm, rids, for_requests(self.settings.latency_requests), clients=1)
                seconds[arm] += done.latencies
                self.drain()
        found = {arm: [figures.percentile(values, share) for share in (0.5, 0.99)] for arm, values in seconds.items()}
        added = [(tapped - own) * 1000 for own, tapped in zip(found[ORIGINAL], found[TAPPED], strict=True)]
        return {
            "added_p50_ms": round(added[0], 3),
            "added_p99_ms": round(added[1], 3),
            "p50_ms": round(found[ORIGINAL][0] * 1000, 2),
            "p99_ms": round(found[ORIGINAL][1] * 1000, 2),
        }

    def small(self) -> dict[str, Any]:
        """Many samples of 8 tokens: time in the forward's thread, over batches of all sizes that came about. SGLang's
        own forward has some of them first: should the server end, it is known whose fault that is."""
        records, samples, left = [], 0, self.settings.small_samples
        requests = {1: min(600, left // 50), 16: min(150, left // 200)}
        requests[256] = max(1, (left - sum(group * count for group, count in requests.items())) // 256)
        for group in requests:
            self.load(ORIGINAL, OTHERS, for_requests(min(40, requests[group])), prompts=self._small(group))
        start = time.perf_counter()
        with self.server.timed():
            for group, count in requests.items():
                self.load(TAPPED, self.ours, for_requests(count), prompts=self._small(group))
                samples += count * group
                records += self.server.times()
        self.drain()
        spent = time.perf_counter() - start
        batch, sample = figures.line_through(records)
        ordered = sorted(records)
        parts = [
            ordered[at : at + max(1, len(ordered) // 4)] for at in range(0, len(ordered), max(1, len(ordered) // 4))
        ]
        return {
            "us_per_batch_small": round(batch, 1),
            "us_per_sample_small": round(sample, 3),
            "small_share_of_wanted": round(figures.share_of(records, *WANTED_US), 3),
            "small_us_by_size": [
                [size, round(spent, 1), round(spent / (WANTED_US[0] + WANTED_US[1] * size), 3)]
                for size, spent in figures.medians_by_size(records)
            ],
            "small_us_of_calls": {
                f"{part[0][0]}-{part[-1][0]}": [round(us, 1) for us in figures.call_us(part)] for part in parts
            },
            "small_samples": samples,
            "small_batches": len(records),
            "small_largest_batch": max(requests for requests, *_ in records),
            "small_samples_per_second": round(samples / spent),
        }

    def _small(self, group: int) -> Prompts:
        """Nothing is decoded: the finished requests of many small batches would pile up until a decoding step."""
        return Prompts(self.config["vocab_size"], 8, group, answer=0)

    def limit(self) -> dict[str, Any]:
        """Capturing to the disk faster than it writes, against plain writes of the same bytes in between. As
        fleetdump's driver does, the load keeps a number of tokens in flight until they are journalled. There is no
        ratio where prefill makes fewer bytes than disk and copy take."""
        plain, ours, copy = [], [], self._copy()
        total = self.settings.limit_bytes
        for _ in range(self.settings.repetitions):
            plain.append(plain_write(self.settings.disk_dir, total, self.settings.shard_bytes))
            ours.append(self._written_at_most(f"fleetdump/{DISK}", total))
        ratios = [written / min(copy, plainly) for written, plainly in zip(ours, plain, strict=True)]
        made = (
            figures.median(self.rates[ORIGINAL] or self._original(3)) * self.journals.bytes / self.journals.rows / 1e9
        )
        limits = {"copy": copy, "disk": figures.median(plain), "prefill": made}
        limited_by = min(limits, key=lambda name: limits[name])
        fast = [plain_write(self.settings.fast_dir, total, self.settings.shard_bytes) for _ in range(3)]
        return {
            "limited_by": limited_by,
            "limit_ratio": None if limited_by == "prefill" else round(figures.median(ratios), 3),
            "limit_written_gbps": round(figures.median(ours), 3),
            "limit_spread": round(figures.spread(ratios), 4),
            "copy_gbps": round(copy, 2),
            "disk_gbps": round(figures.median(plain), 3),
            "shm_gbps": round(figures.median(fast), 3),
        }

    def _written_at_most(self, rids: str, total: int) -> float:
        """GB/s from the first journal line to the last of about ``total`` bytes."""
        rows, size = self.journals.rows, self.journals.bytes
        marks: list[tuple[float, int]] = []

        def more(load: Load) -> bool:
            while load.tokens - (self.journals.rows - rows) > self.settings.window:
                time.sleep(0.002)
            if not marks and self.journals.bytes > size:
                marks.append((time.perf_counter(), self.journals.bytes))
            return self.journals.bytes - size < total

        self.load(TAPPED, rids, more)
        self.drain()
        began, first = marks[0]
        return (self.journals.bytes - first) / (time.perf_counter() - began) / 1e9

    def _copy(self) -> float:
        script = Path(__file__).with_name("limits.py")
        return float(self.engine.run([str(script), "512"]))

    def check(self) -> dict[str, Any]:
        """The same prompts one at a time through the naive arm and the tapped one: the rows must be the same."""
        ids = [[3 + (7 * k) % (self.config["vocab_size"] - 3) for k in range(n)] for n in CHECKED_LENGTHS]
        ids.append([3 + k % 250 for k in range(5 * self.settings.length)])
        for arm in (NAIVE, TAPPED):
            self.server.arm(arm)
            connection = http.client.HTTPConnection("127.0.0.1", self.server.port, timeout=300)
            for number, prompt in enumerate(ids):
                sampling = {"temperature": 0, "max_new_tokens": 1}
                body = {"rid": f"fleetdump/check/{number}/1", "input_ids": prompt, "sampling_params": sampling}
                post(connection, json.dumps(body).encode())
            connection.close()
        run = self.settings.capture_dir / "check"
        deadline = time.monotonic() + 30
        while (not list(run.glob("shard-*.safetensors")) or list(run.glob("*.part"))) and time.monotonic() < deadline:
            time.sleep(0.1)
        script = Path(__file__).with_name("check.py")
        try:
            return {"check": json.loads(self.engine.run([str(script), str(self.server.naive_folder), str(run)]))}
        finally:
            shutil.rmtree(run)
            for path in self.server.naive_folder.iterdir():
                path.unlink()

    # ----------------------------------------------------------------- load
    @property
    def ours(self) -> str:
        return f"fleetdump/{self.settings.write_to}"

    def load(
        self, arm: str, rids: str, more: Callable[[Load], bool], clients: int = 0, prompts: Prompts | None = None
    ) -> Load:
        """Load on ``arm``; the rows of requests that are ours count as captured, for ``drain``."""
        self.server.arm(arm)
        done = run_load(self.server.port, prompts or self.prompts, rids, clients or self.settings.clients, more)
        if arm == TAPPED and rids != OTHERS:
            self._captured += done.tokens
        return done

    def drain(self) -> None:
        """Wait until every captured row is journalled. Raises ``RuntimeError`` with the tap's words if not."""
        try:
            self.journals.wait_for(self._captured)
        except RuntimeError as error:
            raise RuntimeError(f"{error}; the tap: {self.server.tap_lines()}") from None
