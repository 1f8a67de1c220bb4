"""``fleetdump collect``: take in the hosts' manifests and, if told, their shards.

``pull`` works on one host and may run on many at once; ``merge.merge`` then writes the run's one manifest and the
report. A host that cannot be reached is not in the way of the others: what it has is counted as lost until it is
collected.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from fleetdump.agent.hostmessages import StatusArgs, StatusResult
from fleetdump.agent.runmessages import FINISHED, ManifestArgs, ManifestResult
from fleetdump.dataset.lines import LineFault, Source, check_line, check_reject
from fleetdump.errors import HostError
from fleetdump.fleet import Host
from fleetdump.ledger import Ledger, ShareRow
from fleetdump.tasks._task import task
from fleetdump.tasks.merge import PullOptions
from fleetdump.tasks.pullshards import PullReport, pull_shards

MANIFEST_DEADLINE = 600.0


# --------------------------------------------------------------------------- one host
@task
def pull(host: Host, options: PullOptions, ledger: Ledger) -> PullReport:
    """Take in what is new in the host's manifests and, with ``options.to``, its shards. Raises what ``Host.call``
    raises; then everything pulled so far is kept, and the next call goes on from there."""
    report = PullReport(host.config.name)
    for share in _shares(host, options.run, ledger, report):
        _pull_lines(host, options.run, share, ledger, report)
    if options.to is not None:
        pull_shards(host, options.run, options.to / options.run / host.config.name, ledger, report)
    return report


def _shares(host: Host, run: str, ledger: Ledger, report: PullReport) -> list[ShareRow]:
    """The host's shares of the run: those that it says it has, so that a deleted ledger is rebuilt by collecting. What
    it says of the run goes into ``report``."""
    status = host.call(StatusArgs(), StatusResult, verb="status")
    for progress in status.shares:
        if progress.run == run:
            ledger.meet_share(host.config.name, progress.server, progress.share_id)
    report.goes_on = run_goes_on(status, run)
    there = {progress.server for progress in status.shares if progress.run == run}
    report.has_run = bool(there)
    return [share for share in ledger.shares(host.config.name) if share.server in there]


def run_goes_on(status: StatusResult, run: str) -> bool:
    """Whether somebody works on the run on that host: a driver, or who drives it, from there or elsewhere."""
    drivers = (share.driver_alive and share.state not in FINISHED for share in status.shares if share.run == run)
    controllers = (one.alive for one in status.controllers if one.run == run)
    return any(drivers) or any(controllers) or any(by.run == run for by in status.steering)


def _pull_lines(host: Host, run: str, share: ShareRow, ledger: Ledger, report: PullReport) -> None:
    """Lines and the offset behind them go into the ledger in one transaction: neither is lost nor taken twice. Files
    that are not those read before (restored from a copy, say) are read anew."""
    try:
        _pull_lines_from(host, run, share, ledger, report)
    except HostError as error:
        if error.code != "conflict" or not (share.offset or share.rejected_offset):
            raise
        _pull_lines_from(host, run, replace(share, offset=0, rejected_offset=0), ledger, report)


def _pull_lines_from(host: Host, run: str, share: ShareRow, ledger: Ledger, report: PullReport) -> None:
    source = Source(run, host.config.name, share.server)
    events: list[dict[str, Any]] = []
    result = host.call(
        ManifestArgs(run, share.server, share.offset, share.rejected_offset),
        ManifestResult,
        verb="manifest",
        on_event=events.append,
        deadline=MANIFEST_DEADLINE,
    )
    if result.progress.share_id != share.share_id:
        report.faults.append(f"{source}: the run was begun anew there while it was read: collect again")
        return
    with ledger.transaction():
        for event in events:
            if event.get("event") == "manifest":
                faults = take_line(ledger, source, event["line"])
                report.lines += not faults
            elif event.get("event") == "rejected":
                faults = take_reject(ledger, source, event["line"])
                report.rejected += not faults
            else:
                continue
            report.faults += faults
        ledger.advance(host.config.name, share.server, result.offset, result.rejected_offset)
    if result.progress.state != "done":
        report.unfinished.append(f"{source}: {result.progress.state} {result.progress.detail}".strip())


def take_line(ledger: Ledger, source: Source, text: str) -> list[str]:
    """Check a manifest line and take it in; what is wrong with it, in words."""
    try:
        line = check_line(text, source)
        _check_known(line.id, ledger)
    except LineFault as fault:
        return [f"{source}: manifest: {fault}"]
    ledger.deliver(source.host, line, text)
    return []


def take_reject(ledger: Ledger, source: Source, text: str) -> list[str]:
    """Check a reject line and take it in; what is wrong with it, in words."""
    try:
        line = check_reject(text, source)
        _check_known(line.id, ledger)
    except LineFault as fault:
        return [f"{source}: rejected: {fault}"]
    ledger.reject(source.host, line)
    return []


def _check_known(sample: str, ledger: Ledger) -> None:
    if ledger.is_planned and not ledger.knows(sample):
        raise LineFault(f"sample {sample[:80]!r} is not of this data set")
