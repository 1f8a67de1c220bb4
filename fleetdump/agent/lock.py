"""The host's lock: a directory with ``holder.json`` in it, so that two operators never change a host at once."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import shutil
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Iterator, Optional

from fleetdump.agent.context import AgentContext
from fleetdump.agent.procfs import is_alive, start_time
from fleetdump.agent.protocol import AgentFailure, from_json, to_json
from fleetdump.agent.records import NOT_WRITABLE, naming

BELIEVABLE_SECONDS = 10 * 365 * 86400.0
"""A lock that claims to be older is not told its age: its clock, or the file, is wrong."""

POLL_SECONDS = 0.5


@dataclass
class Holder:
    """Who holds the lock. ``host`` is the node's name; ``start_time`` tells its ``pid`` from a later process."""

    operator: str
    host: str
    pid: int
    start_time: int
    verb: str
    since: float


@contextlib.contextmanager
def host_lock(ctx: AgentContext, urgent: bool = False) -> Iterator[None]:
    """Hold the host's lock; raises ``AgentFailure`` code ``locked`` that names the holder when it is taken.

    With ``Request.lock_wait`` the lock is waited for, said in an event. A lock whose holder is dead (killed agent,
    reboot) is taken over. ``urgent``: on a disk that takes no more the call goes on without the lock, unless somebody
    holds it, and says so on stderr. Other ``OSError`` name the lock.
    """
    directory = ctx.state.root / "lock"
    me = Holder(
        operator=ctx.request.operator,
        host=os.uname().nodename,
        pid=os.getpid(),
        start_time=start_time(os.getpid()) or 0,
        verb=ctx.request.verb,
        since=time.time(),
    )
    try:
        with naming(directory):
            ctx.state.directory()
            _acquire_waiting(directory, me, ctx)
    except OSError as error:
        if not urgent or error.errno not in NOT_WRITABLE:
            raise
        _refuse_held(directory)
        print(f"this host is not locked meanwhile: {error}", file=sys.stderr)
        yield
        return
    try:
        yield
    finally:
        _release(directory)


def _refuse_held(directory: Path) -> None:
    holder = read_holder(directory)
    if holder is not None and is_alive(holder.pid, holder.start_time):
        raise _busy(holder)


def read_holder(directory: Path) -> Optional[Holder]:
    """The holder that ``directory`` names, None when nobody holds it."""
    try:
        return from_json(Holder, json.loads((directory / "holder.json").read_text()))
    except (FileNotFoundError, NotADirectoryError, ValueError, OverflowError, RecursionError):
        return None


def _acquire_waiting(directory: Path, me: Holder, ctx: AgentContext) -> None:
    end = time.monotonic() + min(ctx.request.lock_wait, ctx.remaining())
    said = ""
    while True:
        try:
            return _acquire(directory, me)
        except AgentFailure as busy:
            if time.monotonic() >= end:
                raise
            holder = held_by(directory)
            if holder and holder != said:
                said = holder
                ctx.emit("locked", text=f"waiting for the host's lock: {busy.error.why}")
        time.sleep(POLL_SECONDS)


def held_by(directory: Path) -> str:
    """Who holds the lock, in words; empty when nobody alive does."""
    holder = read_holder(directory)
    if holder is None or not is_alive(holder.pid, holder.start_time):
        return ""
    return f"{holder.operator or 'somebody'} runs {holder.verb} (pid {holder.pid})"


def _acquire(directory: Path, me: Holder) -> None:
    """Put a directory that already holds ``me`` in place by rename: it fails on any lock that is not empty, so there is
    no moment at which a lock exists without its holder."""
    ready = directory.with_name(f"lock.{me.pid}.{me.start_time}")
    try:
        ready.mkdir(mode=0o700, exist_ok=True)
        (ready / "holder.json").write_text(json.dumps(to_json(me)))
        if _put(ready, directory):
            return
        with _takeover_guard(directory):
            _refuse_held(directory)
            shutil.rmtree(str(directory), ignore_errors=True)
            if _put(ready, directory):
                return
        raise _busy(read_holder(directory))
    finally:
        shutil.rmtree(str(ready), ignore_errors=True)


def _put(ready: Path, directory: Path) -> bool:
    try:
        os.rename(str(ready), str(directory))
    except OSError as error:
        if error.errno in (errno.ENOTEMPTY, errno.EEXIST):
            return False
        raise
    return True


@contextlib.contextmanager
def _takeover_guard(directory: Path) -> Iterator[None]:
    """One taker at a time, else the second could remove the lock that the first has just put in a dead one's place."""
    descriptor = os.open(str(directory.with_name("lock.guard")), os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _release(directory: Path) -> None:
    """An empty ``lock/`` is free; whoever takes it between the two steps makes the rmdir fail, which is right."""
    with contextlib.suppress(OSError):
        os.unlink(str(directory / "holder.json"))
        os.rmdir(str(directory))


def _busy(holder: Optional[Holder]) -> AgentFailure:
    if holder is None:
        return AgentFailure("locked", "the host is locked", next_step="try again")
    age = time.time() - holder.since
    since = f" since {age:.0f} s" if 0 <= age < BELIEVABLE_SECONDS else ""
    return AgentFailure(
        "locked",
        "the host is locked",
        where=holder.host,
        why=f"{holder.operator or 'somebody'} runs {holder.verb} there{since} (pid {holder.pid})",
        next_step="wait until it ends, or ask that operator",
    )
