"""``status``, ``logs``, ``stop`` and ``diagnose``: look at a host's servers, and end them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from fleetdump.agent.evidence_types import Evidence
from fleetdump.agent.hostmessages import AuditArgs, AuditResult, StatusArgs, StatusResult
from fleetdump.agent.protocol import from_json, to_json
from fleetdump.agent.servermessages import EvidenceArgs, LogsArgs, LogsResult, StopResult
from fleetdump.diagnosis import Verdict, anonymise, diagnose
from fleetdump.errors import UsageError
from fleetdump.fleet import Host
from fleetdump.tasks._task import task
from fleetdump.tasks.deploy import stop_servers
from fleetdump.tasks.evidence import take_evidence
from fleetdump.tasks.servernames import require_known
from fleetdump.tasks.steps import Event

FOLLOW_LIMIT = 24 * 3600.0


@dataclass(frozen=True)
class Target:
    """Which server to diagnose: one of ours by name (empty: the host's only or each one), or any by port or pid."""

    server: str = ""
    port: int = 0
    pid: int = 0
    seconds: float = 10.0
    deep: bool = False


@dataclass
class Diagnosis:
    """Verdicts on one server, best first, with the evidence they rest on."""

    server: str
    verdicts: list[Verdict]
    evidence_dir: str = ""
    evidence: dict[str, Any] = field(default_factory=dict)


@task
def status(host: Host) -> StatusResult:
    """Everything of ours on the host."""
    interpreter = host.config.servers[0].interpreter if host.config.servers else None
    return host.call(StatusArgs(interpreter=interpreter), StatusResult, verb="status")


@task
def audit(host: Host, entries: int) -> AuditResult:
    """The latest changes of the host, the oldest first."""
    return host.call(AuditArgs(entries), AuditResult, verb="audit")


@dataclass(frozen=True)
class LogView:
    """Lines of a server's log: the last ``lines`` of those of ``rank`` (-1: all) in ``phase`` (empty: all)."""

    server: str = ""
    lines: int = 50
    follow: bool = False
    rank: int = -1
    phase: str = ""


@task
def logs(host: Host, view: LogView, on_line: Callable[[str], None]) -> LogsResult:
    """The log's last lines; with ``view.follow`` each new line goes to ``on_line`` until interrupted. Raises
    ``UsageError`` for a server that neither the host nor its inventory entry knows."""
    require_known(host, [view.server] if view.server else [])

    def on_event(event: dict[str, Any]) -> None:
        if event.get("event") == "log":
            on_line(str(event["line"]))

    args = LogsArgs(view.server or only_server(host), view.lines, view.follow, view.rank, view.phase)
    return host.call(args, LogsResult, verb="logs", on_event=on_event, deadline=FOLLOW_LIMIT if view.follow else 60.0)


@task
def stop(host: Host, servers: list[str], on_event: Event) -> StopResult:
    """Stop our servers of the host; all when ``servers`` is empty. Raises ``UsageError``, before any is stopped, for a
    name that neither the host nor its inventory entry knows."""
    require_known(host, servers)
    return stop_servers(host, on_event, servers)


@task
def diagnose_host(host: Host, target: Target) -> list[Diagnosis]:
    """Collect evidence and decide; one diagnosis for each server that ``target`` means. Raises ``UsageError`` for a
    server that neither the host nor its inventory entry knows."""
    require_known(host, [target.server] if target.server else [])
    if target.port or target.pid:
        return [_diagnose_one(host, target, "")]
    names = [target.server] if target.server else [server.name for server in host.config.servers]
    # A host without servers in the inventory has at most one that was started by hand: the agent looks for it.
    names = names or [""]
    return [_diagnose_one(host, target, name) for name in names]


def masked(diagnosis: Diagnosis) -> Diagnosis:
    """The same diagnosis without the names of hosts and users."""
    evidence = anonymise(from_json(Evidence, diagnosis.evidence))
    return Diagnosis(diagnosis.server, diagnose(evidence), "", to_json(evidence))


def only_server(host: Host) -> str:
    """The name of the host's only server; raises ``UsageError`` naming the choices when there are several."""
    names = [server.name for server in host.config.servers]
    if len(names) == 1:
        return names[0]
    raise UsageError(
        "which server?", host.config.name, f"the host has {len(names)}: {', '.join(names)}", "add --server NAME"
    )


def _diagnose_one(host: Host, target: Target, server: str) -> Diagnosis:
    # Where fleetdump never launched that server, whoever was told to listen on its port is meant.
    port = next((spec.port for spec in host.config.servers if spec.name == server), target.port)
    args = EvidenceArgs(
        server=server,
        port=port,
        pid=target.pid,
        seconds=target.seconds,
        deep=target.deep,
        patience=host.config.patience,
    )
    result = take_evidence(host, args)
    evidence = from_json(Evidence, result.evidence)
    verdicts = diagnose(evidence)
    name = server or (f"port {target.port}" if target.port else f"pid {evidence.target.pid}")
    return Diagnosis(name, verdicts, result.evidence_dir, result.evidence)
