"""The self-check: what it says of captured layers, and what a failed one forbids. tests/sglang proves the numbers."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from fleetdump.agent.context import State
from fleetdump.agent.drive import _check_server
from fleetdump.agent.protocol import AgentFailure, CaptureSpec, SubmitArgs
from fleetdump.agent.server import ServerRecord, save_record

RECORD = {
    "name": "main",
    "pid": 1,
    "start_time": 1,
    "launch_id": "1f0c77aa",
    "port": 8000,
    "host": "127.0.0.1",
    "python": "/p",
    "model_path": "/m",
    "tp": 1,
    "argv": [],
    "env": [],
    "log": "",
    "identity": "",
    "started_at": 0.0,
    "capture_layers": [1],
}


@pytest.mark.parametrize("allowed", [False, True])
def test_a_server_whose_self_check_failed_gets_no_work_unless_told(tmp_path: Path, allowed: bool) -> None:
    state = State(tmp_path)
    capture = CaptureSpec([1], str(tmp_path / "hs"))
    record = ServerRecord(**RECORD, capture_dir=capture.dir)  # type: ignore[arg-type]
    args = SubmitArgs("r1", "main", "", capture, allow_failed_selfcheck=allowed)
    record.selfcheck = "passed"
    save_record(state, record)
    _check_server(args, state)

    record.selfcheck = "slots 0 and 1 hold the same values"
    save_record(state, record)

    if allowed:
        _check_server(args, state)
    else:
        with pytest.raises(AgentFailure, match="self-check") as refused:
            _check_server(args, state)
        assert "slots 0 and 1" in refused.value.error.why


@pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="torch is in the SGLang venv only")
def test_layers_that_are_one_by_definition_may_be_equal() -> None:
    import torch

    from fleetdump.worker.selfcheck import check_layers

    rows = torch.randn(5, 3, 4)
    rows[:, 2] = rows[:, 1]
    assert check_layers({"p": rows}, [1, 6], 6).level == "ok", "entry id 6 of 6 layers is the final state"
    assert check_layers({"p": rows}, [1, 5], 6).level == "blocker"
