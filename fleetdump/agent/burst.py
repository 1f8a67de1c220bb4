"""``burst``: how many tokens a second a server takes in a run, measured for some seconds.

The prompts make a run of their own, which the tap captures as any other, and which is removed at the end.
"""

from __future__ import annotations

import random
import time
from pathlib import Path
from typing import Dict, List, Set, Tuple

from fleetdump.agent.access import authorization
from fleetdump.agent.context import AgentContext
from fleetdump.agent.formats import Rid
from fleetdump.agent.generate import Reply, Threads, context_length, prefill
from fleetdump.agent.journals import Journals
from fleetdump.agent.model import vocabulary_size
from fleetdump.agent.protocol import AgentFailure
from fleetdump.agent.runmessages import BurstArgs, BurstResult, SelfCheckArgs
from fleetdump.agent.selfcheck import capturing_server, run_of_its_own
from fleetdump.agent.selfcheck_prompts import VOCABULARY
from fleetdump.agent.server import ServerRecord

SETTLE_SECONDS = 10.0
"""Rows of which no journal has said anything new for so long do not come."""
MARGIN_SECONDS = 10.0
POLL_SECONDS = 0.05


def burst(args: BurstArgs, ctx: AgentContext) -> BurstResult:
    """Measure the servers, all at the same time. Raises ``AgentFailure`` when one does not run, does not capture what
    is wanted, answers an error, or wrote none of it."""
    checks = [SelfCheckArgs(server, args.capture) for server in args.servers]
    records = [capturing_server(check, ctx.state) for check in checks]
    threads = Threads()
    for record, check in zip(records, checks):
        threads.run(lambda record=record, check=check: _measure(record, check, args, ctx))  # type: ignore[misc]
    rates: Dict[str, float] = {}
    while len(rates) < len(records):
        rate = threads.next(max(1.0, ctx.remaining()))
        if rate is None:
            raise AgentFailure("timeout", "the burst did not end in time", next_step="fleetdump diagnose")
        rates[rate[0]] = rate[1]
    return BurstResult(rates)


def _measure(record: ServerRecord, check: SelfCheckArgs, args: BurstArgs, ctx: AgentContext) -> Tuple[str, float]:
    with run_of_its_own(record, check, ctx.state) as directory:
        rate = _Burst(record, args, directory).rate(min(args.seconds, ctx.remaining() - MARGIN_SECONDS))
        give_up = time.monotonic() + SETTLE_SECONDS
        while any(directory.glob("**/*.part")) and time.monotonic() < give_up:
            time.sleep(POLL_SECONDS)  # a run that is removed under an open shard leaves errors in the server's log
        return record.name, rate


class _Burst:
    """The burst on one server."""

    def __init__(self, record: ServerRecord, args: BurstArgs, directory: Path):
        self._record = record
        self._headers = authorization(record.pid, record.start_time)
        self._budget = args.token_budget
        self._run = directory.name
        self._journals = Journals(directory, record.name, lambda _: True)
        context = context_length(record.port, self._headers)
        longest = context - 1 if context else max(args.lengths)
        self._lengths = [min(length, longest) for length in args.lengths if length > 0]
        vocabulary = vocabulary_size(record.model_path) or VOCABULARY
        self._usual = range(vocabulary // 20, vocabulary // 2)  # without both ends, where special tokens are
        self._source = random.Random(vocabulary)  # noqa: S311 (nothing secret)
        self._threads = Threads()
        self._sent = 0

    def rate(self, seconds: float) -> float:
        """Tokens a second, from the first request to the last row in a journal."""
        self._send(max(self._lengths))  # what compiles at first use is not the rate of a run
        self._answer()
        self._written()
        before = self._captured()
        began = time.monotonic()
        in_flight: Dict[int, int] = {}
        for length in self._lengths:
            while in_flight and sum(in_flight.values()) + length > self._budget:
                in_flight.pop(self._answer())
            if time.monotonic() - began > seconds:
                break
            in_flight[self._send(length)] = length
        while in_flight:
            in_flight.pop(self._answer())
        ended = self._written()
        tokens = self._captured() - before
        if tokens <= 0:
            raise AgentFailure(
                "failed", f"server {self._record.name} captured nothing of the burst", next_step="fleetdump selfcheck"
            )
        return tokens / (ended - began)

    def _send(self, length: int) -> int:
        """Start one request; its number."""
        self._sent += 1
        number = self._sent
        ids = [self._source.choice(self._usual) for _ in range(length)]
        rid = str(Rid(self._run, f"burst-{number}", 1))
        self._threads.run(lambda: (number, prefill(self._record.port, rid, ids, self._headers)))
        return number

    def _answer(self) -> int:
        """Wait for one reply; its number."""
        number, reply = self._threads.next(3600.0) or (0, Reply(0, "no answer"))
        if reply.status != 200:
            why = f"HTTP {reply.status} {reply.detail}".strip() if reply.status else reply.detail
            raise AgentFailure("failed", f"server {self._record.name} refused a request", why=why)
        return int(number)

    def _written(self) -> float:
        """Wait until the journals say no more, or have all; when the last of it was seen."""
        seen = time.monotonic()
        while time.monotonic() - seen < SETTLE_SECONDS:
            if self._journals.poll():
                seen = time.monotonic()
            if len(self._settled()) >= self._sent:
                break
            time.sleep(POLL_SECONDS)
        return seen

    def _settled(self) -> Set[str]:
        return {rid for rid, captured in self._journals.captured.items() if captured.skip or captured.pieces}

    def _captured(self) -> int:
        """Rows in the journals; of a pipeline those of one stage."""
        stages: Dict[Tuple[int, ...], List[int]] = {}
        for captured in self._journals.captured.values():
            for piece in captured.pieces:
                stages.setdefault(tuple(piece.slots), []).append(piece.rows)
        return max((sum(rows) for rows in stages.values()), default=0)
