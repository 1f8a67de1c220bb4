"""The server's port and HTTP answers, and the TCP sockets of its processes, in their own network namespace."""

from __future__ import annotations

import ctypes
import http.client
import ipaddress
import os
import socket
import struct
import time
from typing import Dict, List, Sequence

from fleetdump.agent import procfs
from fleetdump.agent.access import authorization
from fleetdump.agent.evidence_engine import HttpProbe, PortFacts
from fleetdump.agent.evidence_process import SocketFacts
from fleetdump.agent.evidence_types import Target
from fleetdump.agent.probes.bounded import ProbeFailed
from fleetdump.agent.scrub import scrub_argv

ANY_ADDRESS = {"0.0.0.0": "127.0.0.1", "": "127.0.0.1", "::": "::1"}  # noqa: S104 (nothing listens there)
"""Where a server that listens on all addresses is asked."""
CLONE_NEWNET = 0x40000000
ENDPOINTS = (
    (("/health",), 6.0),  # a healthy server takes 1 to 2 s: it generates a token; more on a crowded host
    (("/model_info", "/get_model_info"), 2.0),  # from the HTTP process alone
    (("/server_info", "/get_server_info"), 2.0),  # asks the schedulers
)
"""SGLang's status endpoints under their names since and before 0.5.5, each with its time limit in seconds."""
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
    """Whether the server's processes use our network; taken for granted where that may not be read."""
    theirs = procfs.read_link(f"/proc/{pids[0]}/ns/net") if pids else None
    return theirs in (None, procfs.read_link("/proc/self/ns/net"))


def enter_network_of(pid: int) -> None:
    """Move this thread into the network namespace of ``pid``: loopback is then the server's own. The thread should end
    soon; nobody else is moved. Raises ``ProbeFailed`` when that is not allowed."""
    if _same_namespace([pid]):
        return
    try:
        descriptor = os.open(f"{procfs.PROC}/{pid}/ns/net", os.O_RDONLY)
    except OSError as error:
        raise ProbeFailed(f"the server is in another network namespace: {error.strerror}") from error
    try:
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.setns(descriptor, CLONE_NEWNET):
            reason = os.strerror(ctypes.get_errno())
            raise ProbeFailed(f"the server is in another network namespace, which we may not enter: {reason}")
    finally:
        os.close(descriptor)


def status_endpoint(target: Target, pid: int, paths: Sequence[str], limit: float) -> HttpProbe:
    """The first of ``paths`` (one endpoint under the names that releases gave it) that the server knows, asked within
    ``limit`` seconds from the network namespace of ``pid``."""
    enter_network_of(pid)
    for path in paths:
        answer = get(target, path, limit)
        if answer.status != 404:
            return answer
    return answer


def get(target: Target, path: str, limit: float) -> HttpProbe:
    """One GET within ``limit`` seconds, past any proxy; the body is not kept."""
    host = ANY_ADDRESS.get(target.host, target.host)
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
