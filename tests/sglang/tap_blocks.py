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
import zlib

import torch

sys.path.insert(0, sys.argv[1])
from fleetdump_tapblock import Blocks, NoRoomError, PlainLane
from fleetdump_tapfiles import TapWriter
from fleetdump_taprecords import Config
from fleetdump_taprows import Requests

HIDDEN, SLOTS = 8, (0, 1, 2)
ROW = len(SLOTS) * HIDDEN * 4


def config(ring_rows, device_rows, wait=0.2):
    ring, device = ring_rows * ROW, device_rows * ROW
    return Config("main", "1f0c77aa", [0, 1], "/nowhere", 1 << 20, 1 << 16, 1.0, ring, 1, device, max_wait_seconds=wait)


def blocks_of(ring_rows, device_rows, lane=None, **changes):
    made = Blocks(config(ring_rows, device_rows, **changes), SLOTS)
    made.allocate(torch.device("cpu"), torch.float32, HIDDEN, lane)
    return made


def discard(load):
    load.release()


class Forward:
    """Rows of values that nobody else has, of some requests; ``foreign`` rows of others lie between them."""

    def __init__(self, number, sizes, foreign=0, runs=("r",)):
        rids, lengths = [], []
        for index, rows in enumerate(sizes):
            rids += ["others", f"fleetdump/{runs[index % len(runs)]}/s{number}-{index}/1"]
            lengths += [foreign, rows]
        rids, lengths = [*rids, "others"], [*lengths, foreign]
        self.requests = Requests.of(rids, lengths, [0] * len(rids), "fleetdump/")
        self.ids = torch.arange(sum(lengths)) + 1000 * number
        self.values = [torch.randn(sum(lengths), HIDDEN) for _ in SLOTS]
        self.residual = torch.randn(sum(lengths), HIDDEN) if number % 2 else None

    @property
    def rids(self):
        return [rows.rid for rows in self.requests.rows()]

    def expected(self):
        found, first = {}, 0
        for rid, count in zip(self.requests.rids, self.requests.lengths, strict=True):
            data = torch.stack(self.values, dim=1)[first : first + count]
            if self.residual is not None:
                data = data + self.residual[first : first + count, None]
            if rid != "others":
                ids = self.ids[first : first + count].to(torch.int32)
                found[rid] = (0, data.numpy().tobytes(), ids.numpy().tobytes())
            first += count
        return found

    def ship(self, blocks):
        """What the forward's thread does."""
        block = blocks.begin(self.requests.ranges(), self.values[0])
        for slot, value in zip(SLOTS, self.values, strict=True):
            blocks.fill(block, slot, value.clone(), self.residual)
        assert blocks.is_whole(block)
        return blocks.hand_over(block, self.ids, self.requests)

    def run(self, blocks, deliver):
        """The same, unloaded at once; gives the skips."""
        return unload(self.ship(blocks), deliver)


def unload(shipment, deliver):
    skips = []
    shipment.unload(deliver, skips.extend)
    return skips


def taken(load):
    found = {p.rid: (p.start, bytes(p.data), bytes(p.ids)) for p in load.pieces()}
    assert all(p.shape == [p.data.nbytes // ROW, len(SLOTS), HIDDEN] and p.dtype == "F32" for p in load.pieces())
    return found


def refusal(forward, blocks):
    try:
        forward.ship(blocks)
    except NoRoomError as error:
        return error
    raise AssertionError("it was taken")


def late_copies_never_read_what_came_later():
    """Random forwards, the device's buffer little larger than one, courier and writers behind by a random number."""
    source, waits = random.Random(4), 0
    for _ in range(30):
        blocks, coming, loads, expected, got = blocks_of(200, 80, wait=0.0), [], [], {}, {}

        def fetch(coming=coming, loads=loads):
            assert unload(coming.pop(0), loads.append) == []

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
            while (shipment := attempt(forward, blocks)) is None:
                waits += 1
                fetch()
                while len(loads) > 3:
                    write()
            coming.append(shipment)
        while coming:
            fetch()
        while loads:
            write()
        assert got == expected
        assert blocks.gauge().used == 0
    assert waits > 100, "the device's buffer was never full"


def attempt(forward, blocks):
    """What ``ship`` gives, None when the device's buffer is full."""
    try:
        return forward.ship(blocks)
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
        assert forward.run(blocks, loads.append) == []
    for load in loads:
        got.update(taken(load))
    assert got == expected


def a_full_ring_costs_one_wait_and_leaves_requests_out():
    blocks, loads = blocks_of(24, 40, wait=0.3), []
    assert Forward(0, [12, 4]).run(blocks, loads.append) == []
    began = time.monotonic()
    skips = [skip for n in range(1, 20) for skip in Forward(n, [12]).run(blocks, loads.append)]
    assert [skip.reason for skip in skips] == ["backpressure"] * 19
    assert "of the ring's 24 rows wait" in skips[0].detail
    assert 0.3 <= blocks.gauge().waited <= time.monotonic() - began < 4.0
    while loads:
        loads.pop().release()
    assert Forward(99, [12]).run(blocks, loads.append) == []


def a_forward_waits_for_the_devices_buffer_once_and_no_longer_than_it_may():
    blocks, loads = blocks_of(200, 20, wait=0.3), []
    shipment = Forward(0, [12]).ship(blocks)
    began = time.monotonic()
    for number in range(1, 20):
        error = refusal(Forward(number, [12]), blocks)
        assert (error.reason, "20 rows is not emptied" in str(error)) == ("backpressure", True)
    assert 0.3 <= blocks.gauge().waited <= time.monotonic() - began < 4.0, "the driver hears of it"
    assert unload(shipment, loads.append) == []
    assert Forward(99, [12]).run(blocks, loads.append) == []


def what_fits_of_a_forward_is_taken():
    blocks, loads = blocks_of(20, 60, wait=0.0), []
    forward = Forward(0, [8, 8, 8], runs=("r", "q"))  # neighbours of one run would be one load
    left = forward.run(blocks, loads.append)
    assert [skip.rid for skip in left] == [forward.rids[2]]
    assert [rid for load in loads for rid in load.rids] == forward.rids[:2]


def a_forward_larger_than_the_ring_passes_while_it_is_emptied():
    blocks, got = blocks_of(10, 200, wait=60.0), {}
    forward = Forward(0, [6] * 30, runs=("r", "q"))

    def write(load):
        time.sleep(0.001)
        got.update(pieces_of(load))
        load.release()

    assert forward.run(blocks, lambda load: threading.Thread(target=write, args=(load,)).start()) == []
    end = time.monotonic() + 60
    while len(got) < 60 and time.monotonic() < end:  # each in two parts
        time.sleep(0.01)
    assert joined(got) == forward.expected()


def pieces_of(load):
    return {(piece.rid, piece.start): (bytes(piece.data), bytes(piece.ids)) for piece in load.pieces()}


def joined(parts):
    """Pieces of ``pieces_of`` joined by rid, as ``Forward.expected`` has them."""
    found = {}
    for (rid, start), (data, ids) in sorted(parts.items()):
        have = found.setdefault(rid, (0, b"", b""))
        assert len(have[1]) == start * ROW, "no gap"
        found[rid] = (0, have[1] + data, have[2] + ids)
    return found


def a_piece_larger_than_the_ring_goes_in_parts_as_it_is_emptied():
    """Of a forward among others: what follows it goes on where it ended."""
    blocks, got = blocks_of(10, 400, wait=60.0), {}
    forward = Forward(0, [3, 137, 4])

    def write(load):
        time.sleep(0.001)
        got.update(pieces_of(load))
        load.release()

    assert forward.run(blocks, lambda load: threading.Thread(target=write, args=(load,)).start()) == []
    end = time.monotonic() + 60
    while blocks.gauge().used and time.monotonic() < end:
        time.sleep(0.01)
    assert joined(got) == forward.expected()
    assert max(len(data) for data, _ in got.values()) <= 5 * ROW


def a_piece_larger_than_a_ring_that_is_not_emptied_is_one_skip():
    blocks, loads = blocks_of(10, 100, wait=0.0), []
    forward = Forward(0, [30])
    assert [(skip.rid, skip.reason) for skip in forward.run(blocks, loads.append)] == [
        (forward.rids[0], "backpressure")
    ]
    for load in loads:
        load.release()
    assert blocks.gauge().used == 0


def a_forward_larger_than_the_devices_buffer_is_refused_with_the_settings_names():
    error = refusal(Forward(0, [41]), blocks_of(100, 40))
    assert error.reason == "capture_error"
    assert "device_bytes" in str(error)
    assert "--chunked-prefill-size" in str(error)


def no_memory_is_a_reason_and_not_an_exception():
    blocks = Blocks(config(1 << 50, 1 << 50), SLOTS)
    blocks.allocate(torch.device("cpu"), torch.float32, HIDDEN)
    assert "no buffers of" in str(refusal(Forward(0, [1]), blocks))


def a_device_whose_streams_nobody_has_tried_is_a_reason():
    forward = Forward(0, [3])
    forward.values = [value.to("meta") for value in forward.values]
    error = refusal(forward, Blocks(config(100, 100), SLOTS))
    assert (error.reason, "on meta" in str(error)) == ("capture_error", True)


def without_chunks_nobody_knows_the_largest_forward():
    """SGLang lets a prompt that comes alone exceed --max-prefill-tokens, so the buffer must not be cut to that."""
    import fleetdump_taplayout

    real = fleetdump_taplayout._server_args
    try:
        for chunk, rows in [(-1, 0), (None, 0), (4096, 4096)]:
            args = types.SimpleNamespace(chunked_prefill_size=chunk, max_prefill_tokens=128)
            fleetdump_taplayout._server_args = lambda args=args: args
            assert fleetdump_taplayout.largest_forward() == rows
    finally:
        fleetdump_taplayout._server_args = real


def one_request(rows):
    return Requests.of(["fleetdump/r/a/1"], [rows], [0], "fleetdump/")


def a_process_may_fill_some_slots_only():
    """A pipeline stage; its slots keep their numbers."""
    blocks, loads = Blocks(config(100, 100), (1, 4)), []
    values = {slot: torch.randn(5, HIDDEN) for slot in (4, 1)}
    block = blocks.begin([(0, 5)], values[1])
    blocks.fill(block, 4, values[4])
    assert not blocks.is_whole(block)
    blocks.fill(block, 1, values[1])
    assert blocks.is_whole(block)
    assert unload(blocks.hand_over(block, torch.arange(5), one_request(5)), loads.append) == []
    (piece,) = loads[0].pieces()
    assert piece.shape == [5, 2, HIDDEN]
    assert bytes(piece.data) == torch.stack([values[1], values[4]], dim=1).numpy().tobytes()


def another_dtype_than_the_norms_gets_other_buffers():
    blocks, loads = blocks_of(20, 20), []
    value = torch.randn(3, HIDDEN).to(torch.bfloat16)
    block = blocks.begin([(0, 3)], value)
    for slot in SLOTS:
        blocks.fill(block, slot, value)
    assert unload(blocks.hand_over(block, torch.arange(3), one_request(3)), loads.append) == []
    (piece,) = loads[0].pieces()
    assert (piece.dtype, piece.data.nbytes) == ("BF16", ROW // 2 * 3)


def rows_are_the_same_however_they_are_put_into_the_block():
    """Few and many rows, of widths that fit into 64-bit items and not, whole forwards and parts, a view of a larger
    buffer: what is written is ``states + residual``, bit for bit."""
    source = random.Random(7)
    for number in range(60):
        dtype, hidden = source.choice([torch.bfloat16, torch.float16, torch.float32]), source.choice([3, 6, 8, 40])
        rows, foreign = source.choice([5, 2048, 2500]), source.choice([0, 1, 700])
        buffer = torch.randn(rows + foreign + 1, hidden).to(dtype)
        states = buffer[1:] if number % 3 else buffer[1:].clone()
        residual = torch.randn(rows + foreign, hidden).to(dtype) if number % 2 else None
        expected = (states if residual is None else states + residual)[foreign:]
        item = dtype.itemsize * hidden * len(SLOTS)
        settings = Config("main", "1f0c77aa", [0, 1], "/nowhere", 1 << 20, 1 << 16, 1.0, 8000 * item, 1, 4000 * item)
        blocks, loads = Blocks(settings, SLOTS), []
        requests = Requests.of(["others", "fleetdump/r/a/1"], [foreign, rows], [0, 0], "fleetdump/")
        block = blocks.begin(requests.ranges(), states)
        for slot in SLOTS:
            blocks.fill(block, slot, states, residual)
        assert unload(blocks.hand_over(block, torch.arange(rows + foreign), requests), loads.append) == []
        found = torch.frombuffer(bytearray(loads[0].pieces()[0].data), dtype=torch.uint8)
        wanted = torch.stack([expected] * len(SLOTS), dim=1).contiguous().view(torch.uint8).flatten()
        assert torch.equal(found, wanted), (number, dtype, hidden, rows, foreign)


def buffers_outlive_inference_mode():
    with torch.inference_mode():
        blocks = blocks_of(20, 20)
        assert Forward(0, [2]).run(blocks, discard) == []
    with torch.no_grad():
        assert Forward(1, [2]).run(blocks, discard) == []


def a_failed_copy_gives_its_rows_back():
    class Broken(PlainLane):
        def fetch(self, pairs):
            raise RuntimeError("CUDA error")

    class Lost(PlainLane):
        def wait(self, mark):
            raise RuntimeError("CUDA error")

    for lane in (Broken(), Lost()):
        blocks, loads = blocks_of(40, 20, lane, wait=0.0), []
        for number in range(5):
            forward = Forward(number, [15])
            skips = forward.run(blocks, loads.append)
            assert [(skip.rid, skip.reason) for skip in skips] == [(forward.rids[0], "capture_error")]
            assert "CUDA error" in skips[0].detail
        assert (loads, blocks.gauge().used) == ([], 0)


def a_forward_that_came_to_no_end_gives_its_rows_back():
    blocks, loads = blocks_of(60, 20, wait=0.0), []
    for number in range(5):
        forward = Forward(number, [15])
        blocks.begin(forward.requests.ranges(), forward.values[0])
    try:
        blocks.hand_over(blocks.begin([(0, 15)], forward.values[0]), None, forward.requests)
        raise AssertionError("ids of None were taken")
    except AttributeError:
        pass
    assert Forward(9, [15]).run(blocks, loads.append) == []
    assert Forward(10, [15]).run(blocks, loads.append) == []


def the_next_forward_may_have_its_tensors_where_this_one_had_them():
    """SGLang's eager runner copies each batch into the same buffers; layers reuse theirs anyhow."""
    blocks, ids, values = blocks_of(200, 100), torch.zeros(40, dtype=torch.int64), torch.zeros(40, HIDDEN)
    expected, got, coming = {}, {}, []
    for number in range(3):
        forward = Forward(number, [9, 4], foreign=number)
        expected.update(forward.expected())
        rows = len(forward.ids)
        block = blocks.begin(forward.requests.ranges(), values[:rows])
        for slot, value in zip(SLOTS, forward.values, strict=True):
            values[:rows] = value
            blocks.fill(block, slot, values[:rows], forward.residual)
        ids[:rows] = forward.ids
        coming.append(blocks.hand_over(block, ids[:rows], forward.requests))
        values.fill_(-1.0)
        ids.fill_(-1)
    for shipment in coming:
        assert unload(shipment, lambda load: got.update(taken(load))) == []
    assert got == expected


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
        requests = Requests.of([f"fleetdump/r/s{sent}/1"], [10], [0], "fleetdump/")
        writer.take(blocks.hand_over(block, torch.arange(10), requests))
        time.sleep(0.005)
        if sent % 50 == 0:
            grown.append(resident())
    assert writer.drain(60)
    written = writer._counts.rows // 10
    left += writer._counts.skips["backpressure"]
    writer.stop()
    shutil.rmtree(directory)
    fleetdump_tapshard._write_all = real
    assert left > 10, "the disk was not slow"
    assert written > 50
    assert written + left == sent
    assert blocks.gauge().used == 0
    # The buffers are 7 MB, touched as they are used; what was left out would have been tens of times that.
    assert grown[-1] - grown[len(grown) // 3] < 32 << 20, grown


def a_sample_of_128k_tokens_and_interleaved_chunks_pass_through_small_buffers():
    """Two prompts of 131,072 tokens whose chunks take turns, and short prompts between them: 120 MiB through a ring of
    6 MiB and half as much before it. Nothing is left out, and memory stays what the buffers are."""
    tokens, chunk, hidden, directory = 1 << 17, 2048, 40, tempfile.mkdtemp()
    row = len(SLOTS) * hidden * 4
    settings = Config("main", "1f0c77aa", [0, 1], directory, 1 << 25, 1 << 16, 60.0, 6 << 20, 1, 3 << 20, 2)
    settings.max_wait_seconds = 60.0
    blocks = Blocks(settings, SLOTS)
    writer, expected, grown, peak = TapWriter(settings, 0, None, gauge=blocks.gauge), {}, [], 0
    for number in range(2 * tokens // chunk):
        rids = [f"fleetdump/r/long{number % 2}/1", "others", f"fleetdump/r/short{number}/1"]
        lengths, starts = [chunk, 1, 5], [number // 2 * chunk, 0, 0]
        requests = Requests.of(rids, lengths, starts, "fleetdump/")
        states, ids = torch.randn(sum(lengths), hidden), torch.arange(sum(lengths))
        block = blocks.begin(requests.ranges(), states)
        for slot in SLOTS:
            blocks.fill(block, slot, states)
        writer.take(blocks.hand_over(block, ids, requests))
        for rid, first, count, start in ((rids[0], 0, chunk, starts[0]), (rids[2], chunk + 1, 5, 0)):
            data = states[first : first + count, None].expand(count, len(SLOTS), hidden).contiguous()
            expected[rid, start] = zlib.crc32(data.numpy().tobytes())
        peak = max(peak, blocks.gauge().peak)
        grown.append(resident())
    assert writer.drain(60)
    assert dict(writer._counts.skips) == {}
    writer.stop()
    with open(f"{directory}/r/journal-main-1f0c77aa-r0.jsonl") as file:
        lines = [line for line in map(json.loads, file) if line["kind"] == "piece"]
    shutil.rmtree(directory)
    assert {(line["rid"], line["start"]): line["crc32"] for line in lines} == expected
    assert sum(line["rows"] for line in lines if "long" in line["rid"]) == 2 * tokens
    assert 0 < peak <= 6 << 20
    assert 2 * tokens * row >= 20 * (6 << 20)
    assert grown[-1] - grown[len(grown) // 3] < 16 << 20, grown


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
        device, device_index = torch.device("cpu"), 3

        def __init__(self, device):
            pass

        def __enter__(self):
            return self

        def __exit__(self, *_):
            pass

    real, fleetdump_tapblock.COPY_BYTES = torch.cuda, 3 * ROW
    try:
        torch.cuda = types.SimpleNamespace(
            Event=Event,
            Stream=Stream,
            current_stream=lambda device: "current",
            stream=lambda stream: stream,
            set_device=lambda index: log.append(("device", index)),
        )
        lane = fleetdump_tapblock.CudaLane(torch.device("cpu"))
        mark = lane.mark()
    finally:
        torch.cuda = real
    source = torch.randn(10, len(SLOTS), HIDDEN)
    target = torch.empty_like(source)
    lane.wait(mark)
    lane.fetch([(target, source)])
    assert torch.equal(target, source)
    assert log == [("device", 3), "record", "wait", *["record", "wait"] * 4], log


def a_mark_is_the_stream_that_runs_now():
    """Of which torch's slow way is asked once each; always, where the fast way to tell them apart is missing."""
    import fleetdump_tapblock

    handles, asked = [], []

    def current_stream(device):
        asked.append(device)
        return f"stream {handles[-1]}"

    stream = types.SimpleNamespace(device="device 0", device_index=0)
    fake = types.SimpleNamespace(
        Event=lambda blocking: None, Stream=lambda device: stream, current_stream=current_stream
    )
    real, torch.cuda = torch.cuda, fake
    try:
        slow = fleetdump_tapblock.CudaLane(torch.device("cpu"))
        slow._current = None
        fast = fleetdump_tapblock.CudaLane(torch.device("cpu"))
        fast._current = lambda index: handles[-1] + index
    finally:
        torch.cuda = real
    for lane, times in [(fast, 2), (slow, 6)]:
        asked.clear()
        marks = []
        for handle in (7, 7, 9, 7, 9, 9):
            handles.append(handle)
            marks.append(lane.mark())
        assert marks == [f"stream {n}" for n in (7, 7, 9, 7, 9, 9)]
        assert asked == ["device 0"] * times


CASES = [value for name, value in list(globals().items()) if callable(value) and getattr(value, "__code__", None)]
HELPERS = (config, blocks_of, taken, refusal, discard, attempt, resident, unload, pieces_of, joined, one_request)
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
