"""Python stacks of the main threads by py-spy, folded over the ranks: the odd one out holds the cause."""

from __future__ import annotations

import json
import os
import shutil
from typing import Any, Dict, List

from fleetdump.agent.evidence_process import ProcessFacts, Stack, StackGroup
from fleetdump.agent.probes.bounded import ProbeFailed, run_command

LIMIT = 6.0
MISSING = "py-spy not found"
FRAMES = 24
GROUP_FRAMES = 6
ACTIVE_THREADS = 6
ACTIVE_FRAMES = 6


def find_py_spy(python: str, brought: str = "") -> str:
    """py-spy beside the server's interpreter, on the PATH, or as the controller ``brought`` it. Raises ``ProbeFailed``
    when there is none."""
    beside = os.path.join(os.path.dirname(python), "py-spy") if python else ""
    found = next((path for path in (beside, shutil.which("py-spy"), brought) if path and os.access(path, os.X_OK)), "")
    if not found and brought:
        raise ProbeFailed(f"{brought} may not be run: its file system seems to be mounted noexec")
    if not found:
        raise ProbeFailed(f"{MISSING} beside the server's interpreter, nor on the PATH")
    return found


def main_stack(process: ProcessFacts, py_spy: str) -> Stack:
    """The main thread's frames: first without stopping the process, then, if that read failed, with a short stop.

    Raises ``ProbeFailed`` when py-spy may not attach, or another tracer is attached.
    """
    if process.tracer_pid:
        raise ProbeFailed(f"process {process.pid} is already traced by {process.tracer_pid}")
    arguments = [py_spy, "dump", "--json", "--pid", str(process.pid)]
    output = run_command([*arguments, "--nonblocking"], LIMIT)
    if output.status and process.state not in "TtD":
        output = run_command(arguments, LIMIT)
    if output.status:
        raise ProbeFailed((output.stderr.strip().splitlines() or ["py-spy failed"])[0][:200])
    return parse_stack(process, json.loads(output.stdout))


def parse_stack(process: ProcessFacts, threads: List[Dict[str, Any]]) -> Stack:
    """The main thread of py-spy's JSON."""
    main = next(
        (t for t in threads if t.get("os_thread_id") == process.pid or t.get("thread_name") == "MainThread"), None
    )
    if main is None:
        raise ProbeFailed("py-spy shows no main thread")
    state = ("active" if main["active"] else "idle") + ("+gil" if main["owns_gil"] else "")
    busy = [t for t in threads if t is not main and t["active"]][:ACTIVE_THREADS]
    active = {str(t.get("thread_name") or t.get("os_thread_id")): _frames(t)[:ACTIVE_FRAMES] for t in busy}
    return Stack(process.pid, process.role, process.label, state, _frames(main)[:FRAMES], active=active)


def native_frames(process: ProcessFacts, py_spy: str) -> List[str]:
    """The main thread's frames with those of C and C++, innermost first.

    py-spy stops the process while it reads them (0.6 to 1.7 s with CUDA's libraries). Raises ``ProbeFailed``.
    """
    if process.tracer_pid or process.state in "TtD":
        raise ProbeFailed(f"process {process.pid} cannot be traced now (state {process.state})")
    output = run_command([py_spy, "dump", "--json", "--native", "--pid", str(process.pid)], LIMIT)
    if output.status:
        raise ProbeFailed((output.stderr.strip().splitlines() or ["py-spy failed"])[0][:200])
    return parse_stack(process, json.loads(output.stdout)).frames


def _frames(thread: Dict[str, Any]) -> List[str]:
    return [f"{f['name']} ({f.get('short_filename') or f['filename']}:{f['line']})" for f in thread["frames"]]


def group(stacks: List[Stack], *, native: bool = False) -> List[StackGroup]:
    """Ranks by their innermost frames (those of C and C++ too if ``native``), the largest group first; smaller groups
    are marked as the minority. A rank without such frames is left out."""
    groups: Dict[str, StackGroup] = {}
    for stack in stacks:
        frames = (stack.native if native else stack.frames)[:GROUP_FRAMES]
        if stack.role == "scheduler" and (frames or not native):
            groups.setdefault("\n".join(frames), StackGroup(frames, [])).ranks.append(stack.label)
    ordered = sorted(groups.values(), key=lambda g: -len(g.ranks))
    for one in ordered[1:]:
        one.minority = len(one.ranks) < len(ordered[0].ranks)
    return ordered
