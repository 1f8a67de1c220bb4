"""Kinds of installations: editable, of conda, of the system's Python, read-only, in a container, and shared by servers.

The read-only package is a bind mount in a mount namespace of its own, which is also where ``exec_prefix`` leads.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from fleetdump.agent import checks, engine, neighbours, patchrecord
from fleetdump.agent.context import AgentContext
from fleetdump.agent.launch import launch
from fleetdump.agent.patching import patch, read_state, revert
from fleetdump.agent.patchmessages import PatchArgs, RevertArgs
from fleetdump.agent.protocol import AgentFailure, Finding
from fleetdump.agent.server import living, load_record, load_records
from fleetdump.agent.servermessages import LaunchArgs, LaunchResult, StopArgs
from fleetdump.agent.specs import Interpreter, PatchSpec, ServerSpec
from fleetdump.agent.stop import stop as stop_here
from fleetdump.errors import HostError
from fleetdump.fleet import ConnectOptions, Host, connect
from fleetdump.inventory import HostConfig
from fleetdump.tasks.check import CheckPlan, check
from fleetdump.tasks.deploy import DeployPlan, deploy
from fleetdump.tasks.server import stop
from tests.unit.engineinstall import MODEL, Install, context, install, runnable, spec, wait_for

needs_namespaces = pytest.mark.skipif(
    os.geteuid() != 0 or not shutil.which("unshare"), reason="mounts a folder read-only: needs root"
)


@pytest.fixture
def made(tmp_path: Path) -> Install:
    return runnable(install(tmp_path / "engine"))


@pytest.fixture
def ctx(tmp_path: Path) -> Iterator[AgentContext]:
    ctx = context(tmp_path)
    yield ctx
    end_servers(ctx)


def end_servers(ctx: AgentContext) -> None:
    for record in load_records(ctx.state):
        for member in living(record):
            with contextlib.suppress(ProcessLookupError):
                os.kill(member.pid, signal.SIGKILL)


def server(python: str, tmp_path: Path, name: str = "main", **changes: object) -> ServerSpec:
    model = tmp_path / "model"
    model.mkdir(exist_ok=True)
    (model / "config.json").write_text(json.dumps({"architectures": ["TinyModel"], "num_hidden_layers": 6}))
    (model / "model.safetensors").write_bytes(b"w")
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    return replace(ServerSpec(name, python, str(model), port, args=["--device", "cpu"]), **changes)


def started(spec: ServerSpec, ctx: AgentContext) -> int:
    """The pid of a server of ours that listens."""
    launch(LaunchArgs(spec), ctx)
    record = load_record(ctx.state, spec.name)
    assert record is not None
    wait_for(lambda: "listening" in Path(record.log).read_text(), 60)
    return record.pid


# --------------------------------------------------------------------------- ways to install
def round_trip(python: str, ctx: AgentContext, model: Path) -> str:
    """Patch, look, revert; what the patch said of the installation."""
    before = model.read_bytes()
    result = patch(PatchArgs(python, spec()), ctx)
    assert (result.after.state, b"fleetdump_probe" in model.read_bytes()) == ("ours", True)
    imports = subprocess.run(
        [python, "-c", "import fleetdump_probe; print(fleetdump_probe.VERSION)"], capture_output=True, text=True
    )
    assert imports.stdout == "1\n", imports.stderr
    assert not patch(PatchArgs(python, spec()), ctx).changed
    revert(RevertArgs(python), ctx)
    assert model.read_bytes() == before
    assert read_state(python).state == "clean"
    return result.before.detail


FINDER = """import importlib.util, sys

class Finder:
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        if name == "sglang":
            return importlib.util.spec_from_file_location(name, INIT)

def install():
    sys.meta_path.append(Finder)
"""


@pytest.mark.parametrize("kind", ["path", "finder"])
def test_an_editable_install(tmp_path: Path, ctx: AgentContext, kind: str) -> None:
    """As ``pip install -e`` leaves it: the checkout on a .pth, or found by a finder that setuptools writes."""
    made = install(tmp_path / "engine")
    checkout = tmp_path / "checkout" / "python"
    checkout.mkdir(parents=True)
    shutil.move(str(made.site / "sglang"), str(checkout / "sglang"))
    (info,) = made.site.glob("sglang-*.dist-info")
    (info / "direct_url.json").write_text(json.dumps({"url": f"file://{checkout}", "dir_info": {"editable": True}}))
    (info / "RECORD").write_text("__editable__.sglang-0.5.20.pth,,\n")
    pth = made.site / "__editable__.sglang-0.5.20.pth"
    if kind == "path":
        pth.write_text(f"{checkout}\n")
    else:
        finder = FINDER.replace("INIT", repr(str(checkout / "sglang" / "__init__.py")))
        (made.site / "__editable___sglang_finder.py").write_text(finder)
        pth.write_text("import __editable___sglang_finder; __editable___sglang_finder.install()\n")
    model = checkout / "sglang" / "srt" / "models" / "tiny.py"
    said = round_trip(made.python, ctx, model)
    assert "editable" in said
    assert "taken as it is" in said
    assert not list(checkout.rglob("*fleetdump*"))
    assert not list(made.site.glob("*fleetdump*"))


def test_conda_keeps_its_own_interpreter_and_prefix(tmp_path: Path, ctx: AgentContext) -> None:
    """A conda environment is no venv: a whole prefix with its own interpreter, PYTHONHOME by its place."""
    prefix = tmp_path / "conda" / "envs" / "sglang"
    made = install(tmp_path / "conda" / "envs" / "sglang")
    (prefix / "pyvenv.cfg").unlink()
    (prefix / "conda-meta").mkdir()
    (prefix / "conda-meta" / "history").write_text("")
    python = Path(made.python)
    base = python.resolve()
    python.unlink()
    # conda's python is a real file in the prefix; here one that starts the base with the prefix as its home.
    python.write_text(f'#!/bin/sh\nPYTHONPATH="{made.site}${{PYTHONPATH:+:$PYTHONPATH}}" exec "{base}" "$@"\n')
    python.chmod(0o755)
    assert round_trip(made.python, ctx, made.model) == ""


def test_the_systems_python_with_packages_in_a_folder_of_the_distribution(tmp_path: Path, ctx: AgentContext) -> None:
    """Debian's ``dist-packages``: a folder on sys.path that is not the one where pip of a venv would install."""
    made = install(tmp_path / "usr")
    packages = tmp_path / "usr" / "lib" / "python3" / "dist-packages"
    packages.parent.mkdir()
    shutil.move(str(made.site), str(packages))
    made.site.mkdir()
    (made.site / "distribution.pth").write_text(f"{packages}\n")
    assert round_trip(made.python, ctx, packages / "sglang" / "srt" / "models" / "tiny.py") == ""
    assert not list(made.site.glob("fleetdump*"))


# --------------------------------------------------------------------------- read-only, and behind an exec_prefix
def in_a_namespace(folder: Path) -> tuple[str, ...]:
    """A command in front of the agent's, as ``docker exec`` would be: another mount namespace, where ``folder`` is
    read-only."""
    script = 'mount --make-rprivate / && mount -o bind "$0" "$0" && mount -o remount,bind,ro "$0" && exec "$@"'
    return ("unshare", "--mount", "sh", "-c", script, str(folder))


@pytest.fixture
def container(local_config: HostConfig, tmp_path: Path) -> Iterator[Host]:
    """This machine through ``exec_prefix``, with an engine that cannot be written there."""
    made = runnable(install(tmp_path / "engine"))
    (made.site / "sglang" / "launch_server.py").write_text(READY)
    config = replace(
        local_config, servers=(server(made.python, tmp_path),), exec_prefix=in_a_namespace(tmp_path / "engine")
    )
    with connect(config, ConnectOptions(operator="tester@here")) as host:
        yield host
        stop(host, [], lambda _: None)


READY = """import http.server, sys
import sglang.srt.models.tiny
stamp = "[2026-01-01 00:00:00] "
print(stamp + "Load weight begin.\\n" + stamp + "Load weight end. type=TinyModel, mem usage=1 GB")
print(stamp + "The server is fired up and ready to roll!", flush=True)
class Answer(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.send_header("Content-Length", "2")
        self.end_headers()
        self.wfile.write(b"{}")
    def log_message(self, *_):
        pass
http.server.HTTPServer(("127.0.0.1", int(sys.argv[sys.argv.index("--port") + 1])), Answer).serve_forever()
"""


def by_key(findings: list[Finding], key: str) -> list[Finding]:
    return [finding for finding in findings if finding.key == key]


@needs_namespaces
def test_a_read_only_package_is_refused_with_the_import_hook_by_name(container: Host, tmp_path: Path) -> None:
    before = Install(tmp_path / "engine").tree()
    (finding,) = by_key(check(container, CheckPlan(spec())).findings, "patch")
    assert finding.level == "blocker"
    assert "read-only file system" in finding.text
    assert "--delivery import-hook" in finding.fix
    with pytest.raises(HostError) as caught:
        deploy(container, DeployPlan(spec()), lambda _: None)
    assert "--delivery import-hook" in (caught.value.next_step or "")
    assert Install(tmp_path / "engine").tree() == before


@needs_namespaces
def test_the_import_hook_serves_from_a_read_only_package(container: Host, tmp_path: Path) -> None:
    probe = {"fleetdump_probe.py": "import sys\nprint('probe imported', file=sys.stderr, flush=True)\n"}
    assert by_key(check(container, CheckPlan(spec(files=probe), "import-hook")).findings, "patch")[0].level == "ok"
    report = deploy(container, DeployPlan(spec(files=probe), delivery="import-hook"), lambda _: None)
    assert [one.outcome for one in report.servers] == ["ready"], report.servers
    assert "probe imported" in Path(report.servers[0].log).read_text()
    assert (tmp_path / "engine" / "lib").is_dir()
    assert Install(tmp_path / "engine").model.read_bytes() == MODEL


# --------------------------------------------------------------------------- shared by servers
def shared(python: str, ctx: AgentContext, *servers: ServerSpec, delivery: str = "in-place") -> list[Finding]:
    return checks.check_shared(Interpreter(python), servers, ctx.state, delivery).findings


def test_users_of_an_installation_are_found_by_interpreter_or_path_and_nothing_of_theirs_is_run(
    made: Install, ctx: AgentContext, tmp_path: Path
) -> None:
    other = runnable(install(tmp_path / "other"))
    by_path = server(other.python, tmp_path, "path", env={"PYTHONPATH": str(made.site)})
    own = server(made.python, tmp_path, "own")
    stranger = server(other.python, tmp_path, "stranger")
    pids = {one.name: started(one, ctx) for one in (own, by_path, stranger)}
    (other.site / "sitecustomize.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'a').close()\n")

    found = neighbours.engine_users(engine.query(made.python))

    assert {user.pid for user in found} == {pids["own"], pids["path"]}
    assert all(abs(user.started_at - time.time()) < 120 for user in found)
    assert not (tmp_path / "ran").exists()
    assert [user.pid for user in neighbours.engine_users(engine.query(other.python))] == [pids["stranger"]]


def test_a_server_that_somebody_else_runs_makes_check_recommend_the_hook(
    made: Install, ctx: AgentContext, tmp_path: Path
) -> None:
    theirs = context(tmp_path / "theirs")
    try:
        pid = started(server(made.python, tmp_path, "theirs"), theirs)
        mine = server(made.python, tmp_path)
        (finding,) = shared(made.python, ctx, mine)
        assert finding.level == "warning"
        assert f"is also run by pid {pid} of user" in finding.text
        assert "--delivery import-hook" in finding.fix
        assert shared(made.python, ctx, mine, delivery="import-hook") == []
    finally:
        end_servers(theirs)


def test_pids_that_run_the_code_from_before_the_patch_are_named(
    made: Install, ctx: AgentContext, tmp_path: Path
) -> None:
    mine, second = server(made.python, tmp_path), server(made.python, tmp_path, "second")
    pid = started(mine, ctx)
    assert shared(made.python, ctx, mine) == [], "it is the one that is to be patched"
    time.sleep(0.2)
    patch(PatchArgs(made.python, spec()), ctx)
    started(second, ctx)

    (finding,) = shared(made.python, ctx, mine, second)

    assert finding.text.startswith(f"our server main (pid {pid}) started before patch probe 1")
    assert "second" not in finding.text
    record = patchrecord.load(made.site)
    assert record is not None
    patchrecord.save(made.site, replace(record, applied_at=1.0))
    assert shared(made.python, ctx, mine, second) == []


@pytest.fixture
def theirs(tmp_path: Path) -> Iterator[AgentContext]:
    """Another state directory on this machine: servers that another inventory has started."""
    made = context(tmp_path / "theirs")
    yield made
    end_servers(made)


def test_a_patch_that_anybody_runs_is_not_reverted(
    made: Install, ctx: AgentContext, theirs: AgentContext, tmp_path: Path
) -> None:
    before = started(server(made.python, tmp_path, "before"), theirs)
    shipped = made.tree()
    time.sleep(0.2)
    patch(PatchArgs(made.python, spec()), ctx)
    patched = made.tree()
    pid = started(server(made.python, tmp_path, "theirs"), theirs)
    own = started(server(made.python, tmp_path, "own"), ctx)

    with pytest.raises(AgentFailure) as caught:
        revert(RevertArgs(made.python, force=True), ctx)

    error = caught.value.error
    assert (error.code, error.what) == ("conflict", "the patch is in use")
    assert f"our server own (pid {own})" in error.why
    assert f"pid {pid} of user" in error.why
    assert f"server theirs of the state directory {theirs.state.root.parent}" in error.why
    assert f"pid {before} " not in error.why, "it runs the code from before the patch"
    assert "fleetdump stop" in error.next_step
    assert made.tree() == patched
    (finding,) = [one for one in shared(made.python, ctx, server(made.python, tmp_path, "own")) if str(pid) in one.text]
    assert "with patch probe 1" in finding.text
    assert "next start" not in finding.text

    for each, name in ((ctx, "own"), (theirs, "theirs")):
        stop_here(StopArgs([name]), each)
    revert(RevertArgs(made.python), ctx)
    assert made.model.read_bytes() == MODEL
    assert {name: digest for name, (digest, *_) in made.tree().items()} == {n: d for n, (d, *_) in shipped.items()}


def test_a_deploy_without_the_patch_is_refused_before_it_stops_anything(
    made: Install, theirs: AgentContext, local_config: HostConfig, tmp_path: Path
) -> None:
    mine = server(made.python, tmp_path)
    patch(PatchArgs(made.python, spec()), theirs)
    with connect(replace(local_config, servers=(mine,)), ConnectOptions(operator="tester@here")) as host:
        host.call(LaunchArgs(mine, spec()), LaunchResult, verb="launch")
        pid = started(server(made.python, tmp_path, "theirs"), theirs)
        steps: list[dict[str, object]] = []
        with pytest.raises(HostError, match="the patch is in use") as caught:
            deploy(host, DeployPlan(None, replace=True), steps.append)
        assert (caught.value.code, str(pid) in caught.value.why) == ("conflict", True)
        assert not [step for step in steps if step.get("step") in ("stop", "stopping", "revert")]
        stop(host, [], lambda _: None)


def test_a_failed_deploy_leaves_a_patch_that_others_run_by_now_and_tells_it(
    made: Install, theirs: AgentContext, local_config: HostConfig, tmp_path: Path
) -> None:
    steps: list[dict[str, object]] = []

    def on_event(event: dict[str, object]) -> None:
        steps.append(event)
        if event.get("step") == "launch" and event.get("event") == "step":
            started(server(made.python, tmp_path, "theirs"), theirs)

    crashing = server(made.python, tmp_path, args=["--device", "cpu", "--crash"])
    with connect(replace(local_config, servers=(crashing,)), ConnectOptions(operator="tester@here")) as host:
        report = deploy(host, DeployPlan(spec(), on_stall="revert"), on_event)
    assert (report.servers[0].outcome, report.reverted) == ("died", False)
    assert any("not reverted" in str(step.get("text")) and "in use" in str(step.get("text")) for step in steps)
    assert read_state(made.python).state == "ours"


def test_deploy_tells_who_else_has_the_files(made: Install, local_config: HostConfig, tmp_path: Path) -> None:
    theirs = context(tmp_path / "theirs")
    try:
        pid = started(server(made.python, tmp_path, "theirs"), theirs)
        (made.site / "sglang" / "launch_server.py").write_text("raise SystemExit(1)\n")
        steps: list[dict[str, object]] = []
        config = replace(local_config, servers=(server(made.python, tmp_path),))
        with connect(config, ConnectOptions(operator="tester@here")) as host:
            deploy(host, DeployPlan(spec()), steps.append)
        told = [str(step["text"]) for step in steps if step.get("step") == "check"]
        assert len(told) == 1
        assert f"pid {pid} of user" in told[0]
    finally:
        end_servers(theirs)


@pytest.mark.parametrize(("kind", "network"), [("nfs4", True), ("fuse.sshfs", True), ("lustre", True), ("ext4", False)])
def test_a_file_system_that_hosts_share(
    made: Install, ctx: AgentContext, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, network: bool
) -> None:
    # No NFS server can be had here: the kernel's table is as one would make it.
    read = neighbours.procfs.read_text
    table = f"/dev/sda1 / ext4 rw 0 0\nserver:/home {made.root} {kind} rw 0 0\n"
    monkeypatch.setattr(neighbours.procfs, "read_text", lambda p, *a: table if p.endswith("mounts") else read(p, *a))
    findings = shared(made.python, ctx)
    assert [f"lies on {kind}: every host" in finding.text for finding in findings] == ([True] if network else [])


def test_the_file_system_of_a_path_is_that_of_its_longest_mount() -> None:
    assert neighbours.file_system_of("/proc/self") == "proc"
    assert neighbours.file_system_of("/processes") == neighbours.file_system_of("/")
    assert sys.platform == "linux"


def unverified(spec_: PatchSpec) -> PatchSpec:
    return replace(spec_, edits=[replace(edit, verified=[]) for edit in spec_.edits])


def test_what_no_test_has_run_is_told_and_the_self_check_may_not_be_left_out(
    made: Install, local_config: HostConfig, tmp_path: Path
) -> None:
    (made.site / "sglang" / "launch_server.py").write_text("raise SystemExit(1)\n")
    steps: list[dict[str, object]] = []
    before = made.tree()
    with connect(
        replace(local_config, servers=(server(made.python, tmp_path),)), ConnectOptions(operator="tester@here")
    ) as host:
        deploy(host, DeployPlan(unverified(spec())), steps.append)
        assert any("is unverified on sglang 0.5.20" in str(step.get("text")) for step in steps)
        report = deploy(host, DeployPlan(unverified(spec())), steps.append)
        assert not report.patch_verified, "neither when it is in the files already"
        deploy(host, DeployPlan(None), steps.append)
    assert {name: digest for name, (digest, *_) in made.tree().items()} == {n: d for n, (d, *_) in before.items()}


def test_a_file_of_another_content_is_a_shape_that_no_test_has_seen(made: Install, ctx: AgentContext) -> None:
    made.model.write_bytes(made.model.read_bytes() + b"# mine\n")
    assert not patch(PatchArgs(made.python, spec(), force=True), ctx).verified
    revert(RevertArgs(made.python), ctx)
    made.model.write_bytes(MODEL)
    assert patch(PatchArgs(made.python, spec()), ctx).verified
