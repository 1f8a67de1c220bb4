"""A stand-in server (``bench.driveserver``) as a process of its own, recorded on a host as ``launch`` would do it."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from fleetdump.agent.context import State
from fleetdump.agent.procfs import start_time
from fleetdump.agent.server import PASSED, ServerRecord, boot_id, save_record

LAYERS = [1, 3]


@dataclass(frozen=True)
class Host:
    """Where a stand-in's host keeps its things: ``capture`` takes the rows; ``model`` and ``import_env`` are what a
    tokeniser is given."""

    state: State
    capture: Path
    model: Path
    import_env: Mapping[str, str] = field(default_factory=dict)


@contextlib.contextmanager
def stand_in(host: Host, service: float = 0.0, rate: float = 0.0) -> Iterator[int]:
    """The host's server ``main``, which takes ``service`` seconds a request or ``rate`` tokens a second; gives its
    port."""
    host.state.directory()
    port_file = host.state.root / "port"
    argv = [sys.executable, "-m", "bench.driveserver", "--port-file", str(port_file), "--capture", str(host.capture)]
    process = subprocess.Popen([*argv, "--service", str(service), "--rate", str(rate)])
    try:
        while not port_file.exists():
            time.sleep(0.01)
        port = int(port_file.read_text())
        save_record(host.state, _record(host, process.pid, port))
        yield port
    finally:
        process.kill()
        process.wait()


def _record(host: Host, pid: int, port: int) -> ServerRecord:
    return ServerRecord(
        name="main",
        pid=pid,
        start_time=start_time(pid) or 0,
        launch_id="00000001",
        port=port,
        host="127.0.0.1",
        python=sys.executable,
        model_path=str(host.model),
        tp=1,
        argv=[],
        env=[],
        log="",
        identity="",
        started_at=time.time(),
        capture_layers=LAYERS,
        capture_dir=str(host.capture),
        boot=boot_id(),
        settings=PASSED,
        import_env=dict(host.import_env),
    )
