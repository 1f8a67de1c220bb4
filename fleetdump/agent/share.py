"""The files of one server's share of a run, ``runs/<run>/<server>/`` (docs/formats.md), and how to read them."""

from __future__ import annotations

import json
import os
import signal
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Dict, Iterator, List, Optional, Set, Tuple

from fleetdump.agent.context import State
from fleetdump.agent.formats import (
    SELFCHECK_PREFIX,
    SHARE_NAME,
    AttemptLine,
    FormatError,
    RestartLine,
    is_run_name,
    server_of,
    share_id,
)
from fleetdump.agent.jsonl import (
    append_lines,
    decode_line,
    decode_record,
    open_lines,
    read_lines,
    read_raw_lines,
    replacing,
    write_json,
)
from fleetdump.agent.procfs import is_alive, start_time
from fleetdump.agent.protocol import AgentFailure
from fleetdump.agent.records import NOT_WRITABLE, broken, in_words, naming, read_advice, read_record
from fleetdump.agent.runmessages import CANCEL, DRAIN, FINISHED, PAUSE, TOO_LONG, RunProgress
from fleetdump.agent.schedule import Sample
from fleetdump.agent.specs import CaptureSpec
from fleetdump.agent.turn import Turn, try_lock

STOP_SECONDS = 5.0
RESTARTS = "restarts.jsonl"
"""Beside the shares of a run: how often its servers were restarted."""


@dataclass
class ShareSpec:
    """``share.json``: what was submitted. ``rows`` counts the lines of rows.jsonl."""

    run: str
    server: str
    share_sha256: str
    rows: int
    capture: CaptureSpec
    max_tokens: int
    token_budget: int
    max_attempts: int
    engine: str
    patch_sha256: str
    model_sha256: str
    submitted_at: float
    too_long: str = TOO_LONG[0]
    run_samples: int = 0
    v: int = 1

    @property
    def share_id(self) -> str:
        """Which submit made this share."""
        return share_id(self.share_sha256, self.submitted_at)

    @property
    def directory(self) -> Path:
        """Where the taps of this host write the run."""
        return Path(os.path.expanduser(self.capture.dir)) / self.run


@dataclass
class DriverRecord:
    """``driver.json``: the process that works on the share (or did)."""

    pid: int
    start_time: int
    started_at: float
    v: int = 1


@dataclass
class Order:
    """``order.json`` of a run: what ``fleetdump pause``, ``drain`` or ``cancel`` told its drivers here, and who did.
    ``whole_run`` as in ``OrderArgs``."""

    order: str
    operator: str
    t: float
    whole_run: bool = True
    v: int = 1


@dataclass
class WorkHead:
    """What the driver needs of the first line of work.jsonl."""

    template_sha256: str
    samples: int
    tokens: int
    notes: List[str]


class Share:
    """Paths and readers of one share."""

    def __init__(self, root: Path):
        self.root = root
        self.run = root.parent.name
        self.server = root.name
        """The share's name (``formats.SHARE_NAME``)."""
        self._work_file: Optional[BinaryIO] = None

    @classmethod
    def of(cls, state: State, run: str, server: str) -> Share:
        """The share of ``server`` in ``run``; its directory is not created."""
        return cls(state.root / "runs" / run / server)

    @property
    def rows(self) -> Path:
        return self.root / "rows.jsonl"

    @property
    def work(self) -> Path:
        return self.root / "work.jsonl"

    @property
    def manifest(self) -> Path:
        return self.root / "manifest.jsonl"

    @property
    def rejected(self) -> Path:
        return self.root / "rejected.jsonl"

    @property
    def withdrawn(self) -> Path:
        return self.root / "withdrawn.jsonl"

    @property
    def request(self) -> Path:
        """What ``withdraw`` asks of the living driver; it is gone when that is done."""
        return self.root / "withdraw.json"

    @property
    def attempts(self) -> Path:
        return self.root / "attempts.jsonl"

    @property
    def log(self) -> Path:
        return self.root / "driver.log"

    @property
    def turn(self) -> Turn:
        """To send to the share's server, which may have more shares of the run."""
        return Turn(self.root.parent / f"{server_of(self.server)}.turn")

    def manifest_size(self) -> int:
        """Bytes of the manifest, 0 when there is none."""
        try:
            return self.manifest.stat().st_size
        except OSError:
            return 0

    def spec(self) -> Optional[ShareSpec]:
        """What was submitted, None when nothing was (or the submit did not end). Raises ``AgentFailure`` when
        share.json cannot be read."""
        again = "restore that file; or give the data another --run name, and remove this run's folder"
        return read_record(ShareSpec, self.root / "share.json", again)

    def save_spec(self, spec: ShareSpec) -> None:
        with naming(self.root / "share.json"):
            write_json(self.root / "share.json", spec)

    def save_progress(self, progress: RunProgress) -> None:
        """Atomic but not fsynced: it is rewritten every second and recomputed after a crash."""
        with replacing(self.root / "progress.json", durable=False) as file:
            file.write(json.dumps(progress.__dict__).encode())

    def progress(self) -> RunProgress:
        """The share's state as it is now: the driver's last word, whether the driver lives, and what it was told;
        failed, with why, when share.json cannot be read."""
        told = read_advice(RunProgress, self.root / "progress.json")
        progress = told or RunProgress(self.run, self.server, "tokenising")
        try:
            spec = self.spec()
            progress.share_id = spec.share_id if spec else ""
            progress.run_samples = spec.run_samples if spec else 0
            if told is None and spec is not None:
                progress.samples = spec.rows
        except AgentFailure as failure:
            progress.state, progress.detail = "failed", in_words(failure)
        progress.driver_alive = self.driver_alive()
        if progress.state == "done" and self.manifest_size() < progress.manifest_bytes:
            progress.state, progress.detail = "stopped", f"{self.manifest} has lost lines: a driver makes them again"
        if not progress.driver_alive and progress.state not in FINISHED:
            if progress.state != "stopped":
                progress.detail = f"no driver lives: fleetdump resume --run {self.run}, or extract again, starts one"
            progress.state = "stopped"
            progress.tokens_per_second = progress.bytes_per_second = progress.eta_seconds = 0.0
            progress.in_flight = 0
        if progress.state not in ("running", "paused"):
            progress.dead_launch = progress.silent_launch = progress.suspect = ""
            progress.silent_seconds = 0.0
        progress.given_away = self._given_away()
        progress.restarts = restarts_of(self.root.parent, server_of(self.server))
        self._add_order(progress)
        return progress

    def _given_away(self) -> int:
        with suppress(OSError):
            return len(read_raw_lines(self.withdrawn)[0])
        return 0

    def _add_order(self, progress: RunProgress) -> None:
        try:
            order = self.order()
        except AgentFailure as failure:
            progress.order, progress.whole_run = PAUSE, True
            if progress.state not in FINISHED:
                progress.detail = in_words(failure)
        else:
            progress.order = order.order if order is not None else ""
            progress.whole_run = order is not None and order.whole_run

    @property
    def order_file(self) -> Path:
        """Beside all shares of the run: one that comes later is told too."""
        return self.root.parent / "order.json"

    def order(self) -> Optional[Order]:
        """What the run's drivers on this host are told, None when nothing is: they work. Raises ``AgentFailure`` when
        it cannot be read: it said that something must not be done, so nothing may be until it is given anew."""
        again = f"fleetdump pause, resume or cancel --run {self.run} writes it anew; until then nothing is sent"
        order = read_record(Order, self.order_file, again)
        if order is not None and order.order not in (PAUSE, CANCEL, DRAIN):
            raise broken(self.order_file, f"no such order: {order.order!r}", again)
        return order

    def give_order(self, order: Optional[Order]) -> None:
        """Tell the run's drivers on this host, now and later ones; None takes it back. A pause outlives a disk that
        takes no more: an empty file, which says nothing, holds the drivers too."""
        path = self.order_file
        with naming(path):
            if order is None:
                with suppress(FileNotFoundError):
                    path.unlink()
                return
            try:
                write_json(path, order)
            except OSError as error:
                if order.order != PAUSE or error.errno not in NOT_WRITABLE:
                    raise
                with suppress(FileExistsError):
                    path.touch(exist_ok=False)

    # ------------------------------------------------------------------ the one driver
    def claim(self) -> Optional[BinaryIO]:
        """Become this share's driver, by ``try_lock``. None when another process is. Keep the returned file open."""
        lock = try_lock(self.root / "driver.lock")
        if lock is None:
            return None
        pid = os.getpid()
        write_json(self.root / "driver.json", DriverRecord(pid, start_time(pid) or 0, time.time()))
        return lock

    def driver(self) -> Optional[DriverRecord]:
        """The latest driver, alive or not. That there is one at a time is up to the claim, not to this file."""
        return read_advice(DriverRecord, self.root / "driver.json")

    def driver_alive(self) -> bool:
        driver = self.driver()
        return driver is not None and is_alive(driver.pid, driver.start_time)

    def stop_driver(self, seconds: float = STOP_SECONDS) -> Optional[BinaryIO]:
        """SIGKILL to the driver and its tokeniser, which may die at any moment without harm, and take its claim: no
        other driver starts while the returned file is open. None when it has not ended after ``seconds``."""
        give_up = time.monotonic() + seconds
        while True:
            driver = self.driver()
            # A driver that runs in this very process must not end it.
            if driver is not None and driver.pid != os.getpid() and is_alive(driver.pid, driver.start_time):
                with suppress(ProcessLookupError):
                    os.killpg(driver.pid, signal.SIGKILL)
            lock = self.claim()
            if lock is not None or time.monotonic() > give_up:
                return lock
            time.sleep(0.05)

    # ------------------------------------------------------------------ work
    def work_head(self) -> WorkHead:
        """The first line of work.jsonl, with what a person should know about the masks in words."""
        with open(self.work, "rb") as file:
            head = json.loads(file.readline())
        return WorkHead(head["template_sha256"], head["samples"], head["tokens"], _notes(head))

    def scan_work(self) -> Iterator[Tuple[Optional[Sample], Dict[str, Any]]]:
        """Each line of work.jsonl: a sample (without its ids, which ``read_sample`` fetches), or None and the line of
        a row that the tokeniser refused."""
        with open(self.work, "rb") as file:
            offset = len(file.readline())
            for line in file:
                data = json.loads(line)
                if "reason" in data:
                    yield None, data
                else:
                    yield Sample(data["id"], len(data["ids"]), offset, len(line)), data
                offset += len(line)

    def read_sample(self, sample: Sample) -> Tuple[List[int], List[int]]:
        """Ids and mask of ``sample``."""
        if self._work_file is None:
            self._work_file = open(self.work, "rb")  # noqa: SIM115 (as long as the share; work.jsonl never changes)
        line = os.pread(self._work_file.fileno(), sample.line_bytes, sample.offset)
        data = json.loads(line)
        return data["ids"], data["mask"]

    def read_withdrawn(self) -> List[str]:
        """Ids of the samples that were given away."""
        return [line["id"] for line in read_lines(self.withdrawn)[0]]

    def read_attempts(self) -> List[AttemptLine]:
        """All attempts so far, in order."""
        lines, _ = read_lines(self.attempts)
        return [decode_record(AttemptLine, line, str(self.attempts)) for line in lines]


def note_restart(run_dir: Path, line: RestartLine) -> None:
    """Count a restart of a run's server, durably."""
    path = run_dir / RESTARTS
    with naming(path), open_lines(path) as file:
        append_lines(file, [line])


def restarts_of(run_dir: Path, server: str) -> int:
    """How often controllers have restarted the server in the run with no sample to blame (each of those is rejected
    after a few). A line that cannot be read counts for every server: else they would be restarted without limit. A file
    that cannot be read says nothing, but where none can be noted there is none."""
    path = run_dir / RESTARTS
    with suppress(OSError):
        return sum(_may_be_of(line, server, str(path)) for line in read_raw_lines(path)[0])
    return 0


def replaced_launches(run_dir: Path) -> Set[str]:
    """The launches that controllers have replaced for the run: they died, or hung. A line that cannot be read names
    none."""
    found = set()
    with suppress(OSError):
        for line in read_raw_lines(run_dir / RESTARTS)[0]:
            with suppress(FormatError):
                found.add(decode_record(RestartLine, decode_line(line, RESTARTS), RESTARTS).launch_id)
    return found


def _may_be_of(line: bytes, server: str, where: str) -> bool:
    try:
        restart = decode_record(RestartLine, decode_line(line, where), where)
    except FormatError:
        return True
    return restart.server == server and not restart.suspect


def runs_of(state: State) -> List[str]:
    """Names of the runs that have a folder here, by name; what a self-check left is none of them."""
    folders = (state.root / "runs").glob("*")
    return sorted(path.name for path in folders if path.is_dir() and not path.name.startswith(SELFCHECK_PREFIX))


def shares_of(state: State, run: str) -> List[Share]:
    """The complete shares of ``run`` on this host, by server."""
    root = state.root / "runs" / run
    return [Share(path.parent) for path in sorted(root.glob("*/share.json"))]


def valid_names(run: str, share: str) -> bool:
    """Whether both may become folder names."""
    return is_run_name(run) and bool(SHARE_NAME.match(share))


def _notes(head: Dict[str, Any]) -> List[str]:
    methods = ", ".join(f"{method} {count}" for method, count in sorted(head["methods"].items()))
    notes = [f"chat template {head['template_sha256'][:12]}; masks by {methods or 'nothing'}"]
    for sample in head["shown"]:
        spans = " | ".join(repr(span) for span in sample["spans"])
        notes.append(f"{sample['id']}: {sample['supervised']} of {sample['tokens']} tokens supervised: {spans}")
    if head["truncated"]:
        notes.append(f"{head['truncated']} samples were cut at {head['limit']} tokens")
    if head["dropped"]:
        notes.append(f"{head['dropped']} samples have more than {head['limit']} tokens and were dropped")
    if head["unsupervised_samples"]:
        notes.append(f"warning: {head['unsupervised_samples']} samples have no supervised token")
    if head["all_supervised_samples"]:
        notes.append(f"warning: in {head['all_supervised_samples']} conversations every token is supervised")
    return notes
