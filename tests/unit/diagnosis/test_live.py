"""Small programs that really hang, through the whole collection: the verdict on what the agent saw of them."""

from __future__ import annotations

import io
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from fleetdump.agent import evidence as collecting
from fleetdump.agent import procfs
from fleetdump.agent.context import AgentContext, State
from fleetdump.agent.evidence_types import Evidence, Target, WatchFacts
from fleetdump.agent.probes import strace
from fleetdump.agent.protocol import Request, from_json
from fleetdump.diagnosis import diagnose

MARKS = "".join(
    f"[2026-01-01 00:00:0{n} TP{rank}] {text}\n"
    for n, text in enumerate(("Init torch distributed begin.", "Load weight begin. avail mem=9 GB",
                              "Load weight end. type=X, mem usage=1.00 GB."))
    for rank in (0, 1)
)  # fmt: skip
PARENT = """
import os, subprocess, sys
codes = sys.argv[sys.argv.index("--") + 1:]
for rank, code in enumerate(codes[1:]):
    subprocess.Popen([f"sglang::scheduler_TP{rank}", "-S", "-c", code], executable=sys.executable)
exec(codes[0])
"""
SLEEP = "import time; time.sleep(1e6)"
Start = Callable[..., Evidence]


@pytest.fixture
def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Start]:
    monkeypatch.setattr(strace, "SECONDS", 0.3)
    started: list[subprocess.Popen[bytes]] = []

    def collect(parent: str, *ranks: str, wchan: str = "", stdout: int | None = None) -> Evidence:
        log = tmp_path / "server.log"
        log.write_text(MARKS)
        argv = [sys.executable, "-S", "-c", PARENT, "sglang.launch_server", "--tp-size", str(len(ranks)), "--"]
        with log.open("ab") as out:
            target = out if stdout is None else stdout
            process = subprocess.Popen([*argv, parent, *ranks], stdout=target, stderr=target, start_new_session=True)
        started.append(process)
        _settle(process.pid, len(ranks), wchan)
        context = AgentContext(Request("evidence", {}), State(tmp_path / "state"), io.BytesIO(), io.BytesIO())
        target_of = Target(process.pid, 0, process.pid, "main", 1, log=str(log), ranks=len(ranks))
        watch = WatchFacts("kv_pool", 100.0, 60.0)
        return from_json(
            Evidence, collecting.collect(target_of, context, seconds=0.6, deep=False, watch_facts=watch)[0]
        )

    yield collect
    for process in started:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _settle(pid: int, ranks: int, wchan: str) -> None:
    for _ in range(3000):
        asleep = wchan in (procfs.read_text(f"/proc/{pid}/wchan", 99) or "")
        if asleep and sum(sample.role == "scheduler" for sample in procfs.tree(pid)) == ranks:
            time.sleep(0.8)  # the ranks come to where they hang
            return
        time.sleep(0.02)
    raise AssertionError("the program did not settle")


def codes(evidence: Evidence) -> list[str]:
    return [verdict.code for verdict in diagnose(evidence)]


def test_launcher_that_alone_could_write_to_its_pipe(start: Start) -> None:
    evidence = start("r, w = os.pipe(); os.read(r, 1)", SLEEP, SLEEP, wchan="pipe_read")
    assert codes(evidence)[0] == "PIPE_EOF_IMPOSSIBLE"


def test_launcher_whose_log_nobody_reads(start: Start) -> None:
    read, write = os.pipe()
    try:
        evidence = start("\nwhile True: os.write(1, b'x' * 4096)", SLEEP, wchan="pipe_write", stdout=write)
        assert codes(evidence)[0] == "STDOUT_PIPE_FULL"
    finally:
        os.close(read)
        os.close(write)


def test_rank_that_waits_for_a_file_lock(start: Start, tmp_path: Path) -> None:
    path = tmp_path / "build.lock"
    hold = f"import fcntl, time; f = open({str(path)!r}, 'w'); fcntl.flock(f, 2); time.sleep(1e6)"
    # Only once the other one has it: till then every try succeeds and is given back.
    wait = f"""
import fcntl, time
f = open({str(path)!r}, "w")
try:
    while True:
        fcntl.flock(f, fcntl.LOCK_EX | fcntl.LOCK_NB)
        fcntl.flock(f, fcntl.LOCK_UN)
        time.sleep(0.02)
except BlockingIOError:
    fcntl.flock(f, fcntl.LOCK_EX)
"""
    evidence = start(SLEEP, hold, wait, wchan="nanosleep")
    best = diagnose(evidence)[0]
    assert (best.code, best.rank) == ("LOCK_WAIT", 1)
    assert str(path) in best.title


def test_rank_that_was_killed(start: Start) -> None:
    evidence = start(SLEEP, SLEEP, "import os, time; time.sleep(0.3); os.kill(os.getpid(), 9)", wchan="nanosleep")
    best = diagnose(evidence)[0]
    assert (best.code, best.rank) == ("PARENT_WAITS_DEAD_RANK", 1)
    assert any("signal 9" in fact for fact in best.evidence)


def test_all_asleep_names_nobody(start: Start) -> None:
    best = diagnose(start(SLEEP, SLEEP, SLEEP, wchan="nanosleep"))[0]
    assert (best.code, best.rank) == ("PARENT_WAITS_READY", None)
