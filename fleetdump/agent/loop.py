"""The driver's loop: send samples, watch the taps' journals, commit what is whole, retry what is not.

One thread decides; others only wait, for HTTP replies and for the disk: while lines are made durable, requests go out.
All that it must not forget stands in files.
"""

from __future__ import annotations

import logging
import os
import time
from dataclasses import dataclass, field
from typing import BinaryIO, Dict, List, Optional

from fleetdump.agent.commit import Committer, Ready
from fleetdump.agent.context import State
from fleetdump.agent.formats import AttemptLine, PieceRecord, RejectedLine, Rid, coverage
from fleetdump.agent.gate import Launch, Probe, Silence, probe
from fleetdump.agent.generate import Reply, Threads, prefill
from fleetdump.agent.journals import Captured, Journals, PieceFault, join
from fleetdump.agent.jsonl import encode_line, open_lines, write_all
from fleetdump.agent.protocol import AgentFailure
from fleetdump.agent.records import in_words, read_advice
from fleetdump.agent.reporter import Reporter
from fleetdump.agent.runmessages import CANCEL, DRAIN, PAUSE
from fleetdump.agent.schedule import DEATHS_TO_DOUBT, DEATHS_TO_REJECT, Sample, Schedule, backoff
from fleetdump.agent.shardwriter import DISK_FULL
from fleetdump.agent.share import Order, Share, ShareSpec, replaced_launches
from fleetdump.agent.tapstatus import is_behind, taps_of
from fleetdump.agent.withdraw import WithdrawRequest, give_away

log = logging.getLogger("fleetdump.driver")

FREE_OF_CHARGE = ("disk_full", "backpressure", "server_gone")
"""Ends of an attempt that say nothing about the sample: they do not count towards max_attempts."""


@dataclass
class Timing:
    """Seconds. ``turn``: longest wait for a reply before looking at the journals; ``settle``: how long the rows of an
    answered request may stay away while the taps write nothing at all; ``pause``: wait on a full disk; ``probe``:
    between two looks at a server that is away, or at its taps."""

    turn: float = 0.05
    settle: float = 60.0
    pause: float = 10.0
    probe: float = 1.0


@dataclass
class Sent:
    """An attempt whose request went out. ``answered``: monotonic time of its good reply, 0 before."""

    sample: Sample
    rid: Rid
    launch: Launch
    alone: bool
    answered: float = 0.0


@dataclass
class Answer:
    """A request has ended."""

    sent: Sent
    reply: Reply


@dataclass
class Written:
    """A commit has ended: these lines exist now. ``error``: why the rest of them does not."""

    rejects: List[RejectedLine] = field(default_factory=list)
    batch: List[Ready] = field(default_factory=list)
    error: Optional[OSError] = None


class Loop:
    """Works until every sample is in the manifest or rejected (``run``). Everything already settled is left out, so a
    killed loop is continued by making a new one."""

    def __init__(
        self, state: State, share: Share, committer: Committer, reporter: Reporter, timing: Optional[Timing] = None
    ):
        spec = share.spec()
        assert spec is not None
        self.state = state
        self.share = share
        self.spec: ShareSpec = spec
        self.committer = committer
        self.reporter = reporter
        self.timing = timing or Timing()
        self.directory = spec.directory
        self.open: Dict[str, Sample] = {}
        """Samples that are neither in the manifest nor rejected, by id."""
        self.rejects: Dict[str, RejectedLine] = {}
        """Decided, not yet written, by id; rows that still come of them do not count."""
        self.ready: Dict[str, Ready] = {}
        """Captured whole, not yet in the manifest, by id."""
        self.sent: Dict[str, Sent] = {}
        """The attempt that is under way, by sample id."""
        self.lost: List[Sent] = []
        """Their connection broke; what is to be thought of them is known when the server is back."""
        self.given_away = set(share.read_withdrawn())
        self._read_work()
        self._recall_attempts()
        self.reporter.progress.samples -= len(self.given_away)
        self.schedule = Schedule.of(self.open.values(), spec.token_budget)
        self.journals = Journals(self.directory, spec.server, self._wanted)
        self.last_news = time.monotonic()
        self.launch: Optional[Launch] = None
        """The server that answers; None: look for it first."""
        self.stopped_launch = ""
        self.died_launch = ""
        """What died is not stopped, though somebody ends what it left before it is launched again."""
        self.deaths_in_a_row = 0
        """Of the server with one sample alone in flight, since one was captured."""
        self.doubted_launch = ""
        """Died like that so often that no sample is to blame."""
        self.silence = Silence()
        self.mute_launch = ""
        """Was ready once, lives, and does not answer."""
        self.detail = "looking for the server"
        self.held = ""
        """Who paused the share, empty when nobody has."""
        self.leaves = False
        """Its host leaves the run: also what was begun is given away."""
        self.turn = share.turn
        self.threads = Threads()
        self.attempts: BinaryIO = open_lines(share.attempts)
        self._paused_until = 0.0
        self._committing = False
        self._rested = True
        """The token shard is closed: nothing was committed since."""
        self._probing = False
        self._next_probe = 0.0
        self._next_look = 0.0
        self._next_doubt = 0.0
        self._next_order = 0.0

    def run(self) -> None:
        """Work to the end."""
        with self.attempts, self.turn:
            while self.open or self.rejects or self._committing:
                self.step()
            self.reporter.progress.in_flight = 0

    def step(self) -> None:
        """One turn. A full disk pauses everything and loses nothing: each part can be repeated."""
        try:
            self._take_results()
            self._look_for_orders(time.monotonic())
            if time.monotonic() >= self._paused_until and not self.held:
                self._send()
            self._read_journals()
            if time.monotonic() >= self._paused_until:
                self._commit()
                self._give_up_waiting(time.monotonic())
        except OSError as error:
            if error.errno not in DISK_FULL:
                raise
            self._pause(f"{error.filename or self.directory}: {error.strerror}")
        self._look_for_server(time.monotonic())
        self._look_at_taps(time.monotonic())
        self._tell_of_silence(time.monotonic())
        self.reporter.progress.in_flight = len(self.schedule.in_flight)
        state = "paused" if self.held else "running"
        self.reporter.report(state, self.held or self.detail or self._slowness(), self.committer)

    # ------------------------------------------------------------------ what there is to do
    def _read_work(self) -> None:
        for sample, line in self.share.scan_work():
            if line["id"] in self.given_away:
                self.reporter.progress.tokens -= sample.tokens if sample is not None else 0
                continue
            if line["id"] in self.committer.settled or line["id"] in self.open or line["id"] in self.rejects:
                continue
            if sample is None:
                self.rejects[line["id"]] = self.committer.rejection(line["id"], line["reason"], line["detail"], 0)
            else:
                self.open[sample.id] = sample
                self.reporter.tokens_left += sample.tokens

    def _recall_attempts(self) -> None:
        for line in self.share.read_attempts():
            sample = self.open.get(line.id)
            if sample is None:
                continue
            sample.attempt = max(sample.attempt, line.attempt)
            if line.outcome == "killed_server":
                sample.deaths += 1
            elif line.outcome != "sent" and line.outcome not in FREE_OF_CHARGE:
                sample.failures += 1

    def _lacks(self, sample_id: str) -> bool:
        """Whether nothing is decided of the sample: it is neither settled nor about to be."""
        return sample_id in self.open and sample_id not in self.ready and sample_id not in self.rejects

    def _wanted(self, rid: Rid) -> bool:
        return rid.run == self.spec.run and rid.sample in self.open

    # ------------------------------------------------------------------ replies and journals
    def _take_results(self) -> None:
        result = self.threads.next(self.timing.turn)
        while result is not None:
            if isinstance(result, Probe):
                self._take_probe(result)
            elif isinstance(result, Written):
                self._take_written(result)
            else:
                self._take_answer(result)
            result = self.threads.next(0)

    def _take_answer(self, answer: Answer) -> None:
        sent, reply = answer.sent, answer.reply
        self.schedule.landed(sent.sample)
        if reply.status:
            self.silence.ends(time.monotonic())
        if not self._lacks(sent.sample.id):
            self.sent.pop(sent.sample.id, None)
        elif reply.status == 200:
            sent.answered = time.monotonic()
            self._judge(str(sent.rid))
        elif reply.status:
            self._failed(sent, "server_error", f"HTTP {reply.status}: {reply.detail}")
        elif reply.refused:
            self._server_away(reply.detail)
            self._failed(sent, "server_gone", reply.detail)
        elif self.launch is None or self.launch.launch_id == sent.launch.launch_id:
            self._server_away(reply.detail)
            self.lost.append(sent)
        else:
            self._judge_lost(sent, self.launch)

    def _read_journals(self) -> None:
        for rid in self.journals.poll():
            self.last_news = time.monotonic()
            self.silence.ends(self.last_news)
            self._judge(rid)

    def _judge(self, rid: str) -> None:
        """Is the attempt whole, or can it never be? Rows that come late, of an attempt that was given up, count too."""
        captured = self.journals.captured.get(rid)
        if captured is None:
            return
        sample = self.open.get(captured.rid.sample)
        if sample is None or not self._lacks(sample.id):
            self.journals.forget(rid)
            return
        sample.attempt = max(sample.attempt, captured.rid.attempt)
        try:
            pieces = self._whole(captured, sample)
        except PieceFault as fault:
            sent = self.sent.get(sample.id)
            if sent is not None and sent.answered and str(sent.rid) == rid:
                self._failed(sent, captured.skip.reason if captured.skip else "rows_mismatch", str(fault))
            return
        if pieces is not None:
            self.ready[sample.id] = Ready(sample, captured.rid, pieces)
            self.deaths_in_a_row = 0
            self.journals.forget(rid)

    def _whole(self, captured: Captured, sample: Sample) -> Optional[List[PieceRecord]]:
        if captured.skip is not None:
            raise PieceFault(captured.skip.detail)
        if sum(piece.rows for piece in captured.pieces) < sample.tokens:
            return None
        ids, _ = self.share.read_sample(sample)
        return join(captured.pieces, ids, self.spec.capture.slots)

    def _commit(self) -> None:
        """Let rejects and whole samples become lines, in a thread, one batch at a time; only then are they settled.
        While the server is away the token shard is closed, so that what exists can be collected."""
        rest = self.launch is None and not self._rested
        if self._committing or not (self.rejects or self.ready or rest):
            return
        self._committing = True
        rejects, batch = list(self.rejects.values()), list(self.ready.values())
        self._rested = rest
        self.threads.run(lambda: self._write(rejects, batch, rest))

    def _write(self, rejects: List[RejectedLine], batch: List[Ready], rest: bool) -> Written:
        """In a thread of its own: until it has ended nobody else uses the committer's files."""
        written = Written()
        try:
            self.committer.reject(rejects)
            written.rejects = rejects
            self.committer.commit(batch)
            written.batch = batch
            if rest:
                self.committer.rest()
        except OSError as error:
            written.error = error
        return written

    def _take_written(self, written: Written) -> None:
        self._committing = False
        for line in written.rejects:
            self._settled(line.id)
            del self.rejects[line.id]
        for ready in written.batch:
            self._settled(ready.sample.id)
            del self.ready[ready.sample.id]
        if written.error is not None:
            self._rested = False
            raise written.error

    def _settled(self, sample_id: str) -> None:
        sample = self.open.pop(sample_id, None)
        if sample is not None:
            self.reporter.tokens_left -= sample.tokens
        sent = self.sent.get(sample_id)
        if sent is not None and sent.answered:
            del self.sent[sample_id]

    def _give_up_waiting(self, now: float) -> None:
        """Attempts that were answered, but whose rows do not come: the server is gone, or the tap lost them."""
        if now < self._next_doubt:
            return
        self._next_doubt = now + self.timing.probe
        waiting = [sent for sent in self.sent.values() if sent.answered and self._lacks(sent.sample.id)]
        launches = {sent.launch.launch_id: sent.launch for sent in waiting}
        living = {launch_id for launch_id, launch in launches.items() if launch.lives()}
        for sent in waiting:
            if sent.launch.launch_id not in living:
                self._server_away("its process ended")
                self._failed(sent, "server_gone", f"{self._missing(sent)} were not written before the server ended")
            elif now - max(sent.answered, self.last_news) > self.timing.settle:
                why = f"{self._missing(sent)} did not come within {self.timing.settle:.0f} s"
                self._failed(sent, "rows_missing", why)

    def _missing(self, sent: Sent) -> str:
        captured = self.journals.captured.get(str(sent.rid))
        return coverage(captured.pieces if captured else [], sent.sample.tokens, self.spec.capture.slots).missing

    # ------------------------------------------------------------------ orders
    def _look_for_orders(self, now: float) -> None:
        """``fleetdump pause``: what is in flight ends, nothing more is sent. ``cancel``: the rest is rejected."""
        if now < self._next_order:
            return
        self._next_order = now + self.timing.probe
        self._obey()
        request = read_advice(WithdrawRequest, self.share.request)
        if request is not None:
            self._give_away(request.tokens)
            self.share.request.unlink()

    def _obey(self) -> None:
        try:
            order = self.share.order()
        except AgentFailure as failure:
            self.held = in_words(failure)
            return
        self.leaves = order is not None and order.order == DRAIN
        self.held = _held_by(order) if order is not None else ""
        if order is not None and order.order == CANCEL:
            for sample in self.open.values():
                if self._lacks(sample.id):
                    self._reject(sample, "cancelled", f"by {order.operator}")

    def _give_away(self, tokens: int) -> None:
        """Let another server have samples that were not begun. Only when they stand in withdrawn.jsonl it may."""
        taken = [sample for sample in self.schedule.withdraw(tokens) if self._lacks(sample.id)]
        begun = [sample for sample in self._release() if self._lacks(sample.id)] if self.leaves else []
        try:
            give_away(self.share, [sample.id for sample in [*taken, *begun]])
        except OSError:
            self.schedule.waiting = sorted([*self.schedule.waiting, *taken], key=lambda sample: sample.tokens)
            for sample in begun:
                self.schedule.again(sample, 0.0)
            raise
        taken += begun
        for sample in taken:
            del self.open[sample.id]
            self.sent.pop(sample.id, None)
            self.given_away.add(sample.id)
            self.reporter.tokens_left -= sample.tokens
            self.reporter.progress.tokens -= sample.tokens
        self.reporter.progress.samples -= len(taken)

    def _release(self) -> List[Sample]:
        """What was sent and is to be sent again; rows that still come of it are nobody's once it is given away."""
        lost, self.lost = self.lost, []
        return [*self.schedule.release(), *(sent.sample for sent in lost)]

    # ------------------------------------------------------------------ sending
    def _send(self) -> None:
        while self.launch is not None:
            sample = self.schedule.take(time.monotonic())
            if sample is None:
                return
            if self._lacks(sample.id):
                self._send_one(sample, self.launch)
            else:
                self.schedule.landed(sample)

    def _send_one(self, sample: Sample, launch: Launch) -> None:
        rid = Rid(self.spec.run, sample.id, sample.attempt + 1)
        sent = Sent(sample, rid, launch, alone=self.schedule.alone == sample.id)
        try:
            self._write_attempt(sample, rid.attempt, "sent", "")
        except OSError:
            self.schedule.landed(sample)
            self.schedule.again(sample, 0.0)
            raise
        sample.attempt = rid.attempt
        ids, _ = self.share.read_sample(sample)
        self.sent[sample.id] = sent
        self.threads.run(lambda: Answer(sent, prefill(launch.port, str(rid), ids, launch.headers)))

    def _failed(self, sent: Sent, reason: str, detail: str) -> None:
        """An attempt ended without a sample: try again later, or reject."""
        sample, now = sent.sample, time.monotonic()
        self.sent.pop(sample.id, None)
        self.journals.forget(str(sent.rid))
        self._note_end(sent, reason, detail)
        if reason in FREE_OF_CHARGE:
            self.schedule.again(sample, now if reason == "server_gone" else now + self.timing.pause)
            if reason == "disk_full":
                self._pause(f"the tap found the disk full: {detail}")
            return
        sample.failures += 1
        if sample.failures < self.spec.max_attempts:
            self.schedule.again(sample, now + backoff(sample.failures))
        else:
            self._reject(sample, "server_error" if reason == "server_error" else "capture_failed", detail)

    def _reject(self, sample: Sample, reason: str, detail: str) -> None:
        log.warning("%s is rejected: %s: %s", sample.id, reason, detail)
        self.rejects[sample.id] = self.committer.rejection(sample.id, reason, detail, sample.attempt)

    def _note_end(self, sent: Sent, outcome: str, detail: str) -> None:
        """Log why an attempt ended. On a full disk the note is lost: then a later driver counts one failure less."""
        log.warning("%s: %s: %s", sent.rid, outcome, detail)
        self.reporter.failed(str(sent.rid), outcome, detail)
        try:
            self._write_attempt(sent.sample, sent.rid.attempt, outcome, detail)
        except OSError as error:
            log.warning("%s: %s", self.share.attempts, error)

    def _write_attempt(self, sample: Sample, attempt: int, outcome: str, detail: str) -> None:
        """Not fsynced: the line must outlive this process, and a crash of the machine ends the server, and with it
        every request whose id could clash, too."""
        clean = detail.encode("utf-8", "replace").decode()
        end = self.attempts.seek(0, os.SEEK_END)
        try:
            write_all(self.attempts, encode_line(AttemptLine(sample.id, attempt, outcome, clean, time.time())))
        except OSError:
            self.attempts.truncate(end)
            raise

    def _pause(self, why: str) -> None:
        self._paused_until = time.monotonic() + self.timing.pause
        self.detail = f"paused: {why}"
        log.warning("%s", self.detail)

    # ------------------------------------------------------------------ the server
    def _server_away(self, why: str) -> None:
        if self.launch is not None:
            self.launch = None
            self.detail = f"the server is away ({why})"
            log.warning("%s", self.detail)

    def _look_for_server(self, now: float) -> None:
        if self.launch is None and not self._probing and now >= self._next_probe:
            if not self._is_our_turn():
                return
            self._probing = True
            self._next_probe = now + self.timing.probe
            self.threads.run(self._probe)

    def _probe(self) -> Probe:
        """In a thread of its own."""
        found = probe(self.state, self.spec.server, self.spec.capture)
        # A controller ended what hung: no operator's stop. What was in flight there is suspected as at any death.
        if found.stopped and found.stopped in replaced_launches(self.share.root.parent):
            return Probe(None, found.detail, died=found.stopped)
        return found

    def _is_our_turn(self) -> bool:
        try:
            if self.turn.take():
                return True
        except OSError as error:
            if error.errno not in DISK_FULL:
                raise
            self._pause(f"{error.filename}: {error.strerror}")
            self._next_probe = self._paused_until
            return False
        self.detail = "next: another share of the run is at work on this server"
        self.reporter.forget_rate()
        return False

    def _look_at_taps(self, now: float) -> None:
        """Slow down before a forward has to wait for the disk."""
        if self.launch is not None and now >= self._next_look:
            self._next_look = now + self.timing.probe
            taps = taps_of(self.state, self.spec.server, self.launch.launch_id)
            self.schedule.mind_disk(is_behind(taps, time.time()))

    def _slowness(self) -> str:
        allowed = self.schedule.allowed
        return f"the disk is slower than the server: {allowed:.0%} of the tokens in flight" if allowed < 1.0 else ""

    def _take_probe(self, found: Probe) -> None:
        self._probing = False
        self.died_launch = found.died or self.died_launch
        if found.stopped != self.died_launch:
            self.stopped_launch = found.stopped or self.stopped_launch
        self.detail = found.detail
        self.mute_launch = found.mute
        self._tell_of_death(found.died)
        if found.launch is None:
            return
        self.launch = found.launch
        lost, self.lost = self.lost, []
        for sent in lost:
            self._judge_lost(sent, found.launch)

    def _tell_of_death(self, launch_id: str) -> None:
        """So that a controller can have the server restarted, and knows whether one sample may be to blame."""
        alone = self._alone_with(launch_id)
        if alone and self._is_doubtful():
            self.doubted_launch = launch_id
        self.reporter.progress.dead_launch = launch_id
        self.reporter.progress.suspect = alone if launch_id != self.doubted_launch else ""

    def _tell_of_silence(self, now: float) -> None:
        """So that a controller can have a look at a server that lives and gives nothing, and restart it if it hangs."""
        owing = self.launch.launch_id if self.launch is not None and self.schedule.in_flight else self.mute_launch
        progress = self.reporter.progress
        progress.silent_seconds = self.silence.unusual(now, owing)
        progress.silent_launch = owing if progress.silent_seconds else ""
        if not progress.dead_launch:
            is_to_blame = progress.silent_launch and not self._is_doubtful()
            progress.suspect = self._alone_with(owing) if is_to_blame else ""

    def _alone_with(self, launch_id: str) -> str:
        """The sample that is, or was at its end, alone in flight with that launch; empty when there is none."""
        alone = (s.sample.id for s in self.sent.values() if s.alone and s.launch.launch_id == launch_id)
        return next((sample_id for sample_id in alone if not self.sent[sample_id].answered), "")

    def _is_doubtful(self) -> bool:
        """Whether another death with one sample alone is the server's own fault. Only while another sample is left to
        try: else several that kill at the end of a share could not be told."""
        return bool(self.schedule.waiting) and self.deaths_in_a_row + 1 >= DEATHS_TO_DOUBT

    def _judge_lost(self, sent: Sent, back: Launch) -> None:
        """Did this request kill the server? It is a suspect unless the server was stopped on purpose or still lives."""
        sample = sent.sample
        if not self._lacks(sample.id):
            return
        if sent.launch.launch_id == back.launch_id:
            self._failed(sent, "server_error", "the server broke the connection but lives")
            return
        if sent.launch.launch_id == self.stopped_launch:
            self._failed(sent, "server_gone", "the server was stopped")
            return
        self.sent.pop(sample.id, None)
        if not sent.alone:
            self._note_end(sent, "server_gone", "in flight when the server died: it is tried alone")
            self.schedule.suspect(sample)
            return
        self.deaths_in_a_row += 1
        if sent.launch.launch_id == self.doubted_launch:
            self._note_end(sent, "server_gone", f"the server died {self.deaths_in_a_row} times in a row: its own fault")
            self.schedule.suspect(sample)
            self.schedule.try_fresh()
            return
        sample.deaths += 1
        self._note_end(sent, "killed_server", f"launch {sent.launch.launch_id} died with it alone in flight")
        if sample.deaths < DEATHS_TO_REJECT:
            self.schedule.suspect(sample)
        else:
            self._reject(sample, "killed_server", f"the server died {sample.deaths} times with it alone in flight")


def _held_by(order: Order) -> str:
    """Why nothing is sent, empty when the order does not say so."""
    if order.order == DRAIN:
        return f"leaving, by {order.operator}: what is not begun goes to other hosts; fleetdump resume takes it back"
    return f"by {order.operator}; fleetdump resume goes on" if order.order == PAUSE else ""
