"""The live watch: real processes with SGLang's titles, log lines and port; faults as they happen."""

from __future__ import annotations

import contextlib
import io
import json
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fleetdump.agent import healthy, hostwatch, monitor, procfs, progress
from fleetdump.agent import monitor as monitoring
from fleetdump.agent.context import AgentContext, State
from fleetdump.agent.detach import spawn_detached
from fleetdump.agent.protocol import Request, from_json
from fleetdump.agent.runmessages import RunProgress, TapStatus
from fleetdump.agent.server import ServerRecord, boot_id, load_record, save_record
from fleetdump.agent.servermessages import HealthyProfile, MonitorArgs, Vitals
from fleetdump.agent.share import Share, ShareSpec
from fleetdump.agent.specs import PHASES, CaptureSpec, Patience
from tests.unit.engineinstall import wait_for

STEP = "[2026-01-01 00:00:0{} TP{}] {}"
# Two titled ranks that sleep; a launcher that logs what it is told by lines of a file, and answers /health as a second
# file says: a status, or "silent".
SERVER = """
import http.server, os, socketserver, subprocess, sys, threading, time
folder, port = sys.argv[1], int(sys.argv[2])
class Answer(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        word = open(folder + "/health").read().strip()
        if word == "silent":
            time.sleep(600)
        self.send_response(int(word))
        self.end_headers()
    def log_message(self, *args):
        pass
for rank in range(2):
    title = "sglang::scheduler_TP%d" % rank
    subprocess.Popen([title, "-S", "-c", "import time; time.sleep(600)"], executable=sys.executable)
server, told = None, 0
while True:
    lines = open(folder + "/script").read().splitlines()
    for line in lines[told:]:
        if line == "listen":
            class Server(socketserver.ThreadingMixIn, http.server.HTTPServer):
                daemon_threads = True
            server = Server(("127.0.0.1", port), Answer)
            threading.Thread(target=server.serve_forever, daemon=True).start()
        elif line == "close":
            server.shutdown(); server.socket.close()
        else:
            print(line, flush=True)
    told = len(lines)
    time.sleep(0.02)
"""


def loading(text: str, second: int) -> list[str]:
    return [STEP.format(second, rank, text) for rank in range(2)]


LOADING = [*loading("Init torch distributed begin.", 1), *loading("Load weight begin. avail mem=9 GB", 2)]
SERVING = [
    *loading("Load weight end. type=X, mem usage=1.00 GB.", 3),
    *loading("Memory pool end. avail mem=1 GB", 4),
    *loading("max_total_num_tokens=8192", 5),
    "listen",
    "INFO:     Uvicorn running on http://127.0.0.1:1",
    "[2026-01-01 00:00:06] The server is fired up and ready to roll!",
]
BATCH = "[2026-01-01 00:01:0{} TP0] Prefill batch. #new-seq: 1, #new-token: 1, #running-req: 1"


class StandIn:
    """A server of ours that does as its files say."""

    def __init__(self, state: State, capture: Path) -> None:
        self.state, self.capture = state, capture
        self.folder = state.server("main")
        with socket.socket() as listener:
            listener.bind(("127.0.0.1", 0))
            self.port = listener.getsockname()[1]
        self.health("200")
        (self.folder / "script").write_text("")
        log = self.folder / "server.log"
        argv = [sys.executable, "-S", "-c", SERVER, str(self.folder), str(self.port)]
        self.pid, started = spawn_detached(argv, log_path=log)
        record = ServerRecord(
            "main", self.pid, started, "1f0c77aa", self.port, "127.0.0.1", sys.executable, "/m/tiny", 2, ["python"], [],
            str(log), "id", time.time(), capture_dir=str(capture), boot=boot_id(), ranks=2,
        )  # fmt: skip
        save_record(state, record)
        wait_for(lambda: len(self.ranks()) == 2)

    def say(self, *lines: str) -> None:
        with (self.folder / "script").open("a") as file:
            file.write("".join(f"{line}\n" for line in lines))

    def health(self, word: str) -> None:
        (self.folder / "health").write_text(word)

    def ranks(self) -> list[int]:
        return [one.pid for one in procfs.tree(self.pid) if one.role == "scheduler"]

    def record(self) -> ServerRecord:
        record = load_record(self.state, "main")
        assert record is not None
        return record

    def tap(self, **changes: Any) -> None:
        """What a tap says of itself."""
        tap = TapStatus(
            "main", "1f0c77aa", "r0", self.ranks()[0], 0, 0, 0.0, 100, 0, False, 0.0, {}, 0, "", False, time.time()
        )
        (self.folder / "tap-r0-1.json").write_text(json.dumps(replace(tap, **changes).__dict__))

    def share(self, **changes: Any) -> Share:
        """An extraction that this very process drives."""
        share = Share.of(self.state, "r1", "main")
        self.state.share("r1", "main")
        capture = CaptureSpec([1], str(self.capture))
        share.save_spec(ShareSpec("r1", "main", "00", 9, capture, 0, 1, 1, "", "", "", time.time()))
        share.save_progress(replace(RunProgress("r1", "main", "running", 9, 3, updated_at=time.time()), **changes))
        return share


class Watch:
    """A ``monitor`` in a thread, and all that it has said."""

    def __init__(self, state: State, args: MonitorArgs) -> None:
        self._out = io.BytesIO()
        self._ctx = AgentContext(Request("monitor", {}, deadline=240), state, stdin=io.BytesIO(), stdout=self._out)
        self.results: list[Any] = []
        self._thread = threading.Thread(target=lambda: self.results.append(monitor.monitor(args, self._ctx)))
        self._thread.start()

    def seen(self) -> list[Vitals]:
        """Server main at each event."""
        fields: dict[str, Any] = {}
        found = []
        with self._ctx.output:
            lines = self._out.getvalue().splitlines()
        for line in lines:
            fields.update(json.loads(line)["changed"])
            found.append(from_json(Vitals, dict(fields)))
        return found

    def until(self, condition: Callable[[Vitals], Any], seconds: float = 60.0) -> Vitals:
        """The first state with that condition from now on."""
        end = time.monotonic() + seconds
        past = len(self.seen())
        while time.monotonic() < end:
            for one in self.seen()[max(0, past - 1) :]:
                if condition(one):
                    return one
            time.sleep(0.02)
        raise AssertionError(f"it did not come: {self.seen()[-1]}")

    def fault(self, code: str) -> str:
        """Wait for a fault; its text."""
        one = self.until(lambda vitals: any(fault.code == code for fault in vitals.faults))
        return next(fault.text for fault in one.faults if fault.code == code)

    def end(self) -> None:
        self._ctx.deadline = time.monotonic()
        self._thread.join()


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[StandIn]:
    capture = tmp_path / "capture"
    capture.mkdir()
    monkeypatch.setattr(progress, "CONFIRM_SECONDS", 0.2)
    monkeypatch.setattr(hostwatch, "HEALTH_SECONDS", 0.1)
    monkeypatch.setattr(hostwatch, "HEALTH_LIMIT", 1.0)
    monkeypatch.setattr(hostwatch, "DISK_SECONDS", 0.05)
    made = StandIn(State(tmp_path / "state"), capture)
    yield made
    os.killpg(made.pid, signal.SIGKILL)
    os.waitpid(made.pid, 0)


@pytest.fixture
def watch(server: StandIn) -> Iterator[Callable[..., Watch]]:
    made: list[Watch] = []

    def begin(patience: float = 60.0, **changes: Any) -> Watch:
        args = MonitorArgs(["main"], Patience(**dict.fromkeys(PHASES, patience)), 200.0, 0.05)
        made.append(Watch(server.state, replace(args, **changes)))
        return made[-1]

    yield begin
    for one in made:
        one.end()


def ready(one: Vitals) -> bool:
    return one.state == "ready"


def test_a_start_is_followed_to_readiness_and_no_fault_is_seen(server: StandIn, watch: Callable[..., Watch]) -> None:
    live = watch()
    server.say(*LOADING)
    assert live.until(lambda one: one.phase == "weights").state == "starting"
    server.say(*SERVING)
    one = live.until(ready)
    assert (one.lines, one.faults) == (12, [])
    assert one.disk_free > 0 or live.until(lambda vitals: vitals.disk_free > 0)
    server.say(BATCH.format(1))
    assert live.until(lambda vitals: vitals.forwards == 1).faults == []


def test_only_what_has_changed_is_told(server: StandIn, watch: Callable[..., Watch], monkeypatch: Any) -> None:
    server.say(*LOADING)
    live = watch()
    live.until(lambda one: one.phase == "weights" and one.disk_free > 0)
    quiet = len(live.seen())
    time.sleep(1.0)
    assert len(live.seen()) - quiet <= 4, "the disk of a busy machine may change"
    live.end()
    assert live.results[0].samples > quiet


def test_until_ready_ends_by_itself(server: StandIn, watch: Callable[..., Watch]) -> None:
    live = watch(ready=True)
    server.say(*LOADING, *SERVING)
    wait_for(lambda: bool(live.results), 60.0)
    assert [one.state for one in live.results[0].servers] == ["ready"]


def test_a_server_that_dies_is_named_with_its_last_words(server: StandIn, watch: Callable[..., Watch]) -> None:
    server.say(*LOADING, *SERVING)
    live = watch()
    live.until(ready)
    server.say("[2026-01-01 00:01:00] torch.OutOfMemoryError: CUDA out of memory.")
    wait_for(lambda: b"OutOfMemory" in (server.folder / "server.log").read_bytes())
    os.kill(server.pid, signal.SIGKILL)
    text = live.fault("died")
    assert "the launcher is gone" in text
    assert "CUDA out of memory" in text


def test_a_rank_that_is_killed_is_named(server: StandIn, watch: Callable[..., Watch]) -> None:
    server.say(*LOADING, *SERVING)
    live = watch()
    live.until(ready)
    victim = server.ranks()[1]
    os.kill(victim, signal.SIGKILL)
    assert f"scheduler TP1 (pid {victim})" in live.fault("rank_lost")


def test_a_server_that_an_operator_stops_has_no_fault(server: StandIn, watch: Callable[..., Watch]) -> None:
    """Neither its end nor what it leaves unfinished is one: not even after the patience."""
    server.say(*LOADING)
    live = watch(patience=1.0)
    live.until(lambda one: one.phase == "weights")
    save_record(server.state, replace(server.record(), stopped_at=time.time()))
    os.killpg(server.pid, signal.SIGTERM)
    live.until(lambda one: one.state == "stopped" and one.idle_seconds >= 1.0, 100.0)
    time.sleep(2.0)
    assert live.seen()[-1].faults == []


def test_a_port_that_closes(server: StandIn, watch: Callable[..., Watch]) -> None:
    server.say(*LOADING, *SERVING)
    live = watch()
    live.until(ready)
    save_record(server.state, replace(server.record(), ready=True))
    server.say("close")
    assert f"port {server.port} is closed" in live.fault("port_closed")


def test_a_busy_server_is_not_hung(server: StandIn, watch: Callable[..., Watch]) -> None:
    server.say(*LOADING, *SERVING)
    live = watch(patience=1.0)
    live.until(ready)
    server.health("503")
    stop = threading.Event()

    def work() -> None:
        count = 0
        while not stop.wait(0.05):
            count += 1
            server.tap(rows=count)

    worker = threading.Thread(target=work)
    worker.start()
    try:
        text = live.fault("busy")
        assert "503" in text
        assert "busy, not hung" in text
        time.sleep(2.0)
        assert all(fault.note for one in live.seen() for fault in one.faults)
    finally:
        stop.set()
        worker.join()


def test_a_server_that_answers_nothing_and_moves_nothing_is_hung(server: StandIn, watch: Callable[..., Watch]) -> None:
    server.say(*LOADING, *SERVING, BATCH.format(1))
    live = watch(patience=2.0)
    live.until(lambda one: one.forwards == 1)
    server.health("silent")
    assert "timeout" in live.fault("health_fails")
    assert "the forward counter stands at 1" in live.fault("stall")


def test_an_idle_server_is_well(server: StandIn, watch: Callable[..., Watch]) -> None:
    server.say(*LOADING, *SERVING)
    live = watch(patience=0.3)
    live.until(ready)
    time.sleep(2.0)
    assert live.seen()[-1].faults == []


def test_requests_that_stand_are_a_stall(server: StandIn, watch: Callable[..., Watch]) -> None:
    server.say(*LOADING, *SERVING)
    share = server.share(in_flight=4)
    claim = share.claim()
    assert claim is not None
    with claim:
        text = watch(patience=1.0).fault("stall")
    assert "4 requests running" in text


def test_a_start_that_stalls_names_phase_and_lines(server: StandIn, watch: Callable[..., Watch]) -> None:
    server.say(*LOADING, STEP.format(3, 0, "Load weight end. type=X, mem usage=1.00 GB."))
    live = watch(patience=1.0)
    text = live.fault("stall")
    assert "in phase weights" in text
    assert "5 lines" in text
    assert "behind the others: TP1" in text
    assert live.seen()[-1].behind == ["TP1"]


def test_a_start_is_compared_with_what_other_hosts_know(server: StandIn, watch: Callable[..., Watch]) -> None:
    save_record(server.state, replace(server.record(), kind="k"))
    server.say(*LOADING)
    known = HealthyProfile("k", 3, 636, 641, 90.0, {"weights": 30.0}, slowest={"weights": 50.0})
    live = watch(healthy=[replace(known, key="other", lines_max=9999), known])
    one = live.until(lambda vitals: vitals.healthy and vitals.phase == "weights" and vitals.patience > 60.0)
    assert one.healthy is not None
    assert (one.healthy.lines_span, one.patience) == ("636 to 641", 100.0)


def test_a_start_is_compared_with_healthy_ones_once_its_kind_is_known(
    server: StandIn, watch: Callable[..., Watch]
) -> None:
    for lines in (636, 641):
        assert healthy.remember(server.state, healthy.HealthyStart("k", lines, 90.0, {"weights": 1.0}, "sglang", 76.0))
    server.say(*LOADING)
    live = watch(patience=1.0)
    live.until(lambda one: one.phase == "weights")
    save_record(server.state, replace(server.record(), kind="k"))
    one = live.until(lambda vitals: vitals.healthy)
    assert one.healthy is not None
    assert (one.healthy.lines_span, one.healthy.weights_gb) == ("636 to 641", 76.0)
    text = live.until(lambda vitals: vitals.faults and vitals.patience == 2.0).faults[0].text
    assert "4 lines; healthy starts 636 to 641" in text


def test_a_driver_that_is_gone(server: StandIn, watch: Callable[..., Watch]) -> None:
    server.say(*LOADING, *SERVING)
    share = server.share()
    share.log.write_text("2026 INFO begun\n2026 ERROR the tokeniser ended with status 1\n")
    claim = share.claim()
    assert claim is not None
    live = watch()
    with claim:
        live.until(lambda one: "running 3/9" in one.run)
    (share.root / "driver.json").write_text(json.dumps({"v": 1, "pid": 2**22 + 1, "start_time": 1, "started_at": 1.0}))
    text = live.fault("driver_gone")
    assert "run r1" in text
    assert "the tokeniser ended with status 1" in text


def test_a_tap_that_writes_nothing(server: StandIn, watch: Callable[..., Watch]) -> None:
    server.say(*LOADING, *SERVING)
    server.tap(failing=True, last_error="[Errno 5] Input/output error", errors=3)
    live = watch()
    assert "Input/output error" in live.fault("capture_fails")
    assert live.seen()[-1].errors == 3


@pytest.fixture
def small_disk(server: StandIn) -> Iterator[Path]:
    """The capture directory as a file system of its own."""
    if os.geteuid() or os.system(f"mount -t tmpfs -o size=2g none {server.capture} 2>/dev/null"):
        pytest.skip("mounting needs root")
    yield server.capture
    os.system(f"umount -l {server.capture}")


def test_a_disk_that_fills(
    server: StandIn, small_disk: Path, watch: Callable[..., Watch], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hostwatch, "DISK_SURE_SECONDS", 0.3)
    server.say(*LOADING, *SERVING)
    live = watch()
    live.until(ready)
    with (small_disk / "shard").open("wb", buffering=0) as file:
        for _ in range(40):
            file.write(bytes(1 << 20))
            time.sleep(0.03)
    text = live.fault("disk_filling")
    assert "full in" in text
    assert "GB free" in text
    with (small_disk / "more").open("wb", buffering=0) as file, contextlib.suppress(OSError):
        os.posix_fallocate(file.fileno(), 0, 1950 << 20)
    live.fault("disk_full")


def test_a_gpu_that_falls_off_the_bus(
    server: StandIn, watch: Callable[..., Watch], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """nvidia-smi is a script: a GPU is what cannot exist here."""
    tool = tmp_path / "bin" / "nvidia-smi"
    tool.parent.mkdir()
    rows = "0, 0, 100, 70, 700, 143771, NVIDIA H200, GPU-a\n1, 0, 100, 70, 700, 143771, NVIDIA H200, GPU-b\n"
    (tmp_path / "gpus").write_text(rows)
    tool.write_text(f"#!/bin/sh\ncat {tmp_path}/gpus\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tool.parent}:{os.environ['PATH']}")
    monkeypatch.setattr(hostwatch, "GPU_SECONDS", 0.1)
    server.say(*LOADING, *SERVING)
    live = watch()
    live.until(ready)
    time.sleep(0.5)
    (tmp_path / "gpus").write_text(rows.splitlines()[0] + "\n")
    assert "GPU 1 (NVIDIA H200)" in live.fault("gpu_lost")
    tool.write_text("#!/bin/sh\necho 'Unable to determine the device handle: GPU is lost' >&2\nexit 15\n")
    live.until(lambda one: any("GPU is lost" in fault.text for fault in one.faults))


def test_a_replaced_server_is_followed_anew(server: StandIn, watch: Callable[..., Watch]) -> None:
    server.say(*LOADING, *SERVING)
    live = watch()
    live.until(ready)
    record = server.record()
    log = Path(record.log)
    os.replace(log, f"{log}.1")
    log.write_text("")
    save_record(server.state, replace(record, launch_id="00000002", ready=False))
    assert live.until(lambda one: one.state == "starting").phase == "imports"


def test_the_interval_follows_the_cost() -> None:
    assert monitoring.interval(2.0, 0.001) == 2.0
    assert monitoring.interval(2.0, 0.08) == pytest.approx(4.0)
    assert monitoring.interval(2.0, 9.0) == monitoring.LONGEST_INTERVAL
    assert monitoring.interval(30.0, 9.0) == 30.0, "who wants to look seldom is not made to look more often"


def test_absent_and_broken_servers_are_told(tmp_path: Path) -> None:
    state = State(tmp_path)
    (state.server("bad") / "server.json").write_text("{")
    ctx = AgentContext(Request("monitor", {}, deadline=60), state, stdin=io.BytesIO(), stdout=io.BytesIO())
    found = monitor.monitor(MonitorArgs(["bad", "none"], until=0.1, interval=0.1), ctx).servers
    assert [(one.server, one.state) for one in found] == [("bad", "broken"), ("none", "absent")]
    assert [fault.code for fault in found[0].faults] == ["broken"]


def test_a_host_without_servers_is_told_once_and_again_when_the_last_has_gone(tmp_path: Path) -> None:
    told = io.BytesIO()
    ctx = AgentContext(Request("monitor", {}, deadline=60), State(tmp_path), stdin=io.BytesIO(), stdout=told)
    looking = monitor.HostMonitor(MonitorArgs(), ctx)
    for servers in ([], [], [Vitals("main", "ready")], [], []):
        looking.tell(servers)
    events = [json.loads(line)["event"] for line in told.getvalue().splitlines() if line.startswith(b"{")]
    assert events == ["empty", "vitals", "empty"]
