"""Where the demo keeps what, and the inventory it writes."""

from __future__ import annotations

import json
import socket
from dataclasses import dataclass
from pathlib import Path

from demo.sglang_cpu import recipe
from demo.sshd import DemoSshd

LAYERS = (1, 3, 5)
"""Entry ids: the residual stream that enters these layers (``layer_ids: input``)."""
PATIENCE = {
    "imports": 90,
    "init": 60,
    "weights": 45,
    "kv_pool": 15,
    "jit": 20,
    "capture": 20,
    "http": 20,
    "warmup": 20,
    "serving": 30,
}
"""Short, since the model is tiny; what healthy starts took stretches it where a machine is slow."""


@dataclass(frozen=True)
class Layout:
    """Folders of one run of the demo, below ``root``."""

    root: Path = recipe.BUILD / "demo"

    @property
    def ssh(self) -> Path:
        return self.root / "ssh"

    @property
    def host(self) -> Path:
        """Everything that fleetdump may leave on the 'host'."""
        return self.root / "host"

    @property
    def state_dir(self) -> Path:
        return self.host / "state"

    @property
    def capture_dir(self) -> Path:
        return self.host / "hidden-states"

    @property
    def inventory(self) -> Path:
        return self.root / "inventory.yaml"

    @property
    def runs(self) -> Path:
        """The controller's ledgers."""
        return self.root / "runs"

    @property
    def data(self) -> Path:
        """Where ``collect --data`` puts the merged manifest and the shards."""
        return self.root / "data"

    @property
    def logs(self) -> Path:
        return self.root / "logs"

    @property
    def report(self) -> Path:
        return self.root / "report.json"


def write_inventory(layout: Layout, sshd: DemoSshd, tp: int) -> None:
    """The demo's one host. Values are written as JSON, which YAML reads."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    server = {
        "name": "main",
        "model_path": str(recipe.MODEL),
        "port": port,
        "tp": tp,
        "args": list(recipe.SERVER_ARGS),
        "env": recipe.server_env(tp),
    }
    host = {
        "address": "127.0.0.1",
        "port": sshd.port,
        "user": sshd.user,
        "identity_file": str(sshd.identity_file),
        "host_key": sshd.fingerprint,
    }
    capture = {"layers": list(LAYERS), "layer_ids": "input", "dir": str(layout.capture_dir)}
    lines = [
        "# Written by demo/run.py: one host, reached over the demo's own sshd; a real SGLang on the CPU.",
        "defaults:",
        f"  python: {json.dumps(str(recipe.PYTHON))}",
        f"  agent_python: {json.dumps(str(recipe.PYTHON))}",
        f"  state_dir: {json.dumps(str(layout.state_dir))}",
        f"  capture: {json.dumps(capture)}",
        f"  patience: {json.dumps(PATIENCE)}",
        "  servers:",
        f"    - {json.dumps(server)}",
        "hosts:",
        f"  demo-host: {json.dumps(host)}",
    ]
    layout.inventory.write_text("\n".join(lines) + "\n")
