"""The engine's package as it would be without any patch of ours: what a new patch is made for."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Dict, Iterator, Mapping, Optional, Set

from fleetdump.agent import patchrecord
from fleetdump.agent.engine import EngineFacts
from fleetdump.agent.patchrecord import FOLDER, PatchedModule, PatchRecord
from fleetdump.agent.protocol import AgentFailure


@dataclass
class Package:
    """``home`` is the folder that holds the package, and paths such as ``sglang/srt/x.py`` are relative to it.
    ``kept`` are the files that our record has originals of, ``added`` those that the applied patch made."""

    home: Path
    name: str
    site: Path
    kept: Dict[str, PatchedModule] = field(default_factory=dict)
    added: Set[str] = field(default_factory=set)

    @classmethod
    def of(cls, facts: EngineFacts, record: Optional[PatchRecord], stale: bool = False) -> Package:
        """The package of ``facts`` with what ``record`` says; of a ``stale`` one (the package was installed anew over
        the patch) only the files that the patch made are left."""
        folder, site = Path(facts.package), Path(facts.site)
        package = cls(folder.parent, folder.name, site)
        if record is not None:
            package.kept = {} if stale else {package._relative(m.original.path): m for m in record.modules}
            package.added = {package._relative(added.path) for added in record.files}
        return package

    def _relative(self, recorded: str) -> str:
        """A path of the record, which is relative to site-packages."""
        return os.path.relpath(str(self.site / recorded), str(self.home))

    def path_of(self, module: str, found: Mapping[str, str]) -> Optional[str]:
        """The path of a module: ``found`` has the files of those that are there, the record those that the applied
        patch deleted. None where the package has no such module."""
        if module in found:
            return os.path.relpath(found[module], str(self.home))
        name = module.replace(".", "/")
        return next((path for path in (f"{name}.py", f"{name}/__init__.py") if path in self.kept), None)

    def read(self, path: str) -> Optional[bytes]:
        """The original bytes of a file, None where there is none. Raises ``AgentFailure`` conflict for a path whose
        folder lies outside the package (by a link), or that is no regular file."""
        self._refuse_outside(path)
        if path in self.kept:
            return kept_bytes(self.site, self.kept[path])
        target = self.home / path
        if path in self.added or not os.path.lexists(str(target)):
            return None
        if not target.is_file():
            raise AgentFailure("conflict", "the patch would change what is no regular file", where=str(target))
        return target.read_bytes()

    def files(self) -> Iterator[str]:
        """Every file of the package but bytecode, as it would be without our patch; folders that are links are left
        out."""
        seen = set()
        for folder, folders, names in os.walk(str(self.home / self.name)):
            folders[:] = sorted(f for f in folders if f != "__pycache__" and not os.path.islink(f"{folder}/{f}"))
            for name in sorted(names):
                path = os.path.relpath(os.path.join(folder, name), str(self.home))
                if (
                    path not in self.added
                    and not name.endswith((".pyc", ".fleetdump"))
                    and (self.home / path).is_file()
                ):
                    seen.add(path)
                    yield path
        yield from sorted(set(self.kept) - seen)

    def _refuse_outside(self, path: str) -> None:
        root = os.path.realpath(str(self.home / self.name))
        folder = os.path.realpath(str((self.home / path).parent))
        if folder != root and not folder.startswith(root + os.sep):
            raise AgentFailure(
                "conflict",
                "the patch would change a file outside the package",
                where=str(self.home / path),
                why=f"a link leads to {folder}",
                next_step="take that file out of the patch",
            )


def kept_bytes(site: Path, module: PatchedModule) -> bytes:
    """The original of a patched file, from our copy; a damaged copy must never be put back."""
    data = patchrecord.read_bytes(site / FOLDER / module.original.copy)
    if data is None or patchrecord.sha256(data) != module.original.sha256:
        raise AgentFailure(
            "failed",
            "our copy of the original file is missing or damaged",
            where=str(site / FOLDER / module.original.copy),
            next_step=f"reinstall sglang there (pip install --force-reinstall --no-deps), then remove {site / FOLDER}",
        )
    return data
