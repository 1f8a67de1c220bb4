"""Fabric's ``@task`` with its types kept: what fleetdump does can also be called from a user's own fabfile."""

from __future__ import annotations

from collections.abc import Callable
from typing import ParamSpec, TypeVar, cast

import fabric

P = ParamSpec("P")
R = TypeVar("R")


def task(function: Callable[P, R]) -> Callable[P, R]:
    """``fabric.task`` for a function whose first parameter is a ``fleet.Host``."""
    return cast(Callable[P, R], fabric.task(function))
