"""Causes of connections that fail, under the codes that diagnoses use."""

from __future__ import annotations

import errno
from types import SimpleNamespace
from typing import Any, cast

import paramiko
import pytest

from fleetdump.diagnosis.codes import CODES
from fleetdump.fleet.reasons import explain, lost

CONNECTION: Any = cast(Any, SimpleNamespace(user="u", host="h", port=22, connect_timeout=10))


def handshake_timed_out() -> paramiko.SSHException:
    error = paramiko.SSHException("Error reading SSH protocol banner")
    error.__context__ = TimeoutError()
    return error


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (paramiko.SSHException("Error reading SSH protocol banner"), "SSH_THROTTLED"),
        (ConnectionResetError(errno.ECONNRESET, "reset"), "SSH_THROTTLED"),
        (EOFError(), "SSH_THROTTLED"),
        (handshake_timed_out(), "SSH_DEAD_PEER"),
        (TimeoutError(errno.ETIMEDOUT, "timed out"), "SSH_DEAD_PEER"),
        (paramiko.SSHException("No existing session"), "SSH_DEAD_PEER"),
        (OSError(errno.EMFILE, "Too many open files"), "EMFILE_LOCAL"),
        (OSError(errno.ECONNREFUSED, "refused"), "unreachable"),
        (OSError(errno.EHOSTUNREACH, "no route"), "unreachable"),
        (paramiko.AuthenticationException("Authentication failed."), "unreachable"),
    ],
)
def test_codes(error: Exception, code: str) -> None:
    found = explain(error, "gpu01", CONNECTION)
    assert found.code == code
    assert found.what
    assert found.next_step
    assert code == "unreachable" or code in CODES


def test_a_connection_that_was_lost() -> None:
    assert lost("gpu01", "no answer to keep-alives").code == "SSH_DEAD_PEER"


def test_no_descriptor_is_this_machine_s_fault() -> None:
    found = explain(OSError(errno.EMFILE, "Too many open files"), "gpu01", CONNECTION)
    assert "this machine" in found.what
    assert "ulimit -n" in found.next_step
