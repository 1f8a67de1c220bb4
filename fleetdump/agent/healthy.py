"""Healthy starts, remembered: how many lines and seconds a start of the same kind took (``healthy.jsonl``)."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Dict, Iterator, List, Optional, Sequence, Tuple

from fleetdump.agent import engine
from fleetdump.agent.context import State
from fleetdump.agent.formats import FORMAT_VERSION
from fleetdump.agent.jsonl import append_lines, open_journal, open_plain
from fleetdump.agent.probes.bounded import ProbeFailed, run_command
from fleetdump.agent.protocol import AgentFailure
from fleetdump.agent.records import UNREADABLE, decode
from fleetdump.agent.server import ServerRecord
from fleetdump.agent.servermessages import HealthyProfile, merged_profile

FILE = "healthy.jsonl"
REMEMBERED = 20
"""Latest starts of a kind that make its profile."""
MOST_BYTES = 4 << 20
"""Of the file, of which all is read: more than ten thousand starts. One that is larger is begun anew."""
KINDS = 20
"""Latest kinds that a host tells others of."""
LOCK_SECONDS = 2.0
_PLACE_OPTIONS = ("--port", "--host", "--model-path", "--model", "--tokenizer-path", "--nccl-port", "--dist-init-addr")
"""Options that say where a server is, not how it starts."""


@dataclass
class HealthyStart:
    """One line of ``healthy.jsonl``. ``lines``: of the log, up to the ready mark. ``weights_gb``: what the weights took
    of each rank's memory, as it logged it."""

    key: str
    lines: int
    seconds: float
    phase_seconds: Dict[str, float]
    engine: str
    weights_gb: float = 0.0
    t: float = field(default_factory=time.time)
    v: int = FORMAT_VERSION


def start_key(model_path: str, engine: str, argv: Sequence[str], gpus: Sequence[str]) -> str:
    """SHA-256 that starts of the same kind share: model folder's name, engine release, arguments, GPU names.

    ``argv`` is the server's command line; interpreter, ports and paths do not count.
    """
    model = os.path.basename(model_path.rstrip("/"))
    kind = [model, engine, _without_places(argv[1:]), sorted(gpus)]
    return hashlib.sha256(json.dumps(kind).encode()).hexdigest()


def kind_of(record: ServerRecord, timeout: float = 30.0) -> Tuple[str, str]:
    """Engine name and ``start_key`` of a launched server: what its start is compared with. Runs the server's
    interpreter (up to ``timeout`` seconds) and nvidia-smi; without either the key is of what is known."""
    try:
        name = engine.query(record.python, env={**os.environ, **record.import_env}, timeout=timeout).name
    except AgentFailure:
        name = ""
    try:
        output = run_command(["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"], 8.0).stdout
    except ProbeFailed:
        output = ""
    return name, start_key(record.model_path, name, record.argv, output.splitlines())


def remember(state: State, start: HealthyStart) -> bool:
    """Append one start; False when another watch kept the file locked for ``LOCK_SECONDS``, or it cannot be written."""
    deadline = time.monotonic() + LOCK_SECONDS
    while True:
        try:
            file = open_journal(state.directory() / FILE)
            if file is not None:
                with file:
                    if file.seek(0, os.SEEK_END) > MOST_BYTES:
                        file.truncate(0)
                    append_lines(file, [start])
                return True
        except OSError as error:
            print(f"this start is not remembered: {FILE}: {error}", file=sys.stderr)
            return False
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)


def profile(state: State, key: str) -> Optional[HealthyProfile]:
    """What the latest starts of this kind took; None when there was none. Lines that cannot be read do not count."""
    return _profile([start for start in _sane_starts(state.root / FILE) if start.key == key])


def on_all_hosts(state: State, key: str, others: Sequence[HealthyProfile]) -> Optional[HealthyProfile]:
    """``profile`` together with those of ``others`` that are of this kind: what other hosts know."""
    own = profile(state, key)
    alike = [other for other in others if other.key == key]
    return merged_profile([own, *alike] if own else alike)


def profiles(state: State) -> List[HealthyProfile]:
    """The profile of each kind of which a start is remembered, the latest ``KINDS``, the newest last."""
    kinds: Dict[str, List[HealthyStart]] = {}
    for start in _sane_starts(state.root / FILE):
        kinds[start.key] = [*kinds.pop(start.key, []), start]
    found = [_profile(starts) for starts in list(kinds.values())[-KINDS:]]
    return [one for one in found if one is not None]


def _sane_starts(path: Path) -> Iterator[HealthyStart]:
    with contextlib.suppress(OSError):
        if path.stat().st_size > MOST_BYTES:
            return
    for start in _starts(path):
        alone = _profile([start])
        if alone is not None and alone.is_sane:
            yield start


def _profile(starts: List[HealthyStart]) -> Optional[HealthyProfile]:
    starts = starts[-REMEMBERED:]
    if not starts:
        return None
    phases = sorted({phase for start in starts for phase in start.phase_seconds})
    return HealthyProfile(
        key=starts[-1].key,
        starts=len(starts),
        lines_min=min(start.lines for start in starts),
        lines_max=max(start.lines for start in starts),
        seconds=_mean([start.seconds for start in starts]),
        phase_seconds={phase: _mean([start.phase_seconds.get(phase, 0.0) for start in starts]) for phase in phases},
        weights_gb=_mean([start.weights_gb for start in starts]),
    )


def _starts(path: Path) -> Iterator[HealthyStart]:
    with contextlib.suppress(OSError), open(path, "rb", opener=open_plain) as file:
        for line in file:
            with contextlib.suppress(*UNREADABLE):
                yield decode(HealthyStart, line, FILE)


def _without_places(args: Sequence[str]) -> List[str]:
    kept, skip = [], False
    for arg in args:
        option = arg.partition("=")[0]
        if skip or option in _PLACE_OPTIONS:
            skip = not skip and "=" not in arg
            continue
        kept.append(arg)
    return kept


def _mean(values: List[float]) -> float:
    return round(sum(values) / len(values), 2)
