"""What ``check`` found, for people: hosts that agree take one line together, however many they are."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping

from fleetdump.agent.hostmessages import ProbeResult
from fleetdump.agent.protocol import Finding
from fleetdump.hostpatterns import compress
from fleetdump.views.console import count, out, quoted

LEVELS = {"blocker": "bold red", "warning": "yellow"}
"""Levels of findings that ask for something, the worst first, with their styles."""
_FIGURES = re.compile(r"\d[\d.,]*")


def show_check(probes: Mapping[str, ProbeResult]) -> None:
    """What the hosts are, in groups of those alike; then every blocker and warning once, with the hosts that have it.
    Of a single host also what is well."""
    groups: dict[str, list[str]] = {}
    for host, probe in probes.items():
        groups.setdefault(_summary(probe), []).append(host)
    for line, hosts in groups.items():
        out.print(f"[bold]{quoted(', '.join(compress(sorted(hosts))))}[/]  {line}")
    if len(probes) == 1:
        (probe,) = probes.values()
        for finding in probe.findings:
            if finding.level == "ok":
                out.print(f"[green]ok[/]       {quoted(finding.text)}")
    _show_findings(probes)


def _summary(probe: ProbeResult) -> str:
    """What a host is, and whether a deploy would work, as markup."""
    model = f"{probe.model.architecture} with {probe.model.num_layers} layers" if probe.model else "no model"
    gpus = ", ".join(f"{number} x {name}" for name, number in Counter(probe.gpus).items()) or "no GPU"
    levels = Counter(finding.level for finding in probe.findings)
    told = [f"[{style}]{count(levels[level], level)}[/]" for level, style in LEVELS.items() if levels[level]]
    facts = quoted(", ".join((probe.engine or "no engine", model, gpus)))
    return f"{facts}: {', '.join(told) or '[green]ok[/]'}"


def _show_findings(probes: Mapping[str, ProbeResult]) -> None:
    """Findings that differ in their figures alone are told once, with the first host's."""
    having: dict[tuple[str, str, str, str], dict[str, Finding]] = {}
    for host, probe in probes.items():
        for finding in probe.findings:
            alike = (finding.level, finding.key, _FIGURES.sub("#", finding.text), _FIGURES.sub("#", finding.fix))
            having.setdefault(alike, {}).setdefault(host, finding)
    for level, style in LEVELS.items():
        for (its_level, *_), hosts in having.items():
            if its_level == level:
                _show_finding(hosts, style, len(probes))


def _show_finding(hosts: Mapping[str, Finding], style: str, of: int) -> None:
    first, finding = next(iter(hosts.items()))
    whose = f"{', '.join(compress(sorted(hosts)))}: "
    if len(hosts) == of:
        whose = f"all {of} hosts: " if of > 1 else ""
    others = len({other.text for other in hosts.values()}) - 1
    like = f" (on {first}; other figures on the others)" if others else ""
    out.print(f"[{style}]{finding.level:8}[/] {quoted(whose + finding.text + like)}")
    if finding.fix:
        out.print(f"         fix: {quoted(finding.fix)}")
