"""``extract --restart`` with the real SGLang, two ranks and the real tap: the server dies, loses its ranks while its
HTTP server answers on, or hangs; it is diagnosed and launched again, and the run ends whole.

Five starts of a server of two ranks, one after the other: nightly.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from demo.sglang_cpu import recipe
from fleetdump.agent import procfs
from fleetdump.agent.share import Share
from fleetdump.agent.tensorfile import crc32
from fleetdump.dataset.shards import ShardReader
from fleetdump.errors import ExitCode
from tests.sglang.cpuserver import SglangEnv, copy_of, free_port

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "unit"))
from extraction import kill_driver

pytestmark = [pytest.mark.sglang, pytest.mark.nightly]

SECONDS = 900.0
SAMPLES = 24
HANG = """

def _spin_on_request(rank):
    import os
    request = f"{os.environ['HANG_FOLDER']}/spin-{rank}"
    if os.path.exists(request):
        os.rename(request, request + "-taken")
        while True:
            pass
"""
CHANGES = {
    "managers/scheduler.py": (
        "        self.metrics_reporter.record_scheduler_active()\n        self.forward_ct += 1\n",
        "        _spin_on_request(self.ps.tp_rank)\n",
        HANG,
    ),
    "utils/watchdog.py": (
        "        for proc, name in zip(self._processes, self._names):\n",
        "        if os.path.exists(os.environ['HANG_FOLDER'] + '/blind'):\n            return False\n",
        "",
    ),
}
"""Lines that are put before others in the copy of SGLang, and what is added at the end of the file. A rank can be told
to spin; and the launcher not to look after its children, as in earlier releases."""
PATIENCE = {"serving": 30}


@pytest.fixture(scope="module")
def changed_env(sglang_installed: SglangEnv, tmp_path_factory: pytest.TempPathFactory) -> Iterator[SglangEnv]:
    with copy_of(sglang_installed, tmp_path_factory) as env:
        for name, (before, line, end) in CHANGES.items():
            path = env.package / "srt" / name
            text = path.read_text()
            assert text.count(before) == 1, name
            part = path.with_suffix(".part")
            part.write_text(text.replace(before, line + before) + end)
            os.replace(part, path)
        yield env


@dataclass
class Fleet:
    """This machine as a fleet of one host, with the command line in ``folder``."""

    folder: Path
    env: SglangEnv

    @property
    def hangs(self) -> Path:
        return self.folder / "hang"

    def write_inventory(self) -> None:
        self.hangs.mkdir()
        server = {
            "name": "main",
            "model_path": str(self.env.model),
            "port": free_port(),
            "tp": 2,
            "args": list(self.env.args),
            "env": {**recipe.server_env(2), "HANG_FOLDER": str(self.hangs)},
        }
        host = {
            "address": "localhost",
            "connection": "local",
            "state_dir": str(self.folder / "state"),
            "python": str(self.env.python),
            "servers": [server],
            "capture": {"layers": [1, 3, 5], "dir": str(self.folder / "capture")},
            "patience": PATIENCE,
        }
        (self.folder / "inventory.yaml").write_text(yaml.safe_dump({"hosts": {"here": host}}))

    def start(self, *args: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-m", "fleetdump", *args],
            cwd=self.folder,
            env={**os.environ, "XDG_CONFIG_HOME": str(self.folder / "config")},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def run(self, *args: str) -> str:
        """``fleetdump`` to its good end; its stdout."""
        process = self.start(*args)
        try:
            out, err = process.communicate(timeout=SECONDS)
        finally:
            process.kill()
        assert process.returncode == ExitCode.OK, f"fleetdump {args}: {out[-3000:]}{err[-3000:]}"
        return out

    @property
    def state(self) -> Path:
        (agents,) = (self.folder / "state").glob("*/agent")
        return agents.parent

    def record(self) -> dict[str, Any]:
        return dict(json.loads((self.state / "servers" / "main" / "server.json").read_text()))

    def rank(self, number: int) -> int:
        """The process of a rank."""
        members = procfs.tree(self.record()["pid"])
        (pid,) = (p.pid for p in members if p.role == "scheduler" and p.rank and p.rank.tp == number)
        return pid

    def kill_all(self) -> None:
        pid = self.record()["pid"]
        for member in procfs.session_processes(pid):
            with contextlib.suppress(ProcessLookupError):
                os.kill(member.pid, signal.SIGKILL)

    def done(self, run: str) -> int:
        with contextlib.suppress(OSError, ValueError):
            return int(json.loads((self.state / "runs" / run / "main" / "progress.json").read_text())["done"])
        return 0


@pytest.fixture(scope="module")
def fleet(changed_env: SglangEnv, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    made = Fleet(tmp_path_factory.mktemp("restart"), changed_env)
    made.write_inventory()
    with open(made.folder / "data.jsonl", "w") as file:
        for number in range(SAMPLES):
            row = {"id": f"s{number:02}", "text": f"{number}: the quick brown fox. " * (40 + number)}
            file.write(json.dumps(row) + "\n")
    try:
        made.run("deploy", "--patch", "hidden-states")
        yield made
    finally:
        for path in made.state.glob("runs/*/main/driver.json"):
            kill_driver(Share(path.parent))
        made.run("stop")
        made.run("revert")


def kill_whole_server(fleet: Fleet) -> None:
    fleet.kill_all()


def kill_one_rank(fleet: Fleet) -> None:
    os.kill(fleet.rank(1), signal.SIGKILL)


def kill_all_ranks_unseen(fleet: Fleet) -> None:
    (fleet.hangs / "blind").touch()
    time.sleep(3.0)
    for pid in [fleet.rank(0), fleet.rank(1)]:
        os.kill(pid, signal.SIGKILL)


def spin(fleet: Fleet) -> None:
    (fleet.hangs / "spin-1").touch()


@pytest.mark.parametrize(
    ("fault", "verdicts", "lives_on"),
    [
        (kill_whole_server, ("LAUNCHER_DIED",), False),
        (kill_one_rank, ("LAUNCHER_DIED", "RANK_CRASHED", "API_ALIVE_ENGINE_DEAD"), False),
        (kill_all_ranks_unseen, ("API_ALIVE_ENGINE_DEAD",), True),
        (spin, ("RANK_SPIN", "MISSING_RANK"), True),
    ],
)
def test_the_run_goes_on_and_every_sample_is_there_once(
    fleet: Fleet, fault: Callable[[Fleet], None], verdicts: tuple[str, ...], lives_on: bool
) -> None:
    run, before = fault.__name__, fleet.record()
    extract = fleet.start(
        "extract", "--data", "data.jsonl", "--run", run, "--restart", "1", "--token-budget", "1500", "--json"
    )
    try:
        wait_for(lambda: fleet.done(run) >= 3, extract)
        fault(fleet)
        out, err = extract.communicate(timeout=SECONDS)
    finally:
        extract.kill()
        for left in fleet.hangs.iterdir():
            left.unlink()
    assert extract.returncode == ExitCode.OK, out[-3000:] + err[-3000:]
    assert fleet.record()["launch_id"] != before["launch_id"]
    assert "main: restarted, ready in" in err, err
    assert "evidence on the host: " in err
    assert ("nothing has come from the server" in err) == lives_on, err
    (restart,) = map(json.loads, (fleet.state / "runs" / run / "restarts.jsonl").read_text().splitlines())
    assert restart["launch_id"] == before["launch_id"]
    assert restart["verdict"].split(":")[0] in verdicts
    check_whole(fleet, run)
    audited = [json.loads(line) for line in fleet.run("audit", "-n", "1000", "--json").splitlines()]
    entries = [entry for record in audited for entry in record["data"]["entries"]]
    assert [entry["verb"] for entry in entries].count("restart") == len(
        list(fleet.state.glob("runs/*/restarts.jsonl"))
    ), entries


def check_whole(fleet: Fleet, run: str) -> None:
    """Each id once, none rejected, and every byte that the manifest names is there and checks."""
    report = json.loads(fleet.run("collect", "--run", run, "--data", "--json").splitlines()[-1])["data"]
    assert (report["samples"], report["lost"], report["duplicated"], report["rejected"]) == (SAMPLES, 0, 0, 0), report
    folder = fleet.folder / "runs" / run
    lines = [json.loads(line) for line in (folder / "manifest.jsonl").read_text().splitlines()]
    assert Counter(line["id"] for line in lines) == {f"s{number:02}": 1 for number in range(SAMPLES)}
    for line in lines:
        assert sum(piece["rows"] for piece in line["pieces"]) == line["tokens"]
        for piece in line["pieces"]:
            with ShardReader(folder / line["path"] / piece["shard"]) as reader:
                assert crc32(reader.read(piece["name"])) == piece["crc32"]


def wait_for(condition: Callable[[], bool], extract: subprocess.Popen[str]) -> None:
    end = time.monotonic() + SECONDS
    while not condition():
        assert extract.poll() is None, extract.communicate()
        assert time.monotonic() < end
        time.sleep(0.05)
