"""How a diagnosis says things: sizes, names, lists."""

from __future__ import annotations

import re
from collections.abc import Iterable

from fleetdump.agent.evidence_engine import HttpProbe
from fleetdump.agent.evidence_process import ProcessFacts

_NUMBERED = re.compile(r"^(?P<head>.*\D)(?P<number>\d+)$")
_LAUNCHER = "the launcher"


def size(count: float) -> str:
    """Bytes for people."""
    for unit in ("B", "kB", "MB", "GB"):
        if abs(count) < 1000:
            return f"{count:.0f} {unit}"
        count /= 1000
    return f"{count:.1f} TB"


def name_of(process: ProcessFacts) -> str:
    """A process for people: its rank's name in the log, or what it is."""
    if process.role == "other":
        return process.name
    return process.label or (_LAUNCHER if process.role == "launcher" else process.role)


def asked(probe: HttpProbe) -> str:
    """An endpoint and its answer."""
    return f"{probe.path}: {probe.status or probe.error} in {probe.seconds:.1f} s"


def listed(items: Iterable[str]) -> str:
    """ "a", "a and b", "a, b and c"."""
    *head, last = items
    return f"{', '.join(head)} and {last}" if head else last


def rank_names(labels: Iterable[str]) -> str:
    """Names of ranks with neighbours joined: TP0 to TP2, TP4."""
    runs: list[list[str]] = []
    for label in labels:
        if runs and _follows(runs[-1][-1], label):
            runs[-1].append(label)
        else:
            runs.append([label])
    return ", ".join(f"{run[0]} to {run[-1]}" if len(run) > 2 else ", ".join(run) for run in runs)


def _follows(first: str, second: str) -> bool:
    one, two = _NUMBERED.match(first), _NUMBERED.match(second)
    return bool(one and two and one["head"] == two["head"] and int(two["number"]) == int(one["number"]) + 1)


def is_are(items: Iterable[object]) -> str:
    """The verb for one or several."""
    return "are" if len(list(items)) > 1 else "is"
