"""fleetdump's tap in the layer loop of a model that SGLang serves.

The patch puts ``before_layer`` at the head of the loop and ``after_layers`` behind it. Both do nothing unless the
environment variable FLEETDUMP_TAP_CONFIG named a ``tap.json`` when this module was imported. Armed, they copy the
residual stream at the chosen layers and before the final norm, for prompt rows of requests whose rid is fleetdump's,
and hand them to the writer thread of ``fleetdump_tapfiles``.

Law: the model's results stay what they were, no exception leaves this module, the forward's thread does no file I/O,
and whether a collective runs is decided from what all tensor-parallel ranks of a pipeline stage have in common.

Who writes: rank 0 of each attention group, its own requests, and of a pipeline each stage its own layers. In runs of
the self-check the other ranks write the same files once more, below ``ranks/``, to be compared.
"""

from __future__ import annotations

import json
import logging
import os
import re
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from multiprocessing.util import Finalize
from typing import TYPE_CHECKING, Any

from fleetdump_tapfiles import Config, Norm, Piece, Skip, TapWriter
from fleetdump_taplayout import (
    PREFILL_GRAPH,
    UNKNOWN_PLACE,
    Stage,
    batch_refusal,
    is_capturing_graph,
    is_compiling,
    layout,
    prompt_mode,
    refusal,
    stage_of,
    sums_over_replicas,
)

if TYPE_CHECKING:
    import torch

logger = logging.getLogger(__name__)

CONFIG_VARIABLE = "FLEETDUMP_TAP_CONFIG"
MARK = "fleetdump-tap 1"
RID = re.compile(r"fleetdump/[A-Za-z0-9][A-Za-z0-9._-]{0,63}/[^/]+/[1-9][0-9]{0,8}\Z")
SELFCHECK_RID = "fleetdump/selfcheck-"
RANKS = "ranks"
"""Folder in a self-check's run for what ranks write that do not write otherwise."""
REMEMBERED_REQUESTS = 1 << 16
"""How many rids' next positions are kept, to join the chunks of a prompt."""


def before_layer(
    model: Any,
    layer_id: int,
    hidden_states: Any,
    forward_batch: Any,
    residual: torch.Tensor | None = None,
    snapshot: Callable[[Any, Any], torch.Tensor] | None = None,
) -> None:
    """Called before each layer. The stream is ``hidden_states + residual``, or ``snapshot(hidden_states,
    forward_batch)`` on releases that keep the residual in ``forward_batch``."""
    if _tap is not None:
        _tap.before_layer(model, layer_id, _Stream(hidden_states, forward_batch, residual, snapshot))


def after_layers(
    model: Any,
    hidden_states: Any,
    forward_batch: Any,
    residual: torch.Tensor | None = None,
    snapshot: Callable[[Any, Any], torch.Tensor] | None = None,
) -> None:
    """Called behind the loop, before the final norm; arguments as in ``before_layer``."""
    if _tap is not None:
        _tap.after_layers(model, _Stream(hidden_states, forward_batch, residual, snapshot))


def note_requests(batch: Any) -> None:
    """Called where the scheduler makes a batch ready, on releases whose ForwardBatch does not name its requests."""
    if _tap is not None:
        _tap.note_requests(batch)


@dataclass
class _Stream:
    """The residual stream as the loop holds it."""

    hidden_states: Any
    forward_batch: Any
    residual: torch.Tensor | None
    snapshot: Callable[[Any, Any], torch.Tensor] | None

    @property
    def owes_sum(self) -> bool:
        """Whether SGLang has deferred an all-reduce of ``hidden_states`` into the next norm; until 0.5.20, since then
        it keeps account of that itself."""
        return bool(getattr(self.hidden_states, "_sglang_needs_allreduce_fusion", False))

    def value(self) -> torch.Tensor:
        """The complete stream ``[rows >= tokens, hidden]``. May be a view of a live buffer: copy at once. Where SGLang
        has deferred an all-reduce into the next norm this is a collective, on a clone since it may work in place."""
        if self.snapshot is not None:
            return self.snapshot(self.hidden_states, self.forward_batch)
        states = self.hidden_states
        if self.owes_sum:
            from sglang.srt.distributed import tensor_model_parallel_all_reduce

            states = tensor_model_parallel_all_reduce(states.clone())
        return states if self.residual is None else states + self.residual


@dataclass
class _Rows:
    """Rows ``first`` to ``first + rows`` of a forward are positions ``start`` on of request ``rid``."""

    rid: str
    first: int
    rows: int
    start: int


@dataclass
class _Forward:
    """What is being captured of one forward. ``refused`` (on all ranks alike) keeps even the collectives from running;
    ``failed`` only what this rank does with the values. Either is (reason, detail) of the skips."""

    batch: Any
    requests: list[_Rows]
    refused: tuple[str, str] | None
    failed: tuple[str, str] | None = None
    block: torch.Tensor | None = None
    filled: set[int] = field(default_factory=set)

    @property
    def failure(self) -> tuple[str, str] | None:
        return self.refused or self.failed

    @property
    def rows(self) -> int:
        return sum(request.rows for request in self.requests)


class _Tap:
    """The armed tap of one scheduler process."""

    def __init__(self, config: Config):
        self._config = config
        self._armed = False
        self._place = UNKNOWN_PLACE
        self._stage = Stage([], {}, True)
        self._writer: TapWriter | None = None
        self._refusal = ""
        self._forward: _Forward | None = None
        self._batch: Any = None
        self._next: OrderedDict[str, int] = OrderedDict()
        self._noted: tuple[Any, list[str]] | None = None
        """The scheduler's newest batch: its ``prefix_lens``, which the ForwardBatch shares, and its rids."""

    def note_requests(self, batch: Any) -> None:
        try:
            self._noted = (batch.prefix_lens, [request.rid for request in batch.reqs])
        except Exception as error:
            logger.error("fleetdump-tap: %r", error)

    def before_layer(self, model: Any, layer_id: int, stream: _Stream) -> None:
        forward = self._current(model, stream.forward_batch)
        slot = self._stage.before.get(layer_id)
        if forward is not None and slot is not None:
            self._capture(forward, slot, stream)

    def after_layers(self, model: Any, stream: _Stream) -> None:
        forward = self._current(model, stream.forward_batch)
        self._forward = self._batch = None
        if forward is None:
            return
        if self._stage.last:
            self._capture(forward, len(self._config.layers), stream)
            same = self._stage.before.get(len(model.layers))
            if same is not None:
                self._capture(forward, same, stream)
        elif stream.owes_sum:
            forward.failed = (
                "capture_error",
                "the pipeline stage hands on a partial sum, which the next one takes as whole",
            )
        if forward.requests and (self._stage.slots or forward.failure):
            self._finish(forward)

    def _finish(self, forward: _Forward) -> None:
        try:
            self._hand_over(forward, self._writer or self._open_writer())
        except Exception as error:
            logger.error("fleetdump-tap: %r", error)
            if self._writer is not None:
                self._skip_all(forward, self._writer, ("capture_error", repr(error)))

    def _current(self, model: Any, batch: Any) -> _Forward | None:
        if is_compiling():
            return None
        if batch is not self._batch:
            self._batch, self._forward = batch, None
            if not self._armed:
                self._arm(model)
            try:
                self._forward = self._begin(model, batch)
            except Exception as error:
                # Everything up to here depends on what all ranks have in common, so they all come here.
                logger.error("fleetdump-tap: %r", error)
        return self._forward

    def _arm(self, model: Any) -> None:
        """At the first forward: look at the model and the parallel layout, and say in the log what came of it."""
        self._armed = True
        try:
            self._place = place = layout()
            self._refusal = refusal(model, place, self._config.layers)
            if not self._refusal:
                self._stage = stage_of(model, place, self._config.layers)
            if place.attn_tp_rank == 0:
                self._open_writer(_norm(model) if place.is_last_stage else None)
        except Exception as error:
            self._refusal = repr(error)
        self._say(f"refused ({self._refusal})" if self._refusal else "armed", model)

    def _say(self, what: str, model: Any) -> None:
        place, layers = self._place, json.dumps(self._config.layers, separators=(",", ":"))
        where = f"rank={place.tp_rank}/{place.tp_size} pp={place.pp_rank}/{place.pp_size}"
        # At WARNING, so that a server with --log-level warning still says it.
        logger.warning("%s %s %s layers=%s model=%s", MARK, what, where, layers, type(model).__name__)

    def _open_writer(self, norm: Norm | None = None) -> TapWriter:
        """This rank's writer. Ranks that do not write make one for the first request of a self-check."""
        folder = "" if self._place.attn_tp_rank == 0 else RANKS
        self._writer = TapWriter(self._config, self._place.rank, norm, folder)
        Finalize(None, self._writer.stop, exitpriority=100)
        return self._writer

    def _begin(self, model: Any, batch: Any) -> _Forward | None:
        """What is ours in this forward. Whether there is a forward at all to take part in follows from facts that all
        ranks share that a sum of it may run over; ``requests`` are those whose rows this rank writes."""
        has_prompts = prompt_mode(batch)
        if has_prompts and is_capturing_graph() and not self._refusal:
            self._refusal = PREFILL_GRAPH
            self._say(f"refused ({self._refusal})", model)
        why = self._refusal or batch_refusal(batch)
        shared = not why and sums_over_replicas(self._place, batch)
        try:
            requests = self._requests(batch) if has_prompts else []
        except Exception as error:
            if not shared:
                raise
            logger.error("fleetdump-tap: %r", error)
            requests = []
        if not requests and not shared:
            return None
        if self._place.attn_tp_rank != 0:
            requests = [request for request in requests if request.rid.startswith(SELFCHECK_RID)]
        return _Forward(batch, requests, ("capture_error", why) if why else None)

    def _requests(self, batch: Any) -> list[_Rows]:
        """Our requests in this batch, from what the ranks of an attention group have in common."""
        requests, first = [], 0
        for index, rid in enumerate(self._rids(batch)):
            rows = int(batch.extend_seq_lens_cpu[index])
            if RID.match(rid):
                requests.append(_Rows(rid, first, rows, int(batch.extend_prefix_lens_cpu[index])))
            first += rows
        return requests

    def _rids(self, batch: Any) -> list[str]:
        """The batch's requests in order; none for a batch that no scheduler made (a warm-up of graphs)."""
        rids: list[str] | None = getattr(batch, "rids", None)
        if rids is None and self._noted is not None and self._noted[0] is batch.extend_prefix_lens_cpu:
            rids = self._noted[1]
        return rids or []

    def _capture(self, forward: _Forward, slot: int, stream: _Stream) -> None:
        """Put the stream into ``slot`` of the forward's block."""
        if forward.refused:
            return
        try:
            value = stream.value()  # on every rank, before anything that one rank alone could fail at
            if forward.requests and forward.failed is None:
                self._copy(forward, slot, value)
        except Exception as error:
            logger.error("fleetdump-tap: %r", error)
            forward.failed = ("capture_error", repr(error))

    def _copy(self, forward: _Forward, slot: int, value: torch.Tensor) -> None:
        needed = max(request.first + request.rows for request in forward.requests)
        if value.dim() != 2 or value.shape[0] < needed:
            forward.failed = ("rows_mismatch", f"the stream is {list(value.shape)}, the batch has {needed} tokens")
            return
        if forward.block is None:
            forward.block = value.new_empty((forward.rows, len(self._stage.slots), value.shape[1]))
        at, place = 0, self._stage.slots.index(slot)
        for request in forward.requests:
            forward.block[at : at + request.rows, place] = value[request.first : request.first + request.rows]
            at += request.rows
        forward.filled.add(slot)

    def _hand_over(self, forward: _Forward, writer: TapWriter) -> None:
        """Copy the block to the CPU and queue its pieces."""
        failure = forward.failure
        if failure is None and len(forward.filled) != len(self._stage.slots):
            failure = ("capture_error", f"of {len(self._stage.slots)} layers the loop ran {len(forward.filled)}")
        if failure is not None or forward.block is None:
            self._skip_all(forward, writer, failure or ("capture_error", "no layer was captured"))
            return
        block, ids = forward.block.cpu(), forward.batch.input_ids.cpu()
        pieces, skips, at = [], [], 0
        for request in forward.requests:
            rows = block[at : at + request.rows]
            at += request.rows
            if self._is_repeat(request):
                continue
            if not self._continues(request):
                skips.append(Skip(request.rid, "prefix_missing", f"rows begin at {request.start}"))
            elif request.rows:
                pieces.append(
                    _piece(request, rows, ids[request.first : request.first + request.rows], self._stage.slots)
                )
        writer.put(pieces)
        writer.skip(skips)

    def _is_repeat(self, request: _Rows) -> bool:
        """Whether these rows were captured before: a retracted request goes on where a prefix cache still has it."""
        return request.start > 0 and request.start + request.rows <= self._next.get(request.rid, 0)

    def _continues(self, request: _Rows) -> bool:
        """Whether these rows follow on what was captured of the request. Position 0 begins anew (a retracted request
        is prefilled again)."""
        follows = request.start == 0 or self._next.get(request.rid) == request.start
        if follows:
            self._next[request.rid] = request.start + request.rows
            self._next.move_to_end(request.rid)
            if len(self._next) > REMEMBERED_REQUESTS:
                self._next.popitem(last=False)
        return follows

    def _skip_all(self, forward: _Forward, writer: TapWriter, why: tuple[str, str]) -> None:
        for request in forward.requests:
            self._next.pop(request.rid, None)
        writer.skip([Skip(request.rid, *why) for request in forward.requests])


def _piece(request: _Rows, rows: torch.Tensor, ids: torch.Tensor, slots: list[int]) -> Piece:
    import torch

    return Piece(
        rid=request.rid,
        start=request.start,
        dtype=_dtype_name(rows),
        shape=list(rows.shape),
        slots=slots,
        ids=ids.to(torch.int32).numpy().tobytes(),
        data=memoryview(rows.view(torch.uint8).numpy()).cast("B"),
    )


def _dtype_name(tensor: torch.Tensor) -> str:
    """Name of the dtype in safetensors; ``KeyError`` for one that hidden states never have."""
    return {"torch.float32": "F32", "torch.float16": "F16", "torch.bfloat16": "BF16"}[str(tensor.dtype)]


def _norm(model: Any) -> Norm:
    """The final norm as ``rms(x) * weight``; Gemma's kind, which multiplies by 1 + weight, too."""
    import torch

    weight = model.norm.weight.detach().cpu().contiguous()
    if type(model.norm).__name__ == "GemmaRMSNorm":
        weight = weight.float() + 1.0  # float32: 1 + weight in 16 bits would round
    return Norm(weight.view(torch.uint8).numpy().tobytes(), _dtype_name(weight), float(model.norm.variance_epsilon))


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
