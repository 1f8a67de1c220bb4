"""The two consoles: results to stdout, talk to stderr; rich gives colour on a terminal only and honours NO_COLOR.

Much of what is shown was written by others (logs, command lines, file names). ``SafeConsole`` keeps it from steering
the terminal; ``quoted`` keeps it from being taken for markup or for lines of its own.
"""

from __future__ import annotations

import json
import math
import re
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.markup import escape

from fleetdump.errors import FleetdumpError

_STEERING = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
"""Control characters but newline and tab, and those that reorder or break lines."""

_UNTAGGED = re.compile(r"\\\[(?![a-z#/@][^\[]*?\])")
"""A backslash before a bracket that begins no tag: rich's ``escape`` leaves it alone, and its ``render`` drops it."""


def visible(text: str) -> str:
    """``text`` with control characters, escape sequences' beginnings and direction marks as backslash escapes."""
    return _STEERING.sub(lambda match: repr(match.group())[1:-1], text)


def quoted(text: str) -> str:
    """``text`` for use inside a line with markup: nothing of it is markup, and it stays on that line."""
    return _UNTAGGED.sub(r"\\\\[", escape(text.replace("\n", "\\n").replace("\t", "    ")))


class SafeConsole(Console):
    """A console that shows what would steer the terminal instead of sending it."""

    def print(self, *objects: Any, **options: Any) -> None:
        """As rich's; every text passes ``visible``."""
        super().print(*(visible(each) if isinstance(each, str) else each for each in objects), **options)


out = SafeConsole(soft_wrap=True, highlight=False, emoji=False)
err = SafeConsole(stderr=True, soft_wrap=True, highlight=False, emoji=False)


@dataclass
class HostResult:
    """One host's outcome of one command, as ``--json`` prints it."""

    host: str
    command: str
    status: str
    """ok, failed, unreachable, stall or locked."""
    error: FleetdumpError | None = None
    data: Any = None


def print_json(result: HostResult) -> None:
    """One object a line on stdout."""
    error = result.error
    record = {
        "host": result.host,
        "command": result.command,
        "status": result.status,
        "error": error and _in_json(error),
        "data": result.data,
    }
    out.print(json.dumps(record), markup=False)


def _in_json(error: FleetdumpError) -> dict[str, str]:
    """``code`` names the kind for scripts (an agent's code, SSH_THROTTLED …); empty where there is none."""
    parts = {"what": error.what, "where": error.where, "why": error.why, "next_step": error.next_step}
    return {"code": getattr(error, "code", ""), **parts}


def print_error(error: FleetdumpError) -> None:
    """What, where, why and the next step, on stderr; nothing of it is taken for markup."""
    where = f"{error.where}: " if error.where else ""
    err.print("error: ", style="bold red", end="")
    err.print(_indented(f"{where}{error.what}"), markup=False)
    if error.why:
        err.print(f"  why:  {_indented(error.why)}", markup=False)
    if error.next_step:
        err.print(f"  next: {_indented(error.next_step)}", markup=False)


def _indented(text: str) -> str:
    """Further lines of a text, so that they cannot pass for ours."""
    return text.replace("\n", "\n        ")


def size(count: float) -> str:
    """Bytes for people, in binary units (1 GiB = 2**30 B)."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(count) < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"


def duration(seconds: float) -> str:
    """``42s``, ``3m10s`` or ``2h05m``; ``?`` for what is no number (a file of a host may say NaN)."""
    if not math.isfinite(seconds):
        return "?"
    whole = int(seconds)
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m{whole % 60:02d}s"
    return f"{whole // 3600}h{whole % 3600 // 60:02d}m"


def count(number: int, noun: str) -> str:
    """``1 host``, ``2 hosts``."""
    return f"{number} {noun}" + ("s" if number != 1 else "")
