"""What one verb costs beside the cheapest possible SSH exec of Python on the same connection, as a ratio in one run.

Alternates over one open connection to an sshd of its own on loopback: ``python3 -I -S -c pass`` (the floor), the
agent's ``status`` verb, and connect-and-``status``. Prints one JSON object.
Repeat: ``python -m bench.agent_call``.
"""

from __future__ import annotations

import contextlib
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from demo.sshd import run_sshd
from fleetdump.agent.hostmessages import StatusArgs, StatusResult
from fleetdump.fleet import Host, connect
from fleetdump.fleet.connection import open_connection
from fleetdump.fleet.hostkeys import KnownHosts
from fleetdump.fleet.process import SshTransport, Transport
from fleetdump.inventory import HostConfig, load

REPETITIONS = 15
FLOOR = ("python3", "-I", "-S", "-c", "pass")


def main() -> None:
    with tempfile.TemporaryDirectory(prefix="fleetdump-bench-") as scratch, run_sshd(Path(scratch) / "ssh") as sshd:
        inventory = Path(scratch) / "inventory.yaml"
        host = {
            "address": "127.0.0.1",
            "port": sshd.port,
            "user": sshd.user,
            "identity_file": str(sshd.identity_file),
            "host_key": sshd.fingerprint,
            "agent_python": sys.executable,
        }
        inventory.write_text(
            f"defaults: {{state_dir: {json.dumps(scratch + '/state')}}}\nhosts: {{bench: {json.dumps(host)}}}\n"
        )
        print(json.dumps(measure(load(inventory).hosts[0])))


def measure(config: HostConfig) -> dict[str, object]:
    """Medians in seconds, and ratios to the floor."""
    plain = SshTransport(open_connection(config, known=KnownHosts(Path(os.devnull)), accept_new=False))
    with contextlib.closing(plain), connect(config) as host:
        _status(host)  # the first call pushes the bundle
        floor: list[float] = []
        verb: list[float] = []
        fresh: list[float] = []
        for _ in range(REPETITIONS):
            floor.append(_timed(lambda: _floor(plain)))
            verb.append(_timed(lambda: _status(host)))
            fresh.append(_timed(lambda: _connect_and_status(config)))
    base = statistics.median(floor)
    return {
        "benchmark": "agent_call",
        "repetitions": REPETITIONS,
        "floor_seconds": round(base, 4),
        "verb_seconds": round(statistics.median(verb), 4),
        "verb_ratio": round(statistics.median(verb) / base, 2),
        "connect_and_verb_ratio": round(statistics.median(fresh) / base, 2),
        "spread_seconds": {"floor": _spread(floor), "verb": _spread(verb), "connect_and_verb": _spread(fresh)},
    }


def _floor(transport: Transport) -> None:
    process = transport.start(FLOOR)
    while process.read(4096, timeout=30.0):
        pass
    process.close()


def _status(host: Host) -> None:
    host.call(StatusArgs(), StatusResult, verb="status")


def _connect_and_status(config: HostConfig) -> None:
    with connect(config) as host:
        _status(host)


def _timed(function: Callable[[], None]) -> float:
    began = time.perf_counter()
    function()
    return time.perf_counter() - began


def _spread(values: list[float]) -> list[float]:
    return [round(min(values), 4), round(max(values), 4)]


if __name__ == "__main__":
    main()
