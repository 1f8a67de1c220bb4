"""A fleet for tests of the command line: lab hosts with a small stand-in for SGLang, an inventory, and ``fleetdump``.

The stand-in has SGLang's package name, process titles, log lines, phases and endpoints, and a model file to patch. The
real one is run by tests/sglang and the demo.
"""

from __future__ import annotations

import base64
import hashlib
import json
import os
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from hosts import LabHost

ENGINE = "/opt/engine"
PYTHON = f"{ENGINE}/bin/python"
MODEL = "/models/tiny"
STATE = "/lab-state"
CAPTURE = "/capture/hs"
PORT = 8123
SCREEN = 25
MARK = "labmark 1 armed"

_MODEL_FILE = '''"""A model."""


class TinyModel:
    """Layers in a loop."""

    layers = (int, int)

    def forward(self, hidden_states):
        for i in range(len(self.layers)):
            hidden_states = self.layers[i](hidden_states)
        return hidden_states
'''

_LOG = '''"""Log lines with SGLang's stamp."""
import os, time


def log(text):
    rank = os.environ.get("STAND_IN_RANK", "")
    print(time.strftime("[%Y-%m-%d %H:%M:%S") + (" " + rank if rank else "") + "] " + text, flush=True)
'''

_SCHEDULER = '''"""One rank: loads, says so to the launcher through its stdout, and ends when the launcher does."""
import os, sys
from sglang.srt.log import log


def main():
    to_launcher = os.dup(1)
    os.dup2(2, 1)
    log("Init torch distributed begin.")
    log("Init torch distributed ends. elapsed=0.1 s")
    log("Load weight begin. avail mem=1.00 GB")
    from sglang.srt.models.tiny import TinyModel
    log("Load weight end. elapsed=0.1 s, type=TinyModel, avail mem=0.90 GB, mem usage=0.10 GB.")
    TinyModel().forward(1)
    log("KV Cache is allocated. #tokens: 8192")
    log("Memory pool end. avail mem=0.50 GB")
    log("max_total_num_tokens=8192, chunked_prefill_size=8192")
    os.write(to_launcher, b"ready")
    sys.stdin.read()
'''

_LAUNCH_SERVER = '''"""Starts the ranks, then answers HTTP."""
import argparse, http.server, json, os, signal, subprocess, sys

from sglang.srt.log import log

parser = argparse.ArgumentParser()
parser.add_argument("--model-path")
parser.add_argument("--host")
parser.add_argument("--port", type=int)
parser.add_argument("--tp-size", type=int)
parser.add_argument("--say", default="")
args, rest = parser.parse_known_args()
log("server_args=ServerArgs(" + str(vars(args)) + ")")
if args.say:
    log(args.say)
    print(args.say, flush=True)
if "--crash" in rest:
    raise ImportError("libcudart.so.12: cannot open shared object file")
signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
site = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
ranks = []
for n in range(args.tp_size):
    rank = "TP%d" % n if args.tp_size > 1 else ""
    ranks.append(subprocess.Popen(
        ["sglang::scheduler" + ("_" + rank if rank else ""), "-S", "-c",
         "from sglang.srt.scheduler import main; main()"],
        executable=sys.executable, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=sys.stdout,
        env={**os.environ, "PYTHONPATH": site, "STAND_IN_RANK": rank},
    ))
for rank in ranks:
    if rank.stdout.read(5) != b"ready":
        log("Received sigquit from a child process. It usually means the child failed.")
        sys.exit(1)


class Answer(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        body = json.dumps({"model_path": args.model_path, "context_length": 2048}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_):
        pass


print("INFO:     Started server process [%d]" % os.getpid(), flush=True)
server = http.server.HTTPServer((args.host, args.port), Answer)
print("INFO:     Uvicorn running on http://%s:%d (Press CTRL+C to quit)" % (args.host, args.port), flush=True)
log("The server is fired up and ready to roll!")
server.serve_forever()
'''

_FILES = {
    "sglang/__init__.py": "",
    "sglang/launch_server.py": _LAUNCH_SERVER,
    "sglang/srt/__init__.py": "",
    "sglang/srt/log.py": _LOG,
    "sglang/srt/scheduler.py": _SCHEDULER,
    "sglang/srt/models/__init__.py": "",
    "sglang/srt/models/tiny.py": _MODEL_FILE,
}


def site_packages(host: LabHost) -> Path:
    """The engine's site-packages, as a path of this machine."""
    version = f"python{sys.version_info[0]}.{sys.version_info[1]}"
    return host.path(f"{ENGINE}/lib/{version}/site-packages")


def install(host: LabHost) -> None:
    """Put the stand-in and a model directory on the host."""
    base = Path(getattr(sys, "_base_executable", sys.executable))
    site = site_packages(host)
    record = []
    for name, text in _FILES.items():
        path = site / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        digest = base64.urlsafe_b64encode(hashlib.sha256(text.encode()).digest()).rstrip(b"=").decode()
        record.append(f"{name},sha256={digest},{len(text)}\n")
    info = site / "sglang-0.5.20.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: sglang\nVersion: 0.5.20\n")
    (info / "RECORD").write_text("".join(record))
    python = host.path(PYTHON)
    python.parent.mkdir()
    python.symlink_to(base)
    host.path(f"{ENGINE}/pyvenv.cfg").write_text(f"home = {base.parent}\ninclude-system-site-packages = false\n")
    model = host.path(MODEL)
    model.mkdir(parents=True)
    sizes = {"num_hidden_layers": 6, "hidden_size": 128, "vocab_size": 512, "torch_dtype": "float32"}
    (model / "config.json").write_text(json.dumps({"architectures": ["TinyModel"], **sizes}))
    (model / "model.safetensors").write_bytes(bytes(64))


def write_patch(
    folder: Path, name: str, code: str = "pass", *, module: str = "sglang.srt.models.tiny", captures: bool = False
) -> Path:
    """A patch that calls ``code`` (the body of a function) at the head of the model's forward, and logs ``MARK``."""
    folder = folder / name
    folder.mkdir(parents=True)
    helper = f"lab_{name.replace('-', '_')}"
    body = "\n".join(f"    {line}" for line in code.splitlines())
    (folder / f"{helper}.py").write_text(
        f"import os, signal, sys, time\n\nprint(os.environ.get('STAND_IN_RANK') or 'TP0', 'rank=' + "
        f"(os.environ.get('STAND_IN_RANK') or 'TP0')[2:], {MARK!r}, flush=True)\n\n\ndef act():\n{body}\n"
    )
    edit = {
        "module": module,
        "class": "TinyModel",
        "method": "forward",
        "verified": ["0.5.20"],
        "insertions": [
            {"at": "module-imports", "lines": [f"import {helper}"]},
            {"at": "method-head", "lines": [f"{helper}.act()"]},
        ],
    }
    patch = {
        "name": name,
        "version": "1",
        "mark": MARK,
        "captures": captures,
        "files": [f"{helper}.py"],
        "edits": [edit],
    }
    (folder / "patch.yaml").write_text(yaml.safe_dump(patch, sort_keys=False))
    return folder


SPIN = "if os.environ.get('STAND_IN_RANK') in ('', 'TP1'):\n    while True:\n        pass\ntime.sleep(600)"
"""The last rank spins, the others wait, as after a collective that one rank never enters."""


@dataclass
class Fleet:
    """Lab hosts with their inventory file in ``folder``, where ``fleetdump`` runs. ``overrides`` are settings by host
    name, "" to leave one out."""

    folder: Path
    hosts: list[LabHost]
    overrides: dict[str, dict[str, Any]] = field(default_factory=dict)

    @property
    def inventory(self) -> Path:
        return self.folder / "inventory.yaml"

    def write_inventory(self, *, server: dict[str, Any] | None = None, **defaults: Any) -> None:
        """The inventory of all hosts; ``server`` changes their one server, ``defaults`` everything else."""
        args = ["--device", "cpu"]
        servers = [{"name": "main", "model_path": MODEL, "port": PORT, "args": args, **(server or {})}]
        settings = {
            "user": "root",
            "python": PYTHON,
            "agent_python": "/usr/bin/python3",
            "state_dir": STATE,
            "connect_timeout": 4,
            "servers": servers,
            "patience": dict.fromkeys(("imports", "init", "weights", "kv_pool"), 2),
            **defaults,
        }
        hosts = {}
        for host in self.hosts:
            own = {"address": host.address, "identity_file": str(host.identity_file)}
            own["host_key"] = host.host_key_fingerprint()
            merged = {**own, **self.overrides.get(host.name, {})}
            hosts[host.name] = {key: value for key, value in merged.items() if value != ""}
        self.inventory.write_text(yaml.safe_dump({"defaults": settings, "hosts": hosts}, sort_keys=False))

    def environment(self) -> dict[str, str]:
        """With the user's own ssh configuration and known hosts out of sight."""
        return {**os.environ, "XDG_CONFIG_HOME": str(self.folder / "config"), "COLUMNS": "120"}

    def start(self, *args: str) -> subprocess.Popen[str]:
        """``fleetdump`` in the background."""
        return subprocess.Popen(
            [sys.executable, "-m", "fleetdump", *args],
            cwd=self.folder,
            env=self.environment(),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def run(self, *args: str, timeout: float = 120) -> Done:
        """``fleetdump`` to its end."""
        process = self.start(*args)
        try:
            out, err = process.communicate(timeout=timeout)
        finally:
            process.kill()
        return Done(args, process.returncode, out, err)


@dataclass
class Done:
    """One call of the command line. ``records`` are the objects of ``--json``."""

    args: tuple[str, ...]
    code: int
    out: str
    err: str

    def __str__(self) -> str:
        return f"fleetdump {' '.join(self.args)} -> {self.code}\n{self.out}{self.err}"

    def records(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.out.splitlines()]


def tree(host: LabHost, *folders: str) -> set[str]:
    """Every file below these paths of the host with mode and hash; without the agent's own bundle, its audit log and
    its empty guard file, which any call may leave."""
    ours = " ".join(f'-not -path "{pattern}"' for pattern in ("*/agent/*", "*/audit.jsonl", "*/lock.guard"))
    script = f'for d; do [ ! -e "$d" ] || find "$d" -type f {ours} -printf "%p %m\\n" -exec sha256sum {{}} +; done'
    return set(host.run("sh", "-c", script, "sh", *folders).splitlines())
