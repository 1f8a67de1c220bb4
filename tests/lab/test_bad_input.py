"""What is wrong with the input is told on one screen, with the right exit code, and leaves the host as it was."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from fleetengine import (
    CAPTURE,
    MODEL,
    PORT,
    SCREEN,
    STATE,
    Done,
    Fleet,
    install,
    site_packages,
    tree,
    write_patch,
)
from hosts import Lab, LabHost, wait_for

OK, FAILED, USAGE, UNREACHABLE, LOCKED = 0, 1, 2, 3, 5
TOUCHED = (STATE, "/opt/engine", "/capture", "/models")


@pytest.fixture(scope="module")
def shared_host(lab: Lab) -> Iterator[LabHost]:
    """For tests that leave the host as it was, which each of them checks; it has the agent already."""
    (host,) = lab.start(1)
    install(host)
    host.run("mkdir", "-p", STATE)
    yield host
    lab.remove([host])


@pytest.fixture
def fleet(tmp_path: Path, shared_host: LabHost) -> Fleet:
    """The shared host with a right inventory."""
    return _fleet(tmp_path, shared_host)


@pytest.fixture
def fresh_fleet(tmp_path: Path, lab_host: LabHost) -> Fleet:
    """A host of the test's own, which no agent has seen."""
    install(lab_host)
    return _fleet(tmp_path, lab_host)


def _fleet(folder: Path, host: LabHost) -> Fleet:
    made = Fleet(folder, [host])
    made.write_inventory()
    write_patch(folder, "plain")
    return made


def tells(done: Done, code: int, *fragments: str) -> None:
    """One screen with cause and next step, no traceback, and the exit code."""
    assert done.code == code, done
    assert len(done.err.splitlines()) + len(done.out.splitlines()) < SCREEN, done
    assert "Traceback" not in done.err, done
    assert "error: " in done.err, done
    assert code in (OK, LOCKED) or "next: " in done.err, done
    for fragment in fragments:
        assert fragment in done.err + done.out, f"{fragment!r} is not in:\n{done}"


def refused(fleet: Fleet, args: tuple[str, ...], code: int, *fragments: str) -> None:
    """The command is refused, and every host of the fleet is as it was before."""
    before = [tree(host, *TOUCHED) for host in fleet.hosts]
    tells(fleet.run(*args), code, *fragments)
    for host, files in zip(fleet.hosts, before, strict=True):
        changed = tree(host, *TOUCHED) ^ files
        assert not changed
    assert not any(host.count("launch_server") for host in fleet.hosts)


DEPLOY = ("deploy", "--patch", "./plain")


# --------------------------------------------------------------------------- before any host
def test_wrong_inventory(fleet: Fleet) -> None:
    text = fleet.inventory.read_text()
    fleet.inventory.write_text(text.replace("agent_python", "agent_pyton").replace(str(PORT), "99999"))
    refused(fleet, DEPLOY, USAGE, "2 mistakes", "agent_python", "99999", "inventory.yaml:")


def test_unknown_host(fleet: Fleet) -> None:
    (host,) = fleet.hosts
    refused(fleet, (*DEPLOY, "--host", host.name[:-1]), USAGE, "no host matches", host.name)
    refused(fleet, (*DEPLOY, "--host", "198.18.255.254"), USAGE, "--ad-hoc")


@pytest.mark.parametrize(
    ("content", "fragment"),
    [
        (None, "No such file"),
        (b"", "it is empty"),
        (b"\n\n", "it is empty"),
        (b'{"messages": []}\n{broken\n', "line 1"),
        (b"PAR1....", "damaged"),
        (b"PK\x03\x04....", "zip file"),
    ],
)
def test_unusable_data(fleet: Fleet, content: bytes | None, fragment: str) -> None:
    """Nothing is begun: no run that a later command would find."""
    if content is not None:
        (fleet.folder / "data.jsonl").write_bytes(content)
    fleet.write_inventory(capture={"layers": [1], "dir": CAPTURE})
    refused(fleet, ("extract", "--data", "data.jsonl"), USAGE, fragment)
    assert not (fleet.folder / "runs").exists()


def test_broken_rows_among_good_ones(fleet: Fleet) -> None:
    """They are named; where no server was launched no run is begun with the good ones."""
    (fleet.folder / "data.jsonl").write_text('{"text": "good"}\n{broken\n{"messages": []}\n{"text": "good too"}\n')
    fleet.write_inventory(capture={"layers": [1], "dir": CAPTURE})
    told = ("line 2 is left out", "line 3 is left out", "1 of 1 servers was never launched", "fleetdump deploy")
    refused(fleet, ("extract", "--data", "data.jsonl"), USAGE, *told)
    assert not (fleet.folder / "runs").exists()


def test_unknown_run(fleet: Fleet) -> None:
    refused(fleet, ("collect", "--run", "nosuch"), USAGE, "no host that answered has run 'nosuch'")
    refused(fleet, ("collect", "--run", "../nosuch"), USAGE, "not a name for a run")
    assert not (fleet.folder / "runs").exists() or not list((fleet.folder / "runs").iterdir())


def test_unusable_place_for_runs(fleet: Fleet) -> None:
    (fleet.folder / "data.jsonl").write_text('{"text": "good"}\n')
    fleet.write_inventory(capture={"layers": [1], "dir": CAPTURE})
    (fleet.folder / "file").write_text("x")
    refused(fleet, ("extract", "--data", "data.jsonl", "--runs-dir", "file"), FAILED, "file/data cannot be used")
    (fleet.folder / "runs/data").mkdir(parents=True)
    (fleet.folder / "runs/data/ledger.sqlite").write_text("no data base " * 100)
    for command in (("extract", "--data", "data.jsonl"), ("collect",)):
        refused(fleet, command, USAGE, "ledger.sqlite", "cannot be used", "rebuilds it")


# --------------------------------------------------------------------------- the way to the host
@pytest.mark.parametrize(
    ("own", "fragments"),
    [
        ({"host_key": ""}, ("key is unknown", "--accept-new")),
        ({"host_key": "SHA256:" + "A" * 43}, ("not the one we know", "pinned in the inventory")),
        ({"identity_file": "other_key"}, ("refused to let root in", "identity_file")),
        ({"identity_file": "no_such_key"}, ("key file is missing", "no_such_key")),
        ({"port": 2222}, ("refused the connection", "sshd")),
        ({"address": "no-such-host.invalid"}, ("cannot be resolved", "address")),
    ],
)
def test_unreachable(fleet: Fleet, own: dict[str, Any], fragments: tuple[str, ...]) -> None:
    (host,) = fleet.hosts
    other = fleet.folder / "other_key"
    other.write_bytes((host.files / "host_key").read_bytes())
    other.chmod(0o600)
    fleet.overrides[host.name] = {
        key: str(fleet.folder / value) if key == "identity_file" else value for key, value in own.items()
    }
    fleet.write_inventory()
    refused(fleet, DEPLOY, UNREACHABLE, *fragments)


def test_one_dead_host_of_three(fresh_fleet: Fleet, start_hosts: Callable[[int], list[LabHost]]) -> None:
    more = start_hosts(2)
    for host in more:
        install(host)
    fresh_fleet.hosts += more
    fresh_fleet.write_inventory()
    more[0].kill()
    done = fresh_fleet.run("deploy", "--no-patch", "--json")
    assert done.code == UNREACHABLE, done
    assert {r["host"]: r["status"] for r in done.records()} == {
        fresh_fleet.hosts[0].name: "ok",
        more[0].name: "unreachable",
        more[1].name: "ok",
    }
    assert fresh_fleet.run("stop", "--exclude", more[0].name).code == OK


# --------------------------------------------------------------------------- what the host lacks
@pytest.mark.parametrize(
    ("settings", "fragments"),
    [
        ({"python": "/usr/bin/python3"}, ("sglang is not installed", "/usr/bin/python3", "pip install")),
        ({"python": "/opt/none/bin/python"}, ("does not exist", "/opt/none/bin/python", "`python`")),
        ({"python": MODEL}, ("does not exist or may not be run", MODEL)),
        ({"server": {"model_path": "/models/none"}}, ("no readable model", "/models/none", "`model_path`")),
        ({"agent_python": "/usr/bin/python9"}, ("/usr/bin/python9 cannot be run", "agent_python")),
        ({"state_dir": f"{MODEL}/config.json"}, ("config.json", "state_dir")),
        ({"exec_prefix": ["docker", "exec", "-i", "none"]}, ("exec_prefix",)),
    ],
)
def test_wrong_settings(fleet: Fleet, settings: dict[str, object], fragments: tuple[str, ...]) -> None:
    fleet.write_inventory(**settings)  # type: ignore[arg-type]
    refused(fleet, DEPLOY, FAILED, *fragments)


def test_engine_without_the_patched_module(fleet: Fleet) -> None:
    write_patch(fleet.folder, "elsewhere", module="sglang.srt.models.other")
    refused(fleet, ("deploy", "--patch", "./elsewhere"), FAILED, "sglang.srt.models.other")


def test_engine_edited_by_hand(fresh_fleet: Fleet) -> None:
    model = site_packages(fresh_fleet.hosts[0]) / "sglang/srt/models/tiny.py"
    model.write_text(model.read_text() + "\n# edited by hand\n")
    refused(fresh_fleet, DEPLOY, FAILED, "tiny.py", "edited")


def test_patched_engine_edited_by_hand(fresh_fleet: Fleet) -> None:
    """Neither deploy nor revert nor clean overwrites what somebody wrote on top of our patch."""
    assert fresh_fleet.run(*DEPLOY).code == OK
    assert fresh_fleet.run("stop").code == OK
    model = site_packages(fresh_fleet.hosts[0]) / "sglang/srt/models/tiny.py"
    model.write_text(model.read_text() + "\n# edited by hand\n")
    refused(fresh_fleet, (*DEPLOY, "--replace"), FAILED, "tiny.py")
    refused(fresh_fleet, ("revert",), FAILED, "tiny.py")
    refused(fresh_fleet, ("clean",), FAILED, "patch")


def test_occupied_port(fleet: Fleet) -> None:
    """The owner is named, and the engine is not patched for a server that cannot start."""
    (host,) = fleet.hosts
    with listener(host, PORT) as pid:
        refused(fleet, DEPLOY, FAILED, f"port {PORT} is taken", f"pid {pid}", "root", "socket.create_server")
        done = fleet.run("check", "--patch", "./plain")
        assert done.code == FAILED
        assert f"pid {pid}" in done.out


def test_read_only_engine(fresh_fleet: Fleet) -> None:
    (host,) = fresh_fleet.hosts
    host.run("mount", "--bind", "/opt/engine", "/opt/engine")
    host.run("mount", "-o", "remount,ro,bind", "/opt/engine")
    refused(fresh_fleet, DEPLOY, FAILED, "site-packages", "next: ")


def test_full_disk(fresh_fleet: Fleet) -> None:
    """At each step: before the agent is there, before the patch; and all goes well once there is room again."""
    (host,) = fresh_fleet.hosts
    host.fill_disk()
    refused(fresh_fleet, DEPLOY, FAILED, "free space")
    host.free_disk()
    assert fresh_fleet.run("status").code == OK
    host.fill_disk()
    refused(fresh_fleet, DEPLOY, FAILED, "free space")
    host.free_disk()
    assert fresh_fleet.run(*DEPLOY).code == OK
    host.fill_disk()
    tells(fresh_fleet.run("deploy", "--replace", "--no-patch"), FAILED, "free space")
    host.free_disk()
    assert fresh_fleet.run("stop").code == OK
    assert fresh_fleet.run("revert").code == OK


def test_full_capture_disk(fresh_fleet: Fleet) -> None:
    (host,) = fresh_fleet.hosts
    host.run("mkdir", "-p", CAPTURE)
    host.run("mount", "-t", "tmpfs", "-o", "size=1m", "none", CAPTURE)
    write_patch(fresh_fleet.folder, "capturing", captures=True)
    fresh_fleet.write_inventory(capture={"layers": [1], "dir": CAPTURE})
    refused(fresh_fleet, ("deploy", "--patch", "./capturing"), FAILED, CAPTURE, "free")


def test_layers_that_the_model_lacks(fleet: Fleet) -> None:
    write_patch(fleet.folder, "capturing", captures=True)
    fleet.write_inventory(capture={"layers": [1, 61], "dir": CAPTURE})
    refused(fleet, ("deploy", "--patch", "./capturing"), FAILED, "61", "6 layers")


def test_capture_without_settings(fleet: Fleet) -> None:
    write_patch(fleet.folder, "capturing", captures=True)
    refused(fleet, ("deploy", "--patch", "./capturing"), USAGE, "capture.layers")


# --------------------------------------------------------------------------- somebody else
def test_another_operator_holds_the_lock(fresh_fleet: Fleet) -> None:
    (host,) = fresh_fleet.hosts
    assert fresh_fleet.run("status").code == OK
    ticks = int(host.path("/proc/1/stat").read_text().rsplit(")", 1)[1].split()[19])
    (state,) = host.path(STATE).iterdir()
    lock = state / "lock"
    lock.mkdir()
    holder = {"operator": "eve@laptop", "host": host.name, "pid": 1, "start_time": ticks, "verb": "launch", "since": 0}
    (lock / "holder.json").write_text(json.dumps(holder))
    refused(fresh_fleet, DEPLOY, LOCKED, "eve@laptop", "launch")
    refused(fresh_fleet, ("stop",), LOCKED, "eve@laptop")
    assert fresh_fleet.run("stop", "--json").records()[0]["status"] == "locked"
    assert fresh_fleet.run("status").code == OK, "looking needs no lock"
    told = fresh_fleet.run("audit")
    assert (told.code, "eve@laptop runs launch (pid 1)" in told.out) == (OK, True), told
    refused(fresh_fleet, ("stop", "--lock-wait", "1"), LOCKED, "waiting for the host's lock", "eve@laptop")


def test_stop_of_a_server_that_is_not_there(fleet: Fleet) -> None:
    refused(fleet, ("stop", "--server", "mian"), USAGE, "'mian'", "main")
    refused(fleet, ("logs", "--server", "mian"), USAGE, "'mian'", "main")
    refused(fleet, ("logs",), FAILED, "fleetdump deploy")
    refused(fleet, ("diagnose",), FAILED, "fleetdump deploy")


def test_server_that_dies_at_once(fresh_fleet: Fleet) -> None:
    """Its own last words are shown."""
    fresh_fleet.write_inventory(server={"args": ["--device", "cpu", "--crash"]})
    done = fresh_fleet.run("deploy", "--no-patch")
    assert done.code == FAILED, done
    assert "libcudart.so.12" in done.out
    assert len(done.out.splitlines()) < SCREEN
    assert fresh_fleet.run("stop").code == OK


class listener:  # noqa: N801 (a context manager)
    """A foreign process on the host that listens on ``port``; gives its pid there."""

    def __init__(self, host: LabHost, port: int):
        self._host = host
        code = f"import socket, time; s = socket.create_server(('127.0.0.1', {port})); time.sleep(600)"
        self._start = f'python3 -c "{code}" >/dev/null 2>&1 & echo $!'
        self._port = port

    def __enter__(self) -> int:
        self._pid = int(self._host.run("sh", "-c", self._start))
        wait_for(lambda: f":{self._port:04X} " in self._host.run("cat", "/proc/net/tcp"), 10)
        return self._pid

    def __exit__(self, *_: object) -> None:
        self._host.run("kill", str(self._pid))
