"""The driver's ``progress.json``: counters, rate and ETA, rewritten each second."""

from __future__ import annotations

import logging
import os
import shutil
import time
from collections import deque
from pathlib import Path
from typing import Deque, Optional, Tuple

from fleetdump.agent.commit import Committer
from fleetdump.agent.runmessages import RunProgress
from fleetdump.agent.share import Share, ShareSpec

log = logging.getLogger("fleetdump.driver")

RATE_WINDOW = 10.0
PROGRESS_SECONDS = 1.0
ERROR_LENGTH = 300


class Reporter:
    """Says how far the share is. ``progress`` may be changed freely between reports; ``tokens_left`` are those of
    samples that are not settled, for the ETA."""

    def __init__(self, share: Share, spec: ShareSpec):
        self.progress = RunProgress(spec.run, share.server, "tokenising", samples=spec.rows, driver_pid=os.getpid())
        self.tokens_left = 0
        self._share = share
        self._directory = spec.directory
        self._written = 0.0
        self._rates: Deque[Tuple[float, int, int]] = deque()
        """Time, tokens and bytes so far, of the last ``RATE_WINDOW`` seconds."""

    def failed(self, attempt: str, outcome: str, why: str) -> None:
        """An attempt ended without a sample."""
        self.progress.retries += 1
        self.progress.last_error = f"{attempt}: {outcome}: {why}".encode("utf-8", "replace").decode()[:ERROR_LENGTH]

    def forget_rate(self) -> None:
        """Nothing could be done until now: it says nothing of how fast the server is."""
        self._rates.clear()

    def report(self, state: str, detail: str, committer: Optional[Committer] = None) -> None:
        """Write the file when a second has passed since the last time, or the state is another."""
        now = time.monotonic()
        progress = self.progress
        if state == progress.state and now - self._written < PROGRESS_SECONDS:
            return
        self._written = now
        progress.state, progress.detail, progress.updated_at = state, detail, time.time()
        if committer is not None:
            self._count(now, committer)
        try:
            self._share.save_progress(progress)
        except OSError as error:  # a full disk: the figures can wait
            log.warning("progress.json: %s", error)

    def _count(self, now: float, committer: Committer) -> None:
        totals, progress = committer.totals, self.progress
        progress.done = totals.samples
        progress.rejected = committer.rejected
        progress.tokens_done = totals.tokens
        progress.bytes_written = totals.bytes
        progress.manifest_bytes = committer.manifest_bytes
        progress.disk_free_bytes = _free(self._directory)
        self._rates.append((now, totals.tokens, totals.bytes))
        while now - self._rates[0][0] > RATE_WINDOW:
            self._rates.popleft()
        began, tokens, written = self._rates[0]
        seconds = now - began
        rate = (totals.tokens - tokens) / seconds if seconds else 0.0
        progress.tokens_per_second = rate
        progress.bytes_per_second = (totals.bytes - written) / seconds if seconds else 0.0
        progress.eta_seconds = self.tokens_left / rate if rate else 0.0


def _free(directory: Path) -> Optional[int]:
    """Of its disk; a run's folder is made with its first row."""
    try:
        while not directory.exists():
            directory = directory.parent
        return shutil.disk_usage(str(directory)).free
    except OSError:
        return None
