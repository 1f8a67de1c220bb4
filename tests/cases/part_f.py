"""Part F: host, driver, container, hub."""

from __future__ import annotations

from cases import builder as b
from cases.table import HANGS, HEALTHY, case
from fleetdump.agent.evidence_host import (
    CgroupFacts,
    DiskFacts,
    GpuFacts,
    LockFile,
)
from fleetdump.agent.evidence_process import SocketFacts, Stack
from fleetdump.agent.evidence_types import Evidence

SMALL = DiskFacts("shm", "/dev/shm", 20 << 20, 64 << 20, 10**5, "tmpfs")


@case("F1 line", "vllm-project/vllm#1710", first="SHM_SMALL", never=HEALTHY | {"DISK_FULL"})
def nccl_could_not_make_its_segment() -> Evidence:
    e = b.server(2, troubles={"shm_failed": "NCCL WARN Error while creating shared memory segment (size 9637888)"})
    b.at_phase(e, "init", "init begin")
    e.disks.append(SMALL)
    return e


@case("F1 signal", "NVIDIA/nccl#342", first="SHM_SMALL", never=HEALTHY)
def rank_ended_by_a_bus_error() -> Evidence:
    e = b.server(2)
    dead = b.rank(e, 1)
    dead.state, dead.role, dead.rank, dead.label, dead.exit_signal = "Z", "other", None, "", 7
    e.disks.append(SMALL)
    return e


@case("F1 files", "reference row 27", first="NOFILE", never=HEALTHY)
def no_descriptor_left() -> Evidence:
    e = b.server(2, troubles={"too_many_files": "OSError: [Errno 24] Too many open files"})
    b.launcher(e).fd_count, b.launcher(e).fd_limit = 1023, 1024
    return e


@case("F2", "huggingface/huggingface_hub#4134", first="FABRIC_MANAGER", never=HEALTHY)
def fabric_is_not_up() -> Evidence:
    e = b.server(8, crash="RuntimeError: CUDA error 802: system not yet initialized", crash_label="TP0")
    e.log.troubles = {"cuda_802": e.log.crash}
    b.gpus(e, *([0] * 8))
    for gpu in e.gpus:
        gpu.fabric = "In Progress"
    e.host.fabric_manager = "inactive"
    b.dead(e)
    return e


@case("F4 stack", "NVIDIA/open-gpu-kernel-modules#1333", first="DRIVER_D_STATE", never=HEALTHY, rank=2)
def driver_lock_is_orphaned() -> Evidence:
    e = b.server(4)
    b.disk_sleep(b.rank(e, 2), "mutex_lock", "uvm_ioctl", "__x64_sys_ioctl")
    b.rank(e, 2).kill_pending = True
    b.failed_probe(e, "nvidia-smi", "no answer within 9 s")
    return e


@case("F4 no stack", "NVIDIA/open-gpu-kernel-modules#1333", first="DRIVER_D_STATE", never=HEALTHY)
def driver_sleep_seen_without_root() -> Evidence:
    e = b.server(4)
    b.disk_sleep(b.rank(e, 2), "rwsem_down_read_slowpath")
    b.rank(e, 2).kernel_stack = []
    b.failed_probe(e, "nvidia-smi", "no answer within 9 s")
    return e


@case("F5", "h2oai/h2ogpt#1195", first="XID", never=HEALTHY)
def gpu_fell_off_the_bus() -> Evidence:
    e = b.server(8)
    b.serving(e)
    b.listening(e, 0, "timeout")
    e.log.ready = True
    e.kernel_log = ["[900.0] NVRM: Xid (PCI:0000:1b:00): 79, pid=1, GPU has fallen off the bus."]
    b.failed_probe(e, "nvidia-smi", "nvidia-smi ended with 15: Unable to determine the device handle for GPU0")
    return e


@case("F5 no kernel log", "vllm-project/vllm#27430", first="XID", never=HEALTHY)
def gpu_lost_and_the_kernel_log_refused() -> Evidence:
    e = b.server(8)
    b.failed_probe(e, "dmesg", "dmesg: read kernel buffer failed: Operation not permitted")
    b.failed_probe(e, "nvidia-smi", "nvidia-smi ended with 15: Unable to determine the device handle for GPU0")
    return e


def downloading() -> Evidence:
    e = b.server(1, phase="imports")
    e.log.ranks, e.processes, e.watch = [], [b.launcher(e)], None
    return e


@case("F7", "huggingface/huggingface_hub#2543", first="HUB_LOCK", never=HEALTHY | {"HUB_BLOCKED", "IMPORT_STALL"})
def download_lock_of_a_dead_process() -> Evidence:
    e = downloading()
    path = "/nfs/hub/.locks/models--m/abc.lock"
    e.log.growth, e.log.quiet_seconds, e.log.repeated, e.log.waits_for_lock = 300, 4.0, 40, path
    e.lock_files = [LockFile(path, 90_000.0, use="hub", fstype="nfs4")]
    return e


@case("F6 hub", "reference row 28", first="HUB_BLOCKED", never=HEALTHY | {"IMPORT_STALL", "HUB_LOCK"})
def download_gets_no_bytes() -> Evidence:
    e = downloading()
    b.launcher(e).sockets = [SocketFacts(9, "SYN_SENT", "192.0.2.10:40000", "203.0.113.5:443")]
    frames = ["connect (socket.py:1)", "http_get (huggingface_hub/file_download.py:2)", "snapshot_download (x.py:3)"]
    e.stacks = [Stack(b.LAUNCHER, "launcher", "", "idle", frames)]
    return e


@case("F6 hub, no ptrace", "reference row 28", first="HUB_BLOCKED", never=HEALTHY)
def download_connection_is_silent() -> Evidence:
    e = downloading()
    b.launcher(e).sockets = [SocketFacts(9, "ESTABLISHED", "192.0.2.10:40000", "203.0.113.5:443")]
    return e


@case("F8", "benfred/py-spy#8", first="PARENT_WAITS_READY", also="DIAG_BLIND", never=HEALTHY, rank=1)
def ptrace_refused_in_a_container() -> Evidence:
    e = b.server(2)
    b.spin(b.rank(e, 1))
    b.failed_probe(e, "py-spy TP1", "Permission Denied: ptrace refused (yama 1, no CAP_SYS_PTRACE)")
    b.failed_probe(e, "strace TP1", "ptrace(PTRACE_SEIZE): Operation not permitted")
    return e


@case("F10 full", "ai-dynamo/dynamo#4087", first="DISK_FULL", never=HEALTHY)
def no_block_left() -> Evidence:
    e = b.server(2, unterminated=True)
    b.spin(b.rank(e, 0))
    e.disks = [DiskFacts("log", "/srv", 0, 10**12, 10**6, "ext4")]
    return e


@case("F10 nearly", "vllm-project/vllm#3568", first="PARENT_WAITS_READY", never=HEALTHY | {"DISK_FULL"})
def nearly_full_is_no_cause() -> Evidence:
    e = b.server(2)
    b.spin(b.rank(e, 0))
    e.disks = [DiskFacts("log", "/srv", 3 << 30, 10**12, 10**6, "ext4")]
    return e


@case("F11", "reference row 3", first="REMOTE_FS_HANG", never=HEALTHY | {"DRIVER_D_STATE", "LOADING_SLOW"}, rank=0)
def file_server_is_gone() -> Evidence:
    e = b.server(2)
    b.at_phase(e, "weights", "init begin", "init end", "weights begin")
    b.disk_sleep(b.rank(e, 0), "rpc_wait_bit_killable", "nfs4_call_sync")
    e.gpus = [GpuFacts(0, 0, 400)]
    return e


@case("F12 throttled", "reference row 43", first="IDLE_OK", also="CPU_STARVED", never=HANGS)
def container_has_used_up_its_share() -> Evidence:
    e = b.server(2)
    b.serving(e)
    e.cgroup = CgroupFacts(cpu_limit=2.0, periods=50, throttled=48)
    return e


@case("F12 free", "look-alike of reference row 43", first="IDLE_OK", never=HANGS | {"CPU_STARVED"})
def container_is_throttled_now_and_then() -> Evidence:
    e = container_has_used_up_its_share()
    e.cgroup.throttled = 3
    return e
