"""``runs/<run>/rejected.jsonl``: every row that became no sample, with its line in the data set and the reason."""

from __future__ import annotations

import json
from pathlib import Path

from fleetdump.agent.jsonl import replacing
from fleetdump.ledger import Ledger

NAME = "rejected.jsonl"


def write_rejected(ledger: Ledger, folder: Path) -> Path:
    """Write what the ledger knows of rejected rows, in the data set's order; the file is replaced at once."""
    path = folder / NAME
    with replacing(path, mode=0o666) as out:
        for row in ledger.rejected_rows():
            record = {"v": 1, "line": row.line, "id": row.id, "reason": row.reason, "detail": row.detail}
            out.write(json.dumps(record).encode() + b"\n")
    return path
