"""YAML read with line numbers: typed values out of a node tree, and every mistake noted with its line.

``yaml.safe_load`` loses the lines and lets a duplicate key win silently. A ``Reader`` therefore composes the node tree
and reads values from it by a schema, a mapping from key to parser. A parser takes ``(reader, node, what)``, where
``what`` names the value for messages (``capture.layers``; "" is the whole file), and returns the value or calls
``Reader.fail``. What is wrong is noted and left out, so that one pass finds all mistakes.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import yaml
from yaml.nodes import MappingNode, Node, ScalarNode, SequenceNode

from fleetdump.errors import UsageError
from fleetdump.suggest import did_you_mean

T = TypeVar("T")
Parser = Callable[["Reader", Node, str], T]
Schema = Mapping[str, Parser[Any]]

MAX_FILE_BYTES = 1 << 20
MAX_NODES = 100_000
"""Nodes after aliases are followed: an alias bomb is refused before anything walks it."""
_MISTAKES_SHOWN = 20
_TAG = "tag:yaml.org,2002:"
_INTEGER = re.compile(r"-?(0|[1-9][0-9]*)\Z")
_SIZE = re.compile(r"([0-9]+(?:\.[0-9]+)?) ?([KMGT]i?)?B?\Z")
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff]")
_UNWRITABLE = re.compile(r"[\x00\ud800-\udfff]")
_MISTAKE_LENGTH = 400


@dataclass(frozen=True, order=True)
class Mistake:
    """One mistake of a file; ``line`` counts from 1, 0 stands for the whole file."""

    line: int
    text: str


class YamlError(UsageError):
    """A file with mistakes; ``mistakes`` has all of them in the order of their lines."""

    def __init__(self, path: Path, kind: str, mistakes: Collection[Mistake], next_step: str = ""):
        self.mistakes = sorted(set(mistakes))
        count = len(self.mistakes)
        shown = [f"{path}:{m.line}: {m.text}" if m.line else m.text for m in self.mistakes[:_MISTAKES_SHOWN]]
        if count > len(shown):
            shown.append(f"and {count - len(shown)} more")
        what = f"the {kind} has {'a mistake' if count == 1 else f'{count} mistakes'}"
        super().__init__(what, str(path), "\n".join(shown), next_step)


class Wrong(Exception):
    """A value that ``Reader.fail`` has noted; whoever reads the container leaves it out."""


class Reader:
    """Reads one YAML file; ``mistakes`` grows as values are read."""

    def __init__(self, path: Path):
        self.path = path
        self.mistakes: list[Mistake] = []
        self.wrong_keys: set[str] = set()
        """Keys whose value was wrong somewhere: a later check must not call them missing."""

    def note(self, node: Node | int, text: str) -> None:
        """Note a mistake at a node (or line) and go on."""
        line = node if isinstance(node, int) else line_of(node)
        short = text if len(text) <= _MISTAKE_LENGTH else f"{text[:_MISTAKE_LENGTH]} ..."
        self.mistakes.append(Mistake(line, _CONTROL.sub(lambda m: repr(m.group())[1:-1], short)))

    def fail(self, node: Node | int, text: str) -> NoReturn:
        """Note a mistake and leave the value out."""
        self.note(node, text)
        raise Wrong

    def document(self) -> Node | None:
        """The file's one document, or None with the reason noted (unreadable, not UTF-8, not YAML, empty, a bomb)."""
        try:
            root = yaml.compose(self._text(), Loader=yaml.SafeLoader)
            if root is None:
                self.fail(0, "the file is empty")
            self._check_aliases(root)
        except Wrong:
            return None
        except RecursionError:
            self.note(0, "the file is nested too deeply")
            return None
        except yaml.MarkedYAMLError as error:
            mark = error.problem_mark or error.context_mark
            self.note(mark.line + 1 if mark else 0, _syntax_mistake(error))
            return None
        except (
            yaml.YAMLError,
            ValueError,
            OverflowError,
        ) as error:  # a forbidden character, or an escape beyond Unicode
            self.note(0, f"not YAML: {error}")
            return None
        return root

    def _text(self) -> str:
        try:
            with self.path.open("rb") as stream:
                data = stream.read(MAX_FILE_BYTES + 1)
        except OSError as error:
            self.fail(0, f"cannot be read: {os.strerror(error.errno or 0)}")
        if len(data) > MAX_FILE_BYTES:
            self.fail(0, f"the file is larger than {MAX_FILE_BYTES >> 20} MiB")
        try:
            return data.decode("utf-8-sig")
        except UnicodeDecodeError as error:
            line = data.count(b"\n", 0, error.start) + 1
            self.fail(line, f"byte 0x{data[error.start]:02x} is not UTF-8; save the file as UTF-8")

    def _check_aliases(self, root: Node) -> None:
        sizes: dict[int, int] = {}
        open_nodes: set[int] = set()

        def size(node: Node) -> int:
            if id(node) in open_nodes:
                self.fail(node, "the anchor contains an alias of itself")
            if id(node) not in sizes:
                open_nodes.add(id(node))
                sizes[id(node)] = 1 + sum(size(child) for child in _children(node))
                open_nodes.discard(id(node))
            return sizes[id(node)]

        if size(root) > MAX_NODES:
            self.fail(root, f"more than {MAX_NODES} values once aliases are followed")

    # ------------------------------------------------------------------ containers
    def mapping(self, node: Node, what: str) -> dict[str, tuple[Node, Node]]:
        """Key text to (key node, value node), in order; ``<<`` is followed, a duplicate key is a mistake."""
        if not isinstance(node, MappingNode):
            self.fail(node, f"{_prefix(what)}expected a mapping (key: value), got {_kind(node)}")
        self._check_tag(node, what, "map")
        own: dict[str, tuple[Node, Node]] = {}
        merged: dict[str, tuple[Node, Node]] = {}
        for key, value in node.value:
            if key.tag == _TAG + "merge":
                for source in value.value if isinstance(value, SequenceNode) else [value]:
                    merged = {**self.mapping(source, f"{what}.<<"), **merged}
            elif not isinstance(key, ScalarNode) or key.tag == _TAG + "null":
                self.note(key, f"{_prefix(what)}a key must be a plain name, got {_kind(key)}")
            elif key.value in own:
                first = line_of(own[key.value][0])
                self.note(key, f"{_prefix(what)}key {key.value!r} stands twice, first on line {first}")
            else:
                own[key.value] = (key, value)
        return {**merged, **own}

    def fields(self, node: Node, what: str, schema: Schema, required: Collection[str] = ()) -> dict[str, Any]:
        """The values of a mapping with the keys of ``schema``; wrong ones are noted and left out."""
        entries = self.mapping(node, what)
        values: dict[str, Any] = {}
        for name, (key, value) in entries.items():
            if name not in schema:
                self.note(key, f"{_prefix(what)}unknown key {name!r}{did_you_mean(name, schema)}")
                continue
            try:
                values[name] = schema[name](self, value, f"{what}.{name}" if what else name)
            except Wrong:
                self.wrong_keys.add(name)
        for name in required:
            if name not in entries:
                self.note(node, f"{_prefix(what)}key {name!r} is missing")
        return values

    def items(self, node: Node, what: str) -> list[Node]:
        """The nodes of a list."""
        if not isinstance(node, SequenceNode):
            self.fail(node, f"{what}: expected a list, got {_kind(node)}")
        self._check_tag(node, what, "seq")
        return list(node.value)

    def list_of(self, parser: Parser[T], node: Node, what: str) -> list[T]:
        """The values of a list; wrong ones are noted and left out."""
        values: list[T] = []
        for n, item in enumerate(self.items(node, what)):
            with contextlib.suppress(Wrong):
                values.append(parser(self, item, f"{what}[{n}]"))
        return values

    def _check_tag(self, node: Node, what: str, *allowed: str) -> None:
        if node.tag not in [_TAG + name for name in allowed]:
            self.fail(node, f"{_prefix(what)}tag {node.tag!r} is not supported")

    # ------------------------------------------------------------------ scalars
    def scalar(self, node: Node, what: str, expected: str) -> ScalarNode:
        """A scalar that has a value, else a mistake that says what was expected."""
        if not isinstance(node, ScalarNode) or node.tag == _TAG + "null":
            self.fail(node, f"{what}: expected {expected}, got {_kind(node)}")
        self._check_tag(node, what, "str", "int", "float", "bool", "timestamp")
        return node

    def raw_text(self, node: Node, what: str) -> str:
        """Text as it was written, maybe empty or of several lines, that can be passed on as UTF-8 without NUL."""
        value = str(self.scalar(node, what, "text").value)
        if _UNWRITABLE.search(value):
            self.fail(node, f"{what}: has a NUL character or half of a surrogate pair")
        return value

    def text(self, node: Node, what: str) -> str:
        """Text as it was written (``0.80`` stays ``0.80``), without control characters and not empty."""
        value = str(self.scalar(node, what, "text").value)
        if not value:
            self.fail(node, f"{what}: is empty")
        if _CONTROL.search(value):
            self.fail(node, f"{what}: has a control character or line break: {value[:60]!r}")
        return value

    def integer(self, node: Node, what: str, low: int, high: int) -> int:
        """A whole decimal number in ``low..high``."""
        scalar = self.scalar(node, what, "a whole number")
        if not _INTEGER.match(scalar.value) or len(scalar.value) > 20:
            self.fail(node, f"{what}: expected a whole number, got {scalar.value[:60]!r}")
        if scalar.tag == _TAG + "str":
            self.fail(node, f"{what}: expected a whole number, got the text {scalar.value!r}; write it without quotes")
        if not low <= int(scalar.value) <= high:
            self.fail(node, f"{what}: {scalar.value} is outside {low}..{high}")
        return int(scalar.value)

    def seconds(self, node: Node, what: str) -> float:
        """A positive number of seconds, at most 30 days."""
        scalar = self.scalar(node, what, "a number of seconds")
        try:
            value = float(scalar.value)
        except ValueError:
            self.fail(node, f"{what}: expected a number of seconds, got {scalar.value[:60]!r}")
        if not 0 < value <= 30 * 86400:
            self.fail(node, f"{what}: {scalar.value} is not in 0..{30 * 86400} seconds")
        return value

    def size(self, node: Node, what: str, low: int, high: int) -> int:
        """Bytes, written as a number or like ``4GiB``, ``512 MiB``, ``1.5TB``."""
        scalar = self.scalar(node, what, "a size such as 4GiB")
        match = _SIZE.match(scalar.value)
        if match is None:
            self.fail(node, f"{what}: expected a size such as 4GiB, got {scalar.value[:60]!r}")
        value = int(float(match[1]) * _unit(match[2] or ""))
        if not low <= value <= high:
            self.fail(node, f"{what}: {scalar.value} is outside {low}..{high} bytes")
        return value

    def boolean(self, node: Node, what: str) -> bool:
        """``true`` or ``false``."""
        return self.choice(node, what, ("true", "false")) == "true"

    def choice(self, node: Node, what: str, choices: Collection[str]) -> str:
        """One of ``choices``."""
        value = self.text(node, what)
        if value not in choices:
            self.fail(node, f"{what}: {value!r} is not one of {', '.join(choices)}{did_you_mean(value, choices)}")
        return value


def line_of(node: Node) -> int:
    """The line of a node, from 1."""
    return int(node.start_mark.line) + 1


def _prefix(what: str) -> str:
    return f"{what}: " if what else ""


def _unit(name: str) -> int:
    if not name:
        return 1
    power = "KMGT".index(name[0]) + 1
    return int((1024 if name.endswith("i") else 1000) ** power)


def _children(node: Node) -> list[Node]:
    if isinstance(node, MappingNode):
        return [child for pair in node.value for child in pair]
    return list(node.value) if isinstance(node, SequenceNode) else []


def _kind(node: Node) -> str:
    if isinstance(node, MappingNode):
        return "a mapping"
    if isinstance(node, SequenceNode):
        return "a list"
    return "nothing" if node.tag == _TAG + "null" else f"{node.value[:60]!r}"


def _syntax_mistake(error: yaml.MarkedYAMLError) -> str:
    problem = error.problem or "syntax error"
    if "'\\t'" in problem:
        return "a tab: YAML is indented with spaces"
    if "expected a single document" in (error.context or ""):
        return "a second document ('---'): the file must hold one"
    context = f" {error.context}" if error.context else ""
    return f"not YAML: {problem}{context}"
