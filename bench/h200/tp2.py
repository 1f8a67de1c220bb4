"""Two GPUs, tensor parallel over NCCL: what fleetdump writes and what it says of real stalls.

Run by ``bench/tp2_h200.sh``. fleetdump does the work (``connection: local``); servers are real SGLang on two GPUs with
a random DeepSeek-V3-architecture model. Six of them start at once. Each part writes its figures into ``--out`` as it
ends and fails by itself, so that a run that is cut off has lost nothing:
``python -m bench.h200.tp2 WORK --model DIR --fast-model DIR --out RESULT``.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import tarfile
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import median
from typing import Any

from bench.h200.tp2_servers import HERE, HOOK, Answer, Run, Server

LAYERS = list(range(8))
WRITTEN = [3, 8, 14]
"""Of the wide model; its rows go into memory, since two GPUs make more of them than a disk takes."""
EAGER = ["--disable-cuda-graph"]
AS_PATCHED = ["--disable-radix-cache", "--enforce-disable-flashinfer-allreduce-fusion"]
"""What the patch adds to a server's arguments, for the one that runs without it."""
WORDS = [f"{a}{b}" for a in ("lime", "oak", "fir", "elm") for b in ("wood", "land", "dale", "brook")]
SHORT, LONG = 1000, 3000
"""Tokens of a prompt whose batch is under SGLang's limit for fused all-reduces, and of one that is over it."""
PARTS = ("graphs", "healthy", "rows", "throughput", "collective", "spin", "killed")


def text_of(tokens: int, seed: int) -> str:
    """``tokens`` characters; the model's tokenizer has one token a byte."""
    state, parts = seed * 2654435761 % 2**32, []
    while sum(map(len, parts)) < tokens:
        state = (state * 1664525 + 1013904223) % 2**32
        parts.append(WORDS[state >> 28] + " ")
    return "".join(parts)[:tokens]


def write_rows(path: Path) -> None:
    """Prompts under and over the limit, alone and many at once."""
    rows = [(f"short-{n}", text_of(SHORT, n)) for n in range(4)]
    rows += [(f"long-{n}", text_of(LONG, 100 + n)) for n in range(4)]
    rows += [(f"tiny-{n}", text_of(20 + 7 * n, 200 + n)) for n in range(16)]
    path.write_text("".join(json.dumps({"id": name, "text": text}) + "\n" for name, text in rows))


def checks_of(record: dict[str, Any]) -> list[dict[str, Any]]:
    """The self-check's findings, wherever the record has them."""
    found: list[dict[str, Any]] = []

    def walk(value: Any) -> None:
        if isinstance(value, dict):
            if {"key", "level", "text"} <= value.keys():
                found.append(value)
            for inner in value.values():
                walk(inner)
        elif isinstance(value, list):
            for inner in value:
                walk(inner)

    walk(record)
    return found


def deploy_all(run: Run, servers: dict[str, Server], parts: list[str]) -> None:
    """Start every server that the parts need, side by side."""

    def start(server: Server) -> None:
        with run.part(f"deploy_{server.name}"):
            server.prepare()
            if server.name == "graphs":
                part_graphs(run, server)
                return
            answer = server.deploy(*(("--no-patch",) if server.name == "bare" else HOOK))
            if server.name in ("plain", "deferred"):
                note_selfcheck(run, server, answer)

    wanted = [server for server in servers.values() if needed(server.name, parts)]
    with ThreadPoolExecutor(len(wanted)) as pool:
        list(pool.map(start, wanted))


def needed(server: str, parts: list[str]) -> bool:
    """Whether one of the parts works on this server."""
    by_part = {
        "graphs": ["graphs"], "healthy": ["nop2p"], "rows": ["plain", "deferred"], "throughput": ["fast", "bare"],
        "collective": ["fast"], "spin": ["deferred"], "killed": ["plain"],
    }  # fmt: skip
    return any(server in by_part[part] for part in parts)


def note_selfcheck(run: Run, server: Server, answer: Answer) -> None:
    checks = [{key: check[key] for key in ("key", "level", "text")} for check in checks_of(answer.record())]
    run.note(f"selfcheck_{server.name}", {"exit": answer.status, "checks": checks})


def part_graphs(run: Run, server: Server) -> None:
    """Part 3: prefill graphs on, which the patch forbids: refused by their flag; without the patch's own flag that
    turns them off, what notices that rows are missing, and in which words."""
    refused = Server(run, "refused", server.port + 1, server.model, LAYERS, ["--cuda-graph-backend-prefill", "full"])
    refused.prepare()
    answer = refused.fleetdump("deploy", *HOOK, ok=(0, 1, 2, 3, 4, 5))
    run.note("prefill_graphs_by_flag", {"exit": answer.status, "error": answer.record().get("error")})
    patch = patch_without_its_flag(run.work / "patches" / "hidden-states-graphs")
    arguments = ("--patch", str(patch), "--delivery", "import-hook")
    answer = server.fleetdump("deploy", *arguments, ok=(0, 1, 4), seconds=170.0)
    record = answer.record()
    reports = [
        {key: one.get(key) for key in ("outcome", "detail")} for one in (record["data"] or {}).get("servers", [])
    ]
    found = {"exit": answer.status, "servers": reports, "error": record.get("error"), "checks": checks_of(record)}
    run.note("prefill_graphs", found)
    server.stop()


def patch_without_its_flag(folder: Path) -> Path:
    """A copy of the patch that leaves prefill graphs on."""
    folder.mkdir(parents=True, exist_ok=True)
    for file in (HERE.parents[1] / "patches" / "hidden-states").iterdir():
        if file.is_file():
            (folder / file.name).write_bytes(file.read_bytes())
    text = (folder / "patch.yaml").read_text().replace("name: hidden-states\n", "name: hidden-states-graphs\n", 1)
    kept, drop = [], False
    for line in text.splitlines(keepends=True):
        drop = "--disable-prefill-cuda-graph" in line or (drop and line.startswith("    "))
        kept += [] if drop else [line]
    (folder / "patch.yaml").write_text("".join(kept))
    return folder


def part_rows(run: Run, plain: Server, deferred: Server, data: Path) -> None:
    """Parts 1 and 2: the same prompts through both servers, and some alone through the one that defers."""
    for server in (plain, deferred):
        server.needs_ready()
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda server: extract(server, data), (plain, deferred)))
    for n, tokens in enumerate((SHORT + 1, SHORT + 2, LONG + 1, LONG + 2)):  # each alone, and known by its length
        deferred.generate([3 + ord(char) % 250 for char in text_of(tokens, 300 + n)], f"fleetdump/alone/{n}/1")
    deferred.wait_for_shards("alone", 2 * (SHORT + LONG) + 6)
    run.note("rows_extracted", True)


def extract(server: Server, data: Path) -> None:
    """Run the rows through the server and collect them."""
    name = f"rows-{server.name}"
    runs = ("--runs-dir", str(server.folder / "runs"))
    server.fleetdump("extract", "--data", str(data), "--run", name, "--allow-failed-selfcheck", *runs)
    server.fleetdump("collect", "--run", name, "--data", "--to", str(server.folder / "collected"), *runs)


def part_reference(run: Run, plain: Server, deferred: Server) -> None:
    """Parts 1 and 2, the figures; needs no server any more."""
    folders = (plain.folder / "collected", deferred.folder / "collected", deferred.folder / "naive")
    command = [sys.executable, str(HERE / "tp2_reference.py"), str(plain.model), *map(str, folders)]
    done = subprocess.run(
        [*command, str(deferred.capture / "alone")], capture_output=True, text=True, timeout=max(30.0, run.left())
    )
    if done.returncode:
        raise RuntimeError(done.stderr[-2500:])
    run.note("reference", json.loads(done.stdout.splitlines()[-1]))


def hold_requests(server: Server) -> None:
    """One prompt in the background, to be there when the fault strikes; its failure is expected."""

    def ask() -> None:
        try:
            server.generate([5] * 600)
        except OSError as error:
            server.run.say(f"{server.name}: the request ended with {error!r}")

    threading.Thread(target=ask, daemon=True).start()


def part_stall(run: Run, server: Server, name: str, strike: Callable[[], None], after: float) -> None:
    """Part 4: let a fault strike, ask fleetdump for the cause, keep the bundle, stop the server."""
    server.needs_ready()
    ranks = server.ranks()
    strike()
    hold_requests(server)
    time.sleep(after)
    bundle = server.folder / f"bundle-{name}"
    answer = server.fleetdump("diagnose", "--anonymise", "--save", str(bundle), ok=(0, 1, 4), seconds=75.0)
    verdicts = [verdict for one in answer.record()["data"] for verdict in one["verdicts"]]
    with tarfile.open(run.out.parent / f"bundle-{name}.tgz", "w:gz") as archive:
        archive.add(bundle, name)
    found = {"exit": answer.status, "seconds": round(answer.seconds, 1), "ranks": ranks, "verdicts": verdicts[:3]}
    run.note(f"stall_{name}", found)
    server.end()


def kill_rank(server: Server, rank: int) -> None:
    os.kill(server.ranks()[rank], signal.SIGKILL)


def part_throughput(
    run: Run, fast: Server, bare: Server, repetitions: int = 9, prompts: int = 32, tokens: int = 2048
) -> None:
    """Part 5: tokens a second in turns: requests that the tap writes, others on the same server, and on one that runs
    without the patch."""
    fast.needs_ready()
    ids = [[3 + (7 * n + 13 * k) % 250 for k in range(tokens)] for n in range(prompts)]
    arms = {"on": fast, "off": fast, **({"bare": bare} if bare.ready else {})}

    def burst(server: Server, prefix: str = "") -> float:
        with ThreadPoolExecutor(prompts) as pool:
            began = time.monotonic()
            list(pool.map(lambda n: server.generate(ids[n], f"{prefix}/{n}/1" if prefix else ""), range(prompts)))
            return prompts * tokens / (time.monotonic() - began)

    for _ in range(2):
        for arm, server in arms.items():
            burst(server, "fleetdump/warm" if arm == "on" else "")
    rates: dict[str, list[float]] = {arm: [] for arm in arms}
    for repetition in range(repetitions):
        for arm in list(arms)[:: 1 if repetition % 2 else -1]:
            name = f"burst-{repetition}"
            rates[arm].append(burst(arms[arm], f"fleetdump/{name}" if arm == "on" else ""))
            if arm == "on":  # no burst pays for the one before
                fast.wait_for_shards(name, prompts * tokens)
                shutil.rmtree(fast.capture / name)
        run.note("throughput", {**ratios_of(rates), "bytes_per_token": (len(fast.layers) + 1) * 7168 * 2})
        if run.left() < 0:
            break
    bare.stop()


def ratios_of(rates: dict[str, list[float]]) -> dict[str, Any]:
    """Medians, and the ratio of each burst that is written to its neighbour that is not."""
    found: dict[str, Any] = {"tokens_per_s": {arm: round(median(values)) for arm, values in rates.items()}}
    for arm in ("off", "bare"):
        if arm in rates:
            ratios = [on / other for on, other in zip(rates["on"], rates[arm], strict=True)]
            found[f"ratio_to_{arm}"] = round(median(ratios), 4)
            found[f"ratios_to_{arm}"] = [round(ratio, 4) for ratio in ratios]
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("work", type=Path)
    parser.add_argument("--model", type=Path, required=True, help="8 layers, weights on disk, one token a byte")
    parser.add_argument("--fast-model", type=Path, required=True, help="hidden 7168, config alone")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--parts", default=",".join(PARTS), help="which, by commas")
    parser.add_argument("--until", type=float, default=400.0, help="seconds after which no part begins")
    options = parser.parse_args()
    parts = options.parts.split(",")
    options.work.mkdir(parents=True, exist_ok=True)
    run = Run(options.work, options.out, options.until)
    servers = all_servers(run, options.model, options.fast_model)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    try:
        deploy_all(run, servers, parts)
        run_parts(run, servers, parts)
    finally:
        for server in servers.values():
            if (server.folder / "state").exists():
                server.end()
            if server.capture_in:
                shutil.rmtree(server.capture_in, ignore_errors=True)
        run.note("left_running", sum(len(server.processes()) for server in servers.values()))


def all_servers(run: Run, model: Path, fast_model: Path) -> dict[str, Server]:
    naive = run.work / "deferred" / "naive"
    naive.mkdir(parents=True, exist_ok=True)
    defer = {"FLEETDUMP_BENCH_DEFER": "1", "FLEETDUMP_BENCH_NAIVE": str(naive)}
    memory = Path("/dev/shm") / f"fleetdump-tp2-{os.getpid()}"
    memory.mkdir(mode=0o700)
    dummy = [*EAGER, "--load-format", "dummy"]
    found = [
        Server(run, "plain", 17100, model, LAYERS, EAGER),
        Server(run, "deferred", 19200, model, LAYERS, EAGER, defer),
        Server(run, "graphs", 21300, model, LAYERS, ["--cuda-graph-max-bs-decode", "4"]),
        Server(run, "nop2p", 23400, model, LAYERS, EAGER, {"NCCL_P2P_DISABLE": "1"}),
        Server(run, "fast", 25500, fast_model, WRITTEN, dummy, capture_in=memory),
        Server(run, "bare", 14700, fast_model, WRITTEN, [*dummy, *AS_PATCHED]),
    ]
    return {server.name: server for server in found}


def run_parts(run: Run, servers: dict[str, Server], parts: list[str]) -> None:
    plain, deferred, fast = servers["plain"], servers["deferred"], servers["fast"]
    data = run.work / "rows.jsonl"
    write_rows(data)
    steps: dict[str, Callable[[], None]] = {
        # The healthy contrast: without P2P NCCL is slower, and nothing else.
        "healthy": lambda: part_stall(run, servers["nop2p"], "p2p_disabled", lambda: None, 1.0),
        "rows": lambda: part_rows(run, plain, deferred, data),
        "throughput": lambda: part_throughput(run, fast, servers["bare"]),
        "collective": lambda: part_stall(
            run, fast, "collective_rank0", lambda: (fast.faults / "collective-0").touch(), 8.0
        ),
        "spin": lambda: part_stall(run, deferred, "spin_rank1", lambda: (deferred.faults / "spin-1").touch(), 8.0),
        "killed": lambda: part_stall(run, plain, "killed_rank1", lambda: kill_rank(plain, 1), 3.0),
        "reference": lambda: part_reference(run, plain, deferred),
    }
    for name, step in steps.items():
        if name in parts or (name == "reference" and "rows" in parts):
            with run.part(name):
                step()


if __name__ == "__main__":
    main()
