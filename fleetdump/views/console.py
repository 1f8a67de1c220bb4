"""The two consoles: results to stdout, talk to stderr; rich gives colour on a terminal only and honours NO_COLOR."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from rich.console import Console

from fleetdump.errors import FleetdumpError

out = Console(soft_wrap=True, highlight=False)
err = Console(stderr=True, soft_wrap=True, highlight=False)


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
        "error": error and {"what": error.what, "where": error.where, "why": error.why, "next_step": error.next_step},
        "data": result.data,
    }
    out.print(json.dumps(record), markup=False)


def print_error(error: FleetdumpError) -> None:
    """What, where, why and the next step, on stderr; nothing of it is taken for markup."""
    where = f"{error.where}: " if error.where else ""
    err.print("error: ", style="bold red", end="")
    err.print(f"{where}{error.what}", markup=False)
    if error.why:
        err.print(f"  why:  {error.why}", markup=False)
    if error.next_step:
        err.print(f"  next: {error.next_step}", markup=False)


def size(count: float) -> str:
    """Bytes for people, in binary units (1 GiB = 2**30 B)."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(count) < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"


def duration(seconds: float) -> str:
    """``42s``, ``3m10s`` or ``2h05m``."""
    whole = int(seconds)
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m{whole % 60:02d}s"
    return f"{whole // 3600}h{whole % 3600 // 60:02d}m"
