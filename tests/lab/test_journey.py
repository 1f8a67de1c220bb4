"""The journey on real hosts with a stand-in engine: every command, a stall, and interruptions at bad moments."""

from __future__ import annotations

import json
import re
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from fleetengine import MARK, SPIN, STATE, Fleet, install, site_packages, tree, write_patch
from hosts import LabHost, wait_for

OK, FAILED, UNREACHABLE, STALL, INTERRUPTED = 0, 1, 3, 4, 130
OURS = ("launch_server", "sglang::", "sys.stdin.buffer")
"""What stands in the command line of each process of ours: servers, schedulers, agents."""


@pytest.fixture
def make_fleet(tmp_path: Path, start_hosts: Callable[[int], list[LabHost]]) -> Callable[[int], Fleet]:
    def make(count: int) -> Fleet:
        hosts = start_hosts(count)
        for host in hosts:
            install(host)
        fleet = Fleet(tmp_path, hosts)
        fleet.write_inventory(server={"tp": 2})
        write_patch(tmp_path, "plain")
        write_patch(tmp_path, "spin", SPIN)
        write_patch(tmp_path, "slow", "time.sleep(600)")
        return fleet

    return make


def left_over(fleet: Fleet) -> list[str]:
    """Processes and files of ours on the hosts."""
    found = [f"{host.name}: {text}" for host in fleet.hosts for text in OURS if host.count(text)]
    for host in fleet.hosts:
        found += [str(path) for path in (host.path(STATE),) if path.exists()]
        found += [str(path) for path in site_packages(host).glob("fleetdump*")]
    return found


def running(fleet: Fleet, text: str) -> int:
    return sum(host.count(text) for host in fleet.hosts)


def test_journey(make_fleet: Callable[[int], Fleet]) -> None:
    fleet = make_fleet(2)
    first, second = fleet.hosts
    shipped = [tree(host, "/opt/engine") for host in fleet.hosts]

    check = fleet.run("check", "--patch", "./plain")
    assert check.code == OK, check
    assert len(check.out.splitlines()) < 12, f"only what differs is listed host by host:\n{check}"

    deploy = fleet.run("deploy", "--no-patch")
    assert deploy.code == OK, deploy
    again = fleet.run("deploy", "--no-patch", "--host", first.name)
    assert again.out == f"{first.name}/main unchanged, no patch\n"
    assert again.err == ""

    stall = fleet.run("deploy", "--replace", "--on-stall", "revert", "--patch", "./spin", "--host", first.name)
    assert stall.code == STALL, stall
    for fact in ("PARENT_WAITS_READY rank 1", "phase kv_pool", "because:", "healthy starts", "patch reverted"):
        assert fact in stall.out, stall
    assert len(stall.out.splitlines()) <= 30, stall
    assert tree(first, "/opt/engine") == shipped[0]

    refused = fleet.run("deploy", "--patch", "./plain", "--host", second.name)
    assert refused.code == FAILED
    assert "--replace" in refused.err
    patched = fleet.run("deploy", "--replace", "--patch", "./plain", "--json")
    assert patched.code == OK, patched
    assert [record["status"] for record in patched.records()] == ["ok", "ok"]

    status = fleet.run("status")
    assert len(re.findall(r"/main +ready +serving +\S+ +plain@1", status.out)) == 2, status
    assert status.out.count("engine ours plain") == 2, status
    logs = fleet.run("logs", "-n", "50", "--host", first.name)
    assert MARK in logs.out
    assert "fired up and ready to roll" in logs.out

    saved = fleet.run("diagnose", "--host", first.name, "--seconds", "1", "--save", "evidence", "--json")
    assert saved.code == OK, saved
    judged = fleet.run("diagnose", "--bundle", f"evidence/{first.name}/main", "--json")
    assert judged.code == OK, judged
    (live,), (later,) = saved.records(), judged.records()
    assert live["data"][0]["verdicts"] == later["data"][0]["verdicts"]
    assert live["data"][0]["verdicts"][0]["code"] == "IDLE_OK"

    assert fleet.run("revert").code == FAILED, "the patch is in use"
    assert fleet.run("clean").code == FAILED, "servers still run"
    assert fleet.run("stop").code == OK
    assert not running(fleet, "sglang::")
    assert fleet.run("clean").code == FAILED, "the patch is still there"
    assert fleet.run("revert").code == OK
    assert [tree(host, "/opt/engine") for host in fleet.hosts] == shipped
    assert fleet.run("clean").code == OK
    assert not left_over(fleet)


def test_following_logs_ends_with_the_interrupt(make_fleet: Callable[[int], Fleet]) -> None:
    fleet = make_fleet(1)
    (host,) = fleet.hosts
    assert fleet.run("deploy", "--no-patch").code == OK
    follow = fleet.start("logs", "-f", "-n", "1")
    assert follow.stdout is not None
    assert "fired up" in follow.stdout.readline()
    follow.send_signal(signal.SIGINT)
    _, err = follow.communicate(timeout=15)
    assert follow.returncode == INTERRUPTED, err
    assert "Traceback" not in err
    wait_for(lambda: not host.count("sys.stdin.buffer"), 10, "the agent lives on")
    assert host.count("launch_server") == 1
    assert fleet.run("stop").code == OK


def test_stall_outweighs_an_unreachable_host(make_fleet: Callable[[int], Fleet]) -> None:
    """Exit code 4 before 3; ``--on-stall keep`` leaves the server for ``diagnose``, which says the same."""
    fleet = make_fleet(2)
    stalled, dead = fleet.hosts
    dead.kill()
    done = fleet.run("deploy", "--patch", "./spin", "--json")
    assert done.code == STALL, done
    by_host = {record["host"]: record for record in done.records()}
    assert (by_host[stalled.name]["status"], by_host[dead.name]["status"]) == ("stall", "unreachable")
    verdict = by_host[stalled.name]["data"]["servers"][0]["verdicts"][0]
    later = fleet.run("diagnose", "--host", stalled.name, "--json", "--save", "evidence")
    assert later.code == STALL, later
    assert later.records()[0]["data"][0]["verdicts"][0]["code"] == verdict["code"]
    bundle = fleet.run("diagnose", "--bundle", f"evidence/{stalled.name}/main")
    assert bundle.code == STALL
    assert verdict["code"] in bundle.out
    assert fleet.run("stop", "--host", stalled.name).code == OK
    assert not stalled.count("sglang::")


def test_controller_killed_in_mid_deploy(make_fleet: Callable[[int], Fleet]) -> None:
    """Called again, the deploy takes the server up where it stands."""
    fleet = make_fleet(1)
    (host,) = fleet.hosts
    controller = fleet.start("deploy", "--patch", "./plain")
    wait_for(lambda: host.count("launch_server"), 30, "no server")
    controller.kill()
    controller.communicate()
    wait_for(lambda: not host.count("sys.stdin.buffer"), 15, "the agent lives on")
    again = fleet.run("deploy", "--patch", "./plain")
    assert again.code == OK, again
    assert host.count("launch_server") == 1
    assert fleet.run("stop").code == OK
    assert fleet.run("revert").code == OK
    assert fleet.run("clean").code == OK
    assert not left_over(fleet)


@pytest.mark.nightly
def test_link_cut_in_mid_deploy(make_fleet: Callable[[int], Fleet]) -> None:
    """Exit code 3 in bounded time, no agent left behind; with the link back the same command goes on."""
    fleet = make_fleet(1)
    (host,) = fleet.hosts
    fleet.write_inventory(server={"tp": 2}, patience={"kv_pool": 600})
    deploy = fleet.start("deploy", "--patch", "./slow")
    wait_for(lambda: host.count("sglang::"), 30, "no server")
    began = time.monotonic()
    host.cut_link()
    _, err = deploy.communicate(timeout=90)
    assert deploy.returncode == UNREACHABLE, err
    assert time.monotonic() - began < 75
    assert "Traceback" not in err
    host.restore_link()
    assert host.count("launch_server") == 1
    status = fleet.run("status")
    assert re.search(r"/main +starting", status.out), status
    assert fleet.run("stop").code == OK
    assert fleet.run("revert").code == OK
    assert fleet.run("clean").code == OK
    wait_for(lambda: not left_over(fleet), 60, f"{left_over(fleet)}")


def test_hostile_log_lines_are_shown_harmlessly(make_fleet: Callable[[int], Fleet]) -> None:
    fleet = make_fleet(1)
    evil = "\x1b]0;owned\x07\x1b[2J[red]hot[/] \x9b31m :bug: \u202etxt"
    fleet.write_inventory(server={"args": ["--device", "cpu", "--say", evil, "--crash"]})
    deploy = fleet.run("deploy", "--no-patch")
    assert deploy.code == FAILED
    logs = fleet.run("logs", "-n", "20")
    for done in (deploy, logs):
        assert "\x1b" not in done.out + done.err
        assert "\x9b" not in done.out + done.err
        assert "\u202e" not in done.out + done.err
    assert "[red]hot[/]" in logs.out, logs
    assert ":bug:" in logs.out, logs
    raw = json.loads(fleet.run("logs", "-n", "20", "--json").out)
    assert any(evil in line for line in raw["data"]["tail"])


def test_json_is_one_object_a_host(make_fleet: Callable[[int], Fleet]) -> None:
    """Also for what fails; people's words are on stderr."""
    fleet = make_fleet(1)
    (host,) = fleet.hosts
    for command in (("check", "--no-patch"), ("status",), ("deploy", "--no-patch"), ("logs",), ("diagnose",)):
        done = fleet.run(*command, "--json")
        (record,) = done.records()
        assert (record["host"], record["command"], record["status"]) == (host.name, command[0], "ok"), done
    for command in ("stop", "revert", "clean"):
        (record,) = fleet.run(command, "--json").records()
        assert (record["command"], record["status"], record["error"]) == (command, "ok", None)
    fleet.overrides[host.name] = {"port": 2222}
    fleet.write_inventory()
    (record,) = fleet.run("status", "--json").records()
    assert record["status"] == "unreachable"
    assert all(record["error"][key] for key in ("what", "where", "why", "next_step"))
