"""Verdicts of many hosts folded into groups, and one diagnosis as Markdown for a bug report."""

from __future__ import annotations

import re
from collections.abc import Mapping

from fleetdump.diagnosis import Verdict
from fleetdump.hostpatterns import compress
from fleetdump.tasks.server import Diagnosis
from fleetdump.views.console import err, out, quoted, visible
from fleetdump.views.hosts import show_diagnosis

Place = tuple[str, Diagnosis]
"""A host's name and what was found there."""


def show_heard(host: str, diagnoses: list[Diagnosis]) -> None:
    """That a host has answered, while others have not yet; the findings come at the end, folded."""
    codes = ", ".join(f"{d.server}: {d.verdicts[0].code}" for d in diagnoses)
    err.print(f"[dim]\\[{quoted(host)}][/] {quoted(codes)}")


def show_diagnoses(found: Mapping[str, list[Diagnosis]]) -> None:
    """Each kind of verdict once in full, with the hosts that share it; then the host that is unlike all others."""
    groups = fold(found)
    for places in groups:
        host, diagnosis = places[0]
        show_diagnosis(host, diagnosis)
        if len(places) > 1:
            out.print(f"  the same verdict: {quoted(_where(places[1:]))}")
    for host, diagnosis in odd_ones_out(groups):
        best = diagnosis.verdicts[0]
        out.print(f"[bold]{quoted(host)}[/] is unlike the others: {best.code}, {quoted(best.title)}")


def fold(found: Mapping[str, list[Diagnosis]]) -> list[list[Place]]:
    """Places with the same code, phase and severity together, the largest group first."""
    groups: dict[tuple[str, str, str], list[Place]] = {}
    for host, diagnoses in sorted(found.items()):
        for diagnosis in diagnoses:
            best = diagnosis.verdicts[0]
            groups.setdefault((best.code, best.phase, best.severity), []).append((host, diagnosis))
    return sorted(groups.values(), key=len, reverse=True)


def odd_ones_out(groups: list[list[Place]]) -> list[Place]:
    """Places with a verdict of their own, when most places share one and there are at least three."""
    alone = [places[0] for places in groups[1:] if len(places) == 1]
    total = sum(map(len, groups))
    return alone if groups and len(groups[0]) * 2 > total >= 3 else []


def _where(places: list[Place]) -> str:
    """Hosts, folded; those whose verdict names a rank, with it."""
    by_rank: dict[int | None, set[str]] = {}
    for name, diagnosis in places:
        by_rank.setdefault(diagnosis.verdicts[0].rank, set()).add(name)
    parts = []
    for rank, names in sorted(by_rank.items(), key=lambda item: (item[0] is None, item[0] or 0)):
        hosts = ", ".join(compress(sorted(names)))
        parts.append(hosts if rank is None else f"{hosts} (rank {rank})")
    return "; ".join(parts)


def markdown(host: str, diagnosis: Diagnosis) -> str:
    """One diagnosis as text for a bug report. What the host said stands in code spans: it can form no markup."""
    best, *others = diagnosis.verdicts
    lines = [f"### {_plain(best.title)}", ""]
    rank = f", rank {best.rank}" if best.rank is not None else ""
    lines.append(f"`{best.code}`{rank}, phase `{best.phase or '?'}`, confidence: {best.confidence}, on `{_code(host)}`")
    lines += _section("Evidence", best.evidence) + _section("Ruled out", best.ruled_out)
    lines += _section("Also found", [_short(verdict) for verdict in others])
    lines += _section("Next", best.next_steps)
    if best.references:
        lines += ["", f"Reports of the same kind: {', '.join(best.references)}"]
    return "\n".join(lines) + "\n"


def show_markdown(host: str, diagnoses: list[Diagnosis]) -> None:
    """``markdown`` of each server of a host, on stdout."""
    for diagnosis in diagnoses:
        out.print(markdown(host, diagnosis), markup=False, highlight=False, soft_wrap=True)


def _short(verdict: Verdict) -> str:
    return f"{verdict.code} ({verdict.confidence}): {verdict.title}"


def _section(title: str, items: list[str]) -> list[str]:
    return ["", f"**{title}**", "", *(f"- `{_code(item)}`" for item in items)] if items else []


def _code(text: str) -> str:
    return visible(text).replace("`", "'").replace("\n", " ")


def _plain(text: str) -> str:
    return re.sub(r"([\\`*_\[\]<>#])", r"\\\1", visible(text).replace("\n", " "))
