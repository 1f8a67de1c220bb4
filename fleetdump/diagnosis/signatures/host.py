"""The host's part in it: full disks, and proxies in front of the warm-up request."""

from __future__ import annotations

import re

from fleetdump.agent.evidence_host import DiskFacts
from fleetdump.diagnosis.registry import Step, signature
from fleetdump.diagnosis.types import DIRECT, LOG_ONLY, PATTERN, Verdict
from fleetdump.diagnosis.view import View
from fleetdump.diagnosis.words import name_of, size

FULL_BYTES = 1 << 20
_ONLY_A_PROXY = re.compile(r"\b407\b|ProxyError|Tunnel connection failed|Proxy Authentication Required")
_PROXY_NAMES = frozenset({"http_proxy", "https_proxy", "all_proxy"})
_PROXY_PORTS = frozenset({"3128", "8080", "1080", "8888"})


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
    refused = view.trouble("proxy_refused")
    hidden = [] if proxies else _hidden_proxy(view)
    if not (proxies or hidden) or evidence.log.ready or not _through_proxy(view):
        return None
    opened = "http open" in evidence.log.server_marks
    if not opened or not (refused or ("model info" not in evidence.log.server_marks and not view.within_patience)):
        return None
    facts = [f"{name}={value} in the server's environment" for name, value in sorted(proxies.items())]
    if proxies:
        facts.append(f"no_proxy={evidence.proxy.get('no_proxy', '')!r} does not name {evidence.target.host}")
    facts += hidden
    facts.append("the HTTP server is up, and its own request for the model's facts never came in")
    if refused:
        facts.append(f"log: {refused}")
    return Verdict(
        "PROXY_WARMUP",
        f"the warm-up request goes to {_named(proxies)} instead of the server itself",
        LOG_ONLY if not proxies else DIRECT if refused else PATTERN,
        phase="warmup",
        evidence=facts,
        next_steps=[f"add {evidence.target.host} to no_proxy in the server's env, or unset the proxy"],
    )


def _named(proxies: dict[str, str]) -> str:
    return f"the proxy {next(iter(proxies.values()))}" if proxies else "a proxy (which one, its environment hides)"


def _hidden_proxy(view: View) -> list[str]:
    """What tells of a proxy where the values of the environment are not known: an answer that only proxies give, or
    any refusal together with a variable's name or a connection to a port that proxies use."""
    line = view.trouble("proxy_refused")
    if not line:
        return []
    names = [name for name in view.evidence.env_names if name.lower() in _PROXY_NAMES]
    remote = [(p, s) for p in view.members for s in p.sockets if s.remote.rpartition(":")[2] in _PROXY_PORTS]
    facts = [f"{', '.join(names)} is set in the server's environment"] if names else []
    facts += [f"{name_of(p)} has a connection to {s.remote}, {s.state}" for p, s in remote[:3]]
    facts += ["only a proxy gives such an answer"] if _ONLY_A_PROXY.search(line) else []
    return facts


def _through_proxy(view: View) -> bool:
    names = [name.strip() for name in view.evidence.proxy.get("no_proxy", "").split(",")]
    host = view.evidence.target.host
    return "*" not in names and host not in names
