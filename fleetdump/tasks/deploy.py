"""``fleetdump deploy``: patch, launch, watch, self-check; on a stall evidence, verdict, and what the user chose.

What to do is a value (``DeployPlan``) made by the command line; what differs from it on a host is one too
(``HostChanges``), and so is what happened (``DeployReport``). Every step may be repeated: a deploy that was cut off
anywhere is taken up by the same deploy again.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable

from fleetdump.agent.hostmessages import ProbeResult
from fleetdump.agent.patchmessages import PatchResult, RevertArgs, RevertResult
from fleetdump.agent.servermessages import LaunchForecast, LaunchResult, StopArgs, StopResult
from fleetdump.agent.specs import Interpreter, ServerSpec, interpreters
from fleetdump.errors import HostError, UsageError
from fleetdump.fleet import Host
from fleetdump.fleet.lease import held
from fleetdump.inventory import HostConfig
from fleetdump.tasks._task import task
from fleetdump.tasks.changes import HostChanges, launch_args, look, patch_args
from fleetdump.tasks.check import CheckPlan, check
from fleetdump.tasks.deployplan import WITHDRAWN, DeployPlan, DeployReport
from fleetdump.tasks.starting import WATCH_LIMIT, bring_up
from fleetdump.tasks.steps import Event, Steps

PATCH_DEADLINE = 120.0
LAUNCH_DEADLINE = 120.0
STOP_GRACE = 30.0
HOLD_SECONDS = 1800.0
"""What all but the starts of its servers may take of a host's deploy."""
TOLD = ("arguments", "shared", "gpus")
"""Checks whose warnings ``deploy`` tells; the others are for ``check``."""
PATCH_KEYS = ("patch", "arguments")
"""Checks that blame the patch: another one may do."""


@task
def deploy(host: Host, plan: DeployPlan, on_event: Event) -> DeployReport:
    """Bring every server of the host up as planned; a server that does not come up is in the report, not an exception.

    The host is held from the first look to the end. Raises before anything is touched: ``LockedError`` while another
    deploy has it, ``UsageError`` when the inventory does not say what to run or to capture, ``HostError`` (code
    ``conflict``) when a server of ours runs in another way and ``plan.replace`` is False, ``HostError`` (code
    ``blocked``, or ``misfit`` where only the patch is to blame) for what ``check`` finds. A launch that is refused
    later undoes what came before it. Also what ``Host.call`` raises.
    """
    require_servers(host, plan)
    with held(host, "deploy", hold_limit(host.config), lambda text: Steps(on_event).tell("lock", text)):
        return carry_out(host, plan, on_event)


def hold_limit(config: HostConfig) -> float:
    """Seconds that a deploy may take on the host: its servers start in turns, ``parallel_starts`` at a time."""
    turns = math.ceil(len(config.servers) / config.parallel_starts)
    return HOLD_SECONDS + WATCH_LIMIT * max(1, turns)


def carry_out(host: Host, plan: DeployPlan, on_event: Event) -> DeployReport:
    """``deploy`` on a host that is held already, by its caller."""
    steps = Steps(on_event)
    probe, changes = compare(host, plan)
    _refuse_running(host, changes)
    _refuse_unproven(host, plan, changes)
    _tell(probe, changes, plan, steps)
    report = DeployReport(engine=probe.engine, patch=changes.patch)
    if changes.stops:
        report.stopped = stop_servers(host, on_event, changes.stops).stopped
    _put_patch(host, plan, changes, report, steps)
    report.servers = bring_up(host, plan, _launches(host, plan, changes, report, steps), steps)
    _act_on_failure(host, plan, report, on_event)
    return report


@task
def plan_only(host: Host, plan: DeployPlan) -> HostChanges:
    """What ``deploy`` would change; nothing is changed, and the host is not held. Raises as ``deploy``, but for a
    server that runs in another way, which the changes show."""
    require_servers(host, plan)
    return compare(host, plan)[1]


def require_servers(host: Host, plan: DeployPlan) -> None:
    """Raises ``UsageError`` when the inventory lacks what the plan needs."""
    if not host.config.servers:
        raise UsageError(
            "the inventory names no server to bring up",
            host.config.name,
            next_step="add `servers` for it, or leave it out with --exclude; `fleetdump init` writes an example",
        )
    if plan.patch is not None and plan.patch.captures:
        host.config.capture.spec()


def compare(host: Host, plan: DeployPlan) -> tuple[ProbeResult, HostChanges]:
    """What the host is, and what the plan would change there; raises for blockers."""
    probe = check(host, CheckPlan(plan.patch, plan.delivery))
    plan.starts.note(host.config.name, probe.healthy)
    _refuse_blockers(host, probe, plan.force)
    return probe, look(host, plan, probe.servers)


# --------------------------------------------------------------------------- steps that others take too
def stop_servers(host: Host, on_event: Event, servers: list[str] | None = None) -> StopResult:
    """Stop our servers of the host (all by default)."""
    steps = Steps(on_event)
    names = ", ".join(servers or []) or "our servers"
    steps.tell("stopping", f"stopping {names}")
    steps.begin("stop", f"stopping {names}")
    args = StopArgs(servers=servers or [], grace=STOP_GRACE)
    result = host.call(args, StopResult, verb="stop", deadline=STOP_GRACE * 2 + 30)
    steps.end("stop")
    ended = [*result.stopped, *(f"{name} (killed)" for name in result.killed)]
    if ended:
        steps.tell("stop", f"stopped {', '.join(ended)}")
    return result


def revert_patch(
    host: Host, on_event: Event, force: bool = False, engines: list[Interpreter] | None = None
) -> list[RevertResult]:
    """Restore the engines of the host's servers (all by default), byte for byte; with ``force`` files that were edited
    since too."""
    steps, results = Steps(on_event), []
    for engine in interpreters(host.config.servers) if engines is None else engines:
        steps.begin("revert", f"reverting the patch of {engine.python}")
        args = RevertArgs(python=engine.python, env=engine.env, force=force)
        result = host.call(args, RevertResult, verb="revert", deadline=PATCH_DEADLINE)
        steps.end("revert")
        if result.changed:
            steps.tell("revert", f"reverted the patch of {engine.python}")
        results.append(result)
    return results


# --------------------------------------------------------------------------- before anything is touched
def _refuse_blockers(host: Host, probe: ProbeResult, force: bool) -> None:
    """A blocked host is left alone. With ``force`` the patch verb itself judges the files, before it changes any."""
    blockers = [found for found in probe.findings if found.level == "blocker" and not (force and found.key == "patch")]
    if blockers:
        first = blockers[0]
        more = f" (and {len(blockers) - 1} more: fleetdump check lists them)" if len(blockers) > 1 else ""
        code = "misfit" if all(found.key in PATCH_KEYS for found in blockers) else "blocked"
        raise HostError(first.text + more, host.config.name, next_step=first.fix, code=code)


def _refuse_running(host: Host, changes: HostChanges) -> None:
    """Without --replace a running server must already be as wanted: patching under it would leave a mixture."""
    for launch in changes.conflicts:
        raise HostError(
            f"server {launch.server} is running in another way than is wanted now",
            host.config.name,
            "; ".join(launch.differs),
            "add --replace to stop it and start it anew, or fleetdump stop first",
            code="conflict",
        )


def _refuse_unproven(host: Host, plan: DeployPlan, changes: HostChanges) -> None:
    """Where no test has run the patch, the self-check decides; without it nobody would."""
    if plan.selfcheck or plan.patch is None or not plan.patch.captures:
        return
    for _, result in changes.patches:
        if not result.verified:
            raise HostError(
                f"patch {plan.patch.name} {plan.patch.version} is not verified on {result.engine}",
                host.config.name,
                "no test has run it there: only the self-check can tell whether what it captures is right",
                "leave --no-selfcheck out",
                code="blocked",
            )


def _tell(probe: ProbeResult, changes: HostChanges, plan: DeployPlan, steps: Steps) -> None:
    """The plan, and what does not stand in its way but should be known before the engine changes. A host that is as
    wanted is not talked about."""
    for found in probe.findings:
        if found.level == "warning" and found.key in TOLD:
            steps.tell("check", f"{found.text} ({found.fix})" if found.fix else found.text)
    if changes.unchanged:
        return
    steps.tell("lock", "the host is ours until this deploy ends; checked")
    steps.tell("plan", f"plan: {'; '.join(changes.lines())}")
    if changes.diff:
        steps.emit({"event": "diff", "text": changes.diff})
    for _, result in changes.patches:
        if not result.verified:
            text = f"{plan.patch_name} is unverified on {result.engine}: no test has run it there"
            steps.tell("plan", f"{text}, the self-check decides")


# --------------------------------------------------------------------------- changes
def _put_patch(host: Host, plan: DeployPlan, changes: HostChanges, report: DeployReport, steps: Steps) -> None:
    """The engines as the plan wants them: patched, or as shipped. One that is so is not touched."""
    if changes.reverts:
        results = revert_patch(host, steps.emit, engines=changes.reverts)
        report.patch_changed = any(result.changed for result in results)
    report.patch_verified = all(result.verified for _, result in changes.patches)
    for planned in changes.to_patch:
        steps.begin("patch", f"patching {planned.python} with {report.patch}")
        args = patch_args(host, plan, Interpreter(planned.python, planned.env), dry_run=False)
        result = host.call(args, PatchResult, verb="patch", deadline=PATCH_DEADLINE)
        steps.end("patch")
        if result.changed:
            steps.tell("patch", f"patched with {report.patch}: {planned.python}")
        for copy in result.kept:
            steps.tell("patch", f"the file that somebody else edited is kept as {copy}")
        report.patch_changed = report.patch_changed or result.changed
        report.patch_verified = report.patch_verified and result.verified


def _launches(
    host: Host, plan: DeployPlan, changes: HostChanges, report: DeployReport, steps: Steps
) -> list[Callable[[], LaunchResult]]:
    """The launch of each server that does not run as wanted, to be called in their order. When one is refused, what
    this deploy did before is undone, the servers that it has launched included."""
    started: list[str] = []

    def launch(server: ServerSpec, forecast: LaunchForecast) -> LaunchResult:
        try:
            launched = _launch(host, plan, server, forecast, steps)
        except HostError:
            if started:
                stop_servers(host, steps.emit, started)
            if plan.patch is not None and report.patch_changed:
                _revert_if_unused(host, steps)
            raise
        if not launched.reused:
            started.append(launched.state.name)
        return launched

    wanted = zip(host.config.servers, changes.launches, strict=True)
    return [functools.partial(launch, server, forecast) for server, forecast in wanted]


def _launch(host: Host, plan: DeployPlan, server: ServerSpec, forecast: LaunchForecast, steps: Steps) -> LaunchResult:
    if forecast.change == "none" and forecast.running is not None:
        return forecast.running
    steps.begin("launch", f"launching {server.name}")
    args = launch_args(host, plan, server)
    launched = host.call(args, LaunchResult, verb="launch", deadline=LAUNCH_DEADLINE)
    steps.end("launch")
    if not launched.reused:
        text = f"launched {server.name} (pid {launched.state.pid})"
        if launched.added_args:
            text += f" with {' '.join(launched.added_args)}, which the patch needs"
        steps.tell("launch", f"{text}; held by {launched.held_by}", server.name)
        if launched.warning:
            steps.tell("warning", launched.warning, server.name)
    return launched


def _act_on_failure(host: Host, plan: DeployPlan, report: DeployReport, on_event: Event) -> None:
    """--on-stall: keep for a look by hand, stop, or stop and revert. The evidence is already taken. A server that
    another operator stopped or replaced meanwhile is that operator's."""
    bad = [server.server for server in report.servers if server.outcome not in ("ready", *WITHDRAWN)]
    if not bad or plan.on_stall == "keep":
        return
    withdrawn = {server.server for server in report.servers if server.outcome in WITHDRAWN}
    stop_servers(host, on_event, [server.name for server in host.config.servers if server.name not in withdrawn])
    if plan.on_stall == "revert" and plan.patch is not None and not withdrawn:
        report.reverted = _revert_if_unused(host, Steps(on_event))


def _revert_if_unused(host: Host, steps: Steps) -> bool:
    """Whether no patch is left. Where others run it by now it stays: that is told, and hides no earlier failure."""
    try:
        return all(result.after.state in ("clean", "absent") for result in revert_patch(host, steps.emit))
    except HostError as error:
        if error.code != "conflict":
            raise
        steps.end("revert")
        steps.tell("warning", f"not reverted: {error}; next: {error.next_step}")
        return False
