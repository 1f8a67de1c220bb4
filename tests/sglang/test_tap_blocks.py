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


UNUSABLE = [None, "", "{}", "[]", '{"v": 2}', "not json"]
"""Contents of tap.json; None: it is not there."""
LOADED = """
import importlib, os, sys
sys.path.insert(0, sys.argv[1])
for path in ["", *sys.argv[2:]]:
    os.environ["FLEETDUMP_TAP_CONFIG"] = path
    print(f"== {path}", file=sys.stderr)
    tap = importlib.reload(sys.modules["fleetdump_tap"]) if path else importlib.import_module("fleetdump_tap")
    tap.before_layer(None, 0, None, None)
    tap.after_layers(None, None, None)
"""


def test_a_configuration_that_cannot_be_used_leaves_the_tap_inert_and_says_so(
    sglang_installed: SglangEnv, tmp_path: Path
) -> None:
    paths = [tmp_path / f"{number}.json" for number in range(len(UNUSABLE))]
    for path, content in zip(paths, UNUSABLE, strict=True):
        if content is not None:
            path.write_text(content)
    command = [str(sglang_installed.python), "-c", LOADED, str(PATCH), *map(str, paths)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    without, *said = done.stderr.split("== ")[1:]
    assert without.strip() == ""
    assert len(said) == len(UNUSABLE)
    for words, path in zip(said, paths, strict=True):
        assert f"fleetdump-tap 1 refused (FLEETDUMP_TAP_CONFIG={path} cannot be read" in words
