"""The schema of ``patch.yaml``: a parser for each key, and what is read along with it (files, diffs, scripts).

``patch.yaml``::

    name: hidden-states
    version: "1"
    description: What it does, in a sentence.
    mark: FLEETDUMP_TAP ready           # each rank logs it before the server counts as ready; optional
    captures: true                      # it writes hidden states; default false
    files: [fleetdump_tap.py]           # of this directory, put beside the engine's package
    server_args:                        # text, or a flag of some releases
      - --disable-radix-cache
      - flag: --disable-prefill-cuda-graph
        first_release: 0.5.14
        why: a replayed graph runs no Python
        shows: {disable_prefill_cuda_graph: true}   # in /server_info: names (dots go deeper) and values
        unlogged: [prefill CUDA graph begin]        # regular expressions that no line of the log may fit
      - flag: --disable-radix-cache
        optional: each request has a key of its own # a server may do without it (`without` in the inventory) ...
        optional_from: 0.5.11                       # ... from this release on
    refused_args:                       # options that the patch would be wrong with, by all their names
      - {flags: [--moe-a2a-backend], allowed: [none], why: rows are split over ranks}
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

One of ``edits`` and ``changes`` is enough.
"""

from __future__ import annotations

import ast
import base64
import contextlib
import dataclasses
import re
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from yaml.nodes import MappingNode, Node

from fleetdump.agent import unidiff
from fleetdump.agent.specs import Edit, Insertion, PackageChange, RefusedArg, ReleaseArg
from fleetdump.yamlmarks import Parser, Reader, Schema, Wrong

T = TypeVar("T")

PATCH_FILE = "patch.yaml"
PLACES = ("module-imports", "method-head", "loop-head", "after-loop")
MAX_PATCH_FILE_BYTES = 1 << 20
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}\Z")
_FLAG = re.compile(r"--[a-z][a-z0-9-]*\Z")
_RELEASE = re.compile(r"[0-9]+(\.[0-9]+)*((a|b|rc|\.post|\.dev)[0-9]+)*\Z")


def _text_that(fits: Callable[[str], object], kind: str) -> Parser[str]:
    """A reader of text that ``fits`` accepts; what it does not is a mistake that says it is not ``kind``."""

    def read(reader: Reader, node: Node, what: str) -> str:
        value = reader.text(node, what)
        if not fits(value):
            reader.fail(node, f"{what}: {value!r} is not {kind}")
        return value

    return read


_name = _text_that(NAME.match, "a name (letters, digits, '.', '_', '-')")
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
    if "optional_from" in values and "optional" not in values:
        reader.fail(node, f"{what}: 'optional_from' without 'optional', which says why a server may do without")
    return ReleaseArg(**values)


def _refused_arg(reader: Reader, node: Node, what: str) -> RefusedArg:
    values = reader.fields(node, what, _REFUSED_ARG, required=("flags", "why"))
    if not all(key in values for key in ("flags", "why")):
        raise Wrong
    return RefusedArg(**values)


def _refused_args(reader: Reader, node: Node, what: str) -> list[RefusedArg]:
    return reader.list_of(_refused_arg, node, what)


def _flags(reader: Reader, node: Node, what: str) -> list[str]:
    flags = reader.list_of(_flag, node, what)
    if not reader.items(node, what):
        reader.fail(node, f"{what}: names no flag")
    return flags


def _texts(reader: Reader, node: Node, what: str) -> list[str]:
    return [text.lower() for text in reader.list_of(Reader.text, node, what)]


def _shows(reader: Reader, node: Node, what: str) -> dict[str, str]:
    """Names in /server_info, dotted, and the texts of their values."""
    values: dict[str, str] = {}
    for name, (key, value) in reader.mapping(node, what).items():
        if not all(part.isidentifier() for part in name.split(".")):
            reader.note(key, f"{what}: {name!r} is not a dotted name in /server_info")
            continue
        with contextlib.suppress(Wrong):
            values[name] = reader.text(value, f"{what}.{name}").lower()
    return values


def _pattern(reader: Reader, node: Node, what: str) -> str:
    value = reader.text(node, what)
    try:
        re.compile(value)
    except re.error as error:
        reader.fail(node, f"{what}: {value!r} is not a regular expression: {error}")
    return value


def _patterns(reader: Reader, node: Node, what: str) -> list[str]:
    return reader.list_of(_pattern, node, what)


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
    change = read_change(reader, node, reader.path.parent / values.pop(kinds[0]), kinds[0])
    return dataclasses.replace(change, **values)


def read_change(reader: Reader, node: Node | int, path: Path, kind: str) -> PackageChange:
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
    "shows": _shows,
    "unlogged": _patterns,
    "optional": Reader.text,
    "optional_from": _release,
}
_REFUSED_ARG: Schema = {"flags": _flags, "why": Reader.text, "allowed": _texts}
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
PATCH: Schema = {
    "name": _name,
    "version": Reader.text,
    "description": Reader.raw_text,
    "mark": Reader.text,
    "captures": Reader.boolean,
    "files": _files,
    "server_args": _server_args,
    "architectures": _architectures,
    "refused": _refused,
    "refused_args": _refused_args,
    "edits": _edits,
    "changes": _changes,
}
