"""Apply a patch to the installed engine, say what state it is in, and take the patch out again byte for byte."""

from __future__ import annotations

import base64
import os
import time
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Dict, List, Mapping, Optional, Sequence, Tuple

from fleetdump.agent import applicable, engine, packagechange, patchfiles, patchrecord
from fleetdump.agent.changes import Change, show_diff
from fleetdump.agent.context import AgentContext
from fleetdump.agent.engine import EngineFacts
from fleetdump.agent.package import Package
from fleetdump.agent.patchrecord import FOLDER, PatchedModule, PatchRecord
from fleetdump.agent.protocol import (
    DELIVERIES,
    AgentFailure,
    Edit,
    PatchArgs,
    PatchResult,
    PatchSpec,
    PatchState,
    RevertArgs,
    RevertResult,
    to_json,
)

MARKER = "fleetdump:"
IN_PLACE, IMPORT_HOOK = DELIVERIES
_RUN_EDIT = "import sys; sys.path.insert(0, sys.argv[1]); from fleetdump.agent.edit import main; main()"


@dataclass
class _Foreign:
    """A file that somebody else changed, why we think so, and a diff where we know what it was. ``recorded``: it was
    changed after our patch. ``lost``: our patch is in it and its record gone, which no force can undo."""

    path: str
    why: str
    diff: str = ""
    recorded: bool = False
    lost: bool = False


@dataclass
class _Survey:
    """What was found in one installation. ``stale``: the package was reinstalled, so the record no longer describes
    it."""

    state: PatchState
    record: Optional[PatchRecord] = None
    foreign: List[_Foreign] = field(default_factory=list)
    stale: bool = False
    modules: Dict[str, str] = field(default_factory=dict)
    """The file of each module asked for that the engine has."""


# --------------------------------------------------------------------------- verbs
def patch(args: PatchArgs, ctx: AgentContext) -> PatchResult:
    """Apply what of ``args.patch`` the engine and the models need, first taking out another patch of ours; modules
    that this very patch is already in stay patched. Raises ``AgentFailure``: conflict for files that somebody else
    changed and for a release or model that the patch is not for, not_found for a missing engine or module, permission
    for a read-only package."""
    facts = _facts(args.python, args.patch, args.env, _limit(ctx))
    site = Path(facts.site)
    if args.dry_run:
        spec, before = _needed(facts, args.patch, args.models)
        changes = [] if _is_in(before, spec) else _plan(facts, spec, before, ctx, args.force)
        if changes and args.delivery == IN_PLACE:
            _require_writable(facts, changes)
        return _result(spec, facts, before.state, before.state, changes, before.record)
    _require_writable(facts)
    with patchrecord.locked(site):
        spec, before = _needed(facts, args.patch, args.models)
        if _is_in(before, spec):
            return _result(spec, facts, before.state, before.state, [], before.record)
        changes = _plan(facts, spec, before, ctx, args.force)
        _require_writable(facts, changes)
        kept = _set_aside(before, ctx)
        if before.record is not None:
            patchfiles.take_out(site, before.record, before.stale)
        record = patchfiles.prepare(site, facts, spec, changes)
        patchfiles.put_in(site, record, changes, spec)
        result = _result(spec, facts, before.state, _survey(facts, spec).state, changes, record)
        return replace(result, kept=kept)


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
    """Restore every file that a patch of ours changed; raises ``AgentFailure`` conflict when one was edited since."""
    facts = _facts(args.python, env=args.env, timeout=_limit(ctx))
    site = Path(facts.site)
    clean = PatchState("clean")
    if not (site / FOLDER).is_dir():
        return RevertResult(False, clean, clean)
    _require_writable(facts)
    with patchrecord.locked(site):
        before = _survey(facts)
        if before.record is None:
            return RevertResult(False, clean, clean)
        _refuse_foreign(before, args.force)
        _set_aside(before, ctx)
        verified = patchfiles.take_out(site, before.record, before.stale)
        return RevertResult(True, before.state, clean, verified)


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
        return PatchState("absent", detail=failure.error.what)
    if spec is None:
        return _survey(facts).state
    spec, survey = _needed(facts, spec, models)
    state = survey.state
    return replace(state, state="other") if state.state == "ours" and not _is_in(survey, spec) else state


# --------------------------------------------------------------------------- what is there
def _facts(
    python: str, spec: Optional[PatchSpec] = None, env: Optional[Mapping[str, str]] = None, timeout: float = 30.0
) -> EngineFacts:
    """The engine, with the modules of ``spec`` and those that a record of ours names. ``env`` adds to our own."""
    wanted = _modules(spec) if spec else []
    env = {**os.environ, **(env or {})}
    facts = engine.query(python, wanted, env=env, timeout=timeout)
    record = patchrecord.load(Path(facts.site))
    others = [m.module for m in record.modules if m.module not in wanted] if record else []
    return engine.query(python, wanted + others, env=env, timeout=timeout) if others else facts


def _needed(facts: EngineFacts, spec: PatchSpec, models: Sequence[str]) -> Tuple[PatchSpec, _Survey]:
    """``spec`` with the edits alone that ``models`` need on this release, or that are in the engine already (servers
    of another model use them); and the survey of that."""
    edits = applicable.choose_edits(spec, facts.release, applicable.architectures_of(models))
    survey = _survey(facts, replace(spec, edits=edits))
    record = survey.record
    if record is None or survey.stale or record.sha256 != spec.sha256:
        return replace(spec, edits=edits), survey
    held = {module.module for module in record.modules}
    edits = [edit for edit in spec.edits if edit in edits or edit.module in held]
    return replace(spec, edits=edits), survey


def _survey(facts: EngineFacts, spec: Optional[PatchSpec] = None) -> _Survey:
    record = patchrecord.load(Path(facts.site))
    wanted = _modules(spec) if spec else []
    if record is None:
        survey = _Survey(PatchState("clean", files=sorted(facts.modules.values())))
    else:
        survey = _survey_record(facts, record, spec)
    survey.modules = facts.modules
    notes = [survey.state.detail] if survey.state.detail else []
    recorded = record.modules if record and not survey.stale else []
    known = {m.module for m in recorded} | {os.path.normpath(Path(facts.site) / m.original.path) for m in recorded}
    for module in wanted:
        if module not in known and facts.modules.get(module) not in known:
            _survey_unrecorded(facts, module, survey, notes)
    survey.state.detail = "; ".join(notes)
    if survey.foreign:
        survey.state.state = "unknown"
        survey.state.detail = "; ".join([*notes, *(f"{found.path}: {found.why}" for found in survey.foreign)])
    if wanted and not survey.foreign and not any(module in facts.modules for module in wanted):
        survey.state = PatchState("absent", detail=f"{facts.name} has none of: {', '.join(wanted)}")
    return survey


def _survey_record(facts: EngineFacts, record: PatchRecord, spec: Optional[PatchSpec]) -> _Survey:
    """Compare each recorded file with what we wrote, with the original, and with the wheel that is there now."""
    site = Path(facts.site)
    survey = _Survey(
        PatchState(
            "ours", record.patch, record.version, record.sha256, [str(site / m.original.path) for m in record.modules]
        ),
        record,
    )
    modules = [_compare(facts, record, module, survey) for module in record.modules]
    files = []
    for added in record.files:
        data = patchrecord.read_bytes(site / added.path)
        files.append("patched" if data is not None else "original")
        if data is not None and patchrecord.sha256(data) != added.sha256:
            path = str(site / added.path)
            survey.foreign.append(_Foreign(path, "it was changed after our patch", recorded=True))
    state = survey.state
    if "reinstalled" in modules and "patched" not in modules:
        survey.stale = True
        state.state = "clean"
        state.detail = f"{facts.name} was installed over our patch {record.patch} {record.version} of {record.release}"
    elif set(modules + files) != {"patched"}:
        state.state = "other"
        state.detail = f"an interrupted change of patch {record.patch} {record.version}; patch or revert repairs it"
    elif spec is not None and record.sha256 != spec.sha256:
        state.state = "other"
    return survey


def _compare(facts: EngineFacts, record: PatchRecord, module: PatchedModule, survey: _Survey) -> str:
    """What a recorded module is now: patched, original, reinstalled or foreign (then noted in ``survey``)."""
    site = Path(facts.site)
    path = site / module.original.path
    data = patchrecord.read_bytes(path)
    digest = patchrecord.sha256(data) if data is not None else ""
    if digest == module.patched_sha256:
        return "patched"
    if digest == module.original.sha256:
        return "original"
    if digest == facts.recorded.get(module.module) or facts.release != record.release:
        return "reinstalled"
    wrote = patchrecord.read_bytes(site / FOLDER / module.patched_copy) if module.patched_copy else None
    why = "it was changed after our patch" if data is not None else "it is missing"
    survey.foreign.append(_Foreign(str(path), why, show_diff(str(path), wrote, data), recorded=True))
    return "foreign"


def _survey_unrecorded(facts: EngineFacts, module: str, survey: _Survey, notes: List[str]) -> None:
    """A module that our record does not know must be as the wheel brought it."""
    path = facts.modules.get(module)
    if path is None:
        notes.append(f"{facts.name} has no module {module}")
        return
    data = Path(path).read_bytes()
    expected = facts.recorded.get(module)
    if MARKER.encode() in data:
        survey.foreign.append(_Foreign(path, "it holds lines of a fleetdump patch whose record is gone", lost=True))
    elif expected is None:
        notes.append(f"{module}: no wheel RECORD to compare with (editable install?), taken as it is")
    elif patchrecord.sha256(data) != expected:
        survey.foreign.append(_Foreign(path, "its SHA-256 differs from the one in the wheel's RECORD"))


def _is_in(survey: _Survey, spec: PatchSpec) -> bool:
    """Whether the patch is in every module that it needs and the engine has."""
    if survey.state.state != "ours" or survey.state.sha256 != spec.sha256 or survey.record is None:
        return False
    held = {module.module for module in survey.record.modules}
    return all(module in held for module in _modules(spec) if module in survey.modules)


def _refuse_foreign(survey: _Survey, force: bool = False) -> None:
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


def _set_aside(survey: _Survey, ctx: AgentContext) -> List[str]:
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
def _plan(facts: EngineFacts, spec: PatchSpec, survey: _Survey, ctx: AgentContext, force: bool = False) -> List[Change]:
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
    for module, edits in _edits_by_module(spec).items():
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
    facts: EngineFacts, spec: PatchSpec, package: Package, survey: _Survey, ctx: AgentContext
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
        _survey_unrecorded(looked_at, path, survey, notes)
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


def _refuse_taken_names(facts: EngineFacts, spec: PatchSpec, survey: _Survey) -> None:
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
def _edits_by_module(spec: PatchSpec) -> Dict[str, List[Edit]]:
    grouped: Dict[str, List[Edit]] = {}
    for edit in spec.edits:
        grouped.setdefault(edit.module, []).append(edit)
    return grouped


def _modules(spec: PatchSpec) -> List[str]:
    return list(_edits_by_module(spec))


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
) -> PatchResult:
    diffs = [c.diff() for c in changes]
    if changes:
        diffs += [f"new file {Path(facts.site) / name} ({len(text)} characters)" for name, text in spec.files.items()]
    verified = all(c.verified for c in changes) if changes else bool(record and record.verified)
    return PatchResult(before, after, before is not after, facts.name, verified, "\n".join(diffs))
