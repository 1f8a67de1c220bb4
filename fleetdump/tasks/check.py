"""``fleetdump check``: would a deploy work on this host? Nothing is changed."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

from fleetdump.agent.hostmessages import ProbeArgs, ProbeResult
from fleetdump.agent.protocol import Finding
from fleetdump.agent.specs import PatchSpec
from fleetdump.fleet import Host
from fleetdump.inventory import HostConfig, resolve_secrets
from fleetdump.tasks._task import task

PROBE_DEADLINE = 90.0
CLOCK_SECONDS = 5.0
"""How far a host's clock may be off before times in logs, manifests and audits of two hosts cannot be compared."""


@dataclass(frozen=True)
class CheckPlan:
    """What a deploy would bring: the patch (None: the engine as shipped) and its delivery. ``tokens`` are those that
    the host will capture, about (0: not known); ``measure_writes`` times its disk."""

    patch: PatchSpec | None = None
    delivery: str = "in-place"
    tokens: int = 0
    measure_writes: bool = False


@task
def check(host: Host, plan: CheckPlan) -> ProbeResult:
    """Facts and findings of one host, in one call; raises what ``Host.call`` raises."""
    config = host.config
    args = ProbeArgs(
        servers=[resolve_secrets(server) for server in config.servers],
        patch=plan.patch,
        capture_dir=config.capture.dir,
        tokens=plan.tokens,
        layers=config.capture.spec().layers if config.capture.layers else [],
        delivery=plan.delivery,
        ring_bytes=config.capture.ring_bytes,
        device_bytes=config.capture.device_bytes,
        shard_bytes=config.capture.shard_bytes,
        measure_writes=plan.measure_writes,
    )
    sent = time.time()
    probe = host.call(args, ProbeResult, verb="probe", deadline=PROBE_DEADLINE)
    probe.findings += [*clock_findings(sent, time.time(), probe.time), *_left_out(config, plan.patch)]
    return probe


def clock_findings(sent: float, received: float, there: float) -> list[Finding]:
    """What a host's clock showed while a call was under way here: all that is outside ``sent`` to ``received`` is an
    offset, whatever the call took."""
    offset = min(0.0, there - sent) or max(0.0, there - received)
    if abs(offset) < CLOCK_SECONDS:
        return [Finding("clock", "ok", "its clock agrees with this machine's")]
    word = "ahead of" if offset > 0 else "behind"
    text = f"its clock is {abs(offset):.0f} s {word} this machine's"
    return [Finding("clock", "warning", text, "switch NTP on there (timedatectl set-ntp true), or here")]


def _left_out(config: HostConfig, patch: PatchSpec | None) -> list[Finding]:
    """What could not be looked at because the inventory says nothing of it, and what a deploy would refuse for that."""
    findings = []
    if not config.servers:
        text = "the inventory names no server here: interpreter, sglang, model, port and GPUs are not looked at"
        fix = "add `servers`; `fleetdump init` writes an example"
        findings.append(Finding("servers", "blocker", text, fix))
    if not config.capture.layers and patch is not None and patch.captures:
        text = "the inventory does not say what to capture, and where to: layers and disk are not looked at"
        fix = "add for instance capture: {layers: [3, 31, 59], layer_ids: input, dir: /nvme/hs}, or use --no-patch"
        findings.append(Finding("capture", "blocker", text, fix))
    return findings


def tokens_by_host(hosts: Sequence[HostConfig], tokens: int) -> dict[str, int]:
    """How many of a data set's tokens each host will capture when every server takes the same share."""
    servers = sum(len(host.servers) for host in hosts)
    return {host.name: -(-tokens * len(host.servers) // servers) if servers else 0 for host in hosts}
