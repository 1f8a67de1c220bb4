"""Known hosts: what the files say, hashed or not, and what is never taken for known."""

from __future__ import annotations

from pathlib import Path

import paramiko
import pytest
from paramiko.hostkeys import HostKeys

from fleetdump.fleet.hostkeys import HostKeyRefused, KnownHosts, StrictPolicy, order_key_types

KEY = paramiko.ECDSAKey.generate()
OTHER = paramiko.ECDSAKey.generate()
CLIENT = paramiko.SSHClient()


def line(name: str, key: paramiko.PKey = KEY) -> str:
    return f"{name} {key.get_name()} {key.get_base64()}\n"


def known(tmp_path: Path, text: str) -> KnownHosts:
    (tmp_path / "users").write_text(text)
    return KnownHosts(tmp_path / "own" / "known_hosts", read_only=(tmp_path / "users", tmp_path / "absent"))


@pytest.mark.parametrize(
    "text",
    [
        line("gpu01"),
        line("gpu00,gpu01,10.0.0.1"),
        line(HostKeys.hash_host("gpu01")),
        "# a comment\n\ngarbage\ngpu01 ssh-ed25519 !!!\n" + line("gpu01"),
        line("gpu01", OTHER) + line("gpu01"),
    ],
    ids=["plain", "list", "hashed", "among garbage", "one of two"],
)
def test_known_key_is_accepted(tmp_path: Path, text: str) -> None:
    StrictPolicy(known(tmp_path, text)).missing_host_key(CLIENT, "gpu01", KEY)


@pytest.mark.parametrize("accept_new", [False, True])
def test_changed_key_is_refused_always(tmp_path: Path, accept_new: bool) -> None:
    policy = StrictPolicy(known(tmp_path, line("gpu01", OTHER)), accept_new=accept_new)
    with pytest.raises(HostKeyRefused) as caught:
        policy.missing_host_key(CLIENT, "gpu01", KEY)
    assert caught.value.changed
    assert OTHER.fingerprint in caught.value.expected


@pytest.mark.parametrize(
    "text", ["", line("gpu02"), line("[gpu01]:2222"), "@revoked " + line("gpu01"), "@cert-authority " + line("gpu01")]
)
def test_unknown_key_is_refused(tmp_path: Path, text: str) -> None:
    with pytest.raises(HostKeyRefused) as caught:
        StrictPolicy(known(tmp_path, text)).missing_host_key(CLIENT, "gpu01", KEY)
    assert not caught.value.changed
    assert KEY.fingerprint in str(caught.value)


def test_accepted_key_is_known_to_the_next_process(tmp_path: Path) -> None:
    files = known(tmp_path, "")
    StrictPolicy(files, accept_new=True).missing_host_key(CLIENT, "[gpu01]:2222", KEY)
    again = KnownHosts(files.file, read_only=())
    StrictPolicy(again).missing_host_key(CLIENT, "[gpu01]:2222", KEY)
    assert files.file.parent.stat().st_mode & 0o777 == 0o700


def test_alias_stands_for_the_name(tmp_path: Path) -> None:
    StrictPolicy(known(tmp_path, line("alias")), alias="alias").missing_host_key(CLIENT, "10.0.0.9", KEY)


def test_pin_decides_alone(tmp_path: Path) -> None:
    files = known(tmp_path, line("gpu01"))
    StrictPolicy(files, pin=OTHER.fingerprint).missing_host_key(CLIENT, "gpu01", OTHER)
    with pytest.raises(HostKeyRefused, match="changed"):
        StrictPolicy(files, pin=OTHER.fingerprint, accept_new=True).missing_host_key(CLIENT, "gpu01", KEY)


def test_known_types_are_asked_for_first() -> None:
    offered = ["ssh-ed25519", "ecdsa-sha2-nistp256", "rsa-sha2-512", "rsa-sha2-256"]
    assert order_key_types(offered, ["ssh-rsa"])[:2] == ["rsa-sha2-512", "rsa-sha2-256"]
    assert order_key_types(offered, []) == offered
    assert sorted(order_key_types(offered, ["ecdsa-sha2-nistp256", "ssh-dss"])) == sorted(offered)
