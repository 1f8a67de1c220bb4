"""Stop a server and launch it again exactly as it was (verb ``restart``).

Its record hides secrets and has no values of its environment, so both are read from the living launcher, and checked
against the record. A server that is dead is launched again from the record alone where that is whole.
"""

from __future__ import annotations

import json
import os
import secrets
import time
from dataclasses import replace
from pathlib import Path
from typing import Dict, List, Optional, Tuple

from fleetdump.agent import importhook, procfs
from fleetdump.agent.context import AgentContext
from fleetdump.agent.formats import RestartLine
from fleetdump.agent.jsonl import read_small, write_json
from fleetdump.agent.launch import HOOK, TAP_CONFIG, architecture, begin
from fleetdump.agent.launchplan import identity_of, inherited_environment, own_environment
from fleetdump.agent.neighbours import describe_port_owner
from fleetdump.agent.patching import IMPORT_HOOK
from fleetdump.agent.procfs import is_alive
from fleetdump.agent.protocol import AgentFailure
from fleetdump.agent.records import UNREADABLE, naming
from fleetdump.agent.scrub import HIDDEN, scrub_argv
from fleetdump.agent.server import ServerRecord, boot_id, living, load_record, server_state
from fleetdump.agent.servermessages import LaunchResult, RestartArgs, RestartResult, RunRestart
from fleetdump.agent.share import note_restart, shares_of
from fleetdump.agent.stop import end_server

OF_A_LAUNCH = ("FLEETDUMP_LAUNCH_ID",)
ENVIRON_LIMIT = 4 << 20
DEPLOY = "bring it up with `fleetdump deploy`, which has the values from the inventory"


def restart(args: RestartArgs, ctx: AgentContext) -> RestartResult:
    """End the server's processes and start its command line again under a new launch id. Raises ``AgentFailure``, with
    nothing touched: not_found for a server that was never launched, conflict when it cannot be launched as it was, or
    when its port is somebody else's."""
    record = load_record(ctx.state, args.server)
    if record is None:
        raise AgentFailure("not_found", f"server {args.server} was never launched here", next_step=DEPLOY)
    members = living(record)
    if args.of_run is not None:
        _require_launch(record, args.of_run)
        if args.of_run.hangs and procfs.is_alive(record.pid, record.start_time):
            _require_silence(args.of_run, ctx)
    tap_config = ctx.state.server(record.name) / TAP_CONFIG
    argv, env = _as_launched(record, tap_config, args)
    _check_port(record, [member.pid for member in members])
    tap = _tap_settings(record, tap_config) if record.capture_dir else None
    if args.of_run is not None:
        _count(record, args.of_run, ctx)
    killed = bool(members) and end_server(record, ctx, args.grace).killed
    fresh = _fresh(record, tap_config.with_name("server.log"))
    if tap is not None:
        with naming(tap_config):
            write_json(tap_config, {**tap, "launch_id": fresh.launch_id})
    within = begin(fresh, argv, env, ctx)
    launched = LaunchResult(
        server_state(fresh),
        False,
        fresh.argv,
        fresh.log,
        [],
        architecture(fresh.model_path),
        held_by=within.said,
        warning=within.warning,
    )
    return RestartResult(launched, killed, fresh.patch, fresh.mark, fresh.ranks, bool(fresh.capture_dir))


def _require_launch(record: ServerRecord, wanted: RunRestart) -> None:
    """A run's controller brings back what died; what an operator has done meanwhile is that operator's."""
    if record.launch_id == wanted.launch_id and not record.stopped_at:
        return
    raise AgentFailure(
        "conflict",
        f"server {record.name} is left alone",
        where=f"{record.name}/server.json",
        why="an operator stopped it" if record.stopped_at else "it was launched again meanwhile",
        next_step="nothing, if that was meant; the run goes on when the server is ready",
    )


def _require_silence(wanted: RunRestart, ctx: AgentContext) -> None:
    """Asked with the host's lock in hand, which may have been waited for: what gives something again does not hang."""
    shares = shares_of(ctx.state, wanted.run)
    if not any(share.progress().silent_launch == wanted.launch_id for share in shares):
        raise AgentFailure(
            "conflict",
            "the server is left alone",
            where=f"run {wanted.run}",
            why="its driver does not say any more that nothing comes from it",
            next_step="nothing, if the run goes on; fleetdump diagnose says how the server is",
        )


def _count(record: ServerRecord, why: RunRestart, ctx: AgentContext) -> None:
    """Before the restart: one that fails counts too. The run's folder is there, for it has a share of this server."""
    line = RestartLine(record.name, why.launch_id, why.verdict, why.suspect, ctx.request.operator, time.time())
    note_restart(ctx.state.root / "runs" / why.run, line)


def _fresh(record: ServerRecord, log: Path) -> ServerRecord:
    """The record of the next launch of the same server, which writes to ``log``."""
    return replace(
        record,
        pid=0,
        start_time=0,
        launch_id=secrets.token_hex(4),
        started_at=time.time(),
        boot=boot_id(),
        log=str(log),
        phase="imports",
        ready=False,
        lines=0,
        stopped_at=0.0,
        selfcheck="",
        settings="",
    )


def _as_launched(record: ServerRecord, tap_config: Path, args: RestartArgs) -> Tuple[List[str], Dict[str, str]]:
    """Command line and environment of the launch, but for its id."""
    if record.pid and record.boot == boot_id() and is_alive(record.pid, record.start_time):
        return _of_the_process(record)
    argv, own = _of_the_inventory(record, args) or _of_the_record(record)
    env = {**inherited_environment(), **own}
    if record.delivery == IMPORT_HOOK:
        env = importhook.environment(tap_config.with_name(HOOK), env)
    if record.capture_dir:
        env["FLEETDUMP_TAP_CONFIG"] = str(tap_config)
    return argv, env


def _of_the_inventory(record: ServerRecord, args: RestartArgs) -> Optional[Tuple[List[str], Dict[str, str]]]:
    """Command line and own environment with the inventory's values; None where they are not those of the launch."""
    if args.spec is None:
        return None
    argv, env = _with_secrets(record.argv, args.spec.args), own_environment(args.spec)
    capture = args.capture if record.capture_dir else None
    same = identity_of(argv, env, record.patch_sha256, capture, record.delivery) == record.identity
    return (argv, env) if same else None


def _with_secrets(scrubbed: List[str], args: List[str]) -> List[str]:
    """The command line of a record with its hidden arguments as they stand in ``args``, where the same option is."""
    known = dict(zip(zip(["", *scrub_argv(args)], scrub_argv(args)), args))
    pairs = zip(["", *scrubbed], scrubbed)
    return [known.get(pair, pair[1]) if HIDDEN in pair[1] else pair[1] for pair in pairs]


def _of_the_record(record: ServerRecord) -> Tuple[List[str], Dict[str, str]]:
    """Command line and own environment from the record alone. Raises ``AgentFailure`` conflict where it lacks some."""
    hidden = any(HIDDEN in arg for arg in record.argv)
    unknown = sorted(set(record.env) - set(record.import_env))
    if hidden or unknown:
        what = [f"the value of {name}" for name in unknown] + ["a secret argument"] * bool(hidden)
        raise AgentFailure(
            "conflict",
            f"server {record.name} cannot be launched as it was",
            where=f"{record.name}/server.json",
            why=f"it does not run, {', '.join(what)} is in no file of ours, and the inventory has another launch",
            next_step=DEPLOY,
        )
    return record.argv, record.import_env


def _of_the_process(record: ServerRecord) -> Tuple[List[str], Dict[str, str]]:
    """Command line and environment of the launcher; it must still be what was launched."""
    argv = procfs.read_cmdline(record.pid)
    text = procfs.read_guarded(record.pid, "environ", ENVIRON_LIMIT) or ""
    env = dict(pair.split("=", 1) for pair in text.split("\0") if "=" in pair)
    if scrub_argv(argv) != record.argv or env.get(OF_A_LAUNCH[0]) != record.launch_id:
        raise AgentFailure(
            "conflict",
            f"server {record.name} cannot be launched as it was",
            where=f"pid {record.pid}",
            why="its command line or its environment cannot be read, or is not the one that was launched",
            next_step="`fleetdump deploy --replace` launches it from the inventory",
        )
    return argv, {name: value for name, value in env.items() if name not in OF_A_LAUNCH}


def _check_port(record: ServerRecord, own: List[int]) -> None:
    owner = procfs.port_owner(record.port)
    if owner is not None and owner.pid not in own:
        raise AgentFailure(
            "conflict",
            f"port {record.port} is taken",
            where=f"server {record.name}",
            why=describe_port_owner(owner),
            next_step="stop that process first",
        )


def _tap_settings(record: ServerRecord, path: Path) -> Dict[str, object]:
    try:
        settings = json.loads(read_small(path))
        if os.path.isdir(record.capture_dir) and isinstance(settings, dict):
            return settings
        why = f"{record.capture_dir} is no directory"
    except UNREADABLE as error:
        why = str(error)
    raise AgentFailure("conflict", "the tap's settings are gone", where=str(path), why=why, next_step=DEPLOY)
