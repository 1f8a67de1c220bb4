"""Errors that a user reads: each says what failed, where, why, and what to do next, and carries its exit code.

Raise these where the cause is understood; ``fleetdump.cli.main`` shows them in one place.
"""

from __future__ import annotations

import enum
import re
from dataclasses import dataclass


class ExitCode(enum.IntEnum):
    """Exit status of every command; if several apply, 4 wins over 3 over 1 (``worst``)."""

    OK = 0
    FAILED = 1
    USAGE = 2
    UNREACHABLE = 3
    STALL = 4
    LOCKED = 5
    INTERRUPTED = 130


_NAMES = re.compile(r"[\w.-]*\w")
_PRECEDENCE = (
    ExitCode.INTERRUPTED,
    ExitCode.STALL,
    ExitCode.UNREACHABLE,
    ExitCode.LOCKED,
    ExitCode.FAILED,
    ExitCode.USAGE,
    ExitCode.OK,
)


def worst(codes: list[ExitCode]) -> ExitCode:
    """The exit code that stands for all hosts: the first of the precedence order that occurs."""
    return next((code for code in _PRECEDENCE if code in codes), ExitCode.OK)


@dataclass(eq=False)
class FleetdumpError(Exception):
    """What failed, where (host, file:line, server), why, and the next step to take."""

    what: str
    where: str = ""
    why: str = ""
    next_step: str = ""

    exit_code = ExitCode.FAILED

    def __str__(self) -> str:
        head = f"{self.where}: {self.what}" if self.where else self.what
        return f"{head} ({self.why})" if self.why else head


def kind_of(error: FleetdumpError, host: str) -> str:
    """Equal for errors that differ in the host alone: its name, and the other names and addresses of ``where``."""
    text = "\n".join((type(error).__name__, error.what, error.why, error.next_step))
    for name in sorted({host, *_NAMES.findall(error.where)}, key=len, reverse=True):
        text = re.sub(rf"(?<![\w.-]){re.escape(name)}(?![\w-]|\.\w)", "{}", text)
    return text


def of_local_file(error: OSError, where: str = "") -> FleetdumpError:
    """The error for a file of this machine that cannot be read or written."""
    place = str(error.filename) if error.filename else "a file of this machine"
    step = "check that path, its permissions and the free space on this machine"
    return FleetdumpError(f"{place} cannot be used", where, error.strerror or str(error), step)


class UsageError(FleetdumpError):
    """Wrong command line, inventory or data file; nothing was done on any host."""

    exit_code = ExitCode.USAGE


class UnreachableError(FleetdumpError):
    """The host could not be reached or refused us (name, route, host key, authentication, time-out). ``code`` is one of
    ``diagnosis.codes`` where the cause is known."""

    exit_code = ExitCode.UNREACHABLE

    def __init__(self, what: str, where: str = "", why: str = "", next_step: str = "", code: str = "unreachable"):
        super().__init__(what, where, why, next_step)
        self.code = code


class HostError(FleetdumpError):
    """The agent ran on the host and reported that the verb failed; ``code`` is the agent's error code."""

    def __init__(self, what: str, where: str = "", why: str = "", next_step: str = "", code: str = "failed"):
        super().__init__(what, where, why, next_step)
        self.code = code


class LockedError(FleetdumpError):
    """Another operator or process holds the host's lock."""

    exit_code = ExitCode.LOCKED


class DrivenError(LockedError):
    """Another controller drives the run."""

    @classmethod
    def of(cls, locked: LockedError) -> DrivenError:
        """What a host refused, once it is known that another controller is the reason."""
        return cls(locked.what, locked.where, locked.why, locked.next_step)
