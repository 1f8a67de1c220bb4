"""While a controller watches a run it takes in the hosts' manifest lines, now and then: so it knows what of a host that
cannot be reached any more is done, and ``collect`` finds little left to do."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from fleetdump.errors import FleetdumpError
from fleetdump.fleet import Host
from fleetdump.ledger import Ledger
from fleetdump.tasks.collect import pull
from fleetdump.tasks.merge import PullOptions

EVERY_SECONDS = 30.0


@contextmanager
def taking_in(host: Host, run: str, ledger: Ledger, every: float = EVERY_SECONDS) -> Iterator[None]:
    """Take in the host's lines every so often while the block works, and once more when it has ended. What is wrong
    with them, and why it cannot be had, is for others to say: for ``collect``, and for the block itself."""
    over = threading.Event()

    def take() -> bool:
        with suppress(FleetdumpError):
            return take_in(host, run, ledger)
        return True

    def repeat() -> None:
        while not over.wait(every) and take():
            pass

    thread = threading.Thread(target=repeat, name=f"intake-{host.config.name}", daemon=True)
    thread.start()
    try:
        yield
        over.set()
        thread.join()
        take()
    finally:
        over.set()


def take_in(host: Host, run: str, ledger: Ledger) -> bool:
    """Take in what is new in the host's manifests. False: a line is wrong; then all of it is left to ``collect``
    too, which reads it again and reports. Raises what ``Host.call`` raises."""
    name = host.config.name
    before = {share.server: (share.offset, share.rejected_offset) for share in ledger.shares(name)}
    if not pull(host, PullOptions(run), ledger).faults:
        return True
    for share in ledger.shares(name):
        ledger.advance(name, share.server, *before.get(share.server, (0, 0)))
    return False
