"""Verb ``withdraw``: a share gives samples away that it has not begun, so that another server can work on them.

The share's driver decides which, since it knows what is in flight; where none lives, this process takes the claim and
decides. Either way a sample may be given on only when it stands in withdrawn.jsonl, durable.
"""

from __future__ import annotations

import json
import sys
import time
from contextlib import suppress
from dataclasses import dataclass
from typing import List, Sequence, Set, Tuple

from fleetdump.agent import audit
from fleetdump.agent.context import AgentContext, State
from fleetdump.agent.formats import WithdrawnLine
from fleetdump.agent.jsonl import append_lines, open_lines, read_lines, write_json
from fleetdump.agent.protocol import AgentFailure
from fleetdump.agent.runmessages import (
    CANCEL,
    PAUSE,
    DoneArgs,
    DoneResult,
    HeldArgs,
    HeldResult,
    WithdrawArgs,
    WithdrawResult,
)
from fleetdump.agent.share import Share, ShareSpec, shares_of, valid_names
from fleetdump.agent.turn import respect_controller

ANSWER_SECONDS = 30.0
POLL_SECONDS = 0.1


@dataclass
class WithdrawRequest:
    """``withdraw.json``: give samples away, of about ``tokens`` together."""

    tokens: int
    v: int = 1


def withdraw(args: WithdrawArgs, ctx: AgentContext) -> WithdrawResult:
    """See ``WithdrawArgs``. ``AgentFailure`` timeout when a driver lives and does not answer; what it gives away later
    is told by the next call."""
    share, _ = _known(ctx.state, args.run, args.share)
    if args.tokens > 0 and _may_give(share):
        respect_controller(ctx, args.run)
        began, clock, before = time.time(), time.monotonic(), len(share.read_withdrawn())
        _ask(share, args.tokens)
        if len(share.read_withdrawn()) > before:
            _note(ctx, began, time.monotonic() - clock)
    return WithdrawResult(share.read_withdrawn())


def _note(ctx: AgentContext, began: float, seconds: float) -> None:
    """In the audit log. What is given away is given away, also where that takes no line."""
    try:
        audit.record(ctx, ok=True, started=began, seconds=seconds)
    except OSError as error:
        print(f"this call is not audited: {error}", file=sys.stderr)


def held(args: HeldArgs, ctx: AgentContext) -> HeldResult:
    """See ``HeldArgs``."""
    share, spec = _known(ctx.state, args.run, args.share)
    away = set(share.read_withdrawn())
    with open(share.rows, "rb") as file:
        given = [json.loads(line)["id"] for line in file]
    return HeldResult([sample for sample in given if sample not in away], spec.share_sha256)


def done(args: DoneArgs, ctx: AgentContext) -> DoneResult:
    """See ``DoneArgs``."""
    wanted = {str(line["id"]) for line in ctx.body()}
    found: List[str] = []
    for share in shares_of(ctx.state, args.run):
        found += [line["id"] for line in read_lines(share.manifest)[0] if line["id"] in wanted]
    return DoneResult(found)


def _known(state: State, run: str, name: str) -> Tuple[Share, ShareSpec]:
    share = Share.of(state, run, name)
    spec = share.spec() if valid_names(run, name) else None
    if spec is None:
        raise AgentFailure("not_found", f"no share {name} in run {run} on this host")
    return share, spec


def _may_give(share: Share) -> bool:
    """A run that is paused as a whole rests everywhere, and nobody shall have what is cancelled."""
    progress = share.progress()
    return not (progress.order == CANCEL or (progress.order == PAUSE and progress.whole_run))


def give_away(share: Share, ids: Sequence[str]) -> None:
    """Note that these samples are not the share's any more; the caller is, or stands for, its driver."""
    if ids:
        with open_lines(share.withdrawn) as file:
            append_lines(file, [WithdrawnLine(sample, time.time()) for sample in ids])


def _ask(share: Share, tokens: int) -> None:
    write_json(share.request, WithdrawRequest(tokens))
    give_up = time.monotonic() + ANSWER_SECONDS
    while share.request.exists():
        claim = share.claim()
        if claim is not None:
            with claim:
                give_away(share, _not_begun(share, tokens))
                share.request.unlink()
            return
        if time.monotonic() > give_up:
            with suppress(FileNotFoundError):
                share.request.unlink()
            raise AgentFailure(
                "timeout", f"the driver of {share.server} does not answer", str(share.log), next_step="try again later"
            )
        time.sleep(POLL_SECONDS)


def _not_begun(share: Share, tokens: int) -> List[str]:
    """Samples of a share that no driver works on, of about ``tokens`` together. What was sent is left to the next
    driver: its rows may be on the disk already."""
    if not share.work.exists():
        return []
    begun = {line.id for line in share.read_attempts()} | _settled(share)
    taken: List[str] = []
    for sample, _ in share.scan_work():
        if tokens > 0 and sample is not None and sample.id not in begun:
            tokens -= sample.tokens
            taken.append(sample.id)
    return taken


def _settled(share: Share) -> Set[str]:
    files = (share.manifest, share.rejected, share.withdrawn)
    return {line["id"] for path in files for line in read_lines(path)[0]}
