"""Several servers of a host start in turns, and are compared with healthy starts of the whole fleet."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from fleetdump.agent import healthy
from fleetdump.agent.servermessages import HealthyProfile, WatchResult
from fleetdump.tasks.fleetstarts import FleetStarts
from fleetdump.tasks.turns import in_turns
from tests.unit.engineinstall import context


class Stage:
    """Things that are started, and end when they are told to."""

    def __init__(self) -> None:
        self.events: list[str] = []
        self.running: set[str] = set()
        self.most = 0
        self.lock = threading.Lock()

    def start(self, name: str) -> Callable[[], str]:
        def begin() -> str:
            with self.lock:
                self.events.append(f"start {name}")
                self.running.add(name)
                self.most = max(self.most, len(self.running))
            return name

        return begin

    def follow(self, name: str) -> str:
        time.sleep(0.05)
        with self.lock:
            self.running.remove(name)
        return name.upper()


@pytest.mark.parametrize(("limit", "waits"), [(1, 1), (2, 1), (5, 0), (8, 0)])
def test_at_most_so_many_start_at_a_time_and_in_their_order(limit: int, waits: int) -> None:
    stage, waited = Stage(), list[bool]()
    names = list("abcde")
    found = in_turns(limit, [stage.start(name) for name in names], stage.follow, lambda: waited.append(True))
    assert found == ["A", "B", "C", "D", "E"]
    assert stage.events == [f"start {name}" for name in names]
    assert stage.most <= limit
    assert len(waited) == waits


def test_what_did_not_start_takes_no_place_and_has_no_result() -> None:
    stage = Stage()
    starts = [lambda: None, stage.start("a"), lambda: None, stage.start("b")]
    assert in_turns(1, starts, stage.follow) == ["A", "B"]


def test_a_refused_start_ends_the_starting_and_a_failed_follow_frees_its_place() -> None:
    stage = Stage()

    def refuse() -> str:
        raise ValueError("refused")

    with pytest.raises(ValueError, match="refused"):
        in_turns(2, [stage.start("a"), refuse, stage.start("b")], stage.follow)
    assert stage.events == ["start a"]
    assert not stage.running, "what was begun is followed to its end"

    def fail(name: str) -> str:
        raise ValueError(name)

    with pytest.raises(ValueError, match="c"):
        in_turns(1, [stage.start("c"), stage.start("d")], fail)


# --------------------------------------------------------------------------- healthy starts of the fleet
def profile(key: str, seconds: float, lines: int = 636, starts: int = 1) -> HealthyProfile:
    return HealthyProfile(key, starts, lines, lines, seconds, {"weights": seconds})


def ready(key: str, seconds: float) -> WatchResult:
    return WatchResult("ready", "serving", seconds, 640, {"weights": seconds}, kind=key)


def test_a_host_is_given_what_the_others_know_merged_by_kind() -> None:
    known = FleetStarts()
    known.note("gpu01", [profile("k", 100.0), profile("other", 5.0)])
    known.note("gpu02", [profile("k", 300.0, 641, 3)])
    known.note("gpu03", [profile("k", 9000.0)])
    found = {one.key: one for one in known.of_others("gpu03")}
    assert set(found) == {"k", "other"}
    assert (found["k"].lines_span, found["k"].starts) == ("636 to 641", 4)
    assert found["k"].longest == {"weights": 300.0}
    assert found["k"].phase_seconds == {"weights": 250.0}
    known.note("gpu01", [profile("k", 500.0)])
    assert [(one.key, one.longest["weights"]) for one in known.of_others("gpu03")] == [("k", 500.0)], "asked anew"


def test_the_canary_teaches_the_batch_behind_it() -> None:
    known = FleetStarts()
    known.note("gpu01", [])
    known.note_start("gpu01", ready("k", 70.0))
    known.note_start("gpu01", ready("k", 90.0))
    known.note_start("gpu01", WatchResult("stall", "weights", 9e9, 1, {"weights": 9e9}, kind="k"))
    (found,) = known.of_others("gpu02")
    assert (found.starts, found.seconds, found.lines_span) == (2, 80.0, "640")
    assert known.of_others("gpu01") == []


def test_a_later_command_knows_hosts_that_it_does_not_see(tmp_path: Path) -> None:
    file = tmp_path / "config" / "healthy-starts.json"
    first, meanwhile = FleetStarts(file), FleetStarts(file)
    first.note("gpu01", [profile("k", 100.0)])
    first.note("gpu02", [profile("k", 200.0)])
    first.save()
    meanwhile.note("gpu02", [profile("k", 300.0)])
    meanwhile.save()
    later = FleetStarts(file)
    assert [one.longest for one in later.of_others("gpu09")] == [{"weights": 300.0}]
    assert [one.longest for one in later.of_others("gpu02")] == [{"weights": 100.0}]
    later.note("gpu02", [])  # it was reinstalled
    later.save()
    assert [one.longest for one in FleetStarts(file).of_others("gpu09")] == [{"weights": 100.0}]


@pytest.mark.parametrize("data", [b"", b"{oops", b"[]", b'{"hosts": {"a": [1]}}', b"\xff"])
def test_a_broken_file_is_done_without_and_replaced(tmp_path: Path, data: bytes) -> None:
    file = tmp_path / "healthy-starts.json"
    file.write_bytes(data)
    known = FleetStarts(file)
    assert known.of_others("gpu01") == []
    known.note("gpu01", [profile("k", 1.0)])
    known.save()
    assert len(FleetStarts(file).of_others("gpu02")) == 1
    FleetStarts(file / "no" / "folder").save()


def test_a_host_tells_a_profile_a_kind_the_newest_last(tmp_path: Path) -> None:
    ctx = context(tmp_path)
    for key, seconds in (("a", 10.0), ("b", 20.0), ("a", 30.0)):
        healthy.remember(ctx.state, healthy.HealthyStart(key, 60, seconds, {"weights": seconds}, "sglang"))
    found = healthy.profiles(ctx.state)
    assert [(one.key, one.starts, one.seconds) for one in found] == [("b", 1, 20.0), ("a", 2, 20.0)]
    for number in range(healthy.KINDS + 5):
        healthy.remember(ctx.state, healthy.HealthyStart(f"k{number}", 60, 1.0, {}, "sglang"))
    assert [one.key for one in healthy.profiles(ctx.state)][-1] == f"k{healthy.KINDS + 4}"
    assert len(healthy.profiles(ctx.state)) == healthy.KINDS
