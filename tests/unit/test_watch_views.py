"""What a live watch shows: facts of one server, and hosts against each other."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any, cast

import pytest

from fleetdump.agent.hostmessages import StatusResult
from fleetdump.agent.patching import read_state
from fleetdump.agent.runmessages import RunProgress, TapStatus
from fleetdump.agent.servermessages import Fault, HealthyProfile, MonitorResult, Vitals, merged_profile
from fleetdump.agent.servermessages import ServerState as State
from fleetdump.errors import ExitCode, HostError
from fleetdump.fleet.frames import FrameReader
from fleetdump.inventory import HostConfig
from fleetdump.tasks.watch import Listener, WatchPlan, exit_code, load_rates, slow_loaders, watch
from fleetdump.views import status as status_view
from fleetdump.views import watch as watch_view
from fleetdump.views.console import SafeConsole
from fleetdump.views.watch import WatchView, facts

GB = 1e9


def loading(rate: float, **changes: object) -> Vitals:
    values = {"phase": "weights", "load_bytes": 5 * GB, "load_total": int(50 * GB), "load_rate": rate * GB}
    return Vitals("main", "starting", **{**values, **changes})  # type: ignore[arg-type]


def profile(starts: int, lines: tuple[int, int], seconds: float, key: str = "k") -> HealthyProfile:
    return HealthyProfile(key, starts, *lines, seconds, {"weights": seconds / 2})


def test_a_slow_host_is_named_against_the_others(capsys: pytest.CaptureFixture[str]) -> None:
    view = WatchView()
    for number in range(1, 7):
        view.update(f"gpu0{number}", loading(2.9))
    view.update("gpu07", loading(0.4))
    assert "gpu07/main loads at 0.4 GB/s, the others at 2.9" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("rates", "slow"),
    [
        ([2.9, 2.9, 0.4], [2]),
        ([2.9, 0.4], []),  # of two nobody can say which is unlike the others
        ([2.9, 2.5, 1.2], []),
        ([2.9, 2.9, 2.9, 0.0], [3]),
        ([0.4, 0.4, 0.4], []),
    ],
)
def test_outliers(rates: list[float], slow: list[int]) -> None:
    found = slow_loaders({str(place): rate * GB for place, rate in enumerate(rates)})
    assert [int(one.name) for one in found] == slow


def test_a_host_that_has_just_begun_is_no_outlier() -> None:
    servers = {str(place): loading(2.9) for place in range(3)}
    assert set(load_rates({**servers, "new": loading(0.0, load_bytes=0)})) == set(servers)
    assert set(load_rates({**servers, "ready": loading(0.0, phase="serving")})) == set(servers)


def test_healthy_starts_are_merged_over_hosts() -> None:
    merged = merged_profile([profile(1, (636, 636), 100.0), profile(3, (638, 641), 80.0)])
    assert merged is not None
    assert (merged.starts, merged.lines_span, merged.seconds) == (4, "636 to 641", 85.0)
    assert merged.phase_seconds == {"weights": 42.5}
    assert merged.longest == {"weights": 50.0}, "patience is stretched by the slowest host, not by the mean"
    again = merged_profile([merged, profile(9, (1, 1), 10.0)])
    assert again is not None
    assert again.longest == {"weights": 50.0}
    assert merged_profile([]) is None


def test_a_start_is_compared_with_healthy_ones_on_all_hosts() -> None:
    mine = loading(0.4, lines=217, load_eta=112.0, healthy=profile(1, (636, 636), 100.0))
    others = [mine, loading(1, healthy=profile(1, (641, 641), 90.0)), loading(1, healthy=profile(9, (1, 1), 1.0, "x"))]
    text = ", ".join(facts(mine, others))
    assert "217 lines; healthy starts 636 to 641" in text
    assert "4.7 GiB of 46.6 GiB at 0.4 GB/s, ETA 1m52s" in text
    assert "healthy starts spend 47s in weights" in text


def test_lines_come_on_change_alone(capsys: pytest.CaptureFixture[str]) -> None:
    view = WatchView()
    ready = Vitals("main", "ready", "serving", uptime=5.0)
    view.update("h", ready)
    view.update("h", Vitals("main", "ready", "serving", uptime=9.0, forwards=7))
    view.update("h", Vitals("main", "ready", "serving", faults=[Fault("port_closed", "port 1 is closed")]))
    view.update("h", ready)
    told = capsys.readouterr()
    lines = told.out.splitlines()
    assert told.err == "", "what is watched is the output; stderr is for what goes wrong"
    assert [line.partition(" ")[2][:9] for line in lines] == ["ready, up", "port_clos", "over: por"]


def test_a_cut_link_is_told_once_and_so_is_its_return(capsys: pytest.CaptureFixture[str]) -> None:
    outputs = []
    for as_json in (False, True):
        view = WatchView(as_json)
        view.update("h", Vitals("main", "ready", "serving"))
        view.lost("h", "no route")
        view.lost("h", "no route")
        view.update("other", Vitals("main", "ready", "serving"))
        view.update("h", Vitals("main", "ready", "serving"))
        view.lost("h", "no route")
        view.empty("h")
        outputs.append(capsys.readouterr().out)
    told = [line.partition("up")[0].rstrip(" ,") for line in outputs[0].splitlines()]
    cut = "h link lost, trying again: no route"
    assert told == [
        "h/main ready",
        cut,
        "other/main ready",
        "h is back",
        cut,
        "h is back",
        "h nothing of ours runs there",
    ]
    events = [json.loads(line) for line in outputs[1].splitlines()]
    assert [one["event"] for one in events if one["host"] == "h"] == [
        "vitals", "lost", "back", "vitals", "lost", "back", "empty"
    ]  # fmt: skip


def test_a_host_without_servers_is_told_once_it_has_been_looked_at(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    WatchView().empty("gpu01")
    assert capsys.readouterr().out.splitlines() == ["gpu01 nothing of ours runs there"]
    WatchView(as_json=True).empty("gpu01")
    assert json.loads(capsys.readouterr().out) == {"host": "gpu01", "event": "empty"}
    terminal = SafeConsole(file=io.StringIO(), force_terminal=True, width=100)
    monkeypatch.setattr(watch_view, "err", terminal)
    assert WatchView()._live is None, "its output goes into a file"
    monkeypatch.setattr(watch_view, "out", terminal)
    view = WatchView()

    def screen() -> list[str]:
        return [str(line) for line in view._render().renderables]

    assert screen() == ["looking ..."]
    view.empty("gpu02")
    view.empty("gpu01")
    assert screen() == ["gpu[01-02] nothing of ours runs there"]
    view.update("gpu01", Vitals("main", "ready"))
    assert [line.partition(" ")[0] for line in screen()] == ["gpu01/main", "gpu02"]


def test_json_has_an_object_an_event(capsys: pytest.CaptureFixture[str]) -> None:
    view = WatchView(as_json=True)
    view.update("h", Vitals("main", "ready"))
    view.update("h", Vitals("main", "died", faults=[Fault("died", "gone")]))
    view.update("h", Vitals("main", "starting"))
    events = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [one["event"] for one in events] == ["vitals", "vitals", "fault", "vitals", "cleared"]
    assert events[2]["fault"] == {"code": "died", "text": "gone", "note": False}


@pytest.mark.parametrize(
    ("servers", "code"),
    [
        ([Vitals("a", "ready"), Vitals("b", "stopped")], ExitCode.OK),
        ([Vitals("a", "ready", faults=[Fault("busy", "", note=True)])], ExitCode.OK),
        ([Vitals("a", "died", faults=[Fault("died", "")]), Vitals("b", "starting")], ExitCode.FAILED),
        (
            [Vitals("a", "died", faults=[Fault("died", "")]), Vitals("b", "x", faults=[Fault("stall", "")])],
            ExitCode.STALL,
        ),
        ([Vitals("a", "absent")], ExitCode.FAILED),
    ],
)
def test_exit_codes(servers: list[Vitals], code: ExitCode) -> None:
    assert exit_code(MonitorResult(servers)) is code


def test_status_says_why_an_engine_is_absent(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    python = str(tmp_path / "python")
    status_view.show_statuses({"gpu01": StatusResult("gpu01", [], [], read_state(python))})
    shown = capsys.readouterr().out
    assert "engine absent: the server's Python interpreter does not exist" in shown
    assert f"({python}); next: set `python` in the inventory" in shown


def test_status_has_a_line_a_server_with_every_column(capsys: pytest.CaptureFixture[str]) -> None:
    tap = TapStatus("main", "l1", "r0", 1, 9, 1 << 40, 2.1e9, 100, 3, False, 0.0, {"disk_full": 2}, 1, "", False, 1.0)
    main = State(
        "main",
        "ready",
        4,
        1,
        8000,
        launch_id="l1",
        phase="serving",
        uptime=60.0,
        patch_name="hs@1",
        disk_free=812 << 30,
    )
    other = State("r1", "died", launch_id="l2")
    status_view.show_statuses({"gpu01": StatusResult("n", [main, other], [], taps=[tap])})
    head, first, *_ = capsys.readouterr().out.splitlines()
    assert head.split() == ["server", "state", "phase", "up", "patch", "capture", "queue", "disk", "left", "errors"]
    assert first.split() == [
        "gpu01/main",
        "ready",
        "serving",
        "1m00s",
        "hs@1",
        "2.10",
        "GB/s",
        "3%",
        "812.0",
        "GiB",
        "3",
    ]


# --------------------------------------------------------------------------- what a host says is not believed
class Teller:
    """A host whose agent tells this, as its lines of JSON come over the wire."""

    config = HostConfig("gpu01", "10.0.0.1")

    def __init__(self, *lines: str) -> None:
        self.lines = lines
        self.closed = False

    def again(self) -> Any:
        raise AssertionError("it says the same when it is asked again")

    def call(self, _args: object, _kind: type, *, verb: str, on_event: Any, **_: object) -> Any:
        if verb == "status":
            return StatusResult([])
        data = io.BytesIO("".join(f"{line}\n" for line in self.lines).encode())
        reader = FrameReader(lambda limit: data.read(limit))
        while (frame := reader.next_frame()) is not None:
            on_event(frame)
        return MonitorResult([])


def told(changed: str) -> str:
    return f'{{"type": "event", "event": "vitals", "server": "main", "changed": {changed}}}'


@pytest.mark.parametrize(
    "line",
    [
        told('{"server": "main", "state": "ready", "uptime": NaN}'),
        told('{"server": "main", "state": "ready", "uptime": 1e400}'),
        told('{"server": "main", "state": "starting", "load_bytes": Infinity, "load_total": 5}'),
        told('{"server": "main", "state": "ready", "rows": 1' + 400 * "0" + "}"),
        told('{"server": "main", "state": "ready", "uptime": 1' + 400 * "0" + "}"),
        told('{"server": "main", "state": 5}'),
        told('{"server": "main", "state": "ready", "colour": "red"}'),
        told("5"),
        told("null"),
        '{"type": "event", "event": "vitals", "changed": {}}',
    ],
)
def test_what_cannot_be_shown_of_one_host_does_not_reach_the_view_of_all(line: str) -> None:
    seen: list[Vitals] = []
    good = told('{"server": "main", "state": "ready", "uptime": 1.0}')
    with pytest.raises(HostError, match="what the agent tells of a server cannot be") as failed:
        cast(Any, watch).body(Teller(good, line), WatchPlan(), Listener(seen.append))
    assert failed.value.where == "gpu01"
    assert [one.uptime for one in seen] == [1.0]


def test_a_line_nested_too_deep_is_noise() -> None:
    deep = '{"type": ' + 200_000 * "[" + 200_000 * "]" + "}"
    assert cast(Any, watch).body(Teller(deep), WatchPlan(), Listener(lambda _: None)).servers == []


@pytest.mark.parametrize(
    ("share", "words"),
    [
        (
            RunProgress("r1", "main", "done", 624, 28, rejected=596, order="cancel", whole_run=True),
            "cancelled, 28 of 624",
        ),
        (RunProgress("r1", "main", "done", 28, 28, order="cancel", whole_run=True), "done, 28/28 samples"),
        (RunProgress("r1", "main", "done", 624, 28, rejected=596), "done, 28/624 samples"),
        (RunProgress("r1", "main", "closing", 624, 28, order="cancel"), "closing, 28/624 samples"),
    ],
)
def test_a_cancelled_run_is_not_done(share: RunProgress, words: str, capsys: pytest.CaptureFixture[str]) -> None:
    status_view.show_statuses({"gpu01": StatusResult("gpu01", [], [share])})
    assert f"run r1 on main: {words}" in capsys.readouterr().out
