"""What a diagnosis costs the host and the server it looks at, on a stand-in tree of 8 ranks with 60 threads each.

One rank works and never sleeps; the others sleep. It counts its turns in shared memory, and how long it was stopped:
the wall time of a pause, less the time in which the kernel says that it ran or waited for a core (schedstat). So a
tracer's stop counts and a crowded machine does not; a pause as such, which holds both, is told beside it.
Prints {stage1_wall_s, stage1_host_cpu_s, throughput_ratio_stage1, stage2_wall_s, max_stop_ms}, and writes
bench/results/diagnose_cost.json. Stage 1 includes the 5 s between its two samples; the ratio is the median of
``ROUNDS``, each against the same rank alone just before and just after. Where others work on the machine the ratio
says more of them; ``stage1_core_share`` (CPU seconds a second) bounds what a rank can lose that shares its core with
us all the time. ``max_stop_ms`` is of stage 2 without py-spy, whose own sampling is told as ``max_stop_py_spy_ms``;
``max_stop_stage1_ms`` should be nothing but the reading's error, some 4 ms (a scheduler tick).
Repeat: ``python -m bench.diagnose_cost``.

``--port N`` looks at a real SGLang server instead, which is there and listens on that port of this machine: clients in
a process of their own keep it busy, and stretches with stage 1 alternate with stretches alone, each of about the same
length. ``throughput_ratio_stage1`` is then the median over ``--pairs`` of its tokens a second against the mean of the
stretches before and after; beside it stand the quartiles, and those of a stretch alone against its neighbours alone
(``ratio_alone``): what the unrest of this machine makes of a ratio that should be 1.
On one H200: bench/h200/diagnose_cost.sh.
"""

from __future__ import annotations

import argparse
import itertools
import json
import mmap
import os
import signal
import statistics
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from unittest.mock import patch

from bench.busyserver import Load
from fleetdump.agent import evidence as collecting
from fleetdump.agent import procfs, targets
from fleetdump.agent.context import State
from fleetdump.agent.evidence_types import Target, WatchFacts
from fleetdump.agent.probes import stacks
from fleetdump.agent.probes.bounded import ProbeFailed

RANKS = 8
WINDOW = 10.0
SHORT = 0.5
"""Seconds between two samples: of stage 1, and where only stage 2 is of interest."""
ROUNDS = 3
RESULTS = Path(__file__).parent / "results" / "diagnose_cost.json"
COUNTS = struct.Struct("=Qdd")
RESET = COUNTS.size
SLEEPER = """
import threading, time
for _ in range(60):
    threading.Thread(target=time.sleep, args=(1e6,), daemon=True).start()
"""
BUSY = """
import mmap, os, struct, time
file = open({path!r}, "r+b")
shared = mmap.mmap(file.fileno(), 4096)
own = os.open("/proc/thread-self/schedstat", os.O_RDONLY)

def wanted():  # seconds in which this thread ran or waited for a core
    return sum(map(int, os.pread(own, 99, 0).split()[:2])) / 1e9

turns, pause, stopped, last = 0, 0.0, 0.0, time.monotonic()
base, base_wanted = last, wanted()
while True:
    now = time.monotonic()
    turns += 1
    if now - last > 0.002 or now - base > 0.02:
        ran = wanted()
        stopped = max(stopped, now - base - (ran - base_wanted))
        pause = max(pause, now - last)
        base, base_wanted = now, ran
    last = now
    if not turns % 64:
        if shared[{reset}]:
            pause, stopped, shared[{reset}] = 0.0, 0.0, 0
        struct.pack_into("=Qdd", shared, 0, turns, pause, stopped)
"""
PARENT = """
import subprocess, sys, time
for rank, code in enumerate(sys.argv[sys.argv.index("--") + 1:]):
    subprocess.Popen([f"sglang::scheduler_TP{rank}", "-S", "-c", code], executable=sys.executable)
time.sleep(1e6)
"""


@dataclass(frozen=True)
class Seen:
    """Turns a second of the working rank, its longest pause and its longest stop (milliseconds)."""

    rate: float
    pause: float
    stopped: float


@dataclass
class Cost:
    """Seconds of wall time and of CPU; ``ratio`` is the rank's rate against its rate alone."""

    wall: float
    cpu: float
    seen: Seen
    ratio: float = 0.0


class Busy:
    """The counters of the rank that works."""

    def __init__(self, path: Path) -> None:
        path.write_bytes(bytes(4096))
        self._file = path.open("r+b")
        self._shared = mmap.mmap(self._file.fileno(), 4096)

    def during(self, work: Callable[[], object]) -> Seen:
        """What the rank did while ``work`` ran."""
        self._shared[RESET] = 1
        time.sleep(0.1)
        before, start = COUNTS.unpack_from(self._shared)[0], time.monotonic()
        work()
        after, pause, stopped = COUNTS.unpack_from(self._shared)
        return Seen((after - before) / (time.monotonic() - start), pause * 1000, max(0.0, stopped) * 1000)

    def alone(self) -> Seen:
        """What it does when nobody looks."""
        return self.during(lambda: time.sleep(WINDOW))


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.diagnose_cost", description="What a diagnosis costs.")
    parser.add_argument("--port", type=int, help="measure the throughput of the SGLang server that listens here")
    parser.add_argument("--pairs", type=int, default=9, help="stretches with stage 1 (default 9)")
    parser.add_argument("--clients", type=int, default=8, help="requests at a time (default 8)")
    parser.add_argument("--results", type=Path, help="file for the figures")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="fleetdump-bench-") as scratch:
        if options.port:
            figures = real_server(options.port, options.pairs, options.clients, Path(scratch))
        else:
            figures = stand_in(Path(scratch))
    text = json.dumps(figures, indent=1)
    print(text)
    results = options.results or (None if options.port else RESULTS)
    if results:
        results.parent.mkdir(parents=True, exist_ok=True)
        results.write_text(text + "\n")


def real_server(port: int, pairs: int, clients: int, scratch: Path) -> dict[str, object]:
    """Tokens a second of a busy server with and without stage 1, in turns."""
    target = targets.by_port(port)
    collector = collecting.Collector(target, WINDOW, None, State(scratch / "state"))
    walls, cpus, alone, during = [], [], [], []
    with Load(port, clients, scratch) as load:
        load.warm_up(20 * clients)
        collector.stage_one()
        alone.append(_rate(load, lambda: time.sleep(WINDOW)))
        for _ in range(pairs):
            start, used = time.monotonic(), sum(os.times()[:4])
            during.append(_rate(load, collector.stage_one))
            walls.append(time.monotonic() - start)
            cpus.append(sum(os.times()[:4]) - used)
            alone.append(_rate(load, lambda wall=walls[-1]: time.sleep(wall)))
    ratios = [2 * rate / (alone[n] + alone[n + 1]) for n, rate in enumerate(during)]
    quiet = [second / first for first, second in itertools.pairwise(alone)]
    return {
        "server": f"{target.ranks} ranks, {sum(1 for _ in procfs.tree(target.pid))} processes",
        "stage1_wall_s": round(statistics.median(walls), 2),
        "stage1_host_cpu_s": round(statistics.median(cpus), 2),
        "stage1_core_share": round(statistics.median(cpu / wall for cpu, wall in zip(cpus, walls, strict=True)), 3),
        "throughput_ratio_stage1": round(statistics.median(ratios), 3),
        "ratio_quartiles": _quartiles(ratios),
        "ratio_alone": round(statistics.median(quiet), 3),
        "ratio_alone_quartiles": _quartiles(quiet),
        "tokens_per_s_alone": round(statistics.median(alone), 1),
        "pairs": pairs,
        "clients": clients,
        "load": round(os.getloadavg()[0], 1),
        "cores": len(os.sched_getaffinity(0)),
    }


def _rate(load: Load, work: Callable[[], object]) -> float:
    """Tokens a second while ``work`` runs."""
    before, start = load.tokens, time.monotonic()
    work()
    return (load.tokens - before) / (time.monotonic() - start)


def _quartiles(values: list[float]) -> list[float]:
    first, _, third = statistics.quantiles(values, n=4)
    return [round(first, 3), round(third, 3)]


def stand_in(scratch: Path) -> dict[str, float]:
    """All figures of a tree of processes that look like a server's."""
    busy = Busy(scratch / "counters")
    code = BUSY.format(path=str(scratch / "counters"), reset=RESET)
    codes = [code, *[SLEEPER + "time.sleep(1e6)"] * (RANKS - 1)]
    argv = [sys.executable, "-S", "-c", PARENT, "sglang.launch_server", "--tp-size", str(RANKS), "--", *codes]
    server = subprocess.Popen(argv, start_new_session=True)
    try:
        while sum(sample.role == "scheduler" for sample in procfs.tree(server.pid)) < RANKS:
            time.sleep(0.1)
        time.sleep(1.0)
        return measure(server.pid, busy, scratch)
    finally:
        os.killpg(server.pid, signal.SIGKILL)
        server.wait()


def measure(pid: int, busy: Busy, scratch: Path) -> dict[str, float]:
    """All figures."""
    target = Target(pid, 0, pid, "", 1, ranks=RANKS, python=sys.executable)  # py-spy lies beside it
    state = State(scratch / "state")
    rounds = [stage_one(target, state, busy) for _ in range(ROUNDS)]
    with_py_spy = stage_two(target, state, busy)
    with patch.object(stacks, "find_py_spy", side_effect=ProbeFailed("left out")):
        without = stage_two(target, state, busy)
    quiet = busy.alone()
    return {
        "stage1_wall_s": round(statistics.median(one.wall for one in rounds), 2),
        "stage1_host_cpu_s": round(statistics.median(one.cpu for one in rounds), 2),
        "stage1_core_share": round(statistics.median(one.cpu / one.wall for one in rounds), 3),
        "throughput_ratio_stage1": round(statistics.median(one.ratio for one in rounds), 3),
        "stage2_wall_s": round(with_py_spy.wall, 2),
        "max_stop_ms": round(without.seen.stopped, 1),
        "max_stop_py_spy_ms": round(with_py_spy.seen.stopped, 1),
        "max_stop_stage1_ms": round(max(one.seen.stopped for one in rounds), 1),
        "longest_pause_ms": round(without.seen.pause, 1),
        "quiet_stop_ms": round(quiet.stopped, 1),
        "quiet_pause_ms": round(quiet.pause, 1),
        "load": round(os.getloadavg()[0], 1),
        "cores": float(len(os.sched_getaffinity(0))),
    }


def stage_one(target: Target, state: State, busy: Busy) -> Cost:
    """Stage 1 against the rank alone."""
    collector = collecting.Collector(target, WINDOW, None, state)
    before = busy.alone()
    cost = _cost(collector.stage_one, busy)
    after = busy.alone()
    cost.ratio = cost.seen.rate / ((before.rate + after.rate) / 2)
    return cost


def stage_two(target: Target, state: State, busy: Busy) -> Cost:
    """Stage 2 alone, of a server that shows no progress (it has no log and reads nothing)."""
    collector = collecting.Collector(target, SHORT, WatchFacts("serving", 100.0, 60.0), state)
    found = collector.stage_one()
    return _cost(lambda: collector.stage_two(found), busy)


def _cost(work: Callable[[], object], busy: Busy) -> Cost:
    """Wall and CPU seconds (children too) of ``work``, and what the rank saw of it."""
    start, used = time.monotonic(), sum(os.times()[:4])
    seen = busy.during(work)
    return Cost(time.monotonic() - start, sum(os.times()[:4]) - used, seen)


if __name__ == "__main__":
    main()
