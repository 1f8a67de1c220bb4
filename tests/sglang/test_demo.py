"""The demo is the end-to-end test: a real SGLang, a real sshd, every command, every bar of the report."""

import json
import subprocess
import sys

import pytest

from demo.layout import Layout
from demo.sglang_cpu import recipe

pytestmark = pytest.mark.sglang


@pytest.mark.parametrize("tp", [1, pytest.param(2, marks=pytest.mark.nightly)])
def test_the_whole_journey(tp):
    if not recipe.PYTHON.exists():
        pytest.skip("no SGLang for the CPU: run `make setup`")
    command = [sys.executable, "-m", "demo.run", "--tp", str(tp)]
    done = subprocess.run(command, cwd=recipe.ROOT, capture_output=True, text=True, timeout=1500)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    report = json.loads(Layout().report.read_text())
    assert (report["lost"], report["duplicated"], report["left_over"]) == (0, 0, 0)
    assert report["max_rel_err"] <= 1e-4
