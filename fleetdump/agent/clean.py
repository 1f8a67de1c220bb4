"""Remove what is ours from this host; refuses while a server of ours lives or a patch is applied."""

from __future__ import annotations

import contextlib
import os
import shutil
from pathlib import Path
from typing import List, Set

from fleetdump.agent import engine, patching, patchrecord
from fleetdump.agent.context import AgentContext
from fleetdump.agent.formats import SELFCHECK_PREFIX, FileName
from fleetdump.agent.protocol import AgentFailure, CleanArgs, CleanResult
from fleetdump.agent.server import living, load_records, made_dirs
from fleetdump.agent.share import shares_of
from fleetdump.agent.status import tree_bytes


def clean(args: CleanArgs, ctx: AgentContext) -> CleanResult:
    """Remove runs' data (with ``args.data``), then the state, the agent's own bundle last. Without ``data``, runs that
    still have shards are kept, with their state. No server lives by then, so drivers have nothing to do and are ended.
    Raises ``AgentFailure`` conflict while a server of ours lives or a patch of ours is applied."""
    _refuse_living(ctx)
    if not args.runs:
        _refuse_patched(args, ctx)
    with contextlib.ExitStack() as claims:
        _stop_drivers(args, ctx, claims)
        return _clean(args, ctx)


def _clean(args: CleanArgs, ctx: AgentContext) -> CleanResult:
    result = CleanResult()
    kept_runs: Set[str] = set()
    for directory in _capture_dirs(args, ctx):
        kept_runs |= _clean_capture(directory, args, ctx, result)
    for run in _runs(ctx, args.runs):
        if run in kept_runs:
            result.kept.append(str(ctx.state.root / "runs" / run))
        else:
            _remove_tree(ctx.state.root / "runs" / run, result)
    if not args.runs:
        _clean_engines(args, result)
        _remove_made_dirs(ctx, result)
        _clean_state(ctx, result, keep_runs=bool(kept_runs))
    return result


# --------------------------------------------------------------------------- what stands in the way
def _refuse_living(ctx: AgentContext) -> None:
    servers = [record for record in load_records(ctx.state) if living(record)]
    if servers:
        names = ", ".join(f"{record.name} (pid {record.pid})" for record in servers)
        raise AgentFailure("conflict", "servers of ours still run", where=names, next_step="run `fleetdump stop` first")


def _stop_drivers(args: CleanArgs, ctx: AgentContext, claims: contextlib.ExitStack) -> None:
    """End the drivers of the runs that are cleaned, and hold their claims: a ``follow`` would start them again."""
    for run in _runs(ctx, args.runs):
        for share in shares_of(ctx.state, run):
            claim = share.stop_driver()
            if claim is None:
                raise AgentFailure(
                    "failed",
                    "the driver of an extraction does not end",
                    where=f"{share.run} on {share.server}, {share.root / 'driver.json'}",
                    why="SIGKILL has no effect yet: it may wait inside the kernel, for a disk",
                    next_step="run `fleetdump clean` again when that disk answers",
                )
            claims.enter_context(claim)


def _refuse_patched(args: CleanArgs, ctx: AgentContext) -> None:
    for interpreter in args.interpreters:
        limit = max(1.0, min(30.0, ctx.remaining()))
        state = patching.read_state(interpreter.python, env=interpreter.env, timeout=limit)
        if state.patch:
            raise AgentFailure(
                "conflict",
                f"patch {state.patch} {state.version} is still applied",
                where=interpreter.python,
                why=state.detail,
                next_step="run `fleetdump revert` first",
            )


# --------------------------------------------------------------------------- removing
def _capture_dirs(args: CleanArgs, ctx: AgentContext) -> List[Path]:
    """Where shards may lie: as the inventory says now, and as it said when each share was submitted."""
    specs = [share.spec() for run in _runs(ctx, args.runs) for share in shares_of(ctx.state, run)]
    names = [*args.capture_dirs, *(spec.capture.dir for spec in specs if spec)]
    return [Path(name) for name in dict.fromkeys(os.path.expanduser(name) for name in names)]


def _runs(ctx: AgentContext, wanted: List[str]) -> List[str]:
    names = sorted(path.name for path in (ctx.state.root / "runs").glob("*") if path.is_dir())
    return [name for name in names if not wanted or name in wanted]


def _clean_capture(directory: Path, args: CleanArgs, ctx: AgentContext, result: CleanResult) -> Set[str]:
    """Take our files out of the run folders in a capture directory, never through a link; returns the runs that stay
    because they have shards and ``args.data`` is not set."""
    kept = set()
    known = set(_runs(ctx, []))
    for folder in sorted(directory.iterdir()) if directory.is_dir() else []:
        if folder.is_symlink() or not folder.is_dir() or (args.runs and folder.name not in args.runs):
            continue
        ours = [path for path in folder.iterdir() if FileName.parse(path.name) and not path.is_symlink()]
        if not ours and folder.name not in known:
            continue
        if ours and not args.data and not folder.name.startswith(SELFCHECK_PREFIX):
            kept.add(folder.name)
            result.kept.append(str(folder))
            continue
        for path in ours:
            result.freed_bytes += path.lstat().st_size
            path.unlink()
        if not _remove_empty(folder, result):
            result.kept.append(f"{folder} (it holds files that are not ours)")
    return kept


def _remove_tree(path: Path, result: CleanResult) -> None:
    if not path.exists() or path.is_symlink():
        return
    result.freed_bytes += tree_bytes(path)
    shutil.rmtree(str(path))
    result.removed.append(str(path))


def _remove_empty(path: Path, result: CleanResult) -> bool:
    try:
        path.rmdir()
    except OSError:
        return False
    result.removed.append(str(path))
    return True


def _clean_engines(args: CleanArgs, result: CleanResult) -> None:
    """Our folder beside a package goes once no record is in it; taking and releasing its lock removes it."""
    for interpreter in args.interpreters:
        with contextlib.suppress(AgentFailure):
            site = Path(engine.query(interpreter.python, env={**os.environ, **interpreter.env}).site)
            if (site / patchrecord.FOLDER).is_dir():
                with patchrecord.locked(site):
                    pass
                result.removed.append(str(site / patchrecord.FOLDER))


def _remove_made_dirs(ctx: AgentContext, result: CleanResult) -> None:
    """Folders that a launch made on the way to its capture directory, where nothing is in them any more."""
    for directory in sorted(made_dirs(ctx.state), key=len, reverse=True):
        _remove_empty(Path(directory), result)


def _clean_state(ctx: AgentContext, result: CleanResult, keep_runs: bool) -> None:
    """The state directory; the lock that we hold and the bundle that we run from go last."""
    root = ctx.state.root
    result.freed_bytes += tree_bytes(root)
    for entry in sorted(root.iterdir() if root.is_dir() else []):
        if entry.name in ("agent", "lock") or (keep_runs and entry.name in ("runs", "made_dirs.json")):
            continue
        if entry.is_dir() and not entry.is_symlink():
            shutil.rmtree(str(entry))
        else:
            entry.unlink()
        result.removed.append(str(entry))
    if keep_runs:
        return
    for name in ("agent", "lock"):
        shutil.rmtree(str(root / name), ignore_errors=True)
    _remove_empty(root, result)
    with contextlib.suppress(OSError):
        root.parent.rmdir()
