"""``fleetdump clean``: nothing of ours is left on the host, and no sample that was not collected is lost by it."""

from __future__ import annotations

from pathlib import Path

from fleetdump.agent.protocol import CleanArgs, CleanResult, StatusArgs, StatusResult, interpreters
from fleetdump.errors import HostError
from fleetdump.fleet import Host
from fleetdump.ledger import Ledger
from fleetdump.tasks._task import task


@task
def clean(host: Host, runs_dir: Path, data: bool = False, discard_uncollected: bool = False) -> CleanResult:
    """Remove the agent's state, and with ``data`` the shards; raises ``HostError`` when samples would be lost."""
    if data and not discard_uncollected:
        _refuse_uncollected(host, runs_dir)
    args = CleanArgs(
        capture_dirs=[host.config.capture.dir] if host.config.capture.dir else [],
        interpreters=interpreters(host.config.servers),
        data=data,
    )
    return host.call(args, CleanResult, verb="clean", deadline=300.0)


def _refuse_uncollected(host: Host, runs_dir: Path) -> None:
    """Compare what the host has committed with what the ledger knows to be pulled and verified."""
    status = host.call(StatusArgs(), StatusResult, verb="status")
    for share in status.shares:
        pulled = _pulled(runs_dir / share.run / "ledger.sqlite", host.config.name, share.server)
        if pulled < share.done:
            raise HostError(
                f"run {share.run}: {share.done - pulled} of {share.done} samples were not collected from here",
                host.config.name,
                "clean --data would delete their only copy",
                f"fleetdump collect --data --run {share.run}, or add --discard-uncollected",
                code="conflict",
            )


def _pulled(path: Path, host: str, server: str) -> int:
    if not path.exists():
        return 0
    with Ledger(path) as ledger:
        return ledger.collected(host, server)
