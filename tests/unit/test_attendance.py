"""Who takes part in a run that is watched, when a lost host is tried again, and when nobody is waited for any more."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from fleetdump.errors import FleetdumpError, HostError, UnreachableError
from fleetdump.fleet import Outcome
from fleetdump.inventory import HostConfig
from fleetdump.tasks import attendance
from fleetdump.tasks.attendance import JOINING, RETRY_SECONDS, Attendance, JoinRequests, ask_to_join

LOST = Outcome(None, UnreachableError("the connection was lost"), 1.0)
WELL = Outcome([], None, 1.0)


def config(name: str) -> HostConfig:
    return HostConfig(name=name, address=name)


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(attendance, "time", made)
    return made


@pytest.fixture
def two() -> Attendance:
    return Attendance([config("a"), config("b")])


def names(hosts: list[HostConfig]) -> list[str]:
    return [host.name for host in hosts]


def test_a_lost_host_is_tried_again_and_again_with_longer_waits(two: Attendance, clock: Clock) -> None:
    for number, wait in enumerate((*RETRY_SECONDS, RETRY_SECONDS[-1])):
        assert not two.ended("b", LOST)
        assert two.is_first_try("b") == (number == 0)
        assert two.later() == []
        clock.now += wait
        assert names(two.later()) == ["b"]
        assert two.later() == [], "it is being tried"


def test_a_host_that_comes_back_and_is_lost_again_is_told_anew(two: Attendance, clock: Clock) -> None:
    assert not two.arrived("b")
    two.ended("b", LOST)
    clock.now += RETRY_SECONDS[0]
    two.later()
    assert two.arrived("b"), "it was here before"
    assert two.absent() == {}
    assert not two.ended("b", LOST)
    assert two.is_first_try("b")


def test_when_nobody_else_is_at_work_nobody_is_waited_for(two: Attendance, clock: Clock) -> None:
    two.ended("b", LOST)
    assert two.ended("a", WELL)
    clock.now += 3600
    assert two.later() == []
    assert two.absent() == {"b": LOST}


def test_tries_of_lost_hosts_do_not_keep_each_other_going(clock: Clock) -> None:
    three = Attendance([config("a"), config("b"), config("c")])
    three.ended("b", LOST)
    three.ended("c", LOST)
    clock.now += RETRY_SECONDS[0]
    assert names(three.later()) == ["b", "c"]
    three.ended("a", WELL)
    three.ended("b", LOST)
    clock.now += 3600
    assert three.later() == [], "c is being tried, and was not reached"
    three.arrived("c")
    assert names(three.later()) == ["b"]


@pytest.mark.parametrize("last", [WELL, Outcome(None, HostError("no"), 1.0)])
def test_any_other_end_is_the_last(two: Attendance, last: Outcome[list[object]]) -> None:
    assert two.ended("a", last)
    assert two.absent() == {}


def test_hosts_join_and_those_at_work_do_not_join_again() -> None:
    waiting = [[config("c"), config("a")], [config("c")], []]
    joined = Attendance([config("a")], lambda: waiting.pop(0))
    assert names(joined.later()) == ["c"]
    assert joined.later() == []
    assert joined.asked == {"c"}
    assert joined.ended("a", WELL)
    assert joined.later() == []


def test_word_is_left_for_the_process_that_drives(tmp_path: Path) -> None:
    ask_to_join(tmp_path, ["before"])
    requests = JoinRequests(tmp_path, pytest.fail)
    assert requests.names() == []
    ask_to_join(tmp_path, ["gpu09", "gpu10"])
    ask_to_join(tmp_path, ["gpu09"])
    assert requests.names() == ["gpu09", "gpu10"]
    assert requests.names() == []


def test_word_is_left_where_nobody_has_before(tmp_path: Path) -> None:
    requests = JoinRequests(tmp_path, pytest.fail)
    ask_to_join(tmp_path, ["gpu09"])
    assert requests.names() == ["gpu09"]


def test_a_line_that_says_nothing_is_told_once_and_those_after_it_count(tmp_path: Path) -> None:
    told: list[str] = []
    requests = JoinRequests(tmp_path, told.append)
    bad = [b"garbage", b'{"v":1,"t":1.0}', b'{"v":1,"t":1.0,"host":7}', b"[" * 100_000, b'{"v":2}', b"\xff"]
    (tmp_path / JOINING).write_bytes(b"\n".join(bad) + b"\n")
    ask_to_join(tmp_path, ["gpu09"])
    assert requests.names() == ["gpu09"]
    assert requests.names() == []
    assert 1 <= len(told) <= len(bad)
    assert all(JOINING in text for text in told)


@pytest.mark.parametrize("make", [Path.mkdir, os.mkfifo])
def test_what_is_no_file_is_told_once_and_the_run_goes_on(tmp_path: Path, make: Callable[[Path], None]) -> None:
    make(tmp_path / JOINING)
    told: list[str] = []
    requests = JoinRequests(tmp_path, told.append)
    assert (requests.names(), requests.names()) == ([], [])
    assert len(told) == 1
    assert str(tmp_path / JOINING) in told[0]
    with pytest.raises(FleetdumpError, match=JOINING):
        ask_to_join(tmp_path, ["gpu09"])
