"""What docs/data.md shows of reading a collected run is so: its block, run as it stands where torch is."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from array import array
from pathlib import Path
from typing import Any

import pytest

from fleetdump.agent.context import State
from fleetdump.agent.drive import start_driver
from fleetdump.agent.specs import ServerSpec
from fleetdump.dataset.shards import ShardReader
from fleetdump.fleet import connect
from fleetdump.inventory import CaptureConfig, HostConfig
from fleetdump.ledger import Ledger
from fleetdump.tasks.collect import pull
from fleetdump.tasks.merge import PullOptions, merge, require_whole
from tests.sglang.cpuserver import SglangEnv

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "unit"))
from extraction import LAYERS, StandIn, ids_of, kill_driver, wait_for
from standin import HIDDEN, state_at

ROOT = Path(__file__).resolve().parents[2]
BLOCKS = re.findall(r"^```python\n(.*?)^```$", (ROOT / "docs" / "data.md").read_text(), re.MULTILINE | re.DOTALL)
TELL = """
read = {name: [each.tolist() for each in tensors] for name, *tensors in samples(Path("runs/conversations"))}
Path("read.json").write_text(json.dumps(read))
"""
RUN = "conversations"
SAMPLES = {"short": 3, "long": 230, "a/b ü": 61}

pytestmark = pytest.mark.sglang


@pytest.fixture(scope="module", params=[[[0, 1, 2]], [[0], [1, 2]]], ids=["one stage", "two stages"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder where ``collect --data`` was run: samples of several pieces, of a server that is a stand-in."""
    tmp = tmp_path_factory.mktemp("reading")
    standin = StandIn(tmp)
    standin.state = State.of(str(tmp / "state"))
    standin.set_faults(chunk=50, stages=request.param)
    standin.start()
    share = standin.share(SAMPLES, run=RUN)
    start_driver(standin.state, share)
    try:
        wait_for(lambda: share.progress().state == "done", 120)
        norm = Path(standin.capture.dir) / RUN / f"norm-main-{standin.launch_id}.safetensors"
        norm.write_bytes(b"norm")
        _collect(tmp, standin)
    finally:
        standin.kill()
        kill_driver(share)
    return tmp


def _collect(tmp: Path, standin: StandIn) -> None:
    config = HostConfig(
        name="h1",
        address="localhost",
        connection="local",
        agent_python=sys.executable,
        state_dir=str(tmp / "state"),
        servers=(ServerSpec("main", sys.executable, str(tmp), standin.port),),
        capture=CaptureConfig(layers=tuple(LAYERS), dir=standin.capture.dir),
    )
    options = PullOptions(RUN, tmp / "runs")
    with Ledger(tmp / "runs" / RUN / "ledger.sqlite") as ledger, connect(config) as host:
        report = pull(host, options, ledger)
        require_whole(merge(ledger, options, tmp / "runs"), [report])


def test_the_block_of_the_documentation_reads_every_sample(folder: Path, sglang_installed: SglangEnv) -> None:
    (block,) = BLOCKS
    script = folder / "read.py"
    script.write_text(block + TELL, encoding="utf-8")
    done = subprocess.run([sglang_installed.python, script], cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert f"long (230, 3, {HIDDEN}) 1 of 230 tokens supervised" in done.stdout.splitlines()
    read: dict[str, Any] = json.loads((folder / "read.json").read_text())
    assert set(read) == set(SAMPLES)
    for name, tokens in SAMPLES.items():
        states, ids, mask = read[name]
        assert (ids, mask) == (ids_of(name, tokens), [0] * (tokens - 1) + [1])
        assert states == [
            [[state_at(name, row, slot, place) for place in range(HIDDEN)] for slot in range(len(LAYERS) + 1)]
            for row in range(tokens)
        ]


def test_our_own_reader_finds_the_same_tensors(folder: Path) -> None:
    lines = [json.loads(text) for text in (folder / "runs" / RUN / "manifest.jsonl").read_text().splitlines()]
    for line in lines:
        for piece in line["pieces"]:
            with ShardReader(folder / "runs" / RUN / line["path"] / piece["shard"]) as reader:
                data = array("f", reader.read(piece["name"]))
            rows = range(piece["start"], piece["start"] + piece["rows"])
            wanted = [state_at(line["id"], r, s, p) for r in rows for s in piece["slots"] for p in range(HIDDEN)]
            assert data.tolist() == wanted
