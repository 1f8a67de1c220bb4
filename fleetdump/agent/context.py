"""What every verb of the agent gets: the request, the state directory's paths, and the way to answer.

A verb is a function ``(args, ctx) -> result``; ``main.VERB_TABLE`` says which. It raises ``AgentFailure`` for what the
user should read, and returns a result dataclass of ``protocol``.
"""

from __future__ import annotations

import json
import sys
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, Dict, Iterator

from fleetdump.agent.bootstrap import machine_id, state_root
from fleetdump.agent.protocol import Request, to_json

__all__ = ["AgentContext", "ControllerGone", "State", "machine_id"]


class ControllerGone(Exception):
    """Nobody reads our answers any more (or the stream broke inside a blob): end quietly."""


@dataclass
class State:
    """Paths of ``<state_dir>/<machine-id>/``; see docs/formats.md. Directories are made 0700 on first use."""

    root: Path

    @classmethod
    def of(cls, state_dir: str) -> State:
        """The state of this machine below ``state_dir`` (``~`` is the agent's home)."""
        return cls(Path(state_root(state_dir)))

    def directory(self, *parts: str) -> Path:
        """``root/parts…``, each created 0700."""
        path = self.root
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        for part in parts:
            path = path / part
            path.mkdir(mode=0o700, exist_ok=True)
        return path

    def server(self, name: str) -> Path:
        return self.directory("servers", name)

    def share(self, run: str, server: str) -> Path:
        return self.directory("runs", run, server)


@dataclass
class AgentContext:
    """One call of the agent; ``deadline`` is a ``time.monotonic()`` value. Any thread may call its methods."""

    request: Request
    state: State
    stdin: BinaryIO = field(default_factory=lambda: sys.stdin.buffer)
    stdout: BinaryIO = field(default_factory=lambda: sys.stdout.buffer)
    deadline: float = 0.0
    output: threading.RLock = field(default_factory=threading.RLock)
    """Held while a frame is written, so that frames of two threads never mix."""

    def __post_init__(self) -> None:
        if not self.deadline:
            self.deadline = time.monotonic() + self.request.deadline

    def remaining(self) -> float:
        """Seconds left for this call."""
        return self.deadline - time.monotonic()

    def emit(self, event: str, **fields: Any) -> None:
        """Send one event line now; values may be protocol dataclasses."""
        self.send({"type": "event", "event": event, **{k: to_json(v) for k, v in fields.items()}})

    def blob(self, source: BinaryIO, size: int, **fields: Any) -> None:
        """Send ``size`` bytes of ``source`` as a ``blob`` event.

        A source that ends early leaves the stream out of step: it is closed, and ``ControllerGone`` raised.
        """
        with self.output:
            self.send({"type": "event", "event": "blob", "size": size, **fields})
            left = size
            while left:
                chunk = source.read(min(left, 1 << 20))
                if not chunk:
                    self.stdout.close()
                    raise ControllerGone(f"the source of a blob ended {left} bytes early")
                self._write(chunk)
                left -= len(chunk)
            self._flush()

    def body(self) -> Iterator[Dict[str, Any]]:
        """The request's body lines, decoded; raises ``ControllerGone`` when they end early."""
        for _ in range(self.request.body_lines):
            line = self.stdin.readline()
            if not line.endswith(b"\n"):
                raise ControllerGone("the controller went away inside the request's body")
            yield json.loads(line)

    def send(self, frame: Dict[str, Any]) -> None:
        """Send one frame of the protocol now; raises ``ControllerGone`` when nobody can read it."""
        data = json.dumps(frame, separators=(",", ":")).encode() + b"\n"
        with self.output:
            self._write(data)
            self._flush()

    def _write(self, data: bytes) -> None:
        try:
            self.stdout.write(data)
        except (BrokenPipeError, ValueError) as error:
            raise ControllerGone(str(error)) from error

    def _flush(self) -> None:
        try:
            self.stdout.flush()
        except BrokenPipeError as error:
            raise ControllerGone(str(error)) from error
