"""The ledger: an index that forgets nothing, counts each sample once and can be rebuilt."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from manifests import manifest_line, text_of

from fleetdump.agent.formats import RejectedLine
from fleetdump.agent.protocol import ShardInfo
from fleetdump.ledger import Ledger, Planned, Totals


@pytest.fixture
def ledger(tmp_path: Path) -> Iterator[Ledger]:
    with Ledger(tmp_path / "r1" / "ledger.sqlite") as opened:
        opened.plan(
            [Planned(name, f"d{name}", "h1" if name < "c" else "h2", "main", 10) for name in "abcd"],
            [("h1", "main", "s1"), ("h2", "main", "s2")],
            [(7, "bad_json: x")],
        )
        yield opened


def deliver(ledger: Ledger, name: str, host: str = "h1", **changes: object) -> bool:
    line = manifest_line(name, **changes)
    return ledger.deliver(host, line, text_of(line))


def test_a_plan_is_kept_in_order(ledger: Ledger, tmp_path: Path) -> None:
    assert [sample.id for sample in ledger.assignments()] == ["a", "b", "c", "d"]
    assert ledger.homes()["c"] == ("h2", "main")
    assert ledger.is_planned
    assert ledger.totals() == Totals(expected=5, delivered=0, rejected=1, duplicated=0)
    assert ledger.totals().lost == 4
    ledger.close()
    with Ledger(tmp_path / "r1" / "ledger.sqlite") as again:
        assert again.knows("a")
        assert not again.knows("z")


def test_each_sample_counts_once(ledger: Ledger) -> None:
    assert deliver(ledger, "a")
    assert deliver(ledger, "a")  # the same line again: a repeated pull
    assert not deliver(ledger, "a", "h2")
    assert not deliver(ledger, "a", attempt=2)
    assert deliver(ledger, "b", "h2")  # moved to another host
    totals = ledger.totals()
    assert (totals.delivered, totals.duplicated, totals.lost) == (2, 2, 2)
    assert [(d.id, d.host) for d in ledger.delivered()] == [("a", "h1"), ("b", "h2")]
    assert ledger.lost() == [("c", "h2", "main"), ("d", "h2", "main")]


def test_a_reject_does_not_undo_a_delivery(ledger: Ledger) -> None:
    deliver(ledger, "a")
    for name in "ab":
        ledger.reject("h1", RejectedLine(name, "r1", "main", "too_long", "9 tokens", 0, 0.0))
    assert ledger.rejected() == [("line 7", "bad_json: x"), ("b", "too_long: 9 tokens")]
    deliver(ledger, "b", "h2")  # another host could
    assert ledger.totals().rejected == 1


def test_offsets_and_lines_stand_or_fall_together(ledger: Ledger) -> None:
    def interrupted() -> None:
        with ledger.transaction():
            deliver(ledger, "a")
            ledger.advance("h1", "main", 500, 0)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert ledger.shares("h1")[0].offset == 0
    assert ledger.totals().delivered == 0


def test_rebuild_reads_everything_again(ledger: Ledger) -> None:
    deliver(ledger, "a")
    deliver(ledger, "a", "h2")
    ledger.advance("h1", "main", 500, 20)
    ledger.rebuild()
    assert ledger.totals() == Totals(expected=5, delivered=0, rejected=1, duplicated=0)
    assert ledger.shares("h1")[0].offset == 0
    assert ledger.needed_shards("h1") == set()


def test_collected_means_every_shard_verified(ledger: Ledger) -> None:
    deliver(ledger, "a", shards=("s0", "s1"))
    deliver(ledger, "b", shards=("s1",))
    assert ledger.needed_shards("h1") == {"s0", "s1", "tokens"}
    for name in ("s1", "tokens"):
        ledger.put_shard("h1", ShardInfo(name, "shard", 5, "ab"))
        ledger.pulled("h1", name, verified=True)
    assert ledger.collected("h1", "main") == 1
    ledger.put_shard("h1", ShardInfo("s0", "shard", 5, "ab"))
    ledger.pulled("h1", "s0", verified=False)
    assert ledger.collected("h1", "main") == 1
    ledger.pulled("h1", "s0", verified=True)
    assert ledger.collected("h1", "main") == 2
    assert ledger.is_verified("h1", "s0")
    assert ledger.collected("h2", "main") == 0


def test_a_late_duplicate_is_no_reason_to_keep_the_host(ledger: Ledger) -> None:
    deliver(ledger, "a", "h1")
    deliver(ledger, "a", "h2")
    assert ledger.collected("h2", "main") == 1
