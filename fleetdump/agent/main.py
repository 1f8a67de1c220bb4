"""The agent's entry: one request in, events and one result out, and an end in time whatever happens."""

from __future__ import annotations

import contextlib
import errno
import importlib
import json
import os
import sys
import time
import traceback
from typing import Any, BinaryIO, Dict, Iterator, NamedTuple

from fleetdump.agent import (
    audit,
    bundles,
    hostmessages,
    lease,
    patchmessages,
    protocol,
    runmessages,
    servermessages,
    steermessages,
)
from fleetdump.agent.context import AgentContext, ControllerGone, State
from fleetdump.agent.lock import host_lock
from fleetdump.agent.names import require_names
from fleetdump.agent.protocol import AgentError, AgentFailure, Request, from_json, to_json
from fleetdump.agent.records import NOT_WRITABLE
from fleetdump.agent.watchdog import Watchdog


class Verb(NamedTuple):
    """``target`` is ``module:function`` below ``fleetdump.agent``, imported on use; a verb that ``mutates`` the host
    holds its lock and is audited, unless its ``dry_run`` is set; an ``urgent`` one does its work even where the disk
    takes neither lock nor audit, and while another operator's deploy has the host."""

    args: type
    target: str
    mutates: bool = False
    urgent: bool = False


VERB_TABLE: Dict[str, Verb] = {
    "probe": Verb(hostmessages.ProbeArgs, "probe:probe"),
    "hold": Verb(hostmessages.HoldArgs, "lease:hold"),
    "release": Verb(hostmessages.ReleaseArgs, "lease:release"),
    "forecast": Verb(servermessages.ForecastArgs, "forecast:forecast"),
    "patch": Verb(patchmessages.PatchArgs, "patching:patch", mutates=True),
    "revert": Verb(patchmessages.RevertArgs, "patching:revert", mutates=True),
    "launch": Verb(servermessages.LaunchArgs, "launch:launch", mutates=True),
    "stop": Verb(servermessages.StopArgs, "stop:stop", mutates=True, urgent=True),
    "logs": Verb(servermessages.LogsArgs, "status:logs"),
    "status": Verb(hostmessages.StatusArgs, "status:status"),
    "audit": Verb(hostmessages.AuditArgs, "audit:audit"),
    "watch": Verb(servermessages.WatchArgs, "watch:watch"),
    "monitor": Verb(servermessages.MonitorArgs, "monitor:monitor"),
    "restart": Verb(servermessages.RestartArgs, "restart:restart", mutates=True),
    "unlock": Verb(hostmessages.UnlockArgs, "unlock:unlock"),
    "settings": Verb(servermessages.SettingsArgs, "settings:settings"),
    "evidence": Verb(servermessages.EvidenceArgs, "evidence:evidence"),
    "tool": Verb(hostmessages.ToolArgs, "tools:tool"),
    "selfcheck": Verb(runmessages.SelfCheckArgs, "selfcheck:selfcheck"),
    "burst": Verb(runmessages.BurstArgs, "burst:burst"),
    "preview": Verb(runmessages.PreviewArgs, "preview:preview"),
    "steer": Verb(steermessages.SteerArgs, "turn:steer"),
    "submit": Verb(runmessages.SubmitArgs, "drive:submit", mutates=True),
    "order": Verb(runmessages.OrderArgs, "drive:order", mutates=True, urgent=True),
    "withdraw": Verb(runmessages.WithdrawArgs, "withdraw:withdraw"),
    "held": Verb(runmessages.HeldArgs, "withdraw:held"),
    "done": Verb(runmessages.DoneArgs, "withdraw:done"),
    "follow": Verb(runmessages.FollowArgs, "drive:follow"),
    "manifest": Verb(runmessages.ManifestArgs, "drive:manifest"),
    "verify": Verb(runmessages.VerifyArgs, "verify:verify"),
    "shards": Verb(runmessages.ShardsArgs, "shards:shards"),
    "fetch": Verb(runmessages.FetchArgs, "shards:fetch"),
    "controller": Verb(hostmessages.ControllerArgs, "controlling:controller", mutates=True),
    "clean": Verb(hostmessages.CleanArgs, "clean:clean", mutates=True),
}


def run(*, pushed: bool = False) -> None:
    """Serve the one request on stdin. ``pushed``: the bundle has just been unpacked, so older ones may go."""
    request = from_json(Request, json.loads(sys.stdin.buffer.readline()))
    ctx = AgentContext(request, State.of(request.state_dir), stdout=_claim_stdout())
    with bundles.in_use(ctx.state), Watchdog(ctx):
        if pushed:
            bundles.prune(ctx.state)
        serve(ctx)


def _claim_stdout() -> BinaryIO:
    """Our own handle on stdout; whatever a verb, a library or a child process prints goes to stderr from now on."""
    sys.stdout.flush()
    frames = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    sys.stdout = sys.stderr
    return frames


def serve(ctx: AgentContext) -> None:
    """Run the verb and send its result frame; silent when the controller is gone."""
    try:
        result = {"type": "result", "result": to_json(dispatch(ctx)), "error": None}
    except AgentFailure as failure:
        result = _failed(failure.error)
    except ControllerGone:
        return
    except Exception as error:
        result = _failed(_explain(error))
    with contextlib.suppress(ControllerGone):
        ctx.send(result)


def dispatch(ctx: AgentContext) -> Any:
    """Run the requested verb and return its result dataclass; a verb that changes the host runs under the lock."""
    request = ctx.request
    if request.protocol != protocol.PROTOCOL_VERSION:
        raise AgentFailure("usage", f"the agent does not speak protocol {request.protocol}")
    verb = VERB_TABLE.get(request.verb)
    if verb is None:
        raise AgentFailure("usage", f"unknown verb {request.verb!r}", next_step=f"one of {', '.join(VERB_TABLE)}")
    try:
        args: Any = from_json(verb.args, request.args)
    except protocol.ProtocolError as error:
        raise AgentFailure("usage", "the request does not fit", where=request.verb, why=str(error)) from error
    require_names(args)
    module, _, function = verb.target.partition(":")
    call = getattr(importlib.import_module(f"fleetdump.agent.{module}"), function)
    if not verb.mutates or getattr(args, "dry_run", False):
        return call(args, ctx)
    if not verb.urgent:
        lease.respect(ctx)
    with host_lock(ctx, verb.urgent), _audited(ctx, verb.urgent) as outcome:
        result = call(args, ctx)
        outcome.code = getattr(result, "failure", "")
        outcome.ok = not outcome.code
        return result


class _Outcome:
    """How an audited call ended: badly, until it is known to have gone well."""

    ok = False
    code = ""


@contextlib.contextmanager
def _audited(ctx: AgentContext, urgent: bool) -> Iterator[_Outcome]:
    started, clock = time.time(), time.monotonic()
    if not urgent:
        audit.refuse_damage(ctx)
    outcome = _Outcome()
    try:
        yield outcome
    except Exception as error:
        outcome.code = _code_of(error)
        raise
    finally:
        ok, code = outcome.ok, outcome.code
        # ``clean`` removes the audit log with everything else; a line must not bring the directory back.
        if ctx.state.root.is_dir():
            try:
                audit.record(ctx, ok=ok, started=started, seconds=time.monotonic() - clock, code=code)
            except OSError as error:
                if ok and not (urgent and error.errno in (*NOT_WRITABLE, errno.EISDIR)):
                    raise
                print(f"this call is not audited: {error}", file=sys.stderr)


def _code_of(error: Exception) -> str:
    if isinstance(error, ControllerGone):
        return "gone"
    return (error.error if isinstance(error, AgentFailure) else _explain(error)).code


def _failed(error: AgentError) -> Dict[str, Any]:
    return {"type": "result", "result": None, "error": to_json(error)}


_CODE_OF_ERRNO = {
    errno.ENOSPC: "disk_full",
    errno.EDQUOT: "disk_full",
    errno.EACCES: "permission",
    errno.EPERM: "permission",
    errno.EROFS: "permission",
    errno.EISDIR: "failed",
}
_NEXT_STEP = {
    "disk_full": "free space on that file system, then run the command again",
    "permission": "check the owner and mode of that path, or use another user or state_dir",
    "failed": "see what is in that folder, then move it away: a file belongs in its place",
    "bug": "report this with the text above: it is a defect of fleetdump",
}


def _explain(error: Exception) -> AgentError:
    """The error of a verb that did not foresee it: full disks and permissions by name, all else a ``bug``."""
    if isinstance(error, OSError):
        code = _CODE_OF_ERRNO.get(error.errno or 0)
        if code:
            where = os.fsdecode(error.filename) if isinstance(error.filename, (str, bytes)) else ""
            return AgentError(code, error.strerror or str(error), where=where, next_step=_NEXT_STEP[code])
    trace = traceback.format_exc().strip().splitlines()[-6:]
    return AgentError("bug", f"{type(error).__name__}: {error}", why="\n".join(trace), next_step=_NEXT_STEP["bug"])
