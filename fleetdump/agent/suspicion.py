"""A server dies or falls silent: is one sample to blame? What is done with it then, and what a controller is told."""

from __future__ import annotations

from fleetdump.agent.attempts import Attempts, Sent
from fleetdump.agent.runmessages import RunProgress
from fleetdump.agent.samples import Samples
from fleetdump.agent.schedule import DEATHS_TO_DOUBT, DEATHS_TO_REJECT, Schedule


class Suspicion:
    """Deaths and silences of the server of one share, told in ``progress``."""

    def __init__(self, progress: RunProgress, samples: Samples, attempts: Attempts, schedule: Schedule):
        self._deaths_in_a_row = 0
        """Of the server with one sample alone in flight, since one was captured."""
        self._doubted_launch = ""
        """Died like that so often that no sample is to blame."""
        self._progress = progress
        self._samples = samples
        self._attempts = attempts
        self._schedule = schedule

    def captured_one(self) -> None:
        """The server is good for something."""
        self._deaths_in_a_row = 0

    def died_with(self, sent: Sent) -> None:
        """The server died with that request in flight: its sample is tried again alone, or rejected."""
        sample = sent.sample
        self._attempts.sent.pop(sample.id, None)
        if not sent.alone:
            self._attempts.note_end(sent, "server_gone", "in flight when the server died: it is tried alone")
            self._schedule.suspect(sample)
            return
        self._deaths_in_a_row += 1
        if sent.launch.launch_id == self._doubted_launch:
            deaths = self._deaths_in_a_row
            self._attempts.note_end(sent, "server_gone", f"the server died {deaths} times in a row: its own fault")
            self._schedule.suspect(sample)
            self._schedule.try_fresh()
            return
        sample.deaths += 1
        self._attempts.note_end(sent, "killed_server", f"launch {sent.launch.launch_id} died with it alone in flight")
        if sample.deaths < DEATHS_TO_REJECT:
            self._schedule.suspect(sample)
        else:
            why = f"the server died {sample.deaths} times with it alone in flight"
            self._samples.reject(sample, "killed_server", why)

    def tell_of_death(self, launch_id: str) -> None:
        """So that a controller can have the server restarted, and knows whether one sample may be to blame."""
        alone = self._attempts.alone_with(launch_id)
        if alone and self._is_doubtful():
            self._doubted_launch = launch_id
        self._progress.dead_launch = launch_id
        self._progress.suspect = alone if launch_id != self._doubted_launch else ""

    def tell_of_silence(self, launch_id: str, seconds: float) -> None:
        """So that a controller can have a look at a server that lives and gives nothing, and restart it if it hangs.
        0 ``seconds``: it is not silent, or not for longer than usual."""
        progress = self._progress
        progress.silent_seconds = seconds
        progress.silent_launch = launch_id if seconds else ""
        if not progress.dead_launch:
            is_to_blame = progress.silent_launch and not self._is_doubtful()
            progress.suspect = self._attempts.alone_with(launch_id) if is_to_blame else ""

    def _is_doubtful(self) -> bool:
        """Whether another death with one sample alone is the server's own fault. Only while another sample is left to
        try: else several that kill at the end of a share could not be told."""
        return bool(self._schedule.waiting) and self._deaths_in_a_row + 1 >= DEATHS_TO_DOUBT
