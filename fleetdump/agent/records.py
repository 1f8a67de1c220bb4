"""Small JSON files of the state directory, read with the distrust that a disk deserves.

A *record* says what exists: one that cannot be read is an ``AgentFailure`` that names it. *Advice* only makes answers
better: what cannot be read of it is as if it were not there.
"""

from __future__ import annotations

import contextlib
import errno
import json
from pathlib import Path
from typing import Iterator, Optional, Type, TypeVar

from fleetdump.agent.formats import FORMAT_VERSION, FormatError
from fleetdump.agent.jsonl import read_small
from fleetdump.agent.protocol import AgentFailure, from_json

T = TypeVar("T")

UNREADABLE = (OSError, ValueError, OverflowError, RecursionError)
"""What reading and decoding JSON of unknown content may raise; ``ValueError`` covers text, JSON and our own checks."""
NOT_WRITABLE = (errno.ENOSPC, errno.EDQUOT, errno.EROFS)


class OtherVersionError(FormatError):
    """Another version of fleetdump wrote the file."""


def decode(kind: Type[T], text: bytes, where: str) -> T:
    """``kind`` from its JSON; raises one of ``UNREADABLE``."""
    data = json.loads(text.decode())
    version = data.get("v", FORMAT_VERSION) if isinstance(data, dict) else FORMAT_VERSION
    if version != FORMAT_VERSION:
        raise OtherVersionError(f"another version of fleetdump wrote it (format {version!r}, not {FORMAT_VERSION})")
    return from_json(kind, data, where)


def read_record(kind: Type[T], path: Path, next_step: str) -> Optional[T]:
    """The record at ``path``, None when there is none. Raises ``AgentFailure`` (failed) with ``next_step`` when it
    cannot be read."""
    try:
        return decode(kind, read_small(path), path.name)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OtherVersionError as error:
        raise broken(path, str(error), "use that version of fleetdump for what it has begun") from error
    except UNREADABLE as error:
        raise broken(path, str(error), next_step) from error


def read_advice(kind: Type[T], path: Path) -> Optional[T]:
    """The advice at ``path``, None when there is none that can be read."""
    with contextlib.suppress(*UNREADABLE):
        return decode(kind, read_small(path), path.name)
    return None


def broken(path: Path, why: str, next_step: str) -> AgentFailure:
    """The failure of a record that cannot be used."""
    return AgentFailure("failed", f"{path.name} cannot be read", str(path), why or "it is empty", next_step)


def in_words(failure: AgentFailure) -> str:
    """All of a failure in one sentence."""
    error = failure.error
    return f"{error.what} ({error.where}): {error.why}; {error.next_step}"


@contextlib.contextmanager
def naming(path: Path) -> Iterator[None]:
    """Give an ``OSError`` of a write, which the kernel reports without one, the file that it was about."""
    try:
        yield
    except OSError as error:
        if error.filename is None:
            error.filename = str(path)
        raise
