"""How things stand after Ctrl-C: what was done, what runs on, how to go on; hosts alike are told once."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from fleetdump.hostpatterns import compress
from fleetdump.tasks.steps import HostHistory
from fleetdump.views.console import err, quoted


def show_look_cut(_ended: list[str], waiting: list[str]) -> None:
    """After a command that only looks: which hosts had not answered."""
    text = f"; no answer yet from {_names(waiting)}" if waiting else ""
    err.print(f"[bold]interrupted[/]; nothing was changed on the hosts{quoted(text)}")


def show_change_cut(verb: str, ended: list[str], waiting: list[str]) -> None:
    """After a command that changes hosts: where it had ended, and where it may have done something."""
    err.print("[bold]interrupted[/]")
    if ended:
        err.print(f"  {quoted(_names(ended))}: {verb} has ended")
    if waiting:
        err.print(f"  {quoted(_names(waiting))}: {verb} was under way and may or may not be done")
    err.print("  to go on: the same command again; to look: fleetdump status")


def show_nothing_cut(_ended: list[str], _waiting: list[str]) -> None:
    """After a command that is there to be left with Ctrl-C: nothing of it goes on."""


def show_interrupted(histories: Mapping[str, HostHistory], hosts: Iterable[str]) -> None:
    """What was done on each of ``hosts``, which had not ended, what runs on there, and how to go on."""
    left: dict[str, list[str]] = {}
    for host in sorted(hosts):
        left.setdefault(_what_was_done(histories.get(host, HostHistory())), []).append(host)
    err.print("[bold]interrupted[/]")
    for text, names in left.items():
        err.print(f"  {quoted(_names(names))}: {quoted(text)}")
    err.print("  to go on: the same command again, it takes up what is there; to look: fleetdump status")
    err.print("  to undo:  fleetdump stop, then fleetdump revert")


def _what_was_done(history: HostHistory) -> str:
    parts = list(history.done)
    if history.doing:
        parts.append(f"{history.doing} was under way and may or may not be done")
    if history.running:
        servers = ", ".join(history.running)
        parts.append(f"{servers} {'goes' if len(history.running) == 1 else 'go'} on without this command")
    return "; ".join(parts) or "nothing was changed"


def _names(hosts: Iterable[str]) -> str:
    return ", ".join(compress(sorted(hosts)))
