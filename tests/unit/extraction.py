"""What the tests of an extraction share: a host with a stand-in server, and the truth about what was written."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import resource
import secrets
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from fleetdump.agent.context import State
from fleetdump.agent.formats import row_line
from fleetdump.agent.jsonl import read_lines
from fleetdump.agent.procfs import is_alive, start_time
from fleetdump.agent.server import ServerRecord, boot_id, save_record
from fleetdump.agent.share import Share, ShareSpec
from fleetdump.agent.specs import CaptureSpec
from fleetdump.agent.tensorfile import crc32

ROOT = Path(__file__).resolve().parents[2]
LAYERS = [1, 3]


class StandIn:
    """A host with one server, ``main``, that is a stand-in process: start it, kill it, set its faults."""

    program = "standin.py"

    def __init__(self, tmp: Path):
        self.tmp = tmp
        self.state = State(tmp / "state")
        self.capture = CaptureSpec(layers=LAYERS, dir=str(tmp / "capture"))
        self.faults: dict[str, Any] = {}
        self.process: subprocess.Popen[bytes] | None = None
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        self.log = tmp / "requests.log"
        self.config = tmp / "standin.json"

    def set_faults(self, **faults: Any) -> None:
        self.faults = faults
        if self.process is not None:
            self._write_config(self.launch_id)

    def start(self, api_key: str = "") -> None:
        self.launch_id = secrets.token_hex(4)
        self._write_config(self.launch_id)
        self.process = subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name(self.program)), str(self.config)]
            + (["--api-key", api_key] if api_key else []),
            env={**os.environ, "PYTHONPATH": str(ROOT)},
        )
        for _ in range(500):
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", self.port)):
                break
            time.sleep(0.02)
        pid = self.process.pid
        save_record(
            self.state,
            ServerRecord(
                name="main",
                pid=pid,
                start_time=start_time(pid) or 0,
                launch_id=self.launch_id,
                port=self.port,
                host="127.0.0.1",
                python=sys.executable,
                model_path=str(self.tmp),
                tp=1,
                argv=[],
                env=[],
                log="",
                identity="",
                started_at=time.time(),
                capture_layers=LAYERS,
                capture_dir=self.capture.dir,
                boot=boot_id(),
            ),
        )

    def kill(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            self.process = None

    def requests(self) -> list[list[str]]:
        """[sample, attempt, tokens, pid of the server, requests beside it] of every request that arrived."""
        return [line.split() for line in self.log.read_text().splitlines()] if self.log.exists() else []

    def share(self, samples: dict[str, int], run: str = "r1", **settings: Any) -> Share:
        """A share that is already tokenised: ``samples`` maps ids to numbers of tokens (0: a rejected row)."""
        share = Share(self.state.share(run, "main"))
        rows = b"".join(row_line({"id": name, "input_ids": [1] * n}) for name, n in samples.items())
        share.rows.write_bytes(rows)
        spec = ShareSpec(
            run=run,
            server="main",
            share_sha256=hashlib.sha256(rows).hexdigest(),
            rows=len(samples),
            capture=self.capture,
            max_tokens=0,
            token_budget=settings.get("token_budget", 1000),
            max_attempts=settings.get("max_attempts", 3),
            engine="sglang 0.5.20",
            patch_sha256="p",
            model_sha256="m",
            submitted_at=time.time(),
        )
        share.save_spec(spec)
        share.work.write_bytes(work_lines(samples))
        return share

    def _write_config(self, launch_id: str) -> None:
        config = {
            "server": "main",
            "launch_id": launch_id,
            "dir": self.capture.dir,
            "layers": LAYERS,
            "port": self.port,
            "log": str(self.log),
            **self.faults,
        }
        temporary = self.config.with_suffix(".tmp")
        temporary.write_text(json.dumps(config))
        temporary.replace(self.config)


def ids_of(name: str, tokens: int) -> list[int]:
    """Ids that tell samples apart."""
    start = sum(name.encode())
    return [(start + n) % 300 for n in range(tokens)]


def work_lines(samples: dict[str, int]) -> bytes:
    good = {name: n for name, n in samples.items() if n}
    head = {
        "v": 1,
        "kind": "head",
        "tokenizer_sha256": "k",
        "template_sha256": "t",
        "samples": len(good),
        "tokens": sum(good.values()),
        "unsupervised_samples": 0,
        "all_supervised_samples": 0,
        "truncated": 0,
        "dropped": 0,
        "methods": {"given": len(good)},
        "shown": [{"id": "x", "tokens": 2, "supervised": 1, "spans": ["yes"]}],
    }
    lines: list[dict[str, Any]] = [head]
    for name, n in samples.items():
        if n:
            lines.append({"v": 1, "id": name, "ids": ids_of(name, n), "mask": [0] * (n - 1) + [1]})
        else:
            lines.append({"v": 1, "id": name, "reason": "empty", "detail": "no token"})
    return b"".join(json.dumps(line).encode() + b"\n" for line in lines)


def manifest_of(share: Share) -> list[dict[str, Any]]:
    return read_lines(share.manifest)[0]


def rejected_of(share: Share) -> dict[str, str]:
    return {line["id"]: line["reason"] for line in read_lines(share.rejected)[0]}


def check_bytes(share: Share, capture: CaptureSpec) -> None:
    """Every byte that the manifest names is there: pieces by CRC32, ids and mask by value, through the safetensors
    library."""
    from safetensors import safe_open

    directory = Path(capture.dir) / share.run
    for line in manifest_of(share):
        expected = ids_of(line["id"], line["tokens"])
        for piece in line["pieces"]:
            data = (directory / piece["shard"]).read_bytes()
            start = 8 + int.from_bytes(data[:8], "little") + piece["offset"]
            assert crc32(data[start : start + piece["bytes"]]) == piece["crc32"]
        values = sum(piece["rows"] * len(piece["slots"]) for piece in line["pieces"])
        assert values == line["tokens"] * (len(line["layers"]["input"]) + 1)
        with safe_open(str(directory / line["token_shard"]["shard"]), "numpy") as tensors:
            assert tensors.get_tensor(line["token_shard"]["ids"]).tolist() == expected
            assert tensors.get_tensor(line["token_shard"]["mask"]).sum() == line["supervised"]


def wait_for(condition: Any, seconds: float = 20.0) -> None:
    give_up = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < give_up, "waited in vain"
        time.sleep(0.02)


def kill_driver(share: Share) -> None:
    """SIGKILL to the share's driver, if it is a process of its own and still runs."""
    driver = share.driver()
    if driver is None or driver.pid == os.getpid() or not is_alive(driver.pid, driver.start_time):
        return
    os.kill(driver.pid, signal.SIGKILL)
    wait_for(lambda: not is_alive(driver.pid, driver.start_time))


@contextlib.contextmanager
def full_disk(limit: int) -> Iterator[None]:
    """The kernel refuses to make any file of this process longer than ``limit`` bytes."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
