"""Show who holds the host's lock, and remove one that nobody alive holds (verb ``unlock``)."""

from __future__ import annotations

import contextlib
import os
import shutil
import time
from pathlib import Path

from fleetdump.agent import audit, lease
from fleetdump.agent.context import AgentContext
from fleetdump.agent.hostmessages import UnlockArgs, UnlockResult
from fleetdump.agent.lock import GUARD, damage, in_words, is_held, read_holder, takeover_guard
from fleetdump.agent.records import naming


def unlock(args: UnlockArgs, ctx: AgentContext) -> UnlockResult:
    """Look at the lock, and at the lease that a deploy holds for as long as it runs; remove what a dead holder left,
    or with ``args.force`` in any case (the holder is not ended: it goes on, without the lock). What is no lock is
    removed by force alone. Told is what is still held, else what was removed."""
    results = [_unlock(ctx.state.root / name, args, ctx) for name in ("lock", lease.FOLDER)]
    return min(results, key=lambda result: ("held", "removed", "free").index(result.state))


def _unlock(directory: Path, args: UnlockArgs, ctx: AgentContext) -> UnlockResult:
    wrong = damage(directory)
    if wrong:
        if args.force:
            with naming(directory):
                _remove_damage(directory)
            _note(ctx)
        return UnlockResult("removed" if args.force else "held", damage=f"{directory}: {wrong}")
    if not directory.is_dir():
        return UnlockResult("free")
    with naming(directory), takeover_guard(directory):
        alive, holder = is_held(directory), read_holder(directory)
        result = UnlockResult("held", in_words(holder), alive=alive)
        if holder is not None:
            result.operator, result.pid, result.since = holder.operator, holder.pid, holder.since
        if not alive or args.force:
            shutil.rmtree(str(directory), ignore_errors=True)
            result.state = "removed"
    if result.state == "removed":
        _note(ctx)
    return result


def _remove_damage(directory: Path) -> None:
    if directory.is_symlink() or not directory.is_dir():
        with contextlib.suppress(FileNotFoundError):
            os.unlink(str(directory))
    guard = directory.with_name(GUARD)
    if guard.is_symlink():
        os.unlink(str(guard))
    elif guard.is_dir():
        shutil.rmtree(str(guard))


def _note(ctx: AgentContext) -> None:
    """A lock that was removed is a change of the host; an audit log that takes no line does not bring it back."""
    with contextlib.suppress(OSError):
        audit.record(ctx, ok=True, started=time.time(), seconds=0.0)
