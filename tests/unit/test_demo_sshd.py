"""The demo's own sshd: a real login with its keys and pin, none without, and nothing left afterwards."""

import shutil
import socket
import subprocess

import pytest

from demo.sshd import SshdError, run_sshd

pytestmark = pytest.mark.skipif(
    shutil.which("sshd", path="/usr/sbin:/usr/bin:/usr/local/sbin") is None, reason="no sshd on this machine"
)


def ssh(sshd, known_hosts, *command, identity=None):
    options = ["-F", "none", "-o", "BatchMode=yes", "-o", "IdentitiesOnly=yes", "-o", "StrictHostKeyChecking=yes"]
    options += ["-o", f"UserKnownHostsFile={known_hosts}", "-i", str(identity or sshd.identity_file)]
    target = ["-p", str(sshd.port), f"{sshd.user}@127.0.0.1"]
    return subprocess.run(["ssh", *options, *target, *command], capture_output=True, text=True, timeout=20)


def test_login_with_the_pinned_key_only(tmp_path):
    with run_sshd(tmp_path / "ssh") as sshd:
        public = (tmp_path / "ssh" / "host_key.pub").read_text()
        known = tmp_path / "known_hosts"
        known.write_text(f"[127.0.0.1]:{sshd.port} {public}")
        assert ssh(sshd, known, "echo", "hello").stdout == "hello\n"

        stranger = tmp_path / "stranger"
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(stranger)], check=True)
        assert "Permission denied" in ssh(sshd, known, "true", identity=stranger).stderr

        scan = subprocess.run(["ssh-keygen", "-lf", str(tmp_path / "ssh" / "host_key.pub")], capture_output=True)
        assert sshd.fingerprint in scan.stdout.decode()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", sshd.port), timeout=2)


def test_keys_are_new_each_time(tmp_path):
    with run_sshd(tmp_path / "ssh") as first:
        pass
    with run_sshd(tmp_path / "ssh") as second:
        assert second.fingerprint != first.fingerprint


def test_a_server_that_does_not_start_says_why(tmp_path, monkeypatch):
    monkeypatch.setattr("demo.sshd._config", lambda *_: "NoSuchOption yes\n")
    with pytest.raises(SshdError, match=r"(?i)bad configuration option"), run_sshd(tmp_path / "ssh"):
        pass
