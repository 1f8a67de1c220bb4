"""kill -9 of the real SGLang with the real tap in it, under load, at seeded moments: nothing is lost, doubled or torn.

50 kills in all, each with a start of the server behind it, hence nightly. Every day tests/unit/test_tap_kills.py does
the same five times to the tap's writer in a process that is quick to start.
"""

from __future__ import annotations

import json
import random
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from fleetdump.agent.drive import follow
from fleetdump.agent.patching import patch, revert
from fleetdump.agent.patchmessages import PatchArgs, RevertArgs
from fleetdump.agent.procfs import port_owner
from fleetdump.agent.runmessages import FollowArgs
from fleetdump.agent.server import load_record, save_record
from fleetdump.agent.servermessages import StopArgs
from fleetdump.agent.share import Share
from fleetdump.agent.stop import stop
from fleetdump.dataset.shards import ShardReader, verify_directory
from tests.sglang.cpuserver import SglangEnv, free_port
from tests.sglang.test_extract_real import RealHost, kill_driver, manifest_of, rejected_of, wait_for

KILLS = 5
"""Of one run."""
SAMPLES = 25
"""Of one run, a kill."""
LIMIT = 1e-4
"""Largest difference of a row to that of a run without kills, over the largest value: batches differ."""

pytestmark = [pytest.mark.sglang, pytest.mark.nightly]


@pytest.fixture(scope="module")
def host(sglang_env: SglangEnv, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealHost]:
    real = RealHost(tmp_path_factory.mktemp("kills"), sglang_env, free_port())
    real.server.args[real.server.args.index("--chunked-prefill-size") + 1] = "64"
    real.capture.shard_bytes = 2_000_000
    patch(PatchArgs(real.server.python, real.patch, models=[real.server.model_path]), real.context())
    try:
        yield real
    finally:
        for path in (real.state.root / "runs").glob("*/main/driver.json"):
            kill_driver(Share(path.parent))
        stop(StopArgs(), real.context())
        revert(RevertArgs(real.server.python), real.context())


@pytest.mark.parametrize("seed", range(10))
def test_killed_at_any_moment_every_sample_is_there_once_with_its_rows(host: RealHost, seed: int) -> None:
    source = random.Random(seed)
    rows = [
        {"id": f"s{n}", "input_ids": [source.randrange(3, 300) for _ in range(source.randrange(2, 400))]}
        for n in range(KILLS * SAMPLES)
    ]
    for row in rows:
        row["loss_mask"] = [1] * len(row["input_ids"])
    name, torn = f"kills-{seed}", 0
    host.launch()
    share = host.submit(name, rows, budget=4000)
    directory = Path(host.capture.dir) / name
    for _ in range(KILLS):
        wanted = len(manifest_of(share)) + source.randrange(1, SAMPLES // 2)
        wait_for(lambda wanted=wanted: len(manifest_of(share)) >= wanted, 240)
        time.sleep(source.random())
        assert share.progress().state != "done", "everything was done before the last kill"
        kill_on_purpose(host)
        torn += len(list(directory.glob("*.part")))
        host.launch()
    follow(FollowArgs(name, interval=0.2), host.context(deadline=600))
    assert share.progress().state == "done", share.progress()
    assert rejected_of(share) == {}
    assert sorted(line["id"] for line in manifest_of(share)) == sorted(row["id"] for row in rows)
    assert torn > 0, "no kill struck while a shard was open"
    assert not list(directory.glob("*.part"))
    assert verify_directory(directory).faults == []
    whole = host.submit(f"whole-{seed}", rows, budget=4000)
    follow(FollowArgs(f"whole-{seed}", interval=0.2), host.context(deadline=600))
    kill_on_purpose(host)
    worst = largest_difference(host, share, whole)
    assert worst <= LIMIT
    report = {"seed": seed, "kills": KILLS, "samples": len(rows), "torn_shards_repaired": torn, "difference": worst}
    print(json.dumps(report))


def kill_on_purpose(host: RealHost) -> None:
    """SIGKILL, on purpose as the driver sees it: it does not look for a sample that does it."""
    record = load_record(host.state, "main")
    assert record is not None
    record.stopped_at = time.time()
    save_record(host.state, record)
    host.kill_server()
    wait_for(lambda: port_owner(host.server.port) is None, 60)  # children die after the launcher


def largest_difference(host: RealHost, share: Share, whole: Share) -> float:
    """Of the rows of two runs, relative to the largest value. Every sample has as many rows as tokens."""
    import numpy as np

    worst = 0.0
    others = {line["id"]: line for line in manifest_of(whole)}
    for line in manifest_of(share):
        mine, other = states_of(host, share, line), states_of(host, whole, others[line["id"]])
        assert mine.shape == other.shape == (line["tokens"], 4, 128)
        worst = max(worst, float(np.abs(mine - other).max() / np.abs(other).max()))
    return worst


def states_of(host: RealHost, share: Share, line: dict[str, Any]) -> Any:
    """A sample's ``[tokens, 4, 128]`` from its pieces."""
    import numpy as np

    parts = []
    for piece in sorted(line["pieces"], key=lambda piece: int(piece["start"])):
        with ShardReader(Path(host.capture.dir) / share.run / piece["shard"]) as reader:
            parts.append(np.frombuffer(reader.read(piece["name"]), np.float32).reshape(-1, 4, 128))
    return np.concatenate(parts)
