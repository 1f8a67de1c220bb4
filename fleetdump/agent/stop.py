"""End servers of ours, and nothing else (verb ``stop``)."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from dataclasses import dataclass, field
from typing import List, Optional, Tuple

from fleetdump.agent import gpumemory, procfs
from fleetdump.agent.context import AgentContext
from fleetdump.agent.formats import server_of
from fleetdump.agent.procfs import ProcSample
from fleetdump.agent.protocol import AgentFailure
from fleetdump.agent.records import NOT_WRITABLE
from fleetdump.agent.runmessages import DRAIN
from fleetdump.agent.server import ServerRecord, living, load_record, readable_records, save_record
from fleetdump.agent.servermessages import StopArgs, StopResult
from fleetdump.agent.share import Share, runs_of, shares_of

POLL = 0.1
ORPHAN_GRACE = 3.0
"""Seconds that processes get to end by themselves once their launcher is gone."""
KILL_WAIT = 10.0


def stop(args: StopArgs, ctx: AgentContext) -> StopResult:
    """Stop servers of ours; processes of other sessions are never touched. A server whose record cannot be read is an
    ``AgentFailure``, once all others have been stopped."""
    result = StopResult()
    records, unreadable = readable_records(ctx.state)
    for name in args.servers or [record.name for record in records]:
        if name in unreadable:
            continue
        record = load_record(ctx.state, name)
        if record is None or not living(record):
            if record is not None and not record.stopped_at:
                _note_stop(record, ctx, time.time(), ended=True)  # a run's controller would bring back what died
            result.absent.append(name)
            continue
        ended = end_server(record, ctx, args.grace)
        (result.killed if ended.killed else result.stopped).append(name)
        result.gpu_freed += ended.gpu_freed
        result.gpu_held += ended.gpu_held
    for name, failure in unreadable.items():
        if not args.servers or name in args.servers:
            raise _cannot_stop(name, failure, result)
    _mind_drivers(ctx, result)
    return result


def _mind_drivers(ctx: AgentContext, result: StopResult) -> None:
    """Name the extractions that wait for the servers; one that this host was drained of waits for nobody."""
    gone = {*result.stopped, *result.killed}
    for share in (share for run in runs_of(ctx.state) for share in shares_of(ctx.state, run)):
        server, name = server_of(share.server), f"{share.run} on {share.server}"
        if not share.driver_alive():
            continue
        if server in {*gone, *result.absent} and share.progress().order == DRAIN:
            _end_driver(share)
            result.left.append(name)
        elif server in gone:
            result.waiting.append(name)


def _end_driver(share: Share) -> None:
    """What it has not given away is given away without it, or by the next one, which an ``extract`` starts."""
    claim = None
    with contextlib.suppress(OSError):  # a disk that takes no more: it has ended all the same
        claim = share.stop_driver()
    if claim is not None:
        claim.close()


def _cannot_stop(name: str, failure: AgentFailure, result: StopResult) -> AgentFailure:
    error = failure.error
    others = ", ".join([*result.stopped, *result.killed])
    what = f"server {name} cannot be stopped: {error.what}" + (f" (stopped: {others})" if others else "")
    return AgentFailure(error.code, what, error.where, error.why, error.next_step)


@dataclass
class Ended:
    """How a server ended: whether a process of it had to be killed, and what became of its GPU memory (as in
    ``StopResult``)."""

    killed: bool
    gpu_freed: int = 0
    gpu_held: List[str] = field(default_factory=list)


def end_server(record: ServerRecord, ctx: AgentContext, grace: float) -> Ended:
    """End every process of the server's session, and see its GPU memory come free. The record says so from before the
    first signal on, so that whoever watches the server does not take its end for a death."""
    memory = gpumemory.in_use([member.pid for member in living(record)])
    _note_stop(record, ctx, time.time())
    _signal(_terminable(record), record, signal.SIGTERM)
    _wait(record, min(grace, max(1.0, ctx.remaining() - KILL_WAIT)))
    killed = False
    deadline = time.monotonic() + KILL_WAIT
    while True:
        left = living(record)
        if not left:
            break
        if time.monotonic() > deadline:
            _note_stop(record, ctx, 0.0)
            raise _unkillable(record, left)
        killed = True
        _signal(left, record, signal.SIGKILL)
        time.sleep(POLL)
    _note_stop(record, ctx, time.time(), ended=True)
    return Ended(killed, *gpumemory.wait_until_free(memory, min(gpumemory.FREE_SECONDS, max(0.0, ctx.remaining() - 5))))


def _note_stop(record: ServerRecord, ctx: AgentContext, at: float, ended: bool = False) -> None:
    """Write ``stopped_at``; a disk that takes no more must not keep a server from being stopped."""
    current = load_record(ctx.state, record.name) or record
    current.ready = current.ready and not ended
    current.stopped_at = at
    try:
        save_record(ctx.state, current)
    except OSError as error:
        if error.errno not in NOT_WRITABLE:
            raise
        if ended:
            print(f"{record.name} is stopped without a note of it: {error}", file=sys.stderr)


def _terminable(record: ServerRecord) -> List[ProcSample]:
    """The launcher, which ends its children itself; where it is dead, all that it left."""
    members = living(record)
    return [m for m in members if m.pid == record.pid] or members


def _wait(record: ServerRecord, grace: float) -> None:
    """Until nothing is left, ``grace`` is over, or the launcher has been gone for ``ORPHAN_GRACE``."""
    end = time.monotonic() + grace
    orphaned: Optional[float] = None
    while time.monotonic() < end:
        left = living(record)
        if not left:
            return
        if all(m.pid != record.pid for m in left):
            orphaned = orphaned or time.monotonic()
            if time.monotonic() - orphaned > ORPHAN_GRACE:
                return
        time.sleep(POLL)


def _signal(members: List[ProcSample], record: ServerRecord, number: int) -> None:
    """Signal each process after making sure that it is still the same one, in the same session."""
    for member in members:
        stat = procfs.read_stat(member.pid)
        if stat and stat.start_time == member.start_time and stat.sid == record.pid:
            with contextlib.suppress(ProcessLookupError):
                os.kill(member.pid, number)


def _unkillable(record: ServerRecord, left: List[ProcSample]) -> AgentFailure:
    where, states = _names(left)
    return AgentFailure(
        "failed",
        f"server {record.name} does not end",
        where=where,
        why=f"SIGKILL has no effect for {KILL_WAIT:.0f} s (process state {states}: D waits inside the kernel)",
        next_step="see `fleetdump diagnose`; a driver or a file system that hangs needs its own repair or a reboot",
    )


def _names(members: List[ProcSample]) -> Tuple[str, str]:
    return "pid " + ", ".join(str(m.pid) for m in members), ", ".join(sorted({m.state for m in members}))
