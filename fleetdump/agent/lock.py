"""The host's lock: a directory with ``holder.json`` in it, so that two operators never change a host at once.

Whether the holder lives is asked of the kernel: it keeps an exclusive ``flock`` on its ``holder.json``, which ends with
its process however that dies, and which holds between containers that share a disk but see no processes of each other.
So there is no heartbeat that a busy machine could delay, no clock, and no time for which a dead holder's lock stays.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import re
import shlex
import shutil
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Callable, Dict, Iterator, Optional

from fleetdump.agent.context import AgentContext
from fleetdump.agent.jsonl import read_small, writer_lives
from fleetdump.agent.procfs import fd_targets, is_alive, read_text, start_time
from fleetdump.agent.protocol import AgentFailure, from_json, to_json
from fleetdump.agent.records import NOT_WRITABLE, UNREADABLE, naming

BELIEVABLE_SECONDS = 10 * 365 * 86400.0
"""A lock that claims to be older is not told its age: its clock, or the file, is wrong."""

POLL_SECONDS = 0.5
GUARD_SECONDS = 30.0
"""Another taker has the guard for moments: one that has it for so long hangs, or is stopped."""
GUARD_POLL_SECONDS = 0.05
HOLDER = "holder.json"
GUARD = "lock.guard"
_FLOCK = re.compile(r"\d+: FLOCK +\S+ +\S+ +(?P<pid>\d+) (?P<major>[0-9a-f]+):(?P<minor>[0-9a-f]+):(?P<inode>\d+) ")
_kept: Dict[str, int] = {}
"""The descriptors whose ``flock`` says that this process holds a lock, by the lock's path."""


@dataclass
class Holder:
    """Who holds the lock. ``host`` is the node's name; ``start_time`` tells its ``pid`` from a later process of that
    number. Both are of the pid namespace that the holder lives in."""

    operator: str
    host: str
    pid: int
    start_time: int
    verb: str
    since: float
    lease: str = ""
    """Of a lease: the name by which the verbs of the same deploy know it."""


@contextlib.contextmanager
def host_lock(ctx: AgentContext, urgent: bool = False) -> Iterator[None]:
    """Hold the host's lock; raises ``AgentFailure`` code ``locked`` that names the holder when it is taken.

    With ``Request.lock_wait`` the lock is waited for, said in an event. A lock whose holder is dead (killed agent,
    reboot) is taken over. ``urgent``: on a disk that takes no more the call goes on without the lock, unless somebody
    holds it, and says so on stderr. Other ``OSError`` name the lock.
    """
    directory = ctx.state.root / "lock"
    try:
        take(directory, ctx)
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
        release(directory)


def take(directory: Path, ctx: AgentContext, verb: str = "", lease: str = "") -> None:
    """Take the lock ``directory`` for this process, waiting for it as the request says. Raises as ``host_lock``."""
    me = Holder(
        operator=ctx.request.operator,
        host=os.uname().nodename,
        pid=os.getpid(),
        start_time=start_time(os.getpid()) or 0,
        verb=verb or ctx.request.verb,
        since=time.time(),
        lease=lease,
    )
    with naming(directory):
        ctx.state.directory()
        wait_for(lambda: _acquire(directory, me), directory, ctx)


def refuse_other_lease(directory: Path, ctx: AgentContext) -> None:
    """Raise ``AgentFailure`` locked, after the wait that the request allows, while another deploy than the one that
    this request belongs to holds the lease ``directory``."""

    def refuse() -> None:
        holder = read_holder(directory)
        if holder is None or holder.lease != ctx.request.lease:
            _refuse_held(directory)

    wait_for(refuse, directory, ctx)


def _refuse_held(directory: Path) -> None:
    if is_held(directory):
        raise _busy(read_holder(directory))


def is_held(directory: Path) -> bool:
    """Whether somebody alive holds the lock: by its ``flock``, or, where the file system has none, by its pid."""
    with contextlib.suppress(OSError):
        if writer_lives(directory / HOLDER):
            return True
    holder = read_holder(directory)
    return holder is not None and is_alive(holder.pid, holder.start_time)


def damage(directory: Path) -> str:
    """What is wrong with the place of the lock, in words; empty when nothing is."""
    if directory.is_symlink():
        return f"in its place is a symbolic link to {os.readlink(str(directory))}"
    if directory.exists() and not directory.is_dir():
        return "in its place is a file"
    return guard_damage(directory.with_name(GUARD))


def guard_damage(guard: Path) -> str:
    """What is wrong with the guard of a place, in words; empty when nothing is."""
    if guard.is_symlink():
        return f"{guard} is a symbolic link"
    return f"{guard} is a folder" if guard.is_dir() else ""


def flock_holder(path: Path) -> int:
    """The process of this host that has an ``flock`` on the file, as the kernel says; 0 when none does, or when that
    cannot be told for sure (a process of another user, or of another container)."""
    with contextlib.suppress(OSError):
        stat = os.stat(str(path))
        wanted = (os.major(stat.st_dev), os.minor(stat.st_dev), stat.st_ino)
        for found in map(_FLOCK.match, (read_text("/proc/locks") or "").splitlines()):
            if found and (int(found["major"], 16), int(found["minor"], 16), int(found["inode"])) == wanted:
                pid = int(found["pid"])
                return pid if _has_open(pid, stat) else 0
    return 0


def _has_open(pid: int, file: os.stat_result) -> bool:
    """Who took a lock may have left it to a child and ended: then its number is nobody's, or another's."""
    for descriptor in fd_targets(pid):
        with contextlib.suppress(OSError):
            if os.path.samestat(os.stat(f"/proc/{pid}/fd/{descriptor}"), file):
                return True
    return False


def read_holder(directory: Path) -> Optional[Holder]:
    """The holder that ``directory`` names, None when nobody holds it."""
    try:
        return from_json(Holder, json.loads(read_small(directory / HOLDER)))
    except UNREADABLE:
        return None


def wait_for(attempt: Callable[[], None], directory: Path, ctx: AgentContext) -> None:
    """Repeat ``attempt`` while it raises ``AgentFailure``, for as long as the request waits for locks."""
    end = time.monotonic() + min(ctx.request.lock_wait, ctx.remaining())
    said = ""
    while True:
        try:
            return attempt()
        except AgentFailure as busy:
            if busy.error.code != "locked" or time.monotonic() >= end:
                raise
            holder = held_by(directory)
            if holder and holder != said:
                said = holder
                ctx.emit("locked", text=f"waiting for the host's lock: {busy.error.why}")
        time.sleep(POLL_SECONDS)


def held_by(directory: Path) -> str:
    """Who holds the lock, in words; empty when nobody alive does."""
    return in_words(read_holder(directory)) if is_held(directory) else ""


def in_words(holder: Optional[Holder]) -> str:
    """Who it is and what for."""
    if holder is None:
        return "somebody whose holder.json cannot be read"
    return f"{holder.operator or 'somebody'} runs {holder.verb} (pid {holder.pid})"


def _acquire(directory: Path, me: Holder) -> None:
    """Put a directory that already holds ``me`` in place by rename: it fails on any lock that is not empty, so there is
    no moment at which a lock exists without its holder."""
    wrong = damage(directory)
    if wrong:
        raise _damaged(directory, wrong)
    ready = directory.with_name(f"lock.{me.pid}.{me.start_time}")
    kept = -1
    try:
        ready.mkdir(mode=0o700, exist_ok=True)
        kept = os.open(str(ready / HOLDER), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        with contextlib.suppress(OSError):  # a file system without flock: then the pid decides
            fcntl.flock(kept, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.write(kept, json.dumps(to_json(me)).encode())
        if not _put(ready, directory):
            with takeover_guard(directory):
                _refuse_held(directory)
                shutil.rmtree(str(directory), ignore_errors=True)
                if not _put(ready, directory):
                    raise _busy(read_holder(directory))
        _kept[str(directory)], kept = kept, -1
    finally:
        if kept >= 0:
            os.close(kept)
        shutil.rmtree(str(ready), ignore_errors=True)


def _damaged(directory: Path, what: str) -> AgentFailure:
    return AgentFailure(
        "failed",
        "the host's lock cannot be taken",
        where=str(directory),
        why=what,
        next_step="see what it is, then remove it with `fleetdump unlock --force`",
    )


def _put(ready: Path, directory: Path) -> bool:
    try:
        os.rename(str(ready), str(directory))
    except OSError as error:
        if error.errno in (errno.ENOTEMPTY, errno.EEXIST):
            return False
        raise
    return True


@contextlib.contextmanager
def takeover_guard(directory: Path) -> Iterator[None]:
    """One taker at a time, else the second could remove the lock that the first has just put in a dead one's place.
    Raises ``AgentFailure`` failed when another has the guard for ``GUARD_SECONDS``, or when something else is there."""
    guard = directory.with_name(GUARD)
    wrong = guard_damage(guard)
    if wrong:
        away = f"mv {shlex.quote(str(guard))} {shlex.quote(str(guard))}.old"
        next_step = f"see what it is, then move it away: {away}"
        raise AgentFailure("failed", f"{directory.name} cannot be taken", str(directory), wrong, next_step)
    descriptor = os.open(str(guard), os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        _wait_for_guard(descriptor, guard)
        yield
    finally:
        os.close(descriptor)


def _wait_for_guard(descriptor: int, guard: Path) -> None:
    give_up = time.monotonic() + GUARD_SECONDS
    while True:
        try:
            return fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > give_up:
                raise _hung(guard) from None
        time.sleep(GUARD_POLL_SECONDS)


def _hung(guard: Path) -> AgentFailure:
    pid = flock_holder(guard)
    end = (
        f"see what it does (ps -fp {pid}) and end it (kill -9 {pid})" if pid else "end that process (lslocks names it)"
    )
    return AgentFailure(
        "failed",
        f"{guard.name} was not given back within {GUARD_SECONDS:.0f} s",
        where=str(guard),
        why=f"{f'process {pid}' if pid else 'a process'} has the lock of that file, which is one of moments",
        next_step=f"{end}, then give the command again",
    )


def release(directory: Path) -> None:
    """Give a lock back. An empty ``lock/`` is free; whoever takes it between the two steps makes the rmdir fail, which
    is right."""
    kept = _kept.pop(str(directory), -1)
    try:
        with contextlib.suppress(OSError):
            if kept >= 0 and not os.path.samestat(os.fstat(kept), os.stat(str(directory / HOLDER))):
                return  # `unlock --force` took it from us, and another has it by now
            os.unlink(str(directory / HOLDER))
            os.rmdir(str(directory))
    finally:
        if kept >= 0:
            os.close(kept)


def _busy(holder: Optional[Holder]) -> AgentFailure:
    if holder is None:
        return AgentFailure(
            "locked", "the host is locked", why=in_words(None), next_step="try again; fleetdump unlock shows more"
        )
    age = time.time() - holder.since
    since = f" since {age:.0f} s" if 0 <= age < BELIEVABLE_SECONDS else ""
    return AgentFailure(
        "locked",
        "the host is locked",
        where=holder.host,
        why=f"{holder.operator or 'somebody'} runs {holder.verb} there{since} (pid {holder.pid})",
        next_step="wait until it ends (--lock-wait), or ask that operator; fleetdump unlock shows more",
    )
