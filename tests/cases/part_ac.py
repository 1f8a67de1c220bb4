"""Part AC: kinds A to H by a third author who had not read the diagnosis.

Open ports, limits of the host, two causes at once.
"""

from __future__ import annotations

from cases import builder as b
from cases.table import HANGS, HEALTHY, case
from fleetdump.agent.evidence_engine import HttpProbe, PortFacts
from fleetdump.agent.evidence_host import DiskFacts, GpuFacts, GpuProcess, LockFile
from fleetdump.agent.evidence_process import SocketFacts, Stack, SyscallCount, ThreadFacts
from fleetdump.agent.evidence_types import Evidence

KIND = "kind of the one named"
GIB = 2**30


@case("blind E1 idle among old rubbish", KIND, first="IDLE_OK HEALTHY",
      never=HANGS | {"PROXY_WARMUP", "DISK_FULL", "RANK_CRASHED", "OOM_KILLED", "LOCK_WAIT", "HUB_LOCK"})  # fmt: skip
def e1() -> Evidence:
    e = b.server(8)
    b.serving(e)
    e.log.quiet_seconds, e.uptime = 9_000.0, 200_000.0
    e.proxy = {"http_proxy": "squid.example:3128", "no_proxy": "localhost"}
    e.lock_files = [
        LockFile("/root/.cache/flashinfer/90/cached_ops/tmp/x.lock", 260_000.0),
        LockFile("/root/.cache/huggingface/hub/.locks/models--o--m/e1.lock", 260_000.0, use="hub"),
    ]
    done = b.process(600, "compile_worker", ppid=203, name="python3", state="Z")
    e.processes.append(done)
    e.disks.append(DiskFacts("home", "/root", 9 * GIB, 1000 * GIB, 10**6, "ext4"))
    b.gpus(e, *[0] * 8)
    for n in range(8):
        b.trace(
            e,
            n,
            SyscallCount("sglang::schedul", True, "ppoll", 11_000),
            SyscallCount("sglang::schedul", True, "getpid", 11_000),
        )
    return e


@case("blind E2 proxy wants a password, environment hidden", KIND, first="PROXY_WARMUP", never=HEALTHY)
def e2() -> Evidence:
    e = b.server(1)
    b.listening(e, 503)
    e.target.host = "0.0.0.0"
    e.log.server_marks = ["http start", "http open"]
    e.log.quiet_seconds, e.uptime = 2.0, 300.0
    e.log.troubles = {
        "proxy_refused": "AssertionError: res=<Response [407]>, <title>ERROR: Cache Access Denied</title> squid.example"
    }
    e.log.repeated, e.log.repeated_line, e.log.growth = 40, "GET http://0.0.0.0:8000/model_info 407", 300
    b.poll_idle(b.rank(e, 0))
    b.launcher(e).sockets = [SocketFacts(31, "CLOSE_WAIT", "10.0.0.4:51111", "10.9.9.9:3128")]
    b.failed_probe(e, "environ", "Permission denied")
    b.gpus(e, 0)
    return e


@case(
    "blind E4 long prompts, health times out",
    KIND,
    first="BUSY_NOT_HUNG HEALTHY",
    never=HANGS | {"API_LOOP_BLOCKED", "KERNEL_SPIN"},
)
def e4() -> Evidence:
    e = b.server(4)
    b.serving(e)
    b.listening(e, 0, "timeout")
    e.log.ready, e.log.phase, e.log.running_requests = True, "serving", 2
    e.log.growth, e.log.news, e.log.forwards, e.log.quiet_seconds = 700, 3, 3, 1.5
    for p in b.all_ranks(e):
        b.spin(p, user=0.6)
    e.gpus = [GpuFacts(n, 100, 130_000, 655.0, 700.0) for n in range(4)]
    e.log.troubles = {
        "detokenizer_silent": "Health check failed. Server couldn't get a "
        "response from detokenizer for last 20 seconds. tic start time: 10:12:01"
    }
    return e


@case(
    "blind E5 schema in the engine core's pool",
    KIND,
    first="GRAMMAR_COMPILE",
    never=HANGS | {"API_LOOP_BLOCKED", "IDLE_OK"},
)
def e5() -> Evidence:
    e = b.vllm(2)
    engine = e.processes[-1]
    engine.cpu = 1.01
    engine.threads = [ThreadFacts(170, "ThreadPoolExec", "R", cpu=1.0, demand=1.0, user_share=1.0, syscall="running")]
    grammar = [
        "compile_json_schema (xgrammar/compiler.py:150)",
        "compile_grammar (backend_xgrammar.py:90)",
        "_async_create_grammar (structured_output/__init__.py:120)",
    ]
    e.stacks = [
        Stack(
            150,
            "engine",
            "",
            "idle",
            ["get (queue.py:171)", "_process_input_queue (core.py:800)"],
            active={"ThreadPoolExecutor-0_0": grammar},
        )
    ]
    e.deep = True
    b.gpus(e, 0, 0)
    e.log.running_requests, e.log.zero_statistics, e.log.quiet_seconds = 3, 8, 5.0
    e.http.append(HttpProbe("/v1/completions", 0, 6.0, "timeout"))
    return e


@case(
    "blind E7 scheduler walks its tree for ever",
    KIND,
    first="RANK_SPIN MISSING_RANK",
    never=HEALTHY | {"KERNEL_SPIN"},
    rank=0,
)
def e7() -> Evidence:
    e = b.unanswering(2)
    e.log.quiet_seconds, e.log.running_requests = 800.0, 6
    b.spin(b.rank(e, 0))
    other = b.rank(e, 1)
    other.cpu = 0.0
    b.blocked_in(other, "futex_wait_queue", "202 0x1 0x189")
    e.stacks = [
        Stack(
            200,
            "scheduler",
            "TP0",
            "active+gil",
            [
                "_match_prefix_helper (radix_cache.py:600)",
                "match_prefix (radix_cache.py:300)",
                "event_loop_normal (scheduler.py:750)",
            ],
        )
    ]
    e.deep = True
    b.failed_probe(e, "py-spy 201", "time limit")
    b.gpus(e, 0, 0)
    return e


@case("blind F1 bus error without a word", KIND, first="SHM_SMALL", never=HEALTHY | {"OOM_KILLED"})
def f1() -> Evidence:
    e = b.server(4)
    b.at_phase(e, "init", "init begin")
    b.silent(e, 400)
    b.died_of(b.rank(e, 3), 7)
    b.launcher(e).pipes[3].peers = []
    e.disks.append(DiskFacts("shm", "/dev/shm", 0, 64 * 2**20, 10**5, "tmpfs"))
    return e


@case("blind F4 killed and still in uvm", KIND, first="DRIVER_D_STATE", never=HEALTHY | {"REMOTE_FS_HANG"}, rank=2)
def f4() -> Evidence:
    e = b.unanswering(8)
    p = b.rank(e, 2)
    b.disk_sleep(p, "rwsem_down_write_slowpath", "down_write", "uvm_va_space_destroy", "uvm_release", "__fput")
    p.kill_pending, p.cpu = True, 0.0
    e.kernel_log = ["[99122.1] INFO: task sglang::schedul:202 blocked for more than 122 seconds."]
    b.failed_probe(e, "nvidia-smi", "time limit of 10 s")
    return e


@case("blind F7 vllm waits for a hub lock", KIND, first="HUB_LOCK", never=HEALTHY | {"LOCK_WAIT"})
def f7() -> Evidence:
    e = b.vllm_starting(1)
    e.processes = [b.launcher(e)]
    b.launcher(e).pipes = []
    b.launcher(e).main = ThreadFacts(100, "python3", "S", voluntary=20.0, wchan="hrtimer_nanosleep", syscall="230 0x1")
    path = "/nfs/hf/hub/.locks/models--org--m/0a1b.lock"
    e.log.repeated, e.log.repeated_line = 45, f"Still waiting to acquire lock on {path} (elapsed: 450.0 seconds)"
    e.log.waits_for_lock, e.log.growth, e.log.quiet_seconds = path, 110, 4.0
    e.log.news_seconds, e.uptime = 455.0, 500.0
    e.lock_files = [LockFile(path, 86_400.0, use="hub", fstype="nfs4")]
    return e


@case("blind F10 no inodes in tmp", KIND, first="DISK_FULL", never=HEALTHY)
def f10() -> Evidence:
    e = b.server(2)
    b.at_phase(e, "jit", *b.AFTER_WEIGHTS)
    e.log.quiet_seconds = 20.0
    e.log.crash, e.log.crash_label = "OSError: [Errno 28] No space left on device: '/tmp/tmpab12'", "TP1"
    e.log.troubles = {"disk_full": "OSError: [Errno 28] No space left on device: '/tmp/tmpab12'"}
    e.disks.append(DiskFacts("tmp", "/tmp", 300 * GIB, 400 * GIB, 0, "ext4"))
    b.blocked_in(b.launcher(e), "hrtimer_nanosleep", "230 0x0")
    return e


@case("blind G11 logged out", KIND, first="LOGIND_KILL", never=HEALTHY | {"OOM_KILLED", "PTY_SIGHUP"})
def g11() -> Evidence:
    e = b.server(8)
    b.serving(e)
    b.dead(e)
    e.port, e.http = PortFacts(8000), []
    e.host.cgroup = e.cgroup.path = "/user.slice/user-1004.slice/session-14.scope"
    e.host.logins = [
        "1795999987.9 systemd-logind[901]: Session 14 logged out. Waiting for processes to exit.",
        "1795999988.2 systemd[1]: session-14.scope: Killing process 100 (python3) with signal SIGTERM.",
        "1795999988.9 systemd-logind[901]: Removed session 14.",
    ]
    e.log.quiet_seconds = 12.0
    return e


@case(
    "blind two: double bit error and a dead rank",
    KIND,
    first="XID",
    also="XID PARENT_WAITS_DEAD_RANK",
    never=HEALTHY | {"PARENT_WAITS_READY"},
)
def two_xid() -> Evidence:
    e = b.server(8)
    b.silent(e, 500)
    b.died_of(b.rank(e, 4), 6)
    b.blocked_in(b.launcher(e), "pipe_wait", "0 0xa 0x7f 0x4", 10)
    e.kernel_log = [
        "[51200.3] NVRM: Xid (PCI:0000:4b:00): 48, pid=204, name=sglang::schedul, DBE (double bit error) ECC Error",
        "[51200.9] NVRM: Xid (PCI:0000:4b:00): 63, pid='<unknown>', "
        "name=<unknown>, Row Remapper: New row marked for remapping",
    ]
    return e


@case(
    "blind two: full disk and the lock it left", KIND, first="DISK_FULL", also="DISK_FULL JIT_STALE_LOCK", never=HEALTHY
)
def two_disk() -> Evidence:
    e = b.server(2)
    b.at_phase(e, "jit", *b.AFTER_WEIGHTS)
    b.silent(e, 1800)
    for p in b.all_ranks(e):
        p.main = ThreadFacts(p.pid, p.name, "S", voluntary=10.0, wchan="hrtimer_nanosleep", syscall="230 0x1")
    e.disks.append(DiskFacts("home", "/home/u", 0, 50 * GIB, 10**6, "xfs"))
    e.lock_files = [LockFile("/home/u/.cache/torch_extensions/py311_cu126/ops/lock", 7_300.0, fstype="xfs")]
    frames = [
        "wait (torch/utils/file_baton.py:52)",
        "_jit_compile (torch/utils/cpp_extension.py:2150)",
        "load (torch/utils/cpp_extension.py:1600)",
    ]
    b.stacks(e, {0: frames, 1: frames})
    return e


@case(
    "blind two: the old server has port and memory",
    KIND,
    first="PORT_IN_USE ORPHAN_GPU",
    also="PORT_IN_USE ORPHAN_GPU",
    never=HEALTHY | {"MIXED_GPU"},
)
def two_old() -> Evidence:
    e = b.vllm_starting(2)
    b.dead(e)
    e.port = PortFacts(8000, True, 5555, "VLLM::APIServer", False)
    line = "OSError: [Errno 98] Address already in use"
    oom = (
        "ValueError: Free memory on device cuda:0 (5.1/79.2 GiB) on startup is less than desired GPU memory utilization"
    )
    e.log.crash, e.log.troubles = line, {"port_in_use": line, "out_of_memory": oom}
    e.gpus = [
        GpuFacts(n, 0, 74_000, 90.0, 700.0, 81_559, "NVIDIA H100 80GB HBM3", processes_known=True) for n in range(2)
    ]
    for g in e.gpus:
        g.processes = [GpuProcess(5600 + g.index, 73_900, "VLLM::Worker_TP", False, True)]
    return e


@case(
    "blind two: memory took the engine, the API lives",
    KIND,
    first="OOM_KILLED API_ALIVE_ENGINE_DEAD",
    also="OOM_KILLED API_ALIVE_ENGINE_DEAD",
    never=HEALTHY,
)
def two_oom() -> Evidence:
    e = b.vllm(2)
    e.processes = [b.launcher(e)]
    e.uptime = 7_000.0
    e.memory.oom_kills = 1
    e.memory.oom_lines = [
        "[7777.0] Memory cgroup out of memory: Killed process 150 "
        "(VLLM::EngineCor) total-vm:98000000kB, anon-rss:61000000kB"
    ]
    e.cgroup.memory_events = {"oom": 1, "oom_kill": 1}
    e.http.append(HttpProbe("/v1/chat/completions", 0, 10.0, "timeout"))
    return e
