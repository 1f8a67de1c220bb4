"""Who only watches a run counts a sample once that two hosts have done."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, cast

import pytest
from extraction import StandIn

from fleetdump.agent.context import AgentContext
from fleetdump.agent.protocol import Request
from fleetdump.agent.runmessages import DoneArgs, DoneResult, HeldResult, RunProgress
from fleetdump.agent.withdraw import done
from fleetdump.errors import UnreachableError
from fleetdump.fleet import Host
from fleetdump.inventory import HostConfig
from fleetdump.tasks.copies import Copies


class Answering:
    """A host with shares: what each holds, and has done of it."""

    def __init__(self, name: str, held: dict[str, str], done: dict[str, str]):
        self.config = HostConfig(name, name)
        self.held = held
        self.done = done
        self.asked: list[str] = []
        self.closed = 0
        self.silent = False

    def call(self, args: Any, kind: type, *, verb: str, body: Sequence[str] = (), **_: Any) -> Any:
        if self.silent:
            raise UnreachableError("the connection was lost", self.config.name)
        self.asked.append(verb)
        if kind is HeldResult:
            return HeldResult(list(self.held[args.share]), "")
        wanted = {json.loads(line)["id"] for line in body}
        return DoneResult([sample for ids in self.done.values() for sample in ids if sample in wanted])

    def again(self) -> Host:
        return cast(Host, self)

    def close(self) -> None:
        self.closed += 1


def watching(hosts: Sequence[Answering], run_samples: int = 6) -> Copies:
    copies = Copies("r")
    for host in hosts:
        copies.meet(cast(Host, host))
        for share, ids in host.held.items():
            settled = len(host.done[share])
            copies.note(host.config.name, RunProgress("r", share, "done", len(ids), settled, run_samples=run_samples))
    return copies


def test_only_what_two_shares_have_done_is_taken_off() -> None:
    away = Answering("away", {"main": "abc"}, {"main": "ab"})
    here = Answering("here", {"main": "def", "main.1": "abc"}, {"main": "def", "main.1": "bc"})
    copies = watching([away, here])
    assert copies.there_are
    with copies.counted():
        assert copies.count == 0, "before the first look"
    assert copies.count == 1
    assert (away.closed, here.closed) == (1, 1)


def test_where_work_has_only_moved_nothing_is_asked() -> None:
    gave = Answering("gave", {"main": "ab"}, {"main": "ab"})
    took = Answering("took", {"main": "def", "main.1": "c"}, {"main": "def", "main.1": "c"})
    with watching([gave, took]).counted():
        pass
    with watching([gave], run_samples=0).counted():
        pass
    assert gave.asked == took.asked == []


def test_a_host_that_does_not_answer_leaves_the_count_as_it_was() -> None:
    away = Answering("away", {"main": "abc"}, {"main": "abc"})
    here = Answering("here", {"main": "def", "main.1": "abc"}, {"main": "def", "main.1": "abc"})
    copies = watching([away, here])
    copies._look()
    assert copies.count == 3
    away.silent = True
    copies._look()
    assert copies.count == 3
    assert away.closed == 1, "the next look opens a new way"
    away.silent = False
    copies._look()
    assert away.asked == ["done", "done"]


@pytest.fixture
def host(tmp_path: Path) -> Iterator[StandIn]:
    standin = StandIn(tmp_path)
    yield standin
    standin.kill()


def test_a_host_tells_which_of_these_its_shares_have_done(host: StandIn) -> None:
    for name, ids in (("main", "abc"), ("main.1", "cd")):
        share = host.share(dict.fromkeys(ids, 5))
        lines = [json.dumps({"v": 1, "id": sample}) + "\n" for sample in ids]
        (share.root / "manifest.jsonl").write_text("".join(lines) + '{"v": 1, "id": "torn"')
        if name != "main":
            continue
        share.root.rename(share.root.with_name("kept"))
    kept = host.state.root / "runs/r1/kept"
    kept.parent.joinpath("main").rename(kept.with_name("main.1"))
    kept.rename(kept.with_name("main"))
    body = "".join(json.dumps({"id": sample}) + "\n" for sample in ("a", "c", "torn", "nobody"))
    request = Request("done", {}, deadline=60.0, body_lines=4)
    ctx = AgentContext(request, host.state, stdin=io.BytesIO(body.encode()), stdout=io.BytesIO())
    assert done(DoneArgs("r1"), ctx).ids == ["a", "c", "c"]
