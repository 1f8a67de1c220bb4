"""Sharing out, taking in and bringing home: each fault is named, and a good run is whole."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import BinaryIO

import pytest
from extraction import LAYERS, ROOT, StandIn, kill_driver, manifest_of, wait_for
from manifests import manifest_line, text_of

from fleetdump.agent.context import State
from fleetdump.agent.controlling import ControllerRecord
from fleetdump.agent.drive import start_driver, whole_lines
from fleetdump.agent.formats import RejectedLine, Row, is_share, share_id
from fleetdump.agent.hostmessages import StatusResult
from fleetdump.agent.jsonl import encode_line, write_json
from fleetdump.agent.procfs import start_time
from fleetdump.agent.runmessages import RunProgress, ShardInfo
from fleetdump.agent.share import Share
from fleetdump.agent.specs import ServerSpec
from fleetdump.dataset.intake import take_in
from fleetdump.dataset.lines import LineFault, Source, check_line
from fleetdump.dataset.rows import BrokenRow
from fleetdump.dataset.shards import verify_samples
from fleetdump.errors import ExitCode, FleetdumpError, LockedError, UsageError
from fleetdump.fleet import Host, connect
from fleetdump.inventory import CaptureConfig, HostConfig
from fleetdump.ledger import Ledger, Planned, Totals
from fleetdump.tasks.assignment import RunPlan, balance, open_run, targets_of
from fleetdump.tasks.collect import pull, run_goes_on, take_line, take_reject
from fleetdump.tasks.extract import ExtractSettings, require_run_name, submit
from fleetdump.tasks.extract import Share as SharePlan
from fleetdump.tasks.merge import PullOptions, merge, require_whole
from fleetdump.tasks.pullshards import DamagedCopy, PullReport, pull_file, verify_pieces
from fleetdump.tasks.rejected import write_rejected
from fleetdump.tasks.runlock import COLLECTOR, CONTROLLER, sole

SOURCE = Source("r1", "h1", "main")


@pytest.fixture
def ledger(tmp_path: Path) -> Iterator[Ledger]:
    with Ledger(tmp_path / "runs" / "r1" / "ledger.sqlite") as opened:
        yield opened


# --------------------------------------------------------------------------- sharing out
def rows(*names: str) -> list[Row | BrokenRow]:
    return [Row(name, input_ids=[1] * (10 + n)) for n, name in enumerate(names)]


TARGETS = [("h1", "main"), ("h2", "r0"), ("h2", "r1")]


def test_balance_is_even_and_always_the_same() -> None:
    tokens = {f"s{n}": 1 + n * 37 % 1000 for n in range(300)}
    assigned = balance(tokens, TARGETS)
    assert assigned == balance(tokens, TARGETS)
    loads = [sum(n for name, n in tokens.items() if assigned[name] == target) for target in TARGETS]
    assert max(loads) - min(loads) <= max(tokens.values())


def test_the_same_data_gives_the_same_shares_after_a_crash(ledger: Ledger) -> None:
    data = [*rows(*"abcdefg"), BrokenRow(9, "bad_json", "x")]
    first = open_run(ledger, "r1", take_in(enumerate(data, 1)), TARGETS)
    again = open_run(ledger, "r1", take_in(enumerate(data, 1)), TARGETS[:1])  # other hosts selected: the shares stay
    assert (first.resumed, again.resumed) == (False, True)
    assert {t: s.sha256 for t, s in first.shares.items()} == {t: s.sha256 for t, s in again.shares.items()}
    assert first.samples == 7
    assert ledger.totals().rejected == 1
    assert sum(len(share.lines) for share in first.of_host("h2").values()) > 0


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (rows("a", "b", "c", "d"), "1 new (first: 'd')"),
        (rows("a", "b"), "1 missing (first: 'c')"),
        ([*rows("a", "b"), Row("c", text="other")], "1 changed (first: 'c')"),
    ],
)
def test_other_data_under_the_same_name_is_refused(ledger: Ledger, data: list[Row | BrokenRow], why: str) -> None:
    open_run(ledger, "r1", take_in(enumerate(rows("a", "b", "c"), 1)), TARGETS)
    with pytest.raises(UsageError) as caught:
        open_run(ledger, "r1", take_in(enumerate(data, 1)), TARGETS)
    assert why in caught.value.why


def test_a_ledger_that_collect_rebuilt_refuses_other_data(ledger: Ledger) -> None:
    line = manifest_line("z")
    ledger.deliver("h1", line, text_of(line))
    with pytest.raises(UsageError, match="not what run r1 was begun with") as caught:
        open_run(ledger, "r1", take_in(enumerate(rows("a", "b"), 1)), TARGETS)
    assert caught.value.why == "rows: 1 missing (first: 'z')"
    assert not ledger.is_planned


@pytest.mark.parametrize("other", ["texts", "servers"])
def test_a_ledger_that_collect_rebuilt_refuses_other_rows_under_the_same_ids(
    ledger: Ledger, tmp_path: Path, other: str
) -> None:
    with Ledger(tmp_path / "before" / "ledger.sqlite") as before:
        shares = open_run(before, "r1", take_in(enumerate(rows("a", "b", "c"), 1)), TARGETS).shares
    for (host, server), share in shares.items():
        ledger.meet_share(host, server, share_id(share.sha256, 1796000000.25))
    texts = [Row(name, text="other") for name in "abc"] if other == "texts" else rows("a", "b", "c")
    with pytest.raises(UsageError, match="not what run r1 was begun with"):
        open_run(ledger, "r1", take_in(enumerate(texts, 1)), TARGETS if other == "texts" else TARGETS[:1])
    assert not ledger.is_planned
    assert not open_run(ledger, "r1", take_in(enumerate(rows("a", "b", "c"), 1)), TARGETS).resumed


HOSTS = [("h1", "main"), ("h2", "main"), ("h3", "main")]
ROWS = rows(*"abcdefgh")


def shares_of(folder: Path, targets: list[tuple[str, str]]) -> dict[tuple[str, str], str]:
    """What the hosts have of a run that was begun from elsewhere with these servers."""
    with Ledger(folder / "elsewhere" / "ledger.sqlite") as elsewhere:
        plan = open_run(elsewhere, "r1", take_in(enumerate(ROWS, 1)), targets)
    return {target: share_id(share.sha256, 1796000000.25) for target, share in plan.shares.items()}


@pytest.mark.parametrize("begun_with", [HOSTS, HOSTS[:2], HOSTS[1:], HOSTS[:1]])
def test_a_run_of_another_folder_is_taken_over_with_the_shares_that_its_hosts_have(
    ledger: Ledger, tmp_path: Path, begun_with: list[tuple[str, str]]
) -> None:
    found = {**shares_of(tmp_path, begun_with), ("h3", "main.1"): "taken-over"}
    plan = open_run(ledger, "r1", take_in(enumerate(ROWS, 1)), HOSTS, found)
    assert sorted(plan.shares) == begun_with
    assert all(is_share(found[target], share.sha256) for target, share in plan.shares.items())
    assert set(ledger.homes().values()) == set(begun_with)


@pytest.mark.parametrize(
    ("chosen", "differs", "why"),
    [
        (
            HOSTS[:2],
            "h2/main, h3/main",
            "h2/main, h3/main have a share of it that was not made of this data for h1/main",
        ),
        (HOSTS[1:2], "h2/main, h3/main", "was not made of this data for h2/main"),
        ([HOSTS[2], HOSTS[1]], "h2/main, h3/main", "the order of the hosts in the inventory"),
    ],
)
def test_a_run_of_another_folder_and_other_hosts_is_refused_before_anything_is_recorded(
    ledger: Ledger, tmp_path: Path, chosen: list[tuple[str, str]], differs: str, why: str
) -> None:
    found = shares_of(tmp_path, HOSTS[1:])
    with pytest.raises(UsageError, match="not what run r1 was begun with") as caught:
        open_run(ledger, "r1", take_in(enumerate(ROWS, 1)), chosen, found)
    assert caught.value.where == differs
    assert why in caught.value.why
    for words in ("--host h[2-3]", "in the folder it was begun in", "fleetdump collect --run r1"):
        assert words in caught.value.next_step
    assert not ledger.is_planned
    assert (ledger.ids(), ledger.shares()) == (set(), [])


def test_a_plan_that_is_forgotten_leaves_what_came_back(ledger: Ledger) -> None:
    data = take_in(enumerate(ROWS, 1))
    ledger.deliver("h1", manifest_line("a"), text_of(manifest_line("a")))
    before = ledger.ids()
    open_run(ledger, "r1", data, HOSTS)
    ledger.meet_share("h3", "main.1", "known")
    ledger.move(["b"], "h3", "main.1", "sha")
    ledger.forget_plan()
    assert not ledger.is_planned
    assert ledger.ids() == before == {"a"}
    assert [(share.server, share.sha256) for share in ledger.shares()] == [("main.1", "")]
    assert not open_run(ledger, "r1", data, HOSTS).resumed


def test_what_cannot_begin() -> None:
    with pytest.raises(UsageError, match="run"):
        require_run_name("../x")
    with pytest.raises(UsageError, match="usable") as caught:
        take_in([(3, BrokenRow(3, "bad_json", "x"))])
    assert "line 3" in caught.value.why
    with pytest.raises(UsageError, match="no server"):
        targets_of([])
    with pytest.raises(UsageError, match="capture"):
        targets_of([HostConfig("h1", "h1")])


# --------------------------------------------------------------------------- lines
GOOD = manifest_line("a")
PIECE = GOOD.pieces[0]


def changed(old: str, new: str) -> str:
    """The good line's text with one thing changed that no record could hold."""
    text = text_of(GOOD)
    assert text.count(old) == 1
    return text.replace(old, new)


@pytest.mark.parametrize(
    ("text", "what"),
    [
        (text_of(manifest_line("a"))[:-30], "cannot be read"),
        ("[1]", "version 1"),
        (text_of(manifest_line("a", v=2)), "version 1"),
        (text_of(manifest_line("a", run="r2")), "of run 'r2'"),
        (text_of(manifest_line("a", server="other")), "server 'other'"),
        (text_of(manifest_line("a", tokens=6)), "rows 5 to 6 of 6 are missing"),
        (text_of(manifest_line("a", supervised=6)), "6 of 5 tokens"),
        (text_of(manifest_line("a", pieces=manifest_line("a", shards=("x", "y")).pieces[1:])), "rows 5 to 10 of 5"),
        (text_of(manifest_line("z")), "not of this data set"),
        (text_of(manifest_line("a", shards=("../../.ssh/authorized_keys",))), "is no name of a file"),
        (text_of(manifest_line("a", norm="norm-/../../x-0000000a.safetensors")), "is no name of a file"),
        (text_of(manifest_line("a", pieces=[], tokens=0, supervised=0)), "it has no token"),
        (text_of(manifest_line("a", pieces=[])), "rows 0 to 5 of 5 are missing"),
        (text_of(manifest_line("a", pieces=[replace(PIECE, offset=-1)])), "has offset -1"),
        (text_of(manifest_line("a", pieces=[replace(PIECE, bytes=-80)])), "has -80 bytes, expected 80"),
        (text_of(manifest_line("a", pieces=[replace(PIECE, bytes=1 << 50)])), "expected 80"),
        (text_of(manifest_line("a", pieces=[replace(PIECE, slots=[0])])), "slots [1] of 2 are missing"),
        (text_of(manifest_line("a", pieces=[replace(PIECE, slots=[0, 1, 2])])), "slots [0, 1, 2] of 2"),
        (text_of(manifest_line("a", pieces=[PIECE, PIECE])), "after 5"),
        (text_of(manifest_line("a", hidden=0)), "hidden 0"),
        (text_of(manifest_line("a", dtype="X9")), "unknown dtype"),
        (text_of(manifest_line("a", shards=("",))), "is no name of a file"),
        (text_of(manifest_line("a", shards=("s\0",))), "is no name of a file"),
        (text_of(manifest_line("a", shards=("s\n",))), "is no name of a file"),
        (text_of(manifest_line("a", shards=("ü" * 124,))), "is no name of a file"),
        (text_of(manifest_line("a", norm="s0")), "is no norm file"),
        (text_of(manifest_line("a", layers={"input": [1]})), "layers"),
        (text_of(manifest_line("a", layers={"input": [1], "output": [0, 1]})), "layers"),
        (text_of(manifest_line("a", layers={"input": [1], "output": [0], "more": []})), "layers"),
        (text_of(manifest_line("a", t=float("nan"))), "NaN is no number"),
        (text_of(manifest_line("a", t=float("-inf"))), "-Infinity is no number"),
        (changed('"t":1.0', '"t":1e999'), "too large a number"),
        (changed('"attempt":1', f'"attempt":{2**53 + 1}'), "too large a number"),
        (changed('"attempt":1', f'"attempt":{2**64}'), "too large a number"),
        (changed('"attempt":1', f'"attempt":-{"9" * 5000}'), "too large a number"),
        (changed('"host":"m"', '"host":"\\ud800"'), "not Unicode"),
        (changed('"id":"a"', '"id":"\\udc00"'), "not Unicode"),
        (changed('"host":"m"', '"host":"\udcff"'), "not Unicode"),
        (changed('"host":"m"', f'"host":{"[" * 100_000}{"]" * 100_000}'), "cannot be read"),
        (changed('"host":"m"', '"host":' + '{"a":' * 100_000 + "1" + "}" * 100_001), "cannot be read"),
        ("null", "version 1"),
        ("7", "version 1"),
        ('"text"', "version 1"),
        ("", "cannot be read"),
    ],
)
def test_a_bad_line_is_named_and_not_taken(ledger: Ledger, text: str, what: str) -> None:
    ledger.plan([Planned("a", "d", "h1", "main")], [("h1", "main", "s")])
    faults = take_line(ledger, SOURCE, text)
    assert len(faults) == 1
    assert what in faults[0]
    assert faults[0].startswith("h1/main: manifest: ")
    assert faults[0].isprintable(), "it goes to a terminal"
    assert len(faults[0]) < 500
    assert ledger.totals().lost == 1


def test_bad_rejects_are_named(ledger: Ledger) -> None:
    assert "cannot be read" in take_reject(ledger, SOURCE, "{")[0]
    ledger.plan([Planned("a", "d", "h1", "main")], [("h1", "main", "s")])
    stranger = encode_line(RejectedLine("z", "r1", "main", "empty", "", 0, 1.0)).decode()
    assert "not of this data set" in take_reject(ledger, SOURCE, stranger)[0]
    assert "not Unicode" in take_reject(ledger, SOURCE, stranger.replace('"empty"', '"\\ud800"'))[0]
    assert ledger.totals() == Totals(expected=1, delivered=0, rejected=0, duplicated=0)
    with pytest.raises(LineFault):
        check_line("null", SOURCE)


def test_bytes_that_are_no_text_spoil_their_line_alone(tmp_path: Path) -> None:
    path = tmp_path / "manifest.jsonl"
    good = text_of(GOOD).encode()
    path.write_bytes(good + b"\n" + good.replace(b'"host":"m"', b'"host":"\\\xff"') + b"\n\xff\n" + good + b"\ntorn")
    lines = [text for text, _ in whole_lines(path, 0)]
    assert [text == good.decode() for text in lines] == [True, False, False, True]
    for text in lines[1:3]:
        with pytest.raises(LineFault, match="Unicode"):
            check_line(text, SOURCE)


@pytest.mark.parametrize(
    "text", ["", "[1]", "{", '{"v":1,"id":"b"}', '{"v":1,"id":"b","tokens":1,"x":"\\ud800"}', "[" * 100_000]
)
def test_merge_names_what_a_ledger_should_not_hold(ledger: Ledger, tmp_path: Path, text: str) -> None:
    ledger.plan([Planned(name, "d", "h1", "main") for name in "abc"], [("h1", "main", "s")])
    for name in "abc":
        line = manifest_line(name)
        ledger.deliver("h1", line, text if name == "b" else text_of(line))
    collected = merge(ledger, PullOptions("r1"), tmp_path / "runs")
    assert (collected.samples, collected.lost) == (2, 1)
    assert collected.missing[0].startswith("b (its line in the ledger: ")
    assert [json.loads(line)["id"] for line in Path(collected.manifest).read_text().splitlines()] == ["a", "c"]
    with pytest.raises(FleetdumpError, match="1 of 3 samples"):
        require_whole(collected, [])


# --------------------------------------------------------------------------- one collect at a time
HOLD = "import sys,pathlib;from fleetdump.tasks.runlock import COLLECTOR, sole\n"
HOLD += "with sole(pathlib.Path(sys.argv[1]), COLLECTOR): print('held', flush=True); sys.stdin.read()"


def test_a_second_collect_is_refused_until_the_first_is_dead(tmp_path: Path) -> None:
    run = tmp_path / "runs" / "r1"
    with subprocess.Popen(
        [sys.executable, "-c", HOLD, str(run)], cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as first:
        assert first.stdout is not None
        assert first.stdout.readline() == b"held\n"
        with pytest.raises(LockedError, match=f"by process {first.pid} ") as caught, sole(run, COLLECTOR):
            pass
        assert caught.value.exit_code == ExitCode.LOCKED
        with (
            sole(run.with_name("r2"), COLLECTOR),
            sole(run, CONTROLLER),
            Ledger(run / "ledger.sqlite") as beside,
        ):  # other runs, and extract
            open_run(beside, "r1", take_in(enumerate(rows("a"), 1)), TARGETS)
        first.kill()
    with sole(run, COLLECTOR):
        assert (run / "lock").read_text() == f"{os.getpid()}\n"


# --------------------------------------------------------------------------- copies
def test_a_copy_goes_on_where_it_stopped(tmp_path: Path) -> None:
    data = os.urandom(5000)
    shard = info(data)
    (tmp_path / "s.safetensors.partial").write_bytes(data[:2000])
    asked = []

    def fetch(name: str, offset: int, out: BinaryIO) -> int:
        asked.append(offset)
        return out.write(data[offset:])

    assert pull_file(fetch, shard, tmp_path) == 3000
    assert asked == [2000]
    assert (tmp_path / "s.safetensors").read_bytes() == data


@pytest.mark.parametrize("left", [b"wrong" * 100, b"x" * 9000])
def test_a_wrong_partial_copy_is_made_anew(tmp_path: Path, left: bytes) -> None:
    data = os.urandom(5000)
    (tmp_path / "s.safetensors.partial").write_bytes(left)
    pull_file(lambda _, offset, out: out.write(data[offset:]), info(data), tmp_path)
    assert (tmp_path / "s.safetensors").read_bytes() == data


def test_a_copy_that_never_comes_whole_is_not_kept(tmp_path: Path) -> None:
    data = os.urandom(5000)
    with pytest.raises(DamagedCopy, match="SHA-256"):
        pull_file(lambda _, offset, out: out.write(bytes(5000 - offset)), info(data), tmp_path)
    assert list(tmp_path.iterdir()) == []


def info(data: bytes) -> ShardInfo:
    import hashlib

    return ShardInfo("s.safetensors", "shard", len(data), hashlib.sha256(data).hexdigest())


# --------------------------------------------------------------------------- the whole way, over a local agent
SAMPLES = {f"c{n:02}": 3 + 11 * n for n in range(12)}


class Run:
    """A finished run on a host that is this machine, and its way in."""

    def __init__(self, tmp: Path):
        self.tmp = tmp
        self.standin = StandIn(tmp)
        self.standin.state = State.of(str(tmp / "state"))
        self.standin.set_faults(chunk=50)
        self.standin.start()
        self.share: Share
        self._work()
        self.options = PullOptions("r1", tmp / "data")
        self.folder = tmp / "data" / "r1" / "h1"

    def connect(self) -> Host:
        server = ServerSpec("main", sys.executable, str(self.tmp), self.standin.port)
        capture = CaptureConfig(layers=tuple(LAYERS), dir=self.standin.capture.dir)
        return connect(
            HostConfig(
                name="h1",
                address="localhost",
                connection="local",
                agent_python=sys.executable,
                state_dir=str(self.tmp / "state"),
                servers=(server,),
                capture=capture,
            )
        )

    def clean(self) -> None:
        """As ``clean --data`` leaves the host."""
        kill_driver(self.share)
        shutil.rmtree(self.share.root.parent)
        shutil.rmtree(self.standin.capture.dir)

    def again(self) -> None:
        """The same run once more, with a server launched anew."""
        self.standin.kill()
        self.standin.start()
        self._work()

    def _work(self) -> None:
        self.share = self.standin.share({**SAMPLES, "nothing": 0})
        start_driver(self.standin.state, self.share)
        wait_for(lambda: self.share.progress().state == "done")
        norm = Path(self.standin.capture.dir) / "r1" / f"norm-main-{self.standin.launch_id}.safetensors"
        norm.write_bytes(b"norm")

    def close(self) -> None:
        self.standin.kill()
        kill_driver(self.share)


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    finished = Run(tmp_path)
    yield finished
    finished.close()


def plan(ledger: Ledger, *more: str) -> None:
    names = [*sorted(SAMPLES, reverse=True), "nothing", *more]
    ledger.plan([Planned(name, "d", "h1", "main") for name in names], [("h1", "main", "s")])


def test_collect_brings_everything_home(run: Run, ledger: Ledger, tmp_path: Path) -> None:
    plan(ledger)
    with run.connect() as host:
        report = pull(host, run.options, ledger)
        assert report.faults == []
        assert (report.lines, report.rejected, report.unfinished) == (12, 1, [])
        assert report.bytes == sum(path.stat().st_size for path in run.folder.iterdir())
        again = pull(host, run.options, ledger)
        assert (again.lines, again.shards, again.bytes) == (0, 0, 0)
    collected = merge(ledger, run.options, tmp_path / "runs")
    assert (collected.samples, collected.lost, collected.duplicated, collected.rejected) == (12, 0, 0, 1)
    assert collected.tokens == sum(SAMPLES.values())
    lines = [json.loads(line) for line in Path(collected.manifest).read_text().splitlines()]
    assert [line["id"] for line in lines] == sorted(SAMPLES, reverse=True), "in the data set's order"
    assert {line["path"] for line in lines} == {"h1"}
    assert ledger.collected("h1", "main") == set(SAMPLES)
    assert verify_samples(run.folder, [check_line(json.dumps(line), SOURCE) for line in lines]) == []
    require_whole(collected, [report])


def test_a_broken_journal_is_one_fault_and_every_sample_comes_home(run: Run, ledger: Ledger) -> None:
    plan(ledger)
    (journal,) = (Path(run.standin.capture.dir) / "r1").glob("journal-*-r0.jsonl")
    with journal.open("ab") as file:
        file.write(b"garbage\n")
    with run.connect() as host:
        report = pull(host, run.options, ledger)
    (fault,) = report.faults
    assert fault.startswith(f"h1: {journal.name}: ")
    assert ledger.collected("h1", "main") == set(SAMPLES), "each piece is checked against its manifest line"


def test_a_deleted_ledger_is_rebuilt_by_collecting(run: Run, ledger: Ledger, tmp_path: Path) -> None:
    with run.connect() as host:
        pull(host, PullOptions("r1"), ledger)
    collected = merge(ledger, PullOptions("r1"), tmp_path / "runs")
    assert (collected.samples, collected.lost) == (12, 0)


def test_what_is_lost_is_named(run: Run, ledger: Ledger, tmp_path: Path) -> None:
    plan(ledger, "gone")
    with run.connect() as host:
        report = pull(host, PullOptions("r1"), ledger)
    collected = merge(ledger, PullOptions("r1"), tmp_path / "runs")
    assert collected.missing == ["gone (given to h1/main)"]
    with pytest.raises(FleetdumpError, match="1 of 14 samples are not there, first gone"):
        require_whole(collected, [report])


def test_what_a_run_that_goes_on_has_not_done_is_not_lost(run: Run, ledger: Ledger, tmp_path: Path) -> None:
    plan(ledger, "gone")
    with subprocess.Popen(["sleep", "600"]) as controller, run.connect() as host:
        try:
            record = ControllerRecord(controller.pid, start_time(controller.pid) or 0, 1.0, "me@laptop")
            write_json(run.standin.state.directory("controllers", "r1") / "controller.json", record)
            report = pull(host, PullOptions("r1"), ledger)
        finally:
            controller.kill()
        controller.wait()
        after = pull(host, PullOptions("r1"), ledger)
    assert (report.goes_on, after.goes_on) == (True, False)
    collected = merge(ledger, PullOptions("r1"), tmp_path / "runs", goes_on=report.goes_on)
    assert (collected.lost, collected.not_done, collected.missing) == (0, 1, ["gone (given to h1/main)"])
    with pytest.raises(
        FleetdumpError, match=r"not complete yet: it goes on .*1 of 14 samples are not done yet"
    ) as caught:
        require_whole(collected, [report])
    assert "fleetdump attach --run r1" in caught.value.next_step
    assert merge(ledger, PullOptions("r1"), tmp_path / "runs", goes_on=after.goes_on).lost == 1


@pytest.mark.parametrize(
    ("shares", "goes_on"),
    [
        ([RunProgress("r1", "main", "paused", driver_alive=True)], True),
        ([RunProgress("r1", "main", "stopped")], False),
        ([RunProgress("r1", "main", "done", driver_alive=True)], False),
        ([RunProgress("r2", "main", "running", driver_alive=True)], False),
    ],
)
def test_a_run_goes_on_while_a_driver_of_it_lives(shares: list[RunProgress], goes_on: bool) -> None:
    assert run_goes_on(StatusResult("h1", [], shares), "r1") is goes_on


def spoil(path: Path) -> None:
    """A line of each kind that cannot be taken in, between the good ones."""
    good = path.read_bytes().splitlines(keepends=True)
    bad = [
        b"\xff\xfe\n",
        b"[]\n",
        b'{"v":1,"x":"\\ud800"}\n',
        b"[" * 100_000 + b"\n",
        b'{"v":1,"attempt":99999999999999999999}\n',
    ]
    path.write_bytes(b"".join(line + extra for line, extra in zip(good, [*bad, *[b""] * len(good)], strict=False)))


def test_bad_lines_cost_nothing_but_themselves(run: Run, ledger: Ledger, tmp_path: Path) -> None:
    plan(ledger)
    spoil(run.share.manifest)
    with run.connect() as host:
        report = pull(host, run.options, ledger)
        assert len(report.faults) == 5
        assert report.lines == 12, "only what was taken in is counted"
        assert pull(host, run.options, ledger).lines == 0
    assert merge(ledger, run.options, tmp_path / "runs").samples == 12


# --------------------------------------------------------------------------- a run that its host no longer has
@pytest.mark.parametrize("brought_home", [True, False])
def test_a_run_begun_anew_on_a_cleaned_host_is_read_from_its_start(
    run: Run, ledger: Ledger, tmp_path: Path, brought_home: bool
) -> None:
    plan(ledger)
    with run.connect() as host:
        pull(host, run.options if brought_home else PullOptions("r1"), ledger)
        before = [d.line for d in ledger.delivered()]
        run.clean()
        run.again()
        report = pull(host, run.options, ledger)
        assert report.faults == []
        assert report.lines == 12
        assert pull(host, run.options, ledger).lines == 0
    collected = merge(ledger, run.options, tmp_path / "runs")
    assert (collected.samples, collected.lost, collected.rejected) == (12, 0, 1)
    assert collected.duplicated == (12 if brought_home else 0)
    assert ([d.line for d in ledger.delivered()] == before) == brought_home
    assert ledger.collected("h1", "main") == set(SAMPLES)
    require_whole(collected, [report])


def test_a_manifest_that_became_shorter_is_read_anew(run: Run, ledger: Ledger) -> None:
    plan(ledger)
    with run.connect() as host:
        pull(host, run.options, ledger)
        run.share.manifest.write_bytes(b"".join(run.share.manifest.read_bytes().splitlines(keepends=True)[:5]))
        report = pull(host, run.options, ledger)
    assert (report.lines, report.faults) == (5, [])
    assert ledger.totals().delivered == 12


def plan_again(run: str = "r1") -> RunPlan:
    return RunPlan(run, {("h1", "main"): SharePlan(["{}"] * 13)}, 13, [], resumed=True)


def test_extract_sends_nothing_that_was_collected_and_cleaned_away(run: Run, ledger: Ledger) -> None:
    plan(ledger)
    ledger.submitted("h1", "main")
    with run.connect() as host:
        pull(host, run.options, ledger)
        run.clean()
        (state,) = submit(host, plan_again(), ExtractSettings(), ledger)
        assert (state.state, state.samples, state.done, state.rejected) == ("done", 13, 12, 1)
        assert "already collected" in state.detail
        assert not run.share.root.exists()
        assert pull(host, run.options, ledger).faults == []  # and collect goes on saying that all is well


@pytest.mark.parametrize("options", [True, False])
def test_extract_refuses_to_begin_again_what_is_not_all_here(run: Run, ledger: Ledger, options: bool) -> None:
    plan(ledger, "gone")
    ledger.submitted("h1", "main")
    with run.connect() as host:
        pull(host, run.options if options else PullOptions("r1"), ledger)
        run.clean()
        with pytest.raises(UsageError, match=f"{1 if options else 13} of 14 samples") as caught:
            submit(host, plan_again(), ExtractSettings(), ledger)
    assert "another --run name" in caught.value.next_step
    assert not run.share.root.exists()


def damage(run: Run, how: str) -> str:
    """Damage one shard on the host; returns its name."""
    name = str(manifest_of(run.share)[0]["pieces"][0]["shard"])
    path = Path(run.standin.capture.dir) / "r1" / name
    data = bytearray(path.read_bytes())
    if how == "flip":
        data[-3] ^= 1
        path.write_bytes(data)
    elif how == "cut":
        path.write_bytes(data[:-10])
    else:
        path.unlink()
    return name


@pytest.mark.parametrize(("how", "what"), [("flip", "SHA-256"), ("cut", "SHA-256"), ("unlink", "is missing there")])
def test_a_damaged_shard_is_named_and_not_counted_as_collected(run: Run, ledger: Ledger, how: str, what: str) -> None:
    plan(ledger)
    name = damage(run, how)
    with run.connect() as host:
        report = pull(host, run.options, ledger)
    assert any(name in fault and what in fault for fault in report.faults), report.faults
    # A busy machine closes shards early: samples in another shard than the damaged one do count.
    assert len(ledger.collected("h1", "main")) < report.lines


def test_a_flipped_bit_here_is_seen_by_the_pieces(run: Run, ledger: Ledger) -> None:
    plan(ledger)
    with run.connect() as host:
        pull(host, run.options, ledger)
    lines = [check_line(json.dumps(line), SOURCE) for line in manifest_of(run.share)]
    shard = lines[0].pieces[0].shard
    assert verify_pieces(run.folder, shard, lines) == []
    data = bytearray((run.folder / shard).read_bytes())
    data[-3] ^= 1
    (run.folder / shard).write_bytes(data)
    assert "another CRC-32" in verify_pieces(run.folder, shard, lines)[0]
    (run.folder / shard).write_bytes(data[:-10])
    assert verify_pieces(run.folder, shard, lines) != []


def test_an_id_that_turns_or_breaks_lines_is_escaped_in_every_file(ledger: Ledger, tmp_path: Path) -> None:
    taken, left_out = "a\u202eb\u2028c", "d\u2066e\u2029f"
    line = manifest_line(taken)
    ledger.deliver("h1", line, text_of(line))
    ledger.reject("h1", RejectedLine(left_out, "r1", "main", "too_long", "", 1, 1.0))
    merged = merge(ledger, PullOptions("r1"), tmp_path / "runs")
    for path, name in ((Path(merged.manifest), taken), (write_rejected(ledger, tmp_path), left_out)):
        (text,) = path.read_text(encoding="utf-8").splitlines()
        assert text.isascii()
        assert json.loads(text)["id"] == name


def test_servers_with_other_settings_are_named(ledger: Ledger, tmp_path: Path) -> None:
    for name, host, template in (("a", "h1", "t"), ("b", "h2", "u")):
        line = manifest_line(name, template_sha256=template)
        ledger.deliver(host, line, text_of(line))
    collected = merge(ledger, PullOptions("r1"), tmp_path / "runs")
    assert collected.mismatches == ['template_sha256 differs: "t" on h1/main; "u" on h2/main']
    with pytest.raises(FleetdumpError, match="template_sha256"):
        require_whole(collected, [PullReport("h1")])
    shutil.rmtree(tmp_path / "runs")
