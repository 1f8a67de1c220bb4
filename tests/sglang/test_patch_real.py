"""Patches on the real SGLang: they find their place, a stall stalls where it says, and a revert leaves no trace."""

from __future__ import annotations

import hashlib
import time
from pathlib import Path

import pytest

from fleetdump.agent import procfs
from fleetdump.agent.context import AgentContext, State
from fleetdump.agent.launch import launch
from fleetdump.agent.patching import patch, read_state, revert
from fleetdump.agent.patchmessages import PatchArgs, RevertArgs
from fleetdump.agent.protocol import Request
from fleetdump.agent.server import living, load_record
from fleetdump.agent.servermessages import LaunchArgs, StopArgs
from fleetdump.agent.specs import ServerSpec
from fleetdump.agent.stop import stop
from fleetdump.patches import load_patch
from tests.sglang.cpuserver import START_SECONDS, SglangEnv, free_port

PATCHES = Path(__file__).parents[2] / "patches"

pytestmark = pytest.mark.sglang


def tree(root: Path) -> dict[str, object]:
    """Every file of site-packages: SHA-256 of those of sglang and of those beside the packages, size and time of the
    others (torch alone is a gigabyte)."""

    def state(path: Path) -> object:
        if path.parent == root or (root / "sglang") in path.parents:
            return hashlib.sha256(path.read_bytes()).hexdigest()
        return path.stat().st_size, path.stat().st_mtime_ns

    return {str(path.relative_to(root)): state(path) for path in root.rglob("*") if path.is_file()}


@pytest.fixture
def ctx(tmp_path: Path) -> AgentContext:
    return AgentContext(Request("test", {}, deadline=600.0), State(tmp_path / "state" / "machine"))


@pytest.mark.parametrize("name", [pytest.param("stall-example", marks=pytest.mark.nightly), "hidden-states"])
def test_patch_and_revert_leave_the_installation_byte_for_byte(
    sglang_env: SglangEnv, ctx: AgentContext, name: str
) -> None:
    before = tree(sglang_env.site_packages)
    spec = load_patch(PATCHES / name)
    python = str(sglang_env.python)

    models = [str(sglang_env.model)]
    applied = patch(PatchArgs(python, spec, models=models), ctx)
    assert (applied.after.state, applied.verified) == ("ours", True)
    assert not patch(PatchArgs(python, spec, models=models), ctx).changed
    revert(RevertArgs(python), ctx)

    assert read_state(python, spec, models=models).state == "clean"
    assert tree(sglang_env.site_packages) == before


@pytest.mark.nightly  # the demo shows it
def test_the_stall_example_stalls_after_the_weights_and_before_the_port(
    sglang_env: SglangEnv, ctx: AgentContext
) -> None:
    before = tree(sglang_env.site_packages)
    python = str(sglang_env.python)
    spec = load_patch(PATCHES / "stall-example")
    server = ServerSpec(
        "main", python, str(sglang_env.model), free_port(), args=list(sglang_env.args), env=sglang_env.env
    )
    patch(PatchArgs(python, spec), ctx)
    try:
        log = Path(launch(LaunchArgs(server, spec), ctx).log)
        end = time.monotonic() + START_SECONDS
        while "Load weight end" not in log.read_text(errors="replace"):
            assert time.monotonic() < end, log.read_text(errors="replace")[-2000:]
            time.sleep(0.5)
        time.sleep(5.0)
        lines = log.read_text(errors="replace").count("\n")
        time.sleep(10.0)

        assert log.read_text(errors="replace").count("\n") == lines
        assert "Memory pool end" not in log.read_text(errors="replace")
        assert procfs.port_owner(server.port) is None
        record = load_record(ctx.state, "main")
        assert record is not None
        schedulers = [m for m in living(record) if m.role == "scheduler"]
        assert [m.state for m in schedulers] == ["R"]
    finally:
        stop(StopArgs(grace=10.0), ctx)
        revert(RevertArgs(python), ctx)
    assert living(record) == []
    assert tree(sglang_env.site_packages) == before
