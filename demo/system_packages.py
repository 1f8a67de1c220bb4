"""Install the few system packages that demo and tests use, or say which are missing: `python3 -m demo.system_packages`.

As root, or where `sudo -n` works, they are installed with apt-get, saying so. Elsewhere the missing ones are named with
the line to type. Without strace or a C compiler everything still runs: evidence then comes from /proc alone.
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
from dataclasses import dataclass

# A policy-rc.d keeps apt from starting the system's own sshd, which nobody asked for.
INSTALL = """
set -e
export DEBIAN_FRONTEND=noninteractive
policy=/usr/sbin/policy-rc.d
if [ ! -e "$policy" ]; then
  trap 'rm -f "$policy"' EXIT
  printf '#!/bin/sh\\nexit 101\\n' >"$policy"
  chmod 755 "$policy"
fi
apt-get update -qq
apt-get install -y -qq --no-install-recommends "$@"
"""
SBIN = ("/usr/sbin", "/sbin", "/usr/local/sbin")


@dataclass(frozen=True)
class Need:
    """A program, the Debian package that has it, what it is for, and whether the demo ends without it."""

    program: str
    package: str
    purpose: str
    required: bool = False


NEEDS = (
    Need("sshd", "openssh-server", "the demo's own SSH server", required=True),
    Need("ssh-keygen", "openssh-client", "throw-away keys", required=True),
    Need("strace", "strace", "system calls of a hung server; without it evidence is from /proc"),
    Need("cc", "gcc", "compiler children in tests"),
    Need("ip", "iproute2", "lab hosts in network namespaces"),
)


def missing() -> list[Need]:
    """What is not on PATH or in the sbin folders."""
    path = os.pathsep.join([os.environ.get("PATH", ""), *SBIN])
    return [need for need in NEEDS if shutil.which(need.program, path=path) is None]


def root_prefix() -> list[str] | None:
    """What goes before a command that root must run; None when we cannot become root without a password."""
    if os.geteuid() == 0:
        return []
    sudo = shutil.which("sudo")
    if sudo and subprocess.run([sudo, "-n", "true"], capture_output=True).returncode == 0:
        return [sudo, "-n"]
    return None


def install(packages: list[str], prefix: list[str]) -> bool:
    """apt-get update and install; False when either fails."""
    print("  $", shlex.join([*prefix, "apt-get", "install", "--no-install-recommends", *packages]), flush=True)
    command = [*prefix, "sh", "-c", INSTALL, "install", *packages]
    return subprocess.run(command, stdout=subprocess.DEVNULL).returncode == 0


def main() -> int:
    """0 when what is required is there afterwards."""
    lacking = missing()
    if not lacking:
        return 0
    packages = [need.package for need in lacking]
    prefix = root_prefix()
    if prefix is not None and shutil.which("apt-get"):
        print(f"system packages: installing {', '.join(packages)}", flush=True)
        install(packages, prefix)
        lacking = missing()
    for need in lacking:
        print(f"system packages: {need.program} is missing ({need.purpose}): apt-get install {need.package}")
    return 1 if any(need.required for need in lacking) else 0


if __name__ == "__main__":
    sys.exit(main())
