"""The way of the rows from the model's forward to the writer threads (docs/performance.md of fleetdump).

A forward gathers the wanted rows of all its layers into one ``[rows, slots, hidden]`` block of a buffer on the
model's device. At its end it marks the block as ready and goes on; a courier thread works out what is to be written of
it, and copies that, on a stream of its own, into a ring of pinned host memory; what the writers have written makes room
in the ring. Both buffers are allocated once. The forward's thread waits for room at most ``max_wait_seconds``, its
stream for nothing. On the CPU the same code runs with plain copies.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from fleetdump_taprecords import Config, Gauge, Load, Piece, Skip, in_turns, run_of
from fleetdump_tapring import RowRing, Span
from fleetdump_taprows import Ledger, Requests, Rows, groups_of

LOAD_BYTES = 128 << 20
"""What goes to the writers at once, unless a single piece is larger."""
FORWARDS = 3
"""Of the largest that the device's buffer takes at most: one is copied, one computed, one launched."""
WIDE_ROWS = 2048
"""From so many rows on the device's time counts for more than that of the thread that launches. An operation on 16-bit
items with gaps is several times slower than a copy of the same bytes in items of 64 bits."""
COPY_BYTES = 8 << 20
"""What is copied to the host at once: 0.15 ms at 55 GB/s."""


class NoRoomError(Exception):
    """Rows that the buffers cannot take; ``reason`` is that of the skip."""

    def __init__(self, reason: str, detail: str):
        super().__init__(detail)
        self.reason = reason


# --------------------------------------------------------------------------- streams
class Lane(Protocol):
    """Copies from the device to the host, beside the forward."""

    def mark(self) -> Any:
        """A point behind all that the current stream has been given so far, or a later one. The forward's thread calls
        it."""

    def wait(self, mark: Any) -> None:
        """Return when ``mark`` is reached. The courier calls it, and ``fetch``."""

    def fetch(self, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
        """Copy (target, source) pairs; returns when they are done."""


class CudaLane:
    """A stream of its own. One copy at a time is given to the device, of at most ``COPY_BYTES``: the engine that copies
    to the host serves in order, and the forward's own small copies (the next token's ids) must not queue behind half a
    gigabyte. Events sleep instead of spinning: waiting costs the forward no core."""

    def __init__(self, device: torch.device):
        self._cuda = torch.cuda
        self._stream = torch.cuda.Stream(device)
        self._done = torch.cuda.Event(blocking=True)
        self._index = self._stream.device_index
        self._current = getattr(torch._C, "_cuda_getCurrentRawStream", None)  # what Triton's launches ask
        self._streams: dict[int, Any] = {}
        """By handle. Torch never destroys a stream."""

    def mark(self) -> Any:
        # The event is recorded in ``wait``: that takes 10 us, which the courier has and the forward has not. Torch's
        # Python takes 30 more to name the stream, which is always the same one or two.
        if self._current is None:
            return self._cuda.current_stream(self._stream.device)
        handle = self._current(self._index)
        if handle not in self._streams:
            self._streams[handle] = self._cuda.current_stream(self._stream.device)
        return self._streams[handle]

    def wait(self, mark: Any) -> None:
        # This thread's device is 0 until it says otherwise, and to switch back there would make a context of 0.5 GB.
        self._cuda.set_device(self._index)
        self._done.record(mark)
        self._done.synchronize()

    def fetch(self, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
        with self._cuda.stream(self._stream):
            for target, source in pairs:
                rows = max(1, COPY_BYTES // (source[:1].numel() * source.element_size()))
                for at in range(0, source.shape[0], rows):
                    target[at : at + rows].copy_(source[at : at + rows], non_blocking=True)
                    self._done.record(self._stream)
                    self._done.synchronize()


class PlainLane:
    """The CPU's: what the forward has computed is there."""

    def mark(self) -> Any:
        return None

    def wait(self, mark: Any) -> None:
        pass

    def fetch(self, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
        for target, source in pairs:
            target.copy_(source)


# --------------------------------------------------------------------------- blocks
@dataclass
class Block:
    """The block of one forward, rows ``span`` of the device's buffer: ``moves`` says which rows of the stream are which
    rows here. The views of all slots are made at once: each takes the forward's thread as long as the copy does until
    it is launched."""

    buffers: _Buffers
    span: Span
    moves: list[tuple[slice, slice]]
    planes: Sequence[torch.Tensor]
    """Slot by slot, ``[rows, hidden]`` each."""
    filled: set[int] = field(default_factory=set)


@dataclass
class _Buffers:
    """States ``[rows, slots, hidden]`` and ids ``[rows]`` (int32) on the device, the same in host memory, which rows of
    either are in use, and how they get from one to the other. The host's is what everywhere here is called the ring."""

    states: torch.Tensor
    ids: torch.Tensor
    room: RowRing
    host_states: torch.Tensor
    host_ids: torch.Tensor
    state_bytes: memoryview
    id_bytes: memoryview
    ring: RowRing
    lane: Lane

    @property
    def row_bytes(self) -> int:
        slots, hidden = self.states.shape[1:]
        return int(slots * hidden * self.states.element_size())

    def fits(self, like: torch.Tensor) -> bool:
        """Whether they are for a stream of its dtype and width, on its device."""
        states = self.states
        return bool(
            states.dtype is like.dtype
            and states.shape[2] == like.shape[1]
            and states.get_device() == like.get_device()  # a number, which is told faster than ``device``
        )

    def fetch(self, start: int, span: Span) -> None:
        """Copy the device's rows from ``start`` on to ``span`` of the ring."""
        target, source = slice(span.start, span.stop), slice(start, start + span.stop - span.start)
        pairs = [(self.host_states, self.states), (self.host_ids, self.ids)]
        self.lane.fetch([(host[target], device[source]) for host, device in pairs])


class Blocks:
    """The buffers of one process and what is on its way in them.

    ``slots`` are the numbers of the slots that this process fills, in the order of the block's second dimension.
    ``largest`` is the most rows that one forward can have, 0 when that is not known. The forward's thread calls
    ``begin``, ``fill``, ``hand_over`` and ``refuse``; what the last two give is for the courier's thread alone.
    """

    def __init__(self, config: Config, slots: Sequence[int], largest: int = 0):
        self._config = config
        self._slots = list(slots)
        self._index = {slot: index for index, slot in enumerate(slots)}
        self._largest = largest
        self._buffers: _Buffers | None = None
        self._failure = ""
        self._open: Block | None = None
        """Begun and not handed over."""
        self._ledger = Ledger()

    def allocate(self, device: torch.device, dtype: torch.dtype, hidden: int, lane: Lane | None = None) -> None:
        """Allocate the buffers for a stream of that dtype and width. Host memory for CUDA is pinned (about 0.5 s a
        GiB). Failing is remembered: ``begin`` tells it."""
        if device.type not in ("cuda", "cpu"):
            self._failure = (
                f"no rows are captured on {device.type}: nobody has tried how its copies wait for its streams"
            )
            return
        slots = len(self._index)
        row = slots * hidden * dtype.itemsize
        rows, ring_rows = self._config.device_bytes // row, self._config.ring_bytes // row
        rows = min(rows, FORWARDS * self._largest or rows)
        cuda = device.type == "cuda"
        try:
            # Plain tensors, whatever mode the forward runs in: they outlive it.
            with torch.inference_mode(False), torch.no_grad():
                states = torch.empty((rows, slots, hidden), dtype=dtype, device=device)
                ids = torch.empty((rows,), dtype=torch.int32, device=device)
                host_states = torch.empty((ring_rows, slots, hidden), dtype=dtype, pin_memory=cuda)
                host_ids = torch.empty((ring_rows,), dtype=torch.int32, pin_memory=cuda)
                self._buffers = _Buffers(
                    states,
                    ids,
                    RowRing(rows),
                    host_states,
                    host_ids,
                    _bytes(host_states),
                    _bytes(host_ids),
                    RowRing(ring_rows),
                    lane or (CudaLane(device) if cuda else PlainLane()),
                )
            self._open, self._failure = None, ""
        except RuntimeError as error:  # what torch raises without memory, on either side
            self._failure = f"no buffers of {rows} rows on {device} and {ring_rows} in memory: {error}"

    def begin(self, ranges: Sequence[tuple[int, int]], like: torch.Tensor) -> Block:
        """Room for a forward's rows: ``ranges`` are (first, rows) of its stream, ``like`` is that stream. Raises
        ``NoRoomError`` for more rows than the device's buffer has, or has free in time."""
        if self._open is not None:  # of a forward that came to no end
            self._open.buffers.room.give_back(self._open.span)
            self._open = None
        if not self._failure and (self._buffers is None or not self._buffers.fits(like)):
            self.allocate(like.device, like.dtype, like.shape[1])
        buffers = self._buffers
        if buffers is None or self._failure:
            raise NoRoomError("capture_error", self._failure)
        rows, capacity = sum(rows for _, rows in ranges), buffers.room.capacity
        if rows > capacity:
            room = f"{capacity} fit into capture.device_bytes ({self._config.device_bytes})"
            raise NoRoomError("capture_error", f"a forward of {rows} rows: {room}; give SGLang --chunked-prefill-size")
        span = buffers.room.take(rows, self._config.max_wait_seconds)
        if span is None:
            raise NoRoomError("backpressure", f"the device's buffer of {capacity} rows is not emptied")
        self._open = Block(buffers, span, _moves(ranges), buffers.states[span.start : span.stop].unbind(1))
        return self._open

    def fill(self, block: Block, slot: int, states: torch.Tensor, residual: torch.Tensor | None = None) -> None:
        """Put the wanted rows of ``states``, plus ``residual`` if there is one, into ``slot`` of the block: one
        operation of the device. Both are ``[rows, hidden]`` of the buffers' dtype."""
        plane = block.planes[self._index[slot]]
        if plane.shape == states.shape:
            _put(plane, states, residual)
        else:
            for source, target in block.moves:
                _put(plane[target], states[source], None if residual is None else residual[source])
        block.filled.add(slot)

    def is_whole(self, block: Block) -> bool:
        """Whether every slot of this process is filled."""
        return len(block.filled) == len(self._index)

    def hand_over(self, block: Block, input_ids: torch.Tensor, requests: Requests) -> Shipment:
        """Close the block, whose ranges are those of ``requests``; ``input_ids`` has the ids of the whole forward in
        the stream's order. The shipment is to be unloaded, or its room is lost."""
        # Copied before the forward's thread goes on: SGLang puts the next batch's ids into the same tensor (from its
        # eager_runner.py on, 0.5.14).
        ids = block.buffers.ids[block.span.start : block.span.stop]
        if ids.shape == input_ids.shape:
            ids.copy_(input_ids)
        else:
            for source, target in block.moves:
                ids[target].copy_(input_ids[source])
        mark, self._open = block.buffers.lane.mark(), None
        return Shipment(block, mark, requests, self._ledger, self._slots, self._config)

    def refuse(self, requests: Requests, reason: str, detail: str) -> Refusal:
        """Have the requests of a forward skipped, in their turn."""
        return Refusal(requests, reason, detail, self._ledger)

    def gauge(self) -> Gauge:
        """How full the ring is, for the status file."""
        buffers = self._buffers
        if buffers is None:
            return Gauge()
        row, (used, peak) = buffers.row_bytes, buffers.ring.fill()
        return Gauge(buffers.ring.capacity * row, used * row, peak * row, buffers.ring.waited + buffers.room.waited)


Deliver = Callable[[Load], None]
Skipping = Callable[[Sequence[Skip]], None]


@dataclass
class Shipment:
    """A forward's rows, ``block`` of the device's buffer, there when ``mark`` is reached."""

    block: Block
    mark: Any
    requests: Requests
    ledger: Ledger
    slots: list[int]
    config: Config

    def unload(self, deliver: Deliver, skip: Skipping) -> None:
        """Bring the rows into the ring, whose room is waited for ``max_wait_seconds`` at most; then theirs on the
        device is free. What is larger than half the ring goes in parts, as the writers empty it."""
        buffers, span = self.block.buffers, self.block.span
        try:
            buffers.lane.wait(self.mark)
            self._unload(deliver, skip)
        except Exception as error:
            self._lose(self.requests.rows(), ("capture_error", repr(error)), skip)
        finally:
            buffers.room.give_back(span)

    def _unload(self, deliver: Deliver, skip: Skipping) -> None:
        buffers, first = self.block.buffers, self.block.span.start
        ring, patience = buffers.ring, time.monotonic() + self.config.max_wait_seconds
        wanted, skips = self.ledger.settle(self.requests.rows())
        skip(skips)
        most = max(1, ring.capacity // 2)
        groups = groups_of(wanted, min(most, max(1, LOAD_BYTES // buffers.row_bytes)), most)
        for number, group in enumerate(groups):
            size = group[-1].at + group[-1].rows - group[0].at
            span = ring.take(size, max(0.0, patience - time.monotonic()))
            if span is None:
                why = f"{ring.used} of the ring's {ring.capacity} rows wait for the disk"
                self._lose([rows for left in groups[number:] for rows in left], ("backpressure", why), skip)
                return
            load = RingLoad(group, self.slots, span, buffers)
            try:
                buffers.fetch(first + group[0].at, span)
            except Exception as error:
                load.release()
                self._lose(group, ("capture_error", repr(error)), skip)
            else:
                deliver(load)

    def _lose(self, lost: Sequence[Rows], why: tuple[str, str], skip: Skipping) -> None:
        rids = list(dict.fromkeys(rows.rid for rows in lost))
        self.ledger.forget(rids)
        skip([Skip(rid, *why) for rid in rids])


@dataclass
class Refusal:
    """A forward of which nothing is written."""

    requests: Requests
    reason: str
    detail: str
    ledger: Ledger

    def unload(self, deliver: Deliver, skip: Skipping) -> None:  # noqa: ARG002 (a Shipment)
        rids = [rows.rid for rows in self.requests.rows()]
        self.ledger.forget(rids)
        skip([Skip(rid, self.reason, self.detail) for rid in rids])


class RingLoad:
    """Rows of one run on their way to the disk, ``span`` of the ring."""

    def __init__(self, rows: list[Rows], slots: list[int], span: Span, buffers: _Buffers):
        self.rows = rows
        self._slots = slots
        self._span = span
        self._buffers = buffers

    @property
    def run(self) -> str:
        return run_of(self.rows[0].rid)

    @property
    def bytes(self) -> int:
        return (self._span.stop - self._span.start) * self._buffers.row_bytes

    @property
    def rids(self) -> list[str]:
        return [rows.rid for rows in self.rows]

    def pieces(self) -> list[Piece]:
        """The rows where they lie; valid until ``release``."""
        buffers, dtype = self._buffers, dtype_name(self._buffers.host_states.dtype)
        shape, row, shift = list(buffers.host_states.shape[1:]), buffers.row_bytes, self._span.start - self.rows[0].at
        found = []
        for rows in in_turns(self.rows):
            first, last = rows.at + shift, rows.at + shift + rows.rows
            ids, data = buffers.id_bytes[4 * first : 4 * last], buffers.state_bytes[row * first : row * last]
            found.append(Piece(rows.rid, rows.start, dtype, [rows.rows, *shape], self._slots, ids, data))
        return found

    def release(self) -> None:
        """Let the ring have the rows back."""
        self._buffers.ring.give_back(self._span)


def _moves(ranges: Sequence[tuple[int, int]]) -> list[tuple[slice, slice]]:
    """(rows of the stream, rows of the block) that put ``ranges`` one after the other."""
    moves, at = [], 0
    for first, rows in ranges:
        moves.append((slice(first, first + rows), slice(at, at + rows)))
        at += rows
    return moves


def _put(plane: torch.Tensor, states: torch.Tensor, residual: torch.Tensor | None) -> None:
    """Put ``states`` (plus ``residual``) into ``plane``, all ``[rows, hidden]``."""
    many = states.shape[0] >= WIDE_ROWS
    if residual is not None and not many:
        torch.add(states, residual, out=plane)
        return
    value = states if residual is None else states + residual
    if many and value.dtype == plane.dtype and _has_words(value) and _has_words(plane):
        plane.view(torch.int64).copy_(value.view(torch.int64))
    else:
        plane.copy_(value)


def _has_words(tensor: torch.Tensor) -> bool:
    """Whether its rows can be taken for ones of 64-bit items."""
    item = tensor.element_size()
    (row, last), begin = tensor.stride(), tensor.storage_offset()
    return last == 1 and not (row * item % 8 or tensor.shape[1] * item % 8 or begin * item % 8)


def _bytes(tensor: torch.Tensor) -> memoryview:
    return memoryview(tensor.view(torch.uint8).numpy()).cast("B")


def dtype_name(dtype: torch.dtype) -> str:
    """Name of the dtype in safetensors; ``KeyError`` for one that hidden states never have."""
    return {"torch.float32": "F32", "torch.float16": "F16", "torch.bfloat16": "BF16"}[str(dtype)]
