"""One controller a run: its place on each host, kept for as long as it works there, whatever becomes of it."""

from __future__ import annotations

import contextlib
import hashlib
import os
import queue
import secrets
import socket
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fleetdump.agent.scrub import printable
from fleetdump.agent.steermessages import DataMark, SteerArgs, SteerResult
from fleetdump.errors import DrivenError, FleetdumpError, LockedError, UnreachableError, UsageError, of_local_file
from fleetdump.fleet import Host
from fleetdump.tasks.extract import FOLLOW_SECONDS

NONCE = "controller.id"
"""In the run's folder: what tells its controllers from those of every other folder."""


@dataclass(frozen=True)
class Controller:
    """Whoever drives ``run`` from ``folder`` on this machine, with ``data``. There is one at a time (``runlock``), so a
    later process of the same folder may take an earlier one's place on the hosts: that one has ended."""

    run: str
    folder: Path
    data: DataMark

    @property
    def id(self) -> str:
        """Empty when the run has not begun here. Another one for a copy of the folder: of another path or machine."""
        try:
            nonce = (self.folder / NONCE).read_text(encoding="ascii", errors="replace")
        except FileNotFoundError:
            return ""
        except OSError as error:
            raise of_local_file(error) from error
        place = f"{nonce}\n{socket.gethostname()}\n{self.folder.resolve()}"
        return hashlib.sha256(os.fsencode(place)).hexdigest()[:16]

    def begin(self) -> None:
        """From now on it has an ``id``. For the one process of this machine that drives the run."""
        path = self.folder / NONCE
        try:
            if not path.is_file() or not path.stat().st_size:
                path.write_text(secrets.token_hex(16), encoding="ascii")
        except OSError as error:
            raise of_local_file(error) from error


def require_same_data(run: str, ours: DataMark, theirs: DataMark, where: str = "") -> None:
    """Raise ``UsageError`` when a run is driven with other data than this command was given."""
    if theirs.sha256 and ours.sha256 != theirs.sha256:
        raise UsageError(
            f"run {run} is being driven with other data",
            where,
            f"it has {theirs.in_words}, and this command was given {ours.in_words}",
            f"give these another --run name; fleetdump attach --run {run} watches the one that is under way",
        )


@contextlib.contextmanager
def steered(host: Host, me: Controller, on_lost: Callable[[str], None]) -> Iterator[None]:
    """Be the one controller of the run on ``host``; calls of ``host`` inside are its own.

    Raises what ``Host.call`` raises, and ``DrivenError`` naming another controller that has the place. A place that is
    lost too early (somebody ended the process that held it) stops nothing, unless another controller takes it: then its
    calls raise ``LockedError``. ``on_lost`` is told, from another thread.
    """
    answers: queue.Queue[Exception | None] = queue.Queue()
    began, over = threading.Event(), threading.Event()
    args = SteerArgs(me.run, me.id, os.getpid(), printable(str(me.folder.resolve())), me.data)

    def on_event(event: dict[str, Any]) -> None:
        if event.get("event") == "steering":
            began.set()
            answers.put(None)

    def hold() -> None:
        why = "somebody took it away"
        try:
            host.call(args, SteerResult, verb="steer", on_event=on_event, deadline=FOLLOW_SECONDS)
        except Exception as error:  # handed to whoever waits for the answer
            answers.put(error)
            why = str(error)
        if began.is_set() and not over.is_set() and not host.closed:
            on_lost(f"this command's place as the controller of run {me.run} is lost ({why}): another may take it")

    # A daemon: a connection that does not close must not keep the process from ending.
    threading.Thread(target=hold, name=f"steer-{host.config.name}", daemon=True).start()
    error = answers.get()
    if isinstance(error, LockedError):  # nothing else is locked to whoever asks for a place
        raise DrivenError.of(error) from error
    if error is not None:
        raise error
    is_there = True
    try:
        with host.steered_by(args.controller):
            yield
    except UnreachableError:
        is_there = False  # it finds out by itself
        raise
    finally:
        over.set()
        if is_there:
            with contextlib.suppress(FleetdumpError):
                host.call(SteerArgs(me.run, args.controller, over=True), SteerResult, verb="steer")
