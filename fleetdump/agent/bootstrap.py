"""The first thing that runs on a host: it finds or unpacks the bundle and hands over to ``main.run``.

Its text travels on stdin and is executed by whatever python3 the host has, before anything of ours is there. So it
imports only the standard library, nothing of fleetdump at import time, and stays readable for Python 3.6, which can
then be refused by name instead of by a syntax error. ``context`` imports the names of directories from here.
"""

import compileall
import hashlib
import io
import json
import os
import shutil
import sys
import tarfile

MINIMUM = (3, 8)


def machine_id():
    # type: () -> str
    """A stable name of this machine, for state directories on a home that hosts share."""
    node = os.uname()[1]
    for path in ("/etc/machine-id", "/var/lib/dbus/machine-id"):
        try:
            with open(path) as file:
                text = file.read().strip()
        except OSError:
            continue
        if text:
            return f"{text[:12]}-{node}"
    return node


def state_root(state_dir):
    # type: (str) -> str
    """``<state_dir>/<machine-id>``; ``~`` is the home of the user that runs this."""
    return os.path.join(os.path.expanduser(state_dir), machine_id())


def answer(message):
    # type: (dict[str, object]) -> None
    """Send one frame to the controller."""
    sys.stdout.buffer.write(json.dumps(message).encode() + b"\n")
    sys.stdout.buffer.flush()


def unpack(bundle, sha256, target):
    # type: (bytes, str, str) -> None
    """Put the bundle at ``target``, whole or not at all; another agent may do the same at the same time."""
    if hashlib.sha256(bundle).hexdigest() != sha256:
        raise ValueError("the pushed bundle is damaged: SHA-256 differs")
    parent = os.path.dirname(target)
    os.makedirs(parent, mode=0o700, exist_ok=True)
    temporary = os.path.join(parent, f".{sha256}.{os.getpid()}")
    os.mkdir(temporary, 0o700)
    try:
        with tarfile.open(fileobj=io.BytesIO(bundle), mode="r:gz") as archive:
            archive.extractall(temporary)
        compileall.compile_dir(temporary, quiet=2)
        try:
            os.rename(temporary, target)
        except OSError:
            if not os.path.isdir(target):
                raise
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def main():
    # type: () -> None
    """Read the header, make sure that the bundle is there, run the agent."""
    # Ends a line that a shell's start-up file may have left unfinished: a frame must begin its line.
    sys.stdout.buffer.write(b"\n")
    if sys.version_info < MINIMUM:
        answer({"type": "unsupported_python", "version": sys.version.split()[0], "executable": sys.executable})
        return
    header = json.loads(sys.stdin.buffer.readline())
    target = os.path.join(state_root(header["state_dir"]), "agent", header["bundle"])
    pushed = bool(header["push"])
    try:
        if pushed:
            unpack(sys.stdin.buffer.read(header["push"]), header["bundle"], target)
    except OSError as error:
        answer({"type": "install_failed", "where": target, "why": str(error)})
        return
    if not os.path.isdir(target):
        answer({"type": "missing_bundle"})
        return
    sys.path.insert(0, target)
    from fleetdump.agent.main import run

    run(pushed=pushed)


if __name__ == "__main__":
    main()
