"""Patching a real (small) installation: exact, idempotent, revertible from any instant, and never over others' work."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from fleetdump.agent import patching, patchrecord
from fleetdump.agent.patching import patch, read_state, revert
from fleetdump.agent.patchmessages import PatchArgs, PatchResult, RevertArgs
from fleetdump.agent.protocol import AgentFailure
from fleetdump.agent.specs import PatchSpec
from tests.unit.engineinstall import MODEL, Install, compile_model, context, install, spec


@pytest.fixture
def engine(tmp_path: Path) -> Install:
    made = install(tmp_path / "venv")
    compile_model(made)
    return made


@pytest.fixture
def apply(engine: Install, tmp_path: Path) -> Callable[[PatchSpec], object]:
    return lambda wanted: patch(PatchArgs(engine.python, wanted), context(tmp_path))


def undo(engine: Install, tmp_path: Path) -> object:
    return revert(RevertArgs(engine.python), context(tmp_path))


def failure(call: Callable[[], object]) -> AgentFailure:
    with pytest.raises(AgentFailure) as caught:
        call()
    return caught.value


# --------------------------------------------------------------------------- apply, again, revert
def test_a_patch_is_applied_once_and_taken_out_without_a_trace(engine: Install, tmp_path: Path) -> None:
    before = engine.tree()
    args = PatchArgs(engine.python, spec())

    first = patch(args, context(tmp_path))
    patched = engine.tree()
    second = patch(args, context(tmp_path))

    assert (first.before.state, first.after.state, first.changed, first.verified) == ("clean", "ours", True, True)
    assert first.engine == "sglang 0.5.20"
    assert "+import fleetdump_probe  # fleetdump:probe@1" in first.diff
    assert (second.changed, second.diff, second.verified) == (False, "", True)
    assert engine.tree() == patched
    assert read_state(engine.python).patch == "probe"
    assert engine.model.stat().st_mode == 0o100644

    undone = revert(RevertArgs(engine.python), context(tmp_path))

    assert (undone.changed, undone.before.state, undone.after.state) == (True, "ours", "clean")
    assert undone.verified == [str(engine.model)]
    assert engine.tree() == before
    assert not (engine.site / patchrecord.FOLDER).exists()
    assert not revert(RevertArgs(engine.python), context(tmp_path)).changed


def test_the_interpreter_sees_the_edit_although_old_bytecode_was_unchecked(engine: Install, apply) -> None:
    code = "import sys, types; sys.modules['sglang'] = m = types.ModuleType('sglang'); m.__path__ = [sys.argv[1]];"
    code += "import sglang.srt.models.tiny as t; print(t.fleetdump_probe.VERSION)"
    command = [engine.python, "-B", "-c", code, str(engine.site / "sglang")]
    assert subprocess.run(command, check=False, capture_output=True).returncode != 0

    apply(spec())

    assert subprocess.run(command, check=True, capture_output=True, text=True).stdout == "1\n"


def test_bytecode_of_the_patched_files_goes_with_the_revert(engine: Install, apply, tmp_path: Path) -> None:
    before = engine.tree()
    apply(spec())
    subprocess.run([engine.python, "-m", "compileall", "-q", str(engine.site)], check=False, capture_output=True)
    assert list(engine.site.glob("__pycache__/fleetdump_probe.*"))

    undo(engine, tmp_path)

    assert not list(engine.site.glob("__pycache__/fleetdump_probe.*"))
    assert before.items() <= engine.tree().items()


def test_a_dry_run_shows_the_diff_and_changes_nothing(engine: Install, tmp_path: Path) -> None:
    before = engine.tree()

    plan = patch(PatchArgs(engine.python, spec(), dry_run=True), context(tmp_path))

    assert (plan.changed, plan.after.state) == (False, "clean")
    assert "fleetdump_probe.at(i, hidden_states, residual)" in plan.diff
    assert "new file" in plan.diff
    assert engine.tree() == before


@pytest.mark.parametrize(("version", "name"), [("2", "probe"), ("1", "other-patch")])
def test_another_patch_of_ours_is_replaced_in_one_call(
    engine: Install, apply, tmp_path: Path, version: str, name: str
) -> None:
    before = engine.tree()
    apply(spec())

    files = {"fleetdump_probe.py": "new\n", "fleetdump_more.py": "more\n"}
    result = apply(spec(version, name, files))

    assert (result.before.state, result.before.patch, result.after.state) == ("other", "probe", "ours")
    assert engine.model.read_text().count(f"# fleetdump:{name}@{version}") == 3
    assert engine.model.read_text().count("# fleetdump:") == 3
    undo(engine, tmp_path)
    assert engine.tree() == before


def test_mode_and_a_symbolic_link_come_back_as_they_were(engine: Install, apply, tmp_path: Path) -> None:
    store = tmp_path / "store.py"
    shutil.copy2(engine.model, store)
    store.chmod(0o640)
    engine.model.unlink()
    engine.model.symlink_to(store)

    apply(spec())
    assert not engine.model.is_symlink()
    assert store.read_bytes() == MODEL
    undo(engine, tmp_path)

    assert os.readlink(engine.model) == str(store)
    engine.model.unlink()
    shutil.copy2(store, engine.model)
    apply(spec())
    assert engine.model.stat().st_mode & 0o777 == 0o640
    undo(engine, tmp_path)
    assert engine.model.stat().st_mode & 0o777 == 0o640


def test_a_hard_link_of_another_environment_is_not_written_through(engine: Install, apply, tmp_path: Path) -> None:
    os.link(engine.model, tmp_path / "cache.py")

    apply(spec())

    assert (tmp_path / "cache.py").read_bytes() == MODEL


@pytest.mark.parametrize(
    "source",
    [
        MODEL.replace(b"\n", b"\r\n"),
        MODEL.replace(b"    ", b"\t"),
        b"# -*- coding: latin-1 -*-\n# caf\xe9\n" + MODEL,
        b"\xef\xbb\xbf" + MODEL,
        MODEL.rstrip(b"\n"),
    ],
    ids=["crlf", "tabs", "latin-1", "byte order mark", "no newline at the end"],
)
def test_odd_files_get_the_lines_and_come_back_to_the_byte(tmp_path: Path, source: bytes) -> None:
    made = install(tmp_path / "venv", model=source)
    before = made.tree()

    assert patch(PatchArgs(made.python, spec()), context(tmp_path)).after.state == "ours"
    patched = made.model.read_bytes()
    assert patched.count(b"# fleetdump:probe@1") == 3
    assert b"".join(line for line in patched.splitlines(keepends=True) if b"# fleetdump:" not in line) == source
    assert (b"\r\n" in source) == (b"probe@1\r\n" in patched)
    undo(made, tmp_path)

    assert made.tree() == before


@pytest.mark.parametrize(
    "source", [b"", b"\xff\xfe\x00", b"# caf\xe9\n" + MODEL], ids=["0 bytes", "binary", "not UTF-8"]
)
def test_a_file_that_is_no_such_module_is_refused_and_left(tmp_path: Path, source: bytes) -> None:
    made = install(tmp_path / "venv", model=source)
    before = made.tree()

    error = failure(lambda: patch(PatchArgs(made.python, spec()), context(tmp_path))).error

    assert (error.code, error.where) == ("conflict", str(made.model))
    assert "does not fit" in error.what
    assert made.tree() == before


# --------------------------------------------------------------------------- models choose the files
@pytest.fixture
def two(engine: Install) -> PatchSpec:
    """A patch of two model files and of one that every model needs; the engine has them all."""
    wanted = spec()
    tiny = wanted.edits[0]
    for name in ("other", "common"):
        shutil.copy(engine.model, engine.model.with_name(f"{name}.py"))
        wanted.edits.append(replace(tiny, module=f"sglang.srt.models.{name}"))
    wanted.architectures = {"Tiny": [tiny.module], "Other": ["sglang.srt.models.other"]}
    wanted.refused = {"Strange": "its stream is another"}
    return wanted


def model(folder: Path, architecture: str) -> str:
    path = folder / architecture
    path.mkdir(exist_ok=True)
    (path / "config.json").write_text(json.dumps({"architectures": [architecture], "num_hidden_layers": 1}))
    (path / "model.safetensors").write_bytes(b"")
    return str(path)


def patched_files(engine: Install) -> list[str]:
    return sorted(path.stem for path in engine.model.parent.glob("*.py") if b"# fleetdump:" in path.read_bytes())


def test_only_what_the_models_run_is_patched_and_a_second_model_adds_its_own(
    engine: Install, two: PatchSpec, tmp_path: Path
) -> None:
    before = engine.tree()
    tiny, other = model(tmp_path, "Tiny"), model(tmp_path, "Other")

    def apply_for(*models: str, dry_run: bool = False) -> PatchResult:
        return patch(PatchArgs(engine.python, two, models=list(models), dry_run=dry_run), context(tmp_path))

    assert apply_for(tiny, dry_run=True).diff.count("+++ ") == 2
    assert apply_for(tiny).changed
    assert patched_files(engine) == ["common", "tiny"]
    assert read_state(engine.python, two, models=[tiny]).state == "ours"
    assert read_state(engine.python, two, models=[other]).state == "other"
    assert not apply_for(tiny).changed

    assert apply_for(other).changed  # tiny's server may still run: its file stays patched
    assert patched_files(engine) == ["common", "other", "tiny"]
    assert not apply_for(tiny, other).changed
    assert read_state(engine.python, two, models=[tiny]).state == "ours"

    undo(engine, tmp_path)
    assert engine.tree() == before


def test_a_refused_model_stops_the_patch_before_any_file_changes(
    engine: Install, two: PatchSpec, tmp_path: Path
) -> None:
    before = engine.tree()
    models = [model(tmp_path, "Tiny"), model(tmp_path, "Strange")]

    error = failure(lambda: patch(PatchArgs(engine.python, two, models=models), context(tmp_path))).error

    assert (error.code, error.why) == ("conflict", "its stream is another")
    assert "architecture Strange" in error.what
    assert engine.tree() == before


def test_a_model_that_is_not_here_has_every_file_patched(engine: Install, two: PatchSpec, tmp_path: Path) -> None:
    patch(PatchArgs(engine.python, two, models=["somebody/model"]), context(tmp_path))

    assert patched_files(engine) == ["common", "other", "tiny"]


def test_somebody_elses_edit_of_a_file_that_the_model_does_not_run_is_no_obstacle(
    engine: Install, two: PatchSpec, tmp_path: Path
) -> None:
    record = next(engine.site.glob("*.dist-info/RECORD"))
    record.write_text(record.read_text() + "sglang/srt/models/other.py,sha256=AAAA,1\n")
    args = PatchArgs(engine.python, two, models=[model(tmp_path, "Tiny")])

    assert patch(args, context(tmp_path)).changed
    args.models = [model(tmp_path, "Other")]
    assert failure(lambda: patch(args, context(tmp_path))).error.code == "conflict"


# --------------------------------------------------------------------------- other people's work
def test_a_hand_edited_file_is_refused_by_the_hash_in_the_wheel(engine: Install, apply) -> None:
    engine.model.write_bytes(MODEL + b"# mine\n")

    error = failure(lambda: apply(spec())).error

    assert error.code == "conflict"
    assert error.where == str(engine.model)
    assert "RECORD" in error.why
    assert "reinstall" in error.next_step
    assert engine.model.read_bytes() == MODEL + b"# mine\n"
    assert read_state(engine.python, spec()).state == "unknown"


def test_a_file_edited_after_our_patch_is_refused_with_the_diff(engine: Install, apply, tmp_path: Path) -> None:
    apply(spec())
    ours = engine.model.read_bytes()
    engine.model.write_bytes(ours + b"# mine\n")

    for call in (lambda: undo(engine, tmp_path), lambda: apply(spec("2"))):
        error = failure(call).error
        assert error.code == "conflict"
        assert "+# mine" in error.why
    assert engine.model.read_bytes() == ours + b"# mine\n"
    assert read_state(engine.python).state == "unknown"

    engine.model.write_bytes(ours)
    undo(engine, tmp_path)
    assert engine.model.read_bytes() == MODEL


def test_our_lines_without_our_record_are_recognised(engine: Install, apply) -> None:
    apply(spec())
    shutil.rmtree(engine.site / patchrecord.FOLDER)

    assert "record is gone" in failure(lambda: apply(spec())).error.why


def test_an_editable_install_without_hashes_is_taken_as_it_is(engine: Install, apply, tmp_path: Path) -> None:
    next(engine.site.glob("*.dist-info/RECORD")).write_text("")
    engine.model.write_bytes(MODEL + b"# mine\n")

    assert "editable" in apply(spec()).before.detail
    undo(engine, tmp_path)
    assert engine.model.read_bytes() == MODEL + b"# mine\n"


def test_a_file_of_somebody_else_is_never_overwritten(engine: Install, apply) -> None:
    (engine.site / "fleetdump_probe.py").write_text("theirs\n")
    before = engine.tree()

    assert failure(lambda: apply(spec())).error.code == "conflict"

    assert engine.tree() == before


@pytest.mark.parametrize("name", ["../evil.py", "a/b.py", "/tmp/x.py", "data.txt"])
def test_a_patch_may_add_plain_modules_only(engine: Install, apply, name: str) -> None:
    assert failure(lambda: apply(spec(files={name: ""}))).error.code == "usage"


@pytest.mark.parametrize("release", ["0.5.20", "0.5.19"])
def test_a_package_reinstalled_over_our_patch_is_recognised(
    engine: Install, apply, tmp_path: Path, release: str
) -> None:
    apply(spec())
    newer = MODEL.replace(b"A model", b"Another model")
    install(engine.root, release, newer)

    state = read_state(engine.python, spec())
    assert (state.state, "installed over our patch" in state.detail) == ("clean", True)
    assert apply(spec()).after.state == "ours"
    undo(engine, tmp_path)

    assert engine.model.read_bytes() == newer
    assert not (engine.site / "fleetdump_probe.py").exists()


def test_reverting_after_a_reinstall_removes_what_is_left_of_us(engine: Install, apply, tmp_path: Path) -> None:
    apply(spec())
    install(engine.root, "0.5.21", MODEL.replace(b"A model", b"Another model"))
    before = engine.tree()

    assert undo(engine, tmp_path).changed

    left = set(engine.tree())
    assert left == {n for n in before if not n.startswith(("fleetdump-patch", "fleetdump_probe"))}


# --------------------------------------------------------------------------- what cannot be patched
def test_a_release_out_of_range_is_refused_by_name(engine: Install, apply) -> None:
    install(engine.root, "0.5.23")

    error = failure(lambda: apply(spec())).error

    assert (error.code, "release 0.5.23 is outside 0.5.0 to 0.5.20" in error.why) == ("conflict", True)


def test_a_release_that_no_test_has_run_is_not_verified(engine: Install, apply) -> None:
    install(engine.root, "0.5.19")

    assert apply(spec()).verified is False
    assert apply(spec()).verified is False


def test_missing_interpreter_engine_and_module(engine: Install, apply, tmp_path: Path) -> None:
    assert failure(lambda: patch(PatchArgs("/no/python", spec()), context(tmp_path))).error.code == "not_found"
    other = spec()
    other.edits[0].module = "sglang.srt.models.nothing"
    assert "none of: sglang.srt.models.nothing" in failure(lambda: apply(other)).error.why
    shutil.rmtree(engine.site / "sglang")
    assert "not installed" in failure(lambda: apply(spec())).error.what
    assert read_state(engine.python, spec()).state == "absent"


def test_an_interpreter_that_hangs_or_talks_nonsense(tmp_path: Path) -> None:
    for script, code in (("exec sleep 30", "timeout"), ("echo broken >&2; exit 3", "failed")):
        python = tmp_path / code
        python.write_text(f"#!/bin/sh\n{script}\n")
        python.chmod(0o755)
        error = failure(lambda p=python: patch(PatchArgs(str(p), spec()), context(tmp_path, deadline=1.0))).error
        assert error.code == code
    assert "broken" in error.why


def test_a_read_only_package_is_a_clear_error(
    engine: Install, apply, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = engine.tree()
    # Root may write anywhere but on a read-only file system, which os.access reports in just this way.
    monkeypatch.setattr(patching.os, "access", lambda path, mode: mode != os.W_OK | os.X_OK)

    error = failure(lambda: apply(spec())).error

    assert (error.code, error.where) == ("permission", str(engine.site))
    assert engine.tree() == before


def test_a_damaged_copy_of_the_original_is_never_put_back(engine: Install, apply, tmp_path: Path) -> None:
    apply(spec())
    patched = engine.model.read_bytes()
    (engine.site / patchrecord.FOLDER / "0.original").write_bytes(b"damaged")

    assert "damaged" in failure(lambda: undo(engine, tmp_path)).error.what
    assert engine.model.read_bytes() == patched


def test_a_damaged_record_is_reported(engine: Install, apply) -> None:
    apply(spec())
    (engine.site / patchrecord.FOLDER / "record.json").write_text("{")

    assert "record" in failure(lambda: read_state(engine.python)).error.what


def test_the_lock_beside_the_package_is_honoured(engine: Install, apply, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(patchrecord, "LOCK_WAIT", 0.2)
    with patchrecord.locked(engine.site):
        assert failure(lambda: apply(spec())).error.code == "locked"
    assert apply(spec()).changed


# --------------------------------------------------------------------------- killed at any instant
KILLER = """
import json, os, signal, sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from tests.unit import engineinstall
from fleetdump.agent import engine, patching, patchmessages
import shutil

left = int(sys.argv[4])
def deadly(name, where=os):
    real = getattr(where, name)
    def call(*args, **kwargs):
        global left
        left -= 1
        if left == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return real(*args, **kwargs)
    setattr(where, name, call)

def change():
    ctx = engineinstall.context(Path(sys.argv[3]))
    if sys.argv[5] == "revert":
        return patching.revert(patchmessages.RevertArgs(sys.argv[2]), ctx)
    return patching.patch(patchmessages.PatchArgs(sys.argv[2], engineinstall.spec(sys.argv[5])), ctx)

for name in ("replace", "unlink", "fsync", "mkdir", "rmdir", "chmod"):
    deadly(name)
change()
print("survived")
"""


@pytest.mark.parametrize("stride", [5, pytest.param(1, marks=pytest.mark.nightly)], ids=["some", "all"])
@pytest.mark.parametrize(("start", "action"), [("", "1"), ("1", "2"), ("1", "revert")], ids=["apply", "swap", "revert"])
def test_a_kill_at_any_step_leaves_a_state_that_patch_and_revert_can_go_on_from(
    tmp_path: Path, start: str, action: str, stride: int
) -> None:
    engine = install(tmp_path / "venv")
    compile_model(engine)
    clean = engine.tree()
    root = str(Path(__file__).parents[2])
    survived = False
    step = 1 - stride
    while not survived:
        step += stride
        if start:
            patch(PatchArgs(engine.python, spec(start)), context(tmp_path))
        command = [sys.executable, "-c", KILLER, root, engine.python, str(tmp_path), str(step), action]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        survived = "survived" in done.stdout
        assert survived or done.returncode == -signal.SIGKILL, done.stderr
        if step % 2:  # go on: the wanted patch is applied whatever was there
            assert patch(PatchArgs(engine.python, spec("3")), context(tmp_path)).after.state == "ours"
            assert engine.model.read_text().count("# fleetdump:probe@3") == 3
        revert(RevertArgs(engine.python), context(tmp_path))
        assert engine.tree() == clean, f"killed at step {step}"
    assert step > 8
    assert json.dumps(sorted(p.name for p in engine.site.iterdir())).count("fleetdump") == 0


def test_the_package_that_pythonpath_puts_in_front_is_the_one_that_is_patched(tmp_path: Path) -> None:
    engine, other = install(tmp_path / "venv"), install(tmp_path / "other")
    before, env = engine.tree(), {"PYTHONPATH": str(other.site)}
    original = other.tree()

    result = patch(PatchArgs(engine.python, spec(), env=env), context(tmp_path))

    assert result.after.files == [str(other.model)]
    assert patching.read_state(engine.python, spec(), env).state == "ours"
    assert patching.read_state(engine.python, spec()).state == "clean"
    assert engine.tree() == before
    assert revert(RevertArgs(engine.python, env), context(tmp_path)).verified == [str(other.model)]
    assert other.tree() == original
