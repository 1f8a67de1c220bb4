"""The ledger: an index that forgets nothing, counts each sample once and can be rebuilt."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from manifests import manifest_line, text_of

from fleetdump.agent.formats import RejectedLine
from fleetdump.agent.runmessages import ShardInfo
from fleetdump.errors import FleetdumpError
from fleetdump.ledger import Ledger, Planned, Totals
from fleetdump.tasks.merge import CollectReport, PullOptions, merge, require_whole
from fleetdump.tasks.missing import NAME, write_missing


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


def test_another_share_of_the_same_name_is_read_from_its_start(ledger: Ledger, tmp_path: Path) -> None:
    ledger.meet_share("h1", "main", "first")
    deliver(ledger, "a", shards=("s0",))
    deliver(ledger, "b", shards=("s1",))
    pull(ledger, "h1", tmp_path, "s0", "tokens", NORM)
    ledger.advance("h1", "main", 500, 20)
    ledger.meet_share("h1", "main", "first")
    ledger.meet_share("h1", "main", "")
    assert (ledger.shares("h1")[0].offset, ledger.totals().delivered) == (500, 2)
    ledger.meet_share("h1", "main", "second")
    share = ledger.shares("h1")[0]
    assert (share.share_id, share.offset, share.rejected_offset) == ("second", 0, 0)
    assert [d.id for d in ledger.delivered()] == ["a"], "the other one's bytes are gone"
    assert ledger.needed_shards("h1") == {"s0", "tokens"}
    assert ledger.shares("h2")[0].share_id == ""


def test_other_bytes_under_a_known_name_are_not_verified(ledger: Ledger, tmp_path: Path) -> None:
    pull(ledger, "h1", tmp_path, "s0")
    ledger.put_shard("h1", ShardInfo("s0", "shard", 5, "ab"))
    assert ledger.is_verified("h1", "s0")
    ledger.put_shard("h1", ShardInfo("s0", "shard", 5, "cd"))
    assert not ledger.is_verified("h1", "s0")


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


def test_a_plan_keeps_what_was_collected_before_it(tmp_path: Path) -> None:
    """The ledger was lost, `collect` made a new one from the hosts, and `extract` goes on with the run."""
    with Ledger(tmp_path / "ledger.sqlite") as rebuilt:
        rebuilt.meet_share("h1", "main", "first")
        deliver(rebuilt, "c")
        deliver(rebuilt, "a")
        rebuilt.reject("h1", RejectedLine("b", "r1", "main", "too_long", "9 tokens", 0, 0.0))
        rebuilt.advance("h1", "main", 500, 20)
        planned = [Planned(name, f"d{name}", "h1", "main", 10) for name in "abcd"]
        rebuilt.plan(planned, [("h1", "main", "s1")])
        assert [sample.id for sample in rebuilt.assignments()] == ["a", "b", "c", "d"]
        assert [sample.id for sample in rebuilt.delivered()] == ["a", "c"], "in the data set's order"
        assert rebuilt.totals() == Totals(expected=4, delivered=2, rejected=1, duplicated=0)
        (share,) = rebuilt.shares()
        assert (share.sha256, share.offset, share.share_id) == ("s1", 500, "first")


NORM = "norm-main-0000000a.safetensors"


def pull(ledger: Ledger, host: str, folder: Path, *names: str, verified: bool = True) -> None:
    """As collect does: the host lists files of 5 bytes, they are copied here and found right (or not)."""
    for name in names:
        (folder / host).mkdir(parents=True, exist_ok=True)
        (folder / host / name).write_bytes(b"12345")
        ledger.put_shard(host, ShardInfo(name, "shard", 5, "ab"))
        ledger.pulled(host, name, folder / host / name, verified=verified)


def test_collected_means_every_file_verified(ledger: Ledger, tmp_path: Path) -> None:
    deliver(ledger, "a", shards=("s0", "s1"))
    deliver(ledger, "b", shards=("s1",))
    assert ledger.needed_shards("h1") == {"s0", "s1", "tokens"}
    pull(ledger, "h1", tmp_path, "s1", "tokens")
    assert ledger.collected("h1", "main") == set(), "the norm is not here"
    pull(ledger, "h1", tmp_path, NORM)
    assert ledger.collected("h1", "main") == {"b"}
    pull(ledger, "h1", tmp_path, "s0", verified=False)
    assert ledger.collected("h1", "main") == {"b"}
    pull(ledger, "h1", tmp_path, "s0")
    assert ledger.collected("h1", "main") == {"a", "b"}
    assert ledger.is_verified("h1", "s0")
    assert ledger.collected("h2", "main") == set()


@pytest.mark.parametrize("lost", ["s0", "tokens", NORM])
@pytest.mark.parametrize("how", ["removed", "shorter"])
def test_what_is_not_here_any_more_is_not_collected(ledger: Ledger, tmp_path: Path, lost: str, how: str) -> None:
    deliver(ledger, "a")
    pull(ledger, "h1", tmp_path, "s0", "tokens", NORM)
    assert ledger.collected("h1", "main") == {"a"}
    if how == "removed":
        (tmp_path / "h1" / lost).unlink()
    else:
        (tmp_path / "h1" / lost).write_bytes(b"1234")
    assert ledger.collected("h1", "main") == set()


def test_the_folder_is_the_one_that_was_pulled_to_wherever_we_are(
    ledger: Ledger, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    deliver(ledger, "a")
    pull(ledger, "h1", Path("data"), "s0", "tokens", NORM)
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert ledger.collected("h1", "main") == {"a"}


def test_a_duplicate_counts_when_the_kept_copy_is_here(ledger: Ledger, tmp_path: Path) -> None:
    deliver(ledger, "a", "h1")
    deliver(ledger, "a", "h2")
    pull(ledger, "h2", tmp_path, "s0", "tokens", NORM)  # but it is h1's line that the run has
    assert ledger.collected("h2", "main") == set()
    pull(ledger, "h1", tmp_path, "s0", "tokens", NORM)
    assert ledger.collected("h2", "main") == {"a"}


# --------------------------------------------------------------------------- what is missing here
def missing(folder: Path) -> list[tuple[int, str, str, str]]:
    lines = (folder / NAME).read_text().splitlines()
    return [(line["line"], line["id"], line["state"], line["host"]) for line in map(json.loads, lines)]


def test_what_is_done_on_a_host_and_not_brought_here_is_missing(ledger: Ledger, tmp_path: Path) -> None:
    deliver(ledger, "b")
    deliver(ledger, "a", shards=("s0", "s1"))
    deliver(ledger, "d", "h2")
    pull(ledger, "h1", tmp_path, "s0", "tokens", NORM)
    assert write_missing(ledger, tmp_path, with_files=True) == {"h1": 1, "h2": 1}
    assert missing(tmp_path) == [
        (1, "a", "not_here", "h1"),
        (3, "c", "not_done", "h2"),
        (4, "d", "not_here", "h2"),
    ]
    assert write_missing(ledger, tmp_path, with_files=False) == {}
    assert missing(tmp_path) == [(3, "c", "not_done", "h2")]
    pull(ledger, "h1", tmp_path, "s1")
    pull(ledger, "h2", tmp_path, "s0", "tokens", NORM)
    assert write_missing(ledger, tmp_path, with_files=True) == {}
    (tmp_path / "h2" / NORM).unlink()
    assert write_missing(ledger, tmp_path, with_files=True) == {"h2": 1}


def test_a_line_that_a_ledger_should_not_hold_does_not_hide_what_is_missing(ledger: Ledger, tmp_path: Path) -> None:
    ledger.deliver("h1", manifest_line("a"), "no JSON")
    deliver(ledger, "b")
    assert write_missing(ledger, tmp_path, with_files=True) == {"h1": 2}


def test_a_run_whose_files_lie_elsewhere_is_not_whole(ledger: Ledger, tmp_path: Path) -> None:
    for name in "abcd":
        deliver(ledger, name, "h1" if name < "d" else "h2")
    report = merge(ledger, PullOptions("r1", tmp_path), tmp_path)
    assert (report.samples, report.lost) == (4, 0)
    require_whole(report, [])
    report.not_here = write_missing(ledger, tmp_path, with_files=True)
    with pytest.raises(FleetdumpError) as failed:
        require_whole(report, [])
    assert failed.value.why == "4 of 4 samples have no files here: 3 that h1 computed, 1 that h2 computed"
    assert failed.value.next_step.startswith("collect --data again when those hosts answer; if one never comes back")


def test_of_many_hosts_the_first_are_named() -> None:
    report = CollectReport("r", 9, 9, 0, 0, 0, 9, "m.jsonl", not_here={f"h{n}": 1 for n in range(9)})
    with pytest.raises(FleetdumpError, match=r"9 of 9 samples .* 1 that h4 computed and those of 4 more hosts"):
        require_whole(report, [])


def test_the_documented_command_takes_the_missing_rows_from_the_data(ledger: Ledger, tmp_path: Path) -> None:
    """docs/run.md: the rows of ``missing.jsonl``, and no other, whatever they say themselves."""
    rows = [f'{{"id": "{name}", "text": "\\"line\\": {n}"}}' for n, name in zip((3, 4, 1, 1), "abcd", strict=True)]
    (tmp_path / "data.jsonl").write_text("".join(f"{row}\n" for row in rows))
    deliver(ledger, "a")
    deliver(ledger, "c", "h2")
    pull(ledger, "h1", tmp_path, "s0", "tokens", NORM)
    write_missing(ledger, tmp_path, with_files=True)
    text = (Path(__file__).parents[2] / "docs" / "run.md").read_text()
    found = re.search(r"^awk '(.*)'", text, re.MULTILINE)
    assert found is not None
    taken = subprocess.run(
        ["awk", found[1], NAME, "data.jsonl"], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    assert taken.stdout.splitlines() == rows[1:], "b, c and d"
