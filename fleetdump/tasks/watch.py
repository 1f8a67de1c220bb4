"""``fleetdump watch``: follow the servers of a host live, and compare hosts with each other."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from fleetdump.agent.protocol import HealthyProfile, MonitorArgs, MonitorResult, Vitals, from_json
from fleetdump.errors import ExitCode
from fleetdump.fleet import Host
from fleetdump.tasks._task import task
from fleetdump.tasks.servernames import require_known

MARGIN_SECONDS = 60.0
"""Of the call's deadline: the agent ends the watch itself."""
OUTLIER_FACTOR = 3.0
"""A host is unlike the others when it is slower than their median by this much."""
OUTLIER_HOSTS = 3

OnVitals = Callable[[Vitals], None]
OnEmpty = Callable[[], None]


@dataclass(frozen=True)
class WatchPlan:
    """Which servers (none: all of ours), how often to look, for how long; ``ready``: only until all are ready or have
    a fault."""

    servers: tuple[str, ...] = ()
    interval: float = 2.0
    seconds: float = 86400.0
    ready: bool = False


@task
def watch(host: Host, plan: WatchPlan, on_vitals: OnVitals, on_empty: OnEmpty = lambda: None) -> MonitorResult:
    """One call of the agent for the whole watch; ``on_vitals`` gets a server whenever something of it has changed,
    ``on_empty`` is called when the host has none of ours. Raises ``UsageError`` for a server that neither the host nor
    its inventory entry knows."""
    require_known(host, plan.servers)
    known: dict[str, dict[str, Any]] = {}

    def on_event(event: dict[str, Any]) -> None:
        if event.get("event") == "vitals":
            fields = known.setdefault(str(event["server"]), {})
            fields.update(event["changed"])
            on_vitals(from_json(Vitals, fields))
        elif event.get("event") == "empty":
            on_empty()

    args = MonitorArgs(list(plan.servers), host.config.patience, plan.seconds, plan.interval, plan.ready)
    deadline = plan.seconds + MARGIN_SECONDS
    return host.call(args, MonitorResult, verb="monitor", on_event=on_event, deadline=deadline)


def exit_code(result: MonitorResult) -> ExitCode:
    """4 for a stall, 1 for another fault or a server that is not there, 0 when all was well at the end."""
    codes = {fault.code for server in result.servers for fault in server.faults if not fault.note}
    if "stall" in codes:
        return ExitCode.STALL
    missing = any(server.state == "absent" for server in result.servers)
    return ExitCode.FAILED if codes or missing else ExitCode.OK


# --------------------------------------------------------------------------- hosts against each other
@dataclass(frozen=True)
class Outlier:
    """``name`` loads weights at ``rate``, the others at ``others`` (their median), in bytes a second."""

    name: str
    rate: float
    others: float


def slow_loaders(servers: Mapping[str, Vitals]) -> list[Outlier]:
    """Servers that load far more slowly than the others, the slowest first; nothing while fewer than three load.

    A rate of 0 counts: nothing arrives there. One that has just begun has no rate yet and is left out.
    """
    rates = {name: one.load_rate for name, one in servers.items() if one.phase == "weights" and one.load_bytes > 0}
    found = []
    for name, rate in rates.items():
        others = statistics.median([other for key, other in rates.items() if key != name] or [0.0])
        if len(rates) >= OUTLIER_HOSTS and rate * OUTLIER_FACTOR < others:
            found.append(Outlier(name, rate, others))
    return sorted(found, key=lambda outlier: outlier.rate)


def merged_profile(profiles: Iterable[HealthyProfile]) -> HealthyProfile | None:
    """What healthy starts of one kind took on all hosts together; None without any. Means are weighed by starts."""
    known = list(profiles)
    if not known:
        return None
    starts = sum(profile.starts for profile in known)
    phases = sorted({phase for profile in known for phase in profile.phase_seconds})

    def mean(value: Callable[[HealthyProfile], float]) -> float:
        return round(sum(value(profile) * profile.starts for profile in known) / starts, 2)

    def mean_of_phase(phase: str) -> float:
        return mean(lambda profile: profile.phase_seconds.get(phase, 0.0))

    return HealthyProfile(
        key=known[0].key,
        starts=starts,
        lines_min=min(profile.lines_min for profile in known),
        lines_max=max(profile.lines_max for profile in known),
        seconds=mean(lambda profile: profile.seconds),
        phase_seconds={phase: mean_of_phase(phase) for phase in phases},
        weights_gb=mean(lambda profile: profile.weights_gb),
    )


def usual(server: Vitals, servers: Iterable[Vitals]) -> HealthyProfile | None:
    """What healthy starts of ``server``'s kind took, on whatever host of ``servers`` one was seen."""
    if server.healthy is None:
        return None
    alike = [one.healthy for one in servers if one.healthy is not None and one.healthy.key == server.healthy.key]
    return merged_profile(alike)
