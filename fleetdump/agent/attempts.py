"""The attempts of a share: which requests went out, and why each ended. attempts.jsonl keeps them for later drivers."""

from __future__ import annotations

import logging
import os
import time
from dataclasses import dataclass
from typing import BinaryIO, Dict, List

from fleetdump.agent.formats import AttemptLine, Rid
from fleetdump.agent.gate import Launch
from fleetdump.agent.jsonl import encode_line, open_lines, write_all
from fleetdump.agent.reporter import Reporter
from fleetdump.agent.schedule import Sample
from fleetdump.agent.share import Share

log = logging.getLogger("fleetdump.driver")

FREE_OF_CHARGE = ("disk_full", "backpressure", "server_gone")
"""Ends of an attempt that say nothing about the sample: they do not count towards max_attempts."""


@dataclass
class Sent:
    """An attempt whose request went out. ``answered``: monotonic time of its good reply, 0 before."""

    sample: Sample
    rid: Rid
    launch: Launch
    alone: bool
    answered: float = 0.0


class Attempts:
    """A context manager: whoever leaves it writes no more."""

    def __init__(self, share: Share, reporter: Reporter):
        self.sent: Dict[str, Sent] = {}
        """The attempt that is under way, by sample id."""
        self.lost: List[Sent] = []
        """Their connection broke; what is to be thought of them is known when the server is back."""
        self._path = share.attempts
        self._reporter = reporter
        self._file: BinaryIO = open_lines(share.attempts)

    def __enter__(self) -> Attempts:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def begin(self, sent: Sent) -> None:
        """Note that its request goes out now; raises ``OSError`` when there is no room for the line."""
        self._write(sent, "sent", "")
        sent.sample.attempt = sent.rid.attempt
        self.sent[sent.sample.id] = sent

    def note_end(self, sent: Sent, outcome: str, detail: str) -> None:
        """Log why an attempt ended. On a full disk the note is lost: then a later driver counts one failure less."""
        log.warning("%s: %s: %s", sent.rid, outcome, detail)
        self._reporter.failed(str(sent.rid), outcome, detail)
        try:
            self._write(sent, outcome, detail)
        except OSError as error:
            log.warning("%s: %s", self._path, error)

    def settled(self, sample_id: str) -> None:
        """There is no need to wait for rows of it any more; its request may still be under way."""
        sent = self.sent.get(sample_id)
        if sent is not None and sent.answered:
            del self.sent[sample_id]

    def take_lost(self) -> List[Sent]:
        """Those that were lost, which are from now on the caller's."""
        lost, self.lost = self.lost, []
        return lost

    def alone_with(self, launch_id: str) -> str:
        """The sample that is, or was at its end, alone in flight with that launch; empty when there is none."""
        alone = (s.sample.id for s in self.sent.values() if s.alone and s.launch.launch_id == launch_id)
        return next((sample_id for sample_id in alone if not self.sent[sample_id].answered), "")

    def _write(self, sent: Sent, outcome: str, detail: str) -> None:
        """Not fsynced: the line must outlive this process, and a crash of the machine ends the server, and with it
        every request whose id could clash, too."""
        clean = detail.encode("utf-8", "replace").decode()
        line = AttemptLine(sent.sample.id, sent.rid.attempt, outcome, clean, time.time())
        end = self._file.seek(0, os.SEEK_END)
        try:
            write_all(self._file, encode_line(line))
        except OSError:
            self._file.truncate(end)
            raise
