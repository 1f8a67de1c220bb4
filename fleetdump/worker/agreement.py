"""Numbers on captured states: values that no state has, and how far two captures are apart. Pure, on float32 arrays."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from fleetdump.agent.selfcheck_facts import SlotErrors, SlotValues
from fleetdump.worker.capturedrows import Array

COMPARED_ROWS = 512
"""Rows of a prompt that are compared with each other to see whether they moved."""
LIKER = 1e-3
"""By so much another row's cosine must be greater than the own one's: equal tokens have nearly equal rows."""


@dataclass
class Pair:
    """Two captures of the same rows, each ``[rows, slots, hidden]``; ``where`` names them."""

    where: str
    ours: Array
    reference: Array


def row_errors(ours: Array, reference: Array) -> Array:
    """``[rows, slots]``: the largest difference over the largest absolute value of the reference's row. Not a number
    counts as infinite."""
    scale = np.maximum(np.abs(reference).max(axis=-1), np.finfo(np.float32).tiny)
    return np.nan_to_num(np.abs(ours - reference).max(axis=-1) / scale, nan=np.inf)


def moved_rows(ours: Array, reference: Array) -> Array:
    """``[slots]``: how many of the first ``COMPARED_ROWS`` rows are more like another row of ``reference`` (by their
    cosine) than like the one in their place."""
    a = _directions(ours[:COMPARED_ROWS].swapaxes(0, 1))
    b = _directions(reference[:COMPARED_ROWS].swapaxes(0, 1))
    cosines = a @ b.swapaxes(1, 2)  # [slots, rows, rows]
    own = np.diagonal(cosines, axis1=1, axis2=2)
    return (cosines.max(axis=2) > own + LIKER).sum(axis=1)


def compare(pairs: Sequence[Pair]) -> list[SlotErrors]:
    """One record a slot over all ``pairs``; empty without pairs."""
    if not pairs:
        return []
    errors = [row_errors(pair.ours, pair.reference) for pair in pairs]
    moved = sum(moved_rows(pair.ours, pair.reference) for pair in pairs)
    counted = sum(min(len(pair.ours), COMPARED_ROWS) for pair in pairs)
    found = []
    for slot in range(errors[0].shape[1]):
        of_slot = np.concatenate([each[:, slot] for each in errors])
        worst = max(range(len(pairs)), key=lambda n: float(errors[n][:, slot].max()))
        found.append(
            SlotErrors(
                slot=slot,
                rows=len(of_slot),
                median=float(np.median(of_slot)),
                p95=float(np.quantile(of_slot, 0.95, method="higher")),
                largest=float(of_slot.max()),
                moved=float(moved[slot]) / counted,
                where=f"{pairs[worst].where}, row {int(errors[worst][:, slot].argmax())}",
            )
        )
    return found


def note_values(values: list[SlotValues], name: str, ids: Sequence[int], rows: Array) -> None:
    """Add a prompt's rows ``[tokens, slots, hidden]`` to the records of their slots."""
    for record in values:
        of_slot = rows[:, record.slot]
        finite = np.isfinite(of_slot).all(axis=1)
        largest = np.abs(np.where(np.isfinite(of_slot), of_slot, 0)).max(axis=1)
        zero = largest == 0
        constant = (of_slot == of_slot[:, :1]).all(axis=1) & ~zero
        repeated = len(set(ids)) > 2 and bool((of_slot == of_slot[0]).all())
        if not record.where and (not finite.all() or zero.any() or constant.any() or repeated):
            record.where = name
        record.least = min(record.least, float(largest.min())) if record.rows else float(largest.min())
        record.largest = max(record.largest, float(largest.max()))
        record.rows += len(rows)
        record.not_finite += int((~finite).sum())
        record.zero += int((zero & finite).sum())
        record.constant += int(constant.sum())
        record.repeated += int(repeated)


def _directions(states: Array) -> Array:
    """Rows of length 1, zero where they are zero or not finite."""
    states = np.nan_to_num(states, posinf=0, neginf=0)
    length = np.linalg.norm(states, axis=-1, keepdims=True)
    return states / np.maximum(length, np.finfo(np.float32).tiny)
