"""The way of the rows from the model's forward to the writer threads (docs/performance.md of fleetdump).

A forward gathers the wanted rows of all its layers into one ``[rows, slots, hidden]`` block of a buffer on the
model's device. At its end it marks the block as ready and goes on; a courier thread copies it, on a stream of its own,
into a ring of pinned host memory; what the writers have written makes room in the ring. Both buffers are allocated
once. The forward's thread waits for room at most ``max_wait_seconds``, its stream for nothing. On the CPU the same code
runs with plain copies.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from fleetdump_taprecords import Config, Gauge, Piece, run_of
from fleetdump_tapring import RowRing, Span

if TYPE_CHECKING:
    import torch

LOAD_BYTES = 128 << 20
"""What goes to the writers at once, unless a single piece is larger."""
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
        """A point behind all that the current stream has been given so far. The forward's thread calls it."""

    def fetch(self, mark: Any, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
        """Copy (target, source) pairs when ``mark`` is reached; returns when they are done. The courier calls it."""


class CudaLane:
    """A stream of its own. One copy at a time is given to the device, of at most ``COPY_BYTES``: the engine that copies
    to the host serves in order, and the forward's own small copies (the next token's ids) must not queue behind half a
    gigabyte. Events sleep instead of spinning: waiting costs the forward no core."""

    def __init__(self, device: torch.device):
        import torch

        self._cuda = torch.cuda
        self._stream = torch.cuda.Stream(device)
        self._done = torch.cuda.Event(blocking=True)

    def mark(self) -> Any:
        event = self._cuda.Event(blocking=True)
        event.record(self._cuda.current_stream(self._stream.device))
        return event

    def fetch(self, mark: Any, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
        mark.synchronize()
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

    def fetch(self, mark: Any, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:  # noqa: ARG002 (a Lane)
        for target, source in pairs:
            target.copy_(source)


# --------------------------------------------------------------------------- blocks
@dataclass(slots=True)
class Rows:
    """Rows of one request in a block: ``at`` is its first row there, ``start`` that row's position in the prompt."""

    rid: str
    at: int
    rows: int
    start: int


@dataclass
class Block:
    """The block of one forward, rows ``span`` of the device's buffer: ``moves`` says which rows of the stream go to
    which rows there."""

    span: Span
    moves: list[tuple[slice, slice]]
    filled: set[int] = field(default_factory=set)


@dataclass
class _Buffers:
    """States ``[rows, slots, hidden]`` and ids ``[rows]`` (int32) on the device, and the same in host memory."""

    states: torch.Tensor
    ids: torch.Tensor
    host_states: torch.Tensor
    host_ids: torch.Tensor
    state_bytes: memoryview
    id_bytes: memoryview

    @property
    def row_bytes(self) -> int:
        slots, hidden = self.states.shape[1:]
        return int(slots * hidden * self.states.element_size())


class Blocks:
    """The buffers of one process and what is on its way in them.

    ``slots`` are the numbers of the slots that this process fills, in the order of the block's second dimension.
    ``largest`` is the most rows that one forward can have, 0 when that is not known. Only the forward's thread calls.
    """

    def __init__(self, config: Config, slots: Sequence[int], largest: int = 0):
        self._config = config
        self._index = {slot: index for index, slot in enumerate(slots)}
        self._largest = largest
        self._buffers: _Buffers | None = None
        self._failure = ""
        self._lane: Lane = PlainLane()
        self._device = RowRing(0)
        self._ring = RowRing(0)
        self._open: Block | None = None
        """Begun and not handed over."""

    def allocate(self, device: torch.device, dtype: torch.dtype, hidden: int, lane: Lane | None = None) -> None:
        """Allocate the buffers for a stream of that dtype and width; when they are there already, do nothing. Host
        memory for CUDA is pinned (about 0.5 s a GiB). Failing is remembered: ``begin`` tells it."""
        import torch

        has = self._buffers
        if has is not None and (has.states.dtype, has.states.shape[2], has.states.device) == (dtype, hidden, device):
            return
        row = len(self._index) * hidden * dtype.itemsize
        device_rows = self._config.device_bytes // row
        if self._largest:
            device_rows = min(device_rows, 2 * self._largest)
        ring_rows = self._config.ring_bytes // row
        cuda = device.type == "cuda"
        try:
            # Plain tensors, whatever mode the forward runs in: they outlive it.
            with torch.inference_mode(False), torch.no_grad():
                states = torch.empty((device_rows, len(self._index), hidden), dtype=dtype, device=device)
                ids = torch.empty((device_rows,), dtype=torch.int32, device=device)
                host_states = torch.empty((ring_rows, len(self._index), hidden), dtype=dtype, pin_memory=cuda)
                host_ids = torch.empty((ring_rows,), dtype=torch.int32, pin_memory=cuda)
                self._buffers = _Buffers(states, ids, host_states, host_ids, _bytes(host_states), _bytes(host_ids))
            self._lane = lane or (CudaLane(device) if cuda else PlainLane())
        except RuntimeError as error:  # what torch raises without memory, on either side
            self._failure = f"no buffers of {device_rows} rows on {device} and {ring_rows} in memory: {error}"
            return
        self._device, self._ring = RowRing(device_rows), RowRing(ring_rows)
        self._open, self._failure = None, ""

    def begin(self, ranges: Sequence[tuple[int, int]], like: torch.Tensor) -> Block:
        """Room for a forward's rows: ``ranges`` are (first, rows) of its stream, ``like`` is that stream. Raises
        ``NoRoomError`` for more rows than the device's buffer has, or has free in time."""
        if self._open is not None:  # of a forward that came to no end
            self._device.give_back(self._open.span)
            self._open = None
        self.allocate(like.device, like.dtype, like.shape[1])
        rows = sum(rows for _, rows in ranges)
        if self._buffers is None:
            raise NoRoomError("capture_error", self._failure)
        if rows > self._device.capacity:
            room = f"{self._device.capacity} fit into capture.device_bytes ({self._config.device_bytes})"
            raise NoRoomError("capture_error", f"a forward of {rows} rows: {room}; give SGLang --chunked-prefill-size")
        span = self._device.take(rows, self._config.max_wait_seconds)
        if span is None:
            raise NoRoomError("backpressure", f"the device's buffer of {self._device.capacity} rows is not emptied")
        self._open = Block(span, _moves(ranges, span.start))
        return self._open

    def fill(self, block: Block, slot: int, value: torch.Tensor) -> None:
        """Copy the wanted rows of ``value`` (``[rows, hidden]``) into ``slot`` of the block."""
        assert self._buffers is not None
        index = self._index[slot]
        for source, target in block.moves:
            self._buffers.states[target, index].copy_(value[source])
        block.filled.add(slot)

    def is_whole(self, block: Block) -> bool:
        """Whether every slot of this process is filled."""
        return len(block.filled) == len(self._index)

    def hand_over(
        self, block: Block, input_ids: torch.Tensor, wanted: Sequence[Rows], take: Callable[[Sequence[Load]], None]
    ) -> list[Rows]:
        """Give the rows of ``wanted`` with their ids (``input_ids`` has those of the whole forward, in the stream's
        order) to ``take``, whose threads fetch them into the ring and write them. Returns the requests for which the
        ring had no room in time; a forward larger than the ring passes as the writers empty it."""
        assert self._buffers is not None
        for source, target in block.moves:
            self._buffers.ids[target].copy_(input_ids[source])
        self._open, freeing = None, _Countdown(self._device, block.span)
        try:
            return self._send(block, wanted, take, freeing)
        finally:
            freeing.drop()

    def no_room(self) -> str:
        """Why ``hand_over`` left requests out, for people."""
        used, _ = self._ring.fill()
        return f"{used} of the ring's {self._ring.capacity} rows wait for the disk"

    def gauge(self) -> Gauge:
        """How full the ring is, for the status file."""
        row = self._buffers.row_bytes if self._buffers else 0
        used, peak = self._ring.fill()
        return Gauge(self._ring.capacity * row, used * row, peak * row, self._ring.waited)

    def _send(
        self, block: Block, wanted: Sequence[Rows], take: Callable[[Sequence[Load]], None], freeing: _Countdown
    ) -> list[Rows]:
        assert self._buffers is not None
        mark, patience = self._lane.mark(), time.monotonic() + self._config.max_wait_seconds
        groups = _groups(wanted, max(1, LOAD_BYTES // self._buffers.row_bytes))
        loads: list[Load] = []
        for number, group in enumerate(groups):
            first, rows = group[0].at, group[-1].at + group[-1].rows - group[0].at
            span = self._ring.take(rows, 0.0)
            if span is None:
                take(loads)  # before waiting: they are what makes room
                loads = []
                span = self._ring.take(rows, max(0.0, patience - time.monotonic()))
            if span is None:
                return [rows for left in groups[number:] for rows in left]
            freeing.add()
            source = slice(block.span.start + first, block.span.start + first + rows)
            loads.append(Load(group, list(self._index), _Transfer(self._lane, mark, source, freeing), span, self))
        take(loads)
        return []


class _Countdown:
    """Gives a span back when all that read it have dropped it."""

    def __init__(self, ring: RowRing, span: Span):
        self._ring = ring
        self._span = span
        self._count = 1
        self._lock = threading.Lock()

    def add(self) -> None:
        with self._lock:
            self._count += 1

    def drop(self) -> None:
        with self._lock:
            self._count -= 1
            last = self._count == 0
        if last:
            self._ring.give_back(self._span)


@dataclass
class _Transfer:
    """Rows ``source`` of the device's buffer, to be fetched when ``mark`` is reached."""

    lane: Lane
    mark: Any
    source: slice
    freeing: _Countdown


class Load:
    """Rows of one run on their way to the disk, with what is reserved for them in the ring."""

    def __init__(self, rows: list[Rows], slots: list[int], transfer: _Transfer, span: Span, blocks: Blocks):
        assert blocks._buffers is not None
        self.rows = rows
        self._slots = slots
        self._transfer = transfer
        self._span = span
        self._ring = blocks._ring
        self._buffers = blocks._buffers

    @property
    def run(self) -> str:
        return run_of(self.rows[0].rid)

    @property
    def bytes(self) -> int:
        return (self._span.stop - self._span.start) * self._buffers.row_bytes

    @property
    def rids(self) -> list[str]:
        return [rows.rid for rows in self.rows]

    def fetch(self) -> None:
        """Copy the rows into the ring; their place on the device is free then."""
        buffers, source, target = self._buffers, self._transfer.source, slice(self._span.start, self._span.stop)
        pairs = [
            (buffers.host_states[target], buffers.states[source]),
            (buffers.host_ids[target], buffers.ids[source]),
        ]
        try:
            self._transfer.lane.fetch(self._transfer.mark, pairs)
        finally:
            self._transfer.freeing.drop()

    def pieces(self) -> list[Piece]:
        """The rows where they lie; valid until ``release``."""
        buffers, dtype = self._buffers, dtype_name(self._buffers.host_states.dtype)
        shape, row, shift = list(buffers.host_states.shape[1:]), buffers.row_bytes, self._span.start - self.rows[0].at
        found = []
        for rows in self.rows:
            first, last = rows.at + shift, rows.at + shift + rows.rows
            ids, data = buffers.id_bytes[4 * first : 4 * last], buffers.state_bytes[row * first : row * last]
            found.append(Piece(rows.rid, rows.start, dtype, [rows.rows, *shape], self._slots, ids, data))
        return found

    def release(self) -> None:
        """Let the ring have the rows back."""
        self._ring.give_back(self._span)


def _moves(ranges: Sequence[tuple[int, int]], start: int) -> list[tuple[slice, slice]]:
    """(rows of the stream, rows of the buffer) that put ``ranges`` one after the other from row ``start`` on; ranges
    that touch are one."""
    moves = []
    for first, rows in _merged(ranges):
        moves.append((slice(first, first + rows), slice(start, start + rows)))
        start += rows
    return moves


def _merged(ranges: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    merged: list[tuple[int, int]] = []
    for first, rows in ranges:
        if merged and sum(merged[-1]) == first:
            merged[-1] = (merged[-1][0], merged[-1][1] + rows)
        elif rows:
            merged.append((first, rows))
    return merged


def _groups(wanted: Sequence[Rows], limit: int) -> list[list[Rows]]:
    """Neighbours of one run, at most ``limit`` rows together unless one alone has more."""
    groups: list[list[Rows]] = []
    run, end, size = "", -1, 0
    for rows in wanted:
        its_run = run_of(rows.rid)
        if rows.at != end or size + rows.rows > limit or its_run != run:
            groups.append([])
            run, size = its_run, 0
        groups[-1].append(rows)
        end, size = rows.at + rows.rows, size + rows.rows
    return groups


def _bytes(tensor: torch.Tensor) -> memoryview:
    import torch

    return memoryview(tensor.view(torch.uint8).numpy()).cast("B")


def dtype_name(dtype: torch.dtype) -> str:
    """Name of the dtype in safetensors; ``KeyError`` for one that hidden states never have."""
    return {"torch.float32": "F32", "torch.float16": "F16", "torch.bfloat16": "BF16"}[str(dtype)]
