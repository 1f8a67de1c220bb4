"""Probes on recorded answers and on real processes: RAS, nvidia-smi, logs, pipes, dumps, addresses."""

from __future__ import annotations

import os
import pickle
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from fleetdump.agent import procfs
from fleetdump.agent.evidence_engine import LogFacts
from fleetdump.agent.evidence_host import GpuFacts, GpuProcess
from fleetdump.agent.evidence_process import ProcessFacts
from fleetdump.agent.probes import flight, gpu, host, process, ras, reach, stacks
from fleetdump.agent.probes.bounded import Output, ProbeFailed
from fleetdump.agent.probes.logfile import LogReader
from fleetdump.agent.probes.logtroubles import Troubles

RECORDED = Path(__file__).parents[2] / "cases" / "recorded" / "ras"


# --------------------------------------------------------------------------- NCCL RAS
def recorded(name: str) -> str:
    return (RECORDED / f"{name}.txt").read_text()


def test_ras_of_a_healthy_server() -> None:
    facts = ras.parse_ras(recorded("idle"))
    assert (facts.status, facts.communicators, facts.mismatches, facts.silent_pids) == ("OK", 2, [], [])


def test_ras_names_counts_that_differ() -> None:
    facts = ras.parse_ras(recorded("extra_allreduce"))
    assert facts.status == "MISMATCH"
    counts = {m.operation: [(one.rank, one.count, one.pid) for one in m.ranks] for m in facts.mismatches}
    assert counts == {"AllGather": [(1, 1, 9449), (0, 0, 9448)], "AllReduce": [(0, 18, 9448), (1, 17, 9449)]}


def test_ras_with_hundreds_of_garbage_ranks_keeps_facts_only() -> None:
    text = recorded("sigstop")
    assert text.count("process information not found") == 257
    facts = ras.parse_ras(text)
    assert (facts.status, facts.communicators, facts.mismatches, facts.silent_pids) == ("INCOMPLETE", 1, [], [859])


@pytest.mark.parametrize("text", ["", "\0" * 5000, "Rank 99999999999999999999 has launched up to operation 1\n" * 50])
def test_ras_of_anything_else_is_empty(text: str) -> None:
    assert ras.parse_ras(text).mismatches == []


def test_other_jobs_on_the_same_port_are_left_out() -> None:
    facts = ras.only(ras.parse_ras(recorded("spin")), [1, 2])
    assert facts.mismatches == []


def test_ras_is_asked_over_its_socket(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        monkeypatch.setattr(ras, "ADDRESS", server.getsockname())
        asked: list[bytes] = []

        def answer() -> None:
            connection, _ = server.accept()
            with connection:
                asked.append(connection.recv(100))
                connection.sendall(recorded("spin").encode())

        thread = threading.Thread(target=answer)
        thread.start()
        facts = ras.ras([7113, 7114])
        thread.join()
    assert asked == [b"verbose status\n"]
    assert facts.mismatches[0].ranks[1].count == 7


@pytest.mark.parametrize(
    ("value", "address"),
    [
        ("", ("127.0.0.1", 28028)),
        ("127.0.0.1:30011", ("127.0.0.1", 30011)),
        ("localhost:30011", ("127.0.0.1", 30011)),
        ("[::1]:30011", ("::1", 30011)),
    ],
)
def test_ras_of_a_server_with_a_port_of_its_own(value: str, address: tuple[str, int]) -> None:
    assert ras.address_in({"NCCL_RAS_ADDR": value}) == address


@pytest.mark.parametrize("value", ["10.0.0.9:28028", "127.0.0.1", "localhost:http", "127.0.0.1:70000"])
def test_ras_is_never_asked_on_another_machine(value: str) -> None:
    with pytest.raises(ProbeFailed, match="NCCL_RAS_ADDR"):
        ras.address_in({"NCCL_RAS_ADDR": value})


def test_nobody_on_the_ras_port(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = server.getsockname()
    monkeypatch.setattr(ras, "ADDRESS", address)
    with pytest.raises(ProbeFailed, match="RAS"):
        ras.ras([1])


def test_ras_that_never_answers_costs_its_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ras, "LIMIT", 0.3)
    with socket.create_server(("127.0.0.1", 0)) as server:
        monkeypatch.setattr(ras, "ADDRESS", server.getsockname())
        start = time.monotonic()
        with pytest.raises(ProbeFailed):
            ras.ras([1])
    assert time.monotonic() - start < 2


# --------------------------------------------------------------------------- nvidia-smi
OVERVIEW = (
    "0, 100, 45306, 134.40, 700.00, 143771, NVIDIA H200, GPU-a\n1, 0, 45306, 127.7, 700.0, 143771, NVIDIA H200, GPU-b\n"
)
TOPOLOGY = """\tGPU0\tGPU1\tCPU Affinity\tNUMA Affinity
GPU0\t X \tPHB\t0-31\t0
GPU1\tPHB\t X \t0-31\t0

Legend:
  SYS  = Connection traversing PCIe as well as the SMP interconnect
"""
QUERY = """GPU 00000000:06:00.0
    Fabric
        State                             : In Progress
        Status                            : N/A
GPU 00000000:07:00.0
    Fabric
        State                             : Completed
"""


def smi(monkeypatch: pytest.MonkeyPatch, answers: dict[str, str]) -> None:
    def run(argv: list[str], limit: float) -> Output:
        text = next((answer for word, answer in answers.items() if word in " ".join(argv)), None)
        return Output(0, text, "") if text is not None else Output(9, "", "no")

    monkeypatch.setattr(gpu, "run_command", run)


def test_gpus_with_their_processes_and_fabric(monkeypatch: pytest.MonkeyPatch) -> None:
    apps = f"GPU-a, {os.getpid()}, 45000\nGPU-b, 999999999, 300\n"
    smi(monkeypatch, {"--query-gpu": OVERVIEW, "--query-compute-apps": apps, " -q": QUERY, "topo": TOPOLOGY})
    first, second = gpu.inspect([os.getpid()], 0.0)
    assert (first.name, first.memory_total, first.fabric, second.fabric) == (
        "NVIDIA H200",
        143771,
        "In Progress",
        "Completed",
    )
    assert [(p.pid, p.memory, p.ours) for p in first.processes] == [(os.getpid(), 45000, True)]
    assert [(p.ours, p.orphan, p.name) for p in second.processes] == [(False, False, "")]
    assert gpu.links() == ["PHB"]


def test_gpus_stand_when_only_the_overview_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    smi(monkeypatch, {"--query-gpu": OVERVIEW})
    assert [(g.index, g.processes_known, g.fabric) for g in gpu.inspect([], 0.0)] == [(0, False, ""), (1, False, "")]
    assert len(gpu.gpus()) == 2
    with pytest.raises(ProbeFailed):
        gpu.links()
    smi(monkeypatch, {})
    with pytest.raises(ProbeFailed, match="ended with 9"):
        gpu.gpus()


def test_short_rows_are_read_as_far_as_they_go() -> None:
    assert gpu.parse_gpus("0, [N/A], 10, [N/A], 300.0\n") == [GpuFacts(0, 0, 10, 0.0, 300.0)]


def test_a_server_without_parent_is_an_orphan(monkeypatch: pytest.MonkeyPatch) -> None:
    sample = procfs.read_process(os.getpid())
    assert sample
    sample.cmdline, sample.ppid = ["sglang::scheduler_TP0"], 1
    monkeypatch.setattr(procfs, "read_process", lambda pid: sample)
    assert gpu.identify(GpuProcess(5, 38_000), []).orphan


# --------------------------------------------------------------------------- logs
@pytest.mark.parametrize(
    ("line", "name"),
    [
        ("Error while creating shared memory segment /dev/shm/nccl-x (size 9637888)", "shm_failed"),
        ("ValueError: The memory capacity is unbalanced. Some GPUs may be occupied", "memory_unbalanced"),
        ("CUDA error 802: system not yet initialized", "cuda_802"),
        ("No available shared memory broadcast block found in 60 seconds", "ring_full"),
        ("[E] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=8)", "nccl_watchdog"),
        ("Health check failed. No response from detokenizer for 20 s", "detokenizer_silent"),
        ("[W] Unable to resolve hostname to a local address. Using the loopback address.", "loopback_fallback"),
        ("[Errno 99] error while attempting to bind on address ('198.51.100.7', 8000)", "cannot_bind"),
        ("Fatal Python error: Bus error", "bus_error"),
        ("Rank 1 scheduler died during initialization (exit code: -9).", "rank_died"),
        ("Subprocess scheduler_1 (pid=20468) crashed with exit code -9. Triggering SIGQUIT", "rank_died"),
    ],
)  # fmt: skip
def test_known_troubles(line: str, name: str) -> None:
    troubles = Troubles()
    troubles.feed(line)
    assert set(troubles.first) == {name}


@pytest.mark.parametrize(
    "line",
    [
        "Subprocess scheduler_0 (pid=20467) crashed with exit code -3. Triggering SIGQUIT for cleanup...",
        "Load weight begin. avail mem=9 GB",
        "max_total_num_tokens=100",
        'INFO: "GET /health HTTP/1.1" 200 OK',
        "x" * 100_000,
    ],
)
def test_plain_lines_are_no_trouble(line: str) -> None:
    troubles = Troubles()
    troubles.feed(line)
    assert troubles.first == {}


def test_statistics_of_zero_count_from_the_last_token_on() -> None:
    troubles = Troubles()
    zero = "Engine 000: Avg prompt throughput: 0.0 tokens/s, Avg generation throughput: 0.0 tokens/s, Running: 2 reqs"
    for line in [zero, zero.replace("generation throughput: 0.0", "generation throughput: 8.1"), zero, zero]:
        troubles.feed(line)
    assert troubles.zero_statistics == 2
    troubles.feed(zero.replace("Running: 2", "Running: 0"))
    assert troubles.zero_statistics == 0


def test_requests_that_run_by_the_last_statistics() -> None:
    troubles = Troubles()
    line = "Engine 000: Avg prompt throughput: 9.5 tokens/s, Avg generation throughput: 8.1 tokens/s, Running: {} reqs"
    for count in (7, 3):
        troubles.feed(line.format(count))
    troubles.feed("Running: 12 reqs, says somebody without a rate")
    assert troubles.running == 3
    troubles.feed(line.format(0))
    assert troubles.running == 0


def test_a_lock_that_is_waited_for_again_and_again() -> None:
    troubles = Troubles()
    for _ in range(2):
        troubles.feed("Still waiting to acquire lock on '/nfs/hub/.locks/m/abc.lock' (elapsed: 10 seconds)")
    assert troubles.waits_for_lock() == ""
    troubles.feed("Still waiting to acquire lock on '/nfs/hub/.locks/m/abc.lock' (elapsed: 30 seconds)")
    assert troubles.waits_for_lock() == "/nfs/hub/.locks/m/abc.lock"


def test_nccl_s_own_lines_belong_to_ranks(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text(
        "[2026-01-01 00:00:00 TP0] Init torch distributed begin.\n"
        "[2026-01-01 00:00:00 TP1] Init torch distributed begin.\n"
        "node1:858:858 [0] NCCL INFO Bootstrap: Using br0:172.17.0.1<0>\n"
        "node1:858:900 [0] NCCL INFO ncclCommInitRank comm 0x1 rank 0 nranks 2 - Init COMPLETE\n"
        "node1:859:859 [1] NCCL INFO NCCL version 2.28.9+cuda13.0\n"
    )
    reader = LogReader(str(log), 2)
    reader.first()
    facts: LogFacts = reader.second()
    assert [(m.label, m.nccl, m.interface) for m in facts.ranks] == [
        ("TP0", "init end", "br0:172.17.0.1"),
        ("TP1", "bootstrap", ""),
    ]


def test_repetition_does_not_make_a_log_young(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text("[2026-01-01 00:00:00] Load weight begin. avail mem=9 GB\n")
    with log.open("a") as file:
        for n in range(12):
            file.write(f"[2026-01-01 00:0{n // 6}:{n % 6}5] still waiting ({n} s)\n")
    reader = LogReader(str(log), 1)
    reader.first()
    facts = reader.second()
    assert facts.quiet_seconds < 10
    assert 110 <= facts.news_seconds < 125


# --------------------------------------------------------------------------- processes
def looked_at(pid: int) -> ProcessFacts:
    first = process.snapshot(pid, 0, 0.0)
    for sample in first.processes.values():
        sample.role = "launcher"
    second = process.Snapshot(1.0, first.processes, {p: process.read_threads(p) for p in first.processes})
    return next(p for p in process.compare(first, second, "").processes if p.pid == pid)


def python(code: str, **options: object) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-S", "-c", code], **options)  # type: ignore[call-overload,no-any-return]


def sleeps_in(pid: int, family: str) -> None:
    for _ in range(200):
        if family in (procfs.read_text(f"/proc/{pid}/wchan", 99) or ""):
            return
        time.sleep(0.02)
    raise AssertionError(procfs.read_text(f"/proc/{pid}/wchan", 99))


def test_reader_that_holds_the_only_writing_end() -> None:
    child = python("import os; r, w = os.pipe(); os.read(r, 1)")
    try:
        sleeps_in(child.pid, "pipe_read")
        facts = looked_at(child.pid)
        assert [(end.mode, end.own_writer) for end in facts.pipes if end.fd == facts.syscall_fd] == [("r", True)]
    finally:
        child.kill()
        child.wait()


def test_writer_whose_reader_is_stopped() -> None:
    reader = python("import time; time.sleep(99)", stdin=subprocess.PIPE)
    assert reader.stdin
    writer = python("import os\nwhile True: os.write(1, b'x' * 4096)", stdout=reader.stdin)
    reader.stdin.close()
    try:
        sleeps_in(writer.pid, "pipe_write")
        reader.send_signal(signal.SIGSTOP)
        while procfs.read_stat(reader.pid).state != "T":  # type: ignore[union-attr]
            time.sleep(0.01)
        facts = looked_at(writer.pid)
        assert facts.syscall_fd == 1
        assert [(p.fd, p.mode, p.peers, p.peer_states) for p in facts.pipes] == [(1, "w", [reader.pid], "T")]
        assert facts.pipes[0].peer_names == [Path(f"/proc/{reader.pid}/comm").read_text().strip()]
    finally:
        for one in (writer, reader):
            one.kill()
            one.wait()


@pytest.mark.parametrize(
    ("cmdline", "role", "tp"),
    [
        (["VLLM::EngineCore"], "engine", None),
        (["VLLM::Worker_TP3"], "scheduler", 3),
        (["/opt/venv/bin/python", "-m", "vllm.entrypoints.openai.api_server"], "launcher", None),
        (["/opt/venv/bin/python", "/opt/venv/bin/vllm", "serve", "m"], "launcher", None),
    ],
)
def test_roles_of_vllm(cmdline: list[str], role: str, tp: int | None) -> None:
    rank = procfs.rank_of(cmdline)
    assert (procfs.role_of(cmdline), rank.tp if rank else None) == (role, tp)


def test_signal_that_ended_a_zombie() -> None:
    child = python("import os, signal; os.kill(os.getpid(), signal.SIGBUS)")
    while procfs.read_stat(child.pid).state != "Z":  # type: ignore[union-attr]
        time.sleep(0.01)
    assert process.exit_signal(child.pid) == signal.SIGBUS
    child.wait()


# --------------------------------------------------------------------------- dumps, addresses, stacks, locks
def test_flight_recorder_dumps(tmp_path: Path) -> None:
    entries = [
        {"collective_seq_id": n, "profiling_name": "nccl:all_reduce", "state": "completed", "input_sizes": [[n, 7168]]}
        for n in (811, 812)
    ]
    (tmp_path / "trace_0").write_bytes(pickle.dumps({"entries": entries}))
    (tmp_path / "trace_1").write_bytes(b"no pickle")
    found = flight.flight({"TORCH_FR_DUMP_TEMP_FILE": str(tmp_path / "trace_")}, 0.0)
    assert [(r.rank, r.sequence, r.operation, r.sizes) for r in found] == [(0, 812, "all_reduce", [812, 7168])]
    with pytest.raises(ProbeFailed):
        flight.flight({"TORCH_FR_DUMP_TEMP_FILE": str(tmp_path / "none_")}, 0.0)


class Evil:
    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.mkdir, ("evil",)


def test_a_dump_can_run_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "trace_0").write_bytes(pickle.dumps({"entries": [Evil()]}))
    assert flight.last_record(tmp_path / "trace_0") == []
    assert not (tmp_path / "evil").exists()


def test_addresses_and_bridges() -> None:
    text = (
        "1: lo    inet 127.0.0.1/8 scope host lo\n2: eth0@if3    inet 10.0.0.5/24 brd 10.0.0.255 scope global eth0\n"
        "2: eth0@if3    inet6 2001:db8::5/64 scope global\n2: eth0@if3    inet6 fe80::1/64 scope link\n"
    )
    assert reach.parse_addresses(text) == {"lo": ["127.0.0.1"], "eth0": ["10.0.0.5", "2001:db8::5"]}
    assert reach.count_acs("\tACSCtl:\tSrcValid+ ReqRedir+ CmpltRedir+\n\tACSCtl:\tSrcValid- ReqRedir-\n") == 1


def test_this_host_is_described() -> None:
    facts = reach.host_facts(os.getpid())
    assert facts.cgroup.startswith("/") or facts.cgroup == ""
    assert isinstance(facts.name_resolves_to, list)


def test_threads_that_run_are_kept_beside_the_main_thread() -> None:
    threads = [
        {"thread_name": "MainThread", "os_thread_id": 5, "active": False, "owns_gil": False, "frames": []},
        {"thread_name": "pool-0", "os_thread_id": 6, "active": True, "owns_gil": False,
         "frames": [{"name": "compile_grammar", "short_filename": "compiler.py", "filename": "/x", "line": 3}]},
    ]  # fmt: skip
    stack = stacks.parse_stack(ProcessFacts(5, 1, "scheduler", "x", 1, "S"), threads)
    assert stack.active == {"pool-0": ["compile_grammar (compiler.py:3)"]}


def test_native_frames_are_not_asked_of_a_stopped_process() -> None:
    with pytest.raises(ProbeFailed, match="state T"):
        stacks.native_frames(ProcessFacts(5, 1, "scheduler", "x", 1, "T"), "py-spy")


def test_lock_files_of_hubs_and_of_caches_elsewhere(tmp_path: Path) -> None:
    hub, cache = tmp_path / "hf" / "hub" / ".locks" / "m" / "a.lock", tmp_path / "triton" / "k" / "lock"
    for path in (hub, cache):
        path.parent.mkdir(parents=True)
        path.touch()
    found = host.lock_files(
        str(tmp_path), {"HF_HOME": str(tmp_path / "hf"), "TRITON_CACHE_DIR": str(tmp_path / "triton")}
    )
    assert {(f.use, f.path) for f in found} == {("hub", str(hub)), ("compile", str(cache))}
    assert all(f.fstype for f in found)


@pytest.mark.parametrize(
    ("state", "voluntary", "demand"), [("R", 7, 1.0), ("S", 7, 0.4), ("R", 6, 0.4)], ids=["ran", "woke up", "slept"]
)
def test_who_never_slept_wanted_a_core_all_the_time(state: str, voluntary: int, demand: float) -> None:
    """The kernel has counted 0.8 s of 2 s: the rest of the wait is not over yet."""
    sample = procfs.read_process(os.getpid())
    assert sample is not None
    before = process.Ticks("x", state, 0, 0, voluntary)
    now = process.Ticks("x", "R", 10, 0, 7, wanted_ns=800_000_000)
    first, second = (
        process.Snapshot(at, {sample.pid: sample}, {sample.pid: {sample.pid: ticks}})
        for at, ticks in ((0.0, before), (2.0, now))
    )
    (facts,) = process.compare(first, second, "").processes
    assert facts.main is not None
    assert facts.main.demand == demand
