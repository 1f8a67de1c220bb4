"""What a diagnosis costs the host and the server it looks at, on a stand-in tree of 8 ranks with 60 threads each.

One rank counts loop turns and the longest pause between two of them, in shared memory; the others sleep. Its rate is
compared with the same rank left alone, before and after. Stage 2 is forced with ``deep``.
Prints {stage1_wall_s, stage1_host_cpu_s, throughput_ratio_stage1, stage2_wall_s, max_stop_ms}; stage 1 includes the 5 s
between its two samples. ``quiet_stop_ms`` is the longest pause without any diagnosis: the
machine's own share of ``max_stop_ms``. Repeat: ``python -m bench.diagnose_cost``.
"""

from __future__ import annotations

import io
import json
import mmap
import os
import signal
import struct
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from fleetdump.agent import evidence as collecting
from fleetdump.agent import procfs
from fleetdump.agent.context import AgentContext, State
from fleetdump.agent.evidence_types import Target, WatchFacts
from fleetdump.agent.protocol import Request

RANKS = 8
WINDOW = 5.0
SHORT = 0.5
"""Seconds between two samples: of stage 1, and where only stage 2 is of interest."""
COUNTS = struct.Struct("=Qd")
SLEEPER = """
import threading, time
for _ in range(60):
    threading.Thread(target=time.sleep, args=(1e6,), daemon=True).start()
"""
BUSY = """
import mmap, struct, sys, time
file = open({path!r}, "r+b")
shared = mmap.mmap(file.fileno(), 4096)
turns, longest, last = 0, 0.0, time.monotonic()
while True:
    now = time.monotonic()
    turns += 1
    longest = max(longest, now - last)
    last = now
    if not turns % 64:
        if shared[16]:
            longest, shared[16] = 0.0, 0
        struct.pack_into("=Qd", shared, 0, turns, longest)
"""
PARENT = """
import subprocess, sys, time
for rank, code in enumerate(sys.argv[sys.argv.index("--") + 1:]):
    subprocess.Popen([f"sglang::scheduler_TP{rank}", "-S", "-c", code], executable=sys.executable)
time.sleep(1e6)
"""


class Busy:
    """The counters of the rank that works."""

    def __init__(self, path: Path) -> None:
        path.write_bytes(bytes(4096))
        self._file = path.open("r+b")
        self._shared = mmap.mmap(self._file.fileno(), 4096)

    def during(self, work: object) -> tuple[float, float]:
        """Turns a second, and the longest pause in milliseconds, while ``work`` runs."""
        assert callable(work)
        self._shared[16] = 1
        time.sleep(0.1)
        before, start = COUNTS.unpack_from(self._shared)[0], time.monotonic()
        work()
        after, longest = COUNTS.unpack_from(self._shared)
        return (after - before) / (time.monotonic() - start), longest * 1000


def main() -> None:
    with tempfile.TemporaryDirectory(prefix="fleetdump-bench-") as scratch:
        busy = Busy(Path(scratch) / "counters")
        codes = [BUSY.format(path=str(Path(scratch) / "counters")), *[SLEEPER + "time.sleep(1e6)"] * (RANKS - 1)]
        argv = [sys.executable, "-S", "-c", PARENT, "sglang.launch_server", "--tp-size", str(RANKS), "--", *codes]
        server = subprocess.Popen(argv, start_new_session=True)
        try:
            while sum(sample.role == "scheduler" for sample in procfs.tree(server.pid)) < RANKS:
                time.sleep(0.1)
            time.sleep(1.0)
            print(json.dumps(measure(server.pid, busy, Path(scratch)), indent=1))
        finally:
            os.killpg(server.pid, signal.SIGKILL)
            server.wait()


def measure(pid: int, busy: Busy, scratch: Path) -> dict[str, float]:
    """All figures, with the rank left alone before and after."""
    target = Target(pid, 0, pid, "", 1, ranks=RANKS)
    context = AgentContext(Request("evidence", {}), State(scratch / "state"), io.BytesIO(), io.BytesIO())

    def collect(seconds: float, deep: bool) -> None:
        collecting.collect(target, context, seconds=seconds, deep=deep, watch_facts=WatchFacts("serving", 0.0, 60.0))

    alone, quiet = busy.during(lambda: time.sleep(WINDOW))
    wall, cpu, rate = stage_one(target, context, busy)
    start = time.monotonic()
    _, stop = busy.during(lambda: collect(SHORT, True))
    both = time.monotonic() - start
    again, _ = busy.during(lambda: time.sleep(WINDOW))
    return {
        "stage1_wall_s": round(wall, 2),
        "stage1_host_cpu_s": round(cpu, 2),
        "throughput_ratio_stage1": round(rate / ((alone + again) / 2), 3),
        "stage2_wall_s": round(max(0.0, both - SHORT - (wall - WINDOW)), 2),
        "max_stop_ms": round(stop, 1),
        "quiet_stop_ms": round(quiet, 1),
    }


def stage_one(target: Target, context: AgentContext, busy: Busy) -> tuple[float, float, float]:
    """Wall seconds, CPU seconds (children too) and the working rank's rate, over the whole of stage 1."""
    collector = collecting.Collector(target, WINDOW, None, context.state)
    start, used = time.monotonic(), os.times()
    rate, _ = busy.during(collector.stage_one)
    now = os.times()
    cpu = sum(now[:4]) - sum(used[:4])
    return time.monotonic() - start, cpu, rate


if __name__ == "__main__":
    main()
