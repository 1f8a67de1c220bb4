"""fleetdump.agent.procfs: parsing, and reading real processes and sockets."""

import os
import signal
import socket
import subprocess
import sys
import threading
import time

import pytest

from fleetdump.agent import procfs
from fleetdump.agent.procfs import Rank


@pytest.fixture
def child():
    """A process that leads its own session and sleeps."""
    process = subprocess.Popen(
        [sys.executable, "-S", "-c", "import time; print('up', flush=True); time.sleep(60)"],
        stdout=subprocess.PIPE,
        start_new_session=True,
    )
    process.stdout.readline()
    yield process
    process.kill()
    process.wait()
    process.stdout.close()


@pytest.mark.parametrize(
    ("title", "rank", "role"),
    [
        ("sglang::scheduler", Rank(), "scheduler"),
        ("sglang::scheduler_TP3", Rank(tp=3), "scheduler"),
        ("sglang::scheduler_TP12_EP12", Rank(tp=12, ep=12), "scheduler"),
        ("sglang::scheduler_DP1_PP2_ATTN_CP5_MOE_DP4_TP3_EP3", Rank(1, 2, 3, 3), "scheduler"),
        ("sglang::scheduler_PP1_TP0", Rank(pp=1), "scheduler"),
        ("sglang::detokenizer", None, "detokenizer"),
        ("sglang::detokenizer_router", None, "detokenizer_router"),
        ("sglang::data_parallel_controller", None, "data_parallel_controller"),
        ("sglang::tokenizer_worker:4711", None, "tokenizer_worker"),
        ("/usr/bin/sleep", None, "other"),
    ],
)
def test_process_titles_give_rank_and_role(title, rank, role):
    assert procfs.rank_of([title]) == rank
    assert procfs.role_of([title]) == role


@pytest.mark.parametrize(
    ("cmdline", "role"),
    [
        (["/opt/bin/python", "-m", "sglang.launch_server", "--port", "1"], "launcher"),
        (["/opt/bin/python", "/opt/bin/sglang serve"], "launcher"),
        (["/usr/local/cuda/bin/nvcc", "x.cu"], "compiler"),
        (["/usr/lib/gcc/cc1plus", "x.cpp"], "compiler"),
        (["python", "/site/torch/_inductor/compile_worker/__main__.py"], "compile_worker"),
        (["python", "-c", "from multiprocessing.resource_tracker import main"], "resource_tracker"),
        ([], "other"),
    ],
)
def test_roles_by_command_line(cmdline, role):
    assert procfs.role_of(cmdline) == role


def test_a_rank_reads_like_the_log_prefix():
    assert str(Rank(tp=3)) == "TP3"
    assert str(Rank(dp=1, pp=2, tp=3, ep=3)) == "DP1 PP2 TP3"


def test_stat_with_a_hostile_command_name():
    fields = ["S", "1", "7", "7", "0", "-1", "0", "0", "0", "5", "0", "11", "12", "0", "0", "20", "0", "3", "0"]
    fields += ["999", "4096", "10", *["0"] * 14, "6", "0"]
    stat = procfs.parse_stat(f"42 (a) (S 1\n b) {' '.join(fields)}")
    assert stat is not None
    assert (stat.pid, stat.comm, stat.state, stat.ppid, stat.sid) == (42, "a) (S 1\n b", "S", 1, 7)
    assert (stat.majflt, stat.utime, stat.stime, stat.threads, stat.start_time) == (5, 11, 12, 3, 999)
    assert stat.rss_bytes == 10 * procfs.PAGE_BYTES
    assert stat.processor == 6


@pytest.mark.parametrize("text", ["", "garbage", "1 (x) S 1 2", "1 (x"])
def test_broken_stat_is_none(text):
    assert procfs.parse_stat(text) is None


def test_listeners_of_a_table():
    head = "  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode\n"
    listening = "   0: 0100007F:1F40 00000000:0000 0A 00000000:00000000 00:00000000 00000000     0        0 777 1\n"
    established = "   1: 0100007F:1F41 0100007F:9999 01 00000000:00000000 00:00000000 00000000     0        0 778 1\n"
    assert procfs.parse_listeners(head + listening + established) == {8000: {777}}


def test_a_real_process(child):
    sample = procfs.read_process(child.pid)
    assert sample is not None
    assert (sample.ppid, sample.sid, sample.role) == (os.getpid(), child.pid, "other")
    assert sample.cmdline[1:3] == ["-S", "-c"]
    assert sample.rss_bytes > 1 << 20
    assert sample.io_known
    assert sample.rchar > 1000
    assert sample.start_time > 0


def test_counters_follow_what_the_process_does(tmp_path):
    before = procfs.read_process(os.getpid())
    path = tmp_path / "data"
    path.write_bytes(b"x" * (4 << 20))
    path.read_bytes()
    end = time.process_time() + 0.05
    while time.process_time() < end:
        pass
    after = procfs.read_process(os.getpid())
    assert after.rchar - before.rchar >= 4 << 20
    assert after.wchar - before.wchar >= 4 << 20
    assert after.utime + after.stime > before.utime + before.stime


def test_stopped_and_vanished(child):
    os.kill(child.pid, signal.SIGSTOP)
    deadline = time.monotonic() + 2
    while procfs.read_stat(child.pid).state != "T" and time.monotonic() < deadline:
        time.sleep(0.01)
    assert procfs.read_process(child.pid).state == "T"
    child.kill()
    child.wait()
    assert procfs.read_process(child.pid) is None
    assert procfs.tree(child.pid) == []
    assert procfs.listening_ports(child.pid) == []
    assert procfs.fd_targets(child.pid) == {}


def test_session_and_tree_find_orphans():
    code = "import subprocess,sys,time; p=subprocess.Popen(['sleep','61']); print(p.pid,flush=True); time.sleep(61)"
    parent = subprocess.Popen([sys.executable, "-S", "-c", code], stdout=subprocess.PIPE, start_new_session=True)
    grandchild = int(parent.stdout.readline())
    try:
        assert {s.pid for s in procfs.tree(parent.pid)} == {parent.pid, grandchild}
        parent.kill()
        parent.wait()
        assert {s.pid for s in procfs.server_processes(parent.pid, parent.pid)} == {grandchild}
    finally:
        os.kill(grandchild, signal.SIGKILL)
        parent.stdout.close()


def test_a_fork_of_a_scheduler_is_no_second_scheduler():
    code = """
import os, sys, time
if sys.argv[0] == "-c":
    os.execv(sys.executable, ["sglang::scheduler_TP1", "-S", "-c", sys.argv[1], "again"])
"""
    inner = "import os,time; child=os.fork(); print(child, flush=True) if child else None; time.sleep(61)"
    process = subprocess.Popen(
        [sys.executable, "-S", "-c", code, inner], stdout=subprocess.PIPE, start_new_session=True
    )
    try:
        fork = int(process.stdout.readline())
        samples = {s.pid: s for s in procfs.session_processes(process.pid)}
        assert (samples[process.pid].role, samples[process.pid].rank) == ("scheduler", Rank(tp=1))
        assert (samples[fork].role, samples[fork].rank) == ("other", None)
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        process.stdout.close()


def test_a_child_without_a_command_line_is_what_its_parent_is_not():
    """Between fork and exec there is a moment in which only the kernel's name is left, which is the parent's. A rank
    that looks so (its parent is the launcher) stays one."""
    code = (
        "import ctypes, os, time; ctypes.CDLL(None).prctl(15, b'sglang::schedul', 0, 0, 0); child = os.fork()\n"
        "if child: print(child, flush=True)\n"
        "time.sleep(61)"
    )
    process = subprocess.Popen([sys.executable, "-S", "-c", code], stdout=subprocess.PIPE, start_new_session=True)
    try:
        fork = int(process.stdout.readline())

        def look(title):
            rank = procfs.sample(procfs.read_stat(process.pid), title)
            child = procfs.sample(procfs.read_stat(fork), [])
            assert child.role == "scheduler"
            return [found.role for found in procfs.disown_forks([rank, child])]

        assert look(["sglang::scheduler_TP1"]) == ["scheduler", "other"]
        assert look([]) == ["scheduler", "other"]
        assert look([sys.executable, "-m", "sglang.launch_server"]) == ["launcher", "scheduler"]
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        process.stdout.close()


@pytest.mark.parametrize("family", [socket.AF_INET, socket.AF_INET6])
def test_the_owner_of_a_port(family):
    try:
        listener = socket.socket(family)
        listener.bind(("::1" if family == socket.AF_INET6 else "127.0.0.1", 0))
    except OSError:
        pytest.skip("this machine has no IPv6")
    with listener:
        port = listener.getsockname()[1]
        assert procfs.port_owner(port) is None, "bound, but not listening yet"
        listener.listen()
        owner = procfs.port_owner(port)
        assert owner is not None
        assert (owner.pid, owner.start_time) == (os.getpid(), procfs.read_stat(os.getpid()).start_time)
        assert port in procfs.listening_ports(os.getpid())
    assert procfs.port_owner(port) is None


@pytest.fixture
def proc_that_blocks(tmp_path, monkeypatch):
    """A /proc in which process 7's command line can be opened by nobody: its reader waits for a writer."""
    (tmp_path / "7").mkdir()
    os.mkfifo(tmp_path / "7" / "cmdline")
    stat = " ".join(["7 (sglang::schedul) D 1 7 7", *["0"] * 44])
    (tmp_path / "7" / "stat").write_text(stat)
    monkeypatch.setattr(procfs, "PROC", str(tmp_path))
    monkeypatch.setattr(procfs, "GUARD_SECONDS", 0.1)
    monkeypatch.setattr(procfs, "_blocked", {})
    monkeypatch.setattr(procfs, "_local", threading.local())
    yield tmp_path
    with (tmp_path / "7" / "cmdline").open("w"):
        pass


def test_a_read_that_blocks_is_given_up_and_not_tried_again(proc_that_blocks):
    assert procfs.read_cmdline(7) == []
    assert procfs.blocked_pids() == {7}
    started = time.monotonic()
    for _ in range(20):
        assert procfs.read_guarded(7, "environ") is None
    assert time.monotonic() - started < 1.0, "each try would cost 0.1 s"


def test_a_process_whose_arguments_block_is_known_by_its_short_name(proc_that_blocks):
    sample = procfs.read_process(7)
    assert (sample.state, sample.role, sample.rank) == ("D", "scheduler", None)
