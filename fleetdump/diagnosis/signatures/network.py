"""Names and interfaces over which ranks of several hosts cannot find each other, and ports that were gone meanwhile."""

from __future__ import annotations

import ipaddress
import re

from fleetdump.agent.evidence_process import SocketFacts
from fleetdump.diagnosis.registry import Step, signature
from fleetdump.diagnosis.types import DIRECT, LOG_ONLY, MEASURED, PATTERN, Verdict
from fleetdump.diagnosis.view import View
from fleetdump.diagnosis.words import name_of

_PRIVATE_BRIDGE = re.compile(r"^(?:\[\d+\])?(?:docker|br|virbr|veth|cni|flannel|cali|lxc|podman)[\w-]*", re.I)
_LOOPBACK_NAME = re.compile(r"^(?:\[\d+\])?lo\b|127\.\d+\.\d+\.\d+|\[?::1\b")
_PORT = re.compile(r"(?:port[ :=]+|:)(\d{4,5})\b")
ANY_ADDRESS = ("", "0.0.0.0", "::", "localhost")  # noqa: S104
EARLY = ("imports", "init")
_RENDEZVOUS = re.compile(
    r"rendezvous|c10d_store|TCPStore|init_process_group|init_distributed|new_group|store\.(?:get|wait)|barrier"
)
"""Frames in which a rank waits for all others to come."""


@signature(Step.HOST)
def wrong_interface(view: View) -> Verdict | None:
    """Ranks of several hosts use an address that other hosts cannot reach: loopback, or a bridge inside the host."""
    evidence = view.evidence
    if view.healthy or view.phase not in EARLY or not view.failing or evidence.target.nodes < 2:
        return None
    facts, sure = _chosen(view)
    to_loopback = [
        (p, s) for p in view.members for s in p.sockets if s.state == "SYN_SENT" and _is_loopback(_host(s.remote))
    ]
    facts += [f"{name_of(p)} connects to {s.remote}, which is this host itself" for p, s in to_loopback]
    line = view.trouble("loopback_fallback")
    names = evidence.host.name_resolves_to
    only_loopback = bool(names) and all(_is_loopback(name) for name in names)
    if only_loopback:
        facts.append(f"this host's own name resolves to {', '.join(names)} only")
    apart = _two_networks(view)
    facts += [*apart, *([f"log: {line}"] if line else [])]
    if not (sure or to_loopback or line or only_loopback or apart):
        return None
    return Verdict(
        "WRONG_INTERFACE",
        "the ranks of this host announce an address that the other hosts cannot reach",
        DIRECT if sure + bool(to_loopback) + bool(line) + bool(apart) + only_loopback > 1 else PATTERN,
        phase=view.phase,
        evidence=facts,
        next_steps=[
            "set NCCL_SOCKET_IFNAME and GLOO_SOCKET_IFNAME to the interface that joins the hosts",
            "let the host's name resolve to that address (/etc/hosts)",
        ],
    )


def _chosen(view: View) -> tuple[list[str], bool]:
    """What NCCL or gloo chose on the ranks, and whether that is a bridge or loopback."""
    chosen = {m.label: m.interface for m in view.evidence.log.ranks if m.interface}
    bad = {n: i for n, i in chosen.items() if _PRIVATE_BRIDGE.match(i) or _LOOPBACK_NAME.search(i)}
    return [f"{label} uses interface {interface}" for label, interface in bad.items()], bool(bad)


def _two_networks(view: View) -> list[str]:
    """Another host is talked to over one of this host's addresses, and gives no answer over another of them."""
    sockets = [(p, s) for p in view.members for s in p.sockets if s.local and not _is_loopback(_host(s.remote))]
    talks = [s for _, s in sockets if s.state == "ESTABLISHED" and not s.peer and not _is_remote_https(s)]
    facts = []
    for process, sock in sockets:
        known = next((s for s in talks if _host(s.local) != _host(sock.local)), None)
        if sock.state == "SYN_SENT" and known and not _is_remote_https(sock):
            facts.append(
                f"{name_of(process)} gets no answer from {sock.remote} over {_host(sock.local)}, "
                f"while {_host(known.remote)} answers over {_host(known.local)}"
            )
    return facts[:4]


@signature(Step.HOST)
def ipv6_only(view: View) -> Verdict | None:
    """The host has IPv6 addresses alone, and ranks look for each other at an IPv4 address."""
    evidence = view.evidence
    outside = [a for name, of in evidence.host.addresses.items() if name != "lo" for a in of]
    if view.healthy or not outside or any("." in a for a in outside):
        return None
    line = view.trouble("ipv4_unreachable")
    waits = [(p, s) for p in view.members for s in p.sockets if s.state == "SYN_SENT" and "." in _host(s.remote)]
    calls = [t.label for t in evidence.traces if any(c.name == "connect" and c.main for c in t.calls)]
    seen = (line and waits) or (view.failing and (line or waits or calls))  # both together need no patience
    if not seen:
        return None
    facts = [f"the host has no IPv4 address but loopback ({', '.join(outside[:3])})"]
    facts += [f"{name_of(p)} connects to {s.remote}" for p, s in waits]
    facts += [f"{label} calls connect again and again" for label in calls]
    facts += [f"log: {line}"] if line else []
    return Verdict(
        "IPV6_LOOPBACK",
        "the host speaks IPv6 only, and the ranks look for each other at an IPv4 address",
        DIRECT if waits or line else PATTERN,
        phase=view.phase,
        evidence=facts,
        next_steps=["give --dist-init-addr an IPv6 address ([::1]:port on one host), or update SGLang"],
    )


@signature(Step.HOST)
def bad_bind_host(view: View) -> Verdict | None:
    """The server was told to listen on an address that this host does not have."""
    evidence = view.evidence
    host, line = evidence.target.host, view.trouble("cannot_bind")
    have = [a for of in evidence.host.addresses.values() for a in of]
    foreign = bool(have) and host not in have and host not in ANY_ADDRESS and not _is_loopback(host) and _is_ip(host)
    own = bool(have) and (host in have or host in ANY_ADDRESS or _is_loopback(host))
    if view.port_open or own or not view.failing or not (line or (foreign and view.phase in ("http", "warmup"))):
        return None
    facts = [f"the server was told to listen on {host}"]
    facts += [f"this host has {', '.join(have)}"] if have else []
    facts += [f"log: {line}"] if line else []
    return Verdict(
        "BAD_BIND_HOST",
        f"the server cannot listen on {host}: this host has no such address",
        DIRECT if line and foreign else PATTERN if foreign else LOG_ONLY,
        phase=view.phase,
        evidence=facts,
        next_steps=["set host to 127.0.0.1, to 0.0.0.0, or to an address of this host"],
    )


@signature(Step.HOST)
def port_race(view: View) -> Verdict | None:
    """An internal port, not the server's own, was taken between its choice and its use."""
    evidence, line = view.evidence, view.trouble("port_in_use")
    taken = evidence.port.open and not evidence.port.ours
    if not line or taken or not view.failing:
        return None
    ports = {int(port) for port in _PORT.findall(line)} - {evidence.target.port}
    internal = bool(ports) or re.search(r"TCPStore|init_process_group|dist|rendezvous|zmq|ZMQ", line)
    if not internal:
        return None
    named = f"port {', '.join(map(str, sorted(ports)))}" if ports else "an internal port"
    return Verdict(
        "PORT_RACE",
        f"{named} of the server's inner connections was taken by somebody else",
        LOG_ONLY,
        phase=view.phase,
        evidence=[f"log: {line}", f"nobody else listens on the server's own port {evidence.target.port}"],
        next_steps=["deploy again; if it comes back, give --nccl-port outside net.ipv4.ip_local_port_range"],
    )


@signature(Step.COLLECTIVES)
def missing_rank(view: View) -> Verdict | None:
    """During set-up one rank has not come where all the others are, and does nothing."""
    if not view.complete or view.port_open or view.progress or view.compilers or view.within_patience:
        return None
    if view.phase not in EARLY or len(view.schedulers) < 2:
        return None
    if len(view.late_ranks) != 1:
        return None
    process = view.late_ranks[0]
    mark = view.marks_of(process)
    where = mark.last_line if mark and mark.last_line else "it has logged nothing"
    cpu = f", {process.main.cpu:.0%} CPU" if process.main else ""
    return Verdict(
        "MISSING_RANK",
        f"rank {process.rank} has not joined: all other ranks wait for it in the set-up",
        PATTERN,
        phase=view.phase_of(process) or view.phase,
        rank=process.rank,
        evidence=[
            f"{name_of(process)}: state {process.state}{cpu}; last line: {where}",
            *(f"{m.label}: {m.nccl or m.phase}" for m in view.evidence.log.ranks if m.label != process.label),
        ],
        next_steps=[f"look at {name_of(process)}'s stack (--deep); compare its environment with another rank's"],
    )


@signature(Step.COLLECTIVES)
def other_node_silent(view: View) -> Verdict | None:
    """A host of several connects to another for the set-up and nobody answers there, or all of its ranks have come to
    where ranks meet and sleep."""
    if not view.complete or view.port_open or view.progress or view.within_patience or view.phase not in EARLY:
        return None
    waits = [(p, s) for p in view.members for s in p.sockets if s.state == "SYN_SENT" and not _is_remote_https(s)]
    outside = [(p, s) for p, s in waits if not _is_loopback(_host(s.remote))]
    together = _meeting_facts(view)
    if view.evidence.target.nodes < 2 or not (outside or together):
        return None
    remote = sorted({s.remote for _, s in outside})
    where = (
        f" that does not answer at {', '.join(remote[:3])}" if outside else ": all of them have come, nothing follows"
    )
    return Verdict(
        "MISSING_RANK",
        f"the ranks of this host wait for another host{where}",
        DIRECT if outside else PATTERN,
        phase=view.phase,
        evidence=[*(f"{name_of(p)} connects to {s.remote}, and no answer comes" for p, s in outside[:8]), *together],
        next_steps=[
            "see whether the server runs on that host, and whether a firewall lets that port through",
            "compare --dist-init-addr, --nnodes and --node-rank on all hosts",
        ],
    )


def _meeting_facts(view: View) -> list[str]:
    """That all ranks of this host sleep level in the set-up, at a meeting point where their stacks are known; empty
    when it is otherwise."""
    here, stacks = view.schedulers, view.evidence.stacks
    meet = [s for s in stacks if any(_RENDEZVOUS.search(frame) for frame in s.frames)]
    level = len(view.blocked) == len(here) and not view.late_ranks
    if not level or (stacks and len(meet) < len(here)):
        return []
    facts = [f"{s.label} waits in {s.frames[0]}" for s in meet[:8]]
    count = f"{len(here)} of {view.evidence.target.ranks} ranks are on this host"
    return [*facts, f"{count}, all asleep in the set-up, none behind another"]


@signature(Step.HOST)
def hub_blocked(view: View) -> Verdict | None:
    """A download from a model hub that gets no bytes."""
    if view.healthy or view.phase not in (*EARLY, "weights") or view.progress or view.within_patience:
        return None
    waits = [(p, s) for p in view.members for s in p.sockets if _is_remote_https(s)]
    stacks = [s for s in view.evidence.stacks if any(HUB_FRAMES.search(f) for f in s.frames)]
    line = view.trouble("hub_failed")
    imports = any("importlib" in f for s in view.evidence.stacks for f in s.frames)
    if not (waits or (stacks and line)) or (imports and not stacks):
        return None
    if view.missing_ranks or view.evidence.log.crash:
        return None
    first = waits[0][0] if waits else view.members[0]
    states = sorted({s.state for _, s in waits})
    facts = [f"{name_of(p)}: fd {s.fd} to {s.remote} is {s.state}" for p, s in waits[:5]]
    facts += [f"{s.label or s.role} is in {s.frames[0]}" for s in stacks]
    facts += ["no bytes came in two samples", *([f"log: {line}"] if line else [])]
    return Verdict(
        "HUB_BLOCKED",
        f"{name_of(first)} waits for a download that gets no bytes" + (f" ({', '.join(states)})" if states else ""),
        DIRECT if stacks or "SYN_SENT" in states else MEASURED,
        phase=view.phase,
        rank=first.rank,
        evidence=facts,
        next_steps=["give model_path a local folder, or HF_HUB_OFFLINE=1; check that this host reaches the hub"],
    )


HUB_FRAMES = re.compile(r"huggingface_hub|hf_xet|modelscope|urllib3|httpx|requests/|snapshot_download|http_get")


def _is_remote_https(sock: SocketFacts) -> bool:
    host, port = _host(sock.remote), sock.remote.rpartition(":")[2]
    waiting = sock.state in ("SYN_SENT", "ESTABLISHED", "CLOSE_WAIT")
    return waiting and port in ("443", "80", "3128", "8080") and not _is_loopback(host)


def _host(address: str) -> str:
    return address.rpartition(":")[0].strip("[]")


def _is_ip(text: str) -> bool:
    try:
        ipaddress.ip_address(text)
    except ValueError:
        return False
    return True


def _is_loopback(text: str) -> bool:
    return _is_ip(text) and ipaddress.ip_address(text).is_loopback
