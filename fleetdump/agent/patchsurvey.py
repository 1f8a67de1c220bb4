"""What is in an installed engine: patches of ours, files as the wheel brought them, and somebody else's work. Reads
only."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Dict, List, Optional

from fleetdump.agent import patchrecord
from fleetdump.agent.changes import show_diff
from fleetdump.agent.engine import EngineFacts
from fleetdump.agent.patchmessages import PatchState
from fleetdump.agent.patchrecord import FOLDER, PatchedModule, PatchRecord
from fleetdump.agent.specs import Edit, PatchSpec

MARKER = "fleetdump:"
"""Ends every line that an edit of ours has put in, before the patch's name."""


@dataclass
class Foreign:
    """A file that somebody else changed, why we think so, and a diff where we know what it was. ``recorded``: it was
    changed after our patch. ``lost``: our patch is in it and its record gone, which no force can undo."""

    path: str
    why: str
    diff: str = ""
    recorded: bool = False
    lost: bool = False


@dataclass
class Survey:
    """What was found in one installation. ``stale``: the package was reinstalled, so the record no longer describes
    it."""

    state: PatchState
    record: Optional[PatchRecord] = None
    foreign: List[Foreign] = field(default_factory=list)
    stale: bool = False
    modules: Dict[str, str] = field(default_factory=dict)
    """The file of each module asked for that the engine has."""


def survey_of(facts: EngineFacts, spec: Optional[PatchSpec] = None) -> Survey:
    """Look at what our record names and, with ``spec``, at the modules that it edits. Raises ``AgentFailure`` failed
    for a record that cannot be read."""
    record = patchrecord.load(Path(facts.site))
    wanted = modules_of(spec) if spec else []
    if record is None:
        survey = Survey(PatchState("clean", files=sorted(facts.modules.values())))
    else:
        survey = _survey_record(facts, record, spec)
    survey.modules = facts.modules
    notes = [survey.state.detail] if survey.state.detail else []
    recorded = record.modules if record and not survey.stale else []
    known = {m.module for m in recorded} | {os.path.normpath(Path(facts.site) / m.original.path) for m in recorded}
    for module in wanted:
        if module not in known and facts.modules.get(module) not in known:
            survey_unrecorded(facts, module, survey, notes)
    survey.state.detail = "; ".join(notes)
    if survey.foreign:
        survey.state.state = "unknown"
        survey.state.detail = "; ".join([*notes, *(f"{found.path}: {found.why}" for found in survey.foreign)])
    if wanted and not survey.foreign and not any(module in facts.modules for module in wanted):
        survey.state = PatchState("absent", detail=f"{facts.name} has none of: {', '.join(wanted)}")
    return survey


def _survey_record(facts: EngineFacts, record: PatchRecord, spec: Optional[PatchSpec]) -> Survey:
    """Compare each recorded file with what we wrote, with the original, and with the wheel that is there now."""
    site = Path(facts.site)
    survey = Survey(
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
            survey.foreign.append(Foreign(path, "it was changed after our patch", recorded=True))
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


def _compare(facts: EngineFacts, record: PatchRecord, module: PatchedModule, survey: Survey) -> str:
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
    survey.foreign.append(Foreign(str(path), why, show_diff(str(path), wrote, data), recorded=True))
    return "foreign"


def survey_unrecorded(facts: EngineFacts, module: str, survey: Survey, notes: List[str]) -> None:
    """A module that our record does not know must be as the wheel brought it."""
    path = facts.modules.get(module)
    if path is None:
        notes.append(f"{facts.name} has no module {module}")
        return
    data = Path(path).read_bytes()
    expected = facts.recorded.get(module)
    if MARKER.encode() in data:
        survey.foreign.append(Foreign(path, "it holds lines of a fleetdump patch whose record is gone", lost=True))
    elif expected is None:
        notes.append(f"{module}: no wheel RECORD to compare with (editable install?), taken as it is")
    elif patchrecord.sha256(data) != expected:
        survey.foreign.append(Foreign(path, "its SHA-256 differs from the one in the wheel's RECORD"))


def is_in(survey: Survey, spec: PatchSpec) -> bool:
    """Whether the patch is in every module that it needs and the engine has."""
    if survey.state.state != "ours" or survey.state.sha256 != spec.sha256 or survey.record is None:
        return False
    held = {module.module for module in survey.record.modules}
    return all(module in held for module in modules_of(spec) if module in survey.modules)


def edits_by_module(spec: PatchSpec) -> Dict[str, List[Edit]]:
    """The edits of each module, in the patch's order."""
    grouped: Dict[str, List[Edit]] = {}
    for edit in spec.edits:
        grouped.setdefault(edit.module, []).append(edit)
    return grouped


def modules_of(spec: PatchSpec) -> List[str]:
    """The modules that ``spec`` edits, each once."""
    return list(edits_by_module(spec))
