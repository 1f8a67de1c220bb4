"""Part Q: a blind set, written from the mechanisms alone: servers that start, load, compile and capture."""

from __future__ import annotations

from cases import tree as t
from cases.table import DEAD, HANGS, HEALTHY, case
from fleetdump.agent.evidence_host import (
    DiskFacts,
    GpuFacts,
    LockFacts,
    LockFile,
)
from fleetdump.agent.evidence_process import (
    PipeEnd,
    SocketFacts,
    Stack,
    SyscallCount,
    ThreadFacts,
    Trace,
)
from fleetdump.agent.evidence_types import Evidence


# ------------------------------------------------------------------ launcher and ranks
@case("Q01 gone behind another", "kind of A1", first="PARENT_WAITS_DEAD_RANK", never=HEALTHY, rank=3)
def launcher_reads_one_pipe_while_another_rank_is_gone() -> Evidence:
    e = t.sglang(4, "jit")
    t.sleep(t.head(e), t.PIPE, 28)
    t.lose(e, 3)
    e.processes[0].pipes = [PipeEnd(28, 70_001, "r", [t.pid_of(1)])]
    return e


@case("Q02 aborted", "kind of row 15", first="PARENT_WAITS_DEAD_RANK RANK_CRASHED", never=HEALTHY, rank=2)
def a_zombie_that_aborted_before_the_port_opened() -> Evidence:
    e = t.sglang(6, "capture", (*t.LOADED, "capture begin"))
    gone = t.rank(e, 2)
    gone.state = gone.state_before = "Z"
    gone.exit_signal, gone.main = 6, None
    return e


@case("Q03 container limit", "kind of A1", first="OOM_KILLED", also="PARENT_WAITS_DEAD_RANK", never=HEALTHY)
def kernel_log_names_a_rank_of_ours() -> Evidence:
    e = t.sglang(2, "weights", t.LOADED[:3])
    t.lose(e, 1)
    line = f"[81234.5] Memory cgroup out of memory: Killed process {t.pid_of(1)} (sglang::schedul) total-vm:912345678kB"
    e.memory.oom_lines, e.memory.oom_kills = [line], 3
    e.kernel_log = [line]
    return e


@case("Q04 vLLM workers gone", "kind of A5", first="OOM_KILLED", never=HEALTHY)
def engine_core_was_killed_while_compilers_ran() -> Evidence:
    e = t.vllm(1)
    e.processes = e.processes[:1]
    e.memory.oom_kills = 1
    e.memory.oom_lines = ["Out of memory: Killed process 31001 (VLLM::EngineCor) anon-rss:240000000kB"]
    e.log.tail = ["RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): {}"]
    return e


@case("Q05 end of file never", "kind of row 17", first="PIPE_EOF_IMPOSSIBLE", never=HEALTHY)
def launcher_holds_the_only_writing_end_itself() -> Evidence:
    e = t.sglang(2, "kv_pool")
    t.sleep(t.head(e), t.PIPE, 27)
    t.head(e).pipes = [PipeEnd(27, 70_000, "r", [], own_writer=True)]
    return e


@case("Q06 late rank of six", "kind of H1", first="PARENT_WAITS_READY", never=HEALTHY | DEAD, rank=5)
def one_rank_burns_in_a_hook_that_was_patched_in() -> Evidence:
    e = t.sglang(6, "kv_pool")
    for p in t.ranks_of(e):
        t.sleep(p, t.EPOLL)
    t.burn(t.rank(e, 5))
    gloo = ["barrier (torch/distributed/distributed_c10d.py:4900)", "init_cuda_graphs (model_runner.py:1700)"]
    t.dump(
        e,
        {**dict.fromkeys(range(6), gloo), 5: ["collect (probe_hooks.py:18)", "load_model (model_runner.py:6)"]},
        busy=[5],
    )
    t.cards(e, [0] * 6, 140.0)
    return e


@case("Q07 late rank, /proc alone", "kind of H8", first="PARENT_WAITS_READY", never=HEALTHY | DEAD, rank=0)
def rank_zero_burns_and_nobody_may_trace() -> Evidence:
    e = t.sglang(3, "http")
    for p in t.ranks_of(e):
        t.sleep(p, t.EPOLL)
    t.burn(t.rank(e, 0))
    e.probes = []
    return e


@case("Q08 late rank sleeps", "kind of row 16", first="PARENT_WAITS_READY MISSING_RANK", never=HEALTHY | DEAD, rank=1)
def one_rank_has_fewer_marks_and_sleeps() -> Evidence:
    e = t.sglang(4, "jit", (*t.LOADED, "kv cache", "kv pool end"))
    e.log.ranks[1].phase, e.log.ranks[1].marks = "kv_pool", list(t.LOADED)
    for p in t.ranks_of(e):
        t.sleep(p, t.EPOLL)
    t.sleep(t.rank(e, 1), t.SLEEP)
    return e


@case("Q09 import on a dead share", "kind of A13", first="IMPORT_STALL REMOTE_FS_HANG", never=HEALTHY | DEAD)
def import_sleeps_in_the_kernel_on_a_share() -> Evidence:
    e = t.sglang(1, "imports", ())
    e.processes = e.processes[:1]
    e.log.ranks, e.log.phase = [], ""
    t.disk(t.head(e), "rpc_wait_bit_killable", "__rpc_execute", "nfs4_do_call_sync", "nfs_getattr", "vfs_statx")
    e.stacks = [Stack(t.HEAD, "launcher", "", "idle", ["_path_stat (<frozen importlib._bootstrap_external>:147)"])]
    e.deep = True
    return e


@case("Q10 import asks the network", "kind of A13", first="IMPORT_STALL HUB_BLOCKED", never=HEALTHY | DEAD)
def import_connects_to_somewhere_that_does_not_answer() -> Evidence:
    e = t.sglang(1, "imports", ())
    e.processes = e.processes[:1]
    e.log.ranks, e.log.phase, e.log.bytes, e.log.lines = [], "", 0, 0
    t.sleep(t.head(e), ("inet_stream_connect", "42 0x5 0x7f 0x10"), 5)
    t.head(e).sockets = [SocketFacts(5, "SYN_SENT", "10.8.0.4:51000", "198.51.100.80:443")]
    frames = ["create_connection (socket.py:850)", "<module> (telemetry/__init__.py:3)",
              "_find_and_load (<frozen importlib._bootstrap>:1360)"]  # fmt: skip
    e.stacks, e.deep = [Stack(t.HEAD, "launcher", "", "idle", frames)], True
    return e


# ------------------------------------------------------------------ loading
@case("Q11 vLLM over NFS", "kind of B4", first="LOADING_SLOW", never=HANGS | DEAD)
def workers_fault_pages_in_over_nfs() -> Evidence:
    e = t.vllm(4, quiet=1500.0)
    for p in t.ranks_of(e):
        t.disk(p, "folio_wait_bit_common", "filemap_fault", "nfs_file_fault")
        p.majflt_delta, p.read_bytes_delta, p.rchar_delta = 2100, 14 << 20, 300
    e.disks = [DiskFacts("model", "/models/x", 1 << 40, 1 << 42, -1, "nfs4")]
    e.log.tail = ["Loading safetensors checkpoint shards:  12% Completed | 19/163 [14:02<1:46:00]"]
    return e


@case("Q12 object store", "kind of B7", first="LOADING_SLOW", never=HANGS | DEAD, phase="weights")
def shards_are_read_through_fuse() -> Evidence:
    e = t.sglang(2, "weights", t.LOADED[:3], quiet=300.0)
    for p in t.ranks_of(e):
        t.sleep(p, ("request_wait_answer", "0 0x20 0x7f 0x1000000"), 32)
        p.rchar_delta = 31 << 20
    e.disks = [DiskFacts("model", "/mnt/w", 1 << 50, 1 << 50, -1, "fuse.juicefs")]
    return e


@case("Q13 from the page cache", "kind of B6", first="LOADING_SLOW BUSY_NOT_HUNG", never=HANGS | DEAD)
def weights_go_to_the_gpu_and_no_disk_is_read() -> Evidence:
    e = t.sglang(2, "weights", t.LOADED[:3], quiet=200.0)
    for p in t.ranks_of(e):
        t.burn(p, 0.8, 0.4, 12.0)
    e.gpus = [GpuFacts(n, 1, 61_000, 180.0, 1000.0, 180_000, memory_delta=2900) for n in range(2)]
    return e


@case("Q14 mount lost", "kind of row 3", first="REMOTE_FS_HANG", never=HEALTHY | DEAD | {"LOADING_SLOW"})
def file_server_went_away_while_it_loaded() -> Evidence:
    e = t.sglang(8, "weights", t.LOADED[:3], quiet=2400.0)
    for p in t.ranks_of(e):
        t.disk(p, "nfs_wait_bit_killable", "nfs_wait_on_request", "nfs_lock_and_join_requests")
    e.kernel_log = ["[99001.1] nfs: server store7.example not responding, still trying"]
    e.disks = [DiskFacts("model", "/models", 0, 0, -1, "nfs")]
    return e


@case("Q15 ceph lost", "kind of row 3", first="REMOTE_FS_HANG", never=HEALTHY | DEAD | {"LOADING_SLOW"})
def ranks_sleep_in_ceph_without_a_byte() -> Evidence:
    e = t.sglang(2, "weights", t.LOADED[:3], quiet=1900.0)
    for p in t.ranks_of(e):
        t.disk(p, "ceph_read_iter", "ceph_get_caps", "ceph_wait_on_async_create")
    return e


@case("Q16 reclaim", "kind of B1", first="LOADER_DEADLOCK", never=HEALTHY | DEAD | {"LOADING_SLOW"})
def loader_fills_the_memory_and_everything_sleeps() -> Evidence:
    e = t.sglang(4, "weights", t.LOADED[:3], quiet=4000.0, uptime=4300.0)
    for p in t.ranks_of(e):
        p.rss = 230 << 30
    e.memory.available, e.memory.total = 2 << 30, 960 << 30
    e.memory.pressure_some, e.memory.pressure_full = 71.0, 52.0
    return e


@case("Q17 half-closed download", "kind of row 28", first="HUB_BLOCKED", never=HEALTHY | DEAD)
def download_waits_for_a_peer_that_hung_up() -> Evidence:
    e = t.sglang(1, "imports", ())
    e.log.phase = ""
    p = t.rank(e, 0)
    t.sleep(p, POLL_ONE, 41)
    p.sockets = [SocketFacts(41, "CLOSE_WAIT", "10.8.0.4:40222", "203.0.113.77:443")]
    t.dump(e, {0: ["read (ssl.py:1100)", "stream (urllib3/response.py:900)", "http_get "
                                                                             "(huggingface_hub/file_download.py:480)",
                   "snapshot_download (huggingface_hub/_snapshot_download.py:300)"]})  # fmt: skip
    return e


POLL_ONE = ("do_sys_poll", "7 0x7f01 0x1 0x2710")


@case("Q18 hub lock of a dead host", "kind of F7", first="HUB_LOCK", never=HEALTHY | DEAD)
def download_lock_on_a_share_is_nobodys() -> Evidence:
    e = t.vllm(2, quiet=4.0)
    lock = "/share/hf/hub/.locks/models--m/9f3c.lock"
    e.log.waits_for_lock, e.log.repeated, e.log.repeated_line = lock, 44, f"Still waiting to acquire lock on {lock}"
    e.log.growth, e.log.news_seconds = 240, 700.0
    t.sleep(t.head(e), t.SLEEP)
    e.lock_files = [LockFile(lock, 90_000.0, use="hub", fstype="nfs4")]
    return e


# ------------------------------------------------------------------ compiling and locks
@case("Q19 ninja and gcc", "kind of C1", first="JIT_COMPILING", never=HANGS | DEAD)
def host_compiler_builds_an_extension() -> Evidence:
    e = t.sglang(2, "kv_pool", quiet=700.0)
    e.processes += [t.child(40_000 + n, "compiler", "cc1plus", "R", ppid=39_999, cpu=0.98) for n in range(6)]
    e.processes.append(t.child(39_999, "compiler", "ninja", ppid=t.pid_of(0)))
    return e


@case("Q20 NVRTC inside", "kind of C9", first="JIT_COMPILING", never=HANGS | DEAD | {"RANK_SPIN"}, rank=2)
def one_rank_compiles_in_its_own_process_and_others_wait() -> Evidence:
    e = t.served(t.sglang(4, "serving"), 0, 200, running=7)
    e.log.quiet_seconds = 70.0
    for p in t.ranks_of(e):
        t.sleep(p, t.EPOLL)
    t.burn(t.rank(e, 2), user=0.9)
    frames = ["compile (cuda/core/_program.py:400)", "build (deep_gemm/jit/compiler.py:150)", "forward (fp8.py:90)"]
    gloo = ["broadcast (distributed_c10d.py:2700)", "recv_requests (scheduler.py:1200)"]
    t.dump(e, {**dict.fromkeys(range(4), gloo), 2: frames}, busy=[2])
    e.stacks[2].native = ["nvrtcCompileProgram (libnvrtc.so.13)", *frames]
    return e


@case("Q21 inductor workers", "kind of C1", first="JIT_COMPILING", never=HANGS | DEAD)
def torch_compile_waits_for_its_pool() -> Evidence:
    e = t.sglang(2, "capture", (*t.LOADED, "capture begin"), quiet=500.0)
    pool = [t.child(45_000 + n, "compile_worker", "python3.12", "R", ppid=44_999, cpu=0.9) for n in range(4)]
    for p in pool:
        t.burn(p, 0.9)
    e.processes += pool
    t.dump(e, dict.fromkeys(range(2), ("wait (threading.py:359)", "result (concurrent/futures/_base.py:451)",
                                       "wait (torch/_inductor/async_compile.py:600)")))  # fmt: skip
    return e


@case("Q22 baton of yesterday", "kind of C5", first="JIT_STALE_LOCK", never=HEALTHY | DEAD | {"JIT_COMPILING"})
def ranks_wait_for_a_baton_that_nobody_carries() -> Evidence:
    e = t.sglang(4, "kv_pool", quiet=5000.0, uptime=5200.0)
    for p in t.ranks_of(e):
        t.sleep(p, t.SLEEP, voluntary=10.0)
    t.dump(
        e,
        dict.fromkeys(
            range(4), ("wait (torch/utils/file_baton.py:58)", "_jit_compile (torch/utils/cpp_extension.py:2100)")
        ),
    )
    e.lock_files = [LockFile("/home/u/.cache/torch_extensions/py312_cu130/moe/lock", 86_000.0)]
    return e


@case("Q23 soft lock, no stacks", "kind of C5", first="JIT_STALE_LOCK", never=HEALTHY | DEAD | {"JIT_COMPILING"})
def one_rank_polls_for_a_lock_file_that_only_exists() -> Evidence:
    e = t.sglang(2, "jit", (*t.LOADED, "kv cache", "kv pool end", "jit"), quiet=3000.0, uptime=3300.0)
    for p in t.ranks_of(e):
        t.sleep(p, t.SLEEP, voluntary=20.0)
    e.lock_files = [LockFile("/root/.cache/flashinfer/0.4/90a/cached_ops/tmp/sampling.lock", 200_000.0)]
    return e


@case(
    "Q24 another job builds", "kind of row 12", first="LOCK_WAIT JIT_COMPILING", also="LOCK_WAIT", never=HEALTHY | DEAD
)
def cache_lock_is_held_by_another_server() -> Evidence:
    e = t.sglang(2, "kv_pool", quiet=800.0)
    for p in t.ranks_of(e):
        t.sleep(p, ("flock_lock_inode_wait", "73 0x33 0x2"), 51)
    path = "/home/u/.cache/flashinfer/build.lock"
    e.locks = [LockFacts("FLOCK", 5551, 77_001, t.pid_of(n), path, "xfs") for n in range(2)]
    e.lock_files = [LockFile(path, 900.0, 77_001, locked=True)]
    return e


@case("Q25 lock manager", "kind of C7", first="LOCK_WAIT", never=HEALTHY | DEAD)
def lock_on_a_share_is_never_granted() -> Evidence:
    e = t.sglang(1, "kv_pool", quiet=1800.0)
    t.sleep(t.rank(e, 0), ("nlmclnt_block", "72 0x33 0x7 0x7ffe"), 51)
    e.locks = [LockFacts("POSIX", 5552, 0, t.pid_of(0), "/nfs/home/u/.triton/lock", "nfs")]
    return e


@case("Q26 lock against barrier", "kind of row 13", first="JIT_COLLECTIVE_CROSSLOCK", never=HEALTHY | DEAD)
def holder_of_the_build_lock_waits_for_those_who_want_it() -> Evidence:
    e = t.sglang(4, "kv_pool", quiet=1200.0)
    for p in t.ranks_of(e):
        t.sleep(p, ("locks_lock_inode_wait", "73 0x40 0x2"), 64)
    t.sleep(t.rank(e, 3), t.EPOLL)
    e.locks = [LockFacts("FLOCK", 990, t.pid_of(3), t.pid_of(n), "/tmp/jit/ops.lock", "ext4") for n in range(3)]
    wants = ["flock (filelock/_unix.py:55)", "build_and_load (flashinfer/jit/core.py:260)"]
    t.dump(e, {**dict.fromkeys(range(3), wants), 3: ["monitored_barrier (distributed_c10d.py:5000)", "warm (x.py:4)"]})
    return e


# ------------------------------------------------------------------ capture
@case("Q27 capture stands", "kind of C12", first="GRAPH_CAPTURE", never=HEALTHY | DEAD, phase="capture")
def every_rank_sleeps_in_the_capture() -> Evidence:
    e = t.sglang(2, "capture", (*t.LOADED, "kv pool end", "capture begin"), quiet=2500.0, uptime=2900.0)
    t.dump(
        e,
        dict.fromkeys(
            range(2), ("register_graph_buffers (custom_all_reduce.py:260)", "capture (cuda_graph_runner.py:500)")
        ),
    )
    t.cards(e, [0, 0], 140.0)
    return e


@case(
    "Q28 capture moves", "look-alike of C11", first="BUSY_NOT_HUNG", never=HANGS | DEAD | {"UNKNOWN"}, phase="capture"
)
def capture_bar_advances_slowly() -> Evidence:
    e = t.sglang(4, "capture", (*t.LOADED, "capture begin"), quiet=2.0)
    e.log.news, e.log.growth = 1, 90
    for p in t.ranks_of(e):
        t.burn(p, 0.9, 0.7, 40.0)
    t.cards(e, [12, 15, 9, 14], 260.0)
    return e


@case("Q29 capture, one behind", "kind of S8", first="PARENT_WAITS_READY MISSING_RANK "
                                                     "COLLECTIVE_DIVERGED GRAPH_CAPTURE",
      never=HEALTHY | DEAD, rank=3, phase="capture")  # fmt: skip
def one_rank_burns_inside_the_capture() -> Evidence:
    e = t.sglang(4, "capture", (*t.LOADED, "capture begin"), quiet=400.0)
    for p in t.ranks_of(e):
        t.sleep(p, t.EPOLL)
    t.burn(t.rank(e, 3))
    barrier = ["barrier (parallel_state.py:1500)", "capture_one_batch_size (cuda_graph_runner.py:620)"]
    t.dump(e, {**dict.fromkeys(range(4), barrier), 3: ["forward (my_model.py:77)", barrier[1]]}, busy=[3])
    e.traces = [Trace(t.pid_of(0), "TP0", 2.0, [SyscallCount("sglang::schedul", True, "epoll_wait", 2, "epoll")])]
    return e


@case("Q30 just started", "look-alike of A13", first="BUSY_NOT_HUNG", never=HANGS | DEAD | {"UNKNOWN", "IMPORT_STALL"})
def half_a_minute_of_imports() -> Evidence:
    e = t.sglang(1, "imports", (), quiet=20.0, uptime=24.0)
    e.processes = e.processes[:1]
    e.log.ranks, e.log.phase = [], ""
    t.burn(t.head(e), 0.9, 0.8, 60.0)
    t.head(e).rchar_delta = 3 << 20
    return e


@case("Q31 MPI memory", "look-alike of B1", first="BUSY_NOT_HUNG LOADING_SLOW", never=HANGS | DEAD | {"UNKNOWN"})
def pinned_pool_is_filled() -> Evidence:
    e = t.sglang(2, "kv_pool", quiet=240.0, uptime=500.0)
    for p in t.ranks_of(e):
        t.burn(p, 0.99, 0.05)
        p.rss_delta, p.rss = 6 << 30, 200 << 30
    return e


@case("Q32 threads load", "look-alike of B1", first="LOADING_SLOW", never=HANGS | DEAD, phase="weights")
def main_threads_sleep_and_loader_threads_read() -> Evidence:
    e = t.sglang(2, "weights", t.LOADED[:3], quiet=90.0, uptime=160.0)
    for p in t.ranks_of(e):
        p.read_bytes_delta, p.cpu = 2 << 30, 1.4
        p.threads = [
            ThreadFacts(p.pid + 900, "python3.12", "D", 0.6, 0.9, 0.1, 200.0, "folio_wait_bit_common", "0 0x1")
        ]
    return e
