"""The table of signatures: each file of ``signatures/`` adds its own at import."""

from __future__ import annotations

import enum
from collections.abc import Callable

from fleetdump.diagnosis.types import Verdict
from fleetdump.diagnosis.view import View

Signature = Callable[[View], Verdict | None]


class Step(enum.IntEnum):
    """The decision order: what is found at an earlier step stands before what is found at a later one.

    Causes outside the server (hardware, host, limits that were set) come before what they did to its processes. What is
    found at ENDED stands alone: a server that its operator ended has nothing to explain.
    """

    ENDED = 0
    HARDWARE = 1
    HOST = 2
    PIPES = 3
    PROCESSES = 4
    STOPPED = 5
    ANSWERING = 6
    PROGRESS = 7
    LOCKS = 8
    COLLECTIVES = 9
    WAITING = 10
    NOTES = 11


SIGNATURES: list[tuple[Step, Signature]] = []


def signature(step: Step) -> Callable[[Signature], Signature]:
    """Register a signature: a pure function from a view to its verdict, or None when it does not apply."""

    def register(function: Signature) -> Signature:
        SIGNATURES.append((step, function))
        return function

    return register
