"""A small real HTTP server that behaves as SGLang with the tap: /health, /server_info and /generate, and shards and
journals in the capture directory, by the agent's own ShardWriter. Run: ``python standin.py CONFIG.json``.

The config is read anew for each request, so that a test can change the faults of a running server:
``delay`` (seconds a request), ``chunk`` (rows a piece), ``poison`` (samples that kill the server), ``error`` (samples
answered with 500), ``skip`` ({sample: reason}, up to attempt ``skip_until``), ``lose`` (samples answered but never
written), ``other_ids`` (samples written with a wrong hash), ``stages`` (slots of each pipeline stage: all in one),
``idle_close`` (seconds after which a shard closes)."""

from __future__ import annotations

import array
import itertools
import json
import os
import signal
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import ClassVar

from fleetdump.agent.formats import Rid, SkipRecord, Writer
from fleetdump.agent.jsonl import append_lines
from fleetdump.agent.shardwriter import NewPiece, ShardWriter
from fleetdump.agent.tensorfile import ids_sha256

HIDDEN = 4
IDLE_CLOSE_SECONDS = 0.2
LOG = (
    "Load weight begin. avail mem=1.00 GB",
    "Load weight end. elapsed=0.1 s, type=TinyModel, avail mem=0.90 GB, mem usage=0.10 GB.",
    "The server is fired up and ready to roll!",
)


def states_of(sample: str, start: int, rows: int, slots: list[int]) -> bytes:
    """``[rows, slots, HIDDEN]`` float32, each value telling its sample, row, slot and place (``state_at``)."""
    places = itertools.product(range(start, start + rows), slots, range(HIDDEN))
    return array.array("f", (state_at(sample, *place) for place in places)).tobytes()


def state_at(sample: str, row: int, slot: int, place: int) -> float:
    return float(sum(sample.encode()) % 100 * 100_000 + row % 1000 * 100 + slot * 10 + place)


class Tap:
    """A writer for each run and pipeline stage, as the real tap has; a shard closes when idle."""

    def __init__(self, config: dict):
        self.config = config
        self.lock = threading.Lock()
        self.writers: dict[tuple[str, int], ShardWriter] = {}
        self.last = time.monotonic()
        threading.Thread(target=self._close_idle, daemon=True).start()

    def writer(self, run: str, stage: int = 0) -> ShardWriter:
        if (run, stage) not in self.writers:
            name = Writer(self.config["server"], self.config["launch_id"], f"r{stage}")
            self.writers[run, stage] = ShardWriter(Path(self.config["dir"]) / run, name)
        return self.writers[run, stage]

    def capture(self, rid: Rid, ids: list[int], faults: dict) -> None:
        stages = faults.get("stages", [[*range(len(self.config["layers"]) + 1)]])
        chunk = faults.get("chunk", 1 << 30)
        with self.lock:
            writer = self.writer(rid.run)
            reason = faults.get("skip", {}).get(rid.sample)
            if reason and rid.attempt <= faults.get("skip_until", 1 << 30):
                append_lines(writer._journal, [SkipRecord(str(rid), reason, "as told", time.time())])
                return
            if rid.sample in faults.get("lose", []):
                return
            for stage, slots in enumerate(stages):
                other_ids = rid.sample in faults.get("other_ids", [])
                self._write(self.writer(rid.run, stage), slots, rid, ids, chunk, other_ids)
            self.last = time.monotonic()

    def _write(
        self, writer: ShardWriter, slots: list[int], rid: Rid, ids: list[int], chunk: int, other_ids: bool
    ) -> None:
        for start in range(0, len(ids), chunk):
            part = ids[start : start + chunk]
            digest = ids_sha256([0] * len(part) if other_ids else part)
            shape = [len(part), len(slots), HIDDEN]
            piece = NewPiece(f"{rid}:{start}", str(rid), start, len(part), digest, "F32", shape, slots)
            writer.add((piece, states_of(rid.sample, start, len(part), slots)))
        writer.sync()

    def _close_idle(self) -> None:
        while True:
            time.sleep(0.1)
            with self.lock:
                if time.monotonic() - self.last > self.config.get("idle_close", IDLE_CLOSE_SECONDS):
                    for writer in self.writers.values():
                        writer.close_shard()


class Handler(BaseHTTPRequestHandler):
    tap: Tap
    config_path: Path
    in_flight: ClassVar[set[str]] = set()

    def do_GET(self) -> None:
        if self._refused():
            return
        self._answer(200, {"context_length": 2048} if self.path == "/server_info" else {})

    def _refused(self) -> bool:
        """With ``--api-key KEY``, as SGLang: all but /health wants the key."""
        allowed = len(sys.argv) < 4 or self.path == "/health"
        if not allowed and self.headers["Authorization"] != f"Bearer {sys.argv[3]}":
            self._answer(401, {"error": "Unauthorized"})
            return True
        return False

    def do_POST(self) -> None:
        if self._refused():
            return None
        request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        faults = json.loads(self.config_path.read_text())
        rid = Rid.parse(request["rid"])
        assert rid is not None
        with open(faults["log"], "a") as log:
            log.write(f"{rid.sample} {rid.attempt} {len(request['input_ids'])} {os.getpid()} {len(self.in_flight)}\n")
        if request["rid"] in self.in_flight:
            return self._answer(400, {"error": "Duplicate request ID(s) detected"})
        self.in_flight.add(request["rid"])
        time.sleep(faults.get("delay", 0))
        if rid.sample in faults.get("poison", []):
            os.kill(os.getpid(), signal.SIGKILL)
        self.in_flight.discard(request["rid"])  # before anybody can know that it is through, and send the next one
        if rid.sample in faults.get("error", []):
            self._answer(500, {"error": "as told"})
        else:
            self.tap.capture(rid, request["input_ids"], faults)
            self._answer(200, {"text": "x"})
        return None

    def _answer(self, status: int, data: dict) -> None:
        body = json.dumps(data).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


def main() -> None:
    Handler.config_path = Path(sys.argv[1])
    config = json.loads(Handler.config_path.read_text())
    if "FLEETDUMP_LAUNCH_ID" in os.environ:  # launched by the agent, which gives the tap its id and reads the log
        config["launch_id"] = os.environ["FLEETDUMP_LAUNCH_ID"]
        print(time.strftime("".join(f"[%Y-%m-%d %H:%M:%S] {line}\n" for line in LOG)), flush=True)
    Handler.tap = Tap(config)
    ThreadingHTTPServer.request_queue_size = 256
    server = ThreadingHTTPServer(("127.0.0.1", config["port"]), Handler)
    server.daemon_threads = True
    server.serve_forever()


if __name__ == "__main__":
    main()
