"""Secrets by reference: ``env:NAME`` and ``file:PATH`` stay references until the moment they are sent to a host."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

from fleetdump.agent.arguments import is_secret_option
from fleetdump.agent.specs import ServerSpec
from fleetdump.errors import UsageError

_MAX_SECRET_BYTES = 64 << 10
_SECRET_NAME = re.compile(r"(^|_)(TOKEN|SECRET|PASSWORD|PASSWD|APIKEY|KEY|CREDENTIALS?)(_|$)", re.IGNORECASE)
_REFERENCE = re.compile(r"env:[A-Za-z_][A-Za-z0-9_]*\Z|file:(?:~?/).+\Z", re.DOTALL)


def is_reference(value: str) -> bool:
    """Whether a value is ``env:NAME``, or ``file:`` with an absolute path or one that begins with ``~/``."""
    return bool(_REFERENCE.match(value))


def is_secret_name(name: str) -> bool:
    """Whether an environment variable's name says that its value is a secret."""
    return bool(_SECRET_NAME.search(name))


def resolve_secrets(server: ServerSpec, environ: Mapping[str, str] = os.environ) -> ServerSpec:
    """A copy with references in ``env`` and behind secret flags in ``args`` replaced by what they name.

    Call it right before the server is sent to its host, and never log the copy. Raises ``UsageError`` naming the
    variable or file that is missing or empty.
    """
    env = {name: _resolve(value, server, environ) for name, value in server.env.items()}
    args: list[str] = []
    for previous, arg in pairwise(["", *server.args]):
        flag, equals, value = arg.partition("=")
        if is_secret_option(previous):
            args.append(_resolve(arg, server, environ))
        elif equals and is_secret_option(flag):
            args.append(f"{flag}={_resolve(value, server, environ)}")
        else:
            args.append(arg)
    return replace(server, env=env, args=args)


def _resolve(value: str, server: ServerSpec, environ: Mapping[str, str]) -> str:
    if not is_reference(value):
        return value
    kind, _, name = value.partition(":")
    where = f"server {server.name}"
    if kind == "env":
        secret = environ.get(name, "")
        why, fix = f"the inventory says {value}", f"set the variable {name} and run the command again"
    else:
        secret, why = _read(Path(name).expanduser())
        fix = f"write the secret to {name}"
    if not secret:
        noun = "variable" if kind == "env" else "file"
        raise UsageError(f"a secret is missing: {noun} {name} is not there or empty", where, why, fix)
    return secret


def _read(path: Path) -> tuple[str, str]:
    """The file's text without its last line break and "", or "" and why not."""
    try:
        with path.open("rb") as stream:
            data = stream.read(_MAX_SECRET_BYTES + 1)
        if len(data) > _MAX_SECRET_BYTES:
            return "", f"it is larger than {_MAX_SECRET_BYTES} bytes"
        return data.decode().rstrip("\r\n"), "it is empty"
    except OSError as error:
        return "", error.strerror or str(error)
    except UnicodeDecodeError:
        return "", "it is not UTF-8 text"
