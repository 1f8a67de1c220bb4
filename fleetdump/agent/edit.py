"""Insert lines into a Python module at places found by the structure of its syntax tree, touching no other byte.

Runs under the server's own interpreter, since only that one surely parses its source::

    python -I -B -c "import sys; sys.path.insert(0, sys.argv[1]); from fleetdump.agent.edit import main; main()" ROOT

with one JSON object on stdin (see ``main``) and one on stdout. Pure apart from that.
"""

from __future__ import annotations

import ast
import base64
import io
import json
import re
import sys
import tokenize
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Iterator, List, Optional, Sequence, Set, Tuple, Union

from fleetdump.agent.protocol import from_json
from fleetdump.agent.specs import Edit

Function = Union[ast.FunctionDef, ast.AsyncFunctionDef]

_LINE_END = re.compile(r"\r\n|\r|\n")
_SCOPES = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda, ast.ClassDef)
_LOOP_PLACES = ("loop-head", "after-loop")


class EditError(ValueError):
    """No edit can be made; the text says why."""


class _NoFit(Exception):
    """This edit's structure is not in the module."""


@dataclass
class EditOutcome:
    """The edited text; which of the edits was made; whether a test has run it on this release; and, for people,
    where each insertion went."""

    source: str
    index: int
    verified: bool
    places: List[str]


@dataclass(frozen=True)
class _Point:
    """Insert before character ``column`` of line ``line`` (0-based). ``split``: that line holds code before the
    column, which then ends there."""

    line: int
    column: int
    indent: str
    split: bool = False


# --------------------------------------------------------------------------- the one public function
def apply_edits(source: str, edits: Sequence[Edit], release: str, marker: str) -> EditOutcome:
    """Make the first of ``edits`` whose releases and structure fit; every line put in ends with ``# marker``.

    Raises ``EditError`` when none fits, when a place is ambiguous, or when the result would not be the original plus
    the inserted statements.
    """
    tree = _parse(source, "the module")
    misfits = []
    for index, edit in enumerate(edits):
        if not release_within(release, edit.first_release, edit.last_release):
            span = f"{edit.first_release or 'any'} to {edit.last_release or 'any'}"
            misfits.append(f"release {release} is outside {span} of edit {index + 1}")
            continue
        try:
            method, loop, label = _find(tree, edit)
        except _NoFit as misfit:
            misfits.append(str(misfit))
            continue
        editor = _Editor(source, tree, marker)
        places = [editor.insert(i.at, i.lines, method, loop, label) for i in edit.insertions]
        return EditOutcome(editor.result(), index, release in edit.verified, places)
    raise EditError("; ".join(misfits) or "the patch has no edit for this module")


def release_within(release: str, first: str, last: str) -> bool:
    """Whether ``release`` lies in the closed range; an empty bound is open. A bound without ``.postN`` takes all
    post-releases of its release in, one with ``.postN`` tells them apart; ``0.5.20rc1`` counts as 0.5.20."""
    return not (first and _compare(release, first) < 0) and not (last and _compare(release, last) > 0)


def _compare(release: str, bound: str) -> int:
    """Negative, zero or positive, as ``release`` is older than ``bound``, the same or newer."""
    (numbers, post), (bound_numbers, bound_post) = _release_parts(release), _release_parts(bound)
    if numbers != bound_numbers:
        return -1 if numbers < bound_numbers else 1
    return 0 if bound_post is None else (post or 0) - bound_post


def _release_parts(text: str) -> Tuple[Tuple[int, ...], Optional[int]]:
    """The numbers (without trailing zeros: 0.5 is 0.5.0) and the number of the post-release, if it is one."""
    match = re.match(r"(\d+(?:\.\d+)*)(?:.*?\.post(\d+))?", text)
    if match is None:
        return (), None
    numbers = [int(part) for part in match.group(1).split(".")]
    while numbers and not numbers[-1]:
        numbers.pop()
    return tuple(numbers), int(match.group(2)) if match.group(2) else None


# --------------------------------------------------------------------------- finding places
def _find(tree: ast.Module, edit: Edit) -> Tuple[Function, Optional[ast.For], str]:
    """The method, its layer loop where an insertion needs one, and their name."""
    needs_loop = any(i.at in _LOOP_PLACES for i in edit.insertions)
    found = []
    for node in _top_level(tree):
        if isinstance(node, ast.ClassDef) and fnmatchcase(node.name, edit.class_name):
            methods = [n for n in node.body if isinstance(n, (ast.FunctionDef, ast.AsyncFunctionDef))]
            methods = [m for m in methods if m.name == edit.method]
            if methods and (not needs_loop or any(_layer_loops(m) for m in methods)):
                found.append((node.name, methods))
    want = f"class {edit.class_name} with method {edit.method}" + (" and a layer loop" if needs_loop else "")
    if not found:
        raise _NoFit(f"no {want}")
    if len(found) > 1:
        raise EditError(f"more than one {want}: {', '.join(name for name, _ in found)}")
    name, methods = found[0]
    label = f"{name}.{edit.method}"
    if len(methods) > 1:
        raise EditError(f"{label} is defined {len(methods)} times")
    names = _local_names(methods[0])
    missing = [n for n in edit.present if n not in names | _imported_names(tree)]
    if missing:
        raise _NoFit(f"{label} has no local named {missing[0]}, and the module imports none")
    surplus = [n for n in edit.absent if n in names]
    if surplus:
        raise _NoFit(f"{label} has a local named {surplus[0]}")
    loops = _layer_loops(methods[0])
    if needs_loop and len(loops) != 1:
        lines = ", ".join(str(loop.lineno) for loop in loops)
        raise EditError(
            f"{label} has {len(loops)} loops that call layers (lines {lines}); which one is meant is unclear"
        )
    return methods[0], loops[0] if needs_loop else None, label


def _top_level(tree: ast.Module) -> Iterator[ast.stmt]:
    """Statements of the module, also those below ``if`` and ``try``."""
    pending = list(tree.body)
    while pending:
        node = pending.pop(0)
        yield node
        if isinstance(node, (ast.If, ast.Try)):
            pending = [n for n in ast.iter_child_nodes(node) if isinstance(n, ast.stmt)] + pending


def _own_nodes(node: ast.AST) -> Iterator[ast.AST]:
    """All nodes below ``node`` but those of nested scopes."""
    for child in ast.iter_child_nodes(node):
        yield child
        if not isinstance(child, _SCOPES):
            yield from _own_nodes(child)


def _layer_loops(method: Function) -> List[ast.For]:
    """The innermost ``for`` loops of ``method`` whose body calls ``layer(...)`` or ``self.layers[...](...)``."""
    loops = []
    for node in _own_nodes(method):
        if isinstance(node, ast.For):
            inner = [n for statement in node.body for n in [statement, *_own_nodes(statement)]]
            nested = {id(n) for loop in inner if isinstance(loop, ast.For) for n in _own_nodes(loop)}
            if any(_is_layer_call(n) and id(n) not in nested for n in inner):
                loops.append(node)
    return loops


def _is_layer_call(node: ast.AST) -> bool:
    if not isinstance(node, ast.Call):
        return False
    function = node.func
    if isinstance(function, ast.Name):
        return function.id == "layer"
    return (
        isinstance(function, ast.Subscript)
        and isinstance(function.value, ast.Attribute)
        and function.value.attr == "layers"
        and isinstance(function.value.value, ast.Name)
        and function.value.value.id == "self"
    )


def _local_names(method: Function) -> Set[str]:
    arguments = method.args
    names = {a.arg for a in arguments.args + arguments.kwonlyargs + getattr(arguments, "posonlyargs", [])}
    for node in _own_nodes(method):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
        elif isinstance(node, ast.alias):
            names.add(_bound_name(node))
        elif isinstance(node, ast.ExceptHandler) and node.name:
            names.add(node.name)
    return names


def _imported_names(tree: ast.Module) -> Set[str]:
    """What the module's own imports bind."""
    imports = [n for n in _top_level(tree) if isinstance(n, (ast.Import, ast.ImportFrom))]
    return {_bound_name(alias) for statement in imports for alias in statement.names}


def _bound_name(alias: ast.alias) -> str:
    return (alias.asname or alias.name).split(".")[0]


# --------------------------------------------------------------------------- inserting text
class _Editor:
    """Collects insertions into one source text; ``result`` makes and checks them."""

    def __init__(self, source: str, tree: ast.Module, marker: str):
        self.source = source
        self.tree = tree
        self.marker = marker
        self.starts = [0] + [m.end() for m in _LINE_END.finditer(source)]
        first = _LINE_END.search(source)
        self.newline = first.group() if first else "\n"
        self.insertions: List[Tuple[_Point, List[str]]] = []

    def insert(self, at: str, lines: List[str], method: Function, loop: Optional[ast.For], label: str) -> str:
        """Plan one insertion; returns its place for people."""
        if at == "module-imports":
            point, label = self._after_imports(), "module"
        elif at == "method-head":
            point = self._method_head(method)
        elif at == "loop-head" and loop:
            point = self._before(loop.body[0])
        elif at == "after-loop" and loop:
            point = self._after(loop, [])
        else:
            raise EditError(f"unknown place {at!r}")
        self.insertions.append((point, lines))
        return f"{label}: {at}, line {point.line + 1}"

    def result(self) -> str:
        """The edited text, after checking that it is the original plus the inserted statements and nothing else."""
        text = self.source
        ordered = sorted(enumerate(self.insertions), key=lambda x: (x[1][0].line, x[1][0].column, x[0]))
        inserted: Set[int] = set()
        shift = 0
        pieces = []
        done = 0
        for _, (point, lines) in ordered:
            offset = (
                min(self.starts[point.line], len(text)) + point.column if point.line < len(self.starts) else len(text)
            )
            block = "".join(f"{point.indent}{line}  # {self.marker}{self.newline}" for line in lines)
            first = point.line + shift
            if point.split or (offset == len(text) and not text.endswith(("\n", "\r"))):
                block = self.newline + block
                first += 1 if point.split else 0
            if point.split:
                block += point.indent
            pieces += [text[done:offset], block]
            done = offset
            inserted.update(range(first + 1, first + 1 + len(lines)))
            shift += len(_LINE_END.findall(block))
        edited = "".join(pieces) + text[done:]
        self._check(edited, inserted)
        return edited

    def _check(self, edited: str, inserted: Set[int]) -> None:
        tree = _Remover(inserted).visit(_parse(edited, "the edited module"))
        if ast.dump(tree) != ast.dump(self.tree):
            raise EditError("the edit would change more than it inserts; nothing was written")

    def _after_imports(self) -> _Point:
        body = self.tree.body
        imports = [n for n, s in enumerate(body) if isinstance(s, (ast.Import, ast.ImportFrom))]
        if imports:
            return self._after(body[imports[-1]], body[imports[-1] + 1 :])
        rest = body[1:] if _is_docstring(body) else body
        if not rest:
            raise EditError("the module has no statement to insert before")
        return self._before(rest[0])

    def _method_head(self, method: Function) -> _Point:
        if not _is_docstring(method.body):
            return self._before(method.body[0])
        return self._before(method.body[1]) if len(method.body) > 1 else self._after(method.body[0], [])

    def _before(self, statement: ast.stmt) -> _Point:
        """Before a statement's line, or inside it where other code stands in front of it."""
        line = min([statement.lineno] + [d.lineno for d in getattr(statement, "decorator_list", [])]) - 1
        column = statement.col_offset
        start = self._line(line).encode()[:column].decode()
        if not start.strip():
            return _Point(line, 0, start)
        outer = start[: len(start) - len(start.lstrip())]
        return _Point(line, len(start), outer + ("\t" if outer.endswith("\t") else "    "), split=True)

    def _after(self, statement: ast.stmt, siblings: Sequence[ast.stmt]) -> _Point:
        """Below the last line of a statement, and of those that share that line."""
        end = _end(statement)
        for sibling in siblings:
            if sibling.lineno == end:
                end = _end(sibling)
        return _Point(end, 0, self._line(statement.lineno - 1).encode()[: statement.col_offset].decode())

    def _line(self, number: int) -> str:
        end = self.starts[number + 1] if number + 1 < len(self.starts) else len(self.source)
        return self.source[self.starts[number] : end]


class _Remover(ast.NodeTransformer):
    """Takes the statements out that lie wholly on inserted lines."""

    def __init__(self, lines: Set[int]):
        self.lines = lines

    def generic_visit(self, node: ast.AST) -> ast.AST:
        for name, value in ast.iter_fields(node):
            if isinstance(value, list):
                setattr(node, name, [v for v in value if not self._inserted(v)])
        return super().generic_visit(node)

    def _inserted(self, node: object) -> bool:
        return isinstance(node, ast.stmt) and set(range(node.lineno, _end(node) + 1)) <= self.lines


def _end(node: ast.stmt) -> int:
    return node.end_lineno or node.lineno


def _is_docstring(body: Sequence[ast.stmt]) -> bool:
    return (
        bool(body)
        and isinstance(body[0], ast.Expr)
        and isinstance(body[0].value, ast.Constant)
        and isinstance(body[0].value.value, str)
    )


def _parse(source: str, what: str) -> ast.Module:
    try:
        return ast.parse(source)
    except SyntaxError as error:
        version = ".".join(map(str, sys.version_info[:3]))
        raise EditError(f"Python {version} cannot parse {what}: {error.msg} (line {error.lineno})") from error


# --------------------------------------------------------------------------- as a program
def main() -> None:
    """stdin: ``{"source": base64, "path", "edits", "release", "marker"}``; stdout: ``{"source": base64, "index",
    "verified", "places"}`` or ``{"refused": reason}``. The result is also compiled."""
    request = json.load(sys.stdin)
    raw = base64.b64decode(request["source"])
    edits = [from_json(Edit, e) for e in request["edits"]]
    try:
        encoding, _ = tokenize.detect_encoding(io.BytesIO(raw).readline)
        # utf-8-sig: a byte order mark, which decoding takes off and encoding puts back.
        outcome = apply_edits(raw.decode(encoding), edits, request["release"], request["marker"])
        edited = outcome.source.encode(encoding)
        compile(edited, request["path"], "exec", dont_inherit=True)
    except (EditError, UnicodeDecodeError, SyntaxError) as error:
        print(json.dumps({"refused": str(error)}))
        return
    answer = {"index": outcome.index, "verified": outcome.verified, "places": outcome.places}
    print(json.dumps({"source": base64.b64encode(edited).decode(), **answer}))
