"""fleetdump.agent.watch and healthy: real processes that log like SGLang, with its process titles and a real port."""

import io
import json
import os
import shutil
import signal
import socket
import sys
import time
from dataclasses import replace

import pytest

from fleetdump.agent import detach, healthy, procfs, progress
from fleetdump.agent import watch as watch_module
from fleetdump.agent.context import AgentContext, State
from fleetdump.agent.logmarks import parse_log
from fleetdump.agent.protocol import AgentFailure, Request
from fleetdump.agent.server import ServerRecord, load_record, save_record
from fleetdump.agent.servermessages import HealthyProfile, WatchArgs
from fleetdump.agent.specs import PHASES, Patience
from fleetdump.agent.watch import LogFollower, Situation, judge, watch

MARK = "fleetdump tap 1"
MODEL = "DeepseekV3ForCausalLM"

# Plays a script of [kind, value] steps: log a stamped line, start a titled child, sleep, answer GET /model_info.
SERVER = """
import http.server, json, subprocess, sys, threading, time
class Answer(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200 if self.path == "/model_info" else 404)
        self.end_headers()
    def log_message(self, *args):
        pass
for kind, value in json.loads(sys.argv[1]):
    if kind == "log":
        rank, _, text = value.partition("|")
        print(time.strftime("[%Y-%m-%d %H:%M:%S") + (" " + rank if rank else "") + "] " + text, flush=True)
    elif kind == "child":
        subprocess.Popen([value, "-S", "-c", "import time; time.sleep(600)"], executable=sys.executable)
    elif kind == "sleep":
        time.sleep(value)
    elif kind == "http":
        server = http.server.HTTPServer(("127.0.0.1", value), Answer)
        threading.Thread(target=server.serve_forever, daemon=True).start()
open(sys.argv[2], "w").close()
time.sleep(600)
"""


def loading(ranks=("TP0", "TP1"), model=MODEL):
    steps = [["child", f"sglang::scheduler_{rank.replace(' ', '_')}"] for rank in ranks]
    steps += [["child", "sglang::detokenizer"]]
    for text in (
        "Init torch distributed begin.",
        "Load weight begin.",
        f"Load weight end. type={model}, mem usage=1 GB",
    ):
        steps += [["log", f"{rank}|{text}"] for rank in ranks]
    return steps


def serving(port, marks=("TP0", "TP1")):
    return [
        *[["log", f"{rank}|{MARK} is up"] for rank in marks],
        *[["log", f"{rank}|Memory pool end. avail mem=1 GB"] for rank in ("TP0", "TP1")],
        ["log", "TP0|max_total_num_tokens=8192"],
        ["http", port],
        ["log", f"|INFO:     Uvicorn running on http://127.0.0.1:{port}"],
        ["log", "|The server is fired up and ready to roll!"],
    ]


class Output(io.BytesIO):
    """The agent's stdout; calls ``on_tick`` when the first tick passes."""

    def __init__(self, on_tick):
        super().__init__()
        self._on_tick = on_tick

    def write(self, data):
        if self._on_tick and b'"tick"' in data:
            callback, self._on_tick = self._on_tick, None
            callback()
        return super().write(data)


@pytest.fixture
def port():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


@pytest.fixture
def state(tmp_path):
    return State(tmp_path / "state")


@pytest.fixture
def start(state, port):
    """Start a server that plays ``steps``, to their end unless ``wait`` is False; returns its record. All of its
    session is killed at the end."""
    started = []

    def play(steps, wait=True, **changes):
        played = state.server("main") / f"played{len(started)}"
        log = state.server("main") / "server.log"
        argv = [sys.executable, "-S", "-c", SERVER, json.dumps(steps), str(played)]
        pid, ticks = detach.spawn_detached(argv, log_path=log)
        started.append(pid)
        record = ServerRecord(
            "main", pid, ticks, f"{pid:08x}", port, "127.0.0.1", sys.executable, "/m/tiny", 2, ["python", "x"], [],
            str(log), "id", time.time(),
        )  # fmt: skip
        record = replace(record, **changes)
        save_record(state, record)
        deadline = time.monotonic() + 30
        while wait and not played.exists() and time.monotonic() < deadline:
            time.sleep(0.02)
        return record

    yield play
    for pid in started:
        os.killpg(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


@pytest.fixture
def look(state, monkeypatch):
    """Watch server ``main`` with short patience; returns the result and the events."""
    monkeypatch.setattr(progress, "CONFIRM_SECONDS", 0.2)
    monkeypatch.setattr(watch_module, "SETTLE_SECONDS", 0.3)
    monkeypatch.setattr(watch_module, "MARK_SECONDS", 0.3)

    def run(patience=20.0, on_tick=None, **changes):
        out = Output(on_tick)
        args = WatchArgs("main", Patience(**dict.fromkeys(PHASES, patience)), 2, MARK, MODEL, 30.0, 0.05, False)
        ctx = AgentContext(Request("watch", {}, deadline=60), state, stdin=io.BytesIO(), stdout=out)
        result = watch(replace(args, **changes), ctx)
        return result, [json.loads(line) for line in out.getvalue().splitlines()]

    return run


def test_a_healthy_start_is_ready_and_remembered(start, look, state, port):
    start([["sleep", 0.3], *loading(), ["sleep", 0.3], *serving(port)], wait=False)
    result, events = look()
    assert (result.outcome, result.phase, result.detail) == ("ready", "serving", "")
    assert result.lines == 13
    assert set(result.phase_seconds) >= {"imports", "init", "weights", "kv_pool"}
    assert [e["phase"] for e in events if e["event"] == "phase"][-1] == "serving"
    assert any(e["event"] == "tick" and {"lines", "phase", "idle_seconds"} <= set(e) for e in events)
    record = load_record(state, "main")
    assert (record.ready, record.phase, record.lines) == (True, "serving", 13)
    timeline = [json.loads(line) for line in (state.server("main") / "timeline.jsonl").read_text().splitlines()]
    assert timeline[-1]["outcome"] == "ready"
    (line,) = (state.root / healthy.FILE).read_text().splitlines()
    assert json.loads(line)["lines"] == 13


def test_a_controller_that_attaches_late_sees_the_same(start, look, state, port):
    start([*loading(), *serving(port)])
    first, _ = look()
    again, events = look()
    assert (again.outcome, again.lines, again.phase_seconds) == ("ready", first.lines, first.phase_seconds)
    assert next(e["phase"] for e in events if e["event"] == "phase") == "init"
    assert again.healthy is not None
    assert (again.healthy.starts, again.healthy.lines_min, again.healthy.lines_max) == (1, 13, 13)


def test_a_server_that_stops_moving_is_a_stall(start, look):
    start(loading())
    result, _ = look(patience=0.8)
    assert (result.outcome, result.phase, result.lines) == ("stall", "kv_pool", 6)
    assert result.idle_seconds >= 0.8
    assert "no progress" in result.detail
    assert result.evidence is None


def test_the_stall_compares_with_healthy_starts(start, look, state, port):
    start([*loading(), *serving(port)])
    look()
    os.killpg(load_record(state, "main").pid, signal.SIGKILL)
    (state.server("main") / "server.log").unlink()
    start(loading())
    result, _ = look(patience=0.8)
    assert result.healthy.lines_max == 13
    assert "6 log lines (healthy starts had 13)" in result.detail


def test_a_new_host_is_as_patient_as_healthy_starts_of_other_hosts_took(start, look, state):
    """Its own profile is none; those of another kind of start do not count."""
    _, key = healthy.kind_of(start(loading()))
    slow = HealthyProfile(key, 7, 636, 641, 90.0, {"kv_pool": 3.0}, slowest={"kv_pool": 40.0})
    other = replace(slow, key="other", lines_max=9, slowest={"kv_pool": 9000.0})
    result, events = look(patience=0.5, healthy=[other, slow], until=4.0)
    assert result.outcome == "timeout", result.detail
    assert result.healthy.lines_span == "636 to 641"
    assert result.kind == key
    assert {e["usual_lines"] for e in events if e["event"] == "tick"} == {"636 to 641"}
    result, _ = look(patience=0.5, healthy=[other])
    assert (result.outcome, result.healthy) == ("stall", None)


def test_evidence_is_taken_on_a_stall(start, look, monkeypatch, state):
    from fleetdump.agent import evidence

    record = start(loading())
    asked = []

    def collect(target, ctx, *, seconds, deep, watch_facts):
        asked.append((target, watch_facts))
        return {"v": 1}, "/folder"

    monkeypatch.setattr(evidence, "collect", collect)
    result, _ = look(patience=0.8, evidence_on_stall=True)
    ((target, facts),) = asked
    assert (result.evidence, result.evidence_dir) == ({"v": 1}, "/folder")
    assert (target.pid, target.start_time, target.log) == (record.pid, record.start_time, record.log)
    assert (facts.phase, facts.patience) == ("kv_pool", 0.8)


def test_a_ready_line_without_an_answering_port_is_no_readiness(start, look, port):
    steps = [step for step in [*loading(), *serving(port)] if step[0] != "http"]
    start(steps)
    result, _ = look(patience=0.8)
    assert (result.outcome, result.phase) == ("stall", "serving")


def test_the_wrong_model_class(start, look, port):
    fallback = f"TP0|{MODEL} has no SGLang implementation, falling back to Transformers implementation."
    ignored = "TP0|Ignore import error when loading sglang.srt.models.deepseek_v2: No module named 'tap'"
    start([["log", ignored], ["log", fallback], *loading(model="TransformersMoEForCausalLM"), *serving(port)])
    result, _ = look()
    assert result.outcome == "wrong_model"
    assert "TransformersMoEForCausalLM" in result.detail
    assert "No module named 'tap'" in result.detail


def test_of_many_model_files_that_fail_the_one_named_like_the_model_tells():
    """As on a real host: half a dozen model files want optional packages that are not there."""
    reasons = {"aria": "no cutlass", "bert": "no audio", "clip": "no vision", "dots": "no tower"}
    reasons.update(deepseek_v2="broken on purpose", deepseek_nextn="broken on purpose")
    stamp = "[2026-01-01 00:00:00] "
    lines = [f"Ignore import error when loading sglang.srt.models.{name}: {why}" for name, why in reasons.items()]
    fallback = "has no SGLang implementation, falling back to Transformers implementation."
    lines += [f"{stamp}DeepseekV3ForCausalLM {fallback}", f"{stamp}Load weight end. type=TransformersForCausalLM"]
    log = "".join(f"{line}\n" for line in lines).encode()
    args = WatchArgs("main", Patience(), expect_class="DeepseekV3ForCausalLM")
    outcome, detail = judge(args, Situation(parse_log(log), True))
    assert outcome == "wrong_model"
    assert "that failed: deepseek_v2: broken on purpose; " in detail


def test_a_rank_that_does_not_say_its_class_is_not_ready():
    log = b"[2026-01-01 00:00:00 TP0] Load weight end. type=A, mem\n[2026-01-01 00:00:00 TP1] Load weight end.\n"
    log += b"[2026-01-01 00:00:00] The server is fired up and ready to roll!\n"
    args = WatchArgs("main", Patience(), ranks=2, expect_class="A")
    now = Situation(parse_log(log), True, answers=True)
    assert judge(args, now) is None, "its line may still come"
    now.since_ready = 60.0
    outcome, detail = judge(args, now)
    assert outcome == "wrong_model"
    assert "1 of 2 ranks never said which model class" in detail
    assert judge(WatchArgs("main", Patience(), ranks=1, expect_class="A"), now) == ("ready", "")


def test_a_rank_without_the_patchs_mark(start, look, port):
    start([*loading(), *serving(port, marks=["TP0"])])
    result, _ = look()
    assert result.outcome == "no_mark"
    assert "1 of 2 ranks" in result.detail


def test_a_patch_that_refuses_the_server(start, look, port):
    refused = "TP1|fleetdump-tap 1 refused (rows are split (over the ranks)) rank=1/2 pp=0/1 layers=[1] model=M"
    start([*loading(), *serving(port, marks=["TP0"]), ["log", refused]])
    result, _ = look()
    assert result.outcome == "no_mark"
    assert result.detail == "the patch refuses to work: rows are split (over the ranks)"


def test_every_stage_of_a_pipeline_must_say_its_mark(start, look, port):
    ranks = ["PP0 TP0", "PP0 TP1", "PP1 TP0", "PP1 TP1"]
    start([*loading(ranks), *serving(port, marks=ranks[:3])])
    result, _ = look(ranks=4)
    assert result.outcome == "no_mark"
    assert "1 of 4 ranks" in result.detail


def test_a_rank_that_is_killed(start, look, state):
    start(loading())
    victim = _child(load_record(state, "main").pid, "sglang::scheduler_TP1")
    result, _ = look(on_tick=lambda: os.kill(victim, signal.SIGKILL))
    assert result.outcome == "died"
    assert f"scheduler TP1 (pid {victim})" in result.detail


def test_a_crash_in_the_log_names_rank_and_exception(start, look):
    text = 'Scheduler hit an exception: Traceback (most recent call last):\n  File "x.py", line 1\nTypeError: no rids'
    start([*loading(), ["log", f"TP1|{text}"]])
    result, _ = look()
    assert result.outcome == "died"
    assert result.detail.startswith("TP1: TypeError: no rids")
    assert any("TypeError" in line for line in result.log_tail)


def test_a_launcher_that_ends(start, look):
    record = start([["log", "|ValueError: wrong argument"]])
    os.kill(record.pid, signal.SIGKILL)
    result, _ = look()
    assert result.outcome == "died"
    assert "the launcher is gone" in result.detail


def test_another_process_with_the_recorded_pid(start, look):
    start(loading(), start_time=12345)
    result, _ = look()
    assert result.outcome == "died"


def test_a_dead_scheduler_is_no_readiness_for_a_late_watch(start, look, state, port):
    start([*loading(), *serving(port)])
    assert look()[0].outcome == "ready"
    os.kill(_child(load_record(state, "main").pid, "sglang::scheduler_TP0"), signal.SIGKILL)
    result, _ = look()
    assert result.outcome == "died"
    assert "gone: scheduler TP0" in result.detail


def test_a_rank_that_died_before_anybody_looked_is_known_by_its_log(start, look, state):
    start(loading())
    victim = _child(load_record(state, "main").pid, "sglang::scheduler_TP1")
    os.kill(victim, signal.SIGKILL)
    result, _ = look()
    assert result.outcome == "died"
    assert "gone: scheduler TP1" in result.detail


def _audit(state, verb, operator="anna@desk"):
    line = {"v": 1, "t": time.time(), "operator": operator, "verb": verb, "args": {}, "ok": True, "seconds": 0.1}
    with open(state.directory() / "audit.jsonl", "a") as file:
        file.write("torn\n" + json.dumps(line) + "\n")


def _end(record):
    os.killpg(record.pid, signal.SIGKILL)


def test_a_server_that_an_operator_stops_has_not_died(start, look, state):
    record = start(loading())

    def stop_it():
        save_record(state, replace(load_record(state, "main"), stopped_at=time.time()))
        _audit(state, "stop")
        _end(record)

    result, _ = look(on_tick=stop_it)
    assert result.outcome == "stopped"
    assert "fleetdump stop" in result.detail
    assert "anna@desk" in result.detail
    assert result.evidence is None


def test_a_server_that_an_operator_replaces_has_not_died(start, look, state):
    record = start(loading())
    other = []

    def replace_it():
        _end(record)
        _audit(state, "launch")
        other.append(replace(record, launch_id="other", pid=os.getpid()))
        save_record(state, other[0])

    result, _ = look(on_tick=replace_it, evidence_on_stall=True)
    assert result.outcome == "replaced"
    assert "anna@desk" in result.detail
    assert result.evidence is None
    assert load_record(state, "main") == other[0]


def test_a_stop_in_progress_is_named_by_the_lock(start, look, state):
    record = start(loading())

    def stop_it():
        holder = {"operator": "bert@desk", "host": "h", "pid": os.getpid(), "verb": "stop", "since": time.time()}
        holder["start_time"] = procfs.start_time(os.getpid())
        (state.directory("lock") / "holder.json").write_text(json.dumps(holder))
        save_record(state, replace(record, stopped_at=time.time()))

    result, _ = look(on_tick=stop_it)
    assert result.outcome == "stopped"
    assert "bert@desk" in result.detail


def test_a_server_whose_record_is_cleaned_away_is_stopped(start, look, state):
    record = start(loading())

    def clean():
        _end(record)
        shutil.rmtree(state.server("main"))

    result, _ = look(on_tick=clean)
    assert result.outcome == "stopped"
    assert not (state.root / "servers" / "main").exists()


def test_a_broken_record_does_not_end_the_watch(start, look, state):
    record = start(loading())
    path = state.server("main") / "server.json"
    result, _ = look(on_tick=lambda: (path.write_bytes(b""), _end(record)))
    assert result.outcome == "died"


def test_broken_advice_does_not_end_the_watch(start, look, state, port):
    (state.directory() / healthy.FILE).write_bytes(b"\xff{\n[]\n")
    (state.server("main") / "timeline.jsonl").mkdir()
    start([*loading(), *serving(port)])
    assert look()[0].outcome == "ready"


def test_time_is_up(start, look):
    start(loading())
    result, _ = look(until=0.3)
    assert (result.outcome, result.phase) == ("timeout", "kv_pool")


def test_a_server_that_was_never_launched(look):
    with pytest.raises(AgentFailure) as failure:
        look()
    assert failure.value.error.code == "not_found"
    assert failure.value.error.next_step


def test_a_log_that_is_not_the_processs_own(start, look, state, tmp_path):
    other = tmp_path / "other.log"
    other.write_text("")
    start(loading(), log=str(other))
    result, _ = look(patience=0.5)
    assert result.outcome == "stall"
    assert "not to the watched log" in result.detail


def test_a_truncated_or_replaced_log_is_read_anew(tmp_path):
    path = tmp_path / "log"
    follower = LogFollower(str(path), "", 1)
    assert follower.read().lines == 0
    path.write_text("one\ntwo\n")
    assert follower.read().lines == 2
    path.write_text("x\n")
    assert follower.read().lines == 1
    fresh = tmp_path / "fresh"
    fresh.write_text("1\n2\n3\n4\n")
    fresh.replace(path)
    assert follower.read().lines == 4


def test_judge_waits_for_the_traceback():
    args = WatchArgs("main", Patience())
    marks = parse_log(b"[2026-11-29 12:00:00 TP0] Scheduler hit an exception: Traceback (most recent call last):\n")
    assert judge(args, Situation(marks, True, since_death=0.5)) is None
    assert judge(args, Situation(marks, True, since_death=2.5))[0] == "died"


def test_the_key_of_healthy_starts():
    argv = ["/venv/bin/python", "-m", "sglang.launch_server", "--model-path", "/a/Kimi", "--port", "1", "--tp", "8"]
    key = healthy.start_key("/a/Kimi", "sglang 0.5.20", argv, ["H200"])
    elsewhere = ["/other/python", *argv[1:4], "/b/Kimi", "--port=9", "--tp", "8"]
    assert healthy.start_key("/b/Kimi/", "sglang 0.5.20", elsewhere, ["H200"]) == key
    others = [
        ("/a/Qwen", "sglang 0.5.20", argv, ["H200"]),
        ("/a/Kimi", "sglang 0.5.23", argv, ["H200"]),
        ("/a/Kimi", "sglang 0.5.20", [*argv[:-1], "4"], ["H200"]),
        ("/a/Kimi", "sglang 0.5.20", argv, ["H200", "H200"]),
    ]
    assert len({key, *(healthy.start_key(*other) for other in others)}) == 5


def test_profiles_are_of_the_latest_starts(state):
    for n in range(30):
        healthy.remember(state, healthy.HealthyStart("k", 600 + n, 10.0 + n, {"weights": float(n)}, "sglang 0.5.20"))
    healthy.remember(state, healthy.HealthyStart("other", 1, 1.0, {}, "sglang 0.5.20"))
    known = healthy.profile(state, "k")
    assert (known.starts, known.lines_min, known.lines_max) == (20, 610, 629)
    assert known.seconds == 29.5
    assert known.phase_seconds == {"weights": 19.5}
    assert healthy.profile(state, "unknown") is None


def _child(parent, title):
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        for sample in procfs.tree(parent):
            if sample.cmdline[:1] == [title]:
                return sample.pid
        time.sleep(0.02)
    raise AssertionError(f"{title} never started")
