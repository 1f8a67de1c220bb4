"""SGLang's command line as data: options with their values, merged without duplicates."""

from __future__ import annotations

from typing import Iterable, List, Sequence

from fleetdump.agent.protocol import AgentFailure

OWN_OPTIONS = {
    "--model-path": "model_path",
    "--model": "model_path",
    "--host": "host",
    "--port": "port",
    "--tp-size": "tp",
    "--tensor-parallel-size": "tp",
    "--dp-size": "dp",
    "--data-parallel-size": "dp",
    "--pp-size": "pp",
    "--pipeline-parallel-size": "pp",
}
"""Options that an inventory's fields stand for: given twice, they could contradict each other."""

SECRET_OPTIONS = ("--api-key", "--admin-api-key", "--ssl-keyfile-password")
"""Options whose value is a secret."""
_HARMLESS = ("--ssl-keyfile",)
"""Options of their own that a secret one begins with."""


def options_meant(name: str, options: Iterable[str]) -> List[str]:
    """Which of ``options`` SGLang's command line would take ``name`` for: that very one, else those that it begins.
    argparse takes an abbreviation when one option of the release begins so (``--tp`` is one: there is no such option),
    and refuses it itself when several do. An underscore is meant as a hyphen; SGLang has none in its options."""
    name = name.replace("_", "-")
    known = list(options)
    if name in known:
        return [name]
    return [option for option in known if option.startswith(name)] if len(name) > len("--") else []


def own_option(name: str) -> str:
    """The field of the inventory that an option stands for, however it is written; empty for any other."""
    meant = options_meant(name, OWN_OPTIONS)
    return OWN_OPTIONS[meant[0]] if meant else ""


def is_secret_option(name: str) -> bool:
    """Whether the value of an option is a secret, however the option is written."""
    return any(option in SECRET_OPTIONS for option in options_meant(name, SECRET_OPTIONS + _HARMLESS))


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
    """Value of an option with these ``names`` in a command line, as ``--name value`` or ``--name=value``, abbreviated
    or not; of several the last, as argparse has it."""
    found = default
    for word, following in zip(argv, [*argv[1:], ""]):
        name, equals, value = word.partition("=")
        if options_meant(name, names):
            found = value if equals else following
    return found


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
        if own_option(name):
            raise AgentFailure(
                "usage",
                f"`args` must not contain {name}",
                next_step=f"use the server's field `{own_option(name)}` in the inventory",
            )
