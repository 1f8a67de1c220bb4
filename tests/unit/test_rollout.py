"""The order of a roll-out and its end, and what is told when one is interrupted."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleetdump.agent.patchmessages import PatchArgs, PatchResult, PatchState
from fleetdump.agent.servermessages import LaunchForecast
from fleetdump.agent.specs import Interpreter, PatchSpec
from fleetdump.tasks.changes import HostChanges
from fleetdump.tasks.check import clock_findings
from fleetdump.tasks.rollout import Rollout
from fleetdump.tasks.steps import History, Steps

HOSTS = ["a", "b", "c", "d", "e"]


@pytest.mark.parametrize(
    ("rollout", "groups"),
    [
        (Rollout(), [["a", "b", "c", "d", "e"]]),
        (Rollout(canary=1), [["a"], ["b", "c", "d", "e"]]),
        (Rollout(batch=2), [["a", "b"], ["c", "d"], ["e"]]),
        (Rollout(canary=2, batch=2), [["a", "b"], ["c", "d"], ["e"]]),
        (Rollout(canary=9), [["a", "b", "c", "d", "e"]]),
    ],
)
def test_groups(rollout: Rollout, groups: list[list[str]]) -> None:
    assert rollout.groups(HOSTS) == groups
    assert rollout.groups([]) == []


@given(st.integers(0, 8), st.integers(0, 8), st.lists(st.integers(), unique=True, max_size=20))
def test_every_host_has_one_turn(canary: int, batch: int, hosts: list[int]) -> None:
    groups = Rollout(canary, batch).groups(hosts)
    assert [host for group in groups for host in group] == hosts
    assert all(groups), "no group is empty"


@pytest.mark.parametrize(
    ("rollout", "done", "goes_on", "reason"),
    [
        (Rollout(canary=1, max_failures=5), [True], True, ""),
        (Rollout(canary=2, max_failures=5), [True, False], False, "1 of 2 canaries failed"),
        (Rollout(batch=2), [True, False], False, "1 hosts failed, 0 may"),
        (Rollout(batch=2, max_failures=1), [True, False], True, ""),
        (Rollout(batch=2, max_failures=1), [True, False, False, True], False, "2 hosts failed, 1 may"),
        (Rollout(canary=1, batch=2, max_failures=1), [True, False, True], True, ""),
    ],
)
def test_when_it_ends(rollout: Rollout, done: list[bool], goes_on: bool, reason: str) -> None:
    assert rollout.may_go_on(done) is goes_on
    if not goes_on:
        assert rollout.reason(done) == reason


def test_a_history_knows_what_is_done_what_was_under_way_and_what_runs_on() -> None:
    history = History()
    steps = Steps(lambda event: history.add("gpu01", event))
    steps.begin("patch", "patching /opt/python")
    steps.end("patch")
    steps.tell("patch", "patched with p@1")
    steps.tell("plan", "plan: more")
    steps.begin("launch", "launching a")
    steps.end("launch")
    steps.tell("launch", "launched a (pid 7)", "a")
    steps.begin("launch", "launching b")
    history.add("gpu01", {"event": "tick", "server": "a", "phase": "weights"})  # a starts beside it
    steps.tell("lock", "this host is no longer held")
    found = history.of("gpu01")
    assert found.done == ["patched with p@1", "launched a (pid 7)"]
    assert found.doing == "launching b"
    assert found.running == ["a"]
    steps.begin("stop", "stopping a")
    steps.end("stop")
    steps.tell("stop", "stopped a")
    assert (found.running, found.doing) == ([], "")


@pytest.mark.parametrize(
    ("there", "level", "words"),
    [
        (1000.0, "ok", ""),
        (1060.0, "ok", "the call took a minute"),
        (996.0, "ok", ""),
        (988.0, "warning", "12 s behind"),
        (1090.0, "warning", "30 s ahead of"),
    ],
)
def test_a_clock_is_off_only_by_what_the_call_cannot_explain(there: float, level: str, words: str) -> None:
    (found,) = clock_findings(1000.0, 1060.0, there)
    assert found.level == level
    if level != "ok":
        assert words in found.text
        assert found.fix


def patch_result(diff: str) -> PatchResult:
    return PatchResult(PatchState("clean"), PatchState("clean"), False, "sglang 0.5.20", True, diff)


def test_changes_in_words() -> None:
    args = PatchArgs("/opt/python", PatchSpec("p", "1", "00", []))
    changes = HostChanges("p@1", patches=[(args, patch_result(""))])
    changes.launches = [LaunchForecast("a", "none", ["python"])]
    assert changes.unchanged
    assert changes.lines() == []

    changes.patches = [(args, patch_result("+x"))]
    changes.launches.append(LaunchForecast("b", "replace", ["python"], differs=["patch none -> p@1"]))
    assert not changes.unchanged
    assert changes.lines() == [
        "patch /opt/python with p@1",
        "start b (needs --replace: it runs): patch none -> p@1",
    ]
    assert [launch.server for launch in changes.conflicts] == ["b"]
    changes.stops, changes.reverts = ["b"], [Interpreter("/other/python")]
    assert changes.conflicts == []
    assert changes.lines()[:2] == ["stop b", "revert the patch of /other/python"]
    assert changes.summary()["needs_replace"] == []
