"""The evidence bundle on the host."""

from __future__ import annotations

import time
from pathlib import Path

from fleetdump.agent.context import State
from fleetdump.agent.evidence_files import write_files
from fleetdump.agent.evidence_types import Evidence


def write_bundle(found: Evidence, state: State) -> Path:
    """Write ``diagnoses/<time>-<name>/`` (0700, files 0600) and return its path. Raises ``OSError``."""
    stamp = time.strftime("%Y%m%dT%H%M%S", time.gmtime(found.taken_at))
    name = found.target.server or f"pid{found.target.pid}"
    folder = state.directory("diagnoses", f"{stamp}-{name}")
    write_files(found, folder)
    return folder
