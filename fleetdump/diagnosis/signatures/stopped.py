"""Processes that cannot run: stopped, traced, or asleep in the driver."""

from __future__ import annotations

import re

from fleetdump.agent.evidence_types import ProcessFacts
from fleetdump.diagnosis.registry import Step, signature
from fleetdump.diagnosis.types import HIGH, MEDIUM, Verdict
from fleetdump.diagnosis.view import View

_DRIVER = re.compile(r"nvidia|uvm_|nv_|rm_ioctl")
_XID = re.compile(r"Xid.*?: (?P<number>\d+)")


@signature(Step.STOPPED)
def stopped_process(view: View) -> Verdict | None:
    """State T: somebody sent SIGSTOP, or a terminal did."""
    stopped = [p for p in view.members if p.state == "T"]
    if not stopped:
        return None
    first = stopped[0]
    names = ", ".join(_name(p) for p in stopped)
    return Verdict(
        "STOPPED_PROCESS",
        f"{names} is stopped (state T): it runs on when it gets SIGCONT",
        HIGH,
        phase=view.phase_of(first),
        rank=first.rank,
        evidence=[f"{_name(p)}: pid {p.pid}, state {p.state}" for p in stopped],
        next_steps=[
            f"kill -CONT {' '.join(str(p.pid) for p in stopped)}",
            "find out who stopped it (SIGSTOP, SIGTTOU)",
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
    return Verdict(
        "TRACER_ATTACHED",
        f"{', '.join(_name(p) for p in traced)} is traced by process {first.tracer_pid}",
        HIGH if held else MEDIUM,
        phase=view.phase_of(first),
        rank=first.rank,
        evidence=[f"{_name(p)}: pid {p.pid}, state {p.state}, TracerPid {p.tracer_pid}" for p in traced],
        next_steps=[f"end the tracer (process {first.tracer_pid}): a debugger, strace or py-spy that was left behind"],
    )


@signature(Step.HARDWARE)
def driver_sleep(view: View) -> Verdict | None:
    """State D in both samples with the GPU driver on the kernel stack."""
    asleep = [p for p in view.members if p.state == "D" and p.state_before == "D"]
    held = [p for p in asleep if any(_DRIVER.search(frame) for frame in p.kernel_stack)]
    if not held:
        return None
    first = held[0]
    return Verdict(
        "DRIVER_D_STATE",
        f"{_name(first)} sleeps inside the GPU driver and cannot be killed",
        HIGH,
        phase=view.phase_of(first),
        rank=first.rank,
        evidence=[f"{_name(p)}: state D twice, kernel stack {' < '.join(p.kernel_stack[:5])}" for p in held],
        next_steps=["reboot the host: no signal ends a process in state D"],
    )


@signature(Step.HARDWARE)
def xid(view: View) -> Verdict | None:
    """The driver reported a GPU error, and the server is not healthy."""
    lines = [line for line in view.evidence.kernel_log if "Xid" in line]
    if not lines or view.healthy:
        return None
    numbers = sorted({match["number"] for line in lines if (match := _XID.search(line))}, key=int)
    return Verdict(
        "XID",
        f"the GPU driver reported Xid {', '.join(numbers) or '(unreadable)'}",
        HIGH if "79" in numbers else MEDIUM,
        phase=view.phase,
        evidence=lines[-5:],
        next_steps=["drain the host; look the number up in NVIDIA's Xid catalogue (79: fallen off the bus, reboot)"],
    )


def _name(process: ProcessFacts) -> str:
    return process.label or process.role
