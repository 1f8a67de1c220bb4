"""One line in ``audit.jsonl`` for each verb that changed this host: who, what, when, how it ended; never a secret."""

from __future__ import annotations

import contextlib
import json
import os
from collections import deque
from pathlib import Path
from typing import Any, Collection, Deque

from fleetdump.agent import lease
from fleetdump.agent.context import AgentContext, State
from fleetdump.agent.formats import FORMAT_VERSION
from fleetdump.agent.hostmessages import AuditArgs, AuditEntry, AuditResult
from fleetdump.agent.jsonl import open_plain
from fleetdump.agent.lock import held_by
from fleetdump.agent.protocol import AgentFailure
from fleetdump.agent.records import UNREADABLE, decode, naming
from fleetdump.agent.scrub import scrub_argv

FILE = "audit.jsonl"
_LONGEST_TEXT = 120
_LONGEST_LIST = 32
_USUAL_LINE = 4096
"""Bytes that are read of the log for each entry that is asked for."""
_LATEST = 1e11
_NAMES_ONLY = frozenset({"env", "files"})
"""Keys whose objects map names to contents: the names are worth auditing, the contents are secret or long."""


def shorten(value: Any) -> Any:
    """JSON data cut down to what an audit line needs: no environment values, no file contents, no long text."""
    if isinstance(value, dict):
        return {k: sorted(v) if k in _NAMES_ONLY and isinstance(v, dict) else shorten(v) for k, v in value.items()}
    if isinstance(value, list):
        if value and all(isinstance(item, str) for item in value):
            value = scrub_argv(value)
        return [shorten(item) for item in value[:_LONGEST_LIST]] + (["…"] if len(value) > _LONGEST_LIST else [])
    if isinstance(value, str) and len(value) > _LONGEST_TEXT:
        return value[:_LONGEST_TEXT] + "…"
    return value


def record(ctx: AgentContext, *, ok: bool, started: float, seconds: float, code: str = "") -> None:
    """Append this call, which failed with ``code`` unless it is ``ok``, to ``audit.jsonl`` by one ``write`` with
    O_APPEND, so that lines of two agents never mix. An ``OSError`` names that file."""
    line = {
        "v": FORMAT_VERSION,
        "t": started,
        "operator": ctx.request.operator,
        "verb": ctx.request.verb,
        "args": shorten(ctx.request.args),
        "ok": ok,
        "seconds": round(seconds, 3),
        "code": code,
    }
    path = ctx.state.root / FILE
    with naming(path):
        ctx.state.directory()
        _append(path, json.dumps(line, separators=(",", ":")).encode() + b"\n")


def refuse_damage(ctx: AgentContext) -> None:
    """Raise ``AgentFailure`` failed, before anything is changed, when something is in the audit log's place that takes
    no line."""
    path = ctx.state.root / FILE
    if path.is_dir():
        raise AgentFailure(
            "failed",
            "the audit log cannot be written",
            where=str(path),
            why="there is a folder in its place",
            next_step=f"see what is in it, then move it away: mv {path} {path}.old",
        )


def _append(path: Path, line: bytes) -> None:
    descriptor = os.open(str(path), os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    try:
        os.write(descriptor, line)
    finally:
        os.close(descriptor)


def audit(args: AuditArgs, ctx: AgentContext) -> AuditResult:
    """Who changed this host, and who does now. Lines that cannot be read are passed over; of a long log only the end
    is read."""
    entries: Deque[AuditEntry] = deque(maxlen=args.entries)
    path = ctx.state.root / FILE
    if path.is_file():
        with open(str(path), "rb", opener=open_plain) as file:
            before = max(0, file.seek(0, os.SEEK_END) - args.entries * _USUAL_LINE)
            file.seek(before)
            for line in file.readlines()[1 if before else 0 :]:
                with contextlib.suppress(*UNREADABLE):
                    entry = decode(AuditEntry, line, FILE)
                    if 0 <= entry.t < _LATEST and 0 <= entry.seconds < _LATEST:  # no NaN either
                        entries.append(entry)
    return AuditResult(list(entries), lease.held_by(ctx.state) or held_by(ctx.state.root / "lock"))


def last_operator(state: State, verbs: Collection[str], since: float) -> str:
    """Who ran one of ``verbs`` last, ending after ``since``; empty when the log does not say. Lines that cannot be read
    are passed over."""
    operator = ""
    with contextlib.suppress(OSError), open(state.root / FILE, "rb", opener=open_plain) as file:
        for line in file:
            with contextlib.suppress(*UNREADABLE, KeyError, TypeError):
                entry = json.loads(line)
                if entry["verb"] in verbs and entry["t"] + entry["seconds"] >= since:
                    operator = str(entry["operator"])
    return operator
