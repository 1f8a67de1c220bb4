"""Every code: what it says, and public reports of the same kind (owner/repository#number)."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Code:
    """``meaning`` completes "the verdict says that"; ``reports`` are where others met it, and what maintainers said."""

    meaning: str
    reports: tuple[str, ...] = ()


CODES: dict[str, Code] = {
    "HEALTHY": Code("the server answers and works"),
    "IDLE_OK": Code(
        "the server answers and has nothing to do; its schedulers poll, which is no hang",
        ("sgl-project/sglang#1730", "sgl-project/sglang#9863"),
    ),
    "BUSY_NOT_HUNG": Code(
        "it moves by some measure, or has been silent for less than it may be",
        ("sgl-project/sglang#22511", "sgl-project/sglang#10856", "sgl-project/sglang#26568", "NVIDIA/nccl#1646"),
    ),
    "NOT_RUNNING": Code("fleetdump stop ended it"),
    "LOADING_SLOW": Code(
        "weights arrive, at the rate that is named", ("vllm-project/vllm#40988", "vllm-project/vllm#24469")
    ),
    "JIT_COMPILING": Code(
        "kernels are being compiled, by children or inside a rank",
        ("sgl-project/sglang#5580", "sgl-project/sglang#24588", "sgl-project/sglang-omni#1194"),
    ),
    "GRAMMAR_COMPILE": Code(
        "a grammar for structured output is being compiled", ("vllm-project/vllm#14151", "sgl-project/sglang#39125")
    ),
    "PARENT_WAITS_READY": Code("before the port opens, nothing moves and a living rank owes its ready message"),
    "PARENT_WAITS_DEAD_RANK": Code(
        "the launcher waits for a rank that is dead", ("sgl-project/sglang#20287", "sgl-project/sglang#21626")
    ),
    "PIPE_EOF_IMPOSSIBLE": Code("somebody reads a pipe to which only it could write", ("sgl-project/sglang#34233",)),
    "LAUNCHER_DIED": Code("the launcher is gone; the first exception says whose fault it was"),
    "RANK_CRASHED": Code("a rank raised or crashed, and the server has not ended itself yet"),
    "API_ALIVE_ENGINE_DEAD": Code(
        "the HTTP server answers for an engine, rank or detokenizer that is dead",
        ("sgl-project/sglang#21486", "vllm-project/vllm#21443"),
    ),
    "DEAD_READER_RING_FULL": Code(
        "the engine waits for room in a ring that a dead worker should read", ("vllm-project/vllm#45644",)
    ),
    "OOM_KILLED": Code(
        "the kernel killed a process of it for memory", ("sgl-project/sglang#20287", "vllm-project/vllm#45626")
    ),
    "IMPORT_STALL": Code("an import never ends", ("sgl-project/sglang#11796",)),
    "LOADER_DEADLOCK": Code("the loader stands still: all ranks sleep, nothing is read", ("sgl-project/sglang#25748",)),
    "JIT_STALE_LOCK": Code(
        "a compile lock that a dead process left is waited for",
        ("flashinfer-ai/flashinfer#972", "sgl-project/sglang#4389"),
    ),
    "LOCK_WAIT": Code("a lock of somebody alive, or on another host, is waited for", ("flashinfer-ai/flashinfer#993",)),
    "JIT_COLLECTIVE_CROSSLOCK": Code("one rank waits for a lock whose holder waits for it in a collective"),
    "GRAPH_CAPTURE": Code(
        "graph capture stands still and no rank stands out",
        ("sgl-project/sglang#4007", "sgl-project/sglang#4417", "vllm-project/vllm#46933"),
    ),
    "MISSING_RANK": Code(
        "one rank, or another host, is not where all others wait for it", ("NVIDIA/nccl#394", "NVIDIA/nccl#905")
    ),
    "RANK_SPIN": Code("a rank of a server that has served burns a core and never comes back"),
    "WARMUP_STALL": Code("the port is open and the warm-up request never ends", ("sgl-project/sglang#17941",)),
    "COLLECTIVE_DIVERGED": Code(
        "ranks are in different collectives, or in one with different sizes",
        ("sgl-project/sglang#22607", "sgl-project/sglang#27221", "pytorch/pytorch#97191"),
    ),
    "KERNEL_SPIN": Code(
        "a GPU kernel never ends and every rank waits for it",
        ("sgl-project/sglang#30209", "sgl-project/sglang#33642", "vllm-project/vllm#2731"),
    ),
    "P2P_BLOCKED": Code(
        "the first collective over PCIe never ends: peer access is blocked",
        ("NVIDIA/nccl#2079", "pytorch/pytorch#75658", "sgl-project/sglang#3666"),
    ),
    "WRONG_INTERFACE": Code(
        "ranks announce an address that other hosts cannot reach",
        ("sgl-project/sglang#3226", "vllm-project/vllm#7074", "NVIDIA/nccl#377"),
    ),
    "IPV6_LOOPBACK": Code("the host speaks IPv6 only and ranks look for each other at an IPv4 address"),
    "PORT_IN_USE": Code("another process listens on the server's port"),
    "PORT_RACE": Code("a port of its inner connections was taken meanwhile"),
    "BAD_BIND_HOST": Code("it was told to listen on an address that the host does not have"),
    "PROXY_WARMUP": Code(
        "its request to itself goes to a proxy", ("sgl-project/sglang#9814", "sgl-project/sglang#7341")
    ),
    "API_LOOP_BLOCKED": Code(
        "the HTTP server's own loop is stuck while the schedulers are free",
        ("sgl-project/sglang#40809", "sgl-project/sglang#36900", "sgl-project/sglang#30770"),
    ),
    "STOPPED_PROCESS": Code("a process is stopped (state T), or frozen with its container", ("moby/moby#46203",)),
    "TRACER_ATTACHED": Code("a debugger or tracer holds a process"),
    "STDOUT_PIPE_FULL": Code("a process cannot write its log: nobody reads the pipe"),
    "ORPHAN_GPU": Code(
        "GPU memory is held by a process that is not of this server",
        ("sgl-project/sglang#1533", "sgl-project/sglang#5426"),
    ),
    "MIXED_GPU": Code(
        "the server's GPUs are of different kinds, and it refused them",
        ("sgl-project/sglang#4233", "sgl-project/sglang#5426"),
    ),
    "GPU_WEDGED": Code("a GPU is busy for nobody", ("local-inference-lab/rtx6kpro#15",)),
    "FABRIC_MANAGER": Code(
        "the NVSwitch fabric is not initialised",
        ("huggingface/huggingface_hub#4134", "pytorch/pytorch#35710", "pytorch/pytorch#177472"),
    ),
    "XID": Code("the driver reported a GPU error, or lost a GPU", ("h2oai/h2ogpt#1195", "vllm-project/vllm#27430")),
    "DRIVER_D_STATE": Code(
        "a process sleeps in the GPU driver and cannot be killed",
        ("NVIDIA/open-gpu-kernel-modules#1333", "NVIDIA/open-gpu-kernel-modules#968", "NVIDIA/k8s-device-plugin#77"),
    ),
    "SHM_SMALL": Code("shared memory is too small, or full", ("vllm-project/vllm#1710", "NVIDIA/nccl#342")),
    "NOFILE": Code("a process has as many files open as it may"),
    "DISK_FULL": Code(
        "a file system that it writes to has no space or no inodes", ("ai-dynamo/dynamo#4087", "vllm-project/vllm#3568")
    ),
    "REMOTE_FS_HANG": Code("a network file system does not answer", ("ansible/ansible#43865", "ansible/ansible#30411")),
    "HUB_BLOCKED": Code("a download gets no bytes", ("huggingface/xet-core#293",)),
    "HUB_LOCK": Code(
        "a download lock that nobody here holds is waited for",
        ("huggingface/huggingface_hub#2543", "huggingface/huggingface_hub#3944", "modelscope/modelscope#1621"),
    ),
    "LOGIND_KILL": Code(
        "it was ended together with the login session that started it",
        ("systemd/systemd#8486", "systemd/systemd#43361"),
    ),
    "PTY_SIGHUP": Code("it died of SIGHUP when its terminal closed", ("fabric/fabric#1158", "fabric/fabric#1330")),
    "TIMEOUT_TOO_SHORT": Code(
        "a time limit ended it while it still worked",
        ("sgl-project/sglang-omni#1194", "sgl-project/sglang#24588", "sgl-project/sglang#5457"),
    ),
    "CHANNEL_HELD": Code(
        "beside a verdict: it holds the SSH channel that started it open", ("fabric/fabric#1815", "fabric/fabric#216")
    ),
    "LOG_ELSEWHERE": Code("beside a verdict: it writes to another file than the one that is watched"),
    "MODEL_FALLBACK": Code("beside a verdict: the model's own file did not import, a generic one runs"),
    "CPU_STARVED": Code("beside a verdict: its threads wait for CPU time"),
    "DIAG_BLIND": Code(
        "beside a verdict: ptrace is refused, so it rests on /proc alone", ("benfred/py-spy#8", "benfred/py-spy#12")
    ),
    "UNKNOWN": Code("nothing of the above fits; the three most telling facts, and the probe that would decide"),
    "SSH_THROTTLED": Code(
        "error of a connection: sshd dropped us before login (MaxStartups)",
        ("paramiko/paramiko#664", "paramiko/paramiko#2063"),
    ),
    "SSH_DEAD_PEER": Code(
        "error of a connection: the host or its sshd does not answer any more", ("fabric/fabric#1384",)
    ),
    "EMFILE_LOCAL": Code(
        "error of a connection: this machine has no descriptor left", ("ParallelSSH/parallel-ssh#311",)
    ),
    "WINDOW_DEADLOCK": Code(
        "cannot happen: both streams of a call are read at once", ("paramiko/paramiko#1778", "paramiko/paramiko#448")
    ),
    "TRANSFER_STALLED": Code(
        "cannot hang: a transfer ends with its deadline or its connection, and its size is checked",
        ("paramiko/paramiko#926", "paramiko/paramiko#1871"),
    ),
}
