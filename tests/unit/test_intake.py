"""While a controller watches, the hosts' lines come into its ledger; what is wrong with them stays for ``collect``."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from manifests import manifest_line, text_of

from fleetdump.agent.hostmessages import StatusResult
from fleetdump.agent.runmessages import ManifestArgs, ManifestResult, RunProgress
from fleetdump.errors import UnreachableError
from fleetdump.fleet import Host
from fleetdump.ledger import Ledger
from fleetdump.tasks import collect, intake
from fleetdump.tasks.intake import take_in, taking_in
from fleetdump.tasks.merge import PullOptions

SECONDS = 60.0


@dataclass
class Manifest:
    """A host with one share, by the lines of its manifest."""

    lines: list[str] = field(default_factory=list)
    error: UnreachableError | None = None
    calls: int = 0
    asked: threading.Event = field(default_factory=threading.Event)
    config: Any = field(default_factory=lambda: SimpleNamespace(name="h1"))

    @property
    def host(self) -> Host:
        return cast(Host, self)

    def call(self, args: Any, _: type, *, verb: str, on_event: Any = None, **__: Any) -> Any:
        self.calls += 1
        self.asked.set()
        if self.error is not None:
            raise self.error
        progress = RunProgress("r1", "main", "running", share_id="id")
        if verb == "status":
            return StatusResult("h1", [], [progress])
        assert isinstance(args, ManifestArgs)
        end = 0
        for line in self.lines:
            start, end = end, end + len(line) + 1
            if start >= args.offset:
                on_event({"event": "manifest", "line": line, "end": end})
        return ManifestResult(end, 0, progress)


pull = cast(Any, collect.pull).body
"""Without Fabric, which wants a connection."""


@pytest.fixture(autouse=True)
def without_fabric(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(intake, "pull", pull)


def line(name: str) -> str:
    return text_of(manifest_line(name))


@pytest.fixture
def ledger(tmp_path: Path) -> Iterator[Ledger]:
    with Ledger(tmp_path / "ledger.sqlite") as opened:
        yield opened


def delivered(ledger: Ledger) -> list[str]:
    return sorted(sample.id for sample in ledger.delivered())


def test_lines_come_in_once(ledger: Ledger) -> None:
    manifest = Manifest([line("a")])
    assert take_in(manifest.host, "r1", ledger)
    manifest.lines.append(line("b"))
    assert take_in(manifest.host, "r1", ledger)
    assert delivered(ledger) == ["a", "b"]
    assert ledger.totals().duplicated == 0


def test_a_wrong_line_is_left_for_collect_to_report(ledger: Ledger) -> None:
    manifest = Manifest([line("a")])
    assert take_in(manifest.host, "r1", ledger)
    manifest.lines += ["{", line("b")]
    assert not take_in(manifest.host, "r1", ledger)
    assert delivered(ledger) == ["a", "b"], "the others count"
    report = pull(manifest.host, PullOptions("r1"), ledger)
    assert len(report.faults) == 1
    assert ledger.totals().duplicated == 0


def test_the_last_lines_are_taken_in_when_the_host_has_ended(ledger: Ledger) -> None:
    manifest = Manifest()
    with taking_in(manifest.host, "r1", ledger, every=SECONDS):
        manifest.lines.append(line("a"))
    assert delivered(ledger) == ["a"]


def test_lines_come_in_while_the_host_works(ledger: Ledger) -> None:
    manifest = Manifest([line("a")])
    with taking_in(manifest.host, "r1", ledger, every=0.01):
        for _ in range(6000):
            if delivered(ledger):
                break
            manifest.asked.wait(0.01)
    assert delivered(ledger) == ["a"]


def test_a_host_that_does_not_answer_is_somebody_elses_to_report(ledger: Ledger) -> None:
    manifest = Manifest(error=UnreachableError("lost", "h1"))
    with taking_in(manifest.host, "r1", ledger, every=0.01):
        assert manifest.asked.wait(SECONDS)
    calls = manifest.calls
    with pytest.raises(UnreachableError, match="its own"), taking_in(manifest.host, "r1", ledger, every=SECONDS):
        raise UnreachableError("its own")
    assert manifest.calls == calls, "nothing is asked of a host that was lost"
