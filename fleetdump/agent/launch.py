"""Start a server detached (verb ``launch``)."""

from __future__ import annotations

import contextlib
import os
import secrets
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Dict, List

from fleetdump.agent import importhook, launchplan
from fleetdump.agent.applicable import architectures_of
from fleetdump.agent.context import AgentContext, State
from fleetdump.agent.detach import spawn_detached
from fleetdump.agent.jsonl import write_json
from fleetdump.agent.launchplan import LaunchPlan, inherited_environment
from fleetdump.agent.logind import Shelter, shelter
from fleetdump.agent.model import UNKNOWN
from fleetdump.agent.patching import IMPORT_HOOK
from fleetdump.agent.procfs import is_alive
from fleetdump.agent.protocol import AgentFailure, to_json
from fleetdump.agent.records import naming, read_advice
from fleetdump.agent.scrub import scrub_argv
from fleetdump.agent.server import ServerRecord, boot_id, living, load_record, save_record, server_state
from fleetdump.agent.servermessages import LaunchArgs, LaunchResult
from fleetdump.agent.stop import end_server

OLD_LOGS = 5
TAP_CONFIG = "tap.json"
HOOK = "hook"


@dataclass
class MadeDirs:
    """``made_dirs.json``: absolute paths of directories outside the state that a launch made."""

    dirs: List[str]
    v: int = 1


def launch(args: LaunchArgs, ctx: AgentContext) -> LaunchResult:
    """Start a server detached, after checking everything that can be checked first. Raises ``AgentFailure``: usage,
    not_found (interpreter, sglang, model), conflict (port taken, another server of that name), permission."""
    plan = launchplan.plan(args)
    record = load_record(ctx.state, args.server.name)
    members = living(record) if record else []
    if record and members and is_alive(record.pid, record.start_time):
        if record.identity == plan.identity:
            return result_of(args, record, plan, reused=True)
        if not args.replace:
            raise _already_runs(record)
    # Members without a launcher are what is left of a server of ours that died: nobody can use them again.
    launchplan.check(args, {m.pid for m in members})
    by_hook = args.patch if args.delivery == IMPORT_HOOK else None
    edits = importhook.plan(args.server, by_hook, args.force, ctx) if by_hook else []
    if record and members:
        end_server(record, ctx, grace=30.0)
    if by_hook:
        hook = ctx.state.server(args.server.name) / HOOK
        importhook.write(hook, by_hook, edits)
        plan.hook = str(hook)
    return _start(args, plan, ctx)


def _start(args: LaunchArgs, plan: LaunchPlan, ctx: AgentContext) -> LaunchResult:
    spec, patch, capture = args.server, args.patch, args.capture
    folder = ctx.state.server(spec.name)
    record = ServerRecord(
        name=spec.name,
        pid=0,
        start_time=0,
        launch_id=secrets.token_hex(4),
        port=spec.port,
        host=spec.host,
        python=plan.argv[0],
        model_path=os.path.expanduser(spec.model_path),
        tp=spec.tp,
        argv=scrub_argv(plan.argv),
        env=sorted(plan.env),
        log=str(folder / "server.log"),
        identity=plan.identity,
        started_at=time.time(),
        patch=f"{patch.name}@{patch.version}" if patch else "",
        patch_sha256=patch.sha256 if patch else "",
        mark=patch.mark if patch else "",
        capture_layers=capture.layers if capture else [],
        capture_dir=os.path.expanduser(capture.dir) if capture else "",
        boot=boot_id(),
        import_env=spec.interpreter.env,
        delivery=args.delivery,
        expectations=plan.expected,
        ranks=spec.ranks,
    )
    env = {**inherited_environment(), **plan.env}
    if plan.hook:
        env = importhook.environment(Path(plan.hook), env)
    if capture is not None:
        make_capture_dir(ctx.state, Path(record.capture_dir))
        env["FLEETDUMP_TAP_CONFIG"] = str(folder / TAP_CONFIG)
        settings = {"v": 1, "server": spec.name, "launch_id": record.launch_id, "ranks": spec.ranks}
        settings.update(to_json(capture), dir=record.capture_dir)
        with naming(folder / TAP_CONFIG):
            write_json(folder / TAP_CONFIG, settings)
    within = begin(record, plan.argv, env, ctx)
    return result_of(args, record, plan, reused=False, warning=within.warning)


def begin(record: ServerRecord, argv: List[str], env: Dict[str, str], ctx: AgentContext) -> Shelter:
    """Start the process of a launch that is put on record first, with the log of the launch before rotated away.
    ``record`` gets its pid and start time, ``env`` its launch id. Raises ``AgentFailure`` failed when the program
    cannot be started; then there is no record."""
    folder = ctx.state.server(record.name)
    log = Path(record.log)
    _rotate(log)
    with contextlib.suppress(FileNotFoundError):
        (folder / "timeline.jsonl").unlink()
    within = shelter()
    record.held_by = within.said
    save_record(ctx.state, record)
    env = {**env, "FLEETDUMP_LAUNCH_ID": record.launch_id}
    try:
        record.pid, record.start_time = spawn_detached(argv, log_path=log, env=env, within=within)
    except OSError as error:
        (folder / "server.json").unlink()
        raise AgentFailure("failed", "the server's program cannot be started", where=argv[0], why=str(error)) from error
    save_record(ctx.state, record)
    return within


def result_of(
    args: LaunchArgs, record: ServerRecord, plan: LaunchPlan, reused: bool, warning: str = ""
) -> LaunchResult:
    return LaunchResult(
        server_state(record),
        reused,
        record.argv,
        record.log,
        plan.added,
        architecture(args.server.model_path),
        held_by=record.held_by,
        warning=warning,
    )


def architecture(model_path: str) -> str:
    """The model class that each rank must load; empty where the model cannot be looked at (a hub name)."""
    return "".join(name for name in architectures_of([model_path]) if name != UNKNOWN)


def make_capture_dir(state: State, path: Path) -> None:
    """Make the capture directory and note which folders are ours, so that ``clean`` can remove them again."""
    missing = [p for p in [path, *path.parents] if not p.exists()]
    note = state.directory() / "made_dirs.json"
    if missing:
        with naming(note):
            write_json(note, MadeDirs(sorted({*made_dirs(state), *map(str, missing)})))
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    if not os.access(str(path), os.W_OK | os.X_OK):
        raise AgentFailure("permission", "the capture directory may not be written", where=str(path))


def made_dirs(state: State) -> List[str]:
    """Directories outside the state that we made; they are only ever removed when they are empty."""
    made = read_advice(MadeDirs, state.root / "made_dirs.json")
    return made.dirs if made else []


def _rotate(log: Path) -> None:
    """``server.log`` to ``server.log.1`` and so on; the oldest goes."""
    for number in range(OLD_LOGS, 0, -1):
        source = log.with_name(f"{log.name}.{number - 1}") if number > 1 else log
        if source.exists():
            os.replace(str(source), f"{log}.{number}")


def _already_runs(record: ServerRecord) -> AgentFailure:
    return AgentFailure(
        "conflict",
        f"server {record.name} already runs with other arguments or another patch",
        where=f"pid {record.pid}, port {record.port}",
        why="its command line, environment, patch or capture settings differ from what is wanted now",
        next_step="add --replace to stop it and start it anew, or `fleetdump stop` first",
    )
