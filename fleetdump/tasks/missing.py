"""``runs/<run>/missing.jsonl``: every sample whose data is not here, with its line in the data set and its host."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

from fleetdump.agent.jsonl import replacing
from fleetdump.ledger import Ledger

NAME = "missing.jsonl"
NOT_DONE, NOT_HERE = "not_done", "not_here"
"""States: nobody is known to have computed it; its host has, and its files were not brought here."""


def write_missing(ledger: Ledger, folder: Path, *, with_files: bool) -> dict[str, int]:
    """Write what the ledger knows of, in the data set's order; the file is replaced at once. ``with_files``: samples
    whose files do not lie here are missing too. Returns how many of those each host has."""
    samples = [*ledger.missing(), *(ledger.not_here() if with_files else ())]
    with replacing(folder / NAME, mode=0o666) as out:
        for sample in sorted(samples, key=lambda sample: sample.line):
            state = NOT_HERE if sample.is_done else NOT_DONE
            record = {"v": 1, "line": sample.line, "id": sample.id, "state": state, "host": sample.host}
            out.write(json.dumps(record).encode() + b"\n")
    return dict(Counter(sample.host for sample in samples if sample.is_done))
