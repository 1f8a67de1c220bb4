"""One running command on a host, over SSH or as a subprocess: bytes in, bytes out, what it said on stderr."""

from __future__ import annotations

import collections
import contextlib
import os
import select
import shlex
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Sequence
from typing import Protocol

import paramiko
import tenacity

from fleetdump.fleet.connection import StrictConnection

_STDERR_LINES = 40
_STDERR_CHUNK = 1 << 15
_LOCAL_GRACE_SECONDS = 5.0
_SESSION_SECONDS = 20.0
_REASON_TAKEN = "Unable to open channel."


class Process(Protocol):
    """Reading and writing may go on in two threads at once. stderr is drained by a thread of the process's own, so
    that neither stream can block the other."""

    def write(self, data: bytes) -> None:
        """Send all of ``data``; raises ``OSError`` when the other side is gone."""

    def read(self, limit: int, timeout: float) -> bytes:
        """Up to ``limit`` bytes of stdout, b"" at its end; raises ``TimeoutError`` after ``timeout`` seconds."""

    def wait(self, timeout: float) -> int | None:
        """Exit status (negative: ended by a signal or unknown), None when there is none within ``timeout`` seconds."""

    def stderr_tail(self) -> list[str]:
        """The last lines of stderr."""

    def close(self) -> None:
        """End it: the agent takes the hang-up of its stdin as the end of its controller."""


class Transport(Protocol):
    """Where processes of one host are started."""

    def start(self, argv: Sequence[str]) -> Process:
        """Run ``argv`` without a terminal; raises ``OSError``, ``EOFError`` or ``paramiko.SSHException``."""

    def is_alive(self) -> bool:
        """Whether the way to the host still stands."""

    def close(self) -> None:
        """Give everything back."""


class _StderrTail:
    """Drains a stream in a thread and keeps its last lines."""

    def __init__(self, read: Callable[[], bytes]):
        self._read = read
        self._rest = b""
        self._lines: collections.deque[str] = collections.deque(maxlen=_STDERR_LINES)
        self._thread = threading.Thread(target=self._run, name="agent-stderr", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        with contextlib.suppress(OSError, ValueError):
            while data := self._read():
                *lines, rest = (self._rest + data).split(b"\n")
                self._lines += [line.decode(errors="replace").rstrip() for line in lines]
                self._rest = rest[-_STDERR_CHUNK:]

    def lines(self, timeout: float = 1.0) -> list[str]:
        self._thread.join(timeout)
        rest = self._rest.decode(errors="replace").strip()
        return [*self._lines, rest] if rest else list(self._lines)


class SshProcess:
    """A session channel; see ``Process``."""

    def __init__(self, channel: paramiko.Channel, command: str):
        self._channel = channel
        try:
            channel.exec_command(command)
        except BaseException:
            channel.close()
            raise
        self._stderr = _StderrTail(lambda: channel.recv_stderr(_STDERR_CHUNK))

    def write(self, data: bytes) -> None:
        self._channel.sendall(data)

    def read(self, limit: int, timeout: float) -> bytes:
        self._channel.settimeout(max(timeout, 0.001))
        return self._channel.recv(limit)

    def wait(self, timeout: float) -> int | None:
        # recv_exit_status() itself has no time-out.
        return self._channel.exit_status if self._channel.status_event.wait(timeout) else None

    def stderr_tail(self) -> list[str]:
        return self._stderr.lines()

    def close(self) -> None:
        # On a connection that is just breaking paramiko raises what broke it, which the reader has seen or will see.
        with contextlib.suppress(OSError, EOFError, paramiko.SSHException):
            self._channel.close()


class SshTransport:
    """Processes over one Fabric connection."""

    def __init__(self, connection: StrictConnection):
        self.connection = connection

    def start(self, argv: Sequence[str]) -> Process:
        return SshProcess(self._session(), shlex.join(argv))

    def _session(self) -> paramiko.Channel:
        """A new session. sshd counts one that has ended until it has reaped its process, and refuses another meanwhile;
        nothing has run then, so it is asked again."""
        attempts = tenacity.Retrying(
            retry=tenacity.retry_if_exception(self._is_refusal),
            stop=tenacity.stop_after_delay(_SESSION_SECONDS),
            wait=tenacity.wait_random_exponential(multiplier=0.05, max=1),
            reraise=True,
        )
        session: paramiko.Channel = attempts(self.connection.create_session)
        return session

    def _is_refusal(self, error: BaseException) -> bool:
        """paramiko keeps the reason of a refusal once a connection: with several threads another one may have taken it,
        and a bare ``SSHException`` is what is left."""
        if isinstance(error, paramiko.ChannelException):
            return True
        return type(error) is paramiko.SSHException and str(error) == _REASON_TAKEN and self.is_alive()

    def is_alive(self) -> bool:
        return bool(self.connection.is_connected)

    def close(self) -> None:
        self.connection.close()


class LocalProcess:
    """A subprocess in a session of its own; see ``Process``."""

    def __init__(self, argv: Sequence[str]):
        self._process = subprocess.Popen(
            list(argv),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            bufsize=0,
            start_new_session=True,
        )
        self._pipes = [pipe for pipe in (self._process.stdin, self._process.stdout, self._process.stderr) if pipe]
        self._stdin, self._stdout, stderr = (pipe.fileno() for pipe in self._pipes)
        self._stderr = _StderrTail(lambda: os.read(stderr, _STDERR_CHUNK))

    def write(self, data: bytes) -> None:
        view = memoryview(data)
        while view:
            view = view[os.write(self._stdin, view) :]

    def read(self, limit: int, timeout: float) -> bytes:
        ready, _, _ = select.select([self._stdout], [], [], max(timeout, 0))
        if not ready:
            raise TimeoutError(f"nothing on stdout within {timeout:.0f} s")
        return os.read(self._stdout, limit)

    def wait(self, timeout: float) -> int | None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            return self._process.wait(timeout)
        return None

    def stderr_tail(self) -> list[str]:
        return self._stderr.lines()

    def close(self) -> None:
        self._pipes[0].close()
        if self.wait(_LOCAL_GRACE_SECONDS) is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
        self._stderr.lines()
        for pipe in self._pipes:
            pipe.close()


class LocalTransport:
    """Processes on this machine (``connection: local``)."""

    def start(self, argv: Sequence[str]) -> Process:
        return LocalProcess(argv)

    def is_alive(self) -> bool:
        return True

    def close(self) -> None:
        """Nothing is held between two calls."""


def deadline_in(seconds: float) -> Callable[[], float]:
    """A function that returns the seconds left."""
    end = time.monotonic() + seconds
    return lambda: end - time.monotonic()
