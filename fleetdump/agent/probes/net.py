"""The server's port and HTTP answers, and the TCP sockets of its processes, in their own network namespace."""

from __future__ import annotations

import http.client
import ipaddress
import socket
import struct
import time
from typing import Dict, List

from fleetdump.agent import procfs
from fleetdump.agent.access import authorization
from fleetdump.agent.evidence_types import HttpProbe, PortFacts, SocketFacts, Target
from fleetdump.agent.scrub import scrub_argv

HEALTH_LIMIT = 6.0  # a healthy server takes 1 to 2 s: it generates a token; more on a crowded host
INFO_LIMIT = 2.0
STATES = {
    "01": "ESTABLISHED",
    "02": "SYN_SENT",
    "03": "SYN_RECV",
    "04": "FIN_WAIT1",
    "05": "FIN_WAIT2",
    "06": "TIME_WAIT",
    "07": "CLOSE",
    "08": "CLOSE_WAIT",
    "09": "LAST_ACK",
    "0A": "LISTEN",
    "0B": "CLOSING",
}


def port_facts(target: Target, pids: List[int]) -> PortFacts:
    """Who listens on the target's port. ``pids``: living processes of the server, in whose namespace to look."""
    facts = PortFacts(target.port)
    listeners = procfs.listeners(pids[0]) if pids else {}
    inodes = listeners.get(target.port, set())
    owner = next((pid for pid in pids if inodes & procfs.socket_inodes(pid)), 0)
    if owner:
        return PortFacts(target.port, True, owner, "", True)
    foreign = procfs.port_owner(target.port) if _same_namespace(pids) else None
    if inodes or foreign:
        facts.open = True
    if foreign:
        facts.owner_pid, facts.owner = foreign.pid, " ".join(scrub_argv(foreign.cmdline))[:200]
    return facts


def _same_namespace(pids: List[int]) -> bool:
    return not pids or procfs.read_link(f"/proc/{pids[0]}/ns/net") == procfs.read_link("/proc/self/ns/net")


def http_answers(target: Target, pids: List[int]) -> List[HttpProbe]:
    """``/health`` and ``/model_info`` of an open port; nothing when the server lives in another network namespace."""
    if not _same_namespace(pids):
        return []
    probes = [get(target, "/health", HEALTH_LIMIT), get(target, "/model_info", INFO_LIMIT)]
    if probes[1].status == 404:  # its name before SGLang 0.5.5
        probes[1] = get(target, "/get_model_info", INFO_LIMIT)
    return probes


def get(target: Target, path: str, limit: float) -> HttpProbe:
    """One GET within ``limit`` seconds, past any proxy; the body is not kept."""
    host = {"0.0.0.0": "127.0.0.1", "::": "::1", "": "127.0.0.1"}.get(target.host, target.host)  # noqa: S104
    start = time.monotonic()
    connection = http.client.HTTPConnection(host, target.port, timeout=limit)
    status, error = 0, ""
    try:
        connection.request("GET", path, headers=authorization(target.pid, target.start_time))
        status = connection.getresponse().status
    except (OSError, http.client.HTTPException) as problem:
        error = "timeout" if isinstance(problem, socket.timeout) else str(problem) or type(problem).__name__
    finally:
        connection.close()
    return HttpProbe(path, status, round(time.monotonic() - start, 3), error)


def tcp_table(pid: int) -> Dict[int, SocketFacts]:
    """TCP sockets of the network namespace of ``pid``, by inode (``fd`` is not set)."""
    table: Dict[int, SocketFacts] = {}
    for name in ("tcp", "tcp6"):
        for line in (procfs.read_text(f"/proc/{pid}/net/{name}", 16 << 20) or "").splitlines()[1:]:
            columns = line.split()
            if len(columns) > 9:
                state = STATES.get(columns[3], columns[3])
                table[int(columns[9])] = SocketFacts(-1, state, _address(columns[1]), _address(columns[2]))
    return table


def _address(text: str) -> str:
    host, _, port = text.partition(":")
    words = [int(host[n : n + 8], 16) for n in range(0, len(host), 8)]
    packed = struct.pack(f"={len(words)}I", *words)
    return f"{ipaddress.ip_address(packed)}:{int(port, 16)}"
