"""Tables and lines about hosts: findings, server states, deploys, verdicts, and the recap that ends every command."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from rich.markup import escape
from rich.table import Table

from fleetdump.agent.protocol import ProbeResult, StatusResult
from fleetdump.diagnosis import Verdict
from fleetdump.tasks.deploy import DeployReport, ServerReport
from fleetdump.tasks.server import Diagnosis
from fleetdump.views.console import HostResult, duration, err, out, size

_STATUS_STYLE = {"ok": "green", "failed": "red", "unreachable": "magenta", "stall": "bold red", "locked": "yellow"}
_LEVEL_STYLE = {"ok": "green", "warning": "yellow", "blocker": "bold red"}


def show_event(host: str, event: dict[str, Any]) -> None:
    """Steps and phases as they happen, each line with its host."""
    kind = event.get("event")
    if kind == "step":
        err.print(f"[dim]\\[{escape(host)}][/] {escape(str(event['text']))}")
    elif kind == "phase":
        after = duration(float(event.get("seconds", 0.0)))
        text = f"{event.get('server', '')}: {event.get('phase')} after {after}, {event.get('lines', 0)} log lines"
        err.print(f"[dim]\\[{escape(host)}][/] {escape(text)}")


def show_probe(host: str, probe: ProbeResult) -> None:
    """Findings of one host; what is well is one line."""
    good = [f for f in probe.findings if f.level == "ok"]
    out.print(f"[bold]{escape(host)}[/]  {escape(probe.hostname)}  {escape(probe.engine or 'no engine')}")
    if good:
        out.print(f"  [green]ok[/]       {escape('; '.join(f.text for f in good))}")
    for finding in probe.findings:
        if finding.level == "ok":
            continue
        out.print(f"  [{_LEVEL_STYLE[finding.level]}]{finding.level:8}[/] {escape(finding.text)}")
        if finding.fix:
            out.print(f"           fix: {escape(finding.fix)}")


def show_status(host: str, status: StatusResult) -> None:
    """Servers, runs and patch of one host."""
    patch = status.patch
    text = f"patch {patch.state} {patch.patch}".strip() if patch else "patch not looked at"
    out.print(f"[bold]{escape(host)}[/]  {escape(text)}; our files {size(status.state_bytes)}")
    for server in status.servers:
        out.print(
            f"  server {escape(server.name)}: {server.state}"
            + (f", pid {server.pid}, port {server.port}, up {duration(server.uptime)}" if server.pid else "")
            + (f", phase {server.phase}" if server.phase else "")
        )
    for share in status.shares:
        out.print(
            f"  run {escape(share.run)} on {escape(share.server)}: {share.state}, {share.done}/{share.samples} samples,"
            f" {share.tokens_per_second:.0f} tok/s, {size(share.bytes_written)}"
        )


def show_deploy(host: str, report: DeployReport) -> None:
    """How each server of a host came up."""
    for server in report.servers:
        _show_server(host, report, server)


def _show_server(host: str, report: DeployReport, server: ServerReport) -> None:
    name = f"{escape(host)}/{escape(server.server)}"
    if server.outcome == "ready":
        how = "unchanged" if server.reused else f"ready in {duration(server.seconds)}"
        out.print(f"[green]{name}[/] {how}, {server.lines} log lines, patch {escape(report.patch or 'none')}")
        if server.selfcheck:
            check = server.selfcheck
            out.print(
                f"  self-check passed: {check.prompts} prompts, {check.rows} rows,"
                f" largest log-probability difference {check.max_logprob_diff:.2g}"
            )
        return
    out.print(f"[bold red]{name}[/] {server.outcome} in phase {server.phase or '?'}, {server.lines} log lines")
    if server.detail:
        out.print(f"  {escape(server.detail)}")
    show_verdicts(server.verdicts)
    if not server.verdicts:
        for line in server.log_tail[-12:]:
            out.print(f"  | {escape(line)}")
    if server.evidence_dir:
        out.print(f"  evidence on the host: {escape(server.evidence_dir)}")
    if server.log:
        out.print(f"  log on the host: {escape(server.log)}")
    if report.reverted:
        out.print("  the server was stopped and the patch reverted")


def show_diagnosis(host: str, diagnosis: Diagnosis) -> None:
    """Verdicts of one server, the best in full."""
    out.print(f"[bold]{escape(host)}/{escape(diagnosis.server)}[/]")
    show_verdicts(diagnosis.verdicts)
    if diagnosis.evidence_dir:
        out.print(f"  evidence on the host: {escape(diagnosis.evidence_dir)}")


def show_verdicts(verdicts: list[Verdict]) -> None:
    """The first verdict with its evidence, what was ruled out and what to do; the others by their titles."""
    for place, verdict in enumerate(verdicts):
        rank = f" rank {verdict.rank}" if verdict.rank is not None else ""
        phase = f", phase {verdict.phase}" if verdict.phase else ""
        out.print(f"  [bold]{verdict.code}[/]{rank}{phase} ({verdict.confidence} confidence): {escape(verdict.title)}")
        if place:
            continue
        _show_list("because", verdict.evidence)
        _show_list("ruled out", verdict.ruled_out)
        _show_list("next", verdict.next_steps)


def _show_list(label: str, lines: Iterable[str]) -> None:
    for place, line in enumerate(lines):
        out.print(f"    {label + ':' if not place else '':11}{escape(line)}")


def show_recap(results: list[HostResult]) -> None:
    """The table that ends every fleet command, on stderr so that stdout holds results only."""
    table = Table(title=None, box=None, pad_edge=False, show_header=True, header_style="bold")
    table.add_column("host")
    table.add_column("result")
    table.add_column("note")
    for result in results:
        style = _STATUS_STYLE.get(result.status, "")
        note = str(result.error) if result.error else ""
        table.add_row(escape(result.host), f"[{style}]{result.status}[/]", escape(note))
    err.print()
    err.print(table)
