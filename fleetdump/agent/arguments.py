"""SGLang's command line as data: options with their values, merged without duplicates."""

from __future__ import annotations

from typing import List, Sequence

from fleetdump.agent.protocol import AgentFailure

OWN_OPTIONS = {
    "--model-path": "model_path",
    "--model": "model_path",
    "--host": "host",
    "--port": "port",
    "--tp-size": "tp",
    "--tensor-parallel-size": "tp",
    "--tp": "tp",
    "--dp-size": "dp",
    "--data-parallel-size": "dp",
    "--dp": "dp",
    "--pp-size": "pp",
    "--pipeline-parallel-size": "pp",
}
"""Options that an inventory's fields stand for: given twice, they could contradict each other."""


def option_groups(args: Sequence[str]) -> List[List[str]]:
    """Each option together with its values; values before the first option form a group of their own."""
    groups: List[List[str]] = []
    for arg in args:
        if arg.startswith("--") or not groups:
            groups.append([arg])
        else:
            groups[-1].append(arg)
    return groups


def option_name(group: Sequence[str]) -> str:
    return group[0].partition("=")[0]


def option_value(argv: Sequence[str], names: Sequence[str], default: str = "") -> str:
    """Value of the first option of ``names`` in a command line, as ``--name value`` or ``--name=value``."""
    for word, following in zip(argv, [*argv[1:], ""]):
        name, equals, value = word.partition("=")
        if name in names:
            return value if equals else following
    return default


def merge_arguments(first: Sequence[str], more: Sequence[str]) -> List[str]:
    """``first`` and those options of ``more`` that it does not have: what the user writes wins. An option that stands
    twice with the same values is given once."""
    merged: List[List[str]] = []
    for group in option_groups(first):
        if group not in merged:
            merged.append(group)
    return [arg for group in merged for arg in group] + added_arguments(first, more)


def added_arguments(first: Sequence[str], more: Sequence[str]) -> List[str]:
    """What ``merge_arguments`` adds to ``first``."""
    names = {option_name(group) for group in option_groups(first)}
    added = [group for group in option_groups(more) if option_name(group) not in names]
    return [arg for group in added for arg in group]


def refuse_own_options(args: Sequence[str]) -> None:
    """Raise ``AgentFailure`` usage for options that have a field of their own in the inventory."""
    for group in option_groups(args):
        name = option_name(group)
        if name in OWN_OPTIONS:
            raise AgentFailure(
                "usage",
                f"`args` must not contain {name}",
                next_step=f"use the server's field `{OWN_OPTIONS[name]}` in the inventory",
            )
