"""What a user reads: what others wrote never steers the terminal, and hosts that agree are told once."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleetdump.agent.hostmessages import ModelFacts, ProbeResult, StatusResult, UnlockResult
from fleetdump.agent.patchmessages import PatchState
from fleetdump.agent.protocol import Finding
from fleetdump.agent.runmessages import RunProgress, SelfCheckResult
from fleetdump.agent.servermessages import Fault, LaunchForecast, ServerState, Vitals
from fleetdump.diagnosis import Verdict
from fleetdump.errors import HostError, UnreachableError, UsageError
from fleetdump.tasks.changes import HostChanges
from fleetdump.tasks.deployplan import Attempt, DeployReport, ServerReport
from fleetdump.tasks.selfcheck import ServerCheck
from fleetdump.tasks.server import Diagnosis
from fleetdump.tasks.steps import HostHistory
from fleetdump.views import (
    checks,
    console,
    deploys,
    hosts,
    interrupts,
    locks,
    patches,
    progress,
    run,
    selfcheck,
    status,
    watch,
)
from fleetdump.views.console import HostResult, SafeConsole, print_error, print_json, quoted, visible

EVIL = "\x1b]0;title\x07\x1b[31m[red]x[/red] :bug: \x9b2J \u202egpj\nerror: forged\r"
SHOWN = "[red]x[/red] :bug:"

Capture = Callable[[], tuple[str, str]]


@pytest.fixture(params=[False, True], ids=["pipe", "terminal"])
def captured(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Capture:
    """Both consoles as a pipe or a terminal; gives what was written to stdout and stderr."""
    streams = io.StringIO(), io.StringIO()
    for name, stream in zip(("out", "err"), streams, strict=True):
        made = SafeConsole(
            file=stream, force_terminal=request.param, no_color=True, soft_wrap=True, highlight=False, emoji=False
        )
        for module in (checks, console, deploys, hosts, interrupts, locks, progress, selfcheck, status, watch):
            if hasattr(module, name):
                monkeypatch.setattr(module, name, made)
    return lambda: (streams[0].getvalue(), streams[1].getvalue())


@pytest.mark.parametrize(
    ("seconds", "text"), [(42.9, "42s"), (190, "3m10s"), (7500, "2h05m"), (float("nan"), "?"), (-float("inf"), "?")]
)
def test_a_duration_is_told_of_any_number(seconds: float, text: str) -> None:
    assert console.duration(seconds) == text


def harmless(text: str) -> None:
    """Nothing but rich's own styles (bold, dim, reset) could reach the terminal, and nothing was lost."""
    for style in ("\x1b[1m", "\x1b[2m", "\x1b[0m"):
        text = text.replace(style, "")
    assert not set(text) & set("\x1b\x07\x9b\u202e\r"), repr(text)
    assert SHOWN in text
    assert not any(line.startswith("error: forged") for line in text.splitlines())


def verdict(**changes: Any) -> Verdict:
    values = {
        "code": "SPIN",
        "severity": "stall",
        "confidence": "direct",
        "title": EVIL,
        "rank": 1,
        "phase": EVIL,
        "evidence": [EVIL],
        "ruled_out": ["lock: nobody waits", "disk full: no"],
        "next_steps": [EVIL],
    }
    return Verdict(**{**values, **changes})


def show_watch(server: Vitals) -> None:
    """As lines on change, and as the display that is kept up to date on a terminal."""
    view = watch.WatchView()
    view.update("h1", server)
    watch.err.print(view._render())


def probe(*findings: Finding, **changes: Any) -> ProbeResult:
    return ProbeResult("node", "id", "3.11.2", list(findings), **changes)


EVIL_ANSWERS: dict[str, Callable[[], None]] = {
    "event": lambda: hosts.show_event("h1", {"event": "step", "text": EVIL}),
    "phase": lambda: hosts.show_event("h1", {"event": "phase", "server": EVIL, "phase": "init", "seconds": 1}),
    "probe": lambda: checks.show_check(
        {"h1": probe(engine=EVIL, model=ModelFacts(EVIL, 1, 2, "f32", ""), gpus=[EVIL])}
    ),
    "findings": lambda: checks.show_check({"h1": probe(Finding("k", "warning", EVIL, EVIL), Finding("o", "ok", EVIL))}),
    "status": lambda: status.show_statuses(
        {
            "h1": StatusResult(
                "n",
                [ServerState(EVIL, "starting", pid=4, phase=EVIL, patch_name=EVIL, detail=EVIL)],
                [RunProgress(EVIL, EVIL, "failed", detail=EVIL)],
                PatchState("ours", EVIL, detail=EVIL),
            )
        }
    ),
    "watch": lambda: show_watch(Vitals(EVIL, "starting", EVIL, moves=[EVIL], faults=[Fault("stall", EVIL)])),
    "unlock": lambda: locks.show_unlock("h1", UnlockResult("held", EVIL, EVIL, 4, 1.0, True)),
    "damaged lock": lambda: locks.show_unlock("h1", UnlockResult("held", damage=EVIL)),
    "changes": lambda: deploys.show_changes(
        {"h1": HostChanges(EVIL, ["b"], launches=[LaunchForecast(EVIL, "start", [EVIL], differs=[EVIL])])}, True
    ),
    "diff": lambda: deploys.show_host_diff("h1", f"+{EVIL}".replace("\n", "")),
    "works": lambda: deploys.show_works(
        {"h1": DeployReport(EVIL, servers=[ServerReport("main", "ready")], attempts=[Attempt(EVIL, EVIL)])}
    ),
    "attempt": lambda: hosts.show_deploy("h1", DeployReport(attempts=[Attempt(EVIL, EVIL, [EVIL])])),
    "interrupted": lambda: interrupts.show_interrupted({"h1": HostHistory([EVIL], EVIL, [EVIL])}, ["h1"]),
    "not started": lambda: hosts.show_not_started(["h1"], EVIL),
    "not ready": lambda: hosts.show_deploy(
        "h1",
        DeployReport(
            servers=[ServerReport("main", "died", EVIL, detail=EVIL, log_tail=[EVIL], log=EVIL, evidence_dir=EVIL)]
        ),
    ),
    "ready": lambda: hosts.show_deploy("h1", DeployReport(patch=EVIL, servers=[ServerReport("main", "ready")])),
    "diagnosis": lambda: hosts.show_diagnosis("h1", Diagnosis("main", [verdict(), verdict()], EVIL)),
    "self-check": lambda: selfcheck.show_checks(
        "h1",
        [
            ServerCheck(
                "main", SelfCheckResult(False, 1, 1, 0.0, EVIL, [Finding("rows", "blocker", EVIL, EVIL)], [EVIL])
            ),
            ServerCheck("r1", None, EVIL, EVIL),
        ],
    ),
    "error": lambda: print_error(HostError(EVIL, "h1", EVIL, EVIL)),
    "share": lambda: console.err.print(
        *run.host_lines(EVIL, [RunProgress("r", EVIL, "running", detail=EVIL, last_error=EVIL)])
    ),
}


@pytest.mark.parametrize("show", EVIL_ANSWERS.values(), ids=EVIL_ANSWERS.keys())
def test_what_a_host_says_is_shown_harmlessly(show: Callable[[], None], captured: Capture) -> None:
    show()
    harmless("".join(captured()))


def test_json_keeps_every_byte_and_one_line(captured: Capture) -> None:
    print_json(HostResult("h1", "logs", "ok", None, {"line": EVIL, "long": "x" * 5000}))
    out, err = captured()
    assert out.count("\n") == 1
    assert json.loads(out)["data"] == {"line": EVIL, "long": "x" * 5000}
    assert err == ""


def test_json_names_the_kind_of_an_error(captured: Capture) -> None:
    dropped = UnreachableError("no login", "h1", code="SSH_THROTTLED")
    print_json(HostResult("h1", "status", "unreachable", dropped))
    print_json(HostResult("h1", "status", "failed", UsageError("no such server")))
    records = [json.loads(line) for line in captured()[0].splitlines()]
    assert [record["error"]["code"] for record in records] == ["SSH_THROTTLED", ""]


@given(st.text())
def test_visible_leaves_nothing_that_steers(text: str) -> None:
    shown = visible(text)
    assert all(char in "\n\t" or (char.isprintable() or not char.isascii()) for char in shown)
    assert "\x9b" not in shown
    assert visible(shown) == shown


@given(st.text().map(lambda text: text + "."))  # rich doubles a backslash at the very end
def test_quoted_text_is_no_markup_and_stays_on_its_line(text: str) -> None:
    stream = io.StringIO()
    plain = SafeConsole(file=stream, soft_wrap=True, highlight=False, emoji=False)
    plain.print(f"[bold]a[/] {quoted(text)}|")
    assert stream.getvalue() == f"a {visible(text.replace(chr(10), chr(92) + 'n').replace(chr(9), ' ' * 4))}|\n"


def test_findings_that_hosts_share_are_told_once(captured: Capture) -> None:
    shared = Finding("tools", "warning", "py-spy is missing", "pip install py-spy")
    own = Finding("port", "blocker", "port 8000 is taken", "stop it")
    fleet = {f"gpu{n:02}": probe(shared) for n in range(1, 9)}
    fleet["gpu03"] = probe(shared, own)
    fleet["gpu04"] = probe(shared, own)
    checks.show_check(fleet)
    out, _ = captured()
    assert out.count("py-spy is missing") == 1
    assert "all 8 hosts: py-spy is missing" in out
    assert "gpu[03-04]: port 8000 is taken" in out
    assert out.index("port 8000") < out.index("py-spy"), "the worst first"
    assert len(out.splitlines()) == 6
    assert "gpu[01-02,05-08]" in out.splitlines()[0], "hosts alike take one line"


def test_what_is_well_on_one_host_has_a_line_each(captured: Capture) -> None:
    checks.show_check({"gpu01": probe(Finding("a", "ok", "agent runs"), Finding("b", "ok", "processes may be traced"))})
    lines = captured()[0].splitlines()
    assert [line.split(maxsplit=1) for line in lines[1:]] == [["ok", "agent runs"], ["ok", "processes may be traced"]]


def test_fifty_hosts_fit_a_screen(captured: Capture) -> None:
    """Figures that each host has of its own do not make findings of their own."""
    fleet = {}
    for n in range(50):
        taken = Finding("port", "blocker", f"port {8000 + n} is taken: pid {100 + n} listens", "stop it")
        disk = Finding("disk", "warning", f"{n}.5 GiB free at /nvme (xfs)", "free some")
        clock = Finding("clock", "ok", "its clock agrees")
        fleet[f"gpu{n:02}"] = probe(clock, disk, *([taken] if n % 2 else []), engine="sglang 0.5.20", gpus=["H200"] * 8)
    checks.show_check(fleet)
    out, _ = captured()
    assert len(out.splitlines()) <= 8, out
    assert "all 50 hosts: 0.5 GiB free at /nvme (xfs) (on gpu00; other figures on the others)" in out
    assert "port 8001 is taken: pid 101 listens (on gpu01; other figures on the others)" in out
    assert "8 x H200" in out


def test_a_host_that_is_as_wanted_takes_one_line(captured: Capture) -> None:
    report = DeployReport(patch="hidden-states@1", servers=[ServerReport("main", "ready", reused=True, lines=640)])
    hosts.show_deploy("gpu01", report)
    out, _ = captured()
    assert len(out.splitlines()) == 1
    assert "unchanged, patch hidden-states@1" in out


def test_recap_names_hosts_that_are_not_well_and_is_silent_for_one(captured: Capture) -> None:
    hosts.show_recap([HostResult("gpu01", "check", "ok")])
    assert captured()[1] == ""
    dead = [HostResult(f"gpu{n:02}", "check", "unreachable", UnreachableError("x")) for n in (2, 3)]
    hosts.show_recap([HostResult("gpu01", "check", "ok"), *dead])
    out, err = captured()
    assert out == ""
    assert "3 hosts: " in err
    assert "2 unreachable" in err
    assert "gpu[02-03]" in err


def test_a_diff_has_its_colours_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = io.StringIO()
    made = SafeConsole(file=stream, force_terminal=True, color_system="standard", soft_wrap=True, highlight=False)
    monkeypatch.setattr(patches, "out", made)
    patches.show_diff("--- a\n+++ b\n@@ -1 +1 @@\n-old\n+new\n same")
    for text, style in (("+++ b", "1"), ("@@ -1 +1 @@", "36"), ("-old", "31"), ("+new", "32")):
        assert f"\x1b[{style}m{text}\x1b[0m\n" in stream.getvalue()
    assert "\n same\n" in stream.getvalue()


def test_an_interrupt_tells_hosts_alike_once(captured: Capture) -> None:
    done = HostHistory(["patched with p@1"], "launching main", [])
    histories = {"gpu01": done, "gpu02": HostHistory(list(done.done), done.doing)}
    interrupts.show_interrupted(histories, ["gpu01", "gpu02", "gpu04"])
    _, err = captured()
    assert "gpu[01-02]: patched with p@1; launching main was under way and may or may not be done" in err
    assert "gpu04: nothing was changed" in err
    assert "the same command again" in err


def test_an_interrupt_of_other_commands_says_what_may_have_been_done(captured: Capture) -> None:
    interrupts.show_change_cut("stop", ["gpu01"], ["gpu03", "gpu02"])
    interrupts.show_look_cut(["gpu01"], ["gpu03", "gpu02"])
    interrupts.show_look_cut(["gpu01"], [])
    _, err = captured()
    for text in (
        "gpu01: stop has ended",
        "gpu[02-03]: stop was under way and may or may not be done",
        "the same command again",
        "nothing was changed on the hosts; no answer yet from gpu[02-03]",
    ):
        assert text in err
    assert err.rstrip().endswith("nothing was changed on the hosts")


def test_weights_are_told_with_their_eta_now_and_then(captured: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    lines = progress.StartLines()
    tick = {"event": "tick", "server": "main", "load_bytes": 38 << 30, "load_total": 76 << 30}
    for now[0] in (0.0, 5.0, 16.0, 20.0, 32.0):
        lines.update("gpu01", {**tick, "load_rate": 1 << 30, "load_eta": 38})
        lines.update("gpu01", {"event": "tick", "server": "main", "phase": "jit"})
    _, err = captured()
    assert err.splitlines() == ["[gpu01] main: weights 38.0 GiB of 76.0 GiB, 1.0 GiB/s, 38s left"] * 2


def test_a_deploy_names_the_host_that_loads_more_slowly_than_the_others(
    captured: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [0.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    lines = progress.StartLines()

    def tick(host: str, rate: float, phase: str = "weights") -> None:
        load = {"load_bytes": 1 << 30, "load_rate": rate * 1e9} if phase == "weights" else {}
        lines.update(host, {"event": "tick", "server": "main", "phase": phase, "lines": 217, **load})

    for second in range(40):
        now[0] = float(second)
        for host in ("gpu01", "gpu02"):
            tick(host, 2.9)
        tick("gpu03", 0.0 if second < 10 else 2.9)  # has no rate in its first seconds
        tick("gpu07", 0.4)
    err = captured()[1]
    assert [line for line in err.splitlines() if "others" in line] == [
        "gpu07/main loads at 0.4 GB/s, the others at 2.9"
    ], err


def test_lines_are_told_beside_those_of_healthy_starts(captured: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    lines = progress.StartLines()
    tick = {"event": "tick", "server": "main", "phase": "kv_pool", "lines": 217, "usual_lines": "636 to 641"}
    for now[0] in (0.0, 31.0):
        lines.update("gpu01", tick)
    assert captured()[1] == "[gpu01] main: still kv_pool, for 31s, 217 log lines; healthy starts 636 to 641\n"


def test_a_start_shows_a_sign_of_life_in_every_phase(captured: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    lines = progress.StartLines()
    for second in range(100):
        now[0] = float(second)
        phase = "imports" if second < 50 else "init"
        if second == 50:
            lines.update("gpu01", {"event": "phase", "server": "main", "phase": "init", "lines": 7})
        lines.update("gpu01", {"event": "tick", "server": "main", "phase": phase, "lines": 7})
        if second == 80:
            lines.update("gpu01", {"event": "step", "text": "no sign of a server"})
    now[0] = 110.0
    lines.update("gpu01", {"event": "tick", "server": "main", "phase": "init", "lines": 9, "idle_seconds": 40.0})
    assert captured()[1].splitlines() == [
        "[gpu01] main: still imports, for 30s, 7 log lines",
        "[gpu01] main: still init, for 30s, 7 log lines",
        "[gpu01] main: still init, for 1m00s, 9 log lines; nothing moves for 40s",
    ]
