"""What a patch does to single files, planned in memory, and how people see it."""

from __future__ import annotations

import difflib
from dataclasses import dataclass
from pathlib import Path
from typing import Optional

DIFF_LINES = 60


@dataclass
class Change:
    """One file's change. ``module`` is its dotted name, or its path (``sglang/srt/x.json``) where a diff or script
    changes it. ``original`` are the bytes without any patch of ours, None where the file is created; ``edited`` None
    deletes it."""

    module: str
    path: Path
    original: Optional[bytes]
    edited: Optional[bytes]
    verified: bool

    def diff(self) -> str:
        """A unified diff, cut after ``DIFF_LINES`` lines."""
        return show_diff(str(self.path), self.original, self.edited)


def show_diff(path: str, old: Optional[bytes], new: Optional[bytes]) -> str:
    """A unified diff of two states of a file (None: it does not exist), cut after ``DIFF_LINES`` lines."""
    before, after = ((data or b"").decode("utf-8", "replace").splitlines() for data in (old, new))
    names = [path if data is not None else "/dev/null" for data in (old, new)]
    lines = list(difflib.unified_diff(before, after, names[0], names[1], n=2, lineterm=""))
    if not lines and (old is None or new is None):
        lines = [f"--- {names[0]}", f"+++ {names[1]}"]  # an empty file comes or goes
    more = [f"… {len(lines) - DIFF_LINES} more lines"] if len(lines) > DIFF_LINES else []
    return "\n".join(lines[:DIFF_LINES] + more)
