"""How a server that was launched with ``--api-key`` lets us in. The key is read from its command line when it is needed
and stored nowhere: our own records hide it."""

from __future__ import annotations

from typing import Dict

from fleetdump.agent import procfs
from fleetdump.agent.arguments import option_value


def authorization(pid: int, started: int) -> Dict[str, str]:
    """HTTP headers for the server whose launcher is ``pid`` since ``started``; none when it has no key, when it is gone
    or when its command line may not be read."""
    stat = procfs.read_stat(pid)
    if stat is None or stat.start_time != started:
        return {}
    key = option_value(procfs.read_cmdline(pid), ("--api-key",))
    return {"Authorization": f"Bearer {key}"} if key else {}
