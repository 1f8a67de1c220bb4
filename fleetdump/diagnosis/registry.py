"""The table of signatures: each file of ``signatures/`` adds its own at import."""

from __future__ import annotations

import enum
from collections.abc import Callable

from fleetdump.diagnosis.types import Verdict
from fleetdump.diagnosis.view import View

Signature = Callable[[View], Verdict | None]


class Step(enum.IntEnum):
    """The decision order: what is found at an earlier step stands before what is found at a later one."""

    PROCESSES = 1
    STOPPED = 2
    HARDWARE = 3
    HOST = 4
    ANSWERING = 5
    PROGRESS = 6
    LOCKS = 7
    WAITING = 8
    NOTES = 9


SIGNATURES: list[tuple[Step, Signature]] = []


def signature(step: Step) -> Callable[[Signature], Signature]:
    """Register a signature: a pure function from a view to its verdict, or None when it does not apply."""

    def register(function: Signature) -> Signature:
        SIGNATURES.append((step, function))
        return function

    return register
