"""Part AQ: a ninth set: servers that look hung and work, and faults of the host that look like others."""

from __future__ import annotations

from cases import gpuhost as g
from cases import tree as t
from cases.table import DEAD, HANGS, HEALTHY, case
from fleetdump.agent.evidence_engine import HttpProbe
from fleetdump.agent.evidence_host import DiskFacts
from fleetdump.agent.evidence_process import SocketFacts, ThreadFacts
from fleetdump.agent.evidence_types import Evidence

ALIVE = HANGS | DEAD | {"UNKNOWN"}


@case(
    "ninth, image that is pulled page by page",
    "nydus and stargz snapshotters",
    first="BUSY_NOT_HUNG",
    never=ALIVE | {"IMPORT_STALL", "REMOTE_FS_HANG"},
)
def imports_over_fuse() -> Evidence:
    e = g.sgl(1, 0, quiet=150.0, uptime=152.0)
    e.processes = [t.head(e)]
    head = t.head(e)
    head.pipes = []
    t.disk(head, "request_wait_answer", "fuse_simple_request", "fuse_do_readfolio", "filemap_fault")
    head.rchar_delta, head.majflt_delta, head.rss_delta = 240_000, 61, 900_000
    e.disks = [d for d in e.disks if d.use != "tmp"] + [DiskFacts("tmp", "/", 10**11, 10**12, 10**7, "fuse.nydus")]
    return e


@case(
    "ninth, kernels are timed on the GPU",
    "flashinfer autotune",
    first="JIT_COMPILING BUSY_NOT_HUNG",
    never=ALIVE | {"KERNEL_SPIN"},
)
def autotuner_at_work() -> Evidence:
    log = g.start(4, g.POOL)
    log.each("Running FlashInfer autotune...")
    e = g.sgl(4, g.POOL)
    t.logged(e, log.text(), 420.0)
    for p in t.ranks_of(e):
        t.burn(p, 0.99, 0.8)
    frames = [
        "_profile_single_kernel (flashinfer/autotuner.py:611)",
        "choose_one (flashinfer/autotuner.py:455)",
        "forward (sglang/srt/layers/moe/fused_moe.py:88)",
    ]
    t.dump(e, dict.fromkeys(range(4), frames), busy=range(4))
    g.h100(e, [71, 64, 88, 70], 255.0)
    return e


@case("ninth, few lines are wanted", "--decode-log-interval 5000", first="HEALTHY", never=ALIVE)
def decodes_and_says_little() -> Evidence:
    log = g.decode(g.ready(4), 96, 4102.0)
    e = g.serving(4, log, 340.0)
    for p in t.ranks_of(e):
        t.burn(p, 0.96, 0.7, 60.0)
    g.h100(e, [93, 92, 93, 91], 388.0)
    return e


@case("ninth, only warnings are logged", "--log-level warning", first="HEALTHY IDLE_OK", never=ALIVE | {"IMPORT_STALL"})
def silent_by_its_options() -> Evidence:
    e = g.furnish(t.served(t.sglang(4, "serving")))
    t.logged(e, "W1127 22:14:19 torch/distributed: Guessing device ID based on global rank.\n", 80_000.0)
    g.h100(e, 0, 121.0)
    return e


@case(
    "ninth, it drains before it ends",
    "SIGTERM with requests in flight",
    first="BUSY_NOT_HUNG HEALTHY",
    never=ALIVE | {"TIMEOUT_TOO_SHORT"},
)
def graceful_end() -> Evidence:
    log = g.decode(g.ready(2), 6, 410.0)
    log.say("SIGTERM received. signum=None frame=None. Draining requests and shutting down...")
    log.say("Gracefully exiting... Remaining number of requests 3. Remaining requests remaining_rids=['a', 'b', 'c'].")
    more = g.decode(g.Text(2, "2026-11-27 23:00:00"), 3, 212.0).text()
    e = g.serving(2, log, 1.0, health=503, more=more)
    for p in t.ranks_of(e):
        t.burn(p, 0.96, 0.7, 60.0)
    g.h100(e, [61, 60], 300.0)
    return e


@case("ninth, weights come over RDMA", "remote instance loader", first="BUSY_NOT_HUNG LOADING_SLOW", never=ALIVE)
def weights_that_no_counter_counts() -> Evidence:
    e = g.sgl(4, g.WEIGHTS, quiet=170.0)
    for p in t.ranks_of(e):
        t.sleep(p, t.FUTEX, voluntary=3.0)
        p.sockets = [SocketFacts(81, "ESTABLISHED", "10.9.0.4:41200", "10.9.0.3:17777")]
    g.h100(e, 0, 131.0, 30_000)
    for gpu in e.gpus:
        gpu.memory_delta = 2_900
    return e


@case(
    "ninth, a queue of nine hundred",
    "vLLM under load",
    first="BUSY_NOT_HUNG HEALTHY",
    never=ALIVE | {"API_LOOP_BLOCKED", "DEAD_READER_RING_FULL"},
)
def probes_wait_in_a_long_queue() -> Evidence:
    e = g.furnish(t.served(t.vllm(4)))
    e.processes = [p for p in e.processes if p.role != "detokenizer"]
    say = (
        "(APIServer pid=31000) INFO 11-27 22:{:02d}:{:02d} [loggers.py:127] Engine 000: Avg prompt "
        "throughput: {}.4 tokens/s, Avg generation throughput: {}.1 tokens/s, Running: 256 reqs, "
        "Waiting: {} reqs, GPU KV cache usage: 98.{}%, Prefix cache hit rate: 11.2%\n"
    )
    text = "(APIServer pid=31000) INFO:     Application startup complete.\n" + "".join(
        say.format(20 + n // 6, n % 6 * 10, 9000 + n, 2000 + n, 880 + n, n) for n in range(30)
    )
    t.logged(e, text, 4.0, say.format(25, 10, 9100, 2101, 912, 4))
    e.http.append(HttpProbe("/v1/completions", 0, 30.0, "timeout"))
    for p in t.ranks_of(e):
        t.burn(p, 0.99, 0.8, 30.0)
    g.h100(e, [99, 100, 98, 100], 600.0)
    return e


@case(
    "ninth, the prober gives up in the queue",
    "SGLang under load",
    first="BUSY_NOT_HUNG HEALTHY",
    never=ALIVE | {"API_LOOP_BLOCKED"},
)
def prober_is_impatient() -> Evidence:
    log = g.ready(4)
    for n in range(9):
        g.decode(log, 256, 5100.0 + n, 2000 + n)
    more = g.decode(g.Text(4, "2026-11-27 23:00:00"), 256, 5212.0, 2044).text()
    e = g.serving(4, log, 1.0, more=more)
    e.http.append(HttpProbe("/generate", 0, 10.0, "timeout"))
    for p in t.ranks_of(e):
        t.burn(p, 0.99, 0.8, 30.0)
    g.h100(e, [99, 100, 98, 100], 610.0)
    return e


@case(
    "ninth, long outputs keep the detokenizer busy",
    "one core of incremental decoding",
    first="HEALTHY BUSY_NOT_HUNG IDLE_OK",
    never=ALIVE | {"API_LOOP_BLOCKED"},
)
def detokenizer_is_the_bottleneck() -> Evidence:
    log = g.decode(g.ready(2), 500, 21_000.0)
    e = g.serving(2, log, 3.0, more=g.decode(g.Text(2, "2026-11-27 23:00:00"), 498, 20_512.0).text())
    t.burn(next(p for p in e.processes if p.role == "detokenizer"), 1.0, 0.99)
    e.http[0].seconds = 9.1
    for p in t.ranks_of(e):
        t.burn(p, 0.9, 0.8, 300.0)
    g.h100(e, [90, 91], 420.0)
    return e


@case(
    "ninth, communicators of sixteen hosts",
    "NVIDIA/nccl#534",
    first="BUSY_NOT_HUNG",
    never=ALIVE | {"WRONG_INTERFACE", "MISSING_RANK"},
)
def init_of_many_hosts() -> Evidence:
    e = g.sgl(8, 2, quiet=88.0, uptime=150.0)
    e.target.ranks, e.target.nodes, e.target.node_rank = 128, 16, 0
    t.logged(e, g.start(8, 2).text(), 88.0)
    for p in t.ranks_of(e):
        t.sleep(p, g.POLLED, voluntary=4.0)
    g.h100(e, 0, 117.0, 1400)
    return e


@case(
    "ninth, warm-up of a slow model",
    "first request behind lazy loading of modules",
    first="BUSY_NOT_HUNG JIT_COMPILING",
    never=ALIVE,
)
def first_request_takes_ninety_seconds() -> Evidence:
    log = g.opening(g.start(2, g.CAPTURE))
    e = g.furnish(t.warming(t.sglang(2, "warmup"), 503))
    t.logged(e, log.text(), 52.0)
    for p in t.ranks_of(e):
        t.burn(p, 0.99, 0.4)
    g.h100(e, 0, 125.0)
    return e


@case(
    "ninth, a kernel never ends while it is timed",
    "flashinfer autotune",
    first="KERNEL_SPIN",
    never=HEALTHY | DEAD | {"JIT_COMPILING"},
)
def autotuner_meets_a_kernel_without_end() -> Evidence:
    e = autotuner_at_work()
    g.h100(e, 100, 131.0)
    return e


# ---- faults


@case(
    "ninth, a disk of this host fails",
    "nvme time-outs",
    first="LOADER_DEADLOCK",
    never=HEALTHY | DEAD | {"REMOTE_FS_HANG", "DRIVER_D_STATE", "LOADING_SLOW"},
)
def local_disk_does_not_answer() -> Evidence:
    e = g.sgl(4, g.WEIGHTS, quiet=900.0)
    for p in t.ranks_of(e):
        t.disk(p, "folio_wait_bit_common", "filemap_update_page", "filemap_get_pages", "ext4_file_read_iter")
    e.kernel_log = [
        "[91200.1] nvme nvme2: I/O 311 QID 14 timeout, aborting",
        "[91231.4] nvme nvme2: I/O 311 QID 14 timeout, reset controller",
        "[91262.9] blk_update_request: I/O error, dev nvme2n1, sector 881232 op 0x0:(READ) flags 0x80700",
        "[91320.0] INFO: task sglang::schedul:31011 blocked for more than 120 seconds.",
    ]
    g.h100(e, 0, 118.0, 5000)
    return e


@case(
    "ninth, no thread is left to start",
    "pids.max of a pod",
    first="RANK_CRASHED LAUNCHER_DIED",
    never=HEALTHY | {"OOM_KILLED", "NOFILE", "SHM_SMALL"},
)
def limit_of_processes() -> Evidence:
    log = g.start(8, 2)
    log.raw("OpenBLAS blas_thread_init: pthread_create failed for thread 12 of 64: Resource temporarily unavailable")
    log.say("Scheduler hit an exception: Traceback (most recent call last):", "TP6")
    log.raw(
        '  File "/usr/lib/python3.12/threading.py", line 992, in start',
        "    _start_new_thread(self._bootstrap, ())",
        "RuntimeError: can't start new thread",
        "",
    )
    log.say("Received sigquit from a child process. It usually means the child failed.")
    e = g.gone(g.furnish(t.sglang(8, "init")))
    t.logged(e, log.text(), 45.0)
    return e


@case(
    "ninth, memory that may not be locked",
    "ulimit -l",
    first="RANK_CRASHED LAUNCHER_DIED",
    never=HEALTHY | {"OOM_KILLED", "ORPHAN_GPU", "SHM_SMALL"},
)
def memlock_is_small() -> Evidence:
    log = g.start(8, 2)
    log.raw(
        f"gpu-b07:{t.pid_of(1)}:31790 [1] misc/ibvwrap.cc:268 NCCL WARN Call to ibv_reg_mr_iova2 failed "
        f"with error Cannot allocate memory"
    )
    log.say("Scheduler hit an exception: Traceback (most recent call last):", "TP1")
    log.raw(
        "torch.distributed.DistBackendError: NCCL error in: "
        "/pytorch/torch/csrc/distributed/c10d/NCCLUtils.hpp:268, unhandled system error (run "
        "with NCCL_DEBUG=INFO for details), NCCL version 2.27.5",
        "ncclSystemError: System call (e.g. socket, malloc) or external library call failed or device error.",
        "",
    )
    log.say("Received sigquit from a child process. It usually means the child failed.")
    e = g.gone(g.furnish(t.sglang(8, "init")))
    t.logged(e, log.text(), 45.0)
    g.h100(e, [], 0)
    return e


@case(
    "ninth, a kernel reads where it may not",
    "illegal memory access",
    first="RANK_CRASHED XID",
    also="RANK_CRASHED",
    never=HEALTHY | {"GPU_WEDGED", "KERNEL_SPIN", "DRIVER_D_STATE"},
)
def illegal_access_on_one_rank() -> Evidence:
    log = g.decode(g.ready(4), 30, 1900.0)
    log.say("Scheduler hit an exception: Traceback (most recent call last):", "TP2")
    log.raw(
        "torch.AcceleratorError: CUDA error: an illegal memory access was encountered",
        "CUDA kernel errors might be asynchronously reported at some other API call, so the stacktrace "
        "below might be incorrect.",
        "",
    )
    log.say("Received sigquit from a child process. It usually means the child failed.")
    e = g.serving(4, log, 12.0, health=0, other=0)
    for n, p in enumerate(t.ranks_of(e)):
        if n != 2:
            t.burn(p, 1.0, 0.6)
        else:
            t.sleep(p, g.NANOSLEEP)
    t.sleep(t.head(e), g.NANOSLEEP)
    e.kernel_log = [
        (
            f"[512100.331] NVRM: Xid (PCI:0000:5d:00): 31, pid={t.pid_of(2)}, name=sglang::schedul, Ch "
            f"00000008, intr 00000000. MMU Fault: ENGINE GRAPHICS GPCCLIENT_T1_0 faulted @ "
            f"0x7f5a_40000000. Fault is of type FAULT_PDE ACCESS_TYPE_VIRT_READ"
        )
    ]
    g.h100(e, [100, 100, 0, 100], 140.0)
    return e


@case(
    "ninth, a cache that never ends its search",
    "radix tree with a cycle",
    first="MISSING_RANK RANK_SPIN",
    rank=0,
    never=HEALTHY | DEAD | {"COLLECTIVE_DIVERGED", "KERNEL_SPIN", "API_LOOP_BLOCKED"},
)
def first_rank_spins_in_python() -> Evidence:
    log = g.decode(g.ready(4), 30, 1900.0)
    e = g.serving(4, log, 190.0, health=503)
    t.burn(t.rank(e, 0), 1.0, 1.0)
    for n in (1, 2, 3):
        t.sleep(t.rank(e, n), t.FUTEX)
    spin = [
        "_collect_leaves (sglang/srt/mem_cache/radix_cache.py:611)",
        "evict (sglang/srt/mem_cache/radix_cache.py:488)",
        "get_next_batch_to_run (sglang/srt/managers/scheduler.py:1551)",
    ]
    t.dump(e, {n: g.BROADCAST if n else spin for n in range(4)})
    e.stacks[0].state = "active+gil"
    g.h100(e, 0, 121.0)
    return e


@case(
    "ninth, requests of one tokenizer worker",
    "sgl-project/sglang#33858",
    first="UNKNOWN",
    never=HEALTHY | DEAD | {"RANK_SPIN", "KERNEL_SPIN"},
)
def answers_to_the_other_worker_are_lost() -> Evidence:
    log = g.decode(g.ready(2), 1, 188.0)
    log.say('INFO:     10.8.0.22:51818 - "POST /v1/chat/completions HTTP/1.1" 503 Service Unavailable')
    e = g.serving(2, log, 400.0)
    e.http.append(HttpProbe("/v1/chat/completions", 0, 60.0, "timeout"))
    for n in range(2):
        worker = t.child(t.HEAD + 60 + n, "tokenizer_worker", "sglang::tokeniz")
        t.sleep(worker, t.EPOLL)
        worker.threads = [ThreadFacts(worker.pid + 1, "ZMQbg/IO/0", "S", wchan="ep_poll")]
        e.processes.append(worker)
    g.h100(e, 0, 121.0)
    return e
