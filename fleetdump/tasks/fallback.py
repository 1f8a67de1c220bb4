"""``fleetdump deploy --fallback``: where a patch does not work, the next one is tried on that host, at last none."""

from __future__ import annotations

from dataclasses import replace

from fleetdump.errors import HostError
from fleetdump.fleet import Host
from fleetdump.fleet.lease import held
from fleetdump.tasks._task import task
from fleetdump.tasks.deploy import carry_out, hold_limit, require_servers
from fleetdump.tasks.deployplan import WITHDRAWN, Attempt, DeployPlan, DeployReport
from fleetdump.tasks.steps import Event, Steps


@task
def deploy_or_fall_back(host: Host, plan: DeployPlan, on_event: Event) -> DeployReport:
    """``deploy``, with ``plan.fallbacks`` one after the other while the host's servers stall, fail, or do not fit the
    patch; the last attempt is the report, those before are its ``attempts``. Evidence is taken before a failed server
    is stopped. The host is held all the time. Raises as ``deploy``, a ``misfit`` only for the last patch."""
    for patch in (plan.patch, *plan.fallbacks):
        require_servers(host, replace(plan, patch=patch))
    steps, attempts = Steps(on_event), list[Attempt]()
    limit = hold_limit(host.config) * (1 + len(plan.fallbacks))
    with held(host, "deploy", limit, lambda text: steps.tell("lock", text)):
        patches = [plan.patch, *plan.fallbacks]
        for number, patch in enumerate(patches):
            last = number == len(patches) - 1
            # What an attempt has left is in the way of the next one; the evidence of it is taken by then.
            now = replace(plan, patch=patch, fallbacks=(), replace=plan.replace or number > 0)
            now = now if last else replace(now, on_stall="keep")
            try:
                report = carry_out(host, now, on_event)
            except HostError as error:
                if error.code != "misfit" or last:
                    raise
                attempt = Attempt(now.patch_name, str(error))
            else:
                report.attempts = attempts
                outcomes = {server.outcome for server in report.servers}
                if last or outcomes == {"ready"} or outcomes & set(WITHDRAWN):
                    return report
                attempt = _attempt(now, report)
            attempts.append(attempt)
            following = replace(plan, patch=patches[number + 1]).patch_name
            steps.tell("fallback", f"{attempt.patch} does not work here ({attempt.why}); trying {following}")
    raise AssertionError("the last attempt returns or raises")


def _attempt(plan: DeployPlan, report: DeployReport) -> Attempt:
    """What to say of a patch that did not work."""
    bad = [server for server in report.servers if server.outcome != "ready"]
    why = [f"{server.server}: {server.verdicts[0].code if server.verdicts else server.outcome}" for server in bad]
    return Attempt(plan.patch_name, ", ".join(why), [server.evidence_dir for server in bad if server.evidence_dir])
