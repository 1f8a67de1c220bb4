"""Locks: held by the living, left by the dead, or held by a rank that waits for the waiter."""

from __future__ import annotations

import re

from fleetdump.agent.evidence_host import LockFile
from fleetdump.agent.evidence_process import ProcessFacts, Stack
from fleetdump.diagnosis.registry import Step, signature
from fleetdump.diagnosis.suspect import collective_of
from fleetdump.diagnosis.types import DIRECT, LOG_ONLY, MEASURED, PATTERN, STALL, WAIT, Verdict
from fleetdump.diagnosis.view import View
from fleetdump.diagnosis.words import name_of, rank_names

_LOCK_WAIT = re.compile(
    r"file_baton|FileBaton|SoftFileLock|filelock|acquire .*_(?:soft|unix)\.py|\bflock\b|WeakFileLock"
)
_FLOCK_WCHAN = re.compile(r"locks_lock|flock_lock|posix_lock|nlm|nfs4?_.*lock|fcntl_setlk")
_FLOCK_CALL = "73"
_COMPILE_PHASES = ("kv_pool", "jit", "capture", "http", "warmup", "serving")
_JIT_LINE = re.compile(r"\bJIT\b|torch_extensions|cpp_extension|[Bb]uilding (?:op|extension|kernel)|flashinfer")
_HUB_PATH = re.compile(r"/\.locks/|/hub/|huggingface|modelscope")
_SHARED = re.compile(r"nfs|lustre|fuse|ceph|gpfs|cifs|9p|virtiofs|beegfs")
POLLS = (1.0, 60.0)
"""Voluntary switches a second of a thread that looks at a lock file again and again, at most 20 times a second."""


def waits_for_lock(stack: Stack) -> bool:
    """Whether the innermost frames wait for a file lock."""
    return any(_LOCK_WAIT.search(frame) for frame in stack.frames[:5])


@signature(Step.LOCKS)
def hub_lock(view: View) -> Verdict | None:
    """A download waits for a lock that nobody living holds, in a log that may grow all the time."""
    if view.healthy or view.phase not in ("imports", "init", "weights") or view.compilers:
        return None
    named = view.evidence.log.waits_for_lock
    stale = [f for f in view.evidence.lock_files if f.use == "hub" and _is_stale(view, f)]
    stacks = [s for s in view.evidence.stacks if waits_for_lock(s) and any(_HUB_PATH.search(f) for f in s.frames)]
    if not (named or stacks) or (named and view.evidence.lock_files and not stale and not stacks):
        return None
    path = stale[0].path if stale else named
    facts = [f"log: it waits for {named} again and again ({view.evidence.log.repeated} lines)"] if named else []
    facts += [_age(view, f) for f in stale[:3]]
    facts += [f"{s.label or s.role} waits in {s.frames[0]}" for s in stacks]
    return Verdict(
        "HUB_LOCK",
        f"the download waits for a lock that nobody here holds: {path or 'unknown path'}",
        DIRECT if stale else LOG_ONLY,
        phase=view.phase,
        evidence=facts,
        next_steps=[
            f"remove {path} when no other host that shares this folder downloads" if path else "find the lock file",
            "or give model_path a local folder",
        ],
    )


@signature(Step.LOCKS)
def cross_lock(view: View) -> Verdict | None:
    """A rank waits for a lock whose holder, another rank, waits in a collective for it."""
    pids = {p.pid: p for p in view.schedulers}
    for waiter, holder, path in _held_by_ranks(view):
        stack = view.stack(pids[holder])
        inside = collective_of(stack.frames) if stack else ""
        if not inside or view.progress or view.compilers:
            continue
        first, second = pids[waiter], pids[holder]
        return Verdict(
            "JIT_COLLECTIVE_CROSSLOCK",
            f"{name_of(first)} waits for a lock of {name_of(second)}, which waits for it in {inside}",
            DIRECT,
            phase=view.phase_of(first),
            rank=first.rank,
            evidence=[f"{name_of(first)} waits for {path}", f"{name_of(second)} holds it and is in {inside}"],
            next_steps=["restart with a warm compile cache (build the kernels once on one rank)", "update SGLang"],
        )
    return None


def _held_by_ranks(view: View) -> list[tuple[int, int, str]]:
    """(waiter, holder, path), both of them ranks."""
    pids = {p.pid for p in view.schedulers}
    found = [(w.waiter, w.holder, w.path or str(w.inode)) for w in view.evidence.locks]
    waiting = [s.pid for s in view.evidence.stacks if waits_for_lock(s)]
    found += [(pid, f.holder, f.path) for f in view.evidence.lock_files for pid in waiting if f.holder != pid]
    return [one for one in found if one[0] in pids and one[1] in pids]


@signature(Step.LOCKS)
def stale_lock(view: View) -> Verdict | None:
    """Ranks sleep for a lock file that nobody living holds."""
    if view.compilers or view.healthy or view.progress or view.within_patience:
        return None
    stacks = [s for s in view.evidence.stacks if waits_for_lock(s)]
    polling = [p for p in view.schedulers if _polls(p)] if not view.evidence.stacks else []
    stale = [f for f in view.evidence.lock_files if f.use == "compile" and _is_stale(view, f)]
    at_jit = not view.evidence.stacks and not view.spins and bool(_JIT_LINE.search(_last_line(view)))
    if not stale or not (stacks or polling or at_jit):
        return None
    waiting = [p for p in view.schedulers if p.pid in {s.pid for s in stacks}] or polling
    facts = [f"{s.label or s.role} waits in {s.frames[0]}" for s in stacks]
    facts += [f"{name_of(p)} wakes {p.main.voluntary:.0f} times a second and sleeps again" for p in polling if p.main]
    facts += [f"last log line: {_last_line(view)}"] if at_jit else []
    who = rank_names(name_of(p) for p in waiting) if waiting else "the server"
    return Verdict(
        "JIT_STALE_LOCK",
        f"a dead process left a compile lock, and {who} will wait for it for ever: {stale[0].path}",
        DIRECT if stacks else MEASURED,
        phase=view.phase,
        rank=waiting[0].rank if len(waiting) == 1 else None,
        evidence=[*facts, *(_age(view, f) for f in stale[:3]), "no compiler runs"],
        next_steps=[f"remove {stale[0].path}; nobody here has it open"],
    )


@signature(Step.LOCKS)
def lock_wait(view: View) -> Verdict | None:
    """A process of the server waits for a lock of somebody who lives, here or on another host."""
    if view.healthy or view.progress or view.compilers:
        return None
    pids = {p.pid: p for p in view.evidence.processes}
    waits = [w for w in view.evidence.locks if w.waiter in pids]
    if waits:
        first = waits[0]
        holder = name_of(pids[first.holder]) if first.holder in pids else f"process {first.holder}"
        holder = holder if first.holder else "nobody on this host"
        where = f" on {first.fstype}" if first.fstype else ""
        return _waits_for(
            view, pids[first.waiter], holder, f"{first.path or f'inode {first.inode}'}{where}", DIRECT,
            [f"/proc/locks: {w.waiter} waits for {w.holder or 'nobody here'} on {w.path or w.inode}" for w in waits],
        )  # fmt: skip
    if view.within_patience:
        return None
    calls = [p for p in view.members if _in_flock(p)]
    stacks = [s for s in view.evidence.stacks if waits_for_lock(s) and s.pid in pids]
    if calls:
        facts = [f"{name_of(p)} sleeps in {p.main.wchan if p.main else ''}, /proc/locks shows no holder" for p in calls]
        return _waits_for(view, calls[0], "somebody who cannot be seen from here", _likely(view), MEASURED, facts)
    if stacks and not any(f.use == "compile" and _is_stale(view, f) for f in view.evidence.lock_files):
        process = pids[stacks[0].pid]
        file = next((f for f in view.evidence.lock_files if f.holder), None)
        holder = f"process {file.holder}" if file else "an unknown holder"
        facts = [f"{s.label or s.role} waits in {s.frames[0]}" for s in stacks]
        return _waits_for(view, process, holder, file.path if file else "a lock file", PATTERN, facts)
    return None


def _waits_for(view: View, process: ProcessFacts, holder: str, what: str, sure: str, facts: list[str]) -> Verdict:
    return Verdict(
        "LOCK_WAIT",
        f"{name_of(process)} (process {process.pid}) waits for a lock that {holder} holds ({what})",
        sure,
        WAIT if view.within_patience else STALL,
        view.phase,
        process.rank,
        evidence=facts,
        next_steps=[
            f"look at {holder}; a lock on a network file system may have a holder on another host",
            "keep compile caches on a local disk",
        ],
    )


def _likely(view: View) -> str:
    """The lock that is waited for, where there is only one to choose from."""
    files = [f for f in view.evidence.lock_files if f.use == ("compile" if view.phase in _COMPILE_PHASES else "hub")]
    if len(files) != 1:
        return "path unknown"
    where = f" on {files[0].fstype}" if files[0].fstype else ""
    return f"probably {files[0].path}{where}, the only lock file in its caches"


def _polls(process: ProcessFacts) -> bool:
    main = process.main
    return main is not None and "nanosleep" in main.wchan and POLLS[0] <= main.voluntary <= POLLS[1]


def _in_flock(process: ProcessFacts) -> bool:
    main = process.main
    if main is None or main.cpu > 0.05:
        return False
    return bool(_FLOCK_WCHAN.search(main.wchan)) or main.syscall.split()[:1] == [_FLOCK_CALL]


def _is_stale(view: View, file: LockFile) -> bool:
    """Nobody here holds it, and it was there before the server; or before the standstill, if whoever builds would be
    seen with it open: of a compile cache, on a disk of this host."""
    told = file.use == "compile" and not _SHARED.search(file.fstype) and not view.within_patience
    since = min(view.evidence.uptime, view.silence[0]) if told else view.evidence.uptime
    return not (file.holder or file.locked) and file.age_seconds > since > 0


def _last_line(view: View) -> str:
    return view.evidence.log.tail[-1] if view.evidence.log.tail else ""


def _age(view: View, file: LockFile) -> str:
    than = "the server" if file.age_seconds > view.evidence.uptime else "the standstill"
    where = f" (on {file.fstype})" if file.fstype else ""
    return f"{file.path}{where}: {file.age_seconds:.0f} s old, older than {than}, held by nobody"
