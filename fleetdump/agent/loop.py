"""The driver's loop: send samples, watch the taps' journals, commit what is whole, retry what is not.

One thread decides; others only wait, for HTTP replies and for the disk: while lines are made durable, requests go out.
All that it must not forget stands in files.
"""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass
from typing import List, Optional

from fleetdump.agent.attempts import FREE_OF_CHARGE, Attempts, Sent
from fleetdump.agent.commit import Committer, CommitThread, Ready, Written
from fleetdump.agent.context import State
from fleetdump.agent.formats import PieceRecord, Rid, coverage
from fleetdump.agent.gate import Launch, Probe, Silence, probe
from fleetdump.agent.generate import Reply, Threads, prefill
from fleetdump.agent.journals import Captured, Journals, PieceFault, join
from fleetdump.agent.protocol import AgentFailure
from fleetdump.agent.records import in_words, read_advice
from fleetdump.agent.reporter import Reporter
from fleetdump.agent.runmessages import CANCEL, DRAIN, PAUSE
from fleetdump.agent.samples import Samples
from fleetdump.agent.schedule import Sample, Schedule, backoff
from fleetdump.agent.shardwriter import DISK_FULL
from fleetdump.agent.share import Order, Share, ShareSpec, replaced_launches
from fleetdump.agent.suspicion import Suspicion
from fleetdump.agent.tapstatus import is_behind, taps_of
from fleetdump.agent.withdraw import WithdrawRequest, give_away

log = logging.getLogger("fleetdump.driver")


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
class Answer:
    """A request has ended."""

    sent: Sent
    reply: Reply


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
        self.samples = Samples(share, spec.run, committer, reporter)
        self.attempts = Attempts(share, reporter)
        self.schedule = Schedule.of(self.samples.open.values(), spec.token_budget)
        self.suspicion = Suspicion(reporter.progress, self.samples, self.attempts, self.schedule)
        self.journals = Journals(self.directory, spec.server, self.samples.wants)
        self.last_news = time.monotonic()
        self.launch: Optional[Launch] = None
        """The server that answers; None: look for it first."""
        self.stopped_launch = ""
        self.died_launch = ""
        """What died is not stopped, though somebody ends what it left before it is launched again."""
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
        self.commits = CommitThread(committer, self.threads)
        self._paused_until = 0.0
        self._probing = False
        self._next_probe = 0.0
        self._next_look = 0.0
        self._next_doubt = 0.0
        self._next_order = 0.0

    def run(self) -> None:
        """Work to the end."""
        with self.attempts, self.turn:
            while self.samples.open or self.samples.rejects or self.commits.is_busy:
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
        if not self.samples.lacks(sent.sample.id):
            self.attempts.sent.pop(sent.sample.id, None)
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
            self.attempts.lost.append(sent)
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
        sample = self.samples.open.get(captured.rid.sample)
        if sample is None or not self.samples.lacks(sample.id):
            self.journals.forget(rid)
            return
        sample.attempt = max(sample.attempt, captured.rid.attempt)
        try:
            pieces = self._whole(captured, sample)
        except PieceFault as fault:
            sent = self.attempts.sent.get(sample.id)
            if sent is not None and sent.answered and str(sent.rid) == rid:
                self._failed(sent, captured.skip.reason if captured.skip else "rows_mismatch", str(fault))
            return
        if pieces is not None:
            self.samples.ready[sample.id] = Ready(sample, captured.rid, pieces)
            self.suspicion.captured_one()
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
        self.commits.begin(self.samples.rejects.values(), self.samples.ready.values(), rest=self.launch is None)

    def _take_written(self, written: Written) -> None:
        self.commits.ended(written)
        for sample_id in self.samples.written(written.rejects, written.batch):
            self.attempts.settled(sample_id)
        if written.error is not None:
            raise written.error

    def _give_up_waiting(self, now: float) -> None:
        """Attempts that were answered, but whose rows do not come: the server is gone, or the tap lost them."""
        if now < self._next_doubt:
            return
        self._next_doubt = now + self.timing.probe
        waiting = [sent for sent in self.attempts.sent.values() if sent.answered and self.samples.lacks(sent.sample.id)]
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
            for sample in self.samples.open.values():
                if self.samples.lacks(sample.id):
                    self.samples.reject(sample, "cancelled", f"by {order.operator}")

    def _give_away(self, tokens: int) -> None:
        """Let another server have samples that were not begun. Only when they stand in withdrawn.jsonl it may."""
        taken = [sample for sample in self.schedule.withdraw(tokens) if self.samples.lacks(sample.id)]
        begun = [sample for sample in self._release() if self.samples.lacks(sample.id)] if self.leaves else []
        try:
            give_away(self.share, [sample.id for sample in [*taken, *begun]])
        except OSError:
            self.schedule.waiting = sorted([*self.schedule.waiting, *taken], key=lambda sample: sample.tokens)
            for sample in begun:
                self.schedule.again(sample, 0.0)
            raise
        taken += begun
        for sample in taken:
            self.attempts.sent.pop(sample.id, None)
        self.samples.gave_away(taken)

    def _release(self) -> List[Sample]:
        """What was sent and is to be sent again; rows that still come of it are nobody's once it is given away."""
        return [*self.schedule.release(), *(sent.sample for sent in self.attempts.take_lost())]

    # ------------------------------------------------------------------ sending
    def _send(self) -> None:
        while self.launch is not None:
            sample = self.schedule.take(time.monotonic())
            if sample is None:
                return
            if self.samples.lacks(sample.id):
                self._send_one(sample, self.launch)
            else:
                self.schedule.landed(sample)

    def _send_one(self, sample: Sample, launch: Launch) -> None:
        rid = Rid(self.spec.run, sample.id, sample.attempt + 1)
        sent = Sent(sample, rid, launch, alone=self.schedule.alone == sample.id)
        try:
            self.attempts.begin(sent)
        except OSError:
            self.schedule.landed(sample)
            self.schedule.again(sample, 0.0)
            raise
        ids, _ = self.share.read_sample(sample)
        self.threads.run(lambda: Answer(sent, prefill(launch.port, str(rid), ids, launch.headers)))

    def _failed(self, sent: Sent, reason: str, detail: str) -> None:
        """An attempt ended without a sample: try again later, or reject."""
        sample, now = sent.sample, time.monotonic()
        self.attempts.sent.pop(sample.id, None)
        self.journals.forget(str(sent.rid))
        self.attempts.note_end(sent, reason, detail)
        if reason in FREE_OF_CHARGE:
            self.schedule.again(sample, now if reason == "server_gone" else now + self.timing.pause)
            if reason == "disk_full":
                self._pause(f"the tap found the disk full: {detail}")
            return
        sample.failures += 1
        if sample.failures < self.spec.max_attempts:
            self.schedule.again(sample, now + backoff(sample.failures))
        else:
            self.samples.reject(sample, "server_error" if reason == "server_error" else "capture_failed", detail)

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
        self.suspicion.tell_of_death(found.died)
        if found.launch is None:
            return
        self.launch = found.launch
        for sent in self.attempts.take_lost():
            self._judge_lost(sent, found.launch)

    def _tell_of_silence(self, now: float) -> None:
        owing = self.launch.launch_id if self.launch is not None and self.schedule.in_flight else self.mute_launch
        self.suspicion.tell_of_silence(owing, self.silence.unusual(now, owing))

    def _judge_lost(self, sent: Sent, back: Launch) -> None:
        """Did this request kill the server? It is a suspect unless the server was stopped on purpose or still lives."""
        sample = sent.sample
        if not self.samples.lacks(sample.id):
            return
        if sent.launch.launch_id == back.launch_id:
            self._failed(sent, "server_error", "the server broke the connection but lives")
            return
        if sent.launch.launch_id == self.stopped_launch:
            self._failed(sent, "server_gone", "the server was stopped")
            return
        self.suspicion.died_with(sent)


def _held_by(order: Order) -> str:
    """Why nothing is sent, empty when the order does not say so."""
    if order.order == DRAIN:
        return f"leaving, by {order.operator}: what is not begun goes to other hosts; fleetdump resume takes it back"
    return f"by {order.operator}; fleetdump resume goes on" if order.order == PAUSE else ""
