"""Known troubles, statistics and NCCL's own lines in a log, beyond the marks of phases.

A line names a trouble; whether it is the cause is for the diagnosis to decide from other facts.
"""

from __future__ import annotations

import re
from collections import deque
from dataclasses import dataclass, field
from typing import Deque, Dict, List, Tuple

from fleetdump.agent.probes.logusage import Usage
from fleetdump.agent.scrub import scrub

EXCERPT = 500
LAST_LINES = 12
REPEATS = 3
"""How often the same lock must be named in the last lines before it counts as waited for."""
RANKS = 256

TROUBLES: Tuple[Tuple[str, re.Pattern[str]], ...] = tuple(
    (name, re.compile("|".join(texts)))
    for name, *texts in (
        ("proxy_refused", r"Response \[(?:403|407|50[234])\]", r"\b(?:403|407|50[234]) .{0,60}for url",
         "ProxyError", "Tunnel connection failed", "Proxy Authentication Required"),
        # By a signal that nobody raises at himself: who only lost his peer leaves by another way.
        ("rank_died", r"Rank \d+ scheduler (?:died|is dead)",
         r"Subprocess scheduler_\d+ \(pid=\d+\) crashed with exit code -(?:7|9|11)\b"),
        ("shm_failed", r"(?i:(?:creat|extend|truncat|posix_fallocate)\w*.{0,60}(?:shared memory|/dev/shm))",
         r"(?i:/dev/shm.{0,80}(?:fail|error|no space))",
         r"No space left on device: '?/(?:dev/shm/|psm_|sem\.|torch_|nccl-)",
         r"unable to \w+ .{0,20}(?:shared memory|</torch_)"),
        ("bus_error", "(?i:bus error)", "SIGBUS"),
        ("cuda_802", "error 802", "(?i:system not yet initialized)"),
        ("memory_unbalanced", "(?i:memory capacity is unbalanced)"),
        ("ring_full", "(?i:no available (?:shared memory broadcast )?block)"),
        ("nccl_watchdog", "(?i:watchdog caught collective operation timeout)"),
        ("network_failed", r"NET/IB ?:.{0,30}Got completion .{0,80}(?:error|ERR)",
         r"NET/IB ?:.{0,30}Got async event ?: (?:port error|.*fatal)",
         r"NET/Socket.{0,60}(?:timed out|reset by peer|closed by remote peer)"),
        ("detokenizer_silent", "(?i:no response from (?:the )?detokenizer)"),
        ("loopback_fallback", "loopback address", "(?i:unable to resolve (?:the )?hostname)",
         r"hostname.{0,40}cannot be (?:resolved|retrieved)"),
        ("ipv4_unreachable", "Network is unreachable", "Address family not supported",
         "(?i:connect.{0,80}cannot assign requested address)"),
        ("cannot_bind", r"(?<!98\] )error while attempting to bind(?!.*in use)",
         "(?i:^(?!.*connect).*cannot assign requested address|could not bind(?!.*in use))"),
        ("hub_failed", r"(?:huggingface|modelscope|hf\.co|cas-bridge).{0,120}(?i:timed? ?out|max retries|unreachable)"),
        ("startup_timeout", r"(?i:(?:start|initiali[sz]e|ready)\w*.{0,40}(?:timed out|within \d+))",
         r"(?i:timed out waiting for .{0,20}(?:engines?|workers?|schedulers?|server)\b)"),
    )
)  # fmt: skip
_LOCK = re.compile(r"(?:acquire|waiting for|wait for).{0,40}lock.{0,20}?[\s'\"](?P<path>/[^\s'\",]+)", re.I)
_LOCK_WORDS = re.compile(r"still waiting to acquire lock|waiting for (?:the )?(?:file )?lock", re.I)
_STATISTICS = re.compile(r"tokens?/s|throughput", re.I)
_RATE = re.compile(
    r"generation throughput(?: \(token/s\))?: (?P<rate>[\d.]+)|gen throughput.{0,12}?: (?P<gen>[\d.]+)", re.I
)
_BUSY = re.compile(r"(?:Running|Waiting|Pending): (?P<n>\d+) req|#(?:running|queue)-req: (?P<m>\d+)", re.I)
_RUNNING = re.compile(r"Running: (?P<n>\d+) req", re.I)
_NCCL = re.compile(r":(?P<pid>\d+):\d+ \[(?P<gpu>\d+)\] NCCL (?P<kind>INFO|WARN) (?P<text>.*)")
_INTERFACE = re.compile(r"(?:NET/Socket|Bootstrap) ?: Using (?:\[\d+\])?(?P<name>[^\s<]+)")
_STAGES = (
    ("init end", re.compile(r"Init COMPLETE")),
    ("init begin", re.compile(r"Init START|ncclCommInitRank|comm 0x[0-9a-f]+ rank \d+ nranks")),
    ("bootstrap", re.compile(r"Bootstrap|NET/|NCCL version")),
)
_ORDER = ("", "bootstrap", "init begin", "init end")


@dataclass
class Troubles:
    """``first``: the first line of each trouble. ``nccl`` and ``interfaces`` are by GPU index."""

    first: Dict[str, str] = field(default_factory=dict)
    nccl: Dict[int, str] = field(default_factory=dict)
    interfaces: Dict[int, str] = field(default_factory=dict)
    last: Deque[str] = field(default_factory=lambda: deque(maxlen=LAST_LINES))
    zero_statistics: int = 0
    running: int = 0
    """Requests that run by the last of vLLM's statistics."""
    usage: Usage = field(default_factory=Usage)

    def feed(self, line: str) -> None:
        """Take one line of the log."""
        line = line.strip()
        if not line:
            return
        self.usage.feed(line)
        line = line[: 4 * EXCERPT]
        self.last.append(line)
        for name, pattern in TROUBLES:
            if name not in self.first and pattern.search(line):
                self.first[name] = scrub(line[:EXCERPT])
        self._statistics(line)
        self._nccl(line)

    def waits_for_lock(self) -> str:
        """The lock that the last lines name again and again; "a lock" when they do not tell its path."""
        waits = [line for line in self.last if _LOCK_WORDS.search(line)]
        if len(waits) < REPEATS:
            return ""
        match = _LOCK.search(waits[-1])
        return scrub(match["path"]) if match else "a lock"

    def _statistics(self, line: str) -> None:
        rates = [float(m["rate"] or m["gen"]) for m in _RATE.finditer(line)]
        if not rates or not _STATISTICS.search(line):
            return
        running = _RUNNING.search(line)
        self.running = int(running["n"]) if running else self.running
        busy = any(int(m["n"] or m["m"]) for m in _BUSY.finditer(line))
        self.zero_statistics = self.zero_statistics + 1 if busy and not any(rates) else 0

    def _nccl(self, line: str) -> None:
        match = _NCCL.search(line)
        if not match or int(match["gpu"]) >= RANKS:
            return
        gpu, text = int(match["gpu"]), match["text"]
        stage = next((name for name, pattern in _STAGES if pattern.search(text)), "")
        self.nccl[gpu] = max(self.nccl.get(gpu, ""), stage, key=_ORDER.index)
        interface = _INTERFACE.search(text)
        if interface:
            self.interfaces.setdefault(gpu, interface["name"])


def split_lines(data: bytes) -> List[str]:
    """Lines of a log as text."""
    return data.decode("utf-8", "replace").splitlines()
