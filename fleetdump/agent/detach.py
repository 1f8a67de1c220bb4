"""Processes that outlive the agent."""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path
from typing import Dict, Optional, Sequence, Tuple

from fleetdump.agent.logind import Shelter, shelter
from fleetdump.agent.procfs import start_time


def spawn_detached(
    argv: Sequence[str],
    *,
    log_path: Path,
    env: Optional[Dict[str, str]] = None,
    within: Optional[Shelter] = None,
    stdin: int = subprocess.DEVNULL,
) -> Tuple[int, int]:
    """Start ``argv`` so that it survives this process, sshd and a logout; returns its pid and start time.

    ``within`` is what logind makes necessary for that; by default it is looked up.

    The process leads a new session, works in ``/``, reads /dev/null (or ``stdin``), appends stdout and stderr to
    ``log_path`` (made 0600), inherits no other descriptor and ignores SIGHUP, as under nohup(1). ``env`` replaces the
    environment.
    Raises ``OSError`` when the program cannot be started.
    """
    within = within or shelter()
    environment = {**os.environ, **within.env} if env is None else {**env, **within.env}
    log = os.open(str(log_path), os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    try:
        process = subprocess.Popen(
            [*within.prefix, *argv],  # a scope's systemd-run becomes the program itself: same pid, same start time
            cwd="/",
            env=environment,
            stdin=stdin,
            stdout=log,
            stderr=subprocess.STDOUT,
            close_fds=True,
            start_new_session=True,
            preexec_fn=_ignore_hangup,
        )
    finally:
        os.close(log)
    # The child is left to init on purpose; without this Popen would warn that it is still running.
    process.returncode = 0
    return process.pid, start_time(process.pid) or 0


def _ignore_hangup() -> None:
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
