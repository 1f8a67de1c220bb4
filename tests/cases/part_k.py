"""Part K: a third blind set, of kinds that the first two left out."""

from __future__ import annotations

from cases import tree as t
from cases.table import DEAD, HANGS, HEALTHY, case
from fleetdump.agent.evidence_engine import FlightRecord, OperationCounts, PortFacts, RankCount, RasFacts
from fleetdump.agent.evidence_host import CpuFacts, DiskFacts, GpuFacts, GpuProcess, LockFile, Pressure
from fleetdump.agent.evidence_process import PipeEnd, SocketFacts, Stack, SyscallCount, ThreadFacts, Trace
from fleetdump.agent.evidence_types import Evidence, ProbeRecord

CAPTURING = (*t.LOADED, "kv cache", "kv pool end", "capture begin")
BARRIER = ["barrier (distributed_c10d.py:4811)", "sync (parallel_state.py:9)"]


@case("K01 autotune", "kind of row 48", first="PARENT_WAITS_READY COLLECTIVE_DIVERGED MISSING_RANK",
      never=HEALTHY | DEAD, rank=1)  # fmt: skip
def one_rank_is_a_round_ahead_in_the_tuning() -> Evidence:
    e = t.sglang(2, "jit", (*t.LOADED, "kv pool end", "jit"))
    t.cards(e, [0, 0], 140.0)
    t.dump(e, {0: ["all_reduce (distributed_c10d.py:2900)", "choose_one (autotuner.py:400)"],
               1: ["sleep (backoff.py:3)", "tune (autotuner.py:380)", "choose_one (autotuner.py:410)"]})  # fmt: skip
    return e


@case("K02 thrash", "kind of row 42", first="LOADER_DEADLOCK BUSY_NOT_HUNG LOADING_SLOW PARENT_WAITS_READY UNKNOWN",
      never={"IDLE_OK", "P2P_BLOCKED"} | DEAD)  # fmt: skip
def the_host_swaps_and_every_rank_faults() -> Evidence:
    e = t.sglang(2, "weights", t.LOADED[:3])
    for p in t.ranks_of(e):
        t.disk(p, "io_schedule", "folio_wait_bit_common", "do_swap_page")
        p.majflt_delta, p.rss = 40, 200 << 30
    e.memory.total, e.memory.available, e.memory.pressure_full = 420 << 30, 1 << 30, 80.0
    return e


@case("K03 sixteen capture", "kind of C11", first="GRAPH_CAPTURE", never=HEALTHY | DEAD, phase="capture")
def two_nodes_stop_at_the_first_graph() -> Evidence:
    e = t.sglang(8, "capture", CAPTURING, quiet=3000.0, uptime=4000.0)
    e.target.ranks, e.target.nodes = 16, 2
    for p in t.ranks_of(e):
        t.burn(p, user=0.8)
    t.cards(e, [100] * 8, 150.0)
    e.log.tail = ["Capturing batches (bs=160 avail_mem=9.1 GB):   0%|          | 0/23 [00:00<?, ?it/s]"]
    return e


@case("K04 sixteen compile", "kind of C11", first="JIT_COMPILING", never=HANGS | DEAD, phase="capture")
def the_same_with_compilers() -> Evidence:
    e = two_nodes_stop_at_the_first_graph()
    e.processes += [t.child(41_000 + n, "compiler", "ptxas", "R", ppid=t.pid_of(n), cpu=0.9) for n in range(8)]
    t.cards(e, [0] * 8, 130.0)
    return e


@case("K05 nobody left", "kind of D5", first="GPU_WEDGED", never=HEALTHY)
def a_killed_server_left_its_kernel_running() -> Evidence:
    e = t.sglang(1, "serving")
    e.launcher_alive, e.processes, e.log.ready = False, [], True
    e.gpus = [GpuFacts(0, 100, 640, 119.0, 600.0, 97_000, "RTX PRO 6000", processes_known=True)]
    return e


@case("K06 retries", "kind of D16", first="WARMUP_STALL PARENT_WAITS_READY MISSING_RANK UNKNOWN KERNEL_SPIN",
      never=HEALTHY | DEAD)  # fmt: skip
def a_workspace_is_tried_again_every_half_minute() -> Evidence:
    e = t.sglang(4, "kv_pool")
    e.log.repeated, e.log.repeated_line = (
        30,
        ("[W] allreduce workspace: handle exchange timed out after 30 s, trying again"),
    )
    e.log.growth, e.log.news_seconds, e.log.quiet_seconds = 300, 900.0, 4.0
    for g in range(4):
        e.gpus.append(GpuFacts(g, 0, 70_000 + 30 * g, 130.0, 700.0, 80_000, memory_delta=64))
    return e


@case("K07 scheduler sleeps, requests wait", "kind of E7", first="UNKNOWN MISSING_RANK WARMUP_STALL RANK_SPIN",
      never=HEALTHY | DEAD | {"KERNEL_SPIN"})  # fmt: skip
def statistics_say_zero_and_the_cards_rest() -> Evidence:
    e = t.served(t.vllm(2), 200, 200, running=5)
    e.log.zero_statistics, e.log.news_seconds, e.log.quiet_seconds, e.log.growth = 40, 400.0, 9.0, 200
    e.log.repeated, e.log.repeated_line = 40, "generation throughput: 0.0 tokens/s, Running: 5 reqs, Waiting: 2 reqs"
    for p in t.ranks_of(e):
        t.sleep(p, t.FUTEX)
    t.cards(e, [0, 0], 120.0)
    return e


@case("K08 nearly full", "look-alike of F10", first="IDLE_OK HEALTHY", never=HANGS | DEAD | {"DISK_FULL"})
def a_disk_at_99_percent_is_not_full() -> Evidence:
    e = t.served(t.sglang(1, "serving"))
    e.disks = [DiskFacts("log", "/data", 900 << 20, 1 << 40, 5000, "xfs")]
    e.log.tail = ["WARNING: file system /data is 99 % full"]
    return e


@case("K09 parent prints", "kind of H9", first="PARENT_WAITS_READY MISSING_RANK", never=HEALTHY | DEAD)
def the_launcher_prints_waiting_while_its_ranks_sleep() -> Evidence:
    e = t.sglang(2, "kv_pool")
    e.log.repeated, e.log.repeated_line = 90, "waiting for 2 schedulers to become ready"
    e.log.growth, e.log.news_seconds, e.log.quiet_seconds = 90, 900.0, 2.0
    return e


@case("K10 controller", "kind of A3", first="API_ALIVE_ENGINE_DEAD", never=HEALTHY)
def the_controller_of_the_replicas_is_dead_too() -> Evidence:
    e = t.served(t.sglang(2, "serving"), 0, 200)
    for p in t.ranks_of(e):
        p.state, p.main, p.exit_signal = "Z", None, 6
    return e


@case("K11 slow name", "kind of G10", first="HUB_BLOCKED IMPORT_STALL UNKNOWN PARENT_WAITS_READY",
      never=HEALTHY | DEAD | {"P2P_BLOCKED"})  # fmt: skip
def a_rank_asks_a_name_server_before_anything() -> Evidence:
    e = t.sglang(1, "imports", ())
    e.log.phase = "imports"
    t.sleep(t.rank(e, 0), t.POLL, 7)
    t.dump(e, {0: ["getaddrinfo (socket.py:974)", "get_ip (network.py:33)", "__init__ (server_args.py:900)"]})
    return e


@case("K12 offline engine", "look-alike of H7", first="BUSY_NOT_HUNG HEALTHY", never=HANGS | DEAD | {"IDLE_OK"})
def batches_move_while_health_is_slow() -> Evidence:
    e = t.served(t.sglang(2, "serving"), 503, 200, running=60)
    e.log.forwards, e.log.news, e.log.growth = 7, 7, 900
    for p in t.ranks_of(e):
        t.burn(p, 0.9, 0.7, 300.0)
    return e


@case("K13 data-parallel spin", "kind of S2", first="RANK_SPIN MISSING_RANK COLLECTIVE_DIVERGED", never=HEALTHY | DEAD)
def one_replica_with_attention_ranks_burns() -> Evidence:
    e = t.served(t.sglang(4, "serving"), 0, 200, running=4)
    for n, p in enumerate(t.ranks_of(e)):
        p.label = f"DP{n} TP{n} EP{n}"
        t.sleep(p, t.EPOLL)
    t.burn(t.ranks_of(e)[2])
    e.log.ranks = []
    return e


@case("K14 lost after loading", "kind of A1", first="PARENT_WAITS_DEAD_RANK", never=HEALTHY, rank=7)
def the_last_rank_is_a_zombie_without_a_name() -> Evidence:
    e = t.sglang(8, "http", CAPTURING)
    dead = t.rank(e, 7)
    dead.state, dead.role, dead.rank, dead.label, dead.main, dead.exit_signal = "Z", "other", None, "", None, 9
    t.sleep(t.head(e), t.PIPE, 27)
    return e


@case("K15 kubelet", "kind of A5", first="OOM_KILLED", never=HEALTHY)
def the_whole_container_was_killed() -> Evidence:
    e = t.sglang(2, "weights", t.LOADED[:3])
    e.launcher_alive, e.processes = False, []
    e.memory.oom_lines = [
        f"[8.1] oom-kill:constraint=CONSTRAINT_MEMCG,task=python3.12,pid={t.HEAD},uid=0",
        f"[8.2] Memory cgroup out of memory: Killed process {t.HEAD} (python3.12) total-vm:1kB",
    ]
    return e


@case("K31 somebody else's kill", "look-alike of A5", first="IMPORT_STALL", never=HEALTHY | DEAD)
def a_script_of_somebody_else_was_killed_during_an_import() -> Evidence:
    e = t.sglang(1, "imports", ())
    e.processes, e.log.ranks = e.processes[:1], []
    e.memory.oom_lines = ["[90000.1] Out of memory: Killed process 4 (python3) total-vm:9kB"]
    t.disk(t.head(e), "io_schedule", "filemap_fault")
    e.stacks = [Stack(t.HEAD, "launcher", "", "idle", ["get_data (<frozen importlib._bootstrap_external>:1190)"])]
    return e


@case("K32 stopped in a write", "look-alike of row 32", first="STOPPED_PROCESS", never=HEALTHY | {"STDOUT_PIPE_FULL"})
def a_rank_was_stopped_while_it_wrote_a_line() -> Evidence:
    e = t.sglang(2, "kv_pool")
    p = t.rank(e, 1)
    t.sleep(p, ("do_signal_stop", "1 0x1 0x7f 0x20"), 1)
    p.state = p.state_before = "T"
    p.stdout, p.pipes = "pipe:[88]", [PipeEnd(1, 88, "w", [700], peer_states="S", peer_names=["tee"])]
    return e


@case("K33 not named yet", "look-alike of A1", first="BUSY_NOT_HUNG", never=HANGS | DEAD | {"UNKNOWN"})
def one_rank_logs_while_the_other_still_imports() -> Evidence:
    e = t.sglang(2, "init", ("init begin",), quiet=20.0, uptime=95.0)
    e.log.ranks = e.log.ranks[1:]
    p = t.rank(e, 0)
    p.role, p.rank, p.label, p.name, p.main = "other", None, "", "python3", None
    p.cmdline = "/opt/v/bin/python3 -B -c from multiprocessing.spawn import spawn_main; spawn_main(pipe_handle=20)"
    p.cpu, p.rchar_delta = 0.2, 1 << 20
    return e


@case("K34 named and gone", "kind of A1", first="PARENT_WAITS_DEAD_RANK", never=HEALTHY, rank=0)
def the_same_without_that_process() -> Evidence:
    e = one_rank_logs_while_the_other_still_imports()
    e.processes = [p for p in e.processes if p.role != "other"]
    return e


@case("K35 slow imports", "look-alike of A13", first="BUSY_NOT_HUNG", never=HANGS | DEAD | {"UNKNOWN", "IMPORT_STALL"})
def children_import_for_a_minute_on_a_crowded_host() -> Evidence:
    e = t.sglang(2, "imports", (), quiet=80.0, uptime=110.0)
    e.log.ranks, e.processes = [], e.processes[:1]
    command = "/opt/v/bin/python3 -B -c from multiprocessing.spawn import spawn_main; spawn_main(pipe_handle=20)"
    e.processes += [t.child(32_000 + n, "other", "python3", "R", cpu=0.3, cmdline=command) for n in range(3)]
    return e


@case("K16 queue pair", "kind of D7", first="MISSING_RANK", never=HEALTHY | DEAD | {"P2P_BLOCKED"}, rank=3)
def one_rank_never_comes_to_nccl() -> Evidence:
    e = t.sglang(4, "init", ("init begin",), quiet=500.0)
    for m in e.log.ranks:
        m.nccl = "" if m.rank == 3 else "bootstrap"
    for p in t.ranks_of(e):
        t.sleep(p, t.POLL)
    return e


@case("K17 replicas of one rank", "look-alike of A3", first="IDLE_OK", never=HANGS | DEAD | {"UNKNOWN"})
def four_replicas_are_idle() -> Evidence:
    e = t.served(t.sglang(4, "serving"))
    e.target.ranks = 1
    for n, p in enumerate(t.ranks_of(e)):
        p.rank, p.label = 0, f"DP{n} TP0"
    return e


@case("K18 long queue", "look-alike of E4", first="BUSY_NOT_HUNG HEALTHY IDLE_OK", never=HANGS | DEAD | {"UNKNOWN"})
def health_takes_eighteen_seconds() -> Evidence:
    e = t.served(t.sglang(2, "serving"), 200, 200, running=300)
    e.http[0].seconds = 18.2
    e.log.forwards, e.log.growth, e.log.quiet_seconds = 1, 150, 4.0
    return e


@case("K19 certificate", "kind of A11", first="API_LOOP_BLOCKED", never=HEALTHY | DEAD | {"RANK_SPIN"})
def tokenising_a_book_blocks_the_server() -> Evidence:
    e = t.served(t.sglang(4, "serving"), 0, 0)
    t.burn(t.head(e), 1.0, 0.98)
    e.stacks = [Stack(t.HEAD, "launcher", "", "active+gil", ["encode_batch (tokenization_utils_fast.py:580)"])]
    e.deep = True
    e.log.quiet_seconds = 50.0
    return e


@case("K20 two stages", "look-alike of A10", first="BUSY_NOT_HUNG", never=HANGS | DEAD | {"UNKNOWN"}, phase="warmup")
def the_first_request_is_twenty_seconds_old() -> Evidence:
    return t.warming(t.sglang(2, "warmup", quiet=20.0, uptime=90.0))


@case("K21 blocked by the journal", "kind of row 32", first="STDOUT_PIPE_FULL", never=HEALTHY)
def nobody_reads_the_launcher_s_errors() -> Evidence:
    e = t.sglang(1, "weights", t.LOADED[:3])
    p = t.head(e)
    t.sleep(p, ("pipe_write", "1 0x2 0x7f 0x400"), 2)
    p.stderr, p.pipes = "pipe:[5]", [PipeEnd(2, 5, "w", [])]
    return e


@case("K22 nvidia-smi hangs", "kind of F4", first="DRIVER_D_STATE", never=HEALTHY, rank=5)
def a_rank_sleeps_in_the_driver_and_its_stack_is_hidden() -> Evidence:
    e = t.served(t.sglang(8, "serving"), 0, 200, running=3)
    p = t.rank(e, 5)
    p.state = p.state_before = "D"
    p.main = ThreadFacts(p.pid, p.name, "D", wchan="uvm_ioctl")
    e.probes = [ProbeRecord("nvidia-smi", False, 13.0, "no answer in 13 s")]
    return e


@case("K23 full shm", "kind of F1", first="SHM_SMALL", never=HEALTHY)
def segments_of_killed_servers_fill_shared_memory() -> Evidence:
    e = t.sglang(4, "init", ("init begin",), quiet=60.0)
    e.launcher_alive, e.processes = False, []
    e.disks = [DiskFacts("shm", "/dev/shm", 0, 32 << 30, 9999, "tmpfs")]
    e.log.troubles = {"shm_failed": "RuntimeError: unable to write to file </torch_77_1>: No space left on device (28)"}
    return e


@case(
    "K24 sequence numbers",
    "kind of D11",
    first="MISSING_RANK COLLECTIVE_DIVERGED RANK_SPIN",
    never=HEALTHY | DEAD,
    rank=0,
)
def the_recorder_shows_rank_zero_far_behind() -> Evidence:
    e = t.served(t.sglang(4, "serving"), 0, 200, running=2)
    for p in t.ranks_of(e):
        t.burn(p, user=0.7)
    t.sleep(t.rank(e, 0), t.FUTEX)
    t.cards(e, [0, 100, 100, 100], 160.0)
    e.flight = [FlightRecord(n, 800 if n else 640, "all_gather", "started", [1]) for n in range(4)]
    return e


@case(
    "K25 counts while starting",
    "kind of S2",
    first="WARMUP_STALL COLLECTIVE_DIVERGED MISSING_RANK",
    never=HEALTHY | DEAD,
    rank=1,
)
def monitor_names_who_is_behind_in_the_warm_up() -> Evidence:
    e = t.warming(t.sglang(2, "warmup"))
    for p in t.ranks_of(e):
        t.burn(p)
    t.cards(e, [100, 0], 160.0)
    e.stacks = [Stack(t.pid_of(0), "scheduler", "TP0", "active", ["_get_pruned_states (logits_processor.py:469)"]),
                Stack(t.pid_of(1), "scheduler", "TP1", "active+gil", ["forward (model.py:11)"])]  # fmt: skip
    e.deep = True
    counts = [RankCount(0, 17, t.pid_of(0)), RankCount(1, 7, t.pid_of(1))]
    e.ras = RasFacts("MISMATCH", 1, [OperationCounts("AllReduce", "x", counts)])
    return e


@case("K26 crowd", "look-alike of S2", first="HEALTHY IDLE_OK BUSY_NOT_HUNG", also="CPU_STARVED", never=HANGS | DEAD)
def eighty_tasks_on_eight_cores() -> Evidence:
    e = t.served(t.sglang(2, "serving"), 200, 200, running=4)
    e.cpus, e.pressure = CpuFacts(8, 77.0, 80), [Pressure("cpu", "host", 88.0, 0.0)]
    e.log.forwards = 1
    return e


@case("K27 second client", "kind of F7", first="LOCK_WAIT HUB_LOCK", never=HEALTHY | DEAD | {"JIT_STALE_LOCK"})
def somebody_here_downloads_the_same_model() -> Evidence:
    e = t.sglang(1, "imports", (), quiet=3.0)
    lock = "/root/.cache/huggingface/hub/.locks/models--m/aa.lock"
    e.log.waits_for_lock, e.log.repeated, e.log.repeated_line = lock, 20, f"Still waiting to acquire lock on {lock}"
    e.log.growth, e.log.news_seconds = 100, 400.0
    e.lock_files = [LockFile(lock, 30.0, 9009, use="hub", locked=True)]
    t.dump(e, {0: ["acquire (filelock/_api.py:330)", "WeakFileLock (huggingface_hub/utils/_fixes.py:90)"]})
    return e


@case("K28 socket to itself", "kind of E2", first="PROXY_WARMUP", never=HEALTHY | DEAD)
def a_proxy_for_everything_and_nothing_arrives() -> Evidence:
    e = t.warming(t.sglang(2, "warmup"))
    e.target.host, e.log.server_marks = "10.3.3.3", ["http start", "http open"]
    for p in t.ranks_of(e):
        t.idle_loop(p)
    e.proxy = {"all_proxy": "socks.example:1080", "no_proxy": "localhost"}
    t.head(e).sockets = [SocketFacts(40, "SYN_SENT", "10.3.3.3:50000", "198.51.100.2:1080")]
    return e


@case("K29 wakes", "kind of H1", first="PARENT_WAITS_READY", never=HEALTHY | DEAD, rank=3)
def eventfd_writes_are_no_work() -> Evidence:
    e = t.sglang(4, "kv_pool")
    for p in t.ranks_of(e):
        t.sleep(p, t.FUTEX)
        e.traces.append(Trace(p.pid, p.label, 2.0, [SyscallCount("ZMQbg/IO/0", False, "write", 60, "eventfd")]))
    t.burn(t.rank(e, 3))
    e.processes[0].pipes = [PipeEnd(30, 70_003, "r", [t.pid_of(3)])]
    t.sleep(t.head(e), t.PIPE, 30)
    e.deep = True
    return e


@case("K30 tenants", "kind of A8", first="ORPHAN_GPU", never=HEALTHY)
def another_user_s_training_fills_the_cards() -> Evidence:
    e = t.sglang(2, "init", ("init begin",), quiet=9.0)
    e.log.crash, e.log.crash_label = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 9.00 GiB", "TP0"
    e.log.troubles = {"out_of_memory": e.log.crash}
    e.launcher_alive, e.processes, e.port = False, [], PortFacts(t.PORT)
    t.cards(e, [97, 98], 900.0, used=170_000)
    for g in e.gpus:
        g.processes_known, g.processes = True, [GpuProcess(5000 + g.index, 169_000, "train.py")]
    return e
