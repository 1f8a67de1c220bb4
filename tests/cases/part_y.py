"""Part Y: further cases of the same kinds in collectives, while serving, and of hosts; mixed causes and look-alikes."""

from __future__ import annotations

from cases import builder as b
from cases.table import DEAD, HANGS, HEALTHY, case
from fleetdump.agent.evidence_engine import (
    FlightRecord,
    HttpProbe,
    OperationCounts,
    PortFacts,
    RankCount,
    RankMarks,
    RasFacts,
)
from fleetdump.agent.evidence_host import DiskFacts, GpuFacts, GpuProcess
from fleetdump.agent.evidence_process import PipeEnd, Stack, ThreadFacts
from fleetdump.agent.evidence_types import Evidence

FORWARD = ["forward (llama.py:300)", "execute_model (model_runner.py:88)"]


# ------------------------------------------------------------------ collectives
@case("Y01 rank asleep elsewhere", "kind of D13", first="COLLECTIVE_DIVERGED PARENT_WAITS_READY", never=HEALTHY, rank=2)
def one_rank_sleeps_in_its_own_code() -> Evidence:
    e = b.server(4)
    barrier = ["barrier (distributed_c10d.py:4818)", "init_memory_pool (model_runner.py:1)"]
    b.stacks(e, {**dict.fromkeys(range(4), barrier), 2: ["sleep_until_file (plugin.py:3)", "hook (plugin.py:9)"]})
    return e


@case("Y02 vLLM parted", "kind of D13", first="COLLECTIVE_DIVERGED", never=HEALTHY, rank=3)
def one_worker_of_vllm_is_in_another_collective() -> Evidence:
    e = b.vllm(4)
    b.listening(e, 0, "timeout")
    e.log.ready, e.log.phase, e.log.running_requests = True, "serving", 2
    for p in b.all_ranks(e):
        b.spin(p, user=0.7)
    gather = ["all_gather_into_tensor (distributed_c10d.py:4)", *FORWARD]
    b.stacks(e, {**dict.fromkeys(range(4), gather), 3: ["broadcast (distributed_c10d.py:8)", *FORWARD]},
             dict.fromkeys(range(4), "active"))  # fmt: skip
    return e


@case("Y03 halves", "kind of D13", first="COLLECTIVE_DIVERGED", never=HEALTHY | {"KERNEL_SPIN"})
def ranks_are_parted_in_halves() -> Evidence:
    e = b.unanswering(8)
    for p in b.all_ranks(e):
        b.blocked_in(p, "do_epoll_wait", "232 0x9")
    b.stacks(e, {n: ["all_reduce (d.py:1)", "a (x.py:2)"] if n < 4 else ["reduce_scatter (d.py:5)", "b (y.py:2)"]
                 for n in range(8)})  # fmt: skip
    return e


@case("Y04 RAS names it", "kind of S2", first="COLLECTIVE_DIVERGED RANK_SPIN MISSING_RANK", never=HEALTHY, rank=5)
def counts_name_the_rank_that_is_behind() -> Evidence:
    e = b.unanswering(8)
    b.wait_for_gpu(e, 150.0, 700.0, 70_000)
    e.gpus[5].utilization = 0
    b.blocked_in(b.rank(e, 5), "futex_do_wait", "202 0x1")
    counts = [RankCount(n, 10 if n == 5 else 42, b.FIRST_RANK + n) for n in range(8)]
    e.ras = RasFacts("MISMATCH", 3, [OperationCounts("AllGather", "0-1", counts)])
    return e


@case("Y05 sequence", "kind of D11", first="COLLECTIVE_DIVERGED RANK_SPIN MISSING_RANK",
      never=HEALTHY | {"KERNEL_SPIN"}, rank=1)  # fmt: skip
def flight_recorder_shows_a_rank_one_behind() -> Evidence:
    e = b.unanswering(4)
    b.wait_for_gpu(e, 150.0, 700.0, 70_000)
    e.flight = [FlightRecord(n, 40 if n == 1 else 41, "all_reduce", "started", [4096]) for n in range(4)]
    return e


@case("Y06 NVLink", "look-alike of D3", first="KERNEL_SPIN PARENT_WAITS_READY WARMUP_STALL UNKNOWN",
      never=HEALTHY | {"P2P_BLOCKED"})  # fmt: skip
def busy_gpus_that_nvlink_joins() -> Evidence:
    e = b.server(8)
    b.at_phase(e, "kv_pool", *b.AFTER_WEIGHTS)
    b.wait_for_gpu(e, 150.0, 700.0, 70_000)
    e.host.gpu_links, e.ras = ["NV18"], RasFacts("OK", 4)
    return e


@case("Y07 real work", "look-alike of D14", first="BUSY_NOT_HUNG HEALTHY", never=HANGS | {"UNKNOWN"})
def one_very_long_prompt() -> Evidence:
    e = b.unanswering(8)
    e.log.quiet_seconds = 45.0
    for p in b.all_ranks(e):
        b.spin(p, user=0.6)
    e.gpus = [GpuFacts(n, 100, 76_000, 640.0, 700.0) for n in range(8)]
    return e


@case("Y08 container bridge", "kind of D7", first="WRONG_INTERFACE MISSING_RANK", also="WRONG_INTERFACE", never=HEALTHY)
def second_node_chose_the_container_bridge() -> Evidence:
    e = b.server(4)
    e.target.ranks, e.target.nodes, e.target.node_rank = 8, 2, 0
    b.at_phase(e, "init", "init begin")
    for m in e.log.ranks:
        m.nccl, m.interface = "bootstrap", "docker0:172.17.0.1"
    return e


@case("Y09 head node silent", "kind of D8", first="MISSING_RANK WRONG_INTERFACE", never=HEALTHY | {"P2P_BLOCKED"})
def first_node_does_not_answer() -> Evidence:
    e = b.server(4)
    e.target.ranks, e.target.nodes, e.target.node_rank = 8, 2, 1
    for p in b.all_ranks(e):
        p.rank = (p.rank or 0) + 4
        p.label = f"TP{p.rank}"
        b.connecting(p, "198.51.100.4:5000")
        b.blocked_in(p, "inet_stream_connect", "42 0x9")
    b.at_phase(e, "init", "init begin")
    return e


@case(
    "Y10 three at TP 3",
    "kind of S2",
    first="PARENT_WAITS_READY",
    never=HEALTHY | {"KERNEL_SPIN"},
    rank=1,
    phase="kv_pool",
)
def gpu_of_one_rank_has_nothing_to_do() -> Evidence:
    e = b.server(3)
    for n in range(3):
        b.spin(b.rank(e, n), user=0.8)
    b.gpus(e, 100, 0, 100)
    return e


# ------------------------------------------------------------------ serving
@case("Y11 vLLM idle", "look-alike of A4", first="IDLE_OK", never=HANGS | DEAD | {"UNKNOWN"})
def vllm_without_requests() -> Evidence:
    e = b.vllm(2)
    for p in b.all_ranks(e):
        b.blocked_in(p, "do_poll", "7 0x7f")
    e.log.quiet_seconds = 5000.0
    return e


@case("Y12 sleeps when idle", "look-alike of S5", first="IDLE_OK", never=HANGS | DEAD | {"UNKNOWN"})
def schedulers_that_sleep_when_idle() -> Evidence:
    e = b.server(4)
    b.serving(e)
    for p in b.all_ranks(e):
        b.blocked_in(p, "do_poll.constprop.0", "7 0x7f")
        p.cpu = 0.0
    e.log.quiet_seconds = 90_000.0
    return e


@case("Y13 tokenising", "kind of A11", first="API_LOOP_BLOCKED", never=HEALTHY | {"RANK_SPIN", "KERNEL_SPIN"})
def a_huge_text_is_tokenised_in_the_event_loop() -> Evidence:
    e = b.server(2)
    b.serving(e)
    e.http = [HttpProbe("/health", 0, 6.0, "timeout"), HttpProbe("/model_info", 0, 6.0, "timeout")]
    b.spin(b.launcher(e))
    e.stacks = [Stack(b.LAUNCHER, "launcher", "", "active+gil", ["encode (tokenizers/x.py:1)", "_tokenize (tm.py:2)"])]
    return e


@case("Y14 API worker", "kind of A11", first="API_LOOP_BLOCKED", never=HEALTHY | {"RANK_SPIN"})
def tokenizer_worker_is_stuck() -> Evidence:
    e = b.server(2)
    b.serving(e)
    e.http = [HttpProbe("/health", 0, 6.0, "timeout"), HttpProbe("/model_info", 0, 6.0, "timeout")]
    worker = b.process(120, "tokenizer_worker", name="sglang::tokeniz")
    b.spin(worker)
    e.processes.append(worker)
    return e


@case("Y15 regular expression", "kind of E5", first="GRAMMAR_COMPILE", never=HANGS | HEALTHY)
def regular_expression_is_made_an_automaton() -> Evidence:
    e = b.unanswering(1)
    b.spin(b.rank(e, 0))
    frames = ["create_states_mapping (outlines_core/fsm/guide.py:90)", "__init__ (outlines/fsm/guide.py:40)"]
    b.stacks(e, {0: frames}, {0: "active+gil"})
    return e


@case("Y16 native grammar", "kind of E5", first="GRAMMAR_COMPILE", never=HANGS | HEALTHY)
def engine_core_compiles_a_grammar() -> Evidence:
    e = b.vllm(1)
    b.listening(e, 0, "timeout")
    e.log.ready, e.log.phase, e.log.running_requests = True, "serving", 3
    engine = e.processes[-1]
    b.spin(engine)
    e.stacks = [Stack(engine.pid, "engine", "", "active", ["grammar_init (structured_output/__init__.py:9)"],
                      ["llguidance::earley::parser (llguidance.abi3.so)"])]  # fmt: skip
    return e


@case("Y17 all_proxy", "kind of E2", first="PROXY_WARMUP", never=HEALTHY, phase="warmup")
def every_request_goes_through_a_proxy() -> Evidence:
    e = b.server(2)
    b.listening(e, 503)
    e.log.server_marks = ["http start", "http open"]
    e.target.host = "10.0.0.7"
    e.proxy = {"all_proxy": "proxy.example:1080"}
    e.log.troubles = {"proxy_refused": "502 Bad Gateway for url: http://10.0.0.7:8000/get_model_info"}
    return e


@case("Y18 port owner", "kind of row 21", first="PORT_IN_USE", never=HEALTHY | {"BAD_BIND_HOST", "PORT_RACE"})
def port_belongs_to_an_older_server() -> Evidence:
    e = b.server(2)
    b.dead(e)
    e.port = PortFacts(8000, True, 4242, "sglang::http_server")
    e.log.troubles = {"port_in_use": "[Errno 98] error while attempting to bind on address ('0.0.0.0', 8000)"}
    return e


@case("Y19 other replica", "kind of A3", first="API_ALIVE_ENGINE_DEAD", never=HEALTHY | {"UNKNOWN"}, rank=0)
def one_replica_of_two_is_dead() -> Evidence:
    e = b.server(2)
    b.serving(e)
    e.target.ranks = 1
    for n, p in enumerate(b.all_ranks(e)):
        p.rank, p.label = 0, f"DP{n} TP0"
    e.log.ranks = [RankMarks(f"DP{n} TP0", 0, "http", ["init begin", "weights end"]) for n in range(2)]
    dead = e.processes[-1]
    dead.state, dead.role, dead.rank, dead.label, dead.exit_signal = "Z", "other", None, "", 9
    return e


@case("Y20 detokenizer gone", "kind of A3", first="API_ALIVE_ENGINE_DEAD", never=HEALTHY | {"API_LOOP_BLOCKED"})
def detokenizer_has_died() -> Evidence:
    e = b.server(2)
    b.serving(e)
    e.http = [HttpProbe("/health", 503, 20.0), HttpProbe("/model_info", 200, 0.01)]
    e.processes.append(b.process(300, "other", name="sglang::detoken", state="Z", state_before="Z", exit_signal=9))
    e.log.troubles = {"detokenizer_silent": "Health check failed: no response from detokenizer for the last 20 s"}
    return e


@case("Y21 crash wait", "kind of S7a", first="RANK_CRASHED", never=HEALTHY | {"API_LOOP_BLOCKED", "RANK_SPIN"}, rank=1)
def launcher_waits_for_core_dumps() -> Evidence:
    e = b.unanswering(2)
    b.blocked_in(b.launcher(e), "hrtimer_nanosleep", "230 0x0")
    e.log.crash, e.log.crash_label = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 3.00 GiB.", "TP1"
    return e


# ------------------------------------------------------------------ hosts
@case("Y22 GSP", "kind of F5", first="XID", also="DRIVER_D_STATE", never=HEALTHY)
def system_processor_of_a_gpu_does_not_answer() -> Evidence:
    e = b.unanswering(8)
    e.kernel_log = ["[933.1] NVRM: Xid (PCI:0000:5d:00): 119, pid=203, Timeout after 6s of waiting for RPC response"]
    b.disk_sleep(b.rank(e, 3), "rwsem_down_write_slowpath", "os_acquire_rwlock_write", "nvidia_unlocked_ioctl")
    return e


@case("Y23 old Xid", "look-alike of F5", first="IDLE_OK", never=HANGS | {"XID"})
def event_of_before_the_start() -> Evidence:
    e = b.server(2)
    b.serving(e)
    e.target.start_time = 900_000
    e.kernel_log = ["[120.0] NVRM: Xid (PCI:0000:5d:00): 43, pid=9, Ch 00000008"]
    return e


@case("Y24 inodes", "kind of F10", first="DISK_FULL", never=HEALTHY)
def no_inode_left_for_temporary_files() -> Evidence:
    e = b.server(2)
    e.disks = [DiskFacts("tmp", "/tmp", 1 << 40, 1 << 41, 0, "xfs")]
    return e


@case("Y25 shm full", "kind of F1", first="SHM_SMALL DISK_FULL", never=HEALTHY)
def shared_memory_is_full_of_leftovers() -> Evidence:
    e = b.server(8, troubles={"shm_failed": "OSError: [Errno 28] No space left on device: '/psm_0c1'"})
    e.disks.append(DiskFacts("shm", "/dev/shm", 0, 64 << 30, 10**6, "tmpfs"))
    return e


@case("Y26 terminal", "kind of row 33", first="STOPPED_PROCESS", never=HEALTHY | {"API_LOOP_BLOCKED"})
def launcher_was_stopped_by_its_terminal() -> Evidence:
    e = b.unanswering(2)
    b.launcher(e).state = b.launcher(e).state_before = "T"
    return e


@case("Y27 debugger", "kind of row 33", first="TRACER_ATTACHED", never=HEALTHY | {"RANK_SPIN"}, rank=1)
def debugger_holds_a_rank() -> Evidence:
    e = b.unanswering(2)
    held = b.rank(e, 1)
    held.state = held.state_before = "t"
    held.tracer_pid = 5555
    return e


@case("Y28 log moved", "kind of row 30", first="IDLE_OK", also="LOG_ELSEWHERE", never=HANGS)
def healthy_server_that_writes_elsewhere() -> Evidence:
    e = b.server(2)
    b.serving(e)
    b.launcher(e).writes_log, b.launcher(e).stdout = False, "/srv/server.log.1 (deleted)"
    return e


@case("Y29 reader in D", "kind of row 32", first="STDOUT_PIPE_FULL", never=HEALTHY)
def reader_of_the_log_waits_for_its_disk() -> Evidence:
    e = b.unanswering(2)
    writer = b.launcher(e)
    writer.stdout = writer.stderr = "pipe:[777]"
    writer.pipes = [PipeEnd(1, 777, "w", [60], peer_states="D"), PipeEnd(2, 777, "w", [60], peer_states="D")]
    b.blocked_in(writer, "anon_pipe_write", "1 0x2 0x7f 0x90", 2)
    return e


@case("Y30 full and killed", "mixed", first="DISK_FULL OOM_KILLED", also="DISK_FULL OOM_KILLED", never=HEALTHY)
def disk_is_full_and_a_rank_was_killed() -> Evidence:
    e = b.server(4)
    b.lose(e, 3)
    e.memory.oom_lines = ["[970.0] Out of memory: Killed process 203 (sglang::schedul) total-vm:7kB"]
    e.disks = [DiskFacts("log", "/srv", 0, 10**12, 10**6, "ext4")]
    return e


@case("Y31 sick and busy", "mixed", first="XID", also="XID", never=HEALTHY)
def gpu_reports_memory_errors_while_a_kernel_compiles() -> Evidence:
    e = b.unanswering(2)
    e.kernel_log = ["[940.0] NVRM: Xid (PCI:0000:1b:00): 95, pid=201, Uncontained ECC error"]
    e.processes.append(b.process(900, "compiler", ppid=200, cpu=0.9, name="ptxas"))
    return e


@case("Y32 descriptors", "kind of row 27", first="NOFILE", never=HEALTHY)
def descriptors_run_out_without_a_word() -> Evidence:
    e = b.unanswering(2)
    b.launcher(e).fd_count, b.launcher(e).fd_limit = 4096, 4096
    return e


@case("Y33 nothing readable", "kind of F8", first="UNKNOWN API_LOOP_BLOCKED WARMUP_STALL RANK_SPIN", also="DIAG_BLIND",
      never=HEALTHY)  # fmt: skip
def other_user_may_read_nothing() -> Evidence:
    e = b.unanswering(2)
    for p in e.processes:
        p.main = ThreadFacts(p.pid, p.name, "S")
    b.failed_probe(e, "py-spy TP0", "Permission denied (os error 13)")
    b.failed_probe(e, "strace TP0", "attach: ptrace(PTRACE_SEIZE, 200): Operation not permitted")
    return e


@case("Y34 orphan", "kind of A8", first="ORPHAN_GPU", never=HEALTHY | {"MIXED_GPU"})
def leftover_engine_of_vllm_holds_the_memory() -> Evidence:
    e = b.server(2, crash="torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 20 GiB", crash_label="TP0")
    b.dead(e)
    e.gpus = [GpuFacts(n, 0, 71_000, 80.0, 700.0, 80_000, "H100", processes_known=True) for n in range(2)]
    for gpu in e.gpus:
        gpu.processes = [GpuProcess(9001 + gpu.index, 70_500, "VLLM::Worker_TP", orphan=True)]
    return e


@case("Y35 session over", "kind of G11", first="LOGIND_KILL", never=HEALTHY | {"OOM_KILLED", "NOT_RUNNING"})
def login_session_ended_and_took_the_server() -> Evidence:
    e = b.server(2)
    b.serving(e)
    b.dead(e)
    e.port.open = e.port.ours = False
    e.http = []
    e.host.cgroup = "/user.slice/user-1000.slice/session-14.scope"
    e.log.quiet_seconds = 300.0
    e.host.logins = [
        f"{e.taken_at - 298:.6f} systemd-logind[700]: Session 14 logged out. Waiting for processes to exit."
    ]
    return e
