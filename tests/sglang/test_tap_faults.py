"""The tap inside the real SGLang while its disk is full, and gone: the server serves on, and writing comes back."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from fleetdump.agent.formats import PieceRecord, SkipRecord
from fleetdump.agent.jsonl import read_journal
from fleetdump.dataset.shards import verify_directory
from tests.sglang.cpuserver import RunningServer, SglangEnv, start_server
from tests.sglang.test_tap_real import close_when_dead, generate, patched, some_prompts, tap_json

FLAGS = ["--disable-radix-cache", "--chunked-prefill-size", "64"]

pytestmark = [
    pytest.mark.sglang,
    pytest.mark.skipif(os.geteuid() != 0 or not shutil.which("mount"), reason="mounts a small tmpfs: needs root"),
]


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A capture directory of 4 MiB."""
    directory = tmp_path / "cap"
    directory.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4m", "none", str(directory)], check=True)
    yield directory
    subprocess.run(["umount", "--lazy", str(directory)], check=True)


def wait_for(condition: Callable[[], Any], seconds: float = 120) -> Any:
    end = time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < end, "it did not happen in time"
        time.sleep(0.2)
    return value


def status_of(directory: Path) -> dict[str, Any]:
    paths = list(directory.glob("tap-r0-*.json"))
    return dict(json.loads(paths[0].read_text())) if paths else {}


def is_healthy(server: RunningServer) -> bool:
    with urllib.request.urlopen(f"{server.url}/health", timeout=60) as answer:
        return bool(answer.status == 200)


def outcomes(run: Path) -> dict[str, str]:
    """By rid: ``piece``, or the reason of a skip."""
    records = read_journal(run / "journal-main-1f0c77aa-r0.jsonl")[0]
    found = {record.rid: "piece" for record in records if isinstance(record, PieceRecord)}
    return {**found, **{record.rid: record.reason for record in records if isinstance(record, SkipRecord)}}


def fill(disk: Path) -> Path:
    """A file that takes all the room there is."""
    with open(disk / "filler", "wb", buffering=0) as file, contextlib.suppress(OSError):
        while True:
            file.write(bytes(4096))
    return disk / "filler"


def test_a_full_and_a_removed_directory_cost_samples_and_not_the_server(
    sglang_env: SglangEnv, tmp_path: Path, small_disk: Path
) -> None:
    environment = {"FLEETDUMP_TAP_CONFIG": str(tap_json(tmp_path, [0, 3, 6]))}
    run, log = small_disk / "r1", tmp_path / "server.log"
    with patched(sglang_env), start_server(sglang_env, log, 1, FLAGS, environment) as server:
        before, during, after, last = (
            {rid.replace("/s", f"/{name}-"): ids for rid, ids in some_prompts("r1", 6).items()} for name in "abcd"
        )
        generate(server, before)
        wait_for(lambda: outcomes(run).keys() >= before.keys() if run.exists() else False)
        filler = fill(small_disk)
        assert len(generate(server, during)) == len(during), "the server answers all the same"
        status = wait_for(lambda: status_of(tmp_path) if status_of(tmp_path).get("skips") else {})
        assert status["failing"]
        assert "No space" in status["last_error"]
        assert set(status["skips"]) == {"disk_full"}
        assert is_healthy(server)

        filler.unlink()
        generate(server, after)
        wait_for(lambda: outcomes(run).keys() >= after.keys())
        assert {outcomes(run)[rid] for rid in (*before, *after)} == {"piece"}
        wait_for(lambda: not status_of(tmp_path)["failing"])

        shutil.rmtree(run)
        generate(server, last)
        wait_for(lambda: run.exists() and outcomes(run).keys() >= last.keys())
        assert set(outcomes(run).values()) == {"piece"}
        assert is_healthy(server)
    close_when_dead(run)
    assert verify_directory(run).faults == []
