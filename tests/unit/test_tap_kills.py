"""kill -9 of the process that the real tap writes in, under load, at seeded moments: nothing is lost or doubled."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from extraction import StandIn, check_bytes, manifest_of, rejected_of, wait_for
from standin_tap import states_of

from fleetdump.agent.driver import work
from fleetdump.agent.loop import Timing
from fleetdump.agent.server import load_record, save_record
from fleetdump.agent.shards import close_dead, needed_of
from fleetdump.agent.share import Share
from fleetdump.dataset.shards import ShardReader, verify_directory

KILLS = 5
"""Of one share."""


class TapHost(StandIn):
    program = "standin_tap.py"

    def kill(self) -> None:
        """SIGKILL, on purpose as the driver sees it: it does not look for a sample that does it."""
        record = load_record(self.state, "main")
        if record is not None and self.process is not None:
            record.stopped_at = time.time()
            save_record(self.state, record)
        super().kill()


@pytest.fixture
def host(tmp_path: Path) -> Iterator[TapHost]:
    standin = TapHost(tmp_path)
    yield standin
    standin.kill()


@pytest.mark.parametrize("seed", [0, *(pytest.param(n, marks=pytest.mark.nightly) for n in range(1, 10))])
def test_killed_at_any_moment_every_sample_is_there_once_with_its_bytes(host: TapHost, seed: int) -> None:
    source = random.Random(seed)
    samples = {f"c{n:03}": source.randrange(1, 1500) for n in range(200)}
    host.set_faults(chunk=64)
    share = host.share(samples, token_budget=8000)
    driver = threading.Thread(target=drive, args=(host, share), daemon=True)
    driver.start()
    for _ in range(KILLS):
        host.start()
        arrived = len(host.requests()) + source.randrange(1, 30)
        wait_for(lambda wanted=arrived: len(host.requests()) >= wanted or not driver.is_alive(), 120)
        time.sleep(source.random() * 0.1)
        assert driver.is_alive(), "everything was done before the last kill"
        host.kill()
    host.start()
    driver.join(300)
    assert share.progress().state == "done"
    host.kill()
    assert rejected_of(share) == {}
    assert sorted(line["id"] for line in manifest_of(share)) == sorted(samples)
    check_bytes(share, host.capture)
    check_files(Path(host.capture.dir) / "r1", share)


def drive(host: StandIn, share: Share) -> None:
    lock = share.claim()
    assert lock is not None
    with lock:
        work(host.state, share, Timing(turn=0.01, settle=60, pause=0.1, probe=0.05))


def check_files(directory: Path, share: Share) -> None:
    """Torn shards are repaired, all files fit their journals, and each committed row is the one that was computed."""
    close_dead(directory, needed_of([]))
    assert not list(directory.glob("*.part"))
    assert verify_directory(directory).faults == []
    for line in manifest_of(share):
        for piece in line["pieces"]:
            with ShardReader(directory / piece["shard"]) as reader:
                assert reader.read(piece["name"]) == states_of(line["id"], piece["start"], piece["rows"])
