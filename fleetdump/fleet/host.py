"""A host as tasks see it: the agent's verbs, and nothing of how they get there."""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import invoke

from fleetdump.agent.protocol import Request, from_json, to_json
from fleetdump.fleet.bundle import bundle
from fleetdump.fleet.call import Agent, Handlers, OnBlob, OnEvent, call
from fleetdump.fleet.connection import open_connection
from fleetdump.fleet.hostkeys import KnownHosts, own_file
from fleetdump.fleet.process import LocalTransport, SshTransport, Transport

if TYPE_CHECKING:
    from fleetdump.inventory import HostConfig

R = TypeVar("R")

CALLS_AT_ONCE = 9
"""OpenSSH allows ten sessions on one connection (MaxSessions): eight servers that are watched need one each, and the
lease of their deploy one."""


@dataclass(frozen=True)
class ConnectOptions:
    """``accept_new`` remembers unknown host keys in ``known_hosts`` (by default fleetdump's own file); changed keys are
    refused always. ``operator`` (user@machine) goes into locks and audit lines on the host; ``lock_wait`` is how many
    seconds a change waits for another operator's, which ``on_locked`` (host, text) tells."""

    accept_new: bool = False
    operator: str = ""
    lock_wait: float = 0.0
    on_locked: Callable[[str, str], None] = lambda _host, _text: None
    known_hosts: Path | None = None


class Host(invoke.Context):  # type: ignore[misc]
    """An open way to one host. It is an ``invoke.Context`` so that ``@task`` functions take it; ``config`` is the
    host's entry of the inventory. Close it, or use it as a context manager."""

    def __init__(self, config: HostConfig, transport: Transport, options: ConnectOptions):
        super().__init__()
        self._set(
            _host=config,
            _options=options,
            _lease="",
            _controller="",
            _closed=False,
            _slots=threading.BoundedSemaphore(CALLS_AT_ONCE),
            _agent=Agent(
                where=config.name,
                command=(*config.exec_prefix, config.agent_python),
                transport=transport,
                bundle=bundle(),
            ),
        )

    @property
    def config(self) -> HostConfig:
        """The host's entry of the inventory."""
        return self._host  # type: ignore[no-any-return]

    @property
    def closed(self) -> bool:
        """Whether it was closed here: a call that fails then has not lost its host."""
        return self._closed  # type: ignore[no-any-return]

    def resolved(self) -> HostConfig:
        """``config`` with address, user, port and host key as the open connection has them: what ``~/.ssh/config`` and
        known_hosts files of this machine supplied is spelled out."""
        transport = self._agent.transport
        if not isinstance(transport, SshTransport):
            return self.config
        connection = transport.connection
        key = connection.transport.get_remote_server_key()
        return replace(
            self.config,
            address=connection.host,
            user=connection.user,
            port=connection.port,
            host_key=self.config.host_key or key.fingerprint,
        )

    def call(
        self,
        args: Any,
        result: type[R],
        *,
        verb: str,
        on_event: OnEvent | None = None,
        body: Collection[str] | None = None,
        blob: OnBlob | None = None,
        deadline: float = 60.0,
    ) -> R:
        """Run ``verb`` with the message ``args`` and return its ``result`` message.

        ``on_event`` gets each event frame as it comes; ``body`` is sent as lines of JSON; ``blob`` gets the frame and
        the bytes of each blob. The agent ends itself after ``deadline`` seconds (and what it may wait for the lock).
        Several threads may call at once.
        Raises ``HostError`` (with the agent's ``code``), ``LockedError``, or ``UnreachableError``, at most 5 s after
        the deadline.
        """
        request = Request(
            verb=verb,
            args=to_json(args),
            state_dir=self.config.state_dir,
            deadline=deadline + self._options.lock_wait,
            operator=self._options.operator,
            body_lines=len(body or ()),
            lock_wait=self._options.lock_wait,
            lease=self._lease,
            controller=self._controller,
        )
        with self._slots:
            data = call(self._agent, request, body or (), Handlers(self._events(on_event), blob))
        return from_json(result, data)

    @contextlib.contextmanager
    def under(self, lease: str) -> Iterator[None]:
        """Calls inside belong to the deploy that holds the host by ``lease`` (``fleet.lease``)."""
        self._set(_lease=lease)
        try:
            yield
        finally:
            self._set(_lease="")

    @contextlib.contextmanager
    def steered_by(self, controller: str) -> Iterator[None]:
        """Calls inside are those of a run's controller (``tasks.steering``)."""
        self._set(_controller=controller)
        try:
            yield
        finally:
            self._set(_controller="")

    def _events(self, on_event: OnEvent | None) -> OnEvent:
        def handle(event: dict[str, Any]) -> None:
            if event.get("event") == "locked":
                self._options.on_locked(self.config.name, str(event["text"]))
            elif on_event is not None:
                on_event(event)

        return handle

    def again(self) -> Host:
        """A new way to the same host; raises as ``connect``."""
        return connect(self.config, self._options)

    def close(self) -> None:
        """Close the connection; calls that are under way fail."""
        self._set(_closed=True)
        self._agent.transport.close()

    def __enter__(self) -> Host:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def connect(config: HostConfig, options: ConnectOptions | None = None) -> Host:
    """Open the way to a host; raises ``UnreachableError`` with cause and next step."""
    options = options or ConnectOptions()
    if config.connection == "local":
        return Host(config, LocalTransport(), options)
    known = _known_hosts(options.known_hosts or own_file())
    connection = open_connection(config, known=known, accept_new=options.accept_new)
    return Host(config, SshTransport(connection), options)


@functools.cache
def _known_hosts(file: Path) -> KnownHosts:
    return KnownHosts(file)
