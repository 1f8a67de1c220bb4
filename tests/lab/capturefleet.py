"""Lab hosts whose servers speak SGLang's /generate and write synthetic tensors with the tap's own writer.

``CaptureHost`` is one of them with what may happen to it; the command line works on them as on any fleet.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import shutil
import signal
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fleetengine import MODEL, PYTHON, STATE, install, site_packages
from hosts import LabHost, wait_for

from bench.drivetail import TOKENIZER

ROOT = Path(__file__).resolve().parents[2]
CODE = "/lab/code"
CONFIG = "/tmp/standin.json"
PORT = 8123
LAYERS = [1, 3]
CAPTURE = "/capture/hs"
CAPTURE_CONFIG = {"layers": LAYERS, "dir": CAPTURE, "shard_bytes": 8 << 20, "header_bytes": 16384}
SHIPPED = ("fleetdump", "patches/hidden-states", "tests/unit/standin.py", "tests/unit/standin_tap.py")

_SKEWED_DRIVER = """
import sys, time
sys.path.insert(0, sys.argv[1])
real = time.time
def skewed():
    with open("/tmp/skew") as file:
        return real() + float(file.read())
time.time = skewed
from fleetdump.agent.driver import main
main(sys.argv[2:])
"""
"""A driver whose clock is off by what stands in /tmp/skew, which may change at any moment."""


@dataclass
class CaptureHost:
    """A lab host with one server, ``main``. ``settings`` are the stand-in's faults (tests/unit/standin.py)."""

    lab: LabHost
    settings: dict[str, Any] = field(default_factory=lambda: {"chunk": 64})
    launch_id: str = ""

    @property
    def name(self) -> str:
        return self.lab.name

    def install(self) -> None:
        """Engine, code and model; nothing is started."""
        install(self.lab)
        tokenizer = site_packages(self.lab) / "transformers"
        tokenizer.mkdir()
        (tokenizer / "__init__.py").write_text(TOKENIZER)
        for name in (*SHIPPED, "tests/lab/captureserver.py"):
            target = self.lab.path(f"{CODE}/{name}")
            target.parent.mkdir(parents=True, exist_ok=True)
            if (ROOT / name).is_dir():
                shutil.copytree(ROOT / name, target, ignore=shutil.ignore_patterns("__pycache__"))
            else:
                shutil.copy(ROOT / name, target)

    def set(self, **settings: Any) -> None:
        """Change how the server behaves, from its next request on."""
        self.settings.update(settings)
        config = {
            "server": "main",
            "launch_id": self.launch_id,
            "dir": CAPTURE,
            "layers": LAYERS,
            "port": PORT,
            "log": "/tmp/requests.log",
            **self.settings,
        }
        temporary = self.lab.path(f"{CONFIG}.new")
        temporary.write_text(json.dumps(config))
        temporary.replace(self.lab.path(CONFIG))

    def start_server(self, *, restartable: bool = False) -> None:
        """``restartable``: ``fleetdump restart`` can launch it again."""
        self.launch_id = secrets.token_hex(4)
        self.set()
        base = str(Path(getattr(sys, "_base_executable", sys.executable)))
        start = [base, "-B", f"{CODE}/tests/lab/captureserver.py", STATE, CONFIG, PYTHON, MODEL]
        self.lab.run("env", f"PYTHONPATH={CODE}", *start, *(["restartable"] if restartable else []))

    def kill_server(self) -> None:
        self.signal("standin_tap.py")
        wait_for(lambda: not self.lab.count("standin_tap.py"), 60)

    def signal(self, text: str, number: int = signal.SIGKILL) -> int:
        """Send a signal to every process of the host whose command line has ``text``; how many there were."""
        hit = 0
        for pid in self.lab.pids():
            with contextlib.suppress(OSError):
                if text.encode() in Path(f"/proc/{pid}/cmdline").read_bytes():
                    os.kill(pid, number)
                    hit += 1
        return hit

    def skew_clock(self, run: str, seconds: float) -> None:
        """From now on a driver works here whose wall clock is off by so much."""
        self.lab.path("/tmp/skew").write_text(str(seconds))
        if self.lab.count("def skewed"):
            return
        (root,) = self.lab.path(STATE).iterdir()
        self.signal("fleetdump.agent.driver")
        state = f"{STATE}/{root.name}"
        base = str(Path(getattr(sys, "_base_executable", sys.executable)))
        argv = [base, "-I", "-B", "-c", _SKEWED_DRIVER, CODE, state, run, "main"]
        self.lab.run("sh", "-c", 'setsid "$@" </dev/null >/dev/null 2>&1 &', "sh", *argv)

    def progress(self, run: str) -> dict[str, Any]:
        """What the driver last said, {} before it has."""
        with contextlib.suppress(OSError, ValueError):
            (path,) = self.lab.path(STATE).glob(f"*/runs/{run}/main/progress.json")
            return dict(json.loads(path.read_text()))
        return {}


def make_hosts(start_hosts: Callable[[int], list[LabHost]], count: int) -> list[CaptureHost]:
    """Fresh hosts, installed, with their servers running."""
    hosts = [CaptureHost(host) for host in start_hosts(count)]
    for host in hosts:
        host.install()
        host.start_server()
    return hosts


def write_data(path: Path, tokens: dict[str, int]) -> None:
    """A data set of rows that bring their ids."""
    with open(path, "w") as file:
        for name, count in tokens.items():
            ids = [(sum(name.encode()) + n) % 300 for n in range(count)]
            file.write(json.dumps({"id": name, "input_ids": ids, "loss_mask": [1] * count}) + "\n")
