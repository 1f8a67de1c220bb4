"""Before a run is taken up, and after a place was lost: what the hosts know of it, and whether it is ours to drive."""

from __future__ import annotations

from dataclasses import dataclass

from fleetdump.cli._fleet import FleetOptions
from fleetdump.errors import DrivenError, UsageError
from fleetdump.fleet import fan_out
from fleetdump.hostpatterns import compress
from fleetdump.inventory import HostConfig
from fleetdump.ledger import Ledger
from fleetdump.tasks.assignment import Target
from fleetdump.tasks.steering import Controller
from fleetdump.tasks.survey import Surveyed, require_not_cancelled, survey


@dataclass(frozen=True)
class Around:
    """What the hosts that have told know of the run; ``knows_all``: none is missing."""

    hosts: dict[str, Surveyed]
    knows_all: bool

    @property
    def share_ids(self) -> dict[Target, str]:
        """Of all their shares."""
        return {(name, share.server): share.share_id for name, has in self.hosts.items() for share in has.shares}

    def note(self, ledger: Ledger) -> None:
        """Have the ledger know what they took over."""
        for name, has in self.hosts.items():
            has.note(ledger, name)


def look_around(
    options: FleetOptions, hosts: list[HostConfig], run_name: str, ledger: Ledger, me: Controller | None = None
) -> Around:
    """Learn what the hosts know of the run and we do not. Raises ``UsageError`` for a cancelled run, ``DrivenError``
    for one that another controller drives. A host that cannot be asked is reported with its share."""
    outcomes = fan_out(
        hosts, lambda host: survey(host, run_name, ledger, me), limit=options.jobs, options=options.connect_options()
    )
    for outcome in outcomes.values():
        if isinstance(outcome.error, (DrivenError, UsageError)):
            raise outcome.error
    told = {name: outcome.value for name, outcome in outcomes.items() if outcome.value is not None}
    require_not_cancelled(run_name, {name: has.shares for name, has in told.items()})
    return Around(told, len(told) == len(outcomes))


def require_ours(options: FleetOptions, hosts: list[HostConfig], ledger: Ledger, me: Controller) -> None:
    """A place was lost: raise ``DrivenError`` when another controller drives the run now, or has moved samples since.
    What became of them our ledger does not know."""
    around = look_around(options, hosts, me.run, ledger, me)
    moved_to = sorted(name for name, has in around.hosts.items() if has.taken_over)
    if moved_to:
        raise DrivenError(
            f"run {me.run} was driven by another controller meanwhile",
            ", ".join(compress(moved_to)),
            f"it has given samples to {', '.join(compress(moved_to))} that this one knows nothing of",
            f"fleetdump collect --run {me.run} says whether samples are missing",
        )
