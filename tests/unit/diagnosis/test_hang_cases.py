"""The composite cases: one log, eight causes. The log alone must never decide."""

from __future__ import annotations

import pytest
from cases import builder as b

from fleetdump.agent.evidence_engine import LogFacts, PortFacts
from fleetdump.agent.evidence_host import DiskFacts, LockFacts, LockFile
from fleetdump.agent.evidence_process import SyscallCount
from fleetdump.agent.evidence_types import Evidence, ProbeRecord
from fleetdump.agent.protocol import from_json, to_json
from fleetdump.diagnosis import DIRECT, LOG_ONLY, MEASURED, OK, PATTERN, STALL, WAIT, diagnose

SPIN_FRAMES = [
    "ModelRunner.alloc_memory_pool (model_runner.py:893)",
    "TpModelWorker.alloc_memory_pool (tp_worker.py:420)",
]
WAIT_FRAMES = ["all_reduce (distributed_c10d.py:3252)", "get_available_gpu_memory (common.py:549)"]


def kimi() -> Evidence:
    """Ranks 0 to 6 wait in a collective, rank 7 spins in Python; strace shows writes to event descriptors."""
    e = b.server(8)
    b.spin(b.rank(e, 7))
    b.gpus(e, *([0] * 8))
    b.stacks(e, {**dict.fromkeys(range(7), WAIT_FRAMES), 7: SPIN_FRAMES}, {7: "active+gil"})
    b.trace(e, 0, SyscallCount("ZMQbg/IO/0", False, "write", 40, "eventfd"))
    b.trace(e, 7)
    return e


def without_ptrace(e: Evidence) -> Evidence:
    e.stacks, e.stack_groups, e.traces = [], [], []
    e.probes = [
        ProbeRecord("py-spy TP7", False, 0.1, "ptrace refused: yama 1"),
        ProbeRecord("strace TP7", False, 0.1, "EPERM"),
    ]
    return e


def test_healthy_starts_that_all_had_the_same_lines_are_one_number() -> None:
    e = kimi()
    e.watch.healthy.lines_min = e.watch.healthy.lines_max = 62
    assert "217 lines, healthy starts had 62; stopped" in "\n".join(diagnose(e)[0].evidence)


def test_launcher_waits_for_the_spinning_rank() -> None:
    best = diagnose(kimi())[0]
    assert (best.code, best.rank, best.phase, best.confidence, best.severity) == (
        "PARENT_WAITS_READY", 7, "kv_pool", DIRECT, STALL,
    )  # fmt: skip
    assert "model_runner.py:893" in best.title
    text = "\n".join(best.evidence)
    assert "217 lines, healthy starts had 636 to 641; stopped after weights" in text
    assert "healthy starts spend 74 s" in text
    assert "40 writes to eventfd descriptors are wake-ups" in text
    assert "watchdog" in text
    assert any("dead process" in r for r in best.ruled_out)


def test_ptrace_denied_keeps_the_verdict_and_lowers_the_confidence() -> None:
    best = diagnose(without_ptrace(kimi()))[0]
    assert (best.code, best.rank, best.phase, best.confidence) == ("PARENT_WAITS_READY", 7, "kv_pool", MEASURED)
    assert any("yama 1" in fact for fact in best.evidence)


def test_a_crowded_host_does_not_hide_the_spin() -> None:
    e = kimi()
    b.spin(b.rank(e, 7), cpu=0.3)
    assert diagnose(e)[0].rank == 7


@pytest.mark.parametrize("late", range(4))
def test_any_rank_can_be_the_late_one(late: int) -> None:
    e = b.server(4)
    b.spin(b.rank(e, late))
    best = diagnose(e)[0]
    assert (best.code, best.rank) == ("PARENT_WAITS_READY", late)


def test_late_rank_found_by_its_marks_when_all_sleep() -> None:
    e = b.server(4)
    e.log.ranks[2].marks.pop()
    e.log.ranks[2].phase = "weights"
    best = diagnose(e)[0]
    assert (best.code, best.rank, best.phase, best.confidence) == ("PARENT_WAITS_READY", 2, "weights", LOG_ONLY)


def test_nobody_stands_out_names_no_rank() -> None:
    best = diagnose(b.server(4))[0]
    assert (best.code, best.rank) == ("PARENT_WAITS_READY", None)


def test_launcher_pipe_peer_is_named() -> None:
    e = kimi()
    b.launcher(e).polled_fds = [17]
    assert any("fd 17" in fact and "TP7" in fact for fact in diagnose(e)[0].evidence)


def test_compilers_under_the_rank_mean_compiling() -> None:
    e = kimi()
    e.processes += [b.process(900 + n, "compiler", ppid=207, cpu=0.9, name="cicc") for n in range(3)]
    best = diagnose(e)[0]
    assert (best.code, best.rank, best.severity) == ("JIT_COMPILING", 7, WAIT)
    assert "PARENT_WAITS_READY" not in {v.code for v in diagnose(e)}


def test_file_baton_means_a_stale_lock() -> None:
    e = b.server(8)
    b.stacks(
        e,
        {
            **dict.fromkeys(range(7), WAIT_FRAMES),
            7: ["wait (torch/utils/file_baton.py:49)", "load (cpp_extension.py:1)"],
        },
    )
    e.lock_files = [LockFile("/root/.cache/torch_extensions/x/lock", 7200.0)]
    best = diagnose(e)[0]
    assert (best.code, best.rank) == ("JIT_STALE_LOCK", 7)
    assert "/x/lock" in best.next_steps[0]


def test_old_lock_file_alone_is_no_cause() -> None:
    e = kimi()
    e.lock_files = [LockFile("/root/.cache/torch_extensions/x/lock", 7200.0)]
    assert diagnose(e)[0].code == "PARENT_WAITS_READY"


def test_flock_waiter_names_the_holder() -> None:
    e = b.server(8)
    e.locks = [LockFacts("FLOCK", 77, 201, 207, "/root/.cache/build.lock")]
    best = diagnose(e)[0]
    assert (best.code, best.rank) == ("LOCK_WAIT", 7)
    assert "TP1" in best.title


def test_all_spin_with_busy_gpus_names_no_rank() -> None:
    e = b.server(8)
    for n in range(8):
        b.spin(b.rank(e, n), user=0.6)
    b.stacks(
        e,
        {n: ["LogitsProcessor.forward (logits_processor.py:469)"] for n in range(8)},
        dict.fromkeys(range(8), "active"),
    )
    b.gpus(e, *([100] * 8))
    best = diagnose(e)[0]
    assert best.code in ("P2P_BLOCKED", "KERNEL_SPIN")
    assert best.rank is None
    assert "GPU" in best.title


def test_one_idle_gpu_among_spinning_ranks_names_its_rank() -> None:
    e = b.server(4)
    for n in range(4):
        b.spin(b.rank(e, n))
    b.gpus(e, 100, 100, 0, 100)
    assert diagnose(e)[0].rank == 2


def test_missing_rank_with_an_oom_line() -> None:
    e = kimi()
    b.lose(e, 5)
    e.memory.oom_kills = 1
    e.memory.oom_lines = ["[900.1] Out of memory: Killed process 205 (sglang::schedul) total-vm:1kB"]
    verdicts = diagnose(e)
    assert [v.code for v in verdicts[:2]] == ["OOM_KILLED", "PARENT_WAITS_DEAD_RANK"]
    assert {v.rank for v in verdicts} == {5}


def test_oom_kill_of_somebody_else_is_no_cause() -> None:
    e = kimi()
    e.memory.oom_lines = ["[900.1] Out of memory: Killed process 7 (stress)"]
    assert diagnose(e)[0].code == "PARENT_WAITS_READY"


def test_zombie_rank() -> None:
    e = b.server(8)
    dead = b.rank(e, 5)
    dead.state, dead.role, dead.rank, dead.label = "Z", "other", None, ""
    best = diagnose(e)[0]
    assert (best.code, best.rank, best.confidence) == ("PARENT_WAITS_DEAD_RANK", 5, DIRECT)


def test_bytes_that_arrive_mean_loading() -> None:
    e = b.server(8, phase="weights")
    for n in range(8):
        p = b.rank(e, n)
        p.rchar_delta, p.read_bytes_delta, p.majflt_delta = 400, 150_000_000, 9000
        e.log.ranks[n].phase = "weights"
    e.log.tail = ["Loading safetensors checkpoint shards:  21% Completed | 3/14 [00:12<00:44,  4.00s/it]"]
    best = diagnose(e)[0]
    assert (best.code, best.severity, best.phase) == ("LOADING_SLOW", WAIT, "weights")
    assert "240 MB/s" in best.title
    assert "00:44" in best.title
    assert all(v.severity == WAIT for v in diagnose(e))


def test_cached_reads_count_as_loading_too() -> None:
    e = b.server(2, phase="weights")
    b.rank(e, 0).rchar_delta = 1 << 30
    assert diagnose(e)[0].code == "LOADING_SLOW"


def test_idle_server_with_a_frozen_log_is_healthy() -> None:
    e = b.server(8)
    b.serving(e)
    e.log.quiet_seconds = 7200.0
    verdicts = diagnose(e)
    assert [(v.code, v.severity) for v in verdicts] == [("IDLE_OK", OK)]


def test_working_server_is_healthy() -> None:
    e = b.server(2)
    b.serving(e)
    e.log.forwards = e.log.news = 3
    assert diagnose(e)[0].code == "HEALTHY"


def test_health_times_out_while_batches_move() -> None:
    e = b.server(2)
    b.serving(e)
    b.listening(e, 503)
    e.log.ready, e.log.phase, e.log.forwards, e.log.news = True, "serving", 4, 4
    assert [v.code for v in diagnose(e)] == ["BUSY_NOT_HUNG"]


def test_repeated_lines_do_not_hide_a_hang() -> None:
    e = kimi()
    e.log.growth, e.log.quiet_seconds, e.log.repeated = 4000, 1.0, 12
    assert diagnose(e)[0].code == "PARENT_WAITS_READY"


def test_silence_within_the_patience_is_no_stall() -> None:
    e = kimi()
    assert e.watch is not None
    e.watch.idle_seconds = 20.0
    best = diagnose(e)[0]
    assert (best.code, best.severity, best.confidence) == ("BUSY_NOT_HUNG", WAIT, PATTERN)


def test_dead_rank_behind_an_open_port() -> None:
    e = b.server(2)
    b.serving(e)
    b.lose(e, 0)
    assert diagnose(e)[0].code == "API_ALIVE_ENGINE_DEAD"


def test_several_dead_ranks_name_none() -> None:
    e = b.server(4)
    b.lose(e, 1)
    b.lose(e, 2)
    best = diagnose(e)[0]
    assert (best.code, best.rank) == ("PARENT_WAITS_DEAD_RANK", None)
    assert "ranks 1, 2 are dead; the launcher waits for them" in best.title


@pytest.mark.parametrize(
    "word",
    [
        "RuntimeError: Rank 1 scheduler died during initialization (exit code: -9).",
        "Subprocess scheduler_1 (pid=20468) crashed with exit code -9. Triggering SIGQUIT for cleanup...",
    ],
)
def test_launcher_s_own_word_names_the_rank_that_died_first(word: str) -> None:
    e = b.server(2, troubles={"rank_died": word})
    b.lose(e, 0)
    b.lose(e, 1)
    assert (diagnose(e)[0].code, diagnose(e)[0].rank) == ("PARENT_WAITS_DEAD_RANK", 1)
    e.launcher_alive, e.processes = False, []
    assert (diagnose(e)[0].code, diagnose(e)[0].rank) == ("LAUNCHER_DIED", 1)


def test_first_exceptions_rank_wins() -> None:
    e = b.server(2, crash="RuntimeError: boom", crash_label="TP1")
    best = diagnose(e)[0]
    assert (best.code, best.rank) == ("RANK_CRASHED", 1)


def test_peer_that_lost_its_connection_is_not_to_blame() -> None:
    e = b.server(2, crash="RuntimeError: gloo: Connection closed by peer", crash_label="TP0")
    e.launcher_alive, e.processes = False, []
    best = diagnose(e)[0]
    assert (best.code, best.rank) == ("LAUNCHER_DIED", 1)


def test_launcher_that_died_without_a_word() -> None:
    e = b.server(2)
    e.launcher_alive, e.processes = False, []
    assert (diagnose(e)[0].code, diagnose(e)[0].rank) == ("LAUNCHER_DIED", None)


def test_port_of_another_process() -> None:
    e = b.server(1, troubles={"port_in_use": "[Errno 98] address already in use"})
    e.launcher_alive, e.processes = False, []
    e.port = PortFacts(8000, True, 4711, "python -m http.server 8000", False)
    best = diagnose(e)[0]
    assert best.code == "PORT_IN_USE"
    assert "4711" in best.title


def test_full_disk_comes_before_the_spin() -> None:
    e = kimi()
    e.disks = [DiskFacts("log", "/srv", 0, 10**12, 10**6, "ext4")]
    e.log.unterminated = True
    codes = [v.code for v in diagnose(e)]
    assert codes[0] == "DISK_FULL"
    assert "PARENT_WAITS_READY" in codes


def test_no_inodes_is_a_full_disk_but_unknown_inodes_are_not() -> None:
    e = kimi()
    e.disks = [DiskFacts("log", "/srv", 10**11, 10**12, 0, "ext4")]
    assert diagnose(e)[0].code == "DISK_FULL"
    e.disks = [DiskFacts("log", "/srv", 10**11, 10**12, -1, "btrfs")]
    assert diagnose(e)[0].code == "PARENT_WAITS_READY"


def test_log_elsewhere_is_said_beside_the_verdict() -> None:
    e = b.server(2)
    b.serving(e)
    b.launcher(e).writes_log, b.launcher(e).stdout = False, "/srv/server.log (deleted)"
    assert [v.code for v in diagnose(e)] == ["IDLE_OK", "LOG_ELSEWHERE"]


def proxy_case(no_proxy: str) -> Evidence:
    e = b.server(1)
    b.listening(e, 503)
    e.log.server_marks = ["http start", "http open"]
    e.log.troubles = {"proxy_refused": "AssertionError: res=<Response [403]>"}
    e.proxy = {"http_proxy": "proxy.local:3128", "no_proxy": no_proxy}
    return e


def test_proxy_in_front_of_the_warmup() -> None:
    e = proxy_case("localhost")
    best = diagnose(e)[0]
    assert (best.code, best.phase, best.confidence) == ("PROXY_WARMUP", "warmup", DIRECT)


def test_proxy_with_the_host_excluded_is_no_cause() -> None:
    assert "PROXY_WARMUP" not in {v.code for v in diagnose(proxy_case("localhost,127.0.0.1"))}


def test_stopped_and_traced() -> None:
    e = b.server(2)
    b.rank(e, 1).state = "T"
    best = diagnose(e)[0]
    assert (best.code, best.rank) == ("STOPPED_PROCESS", 1)
    e = kimi()
    b.rank(e, 3).tracer_pid = 4242
    assert (diagnose(e)[0].code, diagnose(e)[0].rank) == ("TRACER_ATTACHED", 3)


def test_diverged_collectives() -> None:
    e = b.server(4)
    b.listening(e, 503)
    b.stacks(
        e, {0: ["all_reduce (c10d.py:1)", "prefetch (cache.py:2)"], **{n: ["broadcast (c10d.py:5)"] for n in (1, 2, 3)}}
    )
    best = diagnose(e)[0]
    assert (best.code, best.rank) == ("COLLECTIVE_DIVERGED", 0)


def test_hardware_stands_before_software() -> None:
    e = kimi()
    e.kernel_log = ["[77.0] NVRM: Xid (PCI:0000:1b:00): 45, pid=1, Ch 00000010"]
    codes = [v.code for v in diagnose(e)]
    assert codes.index("XID") < codes.index("PARENT_WAITS_READY")


def test_driver_sleep() -> None:
    e = kimi()
    p = b.rank(e, 2)
    p.state = p.state_before = "D"
    p.kernel_stack = ["mutex_lock", "uvm_ioctl"]
    assert (diagnose(e)[0].code, diagnose(e)[0].rank) == ("DRIVER_D_STATE", 2)


def test_nothing_known_is_said_honestly() -> None:
    e = b.server(1)
    e.log.ranks = []
    e.processes = [b.process(b.LAUNCHER, "launcher", ppid=1)]
    best = diagnose(e)[0]
    assert (best.code, best.confidence) == ("UNKNOWN", PATTERN)


def test_processes_that_could_not_be_read_are_not_called_dead() -> None:
    e = kimi()
    e.processes = []
    assert [v.code for v in diagnose(e)] == ["UNKNOWN"]


def test_server_without_a_log_is_judged_by_its_answers() -> None:
    e = b.server(2)
    b.serving(e)
    e.log = LogFacts()
    assert (diagnose(e)[0].code, diagnose(e)[0].phase) == ("IDLE_OK", "serving")
    b.listening(e, 0, "timeout")
    b.spin(b.rank(e, 1))
    e.log = LogFacts()
    assert (diagnose(e)[0].code, diagnose(e)[0].rank, diagnose(e)[0].phase) == ("RANK_SPIN", 1, "serving")


def test_one_log_many_verdicts() -> None:
    """The cases above share one log: had it decided, they would share one verdict."""
    assert kimi().log == b.server(8).log


def test_json_round_trip() -> None:
    e = kimi()
    assert from_json(Evidence, to_json(e)) == e


def test_who_spins_before_the_first_mark_does_not_import_however_crowded_the_host() -> None:
    """Imports read and grow. Without the right to see the log, a spin of a rank looks as early as an import."""
    e = b.server(2)
    e.log.ranks, e.log.phase, e.log.lines = [], "imports", 0
    b.spin(e.processes[-1])
    e.cpus.cores, e.cpus.running = 2, 15
    assert diagnose(e)[0].code == "PARENT_WAITS_READY"
    e.processes[-1].rchar_delta = e.processes[-1].rss_delta = 90_000
    assert diagnose(e)[0].code == "BUSY_NOT_HUNG"
