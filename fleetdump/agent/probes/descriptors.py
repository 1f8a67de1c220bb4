"""Descriptors of a server's processes: who is at the other end of pipes and sockets, and where their output goes."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Dict, Iterable, List, Optional, Set, Tuple

from fleetdump.agent import procfs
from fleetdump.agent.evidence_process import PipeEnd, ProcessFacts, SocketFacts
from fleetdump.agent.guard import Guard, Stuck
from fleetdump.agent.probes.bounded import ProbeFailed
from fleetdump.agent.probes.net import enter_network_of, tcp_table
from fleetdump.agent.probes.unixpeers import unix_peers

SOCKETS = 30
UNIX_SECONDS = 2.0
_LAST = {"ESTABLISHED": 1, "UNIX": 2}
PEERS = 8
Holders = Dict[int, List[Tuple[int, int, str]]]
"""Pipe inode to (pid, fd, "r" or "w") of every process of the server that has it open."""


def collect_pipes(pid: int, holders: Holders) -> None:
    """Add the pipes that ``pid`` has open."""
    for fd, target in procfs.fd_targets(pid).items():
        if target.startswith("pipe:["):
            holders.setdefault(int(target[6:-1]), []).append((pid, fd, _mode(pid, fd)))


class Sockets:
    """Sockets of the server's network namespace, and which of its processes are at their ends."""

    def __init__(self, members: List[int]) -> None:
        first = next(iter(members), os.getpid())
        self._tcp = tcp_table(first)
        self._owners = {inode: pid for pid in members for inode in procfs.socket_inodes(pid)}
        known = {inode: facts for inode, facts in self._tcp.items() if inode in self._owners}
        self._at = {(facts.local, facts.remote): self._owners[inode] for inode, facts in known.items()}
        self._unix = _unix_peers(first)

    def of(self, pid: int, targets: Dict[int, str]) -> List[SocketFacts]:
        """Of one process whose descriptors point to ``targets``: those that listen or wait for an answer first."""
        inodes = {fd: int(target[8:-1]) for fd, target in targets.items() if target.startswith("socket:[")}
        found = [facts for fd, inode in sorted(inodes.items()) if (facts := self._facts(pid, fd, inode))]
        return sorted(found, key=lambda facts: _LAST.get(facts.state, 0))[:SOCKETS]

    def _facts(self, pid: int, fd: int, inode: int) -> Optional[SocketFacts]:
        known = self._tcp.get(inode)
        if known:
            peer = self._at.get((known.remote, known.local), 0)
            return SocketFacts(fd, known.state, known.local, known.remote, peer)
        other = self._owners.get(self._unix.get(inode, 0), pid)
        return SocketFacts(fd, "UNIX", "", "", other) if other != pid else None


def _unix_peers(pid: int) -> Dict[int, int]:
    """``unix_peers`` in the network namespace of ``pid``; empty where that may not be entered."""

    def ask() -> Dict[int, int]:
        enter_network_of(pid)
        return unix_peers()

    guard = Guard(UNIX_SECONDS)  # in a thread of its own, which stays in that namespace
    try:
        return guard.call(ask)
    except (ProbeFailed, OSError, Stuck):
        return {}
    finally:
        guard.close()


def _mode(pid: int, fd: int) -> str:
    flags = procfs.parse_fields(procfs.read_text(f"{procfs.PROC}/{pid}/fdinfo/{fd}", 4096) or "").get("flags", "0")
    return "w" if int(flags, 8) & os.O_ACCMODE == os.O_WRONLY else "r"


def describe(process: ProcessFacts, pipes: Holders, outside: Outside, sockets: Sockets, log: str) -> None:
    """Fill in what ``process`` has open; ``log`` is the watched file as we see it."""
    targets = procfs.fd_targets(process.pid)
    process.fd_count = len(targets)
    process.fd_limit = _fd_limit(process.pid)
    process.stdout, process.stderr = targets.get(1, ""), targets.get(2, "")
    process.writes_log = _is_file(process.pid, 1, log) if log and 1 in targets else None
    process.errors_in_log = _is_file(process.pid, 2, log) if log and 2 in targets else None
    process.pipes = [end for inode in pipes for end in _pipe_ends(process, inode, pipes[inode], outside)]
    _standard_pipes(process, targets, outside)
    process.sockets = sockets.of(process.pid, targets)


def _pipe_ends(
    process: ProcessFacts, inode: int, holders: List[Tuple[int, int, str]], outside: Outside
) -> List[PipeEnd]:
    """This process's ends of one pipe. A pipe to itself (an event loop's wake-up) says nothing and is left out, but
    for the one that its main thread waits on: then nobody else can ever write."""
    pid = process.pid
    alone = {holder for holder, _, _ in holders} == {pid} and {mode for _, _, mode in holders} == {"r", "w"}
    ends = []
    for holder, fd, mode in holders:
        if holder != pid or (alone and not (mode == "r" and fd == process.syscall_fd)):
            continue
        peers: Set[int] = {other for other, _, theirs in holders if theirs != mode} - ({pid} if alone else set())
        ends.append(PipeEnd(fd, inode, mode, sorted(peers), own_writer=alone and not outside.holders(inode)))
    return ends


def _standard_pipes(process: ProcessFacts, targets: Dict[int, str], outside: Outside) -> None:
    """Who outside of the server is at the other end of its standard streams: a ``tee`` that stopped, an ssh session
    that waits for its end."""
    for fd in (0, 1, 2):
        target = targets.get(fd, "")
        if not target.startswith("pipe:["):
            continue
        inode, mode = int(target[6:-1]), _mode(process.pid, fd)
        others = [one for one in outside.holders(inode) if one.mode != mode][:PEERS]
        process.pipes = [end for end in process.pipes if end.fd != fd]
        end = PipeEnd(fd, inode, mode, [one.pid for one in others])
        end.peer_states = "".join(one.state for one in others)
        end.peer_names = sorted({one.name for one in others})
        process.pipes.append(end)


@dataclass(frozen=True)
class Holder:
    """A process that has a pipe open."""

    pid: int
    name: str
    state: str
    mode: str


class Outside:
    """Processes beside ``members`` (those whose descriptors are looked at anyway) and the pipes that they have open;
    looked for once, when asked."""

    def __init__(self, members: Iterable[int]) -> None:
        self._members = set(members)
        self._found: Optional[Dict[int, List[Tuple[int, int]]]] = None

    def holders(self, inode: int) -> List[Holder]:
        """Who else has that pipe open."""
        if self._found is None:
            self._found = {}
            for pid in set(procfs.pids()) - self._members:
                for fd, target in procfs.fd_targets(pid).items():
                    if target.startswith("pipe:["):
                        self._found.setdefault(int(target[6:-1]), []).append((pid, fd))
        stats = ((procfs.read_stat(pid), fd) for pid, fd in self._found.get(inode, []))
        return [Holder(stat.pid, stat.comm, stat.state, _mode(stat.pid, fd)) for stat, fd in stats if stat]


def _is_file(pid: int, fd: int, path: str) -> Optional[bool]:
    try:
        return os.path.samestat(os.stat(f"{procfs.PROC}/{pid}/fd/{fd}"), os.stat(path))
    except OSError:
        return None


def _fd_limit(pid: int) -> int:
    for line in (procfs.read_text(f"{procfs.PROC}/{pid}/limits", 4096) or "").splitlines():
        if line.startswith("Max open files"):
            soft = line.split()[3]
            return int(soft) if soft.isdigit() else 0
    return 0
