"""System calls of one process for a moment, by thread, call and descriptor.

strace is ended by SIGINT: it then detaches and the server goes on. SIGTERM can leave threads stopped in old releases.
``timeout`` ends it, not the agent, so that no tracer outlives an agent that is killed meanwhile.
"""

from __future__ import annotations

import re
import shutil
import signal
from collections import Counter
from typing import Dict, List, Tuple

from fleetdump.agent import procfs
from fleetdump.agent.evidence_process import ProcessFacts, SyscallCount, Trace
from fleetdump.agent.probes.bounded import ProbeFailed, run_command
from fleetdump.agent.probes.process import read_threads

SECONDS = 2.0
CALLS = 40
_LINE = re.compile(
    r"(?:\[pid\s+)?(?P<tid>\d+)\]?\s+(?:<\.\.\. )?(?P<name>[a-z_0-9]+)(?P<resumed> resumed>)?(?:\((?P<fd>\d+)?)?"
)
_DESCRIPTOR_CALLS = re.compile(r"(?:p?read|p?write|send|recv|ioctl|epoll_p?wait|flock|fsync|accept)")


def trace(process: ProcessFacts, peers: Dict[int, str]) -> Trace:
    """Trace ``process`` for two seconds; ``peers`` names the pids at the other ends of its pipes.

    Raises ``ProbeFailed`` when strace is absent or may not attach, or another tracer is attached.
    """
    if process.tracer_pid:
        raise ProbeFailed(f"process {process.pid} is already traced by {process.tracer_pid}")
    if shutil.which("strace") is None:
        raise ProbeFailed("strace not found")
    bound = ["timeout", "-s", "INT", "-k", "2", f"{SECONDS:g}"]
    output = run_command([*bound, "strace", "-f", "-s", "32", "-p", str(process.pid)], SECONDS + 3, signal.SIGINT)
    if "attached" not in output.stderr:
        raise ProbeFailed(
            output.stderr.strip().splitlines()[-1][:200] if output.stderr.strip() else "strace: no output"
        )
    counts = fold(output.stderr, process.pid)
    threads = read_threads(process.pid)
    targets = {fd: _describe(process, fd, target, peers) for fd, target in procfs.fd_targets(process.pid).items()}
    calls = [
        SyscallCount(
            threads[tid].name if tid in threads else "?",
            tid == process.pid,
            name,
            count,
            targets.get(fd, "") if fd >= 0 else "",
        )
        for (tid, name, fd), count in counts.items()
    ]
    return Trace(process.pid, process.label or process.role, SECONDS, _merge(calls))


def fold(text: str, main: int) -> Counter[Tuple[int, str, int]]:
    """Count the calls of strace's output by (thread id, name, descriptor or -1); ``main`` has no prefix at one thread.

    A call that was already blocked when strace attached counts once; the second half of an interrupted line does not.
    """
    counts: Counter[Tuple[int, str, int]] = Counter()
    for line in text.splitlines():
        if line.startswith(("strace:", "---", "+++")):
            continue
        match = _LINE.match(line if re.match(r"\[pid|\d+ ", line) else f"{main} {line}")
        if match and not match["resumed"]:
            fd = int(match["fd"]) if match["fd"] and _DESCRIPTOR_CALLS.match(match["name"]) else -1
            counts[(int(match["tid"]), match["name"], fd)] += 1
    return counts


def _merge(calls: List[SyscallCount]) -> List[SyscallCount]:
    """Threads of one name counted together, the most frequent calls first; the main thread stays apart."""
    merged: Dict[Tuple[str, bool, str, str], SyscallCount] = {}
    for call in calls:
        known = merged.setdefault(
            (call.thread, call.main, call.name, call.target),
            SyscallCount(call.thread, call.main, call.name, 0, call.target),
        )
        known.count += call.count
    return sorted(merged.values(), key=lambda call: (not call.main, -call.count))[:CALLS]


def _describe(process: ProcessFacts, fd: int, target: str, peers: Dict[int, str]) -> str:
    if fd in (1, 2):
        return f"fd {fd} ({'the log' if process.writes_log else target})"
    pipe = next((end for end in process.pipes if end.fd == fd), None)
    if pipe and pipe.peers:
        return f"pipe to {', '.join(peers.get(pid, str(pid)) for pid in pipe.peers)}"
    if target.startswith("pipe:["):
        return "own wake-up pipe"
    return target.replace("anon_inode:", "").strip("[]") if target.startswith("anon_inode:") else target.split(":")[0]
