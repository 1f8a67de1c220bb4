"""Part AP: an eighth set, by one who knew the signatures: kinds that looked weak, in mechanisms "
"that no other part has."""

from __future__ import annotations

from cases import gpuhost as g
from cases import tree as t
from cases.table import DEAD, HANGS, HEALTHY, case
from fleetdump.agent.evidence_engine import HttpProbe, PortFacts
from fleetdump.agent.evidence_host import CgroupFacts, CpuFacts, LockFile, Pressure
from fleetdump.agent.evidence_process import PipeEnd, SocketFacts, Stack, ThreadFacts
from fleetdump.agent.evidence_types import Evidence


@case(
    "eighth, sockets that nobody closes",
    "Kludex/uvicorn#1199",
    first="NOFILE",
    never=HEALTHY | DEAD | {"API_LOOP_BLOCKED", "RANK_SPIN"},
)
def no_descriptor_for_another_client() -> Evidence:
    log = g.decode(g.ready(2), 5, 377.0)
    log.say("ERROR:asyncio:socket.accept() out of system resource")
    log.raw(
        "socket: <asyncio.TransportSocket fd=43, family=2, type=1, proto=0, laddr=('0.0.0.0', 9123)>",
        "OSError: [Errno 24] Too many open files",
    )
    e = g.serving(2, log, 420.0, health=0, other=0)
    head = t.head(e)
    head.fd_count = head.fd_limit = 1024
    head.sockets = [SocketFacts(60 + n, "CLOSE_WAIT", "10.4.1.9:9123", f"10.4.1.2:5{n:04d}") for n in range(40)]
    g.h100(e, 0, 121.0)
    return e


@case(
    "eighth, download lock of a pod that is gone",
    "huggingface/huggingface_hub#2543",
    first="HUB_LOCK",
    never=HEALTHY | {"JIT_STALE_LOCK", "LOADER_DEADLOCK", "REMOTE_FS_HANG"},
)
def lock_in_a_shared_hub_cache() -> Evidence:
    e = g.sgl(4, g.WEIGHTS, quiet=3000.0, uptime=3100.0)
    for p in t.ranks_of(e):
        t.sleep(p, g.NANOSLEEP, voluntary=20.0)
    e.lock_files = [LockFile("/shared/hf/hub/.locks/models--Q--q/7d31.lock", 33_000.0, 0, "hub", "nfs4")]
    frames = [
        "acquire (filelock/_api.py:344)",
        "WeakFileLock (huggingface_hub/utils/_fixes.py:98)",
        "_hf_hub_download_to_cache_dir (huggingface_hub/file_download.py:1142)",
        "snapshot_download (huggingface_hub/_snapshot_download.py:332)",
    ]
    t.dump(e, dict.fromkeys(range(4), frames))
    g.h100(e, 0, 116.0, 2300)
    return e


@case(
    "eighth, tee writes to a dead share",
    "python -m sglang.launch_server | tee /nfs/log",
    first="STDOUT_PIPE_FULL REMOTE_FS_HANG",
    also="STDOUT_PIPE_FULL",
    never=HEALTHY | {"PARENT_WAITS_READY", "MISSING_RANK"},
)
def log_through_tee() -> Evidence:
    e = g.sgl(4, g.LOADED, quiet=700.0)
    for p in t.ranks_of(e):
        p.stdout = p.stderr = "pipe:[88120]"
    writer = t.rank(e, 2)
    t.sleep(writer, ("anon_pipe_write", "1 0x2 0x7f31 0xa1"), 2)
    writer.pipes = [PipeEnd(2, 88120, "w", [30_990], peer_states="D", peer_names=["tee"])]
    e.kernel_log = ["[441210.220] nfs: server 10.20.0.5 not responding, still trying"]
    g.h100(e, 0, 119.0)
    g.lacking(e, "py-spy", "strace")
    return e


@case(
    "eighth, public address of a cloud host",
    "--host <external ip>",
    first="BAD_BIND_HOST",
    never=HEALTHY | {"PORT_IN_USE", "PORT_RACE"},
)
def address_translated_elsewhere() -> Evidence:
    log = g.start(2, g.CAPTURE)
    log.say(f"INFO:     Started server process [{t.HEAD}]")
    log.say(
        "ERROR:    [Errno 99] error while attempting to bind on address ('34.118.7.20', 9123): cannot "
        "assign requested address"
    )
    log.say("INFO:     Waiting for application shutdown.")
    e = g.gone(g.furnish(t.sglang(2, "http")))
    t.logged(e, log.text(), 60.0)
    e.target.host = "34.118.7.20"
    e.host.addresses = {"lo": ["127.0.0.1"], "ens5": ["10.128.0.7"]}
    return e


@case(
    "eighth, port of a docker proxy",
    "docker -p 9123:80",
    first="PORT_IN_USE",
    never=HEALTHY | {"PORT_RACE", "BAD_BIND_HOST"},
)
def published_by_another_container() -> Evidence:
    log = g.start(2, g.CAPTURE)
    log.say(f"INFO:     Started server process [{t.HEAD}]")
    log.say("ERROR:    [Errno 98] error while attempting to bind on address ('0.0.0.0', 9123): address already in use")
    e = g.gone(g.furnish(t.sglang(2, "http")))
    t.logged(e, log.text(), 60.0)
    e.port = PortFacts(9123, True, 0, "", False)
    e.http = [HttpProbe("/health", 404, 0.01)]
    return e


@case(
    "eighth, detokenizer asleep in a lock",
    "huggingface/tokenizers#187",
    first="UNKNOWN",
    never=HEALTHY | DEAD | {"RANK_SPIN", "API_LOOP_BLOCKED", "COLLECTIVE_DIVERGED", "MISSING_RANK"},
)
def answers_stop_behind_the_schedulers() -> Evidence:
    log = g.decode(g.ready(2), 1, 150.0)
    log.say(
        "Health check failed. Server couldn't get a response from detokenizer for last 20 seconds. tic "
        "start time: 22:31:08. last_heartbeat time: 22:18:51"
    )
    e = g.serving(2, log, 300.0, health=503)
    t.sleep(next(p for p in e.processes if p.role == "detokenizer"), t.FUTEX)
    g.h100(e, 0, 121.0)
    g.lacking(e, "py-spy", "strace")
    return e


@case(
    "eighth, a probe of one second",
    "modelplaneai/modelplane#206",
    first="IDLE_OK",
    never=HANGS | DEAD | {"UNKNOWN", "NOFILE"},
)
def health_takes_a_second() -> Evidence:
    log = g.ready(4)
    for n in range(30):
        log.say(f'INFO:     10.42.7.1:5{n:04d} - "GET /health HTTP/1.1" 200 OK', after=10)
    e = g.serving(4, log, 8.0)
    e.http[0].seconds = 1.002
    t.head(e).sockets = [SocketFacts(70 + n, "CLOSE_WAIT", "10.42.7.9:9123", f"10.42.7.1:5{n:04d}") for n in range(3)]
    g.h100(e, 0, 121.0)
    return e


@case(
    "eighth, a debugger left behind",
    "gdb -p on a rank",
    first="TRACER_ATTACHED",
    rank=1,
    never=HEALTHY | {"COLLECTIVE_DIVERGED", "KERNEL_SPIN"},
)
def debugger_holds_a_rank() -> Evidence:
    log = g.decode(g.ready(4), 9, 611.0)
    e = g.serving(4, log, 900.0, health=0)
    for p in t.ranks_of(e):
        t.burn(p, 1.0, 0.5)
    held = t.rank(e, 1)
    t.sleep(held, ("ptrace_stop", "202 0x7f 0x189"))
    held.state = held.state_before = "t"
    held.tracer_pid = 8812
    g.h100(e, [100, 0, 100, 100], 138.0)
    return e


@case(
    "eighth, a rank writes its core",
    "segfault with ulimit -c unlimited",
    first="RANK_CRASHED API_ALIVE_ENGINE_DEAD",
    rank=2,
    never=HEALTHY | {"DRIVER_D_STATE", "REMOTE_FS_HANG", "KERNEL_SPIN", "COLLECTIVE_DIVERGED", "OOM_KILLED"},
)
def core_of_hundreds_of_gigabytes() -> Evidence:
    log = g.decode(g.ready(4), 9, 611.0)
    log.raw("Fatal Python error: Segmentation fault", "", "Thread 0x00007f2b8effd640 (most recent call first):")
    e = g.serving(4, log, 200.0, health=0)
    for p in t.ranks_of(e):
        t.burn(p, 1.0, 0.5)
    dying = t.rank(e, 2)
    t.disk(
        dying,
        "folio_wait_bit_common",
        "generic_perform_write",
        "dump_emit",
        "elf_core_dump",
        "do_coredump",
        "get_signal",
    )
    dying.write_bytes_delta = dying.wchar_delta = 900_000_000
    e.kernel_log = [
        (
            "[99120.118] sglang::schedul[31013]: segfault at 7f00 ip 00007f1e8c2a11f3 sp 00007ffd3b6aa0d0 "
            "error 4 in libcuda.so.570[7f1e8a000000+9a31000]"
        )
    ]
    g.h100(e, [100, 100, 0, 100], 138.0)
    return e


@case(
    "eighth, one rank loads more slowly than the barrier allows",
    "sgl-project/sglang#5457",
    first="TIMEOUT_TOO_SHORT",
    never=HEALTHY | {"OOM_KILLED", "RANK_CRASHED"},
)
def barrier_after_the_weights() -> Evidence:
    log = g.start(4, g.WEIGHTS)
    log.say(
        "Load weight end. type=DeepseekV3ForCausalLM, dtype=torch.bfloat16, avail mem=20.14 GB, mem usage=57.38 GB.",
        "TP0",
        300,
    )
    log.raw("Loading safetensors checkpoint shards:  98% Completed | 160/163 [31:58<00:30, 10.12s/it]")
    log.say("Scheduler hit an exception: Traceback (most recent call last):", "TP0", 480)
    log.raw(
        '  File "/opt/venv/lib/python3.12/site-packages/torch/distributed/distributed_c10d.py", line '
        "4951, in monitored_barrier",
        "RuntimeError: [../third_party/gloo/gloo/transport/tcp/unbound_buffer.cc:81] Timed out waiting "
        "480000ms for recv operation to complete",
        "",
        "During handling of the above exception, another exception occurred:",
        "",
        "Traceback (most recent call last):",
        "ValueError: TP rank 0 could finish the model loading, but there are other ranks that didn't "
        "finish loading. It is likely due to unexpected failures (e.g., OOM) or a slow node.",
        "",
    )
    log.say("Received sigquit from a child process. It usually means the child failed.")
    e = g.gone(g.furnish(t.sglang(4, "weights")))
    t.logged(e, log.text(), 70.0)
    return e


@case(
    "eighth, the fabric lost a port",
    "NVIDIA/nccl#905",
    first="MISSING_RANK",
    never=HEALTHY | DEAD | {"P2P_BLOCKED", "GPU_WEDGED"},
)
def infiniband_times_out() -> Evidence:
    log = g.decode(g.ready(8), 12, 488.0)
    log.raw(
        "gpu-b07:31013:31755 [2] transport/net_ib.cc:2121 NCCL WARN NET/IB: Got completion from peer "
        "10.9.0.3<40021> with status=IBV_WC_RETRY_EXC_ERR(12) opcode=IBV_WC_RDMA_WRITE(1) "
        "reqSize=0 vendor_err=129 req_type=Send localGid fe80::1 remoteGids fe80::2 hca mlx5_2",
        "gpu-b07:31013:31755 [2] NCCL INFO transport/net.cc:1336 -> 6",
    )
    e = g.serving(8, log, 260.0, health=0)
    e.target.ranks, e.target.nodes = 16, 2
    for p in t.ranks_of(e):
        t.burn(p, 1.0, 0.5)
    g.h100(e, 100, 140.0)
    g.lacking(e, "py-spy", "strace", "ras")
    return e


@case(
    "eighth, a request that can never be admitted",
    "sgl-project/sglang#39271",
    first="UNKNOWN WARMUP_STALL",
    never=HEALTHY | DEAD | {"RANK_SPIN", "API_LOOP_BLOCKED", "KERNEL_SPIN"},
)
def schedulers_poll_and_admit_nobody() -> Evidence:
    log = g.decode(g.ready(2), 1, 88.0, 3)
    e = g.serving(2, log, 600.0)
    e.http.append(HttpProbe("/v1/completions", 0, 30.0, "timeout"))
    g.h100(e, 0, 122.0)
    return e


@case(
    "eighth, weights are packed anew on the GPU",
    "process_weights_after_loading",
    first="BUSY_NOT_HUNG LOADING_SLOW",
    never=HANGS | DEAD | {"UNKNOWN"},
)
def quantisation_after_the_shards() -> Evidence:
    log = g.start(4, g.WEIGHTS)
    log.raw("Loading safetensors checkpoint shards: 100% Completed | 163/163 [04:11<00:00,  1.54s/it]")
    e = g.sgl(4, g.WEIGHTS)
    t.logged(e, log.text(), 240.0)
    for p in t.ranks_of(e):
        t.burn(p, 1.0, 0.8)
    frames = [
        "requant_weight_ue8m0_inplace (sglang/srt/layers/quantization/fp8_utils.py:611)",
        "process_weights_after_loading (sglang/srt/layers/quantization/fp8.py:1011)",
        "load_model (sglang/srt/model_loader/loader.py:640)",
    ]
    t.dump(e, dict.fromkeys(range(4), frames), busy=range(4))
    g.h100(e, [97, 99, 96, 98], 471.0)
    return e


@case(
    "eighth, import on a twentieth of a core",
    "docker --cpus=0.5 with 8 ranks",
    first="BUSY_NOT_HUNG",
    also="CPU_STARVED",
    never=HANGS | DEAD | {"IMPORT_STALL", "UNKNOWN"},
)
def import_in_a_throttled_container() -> Evidence:
    e = g.sgl(1, 0, quiet=200.0, uptime=205.0)
    e.processes = [t.head(e)]
    head = t.head(e)
    head.pipes, head.cpu, head.state = [], 0.47, "R"
    head.rchar_delta, head.rss_delta = 90_000, 400_000
    head.main = ThreadFacts(head.pid, "python3", "R", 0.47, 0.99, 0.86, 0.4, "0", "running")
    e.cgroup = CgroupFacts("/docker/5b", 3 * g.GIB, 0, {}, 0.5, 50, 49, 2.3)
    e.cpus = CpuFacts(192, 3.0, 2)
    e.stacks = [
        Stack(
            t.HEAD,
            "launcher",
            "",
            "active+gil",
            [
                "_compile_bytecode (<frozen importlib._bootstrap_external>:784)",
                "exec_module (<frozen importlib._bootstrap_external>:1022)",
                "<module> (transformers/models/auto/modeling_auto.py:22)",
            ],
        )
    ]
    e.deep = True
    return e


@case(
    "eighth, weights are read again while it serves",
    "POST /update_weights_from_disk",
    first="BUSY_NOT_HUNG",
    never=HANGS | DEAD | {"UNKNOWN", "API_LOOP_BLOCKED"},
)
def weights_updated_in_place() -> Evidence:
    log = g.decode(g.ready(4), 1, 90.0)
    log.say("Start update_weights. Load format=auto")
    e = g.serving(4, log, 170.0, health=503)
    for p in t.ranks_of(e):
        t.disk(p, "folio_wait_bit_common")
        p.state, p.read_bytes_delta, p.majflt_delta = "R", 410_000_000, 900
        assert p.main
        p.main.cpu = p.cpu = 0.3
    g.h100(e, 0, 125.0)
    return e


@case(
    "eighth, memory.high throttles the loader",
    "systemd MemoryHigh=",
    first="LOADER_DEADLOCK PARENT_WAITS_READY",
    never=HEALTHY | DEAD | {"REMOTE_FS_HANG", "DRIVER_D_STATE", "LOADING_SLOW"},
)
def throttled_for_its_memory() -> Evidence:
    e = g.sgl(2, g.WEIGHTS, quiet=1400.0)
    for p in t.ranks_of(e):
        t.sleep(p, ("mem_cgroup_handle_over_high", "0 0x9 0x7f 0x1000"))
        p.kernel_stack = ["mem_cgroup_handle_over_high", "exit_to_user_mode_loop"]
        p.rss = 120 * g.GIB
    e.cgroup = CgroupFacts(
        "/system.slice/sglang.service", 256 * g.GIB, 0, {"high": 8_112_334, "max": 0, "oom_kill": 0}, 0.0, 50
    )
    e.pressure = [Pressure("memory", "cgroup", 99.0, 98.0)]
    g.h100(e, 0, 118.0, 9000)
    g.lacking(e, "py-spy", "strace")
    return e
