"""What a host answered, in lines: findings, server states, deploys, verdicts, and the recap that ends a command."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import datetime
from typing import Any

from fleetdump.agent.formats import server_of
from fleetdump.agent.hostmessages import AuditEntry, AuditResult
from fleetdump.agent.runmessages import VerifyResult
from fleetdump.diagnosis import Verdict
from fleetdump.hostpatterns import compress
from fleetdump.tasks.deployplan import DeployReport, ServerReport
from fleetdump.tasks.server import Diagnosis
from fleetdump.views.console import HostResult, count, duration, err, out, quoted, size

_STATUS_STYLE = {
    "ok": "green",
    "failed": "red",
    "unreachable": "magenta",
    "stall": "bold red",
    "locked": "yellow",
    "not started": "yellow",
}
_LOG_TAIL_OF = ("died", "stall", "timeout")
"""Outcomes whose cause may stand in the log's last lines."""
_LOG_TAIL_LINES = 12


def show_event(host: str, event: dict[str, Any]) -> None:
    """Steps and phases as they happen, each line with its host."""
    kind = event.get("event")
    if kind == "step":
        err.print(f"[dim]\\[{quoted(host)}][/] {quoted(str(event['text']))}")
    elif kind == "phase":
        after = duration(float(event.get("seconds", 0.0)))
        text = f"{event.get('server', '')}: {event.get('phase')} after {after}, {event.get('lines', 0)} log lines"
        err.print(f"[dim]\\[{quoted(host)}][/] {quoted(text)}")


def show_not_started(hosts: list[str], why: str) -> None:
    """Hosts whose turn never came in a roll-out."""
    err.print(f"[yellow]not started:[/] {quoted(', '.join(compress(sorted(hosts))))}: {quoted(why)}")


def show_alike(first: str, others: list[str]) -> None:
    """The hosts whose error is that of ``first``, which was told in full."""
    names = ", ".join(compress(others))
    err.print(f"[bold red]error:[/] {quoted(names)}: the same as {quoted(first)} ({count(len(others), 'host')})")


# --------------------------------------------------------------------------- audit
def show_audit(host: str, audit: AuditResult) -> None:
    """One line a change, the newest last, and who holds the host's lock."""
    out.print(f"[bold]{quoted(host)}[/]  {quoted(audit.holder) or 'nobody changes it now'}")
    for entry in audit.entries:
        began = datetime.fromtimestamp(entry.t).astimezone().isoformat(" ", "seconds")
        how = f" ({quoted(entry.code)})" if entry.code else ""
        outcome = f"{'[green]ok' if entry.ok else '[red]failed'}[/]{how} in {duration(entry.seconds)}"
        what = f"{entry.operator or '?'}  {change_in_words(entry)}"
        out.print(f"  {began}  {quoted(what)}  {outcome}")


def change_in_words(entry: AuditEntry) -> str:
    """What was done to what: a run's orders and moves by their own names."""
    args = entry.args
    run, share = str(args.get("run") or ""), args.get("share") or args.get("server") or ""
    if entry.verb == "order":
        alone = "" if args.get("whole_run", True) else ", some hosts alone"
        return f"{args.get('order') or 'order'} run {run}{alone}"
    if entry.verb == "withdraw":
        return f"move samples away from {share} of run {run}"
    if entry.verb == "submit":
        how = "submit" if server_of(str(share)) == share else "hand over samples to"
        return f"{how} {share} of run {run}"
    on_what = share or run
    return f"{entry.verb} {on_what.get('name', '') if isinstance(on_what, dict) else on_what}".rstrip()


# --------------------------------------------------------------------------- verify
def show_verification(host: str, result: VerifyResult) -> None:
    """What was read of each run, and each fault."""
    for one in result.runs:
        state = "[green]whole[/]" if one.is_whole else "[bold red]not whole[/]"
        out.print(
            f"[bold]{quoted(host)}[/]  run {quoted(one.run)}: {state}; {one.samples} samples, {one.shards} shards,"
            f" {one.pieces} pieces, {size(one.bytes)}"
            + (f"; {count(len(one.open), 'shard')} still written to" if one.open else "")
            + (f"; repaired {quoted(', '.join(one.repaired))}" if one.repaired else "")
        )
        for name in one.torn:
            out.print(f"  torn: {quoted(name)}; `fleetdump verify --repair` closes it")
        for fault in one.faults:
            out.print(f"  [red]fault[/]: {quoted(fault)}")
        if one.more_faults:
            out.print(f"  and {one.more_faults} more faults")
    if not result.runs:
        out.print(f"[bold]{quoted(host)}[/]  no run has written here")


# --------------------------------------------------------------------------- deploy
def show_deploy(host: str, report: DeployReport) -> None:
    """How each server of a host came up."""
    for server in report.servers:
        if server.outcome == "ready":
            _show_ready(host, report, server)
        else:
            _show_not_ready(host, server)
    for attempt in report.attempts:
        evidence = f"; evidence on the host: {', '.join(attempt.evidence_dirs)}" if attempt.evidence_dirs else ""
        out.print(f"  {quoted(f'before: {attempt.patch} did not work ({attempt.why}){evidence}')}")
    if report.reverted:
        out.print(f"{quoted(host)}: stopped, and the patch reverted")


def _show_ready(host: str, report: DeployReport, server: ServerReport) -> None:
    how = "unchanged" if server.reused else f"ready in {duration(server.seconds)}, {_lines(server)}"
    patch = f"patch {report.patch}" if report.patch else "no patch"
    check = server.selfcheck
    proof = f", self-check passed ({check.prompts} prompts, {check.rows} rows)" if check else ""
    out.print(f"[green]{quoted(f'{host}/{server.server}')}[/] {how}, {quoted(patch)}{proof}")


def _lines(server: ServerReport) -> str:
    usual = f"; healthy starts {server.healthy.lines_span}" if server.healthy else ""
    return f"{server.lines} log lines{usual}"


def _show_not_ready(host: str, server: ServerReport) -> None:
    head = f"{server.outcome} in phase {server.phase or '?'}, {_lines(server)}"
    out.print(f"[bold red]{quoted(f'{host}/{server.server}')}[/] {quoted(head)}")
    if server.detail:
        out.print(f"  {quoted(server.detail)}")
    show_verdicts(server.verdicts)
    if not server.verdicts and server.outcome in _LOG_TAIL_OF:
        for line in server.log_tail[-_LOG_TAIL_LINES:]:
            out.print(f"  | {quoted(line)}")
    for label, path in (("evidence", server.evidence_dir), ("log", server.log)):
        if path:
            out.print(f"  {label} on the host: {quoted(path)}")


# --------------------------------------------------------------------------- diagnose
def show_diagnosis(host: str, diagnosis: Diagnosis) -> None:
    """Verdicts of one server, the best in full."""
    out.print(f"[bold]{quoted(f'{host}/{diagnosis.server}')}[/]")
    show_verdicts(diagnosis.verdicts)
    if diagnosis.evidence_dir:
        out.print(f"  evidence on the host: {quoted(diagnosis.evidence_dir)}")


def show_verdicts(verdicts: list[Verdict]) -> None:
    """The first verdict with its evidence, what was ruled out and what to do; the others by their titles."""
    for place, verdict in enumerate(verdicts):
        rank = f" rank {verdict.rank}" if verdict.rank is not None else ""
        phase = f", phase {verdict.phase}" if verdict.phase else ""
        out.print(f"  [bold]{quoted(verdict.title)}[/]")
        out.print(f"    {verdict.code}{rank}{quoted(phase)} (confidence: {verdict.confidence})")
        if place:
            continue
        _show_list("because", verdict.evidence)
        ruled_out = [reason.partition(":")[0] for reason in verdict.ruled_out]
        _show_list("ruled out", [", ".join(ruled_out)] if ruled_out else [])
        _show_list("next", verdict.next_steps)
        _show_list("reports", [", ".join(verdict.references)] if verdict.references else [])


def _show_list(label: str, lines: Iterable[str]) -> None:
    for place, line in enumerate(lines):
        out.print(f"    {label + ':' if not place else '':11}{quoted(line)}")


# --------------------------------------------------------------------------- recap
def show_recap(results: list[HostResult]) -> None:
    """The line that ends a command on several hosts, on stderr so that stdout holds results only."""
    if len(results) < 2:
        return
    having: dict[str, list[str]] = {}
    for result in results:
        having.setdefault(result.status, []).append(result.host)
    parts = []
    for status, style in _STATUS_STYLE.items():
        if hosts := having.get(status):
            names = "" if status == "ok" else f" ({', '.join(compress(sorted(hosts)))})"
            parts.append(f"[{style}]{len(hosts)} {status}[/]{quoted(names)}")
    err.print(f"{len(results)} hosts: {', '.join(parts)}")
