"""Several servers of a host start in turns, and are compared with healthy starts of the whole fleet."""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from fleetdump.agent import healthy
from fleetdump.agent.protocol import to_json
from fleetdump.agent.servermessages import HealthyProfile, WatchResult
from fleetdump.tasks import fleetstarts
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


DEEP = b"[" * 200_000 + b"]" * 200_000
GOOD = json.dumps(to_json(profile("k", 50.0))).encode()


@pytest.mark.parametrize(
    "data",
    [
        DEEP,
        b'{"v": 1, "hosts": {"gpu09": ' + DEEP + b"}}",
        b'{"v": 2, "hosts": {"gpu09": [' + GOOD + b"]}}",
        b'{"v": 1, "hosts": {"gpu09": null}}',
        b'{"v": 1, "hosts": "gpu09"}',
        b'{"v": ' + b"9" * 5000 + b"}",
        b'{"v": 1, "hosts": {"gpu09": [' + GOOD + b"]}}" + b" " * fleetstarts.MOST_BYTES,
    ],
)
def test_a_file_that_is_none_of_ours_says_nothing(tmp_path: Path, data: bytes) -> None:
    test_a_broken_file_is_done_without_and_replaced(tmp_path, data)


def test_what_stands_in_the_files_place_is_not_waited_for_and_nothing_is_left(tmp_path: Path) -> None:
    pipe, folder = tmp_path / "pipe", tmp_path / "folder"
    os.mkfifo(pipe)
    folder.mkdir()
    for place in (pipe, folder):
        known = FleetStarts(place)
        known.note("gpu01", [profile("k", 1.0)])
        known.save()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["folder", "pipe"]


ABSURD = [
    ("starts", "-1"),
    ("starts", "0"),
    ("starts", "1" + "0" * 400),
    ("lines_min", "-5"),
    ("lines_max", "1"),
    ("lines_max", "1" + "0" * 400),
    ("seconds", "-1.0"),
    ("seconds", "Infinity"),
    ("seconds", "NaN"),
    ("seconds", "1" + "0" * 400),
    ("phase_seconds", '{"weights": 1e308}'),
    ("phase_seconds", '{"weights": NaN}'),
    ("slowest", '{"weights": Infinity}'),
    ("slowest", '{"weights": 1e400}'),
    ("weights_gb", "NaN"),
]


def with_text(field: str, text: str) -> str:
    """The JSON of a profile of 100 s in which one value is this text."""
    return json.dumps({**to_json(profile("k", 100.0)), field: "HERE"}).replace('"HERE"', text)


@pytest.mark.parametrize(("field", "text"), ABSURD)
def test_an_absurd_profile_is_left_out_and_no_other(tmp_path: Path, field: str, text: str) -> None:
    file = tmp_path / "healthy-starts.json"
    good = json.dumps(to_json(profile("k", 50.0)))
    file.write_text(f'{{"v": 1, "hosts": {{"gpu01": [{with_text(field, text)}], "gpu02": [{good}]}}}}')
    assert [one.longest for one in FleetStarts(file).of_others("gpu09")] == [{"weights": 50.0}]


@pytest.mark.parametrize(("field", "text"), ABSURD)
def test_no_host_and_no_controller_can_make_another_patient_for_ever(tmp_path: Path, field: str, text: str) -> None:
    """Whatever a host's own file or another host says: it is as if it were not there."""
    value = json.loads(text)
    absurd = replace(profile("k", 100.0), **{field: value})
    known = FleetStarts()
    known.note("gpu01", [absurd, profile("other", 5.0)])
    assert [one.key for one in known.of_others("gpu02")] == ["other"]
    ctx = context(tmp_path)
    assert healthy.on_all_hosts(ctx.state, "k", [absurd]) is None
    found = healthy.on_all_hosts(ctx.state, "k", [absurd, profile("k", 50.0)])
    assert found is not None
    assert found.longest == {"weights": 50.0}


@pytest.mark.parametrize("text", ["-1.0", "Infinity", "NaN", "1e300", "1" + "0" * 400])
def test_an_absurd_line_of_a_hosts_own_file_does_not_count(tmp_path: Path, text: str) -> None:
    ctx = context(tmp_path)
    healthy.remember(ctx.state, healthy.HealthyStart("k", 60, 10.0, {"weights": 10.0}, "sglang"))
    file = ctx.state.root / healthy.FILE
    file.write_text(file.read_text() + file.read_text().replace('"weights":10.0', f'"weights":{text}'))
    assert [(one.starts, one.longest) for one in healthy.profiles(ctx.state)] == [(1, {"weights": 10.0})]


def test_what_a_host_says_that_cannot_be_is_not_kept(tmp_path: Path) -> None:
    file = tmp_path / "healthy-starts.json"
    known = FleetStarts(file)
    known.note("gpu01", [replace(profile("a", 1.0), lines_max=10**5000), profile("b", 1.0)])
    known.note_start("gpu02", replace(ready("a", 1.0), lines=10**5000))
    known.note_start("gpu02", ready("c", 1.0))
    known.save()
    kept = json.loads(file.read_text())["hosts"]
    assert {host: [one["key"] for one in mine] for host, mine in kept.items()} == {"gpu01": ["b"], "gpu02": ["c"]}


def test_a_hosts_file_that_is_too_large_is_not_read_and_begun_anew(tmp_path: Path) -> None:
    ctx = context(tmp_path)
    start = healthy.HealthyStart("k", 60, 10.0, {"weights": 10.0}, "sglang")
    healthy.remember(ctx.state, start)
    with (ctx.state.root / healthy.FILE).open("ab") as file:
        file.write(b"\n" * healthy.MOST_BYTES)
    assert healthy.profile(ctx.state, "k") is None
    healthy.remember(ctx.state, start)
    assert [one.starts for one in healthy.profiles(ctx.state)] == [1]


def test_the_file_keeps_the_hosts_seen_last_as_many_as_it_may_hold(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fleetstarts, "MOST_BYTES", 2000)
    file = tmp_path / "healthy-starts.json"
    for number in range(30):
        known = FleetStarts(file)
        known.note(f"gpu{number}", [profile(f"k{number}", 1.0)])
        known.save()
    kept = [one.key for one in FleetStarts(file).of_others("")]
    assert kept[-1] == "k29"
    assert kept == [f"k{number}" for number in range(30 - len(kept), 30)]
    assert len(kept) > 3
    assert file.stat().st_size <= 2000


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
