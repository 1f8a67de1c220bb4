"""What a controller does about a server that died or hangs: when it restarts it, how often, what it leaves alone."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, cast

import pytest

from fleetdump.agent.runmessages import RunProgress
from fleetdump.agent.servermessages import RunRestart
from fleetdump.agent.specs import Patience
from fleetdump.diagnosis import Verdict
from fleetdump.errors import FleetdumpError, HostError, LockedError, UnreachableError
from fleetdump.fleet import Host
from fleetdump.tasks import supervise
from fleetdump.tasks.restart import Restarted
from fleetdump.tasks.server import Diagnosis
from fleetdump.tasks.supervise import Policy, Supervisor
from tests.unit.engineinstall import wait_for

VERDICT = Verdict("OOM_KILLED", "the kernel ended it for want of memory", "direct", next_steps=["give it more"])


@dataclass
class Servers:
    """A host on which restarts end as ``outcomes`` say, one after the other; the rest come up."""

    outcomes: list[Restarted | FleetdumpError] = field(default_factory=list)
    asked: list[RunRestart] = field(default_factory=list)
    stopped: list[str] = field(default_factory=list)
    evidence: FleetdumpError | None = None
    latest: str = ""
    verdicts: list[Verdict] = field(default_factory=lambda: [VERDICT])
    looks: int = 0
    config: Any = field(default_factory=lambda: SimpleNamespace(name="gpu01", patience=Patience(serving=60.0)))

    @property
    def host(self) -> Host:
        return cast(Host, self)

    def call(self, *_: Any, verb: str, **__: Any) -> Any:
        assert verb == "status"
        return SimpleNamespace(servers=[SimpleNamespace(name="main", launch_id=self.latest)])

    def diagnose(self, _: Host, target: Any) -> list[Diagnosis]:
        self.looks += 1
        if self.evidence is not None:
            raise self.evidence
        return [Diagnosis(target.server, self.verdicts, "/diagnoses/1")]

    def restart(self, _: Host, server: str, why: RunRestart, *__: Any) -> Restarted:
        self.asked.append(why)
        outcome = self.outcomes.pop(0) if self.outcomes else Restarted(server, "ready")
        if isinstance(outcome, FleetdumpError):
            raise outcome
        outcome.launch_id = f"again{len(self.asked)}" if outcome.outcome != "failed" else ""
        self.latest = self.latest or outcome.launch_id
        return outcome


@pytest.fixture
def servers(monkeypatch: pytest.MonkeyPatch) -> Servers:
    made = Servers()
    monkeypatch.setattr(supervise, "diagnose_host", made.diagnose)
    monkeypatch.setattr(supervise, "restart_of_run", made.restart)
    monkeypatch.setattr(supervise, "stop_servers", lambda _host, _event, names: made.stopped.extend(names))
    return made


@dataclass
class Told:
    """A supervisor, what it said and how long it waited."""

    supervisor: Supervisor
    events: list[dict[str, Any]]
    waits: list[float]

    @property
    def text(self) -> str:
        return "\n".join(event["text"] for event in self.events)


def supervised(restarts: int = 2) -> Told:
    events: list[dict[str, Any]] = []
    waits: list[float] = []
    return Told(Supervisor("r", Policy(restarts), lambda _, event: events.append(event), waits.append), events, waits)


def dead(launch_id: str = "L1", **changes: Any) -> RunProgress:
    return RunProgress(**{"run": "r", "server": "main", "state": "running", "dead_launch": launch_id, **changes})


def see_to(told: Told, servers: Servers, progress: RunProgress) -> None:
    told.supervisor.bring_back(supervise._Death.of(servers.host, progress, 0.0))


def test_the_dead_server_is_diagnosed_and_restarted_in_the_runs_name(servers: Servers) -> None:
    told = supervised()
    see_to(told, servers, dead())
    assert servers.asked == [RunRestart("r", "L1", "OOM_KILLED: the kernel ended it for want of memory")]
    assert [event.get("verdict") for event in told.events].count("OOM_KILLED") == 1
    assert {event["server"] for event in told.events} == {"main"}
    for words in ("the server died", VERDICT.title, "give it more", "/diagnoses/1", "(1 of 2 in this run)", "ready in"):
        assert words in told.text
    assert told.waits == [0.0]


@pytest.mark.parametrize(("restarts", "before", "asked"), [(0, 0, 0), (1, 0, 1), (2, 1, 1), (2, 2, 0), (2, 5, 0)])
def test_so_many_restarts_a_run_and_no_more(servers: Servers, restarts: int, before: int, asked: int) -> None:
    told = supervised(restarts)
    see_to(told, servers, dead(restarts=before))
    assert len(servers.asked) == asked
    assert VERDICT.title in told.text, "it is diagnosed in any case"
    by_hand = "fleetdump restart --host gpu01 --server main, or fleetdump deploy"
    assert (by_hand in told.text) == (not asked)


def test_each_restart_waits_longer(servers: Servers) -> None:
    told = supervised(9)
    for before in range(5):
        see_to(told, servers, dead(restarts=before))
    assert told.waits == [0.0, 10.0, 60.0, 300.0, 300.0]


def test_a_death_that_one_sample_is_suspected_of_does_not_count(servers: Servers) -> None:
    """Else the sample that is at fault could not be found out: it takes three deaths."""
    told = supervised(1)
    see_to(told, servers, dead(restarts=1, suspect="s7"))
    assert servers.asked[0].suspect == "s7"
    assert "sample s7 alone in flight" in told.text
    assert told.waits == []
    none = supervised(0)
    see_to(none, servers, dead(suspect="s7"))
    assert len(servers.asked) == 1


def test_a_start_that_stalls_counts_and_is_tried_again(servers: Servers) -> None:
    servers.outcomes = [
        Restarted("main", "stall", "stopped in weights", verdicts=[VERDICT]),
        Restarted("main", "stall"),
    ]
    told = supervised(2)
    see_to(told, servers, dead())
    assert [why.launch_id for why in servers.asked] == ["L1", "again1"]
    assert "stall: stopped in weights" in told.text
    assert "it was restarted 2 times in this run" in told.text
    assert servers.stopped == []


@pytest.mark.parametrize("outcome", ["stopped", "replaced", "died"])
def test_what_others_see_to_is_left_alone(servers: Servers, outcome: str) -> None:
    """An operator took the launch away, or its driver will tell of another death."""
    servers.outcomes = [Restarted("main", outcome, "by root@laptop")]
    told = supervised()
    see_to(told, servers, dead())
    assert len(servers.asked) == 1
    assert servers.stopped == []
    assert "by root@laptop" in told.text


def test_a_refused_restart_is_told_with_its_next_step(servers: Servers) -> None:
    servers.outcomes = [Restarted("main", "failed", "server main is left alone (it was launched again)", "nothing")]
    told = supervised()
    see_to(told, servers, dead())
    assert "server main is left alone (it was launched again); next: nothing" in told.text


@pytest.mark.parametrize("outcome", supervise.NOT_AS_IT_WAS)
def test_what_comes_up_otherwise_is_stopped_before_it_captures_wrongly(servers: Servers, outcome: str) -> None:
    servers.outcomes = [Restarted("main", outcome, "rows differ")]
    told = supervised()
    see_to(told, servers, dead())
    assert servers.stopped == ["main"]
    assert len(servers.asked) == 1
    servers.outcomes, servers.latest = [Restarted("main", outcome)], "somebody's"
    see_to(told, servers, dead("L2"))
    assert servers.stopped == ["main"], "what an operator launched meanwhile stays"


def test_a_host_that_is_changed_by_another_operator_is_asked_later(servers: Servers) -> None:
    servers.outcomes = [LockedError("locked", "gpu01", "deploy of root@laptop")]
    told = supervised()
    see_to(told, servers, dead())
    assert len(servers.asked) == 2
    assert supervise.LOCKED_SECONDS in told.waits
    assert "deploy of root@laptop" in told.text


def test_without_evidence_it_is_restarted_all_the_same(servers: Servers) -> None:
    servers.evidence = HostError("no space left on the device", "gpu01")
    told = supervised()
    see_to(told, servers, dead())
    assert servers.asked[0].verdict == ""
    assert "no evidence: gpu01: no space left" in told.text


# --------------------------------------------------------------------------- from the stream of progress
def test_each_death_is_seen_to_once(servers: Servers) -> None:
    told = supervised(9)
    for _ in range(3):
        told.supervisor.note(servers.host, dead())
        told.supervisor.note(servers.host, dead(server="main.1"))
    wait_for(lambda: "ready in" in told.text, 60.0)
    told.supervisor.note(servers.host, dead("L2"))
    wait_for(lambda: told.text.count("ready in") == 2, 60.0)
    assert [why.launch_id for why in servers.asked] == ["L1", "L2"]


@pytest.mark.parametrize("progress", [dead(""), dead(state="paused"), dead(state="done"), dead(state="stopped")])
def test_where_nobody_waits_for_the_server_nothing_is_done(servers: Servers, progress: RunProgress) -> None:
    told = supervised()
    told.supervisor.note(servers.host, progress)
    assert told.supervisor._treated == {}


def test_a_host_that_was_lost_meanwhile_is_seen_to_when_it_is_back(servers: Servers) -> None:
    servers.evidence = UnreachableError("the connection was lost", "gpu01")
    told = supervised()
    told.supervisor.note(servers.host, dead())
    wait_for(lambda: told.supervisor._treated == {}, 60.0)
    servers.evidence = None
    told.supervisor.note(servers.host, dead())
    wait_for(lambda: len(servers.asked) == 1, 60.0)


def test_an_error_of_the_host_is_told_and_not_repeated(servers: Servers) -> None:
    servers.outcomes = [HostError("the audit log cannot be written", "gpu01", next_step="mv it away")]
    told = supervised()
    told.supervisor.note(servers.host, dead())
    wait_for(lambda: "not restarted: gpu01: the audit log cannot be written; next: mv it away" in told.text, 60.0)
    told.supervisor.note(servers.host, dead())
    assert len(servers.asked) == 1


# --------------------------------------------------------------------------- when nobody is at work any more
def test_a_death_that_was_seen_to_is_left_until_there_is_another_launch(servers: Servers) -> None:
    told = supervised(0)
    assert not told.supervisor.is_left_dead("gpu01", dead())
    told.supervisor.note(servers.host, dead())
    wait_for(lambda: told.supervisor.is_left_dead("gpu01", dead(server="main.1")), 60.0)
    for other in (dead(""), dead("L2"), dead(state="paused"), dead(server="second")):
        assert not told.supervisor.is_left_dead("gpu01", other)
    assert not told.supervisor.is_left_dead("gpu02", dead())


def test_one_that_could_not_be_reached_is_not_left(servers: Servers) -> None:
    servers.evidence = UnreachableError("the connection was lost", "gpu01")
    told = supervised(0)
    told.supervisor.note(servers.host, dead())
    wait_for(lambda: told.supervisor._treated == {}, 60.0)
    assert not told.supervisor.is_left_dead("gpu01", dead())


# --------------------------------------------------------------------------- a server that lives and gives nothing
SPIN = Verdict("RANK_SPIN", "a request never ends: rank 1 spins in Python", "direct", rank=1)
CRASHED = Verdict("RANK_CRASHED", "rank 1 raised", "direct", rank=1)
GONE = Verdict("API_ALIVE_ENGINE_DEAD", "rank 1 is dead; the HTTP server still answers", "direct", rank=1)
FULL = Verdict("DISK_FULL", "the disk of the log is full", "measured")


def silent(seconds: float, launch_id: str = "L1", **changes: Any) -> RunProgress:
    return dead("", silent_launch=launch_id, silent_seconds=seconds, **changes)


@dataclass
class Silent:
    """A supervisor that is told of one silence which began at 0 by its clock."""

    told: Told
    servers: Servers
    began: float = 0.0

    def lasts(self, seconds: float, **changes: Any) -> None:
        """Its driver tells; until what comes of it is done."""
        self.told.supervisor.clock = lambda: self.began + seconds
        self.told.supervisor.note(self.servers.host, silent(seconds, **changes))
        wait_for(lambda: not self.told.supervisor._busy, 60.0)


def test_a_server_of_which_a_rank_is_dead_is_restarted_though_its_launcher_lives(servers: Servers) -> None:
    servers.verdicts = [FULL, GONE]
    silence = Silent(supervised(), servers)
    silence.lasts(59.0)
    assert servers.looks == 0, "a batch may take so long"
    silence.lasts(60.0)
    said = "API_ALIVE_ENGINE_DEAD: rank 1 is dead; the HTTP server still answers"
    assert servers.asked == [RunRestart("r", "L1", said, hangs=True)]
    for words in ("nothing has come from the server for 60 s", "/diagnoses/1", "(1 of 2 in this run)", "ready in"):
        assert words in silence.told.text


@pytest.mark.parametrize("verdict", [SPIN, CRASHED])
def test_that_a_server_hangs_must_be_seen_twice_in_one_silence(servers: Servers, verdict: Verdict) -> None:
    servers.verdicts = [verdict]
    silence = Silent(supervised(), servers)
    for seconds in (60.0, 61.0, 159.0):
        silence.lasts(seconds)
    assert (servers.looks, servers.asked) == (1, [])
    assert "that it hangs must be seen twice; it is looked at again when it has been silent for 160 s" in (
        silence.told.text
    )
    silence.lasts(160.0)
    assert [why.hangs for why in servers.asked] == [True]


@pytest.mark.parametrize("began", [0.0, 500.0])
def test_a_look_at_an_earlier_silence_proves_nothing(servers: Servers, began: float) -> None:
    servers.verdicts = [SPIN]
    silence = Silent(supervised(), servers)
    silence.lasts(60.0)
    silence.began = began
    silence.lasts(170.0)
    assert len(servers.asked) == (0 if began else 1)


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (Verdict("BUSY_NOT_HUNG", "busy", "measured", "wait"),) * 2,
        (Verdict("UNKNOWN", "the cause is not known", "pattern"),) * 2,
        (Verdict("RANK_SPIN", "it may spin", "pattern", rank=1),) * 2,
        (Verdict("API_ALIVE_ENGINE_DEAD", "the log says so", "log only", rank=1),) * 2,
        (Verdict("STOPPED_PROCESS", "rank 1 is stopped and goes on after a SIGCONT", "direct", rank=1),) * 2,
        (FULL, FULL),
        (SPIN, Verdict("RANK_SPIN", "rank 0 spins", "direct", rank=0)),
        (SPIN, Verdict("HEALTHY", "the server is healthy and works", "direct", "ok")),
    ],
)
def test_what_does_not_prove_it_is_told_and_restarts_nothing(servers: Servers, first: Verdict, second: Verdict) -> None:
    silence = Silent(supervised(), servers)
    for seconds, verdict in ((60.0, first), (160.0, second), (200.0, second)):
        servers.verdicts = [verdict]
        silence.lasts(seconds)
    assert (servers.looks, servers.asked) == (2, [])
    assert f"{second.title} ({second.code}, confidence: {second.confidence})" in silence.told.text
    assert not silence.told.supervisor.is_left_dead("gpu01", silent(200.0)), "it may go on"


@pytest.mark.parametrize(
    ("between", "asked"),
    [
        (Verdict("UNKNOWN", "the log has a new line", "pattern"), 1),
        (Verdict("BUSY_NOT_HUNG", "11 s of silence are too few to call it hung", "pattern", "wait"), 1),
        (Verdict("BUSY_NOT_HUNG", "the server is busy with long requests", "measured", "wait"), 0),
    ],
)
def test_a_look_at_which_it_worked_takes_an_earlier_one_back(servers: Servers, between: Verdict, asked: int) -> None:
    silence = Silent(supervised(), servers)
    for seconds, verdict in ((60.0, SPIN), (160.0, between), (360.0, SPIN)):
        servers.verdicts = [verdict]
        silence.lasts(seconds)
    assert (servers.looks, len(servers.asked)) == (3, asked)


def test_what_explains_it_from_outside_keeps_a_hang_from_a_restart(servers: Servers) -> None:
    servers.verdicts = [FULL, SPIN]
    silence = Silent(supervised(), servers)
    silence.lasts(60.0)
    silence.lasts(160.0)
    assert servers.asked == []


def test_without_evidence_what_lives_is_not_restarted(servers: Servers) -> None:
    servers.evidence = HostError("no space left on the device", "gpu01")
    silence = Silent(supervised(), servers)
    silence.lasts(60.0)
    silence.lasts(160.0)
    assert (servers.looks, servers.asked) == (2, [])


def test_a_hanging_server_is_restarted_so_many_times_and_then_left(servers: Servers) -> None:
    servers.verdicts = [GONE]
    silence = Silent(supervised(1), servers)
    silence.lasts(60.0, restarts=1)
    silence.lasts(900.0, restarts=1)
    assert (servers.looks, servers.asked) == (1, [])
    assert "not restarted: it was restarted 1 times in this run" in silence.told.text
    assert silence.told.supervisor.is_left_dead("gpu01", silent(900.0))


def test_a_server_that_answers_again_when_its_turn_comes_is_left_alone_and_looked_at_again(servers: Servers) -> None:
    servers.verdicts, servers.outcomes = [GONE], [Restarted("main", "failed", "the server is left alone")]
    silence = Silent(supervised(), servers)
    silence.lasts(60.0)
    assert "the server is left alone" in silence.told.text
    assert not silence.told.supervisor.is_left_dead("gpu01", silent(61.0))
    for seconds, looks in ((61.0, 1), (159.0, 1), (160.0, 2)):
        silence.lasts(seconds)
        assert servers.looks == looks


def test_one_that_dies_after_all_is_seen_to(servers: Servers) -> None:
    """SGLang ends itself when a batch has taken too long."""
    servers.verdicts = [Verdict("UNKNOWN", "the cause is not known", "pattern")]
    silence = Silent(supervised(), servers)
    silence.lasts(60.0)
    silence.told.supervisor.note(servers.host, dead())
    wait_for(lambda: "ready in" in silence.told.text, 60.0)
    assert servers.asked == [RunRestart("r", "L1", "UNKNOWN: the cause is not known")]
