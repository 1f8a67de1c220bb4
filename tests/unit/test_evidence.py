"""Evidence of real processes: a stand-in for a server's tree, with real pipes, spins, sleeps, stops and deaths."""

from __future__ import annotations

import contextlib
import fcntl
import http.server
import io
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from fleetdump.agent import evidence as collecting
from fleetdump.agent import healthy, scrub, targets
from fleetdump.agent.context import AgentContext, State
from fleetdump.agent.evidence_host import MemoryFacts
from fleetdump.agent.evidence_process import ProcessFacts
from fleetdump.agent.evidence_types import Evidence, Target, WatchFacts
from fleetdump.agent.probes import gpu, host, net, stacks, strace
from fleetdump.agent.probes.bounded import ProbeFailed, Probes, run_command
from fleetdump.agent.probes.logfile import LogReader
from fleetdump.agent.procfs import start_time
from fleetdump.agent.protocol import AgentFailure, Request, from_json
from fleetdump.agent.server import ServerRecord, save_record
from fleetdump.agent.servermessages import EvidenceArgs
from fleetdump.agent.specs import Patience
from fleetdump.diagnosis import MEASURED, OK, Verdict, diagnose

SECRET = "s3cr3t-value-12345"
SPIN = "while True: pass"
SLEEP = "import time; time.sleep(1e6)"
LAUNCHER = """
import os, select, subprocess, sys
readers = []
for rank, code in enumerate(sys.argv[sys.argv.index("--") + 1:]):
    r, w = os.pipe()
    code = "print('rank is up', flush=True)\\n" + code
    subprocess.Popen([f"sglang::scheduler_TP{rank}", "-S", "-c", code], executable=sys.executable, pass_fds=[w])
    os.close(w)
    readers.append(r)
print("launched", flush=True)
poll = select.poll()
poll.register(readers[-1], select.POLLIN)
poll.poll()
"""
LOG = """[2026-01-01 00:00:00 TP0] Init torch distributed begin.
[2026-01-01 00:00:00 TP1] Init torch distributed begin.
[2026-01-01 00:00:01 TP0] Load weight begin. avail mem=9 GB
[2026-01-01 00:00:01 TP1] Load weight begin. avail mem=9 GB
[2026-01-01 00:00:02 TP0] Load weight end. type=DeepseekV3ForCausalLM, mem usage=1.00 GB.
[2026-01-01 00:00:02 TP1] Load weight end. type=DeepseekV3ForCausalLM, mem usage=1.00 GB.
"""


@dataclass
class StandIn:
    """A launcher that waits for its ranks' pipes, and its log."""

    process: subprocess.Popen[bytes]
    target: Target
    context: AgentContext
    ranks: list[int] = field(default_factory=list)

    def collect(self, *, deep: bool = False, idle: float = 100.0, seconds: float = 0.8) -> Evidence:
        facts = WatchFacts("kv_pool", idle, 60.0)
        data, folder = collecting.collect(self.target, self.context, seconds=seconds, deep=deep, watch_facts=facts)
        assert Path(folder, "evidence.json").stat().st_mode & 0o777 == 0o600
        assert Path(folder).stat().st_mode & 0o777 == 0o700
        return from_json(Evidence, data)


def context(root: Path) -> AgentContext:
    return AgentContext(Request("evidence", {}), State(root / "state"), io.BytesIO(), io.BytesIO())


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


@pytest.fixture(autouse=True)
def short_trace(monkeypatch) -> None:
    monkeypatch.setattr(strace, "SECONDS", 0.4)


@pytest.fixture
def launch(tmp_path: Path) -> Iterator[object]:
    started: list[subprocess.Popen[bytes]] = []

    def start(*ranks: str, log: str = LOG) -> StandIn:
        path, port = tmp_path / "server.log", free_port()
        path.write_text(log)
        argv = [
            sys.executable,
            "-S",
            "-c",
            LAUNCHER,
            "sglang.launch_server",
            "--port",
            str(port),
            "--tp-size",
            str(len(ranks)),
        ]
        argv += ["--api-key", SECRET, "--", *ranks]
        env = {**os.environ, "http_proxy": f"http://user:{SECRET}@proxy.local:3128", "no_proxy": "localhost"}
        with path.open("ab") as out:
            process = subprocess.Popen(argv, stdout=out, stderr=out, env=env, start_new_session=True)
        started.append(process)
        wait_until(lambda: "launched" in path.read_text() and path.read_text().count("rank is up") == len(ranks))
        target = Target(process.pid, 0, process.pid, "main", port, log=str(path), ranks=len(ranks))
        return StandIn(process, target, context(tmp_path), children(process.pid))

    yield start
    for process in started:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def children(pid: int) -> list[int]:
    return sorted(map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split()))


def wait_until(condition: object, limit: float = 20.0) -> None:
    assert callable(condition)
    end = time.monotonic() + limit
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.02)


def best(evidence: Evidence) -> Verdict:
    return diagnose(evidence)[0]


# --------------------------------------------------------------------------- whole collections
def test_spinning_rank_is_named_from_proc_and_strace(launch) -> None:
    server = launch(SLEEP, SPIN)
    evidence = server.collect()
    verdict = best(evidence)
    assert (verdict.code, verdict.rank, verdict.phase) == ("PARENT_WAITS_READY", 1, "kv_pool")
    spinning = next(p for p in evidence.processes if p.rank == 1)
    assert spinning.main is not None
    assert spinning.main.demand > 0.85
    assert spinning.main.voluntary < 20
    assert evidence.deep


def test_launcher_s_pipe_leads_to_the_rank(launch) -> None:
    server = launch(SLEEP, SLEEP)
    evidence = server.collect()
    parent = next(p for p in evidence.processes if p.role == "launcher")
    pipe = next(p for p in parent.pipes if p.fd in parent.polled_fds)
    assert pipe.peers == [server.ranks[1]]
    assert any("TP1" in fact and f"fd {pipe.fd}" in fact for fact in best(evidence).evidence)


def test_without_tools_the_verdict_stands_and_says_why(launch, monkeypatch, tmp_path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    evidence = launch(SPIN, SLEEP).collect()
    verdict = best(evidence)
    assert (verdict.code, verdict.rank, verdict.confidence) == ("PARENT_WAITS_READY", 0, MEASURED)
    assert any("strace not found" in fact for fact in verdict.evidence)
    assert any("py-spy not found" in fact for fact in verdict.evidence)


def test_stopped_rank(launch) -> None:
    server = launch(SLEEP, SLEEP)
    os.kill(server.ranks[1], signal.SIGSTOP)
    verdict = best(server.collect())
    assert (verdict.code, verdict.rank) == ("STOPPED_PROCESS", 1)


def test_killed_rank_stays_a_zombie(launch) -> None:
    server = launch(SLEEP, SLEEP)
    os.kill(server.ranks[0], signal.SIGKILL)
    verdict = best(server.collect())
    assert (verdict.code, verdict.rank) == ("PARENT_WAITS_DEAD_RANK", 0)


def test_dead_launcher(launch) -> None:
    server = launch(SLEEP)
    server.process.kill()
    server.process.wait()
    evidence = server.collect()
    assert best(evidence).code == "LAUNCHER_DIED"
    assert [p.rank for p in evidence.processes if p.role == "scheduler"] == [0]


def test_server_that_was_stopped_by_us_is_no_stall(launch) -> None:
    stand_in = launch(SLEEP, SLEEP)
    stand_in.target.stopped_at = 1796000000.0
    assert "NOT_RUNNING" not in [v.code for v in diagnose(stand_in.collect())]
    stand_in.process.kill()
    stand_in.process.wait()
    assert best(stand_in.collect()).code != "NOT_RUNNING", "its ranks still live"
    for pid in stand_in.ranks:
        os.kill(pid, signal.SIGKILL)
    wait_until(lambda: not any(Path(f"/proc/{pid}/exe").exists() for pid in stand_in.ranks))
    (verdict,) = diagnose(stand_in.collect())
    assert (verdict.code, verdict.severity) == ("NOT_RUNNING", OK)
    assert "stopped by fleetdump stop at 2026-11-30" in verdict.title
    stand_in.target.stopped_at = 1e300
    assert [one.title for one in diagnose(stand_in.collect())] == ["stopped by fleetdump stop"]


def test_growing_log_and_memory_are_progress_and_need_no_tracing(launch) -> None:
    grow = "import time\nhold = []\nwhile True: hold.append(bytearray(b'x') * (1 << 20)); time.sleep(0.05)"
    evidence = launch(grow).collect()
    assert not evidence.deep
    assert best(evidence).code == "BUSY_NOT_HUNG"


def test_repetition_is_no_progress(launch) -> None:
    chatter = (
        "import time\nn = 0\nwhile True: n += 1; print(f'waiting for the lock, {n} s', flush=True); time.sleep(0.1)"
    )
    server = launch(chatter)
    time.sleep(0.5)
    evidence = server.collect()
    assert evidence.log.growth > 0
    assert evidence.log.news == 0
    assert best(evidence).severity == "stall"


def test_nothing_secret_reaches_the_bundle(launch, tmp_path) -> None:
    server = launch(
        SPIN, log=LOG + f"server_args=ServerArgs(api_key='{SECRET}', port=1)\nAuthorization: Bearer {SECRET}\n"
    )
    evidence = server.collect(deep=True)
    assert evidence.proxy == {"http_proxy": "proxy.local:3128", "no_proxy": "localhost"}
    texts = [p.read_text() for p in (tmp_path / "state").rglob("*") if p.is_file()]
    assert len(texts) >= 6
    assert not any(SECRET in text for text in texts)


def test_watched_log_that_nobody_writes(launch, tmp_path) -> None:
    server = launch(SLEEP)
    moved = tmp_path / "server.log"
    moved.rename(tmp_path / "rotated.log")
    moved.write_text(LOG)
    evidence = server.collect()
    assert "LOG_ELSEWHERE" in {v.code for v in diagnose(evidence)}


def test_port_taken_by_somebody_else(launch) -> None:
    server = launch(SLEEP)
    with socket.socket() as other:
        other.bind(("127.0.0.1", server.target.port))
        other.listen()
        evidence = server.collect()
    assert best(evidence).code == "PORT_IN_USE"
    assert evidence.port.owner_pid == os.getpid()


# --------------------------------------------------------------------------- which server
def record(pid: int, port: int, log: str) -> ServerRecord:
    return ServerRecord(
        "main", pid, start_time(pid) or 0, "0" * 8, port, "127.0.0.1", "py", "/m", 1, [], [], log, "i", 0.0
    )


def test_verb_finds_ours_by_name_or_alone(launch, tmp_path) -> None:
    server = launch(SPIN)
    ctx = context(tmp_path)
    save_record(ctx.state, record(server.process.pid, server.target.port, server.target.log))
    for args in (EvidenceArgs(server="main", seconds=0.5, patience=Patience()), EvidenceArgs(seconds=0.5)):
        result = collecting.evidence(args, ctx)
        assert result.evidence["target"]["pid"] == server.process.pid
        assert json.loads(Path(result.evidence_dir, "evidence.json").read_text())["v"] == 1


def test_verb_compares_one_of_ours_with_healthy_starts(launch, tmp_path) -> None:
    ours = launch(SLEEP)
    known = record(ours.process.pid, 1, ours.target.log)
    save_record(ours.context.state, known)
    healthy.remember(ours.context.state, healthy.HealthyStart(healthy.kind_of(known)[1], 57, 9.0, {}, ""))

    args = EvidenceArgs(server="main", seconds=0.5)
    found = from_json(Evidence, collecting.evidence(args, ours.context).evidence)

    assert found.watch is not None
    assert found.watch.healthy is not None
    assert (found.watch.healthy.starts, found.watch.healthy.lines_min) == (1, 57)


def test_verb_finds_the_launcher_of_any_process(launch) -> None:
    server = launch(SLEEP, SLEEP)
    target = targets.target_of_pid(server.ranks[1])
    assert (target.pid, target.port, target.ranks) == (server.process.pid, server.target.port, 2)
    assert target.log == server.target.log


@pytest.mark.parametrize(
    ("args", "code"),
    [
        (EvidenceArgs(server="nobody"), "not_found"),
        (EvidenceArgs(port=1), "not_found"),
        (EvidenceArgs(pid=1 << 22), "not_found"),
        (EvidenceArgs(), "usage"),
    ],
)
def test_verb_says_what_it_can_not_find(
    args: EvidenceArgs, code: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(targets.procfs, "all_processes", list)  # whatever else this machine runs
    with pytest.raises(AgentFailure) as failure:
        collecting.evidence(args, context(tmp_path))
    assert failure.value.error.code == code


# --------------------------------------------------------------------------- probes
def test_probe_that_hangs_costs_its_limit_only() -> None:
    probes = Probes()
    start = time.monotonic()
    assert probes.run("hangs", lambda: time.sleep(30) or "late", "default", 0.2) == "default"
    assert probes.run("raises", lambda: 1 // 0, 7, 1.0) == 7
    assert time.monotonic() - start < 2
    assert [(r.name, r.ok) for r in probes.records] == [("hangs", False), ("raises", False)]
    assert "no answer" in probes.records[0].detail
    assert "division" in probes.records[1].detail


def test_command_is_ended_by_the_signal_asked_for() -> None:
    handler = "lambda *_: (print('interrupted', flush=True), os._exit(3))"
    code = f"import os, signal, time; signal.signal(2, {handler}); time.sleep(30)"
    output = run_command([sys.executable, "-S", "-c", code], 1.0, signal.SIGINT)
    assert (output.status, output.stdout.strip()) == (3, "interrupted")
    with pytest.raises(ProbeFailed, match="no-such-tool not found"):
        run_command(["no-such-tool"], 1.0)


def test_traced_process_is_left_alone() -> None:
    traced = ProcessFacts(1, 0, "scheduler", "x", 0, "S", tracer_pid=5)
    for look in (lambda: strace.trace(traced, {}), lambda: stacks.main_stack(traced, "py-spy")):
        with pytest.raises(ProbeFailed, match="already traced by 5"):
            look()


def test_strace_is_folded_by_thread_call_and_descriptor() -> None:
    text = """strace: Process 10 attached with 2 threads
[pid    11] epoll_wait(16,  <unfinished ...>
[pid    10] write(7, "\\1\\0\\0\\0\\0\\0\\0\\0", 8) = 8
[pid    11] <... epoll_wait resumed>[], 64, 10) = 0
[pid    10] write(7, "\\1\\0\\0\\0\\0\\0\\0\\0", 8) = 8
[pid    10] futex(0x5594, FUTEX_WAIT, 0, NULL <detached ...>
"""
    assert dict(strace.fold(text, 10)) == {(11, "epoll_wait", 16): 1, (10, "write", 7): 2, (10, "futex", -1): 1}
    assert dict(strace.fold("read(3, 0x1, 5) = 0\n", 42)) == {(42, "read", 3): 1}


def test_py_spy_stops_the_process_only_when_it_must(tmp_path: Path) -> None:
    tool = tmp_path / "py-spy"
    answer = '[{"os_thread_id": 7, "thread_name": "MainThread", "active": true, "owns_gil": true, "frames": []}]'
    tool.write_text(f"#!/bin/sh\ncase \"$*\" in *--nonblocking*) echo torn >&2; exit 1;; esac\necho '{answer}'\n")
    tool.chmod(0o700)
    found = stacks.find_py_spy(str(tmp_path / "python"))
    assert found == str(tool)
    rank = ProcessFacts(7, 0, "scheduler", "s", 0, "S", 0, "TP0")
    assert stacks.main_stack(rank, found).state == "active+gil"
    rank.state = "T"
    with pytest.raises(ProbeFailed, match="torn"):
        stacks.main_stack(rank, found)


def test_stack_groups_mark_the_minority() -> None:
    def threads(pid: int, name: str) -> list[dict[str, object]]:
        frame = {"name": name, "filename": "/x/a.py", "short_filename": "a.py", "line": 3}
        return [
            {"os_thread_id": pid, "thread_name": "MainThread", "active": True, "owns_gil": False, "frames": [frame]}
        ]

    def rank(n: int) -> ProcessFacts:
        return ProcessFacts(n, 0, "scheduler", "s", 0, "S", n, f"TP{n}")

    found = [stacks.parse_stack(rank(n), threads(n, "spin" if n == 2 else "wait")) for n in range(4)]
    groups = stacks.group(found)
    assert [(g.frames, g.ranks, g.minority) for g in groups] == [
        (["wait (a.py:3)"], ["TP0", "TP1", "TP3"], False),
        (["spin (a.py:3)"], ["TP2"], True),
    ]
    assert not any(g.minority for g in stacks.group(found[1:3]))
    with pytest.raises(ProbeFailed):
        stacks.parse_stack(rank(9), [])


@pytest.mark.parametrize(
    ("text", "hidden", "kept"),
    [
        ("python -m x --api-key abcdef --port 1", "abcdef", "--port 1"),
        ("python -m x --admin-api-key=abcdef --port 1", "abcdef", "--port 1"),
        ("ServerArgs(api_key='abcdef', port=1)", "abcdef", "port=1"),
        ('{"hf_token": "abcdef", "port": 1}', "abcdef", "port"),
        ("Authorization: Bearer abcdefgh", "abcdefgh", "Authorization"),
        ("http://user:abcdef@proxy:3128/x", "abcdef", "proxy:3128"),
        ("token hf_abcdefghijkl end", "hf_abcdefghijkl", "end"),
    ],
)
def test_secrets_are_scrubbed(text: str, hidden: str, kept: str) -> None:
    clean = scrub.scrub(text)
    assert hidden not in clean
    assert kept in clean


@pytest.mark.parametrize(
    "text", ["api_key=None, port=1", "max_total_num_tokens=8192", "the token limit is 5", "tokenizer_path='/m'"]
)
def test_harmless_text_is_left_alone(text: str) -> None:
    assert scrub.scrub(text) == text


@pytest.mark.parametrize("unit", ["x", "-", "a.", "key", "--", " ", "'", "a://"])
def test_a_long_line_costs_no_more_than_its_length(unit: str) -> None:
    line = unit * (200_000 // len(unit))
    started = time.monotonic()
    assert len(scrub.scrub(line)) == len(line)
    assert time.monotonic() - started < 1.0


def test_secret_options_are_hidden_in_command_lines() -> None:
    words = ["serve", "--api-key", "abc", "--admin-api-key=x", "-token", "t", "--port", "1", "http://me:pw@h/"]
    clean = ["serve", "--api-key", "***", "--admin-api-key=***", "-token", "***", "--port", "1", "http://***@h/"]
    assert scrub.scrub_argv(words) == clean


@pytest.mark.parametrize(
    ("value", "address"),
    [
        ("http://u:p@proxy.local:3128/", "proxy.local:3128"),
        ("proxy:80", "proxy:80"),
        ("", ""),
        ("http://[::1]:8", "[::1]:8"),
    ],
)
def test_proxy_addresses(value: str, address: str) -> None:
    assert scrub.proxy_address(value) == address


def test_gpu_lines_with_unknown_fields() -> None:
    found = gpu.parse_gpus("0, 100, 76000, 134.40, 700.00\n1, [N/A], 0, [N/A], 700\n")
    assert [(g.index, g.utilization, g.power) for g in found] == [(0, 100, 134.4), (1, 0, 0.0)]


def test_lock_waiters_and_holders() -> None:
    text = """1: FLOCK  ADVISORY  WRITE 50 08:01:777 0 EOF
1: -> FLOCK  ADVISORY  WRITE 60 08:01:777 0 EOF
2: POSIX  ADVISORY  WRITE 70 08:01:778 0 EOF
"""
    assert [(w.holder, w.waiter, w.inode) for w in host.parse_locks(text, {60})] == [(50, 60, 777)]
    assert host.parse_locks(text, {70}) == []


def test_real_flock_waiter_is_found_with_its_file(tmp_path: Path) -> None:
    path = tmp_path / "build.lock"
    code = f"import fcntl; f = open({str(path)!r}, 'w'); fcntl.flock(f, 2); print('held', flush=True); input()"
    holder = subprocess.Popen([sys.executable, "-S", "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    waiter = None
    try:
        assert holder.stdout is not None
        holder.stdout.readline()
        waiter = subprocess.Popen([sys.executable, "-S", "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        wait_until(lambda: host.locks({waiter.pid}))
        found = host.locks({waiter.pid})[0]
        assert (found.holder, found.waiter, found.path) == (holder.pid, waiter.pid, str(path))
    finally:
        for process in (holder, waiter):
            if process:
                process.kill()
                process.communicate()


def test_oom_lines_before_the_launch_do_not_count() -> None:
    lines = [
        "[  10.5] Out of memory: Killed process 1 (a)",
        "[ 990.5] Out of memory: Killed process 2 (b)",
        "[ 991.0] other",
    ]
    ticks = os.sysconf("SC_CLK_TCK")
    assert host.oom_lines(lines, 900 * ticks, MemoryFacts(), "/") == lines[1:2]
    assert host.oom_lines(lines, 0, MemoryFacts(), "/") == lines[:2]


def test_an_oom_kill_in_another_container_is_not_ours() -> None:
    lines = [
        "[ 5.0] python3 invoked oom-killer: gfp_mask=0xcc0",
        "[ 5.1] oom-kill:constraint=CONSTRAINT_MEMCG,oom_memcg=/docker/a,task_memcg=/docker/a,task=sglang,pid=7,uid=0",
        "[ 5.2] Memory cgroup out of memory: Killed process 7 (sglang::schedul)",
    ]
    ours = lines[1:]
    assert host.oom_lines(lines, 0, MemoryFacts(), "/docker/a") == ours
    assert host.oom_lines(lines, 0, MemoryFacts(), "/docker/a/worker") == ours, "the limit above it"
    assert host.oom_lines(lines, 0, MemoryFacts(), "/docker/b") == []
    assert host.oom_lines(lines, 0, MemoryFacts(), "/") == []
    assert host.oom_lines(lines, 0, MemoryFacts(), "") == [], "whose it is cannot be told"
    assert host.oom_lines(lines[2:], 0, MemoryFacts(), "/docker/a") == [], "the line that tells its group is cut off"
    assert host.oom_lines(lines, 0, MemoryFacts(oom_kills=1), "/") == ours, "a container that counts kills itself"


def test_disk_of_a_path_that_does_not_exist_yet(tmp_path: Path) -> None:
    facts = host.disk("capture", str(tmp_path / "a" / "b"))
    assert facts.total_bytes > 0
    assert facts.fstype


def test_lock_files_of_compile_caches(tmp_path: Path) -> None:
    lock = tmp_path / ".cache" / "torch_extensions" / "x" / "lock"
    lock.parent.mkdir(parents=True)
    lock.touch()
    os.utime(lock, (0, 0))
    assert [(f.path, f.holder) for f in host.lock_files(str(tmp_path), {})] == [(str(lock), 0)]
    with lock.open() as file:
        (found,) = host.lock_files(str(tmp_path), {})
        assert (found.holder, found.locked) == (os.getpid(), False), "it only exists"
        fcntl.flock(file, fcntl.LOCK_EX)
        assert host.lock_files(str(tmp_path), {})[0].locked


def test_http_answers_errors_and_silence() -> None:
    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response({"/health": 503, "/server_info": 200}.get(self.path, 404))
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    with http.server.HTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        target = Target(os.getpid(), port=server.server_port)
        asked = [net.status_endpoint(target, os.getpid(), paths, 5.0) for paths, _ in net.ENDPOINTS]
        answers = [(a.path, a.status) for a in asked]
        assert answers == [
            ("/health", 503),
            ("/get_model_info", 404),
            ("/server_info", 200),
        ]
        assert net.port_facts(target, [os.getpid()]).ours
        server.shutdown()
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        answer = net.get(Target(1, port=silent.getsockname()[1]), "/health", 0.2)
    assert (answer.status, answer.error) == (0, "timeout")
    assert "refused" in net.get(Target(1, port=free_port()), "/health", 1.0).error


def test_log_reader_sees_news_between_its_two_reads(tmp_path: Path) -> None:
    path = tmp_path / "server.log"
    path.write_text(LOG)
    reader = LogReader(str(path), 2)
    reader.first()
    with path.open("a") as file:
        file.write("[2026-01-01 00:00:03 TP0] Memory pool end. avail mem=5 GB\nhalf a line")
    facts = reader.second()
    assert (facts.news, facts.lines, facts.unterminated) == (1, 7, True)
    assert [(m.label, m.phase) for m in facts.ranks] == [("TP0", "jit"), ("TP1", "kv_pool")]
    assert not LogReader(str(tmp_path / "absent"), 1).second().exists


def test_proxy_refusal_in_the_log(tmp_path: Path) -> None:
    path = tmp_path / "server.log"
    path.write_text("AssertionError: res=<Response [403]>, res.text=''\n")
    assert "403" in LogReader(str(path), 1).second().troubles["proxy_refused"]
