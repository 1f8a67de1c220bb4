"""Put a planned patch into the files of the package, and take it out again byte for byte.

``prepare`` makes originals and record durable; ``put_in`` changes files, each in one step; whatever instant a process
dies at, ``take_out`` restores all from the record.
"""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path
from typing import Iterable, List, Sequence

from fleetdump.agent import patchrecord
from fleetdump.agent.changes import Change
from fleetdump.agent.engine import EngineFacts
from fleetdump.agent.jsonl import fsync_directory
from fleetdump.agent.package import kept_bytes
from fleetdump.agent.patchrecord import FOLDER, AddedFile, PatchedModule, PatchRecord
from fleetdump.agent.protocol import AgentFailure
from fleetdump.agent.specs import PatchSpec


def prepare(site: Path, facts: EngineFacts, spec: PatchSpec, changes: Sequence[Change]) -> PatchRecord:
    """Keep all originals and write the record, durably; no file of the package has changed yet."""
    modules = []
    for number, change in enumerate(c for c in changes if c.original is not None):
        original = patchrecord.keep(site, change.path, f"{number}.original")
        patched, copy = "", ""
        if change.edited is not None:
            patched, copy = patchrecord.sha256(change.edited), f"{number}.patched"
            patchrecord.write_durable(site / FOLDER / copy, change.edited)
        bytecode = [
            patchrecord.keep(site, path, f"{number}.{index}.pyc")
            for index, path in enumerate(patchrecord.bytecode_of(change.path))
        ]
        modules.append(PatchedModule(change.module, original, patched, copy, bytecode))
    made = {os.path.relpath(str(c.path), str(site)): c.edited or b"" for c in changes if c.original is None}
    made.update({name: text.encode() for name, text in spec.files.items()})
    record = PatchRecord(
        patch=spec.name,
        version=spec.version,
        sha256=spec.sha256,
        release=facts.release,
        modules=modules,
        files=[AddedFile(path, patchrecord.sha256(data)) for path, data in sorted(made.items())],
        applied_at=time.time(),
        folders=_missing_folders(site, made),
        untested=[c.module for c in changes if not c.verified],
    )
    patchrecord.save(site, record)
    return record


def _missing_folders(site: Path, made: Iterable[str]) -> List[str]:
    """Folders, relative to ``site``, that must be made for these files; each before those inside it."""
    missing = {
        os.path.relpath(str(folder), str(site))
        for path in made
        for folder in (site / path).parents
        if not os.path.lexists(str(folder))
    }
    return sorted(missing)


def put_in(site: Path, record: PatchRecord, changes: Sequence[Change], spec: PatchSpec) -> None:
    """Change every file; when one fails (no space, no permission), all are restored and the error is raised."""
    try:
        _change_files(site, record, changes, spec)
    except OSError:
        with contextlib.suppress(OSError, AgentFailure):  # the record stays then, and the next call restores
            take_out(site, record, stale=False)
        raise


def _change_files(site: Path, record: PatchRecord, changes: Sequence[Change], spec: PatchSpec) -> None:
    # New files first: an edited module that cannot import its tap would break the engine. What is deleted goes last.
    for folder in record.folders:
        (site / folder).mkdir(mode=0o755)
        fsync_directory((site / folder).parent)
    for name, text in spec.files.items():
        patchrecord.replace(site / name, text.encode())
    originals = {module.module: module.original for module in record.modules}
    for change in sorted(changes, key=lambda c: (c.edited is None, c.original is not None)):
        if change.edited is None:
            patchrecord.remove(change.path)
            fsync_directory(change.path.parent)
        else:
            patchrecord.replace(change.path, change.edited, originals.get(change.module))
        _drop_bytecode(change.path)


def take_out(site: Path, record: PatchRecord, stale: bool) -> List[str]:
    """Undo what the record says, modules first; returns the files that were verified to be the originals. ``stale``:
    the package was installed anew since, so only the files that the patch made are removed."""
    verified: List[str] = []
    if not stale:
        for module in record.modules:
            kept_bytes(site, module)
        verified = [_restore_module(site, module) for module in record.modules]
    for added in record.files:
        path = site / added.path
        patchrecord.remove_temporary(path)
        patchrecord.remove(path)
        _drop_bytecode(path)
    for folder in reversed(record.folders):
        for emptied in (site / folder / "__pycache__", site / folder):
            with contextlib.suppress(OSError):  # gone already, or somebody put a file there
                emptied.rmdir()
    patchrecord.forget(site)
    return verified


def _restore_module(site: Path, module: PatchedModule) -> str:
    path = site / module.original.path
    patchrecord.remove_temporary(path)
    _drop_bytecode(path)
    patchrecord.restore(site, module.original)
    for compiled in module.bytecode:
        patchrecord.remove_temporary(site / compiled.path)
        patchrecord.restore(site, compiled)
    if patchrecord.sha256(path.read_bytes()) != module.original.sha256:
        raise AgentFailure("failed", "the restored file is not the original", where=str(path))
    return str(path)


def _drop_bytecode(path: Path) -> None:
    """Cached bytecode of ``path`` may be of the kind that Python never checks against its source."""
    for compiled in patchrecord.bytecode_of(path):
        patchrecord.remove(compiled)
