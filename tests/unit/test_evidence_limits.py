"""Evidence where the host is in the way: calls that block, logs of any size and content, tools, groups, containers."""

from __future__ import annotations

import base64
import hashlib
import io
import json
import os
import socket
import struct
import subprocess
import sys
import threading
import time
import zipfile
import zlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from fleetdump.agent import evidence as collecting
from fleetdump.agent import procfs, targets, tools
from fleetdump.agent.context import AgentContext, State
from fleetdump.agent.evidence_engine import PortFacts
from fleetdump.agent.evidence_files import harmless
from fleetdump.agent.evidence_host import CgroupFacts
from fleetdump.agent.evidence_process import ProcessFacts, Stack
from fleetdump.agent.evidence_report import write_bundle
from fleetdump.agent.evidence_types import Evidence, Target
from fleetdump.agent.guard import Guard, Stuck
from fleetdump.agent.hostmessages import ToolArgs
from fleetdump.agent.probes import bounded, cgroup, descriptors, gpu, host, logfile, process, reach, stacks
from fleetdump.agent.probes.bounded import ProbeFailed, run_command
from fleetdump.agent.probes.logfile import LogReader
from fleetdump.agent.protocol import AgentFailure, Request
from fleetdump.agent.scrub import printable
from fleetdump.agent.servermessages import EvidenceArgs
from fleetdump.fleet import pyspy
from fleetdump.tasks import evidence as task

MARK = "[2026-01-01 00:00:00 TP0] Init torch distributed begin.\n"


# --------------------------------------------------------------------------- calls that block
def test_guard_leaves_a_stuck_call_behind_and_goes_on(tmp_path: Path) -> None:
    guard, fifo = Guard(0.2), tmp_path / "fifo"
    os.mkfifo(fifo)
    with pytest.raises(Stuck, match=r"0\.2 s"):
        guard.call(fifo.read_bytes)
    assert guard.call(lambda: 7) == 7
    with pytest.raises(ZeroDivisionError):
        guard.call(lambda: 1 // 0)
    fifo.write_bytes(b"")
    guard.close()


def test_guard_waits_longer_for_a_call_that_only_lacks_a_processor(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a crowded host the helper can run, or waits for the interpreter: the kernel has not stuck."""
    monkeypatch.setattr("fleetdump.agent.guard.STARVED_LIMITS", 600)
    guard = Guard(0.1)

    def work() -> int:
        began = time.thread_time()
        while time.thread_time() - began < 0.5:
            pass
        return 7

    assert guard.call(work) == 7
    assert guard.call(lambda: threading.Event().wait(0.5)) is False, "a futex, as the interpreter's lock"
    monkeypatch.setattr("fleetdump.agent.guard.STARVED_LIMITS", 2)
    free = threading.Event()
    with pytest.raises(Stuck):
        guard.call(free.wait)
    free.set()
    guard.close()


def test_guard_keeps_one_thread_for_all_its_calls() -> None:
    guard = Guard(5.0)
    names = {guard.call(threading.get_ident) for _ in range(50)}
    guard.close()
    assert len(names) == 1
    assert threading.get_ident() not in names


def test_guard_works_in_a_forked_child() -> None:
    guard = Guard(5.0)
    guard.call(lambda: None)
    pid = os.fork()
    if pid == 0:
        os._exit(0 if guard.call(lambda: 3) == 3 else 1)
    assert os.waitpid(pid, 0)[1] == 0
    guard.close()


def test_one_process_that_blocks_hides_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever of it blocks: the others are looked at, and of it the counters of the samples are kept."""
    free = threading.Event()
    children = [subprocess.Popen([sys.executable, "-S", "-c", "input()"], stdin=subprocess.PIPE) for _ in range(3)]
    held = children[1].pid
    where_is = process.where_is
    monkeypatch.setattr(process, "DETAIL_SECONDS", 3.0)
    monkeypatch.setattr(process, "where_is", lambda pid, tid: free.wait() if pid == held else where_is(pid, tid))
    try:
        samples = {}
        for rank, child in enumerate(children):
            sample = procfs.read_process(child.pid)
            assert sample is not None
            sample.role, sample.rank = "scheduler", procfs.Rank(tp=rank)
            samples[child.pid] = sample
        threads = {pid: process.read_threads(pid) for pid in samples}
        found = process.compare(process.Snapshot(0.0, samples, threads), process.Snapshot(1.0, samples, threads), "")
        assert found.blocked == [held]
        assert [(p.rank, bool(p.fd_count)) for p in found.processes] == [(0, True), (1, False), (2, True)]
    finally:
        free.set()
        for child in children:
            child.communicate(b"\n")


def test_a_rank_without_a_title_is_the_one_that_nobody_else_is() -> None:
    ranks = [ProcessFacts(n, 0, "scheduler", "s", 0, "S", rank=n if n != 1 else None) for n in range(3)]
    process._name_the_only_unknown(ranks)
    assert [(p.rank, p.label) for p in ranks] == [(0, ""), (1, "TP1"), (2, "")]
    ranks[0].rank = ranks[1].rank = None
    process._name_the_only_unknown(ranks)
    assert [p.rank for p in ranks] == [None, None, 2], "two unknown ones stay unknown"


def test_crowd_of_bystanders_is_cut_and_ranks_are_kept() -> None:
    crowd = [ProcessFacts(n, 1, "other", "x", 0, "S") for n in range(3000)]
    ranks = [ProcessFacts(n, 1, "scheduler", "x", 0, "S") for n in range(3000, 3008)]
    found = process.Compared()
    kept = process._without_crowd([*crowd, *ranks], found)
    assert [p for p in kept if p.role == "scheduler"] == ranks
    assert (len(kept), found.left_out) == (process.BYSTANDERS + 8, 3000 - process.BYSTANDERS)


# --------------------------------------------------------------------------- tools
def test_tool_that_prints_for_ever_is_cut_and_killed_with_its_children(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bounded, "OUTPUT_BYTES", 1000)
    output = run_command(["sh", "-c", "head -c 5000000 /dev/zero; echo done >&2"], 60.0)
    assert (len(output.stdout), output.stderr) == (1000, "done\n")
    child = tmp_path / "child"
    with pytest.raises(ProbeFailed, match="no answer within 1 s"):
        run_command(["sh", "-c", f"trap '' TERM INT; sleep 1000 & echo $! > {child}; wait"], 1.0)
    pid = int(child.read_text())
    end = time.monotonic() + 30
    while procfs.is_alive(pid):
        assert time.monotonic() < end, "its child lives on"
        time.sleep(0.02)


def test_tool_that_may_not_run(tmp_path: Path) -> None:
    program = tmp_path / "py-spy"
    program.write_bytes(b"\x7fELF of another machine")
    program.chmod(0o700)
    with pytest.raises(ProbeFailed, match="cannot be run"):
        run_command([str(program)], 1.0)


def context(root: Path, lines: list[str] | None = None) -> AgentContext:
    body = io.BytesIO("".join(line + "\n" for line in lines or []).encode())
    request = Request("tool", {}, body_lines=len(lines or []))
    return AgentContext(request, State(root / "state"), body, io.BytesIO())


def test_tool_is_brought_whole_and_named_by_its_hash(tmp_path: Path) -> None:
    data = os.urandom(200_000)
    args = ToolArgs("py-spy", hashlib.sha256(data).hexdigest())
    ctx = context(tmp_path, list(task._lines(data)))
    path = Path(tools.tool(args, ctx).path)
    assert path.read_bytes() == data
    assert path.stat().st_mode & 0o777 == 0o700
    assert tools.brought(ctx.state, "py-spy") == str(path)
    assert stacks.find_py_spy("", str(path))
    assert [p.name for p in path.parent.iterdir()] == [f"py-spy-{args.sha256}"]


def test_tool_on_a_file_system_that_runs_nothing_is_not_brought_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    (tmp_path / "brought").touch(0o600)
    with pytest.raises(ProbeFailed, match="noexec") as caught:
        stacks.find_py_spy("", str(tmp_path / "brought"))
    assert not str(caught.value).startswith(stacks.MISSING)
    with pytest.raises(ProbeFailed, match=stacks.MISSING):
        stacks.find_py_spy("")


@pytest.mark.parametrize("name", ["../x", "", "py spy", "-x"])
def test_tool_with_no_name(name: str, tmp_path: Path) -> None:
    with pytest.raises(AgentFailure, match="no name"):
        tools.tool(ToolArgs(name, "0" * 64), context(tmp_path))


@pytest.mark.parametrize("size", [10, (64 << 20) + 10])
def test_tool_of_other_bytes_or_too_many_is_refused(size: int, tmp_path: Path) -> None:
    packed = zlib.compress(bytes(size))
    lines = [json.dumps({"data": base64.b64encode(packed).decode()})]
    ctx = context(tmp_path, lines)
    with pytest.raises(AgentFailure, match="not those"):
        tools.tool(ToolArgs("py-spy", "0" * 64), ctx)
    assert tools.brought(ctx.state, "py-spy") == ""
    assert list((ctx.state.root / "tools").iterdir()) == []


def elf(machine: int) -> bytes:
    return b"\x7fELF" + bytes(14) + struct.pack("<H", machine) + bytes(8)


def test_py_spy_of_another_machine_is_taken_from_its_wheel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert pyspy.runs_on(elf(62), "x86_64")
    assert not pyspy.runs_on(elf(62), "aarch64")
    wheel = tmp_path / "py_spy-0.4.1-py2.py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("py_spy-0.4.1.data/scripts/py-spy", elf(183))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(pyspy, "_installed", lambda machine: None)
    ran: list[list[str]] = []

    def download(argv: list[str], **_: object) -> subprocess.CompletedProcess[str]:
        ran.append(argv)
        wheel.replace(Path(argv[argv.index("--dest") + 1]) / wheel.name)
        return subprocess.CompletedProcess(argv, 0, "", "")

    monkeypatch.setattr(subprocess, "run", download)
    pyspy.py_spy.cache_clear()
    found = pyspy.py_spy("aarch64")
    pyspy.py_spy.cache_clear()
    assert (found.data, len(found.sha256)) == (elf(183), 64)
    assert "manylinux_2_17_aarch64" in ran[0]
    assert pyspy.py_spy("aarch64") == found, "the second time from the cache"
    assert len(ran) == 1
    pyspy.py_spy.cache_clear()


def test_py_spy_that_cannot_be_had_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(pyspy, "_installed", lambda machine: None)
    failed = subprocess.CompletedProcess([], 1, "", "ERROR: no index\n")
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: failed)
    with pytest.raises(pyspy.PySpyMissing, match="no index"):
        pyspy.py_spy("x86_64")
    with pytest.raises(pyspy.PySpyMissing, match="riscv64"):
        pyspy.py_spy("riscv64")
    pyspy.py_spy.cache_clear()


# --------------------------------------------------------------------------- logs of any size and content
def test_log_of_20_gigabytes_is_read_at_both_ends(tmp_path: Path) -> None:
    path = tmp_path / "server.log"
    path.write_text(MARK)
    os.truncate(path, 20 << 30)
    with path.open("a") as file:
        file.write(f"\n{MARK.replace('Init torch distributed begin.', 'Load weight begin. avail mem=9 GB')}")
    reader = LogReader(str(path), 1)
    reader.first()
    facts = reader.second()
    assert facts.bytes > 20 << 30
    assert facts.skipped > 19 << 30
    assert [m.marks for m in facts.ranks] == [["init begin", "load begin"]] or facts.ranks[0].phase == "weights"
    assert facts.growth == 0
    assert max(map(len, facts.tail)) <= logfile.LINE_LIMIT


def test_log_that_is_a_pipe_is_not_read(tmp_path: Path) -> None:
    """What we read from it, its own reader would never see."""
    path = tmp_path / "server.log"
    os.mkfifo(path)
    server = os.open(path, os.O_RDWR)
    os.write(server, MARK.encode())
    reader = LogReader(str(path), 1)
    reader.first()
    assert reader.second().lines == 0
    assert os.read(server, 999) == MARK.encode()
    os.close(server)


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("plain text, ünïcödé 漢字\tx", "plain text, ünïcödé 漢字\tx"),
        ("\x1b[31mred\x1b[0m", "red"),
        ("\x1b]0;title\x07after", "after"),
        ("\x1b]8;;http://x\x1b\\link", "link"),
        ("a\x1b", "a"),
        ("\x9b31mred", "\ufffd31mred"),
        ("zero\x00\x07\x08\r\n", "zero\ufffd"),
        ("\u202egnp.exe", "\ufffdgnp.exe"),
        ("bad\udcff", "bad\ufffd"),
    ],
)
def test_nothing_that_a_terminal_obeys_is_shown(text: str, shown: str) -> None:
    assert printable(text) == shown


def test_bundle_of_hostile_texts_can_be_written_and_read(tmp_path: Path) -> None:
    evil = "\x1b[2J\udcff\x00"
    found = Evidence(Target(1), 0.0, 1.0, hostname=evil, env_names=[evil])
    found.processes.append(ProcessFacts(1, 0, "launcher", evil, 0, "S", cmdline=evil, stdout=evil))
    found.log.tail = [evil]
    folder = write_bundle(found, State(tmp_path))
    for path in folder.iterdir():
        assert "\x1b" not in path.read_text(encoding="utf-8")
    assert json.loads((folder / "evidence.json").read_text())["hostname"] == "\ufffd"
    assert harmless({"\x1b[1mk": [1, None, True, "\x07"]}) == {"k": [1, None, True, "\ufffd"]}


# --------------------------------------------------------------------------- control groups, links, environment
@pytest.fixture
def groups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A place instead of /sys/fs/cgroup, and a /proc of process 7."""
    (tmp_path / "proc" / "7").mkdir(parents=True)
    monkeypatch.setattr(cgroup, "ROOT", str(tmp_path / "cgroup"))
    monkeypatch.setattr(procfs, "PROC", str(tmp_path / "proc"))
    return tmp_path


def write(folder: Path, **files: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in {"cgroup.procs": "", **files}.items():
        (folder / name.replace("__", ".")).write_text(text)


def test_cgroup_of_version_2(groups: Path) -> None:
    (groups / "proc" / "7" / "cgroup").write_text("0::/docker/a\n")
    write(
        groups / "cgroup" / "docker" / "a",
        memory__current="1000\n",
        memory__max="2000\n",
        memory__events="low 0\nhigh 4\nmax 9\noom 2\noom_kill 1\n",
        cpu__max="150000 100000\n",
        cpu__stat="usage_usec 5\nnr_periods 100\nnr_throttled 40\nthrottled_usec 2500000\n",
    )
    before = CgroupFacts(periods=50, throttled=10, throttled_seconds=0.5)
    facts = cgroup.since(before, cgroup.cgroup(7))
    assert (facts.path, facts.memory_bytes, facts.memory_limit) == ("/docker/a", 1000, 2000)
    assert facts.memory_events == {"low": 0, "high": 4, "max": 9, "oom": 2, "oom_kill": 1}
    assert (facts.cpu_limit, facts.periods, facts.throttled, facts.throttled_seconds) == (1.5, 50, 30, 2.0)


def test_cgroup_of_version_1_inside_a_container(groups: Path) -> None:
    """The path is the host's, and what is mounted is the group itself."""
    (groups / "proc" / "7" / "cgroup").write_text("5:memory:/docker/a\n4:cpu,cpuacct:/docker/a\n0::/\n")
    write(
        groups / "cgroup" / "memory",
        memory__usage_in_bytes="1000\n",
        memory__limit_in_bytes="9223372036854771712\n",
        memory__oom_control="oom_kill_disable 0\nunder_oom 0\noom_kill 3\n",
    )
    write(groups / "cgroup" / "cpu", cpu__stat="nr_periods 9\nnr_throttled 3\nthrottled_time 1500000000\n")
    facts = cgroup.cgroup(7)
    assert (facts.memory_bytes, facts.memory_limit, facts.memory_events) == (1000, 0, {"oom_kill": 3})
    assert (facts.throttled, facts.throttled_seconds, facts.cpu_limit) == (3, 1.5, 0.0)
    assert host.memory(7).oom_kills == 3


def test_no_cgroup_at_all_is_empty(groups: Path) -> None:
    assert cgroup.cgroup(7) == CgroupFacts()
    assert cgroup.pressures(7) == []


def test_pressure_of_host_and_group(groups: Path) -> None:
    (groups / "proc" / "7" / "cgroup").write_text("0::/a\n")
    write(groups / "cgroup" / "a", memory__pressure="some avg10=5.00 avg60=0\nfull avg10=2.50 avg60=0\n")
    (groups / "proc" / "pressure").mkdir()
    (groups / "proc" / "pressure" / "cpu").write_text("some avg10=90.10 avg60=0 avg300=0 total=1\n")
    found = {(p.resource, p.scope): (p.some, p.full) for p in cgroup.pressures(7)}
    assert found == {("cpu", "host"): (90.1, 0.0), ("memory", "cgroup"): (5.0, 2.5)}


def test_environment_that_a_title_was_written_over_is_looked_for_elsewhere(groups: Path) -> None:
    (groups / "proc" / "8").mkdir()
    (groups / "proc" / "7" / "environ").write_text("s::scheduler_TP0\0\0\0O=1\0")
    (groups / "proc" / "8" / "environ").write_text("PATH=/bin\0NCCL_DEBUG=INFO\0=C:=x\0")
    assert host.environment([7, 8]) == {"PATH": "/bin", "NCCL_DEBUG": "INFO"}
    with pytest.raises(ProbeFailed, match="environment"):
        host.environment([7, 9])


def test_inactive_nvlinks_count_where_others_work() -> None:
    text = (
        "GPU 0: NVIDIA H200 (UUID: GPU-a)\n\t Link 0: 26.562 GB/s\n\t Link 1: <inactive>\n"
        "GPU 1: NVIDIA H200 (UUID: GPU-b)\n\t Link 0: <inactive>\n\t Link 1: <inactive>\n"
    )
    assert gpu.parse_inactive_links(text) == {0: 1}, "GPU 1 has none in use"
    assert gpu.parse_inactive_links("nvlink is not supported\n") == {}


def test_memory_of_gpus_is_looked_at_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    used = iter((1000, 5000))

    def answer(argv: list[str], limit: float) -> bounded.Output:
        if gpu.QUERY in argv[1]:
            return bounded.Output(0, f"0, 0, {next(used)}, 120, 700, 143771, NVIDIA H200, GPU-a\n", "")
        raise ProbeFailed("no answer within 4 s")

    monkeypatch.setattr(gpu, "run_command", answer)
    (found,) = gpu.inspect([], 0.0)
    assert (found.memory_used, found.memory_delta, found.processes_known) == (1000, 4000, False)


def test_journal_of_login_sessions() -> None:
    text = (
        "1796000000.123456 gpu01 systemd-logind[700]: Session 5 logged out. Waiting for processes to exit.\n"
        "1796000001.000001 gpu01 systemd[1]: session-5.scope: Killing process 4711 (python) with signal SIGKILL.\n"
        "1796000002.000001 gpu01 systemd[1]: Started Daily apt download activities.\n"
        "-- Boot 1 --\n"
    )
    assert reach.parse_logins(text) == [
        "1796000000.123456 Session 5 logged out. Waiting for processes to exit.",
        "1796000001.000001 session-5.scope: Killing process 4711 (python) with signal SIGKILL.",
    ]


def test_native_frames_are_grouped_too() -> None:
    def rank(n: int, frame: str) -> Stack:
        return Stack(n, "scheduler", f"TP{n}", "active", ["forward (a.py:1)"], native=[frame] if frame else [])

    taken = [rank(0, "cuLaunchKernel"), rank(1, "cuLaunchKernel"), rank(2, "memcpy"), rank(3, "")]
    groups = stacks.group(taken, native=True)
    assert [(g.ranks, g.minority) for g in groups] == [(["TP0", "TP1"], False), (["TP2"], True)]
    assert [g.ranks for g in stacks.group(taken)] == [["TP0", "TP1", "TP2", "TP3"]]


def test_what_a_serving_launcher_reads_is_no_progress() -> None:
    """It imports a module late; the ranks are what must move."""
    found = Evidence(Target(1), 0.0, 2.0)
    found.processes = [ProcessFacts(1, 0, "launcher", "x", 0, "S", read_bytes_delta=1 << 20)]
    assert collecting.made_progress(found), "while it starts it is"
    found.port = PortFacts(1, open=True, ours=True)
    assert not collecting.made_progress(found)
    found.processes.append(ProcessFacts(2, 1, "scheduler", "x", 0, "S", read_bytes_delta=1 << 20))
    assert collecting.made_progress(found)


def test_requests_without_a_word_of_statistics_are_a_reason_to_look_deeper() -> None:
    found = Evidence(Target(1), 0.0, 2.0)
    found.processes = [ProcessFacts(2, 1, "scheduler", "VLLM::Worker_TP", 0, "S")]
    found.log.running_requests, found.log.quiet_seconds = 3, 8.0
    assert not collecting.is_starved(found), "the next statistics are due in two seconds"
    found.log.quiet_seconds = 90.0
    assert collecting.is_starved(found)
    found.processes[0].name = "sglang::schedul"
    assert not collecting.is_starved(found), "its last batch may have ended long ago"


# --------------------------------------------------------------------------- other ends
def test_both_ends_of_unix_and_tcp_sockets_are_known() -> None:
    ours, theirs = socket.socketpair()
    with socket.create_server(("127.0.0.1", 0)) as server, ours, theirs:
        client = socket.create_connection(server.getsockname())
        code = "import time; time.sleep(1e6)"
        child = subprocess.Popen([sys.executable, "-S", "-c", code], pass_fds=[theirs.fileno(), client.fileno()])
        accepted, _ = server.accept()
        fds = (theirs.fileno(), client.fileno())
        theirs.close()
        client.close()
        try:
            table = descriptors.Sockets([os.getpid(), child.pid])
            end = time.monotonic() + 30
            while not set(fds) <= set(found := {s.fd: s for s in table.of(child.pid, procfs.fd_targets(child.pid))}):
                assert time.monotonic() < end, found
                table = descriptors.Sockets([os.getpid(), child.pid])
            assert [(found[fd].state, found[fd].peer) for fd in fds] == [
                ("UNIX", os.getpid()),
                ("ESTABLISHED", os.getpid()),
            ]
            here = {s.fd: s for s in table.of(os.getpid(), procfs.fd_targets(os.getpid()))}
            assert here[ours.fileno()].peer == child.pid
            assert here[accepted.fileno()].peer == child.pid
            assert here[server.fileno()].state == "LISTEN"
        finally:
            accepted.close()
            child.kill()
            child.wait()


def test_lock_that_outlives_who_took_it_belongs_to_the_child_that_has_it(tmp_path: Path) -> None:
    """The kernel names who called flock; the lock goes with the open file, which a child may have."""
    path = tmp_path / "build.lock"
    take = f"import fcntl, os, time; f = open({str(path)!r}, 'w'); fcntl.flock(f, 2)"
    leave = "if os.fork(): os._exit(0)\nprint(os.getpid(), flush=True); time.sleep(1e6)"
    holder = subprocess.Popen(
        [
            sys.executable,
            "-S",
            "-c",
            f"{take}\n{leave}",
        ],
        stdout=subprocess.PIPE,
        start_new_session=True,
    )
    assert holder.stdout
    child = int(holder.stdout.readline())
    holder.wait()
    waiter = subprocess.Popen([sys.executable, "-S", "-c", take])
    try:
        end = time.monotonic() + 30
        while not (found := host.locks({waiter.pid})):
            assert time.monotonic() < end
        assert (found[0].waiter, found[0].holder, found[0].path) == (waiter.pid, child, str(path))
    finally:
        os.kill(child, 9)
        holder.stdout.close()
        waiter.kill()
        waiter.wait()


# --------------------------------------------------------------------------- which server
@pytest.fixture
def launcher(tmp_path: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A process called as a launcher is, behind a shell that names it too."""
    words = f"{sys.executable} -S -c 'import time; time.sleep(1e6)' sglang.launch_server --port 45999 --tp-size x; true"
    process = subprocess.Popen(["sh", "-c", words], start_new_session=True)
    yield process
    os.killpg(process.pid, 9)
    process.wait()


def test_a_port_that_nobody_opened_leads_to_who_was_told_to(launcher: subprocess.Popen[bytes], tmp_path: Path) -> None:
    end = time.monotonic() + 30
    while not (found := [one for one in targets.launchers() if "45999" in one.cmdline]):
        assert time.monotonic() < end
    (sample,) = found
    assert sample.ppid == launcher.pid, "the shell is only a wrapper"
    target = targets.find_target(EvidenceArgs(port=45999), context(tmp_path))
    assert (target.pid, target.port, target.ranks) == (sample.pid, 45999, 1)
    named = targets.find_target(EvidenceArgs(server="main", port=45999), context(tmp_path))
    assert named.pid == sample.pid, "ours by name, but it was started by hand"


def test_log_behind_a_tee(tmp_path: Path) -> None:
    log = tmp_path / "server.log"
    code = "import time; print('up', flush=True); time.sleep(1e6)"
    server = subprocess.Popen([sys.executable, "-S", "-c", code], stdout=subprocess.PIPE)
    tee = subprocess.Popen(["tee", str(log)], stdin=server.stdout, stdout=subprocess.DEVNULL)
    try:
        assert server.stdout
        server.stdout.close()
        end = time.monotonic() + 30
        while not (log.exists() and log.read_text()):
            assert time.monotonic() < end
        assert targets.target_of_pid(server.pid).log == str(log)
    finally:
        for one in (server, tee):
            one.kill()
            one.wait()
