"""Cleaning: nothing of ours stays, nothing of others goes, and no sample is lost by accident."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest

from fleetdump.agent import patchrecord
from fleetdump.agent.clean import clean
from fleetdump.agent.patching import patch, revert
from fleetdump.agent.procfs import start_time
from fleetdump.agent.protocol import (
    AgentFailure,
    CaptureSpec,
    CleanArgs,
    Interpreter,
    PatchArgs,
    RevertArgs,
    StatusArgs,
)
from fleetdump.agent.server import ServerRecord, _make_capture_dir, boot_id, save_record
from fleetdump.agent.share import Share, ShareSpec
from fleetdump.agent.status import status
from tests.unit.engineinstall import context, install, spec

SHARD = "shard-main-1f0c77aa-r0-0.safetensors"
OURS = [SHARD, "shard-main-1f0c77aa-r0-1.safetensors.part", "journal-main-1f0c77aa-r0.jsonl"]
OURS += ["tokens-main-77aa1f0c-driver-0.safetensors", "norm-main-1f0c77aa.safetensors"]


def make_run(state: Path, capture: Path, run: str = "r1") -> None:
    share = Share(state / "runs" / run / "main")
    share.root.mkdir(parents=True)
    share.save_spec(ShareSpec(run, "main", "00", 1, CaptureSpec([1], str(capture)), 0, 1, 1, "", "", "", 0.0))
    (capture / run).mkdir(parents=True)
    for name in OURS:
        (capture / run / name).write_bytes(b"data")


def test_everything_of_ours_goes_with_data(tmp_path: Path) -> None:
    ctx = context(tmp_path)
    capture = tmp_path / "disk" / "hs"
    _make_capture_dir(ctx.state, capture)
    make_run(ctx.state.root, capture)
    (ctx.state.directory("agent", "abc") / "x.py").write_text("")
    (ctx.state.directory("lock") / "holder.json").write_text("")
    (ctx.state.directory("diagnoses", "1") / "evidence.json").write_text("")

    result = clean(CleanArgs([str(capture)], data=True), ctx)

    assert result.kept == []
    assert result.freed_bytes > 4 * len(OURS)
    assert sorted(path.name for path in tmp_path.iterdir()) == []


def test_without_data_runs_with_shards_are_kept_with_their_state(tmp_path: Path) -> None:
    ctx = context(tmp_path)
    capture = tmp_path / "hs"
    make_run(ctx.state.root, capture)
    make_run(ctx.state.root, capture, "r2")
    for name in OURS:
        (capture / "r2" / name).unlink()
    (ctx.state.directory("diagnoses") / "x").write_text("")

    result = clean(CleanArgs([str(capture)]), ctx)

    assert result.kept == [str(capture / "r1"), str(ctx.state.root / "runs" / "r1")]
    assert sorted(path.name for path in (capture / "r1").iterdir()) == sorted(OURS)
    assert not (capture / "r2").exists()
    assert not (ctx.state.root / "diagnoses").exists()


def test_only_the_named_runs(tmp_path: Path) -> None:
    ctx = context(tmp_path)
    make_run(ctx.state.root, tmp_path / "hs")
    make_run(ctx.state.root, tmp_path / "hs", "r2")

    clean(CleanArgs([str(tmp_path / "hs")], data=True, runs=["r2"]), ctx)

    assert [p.name for p in (tmp_path / "hs").iterdir()] == ["r1"]
    assert [p.name for p in (ctx.state.root / "runs").iterdir()] == ["r1"]


def test_files_and_links_of_others_stay(tmp_path: Path) -> None:
    ctx = context(tmp_path)
    capture, outside = tmp_path / "hs", tmp_path / "outside"
    make_run(ctx.state.root, capture)
    outside.mkdir()
    (outside / SHARD).write_text("precious")
    (capture / "linked").symlink_to(outside)
    (capture / "r1" / "shard-link").symlink_to(outside)
    (capture / "r1" / "notes.txt").write_text("theirs")
    (capture / "theirs").mkdir()
    (capture / "theirs" / "shard-00001.safetensors").write_text("theirs")
    (ctx.state.directory("diagnoses") / "link").symlink_to(outside)

    result = clean(CleanArgs([str(capture)], data=True), ctx)

    assert (outside / SHARD).read_text() == "precious"
    assert (capture / "theirs" / "shard-00001.safetensors").exists()
    assert sorted(p.name for p in (capture / "r1").iterdir()) == ["notes.txt", "shard-link"]
    assert result.kept == [f"{capture / 'r1'} (it holds files that are not ours)"]


def test_a_folder_that_was_there_before_us_stays_even_when_empty(tmp_path: Path) -> None:
    ctx = context(tmp_path)
    (tmp_path / "disk").mkdir()
    _make_capture_dir(ctx.state, tmp_path / "disk" / "hs")

    clean(CleanArgs([str(tmp_path / "disk" / "hs")], data=True), ctx)

    assert [p.name for p in tmp_path.iterdir()] == ["disk"]
    assert list((tmp_path / "disk").iterdir()) == []


def test_a_living_server_of_ours_stands_in_the_way(tmp_path: Path) -> None:
    ctx = context(tmp_path)
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"], start_new_session=True)
    try:
        started = start_time(process.pid) or 0
        record = ServerRecord(
            "main", process.pid, started, "0" * 8, 1, "", "", "", 1, [], [], "", "", time.time(), boot=boot_id()
        )
        save_record(ctx.state, record)
        with pytest.raises(AgentFailure) as caught:
            clean(CleanArgs(), ctx)
        assert f"main (pid {process.pid})" in caught.value.error.where
        assert "fleetdump stop" in caught.value.error.next_step
    finally:
        process.kill()
        process.wait()


@pytest.mark.parametrize("capture_dirs", [[], ["hs"]], ids=["of the share", "of the inventory"])
def test_what_a_killed_self_check_left_counts_for_nothing_and_goes(tmp_path: Path, capture_dirs: list[str]) -> None:
    ctx = context(tmp_path)
    make_run(ctx.state.root, tmp_path / "hs", "selfcheck-1f0c77aa-ab12")
    make_run(ctx.state.root, tmp_path / "hs", "r1")

    assert [share.run for share in status(StatusArgs(), ctx).shares] == ["r1"]
    clean(CleanArgs([str(tmp_path / name) for name in capture_dirs]), ctx)

    assert [path.name for path in (tmp_path / "hs").iterdir()] == ["r1"]
    assert [path.name for path in (ctx.state.root / "runs").iterdir()] == ["r1"]


def test_an_applied_patch_stands_in_the_way_and_a_leftover_folder_goes(tmp_path: Path) -> None:
    ctx = context(tmp_path)
    engine = install(tmp_path / "venv")
    patch(PatchArgs(engine.python, spec()), ctx)
    with pytest.raises(AgentFailure) as caught:
        clean(CleanArgs(interpreters=[Interpreter(engine.python)]), ctx)
    assert "fleetdump revert" in caught.value.error.next_step

    revert(RevertArgs(engine.python), ctx)
    (engine.site / patchrecord.FOLDER).mkdir()
    clean(CleanArgs(interpreters=[Interpreter(engine.python), Interpreter("/no/python")]), ctx)

    assert not (engine.site / patchrecord.FOLDER).exists()
