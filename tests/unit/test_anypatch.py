"""Diffs and scripts in the envelope that edits have: applied, recognised, upgraded, refused, taken out to the byte."""

from __future__ import annotations

import base64
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from fleetdump.agent import patchfiles, patching, patchrecord
from fleetdump.agent.patching import patch, read_state, revert
from fleetdump.agent.patchmessages import PatchArgs, PatchResult, RevertArgs
from fleetdump.agent.protocol import AgentFailure
from fleetdump.agent.specs import PatchSpec
from tests.unit.engineinstall import MODEL, Install, context, install, spec
from tests.unit.packagepatches import DIFF, EXTRA, SCRIPT, all_files, change_spec, engine_with_extra


@pytest.fixture
def engine(tmp_path: Path) -> Install:
    return engine_with_extra(tmp_path / "venv")


@pytest.fixture
def apply(engine: Install, tmp_path: Path) -> Callable[..., PatchResult]:
    return lambda wanted, **more: patch(PatchArgs(engine.python, wanted, **more), context(tmp_path))


def failure(call: Callable[[], object]) -> AgentFailure:
    with pytest.raises(AgentFailure) as caught:
        call()
    return caught.value


def undo(engine: Install, tmp_path: Path, force: bool = False) -> None:
    revert(RevertArgs(engine.python, force=force), context(tmp_path))


both = pytest.mark.parametrize("kind", ["diff", "script"])


# --------------------------------------------------------------------------- apply, again, upgrade, revert
@both
def test_many_files_are_changed_once_and_come_back_without_a_trace(engine, apply, tmp_path: Path, kind: str) -> None:
    before = engine.tree()
    wanted = all_files(kind)

    plan = apply(wanted, dry_run=True)
    assert engine.tree() == before
    first = apply(wanted)
    patched = engine.tree()
    second = apply(wanted)

    assert plan.diff == first.diff
    for text in ("+import sglang.srt.deep.down.made", "+two = 22", "--- /dev/null", "+++ /dev/null", '+{"a": 2}'):
        assert text in first.diff
    assert (first.before.state, first.after.state, first.changed, first.verified) == ("clean", "ours", True, True)
    assert (second.changed, second.diff, second.verified) == (False, "", True)
    assert engine.tree() == patched
    srt = engine.site / "sglang" / "srt"
    assert (srt / "crlf.py").read_bytes() == b"one = 1\r\ntwo = 22\r\nthree = 3\r\n"
    assert (srt / "latin.py").read_bytes() == EXTRA["sglang/srt/latin.py"].replace(b"x = 1", b"x = 2")
    assert (srt / "deep" / "moved.py").read_bytes() == EXTRA["sglang/srt/moved.py"]
    assert (srt / "deep" / "down" / "made.py").read_bytes() == b'VERSION = "1"\n\t# a tab\n'
    assert not [name for name in ("gone.py", "empty.py", "moved.py") if (srt / name).exists()]
    assert not (srt / "__pycache__" / "gone.cpython-311.pyc").exists()
    assert read_state(engine.python).patch == "all"
    assert read_state(engine.python, wanted).state == "ours"

    undo(engine, tmp_path)

    assert engine.tree() == before
    assert not (srt / "deep").exists()
    assert not (engine.site / patchrecord.FOLDER).exists()
    assert not list((tmp_path / "state").rglob("script-copies"))


@pytest.mark.parametrize("new", ["diff", "script", "edits"])
@pytest.mark.parametrize("old", ["diff", "script", "edits"])
def test_any_kind_replaces_any_other_and_an_older_version(engine, apply, tmp_path, old: str, new: str) -> None:
    before = engine.tree()
    apply(all_files(old))

    result = apply(all_files(new, "2"))

    assert (result.before.state, result.after.state, result.after.version) == ("other", "ours", "2")
    made = engine.site / "sglang" / "srt" / "deep" / "down" / "made.py"
    assert made.exists() == (new != "edits")
    assert new == "edits" or 'VERSION = "2"' in made.read_text()
    undo(engine, tmp_path)
    assert engine.tree() == before


def test_a_diff_and_edits_of_one_file_go_together(engine, apply, tmp_path: Path) -> None:
    before = engine.tree()

    apply(replace(spec(), changes=all_files("diff").changes, sha256="both"))

    text = engine.model.read_text()
    assert "import sglang.srt.deep.down.made\n" in text
    assert text.count("# fleetdump:probe@1") == 3
    undo(engine, tmp_path)
    assert engine.tree() == before


def test_files_made_beside_python_of_the_server_leave_no_folder(engine, apply, tmp_path: Path) -> None:
    before = engine.tree()
    apply(all_files("diff"))
    deep = engine.site / "sglang" / "srt" / "deep"
    subprocess.run([engine.python, "-m", "compileall", "-q", str(deep)], check=False, capture_output=True)
    assert list(deep.rglob("*.pyc"))

    undo(engine, tmp_path)

    assert not deep.exists()
    assert engine.tree() == before


# --------------------------------------------------------------------------- what does not fit
def test_the_first_change_for_the_release_is_taken_and_none_is_a_refusal(apply, tmp_path: Path) -> None:
    wanted = all_files("diff")
    other = replace(wanted.changes[0], data=base64.b64encode(b"nonsense").decode(), last_release="0.5.19")
    assert apply(replace(wanted, changes=[other, wanted.changes[0]])).after.state == "ours"

    error = failure(lambda: apply(replace(wanted, sha256="x", changes=[other]))).error

    assert (error.code, "release 0.5.20 is outside 0.5.0 to 0.5.19" in error.why) == ("conflict", True)


def test_a_release_that_no_test_has_run_is_not_verified(engine: Install, apply) -> None:
    engine_with_extra(engine.root, "0.5.19")
    assert apply(all_files("diff")).verified is False


@pytest.mark.parametrize(
    ("old", "new", "why"),
    [
        (b"-two = 2\r", b"-two = 3\r", "does not fit"),
        (b"+two = 22\r", b"+two = (\r", "cannot compile"),
        (b"deep/down/made.py", b"models/__init__.py", "there already"),
        (b"srt/gone.py", b"srt/none.py", "no such file"),
    ],
)
def test_one_file_that_does_not_fit_leaves_all_as_they_were(engine, apply, old: bytes, new: bytes, why: str) -> None:
    before = engine.tree()

    error = failure(lambda: apply(change_spec(DIFF.replace(old, new)))).error

    assert error.code == "conflict"
    assert why in error.why
    assert engine.tree() == before


def test_a_diff_that_is_applied_already_says_so(engine: Install, apply) -> None:
    (engine.site / "sglang" / "srt" / "crlf.py").write_bytes(b"one = 1\r\ntwo = 22\r\nthree = 3\r\n")
    assert "applied already" in failure(lambda: apply(change_spec(DIFF))).error.why


@pytest.mark.parametrize(
    ("target", "link"), [("sglang/srt/out", "/tmp"), ("sglang/srt/out", "../.."), ("sglang/srt/out", "../../other")]
)
def test_a_folder_that_is_a_link_out_of_the_package_is_refused(engine, apply, target: str, link: str) -> None:
    (engine.site / "other").mkdir()
    (engine.site / target).symlink_to(link)
    before = engine.tree()
    made = b"--- /dev/null\n+++ b/sglang/srt/out/made.py\n@@ -0,0 +1 @@\n+x = 1\n"

    error = failure(lambda: apply(change_spec(made))).error

    assert "outside the package" in error.what
    assert engine.tree() == before


def test_a_file_that_is_a_link_is_replaced_and_never_written_through(engine, apply, tmp_path: Path) -> None:
    store = tmp_path / "store.json"
    target = engine.site / "sglang" / "srt" / "table.json"
    shutil.move(str(target), str(store))
    target.symlink_to(store)

    apply(all_files("diff"))
    assert (store.read_bytes(), target.read_bytes(), target.is_symlink()) == (b'{"a": 1}', b'{"a": 2}', False)
    undo(engine, tmp_path)

    assert os.readlink(target) == str(store)


@pytest.mark.parametrize("name", ["../evil.py", "a/b.py", "/tmp/x.py", "data.txt"])
def test_a_script_has_a_plain_name(apply, name: str) -> None:
    assert failure(lambda: apply(change_spec(SCRIPT, "script", name=name))).error.code == "usage"


# --------------------------------------------------------------------------- scripts
@pytest.mark.parametrize(
    ("code", "why"),
    [
        ("sys.exit('not for me')", "not for me"),
        ("raise KeyError('old layout')", "old layout"),
        ("pass", "changes nothing"),
        ("open(package + '/../beside.py', 'w').close()", "beside the package"),
        ("os.symlink('/etc/passwd', package + '/link.py')", "no regular file"),
        ("os.symlink('/etc', package + '/folder')", "no regular file"),
        ("os.mkfifo(package + '/pipe')", "no regular file"),
        ("open(package.encode() + b'/\\xff.py', 'w').close()", "not UTF-8"),
        ("open(package + '/bad.py', 'w').write('x = (')", "cannot compile"),
    ],
)
def test_a_script_that_fails_or_does_what_no_patch_may(engine, apply, tmp_path, code: str, why: str) -> None:
    before = engine.tree()
    script = f"import os, sys\npackage = sys.argv[1]\n{code}\n".encode()

    error = failure(lambda: apply(change_spec(script, "script"))).error

    assert why in error.why
    assert engine.tree() == before
    assert not list((tmp_path / "state").rglob("script-copies"))


def test_a_script_that_writes_to_the_real_package_is_undone_and_refused(engine: Install, apply) -> None:
    before = engine.tree()
    real = str(engine.site / "sglang")
    script = f"""import os
with open({real!r} + "/srt/latin.py", "ab") as file:
    file.write(b"x = 3\\n")
os.unlink({real!r} + "/srt/gone.py")
open({real!r} + "/srt/new.py", "w").close()
""".encode()

    error = failure(lambda: apply(change_spec(script, "script"))).error

    assert "installed package itself" in error.why
    assert "first argument" in error.next_step
    assert engine.tree() == before


def test_a_script_that_does_not_end_is_ended(engine: Install, tmp_path: Path) -> None:
    script = b"import time\ntime.sleep(600)\n"
    args = PatchArgs(engine.python, change_spec(script, "script"))
    assert failure(lambda: patch(args, context(tmp_path, deadline=3.0))).error.code == "timeout"


def test_what_a_killed_agent_left_of_a_script_goes_with_the_next(engine, apply, tmp_path: Path) -> None:
    copies = context(tmp_path).state.directory("script-copies", "999999999-dead")
    apply(all_files("script"))
    assert not copies.exists()


# --------------------------------------------------------------------------- other people's work
@both
def test_a_hand_edited_file_is_refused_and_taken_by_force(engine, apply, tmp_path: Path, kind: str) -> None:
    latin = engine.site / "sglang" / "srt" / "latin.py"
    mine = latin.read_bytes() + b"y = 1\n"
    latin.write_bytes(mine)

    error = failure(lambda: apply(all_files(kind))).error
    assert (error.code, error.where) == ("conflict", str(latin))
    assert "RECORD" in error.why
    assert "--force" in error.next_step
    assert latin.read_bytes() == mine

    result = apply(all_files(kind), force=True)
    assert (result.after.state, latin.read_bytes()) == ("ours", mine.replace(b"x = 1", b"x = 2"))
    undo(engine, tmp_path)
    assert latin.read_bytes() == mine


@pytest.mark.parametrize("kind", ["diff", "script", "edits"])
def test_an_edit_after_our_patch_is_refused_with_the_diff_and_put_aside_by_force(
    engine, apply, tmp_path: Path, kind: str
) -> None:
    before = engine.tree()
    apply(all_files(kind))
    mine = engine.model.read_bytes() + b"# mine\n"
    engine.model.write_bytes(mine)

    for call in (lambda: undo(engine, tmp_path), lambda: apply(all_files(kind)), lambda: apply(all_files(kind, "2"))):
        error = failure(call).error
        assert (error.code, "+# mine" in error.why, "--force" in error.next_step) == ("conflict", True, True)

    result = apply(all_files(kind, "2"), force=True)
    assert result.after.state == "ours"
    assert [Path(copy).read_bytes() for copy in result.kept] == [mine]
    engine.model.write_bytes(mine)
    undo(engine, tmp_path, force=True)
    assert engine.tree() == before


@pytest.mark.parametrize("gone", ["made", "recreated", "missing"])
def test_made_and_deleted_files_that_somebody_changed_are_seen(engine, apply, tmp_path, gone: str) -> None:
    before = engine.tree()
    apply(all_files("diff"))
    srt = engine.site / "sglang" / "srt"
    if gone == "made":
        (srt / "deep" / "down" / "made.py").write_text("mine = 1\n")
    elif gone == "recreated":
        (srt / "gone.py").write_text("mine = 1\n")
    else:
        (srt / "latin.py").unlink()

    assert read_state(engine.python).state == "unknown"
    assert failure(lambda: undo(engine, tmp_path)).error.code == "conflict"
    undo(engine, tmp_path, force=True)
    assert engine.tree() == before


def test_force_does_not_patch_a_patched_file_whose_record_is_gone(engine: Install, apply) -> None:
    apply(spec())
    shutil.rmtree(engine.site / patchrecord.FOLDER)
    assert "record is gone" in failure(lambda: apply(spec(), force=True)).error.why


def test_a_package_reinstalled_over_our_diff_can_be_patched_again(engine, apply, tmp_path: Path) -> None:
    apply(all_files("diff"))
    newer = MODEL + b"\n# newer\n"
    install(engine.root, "0.5.19", newer, EXTRA)
    assert read_state(engine.python).state == "clean"

    assert apply(all_files("diff")).after.state == "ours"
    undo(engine, tmp_path)

    assert engine.model.read_bytes() == newer
    assert not (engine.site / "sglang" / "srt" / "deep").exists()


def test_a_read_only_package_names_the_import_hook(engine: Install, apply, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(patching.os, "access", lambda path, mode: not str(path).endswith("srt"))
    error = failure(lambda: apply(all_files("diff"))).error
    assert (error.code, error.where) == ("permission", str(engine.site / "sglang" / "srt"))
    assert "--delivery import-hook" in error.next_step


# --------------------------------------------------------------------------- half-way
@pytest.mark.parametrize("lasting", [False, True], ids=["once", "lasting"])
def test_all_files_are_undone_when_one_fails(engine, apply, tmp_path: Path, monkeypatch, lasting: bool) -> None:
    before = engine.tree()
    real = patchrecord.replace
    failures = []

    def full(target: Path, *args: object) -> None:
        if target.name == "latin.py" and (lasting or not failures):
            failures.append(target)
            raise OSError(28, "No space left on device", str(target))
        real(target, *args)

    with monkeypatch.context() as patched:
        patched.setattr(patchfiles.patchrecord, "replace", full)
        with pytest.raises(OSError, match="No space"):
            apply(all_files("diff"))
    if lasting:  # not even the undo had room: the next call finishes it
        assert read_state(engine.python).state == "other"
        undo(engine, tmp_path)
    assert engine.tree() == before


KILLER = """
import os, signal, sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from tests.unit import engineinstall, packagepatches
from fleetdump.agent import patching, patchmessages

CHANGES = {f"os.{name}" for name in "rename remove mkdir rmdir chmod chown utime symlink link truncate".split()}
left = int(sys.argv[4])
def step():
    global left
    left -= 1
    if left == 0:
        os.kill(os.getpid(), signal.SIGKILL)

def audit(event, args):
    if event in CHANGES or event == "open" and args[2] & (os.O_WRONLY | os.O_RDWR):
        step()

ctx = engineinstall.context(Path(sys.argv[3]))
sys.addaudithook(audit)  # Python tells of every call that changes a file system, but for fsync
fsync = os.fsync
os.fsync = lambda descriptor: (step(), fsync(descriptor))[1]
if sys.argv[5] == "revert":
    patching.revert(patchmessages.RevertArgs(sys.argv[2]), ctx)
else:
    patching.patch(patchmessages.PatchArgs(sys.argv[2], packagepatches.all_files(*sys.argv[5].split("@"))), ctx)
print("survived")
"""


@pytest.mark.parametrize("stride", [23, pytest.param(1, marks=pytest.mark.nightly)], ids=["some", "all"])
@pytest.mark.parametrize(
    ("start", "action"),
    [("", "diff@1"), ("diff@1", "diff@2"), ("diff@1", "revert"), ("edits@1", "diff@2"), ("diff@1", "edits@2")],
    ids=["apply", "upgrade", "revert", "edits-to-diff", "diff-to-edits"],
)
def test_a_kill_at_any_step_between_files_leaves_a_state_to_go_on_from(
    tmp_path: Path, start: str, action: str, stride: int
) -> None:
    """A step is a call that opens a file for writing or changes a name, a folder or what a file is like, and each
    fsync: the agent dies right before it."""
    engine = engine_with_extra(tmp_path / "venv")
    clean = engine.tree()
    folders = sorted(str(path) for path in engine.site.rglob("*") if path.is_dir())
    root = str(Path(__file__).parents[2])
    step = 1 - stride
    survived = False
    while not survived:
        step += stride
        if start:
            patch(PatchArgs(engine.python, all_files(*start.split("@"))), context(tmp_path))
        command = [sys.executable, "-c", KILLER, root, engine.python, str(tmp_path), str(step), action]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        survived = "survived" in done.stdout
        assert survived or done.returncode == -signal.SIGKILL, done.stderr
        if step % 2:  # go on: the wanted patch is applied whatever was there
            wanted: PatchSpec = all_files("diff", "3")
            assert patch(PatchArgs(engine.python, wanted), context(tmp_path)).after.state == "ours"
            assert 'VERSION = "3"' in (engine.site / "sglang/srt/deep/down/made.py").read_text()
        revert(RevertArgs(engine.python), context(tmp_path))
        assert engine.tree() == clean, f"killed at step {step}"
        assert sorted(str(path) for path in engine.site.rglob("*") if path.is_dir()) == folders
    print(f"{step} steps")
    assert step > 60
