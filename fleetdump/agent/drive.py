"""The verbs of an extraction: ``submit`` a share, ``follow`` its progress, read its ``manifest``."""

from __future__ import annotations

import hashlib
import os
import shutil
import sys
import time
from pathlib import Path
from typing import Iterator, List, Tuple

from fleetdump.agent.context import AgentContext, State
from fleetdump.agent.detach import spawn_detached
from fleetdump.agent.formats import row_line, server_of
from fleetdump.agent.gate import capture_mismatch
from fleetdump.agent.jsonl import replacing
from fleetdump.agent.procfs import is_alive
from fleetdump.agent.protocol import AgentFailure
from fleetdump.agent.runmessages import (
    CANCEL,
    FINISHED,
    ORDERS,
    PAUSE,
    TOO_LONG,
    FollowArgs,
    FollowResult,
    ManifestArgs,
    ManifestResult,
    OrderArgs,
    OrderResult,
    RunProgress,
    SubmitArgs,
)
from fleetdump.agent.server import PASSED, load_record
from fleetdump.agent.share import Order, Share, ShareSpec, shares_of, valid_names
from fleetdump.agent.turn import respect_controller

START_SECONDS = 10.0
GONE_SECONDS = 5.0
"""A dead driver is not gone at once: another controller may start it again."""
MIN_FREE_BYTES = 1 << 30
"""Less free space than this on the capture disk is not worth starting on."""

DRIVER_CODE = "import sys;sys.path.insert(0,sys.argv[1]);from fleetdump.agent.driver import main;main(sys.argv[2:])"


def submit(args: SubmitArgs, ctx: AgentContext) -> RunProgress:
    """Take in a share and start its driver. The same share again only makes sure that its driver runs."""
    if not valid_names(args.run, args.server):
        raise AgentFailure("usage", f"not a run or server name: {args.run!r}, {args.server!r}")
    respect_controller(ctx, args.run)
    share = Share.of(ctx.state, args.run, args.server)
    known = share.spec()
    if known is None:
        _refuse_cancelled(share)
        _check_server(args, ctx.state)
        _check_disk(args)
        ctx.state.share(args.run, args.server)
        rows = _receive(share, args, ctx)
        share.save_spec(_spec(args, rows))
    else:
        for _ in ctx.body():
            pass  # read to the end: a controller must not be left writing into a closed pipe
        if known.share_sha256 != args.share_sha256:
            raise AgentFailure(
                "conflict",
                f"run {args.run} already has another share for server {args.server}",
                where=str(share.root),
                why="a share is fixed once it is submitted: its samples are on their way or done",
                next_step="use another --run name for other data",
            )
        _require_same_limits(known, args)
    if share.progress().state != "done":
        start_driver(ctx.state, share)
    return share.progress()


def order(args: OrderArgs, ctx: AgentContext) -> OrderResult:
    """Leave an order for the run's shares on this host, those that come later too; a cancelled run cannot be resumed.
    An order that cannot be read is replaced."""
    if args.order not in ORDERS:
        raise AgentFailure("usage", f"not an order: {args.order!r}", next_step=f"one of {', '.join(ORDERS)}")
    shares = _require_shares(ctx.state, args.run)
    try:
        before = shares[0].order()
    except AgentFailure:
        before = None
    if before is None or before.order != CANCEL:
        shares[0].give_order(None if args.order == "resume" else _order(args, ctx))
    elif args.order == CANCEL and args.whole_run and not before.whole_run:
        shares[0].give_order(_order(args, ctx))
    for share in shares:
        if args.order != PAUSE and share.progress().state not in FINISHED:
            start_driver(ctx.state, share)
    return OrderResult([share.progress() for share in shares])


def _order(args: OrderArgs, ctx: AgentContext) -> Order:
    return Order(args.order, ctx.request.operator, time.time(), args.whole_run)


def follow(args: FollowArgs, ctx: AgentContext) -> FollowResult:
    """Stream the progress of every share of the run, also of those that come meanwhile, until all are finished (or
    nearly so, see ``FollowArgs``) or the deadline comes; one who only watches is let go when no driver has lived for
    ``GONE_SECONDS``."""
    worked_on = time.monotonic()
    while True:
        shares = _require_shares(ctx.state, args.run)
        states = [share.progress() for share in shares]
        for share, progress in zip(shares, states):
            if args.revive and progress.state == "stopped":
                start_driver(ctx.state, share)
            ctx.emit("progress", progress=progress)
        if args.revive or any(progress.state not in (*FINISHED, "stopped") for progress in states):
            worked_on = time.monotonic()
        is_over = all(progress.state in FINISHED for progress in states) or _end_soon(states, args.ahead)
        if is_over or time.monotonic() - worked_on > GONE_SECONDS or ctx.remaining() < 2 * args.interval:
            return FollowResult(states)
        time.sleep(args.interval)


def _end_soon(states: List[RunProgress], seconds: float) -> bool:
    """Whether all that is left will be done within that time."""
    left = [progress for progress in states if progress.state not in (*FINISHED, "closing")]
    return seconds > 0 and all(
        progress.state == "running" and progress.tokens_per_second > 0 and progress.eta_seconds <= seconds
        for progress in left
    )


def manifest(args: ManifestArgs, ctx: AgentContext) -> ManifestResult:
    """Send whole manifest and reject lines from the given offsets on."""
    share = Share.of(ctx.state, args.run, args.server)
    if not valid_names(args.run, args.server) or share.spec() is None:
        raise AgentFailure("not_found", f"no share of server {args.server} in run {args.run} on this host")
    progress = share.progress()
    offset, rejected_offset = args.offset, args.rejected_offset
    for line, offset in whole_lines(share.rejected, args.rejected_offset):
        ctx.emit("rejected", line=line, end=offset)
        rejected_offset = offset
    offset = args.offset
    for line, end in whole_lines(share.manifest, args.offset):
        ctx.emit("manifest", line=line, end=end)
        offset = end
    return ManifestResult(offset, rejected_offset, progress)


def _require_shares(state: State, run: str) -> List[Share]:
    shares = shares_of(state, run)
    if not shares:
        raise AgentFailure("not_found", f"no run {run} on this host", next_step="fleetdump extract --run NAME")
    return shares


def start_driver(state: State, share: Share) -> None:
    """Start the share's driver, detached, and wait until it has claimed the share. Harmless when one runs already: the
    second finds the claim taken and ends."""
    bundle = Path(__file__).resolve().parents[2]
    argv = [sys.executable, "-I", "-B", "-c", DRIVER_CODE, str(bundle), str(state.root), share.run, share.server]
    pid, started = spawn_detached(argv, log_path=share.log)
    give_up = time.monotonic() + START_SECONDS
    while time.monotonic() < give_up:
        if share.driver_alive():
            return
        if not is_alive(pid, started):
            break
        time.sleep(0.02)
    if share.driver_alive() or share.progress().state in FINISHED:
        return
    raise AgentFailure("failed", "the extraction driver did not start", where=str(share.log), why=_tail(share.log))


def whole_lines(path: Path, offset: int) -> Iterator[Tuple[str, int]]:
    """Each line from byte ``offset`` on that has its newline, with the byte after it. Bytes that are not UTF-8 come as
    lone surrogates, which no good line has: whoever checks it refuses that line alone. Raises ``AgentFailure`` when
    ``offset`` is not where a line of this file begins: then it is not the file that was read before."""
    if not path.exists():
        return
    with open(path, "rb") as file:
        if offset:
            file.seek(offset - 1)
            if file.read(1) != b"\n":
                raise AgentFailure(
                    "conflict", f"no line begins at byte {offset}", str(path), "the file is not the one read before"
                )
        for line in file:
            if not line.endswith(b"\n"):
                return
            offset += len(line)
            yield line[:-1].decode(errors="surrogateescape"), offset


def _receive(share: Share, args: SubmitArgs, ctx: AgentContext) -> int:
    """Write rows.jsonl from the request's body, all or nothing; returns the number of rows."""
    digest = hashlib.sha256()
    rows = 0
    with replacing(share.rows, temporary=share.rows.with_name("rows.jsonl.tmp")) as out:
        for row in ctx.body():
            line = row_line(row)
            digest.update(line)
            out.write(line)
            rows += 1
        if digest.hexdigest() != args.share_sha256:
            raise AgentFailure("failed", "the share arrived damaged", why="its SHA-256 differs", next_step="try again")
    return rows


def _spec(args: SubmitArgs, rows: int) -> ShareSpec:
    return ShareSpec(
        run=args.run,
        server=server_of(args.server),
        share_sha256=args.share_sha256,
        rows=rows,
        capture=args.capture,
        max_tokens=args.max_tokens or 0,
        token_budget=args.token_budget,
        max_attempts=args.max_attempts,
        engine=args.engine,
        patch_sha256=args.patch_sha256,
        model_sha256=args.model_sha256,
        submitted_at=time.time(),
        too_long=args.too_long or TOO_LONG[0],
        run_samples=args.run_samples,
    )


def _require_same_limits(known: ShareSpec, args: SubmitArgs) -> None:
    """Samples are tokenised once: a limit that comes later would be ignored."""
    for flag, begun_with, now in (
        ("--max-tokens", known.max_tokens, args.max_tokens),
        ("--too-long", known.too_long, args.too_long or None),
    ):
        if now is not None and now != begun_with:
            raise AgentFailure(
                "conflict",
                f"run {args.run} was begun with {flag} {begun_with}, not {now}",
                where=f"server {args.server}",
                why="its samples are tokenised already",
                next_step=f"leave {flag} away to go on with it; for other samples use another --run name",
            )


def _refuse_cancelled(share: Share) -> None:
    """What is new to a cancelled run would be rejected at once, though another host could work on it."""
    order = share.order()
    if order is not None and order.order == CANCEL:
        raise AgentFailure(
            "conflict",
            f"run {share.run} was cancelled on this host by {order.operator}",
            where=str(share.order_file),
            next_step="fleetdump collect brings what is done; use another --run name to compute more",
        )


def _check_server(args: SubmitArgs, state: State) -> None:
    record = load_record(state, server_of(args.server))
    if record is None:
        raise AgentFailure(
            "not_found",
            f"server {args.server} was never launched on this host",
            next_step="fleetdump deploy --patch hidden-states",
        )
    mismatch = capture_mismatch(record, args.capture)
    if mismatch:
        raise AgentFailure("conflict", mismatch, next_step="fleetdump deploy --replace --patch hidden-states")
    if record.selfcheck not in ("", PASSED) and not args.allow_failed_selfcheck:
        raise AgentFailure(
            "conflict",
            f"the last self-check of server {args.server} failed",
            why=record.selfcheck,
            next_step="fleetdump deploy checks it again; --allow-failed-selfcheck takes the numbers as they are",
        )


def _check_disk(args: SubmitArgs) -> None:
    directory = Path(os.path.expanduser(args.capture.dir))
    while not directory.exists():
        directory = directory.parent
    free = shutil.disk_usage(str(directory)).free
    if free < min(MIN_FREE_BYTES, args.capture.shard_bytes):
        raise AgentFailure(
            "disk_full",
            f"only {free / 2**20:.0f} MiB are free for shards",
            where=args.capture.dir,
            next_step="free space there, or set another capture.dir in the inventory",
        )


def _tail(path: Path) -> str:
    try:
        return "\n".join(path.read_text(errors="replace").splitlines()[-5:])
    except OSError:
        return ""
