"""Bundles of the agent on a host: which are in use, and which old ones may go."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
from pathlib import Path
from typing import Iterator, List

from fleetdump.agent.context import State

KEEP = 3
"""Newest bundles that always stay, so that controllers of neighbouring versions do not push in turns."""


@contextlib.contextmanager
def in_use(state: State) -> Iterator[None]:
    """Hold the bundle that this agent runs from (modules are imported late, so it must not vanish meanwhile)."""
    home = Path(__file__).resolve().parents[2]
    if home.parent != state.root.resolve() / "agent":
        yield
        return
    descriptor = os.open(str(home), os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.utime(str(home))
        fcntl.flock(descriptor, fcntl.LOCK_SH)
        yield
    finally:
        os.close(descriptor)


def prune(state: State) -> List[str]:
    """Remove bundles that are neither among the newest nor in use by an agent or a driver; returns their names."""
    found = sorted((path for path in (state.root / "agent").iterdir() if path.is_dir()), key=_modified, reverse=True)
    return [path.name for path in found[KEEP:] if not _is_running_from(path) and _remove(path)]


def _modified(path: Path) -> float:
    with contextlib.suppress(OSError):
        return path.stat().st_mtime
    return 0.0


def _is_running_from(bundle: Path) -> bool:
    """Whether a process of this machine names the bundle in its arguments or environment, as drivers do."""
    needle = bundle.name.lstrip(".").encode()
    for process in Path("/proc").iterdir():
        if process.name.isdigit():
            for part in ("cmdline", "environ"):
                with contextlib.suppress(OSError):
                    if needle in (process / part).read_bytes():
                        return True
    return False


def _remove(bundle: Path) -> bool:
    try:
        descriptor = os.open(str(bundle), os.O_RDONLY | os.O_DIRECTORY)
    except OSError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        shutil.rmtree(str(bundle), ignore_errors=True)
        return True
    except OSError:
        return False
    finally:
        os.close(descriptor)
