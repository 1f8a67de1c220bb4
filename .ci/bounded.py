"""Run a command with a time limit and leave none of its processes behind: `bounded.py SECONDS COMMAND...`.

This process becomes the reaper of orphans below it (Linux ``PR_SET_CHILD_SUBREAPER``), so that even what the command
detached into sessions of its own is found among our descendants, and only that is ended. The exit status is the
command's; 124 when its time was up, 1 when it ended well but left something behind.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

PR_SET_CHILD_SUBREAPER = 36
GRACE_SECONDS = 15.0


def descendants() -> list[int]:
    """Living processes below this one."""
    parents: dict[int, int] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError, IndexError, ValueError):
            fields = stat.read_text().rsplit(")", 1)[1].split()
            if fields[0] != "Z":
                parents[int(stat.parent.name)] = int(fields[1])
    below = {os.getpid()}
    while True:
        more = {pid for pid, parent in parents.items() if parent in below} - below
        if not more:
            return sorted(below - {os.getpid()})
        below |= more


def end_all() -> list[int]:
    """SIGTERM, then SIGKILL, to all descendants; the pids that there were."""
    found = descendants()
    for sig in (signal.SIGTERM, signal.SIGKILL):
        for pid in descendants():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, sig)
        deadline = time.monotonic() + GRACE_SECONDS
        while descendants() and time.monotonic() < deadline:
            _reap()
            time.sleep(0.1)
    _reap()
    return found


def _reap() -> None:
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


def wait(process: subprocess.Popen[bytes], seconds: float) -> int:
    """The exit status of ``process`` as a shell gives it; raises ``TimeoutExpired``.

    Orphans that became ours are reaped as they end: unreaped, they would still stand in /proc, and a test that waits
    for its processes to be gone would wait for ever.
    """
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid == process.pid:
            process.returncode = os.waitstatus_to_exitcode(status)
            return process.returncode if process.returncode >= 0 else 128 - process.returncode
        if pid == 0:
            time.sleep(0.05)
    raise subprocess.TimeoutExpired(process.args, seconds)


def main() -> int:
    limit, command = float(sys.argv[1]), sys.argv[2:]
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    process = subprocess.Popen(command)
    try:
        status = wait(process, limit)
    except subprocess.TimeoutExpired:
        print(f"time is up after {limit:.0f} s: {' '.join(command)}", file=sys.stderr)
        status = 124
    except KeyboardInterrupt:
        status = 130
    left = end_all()
    if left and status == 0:
        print(f"the command left {len(left)} processes behind (ended now)", file=sys.stderr)
        return 1
    return status


if __name__ == "__main__":
    sys.exit(main())
