"""Verb ``controller``: the controller of an ``extract`` on this host, which goes on when its user's machine sleeps.

All that it has lies in ``controllers/<run>/`` below the state directory: the code, an inventory, the data, the ledger.
It is a process as a user would start it, with this host's own way to the others; nothing secret is brought.
"""

from __future__ import annotations

import base64
import itertools
import json
import os
import re
import shutil
import signal
import subprocess
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Dict, List, Optional, Tuple

from fleetdump.agent.context import AgentContext, State
from fleetdump.agent.detach import spawn_detached
from fleetdump.agent.hostmessages import ControllerArgs, ControllerResult, ControllerState
from fleetdump.agent.jsonl import read_small, replacing, write_json, writer_lives
from fleetdump.agent.procfs import is_alive, start_time
from fleetdump.agent.protocol import AgentFailure
from fleetdump.agent.records import read_advice, read_record
from fleetdump.agent.times import utc

RECORD = "controller.json"
CODE = "code"
"""Folder of the package that is brought; it is replaced as a whole."""
KEPT = ("ledger.sqlite",)
"""What a controller here goes on writing: brought for a new run alone."""
PACKAGES = ("click", "fabric", "invoke", "paramiko", "rich", "tenacity", "yaml")
"""What the controller imports beside the standard library."""
OLDEST_PYTHON = [3, 10]
MARGIN_SECONDS = 10.0
STOP_SECONDS = 5.0
START_SECONDS = 60.0
"""A controller says within so long that it goes on with the run, or why not."""
SETTLE_SECONDS = 1.0
"""Between its first word and the look whether it lives."""
TAIL_LINES = 20
_FILE = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*(/[A-Za-z0-9_][A-Za-z0-9_.-]*)*")
_START = (
    "import os,sys;folder=sys.argv.pop(1);os.chdir(folder);sys.path[0]=os.path.join(folder,'code');"
    "from fleetdump.__main__ import main;main()"
)
_LET_GO = "import os;go=os.read(0,1);os.dup2(os.open(os.devnull,os.O_RDONLY),0);go or os._exit(1);"
"""Before the controller: wait until it is on record, and end when it never will be."""
_LOOK = (
    "import importlib.util,json,sys;"
    "print(json.dumps([sys.version_info[:2],[n for n in sys.argv[1:] if importlib.util.find_spec(n) is None]]))"
)


@dataclass
class ControllerRecord:
    """``controller.json``: the process that drives a run from this host (or did), and who wanted it."""

    pid: int
    start_time: int
    started_at: float
    operator: str
    v: int = 1


def controller(args: ControllerArgs, ctx: AgentContext) -> ControllerResult:
    """See ``ControllerArgs``. Raises ``AgentFailure`` conflict while a controller of the run lives here, not_found when
    ``python`` cannot run one."""
    folder = ctx.state.root / "controllers" / args.run
    if not args.replace:
        _require_none(folder)
    python = _require_python(args.python)
    _receive(ctx.state.directory("controllers", args.run), ctx)
    if args.replace and args.detach:
        stop_controllers(ctx.state, [args.run])
    code = _LET_GO + _START if args.detach else _START
    argv = [python, "-B", "-c", code, str(folder), *args.argv]
    return _start(argv, folder, ctx) if args.detach else _run(argv, ctx)


def state_of(folder: Path) -> Optional[ControllerState]:
    """The controller whose folder it is; None when none was ever started there."""
    record = _record_of(folder)
    if record is None:
        return None
    alive = is_alive(record.pid, record.start_time)
    return ControllerState(folder.name, record.pid, alive, record.operator, record.started_at)


def controllers_of(state: State) -> List[ControllerState]:
    """Of every run that was driven from this host."""
    found = (state_of(folder) for folder in sorted((state.root / "controllers").glob("*")))
    return [each for each in found if each is not None]


def controller_folders(state: State, runs: List[str]) -> List[Path]:
    """Of the controllers of these runs (of all when none is named)."""
    return sorted(path for path in (state.root / "controllers").glob("*") if not runs or path.name in runs)


def stop_controllers(state: State, runs: List[str]) -> None:
    """End the controllers of these runs (all when none is named). Raises ``AgentFailure`` for one that does not end. A
    controller may be killed at any moment: the hosts know all that it knew."""
    for folder in controller_folders(state, runs):
        record = _record_of(folder)
        if record is None:
            continue
        give_up = time.monotonic() + STOP_SECONDS
        while is_alive(record.pid, record.start_time):
            with suppress(ProcessLookupError):
                os.killpg(record.pid, signal.SIGKILL)
            if time.monotonic() > give_up:
                raise AgentFailure("failed", f"the controller of run {folder.name} does not end", f"pid {record.pid}")
            time.sleep(0.05)


# --------------------------------------------------------------------------- steps
def _record_of(folder: Path) -> Optional[ControllerRecord]:
    """The controller's record; where that cannot be read, who holds the lock of whoever drives the run in there."""
    record = read_advice(ControllerRecord, folder / RECORD)
    lock = folder / "runs" / folder.name / "controller.lock"
    if record is not None or not writer_lives(lock):
        return record
    with suppress(OSError, ValueError):
        pid = int(read_small(lock))
        return ControllerRecord(pid, start_time(pid) or 0, lock.stat().st_mtime, "unknown")
    return None


def _require_none(folder: Path) -> None:
    """Raise ``AgentFailure`` while a controller lives there, or when nobody can say whether one does."""
    by_hand = f"end the process that works in {folder} (its log is controller.log there), then remove that file"
    record = read_record(ControllerRecord, folder / RECORD, by_hand)
    if record is not None and is_alive(record.pid, record.start_time):
        since = utc(record.started_at)
        raise AgentFailure(
            "conflict",
            f"a controller of run {folder.name} lives here already",
            where=f"pid {record.pid}" + (f", since {since}" if since else ""),
            next_step=f"fleetdump attach --run {folder.name} watches the run; pause and cancel are given as ever",
        )


def _require_python(wanted: str) -> str:
    """The interpreter's path; it must be new enough and have what a controller imports. Nothing is installed."""
    python = shutil.which(os.path.expanduser(wanted)) or os.path.expanduser(wanted)
    try:
        done = subprocess.run([python, "-B", "-c", _LOOK, *PACKAGES], capture_output=True, timeout=60.0, cwd="/")
        version, missing = json.loads(done.stdout.decode().splitlines()[-1])
    except (OSError, ValueError, IndexError, subprocess.TimeoutExpired) as error:
        raise AgentFailure("failed", "the controller's Python does not answer", python, str(error)) from error
    venv = "~/fleetdump-controller"
    install = (
        f"make it what it needs, for instance: python3 -m venv {venv} && {venv}/bin/pip install fleetdump (or the "
        f"packages {', '.join(PACKAGES)}, yaml being PyYAML), and give --controller-python {venv}/bin/python"
    )
    if version < OLDEST_PYTHON:
        why = f"it is Python {'.'.join(map(str, version))}; a controller needs {'.'.join(map(str, OLDEST_PYTHON))}"
        raise AgentFailure("not_found", "no Python for a controller here", python, why, install)
    if missing:
        raise AgentFailure(
            "not_found", "a controller cannot run here", python, f"it lacks {', '.join(missing)}", install
        )
    return python


def _receive(folder: Path, ctx: AgentContext) -> None:
    """Put the body's files there, each once it is whole."""
    code = folder / f".{CODE}"
    shutil.rmtree(str(code), ignore_errors=True)
    try:
        for name, lines in itertools.groupby(ctx.body(), key=lambda line: str(line["file"])):
            if not _FILE.fullmatch(name):
                raise AgentFailure("usage", f"no name of a file for a controller: {name[:80]!r}")
            top, _, rest = name.partition("/")
            target = code / rest if top == CODE else folder / name
            if target.name in KEPT and target.exists():
                continue
            target.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            with replacing(target, temporary=folder / ".part") as file:
                for line in lines:
                    file.write(base64.b64decode(line["data"]))
        if code.exists():
            shutil.rmtree(str(folder / CODE), ignore_errors=True)
            os.replace(str(code), str(folder / CODE))
    finally:
        shutil.rmtree(str(code), ignore_errors=True)


def _environment() -> Dict[str, str]:
    """Without the forwarded agent of whoever is logged in: it would be gone when they are."""
    return {**{name: value for name, value in os.environ.items() if name != "SSH_AUTH_SOCK"}, "COLUMNS": "160"}


def _run(argv: List[str], ctx: AgentContext) -> ControllerResult:
    limit = max(1.0, ctx.remaining() - MARGIN_SECONDS)
    try:
        done = subprocess.run(
            argv, stdin=subprocess.DEVNULL, capture_output=True, env=_environment(), timeout=limit, cwd="/"
        )
    except subprocess.TimeoutExpired as error:
        raise AgentFailure("timeout", f"the controller here did not end within {limit:.0f} s", argv[0]) from error
    return ControllerResult(done.returncode, done.stdout.decode(errors="replace"), done.stderr.decode(errors="replace"))


def _start(argv: List[str], folder: Path, ctx: AgentContext) -> ControllerResult:
    log = folder / "controller.log"
    before = log.stat().st_size if log.exists() else 0
    pid, started = _spawn_on_record(argv, folder / RECORD, log, ctx.request.operator)
    give_up = time.monotonic() + min(START_SECONDS, ctx.remaining() - MARGIN_SECONDS)
    while is_alive(pid, started) and log.stat().st_size == before and time.monotonic() < give_up:
        time.sleep(0.1)
    time.sleep(SETTLE_SECONDS)
    with open(str(log), "rb") as file:
        file.seek(before)
        said = "\n".join(file.read().decode(errors="replace").splitlines()[-TAIL_LINES:])
    return ControllerResult(0, "", said, pid if is_alive(pid, started) else 0, str(log))


def _spawn_on_record(argv: List[str], record: Path, log: Path, operator: str) -> Tuple[int, int]:
    """The process and its start time. It begins once the record of it is durable, and ends when that fails, or when we
    are killed before: none lives that another call does not see."""
    waits, lets_go = os.pipe()
    try:
        pid, started = spawn_detached(argv, log_path=log, env=_environment(), stdin=waits)
        write_json(record, ControllerRecord(pid, started, time.time(), operator))
        os.write(lets_go, b"\n")
    except OSError as error:
        raise AgentFailure(
            "failed",
            "the controller was not started",
            where=str(record),
            why=error.strerror or str(error),
            next_step="see to that, and give the same command again; the run itself is under way",
        ) from error
    finally:
        os.close(waits)
        os.close(lets_go)
    return pid, started
