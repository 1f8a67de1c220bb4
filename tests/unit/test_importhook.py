"""The import hook: no file of the engine changes, the launched process and its children alone run the edited module."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from fleetdump.agent import checks, importhook, patching, sitehook
from fleetdump.agent.context import AgentContext
from fleetdump.agent.launch import launch
from fleetdump.agent.patching import patch
from fleetdump.agent.patchmessages import PatchArgs
from fleetdump.agent.protocol import AgentFailure
from fleetdump.agent.server import living, load_record, load_records
from fleetdump.agent.servermessages import LaunchArgs
from fleetdump.agent.specs import Interpreter, PatchSpec, ServerSpec
from tests.unit.engineinstall import MODEL, Install, context, install, runnable, spec, wait_for
from tests.unit.packagepatches import all_files

PROBE = """
VERSION = "1"
print("probe imported", flush=True)
def at(*values): print("at", *values, flush=True)
def end(*values): print("end", *values, flush=True)
"""
SERVER = b"""import inspect, multiprocessing, os, sys, time

def child():
    from sglang.srt.models import tiny
    model = tiny.TinyModel()
    model.layers = [lambda h, r: (h + 1, 0)]
    model.forward(1, None)
    print("child file", tiny.__file__, flush=True)
    print("child source", "fleetdump_probe.at" in inspect.getsource(tiny.TinyModel.forward), flush=True)
    try:
        model.forward(None, None)
    except TypeError:
        import traceback
        print("child trace", traceback.format_exc(), flush=True)

if __name__ == "__main__":
    process = multiprocessing.get_context("spawn").Process(target=child)
    process.start()
    process.join()
    print("child ended", process.exitcode, flush=True)
    time.sleep(60)
"""


@pytest.fixture
def engine(tmp_path: Path) -> Install:
    made = runnable(install(tmp_path / "venv"))
    (made.site / "sglang" / "launch_server.py").write_bytes(SERVER)
    return made


@pytest.fixture
def ctx(tmp_path: Path) -> Iterator[AgentContext]:
    made = context(tmp_path)
    yield made
    for record in load_records(made.state):
        for member in living(record):
            with contextlib.suppress(ProcessLookupError):
                os.kill(member.pid, signal.SIGKILL)


@pytest.fixture
def server(engine: Install, tmp_path: Path) -> ServerSpec:
    (tmp_path / "model").mkdir()
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    return ServerSpec("main", engine.python, str(tmp_path / "model"), port)


def by_hook(server: ServerSpec, patch: PatchSpec | None = None, replace: bool = False) -> LaunchArgs:
    wanted = patch or spec(files={"fleetdump_probe.py": PROBE})
    return LaunchArgs(server, wanted, replace=replace, delivery="import-hook")


def log_of(ctx: AgentContext) -> str:
    record = load_record(ctx.state, "main")
    assert record is not None
    wait_for(lambda: "child ended" in Path(record.log).read_text(), 30.0)
    return Path(record.log).read_text()


def failure(args: LaunchArgs, ctx: AgentContext) -> AgentFailure:
    with pytest.raises(AgentFailure) as caught:
        launch(args, ctx)
    return caught.value


def test_a_spawned_child_runs_the_edited_module_and_no_file_changes(engine: Install, server, ctx) -> None:
    before = engine.tree()

    launch(by_hook(server), ctx)
    log = log_of(ctx)

    assert "probe imported\nat 0 1 None\nend 2 0\n" in log
    assert f"child file {engine.model}" in log
    assert "child source True" in log, "inspect shows the lines that run"
    assert "layer(hidden_states, residual)" in log.partition("child trace")[2], "and so do tracebacks"
    assert "child ended 0" in log
    assert engine.tree() == before
    assert not list(engine.site.glob("fleetdump*"))
    assert patching.read_state(engine.python).state == "clean"
    record = load_record(ctx.state, "main")
    assert record is not None
    assert (record.delivery, record.patch, "PYTHONPATH" in record.import_env) == ("import-hook", "probe@1", False)


def test_the_same_launch_is_reused_and_in_place_is_another(server, ctx) -> None:
    first = launch(by_hook(server), ctx)
    again = launch(by_hook(server), ctx)
    assert (again.reused, again.state.pid) == (True, first.state.pid)
    in_place = LaunchArgs(server, by_hook(server).patch)
    assert failure(in_place, ctx).error.code == "conflict"


def test_a_replaced_server_gets_the_newer_patch(server, ctx) -> None:
    launch(by_hook(server), ctx)
    log_of(ctx)
    files = {"fleetdump_probe.py": PROBE.replace("probe imported", "newer probe")}
    launch(by_hook(server, spec("2", files=files), replace=True), ctx)
    assert "newer probe" in log_of(ctx)


def test_a_module_that_changed_after_the_launch_is_not_imported_at_all(engine: Install, server, ctx) -> None:
    launch(by_hook(server), ctx)
    log_of(ctx)
    engine.model.write_bytes(MODEL + b"# newer\n")
    environment = importhook.environment(ctx.state.server("main") / "hook", dict(os.environ))

    done = subprocess.run(
        [engine.python, "-c", "import sglang.srt.models.tiny"], env=environment, capture_output=True, text=True
    )

    assert done.returncode == 1
    assert "has changed since the server was launched" in done.stderr
    assert "ImportError" in done.stderr


def test_a_sitecustomize_of_the_environment_still_runs_under_its_own_name(engine: Install, server, ctx) -> None:
    # One write a line: the server, its child and multiprocessing's tracker share one unbuffered log.
    theirs = "import os; os.write(1, f'theirs {__name__} {__file__}\\n'.encode())\nOURS = False\n"
    (engine.site / "sitecustomize.py").write_text(theirs)
    launch(by_hook(server), ctx)
    log = log_of(ctx)
    assert log.count(f"theirs sitecustomize {engine.site / 'sitecustomize.py'}") >= 2, "in the server and its child"
    assert "probe imported" in log
    environment = importhook.environment(ctx.state.server("main") / "hook", dict(os.environ))
    code = "import sitecustomize, sys; print(sitecustomize.OURS, type(sys.meta_path[0]).__name__)"
    done = subprocess.run([engine.python, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.endswith("False Finder\n")


def test_pythonpath_of_the_server_comes_behind_the_hook(tmp_path: Path, engine: Install, server, ctx) -> None:
    """An unpacked package on PYTHONPATH is what is imported, so it is what the hook edits."""
    other = runnable(install(tmp_path / "other"))
    (other.site / "sglang" / "launch_server.py").write_bytes(SERVER)
    server.env["PYTHONPATH"] = str(other.site)

    launch(by_hook(server), ctx)

    assert f"child file {other.model}" in log_of(ctx)
    assert "at 0 1 None" in log_of(ctx)
    record = load_record(ctx.state, "main")
    assert record is not None
    assert record.import_env == {"PYTHONPATH": str(other.site)}


def test_what_the_hook_cannot_deliver_is_refused_before_anything_starts(engine: Install, server, ctx) -> None:
    assert failure(by_hook(server, all_files("diff")), ctx).error.code == "usage"
    unfit = spec()
    unfit.edits[0].class_name = "Nothing"
    assert "does not fit" in failure(by_hook(server, unfit), ctx).error.what
    patch(PatchArgs(engine.python, spec()), ctx)
    assert "fleetdump revert" in failure(by_hook(server), ctx).error.next_step
    assert load_record(ctx.state, "main") is None


def test_check_names_the_hook_for_a_read_only_package_and_accepts_it(
    engine: Install, ctx, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Root may write anywhere but on a read-only file system, which os.access reports in just this way.
    monkeypatch.setattr(patching.os, "access", lambda path, mode: mode != os.W_OK | os.X_OK)
    interpreter = Interpreter(engine.python)

    in_place = checks.check_engine(interpreter, [], spec(), ctx).findings[-1]
    hook = checks.check_engine(interpreter, [], spec(), ctx, "import-hook").findings[-1]

    assert (in_place.level, "--delivery import-hook" in in_place.fix) == ("blocker", True)
    assert (hook.level, hook.text) == ("ok", "patch probe 1 would apply through the import hook")


def test_the_hooks_folder_holds_nothing_that_could_hide_a_module(engine: Install, server, ctx) -> None:
    launch(by_hook(server), ctx)
    hook = ctx.state.server("main") / "hook"
    names = {"sitecustomize.py", "fleetdump_probe.py", "hook.json", importhook.EDITED}
    assert {path.name for path in hook.iterdir()} == names
    assert not importhook.EDITED.isidentifier()
    described = json.loads((hook / "hook.json").read_text())
    assert list(described["modules"]) == ["sglang.srt.models.tiny"]
    code = "import sys; sys.path.insert(0, sys.argv[1]); import sitecustomize; print(len(sys.meta_path))"
    assert subprocess.run([sys.executable, "-I", "-c", code, str(hook)], capture_output=True).returncode == 0


def test_the_hook_in_this_process(
    engine: Install, server, ctx, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """What the servers above ran, where coverage sees it; the environment's own ``sitecustomize`` included."""
    wanted = spec(files={"fleetdump_probe.py": PROBE})
    importhook.write(tmp_path / "hook", wanted, importhook.plan(server, wanted, False, ctx))
    (tmp_path / "theirs").mkdir()
    (tmp_path / "theirs" / "sitecustomize.py").write_text("print('theirs', __name__)\n")
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    monkeypatch.delitem(sys.modules, "sitecustomize", raising=False)
    monkeypatch.setattr(sys, "path", [str(tmp_path / "hook"), str(tmp_path / "theirs"), *sys.path])

    sitehook.install(str(tmp_path / "hook"))
    sitehook.run_next(str(tmp_path / "hook"))
    finder = sys.meta_path[0]
    found = finder.find_spec("sglang.srt.models.tiny", [str(engine.model.parent)], None)

    assert capfd.readouterr().out == "theirs sitecustomize\n"
    assert finder.find_spec("sglang.srt.models.other", [str(engine.model.parent)], None) is None
    assert found is not None
    assert found.loader is not None
    module = importlib.util.module_from_spec(found)
    found.loader.exec_module(module)
    assert module.fleetdump_probe.VERSION == "1"
    assert module.__file__ == str(engine.model)
    engine.model.write_bytes(MODEL + b"# newer\n")
    with pytest.raises(ImportError, match="has changed since"):
        found.loader.exec_module(module)
    del sys.modules["fleetdump_probe"], sys.modules["sitecustomize"]
