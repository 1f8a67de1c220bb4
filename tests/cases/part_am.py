"""Part AM: the seventh set: hosts, drivers and containers."""

from __future__ import annotations

from cases import gpuhost as g
from cases import tree as t
from cases.table import HEALTHY, case
from fleetdump.agent.evidence_host import CgroupFacts, DiskFacts, GpuFacts, GpuProcess, LockFile
from fleetdump.agent.evidence_process import SocketFacts
from fleetdump.agent.evidence_types import Evidence

GIB = g.GIB


@case("seventh multicast", "pytorch/pytorch#177472", first="FABRIC_MANAGER", never=HEALTHY | {"XID", "P2P_BLOCKED"})
def multicast_refused_by_the_fabric() -> Evidence:
    log = g.start(8, 2)
    log.say("Scheduler hit an exception: Traceback (most recent call last):", "TP5")
    log.raw(
        '  File "/opt/venv/lib/python3.12/site-packages/torch/distributed/distributed_c10d.py", line 4818, in barrier',
        "    work = group.barrier(opts=opts)",
        "torch.distributed.DistBackendError: NCCL error in: "
        "/pytorch/torch/csrc/distributed/c10d/NCCLUtils.cpp:93, unhandled cuda error (run with "
        "NCCL_DEBUG=INFO for details), NCCL version 2.27.5",
        "ncclUnhandledCudaError: Call to CUDA function failed.",
        "Last error:",
        "Failed to bind NVLink SHARP (NVLS) Multicast memory of size 2097152 : CUDA error 401 'the "
        "operation cannot be performed in the present state'.",
        "This is usually caused by a system or configuration error in the Fabric Manager or NVSwitches.",
        "",
    )
    log.say("Received sigquit from a child process. It usually means the child failed.")
    e = g.gone(g.furnish(t.sglang(8, "init")))
    t.logged(e, log.text(), 300.0)
    e.gpus = [
        GpuFacts(n, 0, 4, 72.0, 700.0, 81_559, "NVIDIA H100 80GB HBM3", "In Progress", processes_known=True)
        for n in range(8)
    ]
    e.host.fabric_manager, e.host.gpu_links = "failed", ["NV18"]
    return e


@case(
    "seventh gsp",
    "NVIDIA/open-gpu-kernel-modules#446",
    first="XID DRIVER_D_STATE",
    also="XID",
    never=HEALTHY | {"RANK_SPIN", "ORPHAN_GPU"},
)
def firmware_of_a_gpu_does_not_answer() -> Evidence:
    log = g.ready(8)
    g.decode(log, 22, 1290.0)
    e = g.serving(8, log, 515.0, health=0)
    for n, p in enumerate(t.ranks_of(e)):
        if n != 5:
            t.burn(p, 1.0, 0.5)
    t.disk(t.rank(e, 5), "os_acquire_mutex", "_nv045221rm", "rm_ioctl", "nvidia_unlocked_ioctl", "__x64_sys_ioctl")
    e.kernel_log = [
        (
            f"[{512100 + 45 * n}.331] NVRM: Xid (PCI:0000:9b:00): 119, pid={t.pid_of(5)}, "
            f"name=sglang::schedul, Timeout after 45s of waiting for RPC response from GPU5 GSP! "
            f"Expected function 76 (GSP_RM_CONTROL) (0x20800a4c 0x4)."
        )
        for n in range(3)
    ]
    e.probes.append(g.silent_probe("nvidia-smi", "no answer within 10 s", 10.0))
    return e


@case(
    "seventh open",
    "NVIDIA/open-gpu-kernel-modules#968",
    first="DRIVER_D_STATE",
    never=HEALTHY | {"REMOTE_FS_HANG", "P2P_BLOCKED", "PARENT_WAITS_READY"},
)
def driver_lock_while_devices_are_opened() -> Evidence:
    e = g.sgl(2, 1, quiet=700.0)
    for p in t.ranks_of(e):
        t.disk(
            p,
            "rwsem_down_write_slowpath",
            "down_write",
            "os_acquire_rwlock_write",
            "rmapiLockAcquire",
            "RmInitAdapter",
            "nv_open_device",
            "nvidia_open",
            "chrdev_open",
        )
        assert p.main
        p.main.syscall = "257 0xffffff9c 0x7ffd 0x80802"
    e.kernel_log = [
        (
            f"[{9100 + 122 * n}.400] INFO: task sglang::schedul:{t.pid_of(n % 2)} blocked for more than "
            f"{122 * (1 + n)} seconds."
        )
        for n in range(3)
    ]
    e.probes.append(g.silent_probe("nvidia-smi", "no answer within 10 s", 10.0))
    g.lacking(e, "py-spy", "strace")
    return e


@case("seventh docker shm", "NVIDIA/nccl#342", first="SHM_SMALL", never=HEALTHY | {"DISK_FULL"})
def shared_memory_of_a_plain_container() -> Evidence:
    log = g.start(4, 2)
    log.raw(
        f"5b1c02:{t.pid_of(2)}:32017 [2] misc/shmutils.cc:87 NCCL WARN Error: failed to extend "
        f"/dev/shm/nccl-9xkGtH to 33030532 bytes, error: No space left on device (28)",
        f"5b1c02:{t.pid_of(2)}:32017 [2] misc/shmutils.cc:129 NCCL WARN Error while creating shared "
        f"memory segment /dev/shm/nccl-9xkGtH (size 33030528), error: No space left on device (28)",
    )
    log.say("Scheduler hit an exception: Traceback (most recent call last):", "TP2")
    log.raw(
        "torch.distributed.DistBackendError: NCCL error in: "
        "/pytorch/torch/csrc/distributed/c10d/NCCLUtils.hpp:268, unhandled system error (run with "
        "NCCL_DEBUG=INFO for details), NCCL version 2.27.5",
        "ncclSystemError: System call (e.g. socket, malloc) or external library call failed or device error.",
        "",
    )
    log.say("Received sigquit from a child process. It usually means the child failed.")
    e = g.gone(g.furnish(t.sglang(4, "init")))
    t.logged(e, log.text(), 100.0)
    e.disks = [d for d in e.disks if d.use != "shm"] + [DiskFacts("shm", "/dev/shm", 3 << 20, 64 << 20, 10**6, "tmpfs")]
    return e


@case("seventh inodes", "moby/moby#31038", first="DISK_FULL", never=HEALTHY | {"SHM_SMALL"})
def no_inodes_for_a_kernel_cache() -> Evidence:
    log = g.start(2, g.CAPTURE)
    log.say("Scheduler hit an exception: Traceback (most recent call last):", "TP0")
    log.raw(
        '  File "/opt/venv/lib/python3.12/site-packages/triton/runtime/cache.py", line 110, in put',
        "    os.makedirs(temp_dir, exist_ok=True)",
        "OSError: [Errno 28] No space left on device: '/root/.triton/cache/FZ2U/tmp.pid_31011_8831'",
        "",
    )
    log.say("Received sigquit from a child process. It usually means the child failed.")
    e = g.gone(g.furnish(t.sglang(2, "capture")))
    t.logged(e, log.text(), 61.0)
    e.disks = [d for d in e.disks if d.use not in ("home", "tmp")]
    e.disks += [
        DiskFacts(use, path, 390 * GIB, 890 * GIB, 0, "overlay") for use, path in (("home", "/root"), ("tmp", "/tmp"))
    ]
    return e


@case(
    "seventh left over",
    "sgl-project/sglang#23627 seen from the next job",
    first="ORPHAN_GPU",
    never=HEALTHY | {"OOM_KILLED", "MIXED_GPU"},
)
def memory_of_the_job_before() -> Evidence:
    log = g.start(4, g.WEIGHTS)
    log.say("Scheduler hit an exception: Traceback (most recent call last):", "TP2")
    log.raw(
        '  File "/opt/venv/lib/python3.12/site-packages/torch/nn/parameter.py", line 54, in __new__',
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.19 GiB. GPU 2 has a total "
        "capacity of 79.11 GiB of which 1.02 GiB is free. Process 2505783 has 76.20 GiB memory in use.",
        "",
    )
    log.say("Received sigquit from a child process. It usually means the child failed.")
    e = g.gone(g.furnish(t.sglang(4, "weights")))
    t.logged(e, log.text(), 500.0)
    e.gpus = [
        GpuFacts(
            n,
            0,
            78_100 if n == 2 else 4,
            118.0 if n == 2 else 71.0,
            700.0,
            81_559,
            "NVIDIA H100 80GB HBM3",
            processes_known=True,
        )
        for n in range(4)
    ]
    e.gpus[2].processes = [GpuProcess(2_505_783, 78_020, "sglang::schedul", orphan=True)]
    return e


@case(
    "seventh xet",
    "huggingface/xet-core#293",
    first="HUB_BLOCKED",
    never=HEALTHY | {"JIT_STALE_LOCK", "LOADER_DEADLOCK", "JIT_COLLECTIVE_CROSSLOCK"},
)
def download_whose_connections_are_silent() -> Evidence:
    e = g.sgl(4, g.WEIGHTS, quiet=2400.0, uptime=4000.0)
    log = g.start(4, g.WEIGHTS)
    log.raw("model-00014-of-00050.safetensors:  61%|######    | 2.94G/4.83G [09:12<05:55, 5.31MB/s]")
    t.logged(e, log.text(), 2400.0)
    first = t.rank(e, 0)
    t.sleep(first, t.FUTEX)
    first.sockets = [SocketFacts(90 + n, "ESTABLISHED", f"10.8.3.2:4{n}112", "18.160.46.77:443") for n in range(8)]
    lock = "/root/.cache/huggingface/hub/.locks/models--Q--q/sglang-model.lock"
    for n in (1, 2, 3):
        t.sleep(t.rank(e, n), g.NANOSLEEP, voluntary=20.0)
    e.lock_files = [LockFile(lock, 2950.0, first.pid, "hub", "overlay", True)]
    t.dump(
        e,
        {
            0: [
                "xet_get (huggingface_hub/file_download.py:627)",
                "_download_to_tmp_and_move (huggingface_hub/file_download.py:1864)",
                "snapshot_download (huggingface_hub/_snapshot_download.py:332)",
                "download_weights_from_hf (sglang/srt/model_loader/weight_utils.py:531)",
            ],
            **{
                n: [
                    "acquire (filelock/_api.py:344)",
                    "__enter__ (filelock/_api.py:375)",
                    "download_weights_from_hf (sglang/srt/model_loader/weight_utils.py:529)",
                ]
                for n in (1, 2, 3)
            },
        },
    )
    e.env_names.append("HF_XET_HIGH_PERFORMANCE")
    g.h100(e, 0, 116.0, 2300)
    return e


@case(
    "seventh frozen",
    "moby/moby#46203",
    first="STOPPED_PROCESS",
    never=HEALTHY | {"API_LOOP_BLOCKED", "MISSING_RANK", "RANK_SPIN"},
)
def container_that_somebody_paused() -> Evidence:
    log = g.ready(2)
    g.decode(log, 4, 301.8)
    e = g.serving(2, log, 3900.0, health=0, other=0)
    for p in e.processes:
        t.sleep(p, ("do_freezer_trap", "running"))
        p.kernel_stack = ["do_freezer_trap", "get_signal", "arch_do_signal_or_restart", "exit_to_user_mode_loop"]
        p.cpu = 0.0
    e.cgroup = CgroupFacts("/system.slice/docker-5b1c02.scope", 63 * GIB, 0, {"oom_kill": 0})
    g.h100(e, 0, 120.0)
    g.lacking(e, "py-spy", "strace")
    return e


@case(
    "seventh stale handle",
    "PrimeIntellect-ai/prime-rl#2305",
    first="RANK_CRASHED",
    rank=3,
    never=HEALTHY | {"KERNEL_SPIN", "COLLECTIVE_DIVERGED", "P2P_BLOCKED"},
)
def one_rank_lost_its_cache_file() -> Evidence:
    log = g.opening(g.start(8, g.CAPTURE))
    log.say("Scheduler hit an exception: Traceback (most recent call last):", "TP3")
    log.raw(
        '  File "/opt/venv/lib/python3.12/site-packages/triton/backends/nvidia/driver.py", line 68, in '
        "compile_module_from_src",
        "    mod = importlib.util.module_from_spec(spec)",
        "ImportError: /home/svc/.triton/cache/ODPQ/__triton_launcher.cpython-312-x86_64-linux-gnu.so: "
        "cannot stat shared object: Stale file handle",
        "",
    )
    log.say("Received sigquit from a child process. It usually means the child failed.")
    log.say("Waiting 60.0 seconds for CUDA coredumps before exiting")
    e = g.furnish(t.warming(t.sglang(8, "warmup"), 0))
    t.logged(e, log.text(), 21.0)
    t.sleep(t.head(e), g.NANOSLEEP)
    for n, p in enumerate(t.ranks_of(e)):
        if n == 3:
            t.sleep(p, g.NANOSLEEP)
        else:
            t.burn(p, 1.0, 0.6)
    g.h100(e, [100, 100, 100, 0, 100, 100, 100, 100], 136.0)
    g.lacking(e, "py-spy", "ras")
    return e
