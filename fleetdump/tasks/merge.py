"""The run as it is known here: one merged manifest, and a report of what is there and what is not."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fleetdump.agent.jsonl import replacing
from fleetdump.dataset.lines import LineFault, load_line
from fleetdump.errors import FleetdumpError
from fleetdump.ledger import Delivered, Ledger
from fleetdump.tasks.pullshards import PullReport

SETTINGS = ("dtype", "hidden", "layers", "final", "engine", "patch_sha256", "model_sha256", "template_sha256")
NAMED = 5
"""Most hosts that a sentence names."""
LISTED = 1000
"""Most ids that a report names; it counts them all."""


@dataclass(frozen=True)
class PullOptions:
    """``to``: where shards go (``<to>/<run>/<host>/``), None to leave them on the hosts."""

    run: str
    to: Path | None = None


@dataclass
class CollectReport:
    """The run as it is known here after a collect. ``lost`` counts samples that are neither delivered nor rejected and
    that nobody works on, ``not_done`` those of a run that goes on; ``missing`` names the first of both.
    ``mismatches`` name settings that differ between servers. ``not_here``: how many samples each host has whose files
    were not brought here, where they were to be."""

    run: str
    samples: int
    expected: int
    lost: int
    duplicated: int
    rejected: int
    tokens: int
    manifest: str
    missing: list[str] = field(default_factory=list)
    rejects: list[str] = field(default_factory=list)
    mismatches: list[str] = field(default_factory=list)
    not_here: dict[str, int] = field(default_factory=dict)
    not_done: int = 0


def merge(ledger: Ledger, options: PullOptions, runs_dir: Path, *, goes_on: bool = False) -> CollectReport:
    """Write the run's merged manifest (each sample once, in the data set's order, replaced at once) and say what is
    there and what is not; of a run that ``goes_on``, what is not done yet."""
    target = (options.to or runs_dir) / options.run / "manifest.jsonl"
    target.parent.mkdir(parents=True, exist_ok=True)
    settings: dict[str, dict[str, set[str]]] = {key: {} for key in SETTINGS}
    tokens = 0
    damaged: list[str] = []
    with replacing(target, mode=0o666, temporary=target.with_name("manifest.jsonl.tmp")) as out:
        for sample in ledger.delivered():
            try:
                line, values = _merged(sample, with_path=options.to is not None)
            except LineFault as fault:
                damaged.append(f"{sample.id} (its line in the ledger: {fault})")
                continue
            tokens += line["tokens"]
            for key, value in values.items():
                settings[key].setdefault(value, set()).add(f"{sample.host}/{sample.server}")
            out.write(json.dumps(line, separators=(",", ":")).encode() + b"\n")
    totals = ledger.totals()
    return CollectReport(
        run=options.run,
        samples=totals.delivered - len(damaged),
        expected=totals.expected,
        lost=len(damaged) + (0 if goes_on else totals.lost),
        not_done=totals.lost if goes_on else 0,
        duplicated=totals.duplicated,
        rejected=totals.rejected,
        tokens=tokens,
        manifest=str(target),
        missing=[*damaged, *(f"{sample} (given to {host}/{server})" for sample, host, server in ledger.lost(LISTED))][
            :LISTED
        ],
        rejects=[f"{sample}: {reason}" for sample, reason in ledger.rejected()[:LISTED]],
        mismatches=list(_mismatches(settings)),
    )


def _merged(sample: Delivered, *, with_path: bool) -> tuple[dict[str, Any], dict[str, str]]:
    """A sample's line for the merged manifest, and its settings as text; raises ``LineFault``."""
    line = load_line(sample.line or "")
    if line.get("id") != sample.id or type(line.get("tokens")) is not int:
        raise LineFault("it is of another sample, or without tokens")
    absent = [key for key in SETTINGS if key not in line]
    if absent:
        raise LineFault(f"it has no {absent[0]}")
    if with_path:
        line["path"] = sample.host
    return line, {key: json.dumps(line[key], sort_keys=True) for key in SETTINGS}


def _mismatches(settings: Mapping[str, Mapping[str, set[str]]]) -> Iterator[str]:
    """Settings with more than one value, each value with the servers that have it."""
    for key, values in settings.items():
        if len(values) > 1:
            named = [f"{value[:40]} on {', '.join(sorted(servers))}" for value, servers in sorted(values.items())]
            yield f"{key} differs: {'; '.join(named)}"


def require_whole(report: CollectReport, pulls: Sequence[PullReport]) -> None:
    """Raise ``FleetdumpError`` when the run is not wholly and rightly here: something lost, mixed or damaged."""
    faults = [fault for pulled in pulls for fault in pulled.faults]
    problems = [*report.mismatches, *faults]
    if report.lost:
        problems.insert(0, f"{report.lost} of {report.expected} samples are not there, first {report.missing[0]}")
    if report.not_here:
        problems.insert(0, not_here_words(report))
    only_goes_on = report.not_done > 0 and not problems
    if report.not_done:
        problems.insert(0, f"{report.not_done} of {report.expected} samples are not done yet")
    if problems:
        raise FleetdumpError(
            f"run {report.run} is not complete" + (" yet: it goes on" if only_goes_on else ""),
            why="; ".join(problems[:5]) + (f" (and {len(problems) - 5} more)" if len(problems) > 5 else ""),
            next_step=_next_step(report),
        )


def not_here_words(report: CollectReport) -> str:
    """How many samples are done whose files were not brought here, and by whom."""
    named = [f"{samples} that {host} computed" for host, samples in sorted(report.not_here.items())]
    more = f" and those of {len(named) - NAMED} more hosts" if len(named) > NAMED else ""
    samples = f"{sum(report.not_here.values())} of {report.samples} samples have no files here"
    return f"{samples}: {', '.join(named[:NAMED])}{more}"


def _next_step(report: CollectReport) -> str:
    if report.not_done:
        return f"fleetdump attach --run {report.run} watches it; collect again when it has ended"
    go_on = "fleetdump extract with the same data goes on where the run stands; then collect again"
    if not report.not_here:
        return go_on
    first = go_on if report.lost else "collect --data again when those hosts answer"
    return f"{first}; if one never comes back, compute anew what missing.jsonl of the run's folder lists (docs/run.md)"
