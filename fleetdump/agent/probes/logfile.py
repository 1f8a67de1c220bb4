"""The server's log at two moments: what it says, and whether it says anything new."""

from __future__ import annotations

import errno
import os
import re
import stat
import time
from typing import BinaryIO, Dict, List, Tuple

from fleetdump.agent import logmarks
from fleetdump.agent.evidence_engine import LogFacts, RankMarks
from fleetdump.agent.probes.logtroubles import EXCERPT, Troubles, split_lines
from fleetdump.agent.probes.vllmlog import VllmLog
from fleetdump.agent.scrub import scrub

READ_LIMIT = 1 << 20
"""Of a longer log the beginning (marks of the start) and the end are read, half of this each: in half a second."""
LINE_LIMIT = 16 << 10
"""Bytes of a line that are looked at: a file of zeros or of anything else is one line."""
_STAMP = re.compile(rb"\[(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d)")
_LONG_LINE = re.compile(rb"([^\n]{%d})[^\n]+" % LINE_LIMIT)
_TP = re.compile(r"TP(?P<rank>\d+)")


class LogReader:
    """Reads one log twice. A log that is not there gives ``LogFacts(exists=False)``."""

    def __init__(self, path: str, ranks: int) -> None:
        self._path = path
        self._parser = logmarks.LogParser(ranks=ranks)
        self._position = self._skipped = 0
        self._troubles = Troubles()
        self._vllm = VllmLog()
        self._rest = b""
        self._stamp = self._news_stamp = ""
        self._first = (0, 0, 0)

    def first(self) -> None:
        """Read what is there now."""
        self._read()
        marks = self._parser.marks
        self._first = (self._position, marks.news, marks.forwards)

    def second(self) -> LogFacts:
        """Read what has come since, and say what the log says."""
        self._read()
        if not self._path or not os.path.exists(self._path):
            return LogFacts(self._path)
        marks, facts = self._parser.marks, os.stat(self._path)
        position, news, forwards = self._first
        troubles: Dict[str, str] = {name: scrub(line) for name, line in marks.troubles.items()}
        troubles.update(self._troubles.first)
        quiet = round(max(0.0, time.time() - facts.st_mtime), 1)
        last, torn = self._last_line()
        self._vllm.feed(last)
        crash = marks.crashed if marks.crashed and marks.crashed.kind in ("exception", "warmup") else None
        return LogFacts(
            path=self._path,
            exists=True,
            bytes=facts.st_size,
            skipped=self._skipped,
            lines=marks.lines,
            growth=self._position - position,
            news=marks.news - news,
            forwards=marks.forwards - forwards,
            quiet_seconds=quiet,
            news_seconds=self._news_seconds(quiet),
            phase=marks.phase if marks.ranks else self._vllm.phase or marks.phase,
            ready=marks.ready,
            server_marks=list(marks.server_markers),
            ranks=[self._rank_marks(rank) for _, rank in sorted(marks.ranks.items())],
            crash=scrub(crash.reason) if crash else "",
            crash_label=crash.rank if crash else "",
            troubles=troubles,
            repeated=marks.repeated,
            repeated_line=scrub(marks.repeated_line),
            running_requests=marks.running_requests or self._troubles.running,
            zero_statistics=self._troubles.zero_statistics,
            fallbacks=_fallbacks(marks),
            waits_for_lock=self._troubles.waits_for_lock(),
            bad_argument=self._troubles.usage.refused,
            nearest_argument=self._troubles.usage.nearest(),
            tail=[scrub(line) for line in [*marks.tail, *([last] if torn else [])][-logmarks.TAIL_LINES :]],
            unterminated=not self._ends_with_newline(),
        )

    def _read(self) -> None:
        try:
            with _open_regular(self._path) as file:
                size = os.fstat(file.fileno()).st_size
                if size - self._position > READ_LIMIT:
                    file.seek(self._position)
                    self._feed(file.read(READ_LIMIT // 2) + b"\n")
                    self._skipped += size - READ_LIMIT - self._position
                    self._position = size - READ_LIMIT // 2
                file.seek(self._position)
                data = file.read(READ_LIMIT)
        except OSError:
            return
        self._feed(data)
        self._position += len(data)

    def _feed(self, data: bytes) -> None:
        data = _LONG_LINE.sub(rb"\1", data)
        *whole, self._rest = (self._rest + data).split(b"\n")
        self._by_line(data)
        for line in split_lines(b"\n".join(whole)):
            self._troubles.feed(line)
            self._vllm.feed(line)
        self._rest = self._rest[-LINE_LIMIT:]

    def _last_line(self) -> Tuple[str, bool]:
        """What there is of a last line without newline, and whether nothing ends it yet: a bar that was drawn once and
        never again has neither newline nor carriage return."""
        parts = [part for line in split_lines(self._rest) if (part := line.strip())]
        return parts[-1][:EXCERPT] if parts else "", bool(parts) and not self._rest.endswith(b"\r")

    def _by_line(self, data: bytes) -> None:
        """Feed line by line and note when the log last said anything new, by its own stamps."""
        for line in data.splitlines(keepends=True):
            stamp = _STAMP.search(line)
            self._stamp = stamp[1].decode() if stamp else self._stamp
            news = self._parser.marks.news
            self._parser.feed(line)
            if self._parser.marks.news != news:
                self._news_stamp = self._stamp

    def _news_seconds(self, quiet: float) -> float:
        if not self._news_stamp or not self._parser.marks.repeated:
            return 0.0
        return round(max(0.0, _seconds(self._stamp) - _seconds(self._news_stamp)) + quiet, 1)

    def _rank_marks(self, marks: logmarks.RankMarks) -> RankMarks:
        match = _TP.search(marks.rank)
        rank = int(match["rank"]) if match else 0
        facts = RankMarks(marks.rank, rank, marks.phase, list(marks.markers)[-40:], scrub(marks.last_line))
        facts.nccl, facts.interface = self._troubles.nccl.get(rank, ""), self._troubles.interfaces.get(rank, "")
        return facts

    def _ends_with_newline(self) -> bool:
        try:
            with _open_regular(self._path) as file:
                file.seek(max(0, self._position - 1))
                return file.read(1) in (b"", b"\n")
        except OSError:
            return True


def _open_regular(path: str) -> BinaryIO:
    """Open a file that is a file: to read from a pipe would take what the server writes away from its reader."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.ESPIPE, "the log is no regular file", path)
    return os.fdopen(descriptor, "rb")


def _fallbacks(marks: logmarks.LogMarks) -> List[str]:
    """Replaced model classes, each with the first import of a model file that failed."""
    why = next((f": {module}: {why}" for module, why in marks.ignored_imports.items() if ".models." in module), "")
    return [scrub(name + why) for name in marks.fallbacks]


def _seconds(stamp: str) -> float:
    return time.mktime(time.strptime(stamp, "%Y-%m-%d %H:%M:%S"))
