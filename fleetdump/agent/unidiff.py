"""Unified diffs: read one, map its names to files of an installed package, apply it to bytes. Pure, and exact.

A hunk may have moved, but its context must be there byte for byte: a patch that no longer fits is refused, never
guessed. Line ends are the file's own: a diff with bare newlines applies to a CRLF file, and the other way round.
File modes are not changed. Bytes of any encoding pass; only file names must be UTF-8.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Dict, List, Mapping, Optional, Sequence

MAX_FILES = 1000
_HUNK = re.compile(rb"@@ -(\d{1,9})(?:,(\d{1,9}))? \+(\d{1,9})(?:,(\d{1,9}))? @@")
_EPOCH = re.compile(rb"\t(1970-01-01|1969-12-31) ")
_ESCAPES = {"n": 10, "t": 9, "r": 13, "a": 7, "b": 8, "f": 12, "v": 11, '"': 34, "\\": 92}
_C_ESCAPE = re.compile(rb'\\([0-7]{3}|[ntrabfv"\\])')
_NOTHING = b"/dev/null"
_ROOT = "sglang"


class DiffError(ValueError):
    """The diff cannot be read, or does not fit; the text says which file and hunk, and why."""


@dataclass
class Hunk:
    """Lines (with their line ends) that are replaced; ``start`` is where the diff's author had them, from 0."""

    start: int
    old: List[bytes]
    new: List[bytes]


@dataclass
class FileDiff:
    """What happens to one file, by paths such as ``sglang/srt/x.py``. ``old`` None: the file is created; ``new`` None:
    it is deleted; both and different: renamed, or copied when ``keeps_old``."""

    old: Optional[str]
    new: Optional[str]
    hunks: List[Hunk] = field(default_factory=list)
    keeps_old: bool = False


# --------------------------------------------------------------------------- reading
def parse(data: bytes) -> List[FileDiff]:
    """The files of a diff, in its order; text around them (a commit message) is passed over. Raises ``DiffError`` for
    what is no unified diff, is cut short, is binary, or names a file outside the package."""
    lines = data.split(b"\n")
    if lines[-1] == b"":
        lines.pop()
    if _converted_to_crlf(lines):
        lines = [line[:-1] if line.endswith(b"\r") else line for line in lines]
    files = _Parser(lines).files()
    if not files:
        raise DiffError("it holds no file: a unified diff has lines that begin with '--- ', '+++ ' and '@@ '")
    if len(files) > MAX_FILES:
        raise DiffError(f"it changes more than {MAX_FILES} files")
    return files


def touched(files: Sequence[FileDiff]) -> List[str]:
    """Every path that the diff reads or writes, sorted."""
    return sorted({path for file in files for path in (file.old, file.new) if path is not None})


def package_path(name: bytes) -> str:
    """The installed path of a name in a diff: ``a/python/sglang/srt/x.py``, ``python/sglang/srt/x.py``,
    ``a/sglang/srt/x.py`` and ``sglang/srt/x.py`` are all ``sglang/srt/x.py``. Raises ``DiffError`` for every other."""
    parts = _safe_parts(name)
    shown = "/".join(parts)
    if parts[0] not in (_ROOT, "python"):
        parts = parts[1:]
    if parts[:1] == ["python"]:
        parts = parts[1:]
    if parts[:1] != [_ROOT] or len(parts) < 2:
        raise DiffError(f"{shown}: not a file of the installed package {_ROOT}; take it out of the diff")
    return "/".join(parts)


def _safe_parts(name: bytes) -> List[str]:
    shown = name.decode("utf-8", "backslashreplace")
    try:
        parts = name.decode("utf-8").split("/")
    except UnicodeDecodeError:
        raise DiffError(f"{shown}: the name is not UTF-8") from None
    if any(part in ("", ".", "..") for part in parts) or re.search(r"[\x00-\x1f\x7f\\]", shown):
        raise DiffError(f"{shown!r}: not a plain path inside the package")
    return parts


def _converted_to_crlf(lines: Sequence[bytes]) -> bool:
    """Whether the diff's own headers end in CRLF: then the whole diff was converted, and its files were not."""
    headers = [line for line in lines if _HUNK.match(line)]
    return bool(headers) and all(line.endswith(b"\r") for line in headers)


class _Parser:
    def __init__(self, lines: Sequence[bytes]):
        self._lines = lines
        self._at = 0

    def files(self) -> List[FileDiff]:
        found: List[FileDiff] = []
        while self._at < len(self._lines):
            line = self._lines[self._at]
            if line.startswith(b"diff --git "):
                file = self._git_file()
                if file is not None:
                    found.append(file)
            elif line.startswith(b"--- ") and self._peek(1).startswith(b"+++ "):
                found.append(self._plain_file({}))
            elif _HUNK.match(line):
                raise DiffError(f"line {self._at + 1}: a hunk without the name of its file")
            else:
                self._at += 1
        return found

    def _git_file(self) -> Optional[FileDiff]:
        """A file with git's header; None when only its mode changes."""
        begin = self._at
        names = self._lines[begin][len(b"diff --git ") :]
        self._at += 1
        head: Dict[bytes, bytes] = {}
        while self._at < len(self._lines):
            line = self._lines[self._at]
            if line.startswith((b"GIT binary patch", b"Binary files ")):
                raise DiffError(f"line {self._at + 1}: a binary change; a patch is text")
            if line.startswith(b"--- ") and self._peek(1).startswith(b"+++ "):
                return self._plain_file(head)
            key = next((k for k in _GIT_KEYS if line.startswith(k + b" ")), None)
            if key is None:
                break
            head[key] = line[len(key) + 1 :]
            self._at += 1
        _refuse_mode(head, begin)
        if b"rename from" in head or b"copy from" in head:
            return _moved(head, [])
        if b"new file mode" in head:
            return FileDiff(None, package_path(_same_name(names, begin)))
        if b"deleted file mode" in head:
            return FileDiff(package_path(_same_name(names, begin)), None)
        if b"old mode" in head:
            return None
        raise DiffError(f"line {begin + 1}: a file without any change")

    def _plain_file(self, head: Mapping[bytes, bytes]) -> FileDiff:
        """From the ``---`` line on."""
        begin = self._at
        _refuse_mode(head, begin)
        old_line, new_line = self._lines[begin][4:], self._lines[begin + 1][4:]
        self._at += 2
        hunks = []
        while _HUNK.match(self._peek(0)):
            hunks.append(self._hunk())
        if not hunks:
            raise DiffError(f"line {begin + 1}: a file without any hunk")
        if b"rename from" in head or b"copy from" in head:
            return _moved(head, hunks)
        return _named(old_line, new_line, hunks, begin)

    def _hunk(self) -> Hunk:
        begin = self._at
        match = _HUNK.match(self._lines[begin])
        assert match is not None
        want_old, want_new = (int(match[n]) if match[n] is not None else 1 for n in (2, 4))
        hunk = Hunk(max(0, int(match[1]) - 1) if want_old else int(match[1]), [], [])
        self._at += 1
        while len(hunk.old) < want_old or len(hunk.new) < want_new:
            if self._at == len(self._lines):
                raise DiffError(f"line {begin + 1}: the diff ends inside a hunk")
            line = self._lines[self._at] or b" "  # a mailer may have cut the blank off an empty context line
            kind, text = line[:1], line[1:] + b"\n"
            if kind not in (b" ", b"-", b"+"):
                raise DiffError(f"line {self._at + 1}: a line of a hunk begins with ' ', '-' or '+'")
            if kind != b"+":
                hunk.old.append(text)
            if kind != b"-":
                hunk.new.append(text)
            self._at += 1
            self._no_newline(hunk, kind)
        if len(hunk.old) != want_old or len(hunk.new) != want_new:
            raise DiffError(f"line {begin + 1}: the hunk has other lines than its header counts")
        return hunk

    def _no_newline(self, hunk: Hunk, kind: bytes) -> None:
        r"""``\ No newline at end of file`` is about the line before it."""
        if self._peek(0)[:1] != b"\\":
            return
        self._at += 1
        for side, other in ((hunk.old, b"+"), (hunk.new, b"-")):
            if kind != other:
                side[-1] = side[-1][:-1]

    def _peek(self, ahead: int) -> bytes:
        place = self._at + ahead
        return self._lines[place] if place < len(self._lines) else b""


_GIT_KEYS = (
    b"old mode",
    b"new mode",
    b"deleted file mode",
    b"new file mode",
    b"copy from",
    b"copy to",
    b"rename from",
    b"rename to",
    b"similarity index",
    b"dissimilarity index",
    b"index",
)


def _refuse_mode(head: Mapping[bytes, bytes], line: int) -> None:
    for key in (b"new file mode", b"new mode", b"deleted file mode"):
        if head.get(key, b"100").strip()[:3] != b"100":
            raise DiffError(f"line {line + 1}: a symbolic link or submodule; a patch changes regular files")


def _moved(head: Mapping[bytes, bytes], hunks: List[Hunk]) -> FileDiff:
    kind = b"rename" if b"rename from" in head else b"copy"
    try:
        # Without a/ and b/: these names begin at the root of the repository.
        old, new = (package_path(_unquoted(head[kind + way])) for way in (b" from", b" to"))
    except KeyError:
        raise DiffError("a rename or copy without its other name") from None
    return FileDiff(old, new, hunks, keeps_old=kind == b"copy")


def _named(old_line: bytes, new_line: bytes, hunks: List[Hunk], line: int) -> FileDiff:
    old_name, new_name = _name_of(old_line), _name_of(new_line)
    if old_name == _NOTHING or _EPOCH.search(old_line):
        return FileDiff(None, package_path(new_name), hunks)
    if new_name == _NOTHING or _EPOCH.search(new_line):
        return FileDiff(package_path(old_name), None, hunks)
    new = package_path(new_name)
    # ``diff -u sglang.orig/srt/x.py sglang/srt/x.py``: only the new name need bear the package's.
    old_parts = _safe_parts(old_name)
    if (_ROOT in old_parts and package_path(old_name) != new) or old_parts[-1] != new.split("/")[-1]:
        raise DiffError(f"line {line + 1}: {'/'.join(old_parts)} and {new} are two files, and it is no rename")
    return FileDiff(new, new, hunks)


def _name_of(text: bytes) -> bytes:
    """The name in a ``---`` or ``+++`` line; behind a tab stands a date."""
    text = text.rstrip(b"\r")
    return _unquoted(text) if text.startswith(b'"') else text.split(b"\t")[0].rstrip()


def _unquoted(text: bytes) -> bytes:
    text = text.rstrip(b"\r")
    if not text.startswith(b'"'):
        return text
    end = re.match(rb'"((?:[^"\\]|\\.)*)"', text)
    if end is None:
        raise DiffError(f"a quoted name does not end: {text.decode('utf-8', 'backslashreplace')}")

    def character(match: re.Match[bytes]) -> bytes:
        code = match[1].decode()
        return bytes([int(code, 8) & 0xFF if code[0] in "01234567" else _ESCAPES[code]])

    return _C_ESCAPE.sub(character, end[1])


def _same_name(names: bytes, line: int) -> bytes:
    """The name in ``a/NAME b/NAME``, the only place where git names a file that is empty."""
    names = names.rstrip(b"\r")
    if names.startswith(b'"'):
        return _unquoted(names)
    left, right = names[: len(names) // 2], names[len(names) // 2 + 1 :]
    if left != right and left[2:] != right[2:]:
        raise DiffError(f"line {line + 1}: two names where one file is created or deleted")
    return left


# --------------------------------------------------------------------------- applying
def apply_to(contents: Dict[str, Optional[bytes]], file: FileDiff) -> None:
    """Apply one file's change to ``contents`` (path to bytes, None: no such file), which must hold all its paths.
    Raises ``DiffError``, then with ``contents`` as it was."""
    source = None if file.old is None else contents[file.old]
    name = file.new or file.old or ""
    if file.old is not None and source is None:
        raise DiffError(f"{file.old}: there is no such file")
    if file.new is not None and file.new != file.old and contents[file.new] is not None:
        raise DiffError(f"{file.new}: the file is there already")
    result = _patched(name, source or b"", file.hunks)
    if file.new is None:
        if result:
            raise DiffError(f"{name}: it would be deleted, but holds more than the diff knows")
        contents[name] = None
        return
    contents[file.new] = result
    if file.old is not None and file.old != file.new and not file.keeps_old:
        contents[file.old] = None


def _patched(name: str, data: bytes, hunks: Sequence[Hunk]) -> bytes:
    lines = data.split(b"\n")
    lines = [line + b"\n" for line in lines[:-1]] + ([lines[-1]] if lines[-1] else [])
    hunks = [_like(hunk, lines) for hunk in hunks]
    done = 0
    shift = 0
    result: List[bytes] = []
    for number, hunk in enumerate(hunks):
        place = _place(lines, hunk, done, shift)
        if place is None:
            again = _place(lines, Hunk(hunk.start, hunk.new, hunk.old), done, shift)
            why = "it seems to be applied already" if again is not None else "its lines are not there"
            raise DiffError(f"{name}: hunk {number + 1} (line {hunk.start + 1}) does not fit: {why}")
        shift = place - hunk.start
        result += lines[done:place] + hunk.new
        done = place + len(hunk.old)
    return b"".join(result + lines[done:])


def _place(lines: Sequence[bytes], hunk: Hunk, first: int, shift: int) -> Optional[int]:
    """Where the old lines stand: at the expected line, or at the nearest other; None where they do not, or where two
    places are equally near. Without old lines there is nothing to recognise a place by, but in an empty file."""
    if not hunk.old:
        return 0 if not lines else None
    wanted = hunk.start + shift
    last = len(lines) - len(hunk.old)
    places = [p for p in range(first, last + 1) if lines[p] == hunk.old[0] and _stands(lines, hunk.old, p)]
    nearest = min((abs(p - wanted) for p in places), default=0)
    found = [p for p in places if abs(p - wanted) == nearest]
    return found[0] if len(found) == 1 else None


def _stands(lines: Sequence[bytes], old: Sequence[bytes], place: int) -> bool:
    return list(lines[place : place + len(old)]) == list(old)


def _like(hunk: Hunk, lines: Sequence[bytes]) -> Hunk:
    """The hunk with the file's line ends, where the file has one kind and the hunk wholly the other."""
    own, its = _line_end(lines), _line_end(hunk.old + hunk.new)
    if own is None or its is None or own == its:
        return hunk
    old, new = ([_ended(line, its, own) for line in side] for side in (hunk.old, hunk.new))
    return Hunk(hunk.start, old, new)


def _line_end(lines: Sequence[bytes]) -> Optional[bytes]:
    kinds = {b"\r\n" if line.endswith(b"\r\n") else b"\n" for line in lines if line.endswith(b"\n")}
    return kinds.pop() if len(kinds) == 1 else None


def _ended(line: bytes, old: bytes, new: bytes) -> bytes:
    return line[: -len(old)] + new if line.endswith(old) else line
