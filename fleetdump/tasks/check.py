"""``fleetdump check``: would a deploy work on this host? Nothing is changed."""

from __future__ import annotations

from fleetdump.agent.protocol import PatchSpec, ProbeArgs, ProbeResult
from fleetdump.fleet import Host
from fleetdump.inventory import resolve_secrets
from fleetdump.tasks._task import task

PROBE_DEADLINE = 90.0


@task
def check(host: Host, patch: PatchSpec | None = None, need_bytes: int = 0, delivery: str = "in-place") -> ProbeResult:
    """Facts and findings of one host; raises what ``Host.call`` raises."""
    config = host.config
    args = ProbeArgs(
        servers=[resolve_secrets(server) for server in config.servers],
        patch=patch,
        capture_dir=config.capture.dir,
        need_bytes=need_bytes,
        layers=config.capture.spec().layers if config.capture.layers else [],
        delivery=delivery,
        ring_bytes=config.capture.ring_bytes,
        device_bytes=config.capture.device_bytes,
    )
    return host.call(args, ProbeResult, verb="probe", deadline=PROBE_DEADLINE)
