"""The record of each server, ``servers/<name>/server.json``, and the server as it is now."""

from __future__ import annotations

import contextlib
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Dict, List, Optional, Tuple

from fleetdump.agent import procfs
from fleetdump.agent.context import State
from fleetdump.agent.jsonl import write_json
from fleetdump.agent.procfs import ProcSample, is_alive
from fleetdump.agent.protocol import AgentFailure
from fleetdump.agent.records import broken, in_words, naming, read_record
from fleetdump.agent.servermessages import ServerState
from fleetdump.agent.specs import Expectation

PASSED = "passed"


@dataclass
class ServerRecord:
    """``server.json``: one launch of a server. ``argv`` is scrubbed of secrets, ``env`` has names only.

    ``pid`` is the launcher and leads its own session (sid == pid); 0 means that the launch began and its process is
    not known yet. ``ready``, ``phase`` and ``lines`` are kept up to date by ``watch``; ``stopped_at`` is set by
    ``stop``. ``identity`` is the SHA-256 of the full argv, environment, patch and capture settings: a launch with the
    same identity is the same server. ``boot`` is the kernel's boot id: start times count from boot.
    ``selfcheck`` is empty before one ran, ``passed``, or why the last one failed. ``expectations`` is what the patch
    wants the server to say of itself, ``settings`` how that went: empty before, ``passed``, or what is not so.
    ``import_env`` are the values of ``specs.IMPORT_VARIABLES`` in its environment, for workers of this server;
    ``delivery`` is how its patch came in (``specs.DELIVERIES``). ``ranks`` are its schedulers; ``kind`` is the key
    of starts like this one in ``healthy.jsonl``, empty until a watch has seen it; ``held_by`` says how it survives a
    logout (``logind.Shelter``)."""

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
    expectations: List[Expectation] = field(default_factory=list)
    settings: str = ""
    ranks: int = 1
    kind: str = ""
    held_by: str = ""
    v: int = 1


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
        detail="" if record.settings == PASSED else record.settings,
        patch_name=record.patch,
        capture_dir=record.capture_dir,
    )


def boot_id() -> str:
    """The kernel's id of this boot."""
    return (procfs.read_text("/proc/sys/kernel/random/boot_id") or "").strip()
