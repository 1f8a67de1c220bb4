"""Ctrl-C: the terminal is back at once, with what was done, what runs on, and how to go on."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections.abc import Iterator
from typing import NoReturn

from fleetdump.errors import ExitCode
from fleetdump.views.console import err

NOTHING = "nothing was changed on the hosts"


def end_of_work() -> None:
    """From now on Ctrl-C does nothing: the process ends in a moment, with its last words whole."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def leave() -> NoReturn:
    """End at once with the exit code of an interrupt: threads that still wait for a host that is gone must not keep the
    terminal. The connections end with this process, and the agents with their connections."""
    with contextlib.suppress(OSError):
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(ExitCode.INTERRUPTED)


def say_and_leave(words: str) -> NoReturn:
    """Say how things stand after an interrupt, and ``leave``."""
    end_of_work()
    err.print(f"interrupted; {words}", markup=False)
    leave()


@contextlib.contextmanager
def interruptible(words: str) -> Iterator[None]:
    """An interrupt inside (also as a decorator) says ``words`` and ends the process."""
    try:
        yield
    except KeyboardInterrupt:
        say_and_leave(words)
