"""``verify``: every byte where it lies, torn shards repaired, and what the taps of a server say of themselves."""

from __future__ import annotations

import io
import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from extraction import StandIn, manifest_of

from fleetdump.agent.context import AgentContext
from fleetdump.agent.driver import work
from fleetdump.agent.loop import Timing
from fleetdump.agent.protocol import AgentFailure, Request, to_json
from fleetdump.agent.runmessages import RunVerification, TapStatus, VerifyArgs
from fleetdump.agent.schedule import LEAST_ALLOWED, Sample, Schedule
from fleetdump.agent.share import Share
from fleetdump.agent.status import status
from fleetdump.agent.tapstatus import FRESH_SECONDS, is_behind, taps_of
from fleetdump.agent.verify import verify


@pytest.fixture
def host(tmp_path: Path) -> Iterator[StandIn]:
    standin = StandIn(tmp_path)
    yield standin
    standin.kill()


@pytest.fixture
def share(host: StandIn) -> Share:
    """A run of ten samples, done; its server lives."""
    host.set_faults(chunk=50, idle_close=2.0)  # all in one shard
    host.start()
    share = host.share({f"c{n}": 20 + 30 * n for n in range(10)})
    lock = share.claim()
    assert lock is not None
    with lock:
        work(host.state, share, Timing(turn=0.01, settle=60, pause=0.1, probe=0.05))
    return share


def context(host: StandIn) -> AgentContext:
    return AgentContext(Request("verify", {}), host.state, stdin=io.BytesIO(), stdout=io.BytesIO())


def verified(host: StandIn, repair: bool = False, run: str = "r1") -> RunVerification:
    (one,) = verify(VerifyArgs(run, repair), context(host)).runs
    return one


def tap_shards(host: StandIn) -> list[Path]:
    return sorted((Path(host.capture.dir) / "r1").glob("shard-*"))


def tear(host: StandIn) -> Path:
    """A shard as a killed server leaves it: open, with half a piece behind its last journalled one."""
    host.kill()
    (shard,) = tap_shards(host)
    part = shard.with_name(shard.name + ".part")
    shard.rename(part)
    with part.open("ab") as file:
        file.write(b"half a piece")
    journal = next(shard.parent.glob("journal-*-r0.jsonl"))
    lines = journal.read_text().splitlines()
    journal.write_text("".join(line + "\n" for line in lines if json.loads(line)["kind"] != "shard") + '{"torn')
    return part


def test_a_run_that_is_whole_is_called_so(host: StandIn, share: Share) -> None:
    host.kill()
    one = verified(host)
    assert one.is_whole
    assert (one.samples, one.torn, one.open, one.faults) == (10, [], [], [])
    assert one.bytes >= sum(piece["bytes"] for line in manifest_of(share) for piece in line["pieces"])
    assert verify(VerifyArgs(), context(host)).runs == [one]


def test_a_torn_shard_is_told_and_repaired_up_to_its_last_good_line(host: StandIn, share: Share) -> None:
    part = tear(host)
    one = verified(host)
    assert (one.torn, one.faults, one.is_whole) == ([part.name], [], False)
    assert part.exists(), "nothing is changed without --repair"
    one = verified(host, repair=True)
    assert (one.repaired, one.torn, one.faults, one.is_whole) == ([part.name], [], [], True)
    assert [path.suffix for path in tap_shards(host)] == [".safetensors"]
    assert verified(host, repair=True).repaired == []


def keep_lines(journal: Path, count: int) -> None:
    journal.write_bytes(b"".join(journal.read_bytes().splitlines(keepends=True)[:count]))


@pytest.mark.parametrize("lines", [None, 0, 3])
def test_a_part_that_samples_need_is_not_cut_because_its_journal_is_lost(
    host: StandIn, share: Share, lines: int | None
) -> None:
    part = tear(host)
    before = part.read_bytes()
    (journal,) = part.parent.glob("journal-*-r0.jsonl")
    if lines is None:
        journal.unlink()
    else:
        keep_lines(journal, lines)
    one = verified(host, repair=True)
    assert (one.repaired, one.is_whole) == ([], False)
    assert any("its journal has lost pieces" in fault for fault in one.faults)
    assert part.read_bytes() == before


def run_driver(host: StandIn, share: Share) -> None:
    lock = share.claim()
    assert lock is not None
    with lock:
        work(host.state, share, Timing(turn=0.01, settle=60, pause=0.1, probe=0.05))


@pytest.mark.parametrize("lines", [None, 0, 3])
def test_the_driver_that_closes_a_share_cuts_nothing_that_samples_need(
    host: StandIn, share: Share, lines: int | None
) -> None:
    part = tear(host)
    before = part.read_bytes()
    (journal,) = part.parent.glob("journal-*-r0.jsonl")
    if lines is None:
        journal.unlink()
    else:
        keep_lines(journal, lines)
    run_driver(host, share)
    progress = share.progress()
    assert progress.state == "failed", "and it does not wait for ever"
    assert f"{part} is not closed: its journal has lost pieces" in progress.detail
    assert part.read_bytes() == before


def test_the_driver_closes_its_own_servers_shards_whatever_lies_beside_them(host: StandIn, share: Share) -> None:
    part = tear(host)
    (part.parent / "journal-other-00000077-r0.jsonl").write_bytes(b"garbage\n")
    (part.parent / "shard-other-00000077-r0-0.safetensors.part").write_bytes(b"short")
    run_driver(host, share)
    assert share.progress().state == "done"
    assert not part.exists()


@pytest.mark.parametrize("how", ["garbage", "directory", "loop"])
def test_one_broken_journal_is_one_finding_and_the_rest_is_verified(host: StandIn, share: Share, how: str) -> None:
    host.kill()
    (journal,) = tap_shards(host)[0].parent.glob("journal-*-r0.jsonl")
    if how == "garbage":
        journal.write_bytes(journal.read_bytes()[:50] + b"\n")
    else:
        journal.unlink()
        if how == "directory":
            journal.mkdir()
        else:
            journal.symlink_to(journal.name)
    for repair in (False, True):
        one = verified(host, repair)
        assert one.samples == 10
        assert one.shards == 1, "the token shard"
        about_journal, about_samples = one.faults
        assert about_journal.startswith(f"{journal.name}: cannot be read")
        assert "10 samples in it cannot be checked without its journal" in about_samples
    assert tap_shards(host)[0].exists()


def test_a_part_cut_inside_its_header_is_one_finding(host: StandIn, share: Share) -> None:
    part = tear(host)
    os.truncate(part, 100)
    for repair in (False, True):
        assert verified(host, repair).faults == [f"{part.name}: ends inside its header"]
    assert part.exists()


@pytest.mark.parametrize("how", ["deleted", "emptied", "cut", "deleted with the report"])
def test_a_lost_manifest_is_no_run_without_samples(host: StandIn, share: Share, how: str) -> None:
    text = share.manifest.read_bytes()
    if how.startswith("deleted"):
        share.manifest.unlink()
    else:
        share.manifest.write_bytes(b"".join(text.splitlines(keepends=True)[: 0 if how == "emptied" else 9]))
    if how == "deleted with the report":
        (share.root / "progress.json").unlink()
    one = verified(host)
    assert not one.is_whole
    (fault,) = one.faults
    assert fault.startswith(f"{share.manifest}: {'is gone' if how.startswith('deleted') else 'has '}")


def test_a_lost_manifest_is_made_again_from_what_the_taps_wrote(host: StandIn, share: Share) -> None:
    requests = len(host.requests())
    share.manifest.unlink()
    assert share.progress().state == "stopped", "so that extract starts a driver"
    run_driver(host, share)
    assert (len(manifest_of(share)), len(host.requests())) == (10, requests), "nothing is computed again"
    assert verified(host).is_whole


def test_a_line_that_cannot_be_read_is_one_finding(host: StandIn, share: Share) -> None:
    lines = share.manifest.read_bytes().splitlines(keepends=True)
    share.manifest.write_bytes(b"".join(lines[:4]) + b"x" * (len(lines[4]) - 1) + b"\n" + b"".join(lines[5:]))
    one = verified(host)
    assert one.samples == 9
    assert "line 5: " in one.faults[0]


def test_a_lost_token_shard_is_found(host: StandIn, share: Share) -> None:
    host.kill()
    for path in (Path(host.capture.dir) / "r1").glob("*driver*"):
        path.unlink()
    one = verified(host)
    assert not one.is_whole
    assert any(":ids so" in fault for fault in one.faults)


def test_looking_changes_nothing_and_waits_for_nothing(host: StandIn, share: Share, tmp_path: Path) -> None:
    """Torn journals stay torn, links lead nowhere, pipes are not read."""
    part = tear(host)
    (journal,) = part.parent.glob("journal-*-r0.jsonl")
    foreign = tmp_path / "foreign"
    foreign.write_text("not ours, and without a newline")
    (part.parent / "journal-main-00000077-r0.jsonl").symlink_to(foreign)
    os.mkfifo(part.parent / "journal-main-00000078-r0.jsonl")
    before = journal.read_bytes()
    assert verified(host).torn == [part.name]
    assert (journal.read_bytes(), foreign.read_text()) == (before, "not ours, and without a newline")


def test_a_part_of_a_living_writer_is_left_alone(host: StandIn, share: Share) -> None:
    from fleetdump.agent.formats import Writer
    from fleetdump.agent.shardwriter import NewPiece, ShardWriter

    directory = Path(host.capture.dir) / "r1"
    with ShardWriter(directory, Writer("main", "00000009", "r0")) as writer:
        writer.add((NewPiece("fleetdump/r1/x/1:0", "fleetdump/r1/x/1", 0, 2, "00", "F32", [2, 4], [0]), bytes(32)))
        writer.sync()
        one = verified(host, repair=True)
        assert len(one.open) >= 1
        assert one.is_whole


@pytest.mark.parametrize("torn", [False, True])
def test_a_flipped_bit_is_found_in_closed_and_in_torn_shards(host: StandIn, share: Share, torn: bool) -> None:
    host.kill()
    path = tear(host) if torn else tap_shards(host)[0]
    data = bytearray(path.read_bytes())
    data[-40] ^= 1
    path.write_bytes(bytes(data))
    one = verified(host)
    assert any("CRC-32" in fault for fault in one.faults), one


def test_a_line_that_no_journal_bears_out_and_a_double_are_faults(host: StandIn, share: Share) -> None:
    lines = share.manifest.read_text().splitlines()
    other = json.loads(lines[0])
    other["pieces"][0]["crc32"] ^= 1
    share.manifest.write_text("\n".join([json.dumps(other), *lines[1:], lines[1]]) + "\n")
    faults = verified(host).faults
    assert any("no journal has" in fault for fault in faults)
    assert any("stands twice" in fault for fault in faults)


def test_a_missing_shard_is_a_fault_and_an_unknown_run_a_failure(host: StandIn, share: Share) -> None:
    host.kill()
    tap_shards(host)[0].unlink()
    assert any("is missing" in fault for fault in verified(host).faults)
    with pytest.raises(AgentFailure) as failure:
        verified(host, run="r2")
    assert "r1" in failure.value.error.why


# --------------------------------------------------------------------------- what taps say
def a_status(host: StandIn, **changes: Any) -> TapStatus:
    values: dict[str, Any] = {
        "server": "main", "launch_id": host.launch_id, "role": "r0", "pid": 1, "rows": 1, "bytes": 10,
        "bytes_per_second": 5.0, "ring_bytes": 100, "queue_bytes": 60, "slow_down": True, "waited_seconds": 0.0,
        "skips": {}, "errors": 0, "last_error": "", "failing": False, "t": time.time(),
    }  # fmt: skip
    return TapStatus(**{**values, **changes})


def put_status(host: StandIn, tap: TapStatus) -> None:
    path = host.state.root / "servers" / "main" / f"tap-{tap.role}-{tap.pid}.json"
    path.write_text(json.dumps(to_json(tap)))


def test_the_taps_of_the_last_launch_are_told_and_no_others(host: StandIn) -> None:
    host.start()
    put_status(host, a_status(host))
    put_status(host, a_status(host, pid=2, launch_id="00000000"))
    (host.state.root / "servers" / "main" / "tap-r1-3.json").write_text('{"half": ')
    assert [tap.pid for tap in taps_of(host.state, "main", host.launch_id)] == [1]
    from fleetdump.agent.hostmessages import StatusArgs

    assert [tap.queue_bytes for tap in status(StatusArgs(), context(host)).taps] == [60]


def test_only_what_a_tap_said_just_now_counts(host: StandIn) -> None:
    host.start()
    now = time.time()
    assert is_behind([a_status(host, slow_down=False), a_status(host, t=now)], now)
    assert not is_behind([a_status(host, t=now - FRESH_SECONDS - 1)], now)
    assert not is_behind([a_status(host, slow_down=False)], now)


def test_a_slow_disk_takes_tokens_out_of_flight_and_a_fast_one_puts_them_back() -> None:
    schedule = Schedule.of([Sample(f"s{n}", 10, 0) for n in range(100)], token_budget=100)
    schedule.mind_disk(behind=True)
    schedule.mind_disk(behind=True)
    taken = list(iter(lambda: schedule.take(0.0), None))
    assert len(taken) == 4  # 49 % of the budget
    for _ in range(30):
        schedule.mind_disk(behind=True)
    assert schedule.allowed == LEAST_ALLOWED
    for sample in taken:
        schedule.landed(sample)
    assert schedule.take(0.0) is not None, "one is always sent"
    assert schedule.take(0.0) is None
    for _ in range(60):
        schedule.mind_disk(behind=False)
    assert schedule.allowed == 1.0


def test_a_driver_slows_down_when_the_tap_says_so_and_ends_all_the_same(host: StandIn) -> None:
    host.set_faults(chunk=50, delay=0.3)
    host.start()
    put_status(host, a_status(host, t=time.time() + 3600))  # for the whole run
    share = host.share({f"c{n}": 10 for n in range(12)}, token_budget=60)
    lock = share.claim()
    assert lock is not None
    with lock:
        work(host.state, share, Timing(turn=0.01, settle=60, pause=0.1, probe=0.05))
    assert len(manifest_of(share)) == 12
    assert max(int(request[4]) for request in host.requests()[6:]) <= 2, "requests beside another, once it has slowed"
