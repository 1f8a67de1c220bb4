"""Apply a patch to the installed engine, say what state it is in, and take the patch out again byte for byte."""

from __future__ import annotations

import base64
import os
import time
from dataclasses import replace
from pathlib import Path
from typing import Dict, List, Mapping, Optional, Sequence, Tuple

from fleetdump.agent import applicable, engine, packagechange, patchfiles, patchrecord
from fleetdump.agent.changes import Change
from fleetdump.agent.context import AgentContext
from fleetdump.agent.engine import EngineFacts
from fleetdump.agent.neighbours import engine_users
from fleetdump.agent.package import Package
from fleetdump.agent.patchmessages import PatchArgs, PatchResult, PatchState, RevertArgs, RevertResult
from fleetdump.agent.patchrecord import FOLDER, PatchRecord
from fleetdump.agent.patchsurvey import MARKER, Survey, edits_by_module, is_in, modules_of, survey_of, survey_unrecorded
from fleetdump.agent.protocol import AgentFailure, to_json
from fleetdump.agent.server import readable_records
from fleetdump.agent.specs import DELIVERIES, Edit, Interpreter, PatchSpec

IN_PLACE, IMPORT_HOOK = DELIVERIES
_RUN_EDIT = "import sys; sys.path.insert(0, sys.argv[1]); from fleetdump.agent.edit import main; main()"


# --------------------------------------------------------------------------- verbs
def patch(args: PatchArgs, ctx: AgentContext) -> PatchResult:
    """Apply what of ``args.patch`` the engine and the models need, first taking out another patch of ours; modules
    that this very patch is already in stay patched. Raises ``AgentFailure``: conflict for files that somebody else
    changed and for a release or model that the patch is not for, not_found for a missing engine or module, permission
    for a read-only package."""
    if args.delivery == IMPORT_HOOK:
        refuse_for_hook(args.patch)
    facts = _facts(args.python, args.patch, args.env, _limit(ctx))
    guessed = bool(args.patch.architectures) and not applicable.architectures_of(args.models)
    if args.dry_run:
        return replace(_dry_run(args, facts, ctx), guessed=guessed)
    site = Path(facts.site)
    _require_writable(facts)
    with patchrecord.locked(site):
        spec, before = _needed(facts, args.patch, args.models)
        if is_in(before, spec):
            return replace(_result(spec, facts, before.state, before.state, [], before.record), guessed=guessed)
        changes = _plan(facts, spec, before, ctx, args.force)
        _require_writable(facts, changes)
        kept = _set_aside(before, ctx)
        if before.record is not None:
            patchfiles.take_out(site, before.record, before.stale)
        record = patchfiles.prepare(site, facts, spec, changes)
        patchfiles.put_in(site, record, changes, spec)
        result = _result(spec, facts, before.state, survey_of(facts, spec).state, changes, record)
        return replace(result, kept=kept, guessed=guessed)


def _dry_run(args: PatchArgs, facts: EngineFacts, ctx: AgentContext) -> PatchResult:
    """What ``patch`` would do, or what a process launched with the import hook would import."""
    spec, before = _needed(facts, args.patch, args.models)
    by_hook = args.delivery == IMPORT_HOOK
    changes = [] if is_in(before, spec) and not by_hook else _plan(facts, spec, before, ctx, args.force)
    if changes and not by_hook:
        _require_writable(facts, changes)
    result = _result(spec, facts, before.state, before.state, changes, before.record, args.delivery)
    return replace(result, delivery=args.delivery)


def refuse_for_hook(spec: PatchSpec) -> None:
    """Raise ``AgentFailure`` usage for a patch that changes files by a diff or script."""
    if spec.changes:
        raise AgentFailure(
            "usage",
            f"patch {spec.name} cannot be delivered by the import hook",
            why=f"{spec.changes[0].name} may change any file; the hook rewrites modules by declarative edits alone",
            next_step="deliver it in place (--delivery in-place)",
        )


def plan_on_clean(args: PatchArgs, ctx: AgentContext) -> List[Change]:
    """What the patch would do to the engine's files, of which none may hold a patch of ours. Raises as ``patch``."""
    facts = _facts(args.python, args.patch, args.env, _limit(ctx))
    spec, survey = _needed(facts, args.patch, args.models)
    if survey.record is not None and not survey.stale:
        raise AgentFailure(
            "conflict",
            f"patch {survey.record.patch} {survey.record.version} is in the engine's files",
            where=facts.package,
            next_step="run `fleetdump revert` first",
        )
    return _plan(facts, spec, survey, ctx, args.force)


def revert(args: RevertArgs, ctx: AgentContext) -> RevertResult:
    """Restore every file that a patch of ours changed; raises ``AgentFailure`` conflict when one was edited since, or
    when a server runs what the patch made, whoever started it."""
    facts = _facts(args.python, env=args.env, timeout=_limit(ctx))
    site = Path(facts.site)
    clean = PatchState("clean")
    if not (site / FOLDER).is_dir():
        return RevertResult(False, clean, clean)
    _require_writable(facts)
    with patchrecord.locked(site):
        before = survey_of(facts)
        if before.record is None:
            return RevertResult(False, clean, clean)
        _refuse_used(facts, before.record, ctx)
        _refuse_foreign(before, args.force)
        _set_aside(before, ctx)
        verified = patchfiles.take_out(site, before.record, before.stale)
        return RevertResult(True, before.state, clean, verified)


def would_revert(interpreter: Interpreter, ctx: AgentContext) -> PatchState:
    """What ``revert`` would take out once our own servers are stopped; raises as it does for others' servers."""
    state = read_state(interpreter.python, env=interpreter.env)
    if state.patch:
        facts = _facts(interpreter.python, env=interpreter.env, timeout=_limit(ctx))
        record = patchrecord.load(Path(facts.site))
        if record is not None:
            _refuse_used(facts, record, ctx, but_ours=True)
    return state


def read_state(
    python: str,
    spec: Optional[PatchSpec] = None,
    env: Optional[Mapping[str, str]] = None,
    timeout: float = 30.0,
    models: Sequence[str] = (),
) -> PatchState:
    """State of the engine that ``python`` imports with ``env`` set, changing nothing. With ``spec`` those of its
    modules that ``models`` run are looked at too, and ``ours`` means that very patch in all of them; without, ``ours``
    is any patch of ours."""
    try:
        facts = _facts(python, spec, env, timeout)
    except AgentFailure as failure:
        if failure.error.code != "not_found":
            raise
        error = failure.error
        where = f" ({error.where})" if error.where else ""
        return PatchState("absent", detail=f"{error.what}{where}; next: {error.next_step}")
    if spec is None:
        return survey_of(facts).state
    spec, survey = _needed(facts, spec, models)
    state = survey.state
    return replace(state, state="other") if state.state == "ours" and not is_in(survey, spec) else state


# --------------------------------------------------------------------------- what is there
def _facts(
    python: str, spec: Optional[PatchSpec] = None, env: Optional[Mapping[str, str]] = None, timeout: float = 30.0
) -> EngineFacts:
    """The engine, with the modules of ``spec`` and those that a record of ours names. ``env`` adds to our own."""
    wanted = modules_of(spec) if spec else []
    env = {**os.environ, **(env or {})}
    facts = engine.query(python, wanted, env=env, timeout=timeout)
    record = patchrecord.load(Path(facts.site))
    others = [m.module for m in record.modules if m.module not in wanted] if record else []
    return engine.query(python, wanted + others, env=env, timeout=timeout) if others else facts


def _needed(facts: EngineFacts, spec: PatchSpec, models: Sequence[str]) -> Tuple[PatchSpec, Survey]:
    """``spec`` with the edits alone that ``models`` need on this release, or that are in the engine already (servers
    of another model use them); and the survey of that."""
    edits = applicable.choose_edits(spec, facts.release, applicable.architectures_of(models))
    survey = survey_of(facts, replace(spec, edits=edits))
    record = survey.record
    if record is None or survey.stale or record.sha256 != spec.sha256:
        return replace(spec, edits=edits), survey
    held = {module.module for module in record.modules}
    edits = [edit for edit in spec.edits if edit in edits or edit.module in held]
    return replace(spec, edits=edits), survey


def _refuse_foreign(survey: Survey, force: bool = False) -> None:
    refused = [found for found in survey.foreign if found.lost or not force]
    if not refused:
        return
    first = refused[0]
    others = f" (and {len(refused) - 1} more)" if len(refused) > 1 else ""
    reinstall = "reinstall the same release (pip install --force-reinstall --no-deps sglang==<release>)"
    raise AgentFailure(
        "conflict",
        "a file of sglang was edited by somebody else; it was left alone",
        where=first.path + others,
        why=f"{first.why}\n{first.diff}" if first.diff else first.why,
        next_step=f"{reinstall}, then try again"
        if first.lost
        else f"undo that edit, or {reinstall}, then try again; or use --force",
    )


def _refuse_used(facts: EngineFacts, record: PatchRecord, ctx: AgentContext, but_ours: bool = False) -> None:
    """A server from before the patch runs the code as it was: it loses nothing."""
    ours = {one.pid: one.name for one in readable_records(ctx.state)[0]}
    users = [user for user in engine_users(facts) if user.started_at >= record.applied_at]
    users = [user for user in users if not (but_ours and user.pid in ours)]
    if not users:
        return
    raise AgentFailure(
        "conflict",
        "the patch is in use",
        where=facts.package,
        why=f"running: {'; '.join(user.in_words(ours) for user in users)}",
        next_step="stop them where they were started (fleetdump stop, with that inventory), then fleetdump revert",
    )


def _set_aside(survey: Survey, ctx: AgentContext) -> List[str]:
    """Copies, in the state directory, of files that were edited after our patch and will be overwritten."""
    copies = []
    for number, found in enumerate(survey.foreign):
        data = patchrecord.read_bytes(Path(found.path)) if found.recorded else None
        if data is not None:
            folder = ctx.state.directory("set-aside", time.strftime("%Y%m%dT%H%M%S", time.gmtime()))
            copy = folder / f"{number}-{os.path.basename(found.path)}"
            patchrecord.write_durable(copy, data)
            copies.append(str(copy))
    return copies


# --------------------------------------------------------------------------- planning
def _plan(facts: EngineFacts, spec: PatchSpec, survey: Survey, ctx: AgentContext, force: bool = False) -> List[Change]:
    """Make every change of the patch in memory; raises ``AgentFailure`` before anything on disk has changed."""
    _refuse_foreign(survey, force)
    _refuse_taken_names(facts, spec, survey)
    if survey.state.state == "absent":
        raise AgentFailure(
            "not_found",
            f"patch {spec.name} {spec.version} does not fit this release",
            where=facts.package,
            why=survey.state.detail,
            next_step="use a release that the patch names, or a newer patch",
        )
    package = Package.of(facts, survey.record, survey.stale)
    changes = _change_files(facts, spec, package, survey, ctx)
    _refuse_foreign(survey, force)
    for module, edits in edits_by_module(spec).items():
        path = package.path_of(module, facts.modules)
        if path is None:
            continue
        earlier = changes.get(path)
        source = earlier.edited if earlier else package.read(path)
        facts.modules[module] = str(package.home / path)
        change = _edit(facts, spec, module, edits, source or b"", ctx)
        # Another content than the release's own is a shape that no test has seen.
        forced = any(found.path == str(package.home / path) for found in survey.foreign)
        verified = change.verified and not forced and (earlier is None or earlier.verified)
        changes[path] = replace(change, original=package.read(path), verified=verified)
    return list(changes.values())


def _change_files(
    facts: EngineFacts, spec: PatchSpec, package: Package, survey: Survey, ctx: AgentContext
) -> Dict[str, Change]:
    """What the patch's diff or script does, by path; files that somebody else edited are noted in ``survey``."""
    chosen = packagechange.choose(spec, facts.release)
    if chosen is None:
        return {}
    contents = packagechange.plan(spec, chosen, facts, package, ctx)
    originals = {path: package.read(path) for path in contents}
    unrecorded = [path for path in contents if originals[path] is not None and path not in package.kept]
    looked_at = engine.query(facts.python, unrecorded, env=facts.env, timeout=_limit(ctx))
    notes: List[str] = []
    for path in unrecorded:
        survey_unrecorded(looked_at, path, survey, notes)
    if notes:
        survey.state.detail = "; ".join(filter(None, [survey.state.detail, *notes]))
    verified = facts.release in chosen.verified
    return {p: Change(p, package.home / p, originals[p], new, verified) for p, new in sorted(contents.items())}


def _edit(
    facts: EngineFacts, spec: PatchSpec, module: str, edits: List[Edit], original: bytes, ctx: AgentContext
) -> Change:
    """Have the server's own interpreter make and compile the edit."""
    path = facts.modules[module]
    request = {
        "source": base64.b64encode(original).decode(),
        "path": path,
        "edits": to_json(edits),
        "release": facts.release,
        "marker": f"{MARKER}{spec.name}@{spec.version}",
    }
    arguments = ["-I", "-B", "-c", _RUN_EDIT, str(engine.bundle_root())]
    answer = engine.run_json(facts.python, arguments, request, facts.env, _limit(ctx))
    if "refused" in answer:
        raise AgentFailure(
            "conflict",
            f"patch {spec.name} {spec.version} does not fit {facts.name}",
            where=path,
            why=answer["refused"],
            next_step="use a release that the patch names, or add an edit for this one to the patch",
        )
    return Change(module, Path(path), original, base64.b64decode(answer["source"]), answer["verified"])


def _refuse_taken_names(facts: EngineFacts, spec: PatchSpec, survey: Survey) -> None:
    ours = {f.path for f in survey.record.files} if survey.record else set()
    for name, text in spec.files.items():
        if name != os.path.basename(name) or not name.endswith(".py"):
            raise AgentFailure("usage", f"a patch cannot add a file named {name!r}", next_step="use a plain name, x.py")
        there = patchrecord.read_bytes(Path(facts.site) / name)
        if there is not None and name not in ours and there != text.encode():
            raise AgentFailure(
                "conflict",
                "the patch would overwrite a file that is not ours",
                where=str(Path(facts.site) / name),
                next_step="move that file away, or rename the patch's file",
            )


# --------------------------------------------------------------------------- small things
def _limit(ctx: AgentContext) -> float:
    """Seconds that one question to the server's interpreter may take."""
    return max(1.0, min(30.0, ctx.remaining()))


def _require_writable(facts: EngineFacts, changes: Sequence[Change] = ()) -> None:
    folders = [facts.site, *(os.path.dirname(path) for path in facts.modules.values())]
    folders += [str(next(folder for folder in change.path.parents if folder.is_dir())) for change in changes]
    for folder in dict.fromkeys(folders):
        if not os.access(folder, os.W_OK | os.X_OK):
            raise AgentFailure(
                "permission",
                "the installed package cannot be changed",
                where=folder,
                why="no write permission, or a read-only file system",
                next_step="use `fleetdump deploy --delivery import-hook`, which changes no file of sglang; or run as"
                " the owner of that folder, or install sglang into an environment that you may write",
            )


def _result(
    spec: PatchSpec,
    facts: EngineFacts,
    before: PatchState,
    after: PatchState,
    changes: Sequence[Change],
    record: Optional[PatchRecord],
    delivery: str = IN_PLACE,
) -> PatchResult:
    diffs = [c.diff() for c in changes]
    if changes and delivery == IN_PLACE:
        diffs += [f"new file {Path(facts.site) / name} ({len(text)} characters)" for name, text in spec.files.items()]
    elif changes:
        diffs += [
            f"new module {name} ({len(text)} characters), in the hook's folder" for name, text in spec.files.items()
        ]
    untested = [c.module for c in changes if not c.verified] if changes else record.untested if record else []
    return PatchResult(before, after, before is not after, facts.name, untested, "\n".join(diffs))
