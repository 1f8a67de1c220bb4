"""One at a time: whose turn it is to send to a server, and which controller drives a run.

The shares of a run that one server has are worked on one after the other. A host takes work over before its own ends,
so that its server never rests; two drivers at once would have twice the token budget in flight, and what is suspected
of killing the server would not be alone there.

Two controllers of one run would both move its samples. Each keeps its place on every host by a call that lasts (verb
``steer``), whose process has the lock of ``steering/<run>.json``: whatever ends the controller, or its link, ends that.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shlex
import time
from pathlib import Path
from typing import BinaryIO, Iterator, List, Optional

from fleetdump.agent.context import AgentContext, State
from fleetdump.agent.jsonl import create_anew, encode_line, open_plain, writer_lives
from fleetdump.agent.lock import flock_holder, takeover_guard
from fleetdump.agent.protocol import AgentFailure
from fleetdump.agent.records import naming, read_advice
from fleetdump.agent.steermessages import DataMark, SteerArgs, Steering, SteerResult

FOLDER = "steering"
POLL_SECONDS = 0.5
BEAT_SECONDS = 10.0
"""Between two signs of life, by which a dead link shows: sshd ends a session whose packets nobody takes."""
LINGER_SECONDS = 3.0
"""A controller that has just ended is let go of within so long."""


def try_lock(path: Path) -> Optional[BinaryIO]:
    """An exclusive lock on the file, which the kernel drops when it is closed or the process ends, however it ends.
    None when another process has it; does not wait. Raises ``OSError`` for what is no plain file, or a link."""
    lock = open(path, "ab", opener=_open_own)  # noqa: SIM115 (outlives this call)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        lock.close()
        return None
    return lock


def _open_own(path: str, flags: int) -> int:
    return open_plain(path, flags | os.O_NOFOLLOW)


class Turn:
    """The lock on ``path``. A context manager: whoever leaves it lets the next one send."""

    def __init__(self, path: Path):
        self._path = path
        self._lock: Optional[BinaryIO] = None

    def take(self) -> bool:
        """Whether it is ours, from now on until the end; does not wait."""
        if self._lock is None:
            self._lock = try_lock(self._path)
        return self._lock is not None

    def __enter__(self) -> Turn:
        return self

    def __exit__(self, *_: object) -> None:
        if self._lock is not None:
            self._lock.close()
            self._lock = None


# --------------------------------------------------------------------------- who drives a run
def steer(args: SteerArgs, ctx: AgentContext) -> SteerResult:
    """See ``SteerArgs``. Raises ``AgentFailure`` locked, naming who it is, while another controller drives the run."""
    path = _path(ctx.state, args.run)
    if args.over:
        _give_up(path, args.controller)
        return SteerResult(0.0)
    if not args.controller:
        raise AgentFailure("usage", "a controller has to say which one it is")
    _refuse_damage(path)
    ctx.state.directory(FOLDER)
    began = time.monotonic()
    with _in_place(path, _me(args, ctx)) as lock:
        ctx.emit("steering")
        beat = time.monotonic()
        while _is_there(lock, path) and ctx.remaining() > 1.0:
            time.sleep(POLL_SECONDS)
            if time.monotonic() - beat > BEAT_SECONDS:
                beat = time.monotonic()
                ctx.emit("alive")
    return SteerResult(round(time.monotonic() - began, 3))


def respect_controller(ctx: AgentContext, run: str) -> None:
    """Raise ``AgentFailure`` locked when another controller than the one that calls drives the run."""
    other = _steering(_path(ctx.state, run))
    if other is not None and other.controller != ctx.request.controller:
        raise _driven(other)


def steering_of_all(state: State) -> List[Steering]:
    """Who drives the runs of this host now."""
    found = (_steering(path) for path in sorted((state.root / FOLDER).glob("*.json")))
    return [one for one in found if one is not None]


def _path(state: State, run: str) -> Path:
    return state.root / FOLDER / f"{run}.json"


def _refuse_damage(path: Path) -> None:
    """Raise ``AgentFailure`` failed when something is in the way of the place of a controller."""
    folder = path.parent
    wrong, why = path, "a folder is in its place" if path.is_dir() and not path.is_symlink() else ""
    if not folder.is_dir() and (folder.exists() or folder.is_symlink()):
        wrong, why = folder, "no folder is in its place"
    if why:
        away = f"mv {shlex.quote(str(wrong))} {shlex.quote(str(wrong))}.old"
        next_step = f"see what it is, then move it away: {away}"
        raise AgentFailure("failed", f"run {path.stem} cannot be driven here", str(wrong), why, next_step)


def _me(args: SteerArgs, ctx: AgentContext) -> Steering:
    data = args.data or DataMark("", 0, "")
    operator = ctx.request.operator
    return Steering(args.run, args.controller, operator, args.pid, args.folder, data, time.time(), os.getpid())


def _steering(path: Path) -> Optional[Steering]:
    """Who holds that place; None when nobody alive does."""
    if not writer_lives(path):
        return None
    known = read_advice(Steering, path)
    return known or Steering(path.stem, "?", "", 0, "", DataMark("", 0, ""), 0.0, flock_holder(path))


@contextlib.contextmanager
def _in_place(path: Path, me: Steering) -> Iterator[BinaryIO]:
    give_up = time.monotonic() + LINGER_SECONDS
    lock = _take(path, me)
    while lock is None:
        other = _steering(path)
        if other is not None and time.monotonic() > give_up:
            raise _driven(other)
        time.sleep(POLL_SECONDS / 5)
        lock = _take(path, me)
    with lock:
        try:
            yield lock
        finally:
            # ``clean`` takes all of it away. Without the guard the file stays: once unlocked it says nothing.
            with contextlib.suppress(FileNotFoundError, AgentFailure), takeover_guard(path):
                if _is_there(lock, path):
                    path.unlink()


def _take(path: Path, me: Steering) -> Optional[BinaryIO]:
    """The lock of a file that is put in place with ``me`` in it; None while another controller has the place."""
    with naming(path), takeover_guard(path):
        other = _steering(path)
        if other is not None and other.controller != me.controller:
            return None
        fresh = path.with_name(f"{path.name}.{me.agent_pid}.tmp")
        lock = os.fdopen(create_anew(fresh), "wb")
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            lock.write(encode_line(me))
            lock.flush()
            os.replace(str(fresh), str(path))
        except OSError:
            with contextlib.suppress(OSError):
                fresh.unlink()
            with contextlib.suppress(OSError):  # what could not be written is tried once more
                lock.close()
            raise
        return lock


def _is_there(lock: BinaryIO, path: Path) -> bool:
    """Whether the file is still the one in place: nobody has taken it away, or anew."""
    with contextlib.suppress(OSError):
        return os.path.samestat(os.fstat(lock.fileno()), os.stat(str(path)))
    return False


def _give_up(path: Path, controller: str) -> None:
    if not path.parent.is_dir():
        return
    with takeover_guard(path):
        held = read_advice(Steering, path)
        if held is not None and held.controller == controller:
            path.unlink()


def _driven(by: Steering) -> AgentFailure:
    return AgentFailure(
        "locked",
        f"run {by.run} is being driven already",
        why=by.in_words,
        next_step=by.next_step("this host"),
    )
