"""Part X: further cases of the same kinds before the port opens (processes, weights, compilers, locks), other names."""

from __future__ import annotations

from cases import builder as b
from cases.table import DEAD, HANGS, HEALTHY, case
from fleetdump.agent.evidence_host import DiskFacts, LockFacts, LockFile
from fleetdump.agent.evidence_process import (
    SocketFacts,
    Stack,
    ThreadFacts,
)
from fleetdump.agent.evidence_types import Evidence


@case("X01 vLLM worker gone", "kind of A1", first="PARENT_WAITS_DEAD_RANK", never=HEALTHY | {"IMPORT_STALL"}, rank=2)
def engine_reads_the_pipe_of_a_dead_worker() -> Evidence:
    e = b.vllm_starting()
    b.lose(e, 2)
    engine = e.processes[-1]
    engine.pipes[2].peers = []
    b.blocked_in(engine, "anon_pipe_read", "0 0x14 0x7f 0x4", 20)
    return e


@case("X02 second node", "kind of A1", first="PARENT_WAITS_DEAD_RANK", never=HEALTHY | {"MISSING_RANK"}, rank=11)
def rank_of_the_second_node_had_a_segmentation_fault() -> Evidence:
    e = b.server(8)
    e.target.ranks, e.target.nodes, e.target.node_rank = 16, 2, 1
    for p in b.all_ranks(e):
        p.rank = (p.rank or 0) + 8
        p.label = f"TP{p.rank}"
    b.at_phase(e, "init", "init begin")
    dead = b.rank(e, 11)
    dead.state, dead.role, dead.rank, dead.label, dead.exit_signal = "Z", "other", None, "", 11
    b.launcher(e).main = ThreadFacts(b.LAUNCHER, "python", "S", wchan="do_epoll_wait", syscall="232 0x9")
    return e


@case("X03 late reader", "kind of B2", first="LOADING_SLOW", never=HANGS | DEAD)
def seven_ranks_wait_for_one_that_still_reads() -> Evidence:
    e = b.server(8)
    late = b.rank(e, 3)
    e.log.ranks[3].phase, e.log.ranks[3].marks = "weights", ["init begin", "init end", "weights begin"]
    late.state = late.state_before = "D"
    late.main = ThreadFacts(late.pid, late.name, "D", wchan="folio_wait_bit_common", syscall="running", voluntary=400.0)
    late.read_bytes_delta, late.majflt_delta = 60_000_000, 3600
    return e


@case("X04 container limit", "kind of A5", first="OOM_KILLED", never=HEALTHY | {"NOT_RUNNING"})
def whole_tree_killed_inside_a_container() -> Evidence:
    e = b.server(4)
    b.dead(e)
    e.memory.oom_kills = 3
    return e


@case(
    "X05 cgroup line", "kind of A1", first="OOM_KILLED PARENT_WAITS_DEAD_RANK", also="OOM_KILLED", never=HEALTHY, rank=1
)
def kernel_names_the_control_group() -> Evidence:
    e = b.server(2)
    b.lose(e, 1)
    line = "Memory cgroup out of memory: Killed process 201 (sglang::schedul) total-vm:98kB, anon-rss:95kB"
    e.memory.oom_lines = [f"[912.4] {line}"]
    e.kernel_log = list(e.memory.oom_lines)
    return e


@case("X06 vLLM bus error", "kind of F1", first="SHM_SMALL", never=HEALTHY, rank=0)
def worker_of_vllm_died_of_sigbus() -> Evidence:
    e = b.vllm_starting(2)
    dead = b.rank(e, 0)
    dead.state, dead.role, dead.rank, dead.label, dead.exit_signal = "Z", "other", None, "", 7
    e.disks.append(DiskFacts("shm", "/dev/shm", 0, 64 << 20, 10**5, "tmpfs"))
    return e


@case("X07 inner child", "look-alike of A3", first="IDLE_OK", never=HANGS | DEAD | {"UNKNOWN"})
def zombie_that_is_no_rank() -> Evidence:
    e = b.server(2)
    b.serving(e)
    e.processes.append(b.process(390, "other", ppid=200, name="python3", state="Z", state_before="Z"))
    return e


@case("X08 compile workers", "look-alike of C4", first="IDLE_OK", never=HANGS | {"JIT_COMPILING"})
def pool_of_compile_workers_warms_itself_up() -> Evidence:
    e = b.server(2)
    b.serving(e)
    e.processes += [b.process(400 + n, "compile_worker", ppid=200, cpu=1.0 if n < 2 else 0.0) for n in range(66)]
    return e


@case("X09 fuse moves", "kind of B7", first="LOADING_SLOW", never=HANGS | {"REMOTE_FS_HANG", "DRIVER_D_STATE"})
def object_store_mount_is_slow() -> Evidence:
    e = b.server(8)
    b.at_phase(e, "weights", "init begin", "init end", "weights begin")
    e.disks.append(DiskFacts("model", "/mnt/models", 1 << 50, 1 << 50, -1, "fuse.juicefs"))
    for p in b.all_ranks(e):
        b.disk_sleep(p, "request_wait_answer", "fuse_readahead")
        p.read_bytes_delta = 9_000_000
    return e


@case("X10 fuse dead", "kind of row 3", first="REMOTE_FS_HANG", never=HEALTHY | {"LOADING_SLOW", "DRIVER_D_STATE"})
def daemon_behind_a_mount_has_died() -> Evidence:
    e = b.server(8)
    b.at_phase(e, "weights", "init begin", "init end", "weights begin")
    e.disks.append(DiskFacts("model", "/mnt/models", 1 << 50, 1 << 50, -1, "fuse.juicefs"))
    for p in b.all_ranks(e):
        b.disk_sleep(p, "request_wait_answer", "fuse_simple_request")
    return e


@case("X11 Lustre dead", "kind of row 3", first="REMOTE_FS_HANG", never=HEALTHY | {"LOADING_SLOW", "DRIVER_D_STATE"})
def lustre_server_is_gone() -> Evidence:
    e = b.server(4)
    b.at_phase(e, "weights", "init begin", "init end", "weights begin")
    e.disks.append(DiskFacts("model", "/lustre/m", 1 << 50, 1 << 50, -1, "lustre"))
    for p in b.all_ranks(e):
        b.disk_sleep(p, "cl_sync_io_wait", "ll_readpage")
    e.kernel_log = ["[950.0] LustreError: 11-0: fs-OST0001-osc: Communicating with 192.0.2.9@o2ib, operation failed"]
    return e


@case("X12 cached reads", "kind of B6a", first="LOADING_SLOW", never=HANGS)
def streamer_reads_from_the_page_cache() -> Evidence:
    e = b.server(2)
    b.at_phase(e, "weights", "init begin", "init end", "weights begin")
    b.rank(e, 0).rchar_delta = 2_000_000_000
    return e


@case("X13 memory grows", "kind of B6a", first="LOADING_SLOW BUSY_NOT_HUNG", never=HANGS)
def weights_are_made_up_in_memory() -> Evidence:
    e = b.server(2)
    b.at_phase(e, "weights", "init begin", "init end", "weights begin")
    for p in b.all_ranks(e):
        b.spin(p)
        p.rss_delta = 3_000_000_000
    return e


@case("X14 reclaim", "kind of B1", first="LOADER_DEADLOCK", never=HEALTHY | {"LOADING_SLOW", "DRIVER_D_STATE"})
def host_is_in_reclaim_while_loading() -> Evidence:
    e = b.server(4)
    b.at_phase(e, "weights", "init begin", "init end", "weights begin")
    for p in b.all_ranks(e):
        p.rss = 400 << 30
    e.memory.total, e.memory.available, e.memory.pressure_full = 2 << 40, 2 << 30, 85.0
    return e


@case("X15 nvcc", "kind of C1", first="JIT_COMPILING", never=HANGS | {"IMPORT_STALL"})
def worker_of_vllm_runs_nvcc() -> Evidence:
    e = b.vllm_starting()
    e.processes += [b.process(900 + n, "compiler", ppid=200 + n, cpu=0.97, name="cudafe++") for n in range(4)]
    return e


@case("X16 host compiler", "kind of C1", first="JIT_COMPILING", never=HANGS)
def c_compiler_of_the_host() -> Evidence:
    e = b.server(2)
    e.processes += [b.process(900, "compiler", ppid=201, cpu=0.93, name="cc1plus")]
    return e


@case("X17 compilers asleep", "look-alike of C1", first="PARENT_WAITS_READY UNKNOWN STOPPED_PROCESS LOCK_WAIT",
      never=HEALTHY | {"JIT_COMPILING"})  # fmt: skip
def compilers_that_do_nothing() -> Evidence:
    e = b.server(2)
    e.processes += [b.process(900, "compiler", ppid=201, cpu=0.0, name="cicc", state="T", state_before="T")]
    return e


@case("X18 soft lock", "kind of C5", first="JIT_STALE_LOCK", never=HEALTHY | {"LOCK_WAIT", "JIT_COMPILING"}, rank=1)
def soft_file_lock_of_last_week() -> Evidence:
    e = b.server(2)
    poll = ["acquire (filelock/_api.py:344)", "__enter__ (filelock/_api.py:376)", "build_and_load (jit/core.py:198)"]
    b.stacks(e, {0: ["barrier (distributed_c10d.py:4)", "init (runner.py:3)"], 1: poll})
    b.rank(e, 1).main = ThreadFacts(201, "x", "S", voluntary=20.0, wchan="hrtimer_nanosleep", syscall="230 0x1")
    e.lock_files = [LockFile("/cache/jit/sm90/gemm.lock", 500_000.0)]
    return e


@case("X19 other server", "kind of C7", first="LOCK_WAIT", never=HEALTHY | {"JIT_STALE_LOCK"}, rank=0)
def lock_held_by_another_server() -> Evidence:
    e = b.server(2)
    e.locks = [LockFacts("POSIX", 88, 7001, 200, "/root/.triton/cache/lock", "ext4")]
    b.blocked_in(b.rank(e, 0), "fcntl_setlk", "72 0x8 0x26", 8)
    return e


@case("X20 builder and waiters", "kind of C1", first="JIT_COMPILING",
      never=HANGS | {"LOCK_WAIT", "JIT_COLLECTIVE_CROSSLOCK"})  # fmt: skip
def one_rank_builds_and_three_wait_for_its_lock() -> Evidence:
    e = b.server(4)
    e.locks = [LockFacts("FLOCK", 77, 200, 200 + n, "/root/.cache/build.lock") for n in (1, 2, 3)]
    for n in (1, 2, 3):
        b.blocked_in(b.rank(e, n), "locks_lock_inode_wait", "73 0x5 0x2", 5)
    e.processes.append(b.process(900, "compiler", ppid=200, cpu=0.9, name="nvcc"))
    return e


@case("X21 vLLM cross lock", "kind of C8", first="JIT_COLLECTIVE_CROSSLOCK", never=HEALTHY, rank=0)
def worker_with_the_lock_waits_in_a_collective() -> Evidence:
    e = b.vllm_starting(2)
    e.locks = [LockFacts("FLOCK", 77, 201, 200, "/root/.cache/vllm/x.lock")]
    b.stacks(e, {0: ["acquire (filelock/_unix.py:40)", "get_lock (utils.py:4)"],
                 1: ["all_gather_object (distributed_c10d.py:3)", "profile_run (gpu_worker.py:9)"]})  # fmt: skip
    return e


@case("X22 torch.compile", "kind of C9", first="JIT_COMPILING", never=HANGS | {"RANK_SPIN"}, rank=0)
def inductor_compiles_in_the_rank_itself() -> Evidence:
    e = b.server(2)
    b.at_phase(e, "capture", "weights end", "kv pool end", "capture begin")
    b.spin(b.rank(e, 0))
    frames = ["codegen (torch/_inductor/scheduler.py:4100)", "compile_fx_inner (torch/_inductor/compile_fx.py:700)",
              "_compile (torch/_dynamo/convert_frame.py:900)", "forward (qwen3.py:300)"]  # fmt: skip
    b.stacks(e, {0: frames, 1: ["barrier (distributed_c10d.py:4)", "capture (runner.py:3)"]}, {0: "active+gil"})
    return e


@case("X23 NVRTC", "kind of C2", first="JIT_COMPILING", never=HANGS | {"RANK_SPIN"})
def kernels_are_compiled_by_a_library() -> Evidence:
    e = b.server(2)
    b.at_phase(e, "jit", "weights end", "kv pool end", "jit")
    for n in range(2):
        b.spin(b.rank(e, n))
    frames = ["compile (deep_gemm/jit/compiler.py:150)", "warmup (w.py:7)"]
    b.stacks(e, dict.fromkeys(range(2), frames), dict.fromkeys(range(2), "active"))
    for stack in e.stacks:
        stack.native = ["nvrtcCompileProgram (libnvrtc.so.12)", "compile (deep_gemm/jit/compiler.py:150)"]
    return e


@case("X24 capture moves", "look-alike of C11", first="BUSY_NOT_HUNG", never=HANGS)
def capture_that_advances() -> Evidence:
    e = b.server(8)
    b.at_phase(e, "capture", "weights end", "kv pool end", "capture begin")
    e.log.tail = ["Capturing batches (bs=96 avail_mem=3.1 GB):  48%|####8     | 25/52 [00:31<00:36,  1.3s/it]"]
    e.log.news, e.log.growth, e.log.quiet_seconds = 4, 300, 1.0
    for n in range(8):
        b.spin(b.rank(e, n))
    return e


@case("X25 just started", "look-alike of A13", first="BUSY_NOT_HUNG", never=HANGS | {"IMPORT_STALL", "UNKNOWN"})
def server_of_three_seconds() -> Evidence:
    e = b.server(1, phase="imports", lines=2, bytes=200)
    e.log.ranks, e.processes, e.watch, e.uptime, e.log.quiet_seconds = [], [b.launcher(e)], None, 3.0, 2.0
    b.spin(b.launcher(e), cpu=0.8)
    return e


@case("X26 download goes on", "look-alike of F6", first="LOADING_SLOW BUSY_NOT_HUNG",
      never=HANGS | {"HUB_BLOCKED", "IMPORT_STALL", "HUB_LOCK"})  # fmt: skip
def download_receives_bytes() -> Evidence:
    e = b.server(1, phase="imports")
    e.log.ranks, e.processes, e.watch = [], [b.launcher(e)], None
    b.launcher(e).sockets = [SocketFacts(9, "ESTABLISHED", "192.0.2.10:40000", "203.0.113.5:443")]
    b.launcher(e).rchar_delta = b.launcher(e).wchar_delta = 50_000_000
    return e


@case("X27 half-closed", "kind of F6", first="HUB_BLOCKED", never=HEALTHY | {"IMPORT_STALL"})
def content_network_closed_and_nobody_noticed() -> Evidence:
    e = b.server(1, phase="imports")
    e.log.ranks, e.processes, e.watch = [], [b.launcher(e)], None
    b.launcher(e).sockets = [SocketFacts(9, "CLOSE_WAIT", "192.0.2.10:40000", "203.0.113.5:443")]
    frames = ["read (ssl.py:1)", "iter_content (requests/models.py:9)", "model_file_download (modelscope/hub/f.py:2)"]
    e.stacks = [Stack(b.LAUNCHER, "launcher", "", "idle", frames)]
    return e


@case("X28 model hub lock", "kind of F7", first="HUB_LOCK", never=HEALTHY | {"HUB_BLOCKED", "JIT_STALE_LOCK"})
def lock_of_another_hub() -> Evidence:
    e = b.server(1, phase="imports")
    e.log.ranks, e.processes, e.watch = [], [b.launcher(e)], None
    path = "/data/modelscope/.lock/models--org--m"
    e.lock_files = [LockFile(path, 7300.0, use="hub", fstype="ext4")]
    frames = ["acquire (filelock/_api.py:344)", "snapshot_download (modelscope/hub/snapshot_download.py:80)"]
    e.stacks = [Stack(b.LAUNCHER, "launcher", "", "idle", frames)]
    return e


@case("X29 own limit", "kind of C9", first="TIMEOUT_TOO_SHORT", never=HEALTHY | {"RANK_SPIN"})
def start_limit_ended_a_server_that_compiled() -> Evidence:
    e = b.server(8)
    b.at_phase(e, "jit", "weights end", "kv pool end", "jit")
    b.dead(e)
    e.log.tail = ["DeepGEMM JIT pre-compile:  71%|#######   | 11632/16384 [09:58<04:04, 19.4it/s]",
                  "Server did not become ready within 600 seconds"]  # fmt: skip
    e.log.troubles = {"startup_timeout": e.log.tail[1]}
    return e
