"""``fleetdump init``."""

from __future__ import annotations

import os
from pathlib import Path

import click

from fleetdump.errors import UsageError
from fleetdump.inventory import example_for
from fleetdump.views.console import err


@click.command(short_help="Write a commented inventory from host names.")
@click.argument("hosts", nargs=-1, required=True, metavar="HOST...")
@click.option(
    "-o",
    "--output",
    type=click.Path(path_type=Path),
    default=Path("inventory.yaml"),
    show_default=True,
    help="The file to write.",
)
@click.option("--force", is_flag=True, help="Overwrite the file.")
def init(hosts: tuple[str, ...], output: Path, force: bool) -> None:
    """Write a commented inventory for HOST... (names, addresses, user@host:port).

    \b
    Example:
      fleetdump init root@10.1.230.174 gpu02 gpu03
    """
    text = example_for(list(hosts))
    flags = os.O_WRONLY | os.O_CREAT | (os.O_TRUNC if force else os.O_EXCL)
    try:
        with os.fdopen(os.open(output, flags, 0o600), "w", encoding="utf-8") as file:
            file.write(text)
    except FileExistsError:
        raise UsageError(
            f"{output} exists", next_step="choose another name with -o, or overwrite it with --force"
        ) from None
    except OSError as error:
        raise UsageError(f"cannot write {output}", why=str(error)) from error
    err.print(f"wrote {output}: set python, model_path and capture, then run fleetdump check", markup=False)
    err.print("unknown host keys are refused: pin them as host_key there, or add --accept-new the first time")
