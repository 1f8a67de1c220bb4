"""Part AD: the mechanisms of parts AA to AC in further clothes, and what only looks like them."""

from __future__ import annotations

from cases import builder as b
from cases import part_aa, part_ab, part_ac
from cases.table import DEAD, HANGS, HEALTHY, case
from fleetdump.agent.evidence_engine import HttpProbe, OperationCounts, PortFacts, RankCount, RasFacts
from fleetdump.agent.evidence_process import PipeEnd
from fleetdump.agent.evidence_types import Evidence

KIND = "kind of the one named"


@case("blind D11 log silent, nobody asked", KIND, first="COLLECTIVE_DIVERGED", never=HEALTHY, rank=1)
def d11_without_a_request_of_ours() -> Evidence:
    e = part_ab.d11()
    e.http = e.http[:2]
    return e


@case("blind D14 without statistics", KIND, first="KERNEL_SPIN", never=HEALTHY | {"P2P_BLOCKED", "RANK_SPIN"})
def d14_without_statistics() -> Evidence:
    e = part_ab.d14()
    e.http = e.http[:2]
    e.log.zero_statistics, e.log.growth, e.log.news_seconds, e.log.quiet_seconds = 0, 0, 0.0, 900.0
    return e


@case("blind D14 parted, no count of requests", KIND, first="COLLECTIVE_DIVERGED MISSING_RANK", never=HEALTHY)
def d14_parted() -> Evidence:
    e = d14_without_statistics()
    e.log.running_requests = 0
    counts = [RankCount(n, 901 if n == 2 else 900, 200 + n) for n in range(8)]
    e.ras = RasFacts("MISMATCH", 4, [OperationCounts("AllReduce", "0x9", counts)])
    return e


@case("blind one GPU, a request times out", KIND, first="KERNEL_SPIN", never=HEALTHY)
def sglang_whose_request_fails() -> Evidence:
    e = b.server(1)
    b.serving(e)
    b.wait_for_gpu(e, power=140.0, limit=700.0)
    e.log.quiet_seconds = 700.0
    e.http.append(HttpProbe("/generate", 0, 10.0, "timeout"))
    return e


@case("blind idle vLLM", KIND, first="IDLE_OK", never=HANGS | {"UNKNOWN", "BUSY_NOT_HUNG"})
def idle_vllm_answers_a_request() -> Evidence:
    e = b.vllm(4)
    e.log.quiet_seconds, e.uptime = 9_000.0, 50_000.0
    e.http.append(HttpProbe("/v1/completions", 200, 0.3))
    e.http.append(HttpProbe("/v1/embeddings", 404, 0.01))
    return e


@case("blind busy vLLM", KIND, first="HEALTHY", never=HANGS | {"UNKNOWN", "BUSY_NOT_HUNG"})
def busy_vllm_writes_statistics() -> Evidence:
    e = b.vllm(2)
    b.wait_for_gpu(e, power=230.0, limit=700.0)
    e.log.running_requests, e.log.quiet_seconds, e.log.news, e.log.growth = 3, 6.0, 1, 200
    return e


@case("blind busy vLLM lets a request wait", KIND, first="BUSY_NOT_HUNG", never=HANGS | {"UNKNOWN"})
def busy_vllm_lets_a_request_wait() -> Evidence:
    e = busy_vllm_writes_statistics()
    e.http.append(HttpProbe("/v1/completions", 0, 10.0, "timeout"))
    return e


@case("blind idle SGLang after its last batch", KIND, first="IDLE_OK", never=HANGS | {"UNKNOWN", "BUSY_NOT_HUNG"})
def last_batch_line_counts_requests() -> Evidence:
    """SGLang logs batches, not their end: the count in its last line is old."""
    e = b.server(4)
    b.serving(e)
    e.log.running_requests, e.log.quiet_seconds, e.uptime = 3, 9_000.0, 50_000.0
    b.gpus(e, 0, 0, 0, 0)
    return e


@case(
    "blind A1 sibling holds the end",
    KIND,
    first="PARENT_WAITS_DEAD_RANK",
    never=HEALTHY | {"PARENT_WAITS_READY"},
    rank=3,
)
def a1_writing_end_was_inherited() -> Evidence:
    e = part_aa.a1_vllm()
    e.processes[-1].pipes[3].peers = [202]
    return e


@case(
    "blind A1 engine at another pipe",
    KIND,
    first="PARENT_WAITS_DEAD_RANK",
    never=HEALTHY | {"PARENT_WAITS_READY"},
    rank=3,
)
def a1_engine_reads_another_pipe() -> Evidence:
    e = part_aa.a1_vllm()
    b.blocked_in(e.processes[-1], "anon_pipe_read", "0 0x14 0x7f 0x4", 20)
    return e


@case(
    "blind A1 two pipes a worker", KIND, first="PARENT_WAITS_DEAD_RANK", never=HEALTHY | {"PARENT_WAITS_READY"}, rank=3
)
def a1_with_sentinels() -> Evidence:
    e = part_aa.a1_vllm()
    e.processes[-1].pipes += [PipeEnd(40 + n, 9500 + n, "r", [200 + n] if n < 3 else []) for n in range(4)]
    return e


@case("blind fourth worker was never started", KIND, first="PARENT_WAITS_READY", never=HEALTHY | DEAD)
def three_of_four_started() -> Evidence:
    e = a1_with_sentinels()
    e.processes[-1].pipes = [end for end in e.processes[-1].pipes if end.peers]
    return e


@case("blind A5 API process lives", KIND, first="OOM_KILLED", never=HEALTHY | {"PARENT_WAITS_READY"})
def a5_with_its_launcher() -> Evidence:
    e = b.vllm_starting(2)
    e.processes = [b.launcher(e)]
    e.log.crash = "RuntimeError: Engine core initialization failed. Failed core proc(s): {'EngineCore_0': -9}"
    e.memory.oom_kills, e.cgroup.memory_events = 1, {"oom": 2, "oom_kill": 1}
    return e


@case("blind A5 an error of its own", KIND, first="LAUNCHER_DIED", never=HEALTHY | {"OOM_KILLED"})
def a_kill_long_ago_explains_nothing() -> Evidence:
    e = part_aa.a5()
    e.log.crash = "RuntimeError: Engine core initialization failed. Failed core proc(s): {'EngineCore_0': 1}"
    return e


@case("blind E2 a variable's name is known", KIND, first="PROXY_WARMUP", never=HEALTHY)
def e2_variable() -> Evidence:
    e = part_ac.e2()
    e.env_names, b.launcher(e).sockets = ["http_proxy"], []
    e.log.troubles = {"proxy_refused": "AssertionError: res=<Response [403]>, Access Denied"}
    return e


@case("blind E2 ended", KIND, first="PROXY_WARMUP", never=HEALTHY)
def e2_ended() -> Evidence:
    e = part_ac.e2()
    b.dead(e)
    e.port, e.http = PortFacts(8000), []
    return e


@case("blind refused by itself", KIND, first="WARMUP_STALL UNKNOWN", never=HEALTHY | {"PROXY_WARMUP"})
def its_own_503() -> Evidence:
    e = part_ac.e2()
    b.launcher(e).sockets = []
    e.log.troubles = {"proxy_refused": "AssertionError: res=<Response [503]>"}
    return e


@case(
    "blind B4 resident memory is flat", KIND, first="LOADING_SLOW", never=HANGS | {"REMOTE_FS_HANG", "DRIVER_D_STATE"}
)
def b4_pages_are_reclaimed() -> Evidence:
    e = part_aa.b4()
    for p in b.all_ranks(e):
        p.state_before, p.rss_delta = "D", 0
    return e


@case("blind B4 no page comes", KIND, first="REMOTE_FS_HANG", never=HEALTHY | {"LOADING_SLOW"})
def b4_hangs() -> Evidence:
    e = part_aa.b4()
    for p in b.all_ranks(e):
        p.state_before, p.rss_delta, p.majflt_delta, p.rchar_delta = "D", 0, 0, 0
    return e
