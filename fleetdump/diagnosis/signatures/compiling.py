"""Compilers at work, and locks that compilers left behind."""

from __future__ import annotations

import re

from fleetdump.agent.evidence_types import LockFile
from fleetdump.diagnosis.registry import Step, signature
from fleetdump.diagnosis.types import HIGH, MEDIUM, WAIT, Verdict
from fleetdump.diagnosis.view import View

_COMPILING = re.compile(
    r"make_ptx|make_llir|make_cubin|ninja|nvcc|_build_extension|build_and_load|jit_compile|_run_ninja_build"
)
_LOCK_WAIT = re.compile(r"file_baton|FileBaton|SoftFileLock|filelock|acquire .*_(?:soft|unix)\.py")


@signature(Step.PROGRESS)
def compiling(view: View) -> Verdict | None:
    """Living compiler children use CPU, or a rank's stack is inside a compiler."""
    inside = [s for s in view.evidence.stacks if any(_COMPILING.search(frame) for frame in s.frames)]
    if (not view.compilers and not inside) or view.healthy or view.missing_ranks:
        return None
    names = sorted({p.name for p in view.compilers})
    facts = [f"{len(view.compilers)} compiler processes use CPU: {', '.join(names)}"] if names else []
    facts += [f"{s.label} is in {next(f for f in s.frames if _COMPILING.search(f))}" for s in inside]
    rank = _owner_rank(view) if view.compilers else None
    if rank is None and len(inside) == 1:
        rank = next((p.rank for p in view.schedulers if p.pid == inside[0].pid), None)
    whose = f" for rank {rank}" if rank is not None else ""
    return Verdict(
        "JIT_COMPILING",
        f"kernels are being compiled{whose}: {', '.join(names) or 'inside the process'}",
        HIGH if view.compilers else MEDIUM,
        WAIT,
        view.phase,
        rank,
        evidence=facts,
        next_steps=["wait (a cold DeepGEMM cache takes 10 to 20 min); keep the compile cache on a disk that survives"],
    )


@signature(Step.LOCKS)
def lock_wait(view: View) -> Verdict | None:
    """A process of the server waits in flock for somebody who lives."""
    pids = {p.pid: p for p in view.evidence.processes}
    waits = [lock for lock in view.evidence.locks if lock.waiter in pids]
    if not waits or view.healthy or view.progress:
        return None
    first = waits[0]
    holder = pids[first.holder].label or pids[first.holder].role if first.holder in pids else f"process {first.holder}"
    return Verdict(
        "LOCK_WAIT",
        f"process {first.waiter} waits for a lock that {holder} holds ({first.path or f'inode {first.inode}'})",
        HIGH,
        phase=view.phase,
        rank=pids[first.waiter].rank,
        evidence=[f"/proc/locks: {w.waiter} waits for {w.holder} on {w.path or w.inode}" for w in waits[:5]],
        next_steps=[
            f"look at process {first.holder}; a lock on a network file system may have a holder on another host"
        ],
    )


@signature(Step.LOCKS)
def stale_lock(view: View) -> Verdict | None:
    """Ranks sleep for a lock file that nobody living holds."""
    if view.compilers or view.healthy or view.progress or view.within_patience:
        return None
    waiting = [s for s in view.evidence.stacks if any(_LOCK_WAIT.search(frame) for frame in s.frames)]
    stale = [f for f in view.evidence.lock_files if not f.holder and f.age_seconds > view.evidence.uptime > 0]
    if not waiting or not stale:
        return None
    rank = next((p.rank for p in view.schedulers if p.pid == waiting[0].pid), None)
    return Verdict(
        "JIT_STALE_LOCK",
        f"a compile lock that a dead process left is waited for: {stale[0].path}",
        HIGH,
        phase=view.phase,
        rank=rank,
        evidence=[f"{s.label} waits in {s.frames[0]}" for s in waiting] + [_age(f) for f in stale[:3]],
        next_steps=[f"remove {stale[0].path}; nobody here has it open"],
    )


def _age(file: LockFile) -> str:
    return f"{file.path}: {file.age_seconds:.0f} s old, older than the server, held by nobody"


def _owner_rank(view: View) -> int | None:
    """The rank whose descendants the compilers are, if it is one."""
    parents = {p.pid: p.ppid for p in view.evidence.processes}
    ranks = {p.pid: p.rank for p in view.schedulers}
    owners = set()
    for compiler in view.compilers:
        pid = compiler.ppid
        while pid in parents and pid not in ranks:
            pid = parents[pid]
        owners.add(ranks.get(pid))
    return owners.pop() if len(owners) == 1 else None
