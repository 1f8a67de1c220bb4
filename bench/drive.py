"""What driver and ledger cost: the driver beside the tightest client there can be, and the ledger with a million rows.

Prints one JSON object:
``wall_ratio``  driver / asynchronous client, against a server with 50 ms of service time and the same concurrency;
``samples_per_s``  of the driver against a server that answers at once;
``scaling_4``  samples a second of four servers with their drivers at once / four times those of one, each server
limited to the same rate of tokens;
``tail_ratio``  the last 5 % of a run's tokens on four hosts, one of them four times slower, / ideal (``drivetail``);
``lease_ms``  the share of 1,000 samples of a 1,000,000-row ledger is read and recorded as submitted;
``resume_s``  ``open_run`` of that run once more, after its data set was read anew (``read_s``); each also as seconds of
the processor, which other work on the machine does not change; ``rss_mb`` the peak of that process;
``begin_s``, ``begin_rss_mb``  the same of ``open_run`` when the run begins.
``load`` is the machine's, of five minutes, before and after. It takes about 20 minutes, most of them for the tail: a
shorter run's tail is as long, and its ideal shorter. Repeat: ``python -m bench.drive``.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import itertools
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from bench.drivehost import LAYERS, Host, stand_in
from bench.drivetail import measure_tail
from fleetdump.agent.context import State
from fleetdump.agent.drive import start_driver
from fleetdump.agent.formats import row_line
from fleetdump.agent.share import Share, ShareSpec
from fleetdump.agent.specs import CaptureSpec

SERVICE = 0.05
CONCURRENCY = 16
SAMPLES = 2400
FAST_SAMPLES = 6000
TOKENS = 64
HOSTS, RATE, SCALED_SAMPLES = 4, 100.0 * TOKENS, 1000
ROWS = 1_000_000
SHARE = 1000
REPETITIONS = 3


def main() -> None:
    began = os.getloadavg()[1]
    with tempfile.TemporaryDirectory(prefix="fleetdump-bench-") as scratch:
        figures = about() | measure_driver(Path(scratch))
        figures["scaling_4"] = measure_scaling(Path(scratch))
        figures.update(measure_tail(Path(scratch) / "tail").figures())
        figures.update(measure_ledger(Path(scratch)))
    print(json.dumps({**figures, "load": [round(load, 1) for load in (began, os.getloadavg()[1])]}))


def about() -> dict[str, object]:
    """What was measured, where and when."""
    describe = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty"]
    commit = subprocess.run(describe, capture_output=True, text=True).stdout.strip()
    date = time.strftime("%Y-%m-%d", time.gmtime())
    return {"command": "python -m bench.drive", "commit": commit, "date": date, "cores": os.cpu_count()}


# --------------------------------------------------------------------------- driver
def measure_driver(scratch: Path) -> dict[str, object]:
    """Walls in seconds, the ratio of their medians, and the rate against a server that answers at once."""
    client, driver = [], []
    for turn in range(REPETITIONS):
        with stand_in(host(scratch / f"client-{turn}"), SERVICE) as port:
            client.append(asyncio.run(tight_client(port, SAMPLES)))
        with stand_in(host(scratch / f"driver-{turn}"), SERVICE):
            driver.append(drive(scratch / f"driver-{turn}", SAMPLES))
    with stand_in(host(scratch / "fast")):
        fast = drive(scratch / "fast", FAST_SAMPLES, concurrency=64)
    return {
        "samples_per_s": round(FAST_SAMPLES / fast, 1),
        "wall_ratio": round(statistics.median(driver) / statistics.median(client), 3),
        "client_s": [round(wall, 2) for wall in client],
        "driver_s": [round(wall, 2) for wall in driver],
    }


def measure_scaling(scratch: Path) -> float:
    """Of the walls of one limited server alone and of four at once, each with its own work."""
    with stand_in(host(scratch / "one"), rate=RATE):
        one = drive(scratch / "one", SCALED_SAMPLES)
    with contextlib.ExitStack() as stack, ThreadPoolExecutor(HOSTS) as pool:
        folders = [scratch / f"of-four-{n}" for n in range(HOSTS)]
        for folder in folders:
            stack.enter_context(stand_in(host(folder), rate=RATE))
        walls = list(pool.map(drive, folders, [SCALED_SAMPLES] * HOSTS))
    return round(one / max(walls), 3)


def host(scratch: Path) -> Host:
    return Host(State(scratch / "state"), scratch / "capture", scratch)


async def tight_client(port: int, samples: int) -> float:
    """Nothing but requests, ``CONCURRENCY`` at a time over kept connections; the wall in seconds."""
    ids = list(range(TOKENS))
    left = iter(range(samples))

    async def work() -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        for n in left:
            body = json.dumps({"input_ids": ids, "rid": f"fleetdump/client/x{n}/1"}).encode()
            writer.write(b"POST /generate HTTP/1.1\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body))
            head = await reader.readuntil(b"\r\n\r\n")
            await reader.readexactly(int(head.rpartition(b":")[2]))
        writer.close()

    began = time.monotonic()
    await asyncio.gather(*(work() for _ in range(CONCURRENCY)))
    return time.monotonic() - began


def drive(scratch: Path, samples: int, concurrency: int = CONCURRENCY) -> float:
    """Seconds from the first attempt of a real driver process to the last manifest line."""
    state = host(scratch).state
    share = Share(state.share("r1", "main"))
    names = [f"s{n:06}" for n in range(samples)]
    rows = b"".join(row_line({"id": name, "input_ids": list(range(TOKENS))}) for name in names)
    share.rows.write_bytes(rows)
    share.work.write_bytes(_work(names))
    share.save_spec(_spec(scratch, rows, samples, concurrency))
    start_driver(state, share)
    while not share.attempts.exists() or not share.attempts.stat().st_size:
        time.sleep(0.005)
    began = time.monotonic()
    while share.manifest.read_bytes().count(b"\n") < samples:
        time.sleep(0.05)
    wall = time.monotonic() - began
    while share.progress().state != "done":
        time.sleep(0.1)
    return wall


def _work(names: list[str]) -> bytes:
    """What the tokeniser would have written."""
    head = {"v": 1, "kind": "head", "tokenizer_sha256": "k", "template_sha256": "t", "samples": len(names)}
    head.update(tokens=TOKENS * len(names), unsupervised_samples=0, all_supervised_samples=0, truncated=0, dropped=0)
    head.update(methods={"given": len(names)}, shown=[])
    ids, mask = list(range(TOKENS)), [1] * TOKENS
    lines = [head, *({"v": 1, "id": name, "ids": ids, "mask": mask} for name in names)]
    return b"".join(json.dumps(line, separators=(",", ":")).encode() + b"\n" for line in lines)


def _spec(scratch: Path, rows: bytes, samples: int, concurrency: int) -> ShareSpec:
    return ShareSpec(
        run="r1",
        server="main",
        share_sha256=hashlib.sha256(rows).hexdigest(),
        rows=samples,
        capture=CaptureSpec(layers=LAYERS, dir=str(scratch / "capture")),
        max_tokens=0,
        token_budget=concurrency * TOKENS,
        max_attempts=3,
        engine="bench",
        patch_sha256="p",
        model_sha256="m",
        submitted_at=time.time(),
    )


# --------------------------------------------------------------------------- ledger
def measure_ledger(scratch: Path) -> dict[str, object]:
    """In a process of its own, so that its peak memory is that of the ledger alone."""
    data = scratch / "data.jsonl"
    with open(data, "w") as file:
        for n in range(ROWS):
            file.write(f'{{"id": "s{n:07}", "text": "sample {n} of many"}}\n')
    argv = [sys.executable, "-m", "bench.drive", "--ledger", str(data)]
    began, resumed = (
        json.loads(subprocess.run(argv, check=True, capture_output=True, text=True).stdout) for _ in range(2)
    )
    return {**resumed, "begin_s": began["resume_s"], "begin_rss_mb": began["rss_mb"]}


def ledger(data: Path) -> dict[str, object]:
    """Open the run of ``data`` (begun by the first call), and take one share of 1,000."""
    from fleetdump.dataset.intake import take_in
    from fleetdump.dataset.rows import numbered_rows
    from fleetdump.ledger import Ledger
    from fleetdump.tasks.assignment import open_run

    targets = [(f"h{n:03}", "main") for n in range(ROWS // SHARE)]
    with Ledger(data.parent / "ledger.sqlite") as book:
        marks = [(time.monotonic(), time.process_time())]
        rows = take_in(numbered_rows(data))
        marks.append((time.monotonic(), time.process_time()))
        plan = open_run(book, "r1", rows, targets)
        marks.append((time.monotonic(), time.process_time()))
        read, resume = ([b - a for a, b in zip(*pair, strict=True)] for pair in itertools.pairwise(marks))
        leases = []
        for target in targets[:20]:
            began = time.monotonic()
            assert abs(sum(1 for _ in plan.shares[target].lines) - SHARE) < SHARE / 10
            book.submitted(*target)
            leases.append(time.monotonic() - began)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    return {
        "lease_ms": round(1000 * statistics.median(leases), 1),
        "resume_s": round(resume[0], 2),
        "resume_cpu_s": round(resume[1], 2),
        "read_s": round(read[0], 2),
        "read_cpu_s": round(read[1], 2),
        "rss_mb": round(peak, 1),
    }


if __name__ == "__main__":
    if sys.argv[1:2] == ["--ledger"]:
        print(json.dumps(ledger(Path(sys.argv[2]))))
    else:
        os.umask(0o077)
        main()
