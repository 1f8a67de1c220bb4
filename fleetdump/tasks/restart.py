"""``fleetdump restart``: stop a server and launch it again as it was, then see that it came up as before."""

from __future__ import annotations

import contextlib
import functools
from dataclasses import dataclass, field
from typing import Any

from fleetdump.agent.evidence_types import Evidence
from fleetdump.agent.hostmessages import StatusArgs, StatusResult
from fleetdump.agent.protocol import from_json
from fleetdump.agent.servermessages import (
    RestartArgs,
    RestartResult,
    RunRestart,
    SettingsArgs,
    SettingsResult,
    WatchArgs,
    WatchResult,
)
from fleetdump.agent.specs import CaptureSpec, ServerSpec
from fleetdump.diagnosis import Verdict, diagnose
from fleetdump.errors import ExitCode, HostError, UsageError
from fleetdump.fleet import Host
from fleetdump.inventory import resolve_secrets
from fleetdump.tasks._task import task
from fleetdump.tasks.selfcheck import check_server
from fleetdump.tasks.starting import SETTINGS_DEADLINE, WATCH_LIMIT
from fleetdump.tasks.steps import Event
from fleetdump.tasks.turns import in_turns

STOP_GRACE = 30.0
RESTART_DEADLINE = 2 * STOP_GRACE + 120.0


@dataclass
class Restarted:
    """How one server came up again. ``outcome`` as in ``WatchResult``, or ``wrong_settings``, ``selfcheck_failed``, or
    ``failed`` when it was not launched (``detail`` says why, ``next_step`` what to do)."""

    server: str
    outcome: str
    detail: str = ""
    next_step: str = ""
    patch: str = ""
    phase: str = ""
    seconds: float = 0.0
    lines: int = 0
    log_tail: list[str] = field(default_factory=list)
    verdicts: list[Verdict] = field(default_factory=list)
    evidence_dir: str = ""
    launch_id: str = ""


def exit_code(servers: list[Restarted]) -> ExitCode:
    """4 when a stall was diagnosed, 1 when a server is not ready for another reason, or there was none."""
    outcomes = {server.outcome for server in servers}
    if "stall" in outcomes:
        return ExitCode.STALL
    return ExitCode.OK if outcomes == {"ready"} else ExitCode.FAILED


@task
def restart(host: Host, servers: list[str], selfcheck: bool, on_event: Event) -> list[Restarted]:
    """Restart the named servers (all of ours that were launched there when there are none), one after the other, and
    watch them come up side by side, ``parallel_starts`` at a time. What does not come up is in the result, not an
    exception. Raises ``UsageError`` for a name that neither the host nor its inventory entry knows."""
    status = host.call(StatusArgs(), StatusResult, verb="status")
    known = [server.name for server in status.servers]
    for name in sorted(set(servers) - set(known)):
        host.config.server(name)
    reports = {name: Restarted(name, "failed") for name in servers or known}
    launches = [functools.partial(_launch, host, report, on_event) for report in reports.values()]

    def see(again: RestartResult) -> None:
        _see(host, again, reports[again.launched.state.name], selfcheck, on_event)

    in_turns(host.config.parallel_starts, launches, see)
    return list(reports.values())


def restart_of_run(host: Host, server: str, why: RunRestart, selfcheck: bool, on_event: Event) -> Restarted:
    """Restart one server for the sake of a run, in place of the launch that ``why`` names and of no other. What does
    not come up is in the result; raises ``LockedError`` while another operator changes the host."""
    report = Restarted(server, "failed")
    launched = _launch(host, report, on_event, why)
    if launched is not None:
        _see(host, launched, report, selfcheck, on_event)
    return report


def _launch(host: Host, report: Restarted, on_event: Event, of_run: RunRestart | None = None) -> RestartResult | None:
    _step(on_event, report.server, "stopping it and launching it again as it was")
    args = RestartArgs(report.server, STOP_GRACE, *_of_inventory(host, report.server), of_run)
    try:
        result = host.call(args, RestartResult, verb="restart", deadline=RESTART_DEADLINE)
    except HostError as error:
        report.detail, report.next_step = str(error), error.next_step
        return None
    report.patch, report.launch_id = result.patch, result.launched.state.launch_id
    _step(on_event, report.server, f"launched (pid {result.launched.state.pid}) with {result.launched.held_by}")
    if result.launched.warning:
        _step(on_event, report.server, result.launched.warning)
    return result


def _of_inventory(host: Host, server: str) -> tuple[ServerSpec | None, CaptureSpec | None]:
    """The server's entry of the inventory with its secrets, and what its host captures; None where there is none."""
    spec: ServerSpec | None = None
    capture: CaptureSpec | None = None
    with contextlib.suppress(UsageError):  # a living server brings all of it along, and the agent says what it lacks
        spec = resolve_secrets(host.config.server(server))
        capture = host.config.capture.spec()
    return spec, capture


def _see(host: Host, again: RestartResult, report: Restarted, selfcheck: bool, on_event: Event) -> None:
    """Is it the server that it was: ready, with the mark of its patch, the class of its model, and its settings?"""
    args = WatchArgs(
        report.server,
        host.config.patience,
        ranks=again.ranks,
        mark=again.mark,
        expect_class=again.launched.architecture,
        until=WATCH_LIMIT,
    )
    result = host.call(args, WatchResult, verb="watch", on_event=on_event, deadline=WATCH_LIMIT + 300)
    report.outcome, report.detail, report.phase = result.outcome, result.detail, result.phase
    report.seconds, report.lines, report.log_tail = result.seconds, result.lines, result.log_tail
    if result.evidence is not None:
        report.verdicts = diagnose(from_json(Evidence, result.evidence))
        report.evidence_dir = result.evidence_dir
    if report.outcome == "ready":
        _prove(host, again, report, selfcheck, on_event)


def _prove(host: Host, again: RestartResult, report: Restarted, selfcheck: bool, on_event: Event) -> None:
    settings = host.call(SettingsArgs(report.server), SettingsResult, verb="settings", deadline=SETTINGS_DEADLINE)
    if settings.faults:
        report.outcome, report.detail = "wrong_settings", "; ".join(settings.faults)
    elif selfcheck and again.captures:
        check = check_server(host, report.server, on_event)
        if not check.passed:
            report.outcome, report.detail = "selfcheck_failed", check.detail


def _step(on_event: Event, server: str, text: str) -> None:
    event: dict[str, Any] = {"event": "step", "step": "restart", "server": server, "text": f"{server}: {text}"}
    on_event(event)
