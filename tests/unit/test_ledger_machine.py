"""The ledger against a model of what a run is, through any order of what may happen to it."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass, field, replace
from pathlib import Path

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from manifests import manifest_line, text_of

from fleetdump.agent.formats import RejectedLine
from fleetdump.ledger import Ledger, Planned, Totals

NAMES = "abcdef"
HOSTS = ("h1", "h2")
names = st.sampled_from(NAMES)
hosts = st.sampled_from(HOSTS)


@dataclass
class Sample:
    """What the model knows of one: ``line`` and ``host`` of the first delivery."""

    state: str = "planned"
    host: str = ""
    line: str = ""
    reason: str = ""


@dataclass
class Model:
    samples: dict[str, Sample] = field(default_factory=dict)
    order: list[str] = field(default_factory=list)
    duplicates: set[tuple[str, str]] = field(default_factory=set)
    shares: dict[str, str] = field(default_factory=dict)
    offsets: dict[str, tuple[int, int]] = field(default_factory=dict)

    def copy(self) -> Model:
        return Model(
            {name: replace(sample) for name, sample in self.samples.items()},
            list(self.order),
            set(self.duplicates),
            dict(self.shares),
            dict(self.offsets),
        )

    def in_state(self, state: str) -> list[str]:
        return [name for name in self.order if self.samples[name].state == state]


class LedgerMachine(RuleBasedStateMachine):
    """Rules are what extract and collect do, and what happens to them; the invariant is every answer of the ledger."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = tempfile.TemporaryDirectory(prefix="fleetdump-ledger-")
        self.path = Path(self.folder.name) / "ledger.sqlite"
        self.ledger = Ledger(self.path)
        self.model = Model()
        self.planned = False

    def teardown(self) -> None:
        self.ledger.close()
        self.folder.cleanup()

    @initialize(begun=st.booleans())
    def begin(self, begun: bool) -> None:
        """A run that extract began, or one that collect rebuilds from what the hosts have."""
        if begun:
            self.plan(sorted(NAMES, reverse=True))

    @precondition(lambda self: not self.planned)
    @rule(order=st.permutations(list(NAMES)))
    def plan(self, order: list[str]) -> None:
        shares = [(host, "main", f"sha-{host}") for host in HOSTS]
        self.ledger.plan([Planned(name, "d", HOSTS[n % 2], "main", 5) for n, name in enumerate(order)], shares)
        self.planned = True
        for name in order:
            self.model.samples.setdefault(name, Sample())
        self.model.order = list(order)
        for host in HOSTS:
            self.model.shares.setdefault(host, "")
            self.model.offsets.setdefault(host, (0, 0))

    @rule(name=names, host=hosts, attempt=st.integers(1, 2))
    def deliver(self, name: str, host: str, attempt: int) -> None:
        assert self._deliver(name, host, attempt) == self._model_delivers(name, host, attempt)

    @rule(name=names, host=hosts, reason=st.sampled_from(["too_long", "killed_server"]))
    def reject(self, name: str, host: str, reason: str) -> None:
        self.ledger.reject(host, RejectedLine(name, "r1", "main", reason, "why", 0, 0.0))
        sample = self._known(name)
        if sample.state != "delivered":
            sample.state, sample.reason = "rejected", f"{reason}: why"

    @rule(host=hosts, share_id=st.sampled_from(["", "first", "second"]))
    def meet_share(self, host: str, share_id: str) -> None:
        """Nothing was pulled here: of a share that was begun anew all is to be taken once more."""
        self.ledger.meet_share(host, "main", share_id)
        before = self.model.shares.setdefault(host, "")
        self.model.offsets.setdefault(host, (0, 0))
        if share_id not in ("", before):
            self.model.shares[host] = share_id
            self.model.offsets[host] = (0, 0)
            for sample in self.model.samples.values():
                if sample.state == "delivered" and sample.host == host:
                    sample.state = "planned"

    @rule(name=names, host=hosts, offset=st.integers(1, 99))
    def an_interrupted_pull_leaves_nothing(self, name: str, host: str, offset: int) -> None:
        class CutOff(Exception):
            pass

        try:
            with self.ledger.transaction():
                self._deliver(name, host, 1)
                self.ledger.advance(host, "main", offset, offset)
                raise CutOff
        except CutOff:
            pass

    @rule(taken=st.lists(st.tuples(names, hosts), max_size=4), host=hosts, offset=st.integers(1, 99))
    def a_pull(self, taken: list[tuple[str, str]], host: str, offset: int) -> None:
        with self.ledger.transaction():
            for name, by in taken:
                self._deliver(name, by, 1)
                self._model_delivers(name, by, 1)
            self.ledger.advance(host, "main", offset, 2 * offset)
        if host in self.model.offsets:
            self.model.offsets[host] = (offset, 2 * offset)

    @rule()
    def the_controller_is_killed(self) -> None:
        self.ledger.close()
        self.ledger = Ledger(self.path)

    @invariant()
    def answers_agree(self) -> None:
        model = self.model
        assert self.ledger.is_planned == self.planned
        assert self.ledger.ids() == set(model.samples)
        assert {name for name in NAMES if self.ledger.knows(name)} == set(model.samples)
        states = [sample.state for sample in model.samples.values()]
        delivered, rejected = states.count("delivered"), states.count("rejected")
        totals = self.ledger.totals()
        assert totals == Totals(len(states), delivered, rejected, len(model.duplicates))
        assert totals.lost == states.count("planned")
        kept = [(d.id, d.host, d.line) for d in self.ledger.delivered()]
        ours = [(name, model.samples[name].host, model.samples[name].line) for name in model.in_state("delivered")]
        assert kept == ours, "each sample once, by its first line, in order"
        for host in HOSTS:
            assert [d.id for d in self.ledger.delivered(host)] == [name for name, at, _ in ours if at == host]
        assert [sample[0] for sample in self.ledger.lost()] == model.in_state("planned")
        assert self.ledger.rejected() == [(name, model.samples[name].reason) for name in model.in_state("rejected")]
        shares = {share.host: share for share in self.ledger.shares()}
        assert {host: share.share_id for host, share in shares.items()} == model.shares
        assert {host: (s.offset, s.rejected_offset) for host, s in shares.items()} == model.offsets

    def _deliver(self, name: str, host: str, attempt: int) -> bool:
        line = manifest_line(name, attempt=attempt)
        return self.ledger.deliver(host, line, text_of(line))

    def _model_delivers(self, name: str, host: str, attempt: int) -> bool:
        text = text_of(manifest_line(name, attempt=attempt))
        sample = self._known(name)
        if sample.state == "delivered" and (sample.host, sample.line) != (host, text):
            self.model.duplicates.add((name, host))
            return False
        sample.state, sample.host, sample.line, sample.reason = "delivered", host, text, ""
        return True

    def _known(self, name: str) -> Sample:
        """What comes back before there is a plan is new, at the end of the order."""
        if name not in self.model.samples:
            self.model.samples[name] = Sample()
            self.model.order.append(name)
        return self.model.samples[name]


LedgerMachine.TestCase.settings = settings(max_examples=25, stateful_step_count=40, deadline=None)
TestLedger = LedgerMachine.TestCase
