"""Unified diffs: every shape that git and diff write, applied exactly or refused, and names that lead nowhere else."""

from __future__ import annotations

import difflib
import subprocess
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fleetdump.agent.unidiff import DiffError, FileDiff, apply_to, package_path, parse, touched

TEXT = b"one\ntwo\nthree\nfour\nfive\nsix\nseven\n"
CHANGED = b"""\
--- a/python/sglang/x.py
+++ b/python/sglang/x.py
@@ -2,3 +2,4 @@ def f():
 two
-three
+THREE
+more
 four
"""


def applied(diff: bytes, **files: bytes) -> dict[str, bytes | None]:
    """``diff`` applied to a package with ``sglang/<name>.py`` for each of ``files``."""
    contents: dict[str, bytes | None] = {f"sglang/{name}.py": data for name, data in files.items()}
    parsed = parse(diff)
    contents.update({path: None for path in touched(parsed) if path not in contents})
    for file in parsed:
        apply_to(contents, file)
    return contents


def test_a_plain_change() -> None:
    assert applied(CHANGED, x=TEXT) == {"sglang/x.py": TEXT.replace(b"three\n", b"THREE\nmore\n")}


def test_text_around_the_files_is_passed_over() -> None:
    mail = b"From 0123\nSubject: [PATCH] it\n\n--- not a header\n---\n x.py | 3 +-\n\n" + CHANGED + b"-- \n2.34.1\n\n"
    assert applied(mail, x=TEXT) == applied(CHANGED, x=TEXT)


def test_a_moved_hunk_is_found_and_a_changed_line_is_not() -> None:
    assert (
        applied(CHANGED, x=b"new\n" * 40 + TEXT)["sglang/x.py"]
        == b"new\n" * 40 + applied(CHANGED, x=TEXT)["sglang/x.py"]
    )
    with pytest.raises(DiffError, match=r"hunk 1 \(line 2\) does not fit: its lines are not there"):
        applied(CHANGED, x=TEXT.replace(b"four", b"four "))
    with pytest.raises(DiffError, match="applied already"):
        applied(CHANGED, x=applied(CHANGED, x=TEXT)["sglang/x.py"] or b"")


def test_two_equally_near_places_are_one_too_many() -> None:
    diff = b"--- sglang/x.py\n+++ sglang/x.py\n@@ -3 +3 @@\n-a\n+b\n"
    with pytest.raises(DiffError, match="does not fit"):
        applied(diff, x=b"-\na\n-\na\n-\n")
    assert applied(diff, x=b"a\n-\na\n-\na\n")["sglang/x.py"] == b"a\n-\nb\n-\na\n"


def test_a_hunk_without_context_needs_an_empty_file() -> None:
    diff = b"--- sglang/x.py\n+++ sglang/x.py\n@@ -2,0 +3 @@\n+b\n"
    with pytest.raises(DiffError, match="does not fit"):
        applied(diff, x=TEXT)
    assert applied(b"--- sglang/x.py\n+++ sglang/x.py\n@@ -0,0 +1 @@\n+b\n", x=b"")["sglang/x.py"] == b"b\n"


@pytest.mark.parametrize("text", [TEXT, TEXT.replace(b"\n", b"\r\n"), b"\tx\xff\n" + TEXT])
def test_line_ends_and_bytes_of_any_encoding_stay(text: bytes) -> None:
    end = b"\r\n" if b"\r\n" in text else b"\n"
    assert applied(CHANGED, x=text)["sglang/x.py"] == text.replace(b"three" + end, b"THREE" + end + b"more" + end)


def test_a_diff_that_was_converted_to_crlf_is_read_as_it_was() -> None:
    assert applied(CHANGED.replace(b"\n", b"\r\n"), x=TEXT) == applied(CHANGED, x=TEXT)


def test_no_newline_at_the_end_of_either_side() -> None:
    note = b"\\ No newline at end of file\n"
    head = b"--- sglang/x.py\n+++ sglang/x.py\n@@ -1,2 +1,2 @@\n a\n"
    assert applied(head + b"-b\n" + note + b"+c\n", x=b"a\nb")["sglang/x.py"] == b"a\nc\n"
    assert applied(head + b"-b\n+c\n" + note, x=b"a\nb\n")["sglang/x.py"] == b"a\nc"
    both = b"--- sglang/x.py\n+++ sglang/x.py\n@@ -1,2 +1,2 @@\n-a\n+A\n b\n" + note
    assert applied(both, x=b"a\nb")["sglang/x.py"] == b"A\nb"
    with pytest.raises(DiffError, match="not there"):
        applied(head + b"-b\n" + note + b"+c\n", x=b"a\nb\n")


CREATED = b"""\
diff --git a/python/sglang/new.py b/python/sglang/new.py
new file mode 100644
index 0000000..e69de29
"""
DELETED = CREATED.replace(b"new file", b"deleted file")


def test_files_come_and_go_empty_ones_too() -> None:
    assert applied(CREATED) == {"sglang/new.py": b""}
    assert applied(DELETED, new=b"") == {"sglang/new.py": None}
    assert applied(CREATED.replace(b"python/sglang/new.py", b"sglang/a b.py")) == {"sglang/a b.py": b""}
    made = b"--- /dev/null\n+++ b/sglang/new.py\n@@ -0,0 +1,2 @@\n+a\n+b\n"
    assert applied(made) == {"sglang/new.py": b"a\nb\n"}
    gone = b"--- a/sglang/new.py\n+++ /dev/null\n@@ -1,2 +0,0 @@\n-a\n-b\n"
    assert applied(gone, new=b"a\nb\n") == {"sglang/new.py": None}
    by_date = gone.replace(b"+++ /dev/null", b"+++ b/sglang/new.py\t1970-01-01 00:00:00.000000000 +0000")
    assert applied(by_date, new=b"a\nb\n") == {"sglang/new.py": None}
    for diff, there in ((CREATED, b"x"), (DELETED, b"x"), (made, b""), (gone, b"a\nb\nc\n")):
        with pytest.raises(DiffError, match=r"new\.py"):
            applied(diff, new=there)
    with pytest.raises(DiffError, match="no such file"):
        applied(CHANGED)


def test_renames_and_copies() -> None:
    rename = (
        b"diff --git a/python/sglang/x.py b/python/sglang/y.py\nsimilarity index 90%\n"
        b"rename from python/sglang/x.py\nrename to python/sglang/y.py\n"
    )
    assert applied(rename, x=TEXT) == {"sglang/x.py": None, "sglang/y.py": TEXT}
    changed = rename + CHANGED.replace(b"+++ b/python/sglang/x.py", b"+++ b/python/sglang/y.py")
    assert applied(changed, x=TEXT)["sglang/y.py"] == applied(CHANGED, x=TEXT)["sglang/x.py"]
    copy = rename.replace(b"rename ", b"copy ")
    assert applied(copy, x=TEXT) == {"sglang/x.py": TEXT, "sglang/y.py": TEXT}
    with pytest.raises(DiffError, match="there already"):
        applied(rename, x=TEXT, y=b"")


def test_a_change_of_mode_alone_is_no_change() -> None:
    mode = b"diff --git a/sglang/y.py b/sglang/y.py\nold mode 100644\nnew mode 100755\n"
    assert applied(mode + CHANGED, x=TEXT) == applied(CHANGED, x=TEXT)


@pytest.mark.parametrize(
    "name",
    [
        "python/sglang/srt/x.py",
        "sglang/srt/x.py",
        "a/python/sglang/srt/x.py",
        "b/sglang/srt/x.py",
        "orig/sglang/srt/x.py",
    ],
)
def test_git_style_and_installed_names(name: str) -> None:
    assert package_path(name.encode()) == "sglang/srt/x.py"


HOSTILE = [
    "/etc/passwd",
    "/usr/lib/python3/site-packages/sglang/x.py",
    "../sglang/x.py",
    "a/sglang/../../x.py",
    "sglang/./x.py",
    "sglang//x.py",
    "sglang\\..\\x.py",
    "sglang/x\x00.py",
    "sglang/x\n.py",
    "a/test/x.py",
    "sglang",
    "sglang_evil/x.py",
    "",
]


@pytest.mark.parametrize("name", HOSTILE)
def test_names_outside_the_package_are_refused(name: str) -> None:
    with pytest.raises(DiffError, match=r"package"):
        package_path(name.encode())


@pytest.mark.parametrize("name", [n for n in HOSTILE if "\n" not in n and "\x00" not in n and n])
@pytest.mark.parametrize(
    "diff",
    [
        "--- {0}\n+++ {0}\n@@ -1 +1 @@\n-a\n+b\n",
        "--- /dev/null\n+++ {0}\n@@ -0,0 +1 @@\n+b\n",
        "--- {0}\n+++ /dev/null\n@@ -1 +0,0 @@\n-b\n",
        "diff --git {0} {0}\nnew file mode 100644\n",
        "diff --git a/sglang/x b/sglang/y\nrename from sglang/x\nrename to {0}\n",
        "diff --git a/sglang/x b/sglang/y\ncopy from {0}\ncopy to sglang/y\n",
    ],
)
def test_no_place_for_a_name_lets_one_out(name: str, diff: str) -> None:
    with pytest.raises(DiffError):
        parse(diff.format(name).encode())


@pytest.mark.parametrize(
    ("diff", "why"),
    [
        (b"", "no file"),
        (b"hello\n", "no file"),
        (b"@@ -1 +1 @@\n-a\n+b\n", "without the name"),
        (b"--- sglang/x.py\n+++ sglang/x.py\n", "without any hunk"),
        (b"--- sglang/x.py\n+++ sglang/x.py\n@@ -1,3 +1,3 @@\n a\n", "ends inside"),
        (b"--- sglang/x.py\n+++ sglang/x.py\n@@ -1,1 +1,9 @@\n-a\n-b\n+c\n", "ends inside"),
        (b"--- sglang/x.py\n+++ sglang/x.py\n@@ -1,2 +1,2 @@\n a\n?b\n", "begins with"),
        (b"--- sglang/x.py\n+++ sglang/x.py\n@@ -1 +1,2 @@\n a\n b\n", "other lines"),
        (b"--- sglang/x.py\n+++ sglang/y.py\n@@ -1 +1 @@\n-a\n+b\n", "two files"),
        (b"--- a/sglang/z/x.py\n+++ b/sglang/x.py\n@@ -1 +1 @@\n-a\n+b\n", "two files"),
        (b'--- "a/sglang/x.py\n+++ "b/sglang/x.py\n@@ -1 +1 @@\n-a\n+b\n', "does not end"),
        (b"--- a/sglang/\xff.py\n+++ b/sglang/\xff.py\n@@ -1 +1 @@\n-a\n+b\n", "UTF-8"),
        (b"diff --git a/sglang/x b/sglang/x\nnew file mode 120000\n", "symbolic link"),
        (b"diff --git a/sglang/x b/sglang/x\nnew file mode 160000\n", "submodule"),
        (b"diff --git a/sglang/x b/sglang/x\nindex 1..2 100644\nGIT binary patch\n", "binary"),
        (b"diff --git a/sglang/x b/sglang/x\nindex 1..2\nBinary files a/sglang/x and b/sglang/x differ\n", "binary"),
        (b"diff --git a/sglang/x b/sglang/x\n", "without any change"),
        (b"diff --git a/sglang/x b/sglang/yy\nnew file mode 100644\n", "two names"),
        (b"diff --git a/sglang/x b/sglang/y\nrename from sglang/x\n", "other name"),
        (b"".join(b"diff --git a/sglang/%d b/sglang/%d\nnew file mode 100644\n" % (n, n) for n in range(1001)), "1000"),
    ],
)
def test_what_is_no_diff_is_refused_by_name(diff: bytes, why: str) -> None:
    with pytest.raises(DiffError, match=why):
        parse(diff)


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=300))
def test_no_input_does_more_than_be_refused(data: bytes) -> None:
    for diff in (data, CHANGED[:60] + data, b"diff --git a/sglang/x b/sglang/x\n" + data):
        try:
            files = parse(diff)
        except DiffError:
            continue
        assert all(path.startswith("sglang/") and ".." not in path.split("/") for path in touched(files))


LINES = st.lists(st.sampled_from(["a", "b", "", "\tc", "ü", "x\r"]), max_size=12)


@settings(max_examples=300, deadline=None)
@given(LINES, LINES, st.integers(1, 3))
def test_what_difflib_makes_gives_its_target(old: list[str], new: list[str], context: int) -> None:
    before, after = (["".join([line, "\n"]) for line in side] for side in (old, new))
    text = "".join(difflib.unified_diff(before, after, "a/sglang/x.py", "b/sglang/x.py", n=context))
    if text and before:
        assert applied(text.encode(), x="".join(before).encode())["sglang/x.py"] == "".join(after).encode()


def test_what_git_itself_writes(tmp_path: Path) -> None:
    """Changed, made, deleted, renamed, empty, CRLF, without a last newline, and names that git must quote."""
    package = tmp_path / "python" / "sglang"
    package.mkdir(parents=True)
    old = {
        "change.py": TEXT * 9,
        "gone.py": TEXT,
        "moved from.py": TEXT * 3,
        "crlf.py": TEXT.replace(b"\n", b"\r\n"),
        "short.py": b"a",
        "empty-gone.py": b"",
        "ä\tb.py": TEXT,
        "latin.py": b"# caf\xe9\nx = 1\n",
    }
    new = {
        "change.py": TEXT * 3 + b"middle\n" + TEXT * 6,
        "made.py": b"made\n",
        "moved to.py": TEXT * 3 + b"end\n",
        "crlf.py": TEXT.replace(b"\n", b"\r\n").replace(b"two", b"2"),
        "short.py": b"a\nb",
        "empty made.py": b"",
        "latin.py": b"# caf\xe9\nx = 2\n",
        "ü.py": b"1\n",
    }

    def git(*args: str) -> bytes:
        return subprocess.run(["git", *args], cwd=tmp_path, check=True, capture_output=True).stdout

    def put(files: dict[str, bytes]) -> None:
        for path in package.iterdir():
            path.unlink()
        for name, data in files.items():
            (package / name).write_bytes(data)
        git("add", "-A")

    git("init", "-q")
    git("config", "core.autocrlf", "false")
    put(old)
    # git refuses nothing with a tab; our names may not hold one, so that file stays out of the diff
    git("-c", "user.name=t", "-c", "user.email=t@t", "commit", "-qm", "old")
    put({**new, "ä\tb.py": TEXT})
    diff = git("diff", "--cached", "-M")

    files = parse(diff)
    contents: dict[str, bytes | None] = {path: old.get(path[7:]) for path in touched(files)}
    for file in files:
        apply_to(contents, file)

    assert any(file.old != file.new and file.old and file.new for file in files), "a rename is among them"
    assert {path[7:]: data for path, data in contents.items() if data is not None} == new
    assert isinstance(files[0], FileDiff)
