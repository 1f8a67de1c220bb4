"""The options that choose a patch and how it comes into the engine, the same for every command that has them."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, get_args

import click
from click.core import ParameterSource

from fleetdump.agent.specs import PatchSpec
from fleetdump.patches import find_patch, load_patch
from fleetdump.tasks.deployplan import Delivery


@dataclass(frozen=True)
class PatchChoice:
    """The patch (None: the engine as shipped), and its delivery."""

    spec: PatchSpec | None
    delivery: Delivery


def patch_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add --patch, --no-patch and --delivery to a click command, and hand them over as one ``PatchChoice``."""

    @click.option("--patch", default="hidden-states", show_default=True, help="The patch: its name or its folder.")
    @click.option("--no-patch", is_flag=True, help="The engine as shipped; deploy takes out a patch of ours.")
    @click.option(
        "--delivery",
        type=click.Choice(get_args(Delivery)),
        default="in-place",
        show_default=True,
        help="Change SGLang's files, or none: a hook in the launched process rewrites the module as it is imported.",
    )
    @functools.wraps(command)
    def wrapper(*args: Any, patch: str, no_patch: bool, delivery: Delivery, **kwargs: Any) -> Any:
        if no_patch and click.get_current_context().get_parameter_source("patch") != ParameterSource.DEFAULT:
            raise click.UsageError("--patch and --no-patch exclude each other")
        spec = None if no_patch else load_patch(find_patch(patch))
        return command(*args, choice=PatchChoice(spec, delivery), **kwargs)

    return wrapper
