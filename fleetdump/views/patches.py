"""Patches for people: what each touches, its edits in words, and coloured diffs."""

from __future__ import annotations

import base64
from collections.abc import Iterable
from pathlib import Path

from fleetdump.agent import unidiff
from fleetdump.agent.patchmessages import PatchResult
from fleetdump.agent.specs import Edit, PackageChange, PatchSpec
from fleetdump.views.console import out, quoted

_FILES_SHOWN = 4
_COLOURS = (("+++", "bold"), ("---", "bold"), ("@@", "cyan"), ("+", "green"), ("-", "red"))


def show_patches(patches: Iterable[tuple[str, PatchSpec, Path]]) -> None:
    """Patches by the names that commands take, with version, where each lies and what it touches."""
    for name, spec, path in patches:
        own = f"  (records call it {spec.name})" if spec.name != name else ""
        out.print(f"[bold]{quoted(name)}[/] {quoted(spec.version)}  {quoted(str(path))}{quoted(own)}")
        out.print(f"  touches {quoted(', '.join(touches(spec)))}")


def touches(spec: PatchSpec) -> list[str]:
    """Modules and files that the patch changes or adds; what a script changes is only known when it has run."""
    found = [edit.module for edit in spec.edits]
    for change in spec.changes:
        if change.kind == "script":
            found.append(f"what {change.name} changes")
        else:
            paths = unidiff.touched(unidiff.parse(base64.b64decode(change.data)))
            more = len(paths) - _FILES_SHOWN
            found += paths[:_FILES_SHOWN] + ([f"{more} more files"] if more > 0 else [])
    return list(dict.fromkeys([*found, *(f"+{name}" for name in spec.files)]))


def show_patch(spec: PatchSpec) -> None:
    """Everything that a patch does."""
    out.print(f"[bold]{quoted(f'{spec.name} {spec.version}')}[/]  sha256 {spec.sha256}")
    for label, text in (("mark", spec.mark), ("server args", " ".join(spec.server_args))):
        if text:
            out.print(f"{label}: {quoted(text)}")
    for arg in spec.release_args:
        where = f"{arg.first_release or 'any'} to {arg.last_release or 'any'}"
        out.print(f"server arg of releases {where}: {quoted(arg.flag)}{quoted(f' ({arg.why})') if arg.why else ''}")
    if spec.refused_args:
        out.print(f"refuses: {quoted(', '.join(flag for rule in spec.refused_args for flag in rule.flags))}")
    if spec.files:
        out.print(f"adds beside the package: {quoted(', '.join(spec.files))}")
    for edit in spec.edits:
        _show_edit(edit)
    for change in spec.changes:
        _show_change(change)


def _show_edit(edit: Edit) -> None:
    what = f"edit {edit.module}: {edit.class_name}.{edit.method}, {_releases(edit)}"
    conditions = [f"with {name}" for name in edit.present] + [f"without {name}" for name in edit.absent]
    out.print(f"[bold]{quoted(', '.join([what, *conditions]))}[/]")
    for insertion in edit.insertions:
        out.print(f"  at {quoted(insertion.at)}")
        for line in insertion.lines:
            out.print(f"    [green]+ {quoted(line)}[/]")


def _show_change(change: PackageChange) -> None:
    out.print(f"[bold]{quoted(f'{change.kind} {change.name}, {_releases(change)}')}[/]")
    text = base64.b64decode(change.data).decode("utf-8", "replace")
    if change.kind == "diff":
        show_diff(text)
    else:
        out.print(text, markup=False)


def _releases(part: Edit | PackageChange) -> str:
    span = f"releases {part.first_release or 'any'} to {part.last_release or 'any'}"
    return f"{span}, tested on {', '.join(part.verified) or 'none'}"


def show_diff(text: str) -> None:
    """A unified diff, in colours on a terminal."""
    for line in text.splitlines():
        style = next((style for start, style in _COLOURS if line.startswith(start)), None)
        out.print(line, style=style, markup=False)


def show_dry_run(host: str, results: list[PatchResult]) -> None:
    """What a patch would do to each engine of a host."""
    for result in results:
        state = f"{result.before.state} {result.before.patch} {result.before.version}".strip()
        fits = "is applied already" if not result.diff else "fits"
        out.print(f"[bold]{quoted(host)}[/]  {quoted(f'{result.engine} ({state}): the patch {fits}')}")
        if result.delivery == "import-hook":
            out.print("  no file changes: the launched process imports what is shown here")
        if result.doubts:
            out.print(f"  {quoted(result.doubts)}")
        if result.before.detail:
            out.print(f"  {quoted(result.before.detail)}")
        show_diff(result.diff)
