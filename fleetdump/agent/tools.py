"""Programs that the controller brings for a diagnosis, named by what they are: the same bytes are brought once."""

from __future__ import annotations

import base64
import hashlib
import os
import re
import zlib

from fleetdump.agent.context import AgentContext, State
from fleetdump.agent.hostmessages import ToolArgs, ToolResult
from fleetdump.agent.jsonl import replacing
from fleetdump.agent.protocol import AgentFailure

TOOL_BYTES = 64 << 20
_NAME = re.compile(r"[a-z][a-z0-9-]*")
_HASH = re.compile(r"[0-9a-f]{64}")


def tool(args: ToolArgs, ctx: AgentContext) -> ToolResult:
    """Verb ``tool``: store a program; ``clean`` removes it with the state directory.

    Raises ``AgentFailure`` (usage, failed) when the name is none or the bytes are not those that were announced.
    """
    if not _NAME.fullmatch(args.name) or not _HASH.fullmatch(args.sha256):
        raise AgentFailure("usage", f"{args.name!r} is no name of a tool, or its hash is none")
    folder = ctx.state.directory("tools")
    final = folder / f"{args.name}-{args.sha256}"
    digest, unpack, size = hashlib.sha256(), zlib.decompressobj(), 0
    with replacing(final, mode=0o700, temporary=folder / f".{args.name}-{os.getpid()}") as file:
        for line in ctx.body():
            data = unpack.decompress(base64.b64decode(line["data"]), TOOL_BYTES - size + 1)
            size += len(data)
            digest.update(data)
            file.write(data)
        if size > TOOL_BYTES or digest.hexdigest() != args.sha256:
            what = f"the bytes of {args.name} are not those that were announced"
            raise AgentFailure("failed", what, where=str(final))
    return ToolResult(str(final))


def brought(state: State, name: str) -> str:
    """The newest ``name`` that a controller brought; empty when none did."""
    folder = state.root / "tools"
    found = [path for path in folder.glob(f"{name}-*") if path.is_file()] if folder.is_dir() else []
    return str(max(found, key=lambda path: path.stat().st_mtime)) if found else ""
