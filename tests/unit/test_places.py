"""The places of a controller on all hosts: of two one gets them all, and the other keeps none."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from fleetdump.agent.hostmessages import StatusResult
from fleetdump.agent.runmessages import RunProgress
from fleetdump.agent.steermessages import DataMark, Steering
from fleetdump.cli import _driving
from fleetdump.cli._driving import Run, Watching
from fleetdump.cli._fleet import FleetOptions
from fleetdump.cli._members import Members
from fleetdump.errors import DrivenError, LockedError, UnreachableError
from fleetdump.fleet import Host, connect, fanout
from fleetdump.inventory import HostConfig
from fleetdump.ledger import Ledger
from fleetdump.tasks import places as places_module
from fleetdump.tasks.assignment import RunPlan
from fleetdump.tasks.attendance import JoinRequests
from fleetdump.tasks.extract import ExtractSettings
from fleetdump.tasks.places import Places
from fleetdump.tasks.rebalance import Balancer
from fleetdump.tasks.steering import Controller, steered
from fleetdump.tasks.supervise import Policy

SECONDS = 60.0
DATA = DataMark("data.jsonl", 2, "ab" * 32)


# --------------------------------------------------------------------------- two that begin in the same moment
class Table:
    """Who has each host, whether still at work there or not; ``slow`` hosts answer late. ``freed``: only who is still
    at work there has it."""

    def __init__(self) -> None:
        self.has: dict[str, str] = {}
        self.freed = False
        self.slow: dict[tuple[str, str], float] = {}
        self.gone: set[str] = set()
        self._lock = threading.Lock()

    @contextlib.contextmanager
    def steered(self, host: Any, me: Any, _: object) -> Iterator[None]:
        name = host.config.address
        time.sleep(self.slow.get((me, name), 0.0))
        if name in self.gone:
            raise UnreachableError("no route", name)
        with self._lock:
            if self.has.setdefault(name, me) != me:
                raise DrivenError("driven", name, f"by {self.has[name]}")
        try:
            yield
        finally:
            if self.freed:
                del self.has[name]


def begin(table: Table, me: str, names: Sequence[str], addresses: Sequence[str] = ()) -> dict[str, str]:
    """What each host's thread came to: empty when it had its place."""
    hosts = [HostConfig(name, address) for name, address in zip(names, addresses or names, strict=True)]
    places = Places(cast(Any, me), hosts, lambda *_: None)

    def work(host: HostConfig) -> str:
        try:
            with places.on(cast(Any, SimpleNamespace(config=host))):
                return ""
        except (LockedError, UnreachableError) as error:
            return error.what

    with ThreadPoolExecutor(len(names)) as pool:
        return dict(zip(names, pool.map(work, hosts), strict=True))


@pytest.fixture
def table(monkeypatch: pytest.MonkeyPatch) -> Table:
    made = Table()
    monkeypatch.setattr(places_module, "steered", made.steered)
    return made


def test_of_two_that_begin_in_the_same_moment_one_gets_all_hosts(table: Table) -> None:
    """Each is quick where the other is slow: without an order both would get some."""
    names = ["gpu03", "gpu01", "gpu02"]
    table.slow = {("a", "gpu01"): 0.3, ("b", "gpu03"): 0.6, ("b", "gpu02"): 0.6}
    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(lambda me: begin(table, me, names), ["a", "b"])
    assert sorted([list(first.values()), list(second.values())]) == [["", "", ""], ["driven", "driven", "driven"]]
    assert len(set(table.has.values())) == 1


def test_two_inventories_may_call_the_hosts_by_other_names(table: Table) -> None:
    there = ["10.0.0.1", "10.0.0.2"]
    table.slow = {("a", "10.0.0.2"): 0.3, ("b", "10.0.0.1"): 0.3}
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(begin, table, "a", ["left", "right"], there)
        second = pool.submit(begin, table, "b", ["right", "left"], there)
        outcomes = [list(first.result().values()), list(second.result().values())]
    assert sorted(outcomes) == [["", ""], ["driven", "driven"]]


def test_a_first_host_that_is_gone_keeps_nobody(table: Table, monkeypatch: pytest.MonkeyPatch) -> None:
    table.gone = {"gpu01"}
    assert begin(table, "a", ["gpu01", "gpu02"]) == {"gpu01": "no route", "gpu02": ""}
    monkeypatch.setattr(places_module, "FIRST_SECONDS", 0.1)
    table.slow = {("a", "gpu01"): 1.0}
    assert begin(table, "a", ["gpu01", "gpu02"])["gpu02"] == ""


def stay(
    table: Table, me: str, names: Sequence[str], tell: Callable[[str, str], None] = lambda *_: None
) -> dict[str, str]:
    """As ``begin``, but to stay until one has all hosts (empty then), or another one's place was found."""
    places = Places(cast(Any, me), [HostConfig(name, name) for name in ("gpu01", *names)], tell)

    def work(name: str) -> str:
        try:
            with places.on(cast(Any, SimpleNamespace(config=HostConfig(name, name)))):
                give_up = time.monotonic() + SECONDS
                while [table.has.get(each) for each in names] != [me] * len(names) and not ended.is_set():
                    places.require_undisputed()
                    assert time.monotonic() < give_up, "neither gives way"
                    time.sleep(0.01)
                ended.set()
                return ""
        except DrivenError as error:
            return error.what

    ended = threading.Event()
    with ThreadPoolExecutor(len(names)) as pool:
        return dict(zip(names, pool.map(work, names), strict=True))


@pytest.mark.parametrize("late", [0.1, 0.6])
def test_of_two_that_have_a_host_each_the_one_with_the_earlier_gets_both(
    table: Table, monkeypatch: pytest.MonkeyPatch, late: float
) -> None:
    """The first host of all is away, so nothing is decided there. ``late``: before or after the other refusal is heard
    each hears who has the host that it is slow to reach."""
    monkeypatch.setattr(places_module, "FIRST_SECONDS", 0.0)
    monkeypatch.setattr(places_module, "RETRY_SECONDS", 0.05)
    table.freed = True
    table.slow = {("a", "gpu02"): 0.05, ("a", "gpu03"): late, ("b", "gpu02"): 0.3}
    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(lambda me: stay(table, me, ["gpu02", "gpu03"]), ["a", "b"])
    assert (first, second) == ({"gpu02": "", "gpu03": ""}, {"gpu02": "driven", "gpu03": "driven"})


def test_who_is_not_given_way_to_gives_up_itself(table: Table, monkeypatch: pytest.MonkeyPatch) -> None:
    """The other one was never told to have the earlier host, so it is refused nowhere."""
    monkeypatch.setattr(places_module, "FIRST_SECONDS", 0.0)
    monkeypatch.setattr(places_module, "RETRY_SECONDS", 0.05)
    monkeypatch.setattr(places_module, "YIELD_SECONDS", 0.3)
    table.freed = True
    table.has["gpu03"] = "b"
    told: list[tuple[str, str]] = []
    ends = stay(table, "a", ["gpu02", "gpu03"], lambda *words: told.append(words))
    assert ends == {"gpu02": "driven", "gpu03": "driven"}
    assert [host for host, text in told if "driven, by b: asking again" in text] == ["gpu03"]
    assert table.has == {"gpu03": "b"}


# --------------------------------------------------------------------------- found in the middle
class Answering:
    """A host, of which nothing is real but what its status says."""

    def __init__(self, *steering: Steering) -> None:
        self.config = HostConfig("h1", "10.0.0.1")
        self._status = StatusResult("node", [], [], steering=list(steering))

    def call(self, *_: object, **__: object) -> StatusResult:
        return self._status


def other(data: DataMark) -> Steering:
    return Steering("r", "other", "anna@desk", 7, "/a/runs/r", data, 1.0, 70)


def refused_inside(monkeypatch: pytest.MonkeyPatch, folder: Path, *by: Steering) -> tuple[Places, LockedError]:
    """A host where the place was had, and where a call was refused then; what came of it."""
    monkeypatch.setattr(places_module, "steered", lambda *_: contextlib.nullcontext())
    host = Answering(*by)
    places = Places(Controller("r", folder, DATA), [host.config], pytest.fail)
    with pytest.raises(LockedError) as refused, places.on(cast(Any, host)):
        raise LockedError("locked", "h1", "by somebody", "wait")
    return places, refused.value


@pytest.mark.parametrize("data", [DATA, DataMark("old.jsonl", 9, "11" * 32)])
def test_a_refusal_because_of_another_controller_is_how_a_host_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, data: DataMark
) -> None:
    places, refused = refused_inside(monkeypatch, tmp_path, other(data))
    assert isinstance(refused, DrivenError)
    with pytest.raises(DrivenError, match="by somebody"):
        places.require_undisputed()


def test_another_lock_is_no_other_controller(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    places, refused = refused_inside(monkeypatch, tmp_path)
    assert not isinstance(refused, DrivenError)
    places.require_undisputed()


# --------------------------------------------------------------------------- what is held elsewhere
@pytest.fixture
def fleet(tmp_path: Path) -> list[HostConfig]:
    """Two hosts, by processes of this machine."""
    return [
        HostConfig(name, "localhost", connection="local", state_dir=str(tmp_path / name), agent_python="python3")
        for name in ("h1", "h2")
    ]


@pytest.mark.parametrize("others", ["h1", "h2"])
def test_who_is_refused_on_a_host_gives_up_its_places_on_all_others(
    fleet: list[HostConfig], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, others: str
) -> None:
    """It came to that host late, when it was at work on the other one already."""
    begun, kept = threading.Event(), []

    def work(members: Any, host: Host) -> list[RunProgress]:
        begun.set()
        for _ in range(1200):
            members._note(host, RunProgress("r", "main", "running"))
            time.sleep(0.05)
        kept.append(host.config.name)
        return []

    def connect_late(config: HostConfig, options: Any) -> Host:
        if config.name == others:
            assert begun.wait(SECONDS)
        return connect(config, options)

    monkeypatch.setattr(Members, "work", work)
    monkeypatch.setattr(fanout, "connect", connect_late)
    monkeypatch.setattr(places_module, "FIRST_SECONDS", 0.0)
    monkeypatch.setattr(places_module, "YIELD_SECONDS", 0.0)
    elsewhere, me = (Controller("r", tmp_path / name, DATA) for name in ("there", "r"))
    for controller in (elsewhere, me):
        controller.folder.mkdir()
        controller.begin()
    watching = Watching(Policy(), 600.0, (), JoinRequests(me.folder, pytest.fail))
    run = Run("r", tmp_path, ExtractSettings(), watching, detach=False, seated=False, controller=me)
    (driven,) = (config for config in fleet if config.name == others)
    options = FleetOptions(Path("i.yaml"), (), (), False, False, False, 4)
    with (
        connect(driven) as theirs,
        steered(theirs, elsewhere, pytest.fail),
        Ledger(tmp_path / "ledger.sqlite") as ledger,
    ):
        balancer = Balancer("r", ledger, cast(Any, None))
        plan = RunPlan("r", {}, 2, [], resumed=False)
        with pytest.raises(DrivenError, match="r is being driven already"):
            _driving._watch(options, fleet, plan, run, balancer)
    assert kept == []
