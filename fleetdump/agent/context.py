"""What every verb of the agent gets: the request, the state directory's paths, and the way to answer.

A verb is a function ``(args, ctx) -> result``; ``main.VERB_TABLE`` says which. It raises ``AgentFailure`` for what the
user should read, and returns a result dataclass of ``protocol``.
"""

from __future__ import annotations

import json
import os
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, Dict, Iterator

from fleetdump.agent.protocol import Request, to_json


def machine_id() -> str:
    """A stable name of this machine, for state directories on a home that hosts share."""
    for path in ("/etc/machine-id", "/var/lib/dbus/machine-id"):
        try:
            text = Path(path).read_text().strip()
        except OSError:
            continue
        if text:
            return f"{text[:12]}-{os.uname().nodename}"
    return os.uname().nodename


@dataclass
class State:
    """Paths of ``<state_dir>/<machine-id>/``; see docs/formats.md. Directories are made 0700 on first use."""

    root: Path

    @classmethod
    def of(cls, state_dir: str) -> State:
        """The state of this machine below ``state_dir`` (``~`` is the agent's home)."""
        return cls(Path(os.path.expanduser(state_dir)) / machine_id())

    def directory(self, *parts: str) -> Path:
        """``root/parts…``, created 0700."""
        path = self.root.joinpath(*parts)
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        return path

    def server(self, name: str) -> Path:
        return self.directory("servers", name)

    def share(self, run: str, server: str) -> Path:
        return self.directory("runs", run, server)


@dataclass
class AgentContext:
    """One call of the agent. ``deadline`` is a ``time.monotonic()`` value."""

    request: Request
    state: State
    stdin: BinaryIO = field(default_factory=lambda: sys.stdin.buffer)
    stdout: BinaryIO = field(default_factory=lambda: sys.stdout.buffer)
    deadline: float = 0.0

    def __post_init__(self) -> None:
        if not self.deadline:
            self.deadline = time.monotonic() + self.request.deadline

    def remaining(self) -> float:
        """Seconds left for this call."""
        return self.deadline - time.monotonic()

    def emit(self, event: str, **fields: Any) -> None:
        """Send one event line now; values may be protocol dataclasses."""
        self._line({"type": "event", "event": event, **{k: to_json(v) for k, v in fields.items()}})

    def blob(self, source: BinaryIO, size: int, **fields: Any) -> None:
        """Send ``size`` bytes of ``source`` as a ``blob`` event."""
        self._line({"type": "event", "event": "blob", "size": size, **fields})
        left = size
        while left:
            chunk = source.read(min(left, 1 << 20))
            if not chunk:
                raise OSError(f"source ended {left} bytes early")
            self.stdout.write(chunk)
            left -= len(chunk)
        self.stdout.flush()

    def body(self) -> Iterator[Dict[str, Any]]:
        """The request's body lines, decoded."""
        for _ in range(self.request.body_lines):
            line = self.stdin.readline()
            if not line.endswith(b"\n"):
                raise EOFError("the controller went away inside the request's body")
            yield json.loads(line)

    def _line(self, data: Dict[str, Any]) -> None:
        self.stdout.write(json.dumps(data, separators=(",", ":")).encode() + b"\n")
        self.stdout.flush()
