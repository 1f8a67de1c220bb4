"""The host's part in it: full disks, and proxies in front of the warm-up request."""

from __future__ import annotations

from fleetdump.agent.evidence_host import DiskFacts
from fleetdump.diagnosis.registry import Step, signature
from fleetdump.diagnosis.types import DIRECT, PATTERN, Verdict
from fleetdump.diagnosis.view import View
from fleetdump.diagnosis.words import size

FULL_BYTES = 1 << 20


@signature(Step.HOST)
def disk_full(view: View) -> Verdict | None:
    """A file system that the server writes to has no space or no inodes left."""
    full = full_disks(view)
    line = view.trouble("disk_full")
    if not full or view.healthy:
        return None
    facts = [f"{d.path} ({d.use}, {d.fstype}): {size(d.free_bytes)} and {d.free_inodes} inodes free" for d in full]
    if line:
        facts.append(f"log: {line}")
    if view.evidence.log.unterminated:
        facts.append("the log ends in the middle of a line")
    where = ", ".join(sorted({d.path for d in full}))
    return Verdict(
        "DISK_FULL",
        f"no space left on {where}",
        DIRECT,
        phase=view.phase,
        evidence=facts,
        next_steps=["free space there; the log may be cut off, so judge by the processes, then deploy again"],
    )


def full_disks(view: View) -> list[DiskFacts]:
    """File systems without space or inodes; shared memory has a code of its own."""
    disks = [d for d in view.evidence.disks if d.total_bytes and d.use != "shm"]
    return [d for d in disks if d.free_bytes < FULL_BYTES or d.free_inodes == 0]


@signature(Step.HOST)
def proxy_warmup(view: View) -> Verdict | None:
    """The server's request to itself goes through a proxy that refuses it."""
    evidence = view.evidence
    proxies = {name: value for name, value in evidence.proxy.items() if name != "no_proxy"}
    refused = evidence.log.troubles.get("proxy_refused")
    if not proxies or evidence.log.ready or not _through_proxy(view):
        return None
    opened = "http open" in evidence.log.server_marks
    if not opened or not (refused or ("model info" not in evidence.log.server_marks and not view.within_patience)):
        return None
    facts = [f"{name}={value} in the server's environment" for name, value in sorted(proxies.items())]
    facts.append(f"no_proxy={evidence.proxy.get('no_proxy', '')!r} does not name {evidence.target.host}")
    facts.append("the HTTP server is up, and its own request for the model's facts never came in")
    if refused:
        facts.append(f"log: {refused}")
    return Verdict(
        "PROXY_WARMUP",
        f"the warm-up request goes to the proxy {next(iter(proxies.values()))} instead of the server itself",
        DIRECT if refused else PATTERN,
        phase="warmup",
        evidence=facts,
        next_steps=[f"add {evidence.target.host} to no_proxy in the server's env, or unset the proxy"],
    )


def _through_proxy(view: View) -> bool:
    names = [name.strip() for name in view.evidence.proxy.get("no_proxy", "").split(",")]
    host = view.evidence.target.host
    return "*" not in names and host not in names
