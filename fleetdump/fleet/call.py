"""One call of the agent: request and rows in, events and blobs out, one result; see docs/design.md, "One call"."""

from __future__ import annotations

import contextlib
import itertools
import json
import shlex
import threading
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from typing import Any

import paramiko

from fleetdump.agent.protocol import AgentError, Request, from_json, to_json
from fleetdump.errors import FleetdumpError, HostError, LockedError
from fleetdump.fleet.bundle import Bundle, bootstrap
from fleetdump.fleet.frames import FrameReader, TornStream
from fleetdump.fleet.process import Process, Transport, deadline_in
from fleetdump.fleet.reasons import lost

COMMAND = ("-I", "-B", "-c", "import sys,json;exec(json.loads(sys.stdin.buffer.readline()))")
"""Arguments of the remote python3: constant, so that no data ever stands in a command line."""

ANSWER_MARGIN_SECONDS = 5.0
"""The agent ends itself at the deadline and says so; a host that is silent for this much longer is cut off or hung."""

_EXIT_SECONDS = 5.0
_BODY_LINES_A_WRITE = 512

OnEvent = Callable[[dict[str, Any]], None]
OnBlob = Callable[[dict[str, Any], Iterator[bytes]], None]


@dataclass(frozen=True)
class Agent:
    """Where an agent runs: ``where`` names the host in errors, ``command`` starts its python3."""

    where: str
    command: tuple[str, ...]
    transport: Transport
    bundle: Bundle


@dataclass(frozen=True)
class Handlers:
    """What happens to events and to blobs; a blob that nobody wants is read and dropped."""

    on_event: OnEvent | None = None
    on_blob: OnBlob | None = None


class MissingBundle(Exception):
    """The host has not got this bundle yet."""


def call(agent: Agent, request: Request, body: Collection[str], handlers: Handlers) -> Any:
    """Run one request and return its result as JSON data; pushes the bundle to a host that lacks it.

    Raises ``HostError`` (the agent failed, or could not run), ``LockedError``, or ``UnreachableError`` when the
    connection was lost or nothing came back by the deadline.
    """
    try:
        return _attempt(agent, request, body, handlers, push=False)
    except MissingBundle:
        return _attempt(agent, request, body, handlers, push=True)


def _attempt(agent: Agent, request: Request, body: Collection[str], handlers: Handlers, *, push: bool) -> Any:
    left = deadline_in(request.deadline + ANSWER_MARGIN_SECONDS)
    try:
        process = agent.transport.start([*agent.command, *COMMAND])
    except FileNotFoundError as error:
        raise _no_program(agent, str(error.filename)) from error
    except (OSError, EOFError, paramiko.SSHException) as error:
        raise lost(agent.where, str(error) or type(error).__name__) from error
    reader = FrameReader(lambda limit: process.read(limit, left()))
    writer = threading.Thread(
        target=_write_all, args=(process, _input(agent.bundle, request, body, push)), name="agent-stdin", daemon=True
    )
    writer.start()
    try:
        return _read_result(agent, process, reader, handlers)
    except TimeoutError as error:
        raise lost(agent.where, f"{request.verb}: no answer within {request.deadline:.0f} s") from error
    except (OSError, EOFError, TornStream, paramiko.SSHException) as error:
        raise lost(agent.where, str(error) or type(error).__name__) from error
    finally:
        process.close()
        writer.join(1.0)


def _input(bundle: Bundle, request: Request, body: Collection[str], push: bool) -> Iterator[bytes]:
    header = {
        "bundle": bundle.sha256,
        "state_dir": request.state_dir,
        "push": len(bundle.data) if push else 0,
    }
    start = [json.dumps(bootstrap()), json.dumps(header)]
    yield ("\n".join(start) + "\n").encode() + (bundle.data if push else b"") + _line(to_json(request))
    lines = iter(body)
    while some := list(itertools.islice(lines, _BODY_LINES_A_WRITE)):
        yield "".join(line.rstrip("\n") + "\n" for line in some).encode()


def _line(value: Any) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode() + b"\n"


def _write_all(process: Process, data: Iterator[bytes]) -> None:
    # A host that stops reading has a reason, which the answer or its absence tells.
    with contextlib.suppress(OSError, EOFError, ValueError, paramiko.SSHException):
        for piece in data:
            process.write(piece)


def _read_result(agent: Agent, process: Process, reader: FrameReader, handlers: Handlers) -> Any:
    while (frame := reader.next_frame()) is not None:
        kind = frame["type"]
        if kind == "event":
            _handle_event(frame, reader, handlers)
        elif kind == "result":
            if frame.get("error"):
                raise _failure(agent.where, from_json(AgentError, frame["error"]), process)
            return frame["result"]
        elif kind == "missing_bundle":
            raise MissingBundle
        elif kind == "unsupported_python":
            raise _old_python(agent, frame)
        elif kind == "install_failed":
            raise HostError(
                "the agent cannot be put on the host",
                agent.where,
                f"{frame['where']}: {frame['why']}",
                "free space there, or choose another `state_dir` in the inventory",
            )
    raise _no_answer(agent, process, reader)


def _handle_event(frame: dict[str, Any], reader: FrameReader, handlers: Handlers) -> None:
    if frame.get("event") != "blob":
        if handlers.on_event is not None:
            handlers.on_event(frame)
        return
    pieces = reader.blob(int(frame["size"]))
    if handlers.on_blob is not None:
        handlers.on_blob(frame, pieces)
    for _ in pieces:
        pass


def _failure(where: str, error: AgentError, process: Process) -> FleetdumpError:
    place = f"{where}: {error.where}" if error.where else where
    if error.code == "locked":
        return LockedError(error.what, where, error.why, error.next_step)
    why = error.why
    if error.code in ("bug", "timeout") and (said := process.stderr_tail()):
        why = "\n".join(filter(None, [why, "the agent's last lines:", *said[-10:]]))
    return HostError(error.what, place, why, error.next_step, code=error.code)


def _no_answer(agent: Agent, process: Process, reader: FrameReader) -> FleetdumpError:
    """Why the stream ended without a result: lost connection, no such python, killed, or crashed."""
    status = process.wait(_EXIT_SECONDS)
    if not agent.transport.is_alive():
        return lost(agent.where, "it broke off before the result came")
    said = [*reader.noise, *process.stderr_tail()]
    if status in (126, 127):
        return _no_program(agent, said[-1] if said else f"exit status {status}")
    ended = "it was killed (out of memory?)" if status is None or status < 0 or status > 128 else f"status {status}"
    return HostError(
        "the agent ended without an answer",
        agent.where,
        "\n".join([ended, *said[-10:]]),
        f"try it on the host: {shlex.join(agent.command)} -c 'import json, sys; print(sys.version)'"
        + (" (`exec_prefix` and `agent_python` of the inventory)" if len(agent.command) > 1 else ""),
    )


def _no_program(agent: Agent, why: str) -> HostError:
    return HostError(
        f"{agent.command[-1]} cannot be run on the host",
        agent.where,
        why,
        "install python3 >= 3.8 there, or set `agent_python` (and check `exec_prefix`) in the inventory",
        code="not_found",
    )


def _old_python(agent: Agent, frame: dict[str, Any]) -> HostError:
    return HostError(
        f"the host's python3 is too old: {frame['version']}",
        agent.where,
        f"{frame['executable']}; the agent needs Python 3.8 or newer",
        "set `agent_python` in the inventory to a newer one, for instance the one that runs SGLang",
        code="conflict",
    )
