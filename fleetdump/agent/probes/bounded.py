"""Time limits for probes: one that hangs (a dead NFS mount, a driver lock) costs its own limit and nothing else."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import threading
import time
from dataclasses import dataclass, field
from typing import IO, Callable, Generic, List, Optional, TypeVar

from fleetdump.agent.evidence_types import ProbeRecord

T = TypeVar("T")

OUTPUT_BYTES = 32 << 20


class ProbeFailed(Exception):
    """A probe that could not answer; the text says why and becomes evidence."""


@dataclass
class Pending(Generic[T]):
    """A probe that runs in a thread of its own."""

    name: str
    default: T
    deadline: float
    started: float
    thread: Optional[threading.Thread] = None
    values: List[T] = field(default_factory=list)
    errors: List[str] = field(default_factory=list)
    seconds: float = 0.0


class Probes:
    """Starts probes, waits for each no longer than its limit, and records how each went."""

    def __init__(self) -> None:
        self.records: List[ProbeRecord] = []

    def start(self, name: str, function: Callable[[], T], default: T, limit: float) -> Pending[T]:
        """Run ``function`` in a daemon thread; ``result`` gives its value, or ``default`` after ``limit`` seconds."""
        now = time.monotonic()
        pending = Pending(name, default, now + limit, now)

        def work() -> None:
            try:
                pending.values.append(function())
            except Exception as error:  # a failed probe is evidence, whatever its reason
                pending.errors.append(str(error) or type(error).__name__)
            pending.seconds = time.monotonic() - now

        pending.thread = threading.Thread(target=work, name=f"probe-{name}", daemon=True)
        pending.thread.start()
        return pending

    def result(self, pending: Pending[T]) -> T:
        """The value of a started probe, waiting until its deadline at most."""
        assert pending.thread is not None
        pending.thread.join(max(0.0, pending.deadline - time.monotonic()))
        if pending.values:
            self.records.append(ProbeRecord(pending.name, True, round(pending.seconds, 3)))
            return pending.values[0]
        limit = pending.deadline - pending.started
        detail = pending.errors[0] if pending.errors else f"no answer within {limit:.0f} s"
        self.records.append(ProbeRecord(pending.name, False, round(pending.seconds or limit, 3), detail))
        return pending.default

    def failed(self, name: str, detail: str) -> None:
        """Record as a failed probe what others found out on their way."""
        self.records.append(ProbeRecord(name, False, 0.0, detail))

    def run(self, name: str, function: Callable[[], T], default: T, limit: float) -> T:
        """``start`` and ``result`` in one."""
        return self.result(self.start(name, function, default, limit))


@dataclass
class Output:
    """What a finished command wrote."""

    status: int
    stdout: str
    stderr: str


def run_command(argv: List[str], limit: float, stop_signal: int = signal.SIGKILL) -> Output:
    """Run a tool for at most ``limit`` seconds, then send it ``stop_signal`` (and SIGKILL two seconds later). Of each
    of its streams ``OUTPUT_BYTES`` are kept.

    Raises ``ProbeFailed`` when the tool is absent or cannot be ended, and when it had to be killed for want of a milder
    ``stop_signal``.
    """
    if shutil.which(argv[0]) is None:
        raise ProbeFailed(f"{argv[0].rsplit('/', 1)[-1]} not found")
    try:
        process = subprocess.Popen(
            argv, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True
        )
    except OSError as error:  # no right to run it, or a file system that runs nothing
        raise ProbeFailed(f"{argv[0]} cannot be run: {error.strerror}") from error
    readers = [_Reader(process.stdout), _Reader(process.stderr)]
    for patience, last_word in ((limit, stop_signal), (2.0, signal.SIGKILL), (1.0, 0)):
        try:
            process.wait(patience)
        except subprocess.TimeoutExpired:
            if last_word == signal.SIGKILL:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)  # its own children too: the session is ours
            elif last_word:
                process.send_signal(last_word)
            continue
        if process.returncode == -signal.SIGKILL and stop_signal == signal.SIGKILL:
            raise ProbeFailed(f"{argv[0]}: no answer within {limit:.0f} s")
        stdout, stderr = (reader.text() for reader in readers)
        return Output(process.returncode, stdout, stderr)
    raise ProbeFailed(f"{argv[0]} does not end, even by SIGKILL")


class _Reader:
    """Empties a pipe in a thread, so that a tool never waits for us; a child of its own that keeps the pipe open is not
    waited for."""

    def __init__(self, stream: Optional[IO[bytes]]) -> None:
        assert stream is not None
        self._stream = stream
        self._data = bytearray()
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def _read(self) -> None:
        while True:
            chunk = os.read(self._stream.fileno(), 1 << 16)
            if not chunk:
                self._stream.close()
                return
            self._data += chunk[: max(0, OUTPUT_BYTES - len(self._data))]

    def text(self) -> str:
        self._thread.join(1.0)
        return bytes(self._data).decode("utf-8", "replace")
