"""Ends the agent when its deadline passes or its controller is gone, with every process that it started itself."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import threading
from types import FrameType, TracebackType
from typing import Any, Callable, Dict, Optional, Type

from fleetdump.agent.context import AgentContext, ControllerGone
from fleetdump.agent.protocol import AgentError, to_json

_POLL_SECONDS = 5.0
_GRACE_SECONDS = 2.0


def end_process_group() -> None:
    """Kill this process and the children that were not detached: they share its process group."""
    os.killpg(os.getpgrp(), signal.SIGKILL)


class Watchdog:
    """A thread beside the verb, and the handlers of SIGTERM and SIGHUP.

    The controller keeps the agent's stdin open for as long as it lives, so a hang-up of stdin means that it is gone,
    whatever the main thread is doing. ``end`` is what ends the process.
    """

    def __init__(self, ctx: AgentContext, end: Callable[[], None] = end_process_group):
        self._ctx = ctx
        self._end = end
        self._done = threading.Event()
        self._wake, self._woken = os.pipe()
        self._handlers: Dict[int, Any] = {}
        self._thread = threading.Thread(target=self._run, name="watchdog", daemon=True)

    def __enter__(self) -> Watchdog:
        if os.getpgrp() != os.getpid():
            os.setpgid(0, 0)
        for number in (signal.SIGTERM, signal.SIGHUP):
            self._handlers[number] = signal.signal(number, self._on_signal)
        self._thread.start()
        return self

    def __exit__(
        self, kind: Optional[Type[BaseException]], error: Optional[BaseException], trace: Optional[TracebackType]
    ) -> None:
        self._done.set()
        os.close(self._woken)
        self._thread.join()
        os.close(self._wake)
        for number, handler in self._handlers.items():
            signal.signal(number, handler)

    def _run(self) -> None:
        poll = select.poll()
        poll.register(self._ctx.stdin.fileno(), select.POLLRDHUP)
        poll.register(self._wake, select.POLLIN)
        while not self._done.is_set():
            left = self._ctx.remaining()
            if left <= 0:
                self._time_out()
                return
            ready = poll.poll(1000 * min(left, _POLL_SECONDS) + 1)
            if not self._done.is_set() and any(fd != self._wake for fd, _ in ready):
                self._end()
                return

    def _time_out(self) -> None:
        """Say so if the stream is free within a moment (a controller that reads nothing blocks it), then end."""
        request = self._ctx.request
        error = AgentError(
            "timeout",
            f"{request.verb} did not finish within {request.deadline:.0f} s",
            next_step="try again with a longer time limit; diagnose the host if it happens twice",
        )
        talker = threading.Thread(target=self._say, args=(error,), daemon=True)
        talker.start()
        talker.join(_GRACE_SECONDS)
        self._end()

    def _say(self, error: AgentError) -> None:
        # The stream is never given back: this is the last frame, even if the verb finishes right now.
        self._ctx.output.acquire()
        with contextlib.suppress(ControllerGone):
            self._ctx.send({"type": "result", "result": None, "error": to_json(error)})

    def _on_signal(self, _number: int, _frame: Optional[FrameType]) -> None:
        self._end()
