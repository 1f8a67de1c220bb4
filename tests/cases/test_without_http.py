"""HTTP may not have been asked, or /health may be guarded, moved or late: a server that is well is no hang by that, and
one that hangs is not well by that."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest

from cases import test_recorded
from cases.table import HEALTHY
from fleetdump.agent.evidence_engine import HttpProbe, PortFacts
from fleetdump.agent.evidence_types import Evidence, ProbeRecord
from fleetdump.diagnosis import STALL, diagnose

INFO = HttpProbe("/model_info", 200, 0.1)
HUNG = [name for name, (_, severity, _, _) in test_recorded.EXPECTED.items() if severity == STALL]
WELL = [name for name in test_recorded.EXPECTED if name not in HUNG]


def answers(e: Evidence, status: int, error: str = "") -> list[HttpProbe]:
    """The recorded answers, but for that of ``/health``."""
    others = [probe for probe in e.http if not probe.path.endswith("/health")]
    return [HttpProbe("/health", status, 3.0 if error else 0.1, error), *others]


HTTP: dict[str, Callable[[Evidence], list[HttpProbe]]] = {
    "nothing asked": lambda _: [],
    "model_info alone": lambda _: [INFO],
    "all but health": lambda e: [probe for probe in e.http if not probe.path.endswith("/health")],
    "health 401": lambda e: answers(e, 401),
    "health 404": lambda e: answers(e, 404),
    "health 503": lambda e: answers(e, 503),
    "health times out": lambda e: answers(e, 0, "timeout"),
    "all time out": lambda _: [HttpProbe(path, 0, 3.0, "timeout") for path in ("/health", "/model_info")],
}


UNANSWERED = ("health 503", "health times out", "all time out")


def as_it_was(_: Evidence) -> None:
    pass


def silent_for_long(e: Evidence) -> None:
    e.log.quiet_seconds, e.log.growth, e.log.news, e.watch = 900.0, 0, 0, None
    e.uptime = max(e.uptime, 1000.0)


def owner_unknown(e: Evidence) -> None:
    e.port = dataclasses.replace(e.port, owner_pid=0, ours=False)


def port_unknown(e: Evidence) -> None:
    e.port = PortFacts(e.port.port)
    e.probes = [*e.probes, ProbeRecord("port", False, 5.0, "no answer within 5 s")]


def stacks_unknown(e: Evidence) -> None:
    e.stacks, e.stack_groups, e.traces = [], [], []


def rank_0_sleeps_in_poll(e: Evidence) -> None:
    """As --sleep-on-idle does, of a server whose ranks look for requests."""
    ranks = [(p, p.main) for p in e.processes if p.role == "scheduler" and p.main]
    for process, main in ranks if all(main.voluntary > 100 for _, main in ranks) else []:
        main.cpu, main.voluntary, main.wchan = 0.0, 0.5, "do_poll" if process.rank == 0 else "futex_do_wait"


LOOKS = (as_it_was, silent_for_long, owner_unknown, port_unknown, stacks_unknown)


@pytest.mark.parametrize("look", [*LOOKS, rank_0_sleeps_in_poll], ids=lambda one: one.__name__)
@pytest.mark.parametrize("name", WELL)
def test_what_works_is_never_called_a_stall(name: str, look: Callable[[Evidence], None]) -> None:
    for what, http in HTTP.items():
        if (name, look) == ("h200_load", stacks_unknown) and what in UNANSWERED:
            continue  # it compiles, which nothing but its stacks tells: GPUs are idle, and the log is silent
        e = test_recorded.load(name)
        look(e)
        e.http = http(e)
        assert STALL not in {v.severity for v in diagnose(e)}, what


@pytest.mark.parametrize("look", LOOKS, ids=lambda one: one.__name__)
@pytest.mark.parametrize("name", HUNG)
def test_what_hangs_is_never_called_well(name: str, look: Callable[[Evidence], None]) -> None:
    for what, http in HTTP.items():
        e = test_recorded.load(name)
        look(e)
        e.http = http(e)
        best = diagnose(e)[0]
        assert best.severity == STALL, what
        assert best.code not in HEALTHY, what


@pytest.mark.parametrize("name", HUNG)
def test_a_rank_that_hangs_is_named_without_http(name: str) -> None:
    codes, _, phase, rank = test_recorded.EXPECTED[name]
    for what, http in HTTP.items():
        e = test_recorded.load(name)
        e.http = http(e)
        best = diagnose(e)[0]
        assert best.code in codes, what
        assert (best.phase, best.rank) == (phase, rank), what


def test_the_verdict_says_that_health_is_not_known() -> None:
    e = test_recorded.load("h200_idle")
    e.http = []
    assert "no answer of /health is in the evidence" in diagnose(e)[0].title
    e.http = answers(e, 401)
    assert "GET /health: 401" in diagnose(e)[0].title


def test_a_launcher_at_work_that_was_asked_nothing_is_not_stuck() -> None:
    e = test_recorded.load("h200_idle")
    main = next(p.main for p in e.processes if p.role == "launcher")
    assert main
    main.cpu, main.voluntary = 1.0, 90.0
    e.http = []
    assert STALL not in {v.severity for v in diagnose(e)}
    e.http = [HttpProbe(path, 0, 3.0, "timeout") for path in ("/health", "/model_info")]
    assert diagnose(e)[0].code == "API_LOOP_BLOCKED"


@pytest.mark.parametrize("wchan", ["futex_do_wait", "do_nanosleep"])
def test_a_rank_that_only_sleeps_and_wakes_does_not_turn(wchan: str) -> None:
    """A wait that polls (``while not flag: time.sleep(0.01)``) is woken as often as a loop that looks for requests."""
    e = test_recorded.load("cpu_served_absent_tp2")
    for process in e.processes:
        if process.role == "scheduler" and process.main:
            process.main.cpu, process.main.voluntary, process.main.wchan = 0.02, 100.0, wchan
    e.http = []
    assert diagnose(e)[0].severity == STALL
