"""What the taps of a server say of themselves, once a second (docs/formats.md). Reads only."""

from __future__ import annotations

import json
from contextlib import suppress
from typing import List, Sequence

from fleetdump.agent.context import State
from fleetdump.agent.jsonl import read_small
from fleetdump.agent.protocol import from_json
from fleetdump.agent.records import UNREADABLE
from fleetdump.agent.runmessages import TapStatus

FRESH_SECONDS = 5.0
"""An older status says nothing of the present: its writer is dead, or its disk stands still with everything else."""


def taps_of(state: State, server: str, launch_id: str) -> List[TapStatus]:
    """The newest status of each tap of that launch, by role; a file that cannot be read is left out."""
    taps = []
    for path in sorted((state.root / "servers" / server).glob("tap-*.json")):
        with suppress(*UNREADABLE):
            tap = from_json(TapStatus, json.loads(read_small(path)))
            if tap.launch_id == launch_id:
                taps.append(tap)
    return taps


def is_behind(taps: Sequence[TapStatus], now: float) -> bool:
    """Whether the disk is slower than the server, by what a living tap said last. ``now``: seconds since 1970."""
    return any(tap.slow_down and now - tap.t < FRESH_SECONDS for tap in taps)
