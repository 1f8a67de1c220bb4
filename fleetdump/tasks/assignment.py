"""Who gets which samples of a run: decided once when it begins, and found again from then on."""

from __future__ import annotations

import functools
import heapq
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from fleetdump.agent.formats import is_share, server_of
from fleetdump.dataset.intake import DataSet, Lines, mark_of
from fleetdump.dataset.rows import BrokenRow
from fleetdump.errors import UsageError
from fleetdump.hostpatterns import compress
from fleetdump.inventory import HostConfig
from fleetdump.ledger import Ledger, Planned

Target = tuple[str, str]
"""A server of the fleet: (host name, server name)."""


@dataclass
class Share:
    """One server's share: the rows as lines (``formats.row_line``), and their SHA-256."""

    lines: Lines

    @functools.cached_property
    def sha256(self) -> str:
        return self.lines.sha256


@dataclass
class RunPlan:
    """Who works on what. ``resumed``: the shares are those of an earlier call, ``broken``: rows that no host gets."""

    run: str
    shares: dict[Target, Share]
    samples: int
    broken: list[BrokenRow]
    resumed: bool

    def of_host(self, host: str) -> dict[str, Share]:
        """The shares of one host, by server."""
        return {server: share for (name, server), share in self.shares.items() if name == host}


def targets_of(configs: Iterable[HostConfig]) -> list[Target]:
    """All servers of these hosts; raises ``UsageError`` when there is none, or a host does not say what to capture."""
    targets = []
    for config in configs:
        config.capture.spec()
        targets += [(config.name, server.name) for server in config.servers]
    if not targets:
        raise UsageError("no server to work on the data", next_step="give the hosts servers in the inventory")
    return targets


def balance(tokens: Mapping[str, int], targets: Sequence[Target]) -> dict[str, Target]:
    """Give each sample to a server so that the sums of tokens are about equal: the longest first, each to the server
    with the least so far. The same input gives the same answer."""
    loads = [(0, n) for n in range(len(targets))]
    assigned = {}
    for sample in sorted(tokens, key=lambda sample: -tokens[sample]):
        load, n = heapq.heappop(loads)
        assigned[sample] = targets[n]
        heapq.heappush(loads, (load + tokens[sample], n))
    return assigned


def is_begun(ledger_file: Path) -> bool:
    """Whether the run of this ledger has shares: then nothing of it is decided any more. Raises ``OSError`` for a place
    where no run can be."""
    try:
        ledger_file.parent.stat()
    except FileNotFoundError:
        return False
    if not ledger_file.exists():
        return False
    with Ledger(ledger_file) as ledger:
        return ledger.is_planned


def open_run(
    ledger: Ledger, run: str, data: DataSet, targets: Sequence[Target], found: Mapping[Target, str] | None = None
) -> RunPlan:
    """Decide who gets what, and record it; for a run that the ledger has, find the shares of before. Where the run was
    begun from another folder, or the ledger was lost, the same data and servers give the same shares, which the hosts
    know: ``found`` are the shares that they have (``share_id``), beside those that ``collect`` has read. Where the
    servers that have a share were all that the run was begun with, further ``targets`` get none.

    Raises ``UsageError`` for a run that was begun with other data or servers (the difference is named); nothing is
    recorded then. New ``targets`` are ignored by a run that has begun: its shares are fixed.
    """
    if ledger.is_planned:
        return _resume(ledger, run, data)
    foreign = sorted(ledger.ids() - set(data.rows))
    if foreign:
        raise _other_data(ledger, run, data, [("missing", foreign)])
    there = _first_shares(ledger, found or {})
    assigned, plan = _share_out(run, data, targets)
    if not _makes(plan, there):
        refusal = _other_shares(plan, there)
        begun_with = [target for target in targets if target in there]
        if not begun_with:
            raise refusal
        assigned, plan = _share_out(run, data, begun_with)
        if not _makes(plan, there):
            raise refusal
    planned = (
        Planned(row_id, row.digest, *assigned[row_id], tokens=row.tokens, line=row.line)
        for row_id, row in data.rows.items()
    )
    shares = [(*target, share.sha256) for target, share in plan.shares.items()]
    ledger.plan(planned, shares, [(row.line, f"{row.reason}: {row.detail}") for row in data.broken])
    ledger.note("data", data.name)
    return plan


def require_begun_with(ledger_file: Path, run: str, data: DataSet) -> None:
    """Raise ``UsageError`` when the run of this ledger was begun with other data (the difference is named)."""
    if is_begun(ledger_file):
        with Ledger(ledger_file) as ledger:
            _resume(ledger, run, data)


def _share_out(run: str, data: DataSet, targets: Sequence[Target]) -> tuple[dict[str, Target], RunPlan]:
    """Each sample's server, and the plan that this makes."""
    assigned = balance({row_id: row.tokens for row_id, row in data.rows.items()}, targets)
    ids: dict[Target, list[str]] = {}
    for row_id in data.rows:
        ids.setdefault(assigned[row_id], []).append(row_id)
    return assigned, _plan(run, data, ids, resumed=False)


def _plan(run: str, data: DataSet, ids: Mapping[Target, Sequence[str]], resumed: bool) -> RunPlan:
    shares = {target: Share(data.lines(rows)) for target, rows in ids.items()}
    return RunPlan(run, shares, len(data.rows), data.broken, resumed)


def _first_shares(ledger: Ledger, found: Mapping[Target, str]) -> dict[Target, str]:
    """The shares that servers were given when the run began (their ``share_id``): not what was taken over from others
    later, nor one of which nothing is known."""
    known = {(share.host, share.server): share.share_id for share in ledger.shares()}
    known.update(found)
    return {target: name for target, name in known.items() if name and server_of(target[1]) == target[1]}


def _makes(plan: RunPlan, there: Mapping[Target, str]) -> bool:
    """Whether the shares that servers have are all of this plan, row for row."""
    return all(target in plan.shares and is_share(name, plan.shares[target].sha256) for target, name in there.items())


def _other_shares(plan: RunPlan, there: Mapping[Target, str]) -> UsageError:
    """Rows of other texts under the same ids, or other servers, or those in another order."""
    begun_with, now = sorted(there), sorted(plan.shares)
    differs = [one for one in begun_with if one not in plan.shares or not is_share(there[one], plan.shares[one].sha256)]
    if begun_with == now:
        why = "it has other rows there: the data, or the order of the hosts in the inventory, is another one"
    else:
        why = f"{_named(begun_with)} {'has' if len(begun_with) == 1 else 'have'} a share of it that was not made of "
        why += f"this data for {_named(now)}"
    hosts = ",".join(compress(sorted({host for host, _ in begun_with})))
    return UsageError(
        f"the data or the servers are not what run {plan.run} was begun with",
        _named(differs),
        why,
        f"give the same file and the hosts it was begun with, in their order (--host {hosts}, when these are all), or "
        f"the command in the folder it was begun in; fleetdump collect --run {plan.run} brings what the hosts have of "
        "it, and fleetdump attach watches; for other data use another --run name",
    )


NAMED = 5


def _named(targets: Sequence[Target]) -> str:
    names = [f"{host}/{server}" for host, server in targets]
    return ", ".join(names[:NAMED]) + (f" and {len(names) - NAMED} more" if len(names) > NAMED else "")


def _resume(ledger: Ledger, run: str, data: DataSet) -> RunPlan:
    """The ledger has the samples in the data set's order: one pass over both, nothing of a million is kept twice."""
    ids: dict[Target, list[str]] = {}
    planned = ledger.assignments()
    for row_id, row in data.rows.items():
        sample = next(planned, None)
        if sample is None or (sample.id, sample.digest) != (row_id, row.digest):
            raise _difference(ledger, run, data)
        ids.setdefault((sample.host, sample.server), []).append(row_id)
    if next(planned, None) is not None:
        raise _difference(ledger, run, data)
    return _plan(run, data, ids, resumed=True)


def _difference(ledger: Ledger, run: str, data: DataSet) -> UsageError:
    before = {sample.id: sample.digest for sample in ledger.assignments()}
    changed = [row_id for row_id, row in data.rows.items() if row.digest != before.get(row_id, row.digest)]
    added = [row_id for row_id in data.rows if row_id not in before]
    gone = [row_id for row_id in before if row_id not in data.rows]
    return _other_data(ledger, run, data, [("changed", changed), ("new", added), ("missing", gone)])


def _other_data(ledger: Ledger, run: str, data: DataSet, kinds: Sequence[tuple[str, list[str]]]) -> UsageError:
    named = [f"{len(ids)} {kind} (first: {ids[0]!r})" for kind, ids in kinds if ids] or ["in another order"]
    why = f"rows: {', '.join(named)}"
    if ledger.is_planned:  # else it knows what the hosts have, and not what there was
        before = mark_of(ledger.noted("data") or "other data", ((one.id, one.digest) for one in ledger.assignments()))
        why += f"; begun with {before.in_words}, given {data.mark.in_words}"
    return UsageError(
        f"the data is not what run {run} was begun with",
        why=why,
        next_step="give the same file, or another --run name for other data",
    )
