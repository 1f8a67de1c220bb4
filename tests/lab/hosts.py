"""Lab hosts: machines made of namespaces, each with its own network, processes, small disk and a real sshd.

A host is one ``unshare`` process. All that it has (processes, mounts, network device) goes with it, and it goes with
this process, even when that is killed: nothing has to be cleaned by hand. Addresses are in 198.18.0.0/15 (RFC 2544).
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import paramiko
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, PublicFormat

from fleetdump.inventory import HostConfig

T = TypeVar("T")

RUN = Path("/run/fleetdump-lab")
SLOTS = 32
"""Labs that may be there at a time; each has 2,000 addresses: 198.18.(8 * slot).1 is its bridge."""
DISK_MB = 200
START_SECONDS = 30.0
TOOLS = ("ip", "sshd", "unshare", "nsenter", "setpriv")

_INIT = """
set -eu
base=/run/fleetdump-lab/disk
mkdir -p $base
mount -t tmpfs -o size={disk}m,mode=755 lab $base
mkdir $base/up $base/work $base/root
mount -t overlay lab -o lowerdir=/,upperdir=$base/up,workdir=$base/work $base/root
root=$base/root
mount -t proc proc $root/proc
mount --rbind /dev $root/dev
mkdir -p $root/run/sshd $root/lab
mount -t tmpfs -o size={disk}m,mode=1777 lab $root/tmp
# The tests' own interpreter is there too, also where the repository lies below /tmp.
prefix={prefix}
[ -e "$root$prefix" ] || {{ mkdir -p "$root$prefix"; mount --bind -o ro "$prefix" "$root$prefix"; }}
cp {files}/* $root/lab/
# bash reads it under sshd: what this machine's root wants at a login (pyenv init takes a lock) is no part of the lab.
: > $root/root/.bashrc
hostname {name}
echo {name} > $root/etc/machine-id
while ! ip link set lan0 up 2>/dev/null; do sleep 0.02; done
ip link set lo up
ip addr add {address}/21 dev lan0
exec chroot $root /usr/sbin/sshd -D -e -f /lab/sshd_config
"""

_SSHD_CONFIG = """
HostKey /lab/host_key
AuthorizedKeysFile /lab/authorized_keys
PermitRootLogin yes
PasswordAuthentication no
UsePAM no
StrictModes no
PidFile none
UseDNS no
"""


def missing() -> str:
    """Why no lab can be made here, "" when it can."""
    if not sys.platform.startswith("linux"):
        return "lab hosts need Linux"
    if os.geteuid() != 0:
        return "lab hosts need root"
    lacking = [
        tool for tool in TOOLS if shutil.which(tool, path=f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin") is None
    ]
    return f"lab hosts need {', '.join(lacking)} (openssh-server, iproute2, util-linux)" if lacking else ""


def wait_for(condition: Callable[[], T], seconds: float = START_SECONDS, what: str = "") -> T:
    """The first true value of ``condition``; raises ``TimeoutError`` after ``seconds``."""
    end = time.monotonic() + seconds
    while not (value := condition()):
        if time.monotonic() > end:
            raise TimeoutError(what or f"{condition} did not come true within {seconds} s")
        time.sleep(0.02)
    return value


def ip(*commands: str) -> None:
    """Run iproute2 commands in one batch."""
    subprocess.run(["ip", "-batch", "-"], input="\n".join(commands) + "\n", text=True, check=True, capture_output=True)


@dataclass
class LabHost:
    """One host. ``process`` is its ``unshare``; everything inside ends with it."""

    name: str
    address: str
    link: str
    files: Path
    identity_file: Path
    process: subprocess.Popen[bytes]
    log: Path
    sshd_pid: int = 0

    def config(self, **changes: Any) -> HostConfig:
        """Its entry of an inventory, pinned to its host key."""
        settings: dict[str, Any] = {
            "name": self.name,
            "address": self.address,
            "user": "root",
            "identity_file": str(self.identity_file),
            "host_key": self.host_key_fingerprint(),
            "state_dir": "/lab-state",
            "agent_python": "/usr/bin/python3",
            "connect_timeout": 10.0,
        }
        return HostConfig(**{**settings, **changes})

    def host_key_fingerprint(self) -> str:
        return str(paramiko.Ed25519Key.from_private_key_file(str(self.files / "host_key")).fingerprint)

    def change_host_key(self) -> None:
        """As after a reinstallation."""
        _make_key(self.files / "host_key")
        shutil.copy(self.files / "host_key", self.path("/lab/host_key"))
        os.kill(self.sshd_pid, signal.SIGHUP)
        time.sleep(0.3)

    def path(self, inside: str) -> Path:
        """The host's file ``inside``, as a path of this machine."""
        return Path(f"/proc/{self.sshd_pid}/root{inside}")

    def run(self, *argv: str, check: bool = True) -> str:
        """Run a command inside, without ssh; its stdout."""
        enter = ["nsenter", "-t", str(self.sshd_pid), "-m", "-u", "-n", "-p", "-r", "-w", "--", *argv]
        return subprocess.run(enter, check=check, capture_output=True, text=True).stdout

    def pids(self) -> list[int]:
        """Processes inside, by their pids on this machine."""
        mine = os.readlink(f"/proc/{self.sshd_pid}/ns/pid")
        found = []
        for process in Path("/proc").iterdir():
            with contextlib.suppress(OSError):
                if process.name.isdigit() and os.readlink(process / "ns" / "pid") == mine:
                    found.append(int(process.name))
        return found

    def count(self, text: str) -> int:
        """Processes inside whose command line has ``text``."""
        return sum(text.encode() in _cmdline(pid) for pid in self.pids())

    def kill(self) -> None:
        """Power off: the host and all in it are gone at once."""
        self.process.kill()
        self.process.wait()

    def cut_link(self) -> None:
        """Packets vanish in both directions; nobody is told."""
        ip(f"link set {self.link} down")

    def restore_link(self) -> None:
        ip(f"link set {self.link} up")

    def stop_sshd(self) -> None:
        """SIGSTOP every sshd: ports stay open, nothing answers."""
        self._signal_sshd(signal.SIGSTOP)

    def continue_sshd(self) -> None:
        self._signal_sshd(signal.SIGCONT)

    def fill_disk(self) -> None:
        """Leave no byte free on the host's disk."""
        with self.path("/filler").open("wb", buffering=0) as file, contextlib.suppress(OSError):
            while True:
                file.write(bytes(1 << 16))

    def free_disk(self) -> None:
        self.path("/filler").unlink()

    def _signal_sshd(self, number: int) -> None:
        for pid in self.pids():
            if b"sshd" in _cmdline(pid):
                os.kill(pid, number)


class Lab:
    """A bridge and the hosts on it. Use it as a context manager; at most ``SLOTS`` labs exist at a time, whoever makes
    them, and what a killed one left is removed by the next one in its slot."""

    def __init__(self) -> None:
        self.hosts: list[LabHost] = []
        self._made = 0

    def __enter__(self) -> Lab:
        RUN.mkdir(mode=0o700, exist_ok=True)
        (RUN / "disk").mkdir(exist_ok=True)
        self._slot, self._lock = _claim_slot()
        self.directory = RUN / str(self._slot)
        self.bridge = f"flb{self._slot}"
        self._remove_leftovers()
        self.directory.mkdir(mode=0o700)
        self.identity_file = self.directory / "id_ed25519"
        _make_key(self.identity_file)
        ip(
            f"link add {self.bridge} type bridge",
            f"addr add {self._address(1)}/21 dev {self.bridge}",
            f"link set {self.bridge} up",
        )
        return self

    def __exit__(self, *_: object) -> None:
        try:
            self.remove(list(self.hosts))
        finally:
            self._remove_leftovers()
            os.close(self._lock)

    def start(self, count: int) -> list[LabHost]:
        """``count`` new hosts, ready for ssh. Call it from the main thread: a host ends with its maker."""
        new = [self._spawn() for _ in range(count)]
        self.hosts += new
        ours = os.readlink("/proc/self/ns/net")
        for host in new:
            wait_for(
                lambda host=host: _network_of(host.process.pid) not in ("", ours), what=f"namespaces of {host.name}"
            )
        ip(
            *(
                command
                for host in new
                for command in (
                    f"link add {host.link} type veth peer name lan0 netns {host.process.pid}",
                    f"link set {host.link} master {self.bridge} up",
                )
            )
        )
        for host in new:
            wait_for(lambda host=host: _answers(host), what=f"sshd of {host.name}: {host.log.read_text()}")
            host.sshd_pid = wait_for(lambda host=host: _child_of(host.process.pid), what=f"sshd of {host.name}")
        return new

    def remove(self, hosts: list[LabHost]) -> None:
        """End hosts and all that they have."""
        for host in hosts:
            host.process.kill()
        for host in hosts:
            host.process.wait()
            shutil.rmtree(host.files, ignore_errors=True)
            self.hosts.remove(host)

    def _spawn(self) -> LabHost:
        self._made += 1
        name = f"lab{self._slot}-{self._made}"
        address = self._address(self._made + 1)
        files = self.directory / name
        files.mkdir()
        _make_key(files / "host_key")
        shutil.copy(f"{self.identity_file}.pub", files / "authorized_keys")
        (files / "sshd_config").write_text(_SSHD_CONFIG)
        log = self.directory / f"{name}.log"
        prefix = shlex.quote(sys.prefix)
        script = _INIT.format(disk=DISK_MB, files=files, name=name, address=address, prefix=prefix)
        unshare = [
            "unshare",
            "--net",
            "--mount",
            "--pid",
            "--uts",
            "--ipc",
            "--fork",
            "--kill-child",
            "sh",
            "-c",
            script,
        ]
        with log.open("wb") as output:
            process = subprocess.Popen(
                ["setpriv", "--pdeathsig", "KILL", *unshare],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        return LabHost(name, address, f"flv{self._slot}-{self._made}", files, self.identity_file, process, log)

    def _address(self, number: int) -> str:
        return f"198.18.{8 * self._slot + number // 256}.{number % 256}"

    def _remove_leftovers(self) -> None:
        for device in Path("/sys/class/net").glob(f"fl[bv]{self._slot}*"):
            if device.name == self.bridge or device.name.startswith(f"flv{self._slot}-"):
                with contextlib.suppress(subprocess.CalledProcessError):
                    ip(f"link del {device.name}")
        shutil.rmtree(self.directory, ignore_errors=True)


def _claim_slot() -> tuple[int, int]:
    """The first slot that nobody holds; the lock goes with the descriptor, so a killed lab holds none."""
    for slot in range(SLOTS):
        lock = os.open(RUN / f"{slot}.lock", os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return slot, lock
        except OSError:
            os.close(lock)
    raise RuntimeError(f"all {SLOTS} labs are in use")


def _make_key(path: Path) -> None:
    """An Ed25519 key pair in OpenSSH's format: ``path`` and ``path``.pub."""
    key = Ed25519PrivateKey.generate()
    path.write_bytes(key.private_bytes(Encoding.PEM, PrivateFormat.OpenSSH, NoEncryption()))
    path.chmod(0o600)
    path.with_suffix(".pub").write_bytes(key.public_key().public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH) + b"\n")


def _network_of(pid: int) -> str:
    with contextlib.suppress(OSError):
        return os.readlink(f"/proc/{pid}/ns/net")
    return ""


def _child_of(pid: int) -> int:
    with contextlib.suppress(OSError):
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        return int(children[0]) if children else 0
    return 0


def _cmdline(pid: int) -> bytes:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ")
    return b""


def _answers(host: LabHost) -> bool:
    if host.process.poll() is not None:
        raise RuntimeError(f"{host.name} did not start: {host.log.read_text()}")
    with contextlib.suppress(OSError), socket.create_connection((host.address, 22), timeout=1) as connection:
        connection.settimeout(2)
        return connection.recv(4) == b"SSH-"
    return False


@contextlib.contextmanager
def lab() -> Iterator[Lab]:
    """A lab for scripts outside pytest."""
    with Lab() as made:
        yield made
