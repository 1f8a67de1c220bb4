"""The samples of a share that are not settled: what is open, and what is decided and not yet written."""

from __future__ import annotations

import logging
from typing import Dict, List, Sequence

from fleetdump.agent.attempts import FREE_OF_CHARGE
from fleetdump.agent.commit import Committer, Ready
from fleetdump.agent.formats import RejectedLine, Rid
from fleetdump.agent.reporter import Reporter
from fleetdump.agent.schedule import Sample
from fleetdump.agent.share import Share

log = logging.getLogger("fleetdump.driver")


class Samples:
    """Everything of ``share`` that is neither in the manifest nor rejected nor given away, with what earlier drivers
    have tried. The reporter counts along."""

    def __init__(self, share: Share, run: str, committer: Committer, reporter: Reporter):
        self._share = share
        self._run = run
        self._committer = committer
        self._reporter = reporter
        self.open: Dict[str, Sample] = {}
        """Samples that are neither in the manifest nor rejected, by id."""
        self.rejects: Dict[str, RejectedLine] = {}
        """Decided, not yet written, by id; rows that still come of them do not count."""
        self.ready: Dict[str, Ready] = {}
        """Captured whole, not yet in the manifest, by id."""
        self._read_work()
        self._recall_attempts()

    def lacks(self, sample_id: str) -> bool:
        """Whether nothing is decided of the sample: it is neither settled nor about to be."""
        return sample_id in self.open and sample_id not in self.ready and sample_id not in self.rejects

    def wants(self, rid: Rid) -> bool:
        """Whether what was captured by that attempt is of interest."""
        return rid.run == self._run and rid.sample in self.open

    def reject(self, sample: Sample, reason: str, detail: str) -> None:
        """Decide that it will not exist."""
        log.warning("%s is rejected: %s: %s", sample.id, reason, detail)
        self.rejects[sample.id] = self._committer.rejection(sample.id, reason, detail, sample.attempt)

    def written(self, rejects: Sequence[RejectedLine], batch: Sequence[Ready]) -> List[str]:
        """These lines exist: the samples are settled. Their ids."""
        for line in rejects:
            del self.rejects[line.id]
        for ready in batch:
            del self.ready[ready.sample.id]
        ids = [*(line.id for line in rejects), *(ready.sample.id for ready in batch)]
        for sample_id in ids:
            sample = self.open.pop(sample_id, None)
            if sample is not None:
                self._reporter.tokens_left -= sample.tokens
        return ids

    def gave_away(self, samples: Sequence[Sample]) -> None:
        """They are not the share's any more."""
        for sample in samples:
            del self.open[sample.id]
            self._reporter.tokens_left -= sample.tokens
            self._reporter.progress.tokens -= sample.tokens
        self._reporter.progress.samples -= len(samples)

    def _read_work(self) -> None:
        given_away = set(self._share.read_withdrawn())
        self._reporter.progress.samples -= len(given_away)
        for sample, line in self._share.scan_work():
            if line["id"] in given_away:
                self._reporter.progress.tokens -= sample.tokens if sample is not None else 0
                continue
            if line["id"] in self._committer.settled or line["id"] in self.open or line["id"] in self.rejects:
                continue
            if sample is None:
                self.rejects[line["id"]] = self._committer.rejection(line["id"], line["reason"], line["detail"], 0)
            else:
                self.open[sample.id] = sample
                self._reporter.tokens_left += sample.tokens

    def _recall_attempts(self) -> None:
        for line in self._share.read_attempts():
            sample = self.open.get(line.id)
            if sample is None:
                continue
            sample.attempt = max(sample.attempt, line.attempt)
            if line.outcome == "killed_server":
                sample.deaths += 1
            elif line.outcome != "sent" and line.outcome not in FREE_OF_CHARGE:
                sample.failures += 1
