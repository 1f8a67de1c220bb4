"""Cleaning: nothing of ours stays, nothing of others goes, and no sample is lost by accident."""

from __future__ import annotations

import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from fleetdump.agent import patchrecord
from fleetdump.agent.clean import clean
from fleetdump.agent.formats import AttemptLine, PieceRecord
from fleetdump.agent.hostmessages import CleanArgs, CleanResult, StatusArgs
from fleetdump.agent.jsonl import encode_line, open_journal
from fleetdump.agent.launch import make_capture_dir
from fleetdump.agent.patching import patch, revert
from fleetdump.agent.patchmessages import PatchArgs, RevertArgs
from fleetdump.agent.procfs import start_time
from fleetdump.agent.protocol import AgentFailure
from fleetdump.agent.runmessages import CollectedShare, RunProgress
from fleetdump.agent.server import ServerRecord, boot_id, save_record
from fleetdump.agent.share import Share, ShareSpec
from fleetdump.agent.specs import CaptureSpec, Interpreter
from fleetdump.agent.status import status
from tests.unit.engineinstall import context, install, spec
from tests.unit.manifests import manifest_line

SHARD = "shard-main-1f0c77aa-r0-0.safetensors"
OURS = [SHARD, "shard-main-1f0c77aa-r0-1.safetensors.part", "journal-main-1f0c77aa-r0.jsonl"]
OURS += ["tokens-main-77aa1f0c-driver-0.safetensors", "journal-main-77aa1f0c-driver.jsonl"]
OURS += ["norm-main-1f0c77aa.safetensors"]


def make_run(state: Path, capture: Path, run: str = "r1") -> None:
    share = Share(state / "runs" / run / "main")
    share.root.mkdir(parents=True)
    share.save_spec(ShareSpec(run, "main", "00", 1, CaptureSpec([1], str(capture)), 0, 1, 1, "", "", "", 0.0))
    (capture / run).mkdir(parents=True)
    for name in OURS:
        (capture / run / name).write_bytes(b"" if name.startswith("journal-") else b"data")


def test_everything_of_ours_goes_with_data(tmp_path: Path) -> None:
    ctx = context(tmp_path)
    capture = tmp_path / "disk" / "hs"
    make_capture_dir(ctx.state, capture)
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

    hint = f"{capture / 'r1'} ({len(OURS)} files; --data removes them)"
    assert result.kept == [hint, str(ctx.state.root / "runs" / "r1")]
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
    assert result.kept[:1] == [f"{capture / 'r1'} (it holds files that are not of this host's runs)"]


def test_a_folder_that_was_there_before_us_stays_even_when_empty(tmp_path: Path) -> None:
    ctx = context(tmp_path)
    (tmp_path / "disk").mkdir()
    make_capture_dir(ctx.state, tmp_path / "disk" / "hs")

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
    ranks = tmp_path / "hs" / "selfcheck-1f0c77aa-ab12" / "ranks"
    ranks.mkdir()
    for name in OURS:
        (ranks / name).write_bytes(b"")

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


def test_what_an_upgrade_put_aside_and_a_hook_goes_and_the_package_is_as_shipped(tmp_path: Path) -> None:
    ctx = context(tmp_path)
    engine = install(tmp_path / "venv")
    shipped = engine.tree()
    patch(PatchArgs(engine.python, spec()), ctx)
    engine.model.write_bytes(engine.model.read_bytes() + b"# mine\n")
    upgraded = patch(PatchArgs(engine.python, spec("2"), force=True), ctx)
    assert [Path(copy).exists() for copy in upgraded.kept] == [True]
    (ctx.state.directory("servers", "main", "hook") / "sitecustomize.py").write_text("")
    revert(RevertArgs(engine.python), ctx)

    result = clean(CleanArgs(interpreters=[Interpreter(engine.python)]), ctx)

    assert not ctx.state.root.exists()
    assert str(ctx.state.root / "set-aside") in result.removed
    assert engine.tree() == shipped


def test_a_folder_beside_the_package_that_somebody_uses_is_kept_with_the_reason(tmp_path: Path) -> None:
    ctx = context(tmp_path)
    engine = install(tmp_path / "venv")
    with patchrecord.locked(engine.site):
        (engine.site / patchrecord.FOLDER / "0.original").write_bytes(b"theirs")
        result = clean(CleanArgs(interpreters=[Interpreter(engine.python)]), ctx)
        assert (engine.site / patchrecord.FOLDER / "0.original").exists()
    (kept,) = result.kept
    assert kept == f"{engine.site / patchrecord.FOLDER} (another process is changing this installation of sglang)"


# --------------------------------------------------------------------------- samples that exist here alone
def commit(state: Path, *names: str, run: str = "r1", said: int = 0) -> Share:
    """Samples in the manifest of ``main``, of which progress.json only speaks of the first ``said``."""
    share = Share(state / "runs" / run / "main")
    share.manifest.write_bytes(b"".join(encode_line(manifest_line(name, run=run)) for name in names))
    share.save_progress(RunProgress(run, "main", "running", samples=9, done=said))
    return share


def everything(root: Path) -> list[str]:
    return sorted(str(path.relative_to(root)) for path in root.rglob("*") if path.name not in ("driver.lock",))


@pytest.mark.parametrize("collected", [[], ["a"], ["a", "x", "y", "z"]], ids=["none", "some", "more, but others"])
def test_a_sample_that_is_committed_here_alone_stops_it_before_anything_is_done(
    tmp_path: Path, collected: list[str]
) -> None:
    ctx = context(tmp_path)
    make_run(ctx.state.root, tmp_path / "hs")
    commit(ctx.state.root, "a", "b", said=1)
    before = everything(tmp_path)
    args = CleanArgs([str(tmp_path / "hs")], data=True, collected=[CollectedShare("r1", "main", collected)])

    with pytest.raises(AgentFailure) as caught:
        clean(args, ctx)

    error = caught.value.error
    assert error.code == "conflict"
    assert f"run r1: {2 - len({'a', 'b'} & set(collected))} of 2 samples of server main" in error.what
    assert "fleetdump collect --data --run r1" in error.next_step
    assert "--discard r1" in error.next_step
    assert everything(tmp_path) == before


def test_a_commit_between_the_look_and_the_end_of_the_driver_is_seen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ctx = context(tmp_path)
    make_run(ctx.state.root, tmp_path / "hs")
    commit(ctx.state.root, "a")
    stop = Share.stop_driver

    def commit_and_stop(share: Share) -> object:
        commit(ctx.state.root, "a", "b")
        return stop(share)

    monkeypatch.setattr(Share, "stop_driver", commit_and_stop)
    with pytest.raises(AgentFailure, match="1 of 2 samples"):
        clean(CleanArgs([str(tmp_path / "hs")], data=True, collected=[CollectedShare("r1", "main", ["a"])]), ctx)
    assert (tmp_path / "hs" / "r1" / SHARD).exists()


@pytest.mark.parametrize("discard", [False, True], ids=["collected", "given up"])
def test_what_was_collected_or_given_up_goes(tmp_path: Path, discard: bool) -> None:
    ctx = context(tmp_path)
    make_run(ctx.state.root, tmp_path / "hs")
    commit(ctx.state.root, "a", "b")
    collected = [] if discard else [CollectedShare("r1", "main", ["a", "b"])]

    clean(CleanArgs([str(tmp_path / "hs")], data=True, collected=collected, discard=["r1"] * discard), ctx)

    assert everything(tmp_path) == ["hs"]


def test_a_broken_manifest_stops_it(tmp_path: Path) -> None:
    ctx = context(tmp_path)
    make_run(ctx.state.root, tmp_path / "hs")
    commit(ctx.state.root).manifest.write_bytes(b"{oops\n")
    with pytest.raises(AgentFailure, match="nobody can tell"):
        clean(CleanArgs([str(tmp_path / "hs")], data=True), ctx)
    clean(CleanArgs([str(tmp_path / "hs")], data=True, discard=["r1"]), ctx)
    assert everything(tmp_path) == ["hs"]


# --------------------------------------------------------------------------- a capture directory of several
def clean_data(tmp_path: Path) -> CleanResult:
    return clean(CleanArgs([str(tmp_path / "hs")], data=True), context(tmp_path))


def test_runs_of_other_state_directories_stay(tmp_path: Path) -> None:
    ctx = context(tmp_path)
    make_run(ctx.state.root, tmp_path / "hs")
    make_run(tmp_path / "other", tmp_path / "hs", "theirs")
    make_run(tmp_path / "other", tmp_path / "hs", "selfcheck-77777777-ab12")

    result = clean_data(tmp_path)

    runs = ("theirs", "selfcheck-77777777-ab12")
    assert everything(tmp_path / "hs") == sorted([*runs, *(f"{run}/{name}" for run in runs for name in OURS)])
    (kept,) = [line for line in result.kept if line.startswith(str(tmp_path / "hs" / "theirs"))]
    assert "no run of this state directory" in kept
    assert f"rm -r {tmp_path / 'hs' / 'theirs'}" in kept


def test_what_a_self_check_of_a_server_of_ours_left_goes_even_when_its_share_is_lost(tmp_path: Path) -> None:
    ctx = context(tmp_path)
    stopped = ServerRecord("main", 0, 0, "1f0c77aa", 1, "", "", "", 1, [], [], "", "", time.time(), boot=boot_id())
    save_record(ctx.state, stopped)
    make_run(tmp_path / "lost", tmp_path / "hs", "selfcheck-1f0c77aa-ab12")
    assert clean(CleanArgs([str(tmp_path / "hs")]), ctx).kept == []
    assert list((tmp_path / "hs").iterdir()) == []


def test_data_outlives_a_lost_state_directory(tmp_path: Path) -> None:
    make_run(tmp_path / "lost", tmp_path / "hs")
    result = clean_data(tmp_path)
    assert sorted(path.name for path in (tmp_path / "hs" / "r1").iterdir()) == sorted(OURS)
    assert len(result.kept) == 1


@pytest.mark.parametrize("server", ["main", "second"])
def test_another_hosts_files_of_the_same_run_stay(tmp_path: Path, server: str) -> None:
    """Every host may have a server of the same name: the journal says whose samples the writer has."""
    ctx = context(tmp_path)
    folder = tmp_path / "hs" / "r1"
    make_run(ctx.state.root, tmp_path / "hs")
    share = Share(ctx.state.root / "runs" / "r1" / "main")
    share.attempts.write_bytes(encode_line(AttemptLine("a", 1, "sent", "", 0.0)))
    (folder / "journal-main-1f0c77aa-r0.jsonl").write_bytes(journal("a"))
    theirs = [f"shard-{server}-22222222-r0-0.safetensors", f"journal-{server}-22222222-r0.jsonl"]
    theirs += [f"norm-{server}-22222222.safetensors"]
    for name in theirs:
        (folder / name).write_bytes(journal("b") if name.startswith("journal") else b"data")

    result = clean_data(tmp_path)

    assert sorted(path.name for path in folder.iterdir()) == sorted(theirs)
    assert result.kept == [f"{folder} (it holds files that are not of this host's runs)"]
    assert not ctx.state.root.exists()


def journal(sample: str) -> bytes:
    return encode_line(PieceRecord("p", f"fleetdump/r1/{sample}/1", 0, 1, "i", "s", "BF16", [1, 1, 1], 0, 2, 0, 0.0))


def test_a_broken_journal_is_nobodys(tmp_path: Path) -> None:
    make_run(context(tmp_path).state.root, tmp_path / "hs")
    (tmp_path / "hs" / "r1" / "journal-main-1f0c77aa-r0.jsonl").write_bytes(b"{oops\n")
    clean_data(tmp_path)
    assert (tmp_path / "hs" / "r1" / SHARD).exists()


def test_committed_shards_are_ours_whatever_the_journal_says(tmp_path: Path) -> None:
    ctx = context(tmp_path)
    make_run(ctx.state.root, tmp_path / "hs")
    line = manifest_line("a", shards=(SHARD,))
    Share(ctx.state.root / "runs" / "r1" / "main").manifest.write_bytes(encode_line(line))
    (tmp_path / "hs" / "r1" / "journal-main-1f0c77aa-r0.jsonl").unlink()
    args = CleanArgs([str(tmp_path / "hs")], data=True, collected=[CollectedShare("r1", "main", ["a"])])
    assert clean(args, ctx).kept == []


def test_what_a_living_process_writes_stays_with_the_state_of_its_run(tmp_path: Path) -> None:
    ctx = context(tmp_path)
    make_run(ctx.state.root, tmp_path / "hs")
    folder = tmp_path / "hs" / "r1"
    writer = open_journal(folder / "journal-main-1f0c77aa-r0.jsonl")
    assert writer is not None
    with writer:
        result = clean_data(tmp_path)
    assert sorted(path.name for path in folder.iterdir()) == sorted(
        name for name in OURS if "1f0c77aa" in name[:30] and "driver" not in name
    )
    assert any("main-1f0c77aa-r0" in line and "living" in line for line in result.kept)
    assert (ctx.state.root / "runs" / "r1").exists()

    assert clean_data(tmp_path).kept == []
    assert everything(tmp_path) == ["hs"]


def test_a_folder_that_may_not_be_read_is_no_fault(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_run(tmp_path / "other", tmp_path / "hs", "private")

    def refuse(path: str) -> object:
        raise PermissionError(13, "Permission denied", path)

    monkeypatch.setattr("fleetdump.agent.ownership.os.scandir", refuse)
    assert len(clean_data(tmp_path).kept) == 1


def test_stopping_a_driver_never_ends_the_process_that_asks(tmp_path: Path) -> None:
    """A self-check is a driver inside the agent, which leads a process group of its own."""
    code = """
import os, sys
from pathlib import Path
from fleetdump.agent.share import Share
os.setpgid(0, 0)
share = Share(Path(sys.argv[1]))
claim = share.claim()
assert share.driver().pid == os.getpid()
print(share.stop_driver(0.2))
"""
    (tmp_path / "share").mkdir()
    command = [sys.executable, "-c", code, str(tmp_path / "share")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=30)
    assert (done.returncode, done.stdout) == (0, "None\n"), done.stderr


def test_another_run_that_was_not_named_is_not_given_up(tmp_path: Path) -> None:
    ctx = context(tmp_path)
    make_run(ctx.state.root, tmp_path / "hs")
    commit(ctx.state.root, "a")
    with pytest.raises(AgentFailure, match="1 of 1 samples"):
        clean(CleanArgs([str(tmp_path / "hs")], data=True, discard=["r2"]), ctx)


@pytest.mark.parametrize("runs", [[], ["r1"]], ids=["all", "one run"])
@pytest.mark.parametrize("data", [False, True])
def test_a_list_changes_nothing_and_names_exactly_what_goes(tmp_path: Path, data: bool, runs: list[str]) -> None:
    ctx = context(tmp_path)
    capture = tmp_path / "disk" / "hs"
    engine = install(tmp_path / "venv")
    make_capture_dir(ctx.state, capture)
    for run in ("r1", "r2", "selfcheck-1f0c77aa-ab12"):
        make_run(ctx.state.root, capture, run)
    commit(ctx.state.root, "a", "b")
    (capture / "r2" / "notes.txt").write_text("theirs")
    (capture / "theirs").mkdir()
    (capture / "theirs" / SHARD).write_text("theirs")
    (capture / "selfcheck-1f0c77aa-ab12" / "ranks").mkdir()
    (ctx.state.directory("agent", "abc") / "x.py").write_text("x")
    (ctx.state.directory("servers", "main") / "server.log").write_text("a log")
    (ctx.state.root / "audit.jsonl").write_text("{}\n")
    (engine.site / patchrecord.FOLDER).mkdir()
    before = everything(tmp_path)
    collected = [CollectedShare("r1", "main", ["a", "b"])]
    args = CleanArgs([str(capture)], [Interpreter(engine.python)], data, runs, collected)

    listed = clean(replace(args, dry_run=True), ctx)
    assert everything(tmp_path) == before
    done = clean(args, ctx)

    assert (listed.removed, listed.kept, listed.obstacles) == (done.removed, done.kept, [])
    assert done.removed or done.kept
    assert listed.freed_bytes <= done.freed_bytes  # the claims of the drivers come between
    assert not [path for path in listed.removed if Path(path).exists()]


def test_a_list_is_made_while_a_server_writes_and_a_patch_is_applied(tmp_path: Path) -> None:
    """Nothing is asked of them: a writer keeps its lock, and the patch its folder."""
    ctx = context(tmp_path)
    make_run(ctx.state.root, tmp_path / "hs")
    engine = install(tmp_path / "venv")
    patch(PatchArgs(engine.python, spec()), ctx)
    with open_journal(tmp_path / "hs" / "r1" / "journal-main-1f0c77aa-r0.jsonl"):
        result = clean(CleanArgs([str(tmp_path / "hs")], [Interpreter(engine.python)], data=True, dry_run=True), ctx)
    assert str(tmp_path / "hs" / "r1") in result.removed
    assert [(error.what, error.next_step) for error in result.obstacles] == [
        ("patch probe 1 is still applied", "run `fleetdump revert` first")
    ]
    assert result.kept == [f"{engine.site / patchrecord.FOLDER} (a patch is in it: fleetdump revert comes first)"]


def test_a_list_says_what_would_be_lost(tmp_path: Path) -> None:
    ctx = context(tmp_path)
    make_run(ctx.state.root, tmp_path / "hs")
    commit(ctx.state.root, "a", "b")
    args = CleanArgs([str(tmp_path / "hs")], data=True, dry_run=True)
    (error,) = clean(args, ctx).obstacles
    assert "2 of 2 samples of server main were not collected" in error.what
    assert "--discard r1" in error.next_step
    assert clean(replace(args, discard=["r1"]), ctx).obstacles == []
    with pytest.raises(AgentFailure, match="were not collected"):
        clean(replace(args, dry_run=False), ctx)
