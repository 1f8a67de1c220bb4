"""Does a running server have the settings that its patch needs? (verb ``settings``)"""

from __future__ import annotations

from typing import Any, Dict, List

from fleetdump.agent import flagrules
from fleetdump.agent.access import authorization
from fleetdump.agent.context import AgentContext
from fleetdump.agent.generate import server_info
from fleetdump.agent.protocol import AgentFailure
from fleetdump.agent.server import PASSED, ServerRecord, load_record, save_record
from fleetdump.agent.servermessages import SettingsArgs, SettingsResult

LOG_LIMIT = 64 << 20
"""Bytes of the log's beginning that are searched: the start, and the first batches."""


def settings(args: SettingsArgs, ctx: AgentContext) -> SettingsResult:
    """Ask a server of ours and keep the answer in its record. Raises ``AgentFailure``: not_found for a server that was
    never launched, failed when it does not say what it runs with."""
    record = load_record(ctx.state, args.server)
    if record is None:
        raise AgentFailure("not_found", f"server {args.server} was never launched here", next_step="fleetdump deploy")
    found = faults_of(record)
    current = load_record(ctx.state, args.server)
    if current is not None and current.launch_id == record.launch_id:
        current.settings = "; ".join(found) or PASSED
        save_record(ctx.state, current)
    return SettingsResult(found, len(record.expectations))


def faults_of(record: ServerRecord) -> List[str]:
    """What of the record's expectations is not so; raises ``AgentFailure`` failed when the server does not say."""
    if not record.expectations:
        return []
    return list(flagrules.faults(record.expectations, _info(record), _log_lines(record)))


def _info(record: ServerRecord) -> Dict[str, Any]:
    info = server_info(record.port, authorization(record.pid, record.start_time))
    if not info:
        raise AgentFailure(
            "failed",
            f"server {record.name} does not say what it runs with",
            where=f"/server_info on port {record.port}",
            next_step="look at its log; fleetdump deploy --replace starts it anew",
        )
    return info


def _log_lines(record: ServerRecord) -> List[str]:
    try:
        with open(record.log, "rb") as log:
            return log.read(LOG_LIMIT).decode("utf-8", "replace").splitlines()
    except FileNotFoundError:
        return []
