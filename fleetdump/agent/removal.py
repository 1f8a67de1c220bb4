"""Taking files away, or only listing what would go: both by the same steps, so that a list names what goes."""

from __future__ import annotations

import contextlib
import os
import shutil
from pathlib import Path
from typing import Callable, List, Set

from fleetdump.agent.hostmessages import CleanResult


class Removal:
    """Removes what it is told to and notes it in ``result``; with ``dry_run`` it only notes. Links are not followed."""

    def __init__(self, dry_run: bool = False) -> None:
        self.dry_run = dry_run
        self.result = CleanResult()
        self._gone: Set[str] = set()
        """With ``dry_run``: what would be gone by now."""

    def files(self, paths: List[Path]) -> None:
        """Plain files, which are counted and not listed."""
        for path in paths:
            self.result.freed_bytes += path.lstat().st_size
            self._take(path, os.unlink)

    def tree(self, path: Path) -> None:
        """A folder or file and all in it; nothing where there is none."""
        if not path.exists() and not path.is_symlink():
            return
        self.result.freed_bytes += self.bytes_in(path)
        self._take(path, shutil.rmtree if path.is_dir() and not path.is_symlink() else os.unlink)
        self.result.removed.append(str(path))

    def quietly(self, path: Path) -> None:
        """A folder and all in it, as far as that goes; it is not listed."""
        if path.is_dir():
            self.result.freed_bytes += self.bytes_in(path)
        self._take(path, lambda name: shutil.rmtree(name, ignore_errors=True))

    def empty(self, path: Path) -> bool:
        """A folder if nothing is in it any more; whether it was."""
        try:
            if self.dry_run and self._left_in(path):
                return False
            self._take(path, os.rmdir)
        except OSError:
            return False
        self.result.removed.append(str(path))
        return True

    def bytes_in(self, path: Path) -> int:
        """Bytes of a file, or of all files below a folder, that are still there."""
        if str(path) in self._gone:
            return 0
        if path.is_symlink() or not path.is_dir():
            return path.lstat().st_size
        total = 0
        for entry in list(path.iterdir()):
            with contextlib.suppress(FileNotFoundError):
                total += self.bytes_in(entry)
        return total

    def _left_in(self, path: Path) -> List[str]:
        return [entry.name for entry in path.iterdir() if str(entry) not in self._gone]

    def _take(self, path: Path, remove: Callable[[str], object]) -> None:
        if self.dry_run:
            self._gone.add(str(path))
        else:
            remove(str(path))
