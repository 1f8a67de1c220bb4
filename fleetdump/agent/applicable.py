"""Which parts of a patch concern one release of the engine and the models that it serves."""

from __future__ import annotations

from typing import List, Sequence, Set

from fleetdump.agent.edit import release_within
from fleetdump.agent.model import read_model
from fleetdump.agent.protocol import AgentFailure
from fleetdump.agent.specs import Edit, PatchSpec


def choose_edits(spec: PatchSpec, release: str, architectures: Sequence[str]) -> List[Edit]:
    """The edits of those modules that models of ``architectures`` run on ``release``, in the patch's order.

    For each architecture that is the first of its modules that has an edit for the release (the loop of a model may
    move to a file of its own); modules that belong to no architecture are always taken. Without architectures, or
    where the patch maps none, it is every module that has an edit for the release. Raises ``AgentFailure`` conflict
    for an architecture that the patch refuses or does not know, and for a release that it has no edit for.
    """
    if not spec.edits:  # a diff or script alone: agent/packagechange.py chooses among those
        return []
    fitting = {e.module for e in spec.edits if release_within(release, e.first_release, e.last_release)}
    if not fitting:
        raise _does_not_fit(spec, f"sglang {release}", _spans(spec.edits, release))
    wanted = fitting
    if architectures and spec.architectures:
        mapped = {module for modules in spec.architectures.values() for module in modules}
        wanted = (fitting - mapped) | {_module_of(spec, name, release, fitting) for name in architectures}
    return [edit for edit in spec.edits if edit.module in wanted]


def _module_of(spec: PatchSpec, architecture: str, release: str, fitting: Set[str]) -> str:
    if architecture in spec.refused:
        raise _does_not_fit(spec, f"models of architecture {architecture}", spec.refused[architecture])
    modules = spec.architectures.get(architecture)
    if modules is None:
        why = f"it knows {', '.join(sorted(spec.architectures))}"
        raise _does_not_fit(spec, f"models of architecture {architecture}", why)
    chosen = next((module for module in modules if module in fitting), None)
    if chosen is None:
        edits = [edit for edit in spec.edits if edit.module in modules]
        raise _does_not_fit(spec, f"{architecture} on sglang {release}", _spans(edits, release))
    return chosen


def _spans(edits: Sequence[Edit], release: str) -> str:
    spans = dict.fromkeys(f"{e.first_release or 'any'} to {e.last_release or 'any'}" for e in edits)
    return f"release {release} is outside {' and '.join(spans)}"


def _does_not_fit(spec: PatchSpec, what: str, why: str) -> AgentFailure:
    return AgentFailure(
        "conflict",
        f"patch {spec.name} {spec.version} is not for {what}",
        why=why,
        next_step="serve a model and a release that the patch names, or add them to the patch with a test",
    )


def architectures_of(models: Sequence[str]) -> List[str]:
    """What the config.json of each model directory names; empty when one cannot be read (a model that is still to be
    downloaded), since then any module may be the one that is run."""
    try:
        return [read_model(model, needs_weights=False).architecture for model in models]
    except AgentFailure:
        return []
