"""What does not explain a stall alone but misleads whoever looks: a log that goes elsewhere, blind tools."""

from __future__ import annotations

import re

from fleetdump.diagnosis.registry import Step, signature
from fleetdump.diagnosis.signatures.host import FULL_BYTES
from fleetdump.diagnosis.types import HIGH, LOW, STALL, WAIT, Verdict
from fleetdump.diagnosis.view import View

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
        HIGH,
        WAIT,
        view.phase,
        evidence=[f"fd 1 of the launcher is {launcher.stdout}; the watched log is {view.evidence.log.path}"],
        next_steps=["read that file instead; if it was rotated or deleted, deploy again to get a log"],
    )


@signature(Step.NOTES)
def disk_was_full(view: View) -> Verdict | None:
    """The log complains of a full disk, and the disks have space now: it may have been the cause, and may not."""
    line = view.trouble("disk_full")
    full = any(d.total_bytes and (d.free_bytes < FULL_BYTES or d.free_inodes == 0) for d in view.evidence.disks)
    if not line or full or view.healthy:
        return None
    return Verdict(
        "DISK_FULL",
        "the log complains of a full disk, which has space again",
        LOW,
        STALL if not view.evidence.launcher_alive else WAIT,
        view.phase,
        evidence=[f"log: {line}"],
        next_steps=["look at what filled the disk, then deploy again"],
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
        HIGH,
        WAIT,
        view.phase,
        evidence=[f"{p.name}: {p.detail}" for p in denied[:6]],
        next_steps=["run fleetdump on the host outside the container, as root, or add the SYS_PTRACE capability"],
    )
