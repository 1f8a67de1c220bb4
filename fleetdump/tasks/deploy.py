"""``fleetdump deploy``: patch, launch, watch, self-check; on a stall evidence, verdict, and what the user chose.

What to do is a value (``DeployPlan``) made by the command line; what happened is a value too (``DeployReport``).
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from fleetdump.agent.evidence_types import Evidence
from fleetdump.agent.protocol import (
    EvidenceArgs,
    HealthyProfile,
    LaunchArgs,
    LaunchResult,
    PatchArgs,
    PatchResult,
    PatchSpec,
    ProbeResult,
    RevertArgs,
    RevertResult,
    SelfCheckResult,
    ServerSpec,
    SettingsArgs,
    SettingsResult,
    StatusArgs,
    StatusResult,
    StopArgs,
    StopResult,
    WatchArgs,
    WatchResult,
    from_json,
    interpreters,
    models_of,
)
from fleetdump.diagnosis import Verdict, diagnose
from fleetdump.errors import ExitCode, FleetdumpError, HostError
from fleetdump.fleet import Host
from fleetdump.inventory import resolve_secrets
from fleetdump.tasks._task import task
from fleetdump.tasks.check import check
from fleetdump.tasks.evidence import take_evidence
from fleetdump.tasks.selfcheck import check_server

OnStall = Literal["keep", "stop", "revert"]
Delivery = Literal["in-place", "import-hook"]
Event = Callable[[dict[str, Any]], None]
PATCH_DEADLINE = 120.0
LAUNCH_DEADLINE = 120.0
STOP_GRACE = 30.0
SETTINGS_DEADLINE = 90.0
TOLD = ("arguments", "shared")
"""Checks whose warnings ``deploy`` tells; the others are for ``check``."""
WITHDRAWN = ("stopped", "replaced")
"""Outcomes of a watch that another operator brought about: nothing to diagnose, and nothing of ours to stop."""
WATCH_LIMIT = 6 * 3600.0
"""A start that still makes progress is waited for this long: the biggest checkpoints take over an hour."""


@dataclass(frozen=True)
class DeployPlan:
    """What is wanted: a patch (None: the engine as shipped), how it comes into the engine, and how to act on what is in
    the way. ``force`` takes files of the engine that somebody else edited as they are."""

    patch: PatchSpec | None
    replace: bool = False
    on_stall: OnStall = "keep"
    selfcheck: bool = True
    delivery: Delivery = "in-place"
    force: bool = False


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
class DeployReport:
    """What one host's deploy did, and how each server came up."""

    patch: str = ""
    patch_changed: bool = False
    patch_verified: bool = True
    engine: str = ""
    stopped: list[str] = field(default_factory=list)
    servers: list[ServerReport] = field(default_factory=list)
    reverted: bool = False

    def exit_code(self) -> ExitCode:
        """4 when a stall was diagnosed, 1 when a server is not ready for another reason, else 0."""
        outcomes = {report.outcome for report in self.servers}
        if "stall" in outcomes:
            return ExitCode.STALL
        return ExitCode.OK if outcomes <= {"ready"} else ExitCode.FAILED


@task
def deploy(host: Host, plan: DeployPlan, on_event: Event) -> DeployReport:
    """Bring every server of the host up as planned; a server that does not come up is in the report, not an exception.

    Raises before anything is touched: ``UsageError`` when the patch captures and the inventory does not say what,
    ``HostError`` (code ``conflict``) when a server of ours runs in another way and ``plan.replace`` is False,
    ``HostError`` (code ``blocked``) for what ``check`` finds (missing engine, unknown patch state, busy port, no disk).
    A launch that is refused later undoes what came before it. Also what ``Host.call`` raises.
    """
    if plan.patch is not None and plan.patch.captures:
        host.config.capture.spec()
    probe = check(host, plan.patch, delivery=plan.delivery)
    _refuse_blockers(host, probe, plan.force)
    _tell_warnings(probe, on_event)
    report = DeployReport(engine=probe.engine)
    if plan.replace:
        report.stopped = stop_servers(host, on_event).stopped
    else:
        _refuse_running(host, plan)
    _put_patch(host, plan, report, on_event)
    launched = _launch_all(host, plan, report, on_event)
    with ThreadPoolExecutor(max_workers=len(launched)) as pool:
        watches = [pool.submit(_watch, host, plan, result, on_event) for result in launched]
        report.servers = [watch.result() for watch in watches]
    for server in report.servers:
        _check_settings(host, server, on_event)
    if plan.selfcheck and plan.patch is not None and plan.patch.captures:
        with ThreadPoolExecutor(max_workers=len(launched)) as pool:
            list(pool.map(lambda server: _self_check(host, server, on_event), report.servers))
    _act_on_failure(host, plan, report, on_event)
    return report


def stop_servers(host: Host, on_event: Event, servers: list[str] | None = None) -> StopResult:
    """Stop our servers of the host (all by default)."""
    on_event({"event": "step", "step": "stop", "text": "stopping our servers"})
    args = StopArgs(servers=servers or [], grace=STOP_GRACE)
    return host.call(args, StopResult, verb="stop", deadline=STOP_GRACE * 2 + 30)


def revert_patch(host: Host, on_event: Event, force: bool = False) -> list[RevertResult]:
    """Restore every engine of the host's servers, byte for byte; with ``force`` files that were edited since too."""
    results = []
    for engine in interpreters(host.config.servers):
        args = RevertArgs(python=engine.python, env=engine.env, force=force)
        result = host.call(args, RevertResult, verb="revert", deadline=PATCH_DEADLINE)
        if result.changed:
            on_event({"event": "step", "step": "revert", "text": f"reverted the patch of {engine.python}"})
        results.append(result)
    return results


def _refuse_blockers(host: Host, probe: ProbeResult, force: bool) -> None:
    """A blocked host is left alone. With ``force`` the patch verb itself judges the files, before it changes any."""
    blockers = [found for found in probe.findings if found.level == "blocker" and not (force and found.key == "patch")]
    if blockers:
        first = blockers[0]
        more = f" (and {len(blockers) - 1} more: fleetdump check lists them)" if len(blockers) > 1 else ""
        raise HostError(first.text + more, host.config.name, next_step=first.fix, code="blocked")


def _tell_warnings(probe: ProbeResult, on_event: Event) -> None:
    """What does not stand in the way, but should be known before the engine changes."""
    for found in probe.findings:
        if found.level == "warning" and found.key in TOLD:
            text = f"{found.text} ({found.fix})" if found.fix else found.text
            on_event({"event": "step", "step": "check", "text": text})


def _refuse_unproven(plan: DeployPlan, result: PatchResult, host: Host) -> None:
    """Where no test has run the patch, the self-check decides; without it nobody would."""
    if result.verified or plan.selfcheck or plan.patch is None or not plan.patch.captures:
        return
    raise HostError(
        f"patch {plan.patch.name} {plan.patch.version} is not verified on {result.engine}",
        host.config.name,
        "no test has run it there: only the self-check can tell whether what it captures is right",
        "leave --no-selfcheck out",
        code="blocked",
    )


def _refuse_running(host: Host, plan: DeployPlan) -> None:
    """Without --replace a running server must already be as wanted: patching under it would leave a mixture."""
    wanted = plan.patch.sha256 if plan.patch else ""
    status = host.call(StatusArgs(), StatusResult, verb="status")
    names = {server.name for server in host.config.servers}
    for server in status.servers:
        alive = server.state in ("starting", "ready")
        other = server.patch != wanted or (wanted and server.delivery != plan.delivery)
        if alive and server.name in names and other:
            raise HostError(
                f"server {server.name} is running (pid {server.pid}) with another patch, or one delivered otherwise",
                host.config.name,
                "changing the engine under a running server would mix two versions",
                "add --replace to stop it and start it anew, or fleetdump stop first",
                code="conflict",
            )


def _put_patch(host: Host, plan: DeployPlan, report: DeployReport, on_event: Event) -> None:
    """The engine as the plan wants it: patched, or as shipped."""
    by_hook = plan.delivery == "import-hook"
    if plan.patch is None or by_hook:
        report.patch_changed = any(result.changed for result in revert_patch(host, on_event))
    if plan.patch is None:
        return
    report.patch = f"{plan.patch.name}@{plan.patch.version}"
    for engine in interpreters(host.config.servers):
        models = models_of(host.config.servers, engine)
        args = PatchArgs(engine.python, plan.patch, by_hook, engine.env, plan.force, plan.delivery, models)
        if not plan.selfcheck:
            _refuse_unproven(plan, host.call(replace(args, dry_run=True), PatchResult, verb="patch"), host)
        result = host.call(args, PatchResult, verb="patch", deadline=PATCH_DEADLINE)
        if not result.verified:
            text = f"{report.patch} is unverified on {result.engine}: no test has run it there, the self-check decides"
            on_event({"event": "step", "step": "patch", "text": text})
        if result.changed:
            on_event({"event": "step", "step": "patch", "text": f"patched with {report.patch}: {engine.python}"})
        for copy in result.kept:
            on_event(
                {"event": "step", "step": "patch", "text": f"the file that somebody else edited is kept as {copy}"}
            )
        report.patch_changed = report.patch_changed or result.changed
        report.patch_verified = report.patch_verified and result.verified


def _launch_all(host: Host, plan: DeployPlan, report: DeployReport, on_event: Event) -> list[LaunchResult]:
    """Launch every server, or none: when one is refused, what this deploy did before is undone."""
    launched: list[LaunchResult] = []
    try:
        for server in host.config.servers:
            launched.append(_launch(host, plan, server, on_event))  # noqa: PERF401 (what came so far is undone)
    except HostError:
        if started := [result.state.name for result in launched if not result.reused]:
            stop_servers(host, on_event, started)
        if plan.patch is not None and report.patch_changed:
            revert_patch(host, on_event)
        raise
    return launched


def _launch(host: Host, plan: DeployPlan, server: ServerSpec, on_event: Event) -> LaunchResult:
    captures = plan.patch is not None and plan.patch.captures
    args = LaunchArgs(
        server=resolve_secrets(server),
        patch=plan.patch,
        capture=host.config.capture.spec() if captures else None,
        replace=plan.replace,
        delivery=plan.delivery if plan.patch else "in-place",
        force=plan.force,
    )
    launched = host.call(args, LaunchResult, verb="launch", deadline=LAUNCH_DEADLINE)
    if not launched.reused:
        text = f"launched {server.name} (pid {launched.state.pid})"
        if launched.added_args:
            text += f" with {' '.join(launched.added_args)}, which the patch needs"
        on_event({"event": "step", "step": "launch", "server": server.name, "text": text})
    return launched


def _watch(host: Host, plan: DeployPlan, launched: LaunchResult, on_event: Event) -> ServerReport:
    name = launched.state.name
    spec = next(server for server in host.config.servers if server.name == name)
    args = WatchArgs(
        server=name,
        patience=host.config.patience,
        ranks=spec.ranks,
        mark=plan.patch.mark if plan.patch else "",
        expect_class=launched.architecture,
        until=WATCH_LIMIT,
    )
    unchanged = launched.reused and launched.state.state == "ready"
    result = host.call(
        args, WatchResult, verb="watch", on_event=None if unchanged else on_event, deadline=WATCH_LIMIT + 300
    )
    report = ServerReport(
        server=name,
        outcome=result.outcome,
        phase=result.phase,
        seconds=result.seconds,
        lines=result.lines,
        idle_seconds=result.idle_seconds,
        phase_seconds=result.phase_seconds,
        healthy=result.healthy,
        reused=launched.reused,
        log=launched.log,
        log_tail=result.log_tail,
        detail=result.detail,
        evidence_dir=result.evidence_dir,
    )
    if result.outcome in WITHDRAWN:
        on_event({"event": "step", "step": "watch", "server": name, "text": f"{name}: {result.detail}"})
    elif result.outcome != "ready":
        on_event({"event": "step", "step": "diagnose", "server": name, "text": f"{name}: {result.outcome}; diagnosing"})
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


def _check_settings(host: Host, report: ServerReport, on_event: Event) -> None:
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
        on_event({"event": "step", "step": "settings", "server": report.server, "text": text})


def _self_check(host: Host, report: ServerReport, on_event: Event) -> None:
    if report.outcome != "ready":
        return
    report.selfcheck = check_server(host, report.server, on_event)
    if not report.selfcheck.passed:
        report.outcome = "selfcheck_failed"
        report.detail = report.selfcheck.detail


def _act_on_failure(host: Host, plan: DeployPlan, report: DeployReport, on_event: Event) -> None:
    """--on-stall: keep for a look by hand, stop, or stop and revert. The evidence is already taken. A server that
    another operator stopped or replaced meanwhile is that operator's."""
    bad = [server.server for server in report.servers if server.outcome not in ("ready", *WITHDRAWN)]
    if not bad or plan.on_stall == "keep":
        return
    withdrawn = {server.server for server in report.servers if server.outcome in WITHDRAWN}
    stop_servers(host, on_event, [server.name for server in host.config.servers if server.name not in withdrawn])
    if plan.on_stall == "revert" and plan.patch is not None and not withdrawn:
        report.reverted = all(r.after.state in ("clean", "absent") for r in revert_patch(host, on_event))
