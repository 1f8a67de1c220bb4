"""NCCL's own monitor (RAS): which rank has launched fewer operations than the others, and who does not answer.

The answer's text is never kept or shown: with a stopped or missing peer it holds a communicator of hundreds of ranks
whose numbers are bytes of memory. What is parsed is bounded and checked instead.
"""

from __future__ import annotations

import re
import socket
import time
from typing import List, Mapping, Optional, Tuple

from fleetdump.agent.evidence_engine import OperationCounts, RankCount, RasFacts
from fleetdump.agent.probes.bounded import ProbeFailed
from fleetdump.agent.probes.net import enter_network_of

ADDRESS = ("127.0.0.1", 28028)
"""NCCL's own choice."""
VARIABLE = "NCCL_RAS_ADDR"
LOOPBACK = ("localhost", "127.0.0.1", "[::1]", "::1", "")
LIMIT = 4.0
"""Seconds; a stopped rank makes RAS take 1.3."""
ANSWER_BYTES = 1 << 20
RANKS = 4096
"""No communicator has more ranks: a larger number is garbage."""
_WORST = ("", "OK", "MISMATCH", "INCOMPLETE", "ERROR")

_GROUP = re.compile(r"^ {1,8}\d+ +(?P<comms>\d+) +\d+ +\d+ +(?P<ranks>\d+) +\d+ +\w+ +(?P<status>[A-Z]+)\s*$")
_COMMUNICATOR = re.compile(r"^#(?P<name>\d+-\d+) \(")
_DIFFER = re.compile(r"^ +Communicator ranks have different (?P<operation>\w+) operation counts")
_COUNT = re.compile(
    r"^ +Rank (?P<rank>-?\d+) has (?:launched up to operation (?P<count>\d+)|not launched any operations)"
    r"(?: -- GPU \S+ managed by process (?P<pid>\d+))?"
)
_SILENT = re.compile(r"^ +(?:Rank -?\d+ -- GPU \S+ managed by process|Process) (?P<pid>\d+) (?:on node|.*managing GPU)")


def ras(pids: List[int], environment: Optional[Mapping[str, str]] = None) -> RasFacts:
    """Ask the RAS of the server that was started in ``environment``; facts of processes other than ``pids`` are dropped
    (several jobs share NCCL's port where none has one of its own).

    RAS listens on loopback, so it is asked in the network namespace of the first of ``pids``. Raises ``ProbeFailed``
    when it listens elsewhere, when nobody listens, or the answer does not come in time.
    """
    address = address_in(environment or {})
    if pids:
        enter_network_of(pids[0])
    return only(parse_ras(_ask(address)), pids)


def address_in(environment: Mapping[str, str]) -> Tuple[str, int]:
    """Where RAS listens by ``NCCL_RAS_ADDR`` (``host:port``); other machines are not asked (``ProbeFailed``)."""
    text = environment.get(VARIABLE, "")
    if not text:
        return ADDRESS
    host, _, port = text.rpartition(":")
    if host not in LOOPBACK or not port.isdigit() or not 0 < int(port) < 65536:
        raise ProbeFailed(f"NCCL RAS: {VARIABLE} is no port of this machine's loopback")
    return ("::1" if "::1" in host else ADDRESS[0], int(port))


def _ask(address: Tuple[str, int]) -> str:
    deadline = time.monotonic() + LIMIT
    try:
        with socket.create_connection(address, timeout=LIMIT) as connection:
            connection.sendall(b"verbose status\n")
            answer = b""
            while len(answer) < ANSWER_BYTES and time.monotonic() < deadline:
                connection.settimeout(max(0.1, deadline - time.monotonic()))
                chunk = connection.recv(1 << 16)
                if not chunk:
                    break
                answer += chunk
    except OSError as error:
        raise ProbeFailed(f"NCCL RAS on port {address[1]}: {error}") from error
    return answer.decode("ascii", "replace")


def parse_ras(text: str) -> RasFacts:
    """The answer to ``verbose status``; lines that do not fit are skipped."""
    facts, communicator = RasFacts(), ""
    for line in text[:ANSWER_BYTES].splitlines():
        group, named, differ = _GROUP.match(line), _COMMUNICATOR.match(line), _DIFFER.match(line)
        count, silent = _COUNT.match(line), _SILENT.match(line)
        if group and 0 < int(group["ranks"]) <= RANKS:
            facts.communicators += int(group["comms"])
            facts.status = max(facts.status, _known(group["status"]), key=_WORST.index)
        elif named:
            communicator = named["name"]
        elif differ:
            facts.mismatches.append(OperationCounts(differ["operation"], communicator))
        elif count and facts.mismatches and 0 <= int(count["rank"]) < RANKS:
            one = RankCount(int(count["rank"]), int(count["count"] or 0), int(count["pid"] or 0))
            facts.mismatches[-1].ranks.append(one)
        elif silent and int(silent["pid"]) not in facts.silent_pids:
            facts.silent_pids.append(int(silent["pid"]))
    return facts


def only(facts: RasFacts, pids: List[int]) -> RasFacts:
    """``facts`` without those of other jobs' processes."""
    known = set(pids)
    facts.silent_pids = [pid for pid in facts.silent_pids if pid in known]
    facts.mismatches = [m for m in facts.mismatches if any(not one.pid or one.pid in known for one in m.ranks)]
    return facts


def _known(status: str) -> str:
    return status if status in _WORST else "ERROR"
