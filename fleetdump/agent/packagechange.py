"""The parts of a patch that may change any file of the package: which one fits the release, and what it makes."""

from __future__ import annotations

import base64
from typing import Dict, Mapping, Optional

from fleetdump.agent import engine, scriptpatch, unidiff
from fleetdump.agent.context import AgentContext
from fleetdump.agent.edit import release_within
from fleetdump.agent.engine import EngineFacts
from fleetdump.agent.package import Package
from fleetdump.agent.protocol import AgentFailure
from fleetdump.agent.specs import PackageChange, PatchSpec

Contents = Dict[str, Optional[bytes]]

_COMPILE = r"""
import base64, json, sys
def fault(data, path):
    try:
        compile(base64.b64decode(data), path, "exec", dont_inherit=True)
    except (SyntaxError, ValueError) as error:
        return "%s (line %s)" % (error, getattr(error, "lineno", "?"))
json.dump({path: fault(data, path) for path, data in json.load(sys.stdin).items()}, sys.stdout)
"""


def choose(spec: PatchSpec, release: str) -> Optional[PackageChange]:
    """The first of the patch's diffs and scripts that is for ``release``, None where it has none at all. Raises
    ``AgentFailure`` conflict where it has some, and none fits."""
    for change in spec.changes:
        if release_within(release, change.first_release, change.last_release):
            return change
    if not spec.changes:
        return None
    spans = dict.fromkeys(f"{c.first_release or 'any'} to {c.last_release or 'any'}" for c in spec.changes)
    raise _misfit(spec, f"sglang {release}", "", f"release {release} is outside {' and '.join(spans)}")


def plan(spec: PatchSpec, change: PackageChange, facts: EngineFacts, package: Package, ctx: AgentContext) -> Contents:
    """The new bytes of every file that ``change`` changes (None: deleted), by path such as ``sglang/srt/x.py``; Python
    files among them compile. Raises ``AgentFailure`` conflict."""
    data = base64.b64decode(change.data)
    if change.kind == "script":
        contents = scriptpatch.run(data, change.name, facts, package, ctx)
    else:
        contents = _by_diff(spec, change, data, facts, package)
    contents = {path: new for path, new in contents.items() if new != package.read(path)}
    if not contents:
        raise _misfit(spec, facts.name, change.name, "it changes nothing here")
    _check_syntax(spec, change, facts, package, contents, max(1.0, min(30.0, ctx.remaining())))
    return contents


def _by_diff(spec: PatchSpec, change: PackageChange, data: bytes, facts: EngineFacts, package: Package) -> Contents:
    try:
        files = unidiff.parse(data)
        contents: Contents = {path: package.read(path) for path in unidiff.touched(files)}
        for file in files:
            unidiff.apply_to(contents, file)
    except unidiff.DiffError as error:
        raise _misfit(spec, facts.name, change.name, str(error)) from error
    return contents


def _check_syntax(
    spec: PatchSpec, change: PackageChange, facts: EngineFacts, package: Package, contents: Contents, timeout: float
) -> None:
    """The server's own interpreter must compile what it could compile before."""
    faults = _faults(
        facts, {p: data for p, data in contents.items() if data is not None and p.endswith(".py")}, timeout
    )
    originals = {path: package.read(path) for path in faults}
    already = _faults(facts, {p: data for p, data in originals.items() if data is not None}, timeout)
    for path, fault in faults.items():
        if path not in already:
            version = f"Python {facts.python_version} cannot compile what it makes of {path}: {fault}"
            raise _misfit(spec, facts.name, change.name, version)


def _faults(facts: EngineFacts, sources: Mapping[str, bytes], timeout: float) -> Dict[str, str]:
    if not sources:
        return {}
    request = {path: base64.b64encode(data).decode() for path, data in sources.items()}
    answer = engine.run_json(facts.python, ["-I", "-B", "-W", "ignore", "-c", _COMPILE], request, facts.env, timeout)
    return {path: fault for path, fault in answer.items() if fault}


def _misfit(spec: PatchSpec, what: str, where: str, why: str) -> AgentFailure:
    return AgentFailure(
        "conflict",
        f"patch {spec.name} {spec.version} does not fit {what}",
        where=where,
        why=why,
        next_step="use a release that the patch is for, or make the patch anew for this one",
    )
