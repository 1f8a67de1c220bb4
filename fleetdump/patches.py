"""Patch directories: where a patch is found, and how one is loaded as a ``specs.PatchSpec``.

What ``patch.yaml`` may say is in ``patchschema``. A directory without one that holds one ``*.patch`` or ``*.diff``
file, or one ``apply_*.py``, is a patch too: for any release, called like the directory, its version the beginning of
its hash.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.resources
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from yaml.nodes import Node

from fleetdump.agent.protocol import to_json
from fleetdump.agent.specs import Edit, PackageChange, PatchSpec, ReleaseArg
from fleetdump.errors import UsageError
from fleetdump.patchschema import NAME, PATCH, PATCH_FILE, read_change
from fleetdump.suggest import did_you_mean
from fleetdump.yamlmarks import Mistake, Reader, Wrong, YamlError

LONE_FILES = ("*.patch", "*.diff", "apply_*.py")


class PatchError(YamlError):
    """A patch directory with mistakes; ``mistakes`` has all of them."""

    def __init__(self, path: Path, mistakes: list[Mistake]):
        super().__init__(path, "patch", mistakes, f"correct it; patches/hidden-states/{PATCH_FILE} is an example")


def find_patch(name_or_path: str) -> Path:
    """The patch directory: a path (anything with a slash), or a name in ``./patches`` or among the packaged ones.

    Raises ``UsageError`` naming the nearest patch.
    """
    if "/" in name_or_path:
        directory = Path(os.path.expanduser(name_or_path))
        if not (directory / PATCH_FILE).is_file() and not _lone_changes(directory):
            why = f"it has no {PATCH_FILE}, and no diff or apply_*.py either"
            raise UsageError("no patch there", str(directory), why, "give a patch directory or name")
        return directory
    known = dict(known_patches())
    if name_or_path not in known:
        raise UsageError(
            f"no patch is called {name_or_path!r}{did_you_mean(name_or_path, known)}",
            why="looked in ./patches and among fleetdump's own",
            next_step="give one of these names, or the path of a patch directory",
        )
    return known[name_or_path]


def known_patches() -> Iterator[tuple[str, Path]]:
    """Name and directory of each; a later one of the same name wins, so the user's own come last."""
    for root in _patch_roots():
        for directory in sorted(root.glob("*/")):
            if (directory / PATCH_FILE).is_file() or _lone_changes(directory):
                yield directory.name, directory


def _lone_changes(directory: Path) -> list[Path]:
    """The diffs and scripts of a directory, of which there must be just one where it has no ``patch.yaml``."""
    return sorted(path for pattern in LONE_FILES for path in directory.glob(pattern) if path.is_file())


def _patch_roots() -> Iterator[Path]:
    package = Path(str(importlib.resources.files("fleetdump")))
    yield package / "_data" / "patches"
    if (package.parent / "pyproject.toml").is_file():  # a source checkout
        yield package.parent / "patches"
    yield Path("patches")


def load_patch(path: Path) -> PatchSpec:
    """Read a patch directory. Raises ``PatchError`` with every mistake, each with its line in ``patch.yaml``."""
    if not (path / PATCH_FILE).is_file() and (lone := _lone_changes(path)):
        return _load_lone(path, lone)
    reader = Reader(path / PATCH_FILE)
    values: dict[str, Any] = {}
    root = reader.document()
    if root is not None:
        with contextlib.suppress(Wrong):
            values = reader.fields(root, "", PATCH, required=("name", "version"))
            if not {"edits", "changes"} & (values.keys() | reader.wrong_keys):
                reader.note(root, "key 'edits' is missing, or 'changes'")
            _check_architectures(reader, root, values)
    if reader.mistakes:
        raise PatchError(reader.path, reader.mistakes)
    values.pop("description", None)
    values.setdefault("edits", [])
    args = values.pop("server_args", [])
    values["server_args"] = [arg for arg in args if isinstance(arg, str)]
    values["release_args"] = [arg for arg in args if isinstance(arg, ReleaseArg)]
    changes = values.get("changes", [])
    return PatchSpec(sha256=patch_sha256(values["edits"], values.get("files", {}), changes), **values)


def _load_lone(directory: Path, lone: list[Path]) -> PatchSpec:
    """A directory that holds nothing but one diff or script."""
    reader = Reader(lone[0])
    change = None
    name = directory.resolve().name
    if len(lone) > 1:
        reader.note(
            0, f"{directory} holds {len(lone)} diffs and scripts, and no {PATCH_FILE} that says which is for what"
        )
    elif not NAME.match(name):
        reader.note(0, f"{name!r} is not a name for a patch (letters, digits, '.', '_', '-')")
    else:
        with contextlib.suppress(Wrong):
            change = read_change(reader, 0, lone[0], "script" if lone[0].suffix == ".py" else "diff")
    if change is None:
        raise PatchError(reader.path, reader.mistakes)
    digest = patch_sha256([], {}, [change])
    return PatchSpec(name, digest[:12], digest, edits=[], changes=[change])


def patch_sha256(edits: list[Edit], files: dict[str, str], changes: list[PackageChange] | None = None) -> str:
    """The identity of a patch: SHA-256 over the canonical JSON of its edits, files and, where it has any, changes."""
    content = {"edits": to_json(edits), "files": files, **({"changes": to_json(changes)} if changes else {})}
    return hashlib.sha256(json.dumps(content, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def _check_architectures(reader: Reader, root: Node, values: dict[str, Any]) -> None:
    """Every module of ``architectures`` has an edit, and nothing is both known and refused."""
    edited = {edit.module for edit in values.get("edits", [])}
    known = values.get("architectures", {})
    for name, modules in known.items():
        for module in modules:
            if edited and module not in edited:
                reader.note(root, f"architectures.{name}: no edit is for {module}{did_you_mean(module, edited)}")
    for name in known.keys() & values.get("refused", {}).keys():
        reader.note(root, f"refused.{name}: stands under architectures too")
