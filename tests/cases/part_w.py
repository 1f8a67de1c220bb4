"""Part W: cases that begin with a log's text, read by the agent's own reader; the rest of the evidence fits it."""

from __future__ import annotations

import tempfile

from cases import builder as b
from cases.table import HANGS, HEALTHY, case
from fleetdump.agent.evidence_engine import PortFacts
from fleetdump.agent.evidence_host import DiskFacts, GpuFacts
from fleetdump.agent.evidence_process import ThreadFacts
from fleetdump.agent.evidence_types import Evidence
from fleetdump.agent.probes.logfile import LogReader

TRACE = "Traceback (most recent call last):"
SHM = DiskFacts("shm", "/dev/shm", 1 << 20, 64 << 20, 10**5, "tmpfs")


def with_log(e: Evidence, *lines: str, quiet: float = 300.0) -> Evidence:
    """Put what the agent reads from these lines in place of the evidence's log."""
    with tempfile.NamedTemporaryFile("w", suffix=".log") as file:
        file.write("\n".join(lines) + "\n")
        file.flush()
        reader = LogReader(file.name, e.target.ranks)
        reader.first()
        log = reader.second()
    log.path, log.quiet_seconds, log.news_seconds = "/srv/server.log", quiet, 0.0
    e.log, e.watch = log, None
    return e


def started(*lines: str, ranks: int = 2) -> Evidence:
    """Ranks have begun their set-up; then these lines."""
    begin = [f"[2026-11-29 10:00:0{n} TP{n}] Init torch distributed begin." for n in range(ranks)]
    return with_log(b.server(ranks), *begin, *lines)


def ended(*lines: str, ranks: int = 2) -> Evidence:
    e = started(*lines, ranks=ranks)
    b.dead(e)
    return e


@case("W01 address in use", "kind of row 21", first="PORT_IN_USE", never=HEALTHY | {"BAD_BIND_HOST", "PORT_RACE"})
def http_server_finds_its_port_taken() -> Evidence:
    e = ended(
        "ERROR:    [Errno 98] error while attempting to bind on address ('0.0.0.0', 8000): address already in use"
    )
    e.port = PortFacts(8000, True, 4242, "python3")
    return e


@case("W02 address of nobody", "kind of row 21", first="BAD_BIND_HOST", never=HEALTHY | {"PORT_IN_USE", "PORT_RACE"})
def http_server_may_not_have_its_address() -> Evidence:
    e = ended(
        "ERROR:    [Errno 99] error while attempting to bind on address ('198.51.100.7', 8000): "
        "cannot assign requested address"
    )
    e.target.host, e.host.addresses = "198.51.100.7", {"eth0": ["192.0.2.10"]}
    return e


@case("W03 store port", "kind of row 22", first="PORT_RACE", never=HEALTHY | {"PORT_IN_USE", "BAD_BIND_HOST"})
def store_of_torch_finds_its_port_taken() -> Evidence:
    return ended(
        f"[2026-11-29 10:00:05 TP0] Scheduler hit an exception: {TRACE}",
        "torch.distributed.DistNetworkError: The server socket has failed to listen on any local network address. "
        "port: 42011, useIpv6: false, code: -98, name: EADDRINUSE, message: address already in use",
    )


@case("W04 shared memory of NCCL", "kind of F1", first="SHM_SMALL", never=HEALTHY | {"DISK_FULL"})
def nccl_cannot_extend_its_segment() -> Evidence:
    e = ended(
        "gpu-a:200:999 [0] misc/shmutils.cc:72 NCCL WARN Error: failed to extend /dev/shm/nccl-Yb1 to 33030532 bytes",
        f"[2026-11-29 10:00:05 TP1] Scheduler hit an exception: {TRACE}",
        "torch.distributed.DistBackendError: NCCL error in: ProcessGroupNCCL.cpp:94, unhandled system error",
    )
    e.disks.append(SHM)
    return e


@case("W05 shared memory of torch", "kind of F1", first="SHM_SMALL", never=HEALTHY)
def torch_cannot_write_its_segment() -> Evidence:
    e = ended("RuntimeError: unable to write to file </torch_812_31_0>: No space left on device (28)")
    e.disks.append(SHM)
    return e


@case("W06 proxy", "kind of E2", first="PROXY_WARMUP", never=HEALTHY, phase="warmup")
def proxy_forbids_the_request_to_oneself() -> Evidence:
    e = with_log(
        b.server(1),
        "INFO:     Started server process [100]",
        "INFO:     Application startup complete.",
        "INFO:     Uvicorn running on http://0.0.0.0:8000 (Press CTRL+C to quit)",
        "requests.exceptions.HTTPError: 403 Client Error: Forbidden for url: http://0.0.0.0:8000/get_model_info",
    )
    b.dead(e)
    e.target.host, e.proxy = "0.0.0.0", {"http_proxy": "proxy.example:3128", "no_proxy": "localhost"}
    return e


@case("W07 fabric", "kind of F2", first="FABRIC_MANAGER", never=HEALTHY)
def cuda_says_that_the_system_is_not_ready() -> Evidence:
    e = ended(
        f"[2026-11-29 10:00:05 TP3] Scheduler hit an exception: {TRACE}",
        "RuntimeError: Unexpected error from cudaGetDeviceCount(). Error 802: system not yet initialized",
        ranks=4,
    )
    e.host.fabric_manager = "inactive"
    return e


@case("W08 unbalanced", "kind of A8", first="MIXED_GPU", never=HEALTHY | {"ORPHAN_GPU"})
def memory_differs_between_the_kinds() -> Evidence:
    e = ended(
        f"[2026-11-29 10:00:05 TP0] Scheduler hit an exception: {TRACE}",
        "ValueError: The memory capacity is unbalanced. Some GPUs may be occupied by other processes. pre=21 post=78",
    )
    e.gpus = [GpuFacts(0, 0, 0, memory_total=24_000, name="A"), GpuFacts(1, 0, 0, memory_total=80_000, name="B")]
    return e


@case("W09 ring", "kind of A7", first="DEAD_READER_RING_FULL", never=HEALTHY, rank=1)
def ring_of_vllm_is_full() -> Evidence:
    line = "INFO shm_broadcast.py:501] No available shared memory broadcast block found in 60 seconds."
    e = with_log(b.vllm(2), *[line] * 5)
    e.port = PortFacts(8000, True, b.LAUNCHER, "", True)
    b.lose(e, 1)
    b.spin(e.processes[-1])
    return e


@case("W10 one dead", "kind of A1", first="PARENT_WAITS_DEAD_RANK RANK_CRASHED", never=HEALTHY, rank=1)
def launcher_says_that_a_rank_died() -> Evidence:
    e = started("[2026-11-29 10:00:09] Rank 1 scheduler died during initialization (exit code: -11).")
    b.lose(e, 1)
    return e


@case("W11 watchdog while compiling", "kind of C9", first="TIMEOUT_TOO_SHORT", never=HEALTHY)
def watchdog_ended_a_cold_start() -> Evidence:
    e = started(
        *(f"[2026-11-29 10:00:2{n} TP{n}] Load weight begin. avail mem=138.4 GB" for n in range(2)),
        *(f"[2026-11-29 10:00:4{n} TP{n}] Load weight end. type=M, mem usage=76.2 GB." for n in range(2)),
        *(f"[2026-11-29 10:00:5{n} TP{n}] Memory pool end. avail mem=11.2 GB" for n in range(2)),
        "[2026-11-29 10:01:00 TP0] Try DeepGEMM JIT Compiling for <GEMM_NT_F8F8BF16> N=4096, K=7168, num_groups=1",
        "DeepGEMM warmup:  41%|####1     | 6717/16384 [04:51<06:59, 23.0it/s]",
        "TimeoutError: server did not become ready within 300 s",
    )
    b.dead(e)
    return e


@case("W12 out of descriptors", "kind of row 27", first="NOFILE", never=HEALTHY)
def socket_cannot_be_opened() -> Evidence:
    return ended("OSError: [Errno 24] Too many open files: '/proc/self/maps'")


@case("W13 IPv6", "kind of row 6", first="IPV6_LOOPBACK", never=HEALTHY)
def nobody_speaks_ipv4() -> Evidence:
    e = started("[W1129 10:00:09.1 socket.cpp:767] [c10d] The client socket has failed to connect to [127.0.0.1]:31111 "
                "(errno: 101 - Network is unreachable).")  # fmt: skip
    e.host.addresses = {"lo": ["::1"], "eth0": ["2001:db8::5"]}
    return e


@case("W14 loopback", "kind of D8", first="WRONG_INTERFACE", never=HEALTHY)
def host_name_is_not_known() -> Evidence:
    e = started("[W1129 10:00:09.1 ProcessGroupGloo.cpp:514] Warning: Unable to resolve hostname to a (local) address. "
                "Using the loopback address as fallback. Manually set the network interface to bind to with "
                "GLOO_SOCKET_IFNAME. (function operator())", ranks=2)  # fmt: skip
    e.target.ranks, e.target.nodes = 4, 2
    return e


@case("W15 lock again and again", "kind of F7", first="HUB_LOCK", never=HEALTHY)
def download_waits_for_a_lock_all_the_time() -> Evidence:
    path = "/data/hf/hub/.locks/models--org--m/3a.lock"
    waits = [f"Still waiting to acquire lock on {path} (elapsed: {n}0.1 seconds)" for n in range(1, 9)]
    e = with_log(b.server(1), *waits)
    e.processes = [b.launcher(e)]
    return e


@case("W16 crash of a patch", "kind of S7a", first="RANK_CRASHED", never=HEALTHY, rank=1)
def patch_raises_on_one_rank() -> Evidence:
    return started(f"[2026-11-29 10:00:09 TP1] Scheduler hit an exception: {TRACE}", "AttributeError: no such layer")


@case("W17 disk", "kind of F10", first="DISK_FULL", never=HEALTHY)
def log_says_that_the_disk_is_full() -> Evidence:
    e = started("OSError: [Errno 28] No space left on device")
    e.disks = [DiskFacts("log", "/srv", 4096, 10**12, 10**6, "ext4")]
    return e


@case("W18 words that mean nothing", "look-alike", first="IDLE_OK", never=HANGS | {"SHM_SMALL", "NOFILE", "DISK_FULL"})
def healthy_server_with_alarming_words() -> Evidence:
    e = b.server(2)
    b.serving(e)
    http = (e.port, e.http)
    e = with_log(
        e,
        "Ignore import error when loading sglang.srt.models.x: No module named 'y'",
        "NCCL WARN Error while creating shared memory segment /dev/shm/nccl-1 (size 4096), will use sockets",
        "Health check failed. Server couldn't get a response from detokenizer for last 20 seconds. tic start time: 1",
        "[2026-11-29 10:00:00 TP0] Prefill batch. #new-seq: 1, #new-token: 8, #cached-token: 0, #queue-req: 0",
        "The server is fired up and ready to roll!",
    )
    e.port, e.http = http
    for p in b.all_ranks(e):
        b.poll_idle(p)
    return e


@case("W19 statistics of zero", "kind of E7", first="RANK_SPIN UNKNOWN KERNEL_SPIN MISSING_RANK", never=HEALTHY)
def vllm_counts_zero_tokens() -> Evidence:
    line = (
        "INFO loggers.py:116] Engine 000: Avg prompt throughput: 0.0 tokens/s, Avg generation throughput: "
        "0.0 tokens/s, Running: 2 reqs, Waiting: 5 reqs, GPU KV cache usage: 3.1%"
    )
    e = b.vllm(2)
    http = (e.port, e.http)
    e = with_log(e, *[line] * 6, quiet=3.0)
    e.port, e.http = http
    for p in b.all_ranks(e):
        p.main = ThreadFacts(p.pid, p.name, "S", wchan="futex_do_wait")
    return e


@case("W20 long prompts", "kind of E4", first="BUSY_NOT_HUNG", never=HANGS)
def health_fails_between_long_prefills() -> Evidence:
    e = b.server(2)
    b.serving(e)
    e = with_log(
        e,
        "The server is fired up and ready to roll!",
        "Health check failed. Server couldn't get a response from detokenizer for last 20 seconds.",
        quiet=2.0,
    )
    b.listening(e, 503)
    e.log.ready, e.log.phase, e.log.forwards, e.log.growth = True, "serving", 2, 400
    for p in b.all_ranks(e):
        b.spin(p)
    return e
