"""A real interpreter with a small package ``sglang`` in site-packages, installed as pip would (METADATA, RECORD)."""

from __future__ import annotations

import base64
import hashlib
import py_compile
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from fleetdump.agent.context import AgentContext, State
from fleetdump.agent.protocol import Request
from fleetdump.agent.specs import Edit, Insertion, PatchSpec

MODEL = b'''"""A model."""
import math

class TinyModel:
    """Layers in a loop."""

    def forward(self, input_ids, forward_batch):
        hidden_states, residual = input_ids, None
        for i in range(len(self.layers)):  # every layer
            layer = self.layers[i]
            hidden_states, residual = layer(hidden_states, residual)
        return hidden_states
'''

LAUNCH_SERVER = b"""import argparse, os, signal, socket, subprocess, sys, time
parser = argparse.ArgumentParser()
parser.add_argument("--host")
parser.add_argument("--port", type=int)
known, rest = parser.parse_known_args()
print("server_args", rest, flush=True)
if "--stubborn" in rest:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
if "--children" in rest:
    code = "import signal,time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(60)"
    subprocess.Popen([sys.executable, "-c", code])
if "--crash" in rest:
    sys.exit("cannot start")
listener = socket.create_server((known.host, known.port))
print("listening", flush=True)
time.sleep(60)
"""


@dataclass
class Install:
    """The fake installation; ``python`` imports it."""

    root: Path

    @property
    def python(self) -> str:
        return str(self.root / "bin" / "python")

    @property
    def site(self) -> Path:
        return self.root / "lib" / f"python{sys.version_info[0]}.{sys.version_info[1]}" / "site-packages"

    @property
    def model(self) -> Path:
        return self.site / "sglang" / "srt" / "models" / "tiny.py"

    def tree(self) -> dict[str, tuple[str, int, int]]:
        """Every file with hash, mode and modification time."""
        files = [path for path in sorted(self.site.rglob("*")) if path.is_file()]
        return {
            str(path.relative_to(self.site)): (
                hashlib.sha256(path.read_bytes()).hexdigest(),
                path.stat().st_mode,
                path.stat().st_mtime_ns,
            )
            for path in files
        }


def install(
    root: Path, release: str = "0.5.20", model: bytes = MODEL, extra: dict[str, bytes] | None = None
) -> Install:
    """Make (or overwrite, as ``pip install --force-reinstall`` does) the installation in ``root``; ``extra`` are more
    files of it."""
    made = Install(root)
    (root / "bin").mkdir(parents=True, exist_ok=True)
    made.model.parent.mkdir(parents=True, exist_ok=True)
    python = Path(made.python)
    if not python.is_symlink():
        base = Path(getattr(sys, "_base_executable", sys.executable))
        python.symlink_to(base)
        (root / "pyvenv.cfg").write_text(f"home = {base.parent}\ninclude-system-site-packages = false\n")
    files = {
        "sglang/__init__.py": b"raise ImportError('fleetdump must not import sglang')\n",
        "sglang/launch_server.py": LAUNCH_SERVER,
        "sglang/srt/__init__.py": b"",
        "sglang/srt/models/__init__.py": b"",
        "sglang/srt/models/tiny.py": model,
        **(extra or {}),
    }
    record = []
    for name, data in files.items():
        path = made.site / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
        digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
        record.append(f"{name},sha256={digest},{len(data)}")
    for old in made.site.glob("sglang-*.dist-info"):
        for path in old.iterdir():
            path.unlink()
        old.rmdir()
    info = made.site / f"sglang-{release}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: sglang\nVersion: {release}\n")
    (info / "RECORD").write_text("\n".join(record) + "\n")
    return made


def compile_model(made: Install) -> Path:
    """Bytecode of the model as an earlier run of the server left it, of the kind that Python never checks."""
    target = made.model.parent / "__pycache__" / f"tiny.cpython-{sys.version_info[0]}{sys.version_info[1]}.pyc"
    mode = py_compile.PycInvalidationMode.UNCHECKED_HASH
    py_compile.compile(str(made.model), cfile=str(target), invalidation_mode=mode)
    return target


def runnable(made: Install) -> Install:
    """Let ``python -m sglang.launch_server`` run: tests of patching want an engine that cannot be imported."""
    (made.site / "sglang" / "__init__.py").write_bytes(b"")
    return made


def context(tmp_path: Path, deadline: float = 60.0) -> AgentContext:
    """A call of the agent whose state lies in ``tmp_path``."""
    return AgentContext(Request("test", {}, deadline=deadline), State(tmp_path / "state" / "machine"))


def spec(version: str = "1", name: str = "probe", files: dict[str, str] | None = None) -> PatchSpec:
    """A patch of the tiny model with a tap file."""
    edit = Edit(
        module="sglang.srt.models.tiny",
        class_name="*Model",
        method="forward",
        present=["residual"],
        first_release="0.5.0",
        last_release="0.5.20",
        verified=["0.5.20"],
        insertions=[
            Insertion("module-imports", ["import fleetdump_probe"]),
            Insertion("loop-head", ["fleetdump_probe.at(i, hidden_states, residual)"]),
            Insertion("after-loop", ["fleetdump_probe.end(hidden_states, residual)"]),
        ],
    )
    files = {"fleetdump_probe.py": f"VERSION = {version!r}\n"} if files is None else files
    digest = hashlib.sha256(f"{name}{version}{sorted(files.items())}".encode()).hexdigest()
    return PatchSpec(name, version, digest, [edit], files)


def wait_for(condition, seconds: float = 10.0) -> None:  # type: ignore[no-untyped-def]
    """Poll until ``condition()`` holds; raises AssertionError after ``seconds``."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not happen in time"
        time.sleep(0.02)
