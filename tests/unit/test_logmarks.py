"""fleetdump.agent.logmarks against trimmed logs of real servers (0.5.5 to 0.5.23, healthy and not)."""

import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fleetdump.agent import logmarks
from fleetdump.agent.logmarks import LogParser, parse_log
from fleetdump.agent.specs import PHASES

LOGS = Path(__file__).parent / "fixtures" / "logs"
HEALTHY = [*sorted(path.stem for path in LOGS.glob("healthy-*.log")), "graphs-tp2-0.5.14"]


def log(name):
    return (LOGS / f"{name}.log").read_bytes()


def stamped(text, rank=""):
    prefix = f"[2026-11-29 12:00:00 {rank}]" if rank else "[2026-11-29 12:00:00]"
    return f"{prefix} {text}\n".encode()


@pytest.mark.parametrize("name", HEALTHY)
def test_healthy_starts_of_every_release(name):
    ranks = 2 if "tp2" in name else 1
    data = log(name)
    marks = parse_log(data, ranks=ranks)
    assert marks.ready
    assert marks.phase == "serving"
    assert marks.crashed is None
    assert sorted(marks.ranks) == [f"TP{n}" for n in range(ranks)]
    assert set(marks.classes.values()) == {"DeepseekV3ForCausalLM"}
    assert len(marks.classes) == ranks
    assert all(rank.weights_gb is not None for rank in marks.ranks.values())
    assert marks.fallbacks == []
    ready_line = next(n for n, line in enumerate(data.split(b"\n"), 1) if b"fired up" in line)
    assert marks.ready_line == ready_line
    assert marks.lines == data.count(b"\n")


@pytest.mark.parametrize("name", HEALTHY)
def test_phases_of_a_healthy_start_come_in_order(name):
    phases = [start.phase for start in parse_log(log(name), ranks=2 if "tp2" in name else 1).phases]
    assert phases == sorted(phases, key=PHASES.index)
    assert {"init", "weights", "kv_pool", "http", "warmup", "serving"} <= set(phases)
    assert ("capture" in phases) == name.startswith("graphs")


def test_seconds_of_phases_come_from_the_log():
    marks = parse_log(log("graphs-tp2-0.5.14"), ranks=2)
    ready = marks.phases[-1].at
    seconds = marks.phase_seconds(ready, since=marks.phases[0].at - 18)
    assert seconds["imports"] == 18
    assert seconds["capture"] == 20
    assert sum(seconds.values()) == ready - marks.phases[0].at + 18


@pytest.mark.parametrize(
    ("name", "kind", "rank", "reason", "phase"),
    [
        ("crash-jit", "exception", "TP0", "RuntimeError: Ninja build failed", "warmup"),
        ("crash-patch-in-capture", "exception", "TP0", "TypeError: 'NoneType' object is not iterable", "capture"),
        ("rank-killed-tp2", "exception", "TP0", "RuntimeError: [/pytorch/third_party/gloo", "serving"),
        ("rank1-raises-tp2", "exception", "TP1", "RuntimeError: dump hook: cannot open the output", "serving"),
        ("fallback-tp2", "exception", "TP0", "RuntimeError: shape mismatch", "warmup"),
        ("barrier-tp2", "sigquit", "", "SIGQUIT received", "warmup"),
    ],
)
def test_crashes_name_the_first_rank_and_its_exception(name, kind, rank, reason, phase):
    marks = parse_log(log(name))
    assert marks.crashed is not None
    assert (marks.crashed.kind, marks.crashed.rank) == (kind, rank)
    assert marks.crashed.reason.startswith(reason)
    assert marks.phase == phase


def test_a_launcher_that_refuses_its_arguments():
    marks = parse_log(log("bad-port"))
    assert marks.crashed is None
    assert marks.last_error == "ValueError: SGLANG_GRPC_PORT (69691) must be between 1 and 65535"
    assert marks.phase == "imports"


def test_a_model_file_that_does_not_import():
    marks = parse_log(log("fallback-tp2"), ranks=2)
    assert marks.fallbacks == ["DeepseekV3ForCausalLM"]
    assert "dump_hooks" in marks.ignored_imports["sglang.srt.models.deepseek_v2"]
    assert set(marks.classes.values()) == {"TransformersMoEForCausalLM"}


def test_stopped_in_graph_capture():
    marks = parse_log(log("spin-in-capture-tp2"), ranks=2)
    assert marks.phase == "capture"
    assert not marks.ready
    assert (marks.bar.done, marks.bar.total) == (1, 4)


def test_stopped_while_loading():
    marks = parse_log(log("loading-tp2-0.5.14"), ranks=2)
    assert marks.phase == "weights"
    assert all(rank.weights_gb is None for rank in marks.ranks.values())


def test_the_watchdog_is_trouble():
    assert "watchdog" in parse_log(log("barrier-tp2")).troubles


@settings(max_examples=15, deadline=None)
@given(st.lists(st.integers(1, 400), min_size=5, max_size=60), st.sampled_from(["fallback-tp2", "graphs-tp2-0.5.14"]))
def test_the_answer_does_not_depend_on_where_the_log_is_torn(sizes, name):
    data = log(name)[:6000]
    torn, position, turn = LogParser(ranks=2), 0, 0
    while position < len(data):
        size = sizes[turn % len(sizes)]
        torn.feed(data[position : position + size])
        position, turn = position + size, turn + 1
    assert torn.marks == parse_log(data, ranks=2)


@settings(max_examples=30, deadline=None)
@given(st.binary(max_size=2000))
def test_any_bytes_are_a_log(data):
    marks = parse_log(data, mark="tap")
    assert marks.lines == data.count(b"\n")
    assert not marks.ready


def test_a_progress_bar_is_one_line_and_news_only_while_it_advances():
    parser = LogParser()
    parser.feed(b"".join(b"\rLoading shards: %d%% Completed | %d/8 [00:01<00:02, 3.1it/s]" % (n, n) for n in range(4)))
    parser.feed(b"\r")
    assert (parser.marks.lines, parser.marks.news, parser.marks.bar.done) == (0, 4, 3)
    for second in range(50):
        parser.feed(b"Loading shards: 37%% Completed | 3/8 [00:%02d<00:02, 3.1it/s]\r" % second)
    assert parser.marks.news == 4
    parser.feed(b"\n")
    assert parser.marks.lines == 1


def test_a_line_behind_an_unfinished_bar_is_read():
    data = b"\rLoading shards:   0% Completed | 0/1 [00:00<?, ?it/s]" + stamped("Load weight begin.", "TP1")
    assert parse_log(data).ranks["TP1"].phase == "weights"


def test_a_log_that_repeats_itself_is_no_news():
    parser = LogParser()
    parser.feed(stamped("waiting for rank 3, try 1, 0x7f01", "TP0"))
    news = parser.marks.news
    for n in range(100):
        parser.feed(stamped(f"waiting for rank 3, try {n}, {n:#x}", "TP0"))
        parser.feed(stamped(f'INFO:     127.0.0.1:{40000 + n} - "GET /health HTTP/1.1" 503 Service Unavailable'))
    assert parser.marks.news == news + 1, "the first access line is new, the 99 others are not"
    assert parser.marks.repeated == 198, "since the first access line"
    assert "GET /health" in parser.marks.repeated_line
    parser.feed(stamped("something else", "TP0"))
    assert (parser.marks.news, parser.marks.repeated) == (news + 2, 0)


def test_batch_lines_are_forwards():
    data = b"".join(stamped(f"Prefill batch, #new-seq: 1, #new-token: {n}, #running-req: {n}", "TP0") for n in range(5))
    marks = parse_log(data)
    assert (marks.forwards, marks.running_requests) == (5, 4)


def test_ranks_that_have_not_logged_are_still_importing():
    parser = LogParser(ranks=2)
    parser.feed(stamped("Load weight begin.", "TP0"))
    assert parser.marks.phase == "imports"
    parser.feed(stamped("Init torch distributed begin.", "TP1"))
    assert parser.marks.phase == "init"
    assert parser.marks.slowest() == ["TP1"]


def test_parallel_init_of_newer_releases_and_late_weights():
    parser = LogParser()
    parser.feed(stamped("Init parallel begin.") + stamped("Init parallel ends. elapsed=1 s"))
    assert parser.marks.phase == "init"
    parser.feed(stamped("Load weight begin.") + stamped("Memory pool end.") + stamped("Capture cuda graph begin."))
    parser.feed(stamped("Load weight end. Committed real weights after CUDA graph capture type=LlamaForCausalLM"))
    assert parser.marks.phase == "capture"
    assert parser.marks.classes == {"TP0": "LlamaForCausalLM"}


@pytest.mark.parametrize(
    ("line", "rank"),
    [
        (stamped("fleetdump tap 1 is up", "TP1"), "TP1"),
        (stamped("fleetdump tap 1 is up", "DP1 TP3 EP3"), "DP1 TP3"),
        (b"fleetdump tap 1 is up, rank 2\n", "TP2"),
        (stamped("fleetdump tap 1 is up"), "TP0"),
    ],
)
def test_the_taps_mark(line, rank):
    marks = parse_log(line, mark="fleetdump tap 1")
    assert marks.marked == [rank]
    assert parse_log(line, mark="fleetdump tap 2").marked == []


def test_colours_and_bad_encoding():
    data = b"\x1b[32m[2026-11-29 12:00:00 TP0]\x1b[0m Load weight \xff\xfe begin\n" + stamped("Load weight begin.")
    assert parse_log(data).ranks["TP0"].phase == "weights"


@pytest.mark.parametrize(
    ("text", "trouble"),
    [
        ("[Errno 98] error while attempting to bind on address: address already in use", "port_in_use"),
        ("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB", "out_of_memory"),
        ("OSError: [Errno 28] No space left on device", "disk_full"),
        ("OSError: [Errno 24] Too many open files", "too_many_files"),
    ],
)
def test_troubles(text, trouble):
    assert list(parse_log(stamped(text)).troubles) == [trouble]


def test_a_child_that_was_killed():
    line = "Subprocess scheduler_0 (pid=13004) crashed with exit code -9. Triggering SIGQUIT for cleanup..."
    marks = parse_log(stamped(line) + stamped("SIGQUIT received. signum=None"))
    assert (marks.crashed.kind, marks.crashed.reason) == ("child_death", line)


def test_a_line_without_end_takes_no_memory():
    parser = LogParser()
    for _ in range(50):
        parser.feed(b"x" * 100_000)
    assert len(parser._pending) <= logmarks.LINE_LIMIT
    parser.feed(b"\n" + stamped("Load weight begin."))
    assert parser.marks.phase == "weights"


@pytest.mark.parametrize("text", ["x" * 60_000, "1" * 60_000, " " * 60_000 + "x", "a." * 30_000, "Capture " * 7_000])
def test_no_line_takes_long(text):
    start = time.process_time()
    parse_log(b"Traceback (most recent call last):\n" + text.encode() + b"\n" + stamped(text))
    assert time.process_time() - start < 1


def test_a_long_log_is_read_quickly():
    line = stamped("Decode batch, #running-req: 4, #token: 1024, gen throughput (token/s): 411.2, #queue-req: 0", "TP0")
    start = time.process_time()
    marks = parse_log(line * 20_000)
    assert marks.forwards == 20_000
    assert time.process_time() - start < 4
