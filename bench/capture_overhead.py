"""What capturing costs a real SGLang server: ``python -m bench.capture_overhead --device cpu|cuda``.

One server process holds SGLang's own forward, fleetdump's and a naive one (``.cpu()`` and ``torch.save`` in the
forward); they are swapped between repetitions, so all figures are of one process, one model and one state of the
machine. docs/performance.md says what each figure means and how to repeat it on a GPU.

The results file has one entry for each number of layers under ``by_layers``; the keys of the entry that wrote most a
second stand at the top as well. It is replaced after each part, and a part that failed or that no time was left for is
named in ``not_measured``. Parts may be measured in several runs: those of one commit on one kind of machine are joined.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import json
import os
import platform
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from bench.capture import figures
from bench.capture.journal import Journals
from bench.capture.load import OTHERS, Prompts, for_requests, for_seconds, run_load
from bench.capture.parts import DISK, FAST, MIB, Bench, Settings
from bench.capture.server import (
    ORIGINAL,
    ROOT,
    Engine,
    fleetdump_flags,
    hidden_states_patch,
    plain_server,
    swappable_server,
)
from demo.sglang_cpu import recipe
from fleetdump.agent.protocol import to_json
from fleetdump.agent.specs import CaptureSpec

PARTS = ("check", "inert", "syncs", "alternate", "growth", "long", "latency", "limit", "small")
FLAGS = "flags"
"""The one part that needs a server of its own."""
GPU_ARGS = (
    *("--attention-backend", "triton", "--sampling-backend", "pytorch", "--moe-runner-backend", "triton"),
    *("--grammar-backend", "none", "--load-format", "dummy"),
    *("--chunked-prefill-size", "8192", "--max-prefill-tokens", "8192"),
)
"""Launch flags on a GPU beside those that fleetdump adds: random weights, batches of 8k tokens."""
CPU_ARGS = (*recipe.SERVER_ARGS, "--chunked-prefill-size", "2048")


def main() -> int:
    options = parse()
    engine = engine_of(options)
    config = json.loads((engine.model / "config.json").read_text())
    layers = options.layers or evenly(config["num_hidden_layers"])
    results = Results(options.results, about(options, engine, config, layers))
    with scratch(options, layers) as settings:
        tap = tap_settings(options, settings, layers)
        results.entry["tap"] = {name: value for name, value in tap.items() if name not in ("dir", "layers")}
        folder = settings.capture_dir.parent / "server"
        with (
            contextlib.ExitStack() as cleanup,
            swappable_server(engine, tap, folder) as server,
            Journals(settings.capture_dir, server.naive_folder, (FAST, DISK)) as journals,
        ):
            bench = Bench(settings, engine, server, journals)
            if options.keep_log:
                cleanup.callback(shutil.copy, folder / "server.log", options.keep_log)
            bench.warm_up()
            for name in [name for name in PARTS if name in options.parts]:
                results.take(name, getattr(bench, name), options.until)
        if FLAGS in options.parts:
            results.take(FLAGS, lambda: flags(engine, settings, bench, folder), options.until)
    print(json.dumps(results.top(), indent=1))
    return 1 if results.entry["not_measured"] else 0


def flags(engine: Engine, settings: Settings, bench: Bench, folder: Path) -> dict[str, Any]:
    """Tokens a second of a server without the flags that fleetdump adds, against those of SGLang's own forward with
    them. Both servers are other processes, so this is no alternating figure."""
    prompts = Prompts(bench.config["vocab_size"], settings.length, seed=2)
    if not bench.rates[ORIGINAL]:
        raise RuntimeError(
            "flags are compared with SGLang's own forward of the part `alternate`, which was not measured"
        )
    with plain_server(engine, [], folder) as port:
        run_load(port, prompts, OTHERS, settings.clients, for_requests(2 * settings.clients))
        stretches = [for_seconds(settings.seconds)] * settings.repetitions
        rates = [run_load(port, prompts, OTHERS, settings.clients, more).rate for more in stretches]
    return {
        "flags_ratio": round(figures.median(bench.rates[ORIGINAL]) / figures.median(rates), 4),
        "flags_spread": round(figures.spread(rates), 4),
        "without_flags_tokens_per_second": [round(rate) for rate in rates],
    }


class Results:
    """The results file, and this run's entry in it."""

    def __init__(self, path: Path, entry: dict[str, Any]):
        before = _entries(path).get(str(entry["model_layers"]), {})
        same = all(before.get(key) == entry[key] for key in ("commit", "patch_sha256", "card", "sglang"))
        kept = {**before, "earlier_runs": [*before.get("earlier_runs", []), before["command"]]} if same else {}
        self.entry: dict[str, Any] = {**kept, **entry, "not_measured": {}}
        self._path = path
        self._began = time.monotonic()

    def take(self, name: str, part: Callable[[], dict[str, Any]], until: float) -> None:
        """Run a part, unless ``until`` seconds of this run are over, and keep its keys."""
        start = time.monotonic()
        if start - self._began > until:
            self.entry["not_measured"][name] = "no time was left"
        else:
            print(f"{name} ...", file=sys.stderr, flush=True)
            try:
                self.entry.update(part())
            except Exception as error:
                traceback.print_exc()
                self.entry["not_measured"][name] = repr(error)[:500]
        self.entry.setdefault("part_seconds", {})[name] = round(time.monotonic() - start, 1)
        self._write()

    def top(self) -> dict[str, Any]:
        """The entry without lists and readings."""
        return {key: value for key, value in self.entry.items() if not isinstance(value, list)}

    def _write(self) -> None:
        entries = _entries(self._path)
        entries[str(self.entry["model_layers"])] = self.entry
        most = max(entries.values(), key=lambda entry: entry.get("written_gbps", 0))
        top = {key: value for key, value in most.items() if not isinstance(value, dict | list)}
        temporary = self._path.with_suffix(".tmp")
        temporary.write_text(json.dumps({**top, "by_layers": entries}, indent=1) + "\n")
        temporary.replace(self._path)


def _entries(path: Path) -> dict[str, Any]:
    """The entries of a results file by number of layers."""
    try:
        return dict(json.loads(path.read_text())["by_layers"])
    except FileNotFoundError:
        return {}


def tap_settings(options: argparse.Namespace, settings: Settings, layers: list[int]) -> dict[str, Any]:
    """The tap.json: fleetdump's defaults but for the size of shards, and what ``--tap`` says."""
    capture = CaptureSpec(layers, str(settings.capture_dir), shard_bytes=settings.shard_bytes)
    given = {name: json.loads(value) for name, value in (text.split("=", 1) for text in options.tap)}
    return {"v": 1, "server": "bench", "launch_id": "00000000", "ranks": 1, **to_json(capture), **given}


def evenly(layers: int) -> list[int]:
    """Three entry ids spread over a model, as EAGLE-3 takes them."""
    return [1, layers // 2, layers - 1]


def about(options: argparse.Namespace, engine: Engine, config: dict[str, Any], layers: list[int]) -> dict[str, Any]:
    """What was measured on what."""
    release = engine.release()
    return {
        "device": options.device,
        "card": card(options.device),
        "sglang": release,
        "model_layers": config["num_hidden_layers"],
        "hidden": config["hidden_size"],
        "captured_layers": layers,
        "fleetdump_flags": fleetdump_flags(release),
        "patch_sha256": hidden_states_patch().sha256,
        "commit": options.commit or output(["git", "-C", str(ROOT), "describe", "--always", "--dirty"]),
        "command": shlex.join(["python", "-m", "bench.capture_overhead", *sys.argv[1:]]),
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
    }


def card(device: str) -> str:
    """The GPU and its driver, or the processor."""
    if device == "cuda":
        return output(["nvidia-smi", "--query-gpu=name,driver_version,memory.total", "--format=csv,noheader"])
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    models = {line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")}
    return f"{os.cpu_count()} x {', '.join(sorted(models)) or platform.machine()}"


def output(command: list[str]) -> str:
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return ""


def engine_of(options: argparse.Namespace) -> Engine:
    args = [*(GPU_ARGS if options.device == "cuda" else CPU_ARGS), *shlex.split(options.server_args)]
    env = {} if options.device == "cuda" else recipe.server_env()
    return Engine(options.python, options.model, tuple(args), env)


@contextlib.contextmanager
def scratch(options: argparse.Namespace, layers: list[int]) -> Iterator[Settings]:
    """Folders for captured rows, removed at the end, and the settings of the measurement. The run ``fast`` lies in
    memory, ``disk`` on the disk, both below one capture directory."""
    with (
        tempfile.TemporaryDirectory(prefix="fleetdump-bench-", dir=options.fast_dir) as fast,
        tempfile.TemporaryDirectory(prefix="fleetdump-bench-", dir=options.disk_dir) as disk,
    ):
        capture = Path(fast) / "capture"
        (capture).mkdir()
        (Path(disk) / DISK).mkdir()
        (capture / DISK).symlink_to(Path(disk) / DISK)
        gpu = options.device == "cuda"
        yield Settings(
            layers=layers,
            capture_dir=capture,
            fast_dir=Path(fast),
            disk_dir=Path(disk),
            write_to=options.write_to,
            shard_bytes=(1024 if gpu else 16) * MIB,
            repetitions=options.repetitions,
            seconds=options.seconds,
            long_seconds=options.long_seconds,
            clients=12 if gpu else 4,
            naive_clients=4,
            length=2048 if gpu else 256,
            latency_requests=12,
            small_samples=options.samples,
            limit_bytes=(2048 if gpu else 16) * MIB,
            window=32768 if gpu else 8192,
        )


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device", choices=["cpu", "cuda"], required=True)
    parser.add_argument("--python", type=Path, default=recipe.PYTHON, help="interpreter that imports SGLang")
    parser.add_argument("--model", type=Path, default=recipe.MODEL)
    parser.add_argument("--layers", type=lambda text: [int(n) for n in text.split(",")], help="entry ids, 1,8,15")
    parser.add_argument("--server-args", default="", help="further flags of the server, as one string")
    parser.add_argument("--results", type=Path)
    parser.add_argument("--parts", type=lambda text: text.split(","), default=[*PARTS, FLAGS])
    parser.add_argument("--repetitions", type=int, default=9)
    parser.add_argument("--seconds", type=float, default=3.0, help="of load on one forward, in a repetition")
    parser.add_argument("--long-seconds", type=float, help="of the long stretch (default 180, on the CPU 20)")
    parser.add_argument("--samples", type=int, help="of 8 tokens (default 100000, on the CPU 4000)")
    parser.add_argument("--write-to", choices=[FAST, DISK], default=FAST, help="run of all parts but limit")
    parser.add_argument("--fast-dir", type=Path, default=Path("/dev/shm"))
    parser.add_argument("--disk-dir", type=Path, help="a folder on the disk (default: where temporary files go)")
    parser.add_argument("--until", type=float, default=1e9, help="begin no part after so many seconds")
    parser.add_argument(
        "--tap", action="append", default=[], metavar="KEY=JSON", help="a setting of the tap, threads=4"
    )
    parser.add_argument("--keep-log", type=Path, help="copy the server's log there at the end")
    parser.add_argument("--commit", default="", help="where git cannot tell it")
    options = parser.parse_args()
    gpu = options.device == "cuda"
    results = ROOT / "bench" / "results" / f"capture_overhead-{'h200' if gpu else 'cpu'}.json"
    options.results = options.results or results
    options.long_seconds = options.long_seconds or (180.0 if gpu else 20.0)
    options.samples = options.samples or (100_000 if gpu else 4000)
    return options


if __name__ == "__main__":
    sys.exit(main())
