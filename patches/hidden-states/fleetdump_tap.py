"""fleetdump's tap in the layer loop of a model that SGLang serves.

The patch puts ``before_layer`` at the head of the loop and ``after_layers`` behind it. Both do nothing unless the
environment variable FLEETDUMP_TAP_CONFIG named a ``tap.json`` when this module was imported. Armed, they copy the
residual stream at the chosen layers and before the final norm, for prompt rows of requests whose rid is fleetdump's,
into the buffers of ``fleetdump_tapblock``, from which the threads of ``fleetdump_tapfiles`` take them.

Law: the model's results stay what they were, no exception leaves this module, the forward's thread does no file I/O,
and whether a collective runs is decided from what all tensor-parallel ranks of a pipeline stage have in common.

Who writes: rank 0 of each attention group, its own requests, and of a pipeline each stage its own layers. In runs of
the self-check the other ranks write the same files once more, below ``ranks/``, to be compared.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from multiprocessing.util import Finalize
from typing import Any

import torch
from fleetdump_tapblock import Block, Blocks, NoRoomError, dtype_name
from fleetdump_tapfiles import TapWriter
from fleetdump_taplayout import (
    PREFILL_GRAPH,
    UNKNOWN_PLACE,
    Stage,
    batch_refusal,
    is_capturing_graph,
    is_compiling,
    largest_forward,
    layout,
    prompt_mode,
    refusal,
    stage_of,
    sums_over_replicas,
)
from fleetdump_taprecords import Config, Norm
from fleetdump_taprows import OUR_RID, SELFCHECK_RID, Requests

logger = logging.getLogger(__name__)

CONFIG_VARIABLE = "FLEETDUMP_TAP_CONFIG"
MARK = "fleetdump-tap 1"
RANKS = "ranks"
"""Folder in a self-check's run for what ranks write that do not write otherwise."""
RANKS_BYTES = 256 << 20
"""What such ranks have for each of their buffers: a self-check is small."""
NO_REQUESTS = Requests([], [], [], [])

Snapshot = Callable[[Any, Any], "torch.Tensor"]


def before_layer(
    model: Any,
    layer_id: int,
    hidden_states: Any,
    forward_batch: Any,
    residual: torch.Tensor | None = None,
    snapshot: Snapshot | None = None,
) -> None:
    """Called before each layer, unless ``forward_batch`` is ``idle``. The stream is ``hidden_states + residual``, or
    ``snapshot(hidden_states, forward_batch)`` on releases that keep the residual in ``forward_batch``."""
    tap = _tap
    if tap is not None and (forward_batch is tap.seen or tap.look(model, forward_batch)):
        slot, forward = tap.wanted.get(layer_id), tap.forward
        if slot is not None and forward is not None:
            tap.capture(forward, slot, _Stream(hidden_states, residual, snapshot))


def after_layers(
    model: Any,
    hidden_states: Any,
    forward_batch: Any,
    residual: torch.Tensor | None = None,
    snapshot: Snapshot | None = None,
) -> None:
    """Called behind the loop, before the final norm; arguments as in ``before_layer``."""
    global idle
    tap, skipped, idle = _tap, idle, None
    if tap is None or forward_batch is skipped:
        return
    if forward_batch is tap.seen or tap.look(model, forward_batch):
        forward, tap.forward, tap.seen = tap.forward, None, None
        if forward is not None:
            tap.finish(model, forward, _Stream(hidden_states, residual, snapshot))


def note_requests(batch: Any) -> None:
    """Called where the scheduler makes a batch ready, on releases whose ForwardBatch does not name its requests."""
    if _tap is not None:
        _tap.note_requests(batch)


@dataclass(slots=True)
class _Stream:
    """The residual stream as the loop holds it."""

    states: Any
    residual: torch.Tensor | None
    snapshot: Snapshot | None

    @property
    def owes_sum(self) -> bool:
        """Whether SGLang has deferred an all-reduce of ``states`` into the next norm; until 0.5.20, since then it
        keeps account of that itself."""
        return bool(getattr(self.states, "_sglang_needs_allreduce_fusion", False))

    def complete(self, batch: Any) -> None:
        """Make the stream ``states + residual``, ``[rows >= tokens, hidden]``, of complete values. May be a view of a
        live buffer: copy at once. Where SGLang has deferred an all-reduce into the next norm this is a collective, on a
        clone since it may work in place."""
        if self.snapshot is not None:
            self.states, self.residual, self.snapshot = self.snapshot(self.states, batch), None, None
        elif self.owes_sum:
            from sglang.srt.distributed import tensor_model_parallel_all_reduce

            self.states = tensor_model_parallel_all_reduce(self.states.clone())
        if self.residual is not None and self.residual.dtype != self.states.dtype:
            self.states, self.residual = self.states + self.residual, None


@dataclass(slots=True)
class _Forward:
    """What is being captured of one forward: ``ranges`` of its rows. ``refused`` (on all ranks alike) keeps even the
    collectives from running; ``failed`` only what this rank does with the values. Either is (reason, detail) of the
    skips."""

    batch: Any
    requests: Requests
    ranges: list[tuple[int, int]]
    refused: tuple[str, str] | None
    failed: tuple[str, str] | None = None
    block: Block | None = None

    @property
    def needed(self) -> int:
        """Rows that the stream must have."""
        return sum(self.ranges[-1])

    @property
    def failure(self) -> tuple[str, str] | None:
        return self.refused or self.failed


class _Tap:
    """The armed tap of one scheduler process."""

    def __init__(self, config: Config):
        self._config = config
        self._armed = False
        self._place = UNKNOWN_PLACE
        self._stage = Stage([], {}, True)
        self._writer: TapWriter | None = None
        self._blocks = Blocks(config, [])
        self._refusal = ""
        self._noted: tuple[Any, list[str]] | None = None
        """The scheduler's newest batch: its ``prefix_lens``, which the ForwardBatch shares, and its rids."""
        self.seen: Any = None
        """The ForwardBatch whose loop is running, if something of it is captured: rows of ours, or a sum to take part
        in."""
        self.forward: _Forward | None = None
        """What is captured of it."""
        self.wanted: dict[int, int] = {}
        """Slots by the layer before which they are taken; none before the first forward."""

    def note_requests(self, batch: Any) -> None:
        try:
            self._noted = (batch.prefix_lens, [request.rid for request in batch.reqs])
        except Exception as error:
            logger.error("fleetdump-tap: %r", error)

    def look(self, model: Any, batch: Any) -> bool:
        """Whether something is to be captured of a forward that begins."""
        if is_compiling():
            return False
        global idle
        self.seen = self.forward = idle = None
        if not self._armed:
            self._arm(model)
        try:
            self.forward = self._begin(model, batch)
        except Exception as error:
            # Everything up to here depends on what all ranks have in common, so they all come here.
            logger.error("fleetdump-tap: %r", error)
        if self.forward is None:
            idle = batch
            return False
        self.seen = batch
        return True

    def capture(self, forward: _Forward, slot: int, stream: _Stream) -> None:
        """Put the stream into ``slot`` of the forward's block."""
        if forward.refused:
            return
        try:
            stream.complete(forward.batch)  # on every rank, before anything that one rank alone could fail at
            if forward.ranges and forward.failed is None:
                self._copy(forward, slot, stream)
        except Exception as error:
            logger.error("fleetdump-tap: %r", error)
            forward.failed = ("capture_error", repr(error))

    def finish(self, model: Any, forward: _Forward, stream: _Stream) -> None:
        """Capture the stream behind the loop, and hand everything over."""
        if self._stage.last:
            self.capture(forward, len(self._config.layers), stream)
            same = self._stage.before.get(len(model.layers))
            if same is not None:
                self.capture(forward, same, stream)
        elif stream.owes_sum:
            forward.failed = (
                "capture_error",
                "the pipeline stage hands on a partial sum, which the next one takes as whole",
            )
        if any(forward.requests.wanted) and (self._stage.slots or forward.failure):
            try:
                self._hand_over(forward, self._writer or self._open_writer())
            except Exception as error:
                logger.error("fleetdump-tap: %r", error)
                if self._writer is not None:
                    self._writer.take(self._blocks.refuse(forward.requests, "capture_error", repr(error)))

    def _arm(self, model: Any) -> None:
        """At the first forward: look at the model and the parallel layout, and say in the log what came of it."""
        self._armed = True
        try:
            self._place = place = layout()
            self._refusal = refusal(model, place, self._config.layers)
            if not self._refusal:
                self._stage = stage_of(model, place, self._config.layers)
                self.wanted = self._stage.before
            self._make_blocks(model)
            if place.attn_tp_rank == 0:
                self._open_writer(_norm(model) if place.is_last_stage else None)
        except Exception as error:
            self._refusal = repr(error)
        self._say(f"refused ({self._refusal})" if self._refusal else "armed", model)

    def _make_blocks(self, model: Any) -> None:
        """The buffers, allocated at once where it is known what for: pinning memory takes a second, and the first
        forward is a warm-up."""
        place, writes = self._place, self._place.attn_tp_rank == 0
        size = RANKS_BYTES if not writes else 0
        config = replace(self._config, ring_bytes=size, device_bytes=size) if size else self._config
        self._blocks = Blocks(config, self._stage.slots, largest_forward())
        if writes and place.is_last_stage and not self._refusal:
            weight = model.norm.weight
            self._blocks.allocate(weight.device, weight.dtype, weight.shape[-1])

    def _say(self, what: str, model: Any) -> None:
        place, layers = self._place, json.dumps(self._config.layers, separators=(",", ":"))
        where = f"rank={place.tp_rank}/{place.tp_size} pp={place.pp_rank}/{place.pp_size}"
        # At WARNING, so that a server with --log-level warning still says it.
        logger.warning("%s %s %s layers=%s model=%s", MARK, what, where, layers, type(model).__name__)

    def _open_writer(self, norm: Norm | None = None) -> TapWriter:
        """This rank's writer. Ranks that do not write make one for the first request of a self-check."""
        folder = "" if self._place.attn_tp_rank == 0 else RANKS
        self._writer = TapWriter(self._config, self._place.rank, norm, folder, self._blocks.gauge)
        Finalize(None, self._writer.stop, exitpriority=100)
        return self._writer

    def _begin(self, model: Any, batch: Any) -> _Forward | None:
        """What is ours in this forward. Whether there is a forward at all to take part in follows from facts that all
        ranks share that a sum of it may run over; ``requests`` are those whose rows this rank writes."""
        if self._is_nobodys(batch):
            return None
        has_prompts = prompt_mode(batch)
        if has_prompts and is_capturing_graph() and not self._refusal:
            self._refusal = PREFILL_GRAPH
            self._say(f"refused ({self._refusal})", model)
        why = self._refusal or batch_refusal(batch)
        shared = not why and sums_over_replicas(self._place, batch)
        try:
            requests = self._requests(batch, OUR_RID) if has_prompts else NO_REQUESTS
        except Exception as error:
            if not shared:
                raise
            logger.error("fleetdump-tap: %r", error)
            requests = NO_REQUESTS
        if not shared and not any(requests.wanted):
            return None
        if self._place.attn_tp_rank != 0 and requests.wanted:
            requests = self._requests(batch, SELFCHECK_RID)
        return _Forward(batch, requests, requests.ranges(), ("capture_error", why) if why else None)

    def _is_nobodys(self, batch: Any) -> bool:
        """Whether the scheduler made this batch of others' requests alone, which all ranks see alike: the usual case on
        a server that is not ours alone, so it is told first."""
        rids: list[str] = getattr(batch, "rids", None) or []
        whole = self._place.attn_dp_size == 1 and bool(rids)
        return whole and not any(rid.startswith(OUR_RID) for rid in rids)

    def _requests(self, batch: Any, beginning: str) -> Requests:
        """The batch's requests, from what the ranks of an attention group have in common."""
        rids = self._rids(batch)
        return Requests.of(rids, batch.extend_seq_lens_cpu, batch.extend_prefix_lens_cpu, beginning)

    def _rids(self, batch: Any) -> list[str]:
        """The batch's requests in order; none for a batch that no scheduler made (a warm-up of graphs)."""
        rids: list[str] | None = getattr(batch, "rids", None)
        if rids is None and self._noted is not None and self._noted[0] is batch.extend_prefix_lens_cpu:
            rids = self._noted[1]
        return rids or []

    def _copy(self, forward: _Forward, slot: int, stream: _Stream) -> None:
        states, residual = stream.states, stream.residual
        if (
            states.dim() != 2
            or states.shape[0] < forward.needed
            or (residual is not None and residual.shape != states.shape)
        ):
            why = f"the stream is {list(states.shape)}, the batch has {forward.needed} tokens"
            forward.failed = ("rows_mismatch", why)
            return
        try:
            if forward.block is None:
                forward.block = self._blocks.begin(forward.ranges, states)
            self._blocks.fill(forward.block, slot, states, residual)
        except NoRoomError as error:
            forward.failed = (error.reason, str(error))

    def _hand_over(self, forward: _Forward, writer: TapWriter) -> None:
        """Leave the block to the writer's threads."""
        failure, block = forward.failure, forward.block
        if failure is None and forward.ranges and (block is None or not self._blocks.is_whole(block)):
            ran = len(block.filled) if block is not None else 0
            failure = ("capture_error", f"of {len(self._stage.slots)} layers the loop ran {ran}")
        if failure is not None:
            writer.take(self._blocks.refuse(forward.requests, *failure))
        elif block is not None:
            writer.take(self._blocks.hand_over(block, forward.batch.input_ids, forward.requests))


def _norm(model: Any) -> Norm:
    """The final norm as ``rms(x) * weight``; Gemma's kind, which multiplies by 1 + weight, too."""
    weight = model.norm.weight.detach().cpu().contiguous()
    if type(model.norm).__name__ == "GemmaRMSNorm":
        weight = weight.float() + 1.0  # float32: 1 + weight in 16 bits would round
    return Norm(
        weight.view(torch.uint8).numpy().tobytes(), dtype_name(weight.dtype), float(model.norm.variance_epsilon)
    )


def _load() -> _Tap | None:
    path = os.environ.get(CONFIG_VARIABLE)
    if not path:
        return None
    try:
        return _Tap(Config.load(path))
    except (OSError, ValueError, TypeError) as error:
        logger.error("%s refused (%s=%s cannot be read: %s)", MARK, CONFIG_VARIABLE, path, error)
        return None


_tap = _load()
idle: Any = None
"""The ForwardBatch whose loop is running, if nothing of it is captured. On a server that is not ours alone that is the
usual case, so the patched line itself looks here and calls nothing."""
