"""Which rows of a forward the tap takes, and how requests go on from one forward to the next."""

from __future__ import annotations

import itertools
import random
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "patches" / "hidden-states"))

from fleetdump_taprows import (  # type: ignore[import-not-found]
    REMEMBERED_REQUESTS,
    RID,
    Ledger,
    Requests,
    Rows,
    groups_of,
)

OURS = "fleetdump/r1/s/1"


def requests(*parts: tuple[str, int, int]) -> Requests:
    """Of (rid, rows, first position)."""
    rids, rows, starts = zip(*parts, strict=True)
    return Requests.of(rids, [*rows, 0, 0], [*starts, 7], "fleetdump/")  # SGLang pads


@pytest.mark.parametrize(
    ("rid", "ours"),
    [
        ("fleetdump/r1/s/1", True),
        ("fleetdump/r1/a%20b%2Fc/12", True),
        ("fleetdump/r1/" + "%F0%9F%92%A9" * 200 + "/1", True),
        ("fleetdump/r1/" + "a" * 2401 + "/1", False),
        ("fleetdump/r1/" + "a" * 1_000_000 + "/1", False),
        ("fleetdump/r1/a b/1", False),
        ("fleetdump/r1/ü/1", False),
        ("fleetdump/r1/s/0", False),
        ("fleetdump/../s/1", False),
        ("fleetdump/r1/s/1\n", False),
    ],
)
def test_a_rid_is_ours_when_fleetdump_could_have_made_it(rid: str, ours: bool) -> None:
    assert bool(RID.match(rid)) is ours
    assert [rows.rid for rows in requests((rid, 2, 0)).rows()] == ([rid] if ours else [])


def test_rows_lie_where_the_ranges_put_them() -> None:
    """For any batch: the block's rows of a request are those that its ranges take from the stream."""
    source = random.Random(1)
    for _ in range(300):
        made = requests(
            *(
                (source.choice(["x", "fleetdump/not/ours", f"fleetdump/r1/s{n}/1"]), source.randrange(0, 4), n)
                for n in range(source.randrange(1, 8))
            )
        )
        stream = [rid for rid, rows in zip(made.rids, made.lengths, strict=True) for _ in range(rows)]
        block = [row for first, rows in made.ranges() for row in stream[first : first + rows]]
        for rows in made.rows():
            assert block[rows.at : rows.at + rows.rows] == [rows.rid] * rows.rows
        assert all(a + b < c for (a, b), (c, _) in itertools.pairwise(made.ranges())), "joined"
        assert all(rows for _, rows in made.ranges())


def test_a_batch_that_says_too_little_is_refused() -> None:
    with pytest.raises(ValueError, match="2 requests, 1 lengths"):
        Requests.of(["a", "b"], [1], [0, 0], "fleetdump/")


def test_chunks_follow_on_each_other_or_miss_something() -> None:
    ledger = Ledger()

    def settle(start: int, rows: int, rid: str = OURS) -> str:
        wanted, skips = ledger.settle([Rows(rid, 0, rows, start)])
        return "written" if wanted else skips[0].reason if skips else "repeat"

    assert [settle(0, 4), settle(4, 2), settle(5, 1), settle(6, 3)] == ["written", "written", "repeat", "written"]
    assert settle(20, 1) == "prefix_missing"
    assert settle(9, 1) == "written", "what came too early changes nothing"
    assert settle(0, 4) == "written", "retracted, and prefilled again"
    assert settle(3, 0) == "repeat"
    ledger.forget([OURS])
    assert settle(4, 2) == "prefix_missing"


def test_the_memory_of_requests_is_bounded() -> None:
    ledger = Ledger()
    for number in range(REMEMBERED_REQUESTS + 10):
        ledger.settle([Rows(f"fleetdump/r1/s{number}/1", 0, 1, 0)])
    assert len(ledger._next) == REMEMBERED_REQUESTS
    assert ledger.settle([Rows("fleetdump/r1/s0/1", 0, 1, 1)])[1], "the oldest is forgotten"


def test_groups_are_neighbours_of_one_run_and_parts_of_what_is_too_large() -> None:
    """For any rows and limits: nothing is lost, no group is too large but for a single piece."""
    source = random.Random(2)
    for _ in range(300):
        rows, at = [], 0
        for number in range(source.randrange(0, 12)):
            size = source.randrange(1, 30)
            rows.append(Rows(f"fleetdump/r{source.randrange(2)}/s{number}/1", at, size, 100 * number))
            at += size + source.choice([0, 0, 3])
        limit, most = source.randrange(1, 20), source.randrange(1, 40)
        groups = groups_of(rows, limit, most)
        parts = [part for group in groups for part in group]
        for group in groups:
            assert len({part.rid.split("/")[1] for part in group}) == 1
            assert all(a.at + a.rows == b.at for a, b in itertools.pairwise(group))
            assert sum(part.rows for part in group) <= limit or len(group) == 1
            assert all(part.rows <= most for part in group)
        for whole in rows:
            mine = [part for part in parts if part.rid == whole.rid]
            positions = [(part.at + k, part.start + k) for part in mine for k in range(part.rows)]
            assert positions == [(whole.at + k, whole.start + k) for k in range(whole.rows)]
