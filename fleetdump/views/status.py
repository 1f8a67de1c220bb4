"""What runs on the hosts: a line a server with the figures that matter, and below it what needs words."""

from __future__ import annotations

from collections.abc import Mapping

from fleetdump.agent.hostmessages import StatusResult
from fleetdump.agent.runmessages import CANCEL, RunProgress, TapStatus
from fleetdump.agent.servermessages import ServerState
from fleetdump.views.console import duration, out, quoted, size

COLUMNS = ("server", "state", "phase", "up", "patch", "capture", "queue", "disk left", "errors")
_STYLES = {"ready": "green", "starting": "yellow", "died": "bold red", "broken": "bold red", "stopped": "dim"}
_LIVING = ("starting", "ready")


def show_statuses(statuses: Mapping[str, StatusResult]) -> None:
    """All hosts, in the order of their names."""
    rows = [(f"{host}/{server.name}", server, status) for host, status in statuses.items() for server in status.servers]
    table = [COLUMNS, *((name, *_figures(server, status)) for name, server, status in rows)]
    widths = [max(len(row[column]) for row in table) for column in range(len(COLUMNS))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in table]
    if rows:
        out.print(quoted(lines[0]), style="dim")
    for (_, server, status), line in zip(rows, lines[1:], strict=True):
        out.print(quoted(line), style=_STYLES.get(server.state, ""))
        for words in _words(server, status):
            out.print(f"  {words}")
    for host, status in statuses.items():
        _show_host(host, status)


def _show_host(host: str, status: StatusResult) -> None:
    patch = status.patch
    text = f"engine {patch.state} {patch.patch}".strip() if patch else "engine not looked at"
    if patch and patch.detail:
        text += f": {patch.detail}"
    servers = "" if status.servers else "no server of ours; "
    out.print(f"[bold]{quoted(host)}[/]  {servers}{quoted(text)}; our files {size(status.state_bytes)}")
    for share in status.shares:
        out.print(
            f"  run {quoted(share.run)} on {quoted(share.server)}: {_how_far(share)},"
            f" {share.tokens_per_second:.0f} tok/s, {size(share.bytes_written)}"
            + (f"; {quoted(share.detail)}" if share.detail else "")
        )
    for one in status.controllers:
        if one.alive:
            out.print(f"  run {quoted(one.run)} is driven from here, for {quoted(one.operator)} (pid {one.pid})")
    for by in status.steering:
        out.print(f"  run {quoted(by.run)} is driven {quoted(by.in_words)}")


def _how_far(share: RunProgress) -> str:
    """A share that has ended because it was cancelled has done no more than it says."""
    if share.state == "done" and share.order == CANCEL and share.done < share.samples:
        return f"cancelled, {share.done} of {share.samples} done"
    return f"{share.state}, {share.done}/{share.samples} samples"


def _figures(server: ServerState, status: StatusResult) -> tuple[str, ...]:
    lives = server.state in _LIVING
    taps = _taps(server, status)
    ring = sum(tap.ring_bytes for tap in taps)
    return (
        server.state,
        server.phase,
        duration(server.uptime) if lives else "",
        server.patch_name or ("none" if lives else ""),
        f"{sum(tap.bytes_per_second for tap in taps) / 1e9:.2f} GB/s" if taps else "",
        f"{sum(tap.queue_bytes for tap in taps) / ring:.0%}" if ring else "",
        size(server.disk_free) if server.disk_free >= 0 else "",
        str(sum(tap.errors + sum(tap.skips.values()) for tap in taps)) if taps else "",
    )


def _taps(server: ServerState, status: StatusResult) -> list[TapStatus]:
    """Those of the launch that runs: what taps of a dead one said last is no figure of now."""
    return [tap for tap in status.taps if server.state in _LIVING and tap.launch_id == server.launch_id]


def _words(server: ServerState, status: StatusResult) -> list[str]:
    words = []
    if server.state in _LIVING:
        hook = ", patched by the import hook" if server.delivery == "import-hook" else ""
        proof = f", self-check {_selfcheck(server.selfcheck)}" if server.selfcheck else ""
        words.append(f"pid {server.pid}, port {server.port}{proof}{hook}")
    if server.detail:
        words.append(quoted(server.detail))
    return words + [f"tap {quoted(tap.role)}: {_tap(tap)}" for tap in _taps(server, status) if tap.rows or tap.failing]


def _tap(tap: TapStatus) -> str:
    skips = ", ".join(f"{count} {reason}" for reason, count in sorted(tap.skips.items()))
    return (
        f"{size(tap.bytes)} written, {size(int(tap.bytes_per_second))}/s"
        + (f", forwards waited {duration(tap.waited_seconds)}" if tap.waited_seconds else "")
        + (f"; skipped: {quoted(skips)}" if skips else "")
        + (f"; [bold red]writes nothing[/]: {quoted(tap.last_error)}" if tap.failing else "")
    )


def _selfcheck(outcome: str) -> str:
    return outcome if outcome == "passed" else f"[bold red]failed[/]: {quoted(outcome)}"
