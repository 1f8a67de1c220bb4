"""What the parts of the tap tell one another: its configuration, pieces of a capture, and why there is none."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, TypeVar

FSYNC = ("group", "close", "never")
LEAST_HEADER = 4096
"""Bytes; one tensor of the longest name fits, with the metadata."""
TURN = 256
"""Samples that a thread of ours takes a step of about 1 us with in one go."""
HEAVY_TURN = 32
"""The same for steps of about 10 us."""
PAUSE_SECONDS = 0.0001
"""What it leaves the interpreter to others between two turns."""

Item = TypeVar("Item")


@dataclass
class Config:
    """``tap.json``, written by fleetdump's agent when it launches the server; docs/formats.md says what each is."""

    server: str
    launch_id: str
    layers: list[int]
    dir: str
    shard_bytes: int
    header_bytes: int
    idle_close_seconds: float
    ring_bytes: int
    ranks: int
    device_bytes: int = 1 << 30
    threads: int = 8
    fsync: str = "group"
    max_wait_seconds: float = 5.0
    status_dir: str = ""
    v: int = 1

    @classmethod
    def load(cls, path: str) -> Config:
        """Raises ``OSError``, ``ValueError`` or ``TypeError`` when the file is not a configuration of this version."""
        config = cls(**json.loads(Path(path).read_text()))
        config.status_dir = config.status_dir or str(Path(path).parent)
        if config.v != 1:
            raise ValueError(f"{path}: version {config.v}")
        least = {"threads": 1, "header_bytes": LEAST_HEADER, "ring_bytes": 1, "device_bytes": 1, "shard_bytes": 1}
        wrong = [name for name, value in least.items() if getattr(config, name) < value]
        wrong += ["fsync"] if config.fsync not in FSYNC else []
        wrong += ["idle_close_seconds"] if config.idle_close_seconds <= 0 else []
        wrong += ["max_wait_seconds"] if config.max_wait_seconds < 0 else []
        if wrong:
            raise ValueError(f"{path}: {', '.join(f'{name} {getattr(config, name)!r}' for name in wrong)}")
        return config


@dataclass
class Norm:
    """The model's final norm: ``weight`` is the bytes of a ``[hidden]`` tensor of ``dtype``."""

    weight: bytes
    dtype: str
    eps: float


@dataclass(slots=True)
class Piece:
    """Rows of one request from one forward: ``data`` is the bytes of a ``[rows, len(slots), hidden]`` tensor of
    ``dtype``, ``ids`` those rows' token ids as int32 LE."""

    rid: str
    start: int
    dtype: str
    shape: list[int]
    slots: list[int]
    ids: bytes | memoryview
    data: memoryview

    @property
    def name(self) -> str:
        """The tensor's name in its shard."""
        return f"{self.rid}:{self.start}"


@dataclass
class Skip:
    """A request of ours whose rows are not written; ``reason`` is one of docs/formats.md."""

    rid: str
    reason: str
    detail: str

    @property
    def run(self) -> str:
        return run_of(self.rid)


class Load(Protocol):
    """Pieces of one run on their way to the disk, with the memory that they occupy."""

    @property
    def run(self) -> str: ...

    @property
    def bytes(self) -> int: ...

    @property
    def rids(self) -> Sequence[str]: ...

    def pieces(self) -> list[Piece]:
        """What it is made of."""

    def release(self) -> None:
        """Their memory may be used again."""


class Shipment(Protocol):
    """What a forward has handed over."""

    def unload(self, deliver: Callable[[Load], None], skip: Callable[[Sequence[Skip]], None]) -> None:
        """Bring it into memory, load by load, once the forward has computed it; takes as long as it takes."""


@dataclass
class PlainLoad:
    """Pieces of one run in memory of their own."""

    loaded: list[Piece]

    @property
    def run(self) -> str:
        return run_of(self.loaded[0].rid)

    @property
    def bytes(self) -> int:
        return sum(piece.data.nbytes for piece in self.loaded)

    @property
    def rids(self) -> list[str]:
        return [piece.rid for piece in self.loaded]

    def pieces(self) -> list[Piece]:
        return self.loaded

    def release(self) -> None:
        pass


@dataclass
class PlainShipment:
    """Loads that are in memory."""

    loads: Sequence[Load]

    def unload(self, deliver: Callable[[Load], None], skip: Callable[[Sequence[Skip]], None]) -> None:  # noqa: ARG002
        for load in self.loads:
            deliver(load)


@dataclass
class Gauge:
    """How full the memory between forward and disk is, in bytes: ``peak`` is the most since the last look. ``waited``:
    seconds that rows have waited for room in it."""

    capacity: int = 0
    used: int = 0
    peak: int = 0
    waited: float = 0.0


def run_of(rid: str) -> str:
    """The run of a rid of ours."""
    return rid.split("/", 2)[1]


def in_turns(items: Iterable[Item], turn: int = TURN) -> Iterator[Item]:
    """``items``, with a pause after every ``turn``. A thread that has the interpreter's lock keeps it for 5 ms unless
    it sleeps, and the forward's thread, which lets go of it in each operation, would wait that long to have it back."""
    for number, item in enumerate(items, 1):
        yield item
        if number % turn == 0:
            time.sleep(PAUSE_SECONDS)
