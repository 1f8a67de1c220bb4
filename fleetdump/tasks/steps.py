"""What a command does to a host, told step by step, and what is left of that when it is interrupted."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

Event = Callable[[dict[str, Any]], None]

CHANGES = ("stop", "patch", "revert", "launch")
"""Steps that change a host."""


@dataclass(frozen=True)
class Steps:
    """Tells the steps of one host to ``emit``: ``begin`` before a step that changes something and ``end`` after it,
    ``step`` for people."""

    emit: Event

    def begin(self, step: str, text: str) -> None:
        """``text`` in words that fit behind "it was"."""
        self.emit({"event": "begin", "step": step, "text": text})

    def end(self, step: str) -> None:
        """The step that was begun is over, whatever it did."""
        self.emit({"event": "end", "step": step})

    def tell(self, step: str, text: str, server: str = "") -> None:
        """Something has happened, or is found."""
        self.emit({"event": "step", "step": step, "text": text, **({"server": server} if server else {})})


@dataclass
class HostHistory:
    """What became of one host so far: changes that are done, the one that was under way, and servers that were launched
    and run on."""

    done: list[str] = field(default_factory=list)
    doing: str = ""
    running: list[str] = field(default_factory=list)


class History:
    """Collects the events of all hosts, from any thread."""

    def __init__(self) -> None:
        self.hosts: dict[str, HostHistory] = {}

    def of(self, host: str) -> HostHistory:
        """That of one host, which may have just begun."""
        return self.hosts.setdefault(host, HostHistory())

    def add(self, host: str, event: dict[str, Any]) -> None:
        """One event of a host."""
        history = self.of(host)
        kind, step, text = event.get("event"), event.get("step"), str(event.get("text", ""))
        if kind == "begin":
            history.doing = text
        elif kind == "end":  # nothing else ends it: servers that were launched before tell of their start meanwhile
            history.doing = ""
        if kind == "step" and step in CHANGES:
            history.done.append(text)
            if step == "launch":
                history.running.append(str(event.get("server")))
            elif step == "stop":
                history.running.clear()
