"""Measure what the self-check captured. Run by the agent with the server's interpreter, a ``MeasureJob`` on stdin; a
``Measured`` comes out on stdout. What the numbers mean is the agent's to say (``selfcheck_rules``).

numpy is all it needs: every engine has it, and importing it takes a tenth of what torch takes.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np

from fleetdump.agent.protocol import from_json, to_json
from fleetdump.agent.selfcheck_facts import CapturedPrompt, Head, Layers, Measured, MeasureJob, SlotValues
from fleetdump.agent.selfcheck_prompts import LARGE
from fleetdump.worker.agreement import Pair, compare, note_values, row_errors
from fleetdump.worker.capturedrows import STORED, Array, as_float32, read_header_of, read_piece, read_rows
from fleetdump.worker.outputhead import EMBEDDINGS, Checkpoint, NotFound, OutputHead
from fleetdump.worker.tokenise import local_model

ROUNDING = {"F32": 2.0**-24, "F16": 2.0**-11, "BF16": 2.0**-8}
"""Largest relative error of rounding to a dtype."""
ROUNDINGS = 4
"""Roundings to the server's dtype between the stream and a logit: the state, its norm, the product, and one to spare
for the sum's order. Each moves a logit by up to ``ROUNDING`` of the row's largest."""
LEAST_TOLERANCE = 1e-3
"""Of log-probabilities in float32, where the order of sums counts for more than rounding does."""


def measure(job: MeasureJob) -> Measured:
    """All numbers of a check; each prompt's rows are read once."""
    directory = Path(job.directory)
    checkpoint = open_checkpoint(job.model_path)
    slots = len(job.layers) + 1
    values = [SlotValues(slot) for slot in range(slots)]
    layers = _LayerTally(slots, checkpoint)
    wanted = {prompt.same_as for prompt in job.prompts}
    kept: dict[str, Array] = {}
    pairs: dict[bool, list[Pair]] = {False: [], True: []}
    last_rows = []
    for prompt in job.prompts:
        rows = read_rows(directory, prompt.pieces)
        note_values(values, prompt.name, prompt.ids, rows)
        layers.note(prompt.ids, rows)
        last_rows.append(rows[-1])
        if prompt.name in wanted:
            kept[prompt.name] = rows
        if prompt.same_as in kept:
            pair = Pair(f"{prompt.same_as} and {prompt.name}", kept[prompt.same_as], rows)
            pairs[prompt.batch == LARGE].append(pair)
    copies = [
        Pair(f"{copy.prompt}, {copy.rank}", read_piece(directory, copy.theirs), read_piece(directory, copy.ours))
        for copy in job.copies
    ]
    dtype = job.prompts[0].pieces[0].dtype
    return Measured(
        dtype=dtype,
        values=values,
        layers=layers.result(),
        small=compare(pairs[False]),
        large=compare(pairs[True]),
        ranks=compare(copies),
        head=measure_head(job, checkpoint, np.stack(last_rows), ROUNDING[dtype]),
    )


def open_checkpoint(model_path: str) -> Checkpoint:
    """The model's files, wherever they are; a name of the Hub that cannot be looked up has none."""
    try:
        return Checkpoint(Path(local_model(model_path)))
    except (OSError, ValueError, ImportError):
        return Checkpoint(Path(model_path))


class _LayerTally:
    """Which slots are the same in every prompt, and how far each is from the embeddings."""

    def __init__(self, slots: int, checkpoint: Checkpoint):
        self._equal = {(first, second) for second in range(slots) for first in range(second)}
        self._errors: list[list[Array]] = [[] for _ in range(slots)]
        self._depth = checkpoint.depth
        try:
            self._embeddings = checkpoint.weight(EMBEDDINGS)
        except NotFound:
            self._errors = []

    def note(self, ids: list[int], rows: Array) -> None:
        self._equal = {pair for pair in self._equal if np.array_equal(rows[:, pair[0]], rows[:, pair[1]])}
        for slot, errors in enumerate(self._errors):
            errors.append(row_errors(*_at_one_scale(rows[:, slot], self._embeddings.rows(ids)))[:, None])

    def result(self) -> Layers:
        embedding = [float(np.median(np.concatenate(errors))) for errors in self._errors]
        return Layers([list(pair) for pair in sorted(self._equal)], embedding, self._depth)


def _at_one_scale(states: Array, embeddings: Array) -> tuple[Array, Array]:
    """Some models multiply their embeddings by a constant: the one that fits best is taken out."""
    states = np.nan_to_num(states, posinf=0, neginf=0)
    scale = float((states * embeddings).sum() / max(float((embeddings * embeddings).sum()), 1e-30))
    return states[:, None], (scale * embeddings)[:, None]


# --------------------------------------------------------------------------- the head
def measure_head(job: MeasureJob, checkpoint: Checkpoint, last_rows: Array, rounding: float) -> Head:
    """lm_head over ``last_rows`` ``[prompts, slots, hidden]`` against the server's tokens and log-probabilities."""
    answered = [n for n, prompt in enumerate(job.prompts) if prompt.token >= 0]
    if not answered:
        return Head(problem="the server gave no log-probabilities")
    try:
        head = OutputHead(checkpoint)
        norm = read_norm(Path(job.directory) / job.norm)
    except (NotFound, OSError, ValueError) as error:
        return Head(problem=str(error))
    prompts, states = [job.prompts[n] for n in answered], np.nan_to_num(last_rows[answered])
    found = judge_logits(head.logits(norm(states[:, -1])), prompts, rounding)
    if found.agree < found.prompts:
        for name, other in _other_readings(job.layers, states, norm).items():
            found.elsewhere[name] = judge_logits(head.logits(other), prompts, rounding).agree
    return found


def judge_logits(logits: Array, prompts: list[CapturedPrompt], rounding: float) -> Head:
    """``logits`` is ``[prompts, vocabulary]``."""
    head = Head(prompts=len(prompts))
    largest = logits.max(axis=1)
    normaliser = largest + np.log(np.exp(logits - largest[:, None]).sum(axis=1))
    for n, prompt in enumerate(prompts):
        tolerance = max(LEAST_TOLERANCE, ROUNDINGS * rounding * float(np.abs(logits[n]).max()))
        ours = float(logits[n, prompt.token]) if prompt.token < logits.shape[1] else -np.inf
        behind, difference = float(largest[n]) - ours, abs(ours - float(normaliser[n]) - prompt.logprob)
        head.ties += 0 < behind <= tolerance
        head.agree += behind <= tolerance and difference <= tolerance
        head.tolerance = max(head.tolerance, tolerance)
        if not difference <= head.largest_difference:  # a NaN is the largest
            head.largest_difference, head.where = difference, prompt.name
    return head


def _other_readings(layers: list[int], states: Array, norm: Callable[[Array], Array]) -> dict[str, Array]:
    """Normed states in case that the final state stands in another slot, or was taken after the norm."""
    slots = {f"slot {slot} (layer {layer})": norm(states[:, slot]) for slot, layer in enumerate(layers)}
    return {"the final slot without the norm": states[:, -1], **slots}


def read_norm(path: Path) -> Callable[[Array], Array]:
    """The final norm, ``rms(x) * weight``, over the last dimension."""
    header = read_header_of(path)
    weight = next(tensor for tensor in header.tensors if tensor.name == "weight")
    stored = np.fromfile(path, STORED[weight.dtype], weight.shape[0], offset=header.data_start + weight.offset)
    factor, eps = as_float32(stored, weight.dtype), float(header.metadata["eps"])

    def norm(states: Array) -> Array:
        return states / np.sqrt((states.astype(np.float64) ** 2).mean(axis=-1, keepdims=True) + eps) * factor

    return norm


def main() -> None:
    """Entry point of ``python -m fleetdump.worker.selfcheck``."""
    job = from_json(MeasureJob, json.load(sys.stdin))
    print(json.dumps(to_json(measure(job))))


if __name__ == "__main__":
    main()
