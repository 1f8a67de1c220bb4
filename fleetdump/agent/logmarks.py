"""What an SGLang log says: phase of each rank, model class, the tap's mark, readiness, crashes, and whether it moves.

Pure and incremental: ``LogParser.feed`` takes bytes as they come, torn anywhere, and the answer does not depend on
where they were torn. Texts are those of SGLang 0.4.6 to 0.5.23. Memory is bounded, however long the log is.
"""

from __future__ import annotations

import re
import time
from dataclasses import dataclass, field
from typing import Dict, List, Optional, Set, Tuple

from fleetdump.agent.procfs import Rank
from fleetdump.agent.specs import PHASES

LINE_LIMIT = 1 << 16
"""Bytes of one line that are looked at; SGLang's longest, the dump of its arguments, has about 12 KB."""
SHAPE_LIMIT = 20_000
TAIL_LINES = 60
EXCERPT = 500

_ANSI = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
_STAMP = re.compile(r"\[(?P<time>\d{4}-\d\d-\d\d \d\d:\d\d:\d\d)(?:[.,]\d+)?(?P<rank>(?: [A-Z_]+\d+)*)\] ?")
_RANK_PART = re.compile(r"(?P<name>DP|PP|TP|EP)(?P<value>\d+)")
_REFUSED = re.compile(r"\bfleetdump-tap \d+ refused \((?P<why>.*?)\)(?: rank=|\s*$)")
_RANK_WORD = re.compile(r"\b(?:tp_)?rank[ =:]+(?P<value>\d+)")
_BAR = re.compile(r"^(?P<label>.*?):?\s*\d+%.*?(?P<done>\d+)/(?P<total>\d+)")
_VARYING = re.compile(r"0x[0-9a-f]+|\d+(?:\.\d+)?")
_EXCEPTION = re.compile(r"(?:\w+\.)*[A-Z]\w*(?:Error|Exception|Exit|Interrupt|Timeout|Expired)(?::|$)")
_MODEL_CLASS = re.compile(r"\btype=(?P<name>\w+)")
_MEMORY = re.compile(r"mem usage=(?P<gb>\d+(?:\.\d+)?) GB")
_FALLBACK = re.compile(r"\b(?P<name>\w+) has no SGLang implementation, falling back to Transformers implementation")
_IGNORED = re.compile(r"Ignore import error when loading (?P<module>[\w.]+): (?P<why>.*)")
_FORWARD = re.compile(r"(?:Prefill|Decode) batch\b")
_POST = re.compile(r'"POST /(?P<path>\S*) HTTP/[\d.]+" (?P<status>\d{3})')
_RUNNING = re.compile(r"#running-req: (?P<n>\d+)")


@dataclass(frozen=True)
class Marker:
    """A text that SGLang logs at a known point. ``phase`` is where the process is from then on (empty: no change),
    ``only_from`` limits that to a process in one of these phases; ``server`` marks come from the launcher."""

    name: str
    text: re.Pattern[str]
    phase: str = ""
    only_from: Tuple[str, ...] = ()
    server: bool = False


def _marker(name: str, text: str, phase: str = "", only_from: Tuple[str, ...] = (), server: bool = False) -> Marker:
    return Marker(name, re.compile(text), phase, only_from, server)


MARKERS = (
    _marker("init begin", r"Init (?:torch distributed|parallel) begin", "init"),
    _marker("init end", r"Init (?:torch distributed|parallel) ends"),
    _marker("weights begin", r"Load weight begin", "weights"),
    _marker("weights end", r"Load weight end", "kv_pool", ("weights",)),
    _marker("kv cache", r"KV Cache is allocated", "kv_pool"),
    _marker("kv pool end", r"Memory pool end", "jit"),
    _marker("jit", r"DeepGEMM JIT|DeepGEMM warmup|[Ff]lash[Ii]nfer autotune", "jit", ("kv_pool",)),
    _marker("capture begin", r"Capture .{0,60}?\bgraph begin", "capture"),
    _marker("capture end", r"Capture .{0,60}?\bgraph end"),
    _marker("tree cache", r"Tree cache initialized", "http", ("jit", "capture")),
    _marker("scheduler ready", r"max_total_num_tokens=", "http"),
    _marker("http start", r"Started server process", "http", server=True),
    _marker("http open", r"Uvicorn running on", "warmup", server=True),
    _marker("model info", r'"GET /(?:get_)?model_info HTTP/[\d.]+" 200', server=True),
    _marker("ready", r"The server is fired up and ready to roll", "serving", server=True),
)

_ANY_MARKER = re.compile("|".join(marker.text.pattern for marker in MARKERS))

FATAL = (
    ("exception", re.compile(r"Scheduler hit an exception")),
    ("child_exception", re.compile(r"\b\w+ hit an exception")),
    ("child_death", re.compile(r"Subprocess \w+ \(pid=\d+\) crashed with exit code")),
    ("warmup", re.compile(r"Initialization failed\. warmup error")),
    ("sigquit", re.compile(r"Received sigquit from a child process|SIGQUIT received")),
)
"""Marks after which SGLang ends by itself (with CUDA it can take more than 60 s until it does)."""

TROUBLES = (
    ("port_in_use", re.compile(r"EADDRINUSE|[Aa]ddress already in use")),
    ("out_of_memory", re.compile(r"[Oo]ut of memory|OutOfMemoryError|Not enough memory|Cannot allocate memory")),
    ("disk_full", re.compile(r"No space left on device|ENOSPC")),
    ("watchdog", re.compile(r"[Ww]atchdog timeout")),
    ("too_many_files", re.compile(r"Too many open files")),
    ("terminated", re.compile(r"SIGTERM received")),
)
_ANY_TROUBLE = re.compile("|".join(pattern.pattern for _, pattern in (*FATAL, *TROUBLES)))


@dataclass
class Crash:
    """The first fatal mark. ``rank`` is empty when the log does not tell it; ``reason`` is the exception's own line."""

    kind: str
    rank: str
    reason: str
    line: int


@dataclass
class RankMarks:
    """What one scheduler has logged. ``weights_gb`` is the memory that its weights took, None until they are loaded."""

    rank: str
    place: Rank
    phase: str = "imports"
    markers: List[str] = field(default_factory=list)
    model_class: str = ""
    weights_gb: Optional[float] = None
    marked: bool = False
    last_line: str = ""


@dataclass
class Bar:
    """A progress bar, for instance of weight shards."""

    label: str
    done: int
    total: int


@dataclass
class PhaseStart:
    """When the server as a whole entered a phase: ``at`` in seconds since 1970 by the log's own stamps (whole seconds,
    the host's time zone; 0 when the log had none yet), and after how many lines."""

    phase: str
    at: float
    line: int


@dataclass
class LogMarks:
    """State of a log. ``lines`` counts newlines, so that a progress bar is one line however often it is redrawn.

    ``news`` counts what moves: markers, lines of a shape that was not there before, progress bars that advance.
    Lines that differ from earlier ones in numbers only are not news; ``repeated`` of them came since the last news.
    ``forwards`` counts prefill and decode batch lines. ``ready_line`` is the line number of the ready mark (0: none).
    """

    lines: int = 0
    bytes: int = 0
    phases: List[PhaseStart] = field(default_factory=list)
    ranks: Dict[str, RankMarks] = field(default_factory=dict)
    server_markers: List[str] = field(default_factory=list)
    ready: bool = False
    ready_line: int = 0
    crashed: Optional[Crash] = None
    last_error: str = ""
    troubles: Dict[str, str] = field(default_factory=dict)
    refused: Dict[str, str] = field(default_factory=dict)
    """By rank, why the patch does not work in this server."""
    fallbacks: List[str] = field(default_factory=list)
    ignored_imports: Dict[str, str] = field(default_factory=dict)
    news: int = 0
    forwards: int = 0
    running_requests: int = 0
    posts: int = 0
    bar: Optional[Bar] = None
    last_new_line: str = ""
    repeated: int = 0
    repeated_line: str = ""
    tail: List[str] = field(default_factory=list)

    @property
    def phase(self) -> str:
        """Phase of the server as a whole: that of its slowest rank until HTTP starts."""
        return self.phases[-1].phase if self.phases else PHASES[0]

    @property
    def marked(self) -> List[str]:
        """Ranks that logged the tap's mark."""
        return sorted(name for name, rank in self.ranks.items() if rank.marked)

    @property
    def classes(self) -> Dict[str, str]:
        """Model class by rank, of those that have loaded weights."""
        return {name: rank.model_class for name, rank in sorted(self.ranks.items()) if rank.model_class}

    def slowest(self) -> List[str]:
        """Ranks in the earliest phase, if not all are in the same one."""
        order = {name: PHASES.index(rank.phase) for name, rank in sorted(self.ranks.items())}
        behind = [name for name, place in order.items() if place == min(order.values())]
        return behind if len(behind) < len(order) else []

    def phase_seconds(self, until: float, since: float = 0.0) -> Dict[str, float]:
        """Seconds spent in each phase up to ``until``, by the log's stamps; ``since`` is when the process started."""
        seconds: Dict[str, float] = {}
        starts = [PhaseStart(PHASES[0], since, 0), *self.phases]
        for now, following in zip(starts, [*starts[1:], PhaseStart("", until, 0)]):
            if now.at and following.at:
                seconds[now.phase] = seconds.get(now.phase, 0.0) + max(0.0, following.at - now.at)
        return seconds


def parse_log(data: bytes, mark: str = "", ranks: int = 0) -> LogMarks:
    """Marks of a whole log; ``mark`` and ``ranks`` as in ``LogParser``."""
    parser = LogParser(mark, ranks)
    parser.feed(data)
    return parser.marks


class LogParser:
    """Follows one log. ``mark`` is the tap's mark (empty: none); ``ranks`` is the number of schedulers expected, of
    which those that have not logged yet count as still importing (0: unknown)."""

    def __init__(self, mark: str = "", ranks: int = 0) -> None:
        self.marks = LogMarks()
        self._mark = mark
        self._expected = ranks
        self._pending = b""
        self._shapes: Set[str] = set()
        self._bars: Dict[str, int] = {}
        self._log_time = 0.0
        self._server_phase = ""
        self._in_traceback = False
        self._in_crash = False
        """Inside the traceback of the first fatal mark: until the next stamped line."""

    def feed(self, data: bytes) -> None:
        """Take the next bytes of the log. A last line without newline waits for its rest."""
        self.marks.bytes += len(data)
        *whole, rest = (self._pending + data).split(b"\n")
        for raw in whole:
            self.marks.lines += 1
            for part in raw.split(b"\r"):
                self._part(part)
        # A bar is redrawn for minutes without a newline: what a carriage return ends is complete and can be read now.
        *parts, self._pending = rest.split(b"\r")
        for part in parts:
            self._part(part)
        self._pending = self._pending[:LINE_LIMIT]

    # ------------------------------------------------------------------ lines
    def _part(self, raw: bytes) -> None:
        text = _ANSI.sub("", raw[:LINE_LIMIT].decode("utf-8", "replace")).rstrip()
        if not text.strip():
            return
        # Several processes write to one log: a bar without newline is followed by another process's line.
        stamps = list(_STAMP.finditer(text))
        starts = [0, *(stamp.start() for stamp in stamps if stamp.start())]
        for begin, end in zip(starts, [*starts[1:], len(text)]):
            if text[begin:end].strip():
                self._line(text[begin:end])

    def _line(self, text: str) -> None:
        marks = self.marks
        marks.tail.append(text[:EXCERPT])
        del marks.tail[:-TAIL_LINES]
        stamp = _STAMP.match(text)
        rank = ""
        if stamp:
            self._log_time = _seconds(stamp["time"])
            rank = _rank_name(stamp["rank"])
            text = text[stamp.end() :]
            self._in_traceback = self._in_crash = False
        bar = None if stamp else _BAR.match(text[:EXCERPT])
        if bar:
            self._bar(bar)
            return
        self._error(text, rank)
        marked = self._tap_mark(text, rank)
        fresh = self._marker(text, rank) or marked
        self._remember(text, rank)
        self._count_news(text, rank, fresh)

    def _bar(self, bar: re.Match[str]) -> None:
        label, done = _VARYING.sub("#", bar["label"]), int(bar["done"])
        self.marks.bar = Bar(bar["label"].strip()[:EXCERPT], done, int(bar["total"]))
        if done > self._bars.get(label, -1):
            self._news(bar.string)
        if len(self._bars) < SHAPE_LIMIT:
            self._bars[label] = done

    # ------------------------------------------------------------------ what a line means
    def _marker(self, text: str, rank: str) -> bool:
        if not _ANY_MARKER.search(text):
            return False
        marker = next(m for m in MARKERS if m.text.search(text))
        if marker.server:
            return self._server_marker(marker)
        marks = self._rank(rank)
        fresh = marker.name not in marks.markers
        if fresh:
            marks.markers.append(marker.name)
        if marker.phase and (not marker.only_from or marks.phase in marker.only_from):
            marks.phase = marker.phase
        if marker.name == "weights end":
            self._weights(marks, text)
        self._update_phase()
        return fresh

    def _server_marker(self, marker: Marker) -> bool:
        fresh = marker.name not in self.marks.server_markers
        if fresh:
            self.marks.server_markers.append(marker.name)
        self._server_phase = marker.phase or self._server_phase
        if marker.name == "ready" and not self.marks.ready:
            self.marks.ready = True
            self.marks.ready_line = self.marks.lines
        self._update_phase()
        return fresh

    def _weights(self, marks: RankMarks, text: str) -> None:
        model_class, memory = _MODEL_CLASS.search(text), _MEMORY.search(text)
        if model_class:
            marks.model_class = model_class["name"]
        if memory:
            marks.weights_gb = float(memory["gb"])

    def _tap_mark(self, text: str, rank: str) -> bool:
        refused = _REFUSED.search(text[:EXCERPT])
        if refused:
            self.marks.refused[rank or str(Rank())] = refused["why"]
        if not self._mark or self._mark not in text:
            return False
        word = _RANK_WORD.search(text)
        marks = self._rank(rank or (str(Rank(tp=int(word["value"]))) if word else ""))
        fresh = not marks.marked
        marks.marked = True
        return fresh

    def _error(self, text: str, rank: str) -> None:
        marks = self.marks
        if self._in_traceback and _EXCEPTION.match(text[:EXCERPT]):
            marks.last_error = text[:EXCERPT]
            if marks.crashed and self._in_crash:
                marks.crashed.reason = text[:EXCERPT]
        if "Traceback (most recent call last)" in text:
            self._in_traceback = True
        if not _ANY_TROUBLE.search(text):
            return
        kind = next((kind for kind, pattern in FATAL if pattern.search(text)), "")
        if kind and marks.crashed is None:
            only = kind == "exception" and set(marks.ranks) <= {"TP0"}  # at TP 1 SGLang logs no rank
            marks.crashed = Crash(kind, rank or ("TP0" if only else ""), text[:EXCERPT], marks.lines)
            self._in_crash = True
        for trouble, pattern in TROUBLES:
            if trouble not in marks.troubles and pattern.search(text):
                marks.troubles[trouble] = text[:EXCERPT]

    def _remember(self, text: str, rank: str) -> None:
        marks = self.marks
        if rank in marks.ranks:
            marks.ranks[rank].last_line = text[:EXCERPT]
        if _FORWARD.match(text):
            marks.forwards += 1
            running = _RUNNING.search(text)
            marks.running_requests = int(running["n"]) if running else 0
        elif _POST.search(text):
            marks.posts += 1
        fallback, ignored = _FALLBACK.search(text), _IGNORED.search(text)
        if fallback and fallback["name"] not in marks.fallbacks:
            marks.fallbacks.append(fallback["name"])
        if ignored and len(marks.ignored_imports) < SHAPE_LIMIT:
            marks.ignored_imports[ignored["module"]] = ignored["why"][:EXCERPT]

    # ------------------------------------------------------------------ news, ranks, phases
    def _count_news(self, text: str, rank: str, fresh: bool) -> None:
        shape = f"{rank} {_VARYING.sub('#', text[:EXCERPT])}"
        if fresh or (shape not in self._shapes and len(self._shapes) < SHAPE_LIMIT):
            self._shapes.add(shape)
            self._news(text)
            return
        self.marks.repeated += 1
        self.marks.repeated_line = text[:EXCERPT]

    def _news(self, text: str) -> None:
        self.marks.news += 1
        self.marks.last_new_line = text[:EXCERPT]
        self.marks.repeated = 0
        self.marks.repeated_line = ""

    def _rank(self, name: str) -> RankMarks:
        name = name or str(Rank())
        return self.marks.ranks.setdefault(name, RankMarks(name, _place(name)))

    def _update_phase(self) -> None:
        ranks = self.marks.ranks.values()
        missing = len(self.marks.ranks) < self._expected
        slowest = min((rank.phase for rank in ranks), key=PHASES.index, default=PHASES[0])
        phase = self._server_phase or (PHASES[0] if missing else slowest)
        if phase != self.marks.phase:
            self.marks.phases.append(PhaseStart(phase, self._log_time, self.marks.lines))


def rank_of_line(line: str) -> Optional[str]:
    """The rank that a stamped line is of, as in ``LogMarks.ranks``; empty for the launcher's (and for all of a server
    of one rank), None for a line without a stamp."""
    stamp = _STAMP.match(_ANSI.sub("", line[:EXCERPT]))
    return _rank_name(stamp["rank"]) if stamp else None


def _seconds(stamp: str) -> float:
    return time.mktime(time.strptime(stamp, "%Y-%m-%d %H:%M:%S"))


def _rank_name(prefix: str) -> str:
    return str(_place(prefix)) if _RANK_PART.search(prefix) else ""


def _place(text: str) -> Rank:
    parts = {part["name"]: int(part["value"]) for part in _RANK_PART.finditer(text)}
    return Rank(parts.get("DP", 0), parts.get("PP", 0), parts.get("TP", 0), parts.get("EP", 0))
