"""``fleetdump clean``: nothing of ours is left on the host, and no sample that was not collected is lost by it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from fleetdump.agent.hostmessages import CleanArgs, CleanResult, StatusArgs, StatusResult
from fleetdump.agent.runmessages import CollectedShare
from fleetdump.agent.specs import interpreters
from fleetdump.fleet import Host
from fleetdump.ledger import Ledger
from fleetdump.tasks._task import task


@dataclass(frozen=True)
class CleanPlan:
    """``data``: the shards too. ``discard``: runs whose samples may go though they were not collected. ``dry_run``:
    only list what would go, and what would have it refused."""

    data: bool = False
    discard: tuple[str, ...] = ()
    dry_run: bool = False


@task
def clean(host: Host, runs_dir: Path, plan: CleanPlan | None = None) -> CleanResult:
    """Remove the agent's state, and with ``plan.data`` the shards; raises ``HostError`` conflict when samples would be
    lost: the host compares what it has committed with what the ledgers in ``runs_dir`` know to lie here."""
    plan = plan or CleanPlan()
    args = CleanArgs(
        capture_dirs=[host.config.capture.dir] if host.config.capture.dir else [],
        interpreters=interpreters(host.config.servers),
        data=plan.data,
        collected=_collected(host, runs_dir) if plan.data else [],
        discard=list(plan.discard),
        dry_run=plan.dry_run,
    )
    return host.call(args, CleanResult, verb="clean", deadline=300.0)


def _collected(host: Host, runs_dir: Path) -> list[CollectedShare]:
    """What of the host's shares was brought here. A share that begins after this look has nothing that was."""
    shares = []
    for share in host.call(StatusArgs(), StatusResult, verb="status").shares:
        path = runs_dir / share.run / "ledger.sqlite"
        if path.exists():
            with Ledger(path) as ledger:
                ids = sorted(ledger.collected(host.config.name, share.server))
            shares.append(CollectedShare(share.run, share.server, ids))
    return shares
