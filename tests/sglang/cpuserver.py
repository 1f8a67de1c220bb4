"""The real SGLang on the CPU for tests: copies that a test may patch, and servers by hand that always end."""

from __future__ import annotations

import contextlib
import http.client
import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest

from demo.sglang_cpu import recipe

START_SECONDS = 480.0
STOP_SECONDS = 20.0


@dataclass(frozen=True)
class SglangEnv:
    """An interpreter that imports SGLang, a tiny model and how to launch a server of it.

    ``python`` lies in a hard-linked copy of the installed venv: patch it with ``os.replace`` only (as fleetdump does),
    writing into a file in place would change the original too.
    """

    python: Path
    model: Path
    version: str
    args: tuple[str, ...] = recipe.SERVER_ARGS
    """Launch flags beside model, host, port and tp size."""
    env: dict[str, str] = field(default_factory=recipe.server_env)
    """Environment beside what the test process has; ``recipe.server_env(2)`` is for two ranks."""

    @property
    def site_packages(self) -> Path:
        return next((self.python.parent.parent / "lib").glob("python3*/site-packages"))

    @property
    def package(self) -> Path:
        """The folder of the ``sglang`` package."""
        return self.site_packages / "sglang"


@dataclass
class RunningServer:
    """A server that answers ``/health``."""

    port: int
    pid: int
    log: Path
    seconds: float
    """From launch to the first healthy answer."""

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"


@contextlib.contextmanager
def copy_of(installed: SglangEnv, tmp_path_factory: pytest.TempPathFactory) -> Iterator[SglangEnv]:
    """A hard-linked copy of a venv (about a second, no disk), removed at the end.

    It lies beside the original where that can be written, since hard links do not cross file systems. Copies of test
    processes that were killed are removed first.
    """
    venv = installed.python.parent.parent.absolute()
    for stale in venv.parent.glob(f"{venv.name}-copy-*-*"):
        if not Path(f"/proc/{stale.name.split('-')[-2]}").exists():
            shutil.rmtree(stale, ignore_errors=True)
    copy = venv.parent / f"{venv.name}-copy-{os.getpid()}-{time.monotonic_ns()}"
    try:
        shutil.copytree(venv, copy, symlinks=True, copy_function=os.link)
    except (OSError, shutil.Error):
        shutil.rmtree(copy, ignore_errors=True)
        copy = tmp_path_factory.mktemp("sglang") / "venv"
        shutil.copytree(venv, copy, symlinks=True)
    try:
        yield replace(installed, python=copy / "bin" / "python")
    finally:
        shutil.rmtree(copy, ignore_errors=True)


def no_other_models(packages: Path, architecture: str) -> dict[str, str]:
    """Environment in which the SGLang in ``packages`` imports that model's module alone. At a start it imports those of
    all, each process for itself, and the first time it compiles them."""
    served = f"class {architecture}("
    modules = sorted((packages / "sglang" / "srt" / "models").glob("*.py"))
    others = [path.stem for path in modules if path.stem != "__init__" and served not in path.read_text()]
    return {"SGLANG_DISABLED_MODEL_ARCHS": ",".join(others)}


GRPC_OFFSET = 10_000


def free_port() -> int:
    """A loopback port that nobody listens on now; some releases take the one 10,000 above it for gRPC."""
    while True:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port: int = probe.getsockname()[1]
        if port + GRPC_OFFSET < 1 << 16:
            return port


def server_argv(env: SglangEnv, port: int, tp: int = 1, extra_args: Sequence[str] = ()) -> list[str]:
    """The command line of a server by hand, without fleetdump."""
    head = [str(env.python), "-m", "sglang.launch_server", "--model-path", str(env.model), "--host", "127.0.0.1"]
    return [*head, "--port", str(port), "--tp-size", str(tp), *env.args, *extra_args]


@contextlib.contextmanager
def start_server(
    env: SglangEnv,
    log: Path,
    tp: int = 1,
    extra_args: Sequence[str] = (),
    extra_env: dict[str, str] | None = None,
    port: int = 0,
) -> Iterator[RunningServer]:
    """Run a real server by hand until the block ends; raises AssertionError with the log's end if it does not start."""
    port = port or free_port()
    variables = {**os.environ, **env.env, **recipe.server_env(tp), **(extra_env or {})}
    began = time.monotonic()
    with log.open("wb") as out:
        process = subprocess.Popen(
            server_argv(env, port, tp, extra_args),
            env=variables,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        _wait_healthy(process, port, log, began + START_SECONDS)
        yield RunningServer(port, process.pid, log, time.monotonic() - began)
    finally:
        _end_session(process)


def _wait_healthy(process: subprocess.Popen[bytes], port: int, log: Path, deadline: float) -> None:
    while not _healthy(port):
        tail = "\n".join(log.read_text(errors="replace").splitlines()[-30:])
        assert process.poll() is None, f"the server died with status {process.returncode}:\n{tail}"
        assert time.monotonic() < deadline, f"the server was not healthy after {START_SECONDS:.0f} s:\n{tail}"
        time.sleep(0.5)


def _healthy(port: int) -> bool:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
    try:
        connection.request("GET", "/health")
        return connection.getresponse().status == 200
    except OSError:
        return False
    finally:
        connection.close()


def session_pids(session: int) -> list[int]:
    """Living processes (zombies excepted) of a session."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rsplit(")", 1)[1].split()
        except (OSError, IndexError):
            continue
        if int(fields[3]) == session and fields[0] != "Z":
            found.append(int(stat.parent.name))
    return found


def _end_session(process: subprocess.Popen[bytes]) -> None:
    """SIGTERM to the launcher, then SIGKILL to what is left of its session."""
    process.terminate()
    deadline = time.monotonic() + STOP_SECONDS
    while session_pids(process.pid) and time.monotonic() < deadline:
        process.poll()
        time.sleep(0.2)
    for pid in session_pids(process.pid):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    process.wait(timeout=STOP_SECONDS)
