"""Part U: bundles as a person writes them by hand from docs/evidence.md: JSON with what matters and nothing else."""

from __future__ import annotations

from typing import Any

from cases.table import HANGS, HEALTHY, case
from fleetdump.agent.evidence_types import Evidence
from fleetdump.agent.protocol import from_json

SLEEP = {"wchan": "futex_wait_queue", "syscall": "202 0x7f 0x80"}
SPIN = {"state": "R", "cpu": 0.98, "user_share": 0.99, "syscall": "running"}
POLL = {"cpu": 0.95, "user_share": 0.5, "voluntary": 11000.0, "wchan": "do_poll", "syscall": "7 0x7f 0x1 0x0"}


def proc(pid: int, role: str, main: dict[str, Any], **fields: Any) -> dict[str, Any]:
    name = {"launcher": "python3", "scheduler": "sglang::schedul", "engine": "VLLM::EngineCor"}.get(role, role)
    state = main.get("state", "S")
    thread = {"tid": pid, "name": name, "state": state, **main}
    parent = 1 if role == "launcher" else 10
    facts = {"pid": pid, "ppid": parent, "role": role, "name": name, "start_time": 1, "state": state, "main": thread}
    return {**facts, "state_before": state, "cpu": main.get("cpu", 0.0), **fields}


def rank(n: int, main: dict[str, Any] | None = None, **fields: Any) -> dict[str, Any]:
    return proc(20 + n, "scheduler", SLEEP if main is None else main, rank=n, label=f"TP{n}", **fields)


def bundle(ranks: int, phase: str, *processes: dict[str, Any], **fields: Any) -> Evidence:
    """A server of ``ranks`` whose log ends in ``phase``, silent for ten minutes."""
    log = {"path": "/l", "exists": True, "bytes": 9000, "lines": 200, "quiet_seconds": 600.0, "phase": phase}
    if phase not in ("imports", "init"):
        marks = ["weights begin", "weights end"]
        log["ranks"] = [{"label": f"TP{n}", "rank": n, "phase": phase, "marks": marks} for n in range(ranks)]
    log.update(fields.pop("log", {}))
    target = {"pid": 10, "port": 8000, "ranks": ranks, **fields.pop("target", {})}
    base = {"target": target, "taken_at": 1796000000.0, "seconds": 6.0, "uptime": 900.0, "log": log}
    launcher = proc(10, "launcher", fields.pop("launcher", {"wchan": "ep_poll", "syscall": "232 0x5"}))
    return from_json(Evidence, {**base, "processes": [launcher, *processes], **fields})


def answering(health: int, error: str = "") -> dict[str, Any]:
    port = {"port": 8000, "open": True, "owner_pid": 10, "ours": True}
    return {"port": port, "http": [{"path": "/health", "status": health, "seconds": 2.0, "error": error}]}


@case("U01", "kind of H1", first="PARENT_WAITS_READY", never=HEALTHY, rank=1, phase="kv_pool")
def last_of_two_spins() -> Evidence:
    return bundle(2, "kv_pool", rank(0), rank(1, SPIN))


@case("U02", "kind of A1", first="PARENT_WAITS_DEAD_RANK", never=HEALTHY, rank=1)
def last_of_two_is_gone() -> Evidence:
    return bundle(2, "kv_pool", rank(0), launcher={"wchan": "unix_stream_read_generic", "syscall": "0 0x7"})


@case("U03", "kind of E1", first="IDLE_OK", never=HANGS)
def schedulers_poll_at_full_speed() -> Evidence:
    return bundle(2, "serving", rank(0, POLL), rank(1, POLL), log={"ready": True}, **answering(200))


@case("U04", "kind of E4", first="BUSY_NOT_HUNG", never=HANGS)
def batches_move_and_health_does_not() -> Evidence:
    log = {"ready": True, "forwards": 4, "news": 4, "growth": 600, "quiet_seconds": 1.0}
    return bundle(2, "serving", rank(0, SPIN), rank(1, SPIN), log=log, **answering(503))


@case("U05", "kind of S2", first="RANK_SPIN", never=HEALTHY, rank=0)
def first_of_three_spins_while_serving() -> Evidence:
    return bundle(3, "serving", rank(0, SPIN), rank(1), rank(2), log={"ready": True}, **answering(0, "timeout"))


@case("U06", "kind of B2", first="LOADING_SLOW", never=HANGS, phase="weights")
def mapped_files_are_read_page_by_page() -> Evidence:
    reads = {"read_bytes_delta": 30_000_000, "majflt_delta": 1800}
    return bundle(2, "weights", rank(0, {"state": "D", "wchan": "folio_wait_bit_common"}, **reads), rank(1, **reads))


@case("U07", "kind of C1", first="JIT_COMPILING", never=HANGS, phase="capture")
def sixteen_compilers_during_capture() -> Evidence:
    jobs = [proc(100 + n, "compiler", {"state": "R", "cpu": 0.97}, name="cicc") for n in range(16)]
    return bundle(2, "capture", rank(0), rank(1), *jobs)


@case("U08", "kind of C5", first="JIT_STALE_LOCK", never=HEALTHY)
def lock_file_of_yesterday() -> Evidence:
    frames = ["wait (torch/utils/file_baton.py:51)", "_jit_compile (torch/utils/cpp_extension.py:2014)"]
    stacks = [
        {"pid": 20 + n, "role": "scheduler", "label": f"TP{n}", "state": "idle", "frames": frames} for n in (0, 1)
    ]
    lock = {"path": "/root/.cache/torch_extensions/py312_cu128/k/lock", "age_seconds": 90000.0}
    return bundle(2, "jit", rank(0), rank(1), stacks=stacks, lock_files=[lock])


@case("U09", "kind of C7", first="LOCK_WAIT", never=HEALTHY | {"JIT_STALE_LOCK"}, rank=0)
def lock_on_a_network_home() -> Evidence:
    lock = {"kind": "FLOCK", "inode": 4, "holder": 0, "waiter": 20, "path": "/home/u/.cache/x.lock", "fstype": "nfs4"}
    return bundle(2, "jit", rank(0, {"wchan": "nfs4_proc_lock", "syscall": "73 0x9 0x2"}), rank(1), locks=[lock])


@case("U10", "kind of D13", first="COLLECTIVE_DIVERGED", never=HEALTHY, rank=2)
def stacks_in_two_collectives() -> Evidence:
    places = {0: "broadcast", 1: "broadcast", 2: "all_reduce", 3: "broadcast"}
    stacks = [
        {"pid": 20 + n, "role": "scheduler", "label": f"TP{n}", "state": "idle",
         "frames": [f"{name} (torch/distributed/distributed_c10d.py:1)", "loop (scheduler.py:5)"]}
        for n, name in places.items()
    ]  # fmt: skip
    ranks = [rank(n, {"wchan": "ep_poll", "syscall": "232 0x9"}) for n in range(4)]
    return bundle(4, "serving", *ranks, stacks=stacks, log={"ready": True}, **answering(0, "timeout"))


@case("U11", "kind of D1", first="P2P_BLOCKED", never=HEALTHY | {"KERNEL_SPIN"}, phase="init")
def first_collective_over_pcie() -> Evidence:
    gpus = [{"index": n, "utilization": 100, "memory_used": 600, "power": 82.0, "power_limit": 350.0} for n in (0, 1)]
    host = {"gpu_links": ["PHB"], "acs_redirects": 2}
    return bundle(2, "init", rank(0, SPIN), rank(1, SPIN), gpus=gpus, host=host)


@case("U12", "kind of D14", first="KERNEL_SPIN", never=HEALTHY | {"P2P_BLOCKED", "COLLECTIVE_DIVERGED"})
def every_gpu_waits_in_the_same_kernel() -> Evidence:
    gpus = [
        {"index": n, "utilization": 100, "memory_used": 70_000, "power": 190.0, "power_limit": 700.0} for n in (0, 1)
    ]
    fields = {"gpus": gpus, "ras": {"status": "OK", "communicators": 2}, **answering(0, "timeout")}
    return bundle(2, "serving", rank(0, SPIN), rank(1, SPIN), log={"ready": True}, **fields)


@case("U13", "kind of D5", first="GPU_WEDGED", never=HEALTHY)
def gpu_busy_without_a_process() -> Evidence:
    gpus = [{"index": 0, "utilization": 100, "memory_used": 500, "power": 118.0, "processes_known": True}]
    found = bundle(1, "serving", gpus=gpus, launcher_alive=False)
    found.processes = []
    return found


@case("U14", "kind of D8", first="WRONG_INTERFACE", never=HEALTHY)
def peers_are_looked_for_on_loopback() -> Evidence:
    socket = {"fd": 9, "state": "SYN_SENT", "local": "127.0.0.1:5", "remote": "127.0.0.1:29500"}
    return bundle(4, "init", rank(2, sockets=[socket]), rank(3, sockets=[socket]),
                  target={"nodes": 2, "node_rank": 1}, host={"name_resolves_to": ["127.0.1.1"]})  # fmt: skip


@case("U15", "kind of F4", first="DRIVER_D_STATE", never=HEALTHY, rank=0)
def rank_cannot_be_killed() -> Evidence:
    stack = ["rwsem_down_write_slowpath", "uvm_ioctl", "__x64_sys_ioctl"]
    asleep = {"state": "D", "wchan": "rwsem_down_write_slowpath", "syscall": "16 0x9"}
    return bundle(2, "kv_pool", rank(0, asleep, kernel_stack=stack, kill_pending=True), rank(1))


@case("U16", "kind of F5", first="XID", never=HEALTHY)
def kernel_log_names_a_lost_gpu() -> Evidence:
    line = "[5000.0] NVRM: Xid (PCI:0000:9b:00): 79, GPU has fallen off the bus."
    return bundle(
        2, "serving", rank(0, SPIN), rank(1), kernel_log=[line], log={"ready": True}, **answering(0, "timeout")
    )


@case("U17", "kind of A4", first="API_ALIVE_ENGINE_DEAD", never=HEALTHY)
def vllm_answers_for_a_dead_engine() -> Evidence:
    found = bundle(
        1, "serving", proc(30, "engine", {"state": "Z"}, exit_signal=9), log={"ready": True}, **answering(200)
    )
    found.processes[0].cmdline = "vllm serve /models/m"
    return found


@case("U18", "kind of row 33", first="STOPPED_PROCESS", never=HEALTHY, rank=1)
def rank_is_stopped() -> Evidence:
    return bundle(2, "serving", rank(0), rank(1, {"state": "T", "wchan": "do_signal_stop"}), log={"ready": True},
                  **answering(0, "timeout"))  # fmt: skip


@case("U19", "kind of E2", first="PROXY_WARMUP", never=HEALTHY)
def own_request_meets_a_proxy() -> Evidence:
    log = {"server_marks": ["http start", "http open"], "troubles": {"proxy_refused": "res=<Response [502]>"}}
    fields = {"proxy": {"http_proxy": "proxy:3128", "no_proxy": "localhost"}, **answering(503)}
    return bundle(1, "warmup", rank(0), log=log, target={"host": "0.0.0.0"}, **fields)


@case("U20", "kind of A10", first="WARMUP_STALL", never=HEALTHY, phase="warmup")
def nobody_moves_in_the_warmup() -> Evidence:
    log = {"server_marks": ["http start", "http open", "model info"]}
    return bundle(2, "warmup", rank(0), rank(1), log=log, **answering(503))


@case("U21", "kind of A11", first="API_LOOP_BLOCKED", never=HEALTHY | {"RANK_SPIN"})
def launcher_burns_and_schedulers_poll() -> Evidence:
    polls = {**POLL, "cpu": 0.7}
    return bundle(2, "serving", rank(0, polls), rank(1, polls), launcher=SPIN, log={"ready": True},
                  **answering(0, "timeout"))  # fmt: skip


@case("U22", "kind of F7", first="HUB_LOCK", never=HEALTHY)
def lock_of_a_download_that_crashed() -> Evidence:
    path = "/nfs/hf/hub/.locks/models--a--b/1.lock"
    log = {"waits_for_lock": path, "repeated": 50, "growth": 400, "quiet_seconds": 2.0, "news_seconds": 600.0}
    lock = {"path": path, "age_seconds": 80000.0, "use": "hub"}
    return bundle(1, "imports", log=log, lock_files=[lock])


@case("U23", "kind of F1", first="SHM_SMALL", never=HEALTHY, rank=1)
def second_rank_had_a_bus_error() -> Evidence:
    disk = {"use": "shm", "path": "/dev/shm", "free_bytes": 0, "total_bytes": 67108864}
    return bundle(2, "init", rank(0), rank(1, {"state": "Z"}, exit_signal=7), disks=[disk])


@case("U24", "kind of E5", first="GRAMMAR_COMPILE", never=HANGS | HEALTHY)
def thread_of_the_scheduler_compiles_a_schema() -> Evidence:
    stack = {"pid": 20, "role": "scheduler", "label": "TP0", "state": "active",
             "frames": ["compile_json_schema (xgrammar/compiler.py:210)"]}  # fmt: skip
    return bundle(1, "serving", rank(0, SPIN), stacks=[stack], log={"ready": True}, **answering(0, "timeout"))


@case("U25", "kind of C9", first="JIT_COMPILING", never=HANGS, rank=1)
def one_rank_is_inside_triton() -> Evidence:
    stacks = [
        {"pid": 20, "role": "scheduler", "label": "TP0", "state": "active", "frames": ["forward (m.py:1)"]},
        {"pid": 21, "role": "scheduler", "label": "TP1", "state": "active+gil",
         "frames": ["make_cubin (triton/backends/nvidia/compiler.py:400)", "compile (triton/compiler/x.py:300)"]},
    ]  # fmt: skip
    return bundle(
        2, "serving", rank(0, SPIN), rank(1, SPIN), stacks=stacks, log={"ready": True}, **answering(0, "timeout")
    )


@case("U26", "kind of D10", first="BUSY_NOT_HUNG", never=HANGS)
def set_up_takes_a_minute() -> Evidence:
    return bundle(8, "init", *(rank(n, SPIN) for n in range(8)), log={"quiet_seconds": 64.0})


@case("U27", "kind of F10", first="DISK_FULL", never=HEALTHY)
def log_stops_in_mid_line() -> Evidence:
    disk = {"use": "log", "path": "/var/log", "free_bytes": 0, "total_bytes": 10**11}
    return bundle(1, "kv_pool", rank(0, SPIN), disks=[disk], log={"unterminated": True})


@case("U28", "kind of F8", first="PARENT_WAITS_READY", also="DIAG_BLIND", never=HEALTHY, rank=0)
def ptrace_is_refused() -> Evidence:
    probe = {"name": "py-spy TP0", "ok": False, "seconds": 0.1, "detail": "Operation not permitted (os error 1)"}
    return bundle(1, "capture", rank(0, SPIN), probes=[probe])
