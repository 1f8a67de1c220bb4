"""What the hosts know of a run before this machine hands anything out: whether it was cancelled, and which samples
another controller has moved. The hosts know it best: this machine may have been away, or be new to the run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from fleetdump.agent.formats import server_of
from fleetdump.agent.hostmessages import StatusArgs, StatusResult
from fleetdump.agent.runmessages import CANCEL, HeldArgs, HeldResult, RunProgress
from fleetdump.errors import DrivenError, UsageError
from fleetdump.fleet import Host
from fleetdump.ledger import Ledger
from fleetdump.tasks.controller import require_alone
from fleetdump.tasks.steering import Controller


def shares_on(host: Host, run: str) -> list[RunProgress]:
    """The shares of ``run`` that the host has, as they are now."""
    return _of_run(host.call(StatusArgs(), StatusResult, verb="status"), run)


def _of_run(status: StatusResult, run: str) -> list[RunProgress]:
    return [share for share in status.shares if share.run == run]


def runs_on(host: Host) -> list[str]:
    """The runs that the host has a share of, by name."""
    return sorted({share.run for share in host.call(StatusArgs(), StatusResult, verb="status").shares})


@dataclass(frozen=True)
class Surveyed:
    """What a host has of a run: its shares, and of those that it took over at the word of another controller (by name)
    the samples."""

    shares: list[RunProgress]
    taken_over: dict[str, HeldResult] = field(default_factory=dict)

    def note(self, ledger: Ledger, host: str) -> None:
        """What ``host`` took over becomes its own in our ledger too, so that it is not given to somebody else once
        more. The ledger has its plan by then: planning gives each sample its first home."""
        for share in self.shares:
            held = self.taken_over.get(share.server)
            if held is not None:
                ledger.move(held.ids, host, share.server, held.share_sha256)
                ledger.meet_share(host, share.server, share.share_id)


def survey(host: Host, run: str, ledger: Ledger, me: Controller | None = None) -> Surveyed:
    """Ask the host; nothing is noted. Raises what ``require_alone`` does."""
    status = host.call(StatusArgs(), StatusResult, verb="status")
    require_alone(host, run, status, me)
    shares = _of_run(status, run)
    moved = [share.server for share in shares if server_of(share.server) != share.server]
    unknown = [share for share in moved if not ledger.share_sha256(host.config.name, share)]  # not moved by ourselves
    return Surveyed(shares, {share: host.call(HeldArgs(run, share), HeldResult, verb="held") for share in unknown})


@dataclass(frozen=True)
class Sight:
    """A host's shares of a run, and who drives it there, if another controller does."""

    shares: list[RunProgress]
    driven: DrivenError | None


def sight(host: Host, run: str, me: Controller) -> Sight:
    """See ``Sight``. Raises ``UsageError`` when the other one drives the run with other data."""
    status = host.call(StatusArgs(), StatusResult, verb="status")
    shares = _of_run(status, run)
    try:
        require_alone(host, run, status, me)
    except DrivenError as error:
        return Sight(shares, error)
    return Sight(shares, None)


def require_not_cancelled(run: str, shares: Mapping[str, Sequence[RunProgress]]) -> None:
    """Raise ``UsageError`` when hosts were told that the whole run is cancelled: others that were not reached then must
    not take it up."""
    told = sorted(host for host, states in shares.items() if any(is_cancelled(share) for share in states))
    if told:
        raise UsageError(
            f"run {run} was cancelled",
            ", ".join(told),
            "a cancelled run is not taken up again",
            f"fleetdump cancel --run {run} ends it on hosts that could not be reached; fleetdump collect brings what "
            "is done; for the rest use another --run name",
        )


def is_cancelled(share: RunProgress) -> bool:
    """Whether the whole run was cancelled, as this share's host was told."""
    return share.order == CANCEL and share.whole_run
