"""What a live watch costs a host, against the same facts gathered with one command each.

A stand-in server of 8 ranks (60 threads each) that logs batches, on an sshd of its own on loopback. A watch is one exec
for all of its samples; beside it the same facts come by Fabric over one open connection, one command a fact and sample,
as people do by hand. Prints one JSON object, and writes bench/results/watch_cost.json:
{execs, samples, round_trip_ratio, host_cpu_s_per_sample, bytes_per_sample, wall_ratio, ...}. Bars: one exec a watch, at
least 10 times fewer round trips, under 0.020 s of the host's CPU a sample. ``wall_ratio`` is a Fabric sample's time
against the time that a look of ours takes. Repeat: ``python -m bench.watch_cost``.
"""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from demo.sshd import run_sshd
from fleetdump.agent import procfs
from fleetdump.agent.bootstrap import state_root
from fleetdump.agent.context import State
from fleetdump.agent.server import ServerRecord, boot_id, save_record
from fleetdump.agent.servermessages import MonitorArgs, MonitorResult
from fleetdump.fleet import connect, host
from fleetdump.fleet.connection import open_connection
from fleetdump.fleet.hostkeys import KnownHosts
from fleetdump.fleet.process import Process, SshTransport
from fleetdump.inventory import HostConfig, load

RANKS = 8
SAMPLES = 40
BY_HAND = 5
INTERVAL = 1.0
RESULTS = Path(__file__).parent / "results" / "watch_cost.json"
BATCH = "[2026-01-01 00:01:00 TP0] Prefill batch. #new-seq: 1, #new-token: 512, #running-req: 1"
RANK = """
import threading, time
for _ in range(60):
    threading.Thread(target=time.sleep, args=(1e6,), daemon=True).start()
time.sleep(1e6)
"""
LAUNCHER = """
import http.server, subprocess, sys, threading, time
class Answer(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200); self.end_headers()
    def log_message(self, *args):
        pass
port, ranks, rank, batch = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4]
for n in range(ranks):
    subprocess.Popen(["sglang::scheduler_TP%d" % n, "-S", "-c", rank], executable=sys.executable)
    print("[2026-01-01 00:00:01 TP%d] Load weight begin. avail mem=9 GB" % n)
    print("[2026-01-01 00:00:02 TP%d] Load weight end. type=X, mem usage=1.00 GB." % n)
    print("[2026-01-01 00:00:03 TP%d] max_total_num_tokens=8192" % n)
server = http.server.HTTPServer(("127.0.0.1", port), Answer)
threading.Thread(target=server.serve_forever, daemon=True).start()
print("INFO:     Uvicorn running on http://127.0.0.1:%d" % port)
print("[2026-01-01 00:00:06] The server is fired up and ready to roll!", flush=True)
while True:
    print(batch, flush=True)
    time.sleep(0.2)
"""


class Counting:
    """A transport that counts execs and the bytes that come back."""

    def __init__(self, inner: SshTransport) -> None:
        self._inner = inner
        self.execs = 0
        self.bytes = 0

    def start(self, argv: Sequence[str]) -> Process:
        self.execs += 1
        process = self._inner.start(argv)
        read = process.read

        def counted(limit: int, timeout: float) -> bytes:
            data = read(limit, timeout)
            self.bytes += len(data)
            return data

        process.read = counted  # type: ignore[method-assign]
        return process

    def is_alive(self) -> bool:
        return self._inner.is_alive()

    def close(self) -> None:
        self._inner.close()


def main() -> None:
    with (
        tempfile.TemporaryDirectory(prefix="fleetdump-bench-") as scratch,
        run_sshd(Path(scratch) / "ssh") as sshd,
        stand_in(State(Path(state_root(f"{scratch}/state")))) as record,
    ):
        inventory = Path(scratch) / "inventory.yaml"
        one = {
            "address": "127.0.0.1",
            "port": sshd.port,
            "user": sshd.user,
            "identity_file": str(sshd.identity_file),
            "host_key": sshd.fingerprint,
            "agent_python": sys.executable,
        }
        inventory.write_text(f"defaults: {{state_dir: {scratch}/state}}\nhosts: {{bench: {json.dumps(one)}}}\n")
        text = json.dumps(measure(load(inventory).hosts[0], record), indent=1)
    print(text)
    RESULTS.parent.mkdir(exist_ok=True)
    RESULTS.write_text(text + "\n")


@contextlib.contextmanager
def stand_in(state: State) -> Iterator[ServerRecord]:
    """A ready server of ours."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    log = state.server("main") / "server.log"
    argv = [sys.executable, "-S", "-c", LAUNCHER, str(port), str(RANKS), RANK, BATCH]
    with log.open("wb") as out:
        server = subprocess.Popen(argv, stdout=out, stderr=out, start_new_session=True)
    try:
        while sum(sample.role == "scheduler" for sample in procfs.tree(server.pid)) < RANKS:
            time.sleep(0.1)
        record = ServerRecord(
            "main", server.pid, procfs.start_time(server.pid) or 0, "1f0c77aa", port, "127.0.0.1", sys.executable,
            "/m/tiny", RANKS, ["python"], [], str(log), "id", time.time(), capture_dir=str(log.parent), boot=boot_id(),
            ranks=RANKS, ready=True,
        )  # fmt: skip
        save_record(state, record)
        yield record
    finally:
        os.killpg(server.pid, signal.SIGKILL)
        server.wait()


def measure(config: HostConfig, record: ServerRecord) -> dict[str, object]:
    """All figures."""
    transports: list[Counting] = []

    def counting(connection: object) -> Counting:
        transports.append(Counting(SshTransport(connection)))  # type: ignore[arg-type]
        return transports[-1]

    host.SshTransport = counting  # type: ignore[misc, assignment]
    with connect(config) as way:
        args = MonitorArgs(until=0.5, interval=0.2)
        way.call(args, MonitorResult, verb="monitor")  # the first call pushes the bundle
        (counted,) = transports
        counted.execs = counted.bytes = 0
        long = replace(args, until=SAMPLES * INTERVAL, interval=INTERVAL)
        result = way.call(long, MonitorResult, verb="monitor", deadline=SAMPLES * INTERVAL + 60)
    commands = by_hand(record, [one.pid for one in procfs.tree(record.pid)])
    seconds = fabric_seconds(config, commands)
    look = result.cpu_seconds / result.samples
    return {
        "benchmark": "watch_cost",
        "ranks": RANKS,
        "execs": counted.execs,
        "samples": result.samples,
        "round_trip_ratio": round(len(commands) * result.samples / counted.execs, 1),
        "host_cpu_s_per_sample": round(look, 4),
        "bytes_per_sample": round(counted.bytes / result.samples),
        "wall_ratio": round(statistics.median(seconds) / (result.wall_seconds / result.samples), 1),
        "fabric_commands_per_sample": len(commands),
        "fabric_seconds_per_sample": round(statistics.median(seconds), 3),
        "processes_on_host": len(procfs.pids()),
        "load": round(os.getloadavg()[0], 1),
        "cores": len(os.sched_getaffinity(0)),
    }


def by_hand(record: ServerRecord, pids: list[int]) -> list[str]:
    """One command for each fact that a look takes in, as a person would give them."""
    log, files = shlex.quote(record.log), " ".join(f"/proc/{pid}/io" for pid in pids)
    return [
        f"ps -o pid,stat,rss,time,args -s {record.pid}",
        f"cat {files}",
        f"wc -lc {log}",
        f"grep -cE 'Prefill batch|Decode batch' {log}",
        f"grep -E 'Load weight|fired up|Traceback|out of memory' {log} | tail",
        f"grep -c ':{record.port:04X} 00000000:0000 0A' /proc/{record.pid}/net/tcp",
        f"curl -s -m 20 -o /dev/null -w '%{{http_code}}' http://127.0.0.1:{record.port}/health || true",
        f"df -B1 {shlex.quote(record.capture_dir)}",
        f"cat {shlex.quote(str(Path(record.log).parent))}/tap-*.json 2>/dev/null || true",
        f"cat {shlex.quote(str(Path(record.log).parents[2]))}/runs/*/*/progress.json 2>/dev/null || true",
        "nvidia-smi --query-gpu=memory.used --format=csv,noheader 2>/dev/null || true",
    ]


def fabric_seconds(config: HostConfig, commands: list[str]) -> list[float]:
    """Seconds of each round of ``commands`` over one open connection."""
    connection = open_connection(config, known=KnownHosts(Path(os.devnull)), accept_new=False)
    seconds = []
    with contextlib.closing(connection):
        for _ in range(BY_HAND):
            began = time.perf_counter()
            for command in commands:
                connection.run(command, hide=True, warn=True, in_stream=False)
            seconds.append(time.perf_counter() - began)
    return seconds


if __name__ == "__main__":
    main()
