"""The self-check on the real SGLang: our patch passes, and taps that are broken in the ways of the field are named.

One server with two ranks has a tap with switches. From its first forward on SGLang defers sums over ranks to the next
layer in forwards of up to 2,048 tokens, as it does by itself on some GPUs: the naive ``hidden_states + residual`` is
wrong there, and right on every other CPU server.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from demo.sglang_cpu import recipe
from fleetdump.agent import selfcheck as verb
from fleetdump.agent.context import AgentContext, State
from fleetdump.agent.generate import is_ready
from fleetdump.agent.launch import launch
from fleetdump.agent.patching import patch, revert
from fleetdump.agent.patchmessages import PatchArgs, RevertArgs
from fleetdump.agent.protocol import Request
from fleetdump.agent.runmessages import SelfCheckArgs, SelfCheckResult
from fleetdump.agent.selfcheck import selfcheck
from fleetdump.agent.servermessages import LaunchArgs, StopArgs
from fleetdump.agent.specs import CaptureSpec, PatchSpec, ServerSpec
from fleetdump.agent.stop import stop
from fleetdump.patches import find_patch, load_patch
from tests.sglang.cpuserver import START_SECONDS, SglangEnv, free_port

pytestmark = pytest.mark.sglang

SPEC = load_patch(find_patch("hidden-states"))
SWITCH = "FLEETDUMP_TEST_SWITCH"
SWITCHES = f'''

# ---------------------------------------------------------------- switches of a test
def _switch(name):
    with open(os.environ["{SWITCH}"]) as file:
        return file.read() == name


def _defer_sums():
    from sglang.srt.layers.communicator import LayerCommunicator

    def should_fuse(self, forward_batch):
        return forward_batch.input_ids.shape[0] <= 2048 and not self.is_last_layer

    LayerCommunicator.should_fuse_mlp_allreduce_with_next_layer = should_fuse


def _other_rows(hidden_states, residual):
    from sglang.srt.distributed import get_tensor_model_parallel_rank, tensor_model_parallel_all_reduce

    if getattr(hidden_states, "_sglang_needs_allreduce_fusion", False):
        hidden_states = tensor_model_parallel_all_reduce(hidden_states.clone())
    shift = 3 * get_tensor_model_parallel_rank()
    return hidden_states.roll(shift, 0), residual if residual is None else residual.roll(shift, 0)


_before_layer, _after_layers = before_layer, after_layers


def before_layer(model, layer_id, hidden_states, forward_batch, residual=None, snapshot=None):
    _defer_sums()
    if _switch("naive"):
        hidden_states = hidden_states.clone()  # without the attribute that says that a sum is owed
    if _switch("scattered"):
        hidden_states, residual = _other_rows(hidden_states, residual)
    if not (_switch("graphs") and forward_batch.input_ids.shape[0] <= 2048):
        _before_layer(model, layer_id + _switch("shifted"), hidden_states, forward_batch, residual, snapshot)


def after_layers(model, hidden_states, forward_batch, residual=None, snapshot=None):
    if _switch("scattered"):
        hidden_states, residual = _other_rows(hidden_states, residual)
    if not (_switch("graphs") and forward_batch.input_ids.shape[0] <= 2048):
        _after_layers(model, hidden_states, forward_batch, residual, snapshot)
'''


class CheckedServer:
    """A patched server of the agent's own verbs in this process."""

    def __init__(self, tmp: Path, env: SglangEnv, spec: PatchSpec, tp: int = 1, without: str = "", dtype: str = ""):
        self.state = State(tmp / "state")
        self.capture = CaptureSpec([1, 3, 5], str(tmp / "capture"))
        self.switch_file = tmp / "switch"
        self.switch_file.write_text("")
        args = [dtype if dtype and arg == "float32" else arg for arg in env.args if arg != without]
        variables = {**env.env, **recipe.server_env(tp), SWITCH: str(self.switch_file)}
        self.server = ServerSpec("main", str(env.python), str(env.model), free_port(), tp=tp, args=args, env=variables)
        self.server.without = [without] if without else []
        self.spec = spec

    def context(self) -> AgentContext:
        return AgentContext(Request("test", {}, deadline=400.0), self.state)

    @contextmanager
    def running(self) -> Iterator[CheckedServer]:
        patch(PatchArgs(self.server.python, self.spec, models=[self.server.model_path]), self.context())
        try:
            log = Path(launch(LaunchArgs(self.server, self.spec, self.capture), self.context()).log)
            end = time.monotonic() + START_SECONDS
            while not is_ready(self.server.port):
                assert time.monotonic() < end, log.read_text(errors="replace")[-3000:]
                time.sleep(0.5)
            yield self
        finally:
            stop(StopArgs(grace=10.0), self.context())
            revert(RevertArgs(self.server.python), self.context())

    def check(self, switch: str = "") -> SelfCheckResult:
        self.switch_file.write_text(switch)
        result = selfcheck(SelfCheckArgs("main", self.capture), self.context())
        assert os.listdir(self.capture.dir) == []
        print(f"{switch or 'right'}: {result.seconds:.1f} s", *result.checks, sep="\n")
        return result


def failed(result: SelfCheckResult) -> set[str]:
    return {check.key for check in result.checks if check.level == "blocker"}


@pytest.fixture(scope="module")
def two_ranks(sglang_env: SglangEnv, tmp_path_factory: pytest.TempPathFactory) -> Iterator[CheckedServer]:
    tap = SPEC.files["fleetdump_tap.py"] + SWITCHES
    spec = replace(SPEC, files={**SPEC.files, "fleetdump_tap.py": tap})
    with CheckedServer(tmp_path_factory.mktemp("two"), sglang_env, spec, tp=2).running() as server:
        yield server


def test_our_tap_passes_where_sums_are_deferred(two_ranks: CheckedServer) -> None:
    result = two_ranks.check()
    assert result.passed, result
    assert {check.level for check in result.checks} == {"ok"}
    ranks = next(check.text for check in result.checks if check.key == "ranks")
    assert ranks == f"{result.rows} rows of 2 ranks, 0 with other bytes"
    assert result.max_logprob_diff < 1e-3


@pytest.mark.parametrize(
    ("switch", "checks", "cause"),
    [
        ("naive", {"ranks", "batches"}, "partial_sum"),
        ("scattered", {"ranks"}, "scattered_rows"),
        ("graphs", {"rows"}, "graph_replay"),
        ("shifted", {"layers"}, "layer_convention"),
    ],
)
def test_a_broken_tap_fails_and_its_cause_is_named(
    two_ranks: CheckedServer, switch: str, checks: set[str], cause: str
) -> None:
    result = two_ranks.check(switch)
    assert (failed(result), result.causes) == (checks, [cause]), result.checks


@pytest.mark.nightly
def test_a_prefix_cache_that_serves_our_prompts_is_named(
    sglang_env: SglangEnv, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Releases before 0.5.11 ignore the extra key that keeps our requests out of the cache."""
    with CheckedServer(tmp_path, sglang_env, SPEC, without="--disable-radix-cache").running() as server:
        with_key = server.check()
        body = verb.request_body
        monkeypatch.setattr(verb, "request_body", lambda rids, ids: {**body(rids, ids), "extra_key": None})
        without_key = server.check()
    assert with_key.passed, with_key
    assert (failed(without_key), without_key.causes) == ({"rows"}, ["prefix_cache"]), without_key.checks
    assert "prefix_missing" in without_key.detail


@pytest.mark.nightly
def test_in_bfloat16_rounding_passes(sglang_env: SglangEnv, tmp_path: Path) -> None:
    with CheckedServer(tmp_path, sglang_env, SPEC, dtype="bfloat16").running() as server:
        result = server.check()
    assert result.passed, result
    assert {check.level for check in result.checks} == {"ok"}
    batches = next(check.text for check in result.checks if check.key == "batches")
    assert batches.endswith("allowed 0.05, 0.2")
