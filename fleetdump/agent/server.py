"""Start and stop SGLang servers, and the record of each: ``servers/<name>/server.json``."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import pwd
import secrets
import signal
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Dict, List, Optional, Set, Tuple

from fleetdump.agent import engine, importhook, procfs
from fleetdump.agent.applicable import release_arguments
from fleetdump.agent.arguments import added_arguments, merge_arguments, refuse_own_options
from fleetdump.agent.context import AgentContext, State
from fleetdump.agent.detach import spawn_detached
from fleetdump.agent.formats import SERVER_NAME
from fleetdump.agent.jsonl import write_json
from fleetdump.agent.patching import IMPORT_HOOK
from fleetdump.agent.procfs import ProcSample, is_alive
from fleetdump.agent.protocol import (
    AgentFailure,
    LaunchArgs,
    LaunchResult,
    ServerState,
    StopArgs,
    StopResult,
    to_json,
)
from fleetdump.agent.records import NOT_WRITABLE, broken, in_words, naming, read_advice, read_record
from fleetdump.agent.scrub import scrub_argv
from fleetdump.agent.share import runs_of, shares_of

PASSED = "passed"
OLD_LOGS = 5
POLL = 0.1
ORPHAN_GRACE = 3.0
"""Seconds that processes get to end by themselves once their launcher is gone."""
KILL_WAIT = 10.0
NOT_INHERITED = ("SSH_", "SUDO_", "FLEETDUMP_", "OLDPWD", "PWD", "_")


@dataclass
class ServerRecord:
    """``server.json``: one launch of a server. ``argv`` is scrubbed of secrets, ``env`` has names only.

    ``pid`` is the launcher and leads its own session (sid == pid); 0 means that the launch began and its process is
    not known yet. ``ready``, ``phase`` and ``lines`` are kept up to date by ``watch``; ``stopped_at`` is set by
    ``stop``. ``identity`` is the SHA-256 of the full argv, environment, patch and capture settings: a launch with the
    same identity is the same server. ``boot`` is the kernel's boot id: start times count from boot.
    ``selfcheck`` is empty before one ran, ``passed``, or why the last one failed.
    ``import_env`` are the values of ``protocol.IMPORT_VARIABLES`` in its environment, for workers of this server;
    ``delivery`` is how its patch came in (``protocol.DELIVERIES``)."""

    name: str
    pid: int
    start_time: int
    launch_id: str
    port: int
    host: str
    python: str
    model_path: str
    tp: int
    argv: List[str]
    env: List[str]
    log: str
    identity: str
    started_at: float
    patch: str = ""
    patch_sha256: str = ""
    mark: str = ""
    phase: str = "imports"
    ready: bool = False
    lines: int = 0
    stopped_at: float = 0.0
    capture_layers: List[int] = field(default_factory=list)
    capture_dir: str = ""
    boot: str = ""
    import_env: Dict[str, str] = field(default_factory=dict)
    selfcheck: str = ""
    delivery: str = "in-place"
    v: int = 1


@dataclass
class MadeDirs:
    """``made_dirs.json``: absolute paths of directories outside the state that a launch made."""

    dirs: List[str]
    v: int = 1


# --------------------------------------------------------------------------- records
def load_record(state: State, name: str) -> Optional[ServerRecord]:
    """The record of server ``name``, or None when it was never launched (or removed). Raises ``AgentFailure`` when it
    cannot be read."""
    path = state.root / "servers" / name / "server.json"
    by_hand = f"end the process that writes {path.with_name('server.log')}, if there is one, then remove that file"
    record = read_record(ServerRecord, path, by_hand)
    if record is None:
        return None
    if record.name != name:
        raise broken(path, f"it is the record of a server named {record.name!r}", by_hand)
    return record if record.pid else _adopt(record)


def load_records(state: State) -> List[ServerRecord]:
    """All records of this host, by name. Raises ``AgentFailure`` when one cannot be read: for verbs that must know
    about every server."""
    records, unreadable = readable_records(state)
    for failure in unreadable.values():
        raise failure
    return records


def readable_records(state: State) -> Tuple[List[ServerRecord], Dict[str, AgentFailure]]:
    """The records of this host that can be read, by name, and why others cannot: for verbs that go on without them."""
    records: List[ServerRecord] = []
    unreadable: Dict[str, AgentFailure] = {}
    for name in sorted(p.parent.name for p in (state.root / "servers").glob("*/server.json")):
        try:
            record = load_record(state, name)
        except AgentFailure as failure:  # noqa: PERF203
            unreadable[name] = failure
        else:
            records += [record] if record else []
    return records, unreadable


def server_states(state: State) -> List[ServerState]:
    """Every server of this host as it is now, by name; one whose record cannot be read is ``broken``."""
    records, unreadable = readable_records(state)
    states = [server_state(record) for record in records]
    states += [ServerState(name, "broken", detail=in_words(failure)) for name, failure in unreadable.items()]
    return sorted(states, key=lambda one: one.name)


def save_record(state: State, record: ServerRecord) -> None:
    """Replace ``server.json`` atomically and durably; an ``OSError`` names it."""
    path = state.root / "servers" / record.name / "server.json"
    with naming(path):
        write_json(state.server(record.name) / path.name, record)


def _adopt(record: ServerRecord) -> ServerRecord:
    """The agent died between starting the process and recording it: find the process by its launch id."""
    needle = f"FLEETDUMP_LAUNCH_ID={record.launch_id}\0".encode()
    for pid in procfs.pids():
        with contextlib.suppress(OSError):
            stat = procfs.read_stat(pid)
            if stat and stat.sid == pid and needle in Path(f"/proc/{pid}/environ").read_bytes():
                record.pid, record.start_time = pid, stat.start_time
    return record


def living(record: ServerRecord) -> List[ProcSample]:
    """Processes of the server's session that still run, whether or not their launcher does."""
    if not record.pid or record.boot != boot_id():
        return []
    leader = procfs.read_stat(record.pid)
    if leader and leader.start_time != record.start_time:
        # The number was given to another process, which the kernel does only once our session is empty.
        return []
    members = procfs.session_processes(record.pid)
    return [m for m in members if m.state not in ("Z", "X") and m.start_time >= record.start_time]


def server_state(record: ServerRecord) -> ServerState:
    """The server as it is now: starting, ready, stopped or died."""
    running = is_alive(record.pid, record.start_time) and record.boot == boot_id()
    if running:
        state = "ready" if record.ready else "starting"
    else:
        state = "stopped" if record.stopped_at else "died"
    return ServerState(
        name=record.name,
        state=state,
        pid=record.pid,
        start_time=record.start_time,
        port=record.port,
        log=record.log,
        launch_id=record.launch_id,
        patch=record.patch_sha256,
        phase=record.phase,
        selfcheck=record.selfcheck,
        started_at=record.started_at,
        uptime=time.time() - record.started_at if running else 0.0,
        delivery=record.delivery,
    )


def boot_id() -> str:
    """The kernel's id of this boot."""
    return (procfs.read_text("/proc/sys/kernel/random/boot_id") or "").strip()


# --------------------------------------------------------------------------- launch
def launch(args: LaunchArgs, ctx: AgentContext) -> LaunchResult:
    """Start a server detached, after checking everything that can be checked first. Raises ``AgentFailure``: usage,
    not_found (interpreter, sglang, model), conflict (port taken, another server of that name), permission."""
    plan = _plan(args)
    record = load_record(ctx.state, args.server.name)
    members = living(record) if record else []
    if record and members and is_alive(record.pid, record.start_time):
        if record.identity == plan.identity:
            return LaunchResult(server_state(record), True, record.argv, record.log, plan.added)
        if not args.replace:
            raise _already_runs(record)
    # Members without a launcher are what is left of a server of ours that died: nobody can use them again.
    _check(args, {m.pid for m in members})
    by_hook = args.patch if args.delivery == IMPORT_HOOK else None
    edits = importhook.plan(args.server, by_hook, args.force, ctx) if by_hook else []
    if record and members:
        _end(record, ctx, grace=30.0)
    if by_hook:
        hook = ctx.state.server(args.server.name) / "hook"
        importhook.write(hook, by_hook, edits)
        plan.hook = str(hook)
    return _start(args, plan, ctx)


@dataclass
class _LaunchPlan:
    """The full command line and environment; they may hold secrets and are neither logged nor stored."""

    argv: List[str]
    env: Dict[str, str]
    identity: str
    added: List[str]
    """Of ``argv``, what the patch added to the server's own arguments."""
    hook: str = ""
    """The import hook's folder, where the patch is delivered so."""


def _plan(args: LaunchArgs) -> _LaunchPlan:
    spec = args.server
    if not SERVER_NAME.match(spec.name):
        raise AgentFailure("usage", f"{spec.name!r} is no server name", next_step="use letters, digits, '_' and '-'")
    refuse_own_options(spec.args)
    argv = [
        engine.find_python(spec.python),
        "-m",
        "sglang.launch_server",
        "--model-path",
        os.path.expanduser(spec.model_path),
    ]
    argv += ["--host", spec.host, "--port", str(spec.port), "--tp-size", str(spec.tp)]
    if spec.dp > 1:
        argv += ["--dp-size", str(spec.dp)]
    wanted = _patch_arguments(args)
    argv += merge_arguments(spec.args, wanted)
    env = dict(spec.env)
    if spec.gpus:
        env["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, spec.gpus))
    what = [argv, env, args.patch.sha256 if args.patch else "", to_json(args.capture)]
    if args.delivery == IMPORT_HOOK:
        what.append(args.delivery)
    identity = hashlib.sha256(json.dumps(what, sort_keys=True).encode()).hexdigest()
    return _LaunchPlan(argv, env, identity, added_arguments(spec.args, wanted))


def _patch_arguments(args: LaunchArgs) -> List[str]:
    """What the patch wants on the command line; some flags exist on some releases of the engine only."""
    if args.patch is None:
        return []
    release = ""
    if args.patch.release_args:
        release = engine.query(args.server.python, env={**inherited_environment(), **args.server.env}).release
    return release_arguments(args.patch, release)


def inherited_environment() -> Dict[str, str]:
    """Our own environment without what belongs to the SSH session; bytecode of sglang is read but never written,
    so that the installed package stays as it is."""
    env = {k: v for k, v in os.environ.items() if not k.startswith(NOT_INHERITED[:3]) and k not in NOT_INHERITED}
    env["PYTHONDONTWRITEBYTECODE"] = "1"
    return env


def _check(args: LaunchArgs, own: Set[int]) -> None:
    """Everything that would make the server fail at once, before anything is started or stopped."""
    spec = args.server
    engine.query(spec.python, env={**inherited_environment(), **spec.env})
    model = os.path.expanduser(spec.model_path)
    if spec.model_path.startswith(("/", "~", ".")) and not os.path.isdir(model):
        raise AgentFailure(
            "not_found",
            "the model directory does not exist",
            where=model,
            next_step="set `model_path` in the inventory",
        )
    owner = procfs.port_owner(spec.port)
    if owner is not None and owner.pid not in own:
        raise AgentFailure(
            "conflict",
            f"port {spec.port} is taken",
            where=f"server {spec.name}",
            why=describe_port_owner(owner),
            next_step="stop that process, or give the server another `port` in the inventory",
        )


def describe_port_owner(owner: procfs.PortOwner) -> str:
    """Pid, user and (scrubbed) command of the process that listens on a port."""
    if not owner.pid:
        return "another user's process, or one outside this container, listens there"
    command = " ".join(scrub_argv(owner.cmdline))[:200] or "(command not readable)"
    return f"pid {owner.pid} of user {_user_of(owner.pid)} listens there: {command}"


def _user_of(pid: int) -> str:
    try:
        uid = os.stat(f"/proc/{pid}").st_uid
    except OSError:
        return "(gone)"
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)


def _start(args: LaunchArgs, plan: _LaunchPlan, ctx: AgentContext) -> LaunchResult:
    spec, patch, capture = args.server, args.patch, args.capture
    folder = ctx.state.server(spec.name)
    log = folder / "server.log"
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
        log=str(log),
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
    )
    env = {**inherited_environment(), **plan.env, "FLEETDUMP_LAUNCH_ID": record.launch_id}
    if plan.hook:
        env = importhook.environment(Path(plan.hook), env)
    if capture is not None:
        directory = os.path.expanduser(capture.dir)
        _make_capture_dir(ctx.state, Path(directory))
        env["FLEETDUMP_TAP_CONFIG"] = str(folder / "tap.json")
        settings = {"v": 1, "server": spec.name, "launch_id": record.launch_id, "ranks": spec.tp}
        settings.update(to_json(capture), dir=directory)
        with naming(folder / "tap.json"):
            write_json(folder / "tap.json", settings)
    _rotate(log)
    with contextlib.suppress(FileNotFoundError):
        (folder / "timeline.jsonl").unlink()
    save_record(ctx.state, record)
    try:
        record.pid, record.start_time = spawn_detached(plan.argv, log_path=log, env=env)
    except OSError as error:
        (folder / "server.json").unlink()
        raise AgentFailure(
            "failed", "the server's program cannot be started", where=plan.argv[0], why=str(error)
        ) from error
    save_record(ctx.state, record)
    return LaunchResult(server_state(record), False, record.argv, record.log, plan.added)


def _make_capture_dir(state: State, path: Path) -> None:
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


# --------------------------------------------------------------------------- stop
def stop(args: StopArgs, ctx: AgentContext) -> StopResult:
    """Stop servers of ours; processes of other sessions are never touched. A server whose record cannot be read is an
    ``AgentFailure``, once all others have been stopped."""
    result = StopResult()
    records, unreadable = readable_records(ctx.state)
    for name in args.servers or [record.name for record in records]:
        if name in unreadable:
            continue
        record = load_record(ctx.state, name)
        if record is None or not living(record):
            result.absent.append(name)
            continue
        (result.killed if _end(record, ctx, args.grace) else result.stopped).append(name)
    for name, failure in unreadable.items():
        if not args.servers or name in args.servers:
            raise _cannot_stop(name, failure, result)
    ended = {*result.stopped, *result.killed}
    shares = [share for run in runs_of(ctx.state) for share in shares_of(ctx.state, run) if share.server in ended]
    result.waiting = [f"{share.run} on {share.server}" for share in shares if share.driver_alive()]
    return result


def _cannot_stop(name: str, failure: AgentFailure, result: StopResult) -> AgentFailure:
    error = failure.error
    others = ", ".join([*result.stopped, *result.killed])
    what = f"server {name} cannot be stopped: {error.what}" + (f" (stopped: {others})" if others else "")
    return AgentFailure(error.code, what, error.where, error.why, error.next_step)


def _end(record: ServerRecord, ctx: AgentContext, grace: float) -> bool:
    """End every process of the server's session; returns whether any had to be killed. The record says so from before
    the first signal on, so that whoever watches the server does not take its end for a death."""
    _note_stop(record, ctx, time.time())
    _signal(_terminable(record), record, signal.SIGTERM)
    _wait(record, min(grace, max(1.0, ctx.remaining() - KILL_WAIT)))
    killed = False
    deadline = time.monotonic() + KILL_WAIT
    while True:
        left = living(record)
        if not left:
            break
        if time.monotonic() > deadline:
            _note_stop(record, ctx, 0.0)
            raise _unkillable(record, left)
        killed = True
        _signal(left, record, signal.SIGKILL)
        time.sleep(POLL)
    _note_stop(record, ctx, time.time(), ended=True)
    return killed


def _note_stop(record: ServerRecord, ctx: AgentContext, at: float, ended: bool = False) -> None:
    """Write ``stopped_at``; a disk that takes no more must not keep a server from being stopped."""
    current = load_record(ctx.state, record.name) or record
    current.ready = current.ready and not ended
    current.stopped_at = at
    try:
        save_record(ctx.state, current)
    except OSError as error:
        if error.errno not in NOT_WRITABLE:
            raise
        if ended:
            print(f"{record.name} is stopped without a note of it: {error}", file=sys.stderr)


def _terminable(record: ServerRecord) -> List[ProcSample]:
    """The launcher, which ends its children itself; where it is dead, all that it left."""
    members = living(record)
    return [m for m in members if m.pid == record.pid] or members


def _wait(record: ServerRecord, grace: float) -> None:
    """Until nothing is left, ``grace`` is over, or the launcher has been gone for ``ORPHAN_GRACE``."""
    end = time.monotonic() + grace
    orphaned: Optional[float] = None
    while time.monotonic() < end:
        left = living(record)
        if not left:
            return
        if all(m.pid != record.pid for m in left):
            orphaned = orphaned or time.monotonic()
            if time.monotonic() - orphaned > ORPHAN_GRACE:
                return
        time.sleep(POLL)


def _signal(members: List[ProcSample], record: ServerRecord, number: int) -> None:
    """Signal each process after making sure that it is still the same one, in the same session."""
    for member in members:
        stat = procfs.read_stat(member.pid)
        if stat and stat.start_time == member.start_time and stat.sid == record.pid:
            with contextlib.suppress(ProcessLookupError):
                os.kill(member.pid, number)


def _unkillable(record: ServerRecord, left: List[ProcSample]) -> AgentFailure:
    where, states = _names(left)
    return AgentFailure(
        "failed",
        f"server {record.name} does not end",
        where=where,
        why=f"SIGKILL has no effect for {KILL_WAIT:.0f} s (process state {states}: D waits inside the kernel)",
        next_step="see `fleetdump diagnose`; a driver or a file system that hangs needs its own repair or a reboot",
    )


def _names(members: List[ProcSample]) -> Tuple[str, str]:
    return "pid " + ", ".join(str(m.pid) for m in members), ", ".join(sorted({m.state for m in members}))
