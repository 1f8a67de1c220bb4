"""Part P: the blind set of part Q goes on: collectives, and servers that serve."""

from __future__ import annotations

from cases import tree as t
from cases.table import DEAD, HANGS, HEALTHY, case
from fleetdump.agent.evidence_engine import (
    FlightRecord,
    OperationCounts,
    PortFacts,
    RankCount,
    RasFacts,
)
from fleetdump.agent.evidence_process import (
    SocketFacts,
    Stack,
    SyscallCount,
    ThreadFacts,
    Trace,
)
from fleetdump.agent.evidence_types import Evidence

INIT = ("init begin",)


# ------------------------------------------------------------------ collectives
@case("Q33 peers over PCIe", "kind of D1", first="P2P_BLOCKED", never=HEALTHY | DEAD | {"KERNEL_SPIN"})
def first_all_reduce_of_two_cards_without_nvlink() -> Evidence:
    e = t.sglang(2, "init", INIT, quiet=600.0)
    for p in t.ranks_of(e):
        t.burn(p)
    for marks in e.log.ranks:
        marks.nccl = "init end"
    t.cards(e, [100, 100], 96.0, 400.0, 1900)
    e.host.gpu_links, e.host.acs_redirects = ["SYS"], 4
    return e


@case("Q34 counts part", "kind of S3", first="COLLECTIVE_DIVERGED MISSING_RANK", never=HEALTHY | DEAD, rank=6)
def monitor_counts_one_rank_behind_while_serving() -> Evidence:
    e = t.served(t.sglang(8, "serving"), 0, 200, running=3)
    for p in t.ranks_of(e):
        t.burn(p, user=0.7)
    t.sleep(t.rank(e, 6), t.FUTEX)
    t.cards(e, [100, 100, 100, 100, 100, 100, 0, 100], 190.0)
    counts = [RankCount(n, 880 if n != 6 else 879, t.pid_of(n)) for n in range(8)]
    e.ras = RasFacts("MISMATCH", 5, [OperationCounts("ReduceScatter", "7c", counts)])
    return e


@case("Q35 gloo groups", "kind of D13", first="COLLECTIVE_DIVERGED", never=HEALTHY | DEAD, rank=2)
def one_rank_scatters_while_the_others_gather() -> Evidence:
    e = t.served(t.sglang(4, "serving"), 0, 200, running=1)
    for p in t.ranks_of(e):
        t.sleep(p, t.EPOLL)
    rest = ["all_gather_object (distributed_c10d.py:3100)", "check_cache (hicache.py:77)"]
    t.dump(
        e, {**dict.fromkeys(range(4), rest), 2: ["scatter_object_list (distributed_c10d.py:3600)", "dispatch (x.py:5)"]}
    )
    return e


@case("Q36 sizes", "kind of D11", first="COLLECTIVE_DIVERGED", never=HEALTHY | DEAD)
def recorder_shows_two_sizes_at_one_sequence_number() -> Evidence:
    e = t.warming(t.sglang(2, "warmup"))
    for p in t.ranks_of(e):
        t.burn(p)
    t.cards(e, [100, 100], 180.0)
    e.flight = [
        FlightRecord(0, 12, "all_gather", "started", [64, 7168]),
        FlightRecord(1, 12, "all_gather", "started", [32, 7168]),
    ]
    return e


@case("Q37 flags in memory", "kind of D14", first="KERNEL_SPIN", never=HEALTHY | DEAD | {"P2P_BLOCKED"})
def every_rank_waits_for_a_kernel_that_polls() -> Evidence:
    e = t.served(t.sglang(4, "serving"), 0, 200, running=12)
    for p in t.ranks_of(e):
        t.burn(p, user=0.8)
    t.cards(e, [100] * 4, 230.0)
    e.host.gpu_links, e.ras = ["NV18"], RasFacts("OK", 6)
    t.dump(
        e,
        dict.fromkeys(range(4), ("synchronize (torch/cuda/streams.py:100)", "resolve (scheduler_output.py:60)")),
        busy=range(4),
    )
    return e


@case(
    "Q38 second node absent",
    "kind of row 4",
    first="MISSING_RANK",
    never=HEALTHY | DEAD | {"P2P_BLOCKED"},
    phase="init",
)
def the_store_waits_for_the_ranks_of_another_host() -> Evidence:
    e = t.sglang(8, "init", INIT, quiet=900.0)
    e.target.ranks, e.target.nodes = 16, 2
    for p in t.ranks_of(e):
        t.sleep(p, POLL_ONE, 60)
        p.sockets = [SocketFacts(60, "ESTABLISHED", "10.0.0.1:43000", "10.0.0.1:20000", t.pid_of(0))]
    t.dump(
        e,
        dict.fromkeys(
            range(8),
            (
                "_create_c10d_store (torch/distributed/rendezvous.py:190)",
                "init_process_group (distributed_c10d.py:1700)",
            ),
        ),
    )
    return e


POLL_ONE = ("do_sys_poll", "7 0x7f01 0x1 0x2710")


@case("Q39 loopback announced", "kind of D8", first="WRONG_INTERFACE", never=HEALTHY | DEAD)
def second_host_is_asked_at_a_loopback_address() -> Evidence:
    e = t.sglang(4, "init", INIT, quiet=300.0)
    e.target.ranks, e.target.nodes, e.target.node_rank = 8, 2, 1
    for p in t.ranks_of(e):
        p.rank, p.label = (p.rank or 0) + 4, f"TP{(p.rank or 0) + 4}"
        p.sockets = [SocketFacts(33, "SYN_SENT", "127.0.0.1:40111", "127.0.1.1:35900")]
    e.host.name_resolves_to = ["127.0.1.1"]
    e.host.addresses = {"lo": ["127.0.0.1"], "ib0": ["10.40.0.12"]}
    e.log.ranks = []
    return e


@case("Q40 six only", "kind of row 6", first="IPV6_LOOPBACK", never=HEALTHY | DEAD)
def ranks_look_for_an_ipv4_address_on_a_host_without() -> Evidence:
    e = t.sglang(2, "init", INIT, quiet=400.0)
    e.host.addresses = {"eth0": ["2001:db8:1::4"], "lo": ["::1"]}
    for p in t.ranks_of(e):
        p.sockets = [SocketFacts(33, "SYN_SENT", "0.0.0.0:0", "127.0.0.1:29500")]
        e.traces.append(
            Trace(p.pid, p.label, 2.0, [SyscallCount("sglang::schedul", True, "connect", 40, "EADDRNOTAVAIL")])
        )
    e.log.troubles = {"ipv4_unreachable": "connect() to 127.0.0.1:29500: Cannot assign requested address"}
    return e


@case("Q41 hook sleeps", "kind of S2", first="MISSING_RANK COLLECTIVE_DIVERGED", never=HEALTHY | DEAD, rank=3)
def a_hook_of_one_rank_sleeps_in_a_request() -> Evidence:
    e = t.served(t.sglang(4, "serving"), 0, 200, running=2)
    for p in t.ranks_of(e):
        t.sleep(p, t.EPOLL)
    t.sleep(t.rank(e, 3), t.SLEEP)
    gloo = ["all_reduce (distributed_c10d.py:2900)", "forward (linear.py:1500)"]
    t.dump(e, {**dict.fromkeys(range(4), gloo), 3: ["write_record (dump.py:41)", "forward (deepseek_v2.py:2500)"]})
    return e


@case("Q42 serving spin", "kind of S2", first="RANK_SPIN", never=HEALTHY | DEAD, rank=1)
def one_rank_of_a_busy_server_never_comes_back() -> Evidence:
    e = t.served(t.sglang(2, "serving"), 0, 200, running=4)
    t.sleep(t.rank(e, 0), t.EPOLL)
    t.burn(t.rank(e, 1))
    e.log.quiet_seconds = 600.0
    return e


@case(
    "Q43 vLLM worker spins",
    "kind of S2",
    first="RANK_SPIN COLLECTIVE_DIVERGED MISSING_RANK",
    never=HEALTHY | DEAD,
    rank=2,
)
def a_worker_of_vllm_burns_in_user_code() -> Evidence:
    e = t.served(t.vllm(4), 0, 200, running=9)
    for p in t.ranks_of(e):
        t.sleep(p, t.EPOLL)
    t.burn(t.rank(e, 2))
    reduce = ["all_reduce (vllm/distributed/parallel_state.py:480)", "execute_model (gpu_worker.py:700)"]
    t.dump(e, {**dict.fromkeys(range(4), reduce), 2: ["sample (custom_sampler.py:12)", reduce[1]]}, busy=[2])
    return e


@case(
    "Q44 two nodes, counts",
    "kind of D7",
    first="MISSING_RANK COLLECTIVE_DIVERGED",
    never=HEALTHY | DEAD | {"P2P_BLOCKED"},
)
def ranks_of_another_host_never_joined() -> Evidence:
    e = t.served(t.sglang(4, "serving"), 0, 200, running=5)
    e.target.ranks, e.target.nodes = 8, 2
    for p in t.ranks_of(e):
        t.burn(p, user=0.7)
    t.cards(e, [100] * 4, 170.0)
    counts = [RankCount(n, 52 if n < 4 else 51, t.pid_of(n) if n < 4 else 0) for n in range(8)]
    e.ras = RasFacts("MISMATCH", 2, [OperationCounts("AllReduce", "a1", counts)])
    return e


# ------------------------------------------------------------------ serving
@case("Q45 idle for days", "kind of E1", first="IDLE_OK", never=HANGS | DEAD | {"UNKNOWN"})
def sixteen_schedulers_poll_and_the_log_is_old() -> Evidence:
    e = t.served(t.sglang(16, "serving"))
    e.log.quiet_seconds = 400_000.0
    for p in t.ranks_of(e)[1:]:
        t.sleep(p, t.EPOLL, voluntary=2800.0)
    return e


@case("Q46 long prefill", "kind of E4", first="BUSY_NOT_HUNG HEALTHY", never=HANGS | DEAD | {"UNKNOWN"})
def health_times_out_and_batches_go_on() -> Evidence:
    e = t.served(t.sglang(4, "serving"), 0, 200, running=40)
    e.log.forwards, e.log.growth, e.log.news, e.log.quiet_seconds = 2, 500, 2, 1.0
    e.log.troubles = {"detokenizer_silent": "Health check failed. Server couldn't get a response from detokenizer"}
    for p in t.ranks_of(e):
        t.burn(p, 0.95, 0.8, 90.0)
    t.cards(e, [99] * 4, 810.0)
    return e


@case("Q47 API loop", "kind of A11", first="API_LOOP_BLOCKED", never=HEALTHY | DEAD | {"RANK_SPIN"})
def a_validator_blocks_the_event_loop() -> Evidence:
    e = t.served(t.sglang(2, "serving"), 0, 0)
    t.burn(t.head(e))
    e.log.quiet_seconds = 80.0
    return e


@case("Q48 API loop sleeps", "kind of A11", first="API_LOOP_BLOCKED", never=HEALTHY | DEAD | {"RANK_SPIN"})
def the_event_loop_waits_for_a_name_server() -> Evidence:
    e = t.served(t.sglang(1, "serving"), 0, 0)
    t.sleep(t.head(e), POLL_ONE, 88)
    e.stacks = [Stack(t.HEAD, "launcher", "", "idle", ["getaddrinfo (socket.py:970)", "fetch_image "
                                                                                      "(requests/api.py:60)",
                                                       "generate_request (http_server.py:700)"])]  # fmt: skip
    e.deep = True
    e.log.quiet_seconds = 80.0
    return e


@case("Q49 schema", "kind of E5", first="GRAMMAR_COMPILE", never=HANGS | HEALTHY | DEAD)
def a_schema_is_compiled_by_a_thread_of_the_scheduler() -> Evidence:
    e = t.served(t.sglang(1, "serving"), 200, 200, running=1)
    p = t.rank(e, 0)
    p.cpu = 1.6
    p.threads = [ThreadFacts(p.pid + 700, "ThreadPoolExec", "R", 0.99, 1.0, 1.0, 0.0, "0", "running")]
    t.dump(e, {0: ["recv_requests (scheduler.py:1200)", "event_loop_overlap (scheduler.py:1000)"]})
    e.stacks[0].active = {
        "ThreadPoolExecutor-3_0": [
            "compile_json_schema (xgrammar/compiler.py:120)",
            "dispatch_json (xgrammar_backend.py:80)",
        ]
    }
    e.log.quiet_seconds = 120.0
    return e


@case("Q50 first request", "kind of A10", first="WARMUP_STALL", never=HEALTHY | DEAD, phase="warmup")
def pipeline_stages_all_wait_for_the_first_batch() -> Evidence:
    e = t.warming(t.sglang(3, "warmup"), 0)
    for n, p in enumerate(t.ranks_of(e)):
        p.rank, p.label = 0, f"PP{n} TP0"
        t.sleep(p, t.EPOLL)
    e.target.ranks, e.log.ranks = 1, []
    e.log.running_requests = 1
    for n, p in enumerate(t.ranks_of(e)):
        frame = "recv_object (parallel_state.py:1200)" if n else "send_object (parallel_state.py:1100)"
        e.stacks.append(Stack(p.pid, "scheduler", p.label, "idle", [frame]))
    e.deep = True
    return e


@case("Q51 proxy in capitals", "kind of E2", first="PROXY_WARMUP", never=HEALTHY | DEAD, phase="warmup")
def request_to_itself_is_answered_by_a_proxy() -> Evidence:
    e = t.warming(t.sglang(1, "warmup"))
    e.target.host, e.log.server_marks = "0.0.0.0", ["http start", "http open"]
    t.idle_loop(t.rank(e, 0))
    e.proxy = {"http_proxy": "squid.example:3128", "no_proxy": "localhost,127.0.0.1"}
    e.log.troubles = {"proxy_refused": "requests.exceptions.HTTPError: 403 Client Error: Forbidden"}
    return e


@case("Q52 engine by a signal", "kind of A3", first="API_ALIVE_ENGINE_DEAD", never=HEALTHY, rank=3)
def a_rank_of_a_serving_tree_died_by_a_segmentation_fault() -> Evidence:
    e = t.served(t.sglang(4, "serving"))
    gone = t.rank(e, 3)
    gone.state = gone.state_before = "Z"
    gone.exit_signal, gone.main, gone.cpu = 11, None, 0.0
    return e


@case("Q53 vLLM engine lost", "kind of A4", first="API_ALIVE_ENGINE_DEAD", never=HEALTHY)
def the_api_of_vllm_answers_alone() -> Evidence:
    e = t.served(t.vllm(1), 200, 200)
    e.processes = e.processes[:1]
    return e


@case("Q54 detokenizer lost", "kind of A3", first="API_ALIVE_ENGINE_DEAD", never=HEALTHY)
def nobody_turns_tokens_into_text() -> Evidence:
    e = t.served(t.sglang(2, "serving"), 0, 200, running=3)
    gone = t.child(31_900, "detokenizer", "sglang::detoken", "Z", exit_signal=9)
    gone.main = None
    e.processes.append(gone)
    return e


@case("Q55 ring", "kind of A7", first="DEAD_READER_RING_FULL", never=HEALTHY, rank=1)
def engine_spins_for_a_worker_that_died() -> Evidence:
    e = t.served(t.vllm(2), 200, 200, running=6)
    t.lose(e, 1)
    t.burn(e.processes[1], 1.0, 0.6)
    e.log.troubles = {"ring_full": "No available shared memory broadcast block found in 60 seconds"}
    e.stacks = [
        Stack(
            t.HEAD + 1,
            "engine",
            "",
            "active",
            ["acquire_write (shm_broadcast.py:470)", "enqueue (shm_broadcast.py:560)"],
        )
    ]
    e.deep = True
    return e


@case("Q56 crash wait", "kind of S7c", first="RANK_CRASHED", never=HEALTHY, rank=2)
def a_rank_raised_and_the_launcher_takes_its_minute() -> Evidence:
    e = t.warming(t.sglang(4, "warmup"), 0)
    e.http[1].status, e.http[1].error = 0, "timed out"
    t.sleep(t.head(e), t.SLEEP)
    e.log.crash, e.log.crash_label = "ValueError: too many values to unpack (expected 2)", "TP2"
    e.log.quiet_seconds = 12.0
    for n in (0, 1, 3):
        t.burn(t.rank(e, n), user=0.8)
    return e


@case("Q57 launcher gone", "kind of row 23", first="LAUNCHER_DIED ORPHAN_GPU", never=HEALTHY)
def ranks_outlive_their_launcher() -> Evidence:
    e = t.served(t.sglang(2, "serving"), 0, 0, "refused")
    e.launcher_alive, e.port = False, PortFacts(t.PORT)
    e.processes = e.processes[1:]
    for p in e.processes:
        p.ppid = 1
    return e


@case("Q58 nothing comes out", "kind of E7", first="KERNEL_SPIN", never=HEALTHY | DEAD)
def statistics_say_zero_and_the_card_is_busy() -> Evidence:
    e = t.served(t.sglang(1, "serving"), 200, 200, running=8)
    t.burn(t.rank(e, 0), user=0.7)
    t.cards(e, [100], 200.0)
    e.log.zero_statistics, e.log.growth, e.log.quiet_seconds = 20, 160, 6.0
    e.log.repeated, e.log.repeated_line = 20, "throughput: 0.0 tokens/s, Running: 8 reqs, Waiting: 3 reqs"
    e.log.news_seconds = 200.0
    return e
