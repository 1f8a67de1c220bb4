"""The demo's own OpenSSH server: a loopback port, throw-away keys, its own configuration, the current user.

Nothing of the system's ssh is read or written. Works as root and as any other user (who then can only log in as
themselves).
"""

from __future__ import annotations

import contextlib
import getpass
import os
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

START_SECONDS = 10.0


class SshdError(Exception):
    """The server could not be started; the text says why and what to do."""


@dataclass(frozen=True)
class DemoSshd:
    """A running server and what a client needs to trust it and be let in."""

    port: int
    user: str
    identity_file: Path
    fingerprint: str
    """Of the host key, as ``SHA256:...``."""
    log: Path


@contextlib.contextmanager
def run_sshd(folder: Path) -> Iterator[DemoSshd]:
    """Serve 127.0.0.1 until the block ends; everything lies in ``folder``. Raises SshdError."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    host_key, user_key = _make_key(folder / "host_key"), _make_key(folder / "user_key")
    shutil.copyfile(user_key.with_suffix(".pub"), folder / "authorized_keys")
    port, log = _free_port(), folder / "sshd.log"
    config = folder / "sshd_config"
    config.write_text(_config(folder, host_key, port))
    with log.open("wb") as out:
        process = subprocess.Popen(
            [_find_sshd(), "-D", "-e", "-f", str(config)],
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        _wait_listening(process, port, log)
        yield DemoSshd(port, getpass.getuser(), user_key, _fingerprint(host_key), log)
    finally:
        process.terminate()
        process.wait(timeout=10)


def _make_key(path: Path) -> Path:
    for stale in (path, path.with_suffix(".pub")):
        stale.unlink(missing_ok=True)
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", "fleetdump-demo", "-f", str(path)], check=True)
    return path


def _fingerprint(key: Path) -> str:
    line = subprocess.run(["ssh-keygen", "-lf", str(key)], capture_output=True, text=True, check=True).stdout
    return line.split()[1]


def _config(folder: Path, host_key: Path, port: int) -> str:
    lines = [
        "ListenAddress 127.0.0.1",
        f"Port {port}",
        f'HostKey "{host_key}"',
        f'AuthorizedKeysFile "{folder / "authorized_keys"}"',
        f'PidFile "{folder / "sshd.pid"}"',
        "StrictModes no",  # the clone may lie in a folder that others can write
        "UsePAM no",
        "PasswordAuthentication no",
        "KbdInteractiveAuthentication no",
        "PubkeyAuthentication yes",
        "PermitRootLogin prohibit-password",
        "MaxStartups 100",
        "PrintMotd no",
        "Subsystem sftp internal-sftp",
    ]
    return "\n".join(lines) + "\n"


def _find_sshd() -> str:
    path = shutil.which("sshd", path=os.pathsep.join([os.environ.get("PATH", ""), "/usr/sbin", "/usr/local/sbin"]))
    if path is None:
        raise SshdError("there is no sshd: run `make system-packages`, or `apt-get install openssh-server`")
    if os.geteuid() == 0:
        # Root's sshd wants its empty privilege separation folder; the package's service makes it at boot only.
        Path("/run/sshd").mkdir(mode=0o755, exist_ok=True)
    return path


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def _wait_listening(process: subprocess.Popen[bytes], port: int, log: Path) -> None:
    deadline = time.monotonic() + START_SECONDS
    while True:
        if process.poll() is not None:
            raise SshdError(f"sshd ended with status {process.returncode}:\n{log.read_text(errors='replace')}")
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
            return
        if time.monotonic() > deadline:
            raise SshdError(f"sshd does not listen on 127.0.0.1:{port} after {START_SECONDS:.0f} s; see {log}")
        time.sleep(0.05)
