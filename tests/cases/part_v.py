"""Part V: the rest of the third set: GPUs, collectives, networks, hosts and look-alikes; then near misses."""

from __future__ import annotations

from cases import builder as b
from cases.table import DEAD, HANGS, HEALTHY, case
from fleetdump.agent.evidence_engine import (
    FlightRecord,
    HttpProbe,
    OperationCounts,
    PortFacts,
    RankCount,
    RasFacts,
)
from fleetdump.agent.evidence_host import (
    CgroupFacts,
    DiskFacts,
    GpuFacts,
    GpuProcess,
    LockFile,
    Pressure,
)
from fleetdump.agent.evidence_process import (
    SocketFacts,
    Stack,
    SyscallCount,
    ThreadFacts,
    Trace,
)
from fleetdump.agent.evidence_types import Evidence


@case("Z23 kernel hangs while serving", "kind of D14", first="KERNEL_SPIN", never=HEALTHY | {"COLLECTIVE_DIVERGED"})
def attention_kernel_never_ends() -> Evidence:
    e = b.unanswering(1)
    b.wait_for_gpu(e, 210.0, 700.0, 70_000)
    b.stacks(e, {0: ["synchronize (torch/cuda/streams.py:9)", "process_batch_result (scheduler.py:3)"]}, {0: "active"})
    return e


@case("Z24 two parted of eight", "kind of D13", first="COLLECTIVE_DIVERGED", never=HEALTHY)
def two_ranks_take_another_branch() -> Evidence:
    e = b.unanswering(8)
    for p in b.all_ranks(e):
        b.blocked_in(p, "ep_poll", "232 0x9")
    main = ["all_gather_object (distributed_c10d.py:2)", "sync (a.py:3)"]
    b.stacks(
        e, {n: main if n not in (2, 5) else ["barrier (distributed_c10d.py:4)", "other (b.py:1)"] for n in range(8)}
    )
    return e


@case("Z25 flight operations", "kind of D11", first="COLLECTIVE_DIVERGED", never=HEALTHY)
def one_rank_called_another_operation() -> Evidence:
    e = b.unanswering(2)
    b.wait_for_gpu(e, 130.0, 700.0, 70_000)
    e.flight = [FlightRecord(0, 91, "all_gather", "started", [8]), FlightRecord(1, 91, "all_reduce", "started", [8])]
    return e


@case("Z26 monitor names a silent one", "kind of S5", first="STOPPED_PROCESS", never=HEALTHY, rank=0)
def monitor_is_incomplete_because_one_is_stopped() -> Evidence:
    e = b.unanswering(4)
    b.rank(e, 0).state = "T"
    e.ras = RasFacts("INCOMPLETE", 2, silent_pids=[200])
    return e


@case("Z27 rank behind while starting", "kind of S2", first="PARENT_WAITS_READY COLLECTIVE_DIVERGED MISSING_RANK",
      never=HEALTHY | {"KERNEL_SPIN", "P2P_BLOCKED"}, rank=0)  # fmt: skip
def counts_name_a_sleeping_rank_before_the_port() -> Evidence:
    e = b.sparse(2)
    b.spin_alone(e, 1)
    e.gpus = [GpuFacts(0, 0, 70_000, 120.0, 700.0), GpuFacts(1, 100, 70_000, 134.0, 700.0)]
    e.processes[1].main = ThreadFacts(2000, "x", "S", wchan="hrtimer_nanosleep", syscall="230 0x0")
    counts = [RankCount(0, 3, 2000), RankCount(1, 9, 2001)]
    e.ras = RasFacts("MISMATCH", 1, [OperationCounts("AllReduce", "c", counts)])
    return e


@case("Z28 gloo on the bridge", "kind of D8", first="WRONG_INTERFACE", never=HEALTHY)
def ranks_listen_on_loopback_for_another_host() -> Evidence:
    e = b.sparse(4)
    e.target.ranks, e.target.nodes = 8, 2
    b.at_phase(e, "init", "init begin")
    for m in e.log.ranks:
        m.interface = "lo:127.0.0.1"
    return e


@case("Z29 IPv6 cluster", "kind of row 6", first="IPV6_LOOPBACK", never=HEALTHY | {"MISSING_RANK"})
def everything_but_the_start_speaks_ipv6() -> Evidence:
    e = b.sparse(2)
    b.at_phase(e, "init", "init begin")
    e.host.addresses = {"lo": ["127.0.0.1"], "eth0": ["2001:db8::5"]}
    e.log.troubles = {"ipv4_unreachable": "OSError: [Errno 101] Network is unreachable"}
    return e


@case("Z30 old server holds the port", "kind of row 21", first="PORT_IN_USE", never=HEALTHY | DEAD)
def listener_of_an_earlier_run() -> Evidence:
    e = b.sparse(1)
    e.port = PortFacts(30000, True, 555, "python3")
    e.log.phase = "http"
    return e


@case("Z31 proxy answers nothing", "kind of E2", first="PROXY_WARMUP", never=HEALTHY)
def proxy_swallows_the_first_request() -> Evidence:
    e = b.sparse(1)
    e.port = PortFacts(30000, True, 1000, "python3", True)
    e.http = [HttpProbe("/health", 503, 0.1)]
    e.log.phase, e.log.server_marks = "warmup", ["http start", "http open"]
    e.target.host = "192.0.2.10"
    e.proxy = {"http_proxy": "proxy.example:8080"}
    return e


@case("Z32 no_proxy by suffix", "look-alike of E2", first="WARMUP_STALL", never=HEALTHY | {"PROXY_WARMUP"}, rank=0)
def proxy_that_is_not_used() -> Evidence:
    e = b.sparse(1)
    b.spin_alone(e, 0)
    e.port = PortFacts(30000, True, 1000, "python3", True)
    e.http = [HttpProbe("/health", 503, 0.1)]
    e.log.phase, e.log.server_marks = "warmup", ["http start", "http open", "model info"]
    e.target.host = "127.0.0.1"
    e.proxy = {"http_proxy": "proxy.example:8080", "no_proxy": "127.0.0.0/8,.example"}
    return e


@case("Z33 DP controller", "kind of A11", first="API_LOOP_BLOCKED", never=HEALTHY | {"RANK_SPIN"})
def http_process_is_busy_and_schedulers_sleep() -> Evidence:
    e = b.unanswering(2)
    for p in b.all_ranks(e):
        b.blocked_in(p, "do_poll", "7 0x7f")
    b.spin(b.launcher(e))
    e.http = [HttpProbe("/health", 0, 6.0, "timeout"), HttpProbe("/model_info", 0, 6.0, "timeout")]
    return e


@case("Z34 grammar in the API", "kind of E5", first="GRAMMAR_COMPILE", never=HANGS | HEALTHY)
def api_process_builds_a_grammar() -> Evidence:
    e = b.unanswering(1)
    b.spin(b.launcher(e))
    e.stacks = [Stack(b.LAUNCHER, "launcher", "", "active+gil", ["build_regex_from_schema (outlines/fsm/json.py:9)"])]
    return e


@case("Z35 ECC", "kind of F5", first="XID", never=HEALTHY)
def double_bit_error() -> Evidence:
    e = b.unanswering(2)
    e.kernel_log = ["[99.0] NVRM: Xid (PCI:0000:3b:00): 48, pid='<unknown>', name=<unknown>, DBE detected"]
    return e


@case("Z36 application fault", "kind of F5", first="RANK_CRASHED", also="XID", never=HEALTHY, rank=1)
def illegal_access_in_a_kernel() -> Evidence:
    e = b.unanswering(2)
    e.log.crash, e.log.crash_label = "torch.AcceleratorError: CUDA error: an illegal memory access", "TP1"
    e.kernel_log = ["[9999.0] NVRM: Xid (PCI:0000:3b:00): 31, pid=201, MMU Fault"]
    return e


@case("Z37 fabric", "kind of F2", first="FABRIC_MANAGER", never=HEALTHY)
def fabric_manager_failed() -> Evidence:
    e = b.sparse(8)
    b.dead(e)
    e.log.crash = "RuntimeError: Error 802: system not yet initialized"
    e.log.troubles = {"cuda_802": e.log.crash}
    e.host.fabric_manager = "failed"
    return e


@case("Z38 uvm", "kind of F4", first="DRIVER_D_STATE", never=HEALTHY | {"REMOTE_FS_HANG"}, rank=1)
def rank_sleeps_in_uvm() -> Evidence:
    e = b.sparse(2)
    p = e.processes[2]
    p.state = p.state_before = "D"
    p.main = ThreadFacts(p.pid, "x", "D", wchan="uvm_va_space_mm_shutdown", syscall="16 0xb")
    return e


@case("Z39 wedged after a crash", "kind of D5", first="GPU_WEDGED", never=HEALTHY)
def two_gpus_work_for_nobody() -> Evidence:
    e = b.sparse(2)
    b.dead(e)
    e.gpus = [GpuFacts(n, 100, 4, 122.0, 600.0, processes_known=True) for n in range(2)]
    return e


@case("Z40 orphan of the same user", "kind of A8", first="ORPHAN_GPU", never=HEALTHY)
def leftover_rank_on_one_gpu() -> Evidence:
    e = b.sparse(2)
    b.dead(e)
    e.log.crash, e.log.troubles = "torch.OutOfMemoryError: CUDA out of memory", {"out_of_memory": "CUDA out of memory"}
    e.gpus = [GpuFacts(0, 0, 60_000, processes_known=True), GpuFacts(1, 0, 3, processes_known=True)]
    e.gpus[0].processes = [GpuProcess(88, 60_000, "sglang::schedul", orphan=True)]
    return e


@case("Z41 shm in the middle", "kind of F1", first="SHM_SMALL", never=HEALTHY)
def nccl_asks_for_more_than_docker_gives() -> Evidence:
    e = b.sparse(4)
    b.dead(e)
    e.log.phase, e.log.troubles = "init", {"shm_failed": "Error while creating shared memory segment /dev/shm/nccl-x"}
    e.disks = [DiskFacts("shm", "/dev/shm", 1 << 20, 64 << 20, 100, "tmpfs")]
    return e


@case("Z42 import from the network", "kind of A13", first="IMPORT_STALL", never=HEALTHY | {"HUB_BLOCKED"})
def plugin_asks_an_address_that_never_answers() -> Evidence:
    e = b.sparse(1)
    e.processes = e.processes[:1]
    e.log.phase, e.log.ranks, e.log.lines = "imports", [], 3
    e.processes[0].sockets = [SocketFacts(3, "SYN_SENT", "192.0.2.1:5000", "198.51.100.1:80")]
    frames = ["connect (socket.py:1)", "_load (<frozen importlib._bootstrap>:1)", "<module> (telemetry.py:2)"]
    e.stacks = [Stack(1000, "launcher", "", "idle", frames)]
    return e


@case("Z43 host reads a huge tokenizer", "look-alike of A13", first="BUSY_NOT_HUNG LOADING_SLOW",
      never=HANGS | {"IMPORT_STALL", "UNKNOWN"})  # fmt: skip
def launcher_reads_before_the_ranks_start() -> Evidence:
    e = b.sparse(1)
    e.processes = e.processes[:1]
    e.log.phase, e.log.ranks = "imports", []
    e.processes[0].read_bytes_delta = 90_000_000
    return e


@case("Z44 weights go to the GPU", "look-alike of B7", first="LOADING_SLOW BUSY_NOT_HUNG", never=HANGS)
def memory_of_the_gpus_grows() -> Evidence:
    e = b.sparse(2)
    b.at_phase(e, "weights", "weights begin")
    for n in range(2):
        b.spin_alone(e, n)
    e.gpus = [GpuFacts(n, 3, 30_000, 130.0, 700.0, memory_delta=900) for n in range(2)]
    return e


@case("Z45 strace shows work", "look-alike of S2", first="PARENT_WAITS_READY BUSY_NOT_HUNG UNKNOWN",
      never={"KERNEL_SPIN", "IDLE_OK", "HEALTHY"})  # fmt: skip
def rank_that_calls_the_system_all_the_time() -> Evidence:
    e = b.sparse(2)
    b.spin_alone(e, 1)
    e.traces = [Trace(2001, "TP1", 2.0, [SyscallCount("x", True, "openat", 900), SyscallCount("x", True, "mmap", 900)])]
    return e


@case("Z46 vLLM loads", "kind of B6a", first="LOADING_SLOW BUSY_NOT_HUNG", never=HANGS | {"IMPORT_STALL"})
def workers_of_vllm_read() -> Evidence:
    e = b.vllm_starting()
    for p in b.all_ranks(e):
        p.read_bytes_delta = 700_000_000
    return e


@case("Z47 vLLM all asleep", "kind of D7", first="PARENT_WAITS_READY UNKNOWN", never=HEALTHY | DEAD | {"HUB_BLOCKED"})
def workers_of_vllm_wait_for_nobody() -> Evidence:
    return b.vllm_starting()


@case("Z48 descriptor limit", "kind of row 27", first="NOFILE", never=HEALTHY)
def rank_is_out_of_descriptors() -> Evidence:
    e = b.sparse(2)
    e.processes[1].fd_count, e.processes[1].fd_limit = 1024, 1024
    e.log.troubles = {"too_many_files": "zmq.error.ZMQError: Too many open files"}
    return e


@case("V01 replica stopped", "kind of row 33", first="STOPPED_PROCESS", never=HEALTHY, rank=0)
def other_replica_answers_for_a_stopped_one() -> Evidence:
    e = b.server(2)
    b.serving(e)
    e.target.ranks = 1
    for n, p in enumerate(b.all_ranks(e)):
        p.rank, p.label = 0, f"DP{n} TP0"
    e.processes[-1].state = "T"
    return e


@case("V02 lock that the kernel knows", "look-alike of C5", first="LOCK_WAIT", never=HEALTHY | {"JIT_STALE_LOCK"})
def old_lock_file_that_is_locked_now() -> Evidence:
    e = b.sparse(1)
    e.uptime = 900.0
    e.stacks = [Stack(2000, "scheduler", "TP0", "idle", ["acquire (filelock/_unix.py:42)", "build (jit.py:3)"])]
    e.lock_files = [LockFile("/root/.cache/flashinfer/x.lock", 86_400.0, locked=True)]
    return e


@case("V03 group pressure", "kind of B1", first="LOADER_DEADLOCK", never=HEALTHY | {"LOADING_SLOW"})
def container_is_in_reclaim() -> Evidence:
    e = b.sparse(2)
    b.at_phase(e, "weights", "weights begin")
    e.pressure = [Pressure("memory", "cgroup", 90.0, 70.0)]
    return e


@case("V04 group kill", "kind of A1", first="OOM_KILLED", also="PARENT_WAITS_DEAD_RANK", never=HEALTHY, rank=3)
def container_counts_a_kill() -> Evidence:
    e = b.sparse(4)
    e.processes.pop()
    e.cgroup = CgroupFacts(memory_events={"oom_kill": 1})
    return e


@case("V05 wedged beside ours", "kind of D5", first="GPU_WEDGED", never=HEALTHY)
def gpu_of_a_killed_run_stops_a_new_one() -> Evidence:
    e = b.sparse(2)
    e.gpus = [GpuFacts(0, 100, 600, 120.0, 600.0, processes_known=True), GpuFacts(1, 0, 9000, processes_known=True)]
    e.gpus[1].processes = [GpuProcess(2001, 9000, "sglang::schedul", ours=True)]
    return e


@case("V06 container hides pids", "look-alike of D5", first="KERNEL_SPIN PARENT_WAITS_READY P2P_BLOCKED",
      never=HEALTHY | {"GPU_WEDGED"})  # fmt: skip
def nvidia_smi_lists_no_process_in_a_container() -> Evidence:
    e = b.sparse(2)
    for n in range(2):
        b.spin_alone(e, n)
    e.gpus = [GpuFacts(n, 100, 600, 120.0, 600.0, processes_known=True) for n in range(2)]
    return e


@case("V07 disk of a healthy one", "look-alike of F10", first="IDLE_OK", also="DISK_FULL", never=HANGS)
def healthy_server_on_a_full_disk() -> Evidence:
    e = b.server(2)
    b.serving(e)
    e.disks = [DiskFacts("log", "/srv", 0, 10**12, 10**6, "ext4")]
    return e


@case("V08 disk was full", "look-alike of F10", first="PARENT_WAITS_READY", also="DISK_FULL", never=HEALTHY, rank=0)
def disk_that_has_space_again() -> Evidence:
    e = b.sparse(1)
    b.spin_alone(e, 0)
    e.log.troubles = {"disk_full": "OSError: [Errno 28] No space left on device"}
    e.disks = [DiskFacts("log", "/srv", 10**11, 10**12, 10**6, "ext4")]
    return e


@case("V09 absent", "kind of S2", first="MISSING_RANK COLLECTIVE_DIVERGED", never=HEALTHY | {"UNKNOWN"}, rank=1)
def one_of_two_waits_for_something_of_its_own() -> Evidence:
    e = b.unanswering(2)
    for p in b.all_ranks(e):
        b.blocked_in(p, "futex_do_wait", "202 0x1")
    event = ["Condition.wait (threading.py:327)", "Event.wait (threading.py:629)", "hook (plugin.py:9)"]
    b.stacks(e, {0: ["all_reduce (distributed_c10d.py:3)", "forward (m.py:2)"], 1: event})
    return e


@case("V10 looks for requests", "look-alike of S2", first="UNKNOWN API_LOOP_BLOCKED",
      never=HEALTHY | {"MISSING_RANK", "COLLECTIVE_DIVERGED", "RANK_SPIN"})  # fmt: skip
def first_rank_looks_for_requests_and_the_other_waits_for_it() -> Evidence:
    e = b.unanswering(2)
    for p in b.all_ranks(e):
        b.poll_idle(p)
    waits = ["broadcast (distributed_c10d.py:3)", "broadcast_pyobj (common.py:1455)", "recv_requests (scheduler.py:9)"]
    b.stacks(e, {0: ["recv_pyobj (zmq/sugar/socket.py:990)", *b.RECV_REQUESTS], 1: waits})
    return e


@case("V11 launcher reads", "kind of S2", first="RANK_SPIN", never=HEALTHY, rank=1)
def launcher_pages_in_a_module_while_a_rank_spins() -> Evidence:
    e = b.unanswering(2)
    b.launcher(e).read_bytes_delta = 2_000_000
    b.spin(b.rank(e, 1), cpu=0.34)
    b.blocked_in(b.rank(e, 0), "futex_do_wait", "202 0x1")
    return e


@case("V12 two of eight GPUs", "kind of D14", first="KERNEL_SPIN", never=HEALTHY | {"P2P_BLOCKED"})
def server_uses_the_last_two_gpus() -> Evidence:
    e = b.unanswering(2)
    b.wait_for_gpu(e, 130.0, 700.0, 70_000)
    mine = [GpuFacts(n, 100, 70_000, 130.0, 700.0) for n in (6, 7)]
    e.gpus = [*(GpuFacts(n, 0, 5, 70.0, 700.0) for n in range(6)), *mine]
    return e


@case("V13 second node's GPUs", "kind of S2", first="PARENT_WAITS_READY", never=HEALTHY | {"KERNEL_SPIN"}, rank=5)
def gpu_of_a_rank_of_the_second_node_is_idle() -> Evidence:
    e = b.server(4)
    e.target.ranks, e.target.nodes, e.target.node_rank = 8, 2, 1
    for p in b.all_ranks(e):
        p.rank = (p.rank or 0) + 4
        p.label = f"TP{p.rank}"
        b.spin(p, user=0.7)
    b.at_phase(e, "kv_pool", *b.AFTER_WEIGHTS)
    b.gpus(e, 100, 0, 100, 100)
    return e


@case("V14 other tenant computes", "kind of D14", first="KERNEL_SPIN", never=HEALTHY)
def gpu_of_another_tenant_is_at_full_power() -> Evidence:
    e = b.unanswering(1)
    b.wait_for_gpu(e, 130.0, 700.0, 70_000)
    e.gpus[0].processes, e.gpus[0].processes_known = [GpuProcess(200, 70_000, "sglang::schedul", ours=True)], True
    e.gpus.append(GpuFacts(1, 100, 60_000, 660.0, 700.0, processes_known=True))
    e.gpus[1].processes = [GpuProcess(9, 60_000, "python3")]
    return e
