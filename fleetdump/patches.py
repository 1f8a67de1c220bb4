"""Patch directories: where a patch is found, and ``patch.yaml`` turned into a ``protocol.PatchSpec``.

``patch.yaml``::

    name: hidden-states
    version: "1"
    description: What it does, in a sentence.
    mark: FLEETDUMP_TAP ready           # each rank logs it before the server counts as ready; optional
    captures: true                      # it writes hidden states; default false
    files: [fleetdump_tap.py]           # of this directory, put beside the engine's package
    server_args:                        # text, or a flag of some releases
      - --disable-radix-cache
      - {flag: --disable-prefill-cuda-graph, first_release: 0.5.14, why: a replayed graph runs no Python}
    architectures:                      # of models: only the modules that they run are patched; optional
      DeepseekV3ForCausalLM: [sglang.srt.models.deepseek_v2]
    refused:                            # architectures that the patch would be wrong for, and why; optional
      DeepseekV4ForCausalLM: its residual stream is not one vector a token
    changes:                            # any files of the package; the first that is for the release is applied
      - diff: sglang-0.5.20.patch       # of this directory: a unified diff ...
        first_release: 0.5.20           # (releases as below)
      - script: apply_change.py         # ... or a script that edits the copy of the package that it is given
    edits:
      - module: sglang.srt.models.deepseek_v2
        class: DeepseekV2Model
        method: forward
        first_release: 0.5.10           # both ends optional
        last_release: 0.5.20
        verified: [0.5.20]
        present: [hidden_states]        # locals the method must have, or the module import ...
        absent: [aux]                   # ... and locals it must not have
        insertions:
          - at: loop-head               # module-imports, method-head, loop-head or after-loop
            lines: ["tap.enter(i, hidden_states, residual)"]

One of ``edits`` and ``changes`` is enough. A directory without ``patch.yaml`` that holds one ``*.patch`` or ``*.diff``
file, or one ``apply_*.py``, is a patch too: for any release, called like the directory, its version the beginning of
its hash.
"""

from __future__ import annotations

import ast
import base64
import contextlib
import dataclasses
import hashlib
import importlib.resources
import json
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

from yaml.nodes import MappingNode, Node

from fleetdump.agent import unidiff
from fleetdump.agent.protocol import Edit, Insertion, PackageChange, PatchSpec, ReleaseArg, to_json
from fleetdump.errors import UsageError
from fleetdump.suggest import did_you_mean
from fleetdump.yamlmarks import Mistake, Parser, Reader, Schema, Wrong, YamlError

T = TypeVar("T")

PATCH_FILE = "patch.yaml"
PLACES = ("module-imports", "method-head", "loop-head", "after-loop")
LONE_FILES = ("*.patch", "*.diff", "apply_*.py")
MAX_PATCH_FILE_BYTES = 1 << 20
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}\Z")
_FLAG = re.compile(r"--[a-z][a-z0-9-]*\Z")
_RELEASE = re.compile(r"[0-9]+(\.[0-9]+)*((a|b|rc|\.post|\.dev)[0-9]+)*\Z")


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
            values = reader.fields(root, "", _PATCH, required=("name", "version"))
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
    elif not _NAME.match(name):
        reader.note(0, f"{name!r} is not a name for a patch (letters, digits, '.', '_', '-')")
    else:
        with contextlib.suppress(Wrong):
            change = _read_change(reader, 0, lone[0], "script" if lone[0].suffix == ".py" else "diff")
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


# --------------------------------------------------------------------------- parsers of patch.yaml
def _text_that(fits: Callable[[str], object], kind: str) -> Parser[str]:
    """A reader of text that ``fits`` accepts; what it does not is a mistake that says it is not ``kind``."""

    def read(reader: Reader, node: Node, what: str) -> str:
        value = reader.text(node, what)
        if not fits(value):
            reader.fail(node, f"{what}: {value!r} is not {kind}")
        return value

    return read


_name = _text_that(_NAME.match, "a name (letters, digits, '.', '_', '-')")
_identifier = _text_that(str.isidentifier, "a Python name")
_module = _text_that(lambda text: all(part.isidentifier() for part in text.split(".")), "a dotted module name")
_release = _text_that(_RELEASE.match, "a release such as 0.5.20")


def _place(reader: Reader, node: Node, what: str) -> str:
    return reader.choice(node, what, PLACES)


def _code_line(reader: Reader, node: Node, what: str) -> str:
    value = reader.raw_text(node, what)
    if "\n" in value or "\r" in value:
        reader.fail(node, f"{what}: one line of Python each")
    return value


def _code(reader: Reader, node: Node, what: str) -> list[str]:
    lines = reader.list_of(_code_line, node, what)
    if not lines:
        reader.fail(node, f"{what}: has no line")
    try:
        ast.parse("\n".join(lines))
    except (SyntaxError, ValueError) as error:
        reader.fail(node, f"{what}: not Python: {error}")
    return lines


def _identifiers(reader: Reader, node: Node, what: str) -> list[str]:
    return reader.list_of(_identifier, node, what)


def _releases(reader: Reader, node: Node, what: str) -> list[str]:
    return reader.list_of(_release, node, what)


def _modules(reader: Reader, node: Node, what: str) -> list[str]:
    modules = reader.list_of(_module, node, what)
    if not reader.items(node, what):
        reader.fail(node, f"{what}: names no module")
    return modules


def _architectures(reader: Reader, node: Node, what: str) -> dict[str, list[str]]:
    return _by_name(reader, node, what, _modules)


def _refused(reader: Reader, node: Node, what: str) -> dict[str, str]:
    return _by_name(reader, node, what, Reader.text)


def _by_name(reader: Reader, node: Node, what: str, parser: Parser[T]) -> dict[str, T]:
    """A mapping with Python names as keys."""
    values: dict[str, T] = {}
    for name, (key, value) in reader.mapping(node, what).items():
        if not name.isidentifier():
            reader.note(key, f"{what}: {name!r} is not the name of a class")
            continue
        with contextlib.suppress(Wrong):
            values[name] = parser(reader, value, f"{what}.{name}")
    return values


def _server_arg(reader: Reader, node: Node, what: str) -> str | ReleaseArg:
    if not isinstance(node, MappingNode):
        return reader.text(node, what)
    values = reader.fields(node, what, _RELEASE_ARG, required=("flag",))
    if "flag" not in values:
        raise Wrong
    return ReleaseArg(**values)


def _flag(reader: Reader, node: Node, what: str) -> str:
    value = reader.text(node, what)
    if not _FLAG.match(value):
        reader.fail(node, f"{what}: {value!r} is not a flag such as --disable-radix-cache")
    return value


def _server_args(reader: Reader, node: Node, what: str) -> list[str | ReleaseArg]:
    return reader.list_of(_server_arg, node, what)


def _patch_file(reader: Reader, node: Node, what: str) -> tuple[str, str]:
    name = _name(reader, node, what)
    if name == PATCH_FILE:
        reader.fail(node, f"{what}: {PATCH_FILE} itself is not installed")
    try:
        data = (reader.path.parent / name).read_bytes()
        if len(data) > MAX_PATCH_FILE_BYTES:
            reader.fail(node, f"{what}: {name} is larger than {MAX_PATCH_FILE_BYTES >> 20} MiB")
        return name, data.decode()
    except OSError as error:
        reader.fail(node, f"{what}: {name} cannot be read: {error.strerror}")
    except UnicodeDecodeError:
        reader.fail(node, f"{what}: {name} is not UTF-8 text")


def _files(reader: Reader, node: Node, what: str) -> dict[str, str]:
    return dict(reader.list_of(_patch_file, node, what))


def _change(reader: Reader, node: Node, what: str) -> PackageChange:
    values = reader.fields(node, what, _CHANGE)
    kinds = [kind for kind in ("diff", "script") if kind in values]
    if len(kinds) != 1:
        reader.fail(node, f"{what}: needs one of 'diff' and 'script'")
    change = _read_change(reader, node, reader.path.parent / values.pop(kinds[0]), kinds[0])
    return dataclasses.replace(change, **values)


def _read_change(reader: Reader, node: Node | int, path: Path, kind: str) -> PackageChange:
    """A diff or script, read and looked at: what is wrong with it should not first be found on a host."""
    try:
        data = path.read_bytes()
        if len(data) > MAX_PATCH_FILE_BYTES:
            reader.fail(node, f"{path.name} is larger than {MAX_PATCH_FILE_BYTES >> 20} MiB")
        if kind == "diff":
            unidiff.parse(data)
        else:
            ast.parse(data)
    except OSError as error:
        reader.fail(node, f"{path.name} cannot be read: {error.strerror}")
    except (unidiff.DiffError, SyntaxError, ValueError) as error:
        reader.fail(node, f"{path.name}: {error}")
    return PackageChange(kind, path.name, base64.b64encode(data).decode())


def _script_name(reader: Reader, node: Node, what: str) -> str:
    name = _name(reader, node, what)
    if not name.endswith(".py"):
        reader.fail(node, f"{what}: {name} is not a Python script (x.py)")
    return name


def _changes(reader: Reader, node: Node, what: str) -> list[PackageChange]:
    changes = reader.list_of(_change, node, what)
    if not reader.items(node, what):
        reader.fail(node, f"{what}: has no change")
    return changes


def _insertion(reader: Reader, node: Node, what: str) -> Insertion:
    values = reader.fields(node, what, _INSERTION, required=_INSERTION)
    if len(values) < len(_INSERTION):
        raise Wrong
    return Insertion(**values)


def _insertions(reader: Reader, node: Node, what: str) -> list[Insertion]:
    insertions = reader.list_of(_insertion, node, what)
    if not reader.items(node, what):
        reader.fail(node, f"{what}: has no insertion")
    return insertions


def _edit(reader: Reader, node: Node, what: str) -> Edit:
    required = ("module", "class", "method", "insertions")
    values = reader.fields(node, what, _EDIT, required=required)
    if not all(key in values for key in required):
        raise Wrong
    values["class_name"] = values.pop("class")
    return Edit(**values)


def _edits(reader: Reader, node: Node, what: str) -> list[Edit]:
    edits = reader.list_of(_edit, node, what)
    if not reader.items(node, what):
        reader.fail(node, f"{what}: has no edit")
    return edits


_CHANGE: Schema = {
    "diff": _name,
    "script": _script_name,
    "first_release": _release,
    "last_release": _release,
    "verified": _releases,
}
_INSERTION: Schema = {"at": _place, "lines": _code}
_RELEASE_ARG: Schema = {
    "flag": _flag,
    "first_release": _release,
    "last_release": _release,
    "why": Reader.text,
}
_EDIT: Schema = {
    "module": _module,
    "class": _identifier,
    "method": _identifier,
    "first_release": _release,
    "last_release": _release,
    "verified": _releases,
    "present": _identifiers,
    "absent": _identifiers,
    "insertions": _insertions,
}
_PATCH: Schema = {
    "name": _name,
    "version": Reader.text,
    "description": Reader.raw_text,
    "mark": Reader.text,
    "captures": Reader.boolean,
    "files": _files,
    "server_args": _server_args,
    "architectures": _architectures,
    "refused": _refused,
    "edits": _edits,
    "changes": _changes,
}
