"""The options of commands that read a data set."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from fleetdump.agent.runmessages import TOO_LONG
from fleetdump.dataset.intake import MAX_REJECTS, DataSet, take_in
from fleetdump.dataset.rows import numbered_rows
from fleetdump.tasks.plan import Limits

runs_dir_option = click.option(
    "--runs-dir",
    type=click.Path(path_type=Path),
    default=Path("runs"),
    show_default=True,
    help="Where this machine keeps the ledger and the files of each run; the same for all commands of a run.",
)


@dataclass(frozen=True)
class DataOptions:
    """Which data, and what becomes of rows that are broken or too long. ``max_tokens`` None and an empty ``too_long``:
    the user said nothing, so an existing run keeps what it was begun with."""

    path: Path
    max_rejects: int
    max_tokens: int | None
    too_long: str

    def take_in(self) -> DataSet:
        """The data set; raises ``UsageError``."""
        return take_in(numbered_rows(self.path), self.max_rejects, str(self.path))

    @property
    def limits(self) -> Limits:
        """Of a run that begins."""
        return Limits(self.max_tokens or 0, self.too_long == "truncate")


def data_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add the options to a click command and hand them over as one ``DataOptions``, ``data``."""

    @click.option(
        "--data",
        required=True,
        type=click.Path(path_type=Path),
        help="JSONL (.gz, .zst), Parquet, Arrow, or a folder that datasets saved; docs/data.md.",
    )
    @click.option(
        "--max-rejects",
        type=click.IntRange(0),
        default=MAX_REJECTS,
        show_default=True,
        help="Leave out so many broken rows; stop when there are more.",
    )
    @click.option(
        "--max-tokens", type=click.IntRange(2), default=None, help="Longest sample.  [default: what the server takes]"
    )
    @click.option(
        "--too-long",
        type=click.Choice(TOO_LONG),
        default=None,
        help=f"What becomes of a longer one: left out, or cut at its end.  [default: {TOO_LONG[0]}]",
    )
    @functools.wraps(command)
    def wrapper(
        *args: Any,
        data: Path,
        max_rejects: int,
        max_tokens: int | None,
        too_long: str | None,
        **kwargs: Any,
    ) -> Any:
        return command(*args, data=DataOptions(data, max_rejects, max_tokens, too_long or ""), **kwargs)

    return wrapper
