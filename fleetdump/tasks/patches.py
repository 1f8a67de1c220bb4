"""``fleetdump patches test``: what a patch would do to the engines of a host. Nothing is changed."""

from __future__ import annotations

from fleetdump.agent.patchmessages import PatchArgs, PatchResult
from fleetdump.agent.specs import PatchSpec, interpreters, models_of
from fleetdump.fleet import Host
from fleetdump.tasks._task import task
from fleetdump.tasks.deploy import PATCH_DEADLINE
from fleetdump.tasks.deployplan import Delivery


@task
def dry_run(host: Host, patch: PatchSpec, delivery: Delivery, force: bool) -> list[PatchResult]:
    """A dry run on each engine of the host's servers; raises ``HostError`` for one that the patch does not fit."""
    results = []
    for engine in interpreters(host.config.servers):
        models = models_of(host.config.servers, engine)
        args = PatchArgs(engine.python, patch, True, engine.env, force, delivery, models)
        results.append(host.call(args, PatchResult, verb="patch", deadline=PATCH_DEADLINE))
    return results
