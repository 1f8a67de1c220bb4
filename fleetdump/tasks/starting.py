"""How the servers of a host come up: watched, asked for their settings, self-checked; diagnosed where they do not."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from fleetdump.agent.evidence_types import Evidence
from fleetdump.agent.protocol import from_json
from fleetdump.agent.servermessages import (
    EvidenceArgs,
    LaunchResult,
    SettingsArgs,
    SettingsResult,
    WatchArgs,
    WatchResult,
)
from fleetdump.diagnosis import diagnose
from fleetdump.errors import FleetdumpError, HostError
from fleetdump.fleet import Host
from fleetdump.tasks.deployplan import WITHDRAWN, DeployPlan, ServerReport
from fleetdump.tasks.evidence import take_evidence
from fleetdump.tasks.selfcheck import check_server
from fleetdump.tasks.steps import Steps
from fleetdump.tasks.turns import in_turns

SETTINGS_DEADLINE = 90.0
WATCH_LIMIT = 6 * 3600.0
"""A start that still makes progress is waited for this long: the biggest checkpoints take over an hour."""


def bring_up(
    host: Host, plan: DeployPlan, launches: Sequence[Callable[[], LaunchResult]], steps: Steps
) -> list[ServerReport]:
    """Launch the host's servers, ``parallel_starts`` at a time, and follow each until it is ready and proven, or is
    not; a server that does not come up is in its report. Raises what ``launches`` and ``Host.call`` raise."""
    limit = host.config.parallel_starts
    wait = f"{limit} of {len(launches)} servers start at a time (parallel_starts); the others wait for their turn"

    def follow(launched: LaunchResult) -> tuple[LaunchResult, ServerReport]:
        return launched, _watch(host, plan, launched, steps)

    followed = in_turns(limit, launches, follow, lambda: steps.tell("wait", wait))
    reports = [report for _, report in followed]
    unproven = [report for result, report in followed if not _is_proven(plan, result)]
    for report in unproven:
        _check_settings(host, report, steps)
    if plan.selfcheck and plan.patch is not None and plan.patch.captures and unproven:
        with ThreadPoolExecutor(max_workers=len(unproven)) as pool:
            list(pool.map(lambda report: _self_check(host, report, steps), unproven))
    return reports


def _is_proven(plan: DeployPlan, launched: LaunchResult) -> bool:
    """Whether this very launch has passed before all that a deploy asks of it: it is left alone."""
    state = launched.state
    captures = plan.patch is not None and plan.patch.captures and plan.selfcheck
    ready = launched.reused and state.state == "ready" and not state.detail
    return ready and (state.selfcheck == "passed" or not captures)


def _watch(host: Host, plan: DeployPlan, launched: LaunchResult, steps: Steps) -> ServerReport:
    name = launched.state.name
    args = WatchArgs(
        server=name,
        patience=host.config.patience,
        ranks=host.config.server(name).ranks,
        mark=plan.patch.mark if plan.patch else "",
        expect_class=launched.architecture,
        until=WATCH_LIMIT,
        healthy=plan.starts.of_others(host.config.name),
    )
    unchanged = launched.reused and launched.state.state == "ready"
    on_event = None if unchanged else steps.emit
    result = host.call(args, WatchResult, verb="watch", on_event=on_event, deadline=WATCH_LIMIT + 300)
    if not unchanged:
        plan.starts.note_start(host.config.name, result)
    report = ServerReport(
        server=name,
        outcome=result.outcome,
        phase=result.phase,
        seconds=result.seconds,
        lines=result.lines,
        idle_seconds=result.idle_seconds,
        phase_seconds=result.phase_seconds,
        healthy=result.healthy,
        reused=unchanged,
        log=launched.log,
        log_tail=result.log_tail,
        detail=result.detail,
        evidence_dir=result.evidence_dir,
    )
    if result.outcome in WITHDRAWN:
        steps.tell("watch", f"{name}: {result.detail}", name)
    elif result.outcome != "ready":
        steps.tell("diagnose", f"{name}: {result.outcome}; diagnosing", name)
        _diagnose(host, report, result)
    return report


def _diagnose(host: Host, report: ServerReport, result: WatchResult) -> None:
    """Verdicts from the evidence that the watch took, or, for a dead server, from what can still be read. Where that
    names no cause and the stacks are missing, it is taken once more with a py-spy of ours."""
    if result.evidence is not None:
        report.verdicts = diagnose(from_json(Evidence, result.evidence))
        if report.verdicts[0].code != "UNKNOWN" or not _lacks_stacks(result.evidence):
            return
    try:
        taken = take_evidence(host, EvidenceArgs(server=report.server, patience=host.config.patience))
    except FleetdumpError as error:
        report.detail = f"{report.detail}; no evidence: {error}".lstrip("; ")
        return
    report.verdicts, report.evidence_dir = diagnose(from_json(Evidence, taken.evidence)), taken.evidence_dir


def _lacks_stacks(evidence: dict[str, Any]) -> bool:
    return any(probe["name"] == "py-spy" and not probe["ok"] for probe in evidence["probes"])


def _check_settings(host: Host, report: ServerReport, steps: Steps) -> None:
    """Did the flags that the patch needs take effect? Asked of the server before the first sample."""
    if report.outcome != "ready":
        return
    try:
        result = host.call(SettingsArgs(report.server), SettingsResult, verb="settings", deadline=SETTINGS_DEADLINE)
        faults = result.faults
    except HostError as error:
        faults = [str(error)]
    if faults:
        report.outcome, report.detail = "wrong_settings", "; ".join(faults)
    elif result.checked:
        text = f"{report.server}: /server_info and the log agree with all that the patch needs"
        steps.tell("settings", text, report.server)


def _self_check(host: Host, report: ServerReport, steps: Steps) -> None:
    if report.outcome != "ready":
        return
    report.selfcheck = check_server(host, report.server, steps.emit)
    if not report.selfcheck.passed:
        report.outcome = "selfcheck_failed"
        report.detail = report.selfcheck.detail
