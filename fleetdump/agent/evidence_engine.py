"""What the server and its engine say: log, port, status endpoints, NCCL and PyTorch; shared by both sides."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Dict, List


@dataclass
class RankMarks:
    """Log marks of one rank (``label`` as in the log, for instance "TP1"): the phase it has entered, what it logged."""

    label: str
    rank: int
    phase: str
    marks: List[str] = field(default_factory=list)
    last_line: str = ""
    nccl: str = ""
    """How far NCCL's own lines say that this rank got: bootstrap, init begin or init end; empty without such lines."""
    interface: str = ""
    """The network interface and address that NCCL or gloo chose, as logged ("br0:172.18.0.1")."""


@dataclass
class LogFacts:
    """The watched log. ``quiet_seconds``: since its last write. ``growth`` (bytes), ``news`` (lines that are no
    repetition, bars that advance) and ``forwards`` (batches) happened between the samples."""

    path: str = ""
    exists: bool = False
    bytes: int = 0
    skipped: int = 0
    """Bytes in the middle of a long log that were not read; ``lines`` are those of the rest."""
    lines: int = 0
    growth: int = 0
    news: int = 0
    forwards: int = 0
    quiet_seconds: float = 0.0
    phase: str = ""
    ready: bool = False
    server_marks: List[str] = field(default_factory=list)
    ranks: List[RankMarks] = field(default_factory=list)
    crash: str = ""
    """The first fatal exception's own line; empty when none was logged."""
    crash_label: str = ""
    """The rank that logged it, for instance "TP1"; empty when the log does not tell."""
    troubles: Dict[str, str] = field(default_factory=dict)
    """Known causes by name (port_in_use, disk_full, proxy_refused, rank_died …), each with its first line."""
    repeated: int = 0
    repeated_line: str = ""
    running_requests: int = 0
    zero_statistics: int = 0
    """Statistics lines at the log's end that say 0 tokens a second while requests run or wait."""
    tail: List[str] = field(default_factory=list)
    unterminated: bool = False
    """The last line has no newline yet."""
    news_seconds: float = 0.0
    """Seconds since the log last said anything new, by its own stamps; 0 when it does not tell."""
    fallbacks: List[str] = field(default_factory=list)
    """Model classes that SGLang could not import and replaced by another implementation, each with the reason."""
    waits_for_lock: str = ""
    """The lock file that the last lines name again and again; empty when they do not."""
    bad_argument: str = ""
    """What the server's argument parser refused, in its own words; empty when it refused nothing."""
    nearest_argument: str = ""
    """What it knows that is most like the refused one, from the usage or the choices that it printed."""


@dataclass
class PortFacts:
    """The server's port, in the launcher's own network namespace. ``owner_pid`` 0: nobody listens or it is hidden."""

    port: int = 0
    open: bool = False
    owner_pid: int = 0
    owner: str = ""
    ours: bool = False


@dataclass
class HttpProbe:
    """One GET: ``status`` 0 when there was no answer, then ``error`` says why (refused, timeout …)."""

    path: str
    status: int
    seconds: float
    error: str = ""


@dataclass
class RankCount:
    """How many operations of one kind a rank has launched (NCCL RAS); 0: none."""

    rank: int
    count: int
    pid: int = 0


@dataclass
class OperationCounts:
    """Counts of one operation ("AllReduce") that differ between the ranks of one communicator."""

    operation: str
    communicator: str
    ranks: List[RankCount] = field(default_factory=list)


@dataclass
class RasFacts:
    """What NCCL's own monitor (RAS, port 28028) says. ``status``: the worst of OK, MISMATCH, INCOMPLETE, ERROR over
    all communicators; empty when it did not answer. Texts are never kept: a missing peer fills them with garbage."""

    status: str = ""
    communicators: int = 0
    mismatches: List[OperationCounts] = field(default_factory=list)
    silent_pids: List[int] = field(default_factory=list)
    """Processes that did not answer their peers."""


@dataclass
class FlightRecord:
    """The last collective of one rank in PyTorch's flight recorder. ``sizes`` are the input's shape."""

    rank: int
    sequence: int
    operation: str
    state: str = ""
    sizes: List[int] = field(default_factory=list)
