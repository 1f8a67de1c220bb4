"""Two GPUs, tensor parallel over NCCL: what fleetdump writes and what it says of real stalls.

Run by ``bench/tp2_h200.sh``. fleetdump does the work (``connection: local``); servers are real SGLang on two GPUs with
a random DeepSeek-V3-architecture model. Each part writes its figures into ``--out`` as it ends, so that a run that is
cut off has lost nothing: ``python -m bench.h200.tp2 WORK --model DIR --fast-model DIR --out RESULT``.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tarfile
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

HERE = Path(__file__).parent
LAYERS = list(range(8))
FLAGS = [
    "--attention-backend", "triton", "--sampling-backend", "pytorch", "--moe-runner-backend", "triton",
    "--grammar-backend", "none", "--trust-remote-code", "--disable-custom-all-reduce", "--chunked-prefill-size", "8192",
    "--max-prefill-tokens", "8192",
]  # fmt: skip
EAGER = ["--disable-cuda-graph"]
HANDED_ON = ("NCCL_", "TORCH_SYMM_", "NVSHMEM_", "HF_HUB_", "TRANSFORMERS_", "SGLANG_", "TVM_FFI_", "LD_LIBRARY_PATH")
"""Beginnings of the names of variables that the servers get from this process."""
WORDS = [f"{a}{b}" for a in ("lime", "oak", "fir", "elm") for b in ("wood", "land", "dale", "brook")]
SHORT, LONG = 1000, 3000
"""Tokens of a prompt whose batch is under SGLang's limit for fused all-reduces, and of one that is over it."""


@dataclass
class Run:
    """Where this run works, and what it has found so far."""

    work: Path
    out: Path
    started: float = field(default_factory=time.monotonic)
    found: dict[str, Any] = field(default_factory=dict)

    def note(self, key: str, value: Any) -> None:
        """Keep a finding; the result file is replaced at once."""
        self.found[key] = value
        temporary = self.out.with_suffix(".tmp")
        temporary.write_text(json.dumps(self.found, indent=1) + "\n")
        os.replace(temporary, self.out)
        self.say(f"{key}: {json.dumps(value)[:400]}")

    def say(self, text: str) -> None:
        print(f"[{time.monotonic() - self.started:6.1f}s] {text}", flush=True)


@dataclass
class Server:
    """One server of one host: its inventory, and the commands of fleetdump on it."""

    run: Run
    name: str
    port: int
    model: Path
    layers: list[int]
    args: list[str]
    env: dict[str, str] = field(default_factory=dict)
    memory: float = 0.3

    @property
    def folder(self) -> Path:
        return self.run.work / self.name

    @property
    def faults(self) -> Path:
        return self.folder / "faults"

    def prepare(self) -> None:
        """Write the inventory; one state directory a server, so that two can be deployed at once."""
        self.faults.mkdir(parents=True, exist_ok=True)
        path = [str(HERE / "faults"), os.environ.get("ENGINE_PYTHONPATH", "")]
        env = {name: value for name, value in os.environ.items() if name.startswith(HANDED_ON)}
        env.update(PYTHONPATH=":".join(filter(None, path)), FLEETDUMP_BENCH_FAULTS=str(self.faults), **self.env)
        server = {
            "name": "main", "model_path": str(self.model), "port": self.port, "tp": 2, "gpus": [0, 1],
            "args": [*FLAGS, *self.args, "--mem-fraction-static", str(self.memory)], "env": env,
        }  # fmt: skip
        capture = {"layers": self.layers, "layer_ids": "input", "dir": str(self.folder / "capture")}
        host = {"connection": "local", "state_dir": str(self.folder / "state"), "agent_python": sys.executable}
        defaults = {"python": sys.executable, "servers": [server], "capture": capture}
        text = yaml.safe_dump({"defaults": defaults, "hosts": {self.name: host}})
        (self.folder / "inventory.yaml").write_text(text)

    def fleetdump(self, verb: str, *arguments: str, ok: tuple[int, ...] = (0,), seconds: float = 240.0) -> Answer:
        """Run one command of fleetdump; what it printed is kept in the server's folder."""
        command = [sys.executable, "-m", "fleetdump", verb, "-i", str(self.folder / "inventory.yaml"), *arguments]
        began = time.monotonic()
        done = subprocess.run(
            [*command, "--json"], capture_output=True, text=True, timeout=seconds, stdin=subprocess.DEVNULL
        )
        answer = Answer(done.returncode, done.stdout, done.stderr, time.monotonic() - began)
        log = self.folder / f"{int(time.monotonic() - self.run.started):04d}-{verb}.log"
        log.write_text(f"{' '.join(command)}\n{done.returncode}\n{done.stdout}\n{done.stderr}\n")
        self.run.say(
            f"{self.name}: fleetdump {verb} {' '.join(arguments)} -> {done.returncode}, {answer.seconds:.0f} s"
        )
        if done.returncode not in ok:
            raise RuntimeError(f"{self.name} {verb}: {done.returncode}\n{done.stdout[-1500:]}\n{done.stderr[-1500:]}")
        return answer

    def ranks(self) -> dict[int, int]:
        """Pid of each rank's scheduler process, of this server alone."""
        found = {}
        status = self.fleetdump("status").record()
        launcher = next(server["pid"] for server in status["data"]["servers"])
        for pid in descendants(launcher):
            line = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            if "sglang::scheduler" in line:
                found[int(line.partition("_TP")[2].split()[0].split("_")[0])] = pid
        return found

    def generate(self, ids: list[int], rid: str = "", seconds: float = 120.0) -> dict[str, Any]:
        """One prompt, one token."""
        body: dict[str, Any] = {"input_ids": ids, "sampling_params": {"max_new_tokens": 1, "temperature": 0}}
        if rid:
            body["rid"] = rid
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.port}/generate", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=seconds) as reply:
            answer: dict[str, Any] = json.load(reply)
            return answer


@dataclass
class Answer:
    """What one command of fleetdump gave."""

    status: int
    stdout: str
    stderr: str
    seconds: float

    def record(self) -> dict[str, Any]:
        record: dict[str, Any] = json.loads(self.stdout.splitlines()[-1])
        return record


def descendants(root: int) -> list[int]:
    parents = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            parents[int(stat.parent.name)] = int(stat.read_text().rpartition(")")[2].split()[1])
    below = {root}
    while more := {pid for pid, parent in parents.items() if parent in below} - below:
        below |= more
    return sorted(below)


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


def extract(server: Server, data: Path, name: str) -> Path:
    """Run the rows through the server; the folder with manifest and shards."""
    server.fleetdump("extract", "--data", str(data), "--run", name)
    target = server.folder / f"collected-{name}"
    server.fleetdump("collect", "--run", name, "--data", "--to", str(target))
    return target


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


def part_rows(run: Run, plain: Server, deferred: Server, data: Path) -> None:
    """Parts 1 and 2: self-check, ranks, transformers; the deferred all-reduce and the naive expression."""
    for server in (plain, deferred):
        answer = server.fleetdump("selfcheck", ok=(0, 1))
        run.note(f"selfcheck_{server.name}", {"exit": answer.status, "checks": checks_of(answer.record())})
    folders = {server.name: extract(server, data, f"rows-{server.name}") for server in (plain, deferred)}
    for n, tokens in enumerate((SHORT + 1, SHORT + 2, LONG + 1, LONG + 2)):  # each alone, and known by its length
        deferred.generate([3 + ord(char) % 250 for char in text_of(tokens, 300 + n)], f"fleetdump/alone/{n}/1")
    sent_alone = deferred.folder / "capture" / "alone"
    wait_for_shards(sent_alone, 2 * (SHORT + LONG) + 6)
    command = [sys.executable, str(HERE / "tp2_reference.py"), str(plain.model)]
    arguments = [folders["plain"], folders["deferred"], deferred.folder / "naive", sent_alone]
    command += map(str, arguments)
    done = subprocess.run(command, capture_output=True, text=True, timeout=200)
    if done.returncode:
        run.note("reference_error", done.stderr[-2000:])
    else:
        run.note("reference", json.loads(done.stdout.splitlines()[-1]))


def hold_requests(server: Server) -> None:
    """One prompt in the background, to be there when the fault strikes; its failure is expected."""

    def ask() -> None:
        try:
            server.generate([5] * 600, seconds=60.0)
        except OSError as error:
            server.run.say(f"{server.name}: the request ended with {error!r}")

    threading.Thread(target=ask, daemon=True).start()


def stall(server: Server, name: str, strike: Callable[[], None], after: float) -> dict[str, Any]:
    """Let a fault strike, ask fleetdump for the cause, keep the bundle."""
    strike()
    hold_requests(server)
    time.sleep(after)
    bundle = server.folder / f"bundle-{name}"
    answer = server.fleetdump("diagnose", "--anonymise", "--save", str(bundle), ok=(0, 1, 4), seconds=150.0)
    verdicts = [verdict for server_data in answer.record()["data"] for verdict in server_data["verdicts"]]
    with tarfile.open(server.run.out.parent / f"bundle-{name}.tgz", "w:gz") as archive:
        archive.add(bundle, name)
    return {"exit": answer.status, "seconds": round(answer.seconds, 1), "verdicts": verdicts[:3]}


def part_stalls(run: Run, servers: dict[str, Server]) -> None:
    """Part 4, the three that hang or die; the healthy contrast is a server of its own."""
    spun, killed, extra = servers["deferred"], servers["plain"], servers["graphs"]
    ranks = killed.ranks()
    found = {
        "spin_rank1": stall(spun, "spin_rank1", lambda: (spun.faults / "spin-1").touch(), 15.0),
        "killed_rank1": stall(killed, "killed_rank1", lambda: os.kill(ranks[1], signal.SIGKILL), 3.0),
        "collective_rank0": stall(extra, "collective_rank0", lambda: (extra.faults / "collective-0").touch(), 15.0),
    }
    run.note("stalls", found)


def part_graphs(run: Run, server: Server) -> None:
    """Part 3: prefill graphs on, which the patch forbids; what says so, and in which words."""
    patch = run.work / "patches" / "hidden-states-graphs"
    source = HERE.parents[1] / "patches" / "hidden-states"
    patch.mkdir(parents=True, exist_ok=True)
    for file in source.iterdir():
        if file.is_file():
            (patch / file.name).write_bytes(file.read_bytes())
    text = (patch / "patch.yaml").read_text().replace("name: hidden-states\n", "name: hidden-states-graphs\n", 1)
    kept, drop = [], False
    for line in text.splitlines(keepends=True):
        drop = "--disable-prefill-cuda-graph" in line or (drop and line.startswith("    "))
        kept += [] if drop else [line]
    (patch / "patch.yaml").write_text("".join(kept))
    arguments = ("--patch", str(patch), "--delivery", "import-hook")
    answer = server.fleetdump("deploy", *arguments, ok=(0, 1, 4), seconds=300.0)
    record = answer.record()
    run.note("prefill_graphs", {"exit": answer.status, "error": record.get("error"), "checks": checks_of(record)})


def part_healthy(run: Run, server: Server) -> None:
    """Part 4, the contrast: NCCL without P2P is slower, and nothing else."""
    server.fleetdump("deploy", "--patch", "hidden-states")
    run.note("nccl_p2p_disabled", stall(server, "p2p_disabled", lambda: None, 1.0))


def part_throughput(run: Run, server: Server, repetitions: int = 9, prompts: int = 24, tokens: int = 2048) -> None:
    """Part 5: tokens a second with requests that the tap writes, and with others, in turns on one server."""
    server.fleetdump("deploy", "--patch", "hidden-states", seconds=300.0)
    ids = [[3 + (7 * n + 13 * k) % 250 for k in range(tokens)] for n in range(prompts)]
    capture = server.folder / "capture"

    def burst(prefix: str) -> float:
        threads = [
            threading.Thread(target=server.generate, args=(row, f"{prefix}/{n}/1" if prefix else ""))
            for n, row in enumerate(ids)
        ]
        began = time.monotonic()
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return prompts * tokens / (time.monotonic() - began)

    for _ in range(2):
        burst("")
    rates: dict[str, list[float]] = {"off": [], "on": []}
    for repetition in range(repetitions):
        for arm in ("off", "on") if repetition % 2 else ("on", "off"):
            run_name = f"burst-{repetition}"
            rates[arm].append(burst(f"fleetdump/{run_name}" if arm == "on" else ""))
            if arm == "on":  # no burst pays for the one before
                wait_for_shards(capture / run_name, prompts * tokens)
                shutil.rmtree(capture / run_name)
    ratios = sorted(on / off for on, off in zip(rates["on"], rates["off"], strict=True))
    run.note(
        "throughput",
        {
            "ratio": round(ratios[len(ratios) // 2], 4),
            "ratios": [round(ratio, 4) for ratio in ratios],
            "tokens_per_s_off": round(sorted(rates["off"])[repetitions // 2]),
            "tokens_per_s_on": round(sorted(rates["on"])[repetitions // 2]),
            "bytes_per_token": (len(server.layers) + 1) * 7168 * 2,
        },
    )


def wait_for_shards(folder: Path, rows: int, seconds: float = 60.0) -> None:
    """Wait until all rows are journalled and their shards closed."""
    deadline = time.monotonic() + seconds
    while True:
        lines = [json.loads(x) for file in folder.glob("journal-*.jsonl") for x in file.read_bytes().splitlines()]
        written = sum(line["rows"] for line in lines if line["kind"] == "piece")
        closed = {line["shard"] for line in lines if line["kind"] == "shard"}
        if written >= rows and closed >= {line["shard"] for line in lines if line["kind"] == "piece"}:
            return
        if time.monotonic() > deadline:
            raise RuntimeError(f"{folder}: {written} of {rows} rows were written within {seconds:.0f} s")
        time.sleep(0.2)


@contextlib.contextmanager
def stopping(run: Run, *servers: Server) -> Iterator[None]:
    """Stop the servers whatever happens; a failure of a part is noted and the next part goes on."""
    try:
        yield
    except Exception as error:
        run.note(f"failed_{servers[0].name}", repr(error)[-1500:])
    finally:
        for server in servers:
            with contextlib.suppress(RuntimeError, subprocess.TimeoutExpired):
                server.fleetdump("stop", ok=(0, 1))


def at_once(*steps: Callable[[], Any]) -> None:
    """Run the steps side by side; raises the first failure."""
    failures: list[BaseException] = []

    def guarded(step: Callable[[], Any]) -> None:
        try:
            step()
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=guarded, args=(step,)) for step in steps]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("work", type=Path)
    parser.add_argument("--model", type=Path, required=True, help="8 layers, weights on disk, one token a byte")
    parser.add_argument("--fast-model", type=Path, required=True, help="hidden 7168, config alone")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    options.work.mkdir(parents=True, exist_ok=True)
    run = Run(options.work, options.out)
    naive = options.work / "deferred" / "naive"
    naive.mkdir(parents=True, exist_ok=True)
    deferred_env = {"FLEETDUMP_BENCH_DEFER": "1", "FLEETDUMP_BENCH_NAIVE": str(naive)}
    servers = {
        "plain": Server(run, "plain", 30000, options.model, LAYERS, EAGER),
        "deferred": Server(run, "deferred", 31000, options.model, LAYERS, EAGER, deferred_env),
        "graphs": Server(run, "graphs", 32000, options.model, LAYERS, ["--cuda-graph-max-bs-decode", "4"]),
        "nop2p": Server(run, "nop2p", 33000, options.model, LAYERS, EAGER, {"NCCL_P2P_DISABLE": "1"}),
        "fast": Server(
            run, "fast", 34000, options.fast_model, [1, 2, 3], [*EAGER, "--load-format", "dummy"], memory=0.6
        ),
    }
    for server in servers.values():
        server.prepare()
    data = options.work / "rows.jsonl"
    write_rows(data)
    plain, deferred, graphs = servers["plain"], servers["deferred"], servers["graphs"]
    with stopping(run, plain, deferred, graphs):
        hook = ("--patch", "hidden-states", "--delivery", "import-hook")
        at_once(
            lambda: plain.fleetdump("deploy", *hook, seconds=300.0),
            lambda: deferred.fleetdump("deploy", *hook, seconds=300.0),
            lambda: part_graphs(run, graphs),
        )
        part_rows(run, plain, deferred, data)
        part_stalls(run, servers)
    with stopping(run, servers["nop2p"]):
        part_healthy(run, servers["nop2p"])
    with stopping(run, servers["fast"]):
        part_throughput(run, servers["fast"])
    left = [pid for server in servers.values() for pid in processes_of(server)]
    run.note("left_running", len(left))


def processes_of(server: Server) -> list[int]:
    """Processes that still hold this server's folder in their command line."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            if str(server.folder).encode() in path.read_bytes() and int(path.parent.name) != os.getpid():
                found.append(int(path.parent.name))
    return found


if __name__ == "__main__":
    main()
