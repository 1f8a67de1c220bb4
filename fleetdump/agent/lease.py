"""The lease of a host: a deploy holds it from its first step to its last, so that two of them never take turns.

Every verb locks the host for itself, for moments (``lock``); a deploy is many verbs, with hours between the first and
the last. Its lease is a lock of the same kind whose holder is the agent of one ``hold`` call, which lives as long as
the controller does: whatever ends that one, nothing stays locked.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

from fleetdump.agent import lock
from fleetdump.agent.context import AgentContext, State
from fleetdump.agent.hostmessages import HoldArgs, HoldResult, ReleaseArgs, ReleaseResult

FOLDER = "lease"
POLL_SECONDS = 0.2
BEAT_SECONDS = 10.0
"""Between two signs of life, by which a dead link shows: sshd ends a session whose packets nobody takes."""


def hold(args: HoldArgs, ctx: AgentContext) -> HoldResult:
    """Hold the host until ``release`` or the deadline; raises ``AgentFailure`` locked when another deploy has it."""
    directory = _directory(ctx.state)
    lock.take(directory, ctx, args.verb, args.lease)
    began = beat = time.monotonic()
    try:
        ctx.emit("held")
        while _is_mine(directory, args.lease) and ctx.remaining() > 1.0:
            time.sleep(POLL_SECONDS)
            if time.monotonic() - beat > BEAT_SECONDS:
                beat = time.monotonic()
                ctx.emit("alive")
    finally:
        if _is_mine(directory, args.lease):
            lock.release(directory)
    return HoldResult(round(time.monotonic() - began, 3))


def release(args: ReleaseArgs, ctx: AgentContext) -> ReleaseResult:
    """Give the host back; its ``hold`` ends by itself."""
    directory = _directory(ctx.state)
    holder = lock.read_holder(directory)
    if holder is None or holder.lease != args.lease:
        return ReleaseResult(False)
    lock.release(directory)
    return ReleaseResult(True)


def respect(ctx: AgentContext) -> None:
    """Raise ``AgentFailure`` locked for a request that is not of the deploy which has the host."""
    lock.refuse_other_lease(_directory(ctx.state), ctx)


def held_by(state: State) -> str:
    """Whose deploy has the host, in words; empty when none has."""
    return lock.held_by(_directory(state))


def _directory(state: State) -> Path:
    return state.root / FOLDER


def _is_mine(directory: Path, lease: str) -> bool:
    holder = lock.read_holder(directory)
    return holder is not None and holder.lease == lease and holder.pid == os.getpid()
