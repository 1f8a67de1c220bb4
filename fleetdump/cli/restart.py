"""``fleetdump restart``."""

from __future__ import annotations

import click

from fleetdump.cli._fleet import FleetOptions, ServerName, Verb, event_printer, fleet_options, lock_wait_option, run
from fleetdump.tasks.deploy import hold_limit
from fleetdump.tasks.restart import Restarted, exit_code
from fleetdump.tasks.restart import restart as restart_on
from fleetdump.views.console import duration, out, quoted
from fleetdump.views.hosts import show_verdicts
from fleetdump.views.progress import StartLines

TAIL_LINES = 12


def _show(host: str, servers: list[Restarted]) -> None:
    for server in servers:
        name = quoted(f"{host}/{server.server}")
        if server.outcome == "ready":
            patch = f", patch {server.patch}" if server.patch else ""
            ready = f"restarted, ready in {duration(server.seconds)}, {server.lines} log lines"
            out.print(f"[green]{name}[/] {ready}{quoted(patch)}")
            continue
        where = f" in phase {server.phase}" if server.phase else ""
        out.print(f"[bold red]{name}[/] {quoted(server.outcome + where)}: {quoted(server.detail)}")
        if server.next_step:
            out.print(f"  next: {quoted(server.next_step)}")
        show_verdicts(server.verdicts)
        for line in [] if server.verdicts else server.log_tail[-TAIL_LINES:]:
            out.print(f"  | {quoted(line)}")
    if not servers:
        out.print(f"[bold]{quoted(host)}[/]  nothing of ours was launched here")
        out.print("  next: fleetdump deploy launches the servers of the inventory")


@click.command(short_help="Stop servers and launch them again as they were.")
@click.option(
    "--server",
    "servers",
    type=ServerName(),
    multiple=True,
    help="Only this server; may be repeated. Default: all of ours.",
)
@click.option("--no-selfcheck", is_flag=True, help="Do not send the few prompts that prove the captured numbers.")
@lock_wait_option
@fleet_options
def restart(options: FleetOptions, servers: tuple[str, ...], no_selfcheck: bool) -> None:
    """Stop servers and launch them again with the very command line, environment and patch that they were launched
    with, whatever the inventory says now; then watch and check them as `deploy` does.

    A server that no longer runs is launched again from its record; what that does not hold (secrets, values of its
    environment) is taken from the inventory, if it still describes that very launch.

    \b
    Example:
      fleetdump restart --host gpu01 --server main
    """
    starts = StartLines()
    longest = max((hold_limit(host) for host in options.select(read_only=False)), default=0.0)
    run(
        options,
        Verb("restart", _show, code=exit_code, deadline=longest),
        lambda host: restart_on(host, list(servers), not no_selfcheck, event_printer(host.config.name, starts)),
    )
