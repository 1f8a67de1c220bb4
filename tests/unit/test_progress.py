"""fleetdump.agent.progress: what moves a server, and when it is stalled."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fleetdump.agent.procfs import TICKS_PER_SECOND, ProcSample, Rank
from fleetdump.agent.progress import CONFIRM_SECONDS, LONGEST_STRETCH, Rates, Sample, allowed, assess, movement
from fleetdump.agent.specs import PHASES, Patience

PATIENCE = Patience(**dict.fromkeys(PHASES, 30.0))
STARTING = [phase for phase in PHASES if phase != "serving"]
MIB = 1 << 20


def process(pid=10, role="scheduler", **counters):
    rank = Rank(tp=pid - 10) if role == "scheduler" else None
    return ProcSample(pid, 1, 1, 100, "R", "python", ["x"], role, rank, io_known=True, **counters)


def series(seconds, make, phase="weights", step=1.0):
    """A sample each ``step`` seconds; ``make(t)`` gives the keyword arguments of each."""
    count = int(seconds / step) + 1
    return [Sample(n * step, phase, **make(n * step)) for n in range(count)]


def spinning(t):
    """CPU, context switches and writes, as a hung server shows them (8-byte writes and reads of eventfds)."""
    ticks = int(t * TICKS_PER_SECOND)
    return process(utime=ticks, stime=ticks // 9, voluntary=int(3000 * t), wchar=int(1e5 * t), rchar=int(1e5 * t))


@settings(max_examples=20, deadline=None)
@given(
    phase=st.sampled_from(STARTING),
    processes=st.integers(1, 8),
    rate=st.floats(0, 1),
    step=st.sampled_from([0.5, 1.0, 3.0]),
)
def test_cpu_and_eventfd_traffic_alone_always_stall(phase, processes, rate, step):
    def make(t):
        return {"processes": [replace(spinning(rate * t), pid=10 + n) for n in range(processes)]}

    found = assess(series(60, make, phase, step), PATIENCE)
    assert found.stalled
    assert found.reasons == []
    assert found.idle_seconds == pytest.approx(60)


@settings(max_examples=20, deadline=None)
@given(
    counter=st.sampled_from(["rchar", "read_bytes", "rss_bytes"]),
    factor=st.floats(1.01, 1000),
    step=st.sampled_from([0.5, 1.0, 5.0]),
    phase=st.sampled_from(STARTING),
)
def test_bytes_above_the_rate_never_stall(counter, factor, step, phase):
    rate = getattr(Rates(), counter) * factor

    def make(t):
        return {"processes": [process(), process(11, **{counter: int(rate * t)})]}

    samples = series(120, make, phase, step)
    assert not any(assess(samples[: n + 1], PATIENCE).stalled for n in range(0, len(samples), 40))
    assert assess(samples, PATIENCE).idle_seconds == 0


@settings(max_examples=20, deadline=None)
@given(st.permutations(range(45)), st.booleans())
def test_samples_may_come_in_any_order(order, moving):
    samples = series(44, lambda t: {"news": int(t) if moving else 1, "processes": [spinning(t)]})
    assert assess([samples[n] for n in order], PATIENCE) == assess(samples, PATIENCE)


@settings(max_examples=20, deadline=None)
@given(st.lists(st.floats(6, 36000), min_size=1, max_size=5))
def test_a_watcher_that_was_not_scheduled_blames_nobody(gaps):
    """Suspended laptop, loaded machine: few samples with hours between them are no stall."""
    at, samples = 0.0, [Sample(0.0, "weights")]
    for gap in gaps:
        at += gap
        samples.append(Sample(at, "weights"))
    found = assess(samples, PATIENCE)
    assert not found.stalled
    assert found.idle_seconds <= 5.0 * len(gaps)


def test_a_stall_after_a_gap_is_still_found():
    samples = [*series(10, lambda t: {}), *(Sample(5000 + n, "weights") for n in range(40))]
    assert assess(samples, PATIENCE).stalled


def test_patience_must_be_exceeded_in_two_samples():
    samples = series(60, lambda t: {})
    stalled = [assess(samples[: n + 1], PATIENCE).stalled for n in range(len(samples))]
    assert stalled.index(True) == 30 + CONFIRM_SECONDS
    revived = [replace(sample, news=int(sample.at >= 33)) for sample in samples]
    assert not any(assess(revived[: n + 1], PATIENCE).stalled for n in range(60))


@pytest.mark.parametrize(
    ("before", "after", "moves"),
    [
        ({}, {}, False),
        ({}, {"news": 1}, True),
        ({}, {"forwards": 1}, True),
        ({"gpu_bytes": 0}, {"gpu_bytes": 512 * MIB}, True),
        ({"gpu_bytes": None}, {"gpu_bytes": 512 * MIB}, False),
        ({"gpu_bytes": 512 * MIB}, {"gpu_bytes": 512 * MIB}, False),
        ({"gpu_bytes": 512 * MIB}, {"gpu_bytes": 0}, False),
    ],
)
def test_movement_of_the_server(before, after, moves):
    assert bool(movement(Sample(0.0, "weights", **before), Sample(1.0, "weights", **after), Rates())) == moves


@pytest.mark.parametrize(
    ("role", "counters", "moves"),
    [
        ("scheduler", {"utime": TICKS_PER_SECOND}, False),
        ("scheduler", {"wchar": 100 * MIB, "write_bytes": 100 * MIB}, False),
        ("scheduler", {"rchar": 100 * MIB}, True),
        ("scheduler", {"rchar": 200_000}, False),
        ("scheduler", {"majflt": 50, "read_bytes": 16384}, True),
        ("scheduler", {"majflt": 50}, False),
        ("scheduler", {"voluntary": 9999, "threads": 5}, False),
        ("compiler", {"utime": TICKS_PER_SECOND}, True),
        ("compile_worker", {"utime": TICKS_PER_SECOND}, True),
        ("compiler", {}, False),
        ("launcher", {"rss_bytes": 50 * MIB}, True),
    ],
)
def test_movement_of_a_process(role, counters, moves):
    before = Sample(0.0, "jit", processes=[process(10, role)])
    after = Sample(1.0, "jit", processes=[process(10, role, **counters)])
    assert bool(movement(before, after, Rates())) == moves


@pytest.mark.parametrize("faults", [6.0, 400.0])
def test_a_mapped_file_whose_bytes_nobody_counts_is_read_by_its_page_faults(faults):
    """Lustre, NFS, FUSE: rchar and read_bytes stand; pages are dropped as fast as they come, so memory stands too."""

    def make(t):
        return {"processes": [replace(spinning(t), majflt=int(faults * t), rss_bytes=40 * MIB)]}

    found = assess(series(120, make), PATIENCE)
    assert not found.stalled
    assert found.idle_seconds == 0
    assert found.reasons == [f"scheduler TP0 pages in {faults:.0f} times a second"]
    for phase in set(STARTING) - {"weights"}:
        assert assess(series(120, make, phase), PATIENCE).stalled, phase


@pytest.mark.parametrize("every", [1.0, 4.0])
def test_a_fault_now_and_then_is_no_reading(every):
    """A hung server's threads wake, and their code may have been pushed out of memory."""
    samples = series(120, lambda t: {"processes": [replace(spinning(t), majflt=int(t / every))]})
    assert assess(samples, PATIENCE).stalled


def test_a_reused_pid_is_another_process():
    before = Sample(0.0, "weights", processes=[process()])
    after = Sample(1.0, "weights", processes=[replace(process(rchar=500 * MIB), start_time=101)])
    assert movement(before, after, Rates()) == []


def test_reasons_name_rank_and_rate():
    before = Sample(0.0, "weights", processes=[process(13)])
    after = Sample(2.0, "weights", processes=[process(13, read_bytes=10 * MIB)])
    assert movement(before, after, Rates()) == ["scheduler TP3 reads 5.0 MiB/s"]


def test_an_idle_server_is_healthy_and_a_busy_one_can_stall():
    assert not assess(series(600, lambda t: {}, "serving"), PATIENCE).stalled
    assert assess(series(60, lambda t: {"busy": True}, "serving"), PATIENCE).stalled
    slow = series(60, lambda t: {"busy": True, "slowest_batch": 20.0}, "serving")
    assert assess(slow, PATIENCE).patience == 100
    assert not assess(slow, PATIENCE).stalled


@pytest.mark.parametrize("phase", PHASES)
def test_patience_is_stretched_to_twice_a_healthy_start(phase):
    patience = Patience()
    assert allowed(phase, patience) == getattr(patience, phase)
    assert allowed(phase, patience, {phase: 400.0}) == 800
    assert allowed(phase, patience, {phase: 1.0}) == getattr(patience, phase)


@pytest.mark.parametrize("absurd", [1e5, 1e308, float("inf"), float("nan")])
@pytest.mark.parametrize("phase", PHASES)
def test_patience_ends_whatever_starts_and_batches_are_said_to_have_taken(phase, absurd):
    assert allowed(phase, Patience(), {phase: absurd}, absurd) <= LONGEST_STRETCH
    assert allowed(phase, replace(Patience(), **{phase: 1e5}), {phase: absurd}, absurd) == 1e5, "a setting is kept"


def test_no_samples():
    with pytest.raises(ValueError, match="no samples"):
        assess([], PATIENCE)
