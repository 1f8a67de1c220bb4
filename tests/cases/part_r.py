"""Part R: a second blind set; many of its logs are texts that the agent's own reader reads."""

from __future__ import annotations

from cases import tree as t
from cases.sampletext import SERVING, TWO_LOADED, VLLM_LOADING
from cases.table import DEAD, HANGS, HEALTHY, case
from fleetdump.agent.evidence_engine import (
    PortFacts,
)
from fleetdump.agent.evidence_host import (
    LockFile,
)
from fleetdump.agent.evidence_process import (
    Stack,
)
from fleetdump.agent.evidence_types import Evidence


@case("R01 both siblings after", "kind of A1", first="OOM_KILLED", also="PARENT_WAITS_DEAD_RANK",
      never=HEALTHY)  # fmt: skip
def two_ranks_were_killed_and_the_launcher_polls() -> Evidence:
    e = t.sglang(2, "kv_pool")
    t.logged(e, TWO_LOADED, 800.0)
    t.lose(e, 0, 1)
    e.cgroup.memory_events = {"oom": 2, "oom_kill": 2}
    return e


@case("R02 vLLM shards", "kind of B2", first="LOADING_SLOW", never=HANGS | DEAD)
def shards_of_vllm_fault_in_from_a_local_disk() -> Evidence:
    e = t.vllm(2)
    t.logged(e, VLLM_LOADING, 70.0)
    for p in t.ranks_of(e):
        t.disk(p, "folio_wait_bit_common", "filemap_fault", "ext4_filemap_fault")
        p.read_bytes_delta, p.majflt_delta = 40 << 20, 900
    return e


@case("R03 vLLM shards stand", "kind of B1", first="LOADER_DEADLOCK PARENT_WAITS_READY", never=HEALTHY | DEAD)
def shards_of_vllm_do_not_move() -> Evidence:
    e = t.vllm(2)
    t.logged(e, VLLM_LOADING, 2400.0)
    e.memory.total, e.memory.pressure_full = 500 << 30, 35.0
    return e


@case("R04 one log, compilers", "kind of B6", first="JIT_COMPILING", never=HANGS | DEAD)
def after_the_weights_a_rank_has_compilers() -> Evidence:
    e = t.sglang(2, "kv_pool")
    t.logged(e, TWO_LOADED, 300.0)
    e.processes += [t.child(50_000 + n, "compiler", "cicc", "R", ppid=t.pid_of(1), cpu=1.0) for n in range(3)]
    return e


@case("R05 one log, a lock", "kind of H3", first="JIT_STALE_LOCK", never=HEALTHY | DEAD, rank=1)
def after_the_weights_a_rank_waits_for_a_dead_lock() -> Evidence:
    e = t.sglang(2, "kv_pool")
    t.logged(e, TWO_LOADED, 1300.0)
    t.sleep(t.rank(e, 0), t.EPOLL)
    t.sleep(t.rank(e, 1), t.SLEEP, voluntary=10.0)
    wait = ["sleep (<built-in>)", "wait (file_baton.py:49)", "load (cpp_extension.py:1900)", "get_module (ops.py:9)"]
    t.dump(e, {0: ["barrier (distributed_c10d.py:4800)", "warmup (model_runner.py:9)"], 1: wait})
    e.lock_files = [LockFile("/cache/torch_extensions/ops/lock", 7200.0)]
    return e


@case("R06 one log, sums", "kind of H4", first="P2P_BLOCKED COLLECTIVE_DIVERGED KERNEL_SPIN", never=HEALTHY | DEAD)
def after_the_weights_both_cards_wait() -> Evidence:
    e = t.sglang(2, "kv_pool")
    t.logged(e, TWO_LOADED, 700.0)
    for p in t.ranks_of(e):
        t.burn(p, user=0.9)
    t.cards(e, [100, 100], 110.0, 450.0, 62_000)
    e.host.gpu_links = ["NODE"]
    return e


@case("R07 one log, serves", "kind of H7", first="IDLE_OK", never=HANGS | DEAD | {"UNKNOWN"})
def the_same_log_frozen_and_the_server_answers() -> Evidence:
    e = t.served(t.sglang(2, "serving"))
    t.logged(e, TWO_LOADED + SERVING, 86_000.0)
    return e


@case("R08 client waits", "kind of F7", first="HUB_LOCK", never=HEALTHY | DEAD)
def the_log_grows_by_one_line_again_and_again() -> Evidence:
    e = t.sglang(1, "imports", ())
    line = (
        "Still waiting to acquire lock on "
        "/nfs/home/u/.cache/huggingface/.locks/models--q/ab12.lock (elapsed: {0} seconds)\n"
    )
    t.logged(e, "starting\n" + "".join(line.format(10 * n) for n in range(60)), 3.0, line.format(610))
    e.lock_files = [
        LockFile("/nfs/home/u/.cache/huggingface/.locks/models--q/ab12.lock", 300_000.0, use="hub", fstype="nfs")
    ]
    return e


@case("R09 vLLM idle", "look-alike of E7", first="IDLE_OK HEALTHY", never=HANGS | DEAD | {"UNKNOWN"})
def statistics_of_an_idle_vllm() -> Evidence:
    e = t.served(t.vllm(2))
    line = (
        "INFO 05-01 11:00:{0} [loggers.py:120] Engine 000: Avg prompt throughput: 0.0 tokens/s, "
        "Avg generation throughput: 0.0 tokens/s, Running: 0 reqs, Waiting: 0 reqs, GPU KV cache usage: 0.0%\n"
    )
    t.logged(e, "INFO:     Application startup complete.\n" + "".join(line.format(10 + n) for n in range(9)), 6.0)
    for p in t.ranks_of(e):
        t.sleep(p, t.FUTEX)
    return e


@case(
    "R10 vLLM stuck",
    "kind of E7",
    first="UNKNOWN RANK_SPIN MISSING_RANK KERNEL_SPIN",
    never=HEALTHY | DEAD | {"IDLE_OK"},
)
def statistics_of_a_vllm_that_gives_nothing() -> Evidence:
    e = t.served(t.vllm(2))
    line = (
        "INFO 05-01 11:{0}:00 [loggers.py:120] Engine 000: Avg prompt throughput: 0.0 tokens/s, "
        "Avg generation throughput: 0.0 tokens/s, Running: 4 reqs, Waiting: 11 reqs, GPU KV cache usage: 3.1%\n"
    )
    t.logged(
        e,
        "INFO:     Application startup complete.\n" + "".join(line.format(10 + n) for n in range(20)),
        6.0,
        line.format(30),
    )
    for p in t.ranks_of(e):
        t.burn(p, user=0.7)
    t.cards(e, [100, 100], 160.0)
    return e


@case("R11 address family", "kind of row 6", first="IPV6_LOOPBACK", never=HEALTHY | DEAD | {"BAD_BIND_HOST"})
def log_says_that_ipv4_does_not_exist() -> Evidence:
    e = t.sglang(2, "init", ("init begin",))
    text = (
        "[2026-05-01 10:00:10 TP0] Init torch distributed begin.\n[W] socket.cpp: [c10d] The "
        "client socket has failed to connect to 127.0.0.1:40211 (errno: 99 - Cannot assign requested address).\n"
    )
    t.logged(e, text, 300.0)
    e.host.addresses = {"eth0": ["fd00:1::7"]}
    return e


@case("R12 own address", "kind of row 21", first="BAD_BIND_HOST", never=HEALTHY | {"IPV6_LOOPBACK"})
def uvicorn_cannot_listen_there() -> Evidence:
    e = t.sglang(1, "http")
    e.target.host = "192.0.2.200"
    t.logged(
        e,
        TWO_LOADED.replace("TP1", "TP0")
        + "INFO:     Started server process [9]\nERROR:    [Errno 99] error while attempting to bind "
        "on address ('192.0.2.200', 9123): cannot assign requested address\n",
        40.0,
    )
    e.launcher_alive, e.processes = False, []
    e.host.addresses = {"eth0": ["192.0.2.7"]}
    return e


@case("R13 two servers", "kind of row 21", first="PORT_IN_USE", never=HEALTHY | {"PORT_RACE", "BAD_BIND_HOST"})
def uvicorn_finds_its_port_taken() -> Evidence:
    e = t.sglang(1, "http")
    t.logged(
        e,
        "INFO:     Started server process [9]\nERROR:    [Errno 98] error while attempting to bind "
        "on address ('0.0.0.0', 9123): address already in use\n",
        40.0,
    )
    e.launcher_alive, e.processes = False, []
    e.port = PortFacts(t.PORT, True, 4321, "python3")
    return e


@case("R14 exception of one", "kind of S7a", first="RANK_CRASHED", never=HEALTHY, rank=1)
def first_exception_is_the_cause_and_the_second_follows() -> Evidence:
    e = t.served(t.sglang(2, "serving"), 0, 0)
    text = (
        TWO_LOADED
        + SERVING
        + """[2026-05-01 12:00:00 TP1] Scheduler hit an exception: Traceback (most recent call last):
  File "x.py", line 1, in f
KeyError: 'mid'

[2026-05-01 12:00:03 TP0] Scheduler hit an exception: Traceback (most recent call last):
RuntimeError: [gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:3000
"""
    )
    t.logged(e, text, 10.0)
    return e


@case(
    "R15 only the echo",
    "kind of S4",
    first="RANK_CRASHED PARENT_WAITS_DEAD_RANK API_ALIVE_ENGINE_DEAD",
    never=HEALTHY,
    rank=1,
)
def the_only_exception_is_that_of_the_survivor() -> Evidence:
    e = t.served(t.sglang(2, "serving"), 0, 0)
    text = (
        TWO_LOADED
        + SERVING
        + """[2026-05-01 12:00:03 TP0] Scheduler hit an exception: Traceback (most recent call last):
RuntimeError: [gloo/transport/tcp/pair.cc:547] Connection reset by peer [127.0.0.1]:3000
"""
    )
    t.logged(e, text, 4.0)
    t.lose(e, 1)
    return e


@case("R16 capture of vLLM", "kind of C12", first="GRAPH_CAPTURE", never=HEALTHY | DEAD)
def vllm_registers_graph_addresses_and_stands() -> Evidence:
    e = t.vllm(2)
    t.logged(
        e,
        VLLM_LOADING + "Capturing CUDA graphs (mixed prefill-decode, PIECEWISE):  34%|###4      | 23/67 "
        "[00:09<00:17]\nINFO 05-01 10:09:00 [custom_all_reduce.py:203] Registering 0 cuda graph addresses\n",
        1300.0,
    )
    t.dump(
        e, dict.fromkeys(range(2), ("capture (custom_all_reduce.py:190)", "capture_model (gpu_model_runner.py:3000)"))
    )
    return e


@case("R17 capture waits for one", "kind of H2", first="JIT_COMPILING", never=HANGS | DEAD, rank=0)
def triton_compiles_in_one_rank_during_capture() -> Evidence:
    e = t.sglang(2, "capture", (*t.LOADED, "capture begin"), quiet=200.0)
    t.burn(t.rank(e, 0), user=0.95)
    t.sleep(t.rank(e, 1), t.EPOLL)
    t.dump(e, {0: ["make_ttgir (triton/backends/nvidia/compiler.py:240)", "compile (triton/compiler/compiler.py:300)",
                   "run (triton/runtime/jit.py:600)", "forward (moe.py:7)"],
               1: ["barrier (parallel_state.py:1451)", "capture_one (runner.py:5)"]}, busy=[0])  # fmt: skip
    return e


@case("R18 all wait in one rank's spin", "kind of S2", first="WARMUP_STALL RANK_SPIN MISSING_RANK COLLECTIVE_DIVERGED",
      never=HEALTHY | DEAD | {"KERNEL_SPIN"}, rank=2)  # fmt: skip
def python_spin_in_the_warm_up() -> Evidence:
    e = t.warming(t.sglang(4, "warmup"))
    for p in t.ranks_of(e):
        t.burn(p, user=0.6)
    t.burn(t.rank(e, 2), user=1.0)
    t.cards(e, [100, 100, 0, 100], 180.0)
    launch = ["_get_pruned_states (logits_processor.py:469)", "forward (model.py:3)"]
    for n in range(4):
        mine = ["poll (extra.py:5)", "forward (model.py:3)"] if n == 2 else launch
        e.stacks.append(Stack(t.pid_of(n), "scheduler", f"TP{n}", "active+gil" if n == 2 else "active", mine))
    e.deep = True
    return e
