"""What the demo counts as left over, and what as changed."""

import json
import os
import subprocess
import sys

import pytest

from demo import leftovers


@pytest.fixture
def detached():
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"], start_new_session=True)
    yield process
    process.kill()
    process.wait()


def record(folder, pid, start_time):
    path = folder / "machine" / "servers" / "main" / "server.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"pid": pid, "start_time": start_time}))


def test_a_living_launch_is_found_by_pid_and_start_time(tmp_path, detached):
    record(tmp_path, detached.pid, leftovers.start_time(detached.pid))
    assert leftovers.launched_sessions(tmp_path) == {detached.pid}


def test_a_pid_used_again_by_another_process_is_not_ours(tmp_path, detached):
    record(tmp_path, detached.pid, leftovers.start_time(detached.pid) - 1)
    assert leftovers.launched_sessions(tmp_path) == set()


def test_a_torn_record_is_no_launch(tmp_path):
    record(tmp_path, 1, 1)
    next(tmp_path.rglob("server.json")).write_text('{"pid": 1')
    assert leftovers.launched_sessions(tmp_path) == set()


def test_processes_are_found_by_session_and_by_folder(tmp_path, detached):
    assert any(str(detached.pid) in text for text in leftovers.processes_of({detached.pid}, tmp_path))
    assert leftovers.processes_of(set(), tmp_path) == []
    named = subprocess.Popen(
        [sys.executable, "-c", "import time; time.sleep(60)"], env={**os.environ, "WHERE": str(tmp_path)}
    )
    try:
        assert any(str(named.pid) in text for text in leftovers.processes_of(set(), tmp_path))
    finally:
        named.kill()
        named.wait()


def test_sessions_are_ended_whole(detached):
    leftovers.kill_sessions({detached.pid})
    assert detached.wait(timeout=5) == -9


def test_files_count_and_empty_folders_do_not(tmp_path):
    (tmp_path / "empty" / "deeper").mkdir(parents=True)
    assert leftovers.files_below(tmp_path) == []
    (tmp_path / "empty" / "file").write_text("")
    assert leftovers.files_below(tmp_path) == [f"file {tmp_path / 'empty' / 'file'}"]


def test_a_changed_a_new_and_a_missing_file_of_the_engine_show(tmp_path, monkeypatch):
    packages = tmp_path / "venv" / "lib" / "python3.11" / "site-packages"
    (packages / "sglang" / "srt" / "__pycache__").mkdir(parents=True)
    (packages / "sglang" / "srt" / "model.py").write_text("a = 1\n")
    monkeypatch.setattr(leftovers.recipe, "VENV", tmp_path / "venv")
    before = leftovers.hash_site_packages()

    (packages / "sglang" / "srt" / "__pycache__" / "model.pyc").write_text("bytecode")
    assert leftovers.hash_site_packages() == before
    (packages / "fleetdump-patch").mkdir()
    assert leftovers.hash_site_packages() != before
    (packages / "fleetdump-patch").rmdir()
    (packages / "sglang" / "srt" / "model.py").write_text("a = 2\n")
    assert leftovers.hash_site_packages() != before
    (packages / "sglang" / "srt" / "model.py").unlink()
    assert leftovers.hash_site_packages() != before
