"""Pass pytest's output through, then one JSON object for all rounds of faults, then ``N passed, M failed``.

Run: ``pytest tests/lab/test_faults.py | python -m tests.lab.faultsummary RECORDS [RESULT]``; RECORDS is the file that
FLEETDUMP_FAULTS named for pytest, RESULT where the object is also written to. Exits 1 when anything failed or was lost.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from pathlib import Path
from typing import Any

from tests.cases.summary import main as summarise

COUNTED = ("faults", "lost", "duplicated", "corrupt", "tool_hangs")


def totals(records: list[dict[str, Any]]) -> dict[str, Any]:
    """Sums over all rounds, and how many faults there were of each kind."""
    kinds: Counter[str] = Counter()
    for record in records:
        kinds.update(record["kinds"])
    sums = {key: sum(record[key] for record in records) for key in COUNTED}
    extent = {"rounds": len(records), "samples": sum(record["samples"] for record in records)}
    return {
        **sums,
        **extent,
        "seconds": round(sum(r["seconds"] for r in records), 1),
        "kinds": dict(sorted(kinds.items())),
    }


def main() -> int:
    path = Path(sys.argv[1])
    held: list[int] = []

    def figures() -> None:
        found = totals([json.loads(line) for line in path.read_text().splitlines()] if path.exists() else [])
        print(json.dumps(found))
        if len(sys.argv) > 2:
            Path(sys.argv[2]).write_text(json.dumps(found, indent=1) + "\n")
        held.append(sum(found[key] for key in COUNTED[1:]))

    code = summarise(figures)
    return code or int(held != [0])


if __name__ == "__main__":
    raise SystemExit(main())
