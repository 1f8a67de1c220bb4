"""Why a self-check failed, as far as facts tell: its findings with the likely cause of each that is bad. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Callable, Dict, List, Optional, Sequence, Tuple

from fleetdump.agent.protocol import Finding
from fleetdump.agent.selfcheck_facts import Facts, PromptFate
from fleetdump.agent.selfcheck_rules import (
    LIMITS,
    RANK_LIMITS,
    beyond,
    check_batches,
    check_head,
    check_ranks,
    findings,
    layer_faults,
    read_elsewhere,
)

MOVED_SHARE = 0.5
"""When so many rows are more like another row than like their own, rows are in other places."""
DISK_SKIPS = ("disk_full", "io_error", "backpressure")


def judge(facts: Facts) -> List[Finding]:
    """One finding a check, in the order of the table that people read. A failed one ends with its likely cause."""
    return [_with_cause(finding, facts) for finding in findings(facts)]


def causes_of(facts: Facts, judged: Sequence[Finding]) -> List[str]:
    """Codes of the likely causes of what failed, each once."""
    found = [cause.code for finding in judged for cause in [_cause(finding, facts)] if cause is not None]
    return list(dict.fromkeys(found))


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
    return any(fate.unreadable or fate.skip in DISK_SKIPS for fate in facts.prompts)


def disk_gave_out_under_ranks(facts: Facts) -> bool:
    return bool(facts.ranks.unreadable) or any(skip.startswith(DISK_SKIPS) for skip in facts.ranks.skips)


def values_are_no_numbers(facts: Facts) -> bool:
    return facts.measured is not None and any(slot.not_finite for slot in facts.measured.values)


def rows_are_blank(facts: Facts) -> bool:
    """Rows of one value, or all alike: what a buffer holds that nobody wrote."""
    if facts.measured is None:
        return False
    return any(slot.zero or slot.constant or slot.repeated for slot in facts.measured.values)


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
    only_large = beyond(measured.large, limits) is not None and beyond(measured.small, limits) is None
    return beyond(measured.ranks, RANK_LIMITS[measured.dtype]) is not None or only_large


def slots_hold_other_layers(facts: Facts) -> bool:
    """Slots that are equal where their layers differ; or a final state from which the server's tokens do not come
    though its values are the same on all ranks and in all batches."""
    measured = facts.measured
    if measured is None:
        return False
    sound = check_ranks(facts).level == check_batches(facts).level == "ok"
    return bool(layer_faults(facts) or read_elsewhere(measured.head)) or (
        sound and check_head(facts).level == "blocker"
    )


_DISK = (
    "the disk of the capture directory is full, broken or too slow",
    "free room there, or name another `capture: dir`",
)

CAUSES = (
    Cause("disk", ("rows",), disk_gave_out, *_DISK),
    Cause("disk", ("ranks",), disk_gave_out_under_ranks, *_DISK),
    Cause(
        "prefix_cache",
        ("rows",),
        prefix_was_cached,
        "a prefix cache served the first rows, which were never computed",
        "remove what switches the radix cache on from `args`; deploy adds --disable-radix-cache",
    ),
    Cause(
        "not_finite",
        ("ranks", "batches", "values", "layers", "head"),
        values_are_no_numbers,
        "values that are no numbers: the model itself computes them (weights or kernels that overflow), or rows were "
        "read before they were written",
        "ask the server without the patch for log-probabilities: NaN there too is the model's or a kernel's fault",
    ),
    Cause(
        "blank_rows",
        ("ranks", "batches", "values", "layers", "head"),
        rows_are_blank,
        "blank rows: they were never written, or read before the device had written them",
        "do not extract with this patch: it copies rows too early, or from another tensor than the stream",
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


def _cause(finding: Finding, facts: Facts) -> Optional[Cause]:
    if finding.level != "blocker":
        return None
    return next((cause for cause in CAUSES if finding.key in cause.of and cause.holds(facts)), None)


def _with_cause(finding: Finding, facts: Facts) -> Finding:
    cause = _cause(finding, facts)
    if cause is None:
        return finding
    return Finding(finding.key, finding.level, f"{finding.text}. Likely cause: {cause.text}", cause.fix)


def _vanished(fate: PromptFate) -> bool:
    """Rows are missing, and nobody says why."""
    return fate.rows < fate.tokens and not (fate.skip or fate.error or fate.fault or fate.unreadable)


def _moved(facts: Facts) -> bool:
    measured = facts.measured
    if measured is None:
        return False
    return any(errors.moved >= MOVED_SHARE for errors in measured.ranks + measured.small + measured.large)
