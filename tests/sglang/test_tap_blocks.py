"""The tap's buffers between forward and writers: what a late copy reads, and what happens when there is no room."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from tests.sglang.cpuserver import SglangEnv

HERE = Path(__file__).parent
PATCH = HERE.parents[1] / "patches" / "hidden-states"

pytestmark = pytest.mark.sglang


def test_rows_pass_the_buffers_unharmed(sglang_installed: SglangEnv) -> None:
    """All cases of tap_blocks.py, in one process: importing torch takes longest."""
    command = [str(sglang_installed.python), str(HERE / "tap_blocks.py"), str(PATCH)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    results = json.loads(done.stdout)
    assert len(results) >= 12
    assert {name: error for name, error in results.items() if error} == {}
