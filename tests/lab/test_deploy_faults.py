"""Deploys that are cut off, meet another deploy, fail, or have nothing to do: on real hosts with a stand-in engine."""

from __future__ import annotations

import json
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from fleetengine import SPIN, STATE, Fleet, install, tree, write_patch
from hosts import LabHost, wait_for

OK, FAILED, STALL, LOCKED, INTERRUPTED = 0, 1, 4, 5, 130
AGENT = "sys.stdin.buffer"
PATIENT = {"patience": dict.fromkeys(("imports", "init", "weights", "kv_pool"), 600)}


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


def when_it_says(controller: subprocess.Popen[str], words: str, act: Callable[[], None]) -> str:
    """Read what ``controller`` tells until a line has ``words``, then ``act``; gives all of stderr, to its end."""
    assert controller.stderr is not None
    said = []
    for line in controller.stderr:
        said.append(line)
        if words in line:
            act()
            break
    else:
        raise AssertionError(f"it never said {words!r}:\n{''.join(said)}")
    _, rest = controller.communicate(timeout=120)
    return "".join(said) + rest


def audit(fleet: Fleet) -> list[dict[str, Any]]:
    (record,) = fleet.run("audit", "--json").records()
    entries: list[dict[str, Any]] = record["data"]["entries"]
    assert record["data"]["holder"] == "", record
    return entries


def verbs(fleet: Fleet, *names: str) -> list[str]:
    """Changes of the only host that went well, in their order."""
    return [entry["verb"] for entry in audit(fleet) if entry["ok"] and entry["verb"] in names]


# --------------------------------------------------------------------------- cut off
@pytest.mark.parametrize("words", ["plan:", "patched with", "launched main", "main: init after", "stopped main"])
def test_a_deploy_goes_on_where_its_controller_was_killed(words: str, make_fleet: Callable[[int], Fleet]) -> None:
    """By SIGKILL, at each step: the next one finishes, nothing runs twice, and the host is free at once."""
    fleet = make_fleet(1)
    (host,) = fleet.hosts
    command = ["deploy", "--patch", "./plain"]
    if words == "stopped main":
        assert fleet.run("deploy", "--no-patch").code == OK
        command.append("--replace")
    controller = fleet.start(*command)
    when_it_says(controller, words, controller.kill)

    again = fleet.run(*command)

    assert again.code == OK, again
    assert host.count("launch_server") == 1
    assert host.count("sglang::") == 2
    launches = 2 if words == "stopped main" else 1
    assert verbs(fleet, "patch", "launch") in (["patch", "launch"], ["launch", "patch", "launch"]), words
    assert verbs(fleet, "launch").count("launch") == launches
    unchanged = fleet.run("deploy", "--patch", "./plain")
    assert unchanged.out == f"{host.name}/main unchanged, patch plain@1\n", unchanged
    wait_for(lambda: not host.count(AGENT), 60, "an agent lives on")


@pytest.mark.nightly
@pytest.mark.parametrize("round_", range(8))
def test_a_deploy_goes_on_wherever_it_was_killed(round_: int, make_fleet: Callable[[int], Fleet]) -> None:
    """At moments that no step announces."""
    fleet = make_fleet(1)
    (host,) = fleet.hosts
    controller = fleet.start("deploy", "--patch", "./plain")
    time.sleep(0.5 + 0.5 * round_)
    controller.kill()
    controller.communicate()
    again = fleet.run("deploy", "--patch", "./plain")
    assert again.code == OK, again
    assert host.count("launch_server") == 1
    assert verbs(fleet, "launch") == ["launch"]


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("plan:", ("nothing was changed", "patching /opt/engine/bin/python with slow@1 was under way")),
        ("patched with", ("patched with slow@1",)),
        ("main: init after", ("main goes on without this command",)),
    ],
)
def test_an_interrupt_says_what_was_done_and_how_to_go_on(
    words: str, told: tuple[str, ...], make_fleet: Callable[[int], Fleet]
) -> None:
    fleet = make_fleet(1)
    (host,) = fleet.hosts
    fleet.write_inventory(server={"tp": 2}, **PATIENT)
    controller = fleet.start("deploy", "--patch", "./slow")
    pressed: list[float] = []

    def press() -> None:
        pressed.append(time.monotonic())
        controller.send_signal(signal.SIGINT)

    err = when_it_says(controller, words, press)
    seconds = time.monotonic() - pressed[0]

    print(f"the terminal was back after {seconds:.2f} s")
    assert controller.returncode == INTERRUPTED, err
    assert seconds < 30
    assert "Traceback" not in err
    assert any(text in err for text in told), err
    assert "the same command again" in err
    wait_for(lambda: not host.count(AGENT), 60, "an agent lives on")
    assert audit(fleet) is not None, "the host is free"
    if words == "main: init after":
        assert host.count("launch_server") == 1


# --------------------------------------------------------------------------- two at once
def test_of_two_deploys_the_second_is_told_who_is_at_work_or_waits(make_fleet: Callable[[int], Fleet]) -> None:
    fleet = make_fleet(1)
    (host,) = fleet.hosts
    fleet.write_inventory(server={"tp": 2}, **PATIENT)
    first = fleet.start("deploy", "--patch", "./slow")
    wait_for(lambda: host.count("sglang::"), 60, "no server")
    try:
        second = fleet.run("deploy", "--patch", "./plain", "--replace")
        assert second.code == LOCKED, second
        assert "runs deploy there since" in second.err
        assert fleet.run("clean").code == LOCKED, "nor may another change come between"
        assert fleet.run("status").code == OK
        assert fleet.run("deploy", "--check", "--patch", "./plain", "--replace").code == OK, "to look is free"
        waiting = fleet.start("deploy", "--patch", "./plain", "--replace", "--lock-wait", "300")
        told = when_it_says(waiting, "waiting for the host's lock", first.kill)
    finally:
        first.kill()
        first.communicate()
    assert waiting.returncode == OK, told
    assert host.count("launch_server") == 1
    assert verbs(fleet, "launch", "stop", "patch") == ["patch", "launch", "stop", "patch", "launch"]


def test_stop_ends_what_another_deploy_waits_for(make_fleet: Callable[[int], Fleet]) -> None:
    """The brake works at any time; the deploy says who pulled it."""
    fleet = make_fleet(1)
    (host,) = fleet.hosts
    fleet.write_inventory(server={"tp": 2}, **PATIENT)
    first = fleet.start("deploy", "--patch", "./slow")
    wait_for(lambda: host.count("sglang::"), 60, "no server")
    assert fleet.run("stop").code == OK
    out, err = first.communicate(timeout=120)
    assert first.returncode == FAILED
    assert "stopped by fleetdump stop" in out + err


# --------------------------------------------------------------------------- nothing to do, nothing done
def test_a_plan_changes_nothing_and_a_host_as_wanted_is_left_alone(make_fleet: Callable[[int], Fleet]) -> None:
    fleet = make_fleet(2)
    first, second = fleet.hosts
    shipped = [tree(host, "/opt/engine") for host in fleet.hosts]

    plan = fleet.run("deploy", "--patch", "./plain", "--check", "--diff")
    assert plan.code == OK, plan
    for text in ("lab", "would change", "patch /opt/engine/bin/python with plain@1", "+        lab_plain.act()"):
        assert text in plan.out, plan
    assert plan.out.count("would change") == 1, "hosts alike are told once"
    assert "--port 8123" in plan.out
    assert [tree(host, "/opt/engine", STATE) - shipped[n] for n, host in enumerate(fleet.hosts)] == [set(), set()]
    assert not any(host.count("launch_server") for host in fleet.hosts)

    assert fleet.run("deploy", "--patch", "./plain", "--host", first.name).code == OK
    mixed = fleet.run("deploy", "--patch", "./plain", "--check", "--json")
    by_host = {record["host"]: record["data"] for record in mixed.records()}
    assert (by_host[first.name]["unchanged"], by_host[second.name]["unchanged"]) == (True, False)
    assert by_host[second.name]["changes"] == ["patch /opt/engine/bin/python with plain@1", "start main"]

    fleet.hosts.remove(second)
    before = tree(first, STATE), audit_of(first, fleet)
    again = fleet.run("deploy", "--patch", "./plain", "--replace", "--host", first.name)
    assert again.out == f"{first.name}/main unchanged, patch plain@1\n", "nor does --replace restart it"
    assert again.err == ""
    assert (tree(first, STATE), audit_of(first, fleet)) == before

    other = fleet.run("deploy", "--no-patch", "--check", "--host", first.name)
    assert other.code == FAILED, other
    assert "start main (needs --replace: it runs): patch plain@1 -> none" in other.out


def audit_of(host: LabHost, fleet: Fleet) -> list[dict[str, Any]]:
    entries: list[dict[str, Any]] = fleet.run("audit", "--json", "--host", host.name).records()[0]["data"]["entries"]
    return entries


# --------------------------------------------------------------------------- several servers, several hosts
def test_servers_of_a_host_start_in_turns_and_a_host_knows_what_others_took(make_fleet: Callable[[int], Fleet]) -> None:
    fleet = make_fleet(2)
    fleet.write_inventory(server={"name": "r{i}", "replicas": 2}, parallel_starts=1)
    told = {}
    for host in fleet.hosts:
        done = fleet.run("deploy", "--no-patch", "--host", host.name, timeout=300)
        assert done.code == OK, done
        assert done.err.count("1 of 2 servers start at a time (parallel_starts)") == 1, done
        told.update({line.partition(" ")[0]: line for line in done.out.splitlines()})
        (state,) = host.path(STATE).iterdir()
        lines = (state / "servers" / "r0" / "timeline.jsonl").read_text().splitlines()
        ready = [event["t"] for event in map(json.loads, lines) if event.get("outcome") == "ready"]
        launched = [entry["t"] for entry in audit_of(host, fleet) if entry["verb"] == "launch"]
        assert launched[0] < ready[0] <= launched[1], (launched, ready)
    first, second = fleet.hosts
    assert "healthy starts" not in told[f"{first.name}/r0"], told
    assert "healthy starts" in told[f"{first.name}/r1"], told
    assert "healthy starts" in told[f"{second.name}/r0"], "it has never had a start of its own"


# --------------------------------------------------------------------------- rolling, falling back
def test_a_failed_canary_ends_the_roll_out(make_fleet: Callable[[int], Fleet]) -> None:
    fleet = make_fleet(3)
    first, *others = fleet.hosts
    crash = [{"name": "main", "model_path": "/models/tiny", "port": 8123, "args": ["--device", "cpu", "--crash"]}]
    fleet.overrides[first.name] = {"servers": crash}
    fleet.write_inventory(server={"tp": 2})

    done = fleet.run("deploy", "--no-patch", "--canary", "1", "--batch", "1", "--max-failures", "9")
    assert done.code == FAILED, done
    assert "1 of 1 canaries failed" in done.err
    assert "2 not started" in done.err
    as_json = fleet.run("deploy", "--no-patch", "--batch", "2", "--json")
    status = {record["host"]: record["status"] for record in as_json.records()}
    assert status == {first.name: "failed", others[0].name: "ok", others[1].name: "not started"}, as_json
    assert not others[1].count("launch_server")
    allowed = fleet.run("deploy", "--no-patch", "--batch", "2", "--max-failures", "1", "--json")
    assert [record["status"] for record in allowed.records()].count("ok") == 2, allowed


def test_the_next_patch_is_tried_where_one_hangs(make_fleet: Callable[[int], Fleet]) -> None:
    """The pivot from a patch that makes servers hang to one that does not, and at last to none."""
    fleet = make_fleet(1)
    (host,) = fleet.hosts
    shipped = tree(host, "/opt/engine")
    assert fleet.run("deploy", "--patch", "./spin", "--fallback", "none,./plain").code == 2

    pivot = fleet.run("deploy", "--patch", "./spin", "--fallback", "./plain,none")
    assert pivot.code == OK, pivot
    for text in ("main ready in", "patch plain@1", "before: spin@1 did not work (main: ", "plain@1 works on"):
        assert text in pivot.out, pivot
    assert "trying plain@1" in pivot.err
    (bundle,) = host.path(STATE).glob("*/diagnoses/*")
    assert str(bundle).endswith("-main"), "the evidence was taken before the server was stopped"
    assert host.count("launch_server") == 1
    assert verbs(fleet, "patch", "launch", "stop") == ["patch", "launch", "stop", "patch", "launch"]

    shipped_again = fleet.run("deploy", "--patch", "./spin", "--fallback", "none", "--replace", "--json")
    assert shipped_again.code == OK, shipped_again
    data = shipped_again.records()[0]["data"]
    assert (data["patch"], [attempt["patch"] for attempt in data["attempts"]]) == ("", ["spin@1"])
    assert tree(host, "/opt/engine") == shipped

    worst = fleet.run("deploy", "--patch", "./spin", "--fallback", "./slow", "--replace", "--on-stall", "revert")
    assert worst.code == STALL, worst
    assert "none of the patches works" in worst.out
    assert not host.count("launch_server")
    assert tree(host, "/opt/engine") == shipped
