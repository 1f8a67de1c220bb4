"""A host's lock, for people."""

from __future__ import annotations

import time

from fleetdump.agent.hostmessages import UnlockResult
from fleetdump.views.console import duration, out, quoted

SHOWN_SECONDS = 10 * 365 * 86400.0
"""A lock that claims to be older has no age worth telling."""


def show_unlock(host: str, result: UnlockResult) -> None:
    """Free, removed or held; by whom, since when, and whether they live."""
    name = f"[bold]{quoted(host)}[/]"
    if result.damage:
        done = "[green]removed[/]" if result.state == "removed" else "[bold red]damaged[/]; --force removes it"
        out.print(f"{name}  {done}: {quoted(result.damage)}")
        return
    if result.state == "free":
        out.print(f"{name}  [green]free[/]: nobody holds the lock")
        return
    age = time.time() - result.since
    since = f" since {duration(age)}" if 0 <= age < SHOWN_SECONDS else ""
    lives = "who lives" if result.alive else "who is dead"
    state = "[green]removed[/]" if result.state == "removed" else "[bold red]held[/]"
    out.print(f"{name}  {state}: {quoted(result.holder)}{since}, {lives}")
    if result.state == "held":
        out.print("  wait until that ends (--lock-wait), or ask them; --force takes it away", markup=False)
