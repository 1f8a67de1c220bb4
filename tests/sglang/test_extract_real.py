"""An extraction through the real SGLang with the real tap: exactly once, with driver and server killed on the way, and
with an API key that stands in no file."""

from __future__ import annotations

import hashlib
import io
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from fleetdump.agent.context import AgentContext, State
from fleetdump.agent.drive import follow, start_driver, submit
from fleetdump.agent.formats import row_line
from fleetdump.agent.generate import is_ready, post
from fleetdump.agent.launch import launch
from fleetdump.agent.patching import patch, revert
from fleetdump.agent.patchmessages import PatchArgs, RevertArgs
from fleetdump.agent.procfs import is_alive
from fleetdump.agent.protocol import Request
from fleetdump.agent.runmessages import FollowArgs, SelfCheckArgs, SubmitArgs
from fleetdump.agent.selfcheck import selfcheck
from fleetdump.agent.server import load_record
from fleetdump.agent.servermessages import LaunchArgs, StopArgs
from fleetdump.agent.share import Share
from fleetdump.agent.specs import CaptureSpec, PatchSpec, ServerSpec
from fleetdump.agent.stop import stop
from fleetdump.agent.tensorfile import ids_sha256
from fleetdump.dataset.shards import verify_directory
from fleetdump.patches import find_patch, load_patch

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "unit"))
from extraction import kill_driver, manifest_of, rejected_of, wait_for

pytestmark = pytest.mark.sglang

READY_SECONDS = 240.0
KEY = "k-4711-secret"
ROWS: list[dict[str, Any]] = [
    *({"id": f"ids-{n}", "input_ids": [(7 * k) % 300 + 3 for k in range(n)], "loss_mask": [1] * n} for n in (2, 3, 5)),
    *({"id": f"text-{n}", "text": "The quick brown fox. " * n} for n in (1, 2, 4, 8, 16, 32, 70)),
    *(
        {
            "id": f"chat {n}",
            "messages": [{"role": "user", "content": "why? " * n}, {"role": "assistant", "content": "so."}],
        }
        for n in range(1, 11)
    ),
]


class RealHost:
    """State, patch and server of one host, by the agent's own verbs in this process."""

    def __init__(self, tmp: Path, env: Any, port: int):
        self.state = State(tmp / "state")
        self.capture = CaptureSpec(layers=[1, 3, 5], dir=str(tmp / "capture"))
        self.server = ServerSpec(
            name="main",
            python=str(env.python),
            model_path=str(env.model),
            port=port,
            args=[*env.args, "--chunked-prefill-size", "512", "--api-key", KEY],
            env=dict(env.env),
        )
        self.patch: PatchSpec = load_patch(find_patch("hidden-states"))

    def context(self, body: bytes = b"", lines: int = 0, deadline: float = 300.0) -> AgentContext:
        request = Request("test", {}, deadline=deadline, body_lines=lines)
        return AgentContext(request, self.state, stdin=io.BytesIO(body), stdout=io.BytesIO())

    def launch(self) -> None:
        launch(LaunchArgs(self.server, self.patch, self.capture), self.context())
        wait_for(lambda: is_ready(self.server.port), READY_SECONDS)

    def kill_server(self) -> None:
        """SIGKILL to every process of the server's session, as the kernel's OOM killer or an operator might."""
        record = load_record(self.state, "main")
        assert record is not None
        for stat in Path("/proc").glob("[0-9]*/stat"):
            try:
                session = int(stat.read_text().rpartition(")")[2].split()[3])
            except (OSError, IndexError):
                continue
            if session == record.pid:
                os.kill(int(stat.parent.name), signal.SIGKILL)
        wait_for(lambda: not is_alive(record.pid, record.start_time))

    def submit(self, run: str, rows: list[dict[str, Any]], budget: int = 32768) -> Share:
        body = b"".join(row_line(row) for row in rows)
        digest = hashlib.sha256(body).hexdigest()
        args = SubmitArgs(run, "main", digest, self.capture, token_budget=budget, engine="sglang 0.5.20")
        submit(args, self.context(body, len(rows)))
        return Share.of(self.state, run, "main")


@pytest.fixture(scope="module")
def host(sglang_env: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealHost]:
    port = int(os.environ.get("FLEETDUMP_TEST_PORT", "31140"))
    real = RealHost(tmp_path_factory.mktemp("extract"), sglang_env, port)
    patch(PatchArgs(real.server.python, real.patch, models=[real.server.model_path]), real.context())
    try:
        real.launch()
        yield real
    finally:
        for path in (real.state.root / "runs").glob("*/main/driver.json"):
            kill_driver(Share(path.parent))
        stop(StopArgs(), real.context())
        revert(RevertArgs(real.server.python), real.context())


def test_selfcheck_passes_and_leaves_nothing(host: RealHost) -> None:
    result = selfcheck(SelfCheckArgs("main", host.capture), host.context())
    assert result.passed, result
    assert result.max_logprob_diff < 1e-3
    assert len(result.checks) == 8
    assert not list(Path(host.capture.dir).glob("selfcheck*"))
    assert not list((host.state.root / "runs").glob("selfcheck*"))


def test_every_id_exactly_once_with_driver_and_server_killed(host: RealHost) -> None:
    rows = [*ROWS, {"id": "empty", "text": ""}, {"id": "too long", "input_ids": [5] * 5000}]
    share = host.submit("faults", rows, budget=1)  # one sample at a time, so that there is a middle to kill in
    wait_for(lambda: len(manifest_of(share)) >= 2, 60)
    kill_driver(share)
    start_driver(host.state, share)
    wait_for(lambda: len(manifest_of(share)) >= 6, 60)
    host.kill_server()
    assert len(manifest_of(share)) < len(ROWS)
    wait_for(lambda: "waiting for it" in share.progress().detail, 30)
    host.launch()
    follow(FollowArgs("faults", interval=0.2), host.context(deadline=200))
    assert share.progress().state == "done", share.progress()
    lines = manifest_of(share)
    assert sorted(line["id"] for line in lines) == sorted(row["id"] for row in ROWS)
    assert rejected_of(share) == {"empty": "empty", "too long": "too_long"}
    _check_lines(host, share, lines)
    assert verify_directory(Path(host.capture.dir) / "faults").faults == []


def _check_lines(host: RealHost, share: Share, lines: list[dict[str, Any]]) -> None:
    """Each line's ids are those of the work file, and each piece is a tensor of the promised shape that differs from
    row to row."""
    from safetensors import safe_open

    work = {data["id"]: data for sample, data in share.scan_work() if sample}
    directory = Path(host.capture.dir) / share.run
    for line in lines:
        assert line["ids_sha256"] == ids_sha256(work[line["id"]]["ids"])
        rows = 0
        for piece in line["pieces"]:
            with safe_open(str(directory / piece["shard"]), "numpy") as tensors:
                tensor = tensors.get_tensor(piece["name"])
            assert tensor.shape == (piece["rows"], 4, 128)
            assert (tensor != 0).any(axis=(1, 2)).all()
            rows += piece["rows"]
        assert rows == line["tokens"] == len(work[line["id"]]["ids"])
        assert (directory / line["norm"]).exists()
    assert max(line["tokens"] for line in lines) > 1400
    assert len(next(line for line in lines if line["id"] == "text-70")["pieces"]) >= 3


@pytest.mark.nightly
def test_the_server_is_not_disturbed_by_a_run(host: RealHost) -> None:
    """A run's requests and a stranger's go side by side; the stranger's answers are the same as without a run."""
    body = {"input_ids": [9, 8, 7, 6], "sampling_params": {"max_new_tokens": 8, "temperature": 0}}
    key = {"Authorization": f"Bearer {KEY}"}
    assert post(host.server.port, "/generate", body).status == 401
    before = post(host.server.port, "/generate", body, key).data["text"]
    share = host.submit("beside", ROWS[3:9])
    during = post(host.server.port, "/generate", body, key).data["text"]
    follow(FollowArgs("beside", interval=0.2), host.context(deadline=100))
    assert share.progress().state == "done"
    assert during == before
    assert share.progress().tokens_done == share.progress().tokens
    records = [path for path in host.state.root.rglob("*.json*") if path.is_file()]
    assert not [path for path in records if KEY.encode() in path.read_bytes()]
