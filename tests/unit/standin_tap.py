"""The stand-in server with the real writer of the tap behind it. Run: ``python standin_tap.py CONFIG.json``.

As SGLang, it answers when the rows are handed over, not when they are on the disk.
"""

from __future__ import annotations

import hashlib
import sys
from pathlib import Path

import standin

from fleetdump.agent.formats import Rid
from fleetdump.agent.tensorfile import ids_bytes

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "patches" / "hidden-states"))

from fleetdump_tapfiles import TapWriter  # type: ignore[import-not-found]
from fleetdump_taprecords import Config, Norm, Piece  # type: ignore[import-not-found]

ROW_BYTES = 3 * standin.HIDDEN * 4


def states_of(sample: str, start: int, rows: int) -> bytes:
    """``[rows, 3, HIDDEN]`` float32 that nobody else has."""
    seeds = (hashlib.sha384(f"{sample}:{row}".encode()).digest() for row in range(start, start + rows))
    return b"".join(seeds)


class RealTap:
    """What ``standin.Tap`` does, by the tap's own threads."""

    def __init__(self, config: dict):
        directory, layers = config["dir"], config["layers"]
        settings = Config(
            config["server"], config["launch_id"], layers, directory, 100_000, 16384, 0.5, 0, 1, threads=4
        )
        self.writer = TapWriter(settings, 0, Norm(bytes(4 * standin.HIDDEN), "F32", 1e-6))

    def capture(self, rid: Rid, ids: list[int], faults: dict) -> None:
        chunk = faults["chunk"]
        for start in range(0, len(ids), chunk):
            part = ids[start : start + chunk]
            data = memoryview(states_of(rid.sample, start, len(part)))
            shape = [len(part), 3, standin.HIDDEN]
            self.writer.put([Piece(str(rid), start, "F32", shape, [0, 1, 2], ids_bytes(part), data)])


if __name__ == "__main__":
    assert len(states_of("a", 0, 1)) == ROW_BYTES
    standin.Tap = RealTap  # type: ignore[misc, assignment]
    standin.main()
