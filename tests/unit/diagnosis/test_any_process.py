"""``--pid`` of a process that is no server: it is said so, and nothing is said of it that is true of servers alone."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from fleetdump.agent import evidence as collecting
from fleetdump.agent import procfs, targets
from fleetdump.agent.context import State
from fleetdump.diagnosis import STALL, Verdict, diagnose

PROGRAM = "import sys, time; print('up', flush=True); time.sleep(1e6)"


@pytest.fixture
def stranger() -> Iterator[subprocess.Popen[bytes]]:
    """A program that sleeps and is called like nothing of ours."""
    with subprocess.Popen([sys.executable, "-S", "-c", PROGRAM], stdout=subprocess.PIPE) as process:
        assert process.stdout
        process.stdout.readline()
        try:
            yield process
        finally:
            process.kill()


def look(pid: int, tmp_path: Path) -> list[Verdict]:
    collector = collecting.Collector(targets.target_of_pid(pid), 0.5, None, State(tmp_path / "state"))
    return diagnose(collector.stage_one())


def test_it_is_said_that_it_is_no_server(stranger: subprocess.Popen[bytes], tmp_path: Path) -> None:
    best = look(stranger.pid, tmp_path)[0]
    assert best.code == "UNKNOWN"
    assert best.title.startswith(f"process {stranger.pid} (")
    assert "is no SGLang or vLLM server" in best.title
    assert any("state S" in fact for fact in best.evidence)
    assert "--pid" in best.next_steps[0]
    assert best.phase == ""


def test_a_cause_that_any_process_can_have_is_named(stranger: subprocess.Popen[bytes], tmp_path: Path) -> None:
    os.kill(stranger.pid, signal.SIGSTOP)
    os.waitpid(stranger.pid, os.WUNTRACED)
    best = look(stranger.pid, tmp_path)[0]
    assert (best.code, best.severity) == ("STOPPED_PROCESS", STALL)
    assert "is no SGLang or vLLM server" in best.title
    assert f"kill -CONT {stranger.pid}" in best.next_steps


def test_a_process_below_a_server_is_the_servers(tmp_path: Path) -> None:
    """The same program called as a rank is one."""
    rank = f"['sglang::scheduler_TP0', '-S', '-c', {PROGRAM!r}]"
    code = f"import subprocess, sys; subprocess.run({rank}, executable=sys.executable)"
    with subprocess.Popen([sys.executable, "-S", "-c", code], stdout=subprocess.PIPE, start_new_session=True) as parent:
        assert parent.stdout
        parent.stdout.readline()
        try:
            best = look(parent.pid, tmp_path)[0]
        finally:
            for sample in procfs.tree(parent.pid):
                os.kill(sample.pid, signal.SIGKILL)
    assert "is no SGLang" not in best.title


def test_masked_hosts_are_numbers_in_all_that_is_shown_and_saved(
    stranger: subprocess.Popen[bytes], tmp_path: Path
) -> None:
    """The inventory's own name of a host is one of the names that ``--anonymise`` hides."""
    inventory = tmp_path / "inventory.yaml"
    inventory.write_text(f"hosts:\n  train-07.example.net: {{connection: local, state_dir: {tmp_path / 'state'}}}\n")
    command = [sys.executable, "-m", "fleetdump", "diagnose", "-i", str(inventory), "--pid", str(stranger.pid)]
    options = ["--seconds", "1", "--anonymise", "--save", str(tmp_path / "saved")]
    done = subprocess.run([*command, *options, "--markdown"], capture_output=True, text=True, check=False)
    assert "on `host-1`" in done.stdout, done
    assert "train-07" not in done.stdout + done.stderr
    saved = [path for path in (tmp_path / "saved").rglob("*") if path.is_file()]
    assert saved
    assert all("train-07" not in f"{path}{path.read_text()}" for path in saved)
