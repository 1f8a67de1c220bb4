"""Self-checks for people: a table of checks for each server."""

from __future__ import annotations

from fleetdump.tasks.selfcheck import ServerCheck
from fleetdump.views.console import duration, out, quoted

_RESULT = {"ok": "[green]ok[/]     ", "warning": "[yellow]warning[/]", "blocker": "[bold red]failed[/] "}
_INDENT = " " * 21


def show_checks(host: str, checks: list[ServerCheck]) -> None:
    """One block a server: the outcome, then a line a check with its numbers, and below what failed what to do."""
    for check in checks:
        name = quoted(f"{host}/{check.server}")
        if check.result is None:
            out.print(f"[bold red]{name}[/] self-check not made: {quoted(check.error)}")
            _show_next(check.next_step)
            continue
        result = check.result
        outcome = "[green]passed[/]" if result.passed else "[bold red]failed[/]"
        causes = f", likely {quoted(', '.join(result.causes))}" if result.causes else ""
        out.print(f"[bold]{name}[/] self-check {outcome} in {duration(result.seconds)}{causes}")
        for found in result.checks:
            out.print(f"  {_RESULT[found.level]}  {found.key:8}  {quoted(found.text)}")
            _show_next(found.fix)


def _show_next(step: str) -> None:
    if step:
        out.print(f"{_INDENT}next: {quoted(step)}")
