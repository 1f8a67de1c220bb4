"""Servers as they are met on GPU hosts: the furniture of a real one (detokenizer, resource tracker, memory, cores,
disks, harmless warnings at the start of every log) around what a case is about."""

from __future__ import annotations

import time

from cases import tree as t
from fleetdump.agent.evidence_host import CpuFacts, DiskFacts, GpuFacts, GpuProcess, MemoryFacts
from fleetdump.agent.evidence_process import ProcessFacts, ThreadFacts
from fleetdump.agent.evidence_types import Evidence, ProbeRecord, WatchFacts
from fleetdump.agent.specs import Patience

GIB = 1 << 30
DETOKENIZER = t.HEAD + 40
POLLED = ("do_sys_poll", "7 0x7ffc 0x1 0x3e8")
NANOSLEEP = ("hrtimer_nanosleep", "230 0x0 0x0 0x7ffd")
BROADCAST = [
    "broadcast (torch/distributed/distributed_c10d.py:2974)",
    "broadcast_pyobj (sglang/srt/utils/common.py:1437)",
    "recv_requests (sglang/srt/managers/scheduler.py:1188)",
    "event_loop_overlap (sglang/srt/managers/scheduler.py:902)",
]
MARKS = (
    "Init torch distributed begin.",
    "sglang is using nccl==2.27.5",
    "Init torch distributed ends. mem usage=1.46 GB",
    "Load weight begin. avail mem=77.52 GB",
    "Load weight end. type=Qwen3MoeForCausalLM, dtype=torch.bfloat16, avail mem=20.14 GB, mem usage=57.38 GB.",
    "Using KV cache dtype: torch.bfloat16",
    "KV Cache is allocated. #tokens: 171632, K size: 7.36 GB, V size: 7.36 GB",
    "Memory pool end. avail mem=4.81 GB",
    "Capture cuda graph begin. This can take up to several minutes. avail mem=4.74 GB",
)
INIT, WEIGHTS, LOADED, POOL, CAPTURE = 1, 4, 5, 8, 9
"""How many of ``MARKS`` a rank has logged when it enters that phase."""


class Text:
    """A log that is being written; ``clock`` is local time."""

    def __init__(self, ranks: int, at: str = "2026-11-27 22:14:03") -> None:
        self.ranks = ranks
        self.clock = time.mktime(time.strptime(at, "%Y-%m-%d %H:%M:%S"))
        self.lines: list[str] = []

    def say(self, text: str, who: str = "", after: float = 1.0) -> Text:
        self.clock += after
        stamp = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(self.clock))
        self.lines.append(f"[{stamp}{' ' + who if who else ''}] {text}")
        return self

    def each(self, text: str, after: float = 2.0) -> Text:
        """Every rank says it."""
        for n in range(self.ranks):
            self.say(text, f"TP{n}" if self.ranks > 1 else "", after if n == 0 else 0.0)
        return self

    def raw(self, *lines: str) -> Text:
        self.lines += lines
        return self

    def text(self) -> str:
        return "\n".join(self.lines) + "\n"


def start(ranks: int, upto: int, at: str = "2026-11-27 22:14:03") -> Text:
    """A start as far as the first ``upto`` of ``MARKS``."""
    log = Text(ranks, at)
    log.say("WARNING server_args.py:1512: Attention backend not explicitly specified. Use fa3 backend by default.")
    log.say(f"server_args=ServerArgs(model_path='/models/q', tokenizer_mode='auto', tp_size={ranks}, port=9123)")
    log.say("Using default HuggingFace chat template with detected content format: string")
    log.raw(
        "/opt/venv/lib/python3.12/site-packages/torch/cuda/__init__.py:63: FutureWarning: The pynvml "
        "package is deprecated."
    )
    log.raw(
        "[W1127 22:14:19.402113507 ProcessGroupNCCL.cpp:5072] Guessing device ID based on global rank. "
        "This can cause a hang if rank to GPU mapping is heterogeneous."
    )
    for n, mark in enumerate(MARKS[:upto]):
        log.each(mark, 3.0)
        if n == 0 and upto > 1:
            log.raw(
                f"[Gloo] Rank 0 is connected to {ranks - 1} peer ranks. Expected number of connected peer "
                f"ranks is : {ranks - 1}"
            )
        if n == 3 and upto > WEIGHTS:
            log.raw("Loading safetensors checkpoint shards: 100% Completed | 16/16 [00:41<00:00,  2.61s/it]")
    return log


def ready(ranks: int, at: str = "2026-11-27 22:14:03") -> Text:
    """A whole start and its warm-up."""
    log = start(ranks, CAPTURE, at)
    log.raw("Capturing batches (bs=1 avail_mem=3.88 GB): 100%|##########| 52/52 [00:19<00:00,  2.71it/s]")
    log.each("Capture cuda graph end. Time elapsed: 20.11 s. mem usage=0.86 GB. avail mem=3.88 GB.", 20.0)
    log.each(
        "max_total_num_tokens=171632, chunked_prefill_size=8192, max_prefill_tokens=16384, "
        "max_running_requests=2048, context_len=262144, available_gpu_mem=3.88 GB"
    )
    opening(log)
    log.say('INFO:     127.0.0.1:33418 - "POST /generate HTTP/1.1" 200 OK', after=2.0)
    return log.say("The server is fired up and ready to roll!")


def opening(log: Text) -> Text:
    """The port opens and the warm-up request is sent."""
    log.say(f"INFO:     Started server process [{t.HEAD}]")
    log.say("INFO:     Waiting for application startup.", after=0.0)
    log.say("INFO:     Application startup complete.", after=0.0)
    log.say("INFO:     Uvicorn running on http://0.0.0.0:9123 (Press CTRL+C to quit)", after=0.0)
    log.say('INFO:     127.0.0.1:33410 - "GET /model_info HTTP/1.1" 200 OK')
    return log.say(
        "Prefill batch, #new-seq: 1, #new-token: 64, #cached-token: 0, token usage: 0.00, #running-req: "
        "0, #queue-req: 0, ",
        "TP0" if log.ranks > 1 else "",
    )


def decode(log: Text, running: int, rate: float, queue: int = 0) -> Text:
    who = "TP0" if log.ranks > 1 else ""
    return log.say(
        f"Decode batch, #running-req: {running}, #token: {running * 1800}, token usage: "
        f"0.{running % 90 + 10}, cuda graph: True, gen throughput (token/s): {rate}, #queue-req: {queue}, ",
        who,
    )


def furnish(e: Evidence, memory: int = 1500) -> Evidence:
    """What every such host has beside the server's main processes; ``memory``: GiB that are available."""
    e.hostname, e.taken_at, e.seconds = "gpu-b07", 1.7958e9, 5.0
    e.processes.append(t.child(t.HEAD + 1, "resource_tracker", "python3", thread_count=1))
    t.sleep(e.processes[-1], ("anon_pipe_read", "0 0x3 0x7f22 0x400"), 3)
    e.processes.append(t.child(DETOKENIZER, "detokenizer", "sglang::detoken", thread_count=31))
    t.sleep(e.processes[-1], t.EPOLL)
    for p in t.ranks_of(e):
        p.threads = [
            ThreadFacts(p.pid + 1000 + n, name, "S", 0.01, wchan="futex_do_wait", syscall="202 0x1 0x189")
            for n, name in enumerate(("pt_nccl_watchdg", "pt_gloo_runloop", "ZMQbg/IO/0"))
        ]
        p.thread_count, p.fd_count, p.fd_limit, p.rss = 131, 214, 1048576, 9 * GIB
    t.head(e).fd_count, t.head(e).fd_limit, t.head(e).rss = 96, 1048576, 3 * GIB
    e.memory = MemoryFacts(memory * GIB, 2015 * GIB)
    e.watch = WatchFacts(patiences=Patience())
    e.cpus = CpuFacts(192, 11.4, 9)
    e.disks = [
        DiskFacts("log", "/data/run", 800 * GIB, 1700 * GIB, 10**8, "ext4"),
        DiskFacts("tmp", "/tmp", 400 * GIB, 890 * GIB, 10**7, "overlay"),
        DiskFacts("shm", "/dev/shm", 1000 * GIB, 1007 * GIB, 10**7, "tmpfs"),
        DiskFacts("home", "/root", 400 * GIB, 890 * GIB, 10**7, "overlay"),
        DiskFacts("model", "/models/q", 5000 * GIB, 28000 * GIB, -1, "xfs"),
    ]
    e.env_names = ["CUDA_VISIBLE_DEVICES", "HF_HOME", "NCCL_DEBUG", "SGLANG_HEALTH_CHECK_TIMEOUT"]
    return e


def sgl(ranks: int, upto: int, quiet: float = 900.0, uptime: float = 1500.0) -> Evidence:
    """A starting server; its log is silent for ``quiet`` seconds."""
    e = furnish(t.sglang(ranks, "imports", (), quiet, uptime))
    t.logged(e, start(ranks, upto).text(), quiet)
    return e


def serving(ranks: int, log: Text, quiet: float, health: int = 200, other: int = 200, more: str = "") -> Evidence:
    """A server that became ready long ago."""
    e = furnish(t.served(t.sglang(ranks, "serving"), health, other))
    t.logged(e, log.text(), quiet, more)
    return e


def h100(e: Evidence, utilization: int | list[int], watts: float, used: int = 71_800) -> None:
    """nvidia-smi, with this server's ranks as the processes."""
    ranks = t.ranks_of(e)
    wanted = utilization if isinstance(utilization, list) else [utilization] * len(ranks)
    e.gpus = [
        GpuFacts(n, u, used, watts + n % 3, 700.0, 81_559, "NVIDIA H100 80GB HBM3", processes_known=True)
        for n, u in enumerate(wanted)
    ]
    for gpu, p in zip(e.gpus, ranks, strict=False):
        gpu.processes = [GpuProcess(p.pid, used - 600, "sglang::schedul", ours=True)]


def lacking(e: Evidence, *names: str) -> None:
    """Tools that could not be used here, each with what it said."""
    said = {
        "py-spy": (
            "Permission Denied: Try running again with elevated permissions by going 'sudo env \"PATH=$PATH\" !!'"
        ),
        "strace": "strace: attach: ptrace(PTRACE_SEIZE, 31011): Operation not permitted",
        "nvidia-smi": "nvidia-smi not found",
        "ras": "connection refused",
        "dmesg": "dmesg: read kernel buffer failed: Operation not permitted",
        "lspci": "lspci not found",
    }
    e.probes += [ProbeRecord(name, False, 0.1, said[name]) for name in names]


def gone(e: Evidence) -> Evidence:
    """No process of it is left."""
    e.launcher_alive, e.processes, e.port.open, e.port.ours, e.http = False, [], False, False, []
    return e


def zombie(p: ProcessFacts, signal: int) -> None:
    """It ended and nobody has waited for it."""
    p.state, p.state_before, p.role, p.rank, p.label, p.exit_signal = "Z", "Z", "other", None, "", signal
    p.main, p.threads, p.rss, p.fd_count = None, [], 0, 0


def silent_probe(name: str, why: str, seconds: float = 3.0) -> ProbeRecord:
    """A probe that had to be given up."""
    return ProbeRecord(name, False, seconds, why)
