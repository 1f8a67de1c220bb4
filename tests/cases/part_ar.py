"""Part AR: a tenth set: hosts of a server that spans several, replicas, vLLM, and servers that are to end."""

from __future__ import annotations

from cases import gpuhost as g
from cases import tree as t
from cases.table import DEAD, HANGS, HEALTHY, case
from fleetdump.agent.evidence_engine import HttpProbe
from fleetdump.agent.evidence_host import DiskFacts, GpuFacts
from fleetdump.agent.evidence_process import Stack
from fleetdump.agent.evidence_types import Evidence

ALIVE = HANGS | DEAD | {"UNKNOWN"}
STARTED = "(APIServer pid=31000) INFO:     Application startup complete.\n"


def second_host(quiet: float) -> Evidence:
    """The second of two hosts; SGLang answers /health there by itself, whatever its ranks do."""
    log = g.start(16, g.CAPTURE)
    log.each("Capture cuda graph end. Time elapsed: 20.11 s. mem usage=0.86 GB. avail mem=3.88 GB.", 20.0)
    log.each("max_total_num_tokens=171632, chunked_prefill_size=8192, max_running_requests=2048, context_len=262144")
    log.lines = [line for line in log.lines if not any(f" TP{n}]" in line for n in range(8))]
    e = g.furnish(t.served(t.sglang(8, "http"), 200, 404))
    e.target.ranks, e.target.nodes, e.target.node_rank = 16, 2, 1
    t.logged(e, log.text(), quiet)
    for n, p in enumerate(t.ranks_of(e)):
        p.rank, p.label = n + 8, f"TP{n + 8}"
    return e


@case("tenth, second host of an idle server", "launch_dummy_health_check_server", first="IDLE_OK HEALTHY", never=ALIVE)
def second_host_is_idle() -> Evidence:
    e = second_host(90_000.0)
    g.h100(e, 0, 121.0)
    return e


@case(
    "tenth, second host answers for ranks that hang",
    "sgl-project/sglang#21486",
    first="MISSING_RANK",
    never=HEALTHY | DEAD,
)
def second_host_hangs() -> Evidence:
    e = second_host(900.0)
    for p in t.ranks_of(e):
        t.burn(p, 1.0, 0.5)
    g.h100(e, 100, 139.0)
    g.lacking(e, "py-spy", "strace", "ras")
    return e


@case("tenth, one replica of four works", "--dp 4", first="HEALTHY", never=ALIVE)
def replicas_with_little_to_do() -> Evidence:
    log = g.Text(1)
    for n in range(4):
        log.say("max_total_num_tokens=171632, chunked_prefill_size=8192", f"DP{n} TP0")
    g.opening(log)
    log.say("The server is fired up and ready to roll!")
    log.say(
        "Decode batch, #running-req: 2, #token: 3600, token usage: 0.12, cuda graph: True, gen "
        "throughput (token/s): 140.2, #queue-req: 0, ",
        "DP2 TP0",
    )
    e = g.furnish(t.served(t.sglang(4, "serving")))
    e.target.ranks = 1
    t.logged(e, log.text(), 9.0)
    for n, p in enumerate(t.ranks_of(e)):
        p.rank, p.label = 0, f"DP{n} TP0"
    t.burn(t.ranks_of(e)[2], 0.95, 0.7, 70.0)
    g.h100(e, [0, 0, 91, 0], 250.0)
    return e


def vllm(ranks: int, log: str, quiet: float) -> Evidence:
    e = g.furnish(t.served(t.vllm(ranks)))
    e.processes = [p for p in e.processes if p.role != "detokenizer"]
    t.logged(e, log, quiet)
    return e


@case(
    "tenth, vLLM asleep at night",
    "workers sleep after a while",
    first="IDLE_OK",
    never=ALIVE | {"DEAD_READER_RING_FULL"},
)
def vllm_has_nothing_to_do() -> Evidence:
    e = vllm(
        4,
        STARTED
        + (
            "(APIServer pid=31000) INFO 11-27 22:40:10 [loggers.py:127] Engine 000: Avg prompt throughput: "
            "0.0 tokens/s, Avg generation throughput: 0.0 tokens/s, Running: 0 reqs, Waiting: 0 "
            "reqs, GPU KV cache usage: 0.0%\n"
        ),
        30_000.0,
    )
    for p in t.ranks_of(e):
        t.sleep(p, t.EPOLL, voluntary=0.2)
        p.cpu = 0.001
    t.sleep(next(p for p in e.processes if p.role == "engine"), t.EPOLL)
    g.h100(e, 0, 119.0)
    return e


@case("tenth, vLLM put to sleep", "POST /sleep?level=1", first="IDLE_OK HEALTHY", never=ALIVE | {"ORPHAN_GPU"})
def vllm_sleeps() -> Evidence:
    e = vllm(
        2,
        STARTED
        + "(EngineCore_DP0 pid=31001) INFO 11-27 22:41:00 [executor_base.py:187] It took 3.1 seconds to fall asleep.\n",
        5_000.0,
    )
    for p in t.ranks_of(e):
        t.sleep(p, t.EPOLL)
    g.h100(e, 0, 75.0, 2100)
    return e


@case(
    "tenth, vLLM profiles its memory",
    "determine_available_memory",
    first="BUSY_NOT_HUNG",
    never=ALIVE | {"PARENT_WAITS_READY"},
)
def vllm_profiles() -> Evidence:
    e = g.furnish(t.vllm(2))
    e.processes = [p for p in e.processes if p.role != "detokenizer"]
    text = (
        "(EngineCore_DP0 pid=31001) INFO 11-27 22:14:31 [core.py:77] Initializing a V1 LLM engine (v0.11.2) "
        "with config: model='/models/q'\n"
    )
    text += "".join(
        (
            f"(Worker_TP{n} pid={t.pid_of(n)}) INFO 11-27 22:16:02 [gpu_model_runner.py:2653] Model loading "
            f"took 57.3 GiB and 71.2 seconds\n"
        )
        for n in range(2)
    )
    t.logged(e, text, 190.0)
    for p in t.ranks_of(e):
        t.burn(p, 0.99, 0.7)
    g.h100(e, [100, 100], 590.0)
    return e


@case(
    "tenth, weights through gcsfuse", "vllm-project/vllm#23115", first="LOADING_SLOW", never=ALIVE | {"REMOTE_FS_HANG"}
)
def object_store_behind_fuse() -> Evidence:
    e = g.sgl(4, g.WEIGHTS, quiet=200.0)
    for p in t.ranks_of(e):
        t.disk(p, "request_wait_answer", "fuse_simple_request", "fuse_read_folio", "filemap_read_folio")
        p.rchar_delta = 21_000_000
    e.disks = [d for d in e.disks if d.use != "model"] + [DiskFacts("model", "/gcs/m", 0, 0, -1, "fuse.gcsfuse")]
    g.h100(e, 0, 117.0, 9000)
    return e


@case(
    "tenth, log was rotated away",
    "logrotate without copytruncate",
    first="IDLE_OK HEALTHY",
    also="LOG_ELSEWHERE",
    never=ALIVE,
)
def log_of_another_name() -> Evidence:
    e = g.furnish(t.served(t.sglang(2, "serving")))
    t.logged(e, "\n", 40_000.0)
    t.head(e).writes_log, t.head(e).stdout = False, "/data/run/out.txt.1"
    g.h100(e, 0, 121.0)
    return e


@case("tenth, seen by another user", "no right to read its descriptors", first="IDLE_OK HEALTHY", never=ALIVE)
def strangers_see_only_that_it_answers() -> Evidence:
    e = g.furnish(t.served(t.sglang(2, "serving")))
    e.log.exists, e.log.ready, e.log.ranks, e.log.phase = False, False, [], ""
    for p in e.processes:
        p.readable, p.pipes, p.fd_count, p.writes_log = False, [], 0, None
    e.port.owner_pid = 0
    g.lacking(e, "py-spy", "strace", "nvidia-smi")
    return e


@case(
    "tenth, second stage on another host is silent",
    "pipeline over two hosts",
    first="MISSING_RANK UNKNOWN",
    never=HEALTHY | DEAD | {"KERNEL_SPIN", "API_LOOP_BLOCKED"},
)
def first_stage_waits_for_the_second() -> Evidence:
    log = g.decode(g.ready(4), 7, 300.0)
    e = g.serving(4, log, 500.0, health=503)
    e.target.nodes, e.target.ranks = 2, 8
    for p in t.ranks_of(e):
        t.sleep(p, t.FUTEX)
    frames = [
        "recv_object (sglang/srt/distributed/parallel_state.py:1050)",
        "recv_tensor_dict (sglang/srt/distributed/parallel_state.py:1228)",
        "event_loop_pp (sglang/srt/managers/scheduler_pp_mixin.py:95)",
    ]
    t.dump(e, dict.fromkeys(range(4), frames))
    g.h100(e, 0, 121.0)
    return e


@case(
    "tenth, user code in one worker",
    "a custom logits processor",
    first="RANK_SPIN MISSING_RANK",
    rank=3,
    never=HEALTHY | DEAD | {"DEAD_READER_RING_FULL", "KERNEL_SPIN", "COLLECTIVE_DIVERGED"},
)
def one_worker_of_vllm_never_returns() -> Evidence:
    line = (
        "(EngineCore_DP0 pid=31001) INFO 11-27 22:{}:20 [shm_broadcast.py:466] No available shared memory "
        "broadcast block found in 60 seconds. This typically happens when some processes are hanging "
        "or doing some time-consuming work (e.g. compilation).\n"
    )
    e = vllm(4, STARTED + "".join(line.format(n) for n in range(40, 46)), 20.0)
    e.http.append(HttpProbe("/v1/completions", 0, 30.0, "timeout"))
    for p in t.ranks_of(e):
        t.burn(p, 1.0, 1.0 if p.rank == 3 else 0.5)
    wait = [
        "_model_forward (vllm/v1/worker/gpu_model_runner.py:2400)",
        "execute_model (vllm/v1/worker/gpu_worker.py:446)",
        "worker_busy_loop (vllm/v1/executor/multiproc_executor.py:832)",
    ]
    t.dump(e, {n: ["apply (corp_plugins/limits.py:41)", *wait] if n == 3 else wait for n in range(4)}, busy=range(4))
    e.stacks[3].state = "active+gil"
    g.h100(e, [100, 100, 100, 0], 138.0)
    return e


@case(
    "tenth, vLLM templates a huge chat",
    "vllm-project/vllm#24910",
    first="API_LOOP_BLOCKED",
    never=HEALTHY | DEAD | {"RANK_SPIN", "KERNEL_SPIN"},
)
def vllm_api_renders_for_minutes() -> Evidence:
    e = vllm(2, STARTED, 300.0)
    e.http = [HttpProbe("/health", 0, 5.0, "timeout"), HttpProbe("/v1/models", 0, 5.0, "timeout")]
    t.burn(t.head(e), 1.0, 0.99)
    for p in t.ranks_of(e):
        t.sleep(p, t.EPOLL, voluntary=25.0)
    e.stacks = [
        Stack(
            t.HEAD,
            "launcher",
            "",
            "active+gil",
            [
                "encode_chat_completion (mistral_common/tokens/tokenizers/mistral.py:160)",
                "apply_chat_template (vllm/transformers_utils/tokenizers/mistral.py:250)",
                "run (uvicorn/server.py:67)",
            ],
        )
    ]
    e.deep = True
    g.h100(e, 0, 119.0)
    return e


@case(
    "tenth, a GPU is lost and the kernel log is closed",
    "dmesg_restrict",
    first="XID",
    never=HEALTHY | {"RANK_SPIN", "KERNEL_SPIN"},
)
def lost_gpu_by_its_tool_alone() -> Evidence:
    log = g.decode(g.ready(8), 12, 800.0)
    e = g.serving(8, log, 400.0, health=0)
    for p in t.ranks_of(e):
        t.burn(p, 1.0, 0.5)
    e.probes.append(
        g.silent_probe(
            "nvidia-smi",
            "Unable to determine the device handle for GPU3: 0000:5D:00.0: GPU is lost. Reboot the "
            "system to recover this GPU",
            0.4,
        )
    )
    g.lacking(e, "dmesg", "py-spy", "strace")
    return e


@case(
    "tenth, dispatch to experts of another host",
    "sgl-project/sglang#26482",
    first="MISSING_RANK KERNEL_SPIN",
    never=HEALTHY | DEAD | {"P2P_BLOCKED", "API_LOOP_BLOCKED", "JIT_COMPILING"},
)
def experts_elsewhere_do_not_answer() -> Evidence:
    log = g.decode(g.ready(8), 33, 2200.0)
    log.say(
        "Health check failed. Server couldn't get a response from detokenizer for last 20 seconds. tic "
        "start time: 22:31:08. last_heartbeat time: 22:30:51"
    )
    e = g.serving(8, log, 120.0, health=503)
    e.target.nodes, e.target.ranks = 2, 16
    for p in t.ranks_of(e):
        t.burn(p, 1.0, 0.9)
    frames = [
        "dispatch (deep_ep/buffer_v2.py:545)",
        "_dispatch_core (sglang/srt/layers/moe/token_dispatcher/deepep.py:390)",
        "forward_deepep (sglang/srt/models/deepseek_v2.py:812)",
    ]
    t.dump(e, dict.fromkeys(range(8), frames), busy=range(8))
    g.h100(e, 100, 152.0)
    g.lacking(e, "ras")
    return e


@case(
    "tenth, it was told to end and does not",
    "SIGTERM, and NCCL waits",
    first="KERNEL_SPIN RANK_SPIN COLLECTIVE_DIVERGED UNKNOWN",
    never=HEALTHY | {"PARENT_WAITS_READY", "P2P_BLOCKED", "WARMUP_STALL"},
)
def ranks_that_outlast_the_end() -> Evidence:
    log = g.decode(g.ready(4), 1, 90.0)
    log.say("SIGTERM received. signum=None frame=None. Draining requests and shutting down...")
    e = g.serving(4, log, 900.0)
    e.port.open, e.port.ours, e.http = False, False, []
    t.sleep(t.head(e), ("do_wait", "61 0x7923 0x7ffd"))
    for p in t.ranks_of(e):
        t.burn(p, 1.0, 0.5)
    e.gpus = [GpuFacts(n, 100, 71_800, 139.0, 700.0, 81_559, "NVIDIA H100 80GB HBM3") for n in range(4)]
    g.lacking(e, "py-spy", "strace", "ras")
    return e
