"""Samples that two hosts have: one could not be reached for so long that others were given its work. Who only watches a
run has no ledger to tell them by, and asks the hosts."""

from __future__ import annotations

import json
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from fleetdump.agent.formats import server_of
from fleetdump.agent.runmessages import DoneArgs, DoneResult, HeldArgs, HeldResult, RunProgress
from fleetdump.errors import FleetdumpError
from fleetdump.fleet import Host

EVERY_SECONDS = 10.0
DEADLINE = 120.0


class Copies:
    """Of the shares of a run that are watched; used by the threads of all hosts. ``count`` is how many of their done
    samples are done by another share too, as of the last look."""

    def __init__(self, run: str):
        self.run = run
        self.count = 0
        self._hosts: dict[str, Host] = {}
        self._ways: dict[str, Host] = {}
        self._shares: dict[tuple[str, str], RunProgress] = {}

    def meet(self, host: Host) -> None:
        """A host whose shares are watched from now on."""
        self._hosts[host.config.name] = host

    def note(self, host: str, progress: RunProgress) -> None:
        """A share's newest state."""
        self._shares[host, progress.server] = progress

    @property
    def run_samples(self) -> int:
        """Of the whole run, each once; 0 when no share knows."""
        return max((share.run_samples for share in list(self._shares.values())), default=0)

    @property
    def there_are(self) -> bool:
        """Whether the shares have more samples than the run: then some have a second home."""
        return 0 < self.run_samples < sum(share.samples for share in list(self._shares.values()))

    @contextmanager
    def counted(self, every: float = EVERY_SECONDS) -> Iterator[None]:
        """Look every so often while the block lasts, and once more at its end. Nothing is asked of the hosts while
        there are no copies; one that does not answer leaves the count as it was."""
        over = threading.Event()

        def repeat() -> None:
            while not over.wait(every):
                self._look()

        thread = threading.Thread(target=repeat, name="copies", daemon=True)
        thread.start()
        try:
            yield
            over.set()
            thread.join()
            self._look()
        finally:
            over.set()
            self._leave()

    def _look(self) -> None:
        if not self.there_are:
            return
        try:
            self.count = self._done_twice()
        except FleetdumpError:
            self._leave()  # the next look opens them anew

    def _leave(self) -> None:
        while self._ways:
            self._ways.popitem()[1].close()

    def _done_twice(self) -> int:
        """What was handed over has a share of its own, so every copy is in one of those."""
        handed = [(host, share) for host, share in list(self._shares) if server_of(share) != share]
        ids = {sample for host, share in handed for sample in self._held(host, share)}
        body = [json.dumps({"id": sample}) for sample in sorted(ids)]
        done = Counter[str]()
        for name in list(self._hosts):
            args = DoneArgs(self.run)
            done.update(self._way(name).call(args, DoneResult, verb="done", body=body, deadline=DEADLINE).ids)
        return sum(times - 1 for times in done.values())

    def _held(self, host: str, share: str) -> list[str]:
        return self._way(host).call(HeldArgs(self.run, share), HeldResult, verb="held", deadline=DEADLINE).ids

    def _way(self, name: str) -> Host:
        """Another way to the host than that of whoever watches it, which ends with what there is to watch."""
        if name not in self._ways:
            self._ways[name] = self._hosts[name].again()
        return self._ways[name]
