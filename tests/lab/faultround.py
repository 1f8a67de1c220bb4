"""One extraction with a seeded list of faults, and an account of what became of each sample.

Every fault is done to real processes, disks and links of lab hosts while ``fleetdump extract`` works; an operator gives
the same command again whenever it ends before the run does, as a person or a cron job would.
"""

from __future__ import annotations

import contextlib
import json
import random
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from capturefleet import CaptureHost, write_data
from fleetengine import Fleet

from fleetdump.dataset.shards import ShardReader
from fleetdump.errors import ExitCode

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "unit"))
from standin_tap import states_of

RUN = "faults"
HANG_SECONDS = 420.0
"""A command of ours that has not ended so long after the last fault hangs. Generous: the machine may be busy."""
COLLECT_SECONDS = 300.0
SLOW = 10.0
DELAY = 0.4
TOKEN_BUDGET = 400
MINUTES = (60.0, 150.0)
"""Seconds that a link of a long round is cut: longer than any of our connections lives without an answer."""
PATIENCE = 10.0
"""Seconds without a host, in a long round, before others compute what it has not done. A cut is noticed after 30 s:
both are over well before ``MINUTES``."""


@dataclass
class Figures:
    """What a round says for the record. ``lost``: samples that are neither merged nor rejected; ``duplicated``: ids
    that stand more than once in the merged manifest; ``corrupt``: pieces that are not what the server computed;
    ``copies``: samples that two hosts computed, of which one counts."""

    faults: int = 0
    lost: int = 0
    duplicated: int = 0
    corrupt: int = 0
    tool_hangs: int = 0
    samples: int = 0
    rejected: int = 0
    copies: int = 0
    seconds: float = 0.0
    kinds: dict[str, int] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


class Operator(threading.Thread):
    """Gives ``fleetdump extract`` until it ends well. ``paused`` is held while somebody else works with the run's
    files."""

    def __init__(self, fleet: Fleet, *options: str):
        super().__init__(daemon=True)
        self.fleet = fleet
        self.options = options
        self.paused = threading.Lock()
        self.process: subprocess.Popen[str] | None = None
        self.calls = 0
        self.last = ""
        self.finished = False
        self.over = False

    def run(self) -> None:
        while not (self.finished or self.over):
            with self.paused:
                self.process = self.fleet.start(
                    "extract",
                    "--data",
                    "data.jsonl",
                    "--run",
                    RUN,
                    "--token-budget",
                    str(TOKEN_BUDGET),
                    "--allow-full-disk",
                    *self.options,
                )
                self.calls += 1
            out, err = self.process.communicate()
            self.last = f"exit code {self.process.returncode}\n{out}{err}"
            self.finished = self.process.returncode == ExitCode.OK
            self.over = self.over or self.process.returncode == ExitCode.USAGE
            if not self.finished:
                time.sleep(0.5)

    def kill(self) -> None:
        """SIGKILL to the controller."""
        if self.process is not None:
            self.process.kill()


@dataclass
class Round:
    """The hosts of a round and what may be done to them."""

    fleet: Fleet
    hosts: list[CaptureHost]
    operator: Operator
    source: random.Random
    samples: int

    def _host(self) -> CaptureHost:
        return self.source.choice(self.hosts)

    def _nap(self, least: float, most: float) -> None:
        time.sleep(self.source.uniform(least, most))

    def kill_server(self) -> None:
        host = self._host()
        host.kill_server()
        self._nap(0.0, 1.5)
        host.start_server()

    def kill_driver(self) -> None:
        self._host().signal("fleetdump.agent.driver")

    def kill_agent(self) -> None:
        self._host().signal("sys.stdin.buffer")

    def kill_controller(self) -> None:
        self.operator.kill()

    def cut_link(self) -> None:
        host = self._host()
        host.lab.cut_link()
        self._nap(1.0, 6.0)
        host.lab.restore_link()

    def fill_disk(self) -> None:
        host = self._host()
        host.lab.fill_disk()
        self._nap(0.5, 3.0)
        host.lab.free_disk()

    def slow_host(self) -> None:
        host = self._host()
        host.set(delay=host.settings["delay"] * SLOW)
        self._nap(1.0, 4.0)
        host.set(delay=host.settings["delay"] / SLOW)

    def clock_jump(self) -> None:
        host = self._host()
        if host.progress(RUN):
            host.skew_clock(RUN, self.source.choice([-1, 1]) * 10 ** self.source.uniform(1, 8))

    def delete_ledger(self) -> None:
        with self.operator.paused:
            self.operator.kill()
            if self.operator.process is not None:
                self.operator.process.wait()
            for path in (self.fleet.folder / "runs" / RUN).glob("ledger.sqlite*"):
                path.unlink()
            self.fleet.run("collect", "--run", RUN, timeout=COLLECT_SECONDS)

    def freeze_controller(self) -> None:
        """The laptop sleeps: nothing of the controller runs, nobody reads what agents send."""
        process = self.operator.process
        if process is not None and process.poll() is None:
            process.send_signal(signal.SIGSTOP)
            self._nap(1.0, 5.0)
            process.send_signal(signal.SIGCONT)

    def cut_link_for_minutes(self) -> None:
        host = self._host()
        host.lab.cut_link()
        end = time.monotonic() + self.source.uniform(*MINUTES)
        while time.monotonic() < end:
            _keep_busy(self.hosts, self.samples, crawl=True)
            time.sleep(2.0)
        host.lab.restore_link()

    def return_late(self) -> None:
        """The others end their own work and are given what a host that is away has not told; it works on and comes
        back with lines of its own."""
        host = self._host()
        host.lab.cut_link()
        for other in self.hosts:
            other.set(delay=DELAY if other is host else 0.0)
        self._nap(*MINUTES)
        host.lab.restore_link()

    @property
    def kinds(self) -> dict[str, Callable[[], None]]:
        return {
            "server killed": self.kill_server,
            "driver killed": self.kill_driver,
            "agent killed": self.kill_agent,
            "controller killed": self.kill_controller,
            "link cut": self.cut_link,
            "disk full": self.fill_disk,
            "slow host": self.slow_host,
            "clock jump": self.clock_jump,
            "ledger deleted": self.delete_ledger,
            "controller frozen": self.freeze_controller,
        }

    @property
    def long_kinds(self) -> dict[str, Callable[[], None]]:
        """Each once in a long round: one on the way, and the last fault of all."""
        return {"link cut for minutes": self.cut_link_for_minutes, "host returns late": self.return_late}

    def draw(self, faults: int, is_long: bool) -> list[str]:
        """So many faults by kind, in a random order: each kind as often as any other, but for the long ones."""
        long_kinds = [*self.long_kinds] if is_long else []
        few = faults - len(long_kinds)
        kinds = [*self.kinds] * (few // len(self.kinds) + 1)
        self.source.shuffle(kinds)
        drawn = kinds[:few]
        if long_kinds:
            drawn.insert(self.source.randrange(few), long_kinds[0])
            drawn.append(long_kinds[1])
        return drawn


def play(
    fleet: Fleet, hosts: list[CaptureHost], seed: int, faults: int, samples: int, *, is_long: bool = False
) -> Figures:
    """Extract ``samples`` samples while ``faults`` faults happen, collect, and count. ``is_long``: with those that take
    minutes."""
    began = time.monotonic()
    source = random.Random(seed)
    tokens = {f"s{n:05}": source.randrange(2, 200) for n in range(samples)}
    write_data(fleet.folder / "data.jsonl", tokens)
    for host in hosts:
        host.set(delay=DELAY)
    operator = Operator(fleet, *(["--patience", str(PATIENCE)] if is_long else []))
    stage = Round(fleet, hosts, operator, source, samples)
    operator.start()
    figures = Figures(samples=samples)
    kinds = stage.draw(faults, is_long)
    happen = {**stage.kinds, **stage.long_kinds}
    for kind in kinds:
        _keep_busy(hosts, samples)
        time.sleep(source.uniform(0.1, 1.0))
        try:
            happen[kind]()
        except subprocess.TimeoutExpired:
            figures.tool_hangs += 1
            figures.notes.append(f"collect after a deleted ledger did not end in {COLLECT_SECONDS:.0f} s")
        figures.faults += 1
    figures.kinds = dict(Counter(kinds))
    for host in hosts:
        host.set(delay=0.0)
    operator.join(HANG_SECONDS)
    if not operator.finished:
        figures.tool_hangs += 1
        states = {host.name: host.progress(RUN) for host in hosts}
        figures.notes.append(f"the run did not end; last call: {operator.last[-2000:]}; hosts: {states}")
    operator.over = True
    operator.kill()
    operator.join(30)
    _account(fleet, tokens, figures)
    figures.seconds = round(time.monotonic() - began, 1)
    return figures


def _keep_busy(hosts: list[CaptureHost], samples: int, *, crawl: bool = False) -> None:
    """A host that gets ahead works more slowly, so that faults do not meet a run that is over. ``crawl``: each of them
    at the least."""
    for host in hosts:
        progress = host.progress(RUN)
        share = max(1, int(progress.get("samples", samples)))
        left = 1 - int(progress.get("done", 0)) / share
        host.set(delay=DELAY * (10 if crawl else 1 if left > 0.5 else 3 if left > 0.2 else 10))


def _account(fleet: Fleet, tokens: dict[str, int], figures: Figures) -> None:
    """Collect all of it and compare with what the servers computed."""
    try:
        collected = fleet.run("collect", "--run", RUN, "--data", "--json", timeout=COLLECT_SECONDS)
    except subprocess.TimeoutExpired:
        figures.tool_hangs += 1
        figures.notes.append("the last collect did not end")
        return
    if collected.code != ExitCode.OK:
        figures.notes.append(str(collected)[-3000:])
    report = collected.records()[-1]["data"]
    if "rejects" not in report:
        figures.lost = len(tokens)
        return
    rejected = {reject.split(":")[0] for reject in report["rejects"]}
    figures.rejected, figures.copies = len(rejected), report["duplicated"]
    if rejected:
        figures.notes.append(f"rejected: {report['rejects'][:5]}")
    folder = fleet.folder / "runs" / RUN
    lines = [json.loads(line) for line in (folder / "manifest.jsonl").read_text().splitlines()]
    ids = Counter(line["id"] for line in lines)
    figures.duplicated = sum(count - 1 for count in ids.values())
    figures.lost = len(tokens.keys() - ids.keys() - rejected)
    figures.corrupt = sum(_wrong_pieces(folder, line, tokens) for line in lines)


def _wrong_pieces(folder: Path, line: dict[str, Any], tokens: dict[str, int]) -> int:
    """Pieces of a sample that do not hold the rows which the server made of it, and rows that no piece holds."""
    wrong = int(line["tokens"] != tokens[line["id"]])
    rows = 0
    for piece in line["pieces"]:
        rows += piece["rows"]
        data = b""
        with contextlib.suppress(Exception), ShardReader(folder / line["path"] / piece["shard"]) as reader:
            data = reader.read(piece["name"])
        wrong += data != states_of(line["id"], piece["start"], piece["rows"])
    return wrong + int(rows != line["tokens"])
