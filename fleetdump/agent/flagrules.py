"""What a patch wants of a server's flags: those that it adds, those that it cannot be right with, and what the server
then says of itself. Pure: who asks the server is ``settings``."""

from __future__ import annotations

import re
from typing import Any, Iterator, List, Mapping, Optional, Sequence

from fleetdump.agent.arguments import option_groups, option_name, options_meant
from fleetdump.agent.edit import release_within
from fleetdump.agent.protocol import AgentFailure
from fleetdump.agent.specs import Expectation, PatchSpec, RefusedArg, ReleaseArg

_MISSING = object()


# --------------------------------------------------------------------------- before the start
def added_args(spec: PatchSpec, release: str, without: Sequence[str] = ()) -> List[ReleaseArg]:
    """The flags of ``release`` that the patch adds, but for those ``without`` which the user wants it. Raises
    ``AgentFailure`` usage for one that the patch does not have, conflict for one that it needs on this release."""
    known = {arg.flag for arg in spec.release_args}
    for flag in without:
        if flag not in known:
            raise AgentFailure(
                "usage",
                f"`without` names {flag}, which patch {spec.name} does not add",
                next_step=f"it may name {', '.join(sorted(known)) or 'nothing'}",
            )
    chosen = [arg for arg in spec.release_args if release_within(release, arg.first_release, arg.last_release)]
    for arg in chosen:
        if arg.flag in without and not _may_be_left_out(arg, release):
            raise _needed(spec, arg, release)
    return [arg for arg in chosen if arg.flag not in without]


def _may_be_left_out(arg: ReleaseArg, release: str) -> bool:
    return bool(arg.optional) and release_within(release, arg.optional_from, "")


def _needed(spec: PatchSpec, arg: ReleaseArg, release: str) -> AgentFailure:
    since = f"; only from {arg.optional_from} on: {arg.optional}" if arg.optional else ""
    return AgentFailure(
        "conflict",
        f"patch {spec.name} needs {arg.flag} on sglang {release}",
        where="`without` of the server in the inventory",
        why=f"{arg.why or 'it is not right without'}{since}",
        next_step="take it out of `without`",
    )


def patch_arguments(spec: PatchSpec, release: str, without: Sequence[str] = ()) -> List[str]:
    """The arguments that servers with the patch get on ``release``; raises as ``added_args``."""
    return [*spec.server_args, *(arg.flag for arg in added_args(spec, release, without))]


def refused(spec: PatchSpec, args: Sequence[str]) -> Iterator[str]:
    """Why the patch would be wrong with ``args``, one text for each option; an abbreviation counts, as argparse takes
    it for the option that it begins."""
    for group in option_groups(args):
        rule = _rule_for(spec.refused_args, option_name(group))
        if rule is None:
            continue
        value = group[0].partition("=")[2] or (group[1] if len(group) > 1 else "")
        if value.lower() not in rule.allowed:
            yield f"{' '.join([group[0], *group[1:2]])}: {rule.why}"


def _rule_for(rules: Sequence[RefusedArg], name: str) -> Optional[RefusedArg]:
    """The rule for an option. One that begins options of several rules is none: no release has but one that begins so,
    and SGLang itself refuses it."""
    meant = options_meant(name, [flag for rule in rules for flag in rule.flags])
    found = [rule for rule in rules if set(meant) & set(rule.flags)]
    return found[0] if len(found) == 1 else None


# --------------------------------------------------------------------------- after the start
def expectations(spec: PatchSpec, release: str, without: Sequence[str] = ()) -> List[Expectation]:
    """What a server with the patch must say of itself; raises as ``added_args``."""
    wanted = [
        Expectation(arg.flag, arg.why, {name: [text] for name, text in arg.shows.items()}, True, arg.unlogged)
        for arg in added_args(spec, release, without)
    ]
    for rule in spec.refused_args:
        fields = {flag.lstrip("-").replace("-", "_"): rule.allowed for flag in rule.flags}
        wanted.append(Expectation(rule.flags[0], rule.why, fields, False))
    return wanted


def faults(wanted: Sequence[Expectation], info: Mapping[str, Any], log: Sequence[str] = ()) -> Iterator[str]:
    """What of ``wanted`` is not so, in words. ``info`` is the answer of /server_info, in which each scheduler's own
    settings stand as ``internal_states``; ``log`` has lines of the server's log."""
    states = [state for state in info.get("internal_states") or [] if isinstance(state, dict)]
    for one in wanted:
        for field, right in one.fields.items():
            # A scheduler says of its own settings what it runs with; not all of what the launcher knows is among them.
            found = [lookup(info, field), *(lookup(state, field) for state in states)]
            there = [value for value in found if value is not _MISSING]
            wrong = next((value for value in there if not _is_right(value, right, one.required)), _MISSING)
            if wrong is not _MISSING:
                yield _not_so(one, f"/server_info has {field} = {text_of(wrong)}")
            elif not there and one.required:
                yield _not_so(one, f"/server_info has no {field}")
        for pattern in one.unlogged:
            said = next((line for line in log if re.search(pattern, line)), None)
            if said is not None:
                yield _not_so(one, f"the log says: {said.strip()[:200]}")


def lookup(info: Mapping[str, Any], field: str) -> Any:
    """The value at a dotted name, or a marker that is no value."""
    value: Any = info
    for part in field.split("."):
        if not isinstance(value, dict) or part not in value:
            return _MISSING
        value = value[part]
    return value


def text_of(value: Any) -> str:
    """A JSON value as a rule writes it: ``true``, ``none``, ``1``, ``disabled``."""
    return str(value).lower()


def _is_right(value: Any, right: Sequence[str], required: bool) -> bool:
    return text_of(value) in right or (not required and not value)


def _not_so(one: Expectation, seen: str) -> str:
    claim = f"{one.flag} did not take effect" if one.required else f"{one.flag} is on"
    return f"{claim}: {seen}" + (f" ({one.why})" if one.why else "")
