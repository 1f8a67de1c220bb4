"""Facts in, findings out: which numbers pass the self-check, and what the likely cause is of those that don't. Pure.

docs/selfcheck.md says where the limits come from.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Callable, Dict, List, Optional, Sequence, Tuple

from fleetdump.agent.protocol import Finding
from fleetdump.agent.selfcheck_facts import Facts, Head, PromptFate, SlotErrors

HEAD_SHARE = 0.98
"""Of the prompts, at least so many must get the server's own next token."""
MOVED_SHARE = 0.5
"""When so many rows are more like another row than like their own, rows are in other places."""
EXAMPLES = 3


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


def judge(facts: Facts) -> List[Finding]:
    """One finding a check, in the order of the table that people read. A failed one ends with its likely cause."""
    findings = [_requests(facts), _rows(facts), _ids(facts), _ranks(facts)]
    if facts.measured is not None:
        findings += [_batches(facts), _values(facts), _layers(facts), _head(facts)]
    return [_with_cause(finding, facts) for finding in findings]


def causes_of(facts: Facts, findings: Sequence[Finding]) -> List[str]:
    """Codes of the likely causes of what failed, each once."""
    found = [cause.code for finding in findings for cause in [_cause(finding, facts)] if cause is not None]
    return list(dict.fromkeys(found))


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
    short = [fate for fate in sent if fate.rows != fate.tokens or fate.skip or fate.fault]
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


def _ranks(facts: Facts) -> Finding:
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
    if not ranks.differing:
        return Finding("ranks", "ok", text)
    if facts.measured is None:
        return _bad("ranks", text, "they could not be compared")
    worst = _beyond(facts.measured.ranks, RANK_LIMITS[facts.measured.dtype])
    if worst is not None:
        return _bad("ranks", text, _numbers(worst))
    return Finding("ranks", "ok", f"{text}; {_numbers(_largest(facts.measured.ranks))}")


def _batches(facts: Facts) -> Finding:
    measured = facts.measured
    assert measured is not None
    errors = measured.small + measured.large
    if not errors:
        return Finding("batches", "warning", "not checked: no prompt was captured twice")
    limits = LIMITS[measured.dtype]
    worst = _beyond(errors, limits)
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
    faults = _layer_faults(facts)
    if faults:
        return _bad("layers", "; ".join(faults[:EXAMPLES]))
    measured = facts.measured
    assert measured is not None
    text = f"slots of layers {facts.layers} and of the final state differ from each other"
    if measured.layers.embedding:
        text += ", and only layer 0 is the embedding" if 0 in facts.layers else " and from the embedding"
    return Finding("layers", "ok", text)


def _layer_faults(facts: Facts) -> List[str]:
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


def _head(facts: Facts) -> Finding:
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
    elsewhere = [f"{name}: {agree} of {head.prompts}" for name, agree in _read_elsewhere(head).items()]
    return _bad("head", f"{text}, worst in {head.where}", "; ".join(elsewhere))


def _head_agrees(agree: int, head: Head) -> bool:
    return agree >= HEAD_SHARE * head.prompts


def _read_elsewhere(head: Head) -> Dict[str, int]:
    """Other readings of the state that give the server's tokens."""
    return {name: agree for name, agree in head.elsewhere.items() if _head_agrees(agree, head)}


# --------------------------------------------------------------------------- causes
@dataclass(frozen=True)
class Cause:
    """Why checks ``of`` fail when ``holds``; ``text`` for people, and what to do."""

    code: str
    of: Tuple[str, ...]
    holds: Callable[[Facts], bool]
    text: str
    fix: str


def prefix_was_cached(facts: Facts) -> bool:
    return any(fate.skip == "prefix_missing" or fate.first > 0 for fate in facts.prompts)


def disk_gave_out(facts: Facts) -> bool:
    return any(fate.skip in ("disk_full", "io_error", "backpressure") for fate in facts.prompts)


def small_forwards_left_nothing(facts: Facts) -> bool:
    """Prompts of small forwards have no rows, those of larger ones have: a graph is replayed up to its largest size."""
    of_forward: Dict[int, List[PromptFate]] = {}
    for fate in facts.prompts:
        if not fate.error:
            of_forward.setdefault(fate.forward_tokens, []).append(fate)
    lost = {size for size, fates in of_forward.items() if 2 * sum(map(_vanished, fates)) > len(fates)}
    return bool(lost) and lost != set(of_forward) and max(lost) < min(set(of_forward) - lost)


def nothing_was_captured(facts: Facts) -> bool:
    return all(_vanished(fate) for fate in facts.prompts if not fate.error)


def rows_are_elsewhere(facts: Facts) -> bool:
    """Row counts that do not fit, rows of other requests, or ranks and batches whose rows are in other places."""
    skips = any(fate.skip == "rows_mismatch" or "split" in fate.detail for fate in facts.prompts)
    return skips or any(fate.other_ids for fate in facts.prompts) or facts.ranks.lacking > 0 or _moved(facts)


def sums_are_partial(facts: Facts) -> bool:
    """Ranks hold different values of the same rows; or large forwards differ from small ones, which agree with each
    other: SGLang leaves sums to the next layer in forwards of up to 2,048 tokens."""
    measured = facts.measured
    if measured is None or _moved(facts):
        return False
    limits = LIMITS[measured.dtype]
    only_large = _beyond(measured.large, limits) is not None and _beyond(measured.small, limits) is None
    return _beyond(measured.ranks, RANK_LIMITS[measured.dtype]) is not None or only_large


def slots_hold_other_layers(facts: Facts) -> bool:
    """Slots that are equal where their layers differ; or a final state from which the server's tokens do not come
    though its values are the same on all ranks and in all batches."""
    measured = facts.measured
    if measured is None:
        return False
    sound = _ranks(facts).level == _batches(facts).level == "ok"
    return bool(_layer_faults(facts) or _read_elsewhere(measured.head)) or (sound and _head(facts).level == "blocker")


CAUSES = (
    Cause(
        "disk",
        ("rows",),
        disk_gave_out,
        "the disk of the capture directory is full, broken or too slow",
        "free room there, or name a faster disk as `capture: dir`",
    ),
    Cause(
        "prefix_cache",
        ("rows",),
        prefix_was_cached,
        "a prefix cache served the first rows, which were never computed",
        "remove what switches the radix cache on from `args`; deploy adds --disable-radix-cache",
    ),
    Cause(
        "scattered_rows",
        ("rows", "ids", "ranks", "batches", "layers", "head"),
        rows_are_elsewhere,
        "rows are scattered: the ranks hold different rows, or rows went to other requests",
        "switch off what splits rows: context parallelism, --moe-a2a-backend, --enable-layernorm-sp, two-batch overlap",
    ),
    Cause(
        "graph_replay",
        ("rows",),
        small_forwards_left_nothing,
        "small forwards are replayed from a graph, which runs no Python",
        "deploy again: it adds the flag that switches prefill graphs off; see that `args` does not undo it",
    ),
    Cause(
        "tap_not_called",
        ("rows",),
        nothing_was_captured,
        "the tap was never called: another model class serves, or a graph is replayed for every forward",
        "look at the server's log for 'fleetdump-tap' and for 'Load weight end'",
    ),
    Cause(
        "partial_sum",
        ("ranks", "batches"),
        sums_are_partial,
        "partial sums: the patch takes the stream before SGLang has added up the ranks' parts",
        "do not extract with this patch; --enforce-disable-flashinfer-allreduce-fusion keeps sums whole from 0.5.10 on",
    ),
    Cause(
        "layer_convention",
        ("layers", "head"),
        slots_hold_other_layers,
        "wrong layer convention: a slot holds the stream of another layer than its number says, or the final one was "
        "not taken between the last layer and the norm",
        "see whether the patch counts layers by what enters or by what leaves them",
    ),
)
"""The first that holds and concerns the check is named."""

UNKNOWN_FIX = "do not extract with this patch and engine: what it writes is wrong"


def _cause(finding: Finding, facts: Facts) -> Optional[Cause]:
    if finding.level != "blocker":
        return None
    return next((cause for cause in CAUSES if finding.key in cause.of and cause.holds(facts)), None)


def _with_cause(finding: Finding, facts: Facts) -> Finding:
    cause = _cause(finding, facts)
    if cause is None:
        return finding
    return Finding(finding.key, finding.level, f"{finding.text}. Likely cause: {cause.text}", cause.fix)


# --------------------------------------------------------------------------- words and numbers
def _vanished(fate: PromptFate) -> bool:
    """Rows are missing, and nobody says why."""
    return fate.rows < fate.tokens and not (fate.skip or fate.error or fate.fault)


def _moved(facts: Facts) -> bool:
    measured = facts.measured
    if measured is None:
        return False
    return any(errors.moved >= MOVED_SHARE for errors in measured.ranks + measured.small + measured.large)


def _beyond(errors: Sequence[SlotErrors], limits: Limits) -> Optional[SlotErrors]:
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
    if fate.fault:
        return fate.fault
    begins = f", which begin at {fate.first}" if fate.first > 0 else ""
    return f"{fate.rows} of {fate.tokens} rows{begins}"


def _bad(key: str, text: str, more: str = "") -> Finding:
    return Finding(key, "blocker", f"{text} ({more})" if more else text, UNKNOWN_FIX)
