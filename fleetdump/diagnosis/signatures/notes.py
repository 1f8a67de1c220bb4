"""What does not explain a stall alone but misleads whoever looks: a log that goes elsewhere, blind tools."""

from __future__ import annotations

from fleetdump.diagnosis.registry import Step, signature
from fleetdump.diagnosis.types import HIGH, WAIT, Verdict
from fleetdump.diagnosis.view import View


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
