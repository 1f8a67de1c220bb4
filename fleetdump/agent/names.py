"""Names in a request that become names of files here: none is trusted, whoever sent it."""

from __future__ import annotations

import dataclasses
from typing import Any

from fleetdump.agent.formats import SERVER_NAME, SHARE_NAME, is_run_name
from fleetdump.agent.protocol import AgentFailure
from fleetdump.agent.specs import ServerSpec

SERVER_FIELDS = ("server", "servers", "share")
"""A share is named after its server, so that one rule holds for both."""
RUN_FIELDS = ("run", "runs", "discard")


def require_names(args: Any) -> None:
    """Look at every server and run that ``args``, the dataclass of a verb's arguments, names at any depth; an empty
    name says that there is none. Raises ``AgentFailure`` usage for one that cannot be the name of a folder of ours."""
    if isinstance(args, list):
        for each in args:
            require_names(each)
    elif dataclasses.is_dataclass(args):
        if isinstance(args, ServerSpec) and not SERVER_NAME.match(args.name):
            raise _refused("server", args.name)
        for field in dataclasses.fields(args):
            value = getattr(args, field.name)
            for text in [value] if isinstance(value, str) else value if isinstance(value, list) else []:
                _require(field.name, text)
            require_names(value)


def _require(field: str, text: Any) -> None:
    if not text or not isinstance(text, str):
        return
    if field in SERVER_FIELDS and not SHARE_NAME.match(text):
        raise _refused("server", text)
    if field in RUN_FIELDS and not is_run_name(text):
        raise _refused("run", text)


def _refused(kind: str, text: str) -> AgentFailure:
    return AgentFailure(
        "usage",
        f"{text[:80]!r} is no {kind} name",
        next_step="use letters, digits, '_' and '-'; status shows the names",
    )
