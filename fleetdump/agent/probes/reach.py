"""Names, addresses and bridges of the host: what decides whether ranks and GPUs can reach each other."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import socket
from typing import Dict, List

from fleetdump.agent import procfs
from fleetdump.agent.evidence_host import HostFacts
from fleetdump.agent.probes.bounded import ProbeFailed, run_command
from fleetdump.agent.scrub import scrub

FABRIC_UNIT = "nvidia-fabricmanager"
LOGINS = 40
_JOURNAL = re.compile(r"(?P<at>\d{9,}(?:\.\d+)?) \S+ [^:]*: (?P<text>.*)")
_LOGIN = re.compile(r"[Ss]ession|user@|\.scope")
_ADDRESS = re.compile(
    r"^\d+: (?P<name>[^\s@]+)\S*\s+inet6? (?P<address>[0-9a-f.:]+)/(?P<prefix>\d+)(?P<rest>.*)$", re.M
)


def host_facts(pid: int) -> HostFacts:
    """Facts of the host; ``pid`` is a living process of the server (0: none), whose cgroup is told.

    Each part that cannot be read stays empty.
    """
    facts = HostFacts(name_resolves_to=_own_addresses(), machine=os.uname().machine)
    for read in (_read_addresses, _read_acs, _read_fabric_manager, _read_logins):
        with contextlib.suppress(ProbeFailed):
            read(facts)
    facts.cgroup = _cgroup(pid)
    return facts


def _own_addresses() -> List[str]:
    try:
        found = socket.getaddrinfo(os.uname().nodename, None, proto=socket.IPPROTO_TCP)
    except OSError:
        return []
    return sorted({str(address[0]) for *_, address in found})


def _read_addresses(facts: HostFacts) -> None:
    facts.addresses = parse_addresses(run_command(["ip", "-o", "addr", "show"], 2.0).stdout)


def parse_addresses(text: str) -> Dict[str, List[str]]:
    """Addresses by interface from ``ip -o addr``, link-local ones left out."""
    found: Dict[str, List[str]] = {}
    for match in _ADDRESS.finditer(text):
        if "scope link" not in match["rest"]:
            found.setdefault(match["name"], []).append(match["address"])
    return found


def _read_acs(facts: HostFacts) -> None:
    if shutil.which("lspci"):
        facts.acs_redirects = count_acs(run_command(["lspci", "-vvv"], 3.0).stdout)


def count_acs(text: str) -> int:
    """Bridges in lspci's text whose access control redirects requests between peers."""
    return sum("ACSCtl" in line and "SrcValid+" in line and "ReqRedir+" in line for line in text.splitlines())


def _read_fabric_manager(facts: HostFacts) -> None:
    if os.path.isdir("/run/systemd/system"):
        output = run_command(["systemctl", "is-active", FABRIC_UNIT], 2.0)
        known = run_command(["systemctl", "cat", FABRIC_UNIT], 2.0).status == 0
        facts.fabric_manager = output.stdout.strip() if known else ""


def _read_logins(facts: HostFacts) -> None:
    if os.path.isdir("/run/systemd/system"):
        who = ["_COMM=systemd-logind", "+", "_COMM=systemd"]
        output = run_command(["journalctl", "-q", "--no-pager", "-o", "short-unix", "-n", "400", *who], 2.0)
        facts.logins = parse_logins(output.stdout)


def parse_logins(text: str) -> List[str]:
    """Of the journal, in its form with seconds of the epoch, what it says on login sessions and their processes."""
    matches = (match for line in text.splitlines() if (match := _JOURNAL.match(line)))
    return [f"{match['at']} {scrub(match['text'])}" for match in matches if _LOGIN.search(match["text"])][-LOGINS:]


def _cgroup(pid: int) -> str:
    lines = (procfs.read_text(f"{procfs.PROC}/{pid}/cgroup", 1 << 14) or "").splitlines() if pid else []
    return next((line.split(":", 2)[2] for line in lines if line.startswith("0::")), "")
