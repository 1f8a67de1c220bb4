"""Part S: the blind set of part Q goes on: ports, processes, GPUs and hosts."""

from __future__ import annotations

from cases import tree as t
from cases.table import DEAD, HANGS, HEALTHY, case
from fleetdump.agent.evidence_engine import (
    PortFacts,
)
from fleetdump.agent.evidence_host import (
    CgroupFacts,
    DiskFacts,
    GpuFacts,
    GpuProcess,
    LockFile,
)
from fleetdump.agent.evidence_process import (
    PipeEnd,
    ThreadFacts,
)
from fleetdump.agent.evidence_types import Evidence, ProbeRecord

INIT = ("init begin",)


# ------------------------------------------------------------------ ports, processes, host
@case("Q59 tenant", "kind of row 21", first="PORT_IN_USE", never=HEALTHY | {"PORT_RACE"})
def a_web_server_holds_the_port() -> Evidence:
    e = t.sglang(1, "http", (*t.LOADED, "scheduler ready"), quiet=20.0)
    e.port = PortFacts(t.PORT, True, 812, "nginx")
    e.log.troubles = {
        "port_in_use": "ERROR: [Errno 98] error while attempting to bind on address ('0.0.0.0', "
        "9123): address already in use"
    }
    return e


@case("Q60 inner port", "kind of row 22", first="PORT_RACE", never=HEALTHY | {"PORT_IN_USE"})
def the_store_finds_its_port_taken() -> Evidence:
    e = t.sglang(2, "init", INIT, quiet=5.0)
    e.launcher_alive, e.processes = False, []
    e.log.troubles = {
        "port_in_use": "torch.distributed.DistNetworkError: The server socket has failed to listen "
        "on any local network address. port: 40337, useIpv6: false, code: -98, name: "
        "EADDRINUSE, message: address already in use"
    }
    e.log.crash, e.log.crash_label = "torch.distributed.DistNetworkError: The server socket has failed to listen", "TP0"
    return e


@case("Q61 foreign address", "kind of row 21", first="BAD_BIND_HOST", never=HEALTHY | {"PORT_IN_USE"})
def it_is_told_to_listen_at_an_address_of_another_host() -> Evidence:
    e = t.sglang(1, "http", (*t.LOADED, "scheduler ready"), quiet=9.0)
    e.launcher_alive, e.processes = False, []
    e.target.host = "10.9.9.9"
    e.host.addresses = {"eth0": ["10.1.0.4"]}
    e.log.troubles = {
        "cannot_bind": "[Errno 99] error while attempting to bind on address ('10.9.9.9', 9123): "
        "cannot assign requested address"
    }
    return e


@case("Q62 job control", "kind of S5", first="STOPPED_PROCESS", never=HEALTHY)
def the_whole_tree_was_stopped_from_a_terminal() -> Evidence:
    e = t.served(t.sglang(2, "serving"), 0, 0)
    for p in e.processes:
        p.state = p.state_before = "T"
        p.main = ThreadFacts(p.pid, p.name, "T", wchan="do_signal_stop")
    return e


@case("Q63 debugger", "kind of row 33", first="TRACER_ATTACHED", never=HEALTHY | {"STOPPED_PROCESS"}, rank=1)
def gdb_was_left_attached_to_a_rank() -> Evidence:
    e = t.served(t.sglang(2, "serving"), 0, 200, running=1)
    p = t.rank(e, 1)
    p.state, p.state_before, p.tracer_pid = "t", "t", 65_001
    p.main = ThreadFacts(p.pid, p.name, "t", wchan="ptrace_stop")
    return e


@case("Q64 pager", "kind of row 32", first="STDOUT_PIPE_FULL", never=HEALTHY)
def the_log_goes_to_a_pager_that_shows_its_first_page() -> Evidence:
    e = t.served(t.sglang(1, "serving"), 0, 0)
    p = t.head(e)
    t.sleep(p, ("pipe_write", "1 0x1 0x7f 0x80"), 1)
    p.stdout, p.writes_log = "pipe:[7123]", False
    p.pipes = [PipeEnd(1, 7123, "w", [700], peer_states="S", peer_names=["less"])]
    e.target.log, e.log.path, e.log.exists = "", "", False
    return e


@case("Q65 remains of a run", "kind of row 23", first="ORPHAN_GPU", never=HEALTHY)
def memory_is_held_by_workers_of_an_earlier_vllm() -> Evidence:
    e = t.sglang(2, "init", INIT, quiet=20.0)
    e.launcher_alive, e.processes = False, []
    e.log.troubles = {"out_of_memory": "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 20.00 GiB"}
    t.cards(e, [0, 0], 120.0, used=150_000)
    for g in e.gpus:
        g.processes_known, g.processes = True, [GpuProcess(900 + g.index, 149_000, "VLLM::Worker_TP", orphan=True)]
    return e


@case("Q66 busy for nobody", "kind of D5", first="GPU_WEDGED", never=HEALTHY)
def a_card_works_without_a_process() -> Evidence:
    e = t.sglang(2, "init", INIT, quiet=200.0)
    t.cards(e, [100, 0], 150.0, used=700)
    for g in e.gpus:
        g.processes_known = True
    return e


@case("Q67 fabric", "kind of F2", first="FABRIC_MANAGER", never=HEALTHY)
def the_switches_were_never_initialised() -> Evidence:
    e = t.sglang(4, "init", INIT, quiet=9.0)
    e.launcher_alive, e.processes = False, []
    e.log.troubles = {"cuda_802": "RuntimeError: CUDA driver initialization failed: system not yet initialized (802)"}
    t.cards(e, [0] * 4, 90.0, used=0)
    for g in e.gpus:
        g.fabric = "In Progress"
    e.host.fabric_manager = "failed"
    return e


@case("Q68 GSP", "kind of row 35", first="XID", never=HEALTHY)
def the_card_s_own_processor_does_not_answer() -> Evidence:
    e = t.served(t.sglang(4, "serving"), 0, 200, running=4)
    for p in t.ranks_of(e):
        t.burn(p)
    e.kernel_log = [
        "[248000.3] NVRM: Xid (PCI:0000:9b:00): 119, pid=31012, name=sglang::schedul, Timeout after "
        "45s of waiting for RPC response from GPU1 GSP!"
    ]
    return e


@case("Q69 driver", "kind of F4", first="DRIVER_D_STATE", never=HEALTHY)
def a_rank_that_was_killed_stays_in_the_driver() -> Evidence:
    e = t.served(t.sglang(2, "serving"), 0, 200, running=4)
    t.disk(t.rank(e, 1), "__rwsem_down_read", "os_acquire_rwlock_read", "nvidia_unlocked_ioctl", "__x64_sys_ioctl")
    t.rank(e, 1).kill_pending = True
    return e


@case("Q70 shm", "kind of F1", first="SHM_SMALL", never=HEALTHY)
def a_rank_died_of_a_bus_error_on_a_tiny_shm() -> Evidence:
    e = t.sglang(4, "init", INIT, quiet=200.0)
    gone = t.rank(e, 2)
    gone.state = gone.state_before = "Z"
    gone.exit_signal, gone.main = 7, None
    e.disks = [DiskFacts("shm", "/dev/shm", 12 << 10, 64 << 20, 1000, "tmpfs")]
    return e


@case("Q71 descriptors", "kind of row 27", first="NOFILE", never=HEALTHY)
def every_request_fails_for_want_of_a_descriptor() -> Evidence:
    e = t.served(t.sglang(1, "serving"), 0, 0, "reset")
    t.head(e).fd_count, t.head(e).fd_limit = 1024, 1024
    e.log.troubles = {"too_many_files": "OSError: [Errno 24] Too many open files"}
    return e


@case("Q72 inodes", "kind of row 31", first="DISK_FULL", never=HEALTHY)
def the_log_s_file_system_has_no_inode_left() -> Evidence:
    e = t.served(t.sglang(1, "serving"), 0, 0)
    e.disks = [DiskFacts("log", "/data", 9 << 30, 1 << 40, 0, "ext4")]
    e.log.troubles = {"disk_full": "OSError: [Errno 28] No space left on device: '/data/cap/x.part'"}
    return e


@case("Q73 throttled", "kind of row 43", first="BUSY_NOT_HUNG HEALTHY IDLE_OK", also="CPU_STARVED", never=HANGS | DEAD)
def a_quota_of_two_cores_for_eight_ranks() -> Evidence:
    e = t.served(t.sglang(8, "serving"), 200, 200, running=8)
    e.log.forwards, e.log.news, e.log.growth, e.log.quiet_seconds = 1, 1, 120, 3.0
    e.cgroup = CgroupFacts("/kubepods/pod7", cpu_limit=2.0, periods=60, throttled=60, throttled_seconds=190.0)
    for p in t.ranks_of(e):
        t.burn(p, 0.25, 0.8, 30.0)
    return e


@case("Q74 session", "kind of G11", first="LOGIND_KILL", never=HEALTHY)
def the_server_went_with_the_session_that_started_it() -> Evidence:
    e = t.served(t.sglang(1, "serving"), 0, 0, "refused")
    e.port, e.launcher_alive, e.processes, e.log.quiet_seconds = PortFacts(t.PORT), False, [], 40.0
    e.host.cgroup = "/user.slice/user-1001.slice/session-88.scope"
    e.host.logins = [f"{e.taken_at - 40.0:.1f} Session 88 logged out. Waiting for processes to exit."]
    return e


@case("Q75 limit of a script", "kind of C1", first="TIMEOUT_TOO_SHORT", never=HEALTHY | {"RANK_CRASHED"})
def a_time_limit_ended_the_compilation() -> Evidence:
    e = t.sglang(2, "jit", (*t.LOADED, "jit"), quiet=30.0)
    e.launcher_alive, e.processes = False, []
    e.log.troubles = {"startup_timeout": "TimeoutError: server did not become ready within 600 s"}
    return e


@case("Q76 log rotated", "kind of row 30", first="IDLE_OK HEALTHY", also="LOG_ELSEWHERE", never=HANGS | DEAD)
def the_watched_log_was_replaced() -> Evidence:
    e = t.served(t.sglang(1, "serving"))
    t.head(e).stdout, t.head(e).writes_log = "/data/run/out.txt (deleted)", False
    e.log.bytes = e.log.lines = 0
    return e


@case("Q77 no ptrace", "kind of F8", first="RANK_SPIN", also="DIAG_BLIND", never=HEALTHY | DEAD, rank=0)
def spin_seen_without_any_tool() -> Evidence:
    e = t.served(t.sglang(2, "serving"), 0, 200, running=1)
    t.sleep(t.rank(e, 1), t.EPOLL)
    t.burn(t.rank(e, 0), 0.96)
    e.probes = [
        ProbeRecord("py-spy", False, 0.2, "ptrace refused: yama 3"),
        ProbeRecord("strace", False, 0.1, "ptrace refused: yama 3"),
    ]
    return e


@case("Q78 two at once", "kind of H10", first="XID", also="PARENT_WAITS_DEAD_RANK", never=HEALTHY)
def a_card_is_lost_and_its_rank_with_it() -> Evidence:
    e = t.sglang(8, "kv_pool")
    t.sleep(t.head(e), t.PIPE, 27)
    t.lose(e, 6)
    e.gpus = [GpuFacts(n, 0, 90_000, 130.0, 1000.0) for n in range(8) if n != 6]
    e.kernel_log = ["[1400.0] NVRM: Xid (PCI:0000:d1:00): 79, GPU has fallen off the bus."]
    return e


@case("Q79 on Arm", "kind of A1", first="PARENT_WAITS_DEAD_RANK", never=HEALTHY, rank=1)
def the_same_on_a_processor_with_other_call_numbers() -> Evidence:
    e = t.sglang(2, "kv_pool")
    e.host.machine = "aarch64"
    t.sleep(t.head(e), ("pipe_read", "63 0x1b 0xffff 0x4"), 27)
    t.lose(e, 1)
    return e


@case("Q80 stale files of others", "look-alike of C5", first="IDLE_OK HEALTHY", never=HANGS | DEAD | {"LOCK_WAIT"})
def a_healthy_server_beside_an_old_lock_file() -> Evidence:
    e = t.served(t.sglang(2, "serving"))
    e.lock_files = [LockFile("/root/.cache/torch_extensions/x/lock", 500_000.0)]
    return e
