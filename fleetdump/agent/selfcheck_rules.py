"""Facts in, findings out: which numbers pass the self-check. Pure; why some don't is said in ``selfcheck_causes``.

docs/selfcheck.md says where the limits come from.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Dict, List, Optional, Sequence

from fleetdump.agent.protocol import Finding
from fleetdump.agent.selfcheck_facts import Facts, Head, PromptFate, SlotErrors

HEAD_SHARE = 0.98
"""Of the prompts, at least so many must get the server's own next token."""
EXAMPLES = 3
UNKNOWN_FIX = "do not extract with this patch and engine: what it writes is wrong"


@dataclass(frozen=True)
class Limits:
    """Largest errors of two captures of the same rows, over a slot's rows."""

    median: float
    p95: float
    largest: float


SINGLE_ROWS_MAY_FLIP = 10.0
LIMITS = {
    "F32": Limits(1e-4, 1e-4, 1e-4),
    "F16": Limits(0.01, 0.1, SINGLE_ROWS_MAY_FLIP),
    "BF16": Limits(0.05, 0.2, SINGLE_ROWS_MAY_FLIP),
}
"""Between a prompt alone and in a batch. In 16 bits single rows may go through other experts."""
RANK_LIMITS = {"F32": Limits(1e-5, 1e-5, 1e-4), "F16": Limits(1e-3, 4e-3, 1e-1), "BF16": Limits(8e-3, 3e-2, 1e-1)}
"""Between ranks, which get the same sums: nothing but their last bits may differ, two roundings in the middle."""
EMBEDDING_LIMIT = {"F32": 1e-5, "F16": 2e-3, "BF16": 1e-2}
"""The stream that enters layer 0 is the embedding, rounded once."""


def findings(facts: Facts) -> List[Finding]:
    """One finding a check, in the order of the table that people read."""
    found = [_requests(facts), _rows(facts), _ids(facts), check_ranks(facts)]
    if facts.measured is not None:
        found += [check_batches(facts), _values(facts), _layers(facts), check_head(facts)]
    return found


# --------------------------------------------------------------------------- checks
def _requests(facts: Facts) -> Finding:
    failed = [fate for fate in facts.prompts if fate.error]
    if failed:
        return _bad("requests", f"{len(failed)} of {len(facts.prompts)} requests failed", _examples(failed, "error"))
    tokens = sum(fate.tokens for fate in facts.prompts)
    text = f"{len(facts.prompts)} prompts of {min(f.tokens for f in facts.prompts)} to "
    text += f"{max(f.tokens for f in facts.prompts)} tokens, {tokens} in all"
    return Finding("requests", "ok", f"{text}; {facts.shortened}" if facts.shortened else text)


def _rows(facts: Facts) -> Finding:
    sent = [fate for fate in facts.prompts if not fate.error]
    short = [fate for fate in sent if fate.rows != fate.tokens or fate.skip or fate.fault or fate.unreadable]
    rows = sum(fate.rows for fate in sent)
    wanted = sum(fate.tokens for fate in sent)
    if not short:
        return Finding("rows", "ok", f"{rows} rows of {wanted} tokens")
    text = f"{len(short)} of {len(sent)} prompts were not captured whole: {rows} rows of {wanted} tokens"
    return _bad("rows", text, _examples(short, "fate"))


def _ids(facts: Facts) -> Finding:
    wrong = [fate for fate in facts.prompts if fate.other_ids]
    captured = [fate for fate in facts.prompts if fate.rows]
    if wrong:
        text = f"{len(wrong)} of {len(captured)} prompts have rows of other ids than were sent"
        return _bad("ids", text, ", ".join(fate.name for fate in wrong[:EXAMPLES]))
    return Finding("ids", "ok", f"{len(captured)} prompts: saved ids are those that were sent")


def check_ranks(facts: Facts) -> Finding:
    ranks = facts.ranks
    if ranks.expected <= 1:
        return Finding("ranks", "ok", "one rank holds each row: nothing to compare")
    if not any(fate.rows for fate in facts.prompts):
        return Finding("ranks", "warning", "not checked: no rows to compare")
    if not ranks.writers:
        text = f"ranks did not write: {ranks.expected} hold each row, and only one wrote its own"
        return _bad("ranks", text, "the patch's tap writes the others' below ranks/ for a self-check")
    if ranks.lacking:
        text = f"{ranks.lacking} rows are not written by all {ranks.expected} ranks"
        return _bad("ranks", text, "; ".join(ranks.skips[:EXAMPLES]) or f"wrote: {', '.join(ranks.writers)}")
    text = f"{ranks.rows} rows of {ranks.expected} ranks, {ranks.differing} with other bytes"
    if ranks.unreadable:
        return _bad("ranks", text, ranks.unreadable)
    if not ranks.differing:
        return Finding("ranks", "ok", text)
    if facts.measured is None:
        return _bad("ranks", text, "they could not be compared")
    worst = beyond(facts.measured.ranks, RANK_LIMITS[facts.measured.dtype])
    if worst is not None:
        return _bad("ranks", text, _numbers(worst))
    return Finding("ranks", "ok", f"{text}; {_numbers(_largest(facts.measured.ranks))}")


def check_batches(facts: Facts) -> Finding:
    measured = facts.measured
    assert measured is not None
    errors = measured.small + measured.large
    if not errors:
        return Finding("batches", "warning", "not checked: no prompt was captured twice")
    limits = LIMITS[measured.dtype]
    worst = beyond(errors, limits)
    allowed = f"allowed {limits.median:g}, {limits.p95:g}"
    if worst is not None:
        return _bad("batches", f"alone and in a batch differ: {_numbers(worst)}", allowed)
    return Finding("batches", "ok", f"alone and in a batch: {_numbers(_largest(errors))}; {allowed}")


def _values(facts: Facts) -> Finding:
    measured = facts.measured
    assert measured is not None
    faults = []
    for slot in measured.values:
        counts = {
            "not finite": slot.not_finite,
            "all zero": slot.zero,
            "one value only": slot.constant,
        }
        said = [f"{count} of {slot.rows} rows {what}" for what, count in counts.items() if count]
        if slot.repeated:
            said.append(f"{slot.repeated} prompts with the same row for all tokens")
        if said:
            faults.append(f"slot {slot.slot}: {', '.join(said)}, first in {slot.where}")
    if faults:
        return _bad("values", "; ".join(faults[:EXAMPLES]))
    least, largest = min(slot.least for slot in measured.values), max(slot.largest for slot in measured.values)
    return Finding("values", "ok", f"finite, not zero, not constant; largest of a row {least:.3g} to {largest:.3g}")


def _layers(facts: Facts) -> Finding:
    faults = layer_faults(facts)
    if faults:
        return _bad("layers", "; ".join(faults[:EXAMPLES]))
    measured = facts.measured
    assert measured is not None
    text = f"slots of layers {facts.layers} and of the final state differ from each other"
    if measured.layers.embedding:
        text += ", and only layer 0 is the embedding" if 0 in facts.layers else " and from the embedding"
    return Finding("layers", "ok", text)


def layer_faults(facts: Facts) -> List[str]:
    """Slots that hold what another should. The stream that enters layer 0 is the embedding; the one that 'enters' the
    layer behind the last is the final state."""
    measured = facts.measured
    assert measured is not None
    meanings = [*facts.layers, measured.layers.depth]
    names = [*(f"layer {layer}" for layer in facts.layers), "the final state"]
    limit = EMBEDDING_LIMIT[measured.dtype]
    equal = {(first, second) for first, second in measured.layers.equal}
    faults = []
    for second in range(len(meanings)):
        for first in range(second):
            same = meanings[first] == meanings[second]
            if same != ((first, second) in equal):
                how = "differs from" if same else "holds the same as"
                faults.append(f"slot {first} ({names[first]}) {how} slot {second} ({names[second]})")
    for slot, error in enumerate(measured.layers.embedding):
        if (meanings[slot] == 0) != (error <= limit):
            how = "is" if error <= limit else "is not"
            faults.append(f"slot {slot} ({names[slot]}) {how} the embedding of the tokens (error {error:.2g})")
    return faults


def check_head(facts: Facts) -> Finding:
    measured = facts.measured
    assert measured is not None
    head = measured.head
    if head.problem:
        return Finding("head", "warning", f"not checked: {head.problem}", "compare with transformers by hand")
    ties = f", {head.ties} of them as ties within rounding" if head.ties else ""
    text = f"{head.agree} of {head.prompts} prompts get the server's own next token{ties}; log-probabilities differ by "
    text += f"up to {head.largest_difference:.2g} (allowed {head.tolerance:.2g})"
    if _head_agrees(head.agree, head):
        return Finding("head", "ok", text)
    elsewhere = [f"{name}: {agree} of {head.prompts}" for name, agree in read_elsewhere(head).items()]
    return _bad("head", f"{text}, worst in {head.where}", "; ".join(elsewhere))


def _head_agrees(agree: int, head: Head) -> bool:
    return agree >= HEAD_SHARE * head.prompts


def read_elsewhere(head: Head) -> Dict[str, int]:
    """Other readings of the state that give the server's tokens."""
    return {name: agree for name, agree in head.elsewhere.items() if _head_agrees(agree, head)}


# --------------------------------------------------------------------------- words and numbers
def beyond(errors: Sequence[SlotErrors], limits: Limits) -> Optional[SlotErrors]:
    """The worst slot that breaks a limit."""
    bad = [
        each
        for each in errors
        if not (each.median <= limits.median and each.p95 <= limits.p95 and each.largest <= limits.largest)
    ]
    return _largest(bad) if bad else None


def _largest(errors: Sequence[SlotErrors]) -> SlotErrors:
    return max(errors, key=lambda each: (each.median, each.largest))


def _numbers(errors: SlotErrors) -> str:
    return (
        f"slot {errors.slot}: median of {errors.rows} rows {errors.median:.2g}, 95th percentile {errors.p95:.2g}, "
        f"largest {errors.largest:.2g} ({errors.where})"
    )


def _examples(fates: Sequence[PromptFate], what: str) -> str:
    told = []
    for fate in fates[:EXAMPLES]:
        why = fate.error if what == "error" else _why(fate)
        told.append(f"{fate.name}: {why}")
    return "; ".join(told)


def _why(fate: PromptFate) -> str:
    if fate.skip:
        return f"{fate.skip} ({fate.detail})"
    if fate.fault or fate.unreadable:
        return fate.fault or fate.unreadable
    begins = f", which begin at {fate.first}" if fate.first > 0 else ""
    return f"{fate.rows} of {fate.tokens} rows{begins}"


def _bad(key: str, text: str, more: str = "") -> Finding:
    return Finding(key, "blocker", f"{text} ({more})" if more else text, UNKNOWN_FIX)
