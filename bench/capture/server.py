"""A server of a real SGLang that holds SGLang's own forward, the tapped one and the naive one."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import shlex
import signal
import socket
import subprocess
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from fleetdump.agent.applicable import choose_edits
from fleetdump.agent.edit import apply_edits
from fleetdump.agent.flagrules import patch_arguments
from fleetdump.agent.specs import Edit, Insertion, PatchSpec
from fleetdump.patches import load_patch

ROOT = Path(__file__).resolve().parents[2]
INSERVER = Path(__file__).with_name("inserver")
ARCHITECTURE = "DeepseekV3ForCausalLM"
MODULE = "sglang.srt.models.deepseek_v2"
ORIGINAL, TAPPED, NAIVE = "original", "tapped", "naive"
START_SECONDS = 400.0
STOP_SECONDS = 20.0


@dataclass(frozen=True)
class Engine:
    """An interpreter that imports SGLang, the model that it serves, and the flags and environment beside ours."""

    python: Path
    model: Path
    args: tuple[str, ...]
    env: dict[str, str] = field(default_factory=dict)

    def release(self) -> str:
        """Version of the interpreter's SGLang."""
        code = "import importlib.metadata as m; print(m.version('sglang'))"
        return self.run(["-c", code]).strip()

    def module_source(self) -> str:
        """Source of the model's module, found without importing SGLang."""
        code = "import importlib.util as u, pathlib; print(pathlib.Path(u.find_spec('sglang').origin).parent)"
        package = Path(self.run(["-c", code]).strip())
        return package.joinpath(*MODULE.split(".")[1:]).with_suffix(".py").read_text()

    def run(self, arguments: Sequence[str]) -> str:
        """What the interpreter prints when run with ``arguments``. Raises ``RuntimeError`` with its last words."""
        command = [str(self.python), *arguments]
        done = subprocess.run(command, env={**os.environ, **self.env}, capture_output=True, text=True, check=False)
        if done.returncode:
            raise RuntimeError(f"{shlex.join(command)[:200]} ended with {done.returncode}: {done.stderr[-1500:]}")
        return done.stdout


class Server:
    """A running server: its port, and the control of the process that runs the model."""

    def __init__(self, port: int, pid: int, folder: Path):
        self.port = port
        self.pid = pid
        self.naive_folder = folder / "naive"
        self._folder = folder
        self._control = folder / "control"

    def arm(self, name: str) -> None:
        """Serve from now on by the forward ``original``, ``tapped`` or ``naive``."""
        self._command("arm", name=name)

    @contextlib.contextmanager
    def timed(self, empty: bool = False) -> Iterator[None]:
        """Time the tap's calls; ``times`` then has them. ``empty``: time the timer, without the calls."""
        self._command("times")
        self._command("time", name=TAPPED, on=True, empty=empty)
        try:
            yield
        finally:
            self._command("time", name=TAPPED, on=False)

    def times(self) -> list[list[int]]:
        """For each forward that was timed: requests, nanoseconds of each ``before_layer``, and of ``after_layers``."""
        return list(self._command("times"))

    @contextlib.contextmanager
    def syncs_noted(self) -> Iterator[None]:
        """Note where the tap has the forward's thread wait for the GPU; ``syncs`` then has the places."""
        self._command("note_syncs", on=True)
        try:
            yield
        finally:
            self._command("note_syncs", on=False)

    def syncs(self) -> list[str]:
        """``file:line`` of what was noted."""
        return list(self._command("syncs"))

    def memory(self) -> dict[str, int]:
        """Bytes in use by the process that runs the model, as ``inserver/sitecustomize.py`` names them."""
        return dict(self._command("memory"))

    def tap_status(self) -> dict[str, Any]:
        """The tap's newest status file; empty when there is none."""
        newest = max(self._folder.glob("tap-*.json"), key=lambda path: path.stat().st_mtime, default=None)
        return dict(json.loads(newest.read_text())) if newest else {}

    def tap_lines(self) -> list[str]:
        """The last of what the tap said in the server's log."""
        lines = (self._folder / "server.log").read_text(errors="replace").splitlines()
        return [line[:500] for line in lines if "fleetdump-tap" in line][-5:]

    def _command(self, do: str, **arguments: Any) -> Any:
        with socket.socket(socket.AF_UNIX) as connection:
            connection.settimeout(60)
            connection.connect(str(self._control))
            connection.sendall(json.dumps({"do": do, **arguments}).encode() + b"\n")
            with connection.makefile("rb") as stream:
                return json.loads(stream.readline())


def fleetdump_flags(release: str) -> list[str]:
    """The flags that fleetdump adds on ``release``."""
    return patch_arguments(hidden_states_patch(), release)


@contextlib.contextmanager
def swappable_server(engine: Engine, tap: dict[str, Any], folder: Path) -> Iterator[Server]:
    """Run a server with fleetdump's flags whose forward can be swapped; it begins with SGLang's own. ``tap`` is the
    tap.json. Socket, sources and the log lie in ``folder``."""
    release = engine.release()
    (folder / "naive").mkdir(parents=True)
    _write_arms(folder, engine.module_source(), release)
    (folder / "tap.json").write_text(json.dumps(tap))
    variables = {
        "FLEETDUMP_TAP_CONFIG": str(folder / "tap.json"),
        "FLEETDUMP_BENCH": str(folder),
        "FLEETDUMP_BENCH_LAYERS": ",".join(map(str, tap["layers"])),
        "FLEETDUMP_BENCH_NAIVE": str(folder / "naive"),
        "PYTHONPATH": _path(INSERVER, folder, {**os.environ, **engine.env}.get("PYTHONPATH", "")),
    }
    with _process(engine, fleetdump_flags(release), variables, folder / "server.log") as (port, pid):
        yield Server(port, pid, folder)


@contextlib.contextmanager
def plain_server(engine: Engine, flags: Sequence[str], folder: Path) -> Iterator[int]:
    """Run a server that has nothing of fleetdump but ``flags``; gives its port."""
    with _process(engine, flags, {}, folder / "server-plain.log") as (port, _):
        yield port


def hidden_states_patch() -> PatchSpec:
    """The patch as it stands in this checkout."""
    return load_patch(ROOT / "patches" / "hidden-states")


def _write_arms(folder: Path, source: str, release: str) -> None:
    """The edited sources and the patch's files; the naive arm has the same lines, of another module."""
    patch = hidden_states_patch()
    for name, text in patch.files.items():
        (folder / name).write_text(text)
    edits = [edit for edit in choose_edits(patch, release, [ARCHITECTURE]) if edit.module == MODULE]
    arms = {}
    for arm, module in ((TAPPED, "fleetdump_tap"), (NAIVE, "fleetdump_bench_naive")):
        edited = apply_edits(source, [_calling(edit, module) for edit in edits], release, "bench")
        path = folder / f"forward_{arm}.py"
        path.write_text(edited.source)
        arms[arm] = {"import": module, "source": str(path)}
    description = {"module": MODULE, "class": edits[0].class_name, "arms": arms}
    (folder / "arms.json").write_text(json.dumps(description))


def _calling(edit: Edit, module: str) -> Edit:
    insertions = [Insertion(i.at, [line.replace("fleetdump_tap", module) for line in i.lines]) for i in edit.insertions]
    return replace(edit, insertions=insertions)


def _path(*folders: object) -> str:
    return os.pathsep.join(str(folder) for folder in folders if str(folder))


@contextlib.contextmanager
def _process(engine: Engine, flags: Sequence[str], variables: dict[str, str], log: Path) -> Iterator[tuple[int, int]]:
    port = _free_port()
    head = [str(engine.python), "-m", "sglang.launch_server", "--model-path", str(engine.model), "--host", "127.0.0.1"]
    command = [*head, "--port", str(port), *engine.args, *flags]
    with log.open("wb") as out:
        process = subprocess.Popen(
            command,
            env={**os.environ, **engine.env, **variables},
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        _wait_ready(process, port, log)
        yield port, process.pid
    finally:
        _end(process)


def _free_port() -> int:
    """A free port of loopback; SGLang 0.5.14 takes 10,000 above it too, and so ends for ports above 55535."""
    while True:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port: int = probe.getsockname()[1]
        if port <= 55535:
            return port


def _wait_ready(process: subprocess.Popen[bytes], port: int, log: Path) -> None:
    deadline = time.monotonic() + START_SECONDS
    while "fired up" not in (text := log.read_text(errors="replace")) or not _healthy(port):
        tail = "\n".join(text.splitlines()[-30:])
        if process.poll() is not None:
            raise RuntimeError(f"the server ended with status {process.returncode} (log: {log}):\n{tail}")
        if time.monotonic() > deadline:
            raise RuntimeError(f"the server was not ready after {START_SECONDS:.0f} s (log: {log}):\n{tail}")
        time.sleep(0.2)


def _healthy(port: int) -> bool:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
    try:
        connection.request("GET", "/health")
        return connection.getresponse().status == 200
    except OSError:
        return False
    finally:
        connection.close()


def _end(process: subprocess.Popen[bytes]) -> None:
    """SIGTERM to the server's session, then SIGKILL to what is left of it."""
    for which, seconds in ((signal.SIGTERM, STOP_SECONDS), (signal.SIGKILL, STOP_SECONDS)):
        deadline = time.monotonic() + seconds
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, which)
            while time.monotonic() < deadline:
                process.poll()
                os.killpg(process.pid, 0)
                time.sleep(0.2)
    process.wait(timeout=STOP_SECONDS)
