"""Why a host could not be reached, in words: each cause apart, with the next step."""

from __future__ import annotations

import errno
import socket
from typing import TYPE_CHECKING

import paramiko
from paramiko.ssh_exception import NoValidConnectionsError

from fleetdump.errors import UnreachableError
from fleetdump.fleet.hostkeys import HostKeyRefused, describe

if TYPE_CHECKING:
    from fleetdump.fleet.connection import StrictConnection

_BANNER = "Error reading SSH protocol banner"
_NO_DESCRIPTOR = (errno.EMFILE, errno.ENFILE)
_NO_ROUTE = (errno.EHOSTUNREACH, errno.ENETUNREACH, errno.EADDRNOTAVAIL)


def is_transient(error: BaseException) -> bool:
    """Whether the server dropped us before login, as sshd does past MaxStartups; a time-out is not that."""
    if isinstance(error, (ConnectionResetError, EOFError)):
        return True
    return isinstance(error, paramiko.SSHException) and _BANNER in str(error) and not _timed_out(error)


def may_pass(error: BaseException) -> bool:
    """Whether ``error`` is a host that cannot be reached now and may be later: its key or ours does not change by
    waiting."""
    lasting = (HostKeyRefused, FileNotFoundError, paramiko.AuthenticationException)
    return isinstance(error, UnreachableError) and not isinstance(error.__cause__, lasting)


def explain(error: Exception, name: str, connection: StrictConnection) -> UnreachableError:
    """The error that a user reads for ``error``, which opening ``connection`` to the host ``name`` raised."""
    target = f"{connection.user}@{connection.host}:{connection.port}"
    what, why, next_step = _cause(error, connection)
    return UnreachableError(what, where=name, why=f"{target}: {why}", next_step=next_step, code=_code(error))


def lost(name: str, why: str) -> UnreachableError:
    """The error for a connection that was there and is gone."""
    return UnreachableError(
        "the connection to the host was lost",
        where=name,
        why=why,
        next_step="check the network and the host, then run the command again: every step can be repeated",
        code="SSH_DEAD_PEER",
    )


def _code(error: Exception) -> str:
    """The code of a cause that is known under one."""
    if _errno(error) in _NO_DESCRIPTOR:
        return "EMFILE_LOCAL"
    if is_transient(error):
        return "SSH_THROTTLED"
    dead = _timed_out(error) or (isinstance(error, paramiko.SSHException) and "No existing session" in str(error))
    return "SSH_DEAD_PEER" if dead else "unreachable"


def _cause(error: Exception, connection: StrictConnection) -> tuple[str, str, str]:
    if isinstance(error, HostKeyRefused):
        return _host_key(error)
    if isinstance(error, socket.gaierror):
        return "the host's name cannot be resolved", error.strerror or str(error), "check `address` in the inventory"
    if isinstance(error, FileNotFoundError):
        return "the key file is missing", str(error.filename), "check `identity_file` in the inventory"
    if isinstance(error, paramiko.SSHException):
        return _ssh(error, connection)
    return _network(error, connection)


def _network(error: Exception, connection: StrictConnection) -> tuple[str, str, str]:
    number = _errno(error)
    if number == errno.ECONNREFUSED:
        return "the host refused the connection", "nothing listens there", "check that sshd runs, and its port"
    if number in _NO_DESCRIPTOR:
        return (
            "this machine has no file descriptor left for the connection",
            error.strerror if isinstance(error, OSError) and error.strerror else str(error),
            "raise the limit here (ulimit -n 4096), or choose fewer hosts at once",
        )
    if number in _NO_ROUTE:
        return "there is no route to the host", str(error), "check the address, VPN or jump host (`proxy_jump`)"
    if isinstance(error, TimeoutError) or number == errno.ETIMEDOUT:
        return (
            "the host did not answer in time",
            f"no TCP connection within {connection.connect_timeout} s",
            "check that it is up and its firewall; `connect_timeout` in the inventory allows more",
        )
    if is_transient(error):
        return _dropped(str(error) or type(error).__name__)
    return "the connection failed", f"{type(error).__name__}: {error}", "try `ssh -v` to that host"


def _ssh(error: paramiko.SSHException, connection: StrictConnection) -> tuple[str, str, str]:
    text = str(error)
    if isinstance(error, paramiko.PasswordRequiredException):
        return "the key has a passphrase", text, "load it into the SSH agent: ssh-add FILE"
    if isinstance(error, paramiko.ChannelException):
        return "the jump host could not reach the host", text, "check the address as seen from the jump host"
    if isinstance(error, paramiko.ssh_exception.IncompatiblePeer):
        return "the SSH server is too old or too new for us", text, "update sshd, or paramiko here"
    if isinstance(error, paramiko.AuthenticationException) or "authentication" in text.lower():
        return (
            f"the host refused to let {connection.user} in",
            text,
            "set `user` and `identity_file`, or load the key: ssh-add FILE; with many keys in the agent set "
            "IdentitiesOnly and IdentityFile in ~/.ssh/config; sshd older than 7.2 needs an Ed25519 key",
        )
    if _BANNER in text and not _timed_out(error):
        return _dropped(text.removeprefix(_BANNER) or "it closed the connection")
    if _timed_out(error) or "No existing session" in text:
        return (
            "the SSH server did not answer in time",
            f"the port is open, but the SSH handshake did not finish within {connection.connect_timeout} s",
            "the host may be overloaded or sshd stopped; look at its console",
        )
    return "the SSH connection failed", text, "try `ssh -v` to that host"


def _dropped(why: str) -> tuple[str, str, str]:
    return (
        "the SSH server dropped the connection before login, several times",
        why.strip(),
        "too many connections may start at once there (MaxStartups in sshd_config), or sshd or a firewall bans us",
    )


def _host_key(error: HostKeyRefused) -> tuple[str, str, str]:
    seen = describe(error.key)
    if error.changed:
        return (
            "the host's key is not the one we know: it was reinstalled, or somebody is in between",
            f"{error.name} shows {seen}, expected {error.expected}",
            f"if you know why, remove the old key (ssh-keygen -R '{error.name}', `host_key` in the inventory)",
        )
    return (
        "the host's key is unknown",
        f"{error.name} shows {seen}",
        "compare with `ssh-keygen -lf /etc/ssh/ssh_host_ed25519_key.pub` on the host, then run again with "
        f"--accept-new, or set `host_key: {error.key.fingerprint}` in the inventory",
    )


def _errno(error: BaseException) -> int | None:
    if isinstance(error, NoValidConnectionsError):
        return next((_errno(each) for each in error.errors.values()), None)
    return error.errno if isinstance(error, OSError) else None


def _timed_out(error: BaseException) -> bool:
    """paramiko keeps the text of what broke the handshake, which a time-out has not; the context is the original."""
    return isinstance(error, TimeoutError) or isinstance(error.__context__, TimeoutError)
