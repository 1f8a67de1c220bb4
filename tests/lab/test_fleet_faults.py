"""What happens to a call when the link, the controller or the host goes away in the middle of it."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import testverbs
from hosts import LabHost, wait_for

from fleetdump.errors import FleetdumpError, UnreachableError
from fleetdump.fleet import connect
from fleetdump.fleet.bundle import Bundle

pytestmark = pytest.mark.usefixtures("use_verbs")


def test_cut_link_in_mid_call(lab_host: LabHost) -> None:
    """The controller gives up by its deadline, the remote agent ends by its own."""
    with connect(lab_host.config()) as host:
        began = time.monotonic()
        with pytest.raises(UnreachableError):
            host.call(
                testverbs.NapArgs(300, child="orphan-1"),
                testverbs.Done,
                verb="nap",
                deadline=6,
                on_event=lambda _: lab_host.cut_link(),
            )
        assert time.monotonic() - began < 30
    wait_for(lambda: not lab_host.count("sys.stdin.buffer"), 20, "the agent lives on")
    assert not lab_host.count("orphan-1")


def test_host_dies_in_mid_call(lab_host: LabHost) -> None:
    with connect(lab_host.config()) as host, pytest.raises(UnreachableError):
        host.call(testverbs.NapArgs(300), testverbs.Done, verb="nap", deadline=8, on_event=lambda _: lab_host.kill())


def test_sshd_session_killed_in_mid_call(lab_host: LabHost) -> None:
    def kill_session(_: object) -> None:
        for pid in lab_host.pids():
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it ended by itself meanwhile
                if pid != lab_host.sshd_pid and b"sshd" in Path(f"/proc/{pid}/cmdline").read_bytes():
                    os.kill(pid, signal.SIGKILL)

    with connect(lab_host.config()) as host:
        began = time.monotonic()
        with pytest.raises(UnreachableError, match="lost"):
            host.call(testverbs.NapArgs(300), testverbs.Done, verb="nap", deadline=60, on_event=kill_session)
        assert time.monotonic() - began < 20
    wait_for(lambda: not lab_host.count("sys.stdin.buffer"), 20, "the agent lives on")


_CONTROLLER = """
import json, sys
import testverbs
from pathlib import Path
from fleetdump.inventory import HostConfig
from fleetdump.fleet import connect
from fleetdump.fleet.bundle import build
import fleetdump.fleet.host
bundle = build(Path(sys.argv[2]))
fleetdump.fleet.host.bundle = lambda: bundle
settings = json.loads(sys.argv[1])
with connect(HostConfig(**settings)) as host:
    done = host.call(testverbs.DetachArgs("survivor", "/lab/survivor.log"), testverbs.Done, verb="detach")
    print("detached", flush=True)
    host.call(testverbs.NapArgs(300, child="orphan-2"), testverbs.Done, verb="nap", deadline=300,
              on_event=lambda _: print("napping", flush=True))
"""


def test_controller_killed_in_mid_call(lab_host: LabHost, verbs_package: Path) -> None:
    """The agent and its children end at once; what was started detached lives on."""
    config = lab_host.config()
    names = ("name", "address", "user", "identity_file", "host_key", "state_dir", "agent_python")
    controller = subprocess.Popen(
        [sys.executable, "-c", _CONTROLLER, json.dumps({n: getattr(config, n) for n in names}), str(verbs_package)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        stdout=subprocess.PIPE,
        text=True,
    )
    assert controller.stdout
    assert controller.stdout.readline() == "detached\n"
    assert controller.stdout.readline() == "napping\n"
    assert lab_host.count("orphan-2") == 1
    controller.kill()
    controller.wait()
    controller.stdout.close()
    wait_for(lambda: not lab_host.count("sys.stdin.buffer"), 15, "the agent lives on")
    wait_for(lambda: not lab_host.count("orphan-2"), 5, "the agent's child lives on")
    assert lab_host.count("survivor") == 1
    assert lab_host.path("/lab/survivor.log").read_text() == "alive\n"


def test_closing_the_host_ends_its_calls(lab_host: LabHost) -> None:
    host = connect(lab_host.config())
    napping = threading.Event()
    errors: list[FleetdumpError] = []

    def nap() -> None:
        try:
            host.call(
                testverbs.NapArgs(300), testverbs.Done, verb="nap", deadline=300, on_event=lambda _: napping.set()
            )
        except FleetdumpError as error:
            errors.append(error)

    thread = threading.Thread(target=nap)
    thread.start()
    assert napping.wait(30)
    host.close()
    thread.join(15)
    assert isinstance(errors[0], UnreachableError)
    wait_for(lambda: not lab_host.count("sys.stdin.buffer"), 15, "the agent lives on")


def test_detached_process_outlives_its_connection(lab_host: LabHost) -> None:
    with connect(lab_host.config()) as host:
        host.call(testverbs.DetachArgs("survivor-2", "/lab/log"), testverbs.Done, verb="detach")
    time.sleep(1)
    assert lab_host.count("survivor-2") == 1


def test_old_bundles_go_when_nobody_uses_them(lab_host: LabHost, use_verbs: Bundle) -> None:
    agents = "/lab-state/lab/agent"
    with connect(lab_host.config()) as host:
        host.call(testverbs.NapArgs(0), testverbs.Done, verb="nap")
        (root,) = lab_host.path("/lab-state").iterdir()
        agents = root / "agent"
        old = [agents / f"{n:064x}" for n in range(5)]
        for age, path in enumerate(reversed(old), 1):
            path.mkdir()
            os.utime(path, (time.time() - 1000 * age,) * 2)
        user = subprocess.Popen(
            ["nsenter", "-t", str(lab_host.sshd_pid), "-p", "-m", "-r", "--", "sh", "-c", f"sleep 60; : {old[0].name}"]
        )
        try:
            wait_for(lambda: lab_host.count(old[0].name), 10)
            (agents / use_verbs.sha256).rename(agents / "moved")
            host.call(testverbs.NapArgs(0), testverbs.Done, verb="nap")
        finally:
            user.kill()
            user.wait()
    left = {path.name for path in agents.iterdir()}
    assert use_verbs.sha256 in left
    assert old[0].name in left, "a process still names it"
    assert not {path.name for path in old[1:3]} & left
