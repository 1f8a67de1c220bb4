"""The end of a run whose hosts are not equally fast: four of them, one four times slower, and ``fleetdump extract`` as
a user gives it, which moves work from the slow one to the others.

The hosts are real ones but for the network (``connection: local``, a state directory each); the servers are
``bench.driveserver``, limited in tokens a second. All else is the product: command line, controller, agent calls,
tokeniser and drivers, with their defaults but the token budget, which has the size that it has beside real rates.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import yaml

from bench.drivehost import LAYERS, Host, stand_in
from fleetdump.agent.context import State

RATES = (2000.0, 2000.0, 2000.0, 500.0)
"""Tokens a second of each host's server: a quarter of a small GPU's, so that a quarter of the requests comes of it."""
TOKEN_BUDGET = 8192
LENGTHS = (448, 64, 352, 160, 256)
"""Tokens of the samples, in turn; 256 in the mean."""
SECONDS = 800.0
"""How long the run would take if no server ever had nothing to do. What is lost at its end does not grow with it."""
TAIL = 0.05
TOKENIZER = '''"""A tokenizer for rows that bring their ids."""


class Tokenizer:
    chat_template = None

    def __len__(self):
        return 512

    def decode(self, ids):
        return " ".join(map(str, ids))


class AutoTokenizer:
    @staticmethod
    def from_pretrained(*_, **__):
        return Tokenizer()
'''
_MODEL = {
    "architectures": ["LlamaForCausalLM"],
    "num_hidden_layers": 4,
    "hidden_size": 4,
    "vocab_size": 512,
    "torch_dtype": "float32",
    "max_position_embeddings": 4096,
}


@dataclass(frozen=True)
class Tail:
    """``seconds`` of the last ``TAIL`` of a run's tokens, ``ideal`` if no server had ever nothing to do; ``run_s`` and
    ``run_ideal`` the same of all tokens, from the first manifest line's time on. ``moved``: shares that were taken
    over."""

    seconds: float
    ideal: float
    run_s: float
    run_ideal: float
    moved: int

    def figures(self) -> dict[str, object]:
        """As the bench prints them."""
        return {
            "tail_ratio": round(self.seconds / self.ideal, 3),
            "tail_s": round(self.seconds, 1),
            "tail_ideal_s": round(self.ideal, 1),
            "tail_run_s": round(self.run_s, 1),
            "tail_run_ideal_s": round(self.run_ideal, 1),
            "tail_moves": self.moved,
        }


def measure_tail(scratch: Path, seconds: float = SECONDS) -> Tail:
    """A whole run that would take ``seconds`` at best."""
    scratch.mkdir()
    samples = int(seconds * sum(RATES) / (sum(LENGTHS) / len(LENGTHS)))
    _write_data(scratch / "data.jsonl", samples)
    engine = _make_engine(scratch)
    hosts = [f"h{n}" for n in range(len(RATES))]
    with contextlib.ExitStack() as stack:
        ports = {
            host: stack.enter_context(stand_in(_host(scratch / host, engine), rate=rate))
            for host, rate in zip(hosts, RATES, strict=True)
        }
        _write_inventory(scratch, engine, ports)
        _extract(scratch)
    lines, moved = _committed(scratch, hosts)
    if len(lines) != samples:
        raise RuntimeError(f"{len(lines)} of {samples} samples were delivered")
    return tail_of(lines, moved)


def tail_of(lines: list[tuple[float, int]], moved: int) -> Tail:
    """From (time, tokens) of every manifest line."""
    lines = sorted(lines)
    total = sum(tokens for _, tokens in lines)
    done = itertools.accumulate(tokens for _, tokens in lines)
    begins = next(t for (t, _), so_far in zip(lines, done, strict=True) if so_far >= (1 - TAIL) * total)
    first, last = lines[0][0], lines[-1][0]
    return Tail(last - begins, TAIL * total / sum(RATES), last - first, total / sum(RATES), moved)


@dataclass(frozen=True)
class Engine:
    """What the tokeniser needs on a host: an import path with stand-ins for the engine's packages, and a model."""

    site: Path
    model: Path


def _make_engine(scratch: Path) -> Engine:
    site, model = scratch / "site", scratch / "model"
    for name, text in {"sglang": "", "transformers": TOKENIZER}.items():
        (site / name).mkdir(parents=True)
        (site / name / "__init__.py").write_text(text)
    (site / "sglang" / "version.py").write_text('__version__ = "0.5.20"\n')
    model.mkdir()
    (model / "config.json").write_text(json.dumps(_MODEL))
    (model / "model.safetensors").touch()
    return Engine(site, model)


def _host(folder: Path, engine: Engine) -> Host:
    state = State.of(str(folder / "state"))
    return Host(state, folder / "capture", engine.model, {"PYTHONPATH": str(engine.site)})


def _write_inventory(scratch: Path, engine: Engine, ports: dict[str, int]) -> None:
    hosts = {}
    for host, port in ports.items():
        server_entry = {
            "name": "main",
            "model_path": str(engine.model),
            "port": port,
            "env": {"PYTHONPATH": str(engine.site)},
        }
        hosts[host] = {
            "connection": "local",
            "python": sys.executable,
            "agent_python": sys.executable,
            "state_dir": str(scratch / host / "state"),
            "capture": {"layers": LAYERS, "dir": str(scratch / host / "capture")},
            "servers": [server_entry],
        }
    (scratch / "inventory.yaml").write_text(yaml.safe_dump({"hosts": hosts}, sort_keys=False))


def _write_data(path: Path, samples: int) -> None:
    with open(path, "w") as file:
        for n, tokens in zip(range(samples), itertools.cycle(LENGTHS), strict=False):
            ids = [(n + k) % 500 for k in range(tokens)]
            row = {"id": f"s{n:06}", "input_ids": ids, "loss_mask": [1] * tokens}
            file.write(json.dumps(row, separators=(",", ":")) + "\n")


def _extract(scratch: Path) -> None:
    argv = [sys.executable, "-m", "fleetdump", "extract", "--data", "data.jsonl", "--run", "tail", "--allow-full-disk"]
    argv += ["--token-budget", str(TOKEN_BUDGET)]
    paths = [str(Path(__file__).resolve().parents[1]), os.environ.get("PYTHONPATH", "")]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))}
    with open(scratch / "extract.log", "w+") as log:
        done = subprocess.run(argv, cwd=scratch, env=env, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        log.seek(0)
        if done.returncode:
            raise RuntimeError(f"fleetdump extract ended with {done.returncode}:\n{log.read()[-4000:]}")


def _committed(scratch: Path, hosts: list[str]) -> tuple[list[tuple[float, int]], int]:
    """Time and tokens of every manifest line of all hosts, each sample once, and how many shares were taken over."""
    lines = {}
    manifests = [path for host in hosts for path in (scratch / host / "state").glob("*/runs/tail/*/manifest.jsonl")]
    for path in manifests:
        for text in path.read_bytes().splitlines():
            line = json.loads(text)
            assert line["id"] not in lines, "a sample was computed twice"
            lines[line["id"]] = (line["t"], line["tokens"])
    return list(lines.values()), sum("." in path.parent.name for path in manifests)
