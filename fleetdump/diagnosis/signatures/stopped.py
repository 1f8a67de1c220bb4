"""Processes that cannot run: stopped, traced, or asleep in the driver."""

from __future__ import annotations

import re

from fleetdump.agent.evidence_process import ProcessFacts
from fleetdump.agent.times import utc
from fleetdump.diagnosis.members import is_dumping, is_frozen
from fleetdump.diagnosis.registry import Step, signature
from fleetdump.diagnosis.types import DIRECT, MEASURED, OK, Verdict
from fleetdump.diagnosis.view import View
from fleetdump.diagnosis.words import is_are, listed, name_of

_DRIVER = re.compile(r"nvidia|uvm_|nv_|rm_ioctl")
_REMOTE = re.compile(
    r"\bnfs|rpc_wait|fuse_|request_wait_answer|lustre|ptlrpc|\bll_|\bcl_(?:sync_)?io|\bosc_|\bceph|gpfs|\bmmfs|\bcifs|\bsmb|"
    r"9p_|p9_|\bafs_|beegfs|fhgfs|orangefs|\bwekafs|\bocfs2|\bgfs2"
)
_REMOTE_TYPE = re.compile(r"nfs|lustre|fuse|ceph|gpfs|cifs|smb|9p|virtiofs|beegfs|wekafs|afs")


_REMOTE_TROUBLE = re.compile(
    r"not responding|LustreError|ceph.*(?:hung|timeout|lost)|CIFS.*(?:timed? ?out|not respond)"
)


@signature(Step.ENDED)
def not_running(view: View) -> Verdict | None:
    """Nothing of it lives, and ``fleetdump stop`` ended it."""
    stopped_at = view.evidence.target.stopped_at
    lives = view.evidence.launcher_alive or any(p.state not in "ZX" for p in view.evidence.processes)
    if not stopped_at or lives:
        return None
    at = utc(stopped_at)
    return Verdict(
        "NOT_RUNNING",
        "stopped by fleetdump stop" + (f" at {at}" if at else ""),
        DIRECT,
        OK,
        evidence=["the server's record says so, and no process of it lives"],
        next_steps=["fleetdump deploy starts it again"],
    )


@signature(Step.STOPPED)
def stopped_process(view: View) -> Verdict | None:
    """State T: somebody sent SIGSTOP, or a terminal did; or its control group was frozen."""
    stopped = [p for p in view.members if p.state == "T"]
    if not stopped:
        return _frozen(view)
    first = stopped[0]
    names = listed(name_of(p) for p in stopped)
    return Verdict(
        "STOPPED_PROCESS",
        f"{names} {is_are(stopped)} stopped (state T) and {'go' if len(stopped) > 1 else 'goes'} on after a SIGCONT",
        DIRECT,
        phase=view.phase_of(first),
        rank=first.rank,
        evidence=[f"{name_of(p)}: pid {p.pid}, state {p.state}" for p in stopped],
        next_steps=[
            f"kill -CONT {' '.join(str(p.pid) for p in stopped)}",
            "find out who stopped it (SIGSTOP, SIGTTOU)",
        ],
    )


def _frozen(view: View) -> Verdict | None:
    """Processes whose control group somebody froze."""
    frozen = [p for p in view.members if is_frozen(p)]
    if not frozen:
        return None
    first, group = frozen[0], view.evidence.cgroup.path
    where = [f"their control group is {group}"] if group else []
    return Verdict(
        "STOPPED_PROCESS",
        f"{listed(map(name_of, frozen))} {is_are(frozen)} frozen with the container, and will go on when it is thawed",
        DIRECT,
        phase=view.phase_of(first),
        rank=first.rank if len(frozen) == 1 else None,
        evidence=[f"{name_of(p)}: pid {p.pid}, in {_where(p)[0]}, no CPU" for p in frozen] + where,
        next_steps=[
            "docker unpause (podman unpause, ctr task resume) the container; or write 0 to cgroup.freeze of its group",
            "find out who froze it (docker events, a checkpoint or a backup that did not end)",
        ],
    )


@signature(Step.STOPPED)
def tracer_attached(view: View) -> Verdict | None:
    """Another tracer holds a process; state t when it also stopped it."""
    traced = [p for p in view.members if p.tracer_pid or p.state == "t"]
    if not traced:
        return None
    first = traced[0]
    held = [p for p in traced if p.state == "t"]
    if view.healthy and not held:
        return None  # a note beside its health
    return Verdict(
        "TRACER_ATTACHED",
        f"{listed(name_of(p) for p in traced)} {is_are(traced)} traced by process {first.tracer_pid or '?'}"
        + (", which has stopped it" if held else ""),
        DIRECT if held else MEASURED,
        phase=view.phase_of(first),
        rank=first.rank,
        evidence=[f"{name_of(p)}: pid {p.pid}, state {p.state}, TracerPid {p.tracer_pid}" for p in traced],
        next_steps=[f"end the tracer (process {first.tracer_pid}): a debugger, strace or py-spy that was left behind"],
    )


@signature(Step.HARDWARE)
def driver_sleep(view: View) -> Verdict | None:
    """State D in both samples inside the GPU driver."""
    asleep = [p for p in view.members if _asleep(p)]
    smi = view.probe("nvidia-smi")
    silent = bool(smi and not smi.ok and "no answer" in smi.detail)
    hung = [line for line in view.kernel_since_start if "blocked for more than" in line]
    held = [p for p in asleep if any(_DRIVER.search(frame) for frame in _where(p))]
    guessed = [p for p in asleep if not _REMOTE.search(" ".join(_where(p)))] if silent and not held else []
    if not held and not guessed and not (silent and hung):
        return None
    shown = held or guessed
    facts = [f"{name_of(p)}: state D in both samples, in {' < '.join(_where(p)[:5]) or 'the kernel'}" for p in shown]
    facts += [f"{name_of(p)}: SIGKILL is pending and does not end it" for p in shown if p.kill_pending]
    facts += ["nvidia-smi does not return either"] if silent else []
    who = name_of(shown[0]) if shown else "whoever calls it"
    return Verdict(
        "DRIVER_D_STATE",
        f"{who} sleeps inside the GPU driver and cannot be killed",
        DIRECT if held else MEASURED,
        phase=view.phase_of(shown[0]) if shown else view.phase,
        rank=shown[0].rank if shown else None,
        evidence=[*facts, *hung[-3:]],
        next_steps=["reboot the host: no signal ends a process in state D"],
    )


@signature(Step.HOST)
def remote_file_system(view: View) -> Verdict | None:
    """A network file system does not answer: whoever touches it sleeps for ever."""
    asleep = [p for p in view.members if _asleep(p)]
    held = [p for p in asleep if any(_REMOTE.search(frame) for frame in _where(p))]
    lines = [line for line in view.kernel_since_start if _REMOTE_TROUBLE.search(line)]
    mounts = [d for d in view.evidence.disks if _REMOTE_TYPE.search(d.fstype)]
    # Below a network file system a page is waited for in the same function as below a local one.
    likely = [p for p in asleep if any("folio" in f or "page" in f for f in _where(p))] if mounts or lines else []
    shown = held or likely
    if not shown or view.progress:
        return None
    first = shown[0]
    return Verdict(
        "REMOTE_FS_HANG",
        f"{name_of(first)} waits for a network file system that does not answer",
        DIRECT if held else MEASURED,
        phase=view.phase_of(first),
        rank=first.rank,
        evidence=[
            *(f"{name_of(p)}: state D in both samples, in {' < '.join(_where(p)[:4])}" for p in shown),
            *(f"{d.path} ({d.use}) is {d.fstype}" for d in mounts),
            *lines[-2:],
        ],
        next_steps=["look at the file server and the mount; do not run df or ls there, they would hang too"],
    )


def _asleep(process: ProcessFacts) -> bool:
    return process.state == "D" and process.state_before == "D" and not is_dumping(process)


def _where(process: ProcessFacts) -> list[str]:
    """Kernel functions it sleeps in: its stack, or the one name that anybody may read."""
    return process.kernel_stack or ([process.main.wchan] if process.main and process.main.wchan else [])
