"""The watch on starts that go well, slowly or wrong: real logs of SGLang, written by process trees like its own.

``make test-nightly`` plays each case again, and many healthy starts, and records what was seen in
bench/results/watch_cases.json; docs/watch.md has the table.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from fleetdump.agent import procfs
from fleetdump.agent.bootstrap import state_root
from fleetdump.agent.context import AgentContext, State
from fleetdump.agent.detach import spawn_detached
from fleetdump.agent.evidence_types import Evidence
from fleetdump.agent.protocol import Request, from_json
from fleetdump.agent.server import ServerRecord, boot_id, save_record
from fleetdump.agent.servermessages import WatchArgs, WatchResult
from fleetdump.agent.specs import PHASES, Patience
from fleetdump.agent.watch import watch
from fleetdump.diagnosis import diagnose

HERE = Path(__file__).parent
REPLAY = HERE / "replay.py"
LOG = HERE.parent / "unit" / "fixtures" / "logs" / "healthy-tp2-0.5.20.log"
RESULTS = HERE.parents[1] / "bench" / "results" / "watch_cases.json"
MODEL = "DeepseekV3ForCausalLM"
PATIENCE = 3.0
HEALTHY_NIGHTLY = 50
WORKS = "6"
"""Seconds that a slow start takes at one place: twice the patience."""


@dataclass(frozen=True)
class Case:
    """``fault`` when the line with ``at`` is due. The watch must come to ``outcome``, in ``phase`` (empty: the log does
    not say which), its words must have all of ``words``; on a stall the diagnosis must be one of ``codes``."""

    name: str
    fault: str = ""
    at: str = ""
    outcome: str = "ready"
    phase: str = "serving"
    words: tuple[str, ...] = ()
    codes: tuple[str, ...] = ()
    env: dict[str, str] = field(default_factory=dict)


AFTER_WEIGHTS = "KV Cache is allocated"
CASES = (
    Case("healthy"),
    Case("slow weights", "trickle", "Load weight end"),
    Case("mapped weights, rchar stands", "map", "Load weight end"),
    Case("compiler child", "compile", AFTER_WEIGHTS),
    Case("spin after weights in one rank", "spin", AFTER_WEIGHTS, "stall", "kv_pool", ("no progress",)),
    Case("rank killed -9 during load", "die", "Load weight end", "died", "weights", ("scheduler TP1",)),
    Case("port taken", outcome="died", phase="http", words=("address already in use",)),
    Case("rank stopped", "stop", AFTER_WEIGHTS, "stall", "kv_pool", ("no progress",), ("STOPPED_PROCESS",)),
    Case("log on a full disk", "spin", AFTER_WEIGHTS, "stall", "", ("the disk of the log is full",)),
    Case("log moved away", "spin", AFTER_WEIGHTS, "stall", "", ("not to the watched log",)),
    Case(
        "warm-up blocked by a proxy", "block", "GET /model_info", "stall", "warmup", ("no progress",),
        env={"http_proxy": "http://198.51.100.7:3128", "no_proxy": ""},
    ),
)  # fmt: skip


@dataclass
class Seen:
    """What the watch said. ``seconds`` from the fault (or the launch) to the word."""

    result: WatchResult
    seconds: float
    codes: list[str] = field(default_factory=list)
    title: str = ""


class Stage:
    """Plays one case in ``folder``."""

    def __init__(self, folder: Path, case: Case) -> None:
        self.folder, self.case = folder, case
        self.state = State(folder / "state")
        self.log = self.state.server("main") / "server.log"
        with socket.socket() as listener:
            listener.bind(("127.0.0.1", 0))
            self.port = listener.getsockname()[1]

    @contextlib.contextmanager
    def started(self) -> Iterator[ServerRecord]:
        """The server, on record; every process is gone at the end."""
        with contextlib.ExitStack() as things:
            self._prepare(things)
            argv = [sys.executable, "-S", str(REPLAY), "sglang.launch_server", "--port", str(self.port)]
            argv += [str(LOG), str(self.folder), self.case.fault, self.case.at]
            env = {**os.environ, "REPLAY_SECONDS": WORKS, "REPLAY_FILE": str(self.folder / "weights"), **self.case.env}
            pid, started = spawn_detached(argv, log_path=self.log, env=env)
            things.callback(_end, pid)
            record = ServerRecord(
                "main", pid, started, "1f0c77aa", self.port, "127.0.0.1", sys.executable, "/m/tiny", 2, ["python"], [],
                str(self.log), "id", time.time(), boot=boot_id(), ranks=2,
            )  # fmt: skip
            save_record(self.state, record)
            yield record

    def play(self, evidence: bool = False) -> Seen:
        """To the watch's end."""
        with self.started() as record:
            if self.case.name == "log moved away":
                _until((self.folder / "fault").exists)
                self.log.rename(self.log.with_name("elsewhere.log"))
            patience = Patience(**dict.fromkeys(PHASES, PATIENCE))
            args = WatchArgs("main", patience, 2, "", MODEL, 120.0, 0.2, evidence)
            ctx = AgentContext(Request("watch", {}, deadline=200), self.state, io.BytesIO(), io.BytesIO())
            result = watch(args, ctx)
            fault = self.folder / "fault"
            wrong_at = fault.exists() and result.outcome != "ready"
            since = fault.stat().st_mtime if wrong_at else record.started_at
            seen = Seen(result, time.time() - since)
            if result.evidence is not None:
                verdicts = diagnose(from_json(Evidence, result.evidence))
                seen.codes, seen.title = [verdict.code for verdict in verdicts], verdicts[0].title
            return seen

    def _prepare(self, things: contextlib.ExitStack) -> None:
        if self.case.fault == "map":
            (self.folder / "weights").write_bytes(os.urandom(64 << 20))
            subprocess.run(["sync", str(self.folder / "weights")], check=True)
        if self.case.name == "port taken":
            other = things.enter_context(socket.socket())
            other.bind(("127.0.0.1", self.port))
            other.listen()
        if self.case.name == "log on a full disk":
            disk = self.folder / "disk"
            disk.mkdir()
            subprocess.run(["mount", "-t", "tmpfs", "-o", "size=8k", "none", str(disk)], check=True)
            things.callback(subprocess.run, ["umount", "-l", str(disk)], check=False)
            self.log = disk / "server.log"


def _end(pid: int) -> None:
    for member in procfs.session_processes(pid):
        with contextlib.suppress(ProcessLookupError):
            os.kill(member.pid, signal.SIGKILL)
    with contextlib.suppress(ChildProcessError):
        os.waitpid(pid, 0)


def _until(condition: object, seconds: float = 60.0) -> None:
    end = time.monotonic() + seconds
    while not condition():  # type: ignore[operator]
        assert time.monotonic() < end, "it did not come to that"
        time.sleep(0.02)


def wrong(case: Case, seen: Seen) -> str:
    """Empty when all was seen rightly."""
    result = seen.result
    if result.outcome != case.outcome or (case.phase and result.phase != case.phase):
        return f"{result.outcome} in {result.phase}: {result.detail}"
    missing = [word for word in case.words if word not in result.detail]
    if missing:
        return f"{result.outcome}: {missing} not in {result.detail!r}"
    if seen.codes and case.codes and seen.codes[0] not in case.codes:
        return f"diagnosed {seen.codes}"
    return ""


@pytest.fixture(params=CASES, ids=lambda case: case.name.replace(" ", "-").replace(",", ""))
def case(request: pytest.FixtureRequest) -> Case:
    return needs(request.param)


def needs(case: Case) -> Case:
    """Skips a case that cannot be played here."""
    if case.fault == "compile" and shutil.which("gcc") is None:
        pytest.skip("there is no compiler")
    if case.name == "log on a full disk" and os.geteuid() != 0:
        pytest.skip("mounting needs root")
    return case


def test_a_start_is_seen_as_what_it_is(case: Case, tmp_path: Path) -> None:
    seen = Stage(tmp_path, case).play()
    assert not (said := wrong(case, seen)), said


def _row(case: Case, seen: Seen) -> dict[str, object]:
    words = seen.result.detail.replace(str(seen.result.evidence_dir), "")
    return {"outcome": seen.result.outcome, "phase": seen.result.phase, "seconds": round(seen.seconds, 1),
            "words": words, "verdicts": seen.codes, "title": seen.title, "wrong": wrong(case, seen)}  # fmt: skip


def test_the_command_shows_a_start_to_its_readiness_and_leaves_cleanly(tmp_path: Path) -> None:
    """As a user without a terminal: events as they come; Ctrl-C ends it, and leaves no agent behind."""
    inventory = tmp_path / "inventory.yaml"
    local = f"connection: local, state_dir: {tmp_path}/home, agent_python: {sys.executable}"
    inventory.write_text(f"defaults: {{{local}}}\nhosts: {{here: {{}}}}\n")
    slow = {"REPLAY_SECONDS": "20"}  # as long as the command may take to start on a busy machine
    stage = Stage(tmp_path, Case("slow weights", "trickle", "Load weight end", env=slow))
    stage.state = State(Path(state_root(f"{tmp_path}/home")))
    stage.log = stage.state.server("main") / "server.log"
    with stage.started():
        command = [sys.executable, "-m", "fleetdump", "watch", "--interval", "0.3", "-i", str(inventory)]
        done = subprocess.run([*command, "--until-ready"], capture_output=True, text=True, timeout=200, check=False)
        assert done.returncode == 0, done.stderr
        assert "here/main starting weights" in done.stdout
        assert "here/main ready" in done.stdout
        assert done.stderr == "", "stderr is for what goes wrong"
        live = subprocess.Popen([*command, "--json"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        assert live.stdout is not None
        event = json.loads(live.stdout.readline())
        assert (event["event"], event["host"], event["server"], event["state"]) == ("vitals", "here", "main", "ready")
        live.send_signal(signal.SIGINT)
        _, err = live.communicate(timeout=100)
        assert live.returncode == 130
        assert "Traceback" not in err
        _until(lambda: not [one for one in procfs.all_processes() if one.ppid == live.pid])


@pytest.mark.nightly
def test_no_false_stall_in_fifty_healthy_starts_and_every_fault_named(tmp_path: Path) -> None:
    """Healthy starts of several kinds by turns, then each case with its evidence; all goes on record."""
    kinds = [needs(one) for one in CASES if one.outcome == "ready"]
    false_stalls = []
    for number in range(HEALTHY_NIGHTLY):
        folder = tmp_path / f"healthy{number}"
        folder.mkdir()
        seen = Stage(folder, kinds[number % len(kinds)]).play()
        if said := wrong(kinds[number % len(kinds)], seen):
            false_stalls.append(f"{kinds[number % len(kinds)].name}: {said}")
        shutil.rmtree(folder)
    rows = {}
    for number, one in enumerate(CASES):
        folder = tmp_path / f"case{number}"
        folder.mkdir()
        rows[one.name] = _row(one, Stage(folder, needs(one)).play(evidence=True))
    record = {
        "at": time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime()),
        "load": round(os.getloadavg()[0], 1),
        "patience_s": PATIENCE,
        "healthy_starts": HEALTHY_NIGHTLY,
        "false_stalls": false_stalls,
        "cases": rows,
    }
    RESULTS.write_text(json.dumps(record, indent=1) + "\n")
    assert not false_stalls
    assert not [row for row in rows.values() if row["wrong"]]


@pytest.fixture(autouse=True)
def _nobody_is_left(tmp_path: Path) -> Iterator[None]:
    yield
    _until(lambda: not [one for one in procfs.all_processes() if str(tmp_path) in " ".join(one.cmdline)])
