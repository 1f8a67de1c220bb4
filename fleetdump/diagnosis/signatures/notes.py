"""What does not explain a stall alone but misleads whoever looks: a log that goes elsewhere, blind tools."""

from __future__ import annotations

import re

from fleetdump.diagnosis.registry import Step, signature
from fleetdump.diagnosis.signatures.host import full_disks
from fleetdump.diagnosis.types import DIRECT, LOG_ONLY, MEASURED, STALL, WAIT, Verdict
from fleetdump.diagnosis.view import View
from fleetdump.diagnosis.words import is_are, listed, name_of

_DENIED = re.compile(r"ptrace|EPERM|[Pp]ermission denied|[Nn]ot permitted|yama", re.IGNORECASE)


@signature(Step.NOTES)
def log_elsewhere(view: View) -> Verdict | None:
    """The launcher's standard output is not the file that is watched."""
    launcher = view.launcher
    if launcher is None or launcher.writes_log is not False:
        return None
    return Verdict(
        "LOG_ELSEWHERE",
        f"the server writes to {launcher.stdout}, not to {view.evidence.log.path}",
        DIRECT,
        WAIT,
        view.phase,
        evidence=[f"fd 1 of the launcher is {launcher.stdout}; the watched log is {view.evidence.log.path}"],
        next_steps=["read that file instead; if it was rotated or deleted, deploy again to get a log"],
    )


@signature(Step.NOTES)
def watched_by_a_tracer(view: View) -> Verdict | None:
    """Somebody traces a healthy server: it goes on, more slowly, and stops if that tracer is stopped."""
    traced = [p for p in view.members if p.tracer_pid]
    if not traced or not view.healthy or any(p.state == "t" for p in traced):
        return None
    tracers = listed(map(str, sorted({p.tracer_pid for p in traced})))
    return Verdict(
        "TRACER_ATTACHED",
        f"{listed(name_of(p) for p in traced)} {is_are(traced)} traced by process {tracers}; the server answers",
        DIRECT,
        WAIT,
        view.phase,
        traced[0].rank,
        evidence=[f"{name_of(p)}: pid {p.pid}, state {p.state}, TracerPid {p.tracer_pid}" for p in traced],
        next_steps=[f"end the tracer (process {tracers}) when it has been forgotten"],
    )


@signature(Step.NOTES)
def model_fallback(view: View) -> Verdict | None:
    """The model's own file failed to import, and SGLang went on with another implementation without saying so again."""
    replaced = view.evidence.log.fallbacks
    if not replaced:
        return None
    return Verdict(
        "MODEL_FALLBACK",
        f"SGLang runs a generic model in place of {replaced[0].partition(':')[0]}, whose own file did not import",
        LOG_ONLY,
        WAIT,
        view.phase,
        evidence=[f"log: {text}" for text in replaced[:3]],
        next_steps=["fix the import named above (a patch that imports a missing module does this), then deploy again"],
    )


@signature(Step.NOTES)
def disk_full_beside(view: View) -> Verdict | None:
    """A healthy server whose disk is full: its log may say nothing new."""
    full = full_disks(view)
    if not full or not view.healthy:
        return None
    where = ", ".join(sorted({d.path for d in full}))
    return Verdict(
        "DISK_FULL",
        f"no space left on {where}: the server answers, what it writes there is lost",
        DIRECT,
        WAIT,
        view.phase,
        evidence=[f"{d.path} ({d.use}): {d.free_bytes} bytes and {d.free_inodes} inodes free" for d in full],
        next_steps=["free space there"],
    )


@signature(Step.NOTES)
def disk_was_full(view: View) -> Verdict | None:
    """The log complains of a full disk, and the disks have space now: it may have been the cause, and may not."""
    line = view.trouble("disk_full")
    if not line or full_disks(view) or view.healthy or line == view.trouble("shm_failed"):
        return None
    return Verdict(
        "DISK_FULL",
        "the log complains of a full disk, which has space again",
        LOG_ONLY,
        STALL if not view.evidence.launcher_alive else WAIT,
        view.phase,
        evidence=[f"log: {line}"],
        next_steps=["look at what filled the disk, then deploy again"],
    )


@signature(Step.NOTES)
def starved_of_cpu(view: View) -> Verdict | None:
    """Its control group is throttled most of the time, or many more tasks want a core than there are cores."""
    if not view.cpu_short:
        return None
    return Verdict(
        "CPU_STARVED",
        "its threads wait for CPU time, so everything takes longer than it should",
        MEASURED,
        WAIT,
        view.phase,
        evidence=view.cpu_short,
        next_steps=["give the container more CPU, or set OMP_NUM_THREADS to cores divided by ranks"],
    )


@signature(Step.NOTES)
def blind(view: View) -> Verdict | None:
    """Stage 2 was refused: the verdict rests on /proc alone."""
    refused = [p for p in view.evidence.probes if not p.ok and p.name.startswith(("py-spy", "strace"))]
    denied = [p for p in refused if _DENIED.search(p.detail)]
    if not denied or view.evidence.stacks or view.evidence.traces:
        return None
    return Verdict(
        "DIAG_BLIND",
        "ptrace is refused here: no stack and no system calls, so the verdict rests on /proc alone",
        DIRECT,
        WAIT,
        view.phase,
        evidence=[f"{p.name}: {p.detail}" for p in denied[:6]],
        next_steps=["run fleetdump on the host outside the container, as root, or add the SYS_PTRACE capability"],
    )
