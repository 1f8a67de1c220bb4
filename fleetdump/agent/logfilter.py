"""Which lines of a log belong to a rank, or to a phase of the start."""

from __future__ import annotations

from fleetdump.agent.logmarks import LogParser, rank_of_line


class LineFilter:
    """Says of each line of a log, in order, whether it is wanted. ``rank``: a tensor-parallel rank (-1: all of them);
    ``phase``: where the rank that logs it is, or the server as a whole for a line of none (empty: anywhere);
    ``ranks``: how many the server has."""

    def __init__(self, rank: int, phase: str, ranks: int) -> None:
        self._rank, self._phase, self._single = rank, phase, ranks == 1
        self._parser = LogParser("", ranks)
        self._of = ""
        """The rank of the last stamped line: what follows without a stamp (a traceback) is that one's."""

    def keeps(self, line: str) -> bool:
        """Take the next line, without its newline."""
        of = rank_of_line(line)
        self._of = self._of if of is None else of
        before = self._phase_of(self._of)
        if self._phase:
            self._parser.feed(line.encode("utf-8", "replace") + b"\n")
        if self._rank >= 0 and not self._is_wanted_rank():
            return False
        # The line that ends a phase is that phase's last, and the next one's first.
        return not self._phase or self._phase in (before, self._phase_of(self._of))

    def _is_wanted_rank(self) -> bool:
        """A server of one rank logs no rank."""
        return f"TP{self._rank}" in self._of.split() or (self._single and self._rank == 0)

    def _phase_of(self, rank: str) -> str:
        marks = self._parser.marks
        known = marks.ranks.get(rank)
        return known.phase if known is not None and not marks.server_markers else marks.phase
