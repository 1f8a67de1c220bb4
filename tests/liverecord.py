"""How often the diagnosis of live servers was right, kept by the nightly runs in bench/results/diagnose_live.json."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

RESULTS = Path(__file__).parents[1] / "bench" / "results" / "diagnose_live.json"
EXAMPLES = 5
FALSE_ALARM_RUNS = 50
"""How many diagnoses of servers that work must have called none of them hung."""
NEVER_HUNG = "a working server is not called hung"


@dataclass
class Tally:
    """Runs of one case, and what was said when it was wrong."""

    right: int = 0
    runs: int = 0
    wrong: list[str] = field(default_factory=list)

    def count(self, wrong: str) -> None:
        """Add a run; ``wrong`` is empty when the verdict was right."""
        self.runs += 1
        self.right += not wrong
        if wrong:
            self.wrong.append(wrong)

    def __str__(self) -> str:
        return f"{self.right} of {self.runs}"


def together(tallies: Mapping[str, Tally]) -> Tally:
    """The sum of several."""
    whole = Tally()
    for tally in tallies.values():
        whole.right, whole.runs = whole.right + tally.right, whole.runs + tally.runs
        whole.wrong += tally.wrong
    return whole


def record(section: str, tallies: dict[str, Tally]) -> None:
    """Replace one section of the file; a run that is broken off has kept what it had."""
    known = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    known[section] = {
        "at": time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime()),
        "load": round(os.getloadavg()[0], 1),
        "cores": len(os.sched_getaffinity(0)),
        "right": {name: str(tally) for name, tally in tallies.items()},
        "wrong": {name: tally.wrong[:EXAMPLES] for name, tally in tallies.items() if tally.wrong},
    }
    RESULTS.parent.mkdir(exist_ok=True)
    part = RESULTS.with_suffix(".part")
    part.write_text(json.dumps(known, indent=1) + "\n")
    part.replace(RESULTS)


@contextlib.contextmanager
def loaded() -> Iterator[None]:
    """A machine of which every core is wanted by somebody else too: by us, where the load says that nobody does."""
    spin = [sys.executable, "-S", "-c", "while True: pass"]
    cores = os.sched_getaffinity(0)
    busy = [subprocess.Popen(spin) for _ in cores] if os.getloadavg()[0] < 2 * len(cores) else []
    try:
        yield
    finally:
        for process in busy:
            process.kill()
            process.wait()
