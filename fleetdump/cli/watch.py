"""``fleetdump watch``."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import click

from fleetdump.agent.servermessages import MonitorResult
from fleetdump.cli._fleet import FleetOptions, Seconds, ServerName, Verb, fleet_options, run
from fleetdump.fleet.fanout import MAX_THREADS
from fleetdump.tasks.fleetstarts import FleetStarts, own_file
from fleetdump.tasks.watch import Listener, WatchPlan, exit_code
from fleetdump.tasks.watch import watch as watch_on
from fleetdump.views.interrupts import show_nothing_cut
from fleetdump.views.watch import WatchView

DAY = 86400.0


@click.command(short_help="Follow servers live: phases, rates, and what goes wrong.")
@click.option(
    "--server",
    "servers",
    type=ServerName(),
    multiple=True,
    help="Only this server; may be repeated. Default: all of ours.",
)
@click.option("--interval", type=Seconds(0.2, 60), default=2.0, show_default=True, help="Seconds between two looks.")
@click.option("--for", "seconds", type=Seconds(1, DAY), default=DAY, metavar="SECONDS", help="End after so long.")
@click.option("--until-ready", is_flag=True, help="End as soon as every server is ready, or has a fault.")
@fleet_options
def watch(options: FleetOptions, servers: tuple[str, ...], interval: float, seconds: float, until_ready: bool) -> None:
    """Follow the servers of the chosen hosts: one line each, kept up to date; faults with their cause as they come.

    Changes nothing on the hosts, and costs each of them one call for as long as you look. A host whose link is cut is
    tried again until it is back; the others go on. Leave with Ctrl-C. Without a terminal a line goes to stdout on each
    change, with --json an object. How long a server may get nowhere before that is called a stall is the inventory's
    `patience`, by phase (docs/watch.md); `extract --patience` is another one. When it ends by itself the exit code says
    how things stood: 0 all well, 4 a stall, 1 another fault, 3 a host that did not come back.

    \b
    Examples:
      fleetdump watch
      fleetdump watch --host @small --until-ready
      fleetdump watch --host gpu01 --for 600 --json
    """
    hosts = len(options.select(read_only=True))
    if hosts > MAX_THREADS:
        raise click.UsageError(
            f"a watch follows at most {MAX_THREADS} hosts, and these are {hosts}: choose with --host"
        )
    plan = WatchPlan(servers, interval, seconds, until_ready, FleetStarts(own_file()))
    with WatchView(options.as_json) as view:
        run(
            replace(options, jobs=max(hosts, 1)),
            Verb(
                "watch",
                _show,
                code=exit_code,
                read_only=True,
                deadline=seconds + 90.0,
                interrupted=show_nothing_cut,
            ),
            lambda host: watch_on(host, plan, _listener(view, host.config.name)),
        )


def _listener(view: WatchView, host: str) -> Listener:
    return Listener(partial(view.update, host), partial(view.empty, host), partial(view.lost, host))


def _show(_host: str, _result: MonitorResult) -> None:
    """All has been shown as it came."""
