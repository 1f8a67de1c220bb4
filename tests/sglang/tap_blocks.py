"""The tap's buffers under copies that are late, as a GPU's are; runs under SGLang's interpreter, which has torch.

A load is fetched long after its forward has ended, and reads what the device's buffer holds by then: a buffer that is
overwritten too early shows as wrong bytes. Usage: tap_blocks.py PATCH_DIR; prints one JSON object, {case: what went
wrong, or ""}.
"""

import json
import os
import random
import shutil
import sys
import tempfile
import threading
import time
import traceback
import types

import torch

sys.path.insert(0, sys.argv[1])
from fleetdump_tapblock import Blocks, NoRoomError, PlainLane, Rows
from fleetdump_tapfiles import TapWriter
from fleetdump_taprecords import Config

HIDDEN, SLOTS = 8, (0, 1, 2)
ROW = len(SLOTS) * HIDDEN * 4


def config(ring_rows, device_rows, wait=0.2):
    ring, device = ring_rows * ROW, device_rows * ROW
    return Config("main", "1f0c77aa", [0, 1], "/nowhere", 1 << 20, 1 << 16, 1.0, ring, 1, device, max_wait_seconds=wait)


def blocks_of(ring_rows, device_rows, lane=None, **changes):
    made = Blocks(config(ring_rows, device_rows, **changes), SLOTS)
    made.allocate(torch.device("cpu"), torch.float32, HIDDEN, lane)
    return made


def discard(some):
    for load in some:
        load.fetch()
        load.release()


class Forward:
    """Rows of values that nobody else has, of some requests; ``foreign`` rows of others lie between them."""

    def __init__(self, number, sizes, foreign=0, runs=("r",)):
        self.requests, self.ranges, at, first = [], [], 0, foreign
        for index, rows in enumerate(sizes):
            rid = f"fleetdump/{runs[index % len(runs)]}/s{number}-{index}/1"
            self.requests.append(Rows(rid, at, rows, 10 * index))
            self.ranges.append((first, rows))
            at, first = at + rows, first + rows + foreign
        self.ids = torch.arange(first) + 1000 * number
        self.values = [torch.randn(first, HIDDEN) for _ in SLOTS]

    def expected(self):
        found = {}
        for rows, (first, count) in zip(self.requests, self.ranges, strict=True):
            data = torch.stack([value[first : first + count] for value in self.values], dim=1)
            ids = self.ids[first : first + count].to(torch.int32)
            found[rows.rid] = (rows.start, data.numpy().tobytes(), ids.numpy().tobytes())
        return found

    def run(self, blocks, take):
        block = blocks.begin(self.ranges, self.values[0])
        for slot, value in zip(SLOTS, self.values, strict=True):
            blocks.fill(block, slot, value.clone())
        assert blocks.is_whole(block)
        return blocks.hand_over(block, self.ids, self.requests, take)


def fetched(loads):
    """Takes loads as the courier does."""

    def take(some):
        for load in some:
            load.fetch()
        loads.extend(some)

    return take


def taken(load):
    found = {p.rid: (p.start, bytes(p.data), bytes(p.ids)) for p in load.pieces()}
    assert all(p.shape == [p.data.nbytes // ROW, len(SLOTS), HIDDEN] and p.dtype == "F32" for p in load.pieces())
    return found


def refusal(forward, blocks):
    try:
        forward.run(blocks, None)
    except NoRoomError as error:
        return error
    raise AssertionError("it was taken")


def late_copies_never_read_what_came_later():
    """Random forwards, the device's buffer little larger than one, courier and writers behind by a random number."""
    source, waits = random.Random(4), 0
    for _ in range(30):
        blocks, coming, loads, expected, got = blocks_of(200, 80, wait=0.0), [], [], {}, {}

        def fetch(coming=coming, loads=loads):
            loads.append(coming.pop(0))
            loads[-1].fetch()

        def write(loads=loads, got=got):
            load = loads.pop(0)
            got.update(taken(load))
            load.release()

        for number in range(60):
            sizes = [source.randrange(1, 12) for _ in range(source.randrange(1, 4))]
            forward = Forward(number, sizes, source.randrange(0, 3), ("r", "q"))
            expected.update(forward.expected())
            while coming and source.random() < 0.4:
                fetch()
            while len(loads) > 3 or (loads and source.random() < 0.3):
                write()
            while (left := attempt(forward, blocks, coming.extend)) is None:
                waits += 1
                fetch()
            assert left == []
        while coming:
            fetch()
        while loads:
            write()
        assert got == expected
        assert blocks.gauge().used == 0
    assert waits > 100, "the device's buffer was never full"


def attempt(forward, blocks, take):
    """What ``run`` gives, None when the device's buffer is full."""
    try:
        return forward.run(blocks, take)
    except NoRoomError as error:
        if error.reason != "backpressure":
            raise
        return None


def loads_may_be_given_back_in_any_order():
    source = random.Random(5)
    blocks, loads, expected, got = blocks_of(120, 40), [], {}, {}
    for number in range(400):
        if len(loads) == 5:
            source.shuffle(loads)
            for load in loads:
                got.update(taken(load))
                load.release()
            loads = []
        forward = Forward(number, [source.randrange(1, 20)])
        expected.update(forward.expected())
        assert forward.run(blocks, fetched(loads)) == []
    for load in loads:
        got.update(taken(load))
    assert got == expected


def a_full_ring_costs_one_wait_and_leaves_requests_out():
    blocks, loads = blocks_of(20, 40, wait=0.3), []
    assert Forward(0, [12]).run(blocks, fetched(loads)) == []
    began = time.monotonic()
    left = [len(Forward(n, [12]).run(blocks, fetched(loads))) for n in range(1, 20)]
    assert left == [1] * 19
    waited = time.monotonic() - began
    assert 0.3 <= blocks.gauge().waited <= waited < 4.0, waited
    assert "of the ring's 20 rows wait" in blocks.no_room()
    loads.pop().release()
    assert Forward(99, [12]).run(blocks, fetched(loads)) == []


def what_fits_of_a_forward_is_taken():
    blocks, loads = blocks_of(20, 60, wait=0.0), []
    forward = Forward(0, [8, 8, 8], runs=("r", "q"))  # neighbours of one run would be one load
    left = forward.run(blocks, fetched(loads))
    assert [rows.rid for rows in left] == [forward.requests[2].rid]
    assert [rid for load in loads for rid in load.rids] == [rows.rid for rows in forward.requests[:2]]


def a_forward_larger_than_the_ring_passes_while_it_is_emptied():
    blocks, got = blocks_of(10, 200, wait=60.0), {}
    forward = Forward(0, [6] * 30, runs=("r", "q"))

    def write(some):
        for load in some:
            load.fetch()
            time.sleep(0.001)
            got.update(taken(load))
            load.release()

    def take(some):
        threading.Thread(target=write, args=(some,)).start()

    assert forward.run(blocks, take) == []
    end = time.monotonic() + 60
    while len(got) < 30 and time.monotonic() < end:
        time.sleep(0.01)
    assert got == forward.expected()


def a_piece_larger_than_the_ring_is_left_out_at_once():
    blocks = blocks_of(10, 100, wait=30.0)
    began = time.monotonic()
    assert len(Forward(0, [11]).run(blocks, [].extend)) == 1
    assert time.monotonic() - began < 10


def a_forward_larger_than_the_devices_buffer_is_refused_with_the_settings_names():
    error = refusal(Forward(0, [41]), blocks_of(100, 40))
    assert error.reason == "capture_error"
    assert "device_bytes" in str(error)
    assert "--chunked-prefill-size" in str(error)


def no_memory_is_a_reason_and_not_an_exception():
    blocks = Blocks(config(1 << 50, 1 << 50), SLOTS)
    blocks.allocate(torch.device("cpu"), torch.float32, HIDDEN)
    assert "no buffers of" in str(refusal(Forward(0, [1]), blocks))


def a_process_may_fill_some_slots_only():
    """A pipeline stage; its slots keep their numbers."""
    blocks, loads = Blocks(config(100, 100), (1, 4)), []
    values = {slot: torch.randn(5, HIDDEN) for slot in (4, 1)}
    block = blocks.begin([(0, 5)], values[1])
    blocks.fill(block, 4, values[4])
    assert not blocks.is_whole(block)
    blocks.fill(block, 1, values[1])
    assert blocks.is_whole(block)
    blocks.hand_over(block, torch.arange(5), [Rows("fleetdump/r/a/1", 0, 5, 0)], fetched(loads))
    (piece,) = loads[0].pieces()
    assert piece.shape == [5, 2, HIDDEN]
    assert bytes(piece.data) == torch.stack([values[1], values[4]], dim=1).numpy().tobytes()


def another_dtype_than_the_norms_gets_other_buffers():
    blocks, loads = blocks_of(20, 20), []
    value = torch.randn(3, HIDDEN).to(torch.bfloat16)
    block = blocks.begin([(0, 3)], value)
    for slot in SLOTS:
        blocks.fill(block, slot, value)
    blocks.hand_over(block, torch.arange(3), [Rows("fleetdump/r/a/1", 0, 3, 0)], fetched(loads))
    (piece,) = loads[0].pieces()
    assert (piece.dtype, piece.data.nbytes) == ("BF16", ROW // 2 * 3)


def buffers_outlive_inference_mode():
    with torch.inference_mode():
        blocks = blocks_of(20, 20)
        assert Forward(0, [2]).run(blocks, discard) == []
    with torch.no_grad():
        assert Forward(1, [2]).run(blocks, discard) == []


def a_failed_copy_gives_its_rows_back():
    class Broken(PlainLane):
        def fetch(self, mark, pairs):
            raise RuntimeError("CUDA error")

    blocks, loads = blocks_of(20, 20, Broken(), wait=0.0), []
    for number in range(5):
        assert Forward(number, [15]).run(blocks, loads.extend) == []
        load = loads.pop()
        try:
            load.fetch()
        except RuntimeError:
            load.release()
    assert blocks.gauge().used == 0


def a_forward_that_came_to_no_end_gives_its_rows_back():
    blocks, loads = blocks_of(40, 20, wait=0.0), []
    for number in range(5):
        forward = Forward(number, [15])
        blocks.begin(forward.ranges, forward.values[0])
    assert Forward(9, [15]).run(blocks, fetched(loads)) == []
    assert Forward(10, [15]).run(blocks, fetched(loads)) == []


def memory_stays_bounded_while_the_disk_is_slow():
    """The real writer, 4 MB/s a thread, so that a forward's rows take longer than it may wait: some are left out."""
    import fleetdump_tapshard

    row = 3 * 4096 * 4
    directory = tempfile.mkdtemp()
    settings = Config("main", "1f0c77aa", [0, 1], directory, 1 << 24, 1 << 16, 1.0, 100 * row, 1, 40 * row, 2)
    settings.max_wait_seconds = 0.02
    blocks = Blocks(settings, SLOTS)
    writer = TapWriter(settings, 0, None, gauge=blocks.gauge)
    real = fleetdump_tapshard._write_all

    def slow(file, views, at):
        time.sleep(sum(view.nbytes for view in views) / 4e6)
        real(file, views, at)

    fleetdump_tapshard._write_all = slow
    value, sent, left, grown = torch.randn(10, 4096), 0, 0, []
    end = time.monotonic() + 8
    while time.monotonic() < end:
        sent += 1
        try:
            block = blocks.begin([(0, 10)], value)
        except NoRoomError:  # the courier has had no turn
            left += 1
            continue
        for slot in SLOTS:
            blocks.fill(block, slot, value)
        rows = [Rows(f"fleetdump/r/s{sent}/1", 0, 10, 0)]
        left += len(blocks.hand_over(block, torch.arange(10), rows, writer.take))
        time.sleep(0.005)
        if sent % 50 == 0:
            grown.append(resident())
    assert writer.drain(60)
    written = writer._counts.rows // 10
    writer.stop()
    shutil.rmtree(directory)
    fleetdump_tapshard._write_all = real
    assert left > 10, "the disk was not slow"
    assert written > 50
    assert written + left == sent
    assert blocks.gauge().used == 0
    # The buffers are 7 MB, touched as they are used; what was left out would have been tens of times that.
    assert grown[-1] - grown[len(grown) // 3] < 32 << 20, grown


def resident():
    """Bytes of this process in memory."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def a_lane_copies_in_small_parts_one_at_a_time():
    """CudaLane with a stand-in of torch.cuda."""
    import fleetdump_tapblock

    log = []

    class Event:
        def __init__(self, blocking):
            assert blocking

        def record(self, stream):
            log.append("record")

        def synchronize(self):
            log.append("wait")

    class Stream:
        device = torch.device("cpu")

        def __init__(self, device):
            pass

        def __enter__(self):
            return self

        def __exit__(self, *_):
            pass

    real, fleetdump_tapblock.COPY_BYTES = torch.cuda, 3 * ROW
    try:
        torch.cuda = types.SimpleNamespace(
            Event=Event, Stream=Stream, current_stream=lambda device: "current", stream=lambda stream: stream
        )
        lane = fleetdump_tapblock.CudaLane(torch.device("cpu"))
        mark = lane.mark()
    finally:
        torch.cuda = real
    source = torch.randn(10, len(SLOTS), HIDDEN)
    target = torch.empty_like(source)
    lane.fetch(mark, [(target, source)])
    assert torch.equal(target, source)
    assert log == ["record", "wait", *["record", "wait"] * 4], log


CASES = [value for name, value in list(globals().items()) if callable(value) and getattr(value, "__code__", None)]
HELPERS = (config, blocks_of, taken, refusal, fetched, discard, attempt, resident)
results = {}
for case in CASES:
    if case in HELPERS:
        continue
    try:
        case()
        results[case.__name__] = ""
    except BaseException:
        results[case.__name__] = traceback.format_exc()
print(json.dumps(results))
