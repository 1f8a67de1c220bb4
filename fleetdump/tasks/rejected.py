"""``runs/<run>/rejected.jsonl``: every row that became no sample, with its line in the data set and the reason."""

from __future__ import annotations

import json
import os
from pathlib import Path

from fleetdump.ledger import Ledger

NAME = "rejected.jsonl"


def write_rejected(ledger: Ledger, folder: Path) -> Path:
    """Write what the ledger knows of rejected rows, in the data set's order; the file is replaced at once."""
    path = folder / NAME
    temporary = folder / f"{NAME}.{os.getpid()}.tmp"
    with temporary.open("w", encoding="utf-8") as out:
        for row in ledger.rejected_rows():
            record = {"v": 1, "line": row.line, "id": row.id, "reason": row.reason, "detail": row.detail}
            out.write(json.dumps(record) + "\n")
    temporary.replace(path)
    return path
