"""Remove what is ours from this host; refuses while a server of ours lives or a patch is applied."""

from __future__ import annotations

import contextlib
import os
import shlex
from pathlib import Path
from typing import Callable, Iterator, List, Optional, Set

from fleetdump.agent import engine, patching, patchrecord
from fleetdump.agent.context import AgentContext
from fleetdump.agent.controlling import controller_folders, stop_controllers
from fleetdump.agent.formats import RANKS_FOLDER, SELFCHECK_PREFIX, FormatError
from fleetdump.agent.hostmessages import CleanArgs, CleanResult
from fleetdump.agent.jsonl import open_journal, read_lines
from fleetdump.agent.launch import made_dirs
from fleetdump.agent.ownership import OwnFiles, holds_files, knows_run, own_files, rank_files
from fleetdump.agent.protocol import AgentError, AgentFailure
from fleetdump.agent.removal import Removal
from fleetdump.agent.server import living, load_records
from fleetdump.agent.share import Share, runs_of, shares_of

WHILE_PATCHED = " (a patch is in it: fleetdump revert comes first)"
UNKNOWN_RUN = "no run of this state directory, it may be another's; to remove it by hand when nobody needs it"


def clean(args: CleanArgs, ctx: AgentContext) -> CleanResult:
    """Remove runs' data (with ``args.data``), then the state, the agent's own bundle last. Without ``data``, runs that
    still have shards are kept, with their state. No server lives by then, so drivers have nothing to do and are ended.
    Raises ``AgentFailure`` conflict while a server of ours lives, a patch of ours is applied or, with ``args.data`` and
    outside of ``args.discard``, a sample exists here alone."""
    if args.dry_run:
        result = _clean(args, ctx, Removal(dry_run=True))
        result.obstacles = list(_obstacles(args, ctx))
        return result
    for check in _checks(args):
        check(args, ctx)  # before a driver is ended: a refusal changes nothing
    with contextlib.ExitStack() as claims:
        _stop_drivers(args, ctx, claims)
        _refuse_uncollected(args, ctx)  # and again, now that nobody can commit
        stop_controllers(ctx.state, args.runs)
        return _clean(args, ctx, Removal())


def _clean(args: CleanArgs, ctx: AgentContext, removal: Removal) -> CleanResult:
    result = removal.result
    for folder in controller_folders(ctx.state, args.runs):
        removal.tree(folder)
    kept_runs: Set[str] = set()
    for directory in _capture_dirs(args, ctx):
        kept_runs |= _clean_capture(directory, args, ctx, removal)
    for run in _runs(ctx, args.runs):
        if run in kept_runs:
            result.kept.append(str(ctx.state.root / "runs" / run))
        else:
            removal.tree(ctx.state.root / "runs" / run)
    if not args.runs:
        _clean_engines(args, removal)
        _remove_made_dirs(ctx, removal)
        _clean_state(ctx, removal, keep_runs=bool(kept_runs))
    return result


# --------------------------------------------------------------------------- what stands in the way
def _checks(args: CleanArgs) -> List[Callable[[CleanArgs, AgentContext], None]]:
    of_host = [] if args.runs else [_refuse_patched]
    return [_refuse_living, *of_host, _refuse_uncollected]


def _obstacles(args: CleanArgs, ctx: AgentContext) -> Iterator[AgentError]:
    for check in _checks(args):
        error = _obstacle(check, args, ctx)
        if error is not None:
            yield error


def _obstacle(
    check: Callable[[CleanArgs, AgentContext], None], args: CleanArgs, ctx: AgentContext
) -> Optional[AgentError]:
    try:
        check(args, ctx)
    except AgentFailure as failure:
        return failure.error
    return None


def _refuse_living(_: CleanArgs, ctx: AgentContext) -> None:
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


def _refuse_uncollected(args: CleanArgs, ctx: AgentContext) -> None:
    """Compare what the manifests have committed, whatever progress.json says, with what the controller has."""
    if not args.data:
        return
    collected = {(share.run, share.server): frozenset(share.ids) for share in args.collected}
    for run in _runs(ctx, args.runs):
        if run in args.discard or run not in runs_of(ctx.state):
            continue
        for root in sorted(path for path in (ctx.state.root / "runs" / run).iterdir() if path.is_dir()):
            share = Share(root)
            committed = _committed(share)
            missing = len(committed - collected.get((share.run, share.server), frozenset()))
            if missing:
                raise AgentFailure(
                    "conflict",
                    f"run {run}: {missing} of {len(committed)} samples of server {share.server} were not collected",
                    where=str(share.manifest),
                    why="the controller has no verified copy of them, and clean --data would delete the only one",
                    next_step=f"fleetdump collect --data --run {run}, or add --discard {run}",
                )


def _committed(share: Share) -> Set[str]:
    try:
        return {str(line["id"]) for line in read_lines(share.manifest)[0]}
    except (FormatError, KeyError) as error:
        raise AgentFailure(
            "failed",
            f"run {share.run}: nobody can tell what server {share.server} has committed",
            where=str(share.manifest),
            why=str(error),
            next_step=f"look at that file; --discard {share.run} deletes the samples whatever it says",
        ) from error


# --------------------------------------------------------------------------- removing
def _capture_dirs(args: CleanArgs, ctx: AgentContext) -> List[Path]:
    """Where shards may lie: as the inventory says now, and as it said when each share was submitted."""
    specs = [share.spec() for run in _runs(ctx, args.runs) for share in shares_of(ctx.state, run)]
    names = [*args.capture_dirs, *(spec.capture.dir for spec in specs if spec)]
    return [Path(name) for name in dict.fromkeys(os.path.expanduser(name) for name in names)]


def _runs(ctx: AgentContext, wanted: List[str]) -> List[str]:
    names = sorted(path.name for path in (ctx.state.root / "runs").glob("*") if path.is_dir())
    return [name for name in names if not wanted or name in wanted]


def _clean_capture(directory: Path, args: CleanArgs, ctx: AgentContext, removal: Removal) -> Set[str]:
    """Take our files out of the run folders in a capture directory, never through a link; returns the runs that stay:
    they have shards and ``args.data`` is not set, or a living process writes them. What other hosts, operators and
    state directories have in the same capture directory is not touched."""
    kept, result = set(), removal.result
    for folder in sorted(directory.iterdir()) if directory.is_dir() else []:
        if folder.is_symlink() or not folder.is_dir() or (args.runs and folder.name not in args.runs):
            continue
        if not knows_run(ctx.state, folder.name):
            if holds_files(folder):
                result.kept.append(f"{folder} ({UNKNOWN_RUN}: rm -r {shlex.quote(str(folder))})")
            continue
        ours = own_files(ctx.state, folder)
        if ours and not args.data and not folder.name.startswith(SELFCHECK_PREFIX):
            kept.add(folder.name)
            result.kept.append(f"{folder} ({len(ours.paths)} files; --data removes them)")
            continue
        living = _remove_files(folder, ours, removal)
        if folder.name.startswith(SELFCHECK_PREFIX):
            living += _remove_ranks(folder / RANKS_FOLDER, removal)
        if living:
            kept.add(folder.name)
            result.kept.append(f"{folder} (still written by living processes: {', '.join(living)})")
        elif not removal.empty(folder):
            result.kept.append(f"{folder} (it holds files that are not of this host's runs)")
    return kept


def _remove_files(folder: Path, ours: OwnFiles, removal: Removal) -> List[str]:
    """Remove them but for those of writers that live, which are returned: a writer holds its journal's lock. A list is
    made before servers are stopped: it takes none from a writer that is about to."""
    living = []
    for writer, paths in ours.of_writers.items():
        with contextlib.ExitStack() as held:
            if (folder / writer.journal).exists() and not removal.dry_run:
                journal = open_journal(folder / writer.journal)
                if journal is None:
                    living.append(str(writer))
                    continue
                held.enter_context(journal)
            removal.files(paths)
    if not living:
        removal.files(ours.others)
    return living


def _remove_ranks(folder: Path, removal: Removal) -> List[str]:
    living = _remove_files(folder, rank_files(folder), removal)
    removal.empty(folder)  # there is none, or they are still written
    return living


def _clean_engines(args: CleanArgs, removal: Removal) -> None:
    """Our folder beside a package goes once no record is in it; taking and releasing its lock removes it. One that
    another host is using, or that may not be removed, is kept."""
    for interpreter in args.interpreters:
        try:
            site = Path(engine.query(interpreter.python, env={**os.environ, **interpreter.env}).site)
        except AgentFailure:
            continue  # no engine there any more
        folder = site / patchrecord.FOLDER
        if not folder.is_dir():
            continue
        result = removal.result
        if removal.dry_run:
            patched = (folder / "record.json").exists()
            (result.kept if patched else result.removed).append(f"{folder}{WHILE_PATCHED if patched else ''}")
            continue
        why = "a patch of another host or operator is in it"
        try:
            with patchrecord.locked(site):
                pass
        except (AgentFailure, OSError) as error:
            why = str(error)
        if folder.is_dir():
            result.kept.append(f"{folder} ({why})")
        else:
            result.removed.append(str(folder))


def _remove_made_dirs(ctx: AgentContext, removal: Removal) -> None:
    """Folders that a launch made on the way to its capture directory, where nothing is in them any more."""
    for directory in sorted(made_dirs(ctx.state), key=len, reverse=True):
        removal.empty(Path(directory))


def _clean_state(ctx: AgentContext, removal: Removal, keep_runs: bool) -> None:
    """The state directory; the lock that we hold and the bundle that we run from go last."""
    root = ctx.state.root
    for entry in sorted(root.iterdir() if root.is_dir() else []):
        if entry.name in ("agent", "lock") or (keep_runs and entry.name in ("runs", "made_dirs.json")):
            continue
        removal.tree(entry)
    if keep_runs:
        return
    for name in ("agent", "lock"):
        removal.quietly(root / name)
    removal.empty(root)
    if not removal.dry_run:
        with contextlib.suppress(OSError):
            root.parent.rmdir()
