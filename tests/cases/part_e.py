"""Part E: ready, health, warm-up, requests."""

from __future__ import annotations

from cases import builder as b
from cases.table import HANGS, HEALTHY, case
from fleetdump.agent.evidence_engine import HttpProbe
from fleetdump.agent.evidence_process import Stack, SyscallCount
from fleetdump.agent.evidence_types import Evidence


@case("E1", "sgl-project/sglang#1730", first="IDLE_OK", never=HANGS | {"UNKNOWN"}, phase="serving")
def idle_scheduler_polls() -> Evidence:
    e = b.server(2)
    b.serving(e)
    e.log.quiet_seconds = 7200.0
    for n in range(2):
        b.rank(e, n).main.cpu = 0.97  # type: ignore[union-attr]
        b.trace(e, n, SyscallCount("main", True, "poll", 23_000), SyscallCount("main", True, "getpid", 23_000))
    b.stacks(e, dict.fromkeys(range(2), b.RECV_REQUESTS))
    b.gpus(e, 0, 0)
    return e


@case("E2 died", "sgl-project/sglang#9814", first="PROXY_WARMUP", never=HEALTHY)
def proxy_refused_and_the_server_ended() -> Evidence:
    e = through_proxy()
    b.dead(e)
    return e


@case("E2 lives", "sgl-project/sglang#9155", first="PROXY_WARMUP", never=HEALTHY, phase="warmup")
def through_proxy() -> Evidence:
    e = b.server(1)
    b.listening(e, 503)
    e.log.server_marks = ["http start", "http open"]
    e.target.host = "0.0.0.0"
    e.proxy = {"http_proxy": "proxy.example:3128", "no_proxy": "localhost,127.0.0.1"}
    e.log.troubles = {"proxy_refused": "res=<Response [403]> from http://0.0.0.0:8000/model_info"}
    return e


@case("E4", "sgl-project/sglang#22511", first="BUSY_NOT_HUNG", never=HANGS | {"API_LOOP_BLOCKED"})
def long_prompts() -> Evidence:
    e = b.server(2)
    b.serving(e)
    b.listening(e, 503)
    e.log.ready, e.log.phase, e.log.forwards, e.log.news = True, "serving", 3, 3
    e.log.troubles = {"detokenizer_silent": "Health check failed: no response from detokenizer for the last 20 s"}
    for n in range(2):
        b.spin(b.rank(e, n))
    return e


@case("E5 main thread", "vllm-project/vllm#14151", first="GRAMMAR_COMPILE", never=HANGS | HEALTHY)
def schema_is_compiled_in_the_main_thread() -> Evidence:
    e = b.server(1)
    b.serving(e)
    e.log.running_requests = 2
    b.spin(b.rank(e, 0))
    b.stacks(
        e, {0: ["compile_json_schema (xgrammar/compiler.py:160)", "dispatch (xgrammar_backend.py:70)"]}, {0: "active"}
    )
    b.gpus(e, 0)
    return e


@case("E5 other thread", "vllm-project/vllm#54003", first="GRAMMAR_COMPILE", never=HANGS | HEALTHY)
def schema_is_compiled_in_another_thread() -> Evidence:
    e = b.server(1)
    b.serving(e)
    b.listening(e, 0, "timeout")
    e.log.ready, e.log.phase = True, "serving"
    b.rank(e, 0).cpu = 1.6
    active = {"ThreadPoolExecutor-0_0": ["GrammarCompiler.compile_grammar (compiler.py:1)", "run (thread.py:58)"]}
    e.stacks = [Stack(b.FIRST_RANK, "scheduler", "TP0", "idle", b.RECV_REQUESTS, active=active)]
    return e


def starved() -> Evidence:
    e = b.server(2)
    b.serving(e)
    e.log.running_requests, e.log.zero_statistics, e.log.growth = 3, 6, 900
    e.log.forwards = e.log.news = 1
    return e


@case(
    "E7 host", "vllm-project/vllm#17972", first="WARMUP_STALL RANK_SPIN UNKNOWN",
    never=HEALTHY | {"KERNEL_SPIN", "P2P_BLOCKED"},
)  # fmt: skip
def no_tokens_and_idle_gpus() -> Evidence:
    e = starved()
    for n in range(2):
        b.rank(e, n).main.voluntary = 0.0  # type: ignore[union-attr]
        b.rank(e, n).main.cpu = 0.0  # type: ignore[union-attr]
    b.gpus(e, 0, 0)
    return e


@case("E7 GPU", "vllm-project/vllm#2731", first="KERNEL_SPIN", never=HEALTHY)
def no_tokens_and_busy_gpus() -> Evidence:
    e = starved()
    b.wait_for_gpu(e, 130.0, 700.0, 70_000)
    return e


@case("E8", "reference row 18", first="IDLE_OK", never=HANGS)
def health_takes_a_second() -> Evidence:
    e = b.server(2)
    b.serving(e)
    e.http = [HttpProbe("/health", 200, 4.9), HttpProbe("/model_info", 200, 0.4)]
    return e
