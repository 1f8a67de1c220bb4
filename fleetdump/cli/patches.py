"""``fleetdump patches``: list, show and test them."""

from __future__ import annotations

import sys
from typing import get_args

import click

from fleetdump.agent.patchmessages import PatchResult
from fleetdump.agent.protocol import to_json
from fleetdump.agent.specs import ServerSpec
from fleetdump.cli._fleet import FleetOptions, Report, Verb, fleet_options, run
from fleetdump.errors import UsageError
from fleetdump.fleet import Host, fan_out
from fleetdump.inventory import HostConfig
from fleetdump.patches import find_patch, known_patches, load_patch
from fleetdump.tasks.deployplan import Delivery
from fleetdump.tasks.patches import dry_run
from fleetdump.views.console import out, print_error
from fleetdump.views.patches import show_dry_run, show_patch, show_patches

TEST_DEADLINE = 300.0


@click.group(short_help="List, show and test patches.")
def patches() -> None:
    """The patches that fleetdump knows: its own, and those in ./patches.

    \b
    Examples:
      fleetdump patches list
      fleetdump patches show hidden-states
      fleetdump patches test ./patches/mine --python /opt/sglang/bin/python
    """


@patches.command("list", short_help="Names, versions and what each touches.")
def list_patches() -> None:
    """Every known patch, by the name that other commands take: that of its folder. One with mistakes is named with
    them, and the others are still listed.

    \b
    Example:
      fleetdump patches list
    """
    loaded = []
    broken = False
    for name, path in dict(known_patches()).items():
        try:
            loaded.append((name, load_patch(path), path))
        except UsageError as error:  # noqa: PERF203
            print_error(error)
            broken = True
    show_patches(loaded)
    if broken:
        sys.exit(UsageError.exit_code)


@patches.command("show", short_help="What a patch does.")
@click.argument("patch")
@click.option("--json", "as_json", is_flag=True, help="The whole patch as one JSON object.")
def show(patch: str, as_json: bool) -> None:
    """The edits, diff or script of PATCH (a name, or a folder with a slash in it).

    \b
    Examples:
      fleetdump patches show hidden-states
      fleetdump patches show ./patches/mine --json
    """
    spec = load_patch(find_patch(patch))
    if as_json:
        out.print_json(data=to_json(spec))
    else:
        show_patch(spec)


@patches.command("test", short_help="A dry run with its diff; nothing is changed.")
@click.argument("patch")
@click.option("--python", default="", help="An interpreter of this machine that imports sglang, instead of hosts.")
@click.option(
    "--model", default="", help="With --python: the model's directory; else the files of every model are shown."
)
@click.option(
    "--delivery",
    type=click.Choice(get_args(Delivery)),
    default="in-place",
    show_default=True,
    help="How it would come to the server: by files that are changed, or by an import hook that changes none.",
)
@click.option("--force", is_flag=True, help="As if files that somebody else edited were taken as they are.")
@fleet_options
def test(options: FleetOptions, patch: str, python: str, model: str, delivery: Delivery, force: bool) -> None:
    """Would PATCH fit? Shows what it would change on the chosen hosts, or for one interpreter of this machine.

    \b
    Examples:
      fleetdump patches test hidden-states --python /opt/sglang/bin/python --model /models/Kimi-K2.5
      fleetdump patches test ./patches/mine --host gpu01
      fleetdump patches test hidden-states --host gpu01 --delivery import-hook
    """
    if model and not python:
        raise UsageError("--model goes with --python", why="hosts of the inventory say what their servers serve")
    spec = load_patch(find_patch(patch))
    verb = Verb("patches test", show_dry_run, read_only=True, deadline=TEST_DEADLINE)

    def on_host(host: Host) -> list[PatchResult]:
        return dry_run(host, spec, delivery, force)

    if not python:
        run(options, verb, on_host)
    report = Report(options, verb)
    here = HostConfig(
        "localhost",
        "localhost",
        connection="local",
        agent_python=sys.executable,
        servers=(ServerSpec("test", python, model, 0),),
    )
    fan_out([here], on_host, deadline=TEST_DEADLINE, options=options.connect_options(), on_outcome=report.add)
    sys.exit(report.close())
