"""The live view of a run: its sums, what stands on a screen of any size, and the events for scripts."""

from __future__ import annotations

import io
import json
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from fleetdump.agent import reporter
from fleetdump.agent.reporter import Reporter
from fleetdump.agent.runmessages import RunProgress
from fleetdump.agent.share import Share, ShareSpec
from fleetdump.agent.specs import CaptureSpec
from fleetdump.views import run
from fleetdump.views.console import SafeConsole

FAST = RunProgress(
    "r", "main", "running", samples=100, done=40, in_flight=10, tokens=10_000, tokens_done=4_000, bytes_written=4 << 30
)
FAST = replace(FAST, tokens_per_second=200.0, bytes_per_second=2e9, eta_seconds=30.0, disk_free_bytes=900 << 30)
SLOW = replace(FAST, server="r1", done=20, rejected=5, retries=7, tokens_done=2_000, tokens_per_second=50.0)
SLOW = replace(SLOW, bytes_per_second=5e8, eta_seconds=160.0, disk_free_bytes=3 << 30, last_error="r/a/1: HTTP 500")
DONE = replace(FAST, server="r2", state="done", done=100, in_flight=0, tokens_done=10_000)
"""Its last rates stand in it still."""


def test_totals_add_up_and_the_rates_of_those_that_have_ended_are_past() -> None:
    totals = run.totals_of([FAST, SLOW, DONE])
    assert (totals.samples, totals.done, totals.rejected, totals.retries) == (300, 160, 5, 7)
    assert (totals.waiting, totals.in_flight) == (115, 20)
    assert (totals.tokens_per_second, totals.bytes_per_second) == (250.0, 2.5e9)
    assert totals.disk_free_bytes == 3 << 30
    assert totals.eta_seconds == 160.0, "the slowest is the last"
    assert totals.text() == (
        "160/300 samples, 250 tok/s, 2.50 GB/s, 12.0 GiB, queue 115 + 20 in flight, 3.0 GiB left on disk,"
        " 5 rejected, 7 retries, ETA 2m40s (done, running)"
    )


def test_where_work_moves_all_end_together() -> None:
    dead = replace(FAST, server="r3", state="stopped", tokens_per_second=0.0, bytes_per_second=0.0, eta_seconds=0.0)
    left = 200 * 30.0 + 50 * 160.0 + 6_000
    assert run.totals_of([FAST, SLOW, DONE, dead], moves=True).eta_seconds == pytest.approx(left / 250)


def test_what_is_not_known_is_not_told() -> None:
    fresh = RunProgress("r", "main", "tokenising", samples=3)
    assert run.totals_of([fresh]).text() == "0/3 samples, 0 tok/s, 0.00 GB/s, 0 B, queue 3 + 0 in flight (tokenising)"
    assert run.totals_of([DONE]).text() == "100/100 samples, 4.0 GiB, 900.0 GiB left on disk (done)"


def test_a_host_has_one_line_and_one_for_each_of_its_troubles() -> None:
    lines = [text.plain for text in run.host_lines("gpu01", [replace(FAST, detail="the disk is behind"), SLOW])]
    assert lines[0].startswith("gpu01 60/200 samples, 250 tok/s, 2.50 GB/s, ")
    assert lines[1:] == ["  main: the disk is behind", "  r1: last error: r/a/1: HTTP 500"]
    assert len(list(run.host_lines("gpu01", [replace(SLOW, state="done")]))) == 1


@pytest.fixture
def screen(monkeypatch: pytest.MonkeyPatch) -> io.StringIO:
    """A terminal of 12 lines."""
    stream = io.StringIO()
    monkeypatch.setattr(run, "err", SafeConsole(file=stream, force_terminal=True, width=200, height=12))
    return stream


def shown(view: run.RunView) -> list[str]:
    return [str(line.plain) for line in view._render().renderables]  # type: ignore[union-attr]


def test_a_screen_that_is_too_small_keeps_totals_and_troubled_hosts(screen: io.StringIO) -> None:
    with run.RunView() as view:
        for n in range(30):
            view.update(f"gpu{n:02}", replace(FAST, detail="server main died" if n == 27 else ""))
        lines = shown(view)
    assert lines[0].startswith("1200/3000 samples")
    assert lines[1].startswith("gpu27 ")
    assert lines[2] == "  main: server main died"
    assert lines[-1] == "and 23 more hosts"
    assert len(lines) <= 12 - 2
    assert "gpu27" in screen.getvalue()


def test_a_sample_that_two_hosts_have_done_counts_once(capsys: pytest.CaptureFixture[str]) -> None:
    done = replace(FAST, state="done", samples=100, done=100, rejected=0, in_flight=0)
    with run.RunView(corrected=run.Whole(samples=150, copies=lambda: 50).corrected) as view:
        view.update("gpu01", done)
        assert view._totals().samples == 150
        view.update("gpu02", done)
        totals = view._totals()
    assert (totals.done, totals.samples, totals.waiting) == (150, 150, 0)
    assert "150/150 samples" in capsys.readouterr().err


def test_a_run_that_waits_for_a_dead_server_says_how_to_launch_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "QUIET_SECONDS", -1.0)
    with run.RunView() as view:
        view.update("gpu01", replace(FAST, server="main.1", dead_launch="L1"))
        assert view._text().endswith("a server is dead; fleetdump restart --host gpu01 --server main")
        view.update("gpu01", replace(FAST, server="main.1"))
        assert "fleetdump diagnose" in view._text()


@pytest.mark.parametrize(
    ("state", "detail", "words"),
    [
        ("tokenising", "1200 rows tokenised", "gpu01/main is still tokenising (1200 rows tokenised)"),
        ("tokenising", "", "gpu01/main is still tokenising"),
        ("closing", "2 shards are still open", "gpu01/main closes its shards (2 shards are still open)"),
        ("paused", "by me@laptop", "gpu01/main is paused (by me@laptop)"),
        ("stopped", "no driver lives", "gpu01/main has no driver (no driver lives)"),
    ],
)
def test_a_run_that_has_not_come_to_its_servers_says_how_far_it_is(
    state: str, detail: str, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run, "QUIET_SECONDS", -1.0)
    with run.RunView() as view:
        view.update("gpu01", replace(FAST, state=state, detail=detail))
        view.update("gpu02", DONE)
        assert view._text().endswith(f": {words}")
        view.update("gpu03", replace(FAST, state=state))
        assert view._text().endswith(f": {words}; 1 other share at work on nothing either")
        view.update("gpu01", FAST)
        assert "fleetdump diagnose" in view._text()


def test_who_has_just_begun_is_not_quiet_since_the_beginning(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(run, "time", SimpleNamespace(monotonic=lambda: now[0]))
    with run.RunView() as view:
        view.update("gpu01", replace(FAST, state="tokenising"))
        now[0] += 2 * run.QUIET_SECONDS
        assert "is still tokenising" in view._text()
        view.update("gpu01", FAST)
        assert "no sample for" not in view._text()
        now[0] += 2 * run.QUIET_SECONDS
        assert "fleetdump diagnose" in view._text()


def test_a_run_that_waits_says_for_what_once(capsys: pytest.CaptureFixture[str]) -> None:
    share = replace(FAST, detail="server main died (pid 7): waiting for it to be launched again")
    with run.RunView() as view:
        for _ in range(3):
            view.update("gpu01", share)
    assert capsys.readouterr().err.count(f"[gpu01/main] {share.detail}\n") == 1


def test_events_come_at_once_for_a_new_state_and_now_and_then_for_figures(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [100.0]
    monkeypatch.setattr(run, "time", SimpleNamespace(monotonic=lambda: now[0]))
    with run.RunView(as_json=True) as view:
        for second in range(11):
            now[0] = 100.0 + second
            state = "paused" if second == 7 else "running"
            view.update("gpu01", replace(FAST, done=40 + second, state=state, notes=["a long text"]))
        view.update("gpu01", replace(FAST, done=50, notes=["a long text"]))
    out, err = capsys.readouterr()
    assert err == ""
    events = [json.loads(line) for line in out.splitlines()]
    told = [(event["done"], event["state"]) for event in events if event["event"] == "progress"]
    assert told == [(40, "running"), (45, "running"), (47, "paused"), (48, "running")]
    first = next(event for event in events if event["event"] == "progress")
    assert (first["host"], first["server"], first["bytes_per_second"]) == ("gpu01", "main", 2e9)
    assert "notes" not in first
    totals = [event for event in events if event["event"] == "totals"]
    assert [event["done"] for event in totals] == [45, 50, 50]
    assert (totals[-1]["run"], totals[-1]["waiting"], totals[-1]["states"]) == ("r", 40, ["running"])


@pytest.fixture
def report(tmp_path: Path) -> Callable[..., RunProgress]:
    """A reporter's file after a second in which so much was committed."""
    share = Share(tmp_path / "runs" / "r" / "main")
    share.root.mkdir(parents=True)
    capture = CaptureSpec(layers=[1], dir=str(tmp_path / "capture"))
    spec = ShareSpec("r", "main", "0" * 64, 9, capture, 0, 100, 3, "e", "p", "m", 1.0)
    made = Reporter(share, spec)

    def report(tokens: int, written: int) -> RunProgress:
        committer: Any = SimpleNamespace(
            totals=SimpleNamespace(samples=1, tokens=tokens, bytes=written), rejected=0, manifest_bytes=0
        )
        made._written = 0.0
        made.report("running", "", committer)
        return share.progress()

    report.reporter = made  # type: ignore[attr-defined]
    return report


def test_a_driver_says_bytes_a_second_disk_left_and_the_last_error(
    report: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [10.0]
    clock = SimpleNamespace(monotonic=lambda: now[0], time=time.time)
    monkeypatch.setattr(reporter, "time", clock)
    report(1_000, 8_000)
    now[0] = 12.0
    report.reporter.failed("r/a/1", "server_error", "HTTP 500: \ud800" + "x" * 1000)
    progress = report(3_000, 24_000)
    assert (progress.tokens_per_second, progress.retries) == (0.0, 1), "no driver lives here"
    written = json.loads((report.reporter._share.root / "progress.json").read_text())
    assert (written["tokens_per_second"], written["bytes_per_second"]) == (1_000.0, 8_000.0)
    assert progress.disk_free_bytes is not None
    assert progress.disk_free_bytes > 0
    assert progress.last_error.startswith("r/a/1: server_error: HTTP 500: ?x")
    assert len(progress.last_error) <= reporter.ERROR_LENGTH
