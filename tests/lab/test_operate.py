"""Looking after a fleet over ssh: watch, logs by rank and phase, restart, unlock, clean, on hosts of their own."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
from fleetengine import STATE, Fleet, install, write_patch
from hosts import LabHost, wait_for

OK, FAILED, LOCKED = 0, 1, 5


@pytest.fixture
def fleet(tmp_path: Path, start_hosts: Callable[[int], list[LabHost]]) -> Fleet:
    """Two hosts, each with a server of two ranks that runs."""
    hosts = start_hosts(2)
    for host in hosts:
        install(host)
    made = Fleet(tmp_path, hosts)
    made.write_inventory(server={"tp": 2})
    write_patch(tmp_path, "plain")
    deployed = made.run("deploy", "--no-patch", timeout=300)
    assert deployed.code == OK, deployed
    return made


def test_operators_look_after_a_fleet(fleet: Fleet) -> None:
    first, second = fleet.hosts
    watched = fleet.run("watch", "--until-ready", "--json")
    assert watched.code == OK, watched
    events = watched.records()
    assert {(one["host"], one["state"]) for one in events if one.get("event") == "vitals"} == {
        (first.name, "ready"),
        (second.name, "ready"),
    }
    results = {one["host"]: one for one in events if one.get("command") == "watch"}
    assert all(one["data"]["samples"] >= 1 for one in results.values())

    logs = fleet.run("logs", "--rank", "1", "--phase", "weights")
    lines = logs.out.splitlines()
    assert {line.partition("]")[0] for line in lines} == {f"[{host.name}" for host in fleet.hosts}
    assert all(" TP1] Load weight" in line for line in lines), logs

    before = {host.name: pids(fleet, host) for host in fleet.hosts}
    again = fleet.run("restart", timeout=300)
    assert again.code == OK, again
    assert again.out.count("restarted, ready in") == 2
    assert "nohup and setsid" in again.err
    assert all(pids(fleet, host) and not pids(fleet, host) & before[host.name] for host in fleet.hosts)
    assert all(host.path(f"{server_folder(host)}/server.log.1").exists() for host in fleet.hosts)

    first.run("pkill", "-9", "-f", "^/opt/engine.*launch_server")
    fallen = fleet.run("watch", "--until-ready", "--host", first.name)
    assert fallen.code == FAILED, fallen
    assert "died: the launcher is gone" in fallen.out
    status = fleet.run("status")
    assert re.search(rf"{first.name}/main +died", status.out), status
    assert re.search(rf"{second.name}/main +ready +serving +\S+ +none", status.out), status

    assert "nobody holds the lock" in fleet.run("unlock", "--host", first.name).out
    lock = first.path(f"{state_root(first)}/lock")
    lock.mkdir()
    holder = {"operator": "ghost@desk", "host": "x", "pid": 4194305, "start_time": 1, "verb": "launch", "since": 1.0}
    (lock / "holder.json").write_text(json.dumps(holder))
    freed = fleet.run("unlock", "--host", first.name)
    assert freed.code == OK
    assert "ghost@desk runs launch" in freed.out
    assert "who is dead" in freed.out
    assert not lock.exists()
    lock.write_text("no lock")
    damaged = fleet.run("stop", "--host", first.name)
    assert damaged.code == FAILED
    assert "unlock --force" in damaged.err
    assert "Traceback" not in damaged.err
    assert fleet.run("unlock", "--host", first.name).code == LOCKED
    assert fleet.run("unlock", "--force", "--host", first.name).code == OK

    assert fleet.run("stop").code == OK
    listed = fleet.run("clean", "--check")
    assert listed.out.count("would remove") == 2
    assert state_root(second) in listed.out
    assert fleet.run("clean").code == OK
    wait_for(lambda: not any(host.path(STATE).exists() for host in fleet.hosts), 60)


def pids(fleet: Fleet, host: LabHost) -> set[str]:
    """The host's launchers."""
    return set(host.run("pgrep", "-f", "launch_server", check=False).split())


def state_root(host: LabHost) -> str:
    return f"{STATE}/{next(path.name for path in host.path(STATE).iterdir())}"


def server_folder(host: LabHost) -> str:
    return f"{state_root(host)}/servers/main"
