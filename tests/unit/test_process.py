"""What a refused session is, as paramiko tells it."""

from __future__ import annotations

from typing import cast

import paramiko
import pytest

from fleetdump.fleet.connection import StrictConnection
from fleetdump.fleet.process import SshTransport


class Connection:
    """Raises ``errors`` one after the other, then opens sessions."""

    def __init__(self, *errors: Exception, connected: bool = True):
        self.errors = list(errors)
        self.is_connected = connected

    def create_session(self) -> str:
        if self.errors:
            raise self.errors.pop(0)
        return "session"


def opened(connection: Connection) -> object:
    return SshTransport(cast(StrictConnection, connection))._session()


@pytest.mark.parametrize(
    "error",
    [paramiko.ChannelException(2, "Connect failed"), paramiko.SSHException("Unable to open channel.")],
    ids=["refused", "reason taken by another thread"],
)
def test_a_refused_session_is_asked_for_again(error: Exception) -> None:
    connection = Connection(error, error)
    assert opened(connection) == "session"
    assert connection.errors == []


@pytest.mark.parametrize(
    ("error", "connected"),
    [
        (paramiko.SSHException("Unable to open channel."), False),
        (paramiko.SSHException("Timeout opening channel."), True),
    ],
    ids=["connection gone", "no answer"],
)
def test_a_link_that_is_gone_is_told_at_once(error: Exception, connected: bool) -> None:
    with pytest.raises(paramiko.SSHException) as raised:
        opened(Connection(error, connected=connected))
    assert raised.value is error
