"""A watch over hosts whose links are cut: it says so, tries again, and goes on with the others meanwhile."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from fleetengine import Fleet, install
from hosts import LabHost, wait_for

INTERRUPTED, UNREACHABLE = 130, 3


@pytest.fixture
def fleet(tmp_path: Path, start_hosts: Callable[[int], list[LabHost]]) -> Fleet:
    """Two hosts on which nothing of ours runs."""
    made = Fleet(tmp_path, start_hosts(2))
    for host in made.hosts:
        install(host)
    made.write_inventory(connect_timeout=5)
    return made


def events(watch: subprocess.Popen[str], count: int) -> list[tuple[str, str]]:
    """(host, event) of the next ``count`` lines."""
    assert watch.stdout is not None
    found: list[dict[str, Any]] = [json.loads(watch.stdout.readline()) for _ in range(count)]
    return sorted((one["host"], one["event"]) for one in found)


def drop_sessions(host: LabHost) -> None:
    """Every ssh connection of the host ends at once, as when a firewall resets it."""
    for pid in host.pids():
        with contextlib.suppress(OSError):  # it is gone already, with the one before
            if b"sshd: root" in Path(f"/proc/{pid}/cmdline").read_bytes():
                os.kill(pid, signal.SIGKILL)


def test_a_watch_comes_back_to_a_host_whose_link_was_cut(fleet: Fleet) -> None:
    cut, other = fleet.hosts
    watch = fleet.start("watch", "--json", "--interval", "0.5")
    try:
        assert events(watch, 2) == sorted([(cut.name, "empty"), (other.name, "empty")])
        for _ in range(2):
            drop_sessions(cut)
            assert [events(watch, 1)[0] for _ in range(3)] == [
                (cut.name, "lost"),
                (cut.name, "back"),
                (cut.name, "empty"),
            ]
        watch.send_signal(signal.SIGINT)
        _, err = watch.communicate(timeout=60)
    finally:
        watch.kill()
    assert watch.returncode == INTERRUPTED
    assert err == ""
    wait_for(lambda: not any(host.count("sys.stdin.buffer") for host in fleet.hosts), 60, "an agent lives on")


def test_a_host_that_does_not_come_back_is_unreachable_and_one_that_we_may_not_trust_is_not_tried(fleet: Fleet) -> None:
    cut, other = fleet.hosts
    watch = fleet.start("watch", "--json", "--host", cut.name)
    try:
        assert events(watch, 1) == [(cut.name, "empty")]
        cut.change_host_key()
        drop_sessions(cut)
        out, err = watch.communicate(timeout=60)
    finally:
        watch.kill()
    assert watch.returncode == UNREACHABLE, err
    records = [json.loads(line) for line in out.splitlines()]
    assert records[0]["event"] == "lost"
    assert "somebody is in between" in records[-1]["error"]["what"]
    gone = fleet.start("watch", "--for", "6", "--json", "--host", other.name)
    try:
        assert events(gone, 1) == [(other.name, "empty")]
        other.kill()
        out, err = gone.communicate(timeout=120)
    finally:
        gone.kill()
    assert gone.returncode == UNREACHABLE, out + err


@pytest.mark.nightly
def test_a_watch_comes_back_through_a_link_on_which_packets_vanished(fleet: Fleet) -> None:
    """Nobody is told: TCP itself must notice, after about 30 s."""
    cut, other = fleet.hosts
    watch = fleet.start("watch", "--json", "--interval", "0.5")
    try:
        assert events(watch, 2) == sorted([(cut.name, "empty"), (other.name, "empty")])
        cut.cut_link()
        assert events(watch, 1) == [(cut.name, "lost")]
        cut.restore_link()
        found = []
        while (cut.name, "empty") not in found:  # each cause of a failed try is told
            found += events(watch, 1)
        assert (cut.name, "back") in found
        assert not [name for name, _ in found if name == other.name]
    finally:
        watch.kill()
        watch.communicate()
