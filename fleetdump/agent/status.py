"""What of ours is on this host, and the servers' logs."""

from __future__ import annotations

import contextlib
import os
import time
from collections import deque
from pathlib import Path
from typing import BinaryIO, Deque, Iterator, List, Optional

from fleetdump.agent import patching
from fleetdump.agent.context import AgentContext, State
from fleetdump.agent.controlling import controllers_of
from fleetdump.agent.guard import Guard, Stuck
from fleetdump.agent.hostmessages import StatusArgs, StatusResult
from fleetdump.agent.logfilter import LineFilter
from fleetdump.agent.patchmessages import PatchState
from fleetdump.agent.protocol import AgentFailure
from fleetdump.agent.runmessages import RunProgress
from fleetdump.agent.scrub import scrub
from fleetdump.agent.server import readable_records, server_states
from fleetdump.agent.servermessages import LogsArgs, LogsResult
from fleetdump.agent.share import runs_of, shares_of
from fleetdump.agent.specs import PHASES, Interpreter
from fleetdump.agent.tapstatus import taps_of
from fleetdump.agent.turn import steering_of_all

BLOCK = 1 << 20
POLL = 0.2
DISK_SECONDS = 2.0


# --------------------------------------------------------------------------- status
def status(args: StatusArgs, ctx: AgentContext) -> StatusResult:
    """Servers, runs and, with ``args.interpreter``, the patch of that engine. Changes nothing, makes no directory."""
    servers = server_states(ctx.state)
    for server in servers:
        server.disk_free = _free(server.capture_dir)
    return StatusResult(
        hostname=os.uname().nodename,
        servers=servers,
        shares=progress_of_all(ctx.state),
        patch=_patch_state(args.interpreter, ctx) if args.interpreter else None,
        state_bytes=tree_bytes(ctx.state.root),
        taps=[tap for server in servers for tap in taps_of(ctx.state, server.name, server.launch_id)],
        controllers=controllers_of(ctx.state),
        steering=steering_of_all(ctx.state),
    )


def _patch_state(interpreter: Interpreter, ctx: AgentContext) -> PatchState:
    limit = max(1.0, min(30.0, ctx.remaining()))
    return patching.read_state(interpreter.python, env=interpreter.env, timeout=limit)


def _free(path: str) -> int:
    """Bytes free on the file system of ``path``; -1 without one, and for one that does not answer (a dead mount)."""
    with contextlib.suppress(OSError, Stuck):
        if path:
            stat = Guard(DISK_SECONDS).call(lambda: os.statvfs(path))
            return stat.f_bavail * stat.f_frsize
    return -1


def progress_of_all(state: State) -> List[RunProgress]:
    """Progress of every share on this host, by run and server."""
    return [share.progress() for run in runs_of(state) for share in shares_of(state, run)]


def tree_bytes(root: Path) -> int:
    """Bytes of all files below ``root``; links are not followed."""
    total = 0
    for folder, _, names in os.walk(str(root)):
        for name in names:
            with contextlib.suppress(FileNotFoundError):
                total += os.lstat(os.path.join(folder, name)).st_size
    return total


# --------------------------------------------------------------------------- logs
def logs(args: LogsArgs, ctx: AgentContext) -> LogsResult:
    """The log's last lines, secrets hidden; with ``follow`` they and every new line come as ``log`` events, across
    restarts of the server, until the deadline."""
    path = ctx.state.root / "servers" / args.server / "server.log"
    try:
        log = open(str(path), "rb")  # noqa: SIM115 (follow changes files)
    except FileNotFoundError:
        known = ", ".join(one.name for one in server_states(ctx.state)) or "none"
        raise AgentFailure(
            "not_found",
            f"server {args.server} has no log here",
            where=str(path),
            why=f"servers of ours on this host: {known}",
            next_step="launch it with `fleetdump deploy`, or name another server",
        ) from None
    wanted = _filter(args, ctx)
    with log:
        total = count_lines(log)
        found = tail(log, args.lines) if wanted is None else filtered(log, args.lines, wanted)
        lines = [scrub(line) for line in found]
    if not args.follow:
        return LogsResult(str(path), total, lines)
    for line in lines:
        ctx.emit("log", server=args.server, line=line)
    for line in follow(path, ctx):
        total += 1
        if wanted is None or wanted.keeps(line):
            ctx.emit("log", server=args.server, line=scrub(line))
    return LogsResult(str(path), total)


def _filter(args: LogsArgs, ctx: AgentContext) -> Optional[LineFilter]:
    """None when every line is wanted. Raises ``AgentFailure`` usage for a phase or a rank that there is not."""
    if args.rank < 0 and not args.phase:
        return None
    if args.phase and args.phase not in PHASES:
        raise AgentFailure("usage", f"there is no phase {args.phase}", next_step=f"one of {', '.join(PHASES)}")
    records, _ = readable_records(ctx.state)
    record = next((record for record in records if record.name == args.server), None)
    if record is not None and args.rank >= record.ranks:
        has = f"it has ranks 0 to {record.ranks - 1}" if record.ranks > 1 else "it has rank 0 alone"
        what = f"server {args.server} has no rank {args.rank}"
        raise AgentFailure("usage", what, why=has, next_step="give one of those as --rank")
    return LineFilter(args.rank, args.phase, record.ranks if record else 1)


def filtered(log: BinaryIO, lines: int, wanted: LineFilter) -> List[str]:
    """The last ``lines`` of the lines that are wanted; the whole log is read for that."""
    log.seek(0)
    kept: Deque[str] = deque(maxlen=lines)
    for raw in log:
        kept.extend(line for line in _lines(raw) if wanted.keeps(line))
    return list(kept)


def _lines(data: bytes) -> List[str]:
    """Text in lines, each state of a progress bar (which ends with a carriage return) being one."""
    return [line.decode("utf-8", "replace") for line in data.splitlines()]


def count_lines(log: BinaryIO) -> int:
    """Number of lines; a last one without its newline counts."""
    log.seek(0)
    count, last = 0, b"\n"
    for block in iter(lambda: log.read(BLOCK), b""):
        count += block.count(b"\n")
        last = block[-1:]
    return count + (last != b"\n")


def tail(log: BinaryIO, lines: int) -> List[str]:
    """The last ``lines`` lines, reading from the end only as far as needed."""
    if lines <= 0:
        return []
    start = log.seek(0, os.SEEK_END)
    data = b""
    while start > 0 and data.count(b"\n") <= lines:
        size = min(start, BLOCK)
        start -= size
        log.seek(start)
        data = log.read(size) + data
    return _lines(data)[-lines:]


def follow(path: Path, ctx: AgentContext) -> Iterator[str]:
    """Lines that are appended from now on, until the deadline. When the log is rotated, the rest of the old file comes
    first, then the new one from its start."""
    log = open(str(path), "rb")  # noqa: SIM115 (changes with each rotation)
    log.seek(0, os.SEEK_END)
    rest = b""
    try:
        while ctx.remaining() > 1.0:
            data = log.read(BLOCK)
            if data:
                whole, newline, rest = (rest + data).rpartition(b"\n")
                yield from _lines(whole + newline)
            elif _is_other_file(log, path):
                yield from _lines(rest)
                log.close()
                log, rest = open(str(path), "rb"), b""  # noqa: SIM115
            else:
                time.sleep(POLL)
    finally:
        log.close()


def _is_other_file(log: BinaryIO, path: Path) -> bool:
    try:
        there = os.stat(str(path))
    except FileNotFoundError:
        return False
    return not os.path.samestat(os.fstat(log.fileno()), there)
