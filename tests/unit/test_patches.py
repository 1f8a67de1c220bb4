"""Patch directories: the two that ship, the whole schema, every kind of mistake, and where a patch is found."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from fleetdump import patches
from fleetdump.agent.protocol import Edit, Insertion, PatchSpec, ReleaseArg, from_json, to_json
from fleetdump.errors import ExitCode, UsageError
from fleetdump.patches import PatchError, find_patch, load_patch

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
