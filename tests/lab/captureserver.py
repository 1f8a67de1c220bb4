"""Start the stand-in server with the tap's real writer on a lab host, and record it as ``launch`` would.

Run there: ``python captureserver.py STATE_DIR CONFIG.json PYTHON MODEL [restartable]``; it ends when the server
answers. The server is detached and ends with the host or by a signal. ``restartable``: its record has all that
``restart`` needs."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path

from fleetdump.agent.context import State
from fleetdump.agent.launch import TAP_CONFIG
from fleetdump.agent.procfs import start_time
from fleetdump.agent.server import ServerRecord, boot_id, save_record

PROGRAM = Path(__file__).resolve().parents[1] / "unit" / "standin_tap.py"
START_SECONDS = 60.0


def main() -> None:
    state_dir, config_path, python, model, *restartable = sys.argv[1:]
    config = json.loads(Path(config_path).read_text())
    argv = [sys.executable, "-B", str(PROGRAM), config_path]
    with open("/tmp/server.log", "ab") as log:
        server = subprocess.Popen(
            argv,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    give_up = time.monotonic() + START_SECONDS
    while time.monotonic() < give_up and server.poll() is None:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", config["port"])):
            break
        time.sleep(0.02)
    record = ServerRecord(
        name=config["server"],
        pid=server.pid,
        start_time=start_time(server.pid) or 0,
        launch_id=config["launch_id"],
        port=config["port"],
        host="127.0.0.1",
        python=python,
        model_path=model,
        tp=1,
        argv=[],
        env=[],
        log="",
        identity="",
        started_at=time.time(),
        capture_layers=config["layers"],
        capture_dir=config["dir"],
        boot=boot_id(),
    )
    if restartable:
        record.argv, record.env = argv, ["PYTHONPATH"]
        record.import_env = {"PYTHONPATH": os.environ["PYTHONPATH"]}
        folder = State.of(state_dir).server(record.name)
        (folder / TAP_CONFIG).write_text(json.dumps({"v": 1, "launch_id": record.launch_id}))
    while not saved(state_dir, record):  # the host's disk is full: another fault of the test's
        time.sleep(0.2)


def saved(state_dir: str, record: ServerRecord) -> bool:
    with contextlib.suppress(OSError):
        save_record(State.of(state_dir), record)
        return True
    return False


if __name__ == "__main__":
    os.umask(0o077)
    main()
