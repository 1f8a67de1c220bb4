"""CI's own wrapper: a time limit, orphans reaped while it waits, and nothing left behind."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

BOUNDED = Path(__file__).parents[2] / ".ci" / "bounded.py"


def bounded(seconds: float, *command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(BOUNDED), str(seconds), *command], capture_output=True, text=True, timeout=60
    )


def gone(pid: int) -> bool:
    return not Path(f"/proc/{pid}").exists()


@pytest.mark.parametrize(("script", "status"), [("exit 0", 0), ("exit 3", 3), ("kill -9 $$", 137)])
def test_the_exit_status_is_the_commands(script: str, status: int) -> None:
    assert bounded(20, "sh", "-c", script).returncode == status


def test_an_orphan_is_reaped_while_the_command_still_runs() -> None:
    script = "pid=$(sh -c 'sleep 0.1 >/dev/null & echo $!'); sleep 1; test -e /proc/$pid && echo stays || echo gone"
    assert bounded(20, "sh", "-c", script).stdout == "gone\n"


def test_what_detached_itself_is_ended_and_said() -> None:
    done = bounded(20, "sh", "-c", "setsid sleep 300 >/dev/null 2>&1 & echo $!")
    assert done.returncode == 1
    assert "left 1 processes behind" in done.stderr
    assert gone(int(done.stdout))


def test_a_command_that_outlasts_its_time_is_ended() -> None:
    done = bounded(0.5, "sh", "-c", "echo $$; sleep 300")
    assert (done.returncode, done.stderr[:10]) == (124, "time is up")
    assert gone(int(done.stdout))
