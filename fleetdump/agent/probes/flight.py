"""Dumps of PyTorch's flight recorder, where a watchdog wrote them: the last collective of each rank.

A dump is a pickle. It is read by an unpickler that knows no class and no function, so that a file which somebody
else put there can run nothing.
"""

from __future__ import annotations

import io
import pickle
import re
import stat
from pathlib import Path
from typing import Any, Dict, List

from fleetdump.agent.evidence_engine import FlightRecord
from fleetdump.agent.probes.bounded import ProbeFailed

DEFAULT_PREFIX = "/tmp/nccl_trace_rank_"  # noqa: S108  PyTorch's own default
PREFIX_NAMES = ("TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE")
DUMP_BYTES = 64 << 20
RANKS = 1024
_RANK = re.compile(r"(\d+)$")


class _PlainUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        raise pickle.UnpicklingError(f"the dump wants {module}.{name}")


def flight(environment: Dict[str, str], since: float, root: str = "") -> List[FlightRecord]:
    """Last record of each dump written after ``since`` (seconds since 1970), below the server's own ``root``.

    Raises ``ProbeFailed`` when there is no dump.
    """
    prefix = next((environment[name] for name in PREFIX_NAMES if environment.get(name)), DEFAULT_PREFIX)
    place = Path(root + prefix)
    paths = [p for p in place.parent.glob(place.name + "*") if _RANK.search(p.name) and _is_recent(p, since)]
    if not paths:
        raise ProbeFailed("no flight-recorder dump (TORCH_NCCL_TRACE_BUFFER_SIZE was not set, or nothing timed out)")
    return [record for path in sorted(paths)[:RANKS] for record in last_record(path)]


def _is_recent(path: Path, since: float) -> bool:
    facts = path.stat()
    return stat.S_ISREG(facts.st_mode) and facts.st_mtime >= since and facts.st_size <= DUMP_BYTES


def last_record(path: Path) -> List[FlightRecord]:
    """The last collective that a dump names; empty when the file is none."""
    match = _RANK.search(path.name)
    try:
        entries = _PlainUnpickler(io.BytesIO(path.read_bytes())).load()["entries"]
        last = max(entries, key=lambda entry: int(entry["collective_seq_id"]))
        sizes = [int(size) for size in last["input_sizes"][0]] if last["input_sizes"] else []
        name = str(last["profiling_name"]).split(":")[-1]
        return [
            FlightRecord(int(match[1]) if match else 0, int(last["collective_seq_id"]), name, str(last["state"]), sizes)
        ]
    except (pickle.UnpicklingError, KeyError, TypeError, ValueError, IndexError, EOFError, AttributeError):
        return []
