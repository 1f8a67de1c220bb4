"""Fabric connections with strict host keys, time-outs on every step, and an explicit end."""

from __future__ import annotations

import contextlib
import functools
import logging
import math
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import fabric
import paramiko
import tenacity

from fleetdump.fleet.hostkeys import KnownHosts, StrictPolicy, order_key_types
from fleetdump.fleet.reasons import explain, is_transient

if TYPE_CHECKING:
    from fleetdump.inventory import HostConfig

KEEPALIVE_SECONDS = 15
DEAD_LINK_SECONDS = 30
CONNECT_ATTEMPTS = 4
STARTS_A_TARGET = 8
"""OpenSSH drops connections at random once 10 are unauthenticated (MaxStartups 10:30:100), so stay below it."""

# paramiko logs tracebacks of failed handshakes; what matters of them is in our own errors.
logging.getLogger("paramiko").addHandler(logging.NullHandler())


class StrictConnection(fabric.Connection):  # type: ignore[misc]
    """A ``fabric.Connection`` that asks ``policy`` about every host key, and whose jump hosts do the same.

    ``identity_file`` is the inventory's key, for the host and its jump hosts; ``pin`` is the host's own key.
    """

    policy: StrictPolicy
    known: KnownHosts
    accept_new: bool
    identity_file: str
    seconds: int

    def __init__(
        self,
        host: str,
        *,
        known: KnownHosts,
        connect_timeout: float,
        accept_new: bool = False,
        pin: str = "",
        identity_file: str = "",
        proxy_jump: str = "",
        **kwargs: Any,
    ):
        # Before the base class, whose constructor calls the two methods below; _set goes around invoke's proxy.
        self._set(known=known, accept_new=accept_new, identity_file=identity_file)
        self._set(seconds=math.ceil(connect_timeout))
        super().__init__(host, connect_timeout=self.seconds, **kwargs)
        if proxy_jump:
            self._set(gateway=self._through(proxy_jump))
        alias = self.ssh_config.get("hostkeyalias", "")
        self._set(policy=StrictPolicy(known, alias=alias, pin=pin, accept_new=accept_new))
        self.client.set_missing_host_key_policy(self.policy)

    def get_gateway(self) -> StrictConnection | str | None:
        """The last hop of ssh_config's ProxyJump, itself strict; a ProxyCommand string; or None."""
        jump = str(self.ssh_config.get("proxyjump", "none"))
        if jump.lower() != "none":
            return self._through(jump)
        command = str(self.ssh_config.get("proxycommand", "none"))
        return None if command.lower() == "none" else command

    def _through(self, jump: str) -> StrictConnection | None:
        """A chain over the comma-separated hops of ``jump``; None when this host is one of them (a wildcard)."""
        gateway: StrictConnection | None = None
        for hop in jump.split(","):
            if self.derive_shorthand(hop)["host"] in (self.host, self.original_host):
                return None
            further = {} if gateway is None else {"gateway": gateway}
            gateway = StrictConnection(
                hop.strip(),
                known=self.known,
                accept_new=self.accept_new,
                connect_timeout=self.seconds,
                identity_file=self.identity_file,
                config=self.config,
                **further,
            )
        return gateway

    def open(self) -> None:
        """Connect and log in; raises what paramiko raises. Leaves nothing behind when it fails."""
        if self.is_connected:
            return
        try:
            if isinstance(self.gateway, StrictConnection):
                self.gateway.open()
            with _starts(self.host, self.port):
                super().open()
        except BaseException:
            self.close()
            raise
        self.transport.set_keepalive(KEEPALIVE_SECONDS)
        _notice_dead_link(self.transport.sock)

    def close(self) -> None:
        """Close the connection and its jump hosts; a half-open one (its thread and socket) as well."""
        super().close()
        self.client.close()
        if isinstance(self.gateway, StrictConnection):
            self.gateway.close()

    def resolve_connect_kwargs(self, _: object) -> dict[str, Any]:
        """Time-outs and credentials for paramiko. A configured key is shown before those of an SSH agent, and the
        default ones not at all: a server counts each key that it is shown, and hangs up after six.

        Fabric's own would write the keys into the configuration, which all connections share.
        """
        mine = self.identity_file
        files = [mine] if mine else self.ssh_config.get("identityfile", [])
        files = [str(path) for file in files if (path := Path(file).expanduser()).exists() or mine]
        agent = not (files and str(self.ssh_config.get("identitiesonly", "no")).lower() == "yes")
        return {
            "key_filename": files,
            "look_for_keys": not files,
            "allow_agent": agent,
            "banner_timeout": self.seconds,
            "auth_timeout": 2 * self.seconds,
            "channel_timeout": self.seconds,
            "transport_factory": self._transport,
        }

    def _transport(self, sock: Any, **kwargs: Any) -> paramiko.Transport:
        transport = paramiko.Transport(sock, **kwargs)
        name = self.host if self.port == paramiko.config.SSH_PORT else f"[{self.host}]:{self.port}"
        options = transport.get_security_options()
        options.key_types = order_key_types(options.key_types, self.policy.preferred_types(name))
        return transport


def open_connection(config: HostConfig, *, known: KnownHosts, accept_new: bool = False) -> StrictConnection:
    """A logged-in connection to the host; raises ``UnreachableError`` that names the cause and the next step.

    ``~/.ssh/config`` supplies what the inventory leaves open. Only a connection that the server dropped before login
    (its MaxStartups, or a reset) is tried again, with growing random pauses.
    """
    connection = StrictConnection(
        config.address,
        known=known,
        accept_new=accept_new,
        pin=config.host_key or "",
        identity_file=config.identity_file or "",
        proxy_jump=config.proxy_jump or "",
        user=config.user or None,
        port=config.port or None,
        config=_fabric_config(),
        connect_timeout=config.connect_timeout,
    )
    attempts = tenacity.Retrying(
        retry=tenacity.retry_if_exception(is_transient),
        stop=tenacity.stop_after_attempt(CONNECT_ATTEMPTS),
        wait=tenacity.wait_random_exponential(multiplier=0.2, max=3),
        reraise=True,
    )
    try:
        attempts(connection.open)
    except Exception as error:
        raise explain(error, config.name, connection) from error
    return connection


_shared = threading.Lock()
_gates: dict[tuple[str, int], threading.BoundedSemaphore] = {}


def _fabric_config() -> fabric.Config:
    """A connection's own copy of Fabric's and ssh's configuration, whose files are read once a process: a connection
    writes into its configuration, and while it does so another thread would find it empty."""
    with _shared:
        return _read_fabric_config().clone()


@functools.cache
def _read_fabric_config() -> fabric.Config:
    return fabric.Config()


@contextlib.contextmanager
def _starts(host: str, port: int) -> Iterator[None]:
    """At most ``STARTS_A_TARGET`` connections at a time between TCP and login on one server (a bastion, mostly)."""
    with _shared:
        gate = _gates.setdefault((host, port), threading.BoundedSemaphore(STARTS_A_TARGET))
    with gate:
        yield


def _notice_dead_link(sock: object) -> None:
    """Let the kernel end a connection whose peer stays silent, else a cut link is noticed only after 15 minutes."""
    if not isinstance(sock, socket.socket):
        return
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (
        ("TCP_KEEPIDLE", DEAD_LINK_SECONDS // 2),
        ("TCP_KEEPINTVL", DEAD_LINK_SECONDS // 6),
        ("TCP_KEEPCNT", 3),
        ("TCP_USER_TIMEOUT", 1000 * DEAD_LINK_SECONDS),
    ):
        if hasattr(socket, name):
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
