"""Patch directories: the two that ship, the whole schema, every kind of mistake, and where a patch is found."""

from __future__ import annotations

import base64
import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from fleetdump import patches
from fleetdump.agent.protocol import from_json, to_json
from fleetdump.agent.specs import Edit, Insertion, PatchSpec, RefusedArg, ReleaseArg
from fleetdump.errors import ExitCode, UsageError
from fleetdump.patches import PatchError, find_patch, load_patch
from tests.unit.engineinstall import install

MINIMAL = """\
name: tiny
version: "1"
edits:
  - module: sglang.srt.models.tiny
    class: TinyModel
    method: forward
    insertions:
      - {at: loop-head, lines: ["tap(i)"]}
"""
FULL = """\
name: full
version: 1.10
description: |
  Two lines
  of prose.
mark: full armed
captures: true
files: [tap.py]
server_args:
  - --disable-radix-cache
  - {flag: --new-flag, first_release: 0.5.14, last_release: 0.5.20.post1, why: it stays off}
  - --mem-fraction-static
  - 0.80
architectures:
  TinyForCausalLM: [sglang.srt.models.tiny]
refused:
  HugeForCausalLM: it has no single stream
edits:
  - module: sglang.srt.models.tiny
    class: TinyModel
    method: forward
    first_release: 0.5.10
    last_release: 0.5.20.post1
    verified: [0.5.10, 0.5.20]
    present: [residual]
    absent: [aux]
    insertions:
      - at: module-imports
        lines: ["import tap"]
      - at: after-loop
        lines:
          - "if tap.on:"
          - "    tap.after(hidden_states, residual)"
"""
CHANGES = """\
name: any
version: "2"
changes:
  - diff: sglang.patch
    first_release: 0.5.10
    last_release: 0.5.20
    verified: [0.5.20]
  - script: apply_it.py
"""
DIFF = b"--- a/python/sglang/x.py\n+++ b/python/sglang/x.py\n@@ -1 +1 @@\n-a = '\xff'\n+a = 1\n"
Write = Callable[..., Path]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    def _write(text: str, **files: str | bytes) -> Path:
        directory = tmp_path / "patch"
        directory.mkdir(exist_ok=True)
        (directory / "patch.yaml").write_text(text)
        for name, content in files.items():
            data = content.encode() if isinstance(content, str) else content
            (directory / f"{name}.py").write_bytes(data)
        return directory

    return _write


@pytest.mark.parametrize("name", ["hidden-states", "stall-example"])
def test_the_patches_that_ship(name: str) -> None:
    patch = load_patch(find_patch(name))
    assert patch.name == name
    assert patch.edits
    assert from_json(PatchSpec, to_json(patch)) == patch
    for text in patch.files.values():
        compile(text, name, "exec")


def test_what_flags_show_and_what_is_refused(write: Write) -> None:
    text = (
        "server_args:\n  - {flag: --off, shows: {a.b: True, c: 0.80}, unlogged: ['x.*y'], optional: why, "
        "optional_from: 0.5.11}\n"
        "refused_args:\n  - {flags: [--n, --num], allowed: [1, None], why: because}\nedits:"
    )
    patch = load_patch(write(MINIMAL.replace("edits:", text)))
    (arg,) = patch.release_args
    assert (arg.shows, arg.unlogged) == ({"a.b": "true", "c": "0.80"}, ["x.*y"])
    assert (arg.optional, arg.optional_from) == ("why", "0.5.11")
    assert patch.refused_args == [RefusedArg(["--n", "--num"], "because", ["1", "none"])]


def test_the_whole_schema(write: Write) -> None:
    patch = load_patch(write(FULL, tap="on = True\n"))
    assert patch == PatchSpec(
        name="full",
        version="1.10",
        sha256=patch.sha256,
        mark="full armed",
        captures=True,
        files={"tap.py": "on = True\n"},
        server_args=["--disable-radix-cache", "--mem-fraction-static", "0.80"],
        release_args=[ReleaseArg("--new-flag", "0.5.14", "0.5.20.post1", "it stays off")],
        architectures={"TinyForCausalLM": ["sglang.srt.models.tiny"]},
        refused={"HugeForCausalLM": "it has no single stream"},
        edits=[
            Edit(
                module="sglang.srt.models.tiny",
                class_name="TinyModel",
                method="forward",
                first_release="0.5.10",
                last_release="0.5.20.post1",
                verified=["0.5.10", "0.5.20"],
                present=["residual"],
                absent=["aux"],
                insertions=[
                    Insertion("module-imports", ["import tap"]),
                    Insertion("after-loop", ["if tap.on:", "    tap.after(hidden_states, residual)"]),
                ],
            )
        ],
    )


def test_defaults(write: Write) -> None:
    patch = load_patch(write(MINIMAL))
    assert (patch.mark, patch.captures, patch.files, patch.server_args) == ("", False, {}, [])
    assert (patch.release_args, patch.architectures, patch.refused) == ([], {}, {})


def test_identity_is_that_of_edits_and_files(write: Write) -> None:
    base = load_patch(write(FULL, tap="on = True\n")).sha256
    assert len(base) == 64
    assert load_patch(write(FULL.replace("full armed", "other"), tap="on = True\n")).sha256 == base
    assert load_patch(write(FULL.replace("# ", ""), tap="on = True\n")).sha256 == base
    assert load_patch(write(FULL, tap="on = False\n")).sha256 != base
    assert load_patch(write(FULL.replace("after-loop", "loop-head"), tap="on = True\n")).sha256 != base
    assert load_patch(write(FULL.replace("0.5.20.post1", "0.5.21"), tap="on = True\n")).sha256 != base


@pytest.mark.parametrize(
    ("old", "new", "line", "fragment"),
    [
        ("name: tiny", "name: ../x", 1, "not a name"),
        ("name: tiny", "nam: tiny\nname: tiny", 1, "did you mean 'name'?"),
        ('version: "1"\n', "", 1, "'version' is missing"),
        ("sglang.srt.models.tiny", "sglang/models/tiny.py", 4, "dotted module name"),
        ("class: TinyModel", "class: Tiny Model", 5, "not a Python name"),
        ("    class: TinyModel\n", "", 4, "'class' is missing"),
        ("class: TinyModel", "class_name: TinyModel", 4, "'class' is missing"),
        ("method: forward", "method: forward()", 6, "not a Python name"),
        ("method: forward", "method: forward\n    first_release: v0.5", 7, "not a release"),
        ("method: forward", "method: forward\n    verified: 0.5.20", 7, "expected a list"),
        ("method: forward", "method: forward\n    present: [a.b]", 7, "not a Python name"),
        ("at: loop-head", "at: loop-haed", 8, "did you mean 'loop-head'?"),
        ("at: loop-head, ", "", 8, "'at' is missing"),
        ('["tap(i)"]', "[]", 8, "has no line"),
        ('["tap(i)"]', '["tap(i"]', 8, "not Python"),
        ('["tap(i)"]', '["if x:"]', 8, "not Python"),
        ('["tap(i)"]', '["a\\nb"]', 8, "one line"),
        ("edits:", "captures: maybe\nedits:", 3, "not one of true, false"),
        ("edits:", "files: [none.py]\nedits:", 3, "cannot be read"),
        ("edits:", "files: [../x.py]\nedits:", 3, "not a name"),
        ("edits:", "files: [patch.yaml]\nedits:", 3, "itself"),
        ("edits:", "files: [bad.py]\nedits:", 3, "not UTF-8"),
        ("edits:", "files: [big.py]\nedits:", 3, "larger than"),
        ("edits:", "\tedits:", 3, "tab"),
        ("edits:", "server_args: [{flag: x}]\nedits:", 3, "not a flag"),
        ("edits:", "server_args: [{first_release: 0.5.14}]\nedits:", 3, "'flag' is missing"),
        ("edits:", "server_args: [{flag: --x, first_release: new}]\nedits:", 3, "not a release"),
        ("edits:", "server_args: [{flag: --x, realese: 1}]\nedits:", 3, "unknown key"),
        ("edits:", "architectures: {A: []}\nedits:", 3, "names no module"),
        ("edits:", "architectures: {A: sglang.srt.models.tiny}\nedits:", 3, "expected a list"),
        ("edits:", "architectures: {A B: [sglang.srt.models.tiny]}\nedits:", 3, "not the name of a class"),
        ("edits:", "architectures: {A: [sglang.srt.models.tony]}\nedits:", 1, "did you mean 'sglang.srt.models.tiny'"),
        ("edits:", "refused: [A]\nedits:", 3, "expected a mapping"),
        ("edits:", "refused: {A: }\nedits:", 3, "expected text"),
        (
            "edits:",
            "architectures: {A: [sglang.srt.models.tiny]}\nrefused: {A: why}\nedits:",
            1,
            "refused.A: stands under architectures too",
        ),
        ("edits:", "server_args: [{flag: --x, shows: {a b: 1}}]\nedits:", 3, "not a dotted name in /server_info"),
        ("edits:", "server_args: [{flag: --x, shows: [a]}]\nedits:", 3, "expected a mapping"),
        ("edits:", "server_args: [{flag: --x, unlogged: ['(']}]\nedits:", 3, "not a regular expression"),
        ("edits:", "server_args: [{flag: --x, optional_from: 0.5.1}]\nedits:", 3, "without 'optional'"),
        ("edits:", "refused_args: [{flags: [], why: x}]\nedits:", 3, "names no flag"),
        ("edits:", "refused_args: [{flags: [--x]}]\nedits:", 3, "'why' is missing"),
        ("edits:", "refused_args: [{flags: [x], why: y}]\nedits:", 3, "not a flag"),
    ],
)
def test_mistakes_have_lines(write: Write, old: str, new: str, line: int, fragment: str) -> None:
    path = write(MINIMAL.replace(old, new), bad=b"\xff", big="#" * ((1 << 20) + 1))
    with pytest.raises(PatchError) as caught:
        load_patch(path)
    assert caught.value.exit_code == ExitCode.USAGE
    assert (line, fragment) in [(m.line, fragment) for m in caught.value.mistakes if fragment in m.text]
    assert f"patch.yaml:{line}: " in caught.value.why


@pytest.mark.parametrize("text", ["", "x", "name: a\nversion: b\nedits: []", "name: a\nversion: b\nedits: "])
def test_nothing_to_apply(write: Write, text: str) -> None:
    with pytest.raises(PatchError):
        load_patch(write(text))


def test_all_mistakes_at_once(write: Write) -> None:
    with pytest.raises(PatchError) as caught:
        load_patch(write(MINIMAL.replace("TinyModel", "1").replace("loop-head", "x").replace("tiny\n", "t i\n", 1)))
    assert [m.line for m in caught.value.mistakes] == [1, 5, 8]


def test_find_by_path_and_by_name(write: Write, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    directory = write(MINIMAL)
    assert find_patch(str(directory)) == directory
    monkeypatch.chdir(tmp_path)
    assert find_patch("./patch").resolve() == directory
    shutil.copytree(directory, tmp_path / "patches" / "hidden-states")
    assert load_patch(find_patch("hidden-states")).name == "tiny"  # the user's own comes before ours


def test_find_packaged_patches(write: Write, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    package = tmp_path / "site-packages" / "fleetdump"
    shutil.copytree(write(MINIMAL), package / "_data" / "patches" / "tiny")
    shutil.copytree(write(MINIMAL), package.parent / "patches" / "strange")  # not ours: no checkout around it
    monkeypatch.setattr(patches.importlib.resources, "files", lambda name: package)
    monkeypatch.chdir(tmp_path)
    assert find_patch("tiny") == package / "_data" / "patches" / "tiny"
    with pytest.raises(UsageError, match="no patch is called 'strange'"):
        find_patch("strange")


def test_find_names_the_nearest(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="did you mean 'hidden-states'"):
        find_patch("hiden-states")
    with pytest.raises(UsageError, match=r"no patch.yaml"):
        find_patch(f"{tmp_path}/x")


# --------------------------------------------------------------------------- diffs and scripts
@pytest.fixture
def changes(tmp_path: Path) -> Path:
    directory = tmp_path / "mine"
    directory.mkdir()
    (directory / "patch.yaml").write_text(CHANGES)
    (directory / "sglang.patch").write_bytes(DIFF)
    (directory / "apply_it.py").write_text("print(1)\n")
    return directory


def test_a_patch_of_a_diff_and_a_script(changes: Path) -> None:
    patch = load_patch(changes)
    assert patch.edits == []
    assert [(c.kind, c.name, c.first_release, c.last_release, c.verified) for c in patch.changes] == [
        ("diff", "sglang.patch", "0.5.10", "0.5.20", ["0.5.20"]),
        ("script", "apply_it.py", "", "", []),
    ]
    assert base64.b64decode(patch.changes[0].data) == DIFF
    assert from_json(PatchSpec, to_json(patch)) == patch
    (changes / "sglang.patch").write_bytes(DIFF.replace(b"+a = 1", b"+a = 2"))
    assert load_patch(changes).sha256 != patch.sha256


@pytest.mark.parametrize(
    ("old", "new", "line", "fragment"),
    [
        ("changes:", "change:", 3, "unknown key 'change'"),
        ("  - script: apply_it.py\n", "  - {}\n", 8, "needs one of"),
        ("- script: apply_it.py", "- {script: apply_it.py, diff: sglang.patch}", 8, "needs one of"),
        ("script: apply_it.py", "script: apply_it.sh", 8, "not a Python script"),
        ("script: apply_it.py", "script: ../apply_it.py", 8, "not a name"),
        ("script: apply_it.py", "script: none.py", 8, "cannot be read"),
        ("script: apply_it.py", "script: broken.py", 8, "never closed"),
        ("diff: sglang.patch", "diff: a/sglang.patch", 4, "not a name"),
        ("diff: sglang.patch", "diff: /etc/passwd", 4, "not a name"),
        ("diff: sglang.patch", "diff: escape.patch", 4, "package"),
        ("diff: sglang.patch", "diff: big.patch", 4, "larger than"),
        ("diff: sglang.patch", "diff: apply_it.py", 4, "holds no file"),
        ("first_release: 0.5.10", "first_release: new", 5, "not a release"),
    ],
)
def test_mistakes_in_changes_have_lines(changes: Path, old: str, new: str, line: int, fragment: str) -> None:
    (changes / "patch.yaml").write_text(CHANGES.replace(old, new))
    (changes / "broken.py").write_text("x = (\n")
    (changes / "escape.patch").write_bytes(DIFF.replace(b"sglang/x.py", b"../x.py"))
    (changes / "big.patch").write_bytes(DIFF + b"#" * (1 << 20))
    with pytest.raises(PatchError) as caught:
        load_patch(changes)
    assert (line, fragment) in [(m.line, fragment) for m in caught.value.mistakes if fragment in m.text]


@pytest.mark.parametrize(("name", "text"), [("x.patch", DIFF), ("x.diff", DIFF), ("apply_x_v2.py", b"print(1)\n")])
def test_a_directory_with_one_diff_or_script_is_a_patch(tmp_path: Path, monkeypatch, name: str, text: bytes) -> None:
    directory = tmp_path / "patches" / "mine"
    directory.mkdir(parents=True)
    (directory / name).write_bytes(text)
    monkeypatch.chdir(tmp_path)

    patch = load_patch(find_patch("mine"))

    assert (patch.name, patch.version, len(patch.changes)) == ("mine", patch.sha256[:12], 1)
    assert load_patch(find_patch("patches/mine/")) == patch
    (directory / "second.patch").write_bytes(DIFF)
    with pytest.raises(PatchError, match="mistake"):
        load_patch(directory)


PROBE = """
name: probe
version: "1"
files: [probe.py]
architectures: {TinyForCausalLM: [sglang.srt.models.tiny]}
edits:
  - module: sglang.srt.models.tiny
    class: TinyModel
    method: forward
    verified: [0.5.19]
    insertions: [{at: module-imports, lines: [import probe]}]
"""


def fleetdump(*args: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "fleetdump", "patches", *args]
    return subprocess.run(command, capture_output=True, text=True, cwd=cwd, timeout=60)


def test_list_and_show(changes: Path) -> None:
    (changes.parent / "patches").mkdir()
    changes.rename(changes.parent / "patches" / "mine")
    (changes.parent / "patches" / "wrong").mkdir()
    (changes.parent / "patches" / "wrong" / "patch.yaml").write_text("name: wrong\n")

    listed = fleetdump("list", cwd=changes.parent)
    assert listed.returncode == 2
    assert "wrong/patch.yaml:1: key 'version' is missing" in listed.stderr
    listing = " ".join(listed.stdout.split())
    for text in ("hidden-states", "mine 2", "(records call it any)", "sglang/x.py, what apply_it.py changes"):
        assert text in listing
    shown = fleetdump("show", "mine", cwd=changes.parent)
    assert shown.returncode == 0
    assert "diff sglang.patch, releases 0.5.10 to 0.5.20, tested on 0.5.20" in shown.stdout
    assert "+a = 1" in shown.stdout
    assert (
        from_json(PatchSpec, json.loads(fleetdump("show", "mine", "--json", cwd=changes.parent).stdout)).name == "any"
    )


def test_a_dry_run_against_an_interpreter_of_this_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    engine = install(tmp_path / "venv", extra={"sglang/x.py": b"a = '\xff'\n"})
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "x.patch").write_bytes(DIFF)
    before = engine.tree()

    done = fleetdump("test", "./mine", "--python", engine.python, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "sglang 0.5.20 (clean): the patch fits" in done.stdout
    assert "+a = 1" in done.stdout
    assert engine.tree() == before

    by_hook = fleetdump("test", "./mine", "--python", engine.python, "--delivery", "import-hook", cwd=tmp_path)
    assert by_hook.returncode == 1
    assert "cannot be delivered by the import hook" in by_hook.stderr

    (engine.site / "sglang" / "x.py").write_bytes(b"b = 1\n")
    refused = fleetdump("test", "./mine", "--python", engine.python, cwd=tmp_path)
    assert refused.returncode == 1
    assert "does not fit sglang 0.5.20" in refused.stderr


def test_a_dry_run_of_the_hook_says_that_no_file_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And of what it shows, which files no test has run, and that nobody said what model is served."""
    monkeypatch.setenv("HOME", str(tmp_path))
    engine = install(tmp_path / "venv")
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "patch.yaml").write_text(PROBE)
    (tmp_path / "mine" / "probe.py").write_text("")
    before = engine.tree()

    in_place = fleetdump("test", "./mine", "--python", engine.python, cwd=tmp_path)
    by_hook = fleetdump("test", "./mine", "--python", engine.python, "--delivery", "import-hook", cwd=tmp_path)

    assert "new file" in in_place.stdout
    assert "no file changes: the launched process imports what is shown here" in by_hook.stdout
    assert "new module probe.py (0 characters), in the hook's folder" in by_hook.stdout
    assert "new file" not in by_hook.stdout
    for done in (in_place, by_hook):
        assert done.returncode == 0, done.stderr
        said = " ".join(done.stdout.split())
        assert "no test has run it on sglang 0.5.20 in sglang.srt.models.tiny" in said
        assert "no config.json says which" in said
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text('{"architectures": ["TinyForCausalLM"]}')
    known = fleetdump("test", "./mine", "--python", engine.python, "--model", str(tmp_path / "model"), cwd=tmp_path)
    assert "in sglang.srt.models.tiny\n" in known.stdout
    assert engine.tree() == before
    assert "--model goes with --python" in fleetdump("test", "./mine", "--model", "m", cwd=tmp_path).stderr


@pytest.mark.parametrize("command", ["list", "show", "test"])
def test_every_command_has_an_example(command: str, tmp_path: Path) -> None:
    assert f"fleetdump patches {command}" in fleetdump(command, "--help", cwd=tmp_path).stdout.split("Example", 1)[1]
