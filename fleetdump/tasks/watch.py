"""``fleetdump watch``: follow the servers of a host live, and compare hosts with each other."""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import tenacity

from fleetdump.agent.protocol import ProtocolError, from_json
from fleetdump.agent.servermessages import HealthyProfile, MonitorArgs, MonitorResult, Vitals, merged_profile
from fleetdump.errors import ExitCode, HostError
from fleetdump.fleet import Host
from fleetdump.fleet.reasons import may_pass
from fleetdump.tasks._task import task
from fleetdump.tasks.fleetstarts import FleetStarts
from fleetdump.tasks.servernames import require_known

MARGIN_SECONDS = 60.0
"""Of the call's deadline: the agent ends the watch itself."""
OUTLIER_FACTOR = 3.0
"""A host is unlike the others when it is slower than their median by this much."""
OUTLIER_HOSTS = 3

LONGEST_PAUSE = 30.0
"""Seconds before a host whose link is lost is tried again; the first pauses are shorter."""

MOST = 1e24
"""Of anything that is counted of a server, bytes and seconds too."""

OnVitals = Callable[[Vitals], None]


@dataclass(frozen=True)
class Listener:
    """Who is told what a watch sees. ``vitals``: a server, whenever something of it has changed; ``empty``: the host
    has none of ours; ``lost``: its link is cut (why); it is tried again, and told of when it is back."""

    vitals: OnVitals
    empty: Callable[[], None] = lambda: None
    lost: Callable[[str], None] = lambda _: None


@dataclass(frozen=True)
class WatchPlan:
    """Which servers (none: all of ours), how often to look, for how long; ``ready``: only until all are ready or have
    a fault. ``starts``: what is known of healthy starts on other hosts."""

    servers: tuple[str, ...] = ()
    interval: float = 2.0
    seconds: float = 86400.0
    ready: bool = False
    starts: FleetStarts = field(default_factory=FleetStarts, compare=False)


@task
def watch(host: Host, plan: WatchPlan, tell: Listener) -> MonitorResult:
    """One call of the agent for the whole watch, and another one whenever the link to the host was cut meanwhile.

    Raises ``UsageError`` for a server that neither the host nor its inventory entry knows, ``UnreachableError`` when
    the host does not come back before the end, or lets us in no more."""
    require_known(host, plan.servers)
    end = time.monotonic() + plan.seconds
    ways: Iterator[Callable[[], AbstractContextManager[Host]]] = itertools.chain(
        [lambda: nullcontext(host)],  # whoever opened it closes it, also to give up
        itertools.repeat(host.again),
    )

    def attempt() -> MonitorResult:
        with next(ways)() as way:
            return _follow(way, replace(plan, seconds=max(1.0, end - time.monotonic())), tell)

    attempts = tenacity.Retrying(
        retry=tenacity.retry_if_exception(lambda error: not host.closed and may_pass(error)),
        stop=tenacity.stop_before_delay(plan.seconds),
        wait=tenacity.wait_random_exponential(multiplier=1, max=LONGEST_PAUSE),
        before_sleep=lambda state: tell.lost(str(state.outcome and state.outcome.exception())),
        reraise=True,
    )
    return attempts(attempt)


def _follow(host: Host, plan: WatchPlan, tell: Listener) -> MonitorResult:
    known: dict[str, dict[str, Any]] = {}

    def on_event(event: dict[str, Any]) -> None:
        if event.get("event") == "vitals":
            tell.vitals(_taken_in(known, event, host.config.name))
        elif event.get("event") == "empty":
            tell.empty()

    args = MonitorArgs(list(plan.servers), host.config.patience, plan.seconds, plan.interval, plan.ready)
    args.healthy = plan.starts.of_others(host.config.name)
    deadline = plan.seconds + MARGIN_SECONDS
    return host.call(args, MonitorResult, verb="monitor", on_event=on_event, deadline=deadline)


def _taken_in(known: dict[str, dict[str, Any]], event: dict[str, Any], host: str) -> Vitals:
    """The server of an event, with what is ``known`` of it from earlier ones. All hosts share one view: what it cannot
    show of one of them ends that one's watch (``HostError``)."""
    try:
        fields = known.setdefault(str(event["server"]), {})
        fields.update(event["changed"])
        vitals = from_json(Vitals, fields)
        wrong = [name for name, value in vars(vitals).items() if not _is_sane(value)]
        if wrong:
            raise ProtocolError(f"{wrong[0]} is {vars(vitals)[wrong[0]]}"[:100])
    except (LookupError, TypeError, ValueError) as error:
        raise HostError(
            "what the agent tells of a server cannot be",
            host,
            f"{type(error).__name__}: {error}",
            "look at that host: fleetdump check, fleetdump status",
        ) from error
    return vitals


def _is_sane(value: object) -> bool:
    """Whether a number may be one of a server's: it is finite, and of no absurd size."""
    return not isinstance(value, (int, float)) or abs(value) <= MOST


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


def load_rates(servers: Mapping[str, Vitals]) -> dict[str, float]:
    """At how many bytes a second each of ``servers`` that loads weights does so. A rate of 0 counts: nothing arrives
    there. One that has just begun has no rate yet and is left out."""
    return {name: one.load_rate for name, one in servers.items() if one.phase == "weights" and one.load_bytes > 0}


def slow_loaders(rates: Mapping[str, float]) -> list[Outlier]:
    """Servers that load far more slowly than the others, the slowest first; nothing while fewer than three load.
    ``rates`` are those of servers that load, in bytes a second."""
    found = []
    for name, rate in rates.items():
        others = statistics.median([other for key, other in rates.items() if key != name] or [0.0])
        if len(rates) >= OUTLIER_HOSTS and rate * OUTLIER_FACTOR < others:
            found.append(Outlier(name, rate, others))
    return sorted(found, key=lambda outlier: outlier.rate)


def usual(server: Vitals, servers: Iterable[Vitals]) -> HealthyProfile | None:
    """What healthy starts of ``server``'s kind took, on whatever host of ``servers`` one was seen."""
    if server.healthy is None:
        return None
    alike = [one.healthy for one in servers if one.healthy is not None and one.healthy.key == server.healthy.key]
    return merged_profile(alike)
