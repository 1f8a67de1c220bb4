"""Servers of the two-GPU run: each has an inventory and a state of its own, and fleetdump does all the work on it."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
import urllib.request
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

HERE = Path(__file__).parent
HOOK = ("--patch", "hidden-states", "--delivery", "import-hook")
"""SGLang's files stay as they are, so servers with the patch and without it can be up at once."""
FLAGS = [
    "--attention-backend", "triton", "--sampling-backend", "pytorch", "--moe-runner-backend", "triton",
    "--grammar-backend", "none", "--trust-remote-code", "--disable-custom-all-reduce", "--chunked-prefill-size", "8192",
    "--max-prefill-tokens", "8192", "--max-total-tokens", "131072", "--mem-fraction-static", "0.6",
]  # fmt: skip
"""All servers share the two GPUs and start at once: the limit on tokens is what keeps each one's share small."""
HANDED_ON = ("NCCL_", "TORCH_SYMM_", "NVSHMEM_", "HF_HUB_", "TRANSFORMERS_", "SGLANG_", "TVM_FFI_", "LD_LIBRARY_PATH")
"""Beginnings of the names of variables that the servers get from this process."""
RAS_PORT = 11
"""NCCL's monitor of a server listens so far above the server's port."""


@dataclass
class Run:
    """Where this run works, how long it may take, and what it has found so far."""

    work: Path
    out: Path
    seconds: float
    started: float = field(default_factory=time.monotonic)
    found: dict[str, Any] = field(default_factory=dict)

    def note(self, key: str, value: Any) -> None:
        """Keep a finding; the result file is replaced at once."""
        self.found[key] = value
        temporary = self.out.with_suffix(".tmp")
        temporary.write_text(json.dumps(self.found, indent=1) + "\n")
        os.replace(temporary, self.out)
        self.say(f"{key}: {json.dumps(value)[:700]}")

    def say(self, text: str) -> None:
        print(f"[{time.monotonic() - self.started:6.1f}s] {text}", flush=True)

    def left(self) -> float:
        """Seconds until the run should end."""
        return self.started + self.seconds - time.monotonic()

    @contextlib.contextmanager
    def part(self, name: str) -> Any:
        """A part that fails, or for which no time is left, is noted; the next one goes on."""
        try:
            if self.left() < 0:
                raise TimeoutError(f"no time is left of {self.seconds:.0f} s")
            yield
        except Exception as error:
            self.note(f"failed_{name}", repr(error)[-3000:])


@dataclass
class Answer:
    """What one command of fleetdump gave."""

    status: int
    stdout: str
    seconds: float

    def record(self) -> dict[str, Any]:
        record: dict[str, Any] = json.loads(self.stdout.splitlines()[-1])
        return record


@dataclass
class Server:
    """One server at TP 2: its inventory, and the commands of fleetdump on it."""

    run: Run
    name: str
    port: int
    model: Path
    layers: list[int]
    args: list[str]
    env: dict[str, str] = field(default_factory=dict)
    capture_in: Path | None = None
    """The folder for captured rows; None: one on the disk, beside the others of this server."""
    ready: bool = False

    @property
    def folder(self) -> Path:
        return self.run.work / self.name

    @property
    def faults(self) -> Path:
        return self.folder / "faults"

    @property
    def capture(self) -> Path:
        return (self.capture_in or self.folder) / "capture"

    def prepare(self) -> None:
        """Write the inventory; one state directory a server, so that several can be deployed at once."""
        self.faults.mkdir(parents=True, exist_ok=True)
        path = [str(HERE / "faults"), os.environ.get("ENGINE_PYTHONPATH", "")]
        env = {name: value for name, value in os.environ.items() if name.startswith(HANDED_ON)}
        env.update(PYTHONPATH=":".join(filter(None, path)), FLEETDUMP_BENCH_FAULTS=str(self.faults))
        env.update(NCCL_RAS_ADDR=f"127.0.0.1:{self.port + RAS_PORT}")
        env.update(SGLANG_ENABLE_TP_MEMORY_INBALANCE_CHECK="0", **self.env)  # the neighbours load at the same time
        server = {
            "name": "main", "model_path": str(self.model), "port": self.port, "tp": 2, "gpus": [0, 1],
            "args": [*FLAGS, *self.args], "env": env,
        }  # fmt: skip
        capture = {"layers": self.layers, "layer_ids": "input", "dir": str(self.capture)}
        host = {"connection": "local", "state_dir": str(self.folder / "state"), "agent_python": sys.executable}
        defaults = {"python": sys.executable, "servers": [server], "capture": capture}
        text = yaml.safe_dump({"defaults": defaults, "hosts": {self.name: host}})
        (self.folder / "inventory.yaml").write_text(text)

    def fleetdump(self, verb: str, *arguments: str, ok: tuple[int, ...] = (0,), seconds: float = 60.0) -> Answer:
        """Run one command of fleetdump; what it printed is kept in the server's folder."""
        command = [sys.executable, "-m", "fleetdump", verb, "-i", str(self.folder / "inventory.yaml"), *arguments]
        began = time.monotonic()
        log = self.folder / f"{int(began - self.run.started):04d}-{verb}.log"
        with log.open("w") as errors:
            done = subprocess.run(
                [*command, "--json"],
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                timeout=seconds,
                stdin=subprocess.DEVNULL,
            )
            answer = Answer(done.returncode, done.stdout, time.monotonic() - began)
            errors.write(f"{' '.join(command)}\n{done.returncode}\n{done.stdout}\n")
        self.run.say(f"{self.name}: {verb} {' '.join(arguments)} -> {done.returncode}, {answer.seconds:.0f} s")
        if done.returncode not in ok:
            raise RuntimeError(f"{self.name} {verb}: {done.returncode}\n{log.read_text()[-2500:]}")
        return answer

    def deploy(self, *arguments: str) -> Answer:
        """Start it and wait until it is ready; a failed self-check is for the caller to judge."""
        answer = self.fleetdump("deploy", *arguments, ok=(0, 1), seconds=170.0)
        outcomes = {report["outcome"] for report in answer.record()["data"]["servers"]}
        if not outcomes <= {"ready", "selfcheck_failed"}:
            raise RuntimeError(f"{self.name}: {outcomes}\n{answer.stdout[-2500:]}")
        self.ready = True
        return answer

    def stop(self) -> None:
        with contextlib.suppress(RuntimeError, subprocess.TimeoutExpired):
            self.fleetdump("stop", ok=(0, 1))
        self.ready = False

    def end(self) -> None:
        """Stop it although it hangs: nobody waits here for the grace that ``stop`` gives a rank."""
        with contextlib.suppress(RuntimeError, StopIteration, TypeError):
            for pid in descendants(self.launcher()):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        self.stop()

    def needs_ready(self) -> None:
        if not self.ready:
            raise RuntimeError(f"{self.name} is not ready")

    def ranks(self) -> dict[int, int]:
        """Pid of each rank's scheduler process, of this server alone."""
        found = {}
        for pid in descendants(self.launcher()):
            with contextlib.suppress(OSError):
                line = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                if "sglang::scheduler" in line:
                    found[int(line.partition("_TP")[2].split()[0].split("_")[0])] = pid
        return found

    def launcher(self) -> int:
        pid: int = next(server["pid"] for server in self.fleetdump("status").record()["data"]["servers"])
        return pid

    def generate(self, ids: list[int], rid: str = "", seconds: float = 60.0) -> dict[str, Any]:
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

    def wait_for_shards(self, run_name: str, rows: int, seconds: float = 30.0) -> None:
        """Wait until all rows of a run are journalled and their shards closed."""
        folder, deadline = self.capture / run_name, time.monotonic() + seconds
        while True:
            lines = [json.loads(x) for file in folder.glob("journal-*.jsonl") for x in file.read_bytes().splitlines()]
            written = sum(line["rows"] for line in lines if line["kind"] == "piece")
            closed = {line["shard"] for line in lines if line["kind"] == "shard"}
            if written >= rows and closed >= {line["shard"] for line in lines if line["kind"] == "piece"}:
                return
            if time.monotonic() > deadline:
                raise RuntimeError(f"{folder}: {written} of {rows} rows were written within {seconds:.0f} s")
            time.sleep(0.1)

    def processes(self) -> list[int]:
        """Processes that still hold this server's folder in their command line or environment."""
        found, mark = [], str(self.folder).encode()
        for path in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                if mark in (path / "cmdline").read_bytes() or mark in (path / "environ").read_bytes():
                    found.append(int(path.name))
        return [pid for pid in found if pid != os.getpid()]


def descendants(root: int) -> list[int]:
    """``root`` and every process below it."""
    parents = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            parents[int(stat.parent.name)] = int(stat.read_text().rpartition(")")[2].split()[1])
    below = {root}
    while more := {pid for pid, parent in parents.items() if parent in below} - below:
        below |= more
    return sorted(below)
