"""What ``deploy`` would change, and which patch works where; hosts alike are told once."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from fleetdump.hostpatterns import compress
from fleetdump.tasks.changes import HostChanges
from fleetdump.tasks.deployplan import DeployReport
from fleetdump.views.console import err, out, quoted
from fleetdump.views.patches import show_diff


def show_changes(changes: Mapping[str, HostChanges], with_diff: bool) -> None:
    """What a deploy would change, the unified diffs and command lines too where they are wanted."""
    groups: dict[tuple[str, ...], list[str]] = {}
    for host, one in changes.items():
        groups.setdefault(tuple(one.lines()), []).append(host)
    for lines, hosts in groups.items():
        if not lines:
            out.print(f"[green]{quoted(_names(hosts))}[/]: unchanged")
            continue
        out.print(f"[bold]{quoted(_names(hosts))}[/]: would change")
        for line in lines:
            out.print(f"  {quoted(line)}")
    if with_diff:
        _show_details(changes)


def _show_details(changes: Mapping[str, HostChanges]) -> None:
    details: dict[tuple[str, tuple[str, ...]], list[str]] = {}
    for host, one in changes.items():
        commands = (f"{launch.server}: {' '.join(launch.argv)}" for launch in one.launches if launch.change != "none")
        details.setdefault((one.diff, tuple(commands)), []).append(host)
    for (diff, starts), hosts in details.items():
        if diff or starts:
            out.print(f"[bold]{quoted(_names(hosts))}[/]:")
            show_diff(diff)
        for command in starts:
            out.print(f"  starts {quoted(command)}")


def show_host_diff(host: str, diff: str) -> None:
    """What is about to change in a host's files, as talk: stdout has the results."""
    for line in diff.splitlines():
        err.print(f"[{host}] {line}", markup=False)


def show_works(reports: Mapping[str, DeployReport]) -> None:
    """After fallbacks: which patch works on which hosts, and where none does."""
    if not any(report.attempts for report in reports.values()):
        return
    working: dict[str, list[str]] = {}
    for host, report in reports.items():
        ready = all(server.outcome == "ready" for server in report.servers)
        working.setdefault((report.patch or "no patch") if ready else "", []).append(host)
    for patch, hosts in working.items():
        if patch:
            out.print(f"[green]{quoted(patch)}[/] works on {quoted(_names(hosts))}")
        else:
            out.print(f"[bold red]none[/] of the patches works on {quoted(_names(hosts))}")


def _names(hosts: Iterable[str]) -> str:
    return ", ".join(compress(sorted(hosts)))
