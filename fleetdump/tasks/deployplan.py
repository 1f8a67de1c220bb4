"""What a deploy is to bring about, and what it brought: values alone."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from fleetdump.agent.runmessages import SelfCheckResult
from fleetdump.agent.servermessages import HealthyProfile
from fleetdump.agent.specs import PatchSpec
from fleetdump.diagnosis import Verdict
from fleetdump.errors import ExitCode
from fleetdump.tasks.fleetstarts import FleetStarts

OnStall = Literal["keep", "stop", "revert"]
Delivery = Literal["in-place", "import-hook"]
WITHDRAWN = ("stopped", "replaced")
"""Outcomes of a watch that another operator brought about: nothing to diagnose, and nothing of ours to stop."""


@dataclass(frozen=True)
class DeployPlan:
    """What is wanted: a patch (None: the engine as shipped), how it comes into the engine, and how to act on what is in
    the way. ``force`` takes files of the engine that somebody else edited as they are. ``fallbacks`` are tried one
    after the other on a host where a patch does not work (None: no patch). ``starts`` is what the hosts of this deploy
    know of healthy starts, and learns from them."""

    patch: PatchSpec | None
    replace: bool = False
    on_stall: OnStall = "keep"
    selfcheck: bool = True
    delivery: Delivery = "in-place"
    force: bool = False
    fallbacks: tuple[PatchSpec | None, ...] = ()
    starts: FleetStarts = field(default_factory=FleetStarts, compare=False)

    @property
    def patch_name(self) -> str:
        """``name@version``, or ``no patch``."""
        return name_of(self.patch)


def name_of(patch: PatchSpec | None) -> str:
    """``name@version``, or ``no patch``."""
    return f"{patch.name}@{patch.version}" if patch else "no patch"


@dataclass
class ServerReport:
    """How one server's start went. ``outcome`` is that of ``WatchResult``, or ``wrong_settings`` (flags that the patch
    needs did not take effect), or ``selfcheck_failed``."""

    server: str
    outcome: str
    phase: str = ""
    seconds: float = 0.0
    lines: int = 0
    idle_seconds: float = 0.0
    phase_seconds: dict[str, float] = field(default_factory=dict)
    healthy: HealthyProfile | None = None
    reused: bool = False
    log: str = ""
    log_tail: list[str] = field(default_factory=list)
    detail: str = ""
    verdicts: list[Verdict] = field(default_factory=list)
    evidence_dir: str = ""
    selfcheck: SelfCheckResult | None = None


@dataclass
class Attempt:
    """A patch that did not work on a host, and why; ``evidence_dirs`` are on the host."""

    patch: str
    why: str
    evidence_dirs: list[str] = field(default_factory=list)


@dataclass
class DeployReport:
    """What one host's deploy did, and how each server came up. ``attempts`` are patches that were given up before."""

    patch: str = ""
    patch_changed: bool = False
    patch_verified: bool = True
    engine: str = ""
    stopped: list[str] = field(default_factory=list)
    servers: list[ServerReport] = field(default_factory=list)
    reverted: bool = False
    attempts: list[Attempt] = field(default_factory=list)

    def exit_code(self) -> ExitCode:
        """4 when a stall was diagnosed, 1 when a server is not ready for another reason, else 0."""
        outcomes = {report.outcome for report in self.servers}
        if "stall" in outcomes:
            return ExitCode.STALL
        return ExitCode.OK if outcomes <= {"ready"} else ExitCode.FAILED
